#include "launch/choose_cpu.h"

#include "launch/checks.h"
#include "runtime/status.h"

namespace multigemm {
namespace {

const KernelRow& row_of(Kernel kernel) {
  for (const KernelRow& row : kKernels)
    if (row.kernel == kernel) return row;
  throw Failure(MG_INTERNAL, "a kernel is missing from the table");
}

// The asked implementation, or null for the automatic choice.
const KernelRow* asked(const CallFacts& facts) {
  if (facts.implementation == MG_AUTO) return nullptr;
  for (const KernelRow& row : kKernels) {
    if (row.implementation != facts.implementation) continue;
    const std::string reason = refusal(row, facts);
    if (!reason.empty())
      throw Failure(MG_UNSUPPORTED, std::string("implementation \"") + implementation_name(facts.implementation) +
                                        "\" can't take this call: " + reason + "; leave the implementation out");
    return &row;
  }
  throw Failure(MG_INTERNAL, "an implementation is missing from the table");
}

// Bytes of one [K, M] matrix in the type it is summed in.
int64_t matrix_bytes(const CallFacts& facts) {
  return facts.inner * facts.outer * dtype_bytes(facts.dtype == MG_FLOAT64 ? MG_FLOAT64 : MG_FLOAT32);
}

Choice best_product(const CallFacts& facts, const std::string& why) {
  for (Kernel kernel : {Kernel::torch, Kernel::blas})
    if (refusal(row_of(kernel), facts).empty()) return {&row_of(kernel), why};
  return {&row_of(Kernel::simd), "no matrix product takes these sizes"};
}

}  // namespace

std::string refusal(const KernelRow& row, const CallFacts& facts) {
  if (row.needs_host_matmul && !facts.has_host_matmul) return "the caller lends no matrix product of its own";
  if (row.needs_32_bit_sizes && facts.largest_extent > 0x7fffffff) return "a size or stride passes 2^31 - 1";
  return "";
}

// Both rules come from the table in docs/kernels-cpu.md.
Choice choose_rows(const CallFacts& facts) {
  if (const KernelRow* row = asked(facts)) return {row, "asked for"};
  const KernelRow* simd = &row_of(Kernel::simd);
  if (matrix_bytes(facts) <= 256 * 1024) return {simd, "one matrix of w stays in the second-level cache"};
  if (facts.few_rows) return {simd, "few rows a group: w is read once, in order, by all threads"};
  if (is_half(facts.dtype) && facts.inner <= 2048) return {simd, "two-byte operands are widened inside the kernel"};
  if (facts.w_transposed && facts.inner <= 1024) return {simd, "w is transposed, and its packed columns fit the cache"};
  return best_product(facts, "one matrix of w is larger than the second-level cache");
}

Choice choose_wgrad(const CallFacts& facts) {
  if (const KernelRow* row = asked(facts)) return {row, "asked for"};
  const KernelRow* simd = &row_of(Kernel::simd);
  const KernelRow* torch = &row_of(Kernel::torch);
  if (!is_half(facts.dtype) && facts.inner * facts.outer >= 8192 && facts.used < 32 * facts.present &&
      refusal(*torch, facts).empty())
    return {torch, "few rows a group and a wide matrix: its sums are stored once, which torch's product does faster"};
  if (matrix_bytes(facts) <= 128 * 1024) return {simd, "one matrix of sums stays in the second-level cache"};
  if (is_half(facts.dtype)) return {simd, "two-byte operands are widened inside the kernel"};
  return best_product(facts, "one matrix of sums is larger than the second-level cache");
}

std::string explain(const char* op, const Choice& choice, const CallFacts& facts, bool wgrad) {
  auto name = [&](const KernelRow& row) { return wgrad ? row.wgrad_name : row.rows_name; };
  std::string text = std::string("{\"operator\": \"") + op + "\", \"kernel\": \"" + name(*choice.row) +
                     "\", \"implementation\": \"" + implementation_name(choice.row->implementation) +
                     "\", \"why\": \"" + choice.why + "\", \"others\": [";
  bool first = true;
  for (const KernelRow& row : kKernels) {
    if (&row == choice.row) continue;
    std::string reason = refusal(row, facts);
    if (reason.empty()) {
      if (facts.implementation != MG_AUTO)
        reason = "another implementation was asked for";
      else if (row.kernel == Kernel::simt)
        reason = "the portable kernel runs only when asked for: it is meant for checks";
      else
        reason = "expected to be slower here: " + choice.why;
    }
    text += std::string(first ? "" : ", ") + "{\"kernel\": \"" + name(row) + "\", \"implementation\": \"" +
            implementation_name(row.implementation) + "\", \"why_not\": \"" + reason + "\"}";
    first = false;
  }
  return text + "]}";
}

}  // namespace multigemm
