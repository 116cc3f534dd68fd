// What a GPU library says about itself; answers without a device too.
#include <string>

#include "blas/blas_gpu.h"
#include "kernels/grouped_mm/table_gpu.h"
#include "runtime/query.h"
#include "runtime/without.h"

namespace multigemm {

std::string query() {
  return "{\"protocol\": " + std::to_string(MG_PROTOCOL) + ", \"abi\": " + std::to_string(MG_ABI) +
         ", \"version\": \"" MG_VERSION "\", \"name\": \"" MG_BACKEND_NAME "\", \"kind\": \"" MG_BACKEND_KIND
         "\", \"blas_version\": " +
         std::to_string(blas_version()) + ", \"grouped_products\": " + (has_grouped_products() ? "true" : "false") +
         ", \"without\": " + kWithout + ", " + kernels_field(kKernels) + "}";
}

}  // namespace multigemm
