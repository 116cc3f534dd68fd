// Which kernel a call on a GPU takes: a pure function of the call's numbers and the device's, so that it can be tested
// without a GPU.
#pragma once

#include <string>

#include "kernels/grouped_mm/gpu_call.h"
#include "kernels/grouped_mm/table_gpu.h"
#include "multigemm/abi.h"

namespace multigemm {

// What is known of the group sizes.
struct SizesFacts {
  bool on_host = false;
  int64_t present = 0;  // groups with rows; only if on_host
  bool capturing = false;
  bool has_host_matmul = false;
  std::string no_blas = {};  // why there is no BLAS, if so
};

struct Choice {
  const KernelRow* row;
  bool pack_first = false;   // x is copied into rows that the kernel can read
  bool pack_second = false;  // the same for gy
  bool cuts_groups = false;  // rows of tall groups are shared out in pieces
  double microseconds = 0;   // what the model expects
};

// Throws Failure(MG_UNSUPPORTED) if the implementation asked for can't take the call.
Choice choose(const mg_grouped_mm_problem& p, const DeviceFacts& device, const SizesFacts& sizes);
Choice choose(const mg_grouped_mm_wgrad_problem& p, const DeviceFacts& device, const SizesFacts& sizes);

// The JSON text of mg_*_explain: the choice, and for each other kernel why not.
std::string explain(const mg_grouped_mm_problem& p, const DeviceFacts& device, const SizesFacts& sizes);
std::string explain(const mg_grouped_mm_wgrad_problem& p, const DeviceFacts& device, const SizesFacts& sizes);

// Elements from one packed row to the next: whole 16 bytes.
int64_t packed_row(int64_t elements, int32_t dtype);

// The problem as it is once operands lie packed at these addresses.
mg_grouped_mm_problem with_packed(const mg_grouped_mm_problem& p, bool first, bool second, const void* first_address,
                                  const void* second_address);
mg_grouped_mm_wgrad_problem with_packed(const mg_grouped_mm_wgrad_problem& p, bool first, bool second,
                                        const void* first_address, const void* second_address);

}  // namespace multigemm
