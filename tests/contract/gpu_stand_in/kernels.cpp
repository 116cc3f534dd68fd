// In place of the kernels of one architecture: they take what the test lets them, and the portable kernels compute.
#include "kernels/grouped_mm/rows_sm80.h"
#include "kernels/grouped_mm/rows_sm90.h"
#include "kernels/grouped_mm/simt.h"
#include "kernels/grouped_mm/wgrad_sm80.h"
#include "kernels/grouped_mm/wgrad_sm90.h"
#include "launch/checks.h"
#include "stand_in.h"

namespace multigemm {
namespace {

// Rows that begin at whole 16 bytes, with unit strides inside.
bool packed(const void* data, const int64_t (&stride)[3], int64_t batch, int64_t columns, int32_t dtype) {
  return reinterpret_cast<uintptr_t>(data) % 16 == 0 && stride[2] == 1 && (batch == 1 || stride[1] == columns) &&
         stride[0] >= batch * columns && stride[0] * dtype_bytes(dtype) % 16 == 0;
}

bool packed(const mg_grouped_mm_problem& p) { return packed(p.x, p.x_stride, p.batch, p.inner, p.dtype); }
bool packed(const mg_grouped_mm_wgrad_problem& p) {
  return packed(p.x, p.x_stride, p.batch, p.inner, p.dtype) && packed(p.gy, p.gy_stride, p.batch, p.outer, p.dtype);
}

template <class Problem>
std::string refusal(const char* kernel, const Problem& p) {
  const int what = stand_in::taking(kernel);
  if (what == stand_in::kNothing) return "the test lets it take nothing";
  if (p.groups.count > kMostBlockGroups) return "there are too many groups";
  return what == stand_in::kPacked && !packed(p) ? "an operand is not packed" : "";
}

int compute(const mg_grouped_mm_problem& p, int64_t* room, void* stream) { return simt::rows(p, room, stream); }
int compute(const mg_grouped_mm_wgrad_problem& p, int64_t* room, void* stream) { return simt::wgrad(p, room, stream); }

template <class Problem>
int launch(const char* kernel, const Problem& p, const DeviceFacts& device, void* stream) {
  if (const int error = stand_in::answer(kernel, stream)) return error;
  if (device.ordinal != stand_in::current_device()) return stand_in::kInvalidDevice;
  if (!refusal(kernel, p).empty() || (p.groups.flags & MG_GROUPS_ON_HOST)) return stand_in::kInvalidValue;
  if (p.rows < 1 || p.batch < 1 || p.inner < 1 || p.outer < 1 || p.groups.count < 1) return stand_in::kInvalidValue;
  auto* room = new int64_t[static_cast<size_t>(simt::room_for(p.groups.count))];
  const int error = compute(p, room, stream);
  stand_in::enqueue(stream, [room] { delete[] room; });
  return error;
}

}  // namespace

std::string rows_sm80_refusal(const mg_grouped_mm_problem& p, const DeviceFacts&) { return refusal("rows_sm80", p); }
std::string rows_sm90_refusal(const mg_grouped_mm_problem& p, const DeviceFacts&) {
  return is_half(p.dtype) ? refusal("rows_sm90", p) : "it takes halves only";
}
std::string wgrad_sm80_refusal(const mg_grouped_mm_wgrad_problem& p, const DeviceFacts&) {
  return refusal("wgrad_sm80", p);
}
std::string wgrad_sm90_refusal(const mg_grouped_mm_wgrad_problem& p, const DeviceFacts&) {
  return is_half(p.dtype) ? refusal("wgrad_sm90", p) : "it takes halves only";
}

int launch_rows_sm80(const mg_grouped_mm_problem& p, const DeviceFacts& device, void* stream) {
  return launch("rows_sm80", p, device, stream);
}
int launch_rows_sm90(const mg_grouped_mm_problem& p, const DeviceFacts& device, void* stream) {
  return launch("rows_sm90", p, device, stream);
}
int launch_wgrad_sm80(const mg_grouped_mm_wgrad_problem& p, const DeviceFacts& device, void* stream) {
  return launch("wgrad_sm80", p, device, stream);
}
int launch_wgrad_sm90(const mg_grouped_mm_wgrad_problem& p, const DeviceFacts& device, void* stream) {
  return launch("wgrad_sm90", p, device, stream);
}

}  // namespace multigemm
