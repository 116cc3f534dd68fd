// Instances and launch of wgrad_sm80.cuh.
#include "kernels/grouped_mm/wgrad_sm80.cuh"

#include "kernels/grouped_mm/launch_sm80.h"
#include "kernels/grouped_mm/wgrad_sm80.h"

namespace multigemm {
namespace sm80 {
namespace {

// Blocks take tiles in turn, so that one counts the groups for several; there are some more than stay on the device,
// because groups differ in size.
constexpr int kTurns = 4;

void count_tiles(WgradCall& call, int64_t of_group) {
  call.tiles_each = of_group;
  call.tiles = of_group * call.p.groups.count;
}

template <class Tile>
int launch_tile(WgradCall& call, const DeviceFacts& device, cudaStream_t stream) {
  const mg_grouped_mm_wgrad_problem& p = call.p;
  call.k_tiles = static_cast<int32_t>(ceil_div(p.inner, Tile::kM));
  call.m_tiles = static_cast<int32_t>(ceil_div(p.outer, Tile::kN));
  count_tiles(call, (p.sum_batch ? 1 : p.batch) * call.k_tiles * call.m_tiles);
  return launch(wgrad_tile_sm80<Tile>, Tile::kThreads, tile_bytes<Tile, false, false>(), call.tiles,
                kTurns * Tile::kBlocks, call, device, stream);
}

template <class T, bool kNarrowX>
int launch_short(WgradCall& call, const DeviceFacts& device, cudaStream_t stream) {
  constexpr int kRun = WgradShortWork<T>::kRun, kBlocks = 4, kWarps = kShortThreads / 32;
  constexpr int kWork = static_cast<int>(sizeof(WgradShortWork<T>) * kWarps + sizeof(T) * 2 * kShortWidth * kRun * 32);
  const mg_grouped_mm_wgrad_problem& p = call.p;
  const int32_t tiles = static_cast<int32_t>(ceil_div(kNarrowX ? p.outer : p.inner, 32 * kRun));
  call.k_tiles = kNarrowX ? 1 : tiles;
  call.m_tiles = kNarrowX ? tiles : 1;
  count_tiles(call, p.batch * tiles);
  const int64_t warps = int64_t{kBlocks} * kWarps * device.multiprocessors;
  // Rounds of all warps, in rounds of whole units; sharing out rows costs a little.
  double least = 0;
  for (int row_warps = 1; row_warps <= kWarps; row_warps *= 2) {
    const double cost =
        static_cast<double>(ceil_div(call.tiles * row_warps, warps)) / row_warps * (1 + 0.04 * row_warps);
    if (row_warps > 1 && cost >= least) continue;
    least = cost;
    call.row_warps = row_warps;
  }
  return launch(wgrad_short_sm80<T, kNarrowX>, kShortThreads, kWork, ceil_div(call.tiles * call.row_warps, kWarps),
                2 * kBlocks, call, device, stream);
}

template <class T>
int launch_thin(WgradCall& call, const DeviceFacts& device, cudaStream_t stream) {
  const mg_grouped_mm_wgrad_problem& p = call.p;
  call.k_tiles = static_cast<int32_t>(ceil_div(p.inner, kThinSide));
  call.m_tiles = static_cast<int32_t>(ceil_div(p.outer, kThinSide));
  count_tiles(call, ceil_div(p.batch * call.k_tiles * call.m_tiles, 32));
  return launch(wgrad_thin_sm80<T>, kThinThreads, 0, call.tiles, kTurns * 4, call, device, stream);
}

template <class T, class Tile>
int launch_any(WgradCall& call, const DeviceFacts& device, cudaStream_t stream) {
  const mg_grouped_mm_wgrad_problem& p = call.p;
  if (!p.sum_batch && p.inner <= 16 && p.outer <= 16 && p.batch >= 8) return launch_thin<T>(call, device, stream);
  const bool few_units = p.groups.count * p.batch * ceil_div(p.inner > p.outer ? p.inner : p.outer, 64) < 1 << 30;
  if (!p.sum_batch && p.inner <= kShortWidth && few_units) return launch_short<T, true>(call, device, stream);
  if (!p.sum_batch && p.outer <= kShortWidth && few_units) return launch_short<T, false>(call, device, stream);
  if constexpr (sizeof(T) == 4) {
    const int64_t tiles =
        p.groups.count * ceil_div(p.inner, Tile::kM) * ceil_div(p.outer, Tile::kN) * (p.sum_batch ? 1 : p.batch);
    if (tiles < 8 * device.multiprocessors) return launch_tile<MidFloat>(call, device, stream);
  }
  return launch_tile<Tile>(call, device, stream);
}

}  // namespace
}  // namespace sm80

std::string wgrad_sm80_refusal(const mg_grouped_mm_wgrad_problem& p, const DeviceFacts& device) {
  const std::string common = sm80::refusal(p.rows, p.batch, p.groups, p.dtype, p.out_dtype, device);
  if (!common.empty()) return common;
  if (p.inner > 1 && p.x_stride[2] != 1) return "x is not contiguous along K";
  if (p.outer > 1 && p.gy_stride[2] != 1) return "gy is not contiguous along M";
  if (p.outer > 1 && p.out_stride[3] != 1) return "out is not contiguous along M";
  if (ceil_div(p.outer, 16) > (int64_t{1} << 30) / p.batch / ceil_div(p.inner, 16))
    return "B times K times M is too large";
  return "";
}

int launch_wgrad_sm80(const mg_grouped_mm_wgrad_problem& p, const DeviceFacts& device, void* queue) {
  using namespace sm80;
  const cudaStream_t stream = static_cast<cudaStream_t>(queue);
  WgradCall call{};
  call.p = p;
  const int64_t x_sizes[3] = {p.rows, p.batch, p.inner}, gy_sizes[3] = {p.rows, p.batch, p.outer};
  call.x_wide = wide_lines(p.x, dtype_bytes(p.dtype), p.x_stride, x_sizes, 2);
  call.gy_wide = wide_lines(p.gy, dtype_bytes(p.dtype), p.gy_stride, gy_sizes, 2);
  const int64_t out_sizes[4] = {p.groups.count, p.sum_batch ? 1 : p.batch, p.inner, p.outer};
  call.out_wide = wide_lines(p.out, dtype_bytes(p.out_dtype), p.out_stride, out_sizes, 3, true);
  switch (p.dtype) {
    case MG_FLOAT64: return launch_any<double, WideDouble>(call, device, stream);
    case MG_FLOAT32:
      if (p.precision == MG_PRECISION_TF32 && p.inner > kShortWidth && p.outer > kShortWidth)
        return launch_tile<WideTf32>(call, device, stream);
      return launch_any<float, WideFloat>(call, device, stream);
    case MG_FLOAT16: return launch_tile<WideHalf<__half>>(call, device, stream);
    default: return launch_tile<WideHalf<__nv_bfloat16>>(call, device, stream);
  }
}

}  // namespace multigemm
