// The pool of BLAS handles: one use at a time, on one device, by preference on the stream of its last call; bounded;
// given back before the driver goes.
#pragma once

#include <stdint.h>

#include "multigemm/abi.h"
#include "runtime/device.h"

struct cublasContext;

namespace multigemm {

// What a handle of the vendor's library points to.
#if defined(MG_HIP)
typedef void BlasContext;
#else
typedef ::cublasContext BlasContext;
#endif

// A handle for this scope, set to a stream, with a workspace from the caller's allocator. Stream, workspace and math
// mode are set at each borrow, so a handle carries nothing from one call to the next.
class BorrowedHandle {
 public:
  BorrowedHandle(const DeviceFacts& device, void* stream, const mg_host* host);
  ~BorrowedHandle();
  BorrowedHandle(const BorrowedHandle&) = delete;
  BorrowedHandle& operator=(const BorrowedHandle&) = delete;
  BlasContext* get() const { return handle_; }

 private:
  DeviceMemory workspace_;
  BlasContext* handle_;
};

// What the pool asks of the vendor's library; each returns 0 or its status.
int create_handle(BlasContext** handle);
int destroy_handle(BlasContext* handle);
int set_stream(BlasContext* handle, void* stream);
int set_workspace(BlasContext* handle, void* memory, int64_t bytes);
int64_t workspace_bytes(const DeviceFacts& device);

}  // namespace multigemm
