// The Hopper kernel of an expert's first product with its activation.
#pragma once

#include <string>

#include "kernels/grouped_mm/gpu_call.h"
#include "multigemm/abi_moe.h"

namespace multigemm {

// "" if the kernel can take the product and the activation of what it gives, else the reason.
std::string up_sm90_refusal(const mg_grouped_mm_problem& p, const mg_moe_activate_problem& activation,
                            const DeviceFacts& device);

// Whether the kernel takes x in the order of tokens too, and is not slower then than after a gather.
bool up_sm90_reads_tokens(const mg_grouped_mm_problem& p, const mg_moe_activate_problem& activation,
                          const DeviceFacts& device);

// 0, or the runtime's error number. The product's `out` stays as it is. `of_tokens`: x has a row for each token, and
// that of place p is permutation[p] / top_k.
int launch_up_sm90(const mg_grouped_mm_problem& p, const mg_moe_activate_problem& activation, bool of_tokens,
                   const DeviceFacts& device, void* stream);

}  // namespace multigemm
