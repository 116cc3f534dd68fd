// Formula: out[g, b, k, m] = sum over the rows n of g of x[n, b, k] gy[n, b, m]
// Layouts: any strides of x and out; unit M stride of gy, of which a row for one b is 16 or 32 bytes.
// Dtypes:  float64, float32 in; any out dtype.
// Architectures: x86-64, x86-64-v3, x86-64-v4, aarch64: compiled once for each, see cpu_levels.cpp.
// Limits:  the sums of a task's part of B must stay in the first-level cache (see fits_thin_wgrad).
#pragma once

#include "kernels/grouped_mm/cpu_levels.h"
#include "kernels/grouped_mm/simd.h"

namespace multigemm {
namespace MG_LEVEL {

// Adds R rows to the sums of one b: each sum is read and written once for R products.
template <class A, int Bytes, int Inner, int R>
inline void wgrad_thin_rows(const mg_grouped_mm_wgrad_problem& p, int64_t n, int64_t b, A* sums) {
  using V = Vector<A, Bytes>;
  const int64_t inner = Inner > 0 ? Inner : p.inner;
  const A* x = static_cast<const A*>(p.x) + n * p.x_stride[0] + b * p.x_stride[1];
  const A* gy = static_cast<const A*>(p.gy) + n * p.gy_stride[0] + b * p.gy_stride[1];
  typename V::type row[R];
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) row[r] = V::load(gy + r * p.gy_stride[0]);
  for (int64_t k = 0; k < inner; ++k) {
    typename V::type sum = V::load(sums + k * V::lanes);
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) sum += x[r * p.x_stride[0] + k * p.x_stride[2]] * row[r];
    V::store(sums + k * V::lanes, sum);
  }
}

// As in rows_thin_cpu.h, whole rows stream past all sums, instead of a quarter of a line of each row at a time.
template <class A, int Bytes, int Inner>
void wgrad_thin(const mg_grouped_mm_wgrad_problem& p, const WgradTask& t, A* sums) {
  constexpr int64_t lanes = Vector<A, Bytes>::lanes;
  const int64_t matrix = (Inner > 0 ? Inner : p.inner) * lanes;
  memset(sums, 0, sizeof(A) * static_cast<size_t>((t.b1 - t.b0) * matrix));
  int64_t n = t.begin;
  for (; n + 4 <= t.end; n += 4)
    for (int64_t b = t.b0; b < t.b1; ++b) wgrad_thin_rows<A, Bytes, Inner, 4>(p, n, b, sums + (b - t.b0) * matrix);
  for (; n < t.end; ++n)
    for (int64_t b = t.b0; b < t.b1; ++b) wgrad_thin_rows<A, Bytes, Inner, 1>(p, n, b, sums + (b - t.b0) * matrix);
  for (int64_t b = t.b0; b < t.b1; ++b)
    for (int64_t k = 0; k < p.inner; ++k)
      narrow_row(element(p.out, p.out_dtype, t.group * p.out_stride[0] + b * p.out_stride[1] + k * p.out_stride[2]),
                 p.out_dtype, p.out_stride[3], sums + (b - t.b0) * matrix + k * lanes, lanes);
}

template <class A>
void wgrad_thin_task(const mg_grouped_mm_wgrad_problem& p, const WgradTask& t, void* scratch) {
  A* sums = static_cast<A*>(scratch);
  const bool short_row = p.outer * static_cast<int64_t>(sizeof(A)) == 16;
  if (p.inner == 4)
    short_row ? wgrad_thin<A, 16, 4>(p, t, sums) : wgrad_thin<A, 32, 4>(p, t, sums);
  else
    short_row ? wgrad_thin<A, 16, 0>(p, t, sums) : wgrad_thin<A, 32, 0>(p, t, sums);
}

}  // namespace MG_LEVEL
}  // namespace multigemm
