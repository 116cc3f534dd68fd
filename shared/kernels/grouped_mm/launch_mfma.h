// What the launchers of rows_mfma and wgrad_mfma share.
#pragma once

#include <string>

#include "kernels/grouped_mm/gpu_call.h"
#include "kernels/grouped_mm/lines.h"
#include "kernels/grouped_mm/tile_mfma.cuh"

namespace multigemm {
namespace mfma {

inline std::string refusal(int64_t rows, int64_t batch, const mg_groups& groups, int32_t dtype, int32_t out_dtype,
                           const DeviceFacts& device) {
  // gfx90a tells version 9.0 and gfx942 9.4: the others of 9.0 have no wheel, those of 10 and up no such instruction.
  if (device.major != 9 || (device.minor != 0 && device.minor != 4)) return "needs a gfx90a or gfx942";
  if (groups.count > kMostCountedGroups) return "too many groups";
  if (rows >= (int64_t{1} << 31) - (1 << 16)) return "too many rows for 32-bit row numbers";
  if (batch >= int64_t{1} << 30) return "B is too large";
  if (dtype < MG_FLOAT64 || dtype > MG_BFLOAT16) return "no such dtype";
  if (out_dtype != dtype && out_dtype != MG_FLOAT32) return "out must have the operands' dtype or be float32";
  return "";
}

// Large tiles where they are full and there are enough for every multiprocessor; the sums are the same in both.
inline bool wants_large_tiles(int64_t tiles, int64_t narrower, const DeviceFacts& device) {
  return narrower > 64 && tiles >= device.multiprocessors;
}

// As many blocks as there are tiles, but no more than may wait: blocks take tiles in turn.
inline int64_t blocks_for(int64_t tiles, const DeviceFacts& device) {
  const int64_t most = int64_t{8} * device.multiprocessors;
  return tiles < most ? tiles : most;
}

}  // namespace mfma
}  // namespace multigemm
