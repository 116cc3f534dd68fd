// Formula: sums += a b for 16 x 16 numbers, by the 64 threads of a wavefront: one matrix instruction of gfx90a and up.
// Layouts: lane l gives row (a) or column (b) l % 16 at `kEach` steps of the depth from kEach (l / 16) on; it has the
//          sums of column l % 16 in the rows 4 (l / 16) + r, in float64 4 r + l / 16. Source: AMD's matrix instruction
//          calculator, and the ISA guides "CDNA2" and "CDNA3", section "Matrix Arithmetic Instructions".
// Dtypes:  bfloat16, float16, float32, float32 as TF32 (gfx942; elsewhere as float32), float64.
// Architectures: gfx90a, gfx942; the host, which computes the same from the layout above, lane by lane.
// Limits:  all lanes call it. gfx90a takes subnormal numbers of 16 bits, and gives subnormal sums of them, as zeros.
#pragma once

#include "kernels/grouped_mm/numbers_simt.cuh"

#if defined(__gfx90a__) || defined(__gfx942__)
#define MG_MFMA 1
#elif !defined(__HIP__)
#define MG_MFMA_EMULATED 1
#endif

namespace multigemm {
namespace mfma {

constexpr int kWave = 64;
constexpr int kThreads = 256;

#if defined(__HIP__)
typedef float FloatSums __attribute__((ext_vector_type(4)));
typedef double DoubleSums __attribute__((ext_vector_type(4)));
typedef short Shorts __attribute__((ext_vector_type(4)));
typedef _Float16 Halves __attribute__((ext_vector_type(4)));
typedef float Floats __attribute__((ext_vector_type(2)));
#else
template <class T>
struct Four {
  T values[4];
  MG_DEVICE T& operator[](int i) { return values[i]; }
  MG_DEVICE T operator[](int i) const { return values[i]; }
};
using FloatSums = Four<float>;
using DoubleSums = Four<double>;
#endif

// 16 bytes of neighbours along the depth, as bits.
struct alignas(16) Pack {
  uint32_t words[4];
};

template <class To, class From>
MG_DEVICE To bits_of(const From& from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  memcpy(&to, &from, sizeof to);
  return to;
}

struct Bfloat16 {
  static constexpr int kEach = 4;
  MG_DEVICE static float value(const uint32_t* words, int i) {
    return simt::bits_to_float(i % 2 ? words[i / 2] & 0xffff0000u : words[i / 2] << 16);
  }
  MG_DEVICE static int row(int lane, int r) { return 4 * (lane / 16) + r; }
};
struct Float16 : Bfloat16 {
  MG_DEVICE static float value(const uint32_t* words, int i) {
    return simt::half_to_float(static_cast<uint16_t>(words[i / 2] >> 16 * (i % 2)));
  }
};
struct Float32 : Bfloat16 {
  static constexpr int kEach = 1;
  MG_DEVICE static float value(const uint32_t* words, int i) { return simt::bits_to_float(words[i]); }
};
struct Tf32 : Float32 {
  static constexpr int kEach = 2;
  MG_DEVICE static float value(const uint32_t* words, int i) {  // 10 bits of fraction
    return simt::bits_to_float((words[i] + 0xfffu + (words[i] >> 13 & 1)) & ~0x1fffu);
  }
};
struct Float64 {
  static constexpr int kEach = 1;
  MG_DEVICE static double value(const uint32_t* words, int) {
    return bits_of<double>(uint64_t{words[1]} << 32 | words[0]);
  }
  MG_DEVICE static int row(int lane, int r) { return 4 * r + lane / 16; }
};

#if defined(MG_MFMA_EMULATED)

// What every lane of every wavefront gives.
struct Given {
  uint32_t a[2], b[2];
};

template <class Kind, class Sums>
MG_DEVICE void multiply(const uint32_t* a, const uint32_t* b, int words, Sums& sums) {
  // Wavefronts take two shelves in turn, so that one barrier does: whoever fills a shelf again, all have left it.
  MG_SHARED Given given[2][kThreads];
  gpu::Block& block = *gpu::Block::current;
  const int thread = static_cast<int>(threadIdx.x), lane = thread % kWave, wave = thread / kWave;
  Given* const all = given[block.wave_barriers() % 2] + wave * kWave;
  for (int i = 0; i < words; ++i) {
    all[lane].a[i] = a[i];
    all[lane].b[i] = b[i];
  }
  block.wave_barrier();
  for (int r = 0; r < 4; ++r)
    for (int k = 0; k < 4 * Kind::kEach; ++k) {
      const int from = 16 * (k / Kind::kEach), at = k % Kind::kEach;
      sums[r] += Kind::value(all[from + Kind::row(lane, r)].a, at) * Kind::value(all[from + lane % 16].b, at);
    }
}

MG_DEVICE void multiply(Bfloat16, const uint32_t* a, const uint32_t* b, FloatSums& sums) {
  multiply<Bfloat16>(a, b, 2, sums);
}
MG_DEVICE void multiply(Float16, const uint32_t* a, const uint32_t* b, FloatSums& sums) {
  multiply<Float16>(a, b, 2, sums);
}
MG_DEVICE void multiply(Float32, const uint32_t* a, const uint32_t* b, FloatSums& sums) {
  multiply<Float32>(a, b, 1, sums);
}
MG_DEVICE void multiply(Tf32, const uint32_t* a, const uint32_t* b, FloatSums& sums) { multiply<Tf32>(a, b, 2, sums); }
MG_DEVICE void multiply(Float64, const uint32_t* a, const uint32_t* b, DoubleSums& sums) {
  multiply<Float64>(a, b, 2, sums);
}

#elif defined(MG_MFMA)

template <class Vector>
MG_DEVICE Vector vector_of(const uint32_t* words) {
  Vector vector;
  memcpy(&vector, words, sizeof vector);
  return vector;
}

MG_DEVICE void multiply(Bfloat16, const uint32_t* a, const uint32_t* b, FloatSums& sums) {
  sums = __builtin_amdgcn_mfma_f32_16x16x16bf16_1k(vector_of<Shorts>(a), vector_of<Shorts>(b), sums, 0, 0, 0);
}
MG_DEVICE void multiply(Float16, const uint32_t* a, const uint32_t* b, FloatSums& sums) {
  sums = __builtin_amdgcn_mfma_f32_16x16x16f16(vector_of<Halves>(a), vector_of<Halves>(b), sums, 0, 0, 0);
}
MG_DEVICE void multiply(Float32, const uint32_t* a, const uint32_t* b, FloatSums& sums) {
  sums = __builtin_amdgcn_mfma_f32_16x16x4f32(vector_of<float>(a), vector_of<float>(b), sums, 0, 0, 0);
}
MG_DEVICE void multiply(Tf32, const uint32_t* a, const uint32_t* b, FloatSums& sums) {
#if defined(__gfx942__)
  sums = __builtin_amdgcn_mfma_f32_16x16x8_xf32(vector_of<Floats>(a), vector_of<Floats>(b), sums, 0, 0, 0);
#else
  multiply(Float32(), a, b, sums);
  multiply(Float32(), a + 1, b + 1, sums);
#endif
}
MG_DEVICE void multiply(Float64, const uint32_t* a, const uint32_t* b, DoubleSums& sums) {
  sums = __builtin_amdgcn_mfma_f64_16x16x4f64(vector_of<double>(a), vector_of<double>(b), sums, 0, 0, 0);
}

#else  // another AMD GPU, for which the host never chooses these kernels

template <class Kind, class Sums>
MG_DEVICE void multiply(Kind, const uint32_t*, const uint32_t*, Sums&) {
  __builtin_trap();
}

#endif

}  // namespace mfma
}  // namespace multigemm
