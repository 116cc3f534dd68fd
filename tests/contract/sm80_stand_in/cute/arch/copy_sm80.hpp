// In place of CuTe's header. A copy does nothing before its thread waits for it, so that a missing wait shows.
#pragma once

#include <deque>
#include <vector>

#include "cuda_fp16.h"

namespace cute {

struct alignas(16) uint128_t {
  uint64_t low, high;
};

namespace emulated_copies {

struct Copy {
  void* to;
  const void* from;  // null: zeros
  size_t bytes;
};
struct Queue {
  unsigned launch = 0, block = 0;
  std::vector<Copy> open;
  std::deque<std::vector<Copy>> groups;
};
inline thread_local Queue queues[1024];

inline Queue& mine() {
  Queue& queue = queues[multigemm::gpu::thread_index.x];
  const unsigned launch = multigemm::gpu::launches, block = multigemm::gpu::block_index.x;
  if (queue.launch != launch || queue.block != block) queue = Queue{launch, block, {}, {}};
  return queue;
}

}  // namespace emulated_copies

template <class T, class U = T>
struct SM80_CP_ASYNC_CACHEALWAYS_ZFILL {
  static void copy(const T& from, U& to, bool there) {
    if (there) emulated::aligned(&from);
    emulated::aligned(&to);
    emulated_copies::mine().open.push_back({&to, there ? &from : nullptr, sizeof(T)});
  }
};
template <class T, class U = T>
using SM80_CP_ASYNC_CACHEGLOBAL_ZFILL = SM80_CP_ASYNC_CACHEALWAYS_ZFILL<T, U>;

inline void cp_async_fence() {
  auto& queue = emulated_copies::mine();
  queue.groups.push_back(std::move(queue.open));
  queue.open.clear();
}

template <int kLeft>
void cp_async_wait() {
  auto& groups = emulated_copies::mine().groups;
  for (; groups.size() > kLeft; groups.pop_front())
    for (const emulated_copies::Copy& copy : groups.front()) {
      if (copy.from)
        memcpy(copy.to, copy.from, copy.bytes);
      else
        memset(copy.to, 0, copy.bytes);
    }
}

}  // namespace cute
