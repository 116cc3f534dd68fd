#include <cublas_v2.h>

#include "blas/handles.h"

namespace multigemm {

int create_handle(BlasContext** handle) { return cublasCreate(handle); }

int destroy_handle(BlasContext* handle) { return cublasDestroy(handle); }

// Also drops the workspace, which goes back to its allocator.
int set_stream(BlasContext* handle, void* stream) { return cublasSetStream(handle, static_cast<gpu::Stream>(stream)); }

int set_workspace(BlasContext* handle, void* memory, int64_t bytes) {
  return cublasSetWorkspace(handle, memory, static_cast<size_t>(bytes));
}

// What cuBLAS asks for on sm_90, and before.
int64_t workspace_bytes(const DeviceFacts& device) { return device.major >= 9 ? 32 << 20 : 4 << 20; }

}  // namespace multigemm
