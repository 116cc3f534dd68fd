// Who computes the two operators on a GPU, in the order `explain` lists them. What each supports is said by its own
// refusal function: a pure function of the call's numbers and of the device.
#pragma once

#include "multigemm/abi.h"

namespace multigemm {

enum class Kernel { sm90, sm80, mfma, simt, blas, torch };

struct KernelRow {
  Kernel kernel;
  mg_implementation implementation;
  const char* rows_name;   // in grouped_mm
  const char* wgrad_name;  // in grouped_mm_wgrad
};

inline constexpr KernelRow kKernels[] = {
#if defined(MG_HIP)
    {Kernel::mfma, MG_NATIVE, "rows_mfma", "wgrad_mfma"},
#else
    {Kernel::sm90, MG_NATIVE, "rows_sm90", "wgrad_sm90"}, {Kernel::sm80, MG_NATIVE, "rows_sm80", "wgrad_sm80"},
#endif
    {Kernel::simt, MG_SIMT, "rows_simt", "wgrad_simt"},
    {Kernel::blas, MG_BLAS, "blas", "blas"},
    {Kernel::torch, MG_TORCH, "torch", "torch"},
};

}  // namespace multigemm
