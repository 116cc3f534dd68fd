// One piece of work of indexed_polynomial on the CPU.
#pragma once

#include <stdint.h>

namespace multigemm {

// Channels of vector `block`; of the rows [begin, end), or of those places in the order of labels for label `group`.
struct PolynomialPiece {
  int64_t block, begin, end, group;
};

}  // namespace multigemm
