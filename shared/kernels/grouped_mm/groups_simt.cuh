// Formula: ends[g] = clamped cumulative end of group g; tiles[g] = row tiles of the groups before g, tiles[G + 1] =
// all. Layouts: groups with any stride; ends [G], tiles [G + 2]; "group" G stands for the rows [R, N) of no group.
// Dtypes:  int32 or int64 groups, sizes or ends; int64 results.
// Architectures: any GPU that nvcc or hipcc compile for, and the host.
// Limits:  one block of kScanThreads threads; meant for G up to 2^20.
#pragma once

#include "multigemm/abi.h"
#include "vendor/gpu.h"

namespace multigemm {
namespace simt {

constexpr int kScanThreads = 64;

struct GroupScan {
  mg_groups groups;
  int64_t rows;
  int64_t tile_rows;
  int64_t* ends;
  int64_t* tiles;
};

MG_DEVICE int64_t read_group(const mg_groups& groups, int64_t g) {
  const int64_t at = g * groups.stride;
  return groups.dtype == MG_INT32 ? static_cast<const int32_t*>(groups.data)[at]
                                  : static_cast<const int64_t*>(groups.data)[at];
}

// The end of a group that follows one that ends at `before`. Saturating sums and running maxima are both
// associative, so the scan may cut the groups anywhere.
MG_DEVICE int64_t next_end(int64_t before, int64_t value, bool offsets, int64_t rows) {
  if (offsets) return value > before ? (value < rows ? value : rows) : before;
  if (value <= 0) return before;
  return value < rows - before ? before + value : rows;
}

MG_KERNEL static void group_scan(GroupScan a) {
  MG_SHARED int64_t partial[kScanThreads + 1];
  const int t = static_cast<int>(threadIdx.x);
  const int64_t count = a.groups.count, share = (count + kScanThreads - 1) / kScanThreads;
  const int64_t first = t * share < count ? t * share : count;
  const int64_t last = first + share < count ? first + share : count;
  const bool offsets = (a.groups.flags & MG_GROUPS_OFFSETS) != 0;

  int64_t end = 0;
  for (int64_t g = first; g < last; ++g) end = next_end(end, read_group(a.groups, g), offsets, a.rows);
  partial[t] = end;
  __syncthreads();
  if (t == 0) {
    int64_t before = 0;
    for (int i = 0; i < kScanThreads; ++i) {
      const int64_t mine = partial[i];
      partial[i] = before;
      before = next_end(before, mine, offsets, a.rows);
    }
    partial[kScanThreads] = before;
  }
  __syncthreads();
  const int64_t used = partial[kScanThreads];
  int64_t begin = partial[t], tiles = 0;
  __syncthreads();
  for (int64_t g = first; g < last; ++g) {
    end = next_end(begin, read_group(a.groups, g), offsets, a.rows);
    a.ends[g] = end;
    tiles += (end - begin + a.tile_rows - 1) / a.tile_rows;
    begin = end;
  }
  partial[t] = tiles;
  __syncthreads();
  if (t == 0) {
    int64_t before = 0;
    for (int i = 0; i < kScanThreads; ++i) {
      const int64_t mine = partial[i];
      partial[i] = before;
      before += mine;
    }
    a.tiles[count] = before;
    a.tiles[count + 1] = before + (a.rows - used + a.tile_rows - 1) / a.tile_rows;
  }
  __syncthreads();
  tiles = partial[t];
  for (int64_t g = first; g < last; ++g) {
    begin = g > 0 ? a.ends[g - 1] : 0;
    a.tiles[g] = tiles;
    tiles += (a.ends[g] - begin + a.tile_rows - 1) / a.tile_rows;
  }
}

}  // namespace simt
}  // namespace multigemm
