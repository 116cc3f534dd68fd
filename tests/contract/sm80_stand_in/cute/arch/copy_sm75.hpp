// In place of CuTe's header: four 8 x 8 matrices of 16-bit numbers, whose rows the lanes point at, eight each. Register
// i of a lane has two neighbours of matrix i; PTX, "ldmatrix".
#pragma once

#include "cute/arch/copy_sm80.hpp"

namespace cute {

template <bool kTransposed>
struct LoadMatrices {
  static void copy(const uint128_t& row, uint32_t& r0, uint32_t& r1, uint32_t& r2, uint32_t& r3) {
    uint32_t* const out[4] = {&r0, &r1, &r2, &r3};
    const int at = ::emulated::lane() / 4, pair = ::emulated::lane() % 4 * 2;
    ::emulated::exchange(::emulated::aligned(&row), [&](auto of) {
      for (int i = 0; i < 4; ++i) {
        uint16_t two[2];
        for (int c = 0; c < 2; ++c) {
          const int line = kTransposed ? pair + c : at, column = kTransposed ? at : pair + c;
          memcpy(&two[c], reinterpret_cast<const char*>(of(8 * i + line)) + 2 * column, 2);
        }
        memcpy(out[i], two, 4);
      }
      return 0;
    });
  }
};
using SM75_U32x4_LDSM_N = LoadMatrices<false>;
using SM75_U16x8_LDSM_T = LoadMatrices<true>;

}  // namespace cute
