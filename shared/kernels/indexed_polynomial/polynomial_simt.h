// The kernels of indexed_polynomial on a GPU, for host code. 0 or the runtime's error number.
#pragma once

#include "multigemm/abi_polynomial.h"

namespace multigemm {
namespace polynomial_simt {

int run(const mg_polynomial_problem& p, void* stream);

}  // namespace polynomial_simt
}  // namespace multigemm
