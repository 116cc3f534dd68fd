// Instances and launch of rows_sm80.cuh.
#include "kernels/grouped_mm/rows_sm80.cuh"

#include "kernels/grouped_mm/launch_sm80.h"
#include "kernels/grouped_mm/rows_sm80.h"

namespace multigemm {
namespace sm80 {
namespace {

template <class Tile, bool kWAlongK>
int launch_tile(RowsCall& call, const DeviceFacts& device, cudaStream_t stream) {
  const mg_grouped_mm_problem& p = call.p;
  call.column_tiles = static_cast<int32_t>(ceil_div(p.outer, Tile::kN));
  call.tiles_each = call.column_tiles * p.batch;
  constexpr int kWork = tile_bytes<Tile, true, kWAlongK>();
  const int64_t blocks = most_row_tiles(p.rows, p.groups.count, Tile::kM) * call.tiles_each;
  return launch(rows_tile_sm80<Tile, kWAlongK>, Tile::kThreads, kWork, blocks, Tile::kBlocks, call, device, stream);
}

template <class Tile>
int launch_either_tile(RowsCall& call, const DeviceFacts& device, cudaStream_t stream) {
  return call.w_along_k ? launch_tile<Tile, true>(call, device, stream)
                        : launch_tile<Tile, false>(call, device, stream);
}

// Rows of a tile for which all multiprocessors have work, if there are enough rows.
int32_t balanced_rows(int64_t rows, int64_t each, int32_t least, int32_t most, int64_t wanted) {
  int32_t tile_rows = most;
  while (tile_rows > least && ceil_div(rows, tile_rows) * each < wanted) tile_rows /= 2;
  return tile_rows;
}

template <class T>
int launch_short(RowsCall& call, const DeviceFacts& device, cudaStream_t stream) {
  constexpr int kColumns = 32 * 16 / static_cast<int>(sizeof(T));  // of one warp
  constexpr int kBlocks = 4;
  const mg_grouped_mm_problem& p = call.p;
  const int64_t warps = ceil_div(p.outer, kColumns);
  call.column_warps = warps % 4 == 0 || warps > 8 ? 4 : warps % 2 == 0 || warps > 2 ? 2 : 1;
  call.column_tiles = static_cast<int32_t>(ceil_div(warps, call.column_warps));
  call.tiles_each = call.column_tiles * p.batch;
  call.tile_rows = balanced_rows(p.rows, call.tiles_each, 16, kShortRows, 2 * kBlocks * device.multiprocessors);
  const int64_t blocks = most_row_tiles(p.rows, p.groups.count, call.tile_rows) * call.tiles_each;
  return launch(rows_short_sm80<T>, kShortThreads, 0, blocks, kBlocks, call, device, stream);
}

template <class T, int kK>
int launch_thin(RowsCall& call, const DeviceFacts& device, cudaStream_t stream) {
  constexpr int kBlocks = 12;
  const mg_grouped_mm_problem& p = call.p;
  call.column_tiles = static_cast<int32_t>(ceil_div(p.outer, kThinRun));
  const int64_t warps = ceil_div(p.batch * call.column_tiles, 32);
  call.column_warps = warps >= 4 ? 4 : warps >= 2 ? 2 : 1;
  call.tiles_each = ceil_div(warps, call.column_warps);
  call.tile_rows = balanced_rows(p.rows, call.tiles_each, 8, 64, kBlocks * device.multiprocessors / 2);
  const int64_t blocks = most_row_tiles(p.rows, p.groups.count, call.tile_rows) * call.tiles_each;
  return launch(rows_thin_sm80<T, kK>, kThinThreads, 0, blocks, kBlocks, call, device, stream);
}

template <class T>
int launch_small(RowsCall& call, const DeviceFacts& device, cudaStream_t stream) {
  const mg_grouped_mm_problem& p = call.p;
  if (p.inner <= 8 && p.outer <= 16 && p.batch >= 8)
    return p.inner <= 4 ? launch_thin<T, 4>(call, device, stream) : launch_thin<T, 8>(call, device, stream);
  if (p.inner <= kShortK && p.outer > 16) return launch_short<T>(call, device, stream);
  if constexpr (sizeof(T) == 4) {
    if (p.outer <= 32) return launch_either_tile<NarrowFloat>(call, device, stream);
    return launch_either_tile<WideFloat>(call, device, stream);
  } else {
    if (p.outer <= 32) return launch_either_tile<NarrowDouble>(call, device, stream);
    return launch_either_tile<WideDouble>(call, device, stream);
  }
}

}  // namespace
}  // namespace sm80

std::string rows_sm80_refusal(const mg_grouped_mm_problem& p, const DeviceFacts& device) {
  const std::string common = sm80::refusal(p.rows, p.batch, p.groups, p.dtype, p.out_dtype, device);
  if (!common.empty()) return common;
  if (p.inner > 1 && p.x_stride[2] != 1) return "x is not contiguous along K";
  if (p.inner > 1 && p.outer > 1 && p.w_stride[2] != 1 && p.w_stride[3] != 1)
    return "w is contiguous neither along K nor M";
  if (p.outer > 1 && p.out_stride[2] != 1) return "out is not contiguous along M";
  if (sm80::ceil_div(p.outer, 16) > (int64_t{1} << 30) / p.batch) return "B times M is too large";
  return "";
}

int launch_rows_sm80(const mg_grouped_mm_problem& p, const DeviceFacts& device, void* queue) {
  using namespace sm80;
  const cudaStream_t stream = static_cast<cudaStream_t>(queue);
  RowsCall call{};
  call.p = p;
  call.w_along_k = !(p.w_stride[3] == 1 || p.outer == 1);
  const int64_t sizes[3] = {p.rows, p.batch, p.inner};
  call.x_wide = wide_lines(p.x, p.dtype, p.x_stride, sizes, 2);
  const int64_t w_sizes[4] = {p.groups.count, p.batch, call.w_along_k ? p.outer : p.inner,
                              call.w_along_k ? p.inner : p.outer};
  const int64_t w_stride[3] = {p.w_stride[0], p.w_stride[1], call.w_along_k ? p.w_stride[3] : p.w_stride[2]};
  call.w_wide = wide_lines(p.w, p.dtype, w_stride, w_sizes, 3);
  const int64_t out_sizes[3] = {p.rows, p.batch, p.outer};
  call.out_wide = wide_lines(p.out, p.out_dtype, p.out_stride, out_sizes, 2, true);
  switch (p.dtype) {
    case MG_FLOAT64: return launch_small<double>(call, device, stream);
    case MG_FLOAT32:
      if (p.precision == MG_PRECISION_TF32 && p.inner > kShortK)
        return launch_either_tile<WideTf32>(call, device, stream);
      return launch_small<float>(call, device, stream);
    case MG_FLOAT16: return launch_either_tile<WideHalf<__half>>(call, device, stream);
    default: return launch_either_tile<WideHalf<__nv_bfloat16>>(call, device, stream);
  }
}

}  // namespace multigemm
