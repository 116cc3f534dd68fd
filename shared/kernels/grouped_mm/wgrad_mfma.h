// Sums of outer products of the rows of each group on AMD's matrix cores: see wgrad_mfma.cuh.
#pragma once

#include <string>

#include "kernels/grouped_mm/gpu_call.h"

namespace multigemm {

// "" if this kernel can take the problem, else the reason.
std::string wgrad_mfma_refusal(const mg_grouped_mm_wgrad_problem& p, const DeviceFacts& device);

// 0, or the HIP error number.
int launch_wgrad_mfma(const mg_grouped_mm_wgrad_problem& p, const DeviceFacts& device, void* stream);

}  // namespace multigemm
