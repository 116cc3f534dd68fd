#include <cstdlib>
#include <mutex>
#include <vector>

#include "blas/blas_gpu.h"
#include "blas/handles.h"
#include "runtime/status.h"

namespace multigemm {
namespace {

constexpr size_t kMostIdle = 16;  // for all devices together; a handle keeps some megabytes of device memory

struct Idle {
  int ordinal;
  void* stream;
  BlasContext* handle;
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

// Registered after the runtime's own exit handler, so it runs before that one.
void close_pool() {
  std::vector<Idle> idle;
  {
    const std::lock_guard<std::mutex> held(pool().lock);
    pool().closed = true;
    idle.swap(pool().idle);
  }
  for (const Idle& entry : idle) (void)destroy_handle(entry.handle);
}

BlasContext* take(int ordinal, void* stream) {
  {
    const std::lock_guard<std::mutex> held(pool().lock);
    auto& idle = pool().idle;
    size_t found = idle.size();
    for (size_t i = 0; i < idle.size(); ++i)
      if (idle[i].ordinal == ordinal && (found == idle.size() || idle[i].stream == stream)) found = i;
    if (found < idle.size()) {
      BlasContext* const handle = idle[found].handle;
      idle.erase(idle.begin() + static_cast<std::ptrdiff_t>(found));
      return handle;
    }
  }
  static std::once_flag registered;
  const gpu::RelaxedCapture relaxed;  // making a handle allocates, which a capture would forbid
  BlasContext* handle = nullptr;
  check_blas(create_handle(&handle), "making a BLAS handle");
  std::call_once(registered, [] { std::atexit(close_pool); });
  return handle;
}

}  // namespace

BorrowedHandle::BorrowedHandle(const DeviceFacts& device, void* stream, const mg_host* host)
    : workspace_(host, stream, workspace_bytes(device)),
      ordinal_(device.ordinal),
      stream_(stream),
      handle_(take(device.ordinal, stream)) {
  try {
    check_blas(set_stream(handle_, stream), "setting the stream of a BLAS handle");
    check_blas(set_workspace(handle_, workspace_.as<void>(), workspace_bytes(device)),
               "setting the workspace of a BLAS handle");
  } catch (...) {
    (void)destroy_handle(handle_);
    throw;
  }
}

BorrowedHandle::~BorrowedHandle() {
  (void)set_stream(handle_, nullptr);  // its next user sets both again
  {
    const std::lock_guard<std::mutex> held(pool().lock);
    if (!pool().closed && pool().idle.size() < kMostIdle) {
      pool().idle.push_back({ordinal_, stream_, handle_});
      return;
    }
  }
  (void)destroy_handle(handle_);
}

int64_t idle_handles() {
  const std::lock_guard<std::mutex> held(pool().lock);
  return static_cast<int64_t>(pool().idle.size());
}

}  // namespace multigemm
