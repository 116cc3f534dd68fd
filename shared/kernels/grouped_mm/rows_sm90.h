// The Hopper kernel of grouped_mm in half precision, as the choice of kernels sees it.
#pragma once

#include <string>

#include "kernels/grouped_mm/gpu_call.h"

namespace multigemm {

// "" if the kernel can take the problem, else the reason. Looks at numbers, strides and alignments only.
std::string rows_sm90_refusal(const mg_grouped_mm_problem& p, const DeviceFacts& device);

// 0, or the runtime's error number.
int launch_rows_sm90(const mg_grouped_mm_problem& p, const DeviceFacts& device, void* stream);

}  // namespace multigemm
