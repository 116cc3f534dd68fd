#include <cublas_v2.h>

#include <cstdlib>
#include <mutex>
#include <vector>

#include "blas/blas_gpu.h"
#include "blas/handles.h"
#include "runtime/status.h"

namespace multigemm {
namespace {

constexpr size_t kMostIdle = 16;  // for all devices together; a handle keeps some megabytes of device memory
constexpr int64_t kWorkspaceBytes = 32 << 20, kOlderWorkspaceBytes = 4 << 20;  // what cuBLAS asks for on sm_90; before

struct Idle {
  int ordinal;
  void* stream;
  cublasHandle_t handle;
};

struct Pool {
  std::mutex lock;
  std::vector<Idle> idle;
  bool closed = false;
};

Pool& pool() {
  static Pool* const one = new Pool;  // never destroyed: threads may outlive static objects
  return *one;
}

// Registered after the CUDA runtime's own exit handler, so it runs before that one.
void close_pool() {
  std::vector<Idle> idle;
  {
    const std::lock_guard<std::mutex> held(pool().lock);
    pool().closed = true;
    idle.swap(pool().idle);
  }
  for (const Idle& entry : idle) (void)cublasDestroy(entry.handle);
}

cublasHandle_t take(int ordinal, void* stream) {
  {
    const std::lock_guard<std::mutex> held(pool().lock);
    auto& idle = pool().idle;
    size_t found = idle.size();
    for (size_t i = 0; i < idle.size(); ++i)
      if (idle[i].ordinal == ordinal && (found == idle.size() || idle[i].stream == stream)) found = i;
    if (found < idle.size()) {
      const cublasHandle_t handle = idle[found].handle;
      idle.erase(idle.begin() + static_cast<std::ptrdiff_t>(found));
      return handle;
    }
  }
  static std::once_flag registered;
  const gpu::RelaxedCapture relaxed;  // making a handle allocates, which a capture would forbid
  cublasHandle_t handle = nullptr;
  check_blas(cublasCreate(&handle), "making a cuBLAS handle");
  std::call_once(registered, [] { std::atexit(close_pool); });
  return handle;
}

}  // namespace

BorrowedHandle::BorrowedHandle(const DeviceFacts& device, void* stream, const mg_host* host)
    : workspace_(host, stream, device.major >= 9 ? kWorkspaceBytes : kOlderWorkspaceBytes),
      ordinal_(device.ordinal),
      stream_(stream),
      handle_(take(device.ordinal, stream)) {
  try {
    check_blas(cublasSetStream(handle_, static_cast<gpu::Stream>(stream)), "setting the stream of a cuBLAS handle");
    check_blas(cublasSetWorkspace(handle_, workspace_.as<void>(),
                                  static_cast<size_t>(device.major >= 9 ? kWorkspaceBytes : kOlderWorkspaceBytes)),
               "setting the workspace of a cuBLAS handle");
  } catch (...) {
    (void)cublasDestroy(handle_);
    throw;
  }
}

BorrowedHandle::~BorrowedHandle() {
  (void)cublasSetStream(handle_, nullptr);  // also drops the workspace, which goes back to its allocator
  {
    const std::lock_guard<std::mutex> held(pool().lock);
    if (!pool().closed && pool().idle.size() < kMostIdle) {
      pool().idle.push_back({ordinal_, stream_, handle_});
      return;
    }
  }
  (void)cublasDestroy(handle_);
}

int64_t idle_handles() {
  const std::lock_guard<std::mutex> held(pool().lock);
  return static_cast<int64_t>(pool().idle.size());
}

}  // namespace multigemm
