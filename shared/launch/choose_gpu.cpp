#include "launch/choose_gpu.h"

#include <algorithm>
#include <cstdio>

#include "kernels/grouped_mm/native_gpu.h"
#include "launch/checks.h"
#include "launch/rates_gpu.h"
#include "runtime/status.h"

namespace multigemm {
namespace {

// --- the model ------------------------------------------------------------------------------------------------------
// Time = launches + the larger of FLOPs over the kernel's rate and bytes over the memory's: rates_gpu.h.
constexpr double kLaunch = 3.0;  // microseconds for one more launch of a call

struct Work {
  double flops, bytes;
};

double number(int64_t value) { return static_cast<double>(value); }

Work work_of(const mg_grouped_mm_problem& p) {
  const double rows = number(p.rows) * number(p.batch), matrices = number(std::min(p.groups.count, p.rows));
  const double w = matrices * number(p.w_stride[1] == 0 ? 1 : p.batch) * number(p.inner) * number(p.outer);
  return {2 * rows * number(p.inner) * number(p.outer),
          (rows * number(p.inner) + w) * dtype_bytes(p.dtype) + rows * number(p.outer) * dtype_bytes(p.out_dtype)};
}

Work work_of(const mg_grouped_mm_wgrad_problem& p) {
  const double rows = number(p.rows) * number(p.batch);
  const double out = number(p.groups.count) * number(p.sum_batch ? 1 : p.batch) * number(p.inner) * number(p.outer);
  return {2 * rows * number(p.inner) * number(p.outer),
          rows * number(p.inner + p.outer) * dtype_bytes(p.dtype) + out * dtype_bytes(p.out_dtype)};
}

double packed_bytes(const mg_grouped_mm_problem& p, bool first, bool) {
  return first ? 2 * number(p.rows) * number(p.batch) * number(p.inner) * dtype_bytes(p.dtype) : 0;
}

double packed_bytes(const mg_grouped_mm_wgrad_problem& p, bool first, bool second) {
  return 2 * number(p.rows) * number(p.batch) * number((first ? p.inner : 0) + (second ? p.outer : 0)) *
         dtype_bytes(p.dtype);
}

template <class Problem>
double estimate(Kernel kernel, const Problem& p, const DeviceFacts& device, double copied, double launches) {
  const Work work = work_of(p);
  const Chip& chip = chip_of(device);
  const double scale = device.multiprocessors / chip.multiprocessors;
  return launches * kLaunch +
         std::max(work.flops / (rate(chip, kernel, p.dtype, p.precision) * 1e6 * scale),
                  work.bytes / (chip.bytes_per_microsecond * scale)) +
         copied / (chip.bytes_per_microsecond * scale);
}

bool cuts_groups(Kernel, const mg_grouped_mm_problem&, const DeviceFacts&) { return false; }
bool cuts_groups(Kernel kernel, const mg_grouped_mm_wgrad_problem& p, const DeviceFacts& device) {
  return room_of(kernel, p, device) > 0;
}

// --- who can take the call ------------------------------------------------------------------------------------------

// Rows that one product of a library may have to take.
int64_t rows_together(const mg_grouped_mm_problem& p) { return p.rows; }
int64_t rows_together(const mg_grouped_mm_wgrad_problem& p) { return p.sum_batch ? p.rows * p.batch : p.rows; }

template <class Problem>
std::string products_refusal(Kernel kernel, const Problem& p, const SizesFacts& sizes) {
  if (kernel == Kernel::torch && !sizes.has_host_matmul) return "the caller lends no matrix product of its own";
  if (kernel == Kernel::blas && !sizes.no_blas.empty()) return sizes.no_blas;
  if (!sizes.on_host && sizes.capturing)
    return "it needs the group sizes on the host, and a graph is being captured; give them as a CPU tensor";
  if (std::max({rows_together(p), p.inner, p.outer}) > 0x7fffffff) return "a size passes 2^31 - 1";
  return "";
}

struct Found {
  std::string reason;  // empty: `choice` stands
  Choice choice;
};

template <class Problem>
Found look_at(const KernelRow& row, const Problem& p, const DeviceFacts& device, const SizesFacts& sizes) {
  Found found{"", {&row}};
  if (row.kernel == Kernel::simt) {
    found.choice.microseconds = estimate(row.kernel, p, device, 0, 2);
    return found;
  }
  if (row.kernel == Kernel::blas || row.kernel == Kernel::torch) {
    found.reason = products_refusal(row.kernel, p, sizes);
    found.choice.microseconds = estimate(Kernel::blas, p, device, 0, sizes.on_host ? number(sizes.present) : 100);
    return found;
  }
  found.reason = refusal_of(row.kernel, p, device);
  found.choice.cuts_groups = cuts_groups(row.kernel, p, device);
  const int launches = (p.groups.count > kMostBlockGroups ? 2 : 1) + (found.choice.cuts_groups ? 1 : 0);
  found.choice.microseconds = estimate(row.kernel, p, device, 0, launches);
  if (found.reason.empty()) return found;
  // Would copies help? An address that no allocation has stands for theirs.
  const void* aligned = reinterpret_cast<const void*>(uintptr_t{1} << 20);
  for (const auto& [first, second] : {std::pair(true, false), std::pair(false, true), std::pair(true, true)}) {
    if (second && std::is_same_v<Problem, mg_grouped_mm_problem>) break;
    if (!refusal_of(row.kernel, with_packed(p, first, second, aligned, aligned), device).empty()) continue;
    found.reason.clear();
    found.choice.pack_first = first;
    found.choice.pack_second = second;
    found.choice.microseconds =
        estimate(row.kernel, p, device, packed_bytes(p, first, second), launches + 1 + (first && second));
    break;
  }
  return found;
}

// Kernels that may be taken when `implementation` is asked for. "native" is the best of this library's own.
// The reason, if not.
template <class Problem>
std::string not_offered(const KernelRow& row, const Problem& p, const SizesFacts& sizes) {
  const int32_t asked = p.implementation;
  const bool own = asked == MG_NATIVE && row.implementation == MG_SIMT;
  if (asked != MG_AUTO) return own || row.implementation == asked ? "" : "another implementation was asked for";
  if (row.kernel == Kernel::torch) return "PyTorch's product runs only when asked for";
  if (row.kernel != Kernel::blas) return "";
  if (!sizes.on_host) return "it needs the group sizes on the host";
  return is_half(p.dtype) && p.out_dtype != p.dtype ? "it would widen the operands first" : "";
}

const KernelRow& simt_row() {
  for (const KernelRow& row : kKernels)
    if (row.kernel == Kernel::simt) return row;
  throw Failure(MG_INTERNAL, "the portable kernel is missing from the table");
}

// Zeros or the bias alone are written, whatever is asked for.
template <class Problem>
bool sums_nothing(const Problem& p) {
  return p.rows == 0 || p.batch == 0 || p.outer == 0 || p.inner == 0 || p.groups.count == 0;
}

template <class Problem>
Choice best(const Problem& p, const DeviceFacts& device, const SizesFacts& sizes) {
  if (sums_nothing(p)) return {&simt_row()};
  Choice chosen{nullptr};
  std::string reason;
  for (const KernelRow& row : kKernels) {
    if (!not_offered(row, p, sizes).empty()) continue;
    Found found = look_at(row, p, device, sizes);
    if (!found.reason.empty())
      reason = found.reason;
    else if (!chosen.row || found.choice.microseconds < chosen.microseconds)
      chosen = found.choice;
  }
  if (!chosen.row)
    throw Failure(MG_UNSUPPORTED, std::string("implementation \"") + implementation_name(p.implementation) +
                                      "\" can't take this call: " + reason + "; leave the implementation out");
  return chosen;
}

std::string microseconds_text(double value) {
  char text[32];
  std::snprintf(text, sizeof text, "%.3g us", value);
  return text;
}

template <class Problem>
std::string explain_call(const Problem& p, const DeviceFacts& device, const SizesFacts& sizes) {
  constexpr bool is_wgrad = std::is_same_v<Problem, mg_grouped_mm_wgrad_problem>;
  auto name = [&](const KernelRow& row) { return is_wgrad ? row.wgrad_name : row.rows_name; };
  const Choice choice = best(p, device, sizes);
  const bool nothing = sums_nothing(p);
  std::string why = nothing ? "there is nothing to sum: at most zeros or the bias are written"
                            : "expected to take " + microseconds_text(choice.microseconds);
  if (choice.pack_first) why += "; x is copied first into rows that the kernel can read";
  if (choice.pack_second) why += "; gy is copied first into rows that the kernel can read";
  if (choice.cuts_groups) why += "; tall groups are cut into pieces of rows, whose sums are added in a second launch";
  if ((choice.row->kernel == Kernel::blas || choice.row->kernel == Kernel::torch) && !sizes.on_host)
    why += "; the group sizes are read back from the device, which synchronises";
  std::string text = std::string("{\"operator\": \"grouped_mm") + (is_wgrad ? "_wgrad" : "") + "\", \"kernel\": \"" +
                     name(*choice.row) + "\", \"implementation\": \"" +
                     implementation_name(choice.row->implementation) + "\", \"why\": \"" + why + "\", \"others\": [";
  bool first = true;
  for (const KernelRow& row : kKernels) {
    if (&row == choice.row) continue;
    const Found found = nothing ? Found{"there is nothing to sum", {&row}} : look_at(row, p, device, sizes);
    std::string reason = found.reason;
    if (reason.empty()) reason = not_offered(row, p, sizes);
    if (reason.empty()) reason = "expected to take " + microseconds_text(found.choice.microseconds);
    text += std::string(first ? "" : ", ") + "{\"kernel\": \"" + name(row) + "\", \"implementation\": \"" +
            implementation_name(row.implementation) + "\", \"why_not\": \"" + reason + "\"}";
    first = false;
  }
  return text + "]}";
}

void point_at_rows(const void*& data, int64_t (&stride)[3], const void* address, int64_t batch, int64_t columns,
                   int32_t dtype) {
  data = address;
  stride[0] = packed_row(batch * columns, dtype);
  stride[1] = columns;
  stride[2] = 1;
}

}  // namespace

int64_t packed_row(int64_t elements, int32_t dtype) {
  const int64_t line = 16 / dtype_bytes(dtype);
  return (elements + line - 1) / line * line;
}

mg_grouped_mm_problem with_packed(const mg_grouped_mm_problem& p, bool first, bool, const void* address, const void*) {
  mg_grouped_mm_problem packed = p;
  if (first) point_at_rows(packed.x, packed.x_stride, address, p.batch, p.inner, p.dtype);
  return packed;
}

mg_grouped_mm_wgrad_problem with_packed(const mg_grouped_mm_wgrad_problem& p, bool first, bool second,
                                        const void* first_address, const void* second_address) {
  mg_grouped_mm_wgrad_problem packed = p;
  if (first) point_at_rows(packed.x, packed.x_stride, first_address, p.batch, p.inner, p.dtype);
  if (second) point_at_rows(packed.gy, packed.gy_stride, second_address, p.batch, p.outer, p.dtype);
  return packed;
}

Choice choose(const mg_grouped_mm_problem& p, const DeviceFacts& device, const SizesFacts& sizes) {
  return best(p, device, sizes);
}
Choice choose(const mg_grouped_mm_wgrad_problem& p, const DeviceFacts& device, const SizesFacts& sizes) {
  return best(p, device, sizes);
}

std::string explain(const mg_grouped_mm_problem& p, const DeviceFacts& device, const SizesFacts& sizes) {
  return explain_call(p, device, sizes);
}
std::string explain(const mg_grouped_mm_wgrad_problem& p, const DeviceFacts& device, const SizesFacts& sizes) {
  return explain_call(p, device, sizes);
}

}  // namespace multigemm
