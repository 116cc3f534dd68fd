// What a problem must satisfy before anything is read or written.
#pragma once

#include <string>

#include "kernels/grouped_mm/lines.h"  // dtype_bytes
#include "multigemm/abi.h"

namespace multigemm {

void check(const mg_grouped_mm_problem* problem);
void check(const mg_grouped_mm_wgrad_problem* problem);

std::string describe(const mg_grouped_mm_problem& problem);
std::string describe(const mg_grouped_mm_wgrad_problem& problem);

const char* dtype_name(int32_t dtype);

// As callers name it; "" for MG_AUTO.
const char* implementation_name(int32_t implementation);
inline bool is_half(int32_t dtype) { return dtype == MG_FLOAT16 || dtype == MG_BFLOAT16; }

}  // namespace multigemm
