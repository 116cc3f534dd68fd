// Sums of outer products of the rows of each group on sm_80 and up: see wgrad_sm80.cuh.
#pragma once

#include <string>

#include "kernels/grouped_mm/gpu_call.h"

namespace multigemm {

// "" if this kernel can take the problem, else the reason.
std::string wgrad_sm80_refusal(const mg_grouped_mm_wgrad_problem& p, const DeviceFacts& device);

// Bytes of workspace, no more than those of out: 0, or for the sums of pieces of the rows of tall groups, which a
// second launch adds up.
int64_t wgrad_sm80_room(const mg_grouped_mm_wgrad_problem& p, const DeviceFacts& device);

// 0, or the CUDA error number. `room`: that workspace, at whole 16 bytes, whatever is in it.
int launch_wgrad_sm80(const mg_grouped_mm_wgrad_problem& p, const DeviceFacts& device, void* room, void* stream);

}  // namespace multigemm
