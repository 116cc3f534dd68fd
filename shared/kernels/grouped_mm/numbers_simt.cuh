// Formula: value of one element of any dtype, widened to the accumulator's type; and back, with one rounding.
// Layouts: none; one element at a time.
// Dtypes:  float64, float32, float16, bfloat16, by their bits, so that no vendor header is needed.
// Architectures: any GPU that nvcc or hipcc compile for, and the host.
// Limits:  rounding to nearest, ties to even; NaN stays NaN.
#pragma once

#include <string.h>

#include "multigemm/abi.h"
#include "vendor/gpu.h"

namespace multigemm {
namespace simt {

MG_DEVICE float bits_to_float(uint32_t bits) {
  float value;
  memcpy(&value, &bits, 4);
  return value;
}
MG_DEVICE uint32_t float_to_bits(float value) {
  uint32_t bits;
  memcpy(&bits, &value, 4);
  return bits;
}

MG_DEVICE float half_to_float(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000) << 16, rest = half & 0x7fff;
  if (rest >= 0x7c00) return bits_to_float(sign | 0x7f800000 | (rest & 0x3ff) << 13);
  if (rest >= 0x400) return bits_to_float(sign | ((rest << 13) + (112u << 23)));
  const float small = static_cast<float>(rest) * 5.9604644775390625e-8f;  // 2^-24 each
  return sign ? -small : small;
}

// The nearest multiple of 2^-shift's unit, ties to even; `bits` loses its last `shift` bits.
MG_DEVICE uint64_t round_bits(uint64_t bits, int shift) {
  const uint64_t half = uint64_t{1} << (shift - 1), rest = bits & ((half << 1) - 1), kept = bits >> shift;
  return kept + (rest > half || (rest == half && (kept & 1)));
}

// A double (a float is one too, exactly) to `exponent_bits`/`fraction_bits`, straight: never rounded twice.
MG_DEVICE uint16_t narrow_16(double value, int exponent_bits, int fraction_bits) {
  uint64_t bits;
  memcpy(&bits, &value, 8);
  const uint64_t sign = (bits >> 63) << 15, fraction = bits & 0xfffffffffffffull;
  const int exponent = static_cast<int>(bits >> 52 & 0x7ff);
  const uint64_t infinity = ((uint64_t{1} << exponent_bits) - 1) << fraction_bits;
  if (exponent == 0x7ff)
    return static_cast<uint16_t>(sign | infinity | (fraction ? uint64_t{1} << (fraction_bits - 1) : 0));
  const int target = exponent - 1023 + (1 << (exponent_bits - 1)) - 1;
  if (exponent == 0 || target < -fraction_bits - 1) return static_cast<uint16_t>(sign);
  uint64_t result;
  if (target > 0)
    result = round_bits(static_cast<uint64_t>(target) << 52 | fraction, 52 - fraction_bits);
  else
    result = round_bits(fraction | uint64_t{1} << 52, 53 - fraction_bits - target);
  return static_cast<uint16_t>(sign | (result > infinity ? infinity : result));
}

template <class A>
MG_DEVICE A load(const void* data, int32_t dtype, int64_t at) {
  switch (dtype) {
    case MG_FLOAT64: return static_cast<A>(static_cast<const double*>(data)[at]);
    case MG_FLOAT32: return static_cast<A>(static_cast<const float*>(data)[at]);
    case MG_FLOAT16: return static_cast<A>(half_to_float(static_cast<const uint16_t*>(data)[at]));
    default: return static_cast<A>(bits_to_float(static_cast<uint32_t>(static_cast<const uint16_t*>(data)[at]) << 16));
  }
}

template <class A>
MG_DEVICE void store(void* data, int32_t dtype, int64_t at, A value) {
  switch (dtype) {
    case MG_FLOAT64: static_cast<double*>(data)[at] = static_cast<double>(value); break;
    case MG_FLOAT32: static_cast<float*>(data)[at] = static_cast<float>(value); break;
    case MG_FLOAT16: static_cast<uint16_t*>(data)[at] = narrow_16(static_cast<double>(value), 5, 10); break;
    default: static_cast<uint16_t*>(data)[at] = narrow_16(static_cast<double>(value), 8, 7);
  }
}

}  // namespace simt
}  // namespace multigemm
