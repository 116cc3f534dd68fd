// indexed_polynomial on a GPU: device guard, launch on the caller's stream.
#include "kernels/indexed_polynomial/polynomial_simt.h"
#include "kernels/indexed_polynomial/unrolled_simt.h"
#include "launch/indexed_polynomial.h"
#include "runtime/device.h"
#include "runtime/status.h"

namespace multigemm {

void run(const mg_polynomial_problem& given) {
  const DeviceGuard guard(given.device);
  const mg_polynomial_problem p = on_its_stream(given);
  if (const int outputs = polynomial_unrolled::outputs_of(p)) {
    const DeviceMemory room(p.host, p.stream, polynomial_unrolled::room_of(p));
    const auto launch = p.dtype == MG_FLOAT64 ? polynomial_unrolled::run_float64 : polynomial_unrolled::run_float32;
    return check_gpu(launch(p, outputs, room.as<void>(), p.stream),
                     "launching a contraction whose terms are compiled in");
  }
  const int error = polynomial_simt::run(p, p.stream);
  if (error == -1) throw Failure(MG_UNSUPPORTED, "the components of a row pass the shared memory of a GPU's block");
  check_gpu(error, "launching indexed_polynomial");
}

}  // namespace multigemm
