// What kernels reach on large shapes, for the model of choose_gpu.cpp: only ratios matter. Scaled by multiprocessors
// for other devices of a kind.
#pragma once

#include "kernels/grouped_mm/gpu_call.h"
#include "kernels/grouped_mm/table_gpu.h"

namespace multigemm {

// 10^6 FLOP per microsecond, by dtype: float64, float32, tf32, half.
struct Rates {
  Kernel kernel;
  double float64, float32, tf32, half;
};

struct Chip {
  double multiprocessors, bytes_per_microsecond;
  Rates rates[4];
};

#if defined(MG_HIP)

// Not measured: what AMD states for half of an MI250X (gfx90a) and for an MI300X (gfx942), of which four tenths are
// expected of this library's kernels and seven of hipBLAS, whose products of float32 are never TF32.
inline constexpr Chip kGfx90a = {110,
                                 1.3e6,
                                 {{Kernel::mfma, 19, 19, 19, 77},
                                  {Kernel::simt, 1, 2, 2, 2},
                                  {Kernel::blas, 33, 33, 33, 134},
                                  {Kernel::torch, 33, 33, 33, 134}}};
inline constexpr Chip kGfx942 = {304,
                                 4.2e6,
                                 {{Kernel::mfma, 65, 65, 260, 520},
                                  {Kernel::simt, 3, 6, 6, 6},
                                  {Kernel::blas, 115, 115, 115, 915},
                                  {Kernel::torch, 115, 115, 115, 915}}};
inline const Chip& chip_of(const DeviceFacts& device) { return device.minor == 0 ? kGfx90a : kGfx942; }

#else

// An H200, as measured: docs/kernels-gpu.md.
inline constexpr Chip kH200 = {132,
                               4.0e6,
                               {{Kernel::sm90, 0, 0, 0, 620},
                                {Kernel::sm80, 42, 36, 90, 240},
                                {Kernel::simt, 1.5, 3, 3, 3},
                                {Kernel::blas, 55, 45, 350, 600}}};
inline const Chip& chip_of(const DeviceFacts&) { return kH200; }

#endif

inline double rate(const Chip& chip, Kernel kernel, int32_t dtype, int32_t precision) {
  for (const Rates& rates : chip.rates) {
    if (rates.kernel != kernel) continue;
    if (dtype == MG_FLOAT64) return rates.float64;
    if (dtype != MG_FLOAT32) return rates.half;
    return precision == MG_PRECISION_TF32 ? rates.tf32 : rates.float32;
  }
  return 1;
}

}  // namespace multigemm
