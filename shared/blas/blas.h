// One matrix product by the BLAS this library links.
#pragma once

#include "multigemm/abi.h"
#include "runtime/host.h"

namespace multigemm {

// c[i] = a[i] b[i]; a and b have a unit row or column stride, c a unit column stride, and no size or leading stride
// passes 2^31 - 1.
void blas_product(const mg_matmul& product, const Host& host);

const char* blas_name();

}  // namespace multigemm
