// What every GPU kernel launcher is given besides the problem, and what it answers.
#pragma once

#include <stdint.h>

#include <string>

#include "multigemm/abi.h"

namespace multigemm {

// A device as choice and launch need it: plain numbers, so that both can be tested without a GPU.
struct DeviceFacts {
  int ordinal = 0;
  int major = 0, minor = 0;  // compute capability; for AMD the digits of gfx
  int multiprocessors = 1;
  int shared_bytes = 48 * 1024;  // that one block may use
  int64_t l2_bytes = 0;
};

// Groups that a kernel counts up in its own shared memory; beyond that, only the portable kernel.
constexpr int64_t kMostBlockGroups = 1024;

}  // namespace multigemm
