// Which kernel a call takes: a pure function of the call's numbers.
#pragma once

#include <string>

#include "kernels/grouped_mm/table_cpu.h"

namespace multigemm {

struct CallFacts {
  int64_t batch, inner, outer;  // B, K, M
  int64_t used;                 // R, rows that belong to a group
  int64_t tallest;              // rows of the largest group
  int64_t present;              // groups with rows
  int64_t largest_extent;       // the largest size or stride of any operand
  int32_t dtype, implementation;
  bool w_transposed;  // unit K stride of w; false for wgrad
  bool has_host_matmul;
  bool few_rows = false;  // rows_few_cpu.h takes the call
};

struct Choice {
  const KernelRow* row;
  std::string why;
};

// Why this kernel can't take the call; empty if it can.
std::string refusal(const KernelRow& row, const CallFacts& facts);

// Throws Failure(MG_UNSUPPORTED) if the implementation asked for can't take the call.
Choice choose_rows(const CallFacts& facts);
Choice choose_wgrad(const CallFacts& facts);

std::string explain(const char* op, const Choice& choice, const CallFacts& facts, bool wgrad);

}  // namespace multigemm
