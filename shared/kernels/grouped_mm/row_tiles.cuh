// Formula: through[g] = row tiles of the groups up to and with g, and back from a tile to its rows.
// Layouts: ends [G] and through [G] int32, in shared memory or, of more groups than a block counts, as
//          simt::count_groups left them.
// Dtypes:  N < 2^31.
// Architectures: any GPU that nvcc or hipcc compile for, and the host.
// Limits:  the block has a whole number of warps, at most 32; wavefronts of 32 or 64 lanes.
#pragma once

#include "kernels/grouped_mm/groups_block.cuh"

namespace multigemm {

// Rows [begin, end) of a group; group G stands for the rows of no group.
struct RowTile {
  int group;
  int32_t begin, end;
  int32_t tiles_before;  // row tiles of earlier groups
};

// Each read chooses between the block's own numbers and those counted before: a pointer to either would be of no known
// kind of memory.
struct RowTiles {
  const mg_groups& groups;
  const int32_t* ends;
  const int32_t* through;
  int32_t rows;
  int tile_rows;

  MG_DEVICE bool many() const { return groups.count > kMostBlockGroups; }
  MG_DEVICE const int32_t* counted() const { return static_cast<const int32_t*>(groups.data); }
  MG_DEVICE int32_t end_of(int64_t g) const { return many() ? counted()[g] : ends[g]; }
  MG_DEVICE int32_t through_with(int64_t g) const {
    return many() ? counted()[(tile_rows == kCountedRows ? 1 : 2) * groups.count + g] : through[g];
  }
  MG_DEVICE int32_t tiles_of(int32_t rows_of_group) const { return (rows_of_group + tile_rows - 1) / tile_rows; }

  // Where the tile is; false past the last.
  MG_DEVICE bool find(int32_t wanted, RowTile& found) const {
    const int count = static_cast<int>(groups.count);
    int low = 0, high = count;  // the first group with through[g] > wanted
    while (low < high) {
      const int middle = (low + high) / 2;
      if (through_with(middle) > wanted)
        high = middle;
      else
        low = middle + 1;
    }
    found.group = low;
    found.begin = low > 0 ? end_of(low - 1) : 0;
    found.end = low < count ? end_of(low) : rows;
    found.tiles_before = low > 0 ? through_with(low - 1) : 0;
    return low < count || wanted - found.tiles_before < tiles_of(rows - found.begin);
  }
};

// All threads of the block call it; `ends` and `through` have room for kMostBlockGroups, `scratch` for 32. Ends with a
// barrier.
MG_DEVICE RowTiles row_tiles(const mg_groups& groups, int64_t row_count, int tile_rows, int32_t* ends, int32_t* through,
                             int32_t* scratch) {
  const RowTiles tiles{groups, ends, through, static_cast<int32_t>(row_count), tile_rows};
  if (tiles.many()) return tiles;
  block_group_ends(groups, row_count, ends, scratch);
  const auto of_group = [&](int g) { return tiles.tiles_of(ends[g] - (g > 0 ? ends[g - 1] : 0)); };
  block_sums(static_cast<int>(groups.count), of_group, through, scratch);
  return tiles;
}

}  // namespace multigemm
