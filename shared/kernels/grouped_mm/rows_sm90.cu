// Instances and launch of the Hopper kernel of grouped_mm.
#include "kernels/grouped_mm/rows_sm90.h"

#include "kernels/grouped_mm/rows_sm90.cuh"
#include "kernels/grouped_mm/tensor_map_sm90.h"

namespace multigemm {
namespace {

using sm90::Major;
using sm90::RowsArguments;
using sm90::RowsShared;

bool aligned(const void* data) { return reinterpret_cast<uintptr_t>(data) % 16 == 0; }

// A stride that a tensor map can hold: an expanded dimension has none, one of one element needs none.
bool mappable(int64_t size, int64_t stride) {
  return size == 1 || (stride > 0 && stride % 8 == 0 && stride < (int64_t{1} << 38));
}

// w as the map sees it: contiguous along M, or along K.
bool along_outer(const mg_grouped_mm_problem& p) {
  return (p.outer == 1 || p.w_stride[3] == 1) && mappable(p.inner, p.w_stride[2]);
}
bool along_inner(const mg_grouped_mm_problem& p) {
  return (p.inner == 1 || p.w_stride[2] == 1) && mappable(p.outer, p.w_stride[3]);
}

// Strides count elements; a dimension of one element may have any.
bool encode(CUtensorMap* map, int32_t dtype, const void* data, int rank, const int64_t* sizes, const int64_t* strides,
            const uint32_t* box) {
  cuuint64_t dims[3], bytes[2];
  for (int i = 0; i < rank; ++i) {
    dims[i] = static_cast<cuuint64_t>(sizes[i]);
    if (i > 0) bytes[i - 1] = sizes[i] == 1 ? 16 : static_cast<cuuint64_t>(strides[i - 1]) * 2;
  }
  return encode_tensor_map(map, dtype, data, rank, dims, bytes, box);
}

template <class Half, Major kMajor>
int launch(const RowsArguments& a, int64_t blocks, int shared_bytes, void* stream) {
  const auto kernel = sm90::rows_sm90<Half, kMajor>;
  cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
  if (error != cudaSuccess) return static_cast<int>(error);
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim.x = static_cast<unsigned>(a.cluster);
  attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(sm90::kThreads);
  config.dynamicSmemBytes = static_cast<size_t>(shared_bytes);
  config.stream = static_cast<cudaStream_t>(stream);
  config.attrs = &attribute;
  config.numAttrs = 1;
  return static_cast<int>(cudaLaunchKernelEx(&config, kernel, a));
}

}  // namespace

std::string rows_sm90_refusal(const mg_grouped_mm_problem& p, const DeviceFacts& device) {
  constexpr int64_t kMost = 0x7fffff00;
  if (device.major != 9 || device.minor != 0) return "needs compute capability 9.0";
  if (p.dtype != MG_BFLOAT16 && p.dtype != MG_FLOAT16) return "takes bfloat16 and float16 only";
  if (p.out_dtype == MG_FLOAT64) return "does not write float64";
  if (p.batch != 1) return "takes no B";
  if (p.groups.count > kMostBlockGroups) return "takes at most 1024 groups";
  if (p.rows > kMost || p.inner > kMost || p.outer > kMost) return "N, K or M passes 2^31";
  if (static_cast<double>(p.rows) * static_cast<double>(p.outer) > 7e13) return "N times M is too large";
  if (!aligned(p.x) || !aligned(p.w)) return "x and w must start at multiples of 16 bytes";
  if ((p.inner != 1 && p.x_stride[2] != 1) || !mappable(p.rows, p.x_stride[0]))
    return "x must be contiguous along K, its rows multiples of 16 bytes apart";
  if (!along_outer(p) && !along_inner(p))
    return "w must be contiguous along M or K, its other rows multiples of 16 bytes apart";
  if (!mappable(p.groups.count, p.w_stride[0])) return "the matrices of w must be multiples of 16 bytes apart";
  return "";
}

int launch_rows_sm90(const mg_grouped_mm_problem& p, const DeviceFacts& device, void* stream) {
  if (tensor_map_encoder() == nullptr) return static_cast<int>(cudaErrorNotSupported);
  RowsArguments a = {};
  const bool outer_first = along_outer(p);
  {
    const int64_t sizes[3] = {outer_first ? p.outer : p.inner, outer_first ? p.inner : p.outer, p.groups.count};
    const int64_t strides[2] = {p.w_stride[outer_first ? 2 : 3], p.w_stride[0]};
    const uint32_t box[3] = {64, outer_first ? 64u : 128u, 1};
    if (!encode(&a.w_map, p.dtype, p.w, 3, sizes, strides, box)) return static_cast<int>(cudaErrorInvalidValue);
  }
  for (int i = 0; i < sm90::kXBoxes; ++i) {
    const int64_t sizes[2] = {p.inner, p.rows};
    const uint32_t box[2] = {64, 64u >> i};
    if (!encode(&a.x_maps[i], p.dtype, p.x, 2, sizes, p.x_stride, box)) return static_cast<int>(cudaErrorInvalidValue);
  }
  a.groups = p.groups;
  a.rows = p.rows;
  a.outer = p.outer;
  a.bias = p.bias;
  a.bias_stride_g = p.bias_stride[0];
  a.bias_stride_m = p.bias_stride[2];
  a.out = p.out;
  a.out_stride_n = p.out_stride[0];
  a.out_stride_m = p.out_stride[2];
  a.out_dtype = p.out_dtype;
  a.depth_steps = static_cast<int32_t>((p.inner + sm90::kDepth - 1) / sm90::kDepth);
  a.whole_vectors =
      p.out_dtype == p.dtype && p.out_stride[2] == 1 && p.out_stride[0] % 8 == 0 && p.outer % 8 == 0 && aligned(p.out);

  const int64_t mean = p.rows / p.groups.count;
  const int64_t columns = (p.outer + sm90::kColumns - 1) / sm90::kColumns;
  a.most_rows = mean <= 16 ? 64 : mean <= 64 ? 128 : mean <= 192 ? 256 : sm90::kMostRows;
  a.cluster = mean > 64 && columns > 1 ? 2 : 1;
  if (p.rows <= 64) {
    // Too few tiles for all multiprocessors, or an uneven number: share tiles along K.
    const int64_t tiles = (p.rows < p.groups.count ? p.rows : p.groups.count) * columns;
    int64_t least = 0;
    for (int split = 1; split <= 8; split *= 2) {
      const int64_t at_once = device.multiprocessors / split;
      const int64_t time = (tiles + at_once - 1) / at_once * ((a.depth_steps + split - 1) / split + 4) * 8;
      if (split > 1 && (split * 4 > a.depth_steps || time * 10 > least * 9)) continue;
      least = time;
      a.cluster = split;
    }
    a.split = a.cluster > 1;
    if (a.split) a.most_rows = sm90::kMostSplitRows;
  }
  a.column_tiles = static_cast<int32_t>(a.split ? columns : (columns + a.cluster - 1) / a.cluster);

  const int room = device.shared_bytes - static_cast<int>(sizeof(RowsShared));
  a.stage_room = room / 1024 * 1024;
  const int shared_bytes = a.stage_room + static_cast<int>(sizeof(RowsShared));
  const int64_t most_tiles =
      (p.rows < p.groups.count ? p.rows : p.groups.count + p.rows / a.most_rows) * a.column_tiles;
  int64_t clusters = device.multiprocessors / a.cluster;
  if (clusters > most_tiles) clusters = most_tiles;
  const int64_t blocks = clusters * a.cluster;
  if (p.dtype == MG_BFLOAT16)
    return outer_first ? launch<__nv_bfloat16, Major::MN>(a, blocks, shared_bytes, stream)
                       : launch<__nv_bfloat16, Major::K>(a, blocks, shared_bytes, stream);
  return outer_first ? launch<__half, Major::MN>(a, blocks, shared_bytes, stream)
                     : launch<__half, Major::K>(a, blocks, shared_bytes, stream);
}

}  // namespace multigemm
