// What the CPU library says about itself.
#include <string>

#include "blas/blas.h"
#include "kernels/grouped_mm/cpu_levels.h"
#include "kernels/grouped_mm/table_cpu.h"
#include "runtime/query.h"

namespace multigemm {

std::string query() {
  return "{\"protocol\": " + std::to_string(MG_PROTOCOL) + ", \"abi\": " + std::to_string(MG_ABI) +
         ", \"version\": \"" MG_VERSION "\", \"name\": \"cpu\", \"kind\": \"cpu\", \"level\": \"" + cpu_level().name +
         "\", \"blas\": \"" + blas_name() + "\", " + kernels_field(kKernels) + "}";
}

}  // namespace multigemm
