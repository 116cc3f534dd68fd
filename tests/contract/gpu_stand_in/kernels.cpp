// In place of the kernels of one architecture: they take what the test lets them, and the portable kernels compute.
#include <cstring>

#include "kernels/grouped_mm/rows_sm80.h"
#include "kernels/grouped_mm/rows_sm90.h"
#include "kernels/grouped_mm/simt.h"
#include "kernels/grouped_mm/wgrad_sm80.h"
#include "kernels/grouped_mm/wgrad_sm90.h"
#include "kernels/moe/up_sm90.h"
#include "launch/checks.h"
#include "stand_in.h"

namespace multigemm {
namespace {

constexpr int64_t kCutRows = 100;  // from so many on, wgrad_sm80 asks for a workspace

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
  if (p.groups.count > kMostBlockGroups && kernel == std::string("rows_sm90")) return "there are too many groups";
  return what == stand_in::kPacked && !packed(p) ? "an operand is not packed" : "";
}

int compute(const mg_grouped_mm_problem& p, int64_t* room, void* stream) { return simt::rows(p, room, stream); }
int compute(const mg_grouped_mm_wgrad_problem& p, int64_t* room, void* stream) { return simt::wgrad(p, room, stream); }

// Ends of more groups than a block counts come with the row tiles up to and with each group, of two heights.
void check_counts(const mg_groups& groups) {
  const auto* ends = static_cast<const int32_t*>(groups.data);
  for (int which = 0; which < 2; ++which) {
    const int32_t* tiles = ends + (which + 1) * groups.count;
    const int height = kCountedRows << which;
    int32_t through = 0;
    for (int64_t g = 0; g < groups.count; ++g) {
      const int32_t rows = ends[g] - (g > 0 ? ends[g - 1] : 0);
      through += (rows + height - 1) / height;
      if (rows < 0 || tiles[g] != through) return stand_in::complain();
    }
  }
}

template <class Problem>
int launch(const char* kernel, const Problem& p, const DeviceFacts& device, void* stream) {
  if (const int error = stand_in::answer(kernel, stream)) return error;
  if (device.ordinal != stand_in::current_device()) return stand_in::kInvalidDevice;
  if (!refusal(kernel, p).empty() || (p.groups.flags & MG_GROUPS_ON_HOST)) return stand_in::kInvalidValue;
  if (!groups_fit(p.groups)) return stand_in::kInvalidValue;
  if (p.groups.count > kMostBlockGroups) stand_in::enqueue(stream, [p] { check_counts(p.groups); });
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
// Some bytes, which the launch writes.
int64_t wgrad_sm80_room(const mg_grouped_mm_wgrad_problem& p, const DeviceFacts&) {
  return p.rows >= kCutRows ? 48 : 0;
}
int launch_wgrad_sm80(const mg_grouped_mm_wgrad_problem& p, const DeviceFacts& device, void* room, void* stream) {
  if ((p.rows >= kCutRows) != (room != nullptr)) return stand_in::kInvalidValue;
  if (room) stand_in::enqueue(stream, [room] { std::memset(room, 0, 48); });
  return launch("wgrad_sm80", p, device, stream);
}
int launch_wgrad_sm90(const mg_grouped_mm_wgrad_problem& p, const DeviceFacts& device, void* stream) {
  return launch("wgrad_sm90", p, device, stream);
}

// There is none here: the product and the activation are launched apart.
std::string up_sm90_refusal(const mg_grouped_mm_problem&, const mg_moe_activate_problem&, const DeviceFacts&) {
  return "no stand-in takes a product with its activation";
}
bool up_sm90_reads_tokens(const mg_grouped_mm_problem&, const mg_moe_activate_problem&, const DeviceFacts&) {
  return false;
}
int launch_up_sm90(const mg_grouped_mm_problem&, const mg_moe_activate_problem&, bool, const DeviceFacts&, void*) {
  return stand_in::kInvalidValue;
}

}  // namespace multigemm
