// Formula: parts of the work on all rows: first the pieces of tall groups, then the other groups, each in order.
// Layouts: a group is cut into as many pieces of nearly equal height as multiples of `height` lie among its rows, if
//          those are two or more and it has half as many rows again as one piece. So the multiples number the pieces of
//          all groups, whatever the sizes: ceil(N / height) numbers do.
// Dtypes:  N < 2^31; height * 2^15 >= N.
// Architectures: any GPU that nvcc or hipcc compile for, and the host.
// Limits:  up to kMostBlockGroups groups are cut; the block has a whole number of warps, at most 32.
#pragma once

#include "kernels/grouped_mm/groups_block.cuh"

namespace multigemm {

struct RowPart {
  int32_t begin, end;
  int32_t place;  // the group, all of it, or ~n: piece n of the multiples

  MG_DEVICE bool whole() const { return place >= 0; }
  MG_DEVICE int32_t number() const { return place >= 0 ? place : ~place; }
};

// Multiples of `height` from 0 on that lie before the row.
MG_DEVICE int32_t multiples_before(int32_t row, int32_t height) { return row > 0 ? (row - 1) / height + 1 : 0; }

// How many pieces a group is cut into, or 0.
MG_DEVICE int32_t pieces_of(int32_t begin, int32_t end, int32_t height) {
  const int32_t pieces = multiples_before(end, height) - multiples_before(begin, height);
  return pieces > 1 && end - begin - height >= height / 2 ? pieces : 0;
}

// The parts of a call; with a height of 0, the groups as they are.
struct RowParts {
  GroupEnds<kFewOrMany> ends;
  const int32_t* through;  // of the groups up to and with g, pieces and, in the lower half of the number, those cut
  int32_t groups, height;

  MG_DEVICE int32_t begin_of(int32_t g) const { return g > 0 ? ends[g - 1] : 0; }
  MG_DEVICE int32_t pieces() const { return height > 0 ? through[groups - 1] >> 16 : 0; }
  MG_DEVICE int32_t groups_cut() const { return height > 0 ? through[groups - 1] & 0xffff : 0; }
  MG_DEVICE int32_t count() const { return pieces() + groups - groups_cut(); }

  // The first group for which what `of` tells is more than `wanted`: it must not fall from group to group.
  template <class Of>
  MG_DEVICE int32_t first_over(int32_t wanted, Of of) const {
    int32_t low = 0, high = groups - 1;
    while (low < high) {
      const int32_t middle = (low + high) / 2;
      if (of(middle) > wanted)
        high = middle;
      else
        low = middle + 1;
    }
    return low;
  }

  // The group of which `i` others that are cut come before.
  MG_DEVICE int32_t cut_group(int32_t i) const {
    return first_over(i, [&](int32_t g) { return through[g] & 0xffff; });
  }

  MG_DEVICE RowPart operator[](int32_t i) const {
    if (height == 0) return {begin_of(i), ends[i], i};
    const int32_t all = pieces();
    if (i >= all) {
      const int32_t g = first_over(i - all, [&](int32_t at) { return at + 1 - (through[at] & 0xffff); });
      return {begin_of(g), ends[g], g};
    }
    const int32_t g = first_over(i, [&](int32_t at) { return through[at] >> 16; });
    const int32_t begin = begin_of(g), end = ends[g], of = pieces_of(begin, end, height);
    const int32_t at = i - (g > 0 ? through[g - 1] >> 16 : 0);
    const int64_t rows = end - begin;
    return {static_cast<int32_t>(begin + rows * at / of), static_cast<int32_t>(begin + rows * (at + 1) / of),
            ~(multiples_before(begin, height) + at)};
  }
};

// All threads of the block call it; of a height that is not 0, `through` has room for the groups and `scratch` for 32.
MG_DEVICE RowParts row_parts(const GroupEnds<kFewOrMany>& ends, int32_t height, int32_t* through, int32_t* scratch) {
  const RowParts parts{ends, through, static_cast<int32_t>(ends.groups.count), height};
  if (height == 0) return parts;
  const auto of_group = [&](int g) {
    const int32_t pieces = pieces_of(parts.begin_of(g), ends[g], height);
    return pieces > 0 ? pieces << 16 | 1 : 0;
  };
  block_sums(parts.groups, of_group, through, scratch);
  return parts;
}

}  // namespace multigemm
