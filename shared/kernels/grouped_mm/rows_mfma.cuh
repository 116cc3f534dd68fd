// Formula: out[n, b, m] = sum_k x[n, b, k] w[g(n), b, k, m] + bias[g(n), b, m], one rounding at the end.
// Layouts: unit K stride of x, unit K or M stride of w, unit M stride of out; any other strides, any alignment.
// Dtypes:  float64, float32 (IEEE, or TF32 on gfx942), float16, bfloat16; out the same or float32.
// Architectures: gfx90a and gfx942; the host, with the matrix instruction emulated.
// Limits:  N < 2^31 - 2^16. Every number is summed in the order of K, whatever the tile.
#pragma once

#include "kernels/grouped_mm/row_tiles.cuh"
#include "kernels/grouped_mm/tile_mfma.cuh"

namespace multigemm {
namespace mfma {

struct RowsCall {
  mg_grouped_mm_problem p;
  int64_t tiles_each;             // column tiles times B: tiles for one row tile
  int32_t column_tiles;           // of one b
  bool x_wide, w_wide, out_wide;  // 16-byte accesses
};

template <class Tile, bool kWAlongK>
MG_KERNEL MG_BLOCK(kThreads, 2) void rows_mfma(RowsCall call) {
  using Type = typename Tile::Type;
  using Sum = typename Type::Sum;
  MG_SHARED Pack x_tile[Tile::kShared];
  MG_SHARED Pack w_tile[Tile::kShared];
  MG_SHARED int32_t ends[kMostBlockGroups];
  MG_SHARED int32_t through[kMostBlockGroups];
  MG_SHARED int32_t scratch[32];
  const mg_grouped_mm_problem& p = call.p;
  const RowTiles tiles = row_tiles(p.groups, p.rows, Tile::kSide, ends, through, scratch);

  constexpr int kBand = 8;  // row tiles that share w in the cache
  RowTile at;
  for (int64_t t = blockIdx.x; tiles.find(static_cast<int32_t>(t / call.tiles_each), at); t += gridDim.x) {
    int64_t left = t - at.tiles_before * call.tiles_each;
    const int64_t band = left / (kBand * call.tiles_each), height = tiles.tiles_of(at.end - at.begin);
    left -= band * kBand * call.tiles_each;
    const int64_t in_band = height - band * kBand < kBand ? height - band * kBand : kBand;
    const int64_t n0 = at.begin + (band * kBand + left % in_band) * Tile::kSide;
    left /= in_band;
    const int64_t m0 = left % call.column_tiles * Tile::kSide, b = left / call.column_tiles, g = at.group;
    const int64_t rows = at.end - n0, columns = p.outer - m0;
    const bool none = at.group == p.groups.count;

    Tile tile;
    tile.clear();
    const Source x{static_cast<const char*>(p.x) + (n0 * p.x_stride[0] + b * p.x_stride[1]) * Type::kBytes,
                   p.x_stride[0] * Type::kBytes, rows, call.x_wide};
    const Source w{static_cast<const char*>(p.w) +
                       (none ? 0 : g * p.w_stride[0] + b * p.w_stride[1] + m0 * p.w_stride[3]) * Type::kBytes,
                   (kWAlongK ? p.w_stride[3] : p.w_stride[2]) * Type::kBytes, columns, call.w_wide};
    tile.template multiply<true, kWAlongK>(x, w, none ? 0 : p.inner, x_tile, w_tile);

    const bool same = p.out_dtype == p.dtype, biased = p.bias && !none;
    const int64_t bias_at = biased ? g * p.bias_stride[0] + b * p.bias_stride[1] : 0;
    tile.each([&](int row, int column, Sum* run) {
      if (row >= rows || column >= columns) return;
      const int count = static_cast<int>(columns - column < Type::kRun ? columns - column : Type::kRun);
      if (biased) {
        MG_UNROLL
        for (int e = 0; e < Type::kRun; ++e)
          if (e < count)
            run[e] += simt::load<Sum>(p.bias, Type::kDtype, bias_at + (m0 + column + e) * p.bias_stride[2]);
      }
      store_run<Type>(p.out, (n0 + row) * p.out_stride[0] + b * p.out_stride[1] + m0 + column, same, run, count,
                      call.out_wide);
    });
  }
}

}  // namespace mfma
}  // namespace multigemm
