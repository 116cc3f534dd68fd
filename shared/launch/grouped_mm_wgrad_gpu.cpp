// grouped_mm_wgrad on a GPU: device guard, empty cases, choice from the table, launch on the caller's stream.
#include <optional>

#include "blas/blas_gpu.h"
#include "kernels/grouped_mm/simt.h"
#include "kernels/grouped_mm/wgrad_sm80.h"
#include "kernels/grouped_mm/wgrad_sm90.h"
#include "launch/checks.h"
#include "launch/choose_gpu.h"
#include "launch/device_groups.h"
#include "launch/grouped_mm.h"
#include "launch/products_gpu.h"
#include "launch/text.h"
#include "runtime/status.h"

namespace multigemm {
namespace {

// Summed over B too, the entries of B are more rows of the same product. Returns how many rows each row became.
int64_t fold_batch(mg_grouped_mm_wgrad_problem& p) {
  const int64_t batch = p.batch;
  if (batch <= 1 || !p.sum_batch || p.x_stride[0] != batch * p.x_stride[1] || p.gy_stride[0] != batch * p.gy_stride[1])
    return 1;
  p.rows *= batch;
  p.batch = 1;
  p.sum_batch = 0;
  p.x_stride[0] = p.x_stride[1];
  p.gy_stride[0] = p.gy_stride[1];
  return batch;
}

SizesFacts facts_of(const mg_grouped_mm_wgrad_problem& p, const mg_grouped_mm_wgrad_problem& given, bool asks_stream) {
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

void run_simt(const mg_grouped_mm_wgrad_problem& p) {
  const DeviceMemory room(p.host, p.stream, simt::room_for(p.groups.count) * static_cast<int64_t>(sizeof(int64_t)));
  check_gpu(simt::wgrad(p, room.as<int64_t>(), p.stream), "launching wgrad_simt");
}

}  // namespace

void run(const mg_grouped_mm_wgrad_problem& given) {
  if (given.groups.count == 0 || given.inner == 0 || given.outer == 0 || (given.batch == 0 && !given.sum_batch)) return;
  const DeviceFacts& device = device_facts(given.device);
  const DeviceGuard guard(given.device);
  mg_grouped_mm_wgrad_problem p = given;
  if (p.rows == 0 || p.batch == 0) {  // sums over nothing
    const NoRows none(p.groups.count, p.host, p.stream);
    p.groups = none.get();
    return run_simt(p);
  }
  const int64_t scale = fold_batch(p);
  const Choice choice = choose(p, device, facts_of(p, given, true));
  if (choice.row->kernel == Kernel::blas || choice.row->kernel == Kernel::torch)
    return wgrad_by_products(p, host_groups(given.groups, given.rows, scale, p.host, p.stream), device,
                             choice.row->kernel == Kernel::torch);

  const DeviceGroups groups(given.groups, given.rows, scale, p.host, p.stream);
  p.groups = groups.get();
  const int64_t bytes = dtype_bytes(p.dtype);
  std::optional<DeviceMemory> x, gy;
  auto pack = [&](std::optional<DeviceMemory>& memory, const void* from, const int64_t* stride, int64_t columns,
                  const char* what) {
    const int64_t row = packed_row(p.batch * columns, p.dtype);
    memory.emplace(p.host, p.stream, p.rows * row * bytes);
    check_gpu(simt::pack({from,
                          {stride[0], stride[1], stride[2]},
                          memory->as<void>(),
                          row,
                          p.rows,
                          p.batch,
                          columns,
                          static_cast<int>(bytes)},
                         p.stream),
              what);
  };
  if (choice.pack_first) pack(x, p.x, p.x_stride, p.inner, "the kernel that copies x");
  if (choice.pack_second) pack(gy, p.gy, p.gy_stride, p.outer, "the kernel that copies gy");
  p = with_packed(p, choice.pack_first, choice.pack_second, x ? x->as<void>() : nullptr, gy ? gy->as<void>() : nullptr);
  switch (choice.row->kernel) {
    case Kernel::sm90: return check_gpu(launch_wgrad_sm90(p, device, p.stream), "launching wgrad_sm90");
    case Kernel::sm80: return check_gpu(launch_wgrad_sm80(p, device, p.stream), "launching wgrad_sm80");
    default: return run_simt(p);
  }
}

std::string plan_on(const mg_grouped_mm_wgrad_problem& given, const DeviceFacts& device, bool asks_stream) {
  mg_grouped_mm_wgrad_problem p = given;
  (void)fold_batch(p);
  return explain(p, device, facts_of(p, given, asks_stream));
}

std::string plan(const mg_grouped_mm_wgrad_problem& given) {
  const DeviceFacts& device = device_facts(given.device);
  const DeviceGuard guard(given.device);
  return plan_on(given, device, true);
}

}  // namespace multigemm

extern "C" int32_t MG_NAME(mg_grouped_mm_wgrad_plan)(const mg_grouped_mm_wgrad_problem* problem,
                                                     const mg_device* device, char* text, int64_t capacity,
                                                     int64_t* length) {
  return multigemm::guarded([&] {
    multigemm::check(problem);
    if (!device) throw multigemm::Failure(MG_INVALID_ARGUMENT, "device is null");
    const multigemm::DeviceFacts facts{
        0, device->major, device->minor, device->multiprocessors, device->shared_bytes, device->l2_bytes};
    multigemm::copy_text(multigemm::plan_on(*problem, facts, false), text, capacity, length);
  });
}
