// In place of shared/vendor/gpu_context.h: contexts of the pretend devices of stand_in.cpp.
#pragma once

#include "vendor/gpu_runtime.h"

namespace multigemm {
namespace gpu {

bool has_context(int ordinal);
int enter_context(int ordinal, void** context);
void leave_context(int ordinal);

}  // namespace gpu
}  // namespace multigemm
