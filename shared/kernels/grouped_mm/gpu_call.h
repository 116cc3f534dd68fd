// What every GPU kernel launcher is given besides the problem, and what it answers.
#pragma once

#include <stdint.h>

#include <string>

#include "multigemm/abi.h"

namespace multigemm {

// A device as choice and launch need it: plain numbers, so that both can be tested without a GPU.
struct DeviceFacts {
  int ordinal = 0;
  int major = 0, minor = 0;  // compute capability; for AMD the digits of gfx
  int multiprocessors = 1;
  int shared_bytes = 48 * 1024;  // that one block may use
  int64_t l2_bytes = 0;
};

// Groups that each block of a kernel counts up in its own shared memory. More are counted in one launch before it
// (simt::count_groups), and groups.data is what that wrote.
constexpr int64_t kMostBlockGroups = 1024;
constexpr int64_t kMostCountedGroups = int64_t{1} << 24;
constexpr int kCountedRows = 64;  // of row tiles that are counted then, and twice as many

inline bool groups_fit(const mg_groups& groups) {
  return groups.count <= kMostBlockGroups ||
         (groups.dtype == MG_INT32 && groups.stride == 1 && (groups.flags & MG_GROUPS_OFFSETS) != 0);
}

}  // namespace multigemm
