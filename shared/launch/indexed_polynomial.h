// The pieces of indexed_polynomial that host code of a backend provides.
#pragma once

#include "multigemm/abi_polynomial.h"

namespace multigemm {

void run(const mg_polynomial_problem& problem);

}  // namespace multigemm
