// Products of row blocks on AMD's matrix cores: see rows_mfma.cuh.
#pragma once

#include <string>

#include "kernels/grouped_mm/gpu_call.h"

namespace multigemm {

// "" if this kernel can take the problem, else the reason.
std::string rows_mfma_refusal(const mg_grouped_mm_problem& p, const DeviceFacts& device);

// 0, or the HIP error number.
int launch_rows_mfma(const mg_grouped_mm_problem& p, const DeviceFacts& device, void* stream);

}  // namespace multigemm
