// grouped_mm_wgrad on the CPU: empty cases, choice from the table, launch.
#include <algorithm>

#include "blas/blas.h"
#include "kernels/grouped_mm/cpu_levels.h"
#include "kernels/grouped_mm/wgrad_simt.cuh"
#include "launch/checks.h"
#include "launch/choose_cpu.h"
#include "launch/grouped_mm.h"
#include "launch/products_cpu.h"

namespace multigemm {
namespace {

// Summed over B too, the entries of B are more rows of the same product.
void fold_batch(mg_grouped_mm_wgrad_problem& p, Partition& groups) {
  const int64_t batch = p.batch;
  if (batch <= 1 || !p.sum_batch || p.x_stride[0] != batch * p.x_stride[1] || p.gy_stride[0] != batch * p.gy_stride[1])
    return;
  p.rows *= batch;
  p.batch = 1;
  p.x_stride[0] = p.x_stride[1];
  p.gy_stride[0] = p.gy_stride[1];
  for (Block& block : groups.blocks) {
    block.begin *= batch;
    block.end *= batch;
  }
  groups.used *= batch;
  groups.tallest *= batch;
}

double work(const mg_grouped_mm_wgrad_problem& p) {
  return static_cast<double>(p.rows) * static_cast<double>(p.batch) * static_cast<double>(p.inner) *
         static_cast<double>(p.outer);
}

CallFacts facts_of(const mg_grouped_mm_wgrad_problem& p, const Partition& groups, const Host& host) {
  int64_t extent = std::max({p.rows, p.inner, p.outer});
  for (int64_t stride :
       {p.x_stride[0], p.x_stride[2], p.gy_stride[0], p.gy_stride[2], p.out_stride[2], p.out_stride[3]})
    extent = std::max(extent, stride < 0 ? -stride : stride);
  return {p.batch, p.inner, p.outer,          groups.used, groups.tallest,   static_cast<int64_t>(groups.blocks.size()),
          extent,  p.dtype, p.implementation, false,       host.has_matmul()};
}

void wgrad_simd(const mg_grouped_mm_wgrad_problem& p, const Partition& groups, const Host& host) {
  const CpuLevel& level = cpu_level();
  const int64_t threads = host.threads(), present = static_cast<int64_t>(groups.blocks.size());
  // A task's sums stay in the caches; thin matrices of neighbouring b share cache lines, so a task takes several b.
  const int64_t m_step = std::min<int64_t>(p.outer, 512),
                k_step = std::min<int64_t>(p.inner, std::max<int64_t>(12, 24576 / m_step));
  const int64_t line = std::min(p.inner, p.outer) * dtype_bytes(p.dtype);
  const int64_t b_step = p.sum_batch          ? p.batch
                         : fits_thin_wgrad(p) ? thin_wgrad_batch(p)
                                              : std::min(p.batch, std::max<int64_t>(1, 64 / line));
  const int64_t m_count = (p.outer + m_step - 1) / m_step, k_count = (p.inner + k_step - 1) / k_step;
  const int64_t b_count = (p.batch + b_step - 1) / b_step;
  const int64_t tasks = present * b_count * k_count * m_count;
  const int64_t out_bytes = present * p.batch * p.inner * p.outer * dtype_bytes(p.out_dtype);
  const bool past_cache = out_bytes > kPastCacheBytes && !p.sum_batch;
  const WgradTask largest{0, 0, 0, 0, b_step, 0, k_step, 0, m_step, past_cache};
  const int64_t scratch = (level.wgrad_scratch(p, largest) + 63) / 64 * 64;
  const Workspace room(host, scratch * std::min(threads, tasks));
  host.for_each(tasks, std::max<int64_t>(1, std::min(b_count, tasks / (threads * 8))), [&](int64_t i, int64_t slot) {
    const int64_t m = i % m_count * m_step, k = i / m_count % k_count * k_step;
    const int64_t b = i / m_count / k_count % b_count * b_step;
    const Block& g = groups.blocks[static_cast<size_t>(i / m_count / k_count / b_count)];
    const WgradTask task{g.group,
                         g.begin,
                         g.end,
                         b,
                         std::min(p.batch, b + b_step),
                         k,
                         std::min(p.inner, k + k_step),
                         m,
                         std::min(p.outer, m + m_step),
                         past_cache};
    level.wgrad(p, task, room.at<char>(slot * scratch));
  });
}

}  // namespace

void run(const mg_grouped_mm_wgrad_problem& given) {
  mg_grouped_mm_wgrad_problem p = given;
  const Host host(p.host, work(p));
  if (p.groups.count == 0 || p.inner == 0 || p.outer == 0 || (p.batch == 0 && !p.sum_batch)) return;
  Partition groups = partition(p.groups, p.rows);
  fold_batch(p, groups);
  const Choice choice = choose_wgrad(facts_of(p, groups, host));
  if (choice.row->kernel == Kernel::simt) {
    // The problem as given, not folded: this kernel clamps the groups itself.
    const Workspace room(host, (2 * given.groups.count + 2) * static_cast<int64_t>(sizeof(int64_t)));
    simt::launch_wgrad_simt(given, room.at<int64_t>(0), {&host});
    return;
  }
  const int64_t bytes = dtype_bytes(p.out_dtype), matrix[3] = {p.sum_batch ? 1 : p.batch, p.inner, p.outer};
  if (p.batch == 0) {  // summed over no entries of B
    for (const Block& g : groups.blocks) groups.empty.push_back(g.group);
    groups.blocks.clear();
  }
  for (int64_t g : groups.empty)
    fill_zeros(static_cast<char*>(p.out) + g * p.out_stride[0] * bytes, bytes, matrix, p.out_stride + 1, host);
  if (groups.blocks.empty()) return;
  if (choice.row->kernel == Kernel::simd) return wgrad_simd(p, groups, host);
  if (choice.row->kernel == Kernel::torch)
    wgrad_by_products(p, groups, host, [&](const mg_matmul& product) { host.matmul(product); });
  else
    wgrad_by_products(p, groups, host, [&](const mg_matmul& product) { blas_product(product, host); });
}

std::string plan(const mg_grouped_mm_wgrad_problem& given) {
  mg_grouped_mm_wgrad_problem p = given;
  Partition groups = partition(p.groups, p.rows);
  fold_batch(p, groups);
  const CallFacts facts = facts_of(p, groups, Host(p.host, work(p)));
  return explain("grouped_mm_wgrad", choose_wgrad(facts), facts, true);
}

}  // namespace multigemm
