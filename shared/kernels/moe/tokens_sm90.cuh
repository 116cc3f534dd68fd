// Formula: that of up_sm90, with x[permutation[n] / k] in the place of x[n].
// Layouts: those of up_sm90; x has a row for each token.
// Dtypes, architectures, limits: those of up_sm90.
//
// Rows of a tile come one by one: the swizzle is a function of the address in shared memory, so a box of one row falls
// into the same pattern as a box of many. All four warps of the copying warpgroup ask for rows, since each request
// takes a while to issue. Rows of padding are not copied; nothing reads what their columns of the product give.
#pragma once

#include "kernels/moe/up_sm90.cuh"

namespace multigemm {
namespace sm90 {

struct TokenArguments : GatedArguments {
  static constexpr int kCopiers = 4;
  CUtensorMap token_map;  // one row of x in a box
  const int32_t* permutation;
  int32_t top_k;
};

template <Major kMajor>
MG_DEVICE void copy_tiles(const TokenArguments& a, RowsShared& s, Ring ring, unsigned char* stages, uint32_t tiles,
                          int rank, int step_begin, int step_end) {
  constexpr int kCopiers = TokenArguments::kCopiers;
  static_assert(kMostRows / TokenArguments::kMatrices <= kCopiers * 32, "a lane has one row");
  const int sharers = a.split ? 1 : a.cluster;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 32, 0);
  const bool elected = warp == 0 && cute::elect_one_sync();
  for (uint32_t index = blockIdx.x / a.cluster; index < tiles; index += gridDim.x / a.cluster) {
    const Tile tile = find_tile(a, s, index, rank);
    int first = 0, last = tile.valid;  // rows that this block copies, for itself or for all sharers
    if (sharers == 2) {
      const int middle = (tile.valid + 1) / 2;
      (rank == 0 ? last : first) = middle;
    }
    const int row = first + lane * kCopiers + warp;
    const bool copies = row < last;
    const int token = copies ? a.permutation[tile.row + row] / a.top_k : 0;
    const uint64_t w_hint = static_cast<uint64_t>(tile.alone ? cute::TMA::CacheHintSm90::EVICT_FIRST
                                                             : cute::TMA::CacheHintSm90::EVICT_NORMAL);
    const uint64_t x_hint = static_cast<uint64_t>(cute::TMA::CacheHintSm90::EVICT_NORMAL);
    for (int step = step_begin; step < step_end; ++step) {
      Barrier::wait(&s.empty[ring.stage], ring.phase ^ 1);
      uint64_t* full = &s.full[ring.stage];
      unsigned char* to = stages + ring.stage * ring.stage_bytes;
      const int k = step * kDepth;
      if (elected) {
        Barrier::arrive_and_expect_tx(
            full, static_cast<uint32_t>(TokenArguments::kMatrices * kWBytes + tile.valid * kRowBytes));
        copy_w<kMajor>(a.w_map, full, w_hint, to, k, tile);
        copy_w<kMajor>(a.second_map, full, w_hint, to + kWBytes, k, tile);
      }
      to += TokenArguments::kMatrices * kWBytes + row * kRowBytes;
      if (copies) {
        if (sharers == 2)
          cute::SM90_TMA_LOAD_MULTICAST_2D::copy(&a.token_map, full, 3, x_hint, to, k, token);
        else
          cute::SM90_TMA_LOAD_2D::copy(&a.token_map, full, x_hint, to, k, token);
      }
      __syncwarp();
      ring.next();
    }
  }
}

}  // namespace sm90
}  // namespace multigemm
