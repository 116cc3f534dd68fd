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
  explicit Block(int threads) : fibers_(static_cast<size_t>(threads)) {}

  // Runs one block to its end. `entry` must not throw.
  void run(void (*entry)(const void*), const void* arguments) {
    entry_ = entry;
    arguments_ = arguments;
    current = this;
    for (Fiber& fiber : fibers_) fiber.done = false;
    for (started_ = 0; started_ < fibers_.size();) {
      Fiber& fiber = fibers_[started_];
      if (!fiber.stack) fiber.stack.reset(new char[kStackBytes]);
      getcontext(&fiber.context);
      fiber.context.uc_stack.ss_sp = fiber.stack.get();
      fiber.context.uc_stack.ss_size = kStackBytes;
      fiber.context.uc_link = &scheduler_;
      makecontext(&fiber.context, &Block::start, 0);
      swapcontext(&scheduler_, &fiber.context);
    }
    for (bool left = true; left;) {
      left = false;
      for (size_t i = 0; i < fibers_.size(); ++i) {
        if (fibers_[i].done) continue;
        active_ = i;
        thread_index.x = static_cast<unsigned>(i);
        swapcontext(&scheduler_, &fibers_[i].context);
        left = left || !fibers_[i].done;
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

  // A thread that ends without a barrier leaves its stack to the next one.
  static void start() {
    Block* block = current;
    while (block->started_ < block->fibers_.size()) {
      block->active_ = block->started_++;
      thread_index.x = static_cast<unsigned>(block->active_);
      block->entry_(block->arguments_);
      block->fibers_[block->active_].done = true;
    }
  }

  std::vector<Fiber> fibers_;
  ucontext_t scheduler_;
  size_t started_ = 0, active_ = 0;
  void (*entry_)(const void*) = nullptr;
  const void* arguments_ = nullptr;
};

// Runs all blocks of a grid. `kernel` must not throw.
template <class Arguments>
void run_blocks(const Host& host, void (*kernel)(Arguments), int64_t blocks, int threads, const Arguments& arguments) {
  struct Call {
    void (*kernel)(Arguments);
    const Arguments& arguments;
  } call{kernel, arguments};
  // Blocks of one slot run one after another on one thread, so each slot keeps its fibers.
  std::vector<std::unique_ptr<Block>> slots;
  for (int64_t i = 0; i < host.threads(); ++i) slots.emplace_back(new Block(threads));
  host.for_each(blocks, 1, [&](int64_t index, int64_t slot) {
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
}

}  // namespace gpu
}  // namespace multigemm

#define threadIdx ::multigemm::gpu::thread_index
#define blockIdx ::multigemm::gpu::block_index
#define blockDim ::multigemm::gpu::block_size
#define gridDim ::multigemm::gpu::grid_size
#define __syncthreads() ::multigemm::gpu::Block::current->barrier()
