// What a library says about itself, as JSON: query_cpu.cpp or query_gpu.cpp.
#pragma once

#include <string>

namespace multigemm {

std::string query();

}  // namespace multigemm
