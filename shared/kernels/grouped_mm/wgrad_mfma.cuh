// Formula: out[g, b, k, m] = sum over n in group g of x[n, b, k] gy[n, b, m]; over b too if sum_batch.
// Layouts: unit K stride of x, unit M stride of gy and of out; any other strides, any alignment.
// Dtypes:  float64, float32 (IEEE, or TF32 on gfx942), float16, bfloat16; out the same or float32.
// Architectures: gfx90a and gfx942; the host, with the matrix instruction emulated.
// Limits:  N < 2^31 - 2^16; each tile of out is summed by one block, in the order of b and the rows.
#pragma once

#include "kernels/grouped_mm/tile_mfma.cuh"

namespace multigemm {
namespace mfma {

struct WgradCall {
  mg_grouped_mm_wgrad_problem p;
  int64_t tiles;       // of all groups
  int64_t tiles_each;  // of one group
  int32_t k_tiles, m_tiles;
  bool x_wide, gy_wide, out_wide;  // 16-byte accesses
};

template <class Tile>
MG_KERNEL MG_BLOCK(kThreads, 2) void wgrad_mfma(WgradCall call) {
  using Type = typename Tile::Type;
  MG_SHARED Pack x_tile[Tile::kShared];
  MG_SHARED Pack gy_tile[Tile::kShared];
  MG_SHARED int32_t room[kMostBlockGroups];
  MG_SHARED int32_t scratch[32];
  const mg_grouped_mm_wgrad_problem& p = call.p;
  const bool many = p.groups.count > kMostBlockGroups;  // counted before
  if (!many) block_group_ends(p.groups, p.rows, room, scratch);
  const auto end_of = [&](int64_t g) { return many ? static_cast<const int32_t*>(p.groups.data)[g] : room[g]; };

  const bool same = p.out_dtype == p.dtype;
  for (int64_t t = blockIdx.x; t < call.tiles; t += gridDim.x) {
    const int64_t g = t / call.tiles_each;
    int64_t left = t - g * call.tiles_each;
    const int64_t m0 = left % call.m_tiles * Tile::kSide;
    left /= call.m_tiles;
    const int64_t k0 = left % call.k_tiles * Tile::kSide, out_b = left / call.k_tiles;
    const int64_t begin = g > 0 ? end_of(g - 1) : 0, end = end_of(g);

    Tile tile;
    tile.clear();
    const int64_t last_b = p.sum_batch ? p.batch : out_b + 1;
    for (int64_t b = out_b; b < last_b; ++b) {
      const Source x{static_cast<const char*>(p.x) + (begin * p.x_stride[0] + b * p.x_stride[1] + k0) * Type::kBytes,
                     p.x_stride[0] * Type::kBytes, p.inner - k0, call.x_wide};
      const Source gy{
          static_cast<const char*>(p.gy) + (begin * p.gy_stride[0] + b * p.gy_stride[1] + m0) * Type::kBytes,
          p.gy_stride[0] * Type::kBytes, p.outer - m0, call.gy_wide};
      tile.template multiply<false, false>(x, gy, end - begin, x_tile, gy_tile);
    }
    const int64_t to = g * p.out_stride[0] + out_b * p.out_stride[1];
    tile.each([&](int row, int column, typename Type::Sum* run) {
      const int64_t k = k0 + row, m = m0 + column;
      if (k >= p.inner || m >= p.outer) return;
      const int count = static_cast<int>(p.outer - m < Type::kRun ? p.outer - m : Type::kRun);
      store_run<Type>(p.out, to + k * p.out_stride[2] + m, same, run, count, call.out_wide);
    });
  }
}

}  // namespace mfma
}  // namespace multigemm
