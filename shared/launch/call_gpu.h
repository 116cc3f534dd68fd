// What both operators do with a call on a GPU: facts for the choice, copies of operands, the portable kernels.
#pragma once

#include <string>

#include "blas/blas_gpu.h"
#include "launch/choose_gpu.h"
#include "launch/groups.h"
#include "launch/text.h"
#include "multigemm/abi.h"
#include "runtime/device.h"

namespace multigemm {

// `given` is the call as it came, `p` what it became; without `asks_stream` nothing of a device is asked.
template <class Problem>
SizesFacts facts_of(const Problem& p, const Problem& given, bool asks_stream) {
  SizesFacts facts;
  facts.on_host = (p.groups.flags & MG_GROUPS_ON_HOST) != 0;
  if (facts.on_host) facts.present = static_cast<int64_t>(partition(given.groups, given.rows).blocks.size());
  // Asked only where the answer matters: it costs host time.
  const bool by_products = p.implementation == MG_BLAS || p.implementation == MG_TORCH;
  if (by_products && !facts.on_host && asks_stream) facts.capturing = is_capturing(p.stream);
  facts.has_host_matmul = p.host && p.host->matmul;
  if (asks_stream) facts.no_blas = blas_refusal();
  return facts;
}

// An operand [N, B, C] anywhere in memory; strides in elements.
struct Operand {
  const void* data;
  int64_t stride[3];
  int64_t rows, batch, columns;
  int32_t dtype;
};

inline Operand operand_x(const mg_grouped_mm_problem& p) {
  return {p.x, {p.x_stride[0], p.x_stride[1], p.x_stride[2]}, p.rows, p.batch, p.inner, p.dtype};
}
inline Operand operand_x(const mg_grouped_mm_wgrad_problem& p) {
  return {p.x, {p.x_stride[0], p.x_stride[1], p.x_stride[2]}, p.rows, p.batch, p.inner, p.dtype};
}
inline Operand operand_gy(const mg_grouped_mm_wgrad_problem& p) {
  return {p.gy, {p.gy_stride[0], p.gy_stride[1], p.gy_stride[2]}, p.rows, p.batch, p.outer, p.dtype};
}

// Copies it to `to`, into rows of `row` elements of the dtype `as`: the operand's own, or float32 for halves.
void copy_operand(const Operand& from, void* to, int64_t row, int32_t as, void* stream);

// A copy in rows of whole 16 bytes, where it is wanted.
class PackedRows {
 public:
  PackedRows(bool wanted, const Operand& from, const mg_host* host, void* stream);
  const void* address() const { return memory_.as<void>(); }

 private:
  DeviceMemory memory_;
};

// The portable kernels, with their workspace.
void run_simt(const mg_grouped_mm_problem& p);
void run_simt(const mg_grouped_mm_wgrad_problem& p);

// The body of mg_*_plan; `plan_on` explains a call for a device's facts.
template <class Problem>
void write_plan(std::string (*plan_on)(const Problem&, const DeviceFacts&), const Problem& problem,
                const mg_device* device, char* text, int64_t capacity, int64_t* length) {
  if (!device) throw Failure(MG_INVALID_ARGUMENT, "device is null");
  const DeviceFacts facts{
      0, device->major, device->minor, device->multiprocessors, device->shared_bytes, device->l2_bytes};
  copy_text(plan_on(problem, facts), text, capacity, length);
}

}  // namespace multigemm
