// A block of GPU threads on one CPU thread: each is a fiber with its own stack; a barrier is a switch to the next.
#pragma once

#include <ucontext.h>

#include <memory>
#include <vector>

#include "runtime/host.h"

namespace multigemm {
namespace gpu {

struct Index {
  unsigned x = 0;
};

inline thread_local Index thread_index, block_index, block_size, grid_size;

class Block {
 public:
  explicit Block(int threads) : fibers_(static_cast<size_t>(threads)) {
    for (Fiber& fiber : fibers_) fiber.stack.reset(new char[kStackBytes]);
  }

  // Runs one block to its end. `entry` must not throw.
  void run(void (*entry)(const void*), const void* arguments) {
    entry_ = entry;
    arguments_ = arguments;
    current = this;
    for (Fiber& fiber : fibers_) {
      getcontext(&fiber.context);
      fiber.context.uc_stack.ss_sp = fiber.stack.get();
      fiber.context.uc_stack.ss_size = kStackBytes;
      fiber.context.uc_link = &scheduler_;
      fiber.done = false;
      makecontext(&fiber.context, &Block::start, 0);
    }
    for (size_t left = fibers_.size(); left > 0;) {
      left = 0;
      for (size_t i = 0; i < fibers_.size(); ++i) {
        if (fibers_[i].done) continue;
        active_ = i;
        thread_index.x = static_cast<unsigned>(i);
        swapcontext(&scheduler_, &fibers_[i].context);
        if (!fibers_[i].done) ++left;
      }
    }
  }

  void barrier() { swapcontext(&fibers_[active_].context, &scheduler_); }

  static inline thread_local Block* current = nullptr;

 private:
  static constexpr size_t kStackBytes = 64 * 1024;
  struct Fiber {
    ucontext_t context;
    std::unique_ptr<char[]> stack;
    bool done;
  };

  static void start() {
    Block* block = current;
    block->entry_(block->arguments_);
    block->fibers_[block->active_].done = true;
  }

  std::vector<Fiber> fibers_;
  ucontext_t scheduler_;
  size_t active_ = 0;
  void (*entry_)(const void*) = nullptr;
  const void* arguments_ = nullptr;
};

struct Queue {
  const Host* host;
};

template <class Arguments>
int launch(void (*kernel)(Arguments), int64_t blocks, int threads, const Queue& queue, const Arguments& arguments) {
  struct Call {
    void (*kernel)(Arguments);
    const Arguments& arguments;
  } call{kernel, arguments};
  // Blocks of one slot run one after another on one thread, so each slot keeps its fibers.
  std::vector<std::unique_ptr<Block>> slots;
  for (int64_t i = 0; i < queue.host->threads(); ++i) slots.emplace_back(new Block(threads));
  queue.host->for_each(blocks, 1, [&](int64_t index, int64_t slot) {
    block_index.x = static_cast<unsigned>(index);
    block_size.x = static_cast<unsigned>(threads);
    grid_size.x = static_cast<unsigned>(blocks);
    slots[static_cast<size_t>(slot)]->run(
        [](const void* argument) {
          const Call& c = *static_cast<const Call*>(argument);
          c.kernel(c.arguments);
        },
        &call);
  });
  return 0;
}

}  // namespace gpu
}  // namespace multigemm

#define threadIdx ::multigemm::gpu::thread_index
#define blockIdx ::multigemm::gpu::block_index
#define blockDim ::multigemm::gpu::block_size
#define gridDim ::multigemm::gpu::grid_size
#define __syncthreads() ::multigemm::gpu::Block::current->barrier()
