// The operators as a few large matrix products, by our BLAS or by the host's. Operands that the product can't read
// in place (two-byte dtypes, odd strides) pass through bounded workspaces.
#pragma once

#include <functional>

#include "launch/groups.h"
#include "runtime/host.h"

namespace multigemm {

using Product = std::function<void(const mg_matmul&)>;

void rows_by_products(const mg_grouped_mm_problem& problem, const Partition& groups, const Host& host,
                      const Product& product);
void wgrad_by_products(const mg_grouped_mm_wgrad_problem& problem, const Partition& groups, const Host& host,
                       const Product& product);

// Zeros in out [rows, batch, columns], elements of `bytes` bytes.
void fill_zeros(void* out, int64_t bytes, const int64_t* sizes, const int64_t* strides, const Host& host);

}  // namespace multigemm
