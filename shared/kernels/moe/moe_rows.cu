#include "kernels/moe/moe.h"
#include "kernels/moe/rows.cuh"

namespace multigemm {
namespace moe {

int spread_rows(const mg_moe_rows_problem& p, void* stream) { return launch_spread(p, {stream}); }
int collect_rows(const mg_moe_rows_problem& p, void* stream) { return launch_collect(p, {stream}); }

}  // namespace moe
}  // namespace multigemm
