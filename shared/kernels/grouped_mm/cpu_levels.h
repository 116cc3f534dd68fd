// The vectorised kernels of one CPU level behind plain functions, and the pick of the level at run time.
#pragma once

#include "kernels/indexed_polynomial/cpu_task.h"
#include "launch/groups.h"
#include "multigemm/abi.h"
#include "multigemm/abi_polynomial.h"

namespace multigemm {

// Outputs over this are written around the cache: their lines would be read first and be gone before their next use.
constexpr int64_t kPastCacheBytes = int64_t{16} << 20;

// One piece of work: the rows [begin, end) of group `group` for batch entry `batch`, or for all of B.
struct RowsTask {
  static constexpr int64_t kAllOfB = -1;  // only where fits_thin_rows
  int64_t group, begin, end, batch;
  bool past_cache;  // write around the cache
};

// The columns [m0, m1) of all rows of a group of at most kFewRows, for batch entry `batch`.
constexpr int64_t kFewRows = 4;
struct FewRowsTask {
  int64_t group, begin, end, batch, m0, m1;
};

// The sums of group `group` over its rows, for out rows [k0, k1) and columns [m0, m1) of batch entries [b0, b1).
struct WgradTask {
  int64_t group, begin, end, b0, b1, k0, k1, m0, m1;
  bool past_cache;  // write around the cache
};

struct Conversion {
  const void* source;
  int64_t source_row, source_column;
  int32_t source_dtype;
  void* target;
  int64_t target_row, target_column;
  int32_t target_dtype;
  int64_t columns;
  const void* bias;
  int64_t bias_stride;
  int32_t bias_dtype;
};

// Whether rows_thin_cpu.h takes a problem, and the scratch of one of its tasks: w with unit M stride.
inline int64_t thin_rows_scratch(const mg_grouped_mm_problem& p) {
  return p.batch * p.inner * p.outer * (p.dtype == MG_FLOAT64 ? 8 : 4);
}
inline bool fits_thin_rows(const mg_grouped_mm_problem& p) {
  const int64_t row = p.outer * (p.dtype == MG_FLOAT64 ? 8 : 4);
  return (p.dtype == MG_FLOAT64 || p.dtype == MG_FLOAT32) && p.out_dtype == p.dtype && p.out_stride[2] == 1 &&
         (!p.bias || p.bias_stride[2] == 1) && (row == 16 || row == 32) && p.batch > 1 && p.inner <= 16 &&
         thin_rows_scratch(p) <= 24 * 1024;
}

// Whether wgrad_thin_cpu.h takes a problem, and how much of B one of its tasks has.
inline bool fits_thin_wgrad(const mg_grouped_mm_wgrad_problem& p) {
  const int64_t row = p.outer * (p.dtype == MG_FLOAT64 ? 8 : 4);
  return (p.dtype == MG_FLOAT64 || p.dtype == MG_FLOAT32) && p.gy_stride[2] == 1 && !p.sum_batch &&
         (row == 16 || row == 32) && p.batch > 1 && p.inner <= 16;
}
inline int64_t thin_wgrad_batch(const mg_grouped_mm_wgrad_problem& p) {
  const int64_t matrix = p.inner * p.outer * (p.dtype == MG_FLOAT64 ? 8 : 4), fit = 8 * 1024 / matrix;
  return fit < p.batch ? fit : p.batch;
}

// Whether rows_few_cpu.h takes a problem: large matrices, few rows for each, so that reading w is the whole cost.
inline bool fits_few_rows(const mg_grouped_mm_problem& p, int64_t tallest) {
  return (p.dtype == MG_FLOAT64 || p.dtype == MG_FLOAT32) && p.out_dtype == p.dtype && p.w_stride[3] == 1 &&
         p.out_stride[2] == 1 && (!p.bias || p.bias_stride[2] == 1) && tallest <= kFewRows &&
         p.inner * p.outer >= 16 * 1024;
}

struct CpuLevel {
  const char* name;
  int64_t (*rows_scratch)(const mg_grouped_mm_problem& problem, int64_t rows);
  void (*rows)(const mg_grouped_mm_problem& problem, const RowsTask& task, void* scratch);
  void (*rows_few)(const mg_grouped_mm_problem& problem, const FewRowsTask& task);
  int64_t (*wgrad_scratch)(const mg_grouped_mm_wgrad_problem& problem, const WgradTask& largest);
  void (*wgrad)(const mg_grouped_mm_wgrad_problem& problem, const WgradTask& task, void* scratch);
  // Rows from one dtype and layout to another, as the matrix-product paths need it; `bias` (may be null) is added to
  // each row before the one rounding. Source and target may be the same memory.
  void (*convert)(const Conversion& conversion, int64_t row_begin, int64_t row_end);
  // indexed_polynomial, whose pieces are vectors of `vector_bytes` of the channels.
  int64_t (*polynomial_scratch)(const mg_polynomial_problem& problem);
  void (*polynomial)(const mg_polynomial_problem& problem, const PolynomialPiece& piece, void* scratch);
  int vector_bytes;
};

// The best level this CPU runs, found once.
const CpuLevel& cpu_level();

}  // namespace multigemm
