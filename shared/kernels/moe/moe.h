// The kernels around the products of a mixture-of-experts layer on a GPU, for host code. Each returns 0 or the
// runtime's error number, allocates nothing and waits for nothing; the device is current.
#pragma once

#include "multigemm/abi_moe.h"

namespace multigemm {
namespace moe {

// int32 elements of workspace that `route` needs.
int64_t room_of_route(const mg_moe_route_problem& p);
int route(const mg_moe_route_problem& p, int32_t* room, void* stream);
int route_gradient(const mg_moe_route_problem& p, void* stream);

int spread_rows(const mg_moe_rows_problem& p, void* stream);
int collect_rows(const mg_moe_rows_problem& p, void* stream);

int activate_rows(const mg_moe_activate_problem& p, void* stream);
int activate_gradient(const mg_moe_activate_problem& p, void* stream);

}  // namespace moe
}  // namespace multigemm
