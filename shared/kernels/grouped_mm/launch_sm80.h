// What the launchers of rows_sm80 and wgrad_sm80 share; for CUDA sources.
#pragma once

#include <string>

#include "kernels/grouped_mm/gpu_call.h"
#include "kernels/grouped_mm/lines.h"
#include "kernels/grouped_mm/tile_sm80.cuh"

namespace multigemm {
namespace sm80 {

template <class Tile, bool kAAlong, bool kBAlong>
constexpr int tile_bytes() {
  return static_cast<int>(sizeof(typename Tile::T)) * Tile::kStages *
         (Tile::template OperandOf<Tile::kM, kAAlong>::kSize + Tile::template OperandOf<Tile::kN, kBAlong>::kSize);
}

inline std::string refusal(int64_t rows, int64_t batch, const mg_groups& groups, int32_t dtype, int32_t out_dtype,
                           const DeviceFacts& device) {
  if (device.major < 8) return "needs compute capability 8.0 or newer";
  if (device.shared_bytes < 96 * 1024) return "needs 96 KiB of shared memory";
  if (groups.count > kMostCountedGroups) return "too many groups";
  if (rows >= (int64_t{1} << 31) - (1 << 16)) return "too many rows for 32-bit row numbers";
  if (batch >= int64_t{1} << 30) return "B is too large";
  if (dtype < MG_FLOAT64 || dtype > MG_BFLOAT16) return "no such dtype";
  if (out_dtype != dtype && out_dtype != MG_FLOAT32) return "out must have the operands' dtype or be float32";
  return "";
}

// As many blocks as there is work, but no more than stay on the device: blocks take tiles in turn. `numbers`: int32 of
// each group that a block counts; `overlaps`: the kernel waits by itself for the one before it.
template <class Call>
int launch(void (*kernel)(Call), int threads, int work_bytes, int64_t blocks, int64_t blocks_each, const Call& call,
           const DeviceFacts& device, void* stream, int numbers = 1, bool overlaps = false) {
  if (!groups_fit(call.p.groups)) return gpu::kInvalidValue;
  const int64_t counted = call.p.groups.count <= kMostBlockGroups ? call.p.groups.count : 0;
  const auto with = [&](int64_t groups) {
    return work_bytes + static_cast<int>(sizeof(int32_t)) * (32 + numbers * static_cast<int>(groups));
  };
  // The most is the same for every call of a kernel: another thread may be between asking for it and its launch.
  const int most = with(2 * kMostBlockGroups / numbers) < device.shared_bytes ? with(2 * kMostBlockGroups / numbers)
                                                                              : device.shared_bytes;
  const int64_t resident = blocks_each * device.multiprocessors;
  return gpu::launch_shared(kernel, blocks < resident ? blocks : resident, threads, with(counted), most, overlaps,
                            {stream}, call);
}

}  // namespace sm80
}  // namespace multigemm
