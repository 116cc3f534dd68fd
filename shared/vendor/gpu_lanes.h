// A team: threads of one block that exchange values without shared memory. On a GPU it is 32 neighbours, on the host
// one thread, so that what a team does is a plain loop there.
#pragma once

#include <string.h>

#include "vendor/gpu.h"

namespace multigemm {
namespace gpu {

#if defined(__HIP__)
constexpr int kLanes = 32;
// Waves of 64 hold two teams; the address counts bytes and is taken modulo the wave.
MG_DEVICE uint32_t word_of_lane(uint32_t word, int lane) {
  const unsigned at = (threadIdx.x & ~31u) | static_cast<unsigned>(lane);
  return static_cast<uint32_t>(__builtin_amdgcn_ds_bpermute(static_cast<int>(at << 2), static_cast<int>(word)));
}
__device__ __attribute__((convergent)) inline void team_sync() {
  __builtin_amdgcn_fence(__ATOMIC_RELEASE, "wavefront");
  __builtin_amdgcn_wave_barrier();
  __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "wavefront");
}
#elif defined(MG_GPU)
constexpr int kLanes = 32;
MG_DEVICE uint32_t word_of_lane(uint32_t word, int lane) { return __shfl_sync(0xffffffffu, word, lane); }
MG_DEVICE void team_sync() { __syncwarp(); }
#else
constexpr int kLanes = 1;
inline uint32_t word_of_lane(uint32_t word, int) { return word; }
inline void team_sync() {}
#endif

MG_DEVICE int lane_index() { return static_cast<int>(threadIdx.x) % kLanes; }

// The value that the given lane of the team has. All lanes call it together.
template <class T>
MG_DEVICE T value_of_lane(T value, int lane) {
  static_assert(sizeof(T) % 4 == 0, "values are exchanged in words");
  uint32_t words[sizeof(T) / 4];
  memcpy(words, &value, sizeof(T));
  MG_UNROLL
  for (size_t i = 0; i < sizeof(T) / 4; ++i) words[i] = word_of_lane(words[i], lane);
  memcpy(&value, words, sizeof(T));
  return value;
}

// Over the lanes of the team, always in the same order; every lane gets the same bits.
template <class T>
MG_DEVICE T team_sum(T value) {
  MG_UNROLL
  for (int step = kLanes / 2; step > 0; step /= 2) value += value_of_lane(value, lane_index() ^ step);
  return value;
}
template <class T>
MG_DEVICE T team_max(T value) {
  MG_UNROLL
  for (int step = kLanes / 2; step > 0; step /= 2) {
    const T other = value_of_lane(value, lane_index() ^ step);
    if (other > value) value = other;
  }
  return value;
}
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
MG_DEVICE uint32_t team_max(uint32_t value) { return __reduce_max_sync(0xffffffffu, value); }
#endif

// How many lanes before this one have the same value, and how many lanes have it.
struct Same {
  int before, count;
};
MG_DEVICE Same team_same(int32_t value) {
#if defined(__CUDA_ARCH__)
  const unsigned same = __match_any_sync(0xffffffffu, value);
  return {__popc(same & ((1u << lane_index()) - 1)), __popc(same)};
#else
  Same found{0, 0};
  for (int lane = 0; lane < kLanes; ++lane) {
    const bool equal = value_of_lane(value, lane) == value;
    found.before += equal && lane < lane_index();
    found.count += equal;
  }
  return found;
#endif
}

// Sum over the lanes before this one.
MG_DEVICE int32_t team_before(int32_t value) {
  int32_t through = value;
  for (int step = 1; step < kLanes; step *= 2) {
    const int32_t other = value_of_lane(through, lane_index() >= step ? lane_index() - step : 0);
    if (lane_index() >= step) through += other;
  }
  return through - value;
}

}  // namespace gpu
}  // namespace multigemm
