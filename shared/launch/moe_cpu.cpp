// The mixture-of-experts kernels on the CPU: the source of the GPU's, compiled for the host.
#include "kernels/moe/activate.cuh"
#include "kernels/moe/route.cuh"
#include "kernels/moe/rows.cuh"
#include "launch/checks.h"
#include "launch/moe.h"

namespace multigemm {
namespace {

double size_of(int64_t rows, int64_t width) { return static_cast<double>(rows) * static_cast<double>(width); }

void check_host(int error) {
  if (error) throw Failure(MG_INTERNAL, "a kernel of the host failed");
}

}  // namespace

void run_route(const mg_moe_route_problem& p) {
  const Host host(p.host, size_of(p.tokens, p.experts * (p.logits ? p.top_k : 1) + (p.x ? p.width * p.top_k : 0)));
  const Workspace room(host, moe::route_room(p) * static_cast<int64_t>(sizeof(int32_t)));
  check_host(moe::launch_route(p, room.at<int32_t>(0), {&host}));
}

void run_route_backward(const mg_moe_route_problem& p) {
  const Host host(p.host, 4 * size_of(p.tokens, p.experts));
  check_host(moe::launch_route_backward(p, {&host}));
}

void run_spread(const mg_moe_rows_problem& p) {
  const Host host(p.host, size_of(p.tokens * p.top_k, p.width));
  check_host(moe::launch_spread(p, {&host}));
}

void run_collect(const mg_moe_rows_problem& p) {
  const Host host(p.host, size_of(p.tokens * p.top_k, p.width));
  check_host(moe::launch_collect(p, {&host}));
}

void run_activate(const mg_moe_activate_problem& p) {
  const Host host(p.host, 8 * size_of(p.tokens * p.top_k, p.width));
  check_host(moe::launch_activate(p, {&host}));
}

void run_up(const mg_grouped_mm_problem& product, const mg_moe_activate_problem& activation, const int32_t* inverse) {
  const Host host(product.host, 0);
  const int64_t bytes = dtype_bytes(product.dtype);
  const Workspace rows(host, inverse ? product.rows * product.inner * bytes : 0);
  const Workspace h(host, product.rows * product.outer * bytes);
  run_apart(inverse ? gather_first(product, activation, inverse, rows.at<void>(0)) : product, activation,
            h.at<void>(0));
}

bool up_reads_tokens(const mg_grouped_mm_problem&, const mg_moe_activate_problem&) { return false; }

void run_activate_backward(const mg_moe_activate_problem& p) {
  const Host host(p.host, 16 * size_of(p.tokens * p.top_k, p.width));
  check_host(moe::launch_activate_backward(p, {&host}));
}

}  // namespace multigemm
