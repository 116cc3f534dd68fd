// indexed_polynomial on a GPU: device guard, launch on the caller's stream.
#include "kernels/indexed_polynomial/polynomial_simt.h"
#include "launch/indexed_polynomial.h"
#include "runtime/device.h"
#include "runtime/status.h"

namespace multigemm {

void run(const mg_polynomial_problem& given) {
  const DeviceGuard guard(given.device);
  const mg_polynomial_problem p = on_its_stream(given);
  const int error = polynomial_simt::run(p, p.stream);
  if (error == -1) throw Failure(MG_UNSUPPORTED, "the components of a row pass the shared memory of a GPU's block");
  check_gpu(error, "launching indexed_polynomial");
}

}  // namespace multigemm
