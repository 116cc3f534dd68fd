// The portable kernels and their helpers on a GPU, for host code. Each returns 0 or the runtime's error number.
#pragma once

#include "kernels/grouped_mm/gpu_call.h"

namespace multigemm {
namespace simt {

// int64 elements of workspace that the two products need.
constexpr int64_t room_for(int64_t groups) { return 2 * groups + 2; }

int rows(const mg_grouped_mm_problem& p, int64_t* room, void* stream);
int wgrad(const mg_grouped_mm_wgrad_problem& p, int64_t* room, void* stream);

// ends[g] = scale times the clamped cumulative end of group g; `room` holds room_for(G) elements, ends lie elsewhere.
int scaled_ends(const mg_groups& groups, int64_t rows, int64_t scale, int64_t* ends, int64_t* room, void* stream);

// numbers [3, G]: scale times the clamped cumulative ends, and the row tiles of 64 and of 128 rows up to and with each
// group; scale times `rows` < 2^31.
int count_groups(const mg_groups& groups, int64_t rows, int64_t scale, int32_t* numbers, void* stream);

// Copies `count` numbers of host memory to the device as kernel arguments: valid in a graph, whatever becomes of
// `from`.
int write_numbers(const int64_t* from, int64_t count, int64_t* to, void* stream);

// to [N, B, C] = from [N, B, C]; strides of `from` in elements, any; `to` has rows of `to_row` elements, unit stride
// along C and C along B. Elements are copied as they are, or halves of the dtype `widened` become float32.
struct Packing {
  const void* from;
  int64_t stride[3];
  void* to;
  int64_t to_row;
  int64_t rows, batch, columns;
  int element_bytes;
  int32_t widened = 0;
};
int pack(const Packing& packing, void* stream);

// out[n, b, m] = sums[n, b, m] + bias[g(n), b, m] with one rounding, zeros in rows of no group; ends [G] on the device,
// bias may be absent. `sums` is contiguous and of `sums_dtype`; null: out itself, whose other rows stay.
int finish_rows(const mg_grouped_mm_problem& p, const int64_t* ends, const void* sums, int32_t sums_dtype,
                void* stream);

// out[g, b, k, m] = sums[g, b, k, m], contiguous and of `sums_dtype`.
int finish_wgrad(const mg_grouped_mm_wgrad_problem& p, const void* sums, int32_t sums_dtype, void* stream);

}  // namespace simt
}  // namespace multigemm
