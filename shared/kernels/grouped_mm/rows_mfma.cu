// Instances and launch of rows_mfma.cuh.
#include "kernels/grouped_mm/rows_mfma.cuh"

#include "kernels/grouped_mm/launch_mfma.h"
#include "kernels/grouped_mm/rows_mfma.h"

namespace multigemm {
namespace mfma {
namespace {

template <class Tile>
int launch_tile(RowsCall& call, const DeviceFacts& device, void* stream) {
  static_assert(Tile::kSide == kCountedRows || Tile::kSide == 2 * kCountedRows);
  const mg_grouped_mm_problem& p = call.p;
  call.column_tiles = static_cast<int32_t>(ceil_div(p.outer, Tile::kSide));
  call.tiles_each = call.column_tiles * p.batch;
  const int64_t blocks = blocks_for(most_row_tiles(p.rows, p.groups.count, Tile::kSide) * call.tiles_each, device);
  const bool w_along_k = !(p.w_stride[3] == 1 || p.outer == 1);
  return gpu::launch(w_along_k ? rows_mfma<Tile, true> : rows_mfma<Tile, false>, blocks, kThreads, {stream}, call);
}

template <class Type>
int launch_type(RowsCall& call, const DeviceFacts& device, void* stream) {
  const mg_grouped_mm_problem& p = call.p;
  const int64_t rows_each = p.rows / p.groups.count, tiles = ceil_div(p.rows, 128) * ceil_div(p.outer, 128) * p.batch;
  if constexpr (Type::kBytes < 8)  // whose sums would not fit in registers
    if (wants_large_tiles(tiles, rows_each < p.outer ? rows_each : p.outer, device))
      return launch_tile<Tile<Type, 128>>(call, device, stream);
  return launch_tile<Tile<Type, 64>>(call, device, stream);
}

}  // namespace
}  // namespace mfma

std::string rows_mfma_refusal(const mg_grouped_mm_problem& p, const DeviceFacts& device) {
  const std::string common = mfma::refusal(p.rows, p.batch, p.groups, p.dtype, p.out_dtype, device);
  if (!common.empty()) return common;
  if (p.inner > 1 && p.x_stride[2] != 1) return "x is not contiguous along K";
  if (p.inner > 1 && p.outer > 1 && p.w_stride[2] != 1 && p.w_stride[3] != 1)
    return "w is contiguous neither along K nor M";
  if (p.outer > 1 && p.out_stride[2] != 1) return "out is not contiguous along M";
  if (ceil_div(p.outer, 64) > (int64_t{1} << 30) / p.batch) return "B times M is too large";
  return "";
}

int launch_rows_mfma(const mg_grouped_mm_problem& p, const DeviceFacts& device, void* stream) {
  using namespace mfma;
  RowsCall call{};
  call.p = p;
  const int64_t bytes = dtype_bytes(p.dtype);
  const bool w_along_k = !(p.w_stride[3] == 1 || p.outer == 1);
  const int64_t x_sizes[3] = {p.rows, p.batch, p.inner}, out_sizes[3] = {p.rows, p.batch, p.outer};
  const int64_t w_sizes[4] = {p.groups.count, p.batch, w_along_k ? p.outer : p.inner, w_along_k ? p.inner : p.outer};
  const int64_t w_stride[3] = {p.w_stride[0], p.w_stride[1], w_along_k ? p.w_stride[3] : p.w_stride[2]};
  call.x_wide = wide_lines(p.x, bytes, p.x_stride, x_sizes, 2);
  call.w_wide = wide_lines(p.w, bytes, w_stride, w_sizes, 3);
  call.out_wide = wide_lines(p.out, dtype_bytes(p.out_dtype), p.out_stride, out_sizes, 2, true);
  switch (p.dtype) {
    case MG_FLOAT64: return launch_type<Double>(call, device, stream);
    case MG_FLOAT32:
      if (p.precision == MG_PRECISION_TF32) return launch_type<SingleTf32>(call, device, stream);
      return launch_type<Single>(call, device, stream);
    case MG_FLOAT16: return launch_type<Half>(call, device, stream);
    default: return launch_type<Brain>(call, device, stream);
  }
}

}  // namespace multigemm
