// The pool of BLAS handles: one use at a time, on one device; bounded; given back before the driver goes.
#pragma once

#include <stdint.h>

#include "multigemm/abi.h"
#include "runtime/device.h"

struct cublasContext;

namespace multigemm {

// A handle for this scope, set to a stream, with a workspace from the caller's allocator. Stream, workspace and math
// mode are set at each borrow, so a handle carries nothing from one call to the next.
class BorrowedHandle {
 public:
  BorrowedHandle(const DeviceFacts& device, void* stream, const mg_host* host);
  ~BorrowedHandle();
  BorrowedHandle(const BorrowedHandle&) = delete;
  BorrowedHandle& operator=(const BorrowedHandle&) = delete;
  cublasContext* get() const { return handle_; }

 private:
  DeviceMemory workspace_;
  int ordinal_;
  void* stream_;
  cublasContext* handle_;
};

// How many handles wait in the pool now.
int64_t idle_handles();

}  // namespace multigemm
