// The kernels of one architecture that a GPU backend has, by their row of the table; room_of: bytes of workspace, for
// the sums of pieces of tall groups, which then take another launch.
#pragma once

#include <string>

#include "kernels/grouped_mm/table_gpu.h"
#if defined(MG_HIP)
#include "kernels/grouped_mm/rows_mfma.h"
#include "kernels/grouped_mm/wgrad_mfma.h"
#else
#include "kernels/grouped_mm/rows_sm80.h"
#include "kernels/grouped_mm/rows_sm90.h"
#include "kernels/grouped_mm/wgrad_sm80.h"
#include "kernels/grouped_mm/wgrad_sm90.h"
#endif

namespace multigemm {

#if defined(MG_HIP)

inline std::string refusal_of(Kernel, const mg_grouped_mm_problem& p, const DeviceFacts& device) {
  return rows_mfma_refusal(p, device);
}
inline std::string refusal_of(Kernel, const mg_grouped_mm_wgrad_problem& p, const DeviceFacts& device) {
  return wgrad_mfma_refusal(p, device);
}
inline int launch_native(Kernel, const mg_grouped_mm_problem& p, const DeviceFacts& device) {
  return launch_rows_mfma(p, device, p.stream);
}
inline int64_t room_of(Kernel, const mg_grouped_mm_wgrad_problem&, const DeviceFacts&) { return 0; }
inline int launch_native(Kernel, const mg_grouped_mm_wgrad_problem& p, const DeviceFacts& device, void*) {
  return launch_wgrad_mfma(p, device, p.stream);
}

#else

inline std::string refusal_of(Kernel kernel, const mg_grouped_mm_problem& p, const DeviceFacts& device) {
  return kernel == Kernel::sm90 ? rows_sm90_refusal(p, device) : rows_sm80_refusal(p, device);
}
inline std::string refusal_of(Kernel kernel, const mg_grouped_mm_wgrad_problem& p, const DeviceFacts& device) {
  return kernel == Kernel::sm90 ? wgrad_sm90_refusal(p, device) : wgrad_sm80_refusal(p, device);
}
inline int launch_native(Kernel kernel, const mg_grouped_mm_problem& p, const DeviceFacts& device) {
  return kernel == Kernel::sm90 ? launch_rows_sm90(p, device, p.stream) : launch_rows_sm80(p, device, p.stream);
}
inline int64_t room_of(Kernel kernel, const mg_grouped_mm_wgrad_problem& p, const DeviceFacts& device) {
  return kernel == Kernel::sm80 ? wgrad_sm80_room(p, device) : 0;
}
inline int launch_native(Kernel kernel, const mg_grouped_mm_wgrad_problem& p, const DeviceFacts& device, void* room) {
  return kernel == Kernel::sm90 ? launch_wgrad_sm90(p, device, p.stream) : launch_wgrad_sm80(p, device, room, p.stream);
}

#endif

}  // namespace multigemm
