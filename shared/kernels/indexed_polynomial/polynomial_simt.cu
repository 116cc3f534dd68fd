#include "kernels/indexed_polynomial/polynomial_simt.h"

#include "kernels/indexed_polynomial/polynomial_simt.cuh"

namespace multigemm {
namespace polynomial_simt {

int run(const mg_polynomial_problem& p, void* stream) { return launch(p, {stream}); }

}  // namespace polynomial_simt
}  // namespace multigemm
