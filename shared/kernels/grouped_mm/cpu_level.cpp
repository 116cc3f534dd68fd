// Compiled once for each CPU level, with MG_LEVEL naming it: see multigemm_add_backend in shared/cmake.
#include "kernels/grouped_mm/rows_cpu.h"
#include "kernels/grouped_mm/rows_few_cpu.h"
#include "kernels/grouped_mm/rows_thin_cpu.h"
#include "kernels/grouped_mm/wgrad_cpu.h"
#include "kernels/grouped_mm/wgrad_thin_cpu.h"
#include "kernels/indexed_polynomial/cpu.h"

namespace multigemm {
namespace MG_LEVEL {
namespace {

int64_t rows_scratch(const mg_grouped_mm_problem& p, int64_t rows) {
  return p.dtype == MG_FLOAT64   ? rows_scratch_bytes<double>(p, rows)
         : p.dtype == MG_FLOAT32 ? rows_scratch_bytes<float>(p, rows)
                                 : rows_scratch_bytes<Half>(p, rows);
}

void rows(const mg_grouped_mm_problem& p, const RowsTask& t, void* scratch) {
  if (t.batch == RowsTask::kAllOfB)
    return p.dtype == MG_FLOAT64 ? rows_thin_task<double>(p, t, scratch) : rows_thin_task<float>(p, t, scratch);
  switch (p.dtype) {
    case MG_FLOAT64: return rows_task<double>(p, t, scratch);
    case MG_FLOAT32: return rows_task<float>(p, t, scratch);
    case MG_FLOAT16: return rows_task<Half>(p, t, scratch);
    default: return rows_task<Bfloat>(p, t, scratch);
  }
}

void rows_few(const mg_grouped_mm_problem& p, const FewRowsTask& t) {
  p.dtype == MG_FLOAT64 ? rows_few_task<double>(p, t) : rows_few_task<float>(p, t);
}

int64_t wgrad_scratch(const mg_grouped_mm_wgrad_problem& p, const WgradTask& t) {
  return p.dtype == MG_FLOAT64   ? wgrad_scratch_bytes<double>(p, t)
         : p.dtype == MG_FLOAT32 ? wgrad_scratch_bytes<float>(p, t)
                                 : wgrad_scratch_bytes<Half>(p, t);
}

void wgrad(const mg_grouped_mm_wgrad_problem& p, const WgradTask& t, void* scratch) {
  if (fits_thin_wgrad(p))
    return p.dtype == MG_FLOAT64 ? wgrad_thin_task<double>(p, t, scratch) : wgrad_thin_task<float>(p, t, scratch);
  switch (p.dtype) {
    case MG_FLOAT64: return wgrad_task<double>(p, t, scratch);
    case MG_FLOAT32: return wgrad_task<float>(p, t, scratch);
    case MG_FLOAT16: return wgrad_task<Half>(p, t, scratch);
    default: return wgrad_task<Bfloat>(p, t, scratch);
  }
}

// In runs of a few hundred columns through a buffer, so that the sum of value and bias is rounded once.
template <class T>
void convert_from(const Conversion& c, int64_t row_begin, int64_t row_end) {
  using A = typename Accumulator<T>::type;
  constexpr int64_t kRun = 256;
  A run[kRun], bias[kRun];
  for (int64_t m = 0; m < c.columns; m += kRun) {
    const int64_t count = least(kRun, c.columns - m);
    if (c.bias) {
      const int64_t at = m * c.bias_stride;
      switch (c.bias_dtype) {
        case MG_FLOAT64:
          if constexpr (sizeof(A) == 8) widen_row(bias, static_cast<const double*>(c.bias) + at, c.bias_stride, count);
          break;
        case MG_FLOAT32: widen_row(bias, static_cast<const float*>(c.bias) + at, c.bias_stride, count); break;
        case MG_FLOAT16: widen_row(bias, static_cast<const Half*>(c.bias) + at, c.bias_stride, count); break;
        default: widen_row(bias, static_cast<const Bfloat*>(c.bias) + at, c.bias_stride, count);
      }
    }
    for (int64_t r = row_begin; r < row_end; ++r) {
      widen_row(run, static_cast<const T*>(c.source) + r * c.source_row + m * c.source_column, c.source_column, count);
      if (c.bias)
        for (int64_t i = 0; i < count; ++i) run[i] += bias[i];
      narrow_row(element(c.target, c.target_dtype, r * c.target_row + m * c.target_column), c.target_dtype,
                 c.target_column, run, count);
    }
  }
}

void convert(const Conversion& c, int64_t row_begin, int64_t row_end) {
  switch (c.source_dtype) {
    case MG_FLOAT64: return convert_from<double>(c, row_begin, row_end);
    case MG_FLOAT32: return convert_from<float>(c, row_begin, row_end);
    case MG_FLOAT16: return convert_from<Half>(c, row_begin, row_end);
    default: return convert_from<Bfloat>(c, row_begin, row_end);
  }
}

}  // namespace

extern const CpuLevel level;
const CpuLevel level{
    MG_LEVEL_NAME, rows_scratch,          rows, rows_few, wgrad_scratch, wgrad, convert, polynomial_scratch,
    polynomial,    kPolynomialVectorBytes};

}  // namespace MG_LEVEL
}  // namespace multigemm
