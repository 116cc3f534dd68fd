// The kernels for AMD's matrix cores by name, for a device that the test describes, and their instruction.
#include <cstring>
#include <vector>

#include "kernels/grouped_mm/instruction_mfma.cuh"
#include "kernels/grouped_mm/rows_mfma.h"
#include "kernels/grouped_mm/simt.h"
#include "kernels/grouped_mm/wgrad_mfma.h"
#include "stand_in.h"

#define MG_CALL extern "C" MG_EXPORT

namespace {

using multigemm::DeviceFacts;

DeviceFacts facts(int minor, int multiprocessors) {
  DeviceFacts facts;
  facts.major = 9;
  facts.minor = minor;
  facts.multiprocessors = multiprocessors;
  return facts;
}

std::string refusal(const mg_grouped_mm_problem& p, const DeviceFacts& device) {
  return multigemm::rows_mfma_refusal(p, device);
}
std::string refusal(const mg_grouped_mm_wgrad_problem& p, const DeviceFacts& device) {
  return multigemm::wgrad_mfma_refusal(p, device);
}
int launch(const mg_grouped_mm_problem& p, const DeviceFacts& device, void* stream) {
  return multigemm::launch_rows_mfma(p, device, stream);
}
int launch(const mg_grouped_mm_wgrad_problem& p, const DeviceFacts& device, void* stream) {
  return multigemm::launch_wgrad_mfma(p, device, stream);
}

// Runs it to its end; the reason in `text` if it is refused.
template <class Problem>
int run(const Problem* problem, int minor, int multiprocessors, char* text, int capacity) {
  const DeviceFacts device = facts(minor, multiprocessors);
  const std::string reason = refusal(*problem, device);
  std::strncpy(text, reason.c_str(), static_cast<size_t>(capacity) - 1);
  if (!reason.empty()) return -1;
  Problem p = *problem;
  void* const stream = &p;
  std::vector<int32_t> counted;
  if (p.groups.count > multigemm::kMostBlockGroups) {
    counted.resize(static_cast<size_t>(3 * p.groups.count));
    const int error = multigemm::simt::count_groups(p.groups, p.rows, 1, counted.data(), stream);
    if (error) return error;
    p.groups = {counted.data(), p.groups.count, 1, MG_INT32, MG_GROUPS_OFFSETS};
  }
  const int error = launch(p, device, stream);
  multigemm::stand_in::synchronize(stream);
  return error;
}

}  // namespace

MG_CALL int mfma_rows(const mg_grouped_mm_problem* p, int minor, int multiprocessors, char* text, int capacity) {
  return run(p, minor, multiprocessors, text, capacity);
}
MG_CALL int mfma_wgrad(const mg_grouped_mm_wgrad_problem* p, int minor, int multiprocessors, char* text, int capacity) {
  return run(p, minor, multiprocessors, text, capacity);
}

namespace {

struct OneProduct {
  const uint32_t* a;  // of each lane, one or two words
  const uint32_t* b;
  void* sums;  // of each lane, four
  int kind;
};

template <class Kind, class Sums>
void one_product(const OneProduct& call, int words) {
  const int lane = static_cast<int>(threadIdx.x);
  Sums& sums = static_cast<Sums*>(call.sums)[lane];
  multigemm::mfma::multiply(Kind(), call.a + lane * words, call.b + lane * words, sums);
}

MG_KERNEL void one_product_of(OneProduct call) {
  using namespace multigemm::mfma;
  switch (call.kind) {
    case 0: return one_product<Bfloat16, FloatSums>(call, 2);
    case 1: return one_product<Float16, FloatSums>(call, 2);
    case 2: return one_product<Float32, FloatSums>(call, 1);
    case 3: return one_product<Tf32, FloatSums>(call, 2);
    default: return one_product<Float64, DoubleSums>(call, 2);
  }
}

}  // namespace

// One matrix instruction by one wavefront.
MG_CALL int mfma_instruction(int kind, const uint32_t* a, const uint32_t* b, void* sums) {
  const OneProduct call{a, b, sums, kind};
  const int error = multigemm::gpu::launch(one_product_of, 1, multigemm::mfma::kWave, {sums}, call);
  multigemm::stand_in::synchronize(sums);
  return error;
}
