#include "kernels/moe/moe.h"
#include "kernels/moe/route.cuh"

namespace multigemm {
namespace moe {

int64_t room_of_route(const mg_moe_route_problem& p) { return route_room(p); }
int route(const mg_moe_route_problem& p, int32_t* room, void* stream) { return launch_route(p, room, {stream}); }
int route_gradient(const mg_moe_route_problem& p, void* stream) { return launch_route_backward(p, {stream}); }

}  // namespace moe
}  // namespace multigemm
