// The caller's services with their defaults, so that kernels never ask which are there.
#pragma once

#include <atomic>
#include <cstdlib>

#include "multigemm/abi.h"
#include "runtime/status.h"

namespace multigemm {

class Host {
 public:
  // `work` is the call's number of multiply-adds. Below some microseconds of it one thread is faster than waking
  // a second one, and very much faster where other processes keep the cores busy.
  Host(const mg_host* host, double work) : host_(host), alone_(work < kWorkForThreads) {}

  int64_t threads() const { return !alone_ && host_ && host_->parallel_for && host_->threads > 1 ? host_->threads : 1; }
  bool has_matmul() const { return host_ && host_->matmul; }

  void matmul(const mg_matmul& product) const {
    if (host_->matmul(host_->context, &product) != 0)
      throw Failure(MG_DEVICE_ERROR, "the host's matrix product failed");
  }

  void* allocate(int64_t bytes) const {
    void* memory = host_ && host_->allocate ? host_->allocate(host_->context, bytes)
                                            : std::aligned_alloc(64, static_cast<size_t>((bytes + 63) / 64 * 64));
    if (!memory) throw Failure(MG_OUT_OF_MEMORY, "no workspace of " + std::to_string(bytes) + " bytes");
    return memory;
  }
  void release(void* memory) const {
    if (host_ && host_->allocate)
      host_->release(host_->context, memory);
    else
      std::free(memory);
  }

  // Calls task(index, slot) for each index below `count`, `slot` below threads(). Threads take the next few
  // indices when they are free, so groups of very different heights balance; a task must not depend on its slot.
  template <class Task>
  void for_each(int64_t count, int64_t at_once, const Task& task) const {
    struct Shared {
      std::atomic<int64_t> next{0};
      int64_t count, at_once;
      const Task& task;
    } shared{{0}, count, at_once < 1 ? 1 : at_once, task};
    auto run = [](int64_t begin, int64_t end, void* argument) {
      auto& s = *static_cast<Shared*>(argument);
      for (int64_t slot = begin; slot < end; ++slot)
        for (int64_t first; (first = s.next.fetch_add(s.at_once, std::memory_order_relaxed)) < s.count;)
          for (int64_t i = first; i < first + s.at_once && i < s.count; ++i) s.task(i, slot);
    };
    const int64_t slots = count < threads() ? count : threads();
    if (slots <= 1)
      run(0, 1, &shared);
    else
      host_->parallel_for(host_->context, 0, slots, 1, run, &shared);
  }

 private:
  static constexpr double kWorkForThreads = 1 << 17;

  const mg_host* host_;
  bool alone_;
};

// Memory of one call, given back at the end of the scope.
class Workspace {
 public:
  Workspace(const Host& host, int64_t bytes) : host_(host), memory_(bytes > 0 ? host.allocate(bytes) : nullptr) {}
  ~Workspace() {
    if (memory_) host_.release(memory_);
  }
  Workspace(const Workspace&) = delete;
  Workspace& operator=(const Workspace&) = delete;
  template <class T>
  T* at(int64_t byte_offset) const {
    return reinterpret_cast<T*>(static_cast<char*>(memory_) + byte_offset);
  }

 private:
  const Host& host_;
  void* memory_;
};

}  // namespace multigemm
