// The C functions that tell what this library is.
#include "runtime/query.h"

#include "multigemm/abi.h"
#include "runtime/status.h"

extern "C" const char* MG_NAME(mg_query)(void) {
  static const std::string text = multigemm::query();
  return text.c_str();
}

extern "C" const char* MG_NAME(mg_last_error)(void) { return multigemm::last_error(); }

extern "C" int64_t MG_NAME(mg_abi_sizes)(int64_t* sizes, int64_t count) {
  const int64_t all[] = {sizeof(mg_groups), sizeof(mg_matmul), sizeof(mg_host), sizeof(mg_grouped_mm_problem),
                         sizeof(mg_grouped_mm_wgrad_problem)};
  const int64_t total = sizeof(all) / sizeof(all[0]);
  for (int64_t i = 0; sizes && i < count && i < total; ++i) sizes[i] = all[i];
  return total;
}
