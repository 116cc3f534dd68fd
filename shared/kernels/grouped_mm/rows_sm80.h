// Rows times their group's matrix on sm_80 and up: see rows_sm80.cuh.
#pragma once

#include <string>

#include "kernels/grouped_mm/gpu_call.h"

namespace multigemm {

// "" if this kernel can take the problem, else the reason.
std::string rows_sm80_refusal(const mg_grouped_mm_problem& p, const DeviceFacts& device);

// 0, or the CUDA error number.
int launch_rows_sm80(const mg_grouped_mm_problem& p, const DeviceFacts& device, void* stream);

}  // namespace multigemm
