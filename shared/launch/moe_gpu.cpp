// The mixture-of-experts kernels on a GPU: device guard, workspace, launch on the caller's stream.
#include "kernels/moe/moe.h"
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

void run_activate_backward(const mg_moe_activate_problem& given) {
  const DeviceGuard guard(given.device);
  const mg_moe_activate_problem p = on_its_stream(given);
  check_gpu(moe::activate_gradient(p, p.stream), "launching moe_activate_backward");
}

}  // namespace multigemm
