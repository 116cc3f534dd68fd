// indexed_polynomial: the C entry point. Checks and empty cases, then the device's own launch.
#include "launch/indexed_polynomial.h"

#include "runtime/status.h"

namespace multigemm {
namespace {

void expect(bool right, const char* what) {
  if (!right) throw Failure(MG_INVALID_ARGUMENT, what);
}

// Throws for a problem that can't be computed; false where nothing is written.
bool check(const mg_polynomial_problem* problem) {
  expect(problem, "problem is null");
  const mg_polynomial_problem& p = *problem;
  expect(p.struct_size == static_cast<int64_t>(sizeof(p)), "struct_size is not that of this library");
  for (int64_t size :
       {p.rows, p.channels, p.groups, p.width, p.components, p.head_count, p.pair_count, p.term_count, p.weight_count})
    expect(size >= 0, "a size is negative");
  for (int64_t count : {p.width, p.components, p.head_count, p.pair_count, p.term_count, p.weight_count})
    expect(count < 0x7fffffff, "the tables have more than 2^31 - 1 entries");
  expect(p.dtype == MG_FLOAT64 || p.dtype == MG_FLOAT32, "dtype must be float64 or float32");
  const bool value = p.kind == MG_POLYNOMIAL_VALUE, weights = p.kind == MG_POLYNOMIAL_WGRAD;
  expect(value || weights || p.kind == MG_POLYNOMIAL_XGRAD, "kind is none that there is");
  expect(p.directions >= 0 && p.directions <= (p.kind == MG_POLYNOMIAL_XGRAD ? 2 : 3), "too many directions");
  const int64_t columns = value ? p.components : p.width;
  if (p.channels == 0 || (weights ? p.groups * p.weight_count : p.rows * columns) == 0) return false;
  expect(p.out, "out is null");
  if (p.rows == 0) return true;
  expect(p.x || p.width == 0, "x is null");
  for (int32_t a = 0; a < p.directions; ++a) expect(p.direction[a] || p.width == 0, "a direction is null");
  expect(p.labels && p.places && (p.term_count == 0 || (p.heads && p.pairs && p.last && p.factors)), "a table is null");
  expect(!weights || (p.entry_ends && (p.term_count == 0 || p.entries)), "a table is null");
  expect(weights || p.w || p.groups * p.weight_count == 0, "w is null");
  expect(value || p.gy || p.components == 0, "gy is null");
  expect(!weights || (p.permutation && p.ends), "the gradient in w needs the rows' order");
  return true;
}

}  // namespace
}  // namespace multigemm

extern "C" int32_t MG_NAME(mg_indexed_polynomial)(const mg_polynomial_problem* problem) {
  return multigemm::guarded([&] {
    if (multigemm::check(problem)) multigemm::run(*problem);
  });
}
