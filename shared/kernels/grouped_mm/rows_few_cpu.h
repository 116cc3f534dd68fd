// Formula: out[n, b, m] = sum_k x[n, b, k] w[g(n), b, k, m] + bias[g(n), b, m], one rounding at the end.
// Layouts: any strides of x; unit M stride of w, out and bias.
// Dtypes:  float64, float32, the same in and out.
// Architectures: x86-64, x86-64-v3, x86-64-v4, aarch64: compiled once for each, see cpu_levels.cpp.
// Limits:  at most kFewRows rows a group: for more, sums in registers (rows_cpu.h) do less work for each product.
#pragma once

#include "kernels/grouped_mm/cpu_levels.h"
#include "kernels/grouped_mm/simd.h"

namespace multigemm {
namespace MG_LEVEL {

// Adds `Depth` rows of w, read as they lie, to the sums of R rows, which wait in out itself: a task's columns of out
// stay in the first-level cache, and w, which is all there is to wait for, is read once and in order.
template <class A, int R, int Depth>
inline void add_rows_of_w(const A* x, int64_t x_row, int64_t x_k, const A* w, int64_t w_k, A* y, int64_t y_row,
                          int64_t columns) {
  using V = Vector<A, kVectorBytes>;
  A value[R][Depth];
  for (int r = 0; r < R; ++r)
    for (int i = 0; i < Depth; ++i) value[r][i] = x[r * x_row + i * x_k];
  int64_t m = 0;
  for (; m + V::lanes <= columns; m += V::lanes) {
    typename V::type row[Depth];
#pragma GCC unroll 4
    for (int i = 0; i < Depth; ++i) row[i] = V::load(w + i * w_k + m);
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      typename V::type sum = V::load(y + r * y_row + m);
#pragma GCC unroll 4
      for (int i = 0; i < Depth; ++i) sum += value[r][i] * row[i];
      V::store(y + r * y_row + m, sum);
    }
  }
  for (; m < columns; ++m)
    for (int r = 0; r < R; ++r) {
      A sum = y[r * y_row + m];
      for (int i = 0; i < Depth; ++i) sum += value[r][i] * w[i * w_k + m];
      y[r * y_row + m] = sum;
    }
}

template <class A, int R>
void rows_few(const mg_grouped_mm_problem& p, const FewRowsTask& t) {
  const A* x = static_cast<const A*>(p.x) + t.begin * p.x_stride[0] + t.batch * p.x_stride[1];
  const A* w = static_cast<const A*>(p.w) + t.group * p.w_stride[0] + t.batch * p.w_stride[1] + t.m0;
  A* y = static_cast<A*>(p.out) + t.begin * p.out_stride[0] + t.batch * p.out_stride[1] + t.m0;
  const A* bias =
      p.bias ? static_cast<const A*>(p.bias) + t.group * p.bias_stride[0] + t.batch * p.bias_stride[1] + t.m0 : nullptr;
  const int64_t columns = t.m1 - t.m0, x_row = p.x_stride[0], x_k = p.x_stride[2], w_k = p.w_stride[2];
  for (int r = 0; r < R; ++r)
    for (int64_t m = 0; m < columns; ++m) y[r * p.out_stride[0] + m] = bias ? bias[m] : A(0);
  int64_t k = 0;
  for (; k + 4 <= p.inner; k += 4)
    add_rows_of_w<A, R, 4>(x + k * x_k, x_row, x_k, w + k * w_k, w_k, y, p.out_stride[0], columns);
  for (; k < p.inner; ++k)
    add_rows_of_w<A, R, 1>(x + k * x_k, x_row, x_k, w + k * w_k, w_k, y, p.out_stride[0], columns);
}

template <class A>
void rows_few_task(const mg_grouped_mm_problem& p, const FewRowsTask& t) {
  static_assert(kFewRows == 4, "one case for each number of rows");
  switch (t.end - t.begin) {
    case 1: return rows_few<A, 1>(p, t);
    case 2: return rows_few<A, 2>(p, t);
    case 3: return rows_few<A, 3>(p, t);
    default: return rows_few<A, 4>(p, t);
  }
}

}  // namespace MG_LEVEL
}  // namespace multigemm
