// What launching the Hopper kernel of rows takes, for any arguments that build on RowsArguments.
#pragma once

#include <algorithm>

#include "kernels/grouped_mm/gpu_call.h"
#include "kernels/grouped_mm/rows_sm90.cuh"
#include "kernels/grouped_mm/tensor_map_sm90.h"

namespace multigemm {
namespace sm90 {

inline bool aligned(const void* data) { return reinterpret_cast<uintptr_t>(data) % 16 == 0; }

// A stride that a tensor map can hold: an expanded dimension has none, one of one element needs none.
inline bool mappable(int64_t size, int64_t stride) {
  return size == 1 || (stride > 0 && stride % 8 == 0 && stride < (int64_t{1} << 38));
}

// w as the map sees it: contiguous along M, or along K.
inline bool along_outer(const mg_grouped_mm_problem& p) {
  return (p.outer == 1 || p.w_stride[3] == 1) && mappable(p.inner, p.w_stride[2]);
}
inline bool along_inner(const mg_grouped_mm_problem& p) {
  return (p.inner == 1 || p.w_stride[2] == 1) && mappable(p.outer, p.w_stride[3]);
}

// Strides count elements; a dimension of one element may have any.
inline bool encode(CUtensorMap* map, int32_t dtype, const void* data, int rank, const int64_t* sizes,
                   const int64_t* strides, const uint32_t* box) {
  cuuint64_t dims[3], bytes[2];
  for (int i = 0; i < rank; ++i) {
    dims[i] = static_cast<cuuint64_t>(sizes[i]);
    if (i > 0) bytes[i - 1] = sizes[i] == 1 ? 16 : static_cast<cuuint64_t>(strides[i - 1]) * 2;
  }
  return encode_tensor_map(map, dtype, data, rank, dims, bytes, box);
}

struct Launch {
  bool outer_first = false;  // w is contiguous along M
  int64_t blocks = 0;
  int shared_bytes = 0;
};

template <class Half, Major kMajor, class Arguments>
int launch(const Arguments& a, const Launch& how, void* stream) {
  const auto kernel = rows_sm90<Half, kMajor, Arguments>;
  cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, how.shared_bytes);
  if (error != cudaSuccess) return static_cast<int>(error);
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim.x = static_cast<unsigned>(a.cluster);
  attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(how.blocks));
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = static_cast<size_t>(how.shared_bytes);
  config.stream = static_cast<cudaStream_t>(stream);
  config.attrs = &attribute;
  config.numAttrs = 1;
  return static_cast<int>(cudaLaunchKernelEx(&config, kernel, a));
}

// The map of a problem's w.
inline bool encode_w(CUtensorMap* map, const mg_grouped_mm_problem& p) {
  const bool outer_first = along_outer(p);
  const int64_t sizes[3] = {outer_first ? p.outer : p.inner, outer_first ? p.inner : p.outer, p.groups.count};
  const int64_t strides[2] = {p.w_stride[outer_first ? 2 : 3], p.w_stride[0]};
  const uint32_t box[3] = {64, outer_first ? 64u : 128u, 1};
  return encode(map, p.dtype, p.w, 3, sizes, strides, box);
}

// Fills all that is of one matrix; false where a tensor map can't be made.
inline bool prepare(RowsArguments* a, Launch* how, const mg_grouped_mm_problem& p, const DeviceFacts& device,
                    int matrices) {
  how->outer_first = along_outer(p);
  if (!encode_w(&a->w_map, p)) return false;
  for (int i = 0; i < kXBoxes; ++i) {
    const int64_t sizes[2] = {p.inner, p.rows};
    const uint32_t box[2] = {64, 64u >> i};
    if (!encode(&a->x_maps[i], p.dtype, p.x, 2, sizes, p.x_stride, box)) return false;
  }
  a->groups = p.groups;
  a->rows = p.rows;
  a->outer = p.outer;
  a->bias = p.bias;
  a->bias_stride_g = p.bias_stride[0];
  a->bias_stride_m = p.bias_stride[2];
  a->out = p.out;
  a->out_stride_n = p.out_stride[0];
  a->out_stride_m = p.out_stride[2];
  a->out_dtype = p.out_dtype;
  a->depth_steps = static_cast<int32_t>((p.inner + kDepth - 1) / kDepth);
  a->whole_vectors =
      p.out_dtype == p.dtype && p.out_stride[2] == 1 && p.out_stride[0] % 8 == 0 && p.outer % 8 == 0 && aligned(p.out);

  const int64_t mean = p.rows / p.groups.count;
  const int64_t columns = (p.outer + kColumns - 1) / kColumns;
  a->most_rows = std::min(mean <= 16 ? 64 : mean <= 64 ? 128 : kMostRows, kMostRows / matrices);
  a->cluster = mean > 64 && columns > 1 ? 2 : 1;
  if (p.rows <= 64) {
    // Too few tiles for all multiprocessors, or an uneven number: share tiles along K.
    const int64_t tiles = (p.rows < p.groups.count ? p.rows : p.groups.count) * columns;
    int64_t least = 0;
    for (int split = 1; split <= 8; split *= 2) {
      const int64_t at_once = device.multiprocessors / split;
      const int64_t time = (tiles + at_once - 1) / at_once * ((a->depth_steps + split - 1) / split + 4) * 8;
      if (split > 1 && (split * 4 > a->depth_steps || time * 10 > least * 9)) continue;
      least = time;
      a->cluster = split;
    }
    a->split = a->cluster > 1;
    if (a->split) a->most_rows = kMostSplitRows / matrices;
  }
  a->column_tiles = static_cast<int32_t>(a->split ? columns : (columns + a->cluster - 1) / a->cluster);

  const int room = device.shared_bytes - static_cast<int>(sizeof(RowsShared));
  a->stage_room = room / 1024 * 1024;
  how->shared_bytes = a->stage_room + static_cast<int>(sizeof(RowsShared));
  const int64_t most_tiles =
      (p.rows < p.groups.count ? p.rows : p.groups.count + p.rows / a->most_rows) * a->column_tiles;
  int64_t clusters = device.multiprocessors / a->cluster;
  if (clusters > most_tiles) clusters = most_tiles;
  how->blocks = clusters * a->cluster;
  return true;
}

template <class Arguments>
int launch(const Arguments& a, const Launch& how, int32_t dtype, void* stream) {
  if (dtype == MG_BFLOAT16)
    return how.outer_first ? launch<__nv_bfloat16, Major::MN>(a, how, stream)
                           : launch<__nv_bfloat16, Major::K>(a, how, stream);
  return how.outer_first ? launch<__half, Major::MN>(a, how, stream) : launch<__half, Major::K>(a, how, stream);
}

}  // namespace sm90
}  // namespace multigemm
