// grouped_mm: the C entry points. Checks, then the device's own launch: guard, empty cases, choice from the table,
// kernel.
#include "launch/grouped_mm.h"

#include "launch/checks.h"
#include "launch/text.h"

extern "C" int32_t MG_NAME(mg_grouped_mm)(const mg_grouped_mm_problem* problem) {
  return multigemm::guarded([&] {
    multigemm::check(problem);
    multigemm::run(*problem);
  });
}

extern "C" int32_t MG_NAME(mg_grouped_mm_explain)(const mg_grouped_mm_problem* problem, char* text, int64_t capacity,
                                                  int64_t* length) {
  return multigemm::guarded([&] {
    multigemm::check(problem);
    multigemm::copy_text(multigemm::plan(*problem), text, capacity, length);
  });
}
