#include "kernels/indexed_polynomial/unrolled_simt.cuh"

namespace multigemm {
namespace polynomial_unrolled {

int run_float32(const mg_polynomial_problem& p, int outputs, void* room, void* stream) {
  return launch<float>(p, outputs, room, {stream});
}

}  // namespace polynomial_unrolled
}  // namespace multigemm
