// Vectors, number formats and packing for the CPU kernels. Included by files that are compiled once for each
// CPU level: everything lives in a namespace of that level and nothing inline comes from the standard library,
// because the linker would merge such functions across levels and could keep the one this CPU can't run.
#pragma once

#include <stdint.h>
#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "multigemm/abi.h"

#ifndef MG_LEVEL
#error "define MG_LEVEL as the namespace of the CPU level this file is compiled for"
#endif

namespace multigemm {
namespace MG_LEVEL {

#if defined(__AVX512F__)
constexpr int kVectorBytes = 64, kTileRows = 12;  // 32 registers
#elif defined(__AVX2__)
constexpr int kVectorBytes = 32, kTileRows = 6;  // 16 registers: 12 sums, 2 columns of w, 1 of x
#elif defined(__aarch64__)
constexpr int kVectorBytes = 16, kTileRows = 12;
#else
constexpr int kVectorBytes = 16, kTileRows = 6;
#endif
constexpr int kTileVectors = 2;

template <class A, int Bytes>
struct Vector {
  typedef A type __attribute__((vector_size(Bytes)));
  typedef A loose __attribute__((vector_size(Bytes), aligned(4), may_alias));
  static constexpr int lanes = Bytes / static_cast<int>(sizeof(A));
  static type load(const A* p) { return *reinterpret_cast<const loose*>(p); }
  static void store(A* p, type v) { *reinterpret_cast<loose*>(p) = v; }
};

// Past the cache: the line of a large output is not read before it is written. p is aligned to Bytes.
template <class A, int Bytes>
inline void store_past_cache(A* p, typename Vector<A, Bytes>::type v) {
#if defined(__AVX512F__)
  if constexpr (Bytes == 64) return _mm512_stream_si512(reinterpret_cast<__m512i*>(p), (__m512i)v);
#endif
#if defined(__AVX__)
  if constexpr (Bytes == 32) return _mm256_stream_si256(reinterpret_cast<__m256i*>(p), (__m256i)v);
#endif
#if defined(__x86_64__)
  if constexpr (Bytes == 16) return _mm_stream_si128(reinterpret_cast<__m128i*>(p), (__m128i)v);
#endif
  Vector<A, Bytes>::store(p, v);
}

inline void finish_stores_past_cache() {
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }

typedef _Float16 Half;
struct Bfloat {
  uint16_t bits;
};

template <class T>
struct Accumulator {
  typedef float type;
};
template <>
struct Accumulator<double> {
  typedef double type;
};

inline double widen(double v) { return v; }
inline float widen(float v) { return v; }
inline float widen(Half v) { return static_cast<float>(v); }
inline float widen(Bfloat v) {
  const uint32_t bits = static_cast<uint32_t>(v.bits) << 16;
  float f;
  memcpy(&f, &bits, 4);
  return f;
}

inline Bfloat narrow_bfloat(float v) {
  uint32_t bits;
  memcpy(&bits, &v, 4);
  const uint32_t even = bits + 0x7fff + ((bits >> 16) & 1);
  return {static_cast<uint16_t>(v == v ? even >> 16 : (bits >> 16) | 0x40)};
}
inline Bfloat narrow_bfloat(double v) {
  // Through a float rounded to odd, or the value would be rounded twice.
  float f = static_cast<float>(v);
  if (f == f && static_cast<double>(f) != v) {
    uint32_t bits;
    memcpy(&bits, &f, 4);
    if ((f < 0 ? -static_cast<double>(f) : static_cast<double>(f)) > (v < 0 ? -v : v)) --bits;
    bits |= 1;
    memcpy(&f, &bits, 4);
  }
  return narrow_bfloat(f);
}

// dst[i] = src[i * stride]
template <class T, class A>
inline void widen_row(A* dst, const T* src, int64_t stride, int64_t count) {
  if (stride == 1) {
    int64_t i = 0;
#if defined(__F16C__)
    if constexpr (sizeof(T) == 2 && sizeof(A) == 4 && !__is_same(T, Bfloat))
      for (; i + 8 <= count; i += 8)
        _mm256_storeu_ps(dst + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(src + i))));
#endif
    for (; i < count; ++i) dst[i] = widen(src[i]);
  } else {
    for (int64_t i = 0; i < count; ++i) dst[i] = widen(src[i * stride]);
  }
}

// A strided read-only matrix.
template <class T>
struct Matrix {
  const T* data;
  int64_t row, column;  // strides
};

inline void transpose(Vector<float, 16>::type (&v)[4]) {
  typedef int32_t Order __attribute__((vector_size(16)));
  const Order low{0, 4, 1, 5}, high{2, 6, 3, 7}, first{0, 1, 4, 5}, second{2, 3, 6, 7};
  const auto a = __builtin_shuffle(v[0], v[1], low), b = __builtin_shuffle(v[2], v[3], low);
  const auto c = __builtin_shuffle(v[0], v[1], high), d = __builtin_shuffle(v[2], v[3], high);
  v[0] = __builtin_shuffle(a, b, first);
  v[1] = __builtin_shuffle(a, b, second);
  v[2] = __builtin_shuffle(c, d, first);
  v[3] = __builtin_shuffle(c, d, second);
}
inline void transpose(Vector<double, 16>::type (&v)[2]) {
  typedef int64_t Order __attribute__((vector_size(16)));
  const auto a = v[0];
  v[0] = __builtin_shuffle(a, v[1], Order{0, 2});
  v[1] = __builtin_shuffle(a, v[1], Order{1, 3});
}

// dst[r][c] = src(r, c) for c < cols, zeros up to `width`; rows of dst are `width` apart.
template <class T, class A>
inline void pack(A* dst, int64_t width, const Matrix<T>& src, int64_t rows, int64_t cols) {
  if (src.row == 1 && src.column != 1) {
    // Transposed source: read along its rows in squares of one short vector, so that nothing goes element by element.
    using V = Vector<A, 16>;
    constexpr int64_t side = V::lanes;
    int64_t c = 0;
    for (; c + side <= cols; c += side) {
      int64_t r = 0;
      for (; r + side <= rows; r += side) {
        typename V::type square[side];
        for (int64_t i = 0; i < side; ++i) {
          const T* from = src.data + (c + i) * src.column + r;
          if constexpr (sizeof(T) == sizeof(A)) {
            square[i] = V::load(from);
          } else {
            A wide[side];
            widen_row(wide, from, 1, side);
            square[i] = V::load(wide);
          }
        }
        transpose(square);
        for (int64_t i = 0; i < side; ++i) V::store(dst + (r + i) * width + c, square[i]);
      }
      for (; r < rows; ++r)
        for (int64_t i = 0; i < side; ++i) dst[r * width + c + i] = widen(src.data[(c + i) * src.column + r]);
    }
    for (; c < cols; ++c)
      for (int64_t r = 0; r < rows; ++r) dst[r * width + c] = widen(src.data[c * src.column + r]);
  } else {
    // A few columns of a wide matrix: each row is a line of its own, too far from the last for the hardware to foresee.
    for (int64_t r = 0; r < rows; ++r) {
      __builtin_prefetch(src.data + (r + 16) * src.row);
      widen_row(dst + r * width, src.data + r * src.row, src.column, cols);
    }
  }
  if (cols < width)
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t c = cols; c < width; ++c) dst[r * width + c] = 0;
}

template <class A>
inline void narrow_row(void* dst, int32_t dtype, int64_t stride, const A* src, int64_t count) {
  switch (dtype) {
    case MG_FLOAT64:
      for (int64_t i = 0; i < count; ++i) static_cast<double*>(dst)[i * stride] = src[i];
      break;
    case MG_FLOAT32:
      for (int64_t i = 0; i < count; ++i) static_cast<float*>(dst)[i * stride] = static_cast<float>(src[i]);
      break;
    case MG_BFLOAT16:
      for (int64_t i = 0; i < count; ++i) static_cast<Bfloat*>(dst)[i * stride] = narrow_bfloat(src[i]);
      break;
    default: {
      int64_t i = 0;
#if defined(__F16C__)
      if constexpr (sizeof(A) == 4)
        if (stride == 1)
          for (; i + 8 <= count; i += 8)
            _mm_storeu_si128(reinterpret_cast<__m128i*>(static_cast<Half*>(dst) + i),
                             _mm256_cvtps_ph(_mm256_loadu_ps(src + i), _MM_FROUND_TO_NEAREST_INT));
#endif
      for (; i < count; ++i) static_cast<Half*>(dst)[i * stride] = static_cast<Half>(src[i]);
    }
  }
}

// Whole vectors of a row around the cache, as long as the place is aligned to them; returns how many were written.
template <class A, int Bytes>
inline int64_t copy_past_cache(A* dst, const A* src, int64_t count) {
  using V = Vector<A, Bytes>;
  if (reinterpret_cast<uintptr_t>(dst) % Bytes != 0) return 0;
  int64_t i = 0;
  for (; i + V::lanes <= count; i += V::lanes) store_past_cache<A, Bytes>(dst + i, V::load(src + i));
  return i;
}

// Rows this far apart (in bytes) fall into the same few sets of the first two cache levels and evict each other.
inline bool rows_collide(int64_t stride_bytes) { return stride_bytes != 0 && stride_bytes % 4096 == 0; }

// dst[r] = row r of src, rows of dst `width` apart, and the lines of the `rows` rows after them on their way.
template <class A>
inline void copy_rows(A* dst, int64_t width, const Matrix<A>& src, int64_t rows, int64_t cols) {
  constexpr int64_t line = 64 / static_cast<int64_t>(sizeof(A));
  for (int64_t r = 0; r < rows; ++r) {
    const A* from = src.data + r * src.row;
    for (int64_t c = 0; c < cols; c += line) {
      __builtin_prefetch(from + rows * src.row + c);
      if (c + line <= cols)
        __builtin_memcpy(dst + r * width + c, from + c, 64);
      else
        for (int64_t i = c; i < cols; ++i) dst[r * width + i] = from[i];
    }
  }
}

inline char* element(void* data, int32_t dtype, int64_t index) {
  return static_cast<char*>(data) + index * (dtype == MG_FLOAT64 ? 8 : dtype == MG_FLOAT32 ? 4 : 2);
}

template <class A>
constexpr int32_t dtype_of() {
  return sizeof(A) == 8 ? MG_FLOAT64 : MG_FLOAT32;
}

}  // namespace MG_LEVEL
}  // namespace multigemm
