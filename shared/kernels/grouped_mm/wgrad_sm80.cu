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
constexpr int kThinBlocks = 4;

// Fewer rows than this are not worth a piece, and fewer in all not another launch; with more groups than that, finding
// one's part takes longer than most groups do.
constexpr int64_t kLeastPiece = 64, kLeastCutRows = 1024, kMostCutGroups = 256;

enum class Way { thin, narrow_x, narrow_gy, tile };

struct Plan {
  Way way;
  int32_t k_tiles, m_tiles;
  int64_t tiles_each;  // of one group
  bool mid;            // smaller tiles of float32
  int32_t piece_rows;  // 0: no group is cut
  int64_t pieces;      // that there can be
};

int64_t sums_bytes(const mg_grouped_mm_wgrad_problem& p) { return p.dtype == MG_FLOAT64 ? 8 : 4; }
int64_t matrices_each(const mg_grouped_mm_wgrad_problem& p) { return p.sum_batch ? 1 : p.batch; }

template <class Tile>
void cover(const mg_grouped_mm_wgrad_problem& p, Plan& plan) {
  plan.k_tiles = static_cast<int32_t>(ceil_div(p.inner, Tile::kM));
  plan.m_tiles = static_cast<int32_t>(ceil_div(p.outer, Tile::kN));
  plan.tiles_each = matrices_each(p) * plan.k_tiles * plan.m_tiles;
}

// The rows of tall groups are shared out where one group's tiles don't fill the device. The sums of pieces take no more
// memory than out, whatever the sizes: it has as many numbers as there are multiples of the height.
void cut(const mg_grouped_mm_wgrad_problem& p, int64_t resident, Plan& plan) {
  if (p.groups.count > kMostCutGroups || p.rows < kLeastCutRows || plan.tiles_each >= resident) return;
  const int64_t most = p.groups.count * dtype_bytes(p.out_dtype) / sums_bytes(p);
  if (most < 2) return;
  const int64_t rows = ceil_div(p.rows, most) > kLeastPiece ? ceil_div(p.rows, most) : kLeastPiece;
  plan.piece_rows = static_cast<int32_t>(rows);
  plan.pieces = ceil_div(p.rows, rows);
}

Plan plan_of(const mg_grouped_mm_wgrad_problem& p, const DeviceFacts& device) {
  Plan plan{};
  const int64_t multiprocessors = device.multiprocessors;
  const bool half = p.dtype == MG_FLOAT16 || p.dtype == MG_BFLOAT16;
  const bool tf32 =
      p.dtype == MG_FLOAT32 && p.precision == MG_PRECISION_TF32 && p.inner > kShortWidth && p.outer > kShortWidth;
  if (!half && !tf32 && !p.sum_batch) {
    const bool few_units = p.groups.count * p.batch * ceil_div(p.inner > p.outer ? p.inner : p.outer, 64) < 1 << 30;
    if (p.inner <= 16 && p.outer <= 16 && p.batch >= 8) {
      plan.way = Way::thin;
      plan.k_tiles = static_cast<int32_t>(ceil_div(p.inner, kThinSide));
      plan.m_tiles = static_cast<int32_t>(ceil_div(p.outer, kThinSide));
      plan.tiles_each = ceil_div(p.batch * plan.k_tiles * plan.m_tiles, 32);
      cut(p, kThinBlocks * multiprocessors, plan);
      return plan;
    }
    if (few_units && (p.inner <= kShortWidth || p.outer <= kShortWidth)) {
      plan.way = p.inner <= kShortWidth ? Way::narrow_x : Way::narrow_gy;
      return plan;
    }
  }
  plan.way = Way::tile;
  if (half) {
    cover<WideHalf<__half>>(p, plan);
    cut(p, WideHalf<__half>::kBlocks * multiprocessors, plan);
  } else if (p.dtype == MG_FLOAT64) {
    cover<WideDouble>(p, plan);
    cut(p, WideDouble::kBlocks * multiprocessors, plan);
  } else if (tf32) {
    cover<WideTf32>(p, plan);
    cut(p, WideTf32::kBlocks * multiprocessors, plan);
  } else {
    cover<WideFloat>(p, plan);
    plan.mid = p.groups.count * plan.tiles_each < 8 * multiprocessors;
    if (plan.mid) cover<MidFloat>(p, plan);
    cut(p, (plan.mid ? MidFloat::kBlocks : WideFloat::kBlocks) * multiprocessors, plan);
  }
  return plan;
}

int64_t room_for(const mg_grouped_mm_wgrad_problem& p, const Plan& plan) {
  return plan.pieces * matrices_each(p) * p.inner * p.outer * sums_bytes(p);
}

// The launch of `kernel` for all parts, and one that joins the pieces if groups are cut.
template <class T>
int launch_parts(void (*kernel)(WgradCall), int threads, int work_bytes, int64_t blocks_each, WgradCall& call,
                 const Plan& plan, const DeviceFacts& device, void* stream) {
  const mg_grouped_mm_wgrad_problem& p = call.p;
  const bool cuts = plan.piece_rows > 0;
  const int numbers = cuts ? 2 : 1;
  const int64_t blocks = (p.groups.count + plan.pieces) * plan.tiles_each;
  const int error = launch(kernel, threads, work_bytes, blocks, blocks_each, call, device, stream, numbers);
  if (error || !cuts) return error;
  const int64_t elements = matrices_each(p) * p.inner * p.outer;
  return launch(wgrad_join_sm80<T>, kJoinThreads, 0, plan.pieces / 2 * ceil_div(elements, kJoinThreads), 8, call,
                device, stream, numbers, device.major >= 9);
}

template <class Tile>
int launch_tile(WgradCall& call, const Plan& plan, const DeviceFacts& device, void* stream) {
  return launch_parts<typename Tile::T>(wgrad_tile_sm80<Tile>, Tile::kThreads, tile_bytes<Tile, false, false>(),
                                        kTurns * Tile::kBlocks, call, plan, device, stream);
}

template <class T, bool kNarrowX>
int launch_short(WgradCall& call, const DeviceFacts& device, void* stream) {
  constexpr int kRun = WgradShortWork<T>::kRun, kBlocks = 4, kWarps = kShortThreads / 32;
  constexpr int kWork = static_cast<int>(sizeof(WgradShortWork<T>) * kWarps + sizeof(T) * 2 * kShortWidth * kRun * 32);
  const mg_grouped_mm_wgrad_problem& p = call.p;
  const int32_t tiles = static_cast<int32_t>(ceil_div(kNarrowX ? p.outer : p.inner, 32 * kRun));
  call.k_tiles = kNarrowX ? 1 : tiles;
  call.m_tiles = kNarrowX ? tiles : 1;
  call.tiles_each = p.batch * tiles;
  call.tiles = call.tiles_each * p.groups.count;
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

template <class T, class Tile>
int launch_any(WgradCall& call, const Plan& plan, const DeviceFacts& device, void* stream) {
  switch (plan.way) {
    case Way::thin:
      return launch_parts<T>(wgrad_thin_sm80<T>, kThinThreads, 0, kTurns * kThinBlocks, call, plan, device, stream);
    case Way::narrow_x: return launch_short<T, true>(call, device, stream);
    case Way::narrow_gy: return launch_short<T, false>(call, device, stream);
    default: return launch_tile<Tile>(call, plan, device, stream);
  }
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

int64_t wgrad_sm80_room(const mg_grouped_mm_wgrad_problem& p, const DeviceFacts& device) {
  return sm80::room_for(p, sm80::plan_of(p, device));
}

int launch_wgrad_sm80(const mg_grouped_mm_wgrad_problem& p, const DeviceFacts& device, void* room, void* stream) {
  using namespace sm80;
  const Plan plan = plan_of(p, device);
  if (plan.pieces > 0 && !room) return gpu::kInvalidValue;
  WgradCall call{};
  call.p = p;
  call.k_tiles = plan.k_tiles;
  call.m_tiles = plan.m_tiles;
  call.tiles_each = plan.tiles_each;
  call.piece_rows = plan.piece_rows;
  call.sums = room;
  const int64_t x_sizes[3] = {p.rows, p.batch, p.inner}, gy_sizes[3] = {p.rows, p.batch, p.outer};
  call.x_wide = wide_lines(p.x, dtype_bytes(p.dtype), p.x_stride, x_sizes, 2);
  call.gy_wide = wide_lines(p.gy, dtype_bytes(p.dtype), p.gy_stride, gy_sizes, 2);
  const int64_t out_sizes[4] = {p.groups.count, p.sum_batch ? 1 : p.batch, p.inner, p.outer};
  call.out_wide = wide_lines(p.out, dtype_bytes(p.out_dtype), p.out_stride, out_sizes, 3, true);
  switch (p.dtype) {
    case MG_FLOAT64: return launch_any<double, WideDouble>(call, plan, device, stream);
    case MG_FLOAT32:
      if (plan.mid) return launch_any<float, MidFloat>(call, plan, device, stream);
      if (p.precision == MG_PRECISION_TF32 && p.inner > kShortWidth && p.outer > kShortWidth)
        return launch_tile<WideTf32>(call, plan, device, stream);
      return launch_any<float, WideFloat>(call, plan, device, stream);
    case MG_FLOAT16: return launch_tile<WideHalf<__half>>(call, plan, device, stream);
    default: return launch_tile<WideHalf<__nv_bfloat16>>(call, plan, device, stream);
  }
}

}  // namespace multigemm
