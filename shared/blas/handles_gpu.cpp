#include "blas/handles.h"

#include <algorithm>
#include <cstdlib>
#include <mutex>
#include <string>
#include <vector>

#include "blas/blas_gpu.h"
#include "launch/text.h"
#include "multigemm/abi_blas.h"
#include "runtime/status.h"
#include "runtime/without.h"

namespace multigemm {
namespace {

constexpr size_t kMostIdle = 16;  // for all devices together; a handle keeps some megabytes of device memory

struct Entry {
  BlasContext* handle;
  int ordinal;  // the device that it serves
  int made_on;  // the device that was current when it was made, which has to be the same
  void* stream;
  bool idle;
};

struct Pool {
  std::mutex lock;
  std::vector<Entry> entries;  // all that there are
  int64_t made = 0;
  bool closed = false;

  size_t idle() const {
    size_t count = 0;
    for (const Entry& entry : entries) count += entry.idle ? 1 : 0;
    return count;
  }
};

Pool& pool() {
  static Pool* const one = new Pool;  // never destroyed: threads may outlive static objects
  return *one;
}

// Registered after the runtime's own exit handler, so it runs before that one.
void close_pool() {
  std::vector<Entry> idle;
  {
    const std::lock_guard<std::mutex> held(pool().lock);
    pool().closed = true;
    auto& entries = pool().entries;
    const auto rest = std::partition(entries.begin(), entries.end(), [](const Entry& entry) { return !entry.idle; });
    idle.assign(rest, entries.end());
    entries.erase(rest, entries.end());
  }
  for (const Entry& entry : idle) (void)destroy_handle(entry.handle);
}

bool serves(const Entry& entry, int ordinal) { return entry.idle && (entry.ordinal == ordinal || !kHasPoolKey); }

BlasContext* take(int ordinal, void* stream) {
  {
    const std::lock_guard<std::mutex> held(pool().lock);
    Entry* found = nullptr;
    for (Entry& entry : pool().entries)
      if (serves(entry, ordinal) && (!found || (entry.stream == stream && found->stream != stream))) found = &entry;
    if (found) {
      found->ordinal = ordinal;
      found->stream = stream;
      found->idle = false;
      return found->handle;
    }
  }
  static std::once_flag registered;
  const gpu::RelaxedCapture relaxed;  // making a handle allocates, which a capture would forbid
  Entry made{nullptr, ordinal, 0, stream, false};
  check_gpu(gpu::get_device(&made.made_on), "reading the current device");
  check_blas(create_handle(&made.handle), "making a BLAS handle");
  std::call_once(registered, [] { std::atexit(close_pool); });
  const std::lock_guard<std::mutex> held(pool().lock);
  ++pool().made;
  pool().entries.push_back(made);
  return made.handle;
}

// Leaves the handle for the next call, unless it is one too many or `broken`.
void give_back(BlasContext* handle, bool broken) {
  {
    const std::lock_guard<std::mutex> held(pool().lock);
    auto& entries = pool().entries;
    const auto found =
        std::find_if(entries.begin(), entries.end(), [&](const Entry& entry) { return entry.handle == handle; });
    if (!broken && !pool().closed && pool().idle() < kMostIdle) {
      found->idle = true;
      return;
    }
    entries.erase(found);
  }
  (void)destroy_handle(handle);
}

std::string report() {
  const std::lock_guard<std::mutex> held(pool().lock);
  std::string handles;
  for (const Entry& entry : pool().entries)
    handles += std::string(handles.empty() ? "" : ", ") + "{\"device\": " + std::to_string(entry.ordinal) +
               ", \"made_on\": " + std::to_string(entry.made_on) +
               ", \"stream\": " + std::to_string(reinterpret_cast<uintptr_t>(entry.stream)) +
               ", \"idle\": " + (entry.idle ? "true" : "false") + "}";
  return "{\"made\": " + std::to_string(pool().made) + ", \"most_idle\": " + std::to_string(kMostIdle) +
         ", \"handles\": [" + handles + "]}";
}

}  // namespace

BorrowedHandle::BorrowedHandle(const DeviceFacts& device, void* stream, const mg_host* host)
    : workspace_(host, stream, workspace_bytes(device)), handle_(take(device.ordinal, stream)) {
  try {
    check_blas(set_stream(handle_, stream), "setting the stream of a BLAS handle");
    check_blas(set_workspace(handle_, workspace_.as<void>(), workspace_bytes(device)),
               "setting the workspace of a BLAS handle");
  } catch (...) {
    give_back(handle_, true);
    throw;
  }
}

BorrowedHandle::~BorrowedHandle() {
  (void)set_stream(handle_, nullptr);  // its next user sets both again
  give_back(handle_, false);
}

}  // namespace multigemm

extern "C" int32_t MG_NAME(mg_blas_handles)(char* text, int64_t capacity, int64_t* length) {
  return multigemm::guarded([&] { multigemm::copy_text(multigemm::report(), text, capacity, length); });
}
