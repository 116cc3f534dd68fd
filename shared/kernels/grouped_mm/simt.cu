#include "kernels/grouped_mm/simt.h"

#include "kernels/grouped_mm/steps_simt.cuh"
#include "kernels/grouped_mm/wgrad_simt.cuh"

namespace multigemm {
namespace simt {
namespace {

template <class T>
int pack_as(const Packing& packing, void* stream) {
  const auto size = [](int64_t stride) { return stride < 0 ? -stride : stride; };
  const bool transposed = size(packing.stride[0]) < size(packing.stride[2]) && packing.stride[0] != 0;
  const int64_t blocks = packing.rows < kMostBlocks ? packing.rows : kMostBlocks;
  return gpu::launch(transposed ? pack_transposed<T> : pack_rows<T>, blocks, kLineThreads, {stream}, packing);
}

}  // namespace

int rows(const mg_grouped_mm_problem& p, int64_t* room, void* stream) { return launch_rows_simt(p, room, {stream}); }

int wgrad(const mg_grouped_mm_wgrad_problem& p, int64_t* room, void* stream) {
  return launch_wgrad_simt(p, room, {stream});
}

int scaled_ends(const mg_groups& groups, int64_t rows, int64_t scale, int64_t* ends, int64_t* room, void* stream) {
  const GroupScan scan{groups, rows, 1, room, room + groups.count};
  const int error = gpu::launch(group_scan, 1, kScanThreads, {stream}, scan);
  if (error) return error;
  const Scaling scaling{room, ends, groups.count, scale};
  return gpu::launch(scale_numbers, (groups.count + kLineThreads - 1) / kLineThreads, kLineThreads, {stream}, scaling);
}

int count_groups(const mg_groups& groups, int64_t rows, int64_t scale, int32_t* numbers, void* stream) {
  return gpu::launch(group_count, 1, kCountThreads, {stream}, GroupCount{groups, rows, scale, numbers});
}

int write_numbers(const int64_t* from, int64_t count, int64_t* to, void* stream) {
  for (int64_t first = 0; first < count; first += kNumbersAtOnce) {
    Numbers numbers;
    numbers.to = to + first;
    numbers.count = count - first < kNumbersAtOnce ? count - first : kNumbersAtOnce;
    memcpy(numbers.values, from + first, static_cast<size_t>(numbers.count) * sizeof(int64_t));
    const int error = gpu::launch(write_values, 1, kLineThreads, {stream}, numbers);
    if (error) return error;
  }
  return 0;
}

int pack(const Packing& packing, void* stream) {
  if (packing.widened) {
    const int64_t blocks = packing.rows < kMostBlocks ? packing.rows : kMostBlocks;
    return gpu::launch(pack_widened, blocks, kLineThreads, {stream}, packing);
  }
  switch (packing.element_bytes) {
    case 8: return pack_as<uint64_t>(packing, stream);
    case 4: return pack_as<uint32_t>(packing, stream);
    default: return pack_as<uint16_t>(packing, stream);
  }
}

int finish_rows(const mg_grouped_mm_problem& p, const int64_t* ends, const void* sums, int32_t sums_dtype,
                void* stream) {
  const FinishRows arguments{p, ends, sums, sums_dtype};
  const int64_t blocks = p.rows < kMostBlocks ? p.rows : kMostBlocks;
  const bool wide = p.dtype == MG_FLOAT64;
  return gpu::launch(wide ? finish_rows_of<double> : finish_rows_of<float>, blocks, kLineThreads, {stream}, arguments);
}

int finish_wgrad(const mg_grouped_mm_wgrad_problem& p, const void* sums, int32_t sums_dtype, void* stream) {
  const FinishWgrad arguments{p, sums, sums_dtype};
  const int64_t lines = p.groups.count * (p.sum_batch ? 1 : p.batch) * p.inner;
  const bool wide = p.dtype == MG_FLOAT64;
  return gpu::launch(wide ? finish_wgrad_of<double> : finish_wgrad_of<float>, lines < kMostBlocks ? lines : kMostBlocks,
                     kLineThreads, {stream}, arguments);
}

}  // namespace simt
}  // namespace multigemm
