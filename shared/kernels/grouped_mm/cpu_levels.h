// The vectorised kernels of one CPU level behind plain functions, and the pick of the level at run time.
#pragma once

#include "launch/groups.h"
#include "multigemm/abi.h"

namespace multigemm {

// One piece of work: the rows [begin, end) of group `group` for batch entry `batch`.
struct RowsTask {
  int64_t group, begin, end, batch;
  bool past_cache;  // write around the cache
};

// The sums of group `group` over its rows, for out rows [k0, k1) and columns [m0, m1) of batch entries [b0, b1).
struct WgradTask {
  int64_t group, begin, end, b0, b1, k0, k1, m0, m1;
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

struct CpuLevel {
  const char* name;
  int64_t (*rows_scratch)(const mg_grouped_mm_problem& problem, int64_t rows);
  void (*rows)(const mg_grouped_mm_problem& problem, const RowsTask& task, void* scratch);
  int64_t (*wgrad_scratch)(const mg_grouped_mm_wgrad_problem& problem, const WgradTask& largest);
  void (*wgrad)(const mg_grouped_mm_wgrad_problem& problem, const WgradTask& task, void* scratch);
  // Rows from one dtype and layout to another, as the matrix-product paths need it; `bias` (may be null) is added to
  // each row before the one rounding. Source and target may be the same memory.
  void (*convert)(const Conversion& conversion, int64_t row_begin, int64_t row_end);
};

// The best level this CPU runs, found once.
const CpuLevel& cpu_level();

}  // namespace multigemm
