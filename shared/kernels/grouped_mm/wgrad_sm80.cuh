// Formula: out[g, b, k, m] = sum over n in group g of x[n, b, k] gy[n, b, m]; over b too if sum_batch.
// Layouts: unit K stride of x, unit M stride of gy and of out; any other strides, any alignment.
// Dtypes:  float64, float32 (IEEE or TF32), float16, bfloat16; out the same or float32.
// Architectures: sm_80 and up.
// Limits:  G <= kMostBlockGroups, N < 2^31 - 2^16; each part of out is summed by one block, in one order.
#pragma once

#include "kernels/grouped_mm/tile_sm80.cuh"

namespace multigemm {
namespace sm80 {

struct WgradCall {
  mg_grouped_mm_wgrad_problem p;
  int64_t tiles;       // of all groups
  int64_t tiles_each;  // of one group
  int32_t k_tiles, m_tiles;
  int32_t column_warps;            // of a block's warps, how many lie side by side; the others take other rows
  bool x_wide, gy_wide, out_wide;  // 16-byte accesses
};

struct GroupRows {
  int32_t begin, end;
};

MG_DEVICE GroupRows rows_of(const int32_t* ends, int64_t g) { return {g > 0 ? ends[g - 1] : 0, ends[g]}; }

// Any K and M: tiles of x^T and gy through shared memory.
template <class Tile>
__global__ __launch_bounds__(Tile::kThreads,
                             Tile::kBlocks) void wgrad_tile_sm80(const __grid_constant__ WgradCall call) {
  using T = typename Tile::T;
  using Warp = typename Tile::Warp;
  using Sum = typename Warp::Sum;
  using A = typename Tile::template OperandOf<Tile::kM, false>;
  using B = typename Tile::template OperandOf<Tile::kN, false>;
  static_assert(Tile::kWarpsD == 1);
  extern __shared__ __align__(16) unsigned char shared[];
  T* work = reinterpret_cast<T*>(shared);
  int32_t* ends = reinterpret_cast<int32_t*>(shared + sizeof(T) * Tile::kStages * (A::kSize + B::kSize));
  const mg_grouped_mm_wgrad_problem& p = call.p;
  block_group_ends(p.groups, p.rows, ends + 32, ends);
  ends += 32;

  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int warp_m = warp % Tile::kWarpsM * Tile::kWarpM, warp_n = warp / Tile::kWarpsM * Tile::kWarpN;
  const bool same = p.out_dtype == p.dtype;
  for (int64_t t = blockIdx.x; t < call.tiles; t += gridDim.x) {
    const int64_t g = t / call.tiles_each;
    int64_t at = t - g * call.tiles_each;
    const int64_t m0 = at % call.m_tiles * Tile::kN;
    at /= call.m_tiles;
    const int64_t k0 = at % call.k_tiles * Tile::kM, out_b = at / call.k_tiles;
    const GroupRows rows = rows_of(ends, g);
    Sum sums[Warp::kSums];
#pragma unroll
    for (int i = 0; i < Warp::kSums; ++i) sums[i] = 0;
    const int64_t last_b = p.sum_batch ? p.batch : out_b + 1;
    for (int64_t b = out_b; b < last_b; ++b) {
      const Source<T> left{static_cast<const T*>(p.x) + rows.begin * p.x_stride[0] + b * p.x_stride[1] + k0,
                           p.x_stride[0], p.inner - k0, call.x_wide};
      const Source<T> right{static_cast<const T*>(p.gy) + rows.begin * p.gy_stride[0] + b * p.gy_stride[1] + m0,
                            p.gy_stride[0], p.outer - m0, call.gy_wide};
      tile_product<Tile, A, B>(left, right, rows.end - rows.begin, work, sums);
    }
    const int64_t to = g * p.out_stride[0] + out_b * p.out_stride[1];
    Warp::template each<A>(lane, sums, [&](int row, int column, const Sum* run) {
      const int64_t k = k0 + warp_m + row, m = m0 + warp_n + column;
      if (k >= p.inner || m >= p.outer) return;
      const int count = static_cast<int>(p.outer - m < Warp::kRun ? p.outer - m : Warp::kRun);
      store_either<T, Warp::kRun>(p.out, to + k * p.out_stride[2] + m, same, run, count, call.out_wide);
    });
  }
}

constexpr int kShortThreads = 128;
constexpr int kShortRows = 64;  // of the narrow operand in shared memory at once
constexpr int kShortWidth = 16;

// K or M <= kShortWidth: each thread keeps the sums of 16 bytes of the other operand's columns with all of the narrow
// one's in registers; rows stream past. kNarrowX: x is the narrow one.
template <class T, bool kNarrowX>
__global__ __launch_bounds__(kShortThreads, 4) void wgrad_short_sm80(const __grid_constant__ WgradCall call) {
  constexpr int kRun = 16 / static_cast<int>(sizeof(T)), kUnroll = 4, kWarps = kShortThreads / 32;
  using Narrow = Operand<T, kShortWidth, kShortRows, false, 0>;
  extern __shared__ __align__(16) unsigned char shared[];
  T* narrow = reinterpret_cast<T*>(shared);  // two of them
  T* partial = narrow + 2 * Narrow::kSize;   // sums of all warps but the first row of them
  int32_t* ends = reinterpret_cast<int32_t*>(partial + (kWarps - 1) * kShortWidth * kRun * 32);
  const mg_grouped_mm_wgrad_problem& p = call.p;
  block_group_ends(p.groups, p.rows, ends + 32, ends);
  ends += 32;

  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int row_warps = kWarps / call.column_warps, first = warp / call.column_warps;
  const int column = (warp % call.column_warps * 32 + lane) * kRun;
  const int64_t columns = kNarrowX ? p.outer : p.inner, width = kNarrowX ? p.inner : p.outer;
  const int64_t narrow_stride = kNarrowX ? p.x_stride[0] : p.gy_stride[0];
  const int64_t broad_stride = kNarrowX ? p.gy_stride[0] : p.x_stride[0];
  const int64_t broad_step = row_warps * broad_stride;
  const bool narrow_wide = kNarrowX ? call.x_wide : call.gy_wide, broad_wide = kNarrowX ? call.gy_wide : call.x_wide;
  const bool same = p.out_dtype == p.dtype;
  const int tiles = kNarrowX ? call.m_tiles : call.k_tiles;
  for (int64_t t = blockIdx.x; t < call.tiles; t += gridDim.x) {
    const int64_t g = t / call.tiles_each;
    const int at = static_cast<int>(t - g * call.tiles_each);
    const int64_t b = at / tiles, c = static_cast<int64_t>(at % tiles) * (call.column_warps * 32 * kRun) + column;
    const int count = static_cast<int>(columns - c < kRun ? columns - c : kRun);
    const GroupRows group = rows_of(ends, g);
    const int rows = group.end - group.begin;
    const T* x = static_cast<const T*>(p.x) + group.begin * p.x_stride[0] + b * p.x_stride[1];
    const T* gy = static_cast<const T*>(p.gy) + group.begin * p.gy_stride[0] + b * p.gy_stride[1];
    const T* from = kNarrowX ? x : gy;
    const T* broad = (kNarrowX ? gy : x) + c + first * broad_stride;

    T sums[kShortWidth][kRun];
#pragma unroll
    for (int i = 0; i < kShortWidth; ++i)
#pragma unroll
      for (int j = 0; j < kRun; ++j) sums[i][j] = 0;
    const auto load = [&](int row0) {
      Narrow::template load<kShortThreads>(narrow + row0 / kShortRows % 2 * Narrow::kSize, from + row0 * narrow_stride,
                                           narrow_stride, width, rows - row0, narrow_wide);
    };
    if (rows > 0) load(0);
    cute::cp_async_fence();
    for (int row0 = 0; row0 < rows; row0 += kShortRows) {
      if (row0 + kShortRows < rows) load(row0 + kShortRows);
      cute::cp_async_fence();
      cute::cp_async_wait<1>();
      __syncthreads();
      const T* tile = narrow + row0 / kShortRows % 2 * Narrow::kSize;
      const int left = rows - row0 < kShortRows ? rows - row0 : kShortRows;
      if (count > 0) {
        for (int row = first; row < left; row += kUnroll * row_warps) {
          T right[kUnroll][kRun];
#pragma unroll
          for (int u = 0; u < kUnroll; ++u) {
            const bool inside = row + u * row_warps < left;
            if (broad_wide && count == kRun) {
              load_sixteen<From::kStreamed>(right[u], broad, inside);
            } else {
#pragma unroll
              for (int j = 0; j < kRun; ++j) right[u][j] = inside && j < count ? broad[j] : T(0);
            }
            broad += broad_step;
          }
#pragma unroll
          for (int u = 0; u < kUnroll; ++u) {
            const T* line = tile + (row + u * row_warps < kShortRows ? row + u * row_warps : 0) * kShortWidth;
#pragma unroll
            for (int i = 0; i < kShortWidth; i += kRun) {
              T values[kRun];
              load_sixteen<From::kShared>(values, line + i);
#pragma unroll
              for (int e = 0; e < kRun; ++e)
#pragma unroll
                for (int j = 0; j < kRun; ++j) sums[i + e][j] += values[e] * right[u][j];
            }
          }
        }
      }
      __syncthreads();
    }
    if (row_warps > 1) {
      T* mine = partial + (warp - call.column_warps) * (kShortWidth * kRun * 32) + lane;
      if (first > 0)
#pragma unroll
        for (int i = 0; i < kShortWidth; ++i)
#pragma unroll
          for (int j = 0; j < kRun; ++j) mine[(i * kRun + j) * 32] = sums[i][j];
      __syncthreads();
      if (first == 0)
        for (int other = 1; other < row_warps; ++other) {
          const T* theirs = mine + other * call.column_warps * (kShortWidth * kRun * 32);
#pragma unroll
          for (int i = 0; i < kShortWidth; ++i)
#pragma unroll
            for (int j = 0; j < kRun; ++j) sums[i][j] += theirs[(i * kRun + j) * 32];
        }
      __syncthreads();
    }
    if (first > 0 || count <= 0) continue;
    const int64_t to = g * p.out_stride[0] + b * p.out_stride[1];
    if constexpr (kNarrowX) {
#pragma unroll
      for (int i = 0; i < kShortWidth; ++i)
        if (i < width) store_either<T, kRun>(p.out, to + i * p.out_stride[2] + c, same, sums[i], count, call.out_wide);
    } else {
#pragma unroll
      for (int j = 0; j < kRun; ++j)
#pragma unroll
        for (int i = 0; i < kShortWidth; i += kRun) {
          T run[kRun];
#pragma unroll
          for (int e = 0; e < kRun; ++e) run[e] = sums[i + e][j];
          if (j < count)
            store_either<T, kRun>(p.out, to + (c + j) * p.out_stride[2] + i, same, run, static_cast<int>(width) - i,
                                  call.out_wide);
        }
    }
  }
}

constexpr int kThinThreads = 256;
constexpr int kThinSide = 4;  // each thread sums a block of this many K by this many M

// Few K and M: lanes lie along B, and along the blocks of each matrix, so that a warp streams whole lines of rows; the
// rows of a group are shared out over the block's warps, whose sums are added in order.
template <class T>
__global__ __launch_bounds__(kThinThreads) void wgrad_thin_sm80(const __grid_constant__ WgradCall call) {
  constexpr int kChunk = 16 / static_cast<int>(sizeof(T)), kUnroll = 4, kWarps = kThinThreads / 32;
  constexpr int kSums = kThinSide * kThinSide;
  __shared__ T partial[kWarps][kSums][33];
  extern __shared__ __align__(16) unsigned char shared[];
  int32_t* ends = reinterpret_cast<int32_t*>(shared);
  const mg_grouped_mm_wgrad_problem& p = call.p;
  block_group_ends(p.groups, p.rows, ends + 32, ends);
  ends += 32;

  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int parts = call.k_tiles * call.m_tiles;
  const bool same = p.out_dtype == p.dtype;
  for (int64_t t = blockIdx.x; t < call.tiles; t += gridDim.x) {
    const int64_t g = t / call.tiles_each, first = (t - g * call.tiles_each) * 32;
    const GroupRows group = rows_of(ends, g);
    const int64_t along = first + lane, b = along / parts;
    const int part = static_cast<int>(along % parts);
    const int64_t k0 = part / call.m_tiles * kThinSide, m0 = part % call.m_tiles * kThinSide;
    const int height = static_cast<int>(p.inner - k0 < kThinSide ? p.inner - k0 : kThinSide);
    const int width = static_cast<int>(p.outer - m0 < kThinSide ? p.outer - m0 : kThinSide);
    T sums[kThinSide][kThinSide];
#pragma unroll
    for (int i = 0; i < kThinSide; ++i)
#pragma unroll
      for (int j = 0; j < kThinSide; ++j) sums[i][j] = 0;
    if (b < p.batch) {
      const int64_t start = group.begin + warp;
      const T* x = static_cast<const T*>(p.x) + start * p.x_stride[0] + b * p.x_stride[1] + k0;
      const T* gy = static_cast<const T*>(p.gy) + start * p.gy_stride[0] + b * p.gy_stride[1] + m0;
      for (int n = group.begin + warp; n < group.end; n += kUnroll * kWarps) {
        T left[kUnroll][kThinSide], right[kUnroll][kThinSide];
        const auto load = [&](T* to, const T* line, bool inside, bool wide, int length) {
          if (wide) {
#pragma unroll
            for (int i = 0; i < kThinSide; i += kChunk)
              load_sixteen<From::kStreamed>(to + i, line + i, inside && i < length);
          } else {
#pragma unroll
            for (int i = 0; i < kThinSide; ++i) to[i] = inside && i < length ? line[i] : T(0);
          }
        };
#pragma unroll
        for (int u = 0; u < kUnroll; ++u) {
          const bool inside = n + u * kWarps < group.end;
          load(left[u], x + u * kWarps * p.x_stride[0], inside, call.x_wide, height);
          load(right[u], gy + u * kWarps * p.gy_stride[0], inside, call.gy_wide, width);
        }
#pragma unroll
        for (int u = 0; u < kUnroll; ++u)
#pragma unroll
          for (int i = 0; i < kThinSide; ++i)
#pragma unroll
            for (int j = 0; j < kThinSide; ++j) sums[i][j] += left[u][i] * right[u][j];
        x += kUnroll * kWarps * p.x_stride[0];
        gy += kUnroll * kWarps * p.gy_stride[0];
      }
    }
#pragma unroll
    for (int i = 0; i < kThinSide; ++i)
#pragma unroll
      for (int j = 0; j < kThinSide; ++j) partial[warp][i * kThinSide + j][lane] = sums[i][j];
    __syncthreads();
    for (int i = static_cast<int>(threadIdx.x); i < 32 * kSums; i += kThinThreads) {
      const int at = i / kSums, of = i % kSums;
      const int64_t owner = first + at, out_b = owner / parts;
      const int its = static_cast<int>(owner % parts);
      const int64_t k = its / call.m_tiles * kThinSide + of / kThinSide;
      const int64_t m = its % call.m_tiles * kThinSide + of % kThinSide;
      if (out_b >= p.batch || k >= p.inner || m >= p.outer) continue;
      T sum = partial[0][of][at];
#pragma unroll
      for (int other = 1; other < kWarps; ++other) sum += partial[other][of][at];
      const int64_t to = g * p.out_stride[0] + out_b * p.out_stride[1] + k * p.out_stride[2] + m;
      if (same)
        static_cast<T*>(p.out)[to] = sum;
      else
        static_cast<float*>(p.out)[to] = static_cast<float>(sum);
    }
    __syncthreads();
  }
}

}  // namespace sm80
}  // namespace multigemm
