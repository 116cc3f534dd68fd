// What each kind of device does with a checked problem: grouped_mm_cpu.cpp and grouped_mm_gpu.cpp, and the same for
// grouped_mm_wgrad.
#pragma once

#include <string>

#include "multigemm/abi.h"

namespace multigemm {

// Runs the problem, or throws Failure.
void run(const mg_grouped_mm_problem& p);
void run(const mg_grouped_mm_wgrad_problem& p);

// The JSON text of mg_*_explain.
std::string plan(const mg_grouped_mm_problem& p);
std::string plan(const mg_grouped_mm_wgrad_problem& p);

}  // namespace multigemm
