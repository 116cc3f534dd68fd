// What launchers of kernels ask of operands in memory; host code.
#pragma once

#include <stdint.h>

#include "multigemm/abi.h"

namespace multigemm {

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

inline int64_t dtype_bytes(int32_t dtype) { return dtype == MG_FLOAT64 ? 8 : dtype == MG_FLOAT32 ? 4 : 2; }

// Whether lines of unit stride can be read or written 16 bytes at a time: `strides` of the `count` outer dimensions,
// `sizes` of them and then the line's length, which need not be whole if each access is guarded (`guarded`).
inline bool wide_lines(const void* data, int64_t element_bytes, const int64_t* strides, const int64_t* sizes, int count,
                       bool guarded = false) {
  if (reinterpret_cast<uintptr_t>(data) % 16) return false;
  for (int i = 0; i < count; ++i)
    if (sizes[i] > 1 && strides[i] * element_bytes % 16) return false;
  return guarded || sizes[count] * element_bytes % 16 == 0;
}

// Row tiles there can be at most, whatever the sizes.
inline int64_t most_row_tiles(int64_t rows, int64_t groups, int64_t tile_rows) {
  return rows / tile_rows + (groups + 1 < rows ? groups + 1 : rows);
}

}  // namespace multigemm
