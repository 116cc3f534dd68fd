// Functions and conversions of numbers for kernels, by the vendor's own where there are any without a library.
#pragma once

#include <string.h>

#include "vendor/gpu.h"

#if !defined(MG_GPU)
#include <cmath>
#elif !defined(__HIP__)
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#endif

namespace multigemm {
namespace gpu {

// e^x by 2^n e^r, |r| <= log(2) / 2, with the Taylor polynomial of degree 13, whose next term is below 2^-57.
MG_DEVICE double series_exp(double x) {
  if (!(x > -745.2)) return x == x ? 0.0 : x;
  if (x > 709.79) return x * __builtin_inf();
  const double n = __builtin_rint(x * 1.4426950408889634);
  const double r = (x - n * 0.693147180369123816490) - n * 1.90821492927058770002e-10;
  double sum = 1.0;
  for (int i = 13; i > 0; --i) sum = 1.0 + sum * (r / i);
  const int half = static_cast<int>(n) / 2, rest = static_cast<int>(n) - half;
  const uint64_t bits[2] = {static_cast<uint64_t>(half + 1023) << 52, static_cast<uint64_t>(rest + 1023) << 52};
  double scale[2];
  memcpy(scale, bits, sizeof(bits));
  return sum * scale[0] * scale[1];
}

// erf x = 2 / sqrt(pi) x e^-xx (1 + 2xx / 3 + (2xx)^2 / (3 5) + ...), all terms positive; beyond 3 the continued
// fraction erfc x = e^-xx / sqrt(pi) / (x + 1/2 / (x + 2/2 / (x + 3/2 / ...))).
MG_DEVICE double series_erf(double x) {
  const double size = x < 0 ? -x : x, square = x * x;
  if (!(size < 6)) return x == x ? (x < 0 ? -1.0 : 1.0) : x;
  if (size < 3) {
    double term = 1.0, sum = 1.0;
    for (int n = 1; n < 80 && term > 1e-18 * sum; ++n) {
      term *= 2 * square / (2 * n + 1);
      sum += term;
    }
    return 1.1283791670955126 * x * series_exp(-square) * sum;
  }
  double tail = size;
  for (int n = 60; n > 0; --n) tail = size + 0.5 * n / tail;
  const double value = 1.0 - 0.5641895835477563 * series_exp(-square) / tail;
  return x < 0 ? -value : value;
}

// AMD's math library is not there, and the compiler has none of these.
#if defined(__HIP__)
MG_DEVICE double exponential(double x) { return series_exp(x); }
MG_DEVICE double error_function(double x) { return series_erf(x); }
MG_DEVICE double tangens_hyperbolicus(double x) { return 1.0 - 2.0 / (series_exp(2 * x) + 1.0); }
MG_DEVICE float exponential(float x) { return static_cast<float>(series_exp(x)); }
MG_DEVICE float error_function(float x) { return static_cast<float>(series_erf(x)); }
MG_DEVICE float tangens_hyperbolicus(float x) { return static_cast<float>(tangens_hyperbolicus(double{x})); }
#else
#if !defined(MG_GPU)
using std::erf;
using std::exp;
using std::tanh;
#endif
MG_DEVICE double exponential(double x) { return exp(x); }
MG_DEVICE double error_function(double x) { return erf(x); }
MG_DEVICE double tangens_hyperbolicus(double x) { return tanh(x); }
MG_DEVICE float exponential(float x) { return expf(x); }
MG_DEVICE float error_function(float x) { return erff(x); }
MG_DEVICE float tangens_hyperbolicus(float x) { return tanhf(x); }
#endif

// Within some 1e-6 of the value, for what is rounded to two bytes.
MG_DEVICE float fast_exponential(float x) {
#if defined(__CUDA_ARCH__)
  return __expf(x);
#else
  return exponential(x);
#endif
}
MG_DEVICE float fast_quotient(float a, float b) {
#if defined(__CUDA_ARCH__)
  return __fdividef(a, b);
#else
  return a / b;
#endif
}

// Two-byte numbers by their bits, rounded to nearest, ties to even; NaN stays NaN.
MG_DEVICE float widen_bfloat(uint16_t bits) {
  const uint32_t wide = static_cast<uint32_t>(bits) << 16;
  float value;
  memcpy(&value, &wide, 4);
  return value;
}
MG_DEVICE uint16_t narrow_bfloat(float value) {
#if defined(__CUDA_ARCH__)
  return __bfloat16_as_ushort(__float2bfloat16_rn(value));
#else
  uint32_t bits;
  memcpy(&bits, &value, 4);
  if (value != value) return static_cast<uint16_t>(bits >> 16 | 0x40);
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
#endif
}

#if defined(__CUDA_ARCH__)
MG_DEVICE float widen_half(uint16_t bits) { return __half2float(__ushort_as_half(bits)); }
MG_DEVICE uint16_t narrow_half(float value) { return __half_as_ushort(__float2half_rn(value)); }
#elif defined(__HIP__)
MG_DEVICE float widen_half(uint16_t bits) {
  _Float16 half;
  memcpy(&half, &bits, 2);
  return static_cast<float>(half);
}
MG_DEVICE uint16_t narrow_half(float value) {
  const _Float16 half = static_cast<_Float16>(value);
  uint16_t bits;
  memcpy(&bits, &half, 2);
  return bits;
}
#endif

}  // namespace gpu
}  // namespace multigemm
