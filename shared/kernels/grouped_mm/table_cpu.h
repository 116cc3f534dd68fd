// Who supports what on the CPU: the kernels of both operators, in the order `explain` lists them.
#pragma once

#include "multigemm/abi.h"

namespace multigemm {

enum class Kernel { simd, simt, blas, torch };

struct KernelRow {
  Kernel kernel;
  mg_implementation implementation;
  const char* rows_name;   // in grouped_mm
  const char* wgrad_name;  // in grouped_mm_wgrad
  bool needs_host_matmul;
  bool needs_32_bit_sizes;
};

// Every kernel takes every dtype, stride, alignment and size but for the two columns on the right.
inline constexpr KernelRow kKernels[] = {
    {Kernel::simd, MG_NATIVE, "rows_simd", "wgrad_simd", false, false},
    {Kernel::simt, MG_SIMT, "rows_simt", "wgrad_simt", false, false},
    {Kernel::blas, MG_BLAS, "blas", "blas", false, true},
    {Kernel::torch, MG_TORCH, "torch", "torch", true, false},
};

}  // namespace multigemm
