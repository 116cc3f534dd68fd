// The GPU's kernels on the CPU, as vendor/gpu_host.h runs them.
#include "kernels/indexed_polynomial/unrolled_simt.cuh"
#include "runtime/host.h"

namespace multigemm {
namespace polynomial_unrolled {

int run_on_host(const mg_polynomial_problem& p, int outputs, void* room, const Host& host) {
  return p.dtype == MG_FLOAT64 ? launch<double>(p, outputs, room, {&host}) : launch<float>(p, outputs, room, {&host});
}

}  // namespace polynomial_unrolled
}  // namespace multigemm
