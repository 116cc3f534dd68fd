// grouped_mm_wgrad on a GPU: device guard, empty cases, choice from the table, launch on the caller's stream.
#include "kernels/grouped_mm/native_gpu.h"
#include "launch/call_gpu.h"
#include "launch/checks.h"
#include "launch/device_groups.h"
#include "launch/grouped_mm.h"
#include "launch/products_gpu.h"
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

// `known`: the device is there and may be asked.
std::string explain_on(const mg_grouped_mm_wgrad_problem& given, const DeviceFacts& device, bool known) {
  mg_grouped_mm_wgrad_problem p = given;
  (void)fold_batch(p);
  return explain(p, device, facts_of(p, given, known));
}

std::string plan_on(const mg_grouped_mm_wgrad_problem& given, const DeviceFacts& device) {
  return explain_on(given, device, false);
}

}  // namespace

void run(const mg_grouped_mm_wgrad_problem& given) {
  if (given.groups.count == 0 || given.inner == 0 || given.outer == 0 || (given.batch == 0 && !given.sum_batch)) return;
  const DeviceFacts& device = device_facts(given.device);
  const DeviceGuard guard(given.device);
  mg_grouped_mm_wgrad_problem p = on_its_stream(given);
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

  const bool counted = choice.row->kernel != Kernel::simt;
  const DeviceGroups groups(given.groups, given.rows, scale, counted, p.host, p.stream);
  p.groups = groups.get();
  const PackedRows x(choice.pack_first, operand_x(p), p.host, p.stream);
  const PackedRows gy(choice.pack_second, operand_gy(p), p.host, p.stream);
  p = with_packed(p, choice.pack_first, choice.pack_second, x.address(), gy.address());
  if (choice.row->kernel == Kernel::simt) return run_simt(p);
  const DeviceMemory room(p.host, p.stream, room_of(choice.row->kernel, p, device));
  check_gpu(launch_native(choice.row->kernel, p, device, room.as<void>()),
            (std::string("launching ") + choice.row->wgrad_name).c_str());
}

std::string plan(const mg_grouped_mm_wgrad_problem& given) {
  const DeviceFacts& device = device_facts(given.device);
  const DeviceGuard guard(given.device);
  return explain_on(given, device, true);
}

}  // namespace multigemm

extern "C" int32_t MG_NAME(mg_grouped_mm_wgrad_plan)(const mg_grouped_mm_wgrad_problem* problem,
                                                     const mg_device* device, char* text, int64_t capacity,
                                                     int64_t* length) {
  return multigemm::guarded([&] {
    multigemm::check(problem);
    multigemm::write_plan(multigemm::plan_on, *problem, device, text, capacity, length);
  });
}
