// grouped_mm on a GPU: device guard, empty cases, choice from the table, launch on the caller's stream.
#include <optional>

#include "blas/blas_gpu.h"
#include "kernels/grouped_mm/rows_sm80.h"
#include "kernels/grouped_mm/rows_sm90.h"
#include "kernels/grouped_mm/simt.h"
#include "launch/checks.h"
#include "launch/choose_gpu.h"
#include "launch/device_groups.h"
#include "launch/grouped_mm.h"
#include "launch/products_gpu.h"
#include "launch/text.h"
#include "runtime/status.h"

namespace multigemm {
namespace {

// With one w and bias for all of B, the entries of B are more rows of the same product. Returns how many rows each
// row became.
int64_t fold_batch(mg_grouped_mm_problem& p) {
  const int64_t batch = p.batch;
  if (batch <= 1 || p.w_stride[1] != 0 || (p.bias && p.bias_stride[1] != 0) || p.x_stride[0] != batch * p.x_stride[1] ||
      p.out_stride[0] != batch * p.out_stride[1])
    return 1;
  p.rows *= batch;
  p.batch = 1;
  p.x_stride[0] = p.x_stride[1];
  p.out_stride[0] = p.out_stride[1];
  return batch;
}

bool by_products(const mg_grouped_mm_problem& p) { return p.implementation == MG_BLAS || p.implementation == MG_TORCH; }

SizesFacts facts_of(const mg_grouped_mm_problem& p, const mg_grouped_mm_problem& given, bool asks_stream) {
  SizesFacts facts;
  facts.on_host = (p.groups.flags & MG_GROUPS_ON_HOST) != 0;
  if (facts.on_host) facts.present = static_cast<int64_t>(partition(given.groups, given.rows).blocks.size());
  // Asked only where the answer matters: it costs host time.
  if (by_products(p) && !facts.on_host && asks_stream) facts.capturing = is_capturing(p.stream);
  facts.has_host_matmul = p.host && p.host->matmul;
  if (asks_stream) facts.no_blas = blas_refusal();
  return facts;
}

}  // namespace

void run(const mg_grouped_mm_problem& given) {
  if (given.rows == 0 || given.batch == 0 || given.outer == 0) return;
  const DeviceFacts& device = device_facts(given.device);
  const DeviceGuard guard(given.device);
  mg_grouped_mm_problem p = given;
  const int64_t scale = fold_batch(p);
  const Choice choice = choose(p, device, facts_of(p, given, true));
  if (choice.row->kernel == Kernel::blas || choice.row->kernel == Kernel::torch)
    return rows_by_products(p, host_groups(given.groups, given.rows, scale, p.host, p.stream), device,
                            choice.row->kernel == Kernel::torch);

  const DeviceGroups groups(given.groups, given.rows, scale, p.host, p.stream);
  p.groups = groups.get();
  std::optional<DeviceMemory> packed;
  if (choice.pack_first) {
    const int64_t row = packed_row(p.batch * p.inner, p.dtype), bytes = dtype_bytes(p.dtype);
    packed.emplace(p.host, p.stream, p.rows * row * bytes);
    check_gpu(simt::pack({p.x,
                          {p.x_stride[0], p.x_stride[1], p.x_stride[2]},
                          packed->as<void>(),
                          row,
                          p.rows,
                          p.batch,
                          p.inner,
                          static_cast<int>(bytes)},
                         p.stream),
              "the kernel that copies x");
    p = with_packed(p, true, false, packed->as<void>(), nullptr);
  }
  switch (choice.row->kernel) {
    case Kernel::sm90: return check_gpu(launch_rows_sm90(p, device, p.stream), "launching rows_sm90");
    case Kernel::sm80: return check_gpu(launch_rows_sm80(p, device, p.stream), "launching rows_sm80");
    default: {
      const DeviceMemory room(p.host, p.stream, simt::room_for(p.groups.count) * static_cast<int64_t>(sizeof(int64_t)));
      return check_gpu(simt::rows(p, room.as<int64_t>(), p.stream), "launching rows_simt");
    }
  }
}

std::string plan_on(const mg_grouped_mm_problem& given, const DeviceFacts& device, bool asks_stream) {
  mg_grouped_mm_problem p = given;
  (void)fold_batch(p);
  return explain(p, device, facts_of(p, given, asks_stream));
}

std::string plan(const mg_grouped_mm_problem& given) {
  const DeviceFacts& device = device_facts(given.device);
  const DeviceGuard guard(given.device);
  return plan_on(given, device, true);
}

}  // namespace multigemm

extern "C" int32_t MG_NAME(mg_grouped_mm_plan)(const mg_grouped_mm_problem* problem, const mg_device* device,
                                               char* text, int64_t capacity, int64_t* length) {
  return multigemm::guarded([&] {
    multigemm::check(problem);
    if (!device) throw multigemm::Failure(MG_INVALID_ARGUMENT, "device is null");
    const multigemm::DeviceFacts facts{
        0, device->major, device->minor, device->multiprocessors, device->shared_bytes, device->l2_bytes};
    multigemm::copy_text(multigemm::plan_on(*problem, facts, false), text, capacity, length);
  });
}
