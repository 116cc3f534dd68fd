// In place of CUDA's header: what the kernels for sm_80 use of CUDA C++, for the host.
#pragma once

#include <math.h>
#include <string.h>

#include <cstdio>
#include <cstdlib>
#include <type_traits>

#include "kernels/grouped_mm/numbers_simt.cuh"
#include "vendor/gpu.h"

#define __global__
#define __launch_bounds__(...)
#define __grid_constant__

struct alignas(16) float4 {
  float x, y, z, w;
};
struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) double2 {
  double x, y;
};
struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline double2 make_double2(double x, double y) { return {x, y}; }
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }

struct __half {
  uint16_t bits;
};
struct __nv_bfloat16 {
  uint16_t bits;
};
inline float __half2float(__half value) { return multigemm::simt::half_to_float(value.bits); }
inline float __bfloat162float(__nv_bfloat16 value) {
  return multigemm::simt::bits_to_float(static_cast<uint32_t>(value.bits) << 16);
}
inline __half __float2half_rn(float value) { return {multigemm::simt::narrow_16(value, 5, 10)}; }
inline __nv_bfloat16 __float2bfloat16_rn(float value) { return {multigemm::simt::narrow_16(value, 8, 7)}; }

namespace emulated {

using multigemm::gpu::Block;

inline int lane() { return static_cast<int>(multigemm::gpu::thread_index.x) % 32; }
inline int warp() { return static_cast<int>(multigemm::gpu::thread_index.x) / 32; }

// What each lane of a warp shows the others: 32 bytes.
struct Shown {
  uint64_t words[4];
};
inline thread_local Shown shown[2][32][32];
inline thread_local unsigned turns[32][32];

// Shows a value and calls `look` once all lanes have. Two shelves in turn, so that one barrier does: whoever fills a
// shelf again, all have left it.
template <class T, class Look>
auto exchange(const T& value, Look look) {
  static_assert(sizeof(T) <= sizeof(Shown));
  Shown(&shelf)[32] = shown[turns[warp()][lane()]++ % 2][warp()];
  memcpy(&shelf[lane()], &value, sizeof value);
  Block::current->warp_barrier();
  return look([&shelf](int lane) {
    T found;
    memcpy(&found, &shelf[lane], sizeof found);
    return found;
  });
}

// The address of an access must be a multiple of its size.
template <class T>
const T* aligned(const T* address) {
  if (reinterpret_cast<uintptr_t>(address) % sizeof(T)) {
    fprintf(stderr, "an access of %d bytes is not aligned\n", static_cast<int>(sizeof(T)));
    abort();
  }
  return address;
}

}  // namespace emulated

inline void __syncwarp() { emulated::Block::current->warp_barrier(); }
template <class T>
T __shfl_sync(unsigned, T value, int from) {
  return emulated::exchange(value, [&](auto of) { return of(from); });
}
inline unsigned __ballot_sync(unsigned, bool value) {
  return emulated::exchange(value, [](auto of) {
    unsigned all = 0;
    for (int lane = 0; lane < 32; ++lane) all |= static_cast<unsigned>(of(lane)) << lane;
    return all;
  });
}
inline int __ffs(int value) { return __builtin_ffs(value); }
inline uint32_t __funnelshift_r(uint32_t low, uint32_t high, unsigned shift) {
  return static_cast<uint32_t>((static_cast<uint64_t>(high) << 32 | low) >> (shift % 32));
}
template <class T>
T __ldg(const T* address) {
  return *emulated::aligned(address);
}
template <class T>
T __ldcs(const T* address) {
  return *emulated::aligned(address);
}
template <class T>
void __stcs(T* address, const T& value) {
  emulated::aligned(address);
  *address = value;
}
