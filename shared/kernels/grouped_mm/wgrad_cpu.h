// Formula: out[g, b, k, m] = sum over n in group g of x[n, b, k] gy[n, b, m]; over b too if sum_batch.
// Layouts: any strides; unit M stride of gy is the fast one.
// Dtypes:  float64, float32, float16, bfloat16 (the last two widened to float32 on the way), any out dtype.
// Architectures: x86-64, x86-64-v3, x86-64-v4, aarch64: compiled once for each, see cpu_levels.cpp.
// Limits:  the rows of one group are summed by one thread (so that sums repeat bit for bit).
#pragma once

#include "kernels/grouped_mm/cpu_levels.h"
#include "kernels/grouped_mm/simd.h"

namespace multigemm {
namespace MG_LEVEL {

constexpr int64_t kStripBytes = 24 * 1024;  // rows of gy taken at once, so that they stay in the second-level cache

// sum[R][Vectors] += x[rows][R]^T gy[rows][Vectors]. `ahead`, if not null, is laid out like gy and is read soon: rows
// are far apart in [N, B, M], where the hardware does not see what comes next.
template <class A, int Bytes, int R, int Vectors>
void wgrad_tile(const A* x, int64_t x_row, int64_t x_k, const A* gy, int64_t gy_row, int64_t rows, A* sums,
                int64_t sums_row, const A* ahead) {
  using V = Vector<A, Bytes>;
  typename V::type sum[R][Vectors];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < Vectors; ++v) sum[r][v] = V::load(sums + r * sums_row + v * V::lanes);
  for (int64_t n = 0; n < rows; ++n) {
    typename V::type column[Vectors];
    if (ahead) {
      __builtin_prefetch(ahead);
      ahead += gy_row;
    }
#pragma GCC unroll 4
    for (int v = 0; v < Vectors; ++v) column[v] = V::load(gy + v * V::lanes);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const A value = x[r * x_k];
#pragma GCC unroll 4
      for (int v = 0; v < Vectors; ++v) sum[r][v] += value * column[v];
    }
    x += x_row;
    gy += gy_row;
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < Vectors; ++v) V::store(sums + r * sums_row + v * V::lanes, sum[r][v]);
}

template <class A>
using WgradTile = void (*)(const A*, int64_t, int64_t, const A*, int64_t, int64_t, A*, int64_t, const A*);

template <class A, int Bytes, int R>
inline WgradTile<A> wgrad_tile_of(int64_t height, int vectors) {
  if constexpr (R > 1) {
    if (height < R) return wgrad_tile_of<A, Bytes, R - 1>(height, vectors);
  }
  return vectors == 1 ? wgrad_tile<A, Bytes, R, 1> : wgrad_tile<A, Bytes, R, 2>;
}

inline int64_t round_up(int64_t value, int64_t step) { return (value + step - 1) / step * step; }

template <class A>
inline int64_t wgrad_strip(int64_t width) {
  return most(8, least(64, kStripBytes / (most(width, 1) * static_cast<int64_t>(sizeof(A)))));
}

// Scratch: sums of the task, a strip of gy, a strip of x.
template <class T>
int64_t wgrad_scratch_bytes(const mg_grouped_mm_wgrad_problem& p, const WgradTask& t) {
  using A = typename Accumulator<T>::type;
  const int64_t lanes = kVectorBytes / static_cast<int64_t>(sizeof(A));
  const int64_t width = round_up(t.m1 - t.m0, lanes), height = t.k1 - t.k0;
  const int64_t batches = p.sum_batch ? 1 : t.b1 - t.b0;
  return static_cast<int64_t>(sizeof(A)) * (batches * height * width + 64 * (width + height)) + 256;
}

template <class T, int Bytes>
void wgrad_block(const mg_grouped_mm_wgrad_problem& p, const WgradTask& t, void* scratch) {
  using A = typename Accumulator<T>::type;
  constexpr int64_t lanes = Bytes / static_cast<int64_t>(sizeof(A));
  const int64_t columns = t.m1 - t.m0, width = round_up(columns, lanes), height = t.k1 - t.k0;
  const int64_t whole = columns / lanes * lanes;  // columns in full vectors
  const int64_t batches = p.sum_batch ? 1 : t.b1 - t.b0;
  const int64_t strip = wgrad_strip<A>(width);
  A* sums = static_cast<A*>(scratch);
  A* gy_strip = sums + batches * height * width;
  A* x_strip = gy_strip + strip * width;
  memset(sums, 0, static_cast<size_t>(batches * height * width) * sizeof(A));

  const bool x_collides = p.x_stride[2] == 1 && rows_collide(p.x_stride[0] * static_cast<int64_t>(sizeof(T)));
  const bool gy_collides = rows_collide(p.gy_stride[0] * static_cast<int64_t>(sizeof(T)));
  const bool gy_unit = sizeof(T) == sizeof(A) && p.gy_stride[2] == 1, gy_copied = gy_unit && gy_collides;
  const bool gy_in_place = gy_unit && !gy_collides;
  for (int64_t n0 = t.begin; n0 < t.end; n0 += strip) {
    const int64_t rows = least(strip, t.end - n0);
    for (int64_t b = t.b0; b < t.b1; ++b) {
      const T* x = static_cast<const T*>(p.x) + n0 * p.x_stride[0] + b * p.x_stride[1] + t.k0 * p.x_stride[2];
      const T* gy = static_cast<const T*>(p.gy) + n0 * p.gy_stride[0] + b * p.gy_stride[1] + t.m0 * p.gy_stride[2];
      Matrix<A> xa{x_strip, height, 1};
      if constexpr (sizeof(T) == 2)
        pack(x_strip, height, Matrix<T>{x, p.x_stride[0], p.x_stride[2]}, rows, height);
      else if (x_collides)
        copy_rows(x_strip, height, Matrix<A>{x, p.x_stride[0], 1}, rows, height);
      else
        xa = {x, p.x_stride[0], p.x_stride[2]};
      // In place except for the columns that don't fill a vector.
      const int64_t packed_from = gy_in_place ? whole : 0;
      if constexpr (sizeof(T) == sizeof(A))
        if (gy_copied && whole == columns) copy_rows(gy_strip, width, Matrix<A>{gy, p.gy_stride[0], 1}, rows, columns);
      if (packed_from < columns && !(gy_copied && whole == columns))
        pack(gy_strip, width - packed_from,
             Matrix<T>{gy + packed_from * p.gy_stride[2], p.gy_stride[0], p.gy_stride[2]}, rows, columns - packed_from);
      A* sums_b = sums + (p.sum_batch ? 0 : b - t.b0) * height * width;
      for (int64_t m = 0; m < width;) {
        const bool direct = m < packed_from;
        const int64_t left = (direct ? packed_from : width) - m;
        const int vectors = left >= 2 * lanes ? 2 : 1;
        const A* gy_at = direct ? reinterpret_cast<const A*>(gy + m) : gy_strip + (m - packed_from);
        const int64_t gy_row = direct ? p.gy_stride[0] : width - packed_from;
        const A* ahead = nullptr;
        if (direct) ahead = m + 2 * lanes < packed_from ? gy_at + 2 * lanes : gy_at - m + strip * gy_row;
        for (int64_t k = 0; k < height; k += kTileRows)
          wgrad_tile_of<A, Bytes, kTileRows>(height - k, vectors)(xa.data + k * xa.column, xa.row, xa.column, gy_at,
                                                                  gy_row, rows, sums_b + k * width + m, width,
                                                                  k == 0 ? ahead : nullptr);
        m += vectors * lanes;
      }
    }
  }
  const bool past_cache = t.past_cache && p.out_dtype == dtype_of<A>() && p.out_stride[3] == 1;
  for (int64_t b = 0; b < batches; ++b)
    for (int64_t k = 0; k < height; ++k) {
      const int64_t row = t.group * p.out_stride[0] + (p.sum_batch ? 0 : t.b0 + b) * p.out_stride[1] +
                          (t.k0 + k) * p.out_stride[2] + t.m0 * p.out_stride[3];
      const A* from = sums + (b * height + k) * width;
      const int64_t done = past_cache ? copy_past_cache<A, Bytes>(static_cast<A*>(p.out) + row, from, columns) : 0;
      narrow_row(element(p.out, p.out_dtype, row + done * p.out_stride[3]), p.out_dtype, p.out_stride[3], from + done,
                 columns - done);
    }
  if (past_cache) finish_stores_past_cache();
}

template <class T>
void wgrad_task(const mg_grouped_mm_wgrad_problem& p, const WgradTask& t, void* scratch) {
  using A = typename Accumulator<T>::type;
  if (kVectorBytes > 16 && p.outer * static_cast<int64_t>(sizeof(A)) <= 16)
    wgrad_block<T, 16>(p, t, scratch);
  else
    wgrad_block<T, kVectorBytes>(p, t, scratch);
}

}  // namespace MG_LEVEL
}  // namespace multigemm
