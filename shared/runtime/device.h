// The device of one call: facts, guard, memory. Nothing of a device is kept between calls but its facts.
#pragma once

#include <string>

#include "kernels/grouped_mm/gpu_call.h"
#include "multigemm/abi.h"
#include "vendor/gpu_runtime.h"

namespace multigemm {

// Throws Failure(MG_DEVICE_ERROR) with the runtime's name and text for a non-zero error number.
void check_gpu(int error, const char* what);

// Read once for each device. Throws Failure for a device that is not there.
const DeviceFacts& device_facts(int ordinal);

// Makes a device current for the scope, and the caller's again at its end, also after an exception. A caller's device
// that nobody has used yet stays so.
class DeviceGuard {
 public:
  explicit DeviceGuard(int ordinal);
  ~DeviceGuard();
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int ordinal_;
  int before_ = 0;
  bool changed_ = false;
  bool entered_ = false;
};

// The stream that the work of a call goes to: the caller's.
void* stream_of_call(void* given);

// A problem as its kernels get it.
template <class Problem>
Problem on_its_stream(const Problem& given) {
  Problem problem = given;
  problem.stream = stream_of_call(given.stream);
  return problem;
}

// Memory of the current device in the order of a stream: from the caller's allocator, else from the runtime's pool.
class DeviceMemory {
 public:
  DeviceMemory(const mg_host* host, void* stream, int64_t bytes);
  ~DeviceMemory();
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;
  template <class T>
  T* as() const {
    return static_cast<T*>(memory_);
  }

 private:
  const mg_host* host_;
  void* stream_;
  void* memory_ = nullptr;
};

// Whether the stream records a graph now.
bool is_capturing(void* stream);

}  // namespace multigemm
