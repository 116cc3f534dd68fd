// What a GPU library says about itself; answers without a device too.
#include <string>

#include "blas/blas_gpu.h"
#include "kernels/grouped_mm/table_gpu.h"
#include "runtime/query.h"

namespace multigemm {

std::string query() {
  std::string rows, wgrad;
  for (const KernelRow& row : kKernels) {
    rows += std::string(rows.empty() ? "\"" : ", \"") + row.rows_name + "\"";
    wgrad += std::string(wgrad.empty() ? "\"" : ", \"") + row.wgrad_name + "\"";
  }
  return "{\"protocol\": " + std::to_string(MG_PROTOCOL) + ", \"abi\": " + std::to_string(MG_ABI) +
         ", \"version\": \"" MG_VERSION "\", \"name\": \"" MG_BACKEND_NAME "\", \"kind\": \"" MG_BACKEND_KIND
         "\", \"blas_version\": " +
         std::to_string(blas_version()) + ", \"grouped_products\": " + (has_grouped_products() ? "true" : "false") +
         ", \"kernels\": {\"grouped_mm\": [" + rows + "], \"grouped_mm_wgrad\": [" + wgrad + "]}}";
}

}  // namespace multigemm
