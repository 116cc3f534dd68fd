// Formula: out[n, b, m] = sum_k x[n, b, k] w[g(n), b, k, m] + bias[g(n), b, m], one rounding at the end.
// Layouts: any strides, any alignment.
// Dtypes:  float64, float32, float16, bfloat16 in and out, in any pair; sums in float64 or float32.
// Architectures: any GPU that nvcc or hipcc compile for, and the host.
// Limits:  none but 64-bit offsets; no tensor cores, no vector loads: the kernel of last resort.
#pragma once

#include "kernels/grouped_mm/groups_simt.cuh"
#include "kernels/grouped_mm/numbers_simt.cuh"

namespace multigemm {
namespace simt {

constexpr int kTile = 32;     // rows and columns of one block's tile
constexpr int kDepth = 16;    // of K at once
constexpr int kThreads = 64;  // 8 x 8, each with 4 x 4 sums
constexpr int kSums = 4;

struct RowsArguments {
  mg_grouped_mm_problem p;
  const int64_t* ends;
  const int64_t* tiles;
};

template <class A>
MG_KERNEL void rows_simt(RowsArguments a) {
  MG_SHARED A x_tile[kDepth][kTile + 1];
  MG_SHARED A w_tile[kDepth][kTile];
  const mg_grouped_mm_problem& p = a.p;
  const int thread = static_cast<int>(threadIdx.x), ty = thread / 8, tx = thread % 8;
  const int64_t groups = p.groups.count, column_tiles = (p.outer + kTile - 1) / kTile;
  const int64_t total = a.tiles[groups + 1] * column_tiles * p.batch;
  for (int64_t t = blockIdx.x; t < total; t += gridDim.x) {
    const int64_t m0 = t % column_tiles * kTile, b = t / column_tiles % p.batch, row_tile = t / column_tiles / p.batch;
    int64_t low = 0, high = groups + 1;  // the last g with tiles[g] <= row_tile
    while (high - low > 1) {
      const int64_t middle = (low + high) / 2;
      if (a.tiles[middle] <= row_tile)
        low = middle;
      else
        high = middle;
    }
    const int64_t g = low, begin = g > 0 ? a.ends[g - 1] : 0, end = g < groups ? a.ends[g] : p.rows;
    const int64_t n0 = begin + (row_tile - a.tiles[g]) * kTile;
    const int64_t inner = g < groups ? p.inner : 0;  // rows of no group: an empty sum
    A sums[kSums][kSums] = {};
    for (int64_t k0 = 0; k0 < inner; k0 += kDepth) {
      for (int i = thread; i < kDepth * kTile; i += kThreads) {
        const int64_t n = n0 + i / kDepth, xk = k0 + i % kDepth;
        x_tile[i % kDepth][i / kDepth] =
            n < end && xk < inner ? load<A>(p.x, p.dtype, n * p.x_stride[0] + b * p.x_stride[1] + xk * p.x_stride[2])
                                  : A(0);
        const int64_t m = m0 + i % kTile, wk = k0 + i / kTile;
        w_tile[i / kTile][i % kTile] =
            m < p.outer && wk < inner
                ? load<A>(p.w, p.dtype, g * p.w_stride[0] + b * p.w_stride[1] + wk * p.w_stride[2] + m * p.w_stride[3])
                : A(0);
      }
      __syncthreads();
      MG_UNROLL
      for (int k = 0; k < kDepth; ++k) MG_UNROLL
      for (int i = 0; i < kSums; ++i) MG_UNROLL
      for (int j = 0; j < kSums; ++j) sums[i][j] += x_tile[k][ty + 8 * i] * w_tile[k][tx + 8 * j];
      __syncthreads();
    }
    MG_UNROLL
    for (int i = 0; i < kSums; ++i) MG_UNROLL
    for (int j = 0; j < kSums; ++j) {
      const int64_t n = n0 + ty + 8 * i, m = m0 + tx + 8 * j;
      if (n >= end || m >= p.outer) continue;
      A value = sums[i][j];
      if (p.bias && g < groups)
        value += load<A>(p.bias, p.dtype, g * p.bias_stride[0] + b * p.bias_stride[1] + m * p.bias_stride[2]);
      store<A>(p.out, p.out_dtype, n * p.out_stride[0] + b * p.out_stride[1] + m * p.out_stride[2], value);
    }
  }
}

// `room`: int64 [2 G + 2] on the device. 0, or the runtime's error number.
inline int launch_rows_simt(const mg_grouped_mm_problem& p, int64_t* room, const gpu::Queue& queue) {
  const int64_t groups = p.groups.count;
  const GroupScan scan{p.groups, p.rows, kTile, room, room + groups};
  int error = gpu::launch(group_scan, 1, kScanThreads, queue, scan);
  if (error) return error;
  // The host does not know the sizes; this many tiles there can be at most.
  const int64_t row_tiles = (p.rows + kTile - 1) / kTile + groups + 1;
  const int64_t blocks = row_tiles * ((p.outer + kTile - 1) / kTile);
  const int64_t grid = blocks > (1 << 20) / p.batch ? (1 << 20) : blocks * p.batch;
  const RowsArguments arguments{p, scan.ends, scan.tiles};
  return p.dtype == MG_FLOAT64 ? gpu::launch(rows_simt<double>, grid, kThreads, queue, arguments)
                               : gpu::launch(rows_simt<float>, grid, kThreads, queue, arguments);
}

}  // namespace simt
}  // namespace multigemm
