// The kernel of an expert's first product with its activation, where the vendor's architectures have one.
#pragma once

#include <string>

#include "kernels/grouped_mm/gpu_call.h"
#include "multigemm/abi_moe.h"
#if !defined(MG_HIP)
#include "kernels/moe/up_sm90.h"
#endif

namespace multigemm {
namespace moe {

#if defined(MG_HIP)
inline std::string up_refusal(const mg_grouped_mm_problem&, const mg_moe_activate_problem&, const DeviceFacts&) {
  return "there is none for this vendor";
}
inline bool up_reads_tokens(const mg_grouped_mm_problem&, const mg_moe_activate_problem&, const DeviceFacts&) {
  return false;
}
inline int launch_up(const mg_grouped_mm_problem&, const mg_moe_activate_problem&, bool, const DeviceFacts&, void*) {
  return 1;  // never asked for
}
#else
inline std::string up_refusal(const mg_grouped_mm_problem& p, const mg_moe_activate_problem& activation,
                              const DeviceFacts& device) {
  return up_sm90_refusal(p, activation, device);
}
inline bool up_reads_tokens(const mg_grouped_mm_problem& p, const mg_moe_activate_problem& activation,
                            const DeviceFacts& device) {
  return up_sm90_reads_tokens(p, activation, device);
}
inline int launch_up(const mg_grouped_mm_problem& p, const mg_moe_activate_problem& activation, bool of_tokens,
                     const DeviceFacts& device, void* stream) {
  return launch_up_sm90(p, activation, of_tokens, device, stream);
}
#endif

}  // namespace moe
}  // namespace multigemm
