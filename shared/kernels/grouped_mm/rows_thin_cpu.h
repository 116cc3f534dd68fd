// Formula: out[n, b, m] = sum_k x[n, b, k] w[g(n), b, k, m] + bias[g(n), b, m], one rounding at the end.
// Layouts: any strides of x and w; unit M stride of out and bias; a row of out for one b is 16 or 32 bytes.
// Dtypes:  float64, float32, the same in and out.
// Architectures: x86-64, x86-64-v3, x86-64-v4, aarch64: compiled once for each, see cpu_levels.cpp.
// Limits:  all of B is one task: the matrices of a group must stay in the first-level cache (see fits_thin_rows).
#pragma once

#include "kernels/grouped_mm/cpu_levels.h"
#include "kernels/grouped_mm/simd.h"

namespace multigemm {
namespace MG_LEVEL {

// With b outermost, as rows_cpu.h has it, such short rows are read a quarter of a line at a time, and rows that lie 2
// or 4 KB apart evict each other meanwhile. Here a whole x[n] streams past all matrices of the group.
template <class A, int Bytes, int Inner>
void rows_thin(const mg_grouped_mm_problem& p, const RowsTask& t, A* packed) {
  using V = Vector<A, Bytes>;
  const int64_t inner = Inner > 0 ? Inner : p.inner;
  const A* w = static_cast<const A*>(p.w) + t.group * p.w_stride[0];
  int64_t w_b = p.w_stride[1], w_k = p.w_stride[2];
  if (p.w_stride[3] != 1) {
    const int64_t matrices = w_b == 0 ? 1 : p.batch;
    for (int64_t b = 0; b < matrices; ++b)
      for (int64_t k = 0; k < inner; ++k)
        for (int64_t m = 0; m < V::lanes; ++m)
          packed[(b * inner + k) * V::lanes + m] = w[b * w_b + k * w_k + m * p.w_stride[3]];
    w = packed;
    w_k = V::lanes;
    if (w_b != 0) w_b = inner * V::lanes;
  }
  const A* bias = p.bias ? static_cast<const A*>(p.bias) + t.group * p.bias_stride[0] : nullptr;
  A* out = static_cast<A*>(p.out);
  const bool past_cache = t.past_cache && p.out_stride[1] == V::lanes && p.out_stride[0] % V::lanes == 0 &&
                          reinterpret_cast<uintptr_t>(out) % Bytes == 0;
  for (int64_t n = t.begin; n < t.end; ++n) {
    const A* x = static_cast<const A*>(p.x) + n * p.x_stride[0];
    A* y = out + n * p.out_stride[0];
    for (int64_t b = 0; b < p.batch; ++b) {
      typename V::type sum{};
      const A* column = w + b * w_b;
      for (int64_t k = 0; k < inner; ++k) sum += x[b * p.x_stride[1] + k * p.x_stride[2]] * V::load(column + k * w_k);
      if (bias) sum += V::load(bias + b * p.bias_stride[1]);
      if (past_cache)
        store_past_cache<A, Bytes>(y + b * p.out_stride[1], sum);
      else
        V::store(y + b * p.out_stride[1], sum);
    }
  }
  if (past_cache) finish_stores_past_cache();
}

template <class A>
void rows_thin_task(const mg_grouped_mm_problem& p, const RowsTask& t, void* scratch) {
  A* packed = static_cast<A*>(scratch);
  const bool short_row = p.outer * static_cast<int64_t>(sizeof(A)) == 16;
  if (p.inner == 4)
    short_row ? rows_thin<A, 16, 4>(p, t, packed) : rows_thin<A, 32, 4>(p, t, packed);
  else
    short_row ? rows_thin<A, 16, 0>(p, t, packed) : rows_thin<A, 32, 0>(p, t, packed);
}

}  // namespace MG_LEVEL
}  // namespace multigemm
