// Formula: out[n, b, m] = sum_k x[n, b, k] w[g(n), b, k, m] + bias[g(n), b, m], one rounding at the end.
// Layouts: any strides; unit M stride of w and out, or unit K stride of w (transposed), are the fast ones.
// Dtypes:  float64, float32, float16, bfloat16 (the last two widened to float32 on the way), any out dtype.
// Architectures: x86-64, x86-64-v3, x86-64-v4, aarch64: compiled once for each, see cpu_levels.cpp.
// Limits:  the whole of K is one pass, so for K over a few thousand the packed columns of w leave the cache.
#pragma once

#include "kernels/grouped_mm/cpu_levels.h"
#include "kernels/grouped_mm/simd.h"

namespace multigemm {
namespace MG_LEVEL {

constexpr int64_t kPanelBytes = 24 * 1024;  // packed columns of w that stay in the first-level cache
constexpr int64_t kMostPanels = 64;

template <class A>
struct Panel {
  const A* w;
  int64_t w_row;
  int64_t column, columns;
  int vectors;
};

// y[R][Vectors] = x[R][K] w[K][Vectors] + bias: R x Vectors sums live in registers. `ahead`, if not null, is laid out
// like x and is read soon: rows are far apart in [N, B, K], where the hardware does not see what comes next.
template <class A, int Bytes, int R, int Vectors>
void rows_tile(const A* x, int64_t x_row, int64_t x_k, const A* w, int64_t w_row, int64_t inner, const A* bias, A* y,
               int64_t y_row, bool past_cache, const A* ahead) {
  using V = Vector<A, Bytes>;
  constexpr int64_t kLine = 64 / static_cast<int64_t>(sizeof(A));
  typename V::type sum[R][Vectors];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < Vectors; ++v) sum[r][v] = typename V::type{};
  for (int64_t k0 = 0; k0 < inner; k0 += kLine) {
    if (ahead)
      for (int r = 0; r < R; ++r) __builtin_prefetch(ahead + r * x_row + k0);
    for (int64_t left = least(kLine, inner - k0); left > 0; --left) {
      typename V::type column[Vectors];
#pragma GCC unroll 4
      for (int v = 0; v < Vectors; ++v) column[v] = V::load(w + v * V::lanes);
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) {
        const A value = x[r * x_row];
#pragma GCC unroll 4
        for (int v = 0; v < Vectors; ++v) sum[r][v] += value * column[v];
      }
      x += x_k;
      w += w_row;
    }
  }
  if (bias)
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < Vectors; ++v) sum[r][v] += V::load(bias + v * V::lanes);
  if (past_cache) {
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < Vectors; ++v) store_past_cache<A, Bytes>(y + r * y_row + v * V::lanes, sum[r][v]);
  } else {
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < Vectors; ++v) V::store(y + r * y_row + v * V::lanes, sum[r][v]);
  }
}

template <class A>
using RowsTile = void (*)(const A*, int64_t, int64_t, const A*, int64_t, int64_t, const A*, A*, int64_t, bool,
                          const A*);

template <class A, int Bytes, int R>
inline RowsTile<A> rows_tile_of(int64_t rows, int vectors) {
  if constexpr (R > 1) {
    if (rows < R) return rows_tile_of<A, Bytes, R - 1>(rows, vectors);
  }
  return vectors == 1 ? rows_tile<A, Bytes, R, 1> : rows_tile<A, Bytes, R, 2>;
}

// One for both vector lengths of a level: the scratch is laid out by it.
template <class A>
inline int64_t rows_column_block(const mg_grouped_mm_problem& p) {
  const int64_t width = kVectorBytes / static_cast<int64_t>(sizeof(A)) * kTileVectors;
  const int64_t fit = kPanelBytes / (most(p.inner, 1) * static_cast<int64_t>(sizeof(A))) / width;
  return most(1, least(fit, kMostPanels)) * width;
}

// Scratch: packed w, widened x, a tile of sums, bias.
template <class T>
int64_t rows_scratch_bytes(const mg_grouped_mm_problem& p, int64_t rows) {
  using A = typename Accumulator<T>::type;
  const int64_t block = rows_column_block<A>(p);
  const int64_t x = sizeof(T) == 2 ? rows * p.inner : 0;
  return static_cast<int64_t>(sizeof(A)) * (p.inner * block + x + kTileRows * block + block) + 256;
}

template <class T, int Bytes>
void rows_block(const mg_grouped_mm_problem& p, const RowsTask& t, void* scratch) {
  using A = typename Accumulator<T>::type;
  constexpr int lanes = Bytes / static_cast<int>(sizeof(A));
  const int64_t block = rows_column_block<A>(p);
  const int64_t rows = t.end - t.begin, inner = p.inner;
  A* packed = static_cast<A*>(scratch);
  A* sums = packed + inner * block;
  A* bias_row = sums + kTileRows * block;
  A* wide_x = bias_row + block;

  const T* x = static_cast<const T*>(p.x) + t.begin * p.x_stride[0] + t.batch * p.x_stride[1];
  Matrix<A> xa{nullptr, p.x_stride[0], p.x_stride[2]};
  if constexpr (sizeof(T) == 2) {
    for (int64_t r = 0; r < rows; ++r) widen_row(wide_x + r * inner, x + r * p.x_stride[0], p.x_stride[2], inner);
    xa = {wide_x, inner, 1};
  } else {
    xa.data = x;
  }

  const T* w = static_cast<const T*>(p.w) + t.group * p.w_stride[0] + t.batch * p.w_stride[1];
  const int64_t w_k = p.w_stride[2], w_m = p.w_stride[3];
  // Small row-major matrices are read in place; larger ones would keep meeting in the same cache sets.
  const bool in_place = sizeof(T) == sizeof(A) && w_m == 1 &&
                        (inner * p.outer * static_cast<int64_t>(sizeof(A)) <= 2 * kPanelBytes || rows <= 2 * kTileRows);
  const T* bias =
      p.bias ? static_cast<const T*>(p.bias) + t.group * p.bias_stride[0] + t.batch * p.bias_stride[1] : nullptr;
  const bool out_in_place = p.out_dtype == dtype_of<A>() && p.out_stride[2] == 1;
  char* out = element(p.out, p.out_dtype, t.begin * p.out_stride[0] + t.batch * p.out_stride[1]);
  const bool past_cache = t.past_cache && out_in_place && reinterpret_cast<uintptr_t>(out) % Bytes == 0 &&
                          p.out_stride[0] * static_cast<int64_t>(sizeof(A)) % Bytes == 0;

  Panel<A> panels[2 * kMostPanels + 2];
  for (int64_t m0 = 0; m0 < p.outer; m0 += block) {
    const int64_t columns = least(block, p.outer - m0);
    int count = 0;
    A* free = packed;
    for (int64_t m = 0; m < columns;) {
      const int64_t left = columns - m;
      const bool direct = in_place && left >= lanes;
      const int vectors = left > lanes && (!direct || left >= 2 * lanes) ? 2 : 1;
      const int64_t width = vectors * lanes, taken = least(width, left);
      Panel<A>& panel = panels[count++];
      panel = {nullptr, w_k, m, taken, vectors};
      if (direct) {
        panel.w = reinterpret_cast<const A*>(w + (m0 + m) * w_m);
      } else {
        pack(free, width, Matrix<T>{w + (m0 + m) * w_m, w_k, w_m}, inner, taken);
        panel.w = free;
        panel.w_row = width;
        free += inner * width;
      }
      m += taken;
    }
    if (bias) {
      widen_row(bias_row, bias + m0 * p.bias_stride[2], p.bias_stride[2], columns);
      for (int64_t m = columns; m < block; ++m) bias_row[m] = 0;
    }
    for (int64_t r0 = 0; r0 < rows; r0 += kTileRows) {
      const int64_t height = least(kTileRows, rows - r0);
      const A* x_tile = xa.data + r0 * xa.row;
      for (int i = 0; i < count; ++i) {
        const Panel<A>& panel = panels[i];
        const A* ahead = i == 0 && m0 == 0 && xa.column == 1 ? x_tile + kTileRows * xa.row : nullptr;
        const RowsTile<A> tile = rows_tile_of<A, Bytes, kTileRows>(height, panel.vectors);
        const A* bias_at = bias ? bias_row + panel.column : nullptr;
        if (out_in_place && panel.columns == panel.vectors * lanes) {
          A* y = reinterpret_cast<A*>(out) + r0 * p.out_stride[0] + m0 + panel.column;
          tile(x_tile, xa.row, xa.column, panel.w, panel.w_row, inner, bias_at, y, p.out_stride[0], past_cache, ahead);
        } else {
          const int64_t width = panel.vectors * lanes;
          tile(x_tile, xa.row, xa.column, panel.w, panel.w_row, inner, bias_at, sums, width, false, ahead);
          for (int64_t r = 0; r < height; ++r)
            narrow_row(element(out, p.out_dtype, (r0 + r) * p.out_stride[0] + (m0 + panel.column) * p.out_stride[2]),
                       p.out_dtype, p.out_stride[2], sums + r * width, panel.columns);
        }
      }
    }
  }
  if (past_cache) finish_stores_past_cache();
}

template <class T>
void rows_task(const mg_grouped_mm_problem& p, const RowsTask& t, void* scratch) {
  using A = typename Accumulator<T>::type;
  if (kVectorBytes > 16 && p.outer * static_cast<int64_t>(sizeof(A)) <= 16)
    rows_block<T, 16>(p, t, scratch);  // a whole row of a 4 x 4 matrix fills the short vector
  else
    rows_block<T, kVectorBytes>(p, t, scratch);
}

}  // namespace MG_LEVEL
}  // namespace multigemm
