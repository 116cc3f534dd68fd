// hipBLAS of ROCm 7, in this project's own declarations. It is looked up in the process, where PyTorch has loaded it,
// so that this library needs no ROCm to be built or opened.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "blas/handles.h"

namespace multigemm {

struct HipBlas {
  int (*create)(BlasContext** handle);
  int (*destroy)(BlasContext* handle);
  int (*set_stream)(BlasContext* handle, void* stream);
  int (*set_workspace)(BlasContext* handle, void* memory, size_t bytes);
  int (*set_atomics_mode)(BlasContext* handle, int mode);
  const char* (*status_text)(int status);
  int (*gemm)(BlasContext* handle, int a_operation, int b_operation, int m, int n, int k, const void* alpha,
              const void* a, int a_type, int a_leading, int64_t a_stride, const void* b, int b_type, int b_leading,
              int64_t b_stride, const void* beta, void* c, int c_type, int c_leading, int64_t c_stride, int count,
              int compute, int algorithm);
};

// Null if there is none, or an older one.
const HipBlas* find_blas();

// Throws Failure(MG_UNSUPPORTED) if there is none.
const HipBlas& blas();

}  // namespace multigemm
