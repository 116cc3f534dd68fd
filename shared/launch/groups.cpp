#include "launch/groups.h"

namespace multigemm {
namespace {

int64_t read(const mg_groups& groups, int64_t g) {
  const int64_t i = g * groups.stride;
  return groups.dtype == MG_INT32 ? static_cast<const int32_t*>(groups.data)[i]
                                  : static_cast<const int64_t*>(groups.data)[i];
}

}  // namespace

Partition partition(const mg_groups& groups, int64_t rows) {
  Partition result;
  int64_t begin = 0;
  for (int64_t g = 0; g < groups.count; ++g) {
    const int64_t value = read(groups, g);
    int64_t end = begin;
    if (groups.flags & MG_GROUPS_OFFSETS)
      end = value > begin ? (value < rows ? value : rows) : begin;
    else if (value > 0)
      end = value < rows - begin ? begin + value : rows;  // compared, not added: no overflow
    if (end > begin) {
      result.blocks.push_back({g, begin, end});
      if (end - begin > result.tallest) result.tallest = end - begin;
    } else {
      result.empty.push_back(g);
    }
    begin = end;
  }
  result.used = begin;
  return result;
}

}  // namespace multigemm
