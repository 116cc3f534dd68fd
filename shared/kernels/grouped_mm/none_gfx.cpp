// In place of kernels of one architecture in a library that has none of them: no row of the table leads here.
#include "kernels/grouped_mm/rows_sm80.h"
#include "kernels/grouped_mm/rows_sm90.h"
#include "kernels/grouped_mm/wgrad_sm80.h"
#include "kernels/grouped_mm/wgrad_sm90.h"
#include "runtime/status.h"

namespace multigemm {
namespace {

constexpr char kNone[] = "this backend has no such kernel";

}  // namespace

std::string rows_sm80_refusal(const mg_grouped_mm_problem&, const DeviceFacts&) { return kNone; }
std::string rows_sm90_refusal(const mg_grouped_mm_problem&, const DeviceFacts&) { return kNone; }
std::string wgrad_sm80_refusal(const mg_grouped_mm_wgrad_problem&, const DeviceFacts&) { return kNone; }
std::string wgrad_sm90_refusal(const mg_grouped_mm_wgrad_problem&, const DeviceFacts&) { return kNone; }

int launch_rows_sm80(const mg_grouped_mm_problem&, const DeviceFacts&, void*) { throw Failure(MG_INTERNAL, kNone); }
int launch_rows_sm90(const mg_grouped_mm_problem&, const DeviceFacts&, void*) { throw Failure(MG_INTERNAL, kNone); }
int launch_wgrad_sm80(const mg_grouped_mm_wgrad_problem&, const DeviceFacts&, void*) {
  throw Failure(MG_INTERNAL, kNone);
}
int launch_wgrad_sm90(const mg_grouped_mm_wgrad_problem&, const DeviceFacts&, void*) {
  throw Failure(MG_INTERNAL, kNone);
}

}  // namespace multigemm
