// Instances and launch of wgrad_mfma.cuh.
#include "kernels/grouped_mm/wgrad_mfma.cuh"

#include "kernels/grouped_mm/launch_mfma.h"
#include "kernels/grouped_mm/wgrad_mfma.h"

namespace multigemm {
namespace mfma {
namespace {

template <class Tile>
int launch_tile(WgradCall& call, const DeviceFacts& device, void* stream) {
  const mg_grouped_mm_wgrad_problem& p = call.p;
  call.k_tiles = static_cast<int32_t>(ceil_div(p.inner, Tile::kSide));
  call.m_tiles = static_cast<int32_t>(ceil_div(p.outer, Tile::kSide));
  call.tiles_each = int64_t{call.k_tiles} * call.m_tiles * (p.sum_batch ? 1 : p.batch);
  call.tiles = call.tiles_each * p.groups.count;
  return gpu::launch(wgrad_mfma<Tile>, blocks_for(call.tiles, device), kThreads, {stream}, call);
}

template <class Type>
int launch_type(WgradCall& call, const DeviceFacts& device, void* stream) {
  const mg_grouped_mm_wgrad_problem& p = call.p;
  const int64_t tiles = ceil_div(p.inner, 128) * ceil_div(p.outer, 128) * p.groups.count * (p.sum_batch ? 1 : p.batch);
  if constexpr (Type::kBytes < 8)  // whose sums would not fit in registers
    if (wants_large_tiles(tiles, p.inner < p.outer ? p.inner : p.outer, device))
      return launch_tile<Tile<Type, 128>>(call, device, stream);
  return launch_tile<Tile<Type, 64>>(call, device, stream);
}

}  // namespace
}  // namespace mfma

std::string wgrad_mfma_refusal(const mg_grouped_mm_wgrad_problem& p, const DeviceFacts& device) {
  const std::string common = mfma::refusal(p.rows, p.batch, p.groups, p.dtype, p.out_dtype, device);
  if (!common.empty()) return common;
  if (p.inner > 1 && p.x_stride[2] != 1) return "x is not contiguous along K";
  if (p.outer > 1 && p.gy_stride[2] != 1) return "gy is not contiguous along M";
  if (p.outer > 1 && p.out_stride[3] != 1) return "out is not contiguous along M";
  if (ceil_div(p.outer, 64) > (int64_t{1} << 30) / p.batch / ceil_div(p.inner, 64))
    return "B times K times M is too large";
  return "";
}

int launch_wgrad_mfma(const mg_grouped_mm_wgrad_problem& p, const DeviceFacts& device, void* stream) {
  using namespace mfma;
  WgradCall call{};
  call.p = p;
  const int64_t bytes = dtype_bytes(p.dtype);
  const int64_t x_sizes[3] = {p.rows, p.batch, p.inner}, gy_sizes[3] = {p.rows, p.batch, p.outer};
  const int64_t out_sizes[4] = {p.groups.count, p.sum_batch ? 1 : p.batch, p.inner, p.outer};
  call.x_wide = wide_lines(p.x, bytes, p.x_stride, x_sizes, 2);
  call.gy_wide = wide_lines(p.gy, bytes, p.gy_stride, gy_sizes, 2);
  call.out_wide = wide_lines(p.out, dtype_bytes(p.out_dtype), p.out_stride, out_sizes, 3, true);
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
