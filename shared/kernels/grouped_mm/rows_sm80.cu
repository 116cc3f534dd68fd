// Instances and launch of rows_sm80.cuh.
#include "kernels/grouped_mm/rows_sm80.cuh"

#include "kernels/grouped_mm/launch_sm80.h"
#include "kernels/grouped_mm/rows_sm80.h"

namespace multigemm {
namespace sm80 {
namespace {

template <class Tile, bool kWAlongK>
int launch_tile(RowsCall& call, const DeviceFacts& device, void* stream) {
  static_assert(Tile::kM == kCountedRows || Tile::kM == 2 * kCountedRows);
  const mg_grouped_mm_problem& p = call.p;
  call.column_tiles = static_cast<int32_t>(ceil_div(p.outer, Tile::kN));
  call.tiles_each = call.column_tiles * p.batch;
  constexpr int kWork = tile_bytes<Tile, true, kWAlongK>();
  const int64_t blocks = most_row_tiles(p.rows, p.groups.count, Tile::kM) * call.tiles_each;
  return launch(rows_tile_sm80<Tile, kWAlongK>, Tile::kThreads, kWork, blocks, Tile::kBlocks, call, device, stream);
}

template <class Tile>
int launch_either_tile(RowsCall& call, const DeviceFacts& device, void* stream) {
  return call.w_along_k ? launch_tile<Tile, true>(call, device, stream)
                        : launch_tile<Tile, false>(call, device, stream);
}

template <class T>
int launch_short(RowsCall& call, const DeviceFacts& device, void* stream) {
  constexpr int kBlocks = 4, kWarps = kShortThreads / 32;
  static_assert(kShortRows == kCountedRows);
  const mg_grouped_mm_problem& p = call.p;
  call.column_tiles = static_cast<int32_t>(ceil_div(p.outer, 32 * RowsShortWork<T>::kRun));
  call.tiles_each = call.column_tiles * p.batch;
  call.tile_rows = kShortRows;
  const int64_t warps = int64_t{kBlocks} * kWarps * device.multiprocessors;
  const int64_t units = most_row_tiles(p.rows, p.groups.count, call.tile_rows) * call.tiles_each;
  int64_t blocks = ceil_div(units, kWarps);
  if (units < 6 * warps) {  // too few to spread evenly
    const int64_t total = p.rows * call.tiles_each, share = ceil_div(total, warps) > 8 ? ceil_div(total, warps) : 8;
    call.share = static_cast<uint32_t>(share);
    blocks = ceil_div(ceil_div(total, share), kWarps);
  }
  const auto kernel = p.groups.count > kMostBlockGroups ? rows_short_sm80<T, kMany> : rows_short_sm80<T, kFew>;
  return launch(kernel, kShortThreads, sizeof(RowsShortWork<T>) * kWarps, blocks, kBlocks, call, device, stream);
}

template <class T, int kK>
int launch_thin(RowsCall& call, const DeviceFacts& device, void* stream) {
  constexpr int kBlocks = RowsThin<T, kK>::kBlocks;
  const mg_grouped_mm_problem& p = call.p;
  call.column_tiles = static_cast<int32_t>(ceil_div(p.outer, RowsThin<T, kK>::kRun));
  const int64_t warps = ceil_div(p.batch * call.column_tiles, 32);
  call.column_warps = warps >= 4 ? 4 : warps >= 2 ? 2 : 1;
  call.tiles_each = ceil_div(warps, call.column_warps);
  // Ranges of at least a few rows for each warp, and no more of them than stay on the device.
  const int64_t ranges = ceil_div(int64_t{kBlocks} * device.multiprocessors, call.tiles_each);
  const int64_t least = 4 * (kThinThreads / 32) / call.column_warps;
  call.tile_rows = static_cast<int32_t>(ceil_div(p.rows, ranges) > least ? ceil_div(p.rows, ranges) : least);
  return launch(rows_thin_sm80<T, kK>, kThinThreads, 0, ceil_div(p.rows, call.tile_rows) * call.tiles_each,
                int64_t{1} << 30, call, device, stream);
}

template <class T>
int launch_small(RowsCall& call, const DeviceFacts& device, void* stream) {
  const mg_grouped_mm_problem& p = call.p;
  const bool few_units = p.rows < (int64_t{1} << 29) / p.batch / ceil_div(p.outer, 64);
  // A warp's 512 bytes of columns of one b would be half empty.
  if (p.inner <= kShortK && p.outer <= 8 * RowsShortWork<T>::kRun && p.batch >= 8 && p.batch < 1 << 24) {
    if (p.inner <= 4) return launch_thin<T, 4>(call, device, stream);
    if (p.inner <= 8) return launch_thin<T, 8>(call, device, stream);
    return launch_thin<T, 16>(call, device, stream);
  }
  if (p.inner <= kShortK && p.outer > 16 && few_units) return launch_short<T>(call, device, stream);
  if constexpr (sizeof(T) == 4) {
    if (p.outer <= 32) return launch_either_tile<NarrowFloat>(call, device, stream);
    const int64_t tiles =
        most_row_tiles(p.rows, p.groups.count, WideFloat::kM) * ceil_div(p.outer, WideFloat::kN) * p.batch;
    if (tiles < 8 * device.multiprocessors) return launch_either_tile<MidFloat>(call, device, stream);
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
  if (ceil_div(p.outer, 16) > (int64_t{1} << 30) / p.batch) return "B times M is too large";
  return "";
}

int launch_rows_sm80(const mg_grouped_mm_problem& p, const DeviceFacts& device, void* stream) {
  using namespace sm80;
  RowsCall call{};
  call.p = p;
  call.w_along_k = !(p.w_stride[3] == 1 || p.outer == 1);
  const int64_t sizes[3] = {p.rows, p.batch, p.inner};
  call.x_wide = wide_lines(p.x, dtype_bytes(p.dtype), p.x_stride, sizes, 2);
  const int64_t w_sizes[4] = {p.groups.count, p.batch, call.w_along_k ? p.outer : p.inner,
                              call.w_along_k ? p.inner : p.outer};
  const int64_t w_stride[3] = {p.w_stride[0], p.w_stride[1], call.w_along_k ? p.w_stride[3] : p.w_stride[2]};
  call.w_wide = wide_lines(p.w, dtype_bytes(p.dtype), w_stride, w_sizes, 3);
  const int64_t out_sizes[3] = {p.rows, p.batch, p.outer};
  call.out_wide = wide_lines(p.out, dtype_bytes(p.out_dtype), p.out_stride, out_sizes, 2, true);
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
