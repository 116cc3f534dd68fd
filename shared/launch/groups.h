// The clamping that every backend shares, for groups in memory the host can read.
#pragma once

#include <vector>

#include "multigemm/abi.h"

namespace multigemm {

// The rows [begin, end) of one group.
struct Block {
  int64_t group, begin, end;
};

struct Partition {
  std::vector<Block> blocks;   // groups with rows, in order
  std::vector<int64_t> empty;  // groups without
  int64_t used = 0;            // R: rows in groups; [R, N) belong to none
  int64_t tallest = 0;
};

// Sizes: s = max(s, 0), end = min(start + s, N). Ends: end = min(max(previous end, given), N).
Partition partition(const mg_groups& groups, int64_t rows);

}  // namespace multigemm
