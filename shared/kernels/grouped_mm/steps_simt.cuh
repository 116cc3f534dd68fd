// Formula: the small steps around a product: numbers written or scaled, operands copied into rows, results rounded
// once from sums in their own dtype, with the bias added. Layouts: sources any strides, copies [N, B, K] in rows.
// Dtypes:  any of the four; copies of halves may widen to float32.
// Architectures: any GPU that nvcc or hipcc compile for, and the host.
// Limits:  at most kMostBlocks blocks, which loop over what is left.
#pragma once

#include "kernels/grouped_mm/numbers_simt.cuh"
#include "kernels/grouped_mm/simt.h"
#include "vendor/gpu.h"

namespace multigemm {
namespace simt {

constexpr int kLineThreads = 256;
constexpr int64_t kMostBlocks = 1 << 16;

struct Scaling {
  const int64_t* from;
  int64_t* to;
  int64_t count, scale;
};

MG_KERNEL static void scale_numbers(Scaling a) {
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < a.count; i += int64_t{gridDim.x} * blockDim.x)
    a.to[i] = a.from[i] * a.scale;
}

constexpr int kNumbersAtOnce = 480;  // kernel arguments may take 4 KB

struct Numbers {
  int64_t* to;
  int64_t count;
  int64_t values[kNumbersAtOnce];
};

MG_KERNEL static void write_values(Numbers a) {
  for (int64_t i = threadIdx.x; i < a.count; i += blockDim.x) a.to[i] = a.values[i];
}

template <class T>
MG_KERNEL void pack_rows(Packing a) {
  const int64_t line = a.batch * a.columns;
  for (int64_t n = blockIdx.x; n < a.rows; n += gridDim.x)
    for (int64_t i = threadIdx.x; i < line; i += blockDim.x)
      static_cast<T*>(a.to)[n * a.to_row + i] =
          static_cast<const T*>(a.from)[n * a.stride[0] + i / a.columns * a.stride[1] + i % a.columns * a.stride[2]];
}

MG_KERNEL static void pack_widened(Packing a) {
  const int64_t line = a.batch * a.columns;
  for (int64_t n = blockIdx.x; n < a.rows; n += gridDim.x)
    for (int64_t i = threadIdx.x; i < line; i += blockDim.x)
      static_cast<float*>(a.to)[n * a.to_row + i] =
          load<float>(a.from, a.widened, n * a.stride[0] + i / a.columns * a.stride[1] + i % a.columns * a.stride[2]);
}

// Neighbouring threads read neighbouring rows: for sources that are transposed.
template <class T>
MG_KERNEL void pack_transposed(Packing a) {
  MG_SHARED T tile[32][33];
  const int64_t column_tiles = (a.columns + 31) / 32, row_tiles = (a.rows + 31) / 32;
  const int x = static_cast<int>(threadIdx.x % 32), y = static_cast<int>(threadIdx.x / 32);
  for (int64_t t = blockIdx.x; t < row_tiles * column_tiles * a.batch; t += gridDim.x) {
    const int64_t c0 = t % column_tiles * 32, b = t / column_tiles % a.batch, n0 = t / column_tiles / a.batch * 32;
    for (int i = y; i < 32; i += kLineThreads / 32)
      if (n0 + x < a.rows && c0 + i < a.columns)
        tile[i][x] = static_cast<const T*>(a.from)[(n0 + x) * a.stride[0] + b * a.stride[1] + (c0 + i) * a.stride[2]];
    __syncthreads();
    for (int i = y; i < 32; i += kLineThreads / 32)
      if (n0 + i < a.rows && c0 + x < a.columns)
        static_cast<T*>(a.to)[(n0 + i) * a.to_row + b * a.columns + c0 + x] = tile[x][i];
    __syncthreads();
  }
}

struct FinishRows {
  mg_grouped_mm_problem p;
  const int64_t* ends;
  const void* sums;
  int32_t sums_dtype;
};

template <class A>
MG_KERNEL void finish_rows_of(FinishRows a) {
  const mg_grouped_mm_problem& p = a.p;
  const int64_t groups = p.groups.count, line = p.batch * p.outer;
  for (int64_t n = blockIdx.x; n < p.rows; n += gridDim.x) {
    int64_t low = 0, high = groups;  // the first g with ends[g] > n
    while (low < high) {
      const int64_t middle = (low + high) / 2;
      if (a.ends[middle] > n)
        high = middle;
      else
        low = middle + 1;
    }
    const bool none = low == groups;
    if (none && !a.sums) return;
    for (int64_t i = threadIdx.x; i < line; i += blockDim.x) {
      const int64_t b = i / p.outer, m = i % p.outer;
      const int64_t at = n * p.out_stride[0] + b * p.out_stride[1] + m * p.out_stride[2];
      const int64_t from = low * p.bias_stride[0] + b * p.bias_stride[1] + m * p.bias_stride[2];
      A value = A(0);
      if (!none) value = a.sums ? load<A>(a.sums, a.sums_dtype, n * line + i) : load<A>(p.out, p.out_dtype, at);
      if (!none && p.bias) value += load<A>(p.bias, p.dtype, from);
      store<A>(p.out, p.out_dtype, at, value);
    }
  }
}

struct FinishWgrad {
  mg_grouped_mm_wgrad_problem p;
  const void* sums;
  int32_t sums_dtype;
};

template <class A>
MG_KERNEL void finish_wgrad_of(FinishWgrad a) {
  const mg_grouped_mm_wgrad_problem& p = a.p;
  const int64_t batch = p.sum_batch ? 1 : p.batch, lines = p.groups.count * batch * p.inner;
  for (int64_t line = blockIdx.x; line < lines; line += gridDim.x) {
    const int64_t k = line % p.inner, b = line / p.inner % batch, g = line / p.inner / batch;
    const int64_t at = g * p.out_stride[0] + b * p.out_stride[1] + k * p.out_stride[2];
    for (int64_t m = threadIdx.x; m < p.outer; m += blockDim.x)
      store<A>(p.out, p.out_dtype, at + m * p.out_stride[3], load<A>(a.sums, a.sums_dtype, line * p.outer + m));
  }
}

}  // namespace simt
}  // namespace multigemm
