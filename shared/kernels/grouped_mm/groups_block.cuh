// Formula: ends[g] = clamped cumulative end of group g, computed by every block for itself in shared memory, so that
// a product is one launch. Layouts: groups with any stride; ends [G] int32.
// Dtypes:  int32 or int64 groups, sizes or ends; N < 2^31.
// Architectures: any GPU that nvcc or hipcc compile for.
// Limits:  the block has a whole number of warps, at most 32; more than kMostBlockGroups groups were counted before.
#pragma once

#include "kernels/grouped_mm/gpu_call.h"
#include "kernels/grouped_mm/groups_simt.cuh"

namespace multigemm {

// The end after two neighbouring stretches of groups, given the end of each counted from row 0. Running maxima
// (offsets) and saturating sums (sizes) are associative, so the scan may cut the groups anywhere.
MG_DEVICE int32_t join_ends(int32_t before, int32_t mine, bool offsets, int32_t rows) {
  if (offsets) return mine > before ? mine : before;
  return mine < rows - before ? before + mine : rows;
}

// All threads of the block call it; `scratch` holds 32 int32. Ends with a barrier.
MG_DEVICE void block_group_ends(const mg_groups& groups, int64_t row_count, int32_t* ends, int32_t* scratch) {
  const int thread = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x);
  const int lane = thread % 32, warp = thread / 32, warps = threads / 32;
  const int count = static_cast<int>(groups.count), share = (count + threads - 1) / threads;
  const int first = thread * share < count ? thread * share : count;
  const int last = first + share < count ? first + share : count;
  const bool offsets = (groups.flags & MG_GROUPS_OFFSETS) != 0;
  const int32_t rows = static_cast<int32_t>(row_count);

  int32_t mine = 0;
  for (int g = first; g < last; ++g)
    mine = static_cast<int32_t>(simt::next_end(mine, simt::read_group(groups, g), offsets, rows));
  int32_t through = mine;  // of this warp's threads up to this one
  for (int step = 1; step < 32; step *= 2) {
    const int32_t other = __shfl_up_sync(0xffffffffu, through, step);
    if (lane >= step) through = join_ends(other, through, offsets, rows);
  }
  if (lane == 31) scratch[warp] = through;
  int32_t before = __shfl_up_sync(0xffffffffu, through, 1);
  if (lane == 0) before = 0;
  __syncthreads();
  if (warp == 0) {
    int32_t total = lane < warps ? scratch[lane] : 0;
    for (int step = 1; step < 32; step *= 2) {
      const int32_t other = __shfl_up_sync(0xffffffffu, total, step);
      if (lane >= step) total = join_ends(other, total, offsets, rows);
    }
    scratch[lane] = total;
  }
  __syncthreads();
  if (warp > 0) before = join_ends(scratch[warp - 1], before, offsets, rows);
  for (int g = first; g < last; ++g) {
    before = static_cast<int32_t>(simt::next_end(before, simt::read_group(groups, g), offsets, rows));
    ends[g] = before;
  }
  __syncthreads();
}

// through[i] = number(0) + .. + number(i). All threads of the block call it; `scratch` holds 32 int32. Ends with a
// barrier.
template <class Number>
MG_DEVICE void block_sums(int count, Number number, int32_t* through, int32_t* scratch) {
  const int thread = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x);
  const int lane = thread % 32, warp = thread / 32, warps = threads / 32;
  const int share = (count + threads - 1) / threads;
  const int first = thread * share < count ? thread * share : count;
  const int last = first + share < count ? first + share : count;
  int32_t mine = 0;
  for (int i = first; i < last; ++i) mine += number(i);
  int32_t sum = mine;  // of these 32 threads up to this one
  for (int step = 1; step < 32; step *= 2) {
    const int32_t other = __shfl_up_sync(0xffffffffu, sum, step);
    if (lane >= step) sum += other;
  }
  if (lane == 31) scratch[warp] = sum;
  __syncthreads();
  if (warp == 0) {
    int32_t total = lane < warps ? scratch[lane] : 0;
    for (int step = 1; step < 32; step *= 2) {
      const int32_t other = __shfl_up_sync(0xffffffffu, total, step);
      if (lane >= step) total += other;
    }
    scratch[lane] = total;
  }
  __syncthreads();
  int32_t before = sum - mine + (warp > 0 ? scratch[warp - 1] : 0);
  for (int i = first; i < last; ++i) {
    before += number(i);
    through[i] = before;
  }
  __syncthreads();
}

enum { kFew, kMany, kFewOrMany };  // groups: up to kMostBlockGroups, more, or not known to the compiler

// The ends of any number of groups: counted up in the block's shared memory, or by an earlier launch. (Each read
// chooses: a pointer to either would cost the kernels registers.)
template <int kWhich>
struct GroupEnds {
  const mg_groups& groups;
  const int32_t* counted;

  MG_DEVICE bool many() const { return kWhich == kMany || (kWhich == kFewOrMany && groups.count > kMostBlockGroups); }
  MG_DEVICE const int32_t* numbers() const { return static_cast<const int32_t*>(groups.data); }  // of many
  MG_DEVICE int32_t operator[](int64_t g) const { return many() ? numbers()[g] : counted[g]; }
};

// `room` holds 32 int32 and, of few groups, their ends. All threads of the block call it.
template <int kWhich = kFewOrMany>
MG_DEVICE GroupEnds<kWhich> group_ends(const mg_groups& groups, int64_t row_count, int32_t* room) {
  const GroupEnds<kWhich> ends{groups, room + 32};
  if (!ends.many()) block_group_ends(groups, row_count, room + 32, room);
  return ends;
}

}  // namespace multigemm
