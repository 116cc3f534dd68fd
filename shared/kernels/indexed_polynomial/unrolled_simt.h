// The kernels of contractions whose terms are compiled in, for host code.
#pragma once

#include "kernels/indexed_polynomial/unrolled_terms.h"
#include "multigemm/abi_polynomial.h"

namespace multigemm {

class Host;

namespace polynomial_unrolled {

constexpr int kWidth = 16;

// Which outputs the tables of a problem are those of, a bit for each; 0 where they are compiled in for none.
inline int outputs_of(const mg_polynomial_problem& p) {
  constexpr int64_t kMostColumns = 0x7fffffff;
  if (p.fingerprint == 0 || p.directions > 1 || p.width != kWidth) return 0;
  if ((p.width + p.components) * p.channels > kMostColumns) return 0;
  for (const Known& known : kKnown)
    if (known.fingerprint == p.fingerprint) return known.outputs;
  return 0;
}

// Rows that one thread of wgrad adds: few where there are few, so that they fill the device, and then as many as leave
// 2048 warps, since each chunk writes sums.
inline int64_t chunk_of(const mg_polynomial_problem& p) {
  constexpr int64_t kThreads = 2048 * 32;
  const int64_t least = p.rows < 512 ? 4 : 8, wanted = p.rows * p.channels / kThreads;
  return wanted < least ? least : wanted;
}

// Bytes of the workspace that launch takes.
inline int64_t room_of(const mg_polynomial_problem& p) {
  if (p.kind != MG_POLYNOMIAL_WGRAD || p.rows == 0) return 0;
  const int64_t chunks = (p.rows + chunk_of(p) - 1) / chunk_of(p);
  return chunks * 2 * p.weight_count * p.channels * (p.dtype == MG_FLOAT64 ? 8 : 4);
}

// Of the dtype that they name, on a GPU: launch of unrolled_simt.cuh. 0, or the runtime's error number.
int run_float32(const mg_polynomial_problem& p, int outputs, void* room, void* stream);
int run_float64(const mg_polynomial_problem& p, int outputs, void* room, void* stream);

// Of either dtype, on the CPU.
int run_on_host(const mg_polynomial_problem& p, int outputs, void* room, const Host& host);

}  // namespace polynomial_unrolled
}  // namespace multigemm
