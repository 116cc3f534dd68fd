// The mixture-of-experts kernels on a GPU: device guard, workspace, launch on the caller's stream.
#include "kernels/moe/moe.h"
#include "kernels/moe/up_gpu.h"
#include "launch/checks.h"
#include "launch/device_groups.h"
#include "launch/moe.h"
#include "runtime/device.h"

namespace multigemm {

void run_route(const mg_moe_route_problem& given) {
  const DeviceGuard guard(given.device);
  const mg_moe_route_problem p = on_its_stream(given);
  const DeviceMemory room(p.host, p.stream, moe::room_of_route(p) * static_cast<int64_t>(sizeof(int32_t)));
  check_gpu(moe::route(p, room.as<int32_t>(), p.stream), "launching moe_route");
}

void run_route_backward(const mg_moe_route_problem& given) {
  const DeviceGuard guard(given.device);
  const mg_moe_route_problem p = on_its_stream(given);
  check_gpu(moe::route_gradient(p, p.stream), "launching moe_route_backward");
}

void run_spread(const mg_moe_rows_problem& given) {
  const DeviceGuard guard(given.device);
  const mg_moe_rows_problem p = on_its_stream(given);
  check_gpu(moe::spread_rows(p, p.stream), "launching moe_spread");
}

void run_collect(const mg_moe_rows_problem& given) {
  const DeviceGuard guard(given.device);
  const mg_moe_rows_problem p = on_its_stream(given);
  check_gpu(moe::collect_rows(p, p.stream), "launching moe_collect");
}

void run_activate(const mg_moe_activate_problem& given) {
  const DeviceGuard guard(given.device);
  const mg_moe_activate_problem p = on_its_stream(given);
  check_gpu(moe::activate_rows(p, p.stream), "launching moe_activate");
}

namespace {

bool left_to_us(const mg_grouped_mm_problem& p) { return p.implementation == MG_AUTO || p.implementation == MG_NATIVE; }

}  // namespace

bool up_reads_tokens(const mg_grouped_mm_problem& p, const mg_moe_activate_problem& activation) {
  return left_to_us(p) && moe::up_reads_tokens(p, activation, device_facts(p.device));
}

void run_up(const mg_grouped_mm_problem& given, const mg_moe_activate_problem& activation, const int32_t* inverse) {
  const DeviceFacts& device = device_facts(given.device);
  const DeviceGuard guard(given.device);
  mg_grouped_mm_problem p = on_its_stream(given);
  if (inverse && !up_reads_tokens(p, activation)) {
    const DeviceMemory rows(p.host, p.stream, p.rows * p.inner * dtype_bytes(p.dtype));
    return run_up(gather_first(given, activation, inverse, rows.as<void>()), activation, nullptr);
  }
  if (!left_to_us(p) || !moe::up_refusal(p, activation, device).empty()) {
    const DeviceMemory h(p.host, p.stream, p.rows * p.outer * dtype_bytes(p.dtype));
    return run_apart(given, activation, h.as<void>());
  }
  const DeviceGroups groups(p.groups, p.rows, 1, true, p.host, p.stream);
  p.groups = groups.get();
  check_gpu(moe::launch_up(p, activation, inverse != nullptr, device, p.stream), "launching moe_up");
}

void run_activate_backward(const mg_moe_activate_problem& given) {
  const DeviceGuard guard(given.device);
  const mg_moe_activate_problem p = on_its_stream(given);
  check_gpu(moe::activate_gradient(p, p.stream), "launching moe_activate_backward");
}

}  // namespace multigemm
