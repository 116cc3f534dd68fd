// Formula: ends[g] = clamped cumulative end of group g; tiles[g] = row tiles of the groups before g, tiles[G + 1] =
// all. Layouts: groups with any stride; ends [G], tiles [G + 2]; "group" G stands for the rows [R, N) of no group.
// Dtypes:  int32 or int64 groups, sizes or ends; int64 results.
// Architectures: any GPU that nvcc or hipcc compile for, and the host.
// Limits:  one block of kScanThreads or kCountThreads threads; meant for G up to 2^20.
#pragma once

#include "kernels/grouped_mm/gpu_call.h"
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

constexpr int kCountThreads = 512;
constexpr int kCountTogether = 8;  // groups that are read at once, since one read takes as long as many

// numbers [3, G]: ends of the groups, `scale` times those of the rows, then the tiles up to and with each group, for
// tiles of kCountedRows and of twice as many.
struct GroupCount {
  mg_groups groups;
  int64_t rows, scale;
  int32_t* numbers;
};

// What comes before this thread's number, joined in the order of the threads. All of them call it.
template <class Join>
MG_DEVICE int64_t joined_before(int64_t* shelf, int64_t mine, Join join) {
  const int t = static_cast<int>(threadIdx.x);
  shelf[t] = mine;
  __syncthreads();
  for (int step = 1; step < kCountThreads; step *= 2) {
    const int64_t other = t >= step ? shelf[t - step] : 0;
    __syncthreads();
    shelf[t] = join(other, shelf[t]);
    __syncthreads();
  }
  const int64_t before = t > 0 ? shelf[t - 1] : 0;
  __syncthreads();
  return before;
}

// Tiles of `rows` rows: of either height in one half of the number.
MG_DEVICE int64_t counted_tiles(int64_t rows) {
  const int64_t high = (rows + kCountedRows - 1) / kCountedRows;
  return high << 32 | (high + 1) / 2;
}

MG_KERNEL static void group_count(GroupCount a) {
  MG_SHARED int64_t shelf[kCountThreads];
  const int t = static_cast<int>(threadIdx.x);
  const int64_t count = a.groups.count, share = (count + kCountThreads - 1) / kCountThreads;
  const int64_t first = t * share < count ? t * share : count;
  const int64_t last = first + share < count ? first + share : count;
  const bool offsets = (a.groups.flags & MG_GROUPS_OFFSETS) != 0;
  const auto join = [&](int64_t before, int64_t value) { return next_end(before, value, offsets, a.rows); };
  const auto add = [](int64_t one, int64_t other) { return one + other; };
  // Calls visit(g, begin, end) for the groups of this thread, in order; the end of the last.
  const auto walk = [&](int64_t end, auto visit) {
    for (int64_t g = first; g < last; g += kCountTogether) {
      int64_t values[kCountTogether];
      MG_UNROLL
      for (int i = 0; i < kCountTogether; ++i) values[i] = g + i < last ? read_group(a.groups, g + i) : 0;
      MG_UNROLL
      for (int i = 0; i < kCountTogether; ++i) {
        const int64_t begin = end;
        end = join(begin, values[i]);
        if (g + i < last) visit(g + i, begin * a.scale, end * a.scale);
      }
    }
    return end;
  };

  const int64_t begin = joined_before(shelf, walk(0, [](int64_t, int64_t, int64_t) {}), join);
  int64_t tiles = 0;
  walk(begin, [&](int64_t, int64_t from, int64_t to) { tiles += counted_tiles(to - from); });
  tiles = joined_before(shelf, tiles, add);
  walk(begin, [&](int64_t g, int64_t from, int64_t to) {
    tiles += counted_tiles(to - from);
    a.numbers[g] = static_cast<int32_t>(to);
    a.numbers[count + g] = static_cast<int32_t>(tiles >> 32);
    a.numbers[2 * count + g] = static_cast<int32_t>(tiles & 0xffffffff);
  });
}

}  // namespace simt
}  // namespace multigemm
