// In place of shared/vendor/gpu.h: kernels wait in their stream's queue until somebody waits for the stream, so that
// what reads or frees their arguments too early is found out.
#pragma once

#include "stand_in.h"
#include "vendor/gpu_host.h"

#define MG_KERNEL
#define MG_DEVICE inline
#define MG_SHARED static thread_local
#define MG_DYNAMIC_SHARED(name) unsigned char* const name = ::multigemm::gpu::dynamic_shared
#define MG_BLOCK(threads, blocks)
#define MG_UNROLL
#define MG_UNROLL_BY(count)

namespace multigemm {
namespace gpu {

struct Queue {
  void* stream;
};

inline void opaque(const float&) {}
inline void opaque(const double&) {}

template <class Arguments>
int launch(void (*kernel)(Arguments), int64_t blocks, int threads, const Queue& queue, const Arguments& arguments) {
  static_assert(sizeof(Arguments) <= 4096, "kernel arguments may take 4 KB");
  if (const int error = stand_in::answer("launch", queue.stream)) return error;
  if (blocks < 1 || threads < 1 || threads > 1024) return stand_in::kInvalidConfiguration;
  stand_in::enqueue(queue.stream, [kernel, blocks, threads, arguments] {
    run_blocks(Host(nullptr, 0), kernel, blocks, threads, arguments);
  });
  return 0;
}

constexpr int kInvalidValue = stand_in::kInvalidValue;
inline thread_local unsigned char* dynamic_shared = nullptr;
inline thread_local unsigned launches = 0;  // that were run

// A launch with so many bytes of shared memory, which hold NaNs at first.
template <class Arguments>
int launch_shared(void (*kernel)(Arguments), int64_t blocks, int threads, int bytes, int most, bool, const Queue& queue,
                  const Arguments& arguments) {
  static_assert(sizeof(Arguments) <= 4096, "kernel arguments may take 4 KB");
  if (const int error = stand_in::answer("launch", queue.stream)) return error;
  if (blocks < 1 || threads < 1 || threads > 1024) return stand_in::kInvalidConfiguration;
  if (bytes > 48 * 1024 && bytes > most) return stand_in::kInvalidValue;
  stand_in::enqueue(queue.stream, [kernel, blocks, threads, bytes, arguments] {
    ++launches;
    std::vector<unsigned char> memory(static_cast<size_t>(bytes) + 15, 0xff);
    dynamic_shared = memory.data() + (16 - reinterpret_cast<uintptr_t>(memory.data()) % 16) % 16;
    run_blocks(Host(nullptr, 0), kernel, blocks, threads, arguments);
  });
  return 0;
}

}  // namespace gpu
}  // namespace multigemm
