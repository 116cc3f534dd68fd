// The two operators as one library product for each group that has rows; the host knows the groups.
#pragma once

#include "blas/handles.h"
#include "launch/groups.h"
#include "multigemm/abi.h"

namespace multigemm {

// `by_torch`: the host's product, else the BLAS this library links. Every element of out is written.
void rows_by_products(const mg_grouped_mm_problem& p, const Partition& groups, const DeviceFacts& device,
                      bool by_torch);
void wgrad_by_products(const mg_grouped_mm_wgrad_problem& p, const Partition& groups, const DeviceFacts& device,
                       bool by_torch);

}  // namespace multigemm
