// The weight gradient on Hopper's warpgroup matrix units; the kernel is in wgrad_sm90.cuh.
#pragma once

#include <string>

#include "kernels/grouped_mm/gpu_call.h"

namespace multigemm {

// "" if the kernel can take the problem, else the reason. Reads numbers, strides and alignments only.
std::string wgrad_sm90_refusal(const mg_grouped_mm_wgrad_problem& p, const DeviceFacts& device);

// 0, or the CUDA error number. One launch; never synchronises, allocates nothing.
int launch_wgrad_sm90(const mg_grouped_mm_wgrad_problem& p, const DeviceFacts& device, void* stream);

}  // namespace multigemm
