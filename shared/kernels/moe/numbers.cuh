// Formula: packs of neighbouring elements, read and written at once, widened to the type in which sums are kept and
// rounded back once. Layouts: Packed: 16 bytes, aligned to them; Single: one element anywhere.
// Dtypes:  float64, float32, float16, bfloat16; Single takes them at run time, each operand its own.
// Architectures: any GPU that nvcc or hipcc compile for, and the host.
// Limits:  none.
#pragma once

#include "kernels/grouped_mm/numbers_simt.cuh"
#include "vendor/gpu_lanes.h"
#include "vendor/gpu_math.h"

namespace multigemm {
namespace moe {

constexpr int kThreads = 256;
// Packs of one row that a team handles at once. Of several for a lane, AMD's compiler keeps arrays in memory.
#if defined(__HIP__)
constexpr int kTile = gpu::kLanes;
#else
constexpr int kTile = 128;
#endif
constexpr int kPacks = kTile / gpu::kLanes;  // of them, a lane's

struct Half {
  uint16_t bits;
};
struct Bfloat {
  uint16_t bits;
};

MG_DEVICE double widen(double value) { return value; }
MG_DEVICE float widen(float value) { return value; }
MG_DEVICE float widen(Bfloat value) { return gpu::widen_bfloat(value.bits); }
MG_DEVICE float widen(Half value) {
#if defined(__CUDA_ARCH__) || defined(__HIP__)
  return gpu::widen_half(value.bits);
#else
  return simt::half_to_float(value.bits);
#endif
}
MG_DEVICE void narrow(double value, double* to) { *to = value; }
MG_DEVICE void narrow(float value, float* to) { *to = value; }
MG_DEVICE void narrow(float value, Bfloat* to) { to->bits = gpu::narrow_bfloat(value); }
MG_DEVICE void narrow(float value, Half* to) {
#if defined(__CUDA_ARCH__) || defined(__HIP__)
  to->bits = gpu::narrow_half(value);
#else
  to->bits = simt::narrow_16(static_cast<double>(value), 5, 10);
#endif
}

template <class T>
struct Wide {
  using type = float;
};
template <>
struct Wide<double> {
  using type = double;
};

#if defined(__HIP__)
typedef uint32_t Word16 __attribute__((ext_vector_type(4)));  // AMD's compiler keeps a struct of an array in memory
#else
struct alignas(16) Word16 {
  uint32_t words[4];
};
#endif

// Elements of type T, which every operand has.
template <class T>
struct Packed {
  using A = typename Wide<T>::type;
  using Raw = Word16;
  static constexpr int kCount = 16 / static_cast<int>(sizeof(T));
  static constexpr bool kCoarse = sizeof(T) == 2;  // results are rounded to two bytes

  // The pack `index` of the row that begins at element `row`.
  static MG_DEVICE Raw read(const void* data, int32_t, int64_t row, int64_t index) {
    return *(reinterpret_cast<const Raw*>(static_cast<const T*>(data) + row) + index);
  }
  static MG_DEVICE void unpack(const Raw& raw, A* values) {
    T elements[kCount];
    memcpy(elements, &raw, 16);
    MG_UNROLL
    for (int i = 0; i < kCount; ++i) values[i] = widen(elements[i]);
  }
  static MG_DEVICE void write(void* data, int32_t, int64_t row, int64_t index, const A* values) {
    T elements[kCount];
    MG_UNROLL
    for (int i = 0; i < kCount; ++i) narrow(values[i], &elements[i]);
    Raw raw;
    memcpy(&raw, elements, 16);
    *(reinterpret_cast<Raw*>(static_cast<T*>(data) + row) + index) = raw;
  }
};

template <class Type>
struct Single {
  using A = Type;
  using Raw = Type;
  static constexpr int kCount = 1;
  static constexpr bool kCoarse = false;

  static MG_DEVICE Raw read(const void* data, int32_t dtype, int64_t row, int64_t index) {
    return simt::load<A>(data, dtype, row + index);
  }
  static MG_DEVICE void unpack(const Raw& raw, A* values) { *values = raw; }
  static MG_DEVICE void write(void* data, int32_t dtype, int64_t row, int64_t index, const A* values) {
    simt::store<A>(data, dtype, row + index, *values);
  }
};

// The team's number among all of the grid's, and how many there are.
MG_DEVICE int64_t team_number() { return (int64_t{blockIdx.x} * blockDim.x + threadIdx.x) / gpu::kLanes; }
MG_DEVICE int64_t team_total() { return int64_t{gridDim.x} * blockDim.x / gpu::kLanes; }

// A grid whose teams take `units` pieces of work in turn.
inline int64_t blocks_for(int64_t units) {
#if defined(MG_GPU)
  const int64_t teams = kThreads / gpu::kLanes, blocks = (units + teams - 1) / teams;
  return blocks < (1 << 16) ? blocks : 1 << 16;
#else
  return units < 16 ? units : 16;  // few, because starting one costs more than a piece of work
#endif
}
// Packs of a row for one team: fewer where all teams would not have work.
inline int64_t tile_for(int64_t rows, int64_t packs) {
#if defined(MG_GPU)
  if (rows * ((packs + kTile - 1) / kTile) < 2048) return gpu::kLanes;
#endif
  (void)rows;
  (void)packs;
  return kTile;
}
// On the host a block of kernels without a barrier is one thread, whose loops are then plain ones.
#if defined(MG_GPU)
constexpr int kRowThreads = kThreads;
#else
constexpr int kRowThreads = 1;
#endif

inline int64_t bytes_of(int32_t dtype) { return dtype == MG_FLOAT64 ? 8 : dtype == MG_FLOAT32 ? 4 : 2; }
inline bool whole_packs(const void* data, int64_t row, int32_t dtype) {
  return reinterpret_cast<uintptr_t>(data) % 16 == 0 && row * bytes_of(dtype) % 16 == 0;
}

// Calls f with the reader of packs of a dtype.
template <class Function>
int with_packs(bool packs, int32_t dtype, const Function& f) {
  switch (dtype) {
    case MG_FLOAT64: return packs ? f(Packed<double>()) : f(Single<double>());
    case MG_FLOAT32: return packs ? f(Packed<float>()) : f(Single<float>());
    case MG_FLOAT16: return packs ? f(Packed<Half>()) : f(Single<float>());
    default: return packs ? f(Packed<Bfloat>()) : f(Single<float>());
  }
}

}  // namespace moe
}  // namespace multigemm
