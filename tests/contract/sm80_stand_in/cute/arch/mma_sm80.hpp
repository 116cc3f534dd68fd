// In place of CuTe's header: products of a warp by what PTX says of where each lane keeps its numbers ("Matrix
// fragments for mma.m8n8k4, m16n8k8, m16n8k16"), one multiplication after another along the depth.
#pragma once

#include "cute/arch/copy_sm75.hpp"

namespace cute {

struct SM80_8x8x4_F64F64F64F64_TN {
  static void fma(double& d0, double& d1, double a, double b, double c0, double c1) {
    struct Given {
      double a, b;
    };
    double sums[2] = {c0, c1};
    const int lane = ::emulated::lane();
    ::emulated::exchange(Given{a, b}, [&](auto of) {
      for (int j = 0; j < 2; ++j)
        for (int k = 0; k < 4; ++k) sums[j] += of(lane / 4 * 4 + k).a * of((lane % 4 * 2 + j) * 4 + k).b;
      return 0;
    });
    d0 = sums[0], d1 = sums[1];
  }
};

// 16 x 8 products: rows lane / 4 and 8 further, columns 2 (lane % 4) and the next. `number` takes the k-th number of a
// row of A, in the given half, or of a column of B from what the lane that has it shows.
template <int kDepth, class Number>
void multiply(float (&sums)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], Number number) {
  struct Given {
    uint32_t a[4], b[2];
  };
  Given given;
  memcpy(given.a, a, sizeof a);
  memcpy(given.b, b, sizeof b);
  constexpr int kEach = kDepth / 8;  // neighbours in one register
  const int lane = ::emulated::lane();
  ::emulated::exchange(given, [&](auto of) {
    for (int i = 0; i < 4; ++i)
      for (int k = 0; k < kDepth; ++k) {
        const int from = k % (kDepth / 2) / kEach, half = k / (kDepth / 2), column = lane % 4 * 2 + i % 2;
        sums[i] += number(of(lane / 4 * 4 + from).a[2 * half + i / 2], k % kEach) *
                   number(of(column * 4 + from).b[half], k % kEach);
      }
    return 0;
  });
}

struct SM80_16x8x8_F32TF32TF32F32_TN {
  static void fma(float& d0, float& d1, float& d2, float& d3, uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                  uint32_t b0, uint32_t b1, float c0, float c1, float c2, float c3) {
    float sums[4] = {c0, c1, c2, c3};
    multiply<8>(sums, {a0, a1, a2, a3}, {b0, b1},
                [](uint32_t bits, int) { return multigemm::simt::bits_to_float(bits); });
    d0 = sums[0], d1 = sums[1], d2 = sums[2], d3 = sums[3];
  }
};

template <bool kBfloat16>
struct HalfProducts {
  static void fma(float& d0, float& d1, float& d2, float& d3, uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                  uint32_t b0, uint32_t b1, float c0, float c1, float c2, float c3) {
    float sums[4] = {c0, c1, c2, c3};
    multiply<16>(sums, {a0, a1, a2, a3}, {b0, b1}, [](uint32_t word, int which) {
      const uint16_t bits = static_cast<uint16_t>(word >> (16 * which));
      return kBfloat16 ? multigemm::simt::bits_to_float(static_cast<uint32_t>(bits) << 16)
                       : multigemm::simt::half_to_float(bits);
    });
    d0 = sums[0], d1 = sums[1], d2 = sums[2], d3 = sums[3];
  }
};
using SM80_16x8x16_F32F16F16F32_TN = HalfProducts<false>;
using SM80_16x8x16_F32BF16BF16F32_TN = HalfProducts<true>;

}  // namespace cute
