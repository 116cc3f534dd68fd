// What this library says about itself.
#include <string>

#include "blas/blas.h"
#include "kernels/grouped_mm/cpu_levels.h"
#include "kernels/grouped_mm/table.h"
#include "runtime/status.h"

namespace multigemm {
namespace {

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

}  // namespace
}  // namespace multigemm

extern "C" const char* MG_NAME(mg_query)(void) {
  static const std::string text = multigemm::query();
  return text.c_str();
}

extern "C" const char* MG_NAME(mg_last_error)(void) { return multigemm::last_error(); }

extern "C" int64_t MG_NAME(mg_abi_sizes)(int64_t* sizes, int64_t count) {
  const int64_t all[] = {sizeof(mg_groups), sizeof(mg_matmul), sizeof(mg_host), sizeof(mg_grouped_mm_problem),
                         sizeof(mg_grouped_mm_wgrad_problem)};
  const int64_t total = sizeof(all) / sizeof(all[0]);
  for (int64_t i = 0; sizes && i < count && i < total; ++i) sizes[i] = all[i];
  return total;
}
