// grouped_mm on the CPU: empty cases, choice from the table, launch.
#include <algorithm>
#include <cstring>

#include "blas/blas.h"
#include "kernels/grouped_mm/cpu_levels.h"
#include "kernels/grouped_mm/rows_simt.cuh"
#include "launch/checks.h"
#include "launch/choose_cpu.h"
#include "launch/grouped_mm.h"
#include "launch/products_cpu.h"

namespace multigemm {
namespace {

// With one w and bias for all of B, the entries of B are more rows of the same product.
void fold_batch(mg_grouped_mm_problem& p, Partition& groups) {
  const int64_t batch = p.batch;
  if (batch <= 1 || p.w_stride[1] != 0 || (p.bias && p.bias_stride[1] != 0) || p.x_stride[0] != batch * p.x_stride[1] ||
      p.out_stride[0] != batch * p.out_stride[1])
    return;
  p.rows *= batch;
  p.batch = 1;
  p.x_stride[0] = p.x_stride[1];
  p.out_stride[0] = p.out_stride[1];
  for (Block& block : groups.blocks) {
    block.begin *= batch;
    block.end *= batch;
  }
  groups.used *= batch;
  groups.tallest *= batch;
}

double work(const mg_grouped_mm_problem& p) {
  return static_cast<double>(p.rows) * static_cast<double>(p.batch) * static_cast<double>(p.inner) *
         static_cast<double>(p.outer);
}

CallFacts facts_of(const mg_grouped_mm_problem& p, const Partition& groups, const Host& host) {
  int64_t extent = std::max({p.rows, p.inner, p.outer});
  for (int64_t stride : {p.x_stride[0], p.x_stride[2], p.w_stride[2], p.w_stride[3], p.out_stride[0], p.out_stride[2]})
    extent = std::max(extent, stride < 0 ? -stride : stride);
  return {p.batch,
          p.inner,
          p.outer,
          groups.used,
          groups.tallest,
          static_cast<int64_t>(groups.blocks.size()),
          extent,
          p.dtype,
          p.implementation,
          p.w_stride[2] == 1 && p.w_stride[3] != 1,
          host.has_matmul(),
          fits_few_rows(p, groups.tallest)};
}

void rows_few(const mg_grouped_mm_problem& p, const Partition& groups, const Host& host) {
  const CpuLevel& level = cpu_level();
  // Rows of w whole where there are matrices enough for all threads, because the hardware reads ahead along them; in
  // pieces of 2 KB or more where there are not. The sums of a task, of at most 16 KB a row, stay in the caches.
  const int64_t matrices = static_cast<int64_t>(groups.blocks.size()) * p.batch;
  const int64_t row = p.outer * dtype_bytes(p.dtype), line = 64 / dtype_bytes(p.dtype);
  const int64_t wanted = std::min((2 * host.threads() + matrices - 1) / matrices, (row + 2047) / 2048);
  const int64_t parts = std::max(wanted, (row + 16383) / 16384);
  const int64_t step = ((p.outer + parts - 1) / parts + line - 1) / line * line, pieces = (p.outer + step - 1) / step;
  const int64_t tasks = matrices * pieces;
  host.for_each(tasks, 1, [&](int64_t i, int64_t) {
    const Block& g = groups.blocks[static_cast<size_t>(i / pieces / p.batch)];
    const int64_t m = i % pieces * step;
    level.rows_few(p, {g.group, g.begin, g.end, i / pieces % p.batch, m, std::min(p.outer, m + step)});
  });
}

void rows_simd(const mg_grouped_mm_problem& p, const Partition& groups, const Host& host) {
  if (fits_few_rows(p, groups.tallest)) return rows_few(p, groups, host);
  const CpuLevel& level = cpu_level();
  const int64_t threads = host.threads();
  // Tall enough to use packed columns of w many times, low enough that every thread gets several pieces; rows that
  // fill less than a cache line share it with their neighbours of B, so their pieces must stay in the first-level
  // cache.
  const bool thin = fits_thin_rows(p);
  const int64_t batches = thin ? 1 : p.batch;
  const int64_t line = std::min(p.inner, p.outer) * dtype_bytes(p.dtype);
  const int64_t tall = thin        ? 512
                       : line < 64 ? 96
                       : is_half(p.dtype)
                           ? std::max<int64_t>(24, std::min<int64_t>(192, 65536 / std::max<int64_t>(p.inner, 1)))
                           : 192;
  const int64_t share = (groups.used * batches + threads * 8 - 1) / (threads * 8);
  const int64_t height = std::min(tall, std::max<int64_t>(24, share));
  std::vector<Block> pieces;
  for (const Block& g : groups.blocks) {
    const int64_t count = (g.end - g.begin + height - 1) / height;
    for (int64_t i = 0; i < count; ++i)
      pieces.push_back(
          {g.group, g.begin + (g.end - g.begin) * i / count, g.begin + (g.end - g.begin) * (i + 1) / count});
  }
  const int64_t tasks = static_cast<int64_t>(pieces.size()) * batches;
  const bool past_cache = p.rows * p.batch * p.outer * dtype_bytes(p.out_dtype) > kPastCacheBytes &&
                          (thin || p.outer * dtype_bytes(p.out_dtype) >= 64);
  const int64_t scratch = ((thin ? thin_rows_scratch(p) : level.rows_scratch(p, height)) + 63) / 64 * 64;
  const Workspace room(host, scratch * std::min(threads, tasks));
  const int64_t at_once = std::max<int64_t>(1, std::min(batches, tasks / (threads * 8)));
  host.for_each(tasks, at_once, [&](int64_t i, int64_t slot) {
    const Block& piece = pieces[static_cast<size_t>(i / batches)];
    const int64_t b = thin ? RowsTask::kAllOfB : i % batches;
    level.rows(p, {piece.group, piece.begin, piece.end, b, past_cache}, room.at<char>(slot * scratch));
  });
}

}  // namespace

void run(const mg_grouped_mm_problem& given) {
  mg_grouped_mm_problem p = given;
  const Host host(p.host, work(p));
  if (p.rows == 0 || p.batch == 0 || p.outer == 0) return;
  Partition groups = partition(p.groups, p.rows);
  fold_batch(p, groups);
  const CallFacts facts = facts_of(p, groups, host);
  const Choice choice = choose_rows(facts);
  const int64_t bytes = dtype_bytes(p.out_dtype);
  if (choice.row->kernel == Kernel::simt) {
    // The problem as given, not folded: this kernel clamps the groups itself.
    const Workspace room(host, (2 * given.groups.count + 2) * static_cast<int64_t>(sizeof(int64_t)));
    simt::launch_rows_simt(given, room.at<int64_t>(0), {&host});
    return;
  }
  const int64_t rest[3] = {p.rows - groups.used, p.batch, p.outer};
  fill_zeros(static_cast<char*>(p.out) + groups.used * p.out_stride[0] * bytes, bytes, rest, p.out_stride, host);
  if (groups.blocks.empty()) return;
  // A product with K = 0 is not one: the sums are empty and only the bias is left, which rows_simd does.
  if (choice.row->kernel == Kernel::simd || p.inner == 0) return rows_simd(p, groups, host);
  if (choice.row->kernel == Kernel::torch)
    rows_by_products(p, groups, host, [&](const mg_matmul& product) { host.matmul(product); });
  else
    rows_by_products(p, groups, host, [&](const mg_matmul& product) { blas_product(product, host); });
}

std::string plan(const mg_grouped_mm_problem& given) {
  mg_grouped_mm_problem p = given;
  Partition groups = partition(p.groups, p.rows);
  fold_batch(p, groups);
  const CallFacts facts = facts_of(p, groups, Host(p.host, work(p)));
  return explain("grouped_mm", choose_rows(facts), facts, false);
}

}  // namespace multigemm
