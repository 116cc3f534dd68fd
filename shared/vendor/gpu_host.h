// A block of GPU threads on one CPU thread: each is a fiber with its own stack. A barrier switches to the next one
// until all have come, so a barrier that some thread misses ends the process with a message.
#pragma once

#include <ucontext.h>

#include <cstdio>
#include <cstdlib>
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
  explicit Block(int threads)
      : fibers_(static_cast<size_t>(threads)), warps_(fibers_.size() / 32 + 1), waves_(fibers_.size() / 64 + 1) {}

  // Runs one block to its end. `entry` must not throw.
  void run(void (*entry)(const void*), const void* arguments) {
    entry_ = entry;
    arguments_ = arguments;
    current = this;
    for (Fiber& fiber : fibers_) fiber.done = false;
    progress_ = 0;
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
      const size_t before = progress_;
      for (size_t i = 0; i < fibers_.size(); ++i) {
        if (fibers_[i].done) continue;
        active_ = i;
        thread_index.x = static_cast<unsigned>(i);
        swapcontext(&scheduler_, &fibers_[i].context);
        left = left || !fibers_[i].done;
      }
      if (left && progress_ == before) {
        std::fputs("multigemm: a barrier in a kernel was not reached by all of its threads\n", stderr);
        std::abort();
      }
    }
  }

  void barrier() { meet(all_, fibers_.size()); }
  // Of the 64 threads of a wavefront, and of 32 neighbours.
  void wave_barrier() { meet(waves_[active_ / 64], size_of(64)); }
  size_t wave_barriers() const { return waves_[active_ / 64].turn; }
  void warp_barrier() { meet(warps_[active_ / 32], size_of(32)); }

  // The value of the thread `step` before this one among 32 neighbours; of the first ones their own.
  int shuffle_up(int value, int step) {
    int* const shelf = shelves_[active_ / 32];
    const size_t lane = active_ % 32, from = lane < static_cast<size_t>(step) ? lane : lane - static_cast<size_t>(step);
    shelf[lane] = value;
    warp_barrier();
    const int found = shelf[from];
    warp_barrier();
    return found;
  }

  static inline thread_local Block* current = nullptr;

 private:
  static constexpr size_t kStackBytes = 64 * 1024;
  struct Fiber {
    ucontext_t context;
    std::unique_ptr<char[]> stack;
    bool done;
  };
  struct Meeting {
    size_t here = 0, turn = 0;
  };

  // Threads of the aligned `width` threads that this one is in.
  size_t size_of(size_t width) const {
    const size_t first = active_ / width * width;
    return fibers_.size() - first < width ? fibers_.size() - first : width;
  }

  void meet(Meeting& meeting, size_t threads) {
    if (++meeting.here == threads) {
      meeting.here = 0;
      ++meeting.turn;
      ++progress_;
      return;
    }
    const size_t me = active_;
    for (const size_t turn = meeting.turn; meeting.turn == turn;) swapcontext(&fibers_[me].context, &scheduler_);
  }

  // A thread that ends without a barrier leaves its stack to the next one.
  static void start() {
    Block* block = current;
    while (block->started_ < block->fibers_.size()) {
      block->active_ = block->started_++;
      thread_index.x = static_cast<unsigned>(block->active_);
      block->entry_(block->arguments_);
      block->fibers_[block->active_].done = true;
      ++block->progress_;
    }
  }

  std::vector<Fiber> fibers_;
  std::vector<Meeting> warps_, waves_;
  Meeting all_;
  int shelves_[32][32];
  size_t progress_ = 0;
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
#define __shfl_up_sync(mask, value, step) ::multigemm::gpu::Block::current->shuffle_up(value, step)
