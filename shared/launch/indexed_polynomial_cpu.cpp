// indexed_polynomial on the CPU: pieces of rows or labels for all threads.
#include <algorithm>

#include "kernels/grouped_mm/cpu_levels.h"
#include "kernels/indexed_polynomial/polynomial_simt.cuh"
#include "kernels/indexed_polynomial/unrolled_simt.h"
#include "launch/indexed_polynomial.h"
#include "runtime/host.h"

namespace multigemm {

void run(const mg_polynomial_problem& p) {
  const Host host(p.host, static_cast<double>(p.rows) * static_cast<double>(p.channels) *
                              static_cast<double>(p.term_count) * (1 + p.directions));
  if (p.implementation == MG_SIMT) {
    if (const int outputs = polynomial_unrolled::outputs_of(p)) {
      const Workspace room(host, polynomial_unrolled::room_of(p));
      if (polynomial_unrolled::run_on_host(p, outputs, room.at<char>(0), host) != 0)
        throw Failure(MG_DEVICE_ERROR, "a kernel on the CPU failed");
      return;
    }
    if (polynomial_simt::launch(p, {&host}) != 0)
      throw Failure(MG_UNSUPPORTED, "the components of a row pass the shared memory of a GPU's block");
    return;
  }
  const CpuLevel& level = cpu_level();
  const int64_t lanes = level.vector_bytes / (p.dtype == MG_FLOAT64 ? 8 : 4);
  const int64_t blocks = (p.channels + lanes - 1) / lanes, threads = host.threads();
  const int64_t scratch = (level.polynomial_scratch(p) + 63) / 64 * 64;
  const bool weights = p.kind == MG_POLYNOMIAL_WGRAD;
  // Pieces of rows use the coefficients of a vector of channels, some tens of kilobytes a label, again and again.
  const int64_t share = (p.rows * blocks + threads * 8 - 1) / (threads * 8);
  const int64_t height = std::min<int64_t>(p.rows, std::max<int64_t>(16, share));
  const int64_t pieces = weights ? p.groups : (p.rows + height - 1) / height;
  const Workspace room(host, scratch * std::min(threads, pieces * blocks));
  host.for_each(pieces * blocks, 1, [&](int64_t i, int64_t slot) {
    const int64_t piece = i / blocks;
    PolynomialPiece task{i % blocks, piece * height, std::min(p.rows, (piece + 1) * height), 0};
    if (weights) {
      // Clamped, as `ends` is data.
      auto end_of = [&](int64_t g) { return std::clamp<int64_t>(p.ends[g], 0, p.rows); };
      const int64_t begin = p.rows == 0 || piece == 0 ? 0 : end_of(piece - 1);
      task = {i % blocks, begin, p.rows == 0 ? 0 : std::max(begin, end_of(piece)), piece};
    }
    level.polynomial(p, task, room.at<char>(slot * scratch));
  });
}

}  // namespace multigemm
