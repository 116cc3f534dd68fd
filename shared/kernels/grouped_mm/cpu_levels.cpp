#include "kernels/grouped_mm/cpu_levels.h"

namespace multigemm {

#if defined(__x86_64__)
namespace x86_64 {
extern const CpuLevel level;
}
namespace x86_64_v3 {
extern const CpuLevel level;
}
namespace x86_64_v4 {
extern const CpuLevel level;
}

const CpuLevel& cpu_level() {
  static const CpuLevel& best = []() -> const CpuLevel& {
    __builtin_cpu_init();
    if (__builtin_cpu_supports("x86-64-v4")) return x86_64_v4::level;
    if (__builtin_cpu_supports("x86-64-v3")) return x86_64_v3::level;
    return x86_64::level;
  }();
  return best;
}
#else
namespace baseline {
extern const CpuLevel level;
}
const CpuLevel& cpu_level() { return baseline::level; }
#endif

}  // namespace multigemm
