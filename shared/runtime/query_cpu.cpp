// What the CPU library says about itself.
#include <string>

#include "blas/blas.h"
#include "kernels/grouped_mm/cpu_levels.h"
#include "kernels/grouped_mm/table_cpu.h"
#include "runtime/query.h"

namespace multigemm {

std::string query() {
  std::string rows, wgrad;
  for (const KernelRow& row : kKernels) {
    rows += std::string(rows.empty() ? "\"" : ", \"") + row.rows_name + "\"";
    wgrad += std::string(wgrad.empty() ? "\"" : ", \"") + row.wgrad_name + "\"";
  }
  return "{\"protocol\": " + std::to_string(MG_PROTOCOL) + ", \"abi\": " + std::to_string(MG_ABI) +
         ", \"version\": \"" MG_VERSION "\", \"name\": \"cpu\", \"kind\": \"cpu\", \"level\": \"" + cpu_level().name +
         "\", \"blas\": \"" + blas_name() + "\", \"kernels\": {\"grouped_mm\": [" + rows +
         "], \"grouped_mm_wgrad\": [" + wgrad + "]}}";
}

}  // namespace multigemm
