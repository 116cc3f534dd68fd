// Instances and launch of the Hopper kernel of grouped_mm.
#include "kernels/grouped_mm/rows_sm90.h"

#include "kernels/grouped_mm/launch_sm90.h"
#include "kernels/grouped_mm/rows_sm90.cuh"

namespace multigemm {

using namespace sm90;

std::string rows_sm90_refusal(const mg_grouped_mm_problem& p, const DeviceFacts& device) {
  constexpr int64_t kMost = 0x7fffff00;
  if (device.major != 9 || device.minor != 0) return "needs compute capability 9.0";
  if (p.dtype != MG_BFLOAT16 && p.dtype != MG_FLOAT16) return "takes bfloat16 and float16 only";
  if (p.out_dtype == MG_FLOAT64) return "does not write float64";
  if (p.batch != 1) return "takes no B";
  if (p.groups.count > kMostBlockGroups) return "takes at most 1024 groups";
  if (p.rows > kMost || p.inner > kMost || p.outer > kMost) return "N, K or M passes 2^31";
  if (static_cast<double>(p.rows) * static_cast<double>(p.outer) > 7e13) return "N times M is too large";
  if (!aligned(p.x) || !aligned(p.w)) return "x and w must start at multiples of 16 bytes";
  if ((p.inner != 1 && p.x_stride[2] != 1) || !mappable(p.rows, p.x_stride[0]))
    return "x must be contiguous along K, its rows multiples of 16 bytes apart";
  if (!along_outer(p) && !along_inner(p))
    return "w must be contiguous along M or K, its other rows multiples of 16 bytes apart";
  if (!mappable(p.groups.count, p.w_stride[0])) return "the matrices of w must be multiples of 16 bytes apart";
  return "";
}

int launch_rows_sm90(const mg_grouped_mm_problem& p, const DeviceFacts& device, void* stream) {
  if (tensor_map_encoder() == nullptr) return static_cast<int>(cudaErrorNotSupported);
  RowsArguments a = {};
  Launch how;
  if (!prepare(&a, &how, p, device, RowsArguments::kMatrices)) return static_cast<int>(cudaErrorInvalidValue);
  return launch(a, how, p.dtype, stream);
}

}  // namespace multigemm
