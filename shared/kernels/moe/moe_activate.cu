#include "kernels/moe/activate.cuh"
#include "kernels/moe/moe.h"

namespace multigemm {
namespace moe {

int activate_rows(const mg_moe_activate_problem& p, void* stream) { return launch_activate(p, {stream}); }
int activate_gradient(const mg_moe_activate_problem& p, void* stream) { return launch_activate_backward(p, {stream}); }

}  // namespace moe
}  // namespace multigemm
