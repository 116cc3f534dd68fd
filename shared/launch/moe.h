// What each kind of device does with a checked problem: moe_cpu.cpp and moe_gpu.cpp. Each throws Failure.
#pragma once

#include <string>

#include "multigemm/abi_moe.h"

namespace multigemm {

void run_route(const mg_moe_route_problem& p);
void run_route_backward(const mg_moe_route_problem& p);
void run_spread(const mg_moe_rows_problem& p);
void run_collect(const mg_moe_rows_problem& p);
void run_activate(const mg_moe_activate_problem& p);
void run_up(const mg_grouped_mm_problem& product, const mg_moe_activate_problem& activation, const int32_t* inverse);
bool up_reads_tokens(const mg_grouped_mm_problem& product, const mg_moe_activate_problem& activation);
void run_activate_backward(const mg_moe_activate_problem& p);

// The product of the tokens in expert order, which are written to `rows` [T k, H] first.
mg_grouped_mm_problem gather_first(const mg_grouped_mm_problem& product, const mg_moe_activate_problem& activation,
                                   const int32_t* inverse, void* rows);

// One after the other, with h [T k, 2 I or I] between them, contiguous.
void run_apart(const mg_grouped_mm_problem& product, const mg_moe_activate_problem& activation, void* h);

}  // namespace multigemm
