// Formula: sums += A B for a tile of rows and columns over a slice of the depth, by one warp; and the copies that
// bring both operands into shared memory.
// Layouts: an operand's tile lies as in memory, lines of unit stride with padding: along its depth or across it.
// Dtypes:  float64 (DMMA), float32 (FMA, or TF32 on tensor cores), float16 and bfloat16 (tensor cores, float32 sums).
// Architectures: sm_80 and up.
// Limits:  tiles of compile-time size.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "cute/arch/copy_sm75.hpp"
#include "cute/arch/copy_sm80.hpp"
#include "cute/arch/mma_sm80.hpp"
#include "kernels/grouped_mm/groups_block.cuh"

namespace multigemm {
namespace sm80 {

// Blocks that must stay on a multiprocessor at once; code for some architectures needs a few registers more.
constexpr int least_blocks(int blocks) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
  return blocks > 2 ? blocks - 1 : blocks;
#else
  return blocks;
#endif
}

// Of so many steps along the depth, how many are unrolled together: all of them, but where both operands lie across the
// depth, code for newer architectures would spill.
template <class A, class B>
constexpr int unrolled(int steps) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
  return A::kAlongDepth || B::kAlongDepth ? steps : 1;
#else
  return steps;
#endif
}

template <class T>
struct SumOf {
  using type = float;
};
template <>
struct SumOf<double> {
  using type = double;
};

MG_DEVICE float widen(float value) { return value; }
MG_DEVICE double widen(double value) { return value; }
MG_DEVICE float widen(__half value) { return __half2float(value); }
MG_DEVICE float widen(__nv_bfloat16 value) { return __bfloat162float(value); }

template <class T, class A>
MG_DEVICE T narrow(A value) {
  if constexpr (sizeof(T) == 2 && sizeof(A) == 4) {
    if constexpr (std::is_same<T, __half>::value)
      return __float2half_rn(value);
    else
      return __float2bfloat16_rn(value);
  } else {
    return static_cast<T>(value);
  }
}

// 16 bytes of one type, as named members: an array seen through another type would lie in local memory.
template <class T>
struct Sixteen;
template <>
struct Sixteen<float> {
  using type = float4;
  MG_DEVICE static void spread(const float4& from, float* to) {
    to[0] = from.x, to[1] = from.y, to[2] = from.z, to[3] = from.w;
  }
  MG_DEVICE static float4 gather(const float* from) { return make_float4(from[0], from[1], from[2], from[3]); }
};
template <>
struct Sixteen<double> {
  using type = double2;
  MG_DEVICE static void spread(const double2& from, double* to) { to[0] = from.x, to[1] = from.y; }
  MG_DEVICE static double2 gather(const double* from) { return make_double2(from[0], from[1]); }
};

enum class From { kShared, kRead, kStreamed };

// to[0, 16 bytes) = *from if `inside`, else zeros.
template <From kFrom, class T>
MG_DEVICE void load_sixteen(T* to, const T* from, bool inside = true) {
  using V = typename Sixteen<T>::type;
  V value{};
  if (inside) {
    const V* at = reinterpret_cast<const V*>(from);
    value = kFrom == From::kShared ? *at : kFrom == From::kRead ? __ldg(at) : __ldcs(at);
  }
  Sixteen<T>::spread(value, to);
}

// Writes `kRun` neighbours past the caches' usual order: outputs are not read again soon.
template <class O, int kRun, class A>
MG_DEVICE void store_run(O* to, const A* values, int count, bool wide) {
  constexpr int kBytes = kRun * static_cast<int>(sizeof(O));
  if (wide && count >= kRun) {
    O run[kRun];
#pragma unroll
    for (int i = 0; i < kRun; ++i) run[i] = narrow<O>(values[i]);
    if constexpr (kBytes % 16 == 0) {
      using V = typename Sixteen<O>::type;
      constexpr int kPart = 16 / static_cast<int>(sizeof(O));
#pragma unroll
      for (int i = 0; i < kRun; i += kPart) __stcs(reinterpret_cast<V*>(to + i), Sixteen<O>::gather(run + i));
    } else if constexpr (kBytes == 8) {
      static_assert(kRun == 2);
      __stcs(reinterpret_cast<float2*>(to), make_float2(run[0], run[1]));
    } else {
      static_assert(kBytes == 4 && kRun == 2);
      uint32_t bits = reinterpret_cast<const uint16_t&>(run[1]);
      bits = bits << 16 | reinterpret_cast<const uint16_t&>(run[0]);
      __stcs(reinterpret_cast<uint32_t*>(to), bits);
    }
  } else {
#pragma unroll
    for (int i = 0; i < kRun; ++i)
      if (i < count) to[i] = narrow<O>(values[i]);
  }
}

// out_dtype is the input's or float32.
template <class T, int kRun, class A>
MG_DEVICE void store_either(void* out, int64_t at, bool same, const A* values, int count, bool wide) {
  if constexpr (std::is_same<T, float>::value) {
    store_run<float, kRun>(static_cast<float*>(out) + at, values, count, wide);
  } else {
    if (same)
      store_run<T, kRun>(static_cast<T*>(out) + at, values, count, wide);
    else
      store_run<float, kRun>(static_cast<float*>(out) + at, values, count, wide);
  }
}

template <class T, int kWidth_, int kDepth_, bool kAlongDepth_, int kPad>
struct Operand {
  static constexpr int kWidth = kWidth_, kDepth = kDepth_;
  static constexpr bool kAlongDepth = kAlongDepth_;
  static constexpr int kLines = kAlongDepth ? kWidth : kDepth, kLength = kAlongDepth ? kDepth : kWidth;
  static constexpr int kPitch = kLength + kPad, kSize = kLines * kPitch;
  MG_DEVICE static int at(int width, int depth) {
    return kAlongDepth ? width * kPitch + depth : depth * kPitch + width;
  }

  // Brings a tile in, zeros past `width_left` and `depth_left`; asynchronous but for single 16-bit elements.
  // `wide`: lines start at, and `left` is a multiple of, 16 bytes.
  template <int kThreads>
  MG_DEVICE static void load(T* tile, const T* from, int64_t line_stride, int64_t width_left, int64_t depth_left,
                             bool wide) {
    const int64_t lines_left = kAlongDepth ? width_left : depth_left, left = kAlongDepth ? depth_left : width_left;
    const int lines = static_cast<int>(lines_left < kLines ? lines_left : kLines);
    const int length = static_cast<int>(left < kLength ? left : kLength);
    if (wide)
      load_by<kThreads, cute::uint128_t>(tile, from, line_stride, lines, length);
    else if constexpr (sizeof(T) == 4)
      load_by<kThreads, uint32_t>(tile, from, line_stride, lines, length);
    else if constexpr (sizeof(T) == 8)
      load_by<kThreads, uint64_t>(tile, from, line_stride, lines, length);
    else
      load_halves<kThreads>(tile, from, line_stride, lines, length);
  }

 private:
  template <int kThreads, class Word>
  MG_DEVICE static void load_by(T* tile, const T* from, int64_t line_stride, int lines, int length) {
    constexpr int kChunk = static_cast<int>(sizeof(Word) / sizeof(T)), kChunks = kLength / kChunk;
    constexpr int kTogether = kThreads / kChunks;  // lines at once
    static_assert(kLength % kChunk == 0 && kThreads % kChunks == 0 && kLines % kTogether == 0);
    const int thread = static_cast<int>(threadIdx.x), line = thread / kChunks, at = thread % kChunks * kChunk;
    if (at >= length) lines = 0;
    from += line * line_stride + at;
    tile += line * kPitch + at;
#pragma unroll
    for (int i = 0; i < kLines; i += kTogether) {
      const Word& source = *reinterpret_cast<const Word*>(from);
      Word& target = *reinterpret_cast<Word*>(tile + i * kPitch);
      if constexpr (sizeof(Word) == 16)
        cute::SM80_CP_ASYNC_CACHEGLOBAL_ZFILL<Word>::copy(source, target, line + i < lines);
      else
        cute::SM80_CP_ASYNC_CACHEALWAYS_ZFILL<Word>::copy(source, target, line + i < lines);
      from += kTogether * line_stride;
    }
  }

  // 16-bit elements whose lines begin anywhere: eight of them from the aligned words around them, shifted into place.
  template <int kThreads>
  MG_DEVICE static void load_halves(T* tile, const T* from, int64_t line_stride, int lines, int length) {
    constexpr int kChunks = kLength / 8, kTogether = kThreads / kChunks;
    static_assert(kThreads % kChunks == 0 && kLines % kTogether == 0);
    const int thread = static_cast<int>(threadIdx.x), line = thread / kChunks, at = thread % kChunks * 8;
    from += line * line_stride + at;
    tile += line * kPitch + at;
    const int count = length - at < 8 ? length - at : 8;
#pragma unroll
    for (int i = 0; i < kLines; i += kTogether) {
      const int there = line + i < lines ? count : 0;
      const int odd = static_cast<int>(reinterpret_cast<uintptr_t>(from) / 2 % 2);
      const uint32_t* words = reinterpret_cast<const uint32_t*>(from - odd);
      uint32_t raw[5];
#pragma unroll
      for (int k = 0; k < 5; ++k) {  // never a byte outside the line
        const int low = 2 * k - odd, high = low + 1;
        raw[k] = 0;
        if (low >= 0 && high < there)
          raw[k] = __ldg(words + k);
        else if (low >= 0 && low < there)
          raw[k] = __ldg(reinterpret_cast<const uint16_t*>(from) + low);
        else if (high >= 0 && high < there)
          raw[k] = static_cast<uint32_t>(__ldg(reinterpret_cast<const uint16_t*>(from) + high)) << 16;
      }
      uint32_t out[4];
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        out[k] = __funnelshift_r(raw[k], raw[k + 1], 16 * odd);
        if (2 * k + 1 >= there) out[k] = 2 * k < there ? out[k] & 0xffff : 0;
      }
      *reinterpret_cast<uint4*>(tile + i * kPitch) = make_uint4(out[0], out[1], out[2], out[3]);
      from += kTogether * line_stride;
    }
  }
};

// A warp's kM x kN tile on the FMA units: lanes 8 x 4, each with kM / 8 x kN / 4 sums.
template <int kM, int kN>
struct FmaWarp {
  static constexpr int kRows = kM / 8, kColumns = kN / 4, kRun = 4, kSums = kRows * kColumns;
  using Sum = float;

  template <class A>
  MG_DEVICE static int row(int lane, int i) {
    return A::kAlongDepth ? lane / 4 + 8 * i : lane / 4 * 4 + i % 4 + 32 * (i / 4);
  }
  MG_DEVICE static int column(int lane, int j) { return lane % 4 * 4 + j % 4 + 16 * (j / 4); }

  // Four steps of the depth of `kActive` rows or columns of one operand.
  template <class O, int kActive, class Place>
  MG_DEVICE static void fragment(const float* tile, int width, int depth, Place place, float (*values)[4]) {
    if constexpr (O::kAlongDepth) {
#pragma unroll
      for (int i = 0; i < kActive; ++i) load_sixteen<From::kShared>(values[i], tile + O::at(width + place(i), depth));
    } else {
#pragma unroll
      for (int e = 0; e < 4; ++e)
#pragma unroll
        for (int i = 0; i < kActive; i += 4) {
          float four[4];
          load_sixteen<From::kShared>(four, tile + O::at(width + place(i), depth + e));
#pragma unroll
          for (int c = 0; c < 4; ++c) values[i + c][e] = four[c];
        }
    }
  }

  template <class A, class B, int kSteps, int kActive>
  MG_DEVICE static void step(const float* a, const float* b, int m0, int n0, int d0, int lane, float* sums) {
    constexpr int kTogether = unrolled<A, B>(kSteps / 4);
#pragma unroll kTogether
    for (int d = 0; d < kSteps; d += 4) {
      float left[kActive / 8][4], right[kColumns][4];
      fragment<A, kActive / 8>(a, m0, d0 + d, [&](int i) { return row<A>(lane, i); }, left);
      fragment<B, kColumns>(b, n0, d0 + d, [&](int j) { return column(lane, j); }, right);
#pragma unroll
      for (int e = 0; e < 4; ++e)
#pragma unroll
        for (int i = 0; i < kActive / 8; ++i)
#pragma unroll
          for (int j = 0; j < kColumns; ++j)
            sums[i * kColumns + j] = fmaf(left[i][e], right[j][e], sums[i * kColumns + j]);
    }
  }

  // Calls visit(row, column, first of kRun neighbouring sums).
  template <class A, class Visit>
  MG_DEVICE static void each(int lane, const float* sums, Visit visit) {
#pragma unroll
    for (int i = 0; i < kRows; ++i)
#pragma unroll
      for (int j = 0; j < kColumns; j += kRun) visit(row<A>(lane, i), column(lane, j), sums + i * kColumns + j);
  }
};

MG_DEVICE void mma_16x8x8(double* c, const double* a, const double* b) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm("mma.sync.aligned.m16n8k8.row.col.f64.f64.f64.f64 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+d"(c[0]), "+d"(c[1]), "+d"(c[2]), "+d"(c[3])
      : "d"(a[0]), "d"(a[1]), "d"(a[2]), "d"(a[3]), "d"(b[0]), "d"(b[1]));
#else
#pragma unroll
  for (int k = 0; k < 2; ++k)
#pragma unroll
    for (int i = 0; i < 2; ++i)
      cute::SM80_8x8x4_F64F64F64F64_TN::fma(c[2 * i], c[2 * i + 1], a[i + 2 * k], b[k], c[2 * i], c[2 * i + 1]);
#endif
}

// Rounded to ten bits, ties away from zero.
MG_DEVICE uint32_t to_tf32(float value) {
  uint32_t bits;
#if defined(MG_GPU)
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(bits) : "f"(value));
#else
  memcpy(&bits, &value, sizeof bits);
  if ((~bits & 0x7f800000) != 0) bits = (bits + 0x1000) & ~uint32_t{0x1fff};
#endif
  return bits;
}

MG_DEVICE void mma_16x8x8(float* c, const float* a, const float* b) {
  cute::SM80_16x8x8_F32TF32TF32F32_TN::fma(c[0], c[1], c[2], c[3], to_tf32(a[0]), to_tf32(a[1]), to_tf32(a[2]),
                                           to_tf32(a[3]), to_tf32(b[0]), to_tf32(b[1]), c[0], c[1], c[2], c[3]);
}

// A warp's tile of 16 x 8 products of float64, or of float32 as TF32.
template <class T, int kM, int kN>
struct WideMmaWarp {
  static constexpr int kRun = 2, kSums = kM * kN / 32;
  using Sum = T;

  template <class A, class B, int kSteps, int kActive>
  MG_DEVICE static void step(const T* a, const T* b, int m0, int n0, int d0, int lane, T* sums) {
    const int group = lane / 4, place = lane % 4;
    constexpr int kTogether = unrolled<A, B>(kSteps / 8);
#pragma unroll kTogether
    for (int d = d0; d < d0 + kSteps; d += 8) {
      T right[kN / 8][2];
#pragma unroll
      for (int j = 0; j < kN / 8; ++j)
#pragma unroll
        for (int k = 0; k < 2; ++k) right[j][k] = b[B::at(n0 + 8 * j + group, d + place + 4 * k)];
#pragma unroll
      for (int i = 0; i < kActive / 16; ++i) {
        T left[4];
#pragma unroll
        for (int k = 0; k < 4; ++k) left[k] = a[A::at(m0 + 16 * i + group + k % 2 * 8, d + place + k / 2 * 4)];
#pragma unroll
        for (int j = 0; j < kN / 8; ++j) mma_16x8x8(sums + (i * (kN / 8) + j) * 4, left, right[j]);
      }
    }
  }

  template <class A, class Visit>
  MG_DEVICE static void each(int lane, const T* sums, Visit visit) {
#pragma unroll
    for (int i = 0; i < kM / 16; ++i)
#pragma unroll
      for (int j = 0; j < kN / 8; ++j)
#pragma unroll
        for (int h = 0; h < 2; ++h)
          visit(16 * i + 8 * h + lane / 4, 8 * j + lane % 4 * 2, sums + (i * (kN / 8) + j) * 4 + 2 * h);
  }
};

// A warp's tile of 16 x 8 x 16 products of 16-bit numbers.
template <class T, int kM, int kN>
struct HalfMmaWarp {
  static constexpr int kRun = 2, kSums = kM * kN / 32;
  using Sum = float;

  // A 16 x 16 piece as four 8 x 8 matrices: (width 0, depth 0), (8, 0), (0, 8), (8, 8).
  template <class O>
  MG_DEVICE static void fragment(const T* tile, int width, int depth, int lane, uint32_t* out) {
    if constexpr (O::kAlongDepth)
      cute::SM75_U32x4_LDSM_N::copy(
          *reinterpret_cast<const cute::uint128_t*>(tile + O::at(width + lane % 16, depth + lane / 16 * 8)), out[0],
          out[1], out[2], out[3]);
    else
      cute::SM75_U16x8_LDSM_T::copy(*reinterpret_cast<const cute::uint128_t*>(
                                        tile + O::at(width + lane / 8 % 2 * 8, depth + lane % 8 + lane / 16 * 8)),
                                    out[0], out[1], out[2], out[3]);
  }

  template <class A, class B, int kSteps, int kActive>
  MG_DEVICE static void step(const T* a, const T* b, int m0, int n0, int d0, int lane, float* sums) {
    constexpr int kTogether = unrolled<A, B>(kSteps / 16);
#pragma unroll kTogether
    for (int d = d0; d < d0 + kSteps; d += 16) {
      uint32_t right[kN / 16][4];
#pragma unroll
      for (int j = 0; j < kN / 16; ++j) fragment<B>(b, n0 + 16 * j, d, lane, right[j]);
#pragma unroll
      for (int i = 0; i < kActive / 16; ++i) {
        uint32_t left[4];
        fragment<A>(a, m0 + 16 * i, d, lane, left);
#pragma unroll
        for (int j = 0; j < kN / 8; ++j) {
          float* c = sums + (i * (kN / 8) + j) * 4;
          const uint32_t b0 = right[j / 2][j % 2], b1 = right[j / 2][j % 2 + 2];
          if constexpr (std::is_same<T, __half>::value)
            cute::SM80_16x8x16_F32F16F16F32_TN::fma(c[0], c[1], c[2], c[3], left[0], left[1], left[2], left[3], b0, b1,
                                                    c[0], c[1], c[2], c[3]);
          else
            cute::SM80_16x8x16_F32BF16BF16F32_TN::fma(c[0], c[1], c[2], c[3], left[0], left[1], left[2], left[3], b0,
                                                      b1, c[0], c[1], c[2], c[3]);
        }
      }
    }
  }

  template <class A, class Visit>
  MG_DEVICE static void each(int lane, const float* sums, Visit visit) {
    WideMmaWarp<float, kM, kN>::template each<A>(lane, sums, visit);
  }
};

// Asynchronous copy of 16 bytes, or of each of their elements, zeros where not `count` of them are there.
template <class T>
MG_DEVICE void copy_sixteen(T* to, const T* from, int64_t element_stride, int count, bool wide) {
  constexpr int kRun = 16 / static_cast<int>(sizeof(T));
  if (wide) {
    cute::SM80_CP_ASYNC_CACHEGLOBAL_ZFILL<cute::uint128_t>::copy(*reinterpret_cast<const cute::uint128_t*>(from),
                                                                 *reinterpret_cast<cute::uint128_t*>(to), count > 0);
  } else {
#pragma unroll
    for (int i = 0; i < kRun; ++i)
      cute::SM80_CP_ASYNC_CACHEALWAYS_ZFILL<T>::copy(from[i * element_stride], to[i], i < count);
  }
}

// How a block of kWarpsM x kWarpsN x kWarpsD warps covers a kM x kN tile, kD of the depth at a time.
template <class T_, bool kTf32, int kM_, int kN_, int kD_, int kWarpsM_, int kWarpsN_, int kWarpsD_, int kStages_,
          int kBlocks_>
struct Tiling {
  using T = T_;
  static constexpr int kM = kM_, kN = kN_, kD = kD_, kWarpsM = kWarpsM_, kWarpsN = kWarpsN_, kWarpsD = kWarpsD_;
  static constexpr int kStages = kStages_, kBlocks = kBlocks_, kThreads = 32 * kWarpsM * kWarpsN * kWarpsD;
  static constexpr int kWarpM = kM / kWarpsM, kWarpN = kN / kWarpsN, kWarpD = kD / kWarpsD;
  // Pitches that keep the fragments' shared-memory reads free of bank conflicts.
  static constexpr int kPadAlong = sizeof(T) == 2 ? 8 : 4, kPadAcross = kTf32 || sizeof(T) == 2 ? 8 : 4;
  template <int kWidth, bool kAlongDepth>
  using OperandOf = Operand<T, kWidth, kD, kAlongDepth, kAlongDepth ? kPadAlong : kPadAcross>;
  using Warp = std::conditional_t<
      sizeof(T) == 2, HalfMmaWarp<T, kWarpM, kWarpN>,
      std::conditional_t<sizeof(T) == 8 || kTf32, WideMmaWarp<T, kWarpM, kWarpN>, FmaWarp<kWarpM, kWarpN>>>;
};

// The tilings of both operators: wide tiles, and narrow ones whose warps share out the depth.
using WideFloat = Tiling<float, false, 128, 64, 16, 2, 2, 1, 4, 2>;
using MidFloat = Tiling<float, false, 64, 64, 16, 2, 2, 1, 4, 3>;
using NarrowFloat = Tiling<float, false, 64, 16, 64, 1, 1, 4, 3, 3>;
using WideTf32 = Tiling<float, true, 64, 64, 32, 2, 2, 1, 3, 3>;
using WideDouble = Tiling<double, false, 64, 64, 16, 2, 2, 1, 4, 2>;
using NarrowDouble = Tiling<double, false, 64, 16, 32, 1, 1, 4, 3, 3>;
template <class T>
using WideHalf = Tiling<T, false, 128, 128, 32, 2, 2, 1, 4, 2>;

// One operand of a tile: its first element there, the stride between lines, what is left of width and depth.
template <class T>
struct Source {
  const T* data;
  int64_t line_stride;
  int64_t width;
  bool wide;
};

// sums += A B over `depth`, for the whole block; `work` holds kStages stages. Ends with all reads of `work` done and,
// of kWarpsD slices of the depth, everything in the sums of the first.
template <class Tile, class A, class B>
MG_DEVICE void tile_product(const Source<typename Tile::T>& a, const Source<typename Tile::T>& b, int64_t depth,
                            typename Tile::T* work, typename Tile::Warp::Sum* sums) {
  using T = typename Tile::T;
  using Warp = typename Tile::Warp;
  constexpr int kStage = A::kSize + B::kSize, kThreads = Tile::kThreads;
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int m0 = warp % Tile::kWarpsM * Tile::kWarpM, n0 = warp / Tile::kWarpsM % Tile::kWarpsN * Tile::kWarpN;
  const int slice = warp / (Tile::kWarpsM * Tile::kWarpsN);
  const int64_t steps = (depth + Tile::kD - 1) / Tile::kD;
  const auto load = [&](int64_t step, int stage) {
    T* to = work + stage * kStage;
    const int64_t d = step * Tile::kD;
    A::template load<kThreads>(to, a.data + (A::kAlongDepth ? d : d * a.line_stride), a.line_stride, a.width, depth - d,
                               a.wide);
    B::template load<kThreads>(to + A::kSize, b.data + (B::kAlongDepth ? d : d * b.line_stride), b.line_stride, b.width,
                               depth - d, b.wide);
  };
#pragma unroll
  for (int s = 0; s < Tile::kStages - 1; ++s) {
    if (s < steps) load(s, s);
    cute::cp_async_fence();
  }
  int stage = 0, next = Tile::kStages - 1;
  const int active = static_cast<int>(a.width < Tile::kM ? a.width : Tile::kM) - m0;
  for (int64_t step = 0; step < steps; ++step) {
    cute::cp_async_wait<Tile::kStages - 2>();
    __syncthreads();
    if (step + Tile::kStages - 1 < steps) load(step + Tile::kStages - 1, next);
    cute::cp_async_fence();
    const T* left = work + stage * kStage;
    const T* right = left + A::kSize;
    if (Tile::kWarpsD > 1 && active <= Tile::kWarpM / 2)
      Warp::template step<A, B, Tile::kWarpD, Tile::kWarpM / 2>(left, right, m0, n0, slice * Tile::kWarpD, lane, sums);
    else if (active > 0)
      Warp::template step<A, B, Tile::kWarpD, Tile::kWarpM>(left, right, m0, n0, slice * Tile::kWarpD, lane, sums);
    stage = stage + 1 == Tile::kStages ? 0 : stage + 1;
    next = next + 1 == Tile::kStages ? 0 : next + 1;
  }
  cute::cp_async_wait<0>();
  __syncthreads();
  if constexpr (Tile::kWarpsD > 1) {
    using Sum = typename Warp::Sum;
    static_assert(Tile::kWarpsM * Tile::kWarpsN == 1);
    static_assert(sizeof(Sum) * Warp::kSums * 32 * (Tile::kWarpsD - 1) <= sizeof(T) * kStage * Tile::kStages);
    Sum* shared = reinterpret_cast<Sum*>(work);
    if (slice > 0)
#pragma unroll
      for (int i = 0; i < Warp::kSums; ++i) shared[((slice - 1) * Warp::kSums + i) * 32 + lane] = sums[i];
    __syncthreads();
    if (slice == 0)
#pragma unroll
      for (int i = 0; i < Warp::kSums; ++i)
#pragma unroll
        for (int s = 0; s < Tile::kWarpsD - 1; ++s) sums[i] += shared[(s * Warp::kSums + i) * 32 + lane];
    __syncthreads();
  }
}

// A row tile found by walking the groups: rows [begin, end) of `group`; group G stands for the rows of no group.
struct RowTile {
  int group;
  int32_t begin, end;    // of the group
  int32_t tiles_before;  // row tiles of earlier groups
};

// Walks row tiles in increasing order, a warp at a time, 32 groups a step; of more groups than a block counts it looks
// the tile up.
template <int kWhich>
struct TileWalk {
  GroupEnds<kWhich> ends;
  int groups;
  int32_t rows;
  int tile_rows;
  int base = 0;
  int32_t before = 0;

  // The group of row tile `wanted`, which must not decrease between calls; false past the last.
  MG_DEVICE bool find(int32_t wanted, RowTile& found) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    if (ends.many()) return look_up(wanted, found);
    for (; base <= groups; base += 32) {
      const int g = base + lane;
      const int32_t begin = g > 0 && g <= groups ? ends[g - 1] : 0;
      const int32_t end = g < groups ? ends[g] : g == groups ? rows : begin;
      const int mine = (end - begin + tile_rows - 1) / tile_rows;
      int through = mine;
#pragma unroll
      for (int step = 1; step < 32; step *= 2) {
        const int other = __shfl_up_sync(0xffffffffu, through, step);
        if (lane >= step) through += other;
      }
      const unsigned past = __ballot_sync(0xffffffffu, before + through > wanted);
      if (past) {
        const int at = __ffs(static_cast<int>(past)) - 1;
        found.group = base + at;
        found.begin = __shfl_sync(0xffffffffu, begin, at);
        found.end = __shfl_sync(0xffffffffu, end, at);
        found.tiles_before = before + __shfl_sync(0xffffffffu, through - mine, at);
        return true;
      }
      before += __shfl_sync(0xffffffffu, through, 31);
    }
    return false;
  }

  // In the numbers that simt::count_groups wrote.
  MG_DEVICE bool look_up(int32_t wanted, RowTile& found) const {
    const int32_t* tiles =
        ends.numbers() + static_cast<int64_t>(tile_rows / kCountedRows) * groups;  // through each group
    const int lane = static_cast<int>(threadIdx.x) % 32;
    int low = 0, count = groups;  // the first group past it is one of low .. low + count
    while (count > 0) {
      const int step = (count + 31) / 32, last = (lane + 1) * step < count ? (lane + 1) * step : count;
      const unsigned past = __ballot_sync(0xffffffffu, tiles[low + last - 1] > wanted);
      if (!past) {
        low += count;
        break;
      }
      const int at = (__ffs(static_cast<int>(past)) - 1) * step;
      count = (count - at < step ? count - at : step) - 1;
      low += at;
    }
    found.group = low;
    found.begin = low > 0 ? ends[low - 1] : 0;
    found.end = low < groups ? ends[low] : rows;
    found.tiles_before = low > 0 ? tiles[low - 1] : 0;
    return wanted - found.tiles_before < (found.end - found.begin + tile_rows - 1) / tile_rows;
  }
};

}  // namespace sm80
}  // namespace multigemm
