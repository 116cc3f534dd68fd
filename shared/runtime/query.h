// What a library says about itself, as JSON: query_cpu.cpp or query_gpu.cpp.
#pragma once

#include <stddef.h>

#include <string>

namespace multigemm {

std::string query();

// The field "kernels": the names in a kernel table, by operator.
template <class Row, size_t kCount>
std::string kernels_field(const Row (&table)[kCount]) {
  std::string rows, wgrad;
  for (const Row& row : table) {
    rows += std::string(rows.empty() ? "\"" : ", \"") + row.rows_name + "\"";
    wgrad += std::string(wgrad.empty() ? "\"" : ", \"") + row.wgrad_name + "\"";
  }
  return "\"kernels\": {\"grouped_mm\": [" + rows + "], \"grouped_mm_wgrad\": [" + wgrad + "]}";
}

}  // namespace multigemm
