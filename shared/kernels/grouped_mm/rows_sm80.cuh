// Formula: out[n, b, m] = sum_k x[n, b, k] w[g(n), b, k, m] + bias[g(n), b, m], one rounding at the end.
// Layouts: unit K stride of x, unit K or M stride of w, unit M stride of out; any other strides, any alignment.
// Dtypes:  float64, float32 (IEEE or TF32), float16, bfloat16; out the same or float32.
// Architectures: sm_80 and up.
// Limits:  G <= kMostBlockGroups, N < 2^31 - 2^16.
#pragma once

#include "kernels/grouped_mm/tile_sm80.cuh"

namespace multigemm {
namespace sm80 {

struct RowsCall {
  mg_grouped_mm_problem p;
  int64_t tiles_each;     // column tiles times B: tiles for one row tile
  int32_t column_tiles;   // of one b
  int32_t tile_rows;      // of the kernels for short and thin matrices
  int32_t column_warps;   // of a block's warps, how many lie side by side; the others take other rows
  bool x_wide, out_wide;  // 16-byte accesses
  bool w_wide;            // along the unit stride
  bool w_along_k;
};

// Block-wide shared memory: `bytes` of work, then the groups' ends and the scan's scratch.
MG_DEVICE int32_t* ends_after(unsigned char* shared, int64_t bytes) {
  return reinterpret_cast<int32_t*>(shared + bytes);
}

// Any K and M: tiles through shared memory, rows of neighbouring tiles in bands that share w in the L2 cache.
template <class Tile, bool kWAlongK>
__global__ __launch_bounds__(Tile::kThreads, Tile::kBlocks) void rows_tile_sm80(const __grid_constant__ RowsCall call) {
  using T = typename Tile::T;
  using Warp = typename Tile::Warp;
  using Sum = typename Warp::Sum;
  using A = typename Tile::template OperandOf<Tile::kM, true>;
  using B = typename Tile::template OperandOf<Tile::kN, kWAlongK>;
  extern __shared__ __align__(16) unsigned char shared[];
  T* work = reinterpret_cast<T*>(shared);
  int32_t* ends = ends_after(shared, sizeof(T) * Tile::kStages * (A::kSize + B::kSize));
  const mg_grouped_mm_problem& p = call.p;
  const int groups = static_cast<int>(p.groups.count);
  block_group_ends(p.groups, p.rows, ends + 32, ends);
  ends += 32;

  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int warp_m = warp % Tile::kWarpsM * Tile::kWarpM, warp_n = warp / Tile::kWarpsM % Tile::kWarpsN * Tile::kWarpN;
  constexpr int kBand = 8;
  TileWalk walk{ends, groups, static_cast<int32_t>(p.rows), Tile::kM};
  RowTile tile;
  for (int64_t t = blockIdx.x; walk.find(t / call.tiles_each, tile); t += gridDim.x) {
    int64_t at = t - tile.tiles_before * call.tiles_each;
    const int64_t band = at / (kBand * call.tiles_each), height = (tile.end - tile.begin + Tile::kM - 1) / Tile::kM;
    at -= band * kBand * call.tiles_each;
    const int64_t in_band = height - band * kBand < kBand ? height - band * kBand : kBand;
    const int64_t n0 = tile.begin + (band * kBand + at % in_band) * Tile::kM;
    at /= in_band;
    const int64_t m0 = at % call.column_tiles * Tile::kN, b = at / call.column_tiles;
    const int64_t g = tile.group, rows = tile.end - n0;

    Sum sums[Warp::kSums];
#pragma unroll
    for (int i = 0; i < Warp::kSums; ++i) sums[i] = 0;
    const Source<T> left{static_cast<const T*>(p.x) + n0 * p.x_stride[0] + b * p.x_stride[1], p.x_stride[0], rows,
                         call.x_wide};
    const Source<T> right{static_cast<const T*>(p.w) + g * p.w_stride[0] + b * p.w_stride[1] + m0 * p.w_stride[3],
                          kWAlongK ? p.w_stride[3] : p.w_stride[2], p.outer - m0, call.w_wide};
    tile_product<Tile, A, B>(left, right, g < groups ? p.inner : 0, work, sums);

    if (Tile::kWarpsD > 1 && warp >= Tile::kWarpsM * Tile::kWarpsN) continue;
    const T* bias =
        p.bias && g < groups ? static_cast<const T*>(p.bias) + g * p.bias_stride[0] + b * p.bias_stride[1] : nullptr;
    const bool same = p.out_dtype == p.dtype;
    Warp::template each<A>(lane, sums, [&](int row, int column, const Sum* run) {
      const int64_t m = m0 + warp_n + column;
      if (warp_m + row >= rows || m >= p.outer) return;
      const int count = static_cast<int>(p.outer - m < Warp::kRun ? p.outer - m : Warp::kRun);
      Sum values[Warp::kRun];
#pragma unroll
      for (int i = 0; i < Warp::kRun; ++i) {
        values[i] = run[i];
        if (bias && i < count) values[i] += widen(bias[(m + i) * p.bias_stride[2]]);
      }
      store_either<T, Warp::kRun>(p.out, (n0 + warp_m + row) * p.out_stride[0] + b * p.out_stride[1] + m, same, values,
                                  count, call.out_wide);
    });
  }
}

constexpr int kShortThreads = 128;
constexpr int kShortRows = 64;  // most of a tile
constexpr int kShortK = 16;

// K <= kShortK: each thread keeps 16 bytes of the columns of w for all K in registers; rows stream past.
template <class T>
__global__ __launch_bounds__(kShortThreads, 4) void rows_short_sm80(const __grid_constant__ RowsCall call) {
  constexpr int kRun = 16 / static_cast<int>(sizeof(T));
  using X = Operand<T, kShortRows, kShortK, true, 0>;
  __shared__ __align__(16) T x_tile[(kShortRows + 4) * kShortK];  // the last rows are read, never used
  extern __shared__ __align__(16) unsigned char shared[];
  int32_t* ends = ends_after(shared, 0);
  const mg_grouped_mm_problem& p = call.p;
  const int groups = static_cast<int>(p.groups.count), inner = static_cast<int>(p.inner);
  block_group_ends(p.groups, p.rows, ends + 32, ends);
  ends += 32;

  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int row_step = kShortThreads / 32 / call.column_warps, first = warp / call.column_warps;
  const int column = (warp % call.column_warps * 32 + lane) * kRun;
  TileWalk walk{ends, groups, static_cast<int32_t>(p.rows), call.tile_rows};
  RowTile tile;
  for (int64_t t = blockIdx.x; walk.find(t / call.tiles_each, tile); t += gridDim.x) {
    const int64_t row_tile = t / call.tiles_each;
    const int at = static_cast<int>(t - row_tile * call.tiles_each);
    const int64_t n0 = tile.begin + (row_tile - tile.tiles_before) * call.tile_rows;
    const int64_t b = at / call.column_tiles, m = at % call.column_tiles * (call.column_warps * 32 * kRun) + column;
    const int64_t g = tile.group;
    const bool in_group = g < groups;
    const int rows = static_cast<int>(tile.end - n0 < call.tile_rows ? tile.end - n0 : call.tile_rows);

    __syncthreads();  // the tile before has been read
    X::template load<kShortThreads>(x_tile, static_cast<const T*>(p.x) + n0 * p.x_stride[0] + b * p.x_stride[1],
                                    p.x_stride[0], in_group ? rows : 0, inner, call.x_wide);
    cute::cp_async_fence();

    T w[kShortK][kRun], bias[kRun];
#pragma unroll
    for (int i = 0; i < kRun; ++i) bias[i] = 0;
    const T* from = static_cast<const T*>(p.w) + g * p.w_stride[0] + b * p.w_stride[1] + m * p.w_stride[3];
    const int count = static_cast<int>(p.outer - m < kRun ? p.outer - m : kRun);
    if (in_group && call.w_wide && !call.w_along_k && count == kRun) {
#pragma unroll
      for (int k = 0; k < kShortK; ++k) load_sixteen<From::kRead>(w[k], from + k * p.w_stride[2], k < inner);
    } else if (in_group && call.w_wide && call.w_along_k && count == kRun) {
#pragma unroll
      for (int i = 0; i < kRun; ++i)
#pragma unroll
        for (int k = 0; k < kShortK; k += kRun) {
          T run[kRun];
          load_sixteen<From::kRead>(run, from + i * p.w_stride[3] + k, k < inner);
#pragma unroll
          for (int e = 0; e < kRun; ++e) w[k + e][i] = run[e];
        }
    } else {
#pragma unroll
      for (int k = 0; k < kShortK; ++k)
#pragma unroll
        for (int i = 0; i < kRun; ++i)
          w[k][i] = in_group && k < inner && i < count ? from[k * p.w_stride[2] + i * p.w_stride[3]] : T(0);
    }
    if (p.bias && in_group) {
      const T* row = static_cast<const T*>(p.bias) + g * p.bias_stride[0] + b * p.bias_stride[1];
#pragma unroll
      for (int i = 0; i < kRun; ++i)
        if (i < count) bias[i] = row[(m + i) * p.bias_stride[2]];
    }
    cute::cp_async_wait<0>();
    __syncthreads();

    if (count > 0) {
      const bool same = p.out_dtype == p.dtype;
      int64_t to = (n0 + first) * p.out_stride[0] + b * p.out_stride[1] + m;
      const int64_t to_step = row_step * p.out_stride[0];
      for (int row = first; row < rows; row += 2 * row_step) {  // two at once for more independent sums
        const T* x0 = x_tile + row * kShortK;
        const T* x1 = x0 + row_step * kShortK;
        T sums[2][kRun] = {};
#pragma unroll
        for (int k = 0; k < kShortK; k += kRun) {
          T left[2][kRun];
          load_sixteen<From::kShared>(left[0], x0 + k);
          load_sixteen<From::kShared>(left[1], x1 + k);
#pragma unroll
          for (int e = 0; e < kRun; ++e)
#pragma unroll
            for (int r = 0; r < 2; ++r)
#pragma unroll
              for (int i = 0; i < kRun; ++i) sums[r][i] += left[r][e] * w[k + e][i];
        }
#pragma unroll
        for (int r = 0; r < 2; ++r) {
#pragma unroll
          for (int i = 0; i < kRun; ++i) sums[r][i] += bias[i];
          if (row + r * row_step < rows)
            store_either<T, kRun>(p.out, to + r * to_step, same, sums[r], count, call.out_wide);
        }
        to += 2 * to_step;
      }
    }
  }
}

constexpr int kThinThreads = 128;
constexpr int kThinRun = 4;  // columns of one thread

// K <= kK and few columns: lanes lie along B, and along columns in runs of kThinRun, so that a warp streams whole lines
// of rows; each thread keeps its part of its matrix in registers.
template <class T, int kK>
__global__ __launch_bounds__(kThinThreads) void rows_thin_sm80(const __grid_constant__ RowsCall call) {
  constexpr int kUnroll = kK == 4 && sizeof(T) == 4 ? 8 : 4;
  constexpr int kChunk = 16 / static_cast<int>(sizeof(T));
  extern __shared__ __align__(16) unsigned char shared[];
  int32_t* ends = ends_after(shared, 0);
  const mg_grouped_mm_problem& p = call.p;
  const int groups = static_cast<int>(p.groups.count), inner = static_cast<int>(p.inner);
  block_group_ends(p.groups, p.rows, ends + 32, ends);
  ends += 32;

  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int row_step = kThinThreads / 32 / call.column_warps, first = warp / call.column_warps;
  const int parts = call.column_tiles;
  TileWalk walk{ends, groups, static_cast<int32_t>(p.rows), call.tile_rows};
  RowTile tile;
  for (int64_t t = blockIdx.x; walk.find(t / call.tiles_each, tile); t += gridDim.x) {
    const int64_t row_tile = t / call.tiles_each;
    const int64_t along = ((t - row_tile * call.tiles_each) * call.column_warps + warp % call.column_warps) * 32 + lane;
    const int64_t b = along / parts, m = along % parts * kThinRun, g = tile.group;
    if (b >= p.batch) continue;
    const int64_t n0 = tile.begin + (row_tile - tile.tiles_before) * call.tile_rows;
    const int rows = static_cast<int>(tile.end - n0 < call.tile_rows ? tile.end - n0 : call.tile_rows);
    const int count = static_cast<int>(p.outer - m < kThinRun ? p.outer - m : kThinRun);
    const bool in_group = g < groups;

    T w[kK][kThinRun], bias[kThinRun];
    const T* from = static_cast<const T*>(p.w) + g * p.w_stride[0] + b * p.w_stride[1] + m * p.w_stride[3];
    if (in_group && call.w_wide && !call.w_along_k && count == kThinRun) {
#pragma unroll
      for (int k = 0; k < kK; ++k)
#pragma unroll
        for (int c = 0; c < kThinRun; c += kChunk)
          load_sixteen<From::kRead>(w[k] + c, from + k * p.w_stride[2] + c, k < inner);
    } else {
#pragma unroll
      for (int k = 0; k < kK; ++k)
#pragma unroll
        for (int i = 0; i < kThinRun; ++i)
          w[k][i] = in_group && k < inner && i < count ? from[k * p.w_stride[2] + i * p.w_stride[3]] : T(0);
    }
#pragma unroll
    for (int i = 0; i < kThinRun; ++i)
      bias[i] =
          p.bias && in_group && i < count
              ? static_cast<const T*>(p.bias)[g * p.bias_stride[0] + b * p.bias_stride[1] + (m + i) * p.bias_stride[2]]
              : T(0);

    const bool same = p.out_dtype == p.dtype;
    const T* x = static_cast<const T*>(p.x) + (n0 + first) * p.x_stride[0] + b * p.x_stride[1];
    int64_t to = (n0 + first) * p.out_stride[0] + b * p.out_stride[1] + m;
    const int64_t x_step = row_step * p.x_stride[0], to_step = row_step * p.out_stride[0];
    for (int row = first; row < rows; row += kUnroll * row_step) {
      T left[kUnroll][kK];
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        const bool inside = in_group && row + u * row_step < rows;
        const T* at = x + u * x_step;
        if (call.x_wide) {
#pragma unroll
          for (int k = 0; k < kK; k += kChunk) load_sixteen<From::kStreamed>(left[u] + k, at + k, inside && k < inner);
        } else {
#pragma unroll
          for (int k = 0; k < kK; ++k) left[u][k] = inside && k < inner ? at[k] : T(0);
        }
      }
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        T sums[kThinRun] = {};
#pragma unroll
        for (int k = 0; k < kK; ++k)
#pragma unroll
          for (int i = 0; i < kThinRun; ++i) sums[i] += left[u][k] * w[k][i];
#pragma unroll
        for (int i = 0; i < kThinRun; ++i) sums[i] += bias[i];
        if (row + u * row_step < rows)
          store_either<T, kThinRun>(p.out, to + u * to_step, same, sums, count, call.out_wide);
      }
      x += kUnroll * x_step;
      to += kUnroll * to_step;
    }
  }
}

}  // namespace sm80
}  // namespace multigemm
