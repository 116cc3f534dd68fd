#include "launch/device_groups.h"

#include "kernels/grouped_mm/simt.h"

namespace multigemm {
namespace {

constexpr int64_t kBytes = static_cast<int64_t>(sizeof(int64_t));

bool on_host(const mg_groups& groups) { return (groups.flags & MG_GROUPS_ON_HOST) != 0; }

void scale_rows(Partition& partition, int64_t scale) {
  for (Block& block : partition.blocks) {
    block.begin *= scale;
    block.end *= scale;
  }
  partition.used *= scale;
  partition.tallest *= scale;
}

}  // namespace

std::vector<int64_t> ends_of(const Partition& partition, int64_t count) {
  std::vector<int64_t> ends(static_cast<size_t>(count), 0);
  for (const Block& block : partition.blocks) ends[static_cast<size_t>(block.group)] = block.end;
  for (size_t g = 1; g < ends.size(); ++g)
    if (ends[g] < ends[g - 1]) ends[g] = ends[g - 1];
  return ends;
}

DeviceGroups::DeviceGroups(const mg_groups& groups, int64_t rows, int64_t scale, bool counted, const mg_host* host,
                           void* stream)
    : groups_(groups) {
  const int64_t count = groups.count;
  counted = counted && (count > kMostBlockGroups || (!on_host(groups) && scale != 1));
  if (count == 0 || (!on_host(groups) && scale == 1 && !counted)) return;
  memory_ = std::make_unique<DeviceMemory>(host, stream, (count + simt::room_for(count)) * kBytes);
  int64_t* ends = memory_->as<int64_t>();
  int64_t* room = ends + count;
  if (on_host(groups)) {
    Partition partition = multigemm::partition(groups, rows);
    scale_rows(partition, scale);
    check_gpu(simt::write_numbers(ends_of(partition, count).data(), count, ends, stream), "writing the group ends");
    groups_ = {ends, count, 1, MG_INT64, MG_GROUPS_OFFSETS};
    if (counted) count_groups(rows * scale, 1, reinterpret_cast<int32_t*>(room), stream);
  } else if (counted) {
    count_groups(rows, scale, reinterpret_cast<int32_t*>(room), stream);
  } else {
    check_gpu(simt::scaled_ends(groups, rows, scale, ends, room, stream), "the kernel that counts the groups");
    groups_ = {ends, count, 1, MG_INT64, MG_GROUPS_OFFSETS};
  }
}

void DeviceGroups::count_groups(int64_t rows, int64_t scale, int32_t* numbers, void* stream) {
  check_gpu(simt::count_groups(groups_, rows, scale, numbers, stream), "the kernel that counts the groups");
  groups_ = {numbers, groups_.count, 1, MG_INT32, MG_GROUPS_OFFSETS};
}

NoRows::NoRows(int64_t count, const mg_host* host, void* stream) : memory_(host, stream, kBytes) {
  const int64_t zero = 0;
  check_gpu(simt::write_numbers(&zero, 1, memory_.as<int64_t>(), stream), "writing a size of zero");
  groups_ = {memory_.as<int64_t>(), count, 0, MG_INT64, 0};  // stride 0: every group reads the same zero
}

Partition host_groups(const mg_groups& groups, int64_t rows, int64_t scale, const mg_host* host, void* stream) {
  if (on_host(groups) || groups.count == 0) {
    Partition partition = multigemm::partition(groups, rows);
    scale_rows(partition, scale);
    return partition;
  }
  const int64_t count = groups.count;
  const DeviceMemory memory(host, stream, (count + simt::room_for(count)) * kBytes);
  int64_t* ends = memory.as<int64_t>();
  check_gpu(simt::scaled_ends(groups, rows, scale, ends, ends + count, stream), "the kernel that counts the groups");
  std::vector<int64_t> read(static_cast<size_t>(count));
  check_gpu(gpu::copy_to_host(read.data(), ends, count * kBytes, static_cast<gpu::Stream>(stream)),
            "reading the group sizes");
  return partition({read.data(), count, 1, MG_INT64, MG_GROUPS_OFFSETS | MG_GROUPS_ON_HOST}, rows * scale);
}

}  // namespace multigemm
