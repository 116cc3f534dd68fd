// The group sizes of a call, where its kernels can read them.
#pragma once

#include <memory>
#include <vector>

#include "launch/groups.h"
#include "multigemm/abi.h"
#include "runtime/device.h"

namespace multigemm {

// Groups in device memory: the caller's own, or clamped ends that are written there first. With a scale, each row
// counts as that many rows (entries of B that became rows). `counted`: for a kernel that has more groups than its
// blocks count counted before (gpu_call.h).
class DeviceGroups {
 public:
  DeviceGroups(const mg_groups& groups, int64_t rows, int64_t scale, bool counted, const mg_host* host, void* stream);
  const mg_groups& get() const { return groups_; }

 private:
  void count_groups(int64_t rows, int64_t scale, int32_t* numbers, void* stream);

  std::unique_ptr<DeviceMemory> memory_;
  mg_groups groups_;
};

// Groups without any row, whatever `groups` says: for kernels that then write zeros.
class NoRows {
 public:
  NoRows(int64_t count, const mg_host* host, void* stream);
  const mg_groups& get() const { return groups_; }

 private:
  DeviceMemory memory_;
  mg_groups groups_;
};

// Cumulative ends of all `count` groups.
std::vector<int64_t> ends_of(const Partition& partition, int64_t count);

// The groups for the host. Of groups on the device they are read back, which waits for the stream.
Partition host_groups(const mg_groups& groups, int64_t rows, int64_t scale, const mg_host* host, void* stream);

}  // namespace multigemm
