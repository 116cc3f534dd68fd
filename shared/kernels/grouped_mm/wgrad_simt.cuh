// Formula: out[g, b, k, m] = sum over n in group g of x[n, b, k] gy[n, b, m]; over b too if sum_batch.
// Layouts: any strides, any alignment.
// Dtypes:  float64, float32, float16, bfloat16 in and out, in any pair; sums in float64 or float32.
// Architectures: any GPU that nvcc or hipcc compile for, and the host.
// Limits:  none but 64-bit offsets; each tile of out is summed by one block, in row order (bitwise repeatable).
#pragma once

#include "kernels/grouped_mm/rows_simt.cuh"

namespace multigemm {
namespace simt {

struct WgradArguments {
  mg_grouped_mm_wgrad_problem p;
  const int64_t* ends;
};

template <class A>
MG_KERNEL void wgrad_simt(WgradArguments a) {
  MG_SHARED A x_tile[kDepth][kTile];
  MG_SHARED A gy_tile[kDepth][kTile];
  const mg_grouped_mm_wgrad_problem& p = a.p;
  const int thread = static_cast<int>(threadIdx.x), ty = thread / 8, tx = thread % 8;
  const int64_t k_tiles = (p.inner + kTile - 1) / kTile, m_tiles = (p.outer + kTile - 1) / kTile;
  const int64_t out_batch = p.sum_batch ? 1 : p.batch, total = p.groups.count * out_batch * k_tiles * m_tiles;
  for (int64_t t = blockIdx.x; t < total; t += gridDim.x) {
    const int64_t m0 = t % m_tiles * kTile, k0 = t / m_tiles % k_tiles * kTile;
    const int64_t out_b = t / m_tiles / k_tiles % out_batch, g = t / m_tiles / k_tiles / out_batch;
    const int64_t begin = g > 0 ? a.ends[g - 1] : 0, end = a.ends[g];
    const int64_t b0 = p.sum_batch ? 0 : out_b, b1 = p.sum_batch ? p.batch : out_b + 1;
    A sums[kSums][kSums] = {};
    for (int64_t b = b0; b < b1; ++b)
      for (int64_t n0 = begin; n0 < end; n0 += kDepth) {
        for (int i = thread; i < kDepth * kTile; i += kThreads) {
          const int64_t n = n0 + i / kTile, k = k0 + i % kTile, m = m0 + i % kTile;
          x_tile[i / kTile][i % kTile] =
              n < end && k < p.inner ? load<A>(p.x, p.dtype, n * p.x_stride[0] + b * p.x_stride[1] + k * p.x_stride[2])
                                     : A(0);
          gy_tile[i / kTile][i % kTile] =
              n < end && m < p.outer
                  ? load<A>(p.gy, p.dtype, n * p.gy_stride[0] + b * p.gy_stride[1] + m * p.gy_stride[2])
                  : A(0);
        }
        __syncthreads();
        MG_UNROLL
        for (int d = 0; d < kDepth; ++d) MG_UNROLL
        for (int i = 0; i < kSums; ++i) MG_UNROLL
        for (int j = 0; j < kSums; ++j) sums[i][j] += x_tile[d][ty + 8 * i] * gy_tile[d][tx + 8 * j];
        __syncthreads();
      }
    MG_UNROLL
    for (int i = 0; i < kSums; ++i) MG_UNROLL
    for (int j = 0; j < kSums; ++j) {
      const int64_t k = k0 + ty + 8 * i, m = m0 + tx + 8 * j;
      if (k < p.inner && m < p.outer)
        store<A>(p.out, p.out_dtype,
                 g * p.out_stride[0] + out_b * p.out_stride[1] + k * p.out_stride[2] + m * p.out_stride[3], sums[i][j]);
    }
  }
}

// `room`: int64 [2 G + 2] on the device. 0, or the runtime's error number.
inline int launch_wgrad_simt(const mg_grouped_mm_wgrad_problem& p, int64_t* room, const gpu::Queue& queue) {
  const int64_t groups = p.groups.count;
  const GroupScan scan{p.groups, p.rows, kDepth, room, room + groups};
  int error = gpu::launch(group_scan, 1, kScanThreads, queue, scan);
  if (error) return error;
  const int64_t tiles = ((p.inner + kTile - 1) / kTile) * ((p.outer + kTile - 1) / kTile);
  const int64_t matrices = groups * (p.sum_batch ? 1 : p.batch);
  const int64_t grid = tiles > (1 << 20) / matrices ? (1 << 20) : tiles * matrices;
  const WgradArguments arguments{p, scan.ends};
  return p.dtype == MG_FLOAT64 ? gpu::launch(wgrad_simt<double>, grid, kThreads, queue, arguments)
                               : gpu::launch(wgrad_simt<float>, grid, kThreads, queue, arguments);
}

}  // namespace simt
}  // namespace multigemm
