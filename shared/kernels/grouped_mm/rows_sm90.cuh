// Formula: out[n, m] = sum_k x[n, k] w[g(n), k, m] + bias[g(n), m], in fp32, with one rounding at the end.
// Layouts: x contiguous along K, w along K or M, 16-byte pointers and other strides; out and bias any.
// Dtypes:  bfloat16, float16; out also float32.
// Architectures: sm_90a.
// Limits:  B absent; G <= kMostBlockGroups; N, K, M < 2^31.
//
// The product is computed as out^T = w[g]^T x^T: columns of w fill the 64 rows that a wgmma always has, rows of x fill
// its other side, which goes in steps of 8. A group is cut in tiles of nearly equal height, so few rows are padding,
// whatever the sizes are. One persistent launch: a warp copies tiles to shared memory, two warpgroups multiply, each
// for 64 of the block's 128 columns. Two blocks of a cluster may take neighbouring columns and share the rows of x, or
// several may share one tile along K. Arguments with two matrices per group (moe/up_sm90.cuh) multiply both with the
// same rows of x, in tiles of half the height, and bring their own `finish`. Arguments that say how rows of x are found
// (moe/tokens_sm90.cuh) bring their own `copy_tiles`.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <utility>

#define CUTE_SM90_EXTENDED_MMA_SHAPES_ENABLED  // every multiple of 8

#include "cute/arch/cluster_sm90.hpp"
#include "cute/arch/copy_sm90.hpp"
#include "cute/arch/copy_sm90_desc.hpp"
#include "cute/arch/copy_sm90_tma.hpp"
#include "cute/arch/mma_sm90_gmma.hpp"
#include "cutlass/arch/barrier.h"
#include "cutlass/arch/reg_reconfig.h"
#include "kernels/grouped_mm/groups_block.cuh"

namespace multigemm {
namespace sm90 {

using cute::SM90::GMMA::Major;
using cute::SM90::GMMA::ScaleOut;
using Barrier = cutlass::arch::ClusterTransactionBarrier;

constexpr int kColumns = 128;  // of w in a block's tile
constexpr int kDepth = 64;     // of K in a stage: 128 bytes, the width of the swizzle
constexpr int kConsumers = 2;  // warpgroups, each with 64 columns
constexpr int kThreads = 128 * (1 + kConsumers);
constexpr int kMostStages = 12;
constexpr int kMostRows = 256;  // of a tile
constexpr int kMostSums = kMostRows / 2;
constexpr int kWBytes = kColumns * kDepth * 2;
constexpr int kRowBytes = kDepth * 2;
constexpr int kSlabRows = 32;  // rows of out that a warpgroup stages at once
constexpr int kSlabBytes = kSlabRows * 128;
constexpr int kXBoxes = 4;  // boxes of 64, 32, 16 and 8 rows
constexpr int kBandTiles = 8;
constexpr int kMostSplitRows = 32;  // of a tile whose sums fit the slabs

struct RowsArguments {
  static constexpr int kMatrices = 1;  // of w that a tile is multiplied with
  static constexpr int kCopiers = 1;   // warps that fill stages: 1 or 4
  CUtensorMap w_map;
  CUtensorMap x_maps[kXBoxes];
  mg_groups groups;
  int64_t rows, outer;
  const void* bias;
  int64_t bias_stride_g, bias_stride_m;
  void* out;
  int64_t out_stride_n, out_stride_m;
  int32_t out_dtype;
  int32_t depth_steps;    // of kDepth
  int32_t column_tiles;   // of the cluster's width
  int32_t cluster;        // blocks
  int32_t split;          // the cluster's blocks share one tile along K; else they lie side by side along M
  int32_t most_rows;      // of a tile: a multiple of 16, at most kMostRows
  int32_t whole_vectors;  // out takes 16-byte stores
  int32_t stage_room;     // bytes
};

// Shared memory: stages first, since the swizzle wants 1024 bytes; then this.
struct RowsShared {
  alignas(128) unsigned char slabs[kConsumers][2][kSlabBytes];
  uint64_t full[kMostStages], empty[kMostStages];
  uint64_t partial_full, partial_empty;
  int32_t scratch[32];
  int32_t tallest;
  int32_t ends[kMostBlockGroups];
  int32_t tiles[kMostBlockGroups];  // of the groups up to and with this one
  uint16_t heights[kMostBlockGroups];
};

struct Tile {
  int32_t group, row, valid, rows, column;  // `valid` of `rows` belong to the group
  bool alone;                               // the group's only tile along N
};

MG_DEVICE int padded_rows(int rows) { return rows <= 64 ? (rows + 7) / 8 * 8 : (rows + 15) / 16 * 16; }

// Rows of the tiles of a group.
MG_DEVICE int tile_height(int rows, int most) {
  if (rows <= 0) return 0;
  const int count = (rows + most - 1) / most;
  return padded_rows((rows + count - 1) / count);
}

// tiles[g] and heights[g] of every group, and the tallest tile. All threads call it; ends with a barrier.
MG_DEVICE void count_tiles(RowsShared& s, int groups, int most) {
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, warp = thread / 32;
  constexpr int share = (kMostBlockGroups + kThreads - 1) / kThreads;
  const int first = thread * share;
  int count[share], sum = 0, tallest = 0;
  for (int i = 0; i < share; ++i) {
    const int g = first + i;
    count[i] = 0;
    if (g < groups) {
      const int rows = s.ends[g] - (g > 0 ? s.ends[g - 1] : 0), height = tile_height(rows, most);
      count[i] = height > 0 ? (rows + height - 1) / height : 0;
      s.heights[g] = static_cast<uint16_t>(height);
      tallest = height > tallest ? height : tallest;
    }
    sum += count[i];
  }
  int through = sum;
  for (int step = 1; step < 32; step *= 2) {
    const int other = __shfl_up_sync(0xffffffffu, through, step);
    if (lane >= step) through += other;
  }
  tallest = __reduce_max_sync(0xffffffffu, tallest);
  if (lane == 31) s.scratch[warp] = through;
  if (lane == 0) s.scratch[16 + warp] = tallest;
  __syncthreads();
  int before = through - sum;
  for (int i = 0; i < kThreads / 32; ++i) {
    if (i < warp) before += s.scratch[i];
    tallest = s.scratch[16 + i] > tallest ? s.scratch[16 + i] : tallest;
  }
  if (thread == 0) s.tallest = tallest;
  for (int i = 0; i < share; ++i) {
    before += count[i];
    if (first + i < kMostBlockGroups) s.tiles[first + i] = first + i < groups ? before : 0x7fffffff;
  }
  __syncthreads();
}

// The tile of number `index`; a whole warp calls it. Within a group, bands of kBandTiles tiles along N go first along
// N, then along M, so that blocks that run at the same time share both operands in the L2 cache.
MG_DEVICE Tile find_tile(const RowsArguments& a, const RowsShared& s, uint32_t index, int rank) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const uint32_t columns = static_cast<uint32_t>(a.column_tiles);
  const int along = static_cast<int>(index / columns);
  const int chunk = __popc(__ballot_sync(0xffffffffu, s.tiles[lane * 32 + 31] <= along));
  const int g = chunk * 32 + __popc(__ballot_sync(0xffffffffu, s.tiles[chunk * 32 + lane] <= along));
  const int before = g > 0 ? s.tiles[g - 1] : 0, begin = g > 0 ? s.ends[g - 1] : 0;
  const int count = s.tiles[g] - before, height = s.heights[g];
  uint32_t local = index - static_cast<uint32_t>(before) * columns;
  const uint32_t band = local / (kBandTiles * columns);
  local -= band * (kBandTiles * columns);
  const int left = count - static_cast<int>(band) * kBandTiles;
  const uint32_t width = static_cast<uint32_t>(left < kBandTiles ? left : kBandTiles);
  const uint32_t column = local / width, row = band * kBandTiles + local - column * width;
  Tile tile;
  tile.group = g;
  tile.row = begin + static_cast<int>(row) * height;
  tile.valid = min(height, s.ends[g] - tile.row);
  tile.rows = padded_rows(tile.valid);
  tile.column = (a.split ? static_cast<int>(column) : static_cast<int>(column) * a.cluster + rank) * kColumns;
  tile.alone = count == 1;
  return tile;
}

template <class Half, int kRows, Major kMajor>
struct Product;
#define MG_SM90_PRODUCT(N)                                                                                          \
  template <Major kMajor>                                                                                           \
  struct Product<__nv_bfloat16, N, kMajor> : cute::SM90::GMMA::MMA_64x##N##x16_F32BF16BF16_SS<kMajor, Major::K> {}; \
  template <Major kMajor>                                                                                           \
  struct Product<__half, N, kMajor> : cute::SM90::GMMA::MMA_64x##N##x16_F32F16F16_SS<kMajor, Major::K> {};
MG_SM90_PRODUCT(8)
MG_SM90_PRODUCT(16)
MG_SM90_PRODUCT(24)
MG_SM90_PRODUCT(32)
MG_SM90_PRODUCT(40)
MG_SM90_PRODUCT(48)
MG_SM90_PRODUCT(56)
MG_SM90_PRODUCT(64)
MG_SM90_PRODUCT(80)
MG_SM90_PRODUCT(96)
MG_SM90_PRODUCT(112)
MG_SM90_PRODUCT(128)
MG_SM90_PRODUCT(144)
MG_SM90_PRODUCT(160)
MG_SM90_PRODUCT(176)
MG_SM90_PRODUCT(192)
MG_SM90_PRODUCT(208)
MG_SM90_PRODUCT(224)
MG_SM90_PRODUCT(240)
MG_SM90_PRODUCT(256)
#undef MG_SM90_PRODUCT

template <class P, size_t... I>
MG_DEVICE void multiply(uint64_t a, uint64_t b, float* sums, ScaleOut scale, std::index_sequence<I...>) {
  P::fma(a, b, sums[I]..., scale);
}

// The ring of stages as one side sees it.
struct Ring {
  int stages, stage_bytes, stage = 0;
  uint32_t phase = 0;
  MG_DEVICE void next() {
    if (++stage == stages) {
      stage = 0;
      phase ^= 1;
    }
  }
};

// Both blocks of a cluster that share x wait for both blocks' readers.
MG_DEVICE void release_stage(RowsShared& s, int stage, int sharers) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  if (sharers == 1) {
    if (lane == 0) Barrier::arrive(&s.empty[stage]);
  } else {
    Barrier::arrive(&s.empty[stage], static_cast<uint32_t>(lane), lane < sharers);
  }
}

// Matrix descriptors: 128-byte swizzle, 1024 bytes between groups of 8 rows.
MG_DEVICE uint64_t descriptor(uint32_t address) {
  return uint64_t{1} << 62 | uint64_t{64} << 32 | uint64_t{1} << 16 | (address & 0x3ffff) >> 4;
}

// sums = one tile's product along `steps` stages; those of the second matrix follow kMostSums / 2 after the first's.
template <class Half, Major kMajor, int kMatrices, int kRows>
MG_DEVICE void multiply_tile(RowsShared& s, Ring& ring, uint32_t stages_at, int consumer, int steps, int sharers,
                             float* sums) {
  using P = Product<Half, kRows, kMajor>;
  constexpr uint64_t kAStep = kMajor == Major::K ? 2 : 128;  // 16 of K, in 16-byte units
  int previous = 0;
  ScaleOut scale = ScaleOut::Zero;
  if constexpr (kMatrices == 2) {
    // The compiler moves undefined sums of two matrices between multiplications, and then waits after each of these.
#pragma unroll
    for (int i = 0; i < kMostSums; ++i) sums[i] = 0.0f;
    scale = ScaleOut::One;
  }
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    Barrier::wait(&s.full[ring.stage], ring.phase);
    const uint32_t at = stages_at + ring.stage * ring.stage_bytes;
    const uint64_t w = descriptor(at + consumer * (kWBytes / 2)), x = descriptor(at + kMatrices * kWBytes);
    cute::warpgroup_arrive();
#pragma unroll
    for (int k = 0; k < kDepth / 16; ++k) {
#pragma unroll
      for (int i = 0; i < kMatrices; ++i)
        multiply<P>(w + i * (kWBytes / 16) + k * kAStep, x + k * 2, sums + i * (kMostSums / 2), scale,
                    std::make_index_sequence<kRows / 2>());
      scale = ScaleOut::One;
    }
    cute::warpgroup_commit_batch();
    if (step > 0) {
      cute::warpgroup_wait<1>();
      release_stage(s, previous, sharers);
    }
    previous = ring.stage;
    ring.next();
  }
  cute::warpgroup_wait<0>();
  release_stage(s, previous, sharers);
}

template <class Half, Major kMajor, int kMatrices>
MG_DEVICE void multiply_tile(int rows, RowsShared& s, Ring& ring, uint32_t stages_at, int consumer, int steps,
                             int sharers, float* sums) {
#define MG_SM90_CASE(N)                                                                              \
  case N / 8:                                                                                        \
    if constexpr (N * kMatrices <= kMostRows)                                                        \
      multiply_tile<Half, kMajor, kMatrices, N>(s, ring, stages_at, consumer, steps, sharers, sums); \
    break;
  switch (rows / 8) {
    MG_SM90_CASE(8)
    MG_SM90_CASE(16)
    MG_SM90_CASE(24)
    MG_SM90_CASE(32)
    MG_SM90_CASE(40)
    MG_SM90_CASE(48)
    MG_SM90_CASE(56)
    MG_SM90_CASE(64)
    MG_SM90_CASE(80)
    MG_SM90_CASE(96)
    MG_SM90_CASE(112)
    MG_SM90_CASE(128)
    MG_SM90_CASE(144)
    MG_SM90_CASE(160)
    MG_SM90_CASE(176)
    MG_SM90_CASE(192)
    MG_SM90_CASE(208)
    MG_SM90_CASE(224)
    MG_SM90_CASE(240)
    MG_SM90_CASE(256)
  }
#undef MG_SM90_CASE
}

template <class Half>
MG_DEVICE uint32_t pack(float low, float high);
template <>
MG_DEVICE uint32_t pack<__nv_bfloat16>(float low, float high) {
  const __nv_bfloat162 both = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&both);
}
template <>
MG_DEVICE uint32_t pack<__half>(float low, float high) {
  const __half2 both = __floats2half2_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&both);
}

MG_DEVICE void store_any(const RowsArguments& a, int64_t at, float value) {
  if (a.out_dtype == MG_FLOAT32)
    static_cast<float*>(a.out)[at] = value;
  else if (a.out_dtype == MG_FLOAT16)
    static_cast<__half*>(a.out)[at] = __float2half_rn(value);
  else
    static_cast<__nv_bfloat16*>(a.out)[at] = __float2bfloat16_rn(value);
}

// A cluster's blocks share a tile along K: block 0 adds the others' sums to its own, in the order of their ranks. They
// wait in the slabs, [sum][thread].
MG_DEVICE void arrive_remote(const uint64_t* barrier, int rank) {
  const uint32_t remote = cute::set_block_rank(cute::cast_smem_ptr_to_uint(barrier), static_cast<uint32_t>(rank));
  asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(remote) : "memory");
}
MG_DEVICE void wait_remote(const uint64_t* barrier, uint32_t phase) {
  uint32_t done = 0;
  while (!done)
    asm volatile(
        "{\n.reg .pred p;\nmbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, "
        "p;\n}"
        : "=r"(done)
        : "r"(cute::cast_smem_ptr_to_uint(barrier)), "r"(phase)
        : "memory");
}

// `joined` gets the whole sums in block 0, where the answer is true.
MG_DEVICE bool join_sums(const RowsArguments& a, RowsShared& s, int consumer, int rows, int rank, uint32_t& phase,
                         const float* sums, float* joined) {
  constexpr int kSums = kMostSplitRows / 2;
  const int thread = static_cast<int>(threadIdx.x) % 128, lane = thread % 32;
  float* parts = reinterpret_cast<float*>(s.slabs[consumer]) + thread;
  if (rank == 0) {
    wait_remote(&s.partial_full, phase);
#pragma unroll
    for (int i = 0; i < kSums; ++i) joined[i] = sums[i];
    for (int from = 1; from < a.cluster; ++from) {
      const uint32_t remote = cute::set_block_rank(cute::cast_smem_ptr_to_uint(parts), static_cast<uint32_t>(from));
#pragma unroll
      for (int i = 0; i < kSums; ++i) {
        float part = 0.0f;
        if (i < rows / 2)
          asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(part) : "r"(remote + i * 512) : "memory");
        joined[i] += part;
      }
    }
    __syncwarp();
    if (lane > 0 && lane < a.cluster) arrive_remote(&s.partial_empty, lane);
  } else {
    wait_remote(&s.partial_empty, phase ^ 1);
#pragma unroll
    for (int i = 0; i < kSums; ++i)
      if (i < rows / 2) parts[i * 128] = sums[i];
    __syncwarp();
    if (lane == 0) arrive_remote(&s.partial_full, 0);
  }
  phase ^= 1;
  return rank == 0;
}

// A warp's sums: thread's sums[4 j + 2 h + i] are of row 8 j + lane % 4 * 2 + i, column 16 warp + lane / 4 + 8 h.
template <class Half, int kRows>
MG_DEVICE void store_tile(const RowsArguments& a, RowsShared& s, const Tile& tile, int consumer, const float* bias,
                          const float* sums) {
  const int thread = static_cast<int>(threadIdx.x) % 128, lane = thread % 32, warp = thread / 32;
  if (!a.whole_vectors) {
    const int64_t column = tile.column + consumer * 64 + warp * 16 + lane / 4;
#pragma unroll
    for (int j = 0; j < kRows / 8; ++j) {
      if (j * 8 >= tile.valid) break;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int row = j * 8 + lane % 4 * 2 + i % 2;
        const int64_t m = column + i / 2 * 8;
        if (row < tile.valid && m < a.outer)
          store_any(a, (int64_t{tile.row} + row) * a.out_stride_n + m * a.out_stride_m, sums[4 * j + i] + bias[i / 2]);
      }
    }
    return;
  }
  const int slab_row = lane / 16 * 8 + lane % 8, slab_chunk = warp * 2 + lane / 8 % 2;
  const int row = thread / 8, chunk = thread % 8;
  const int64_t column = tile.column + consumer * 64 + chunk * 8;
  Half* out = static_cast<Half*>(a.out) + (int64_t{tile.row} + row) * a.out_stride_n + column;
  const bool inside = column < a.outer;
#pragma unroll
  for (int slab = 0; slab < kRows / kSlabRows; ++slab) {
    if (slab * kSlabRows >= tile.valid) break;
    unsigned char* staged = s.slabs[consumer][slab % 2];
#pragma unroll
    for (int half = 0; half < kSlabRows / 16; ++half) {
      const float* d = sums + slab * (kSlabRows / 2) + half * 8;
      unsigned char* to = staged + (half * 16 + slab_row) * 128 + ((slab_chunk ^ slab_row % 8) << 4);
      cute::SM90_U16x8_STSM_T::copy(
          pack<Half>(d[0] + bias[0], d[1] + bias[0]), pack<Half>(d[2] + bias[1], d[3] + bias[1]),
          pack<Half>(d[4] + bias[0], d[5] + bias[0]), pack<Half>(d[6] + bias[1], d[7] + bias[1]),
          *reinterpret_cast<cute::uint128_t*>(to));
    }
    if (consumer == 0)
      cutlass::arch::NamedBarrier::sync(128, 0);
    else
      cutlass::arch::NamedBarrier::sync(128, 1);
    asm volatile("" ::: "memory");
#pragma unroll
    for (int i = 0; i < kSlabRows / 16; ++i) {
      const int at = i * 16 + row;
      const uint4 values = *reinterpret_cast<const uint4*>(staged + at * 128 + ((chunk ^ at % 8) << 4));
      if (inside && slab * kSlabRows + at < tile.valid)
        *reinterpret_cast<uint4*>(out + (slab * kSlabRows + i * 16) * a.out_stride_n) = values;
    }
  }
}

// One stage's part of a matrix of w.
template <Major kMajor>
MG_DEVICE void copy_w(const CUtensorMap& map, uint64_t* full, uint64_t hint, unsigned char* to, int k,
                      const Tile& tile) {
  if (kMajor == Major::K) {
    cute::SM90_TMA_LOAD_3D::copy(&map, full, hint, to, k, tile.column, tile.group);
  } else {
    cute::SM90_TMA_LOAD_3D::copy(&map, full, hint, to, tile.column, k, tile.group);
    cute::SM90_TMA_LOAD_3D::copy(&map, full, hint, to + kWBytes / 2, tile.column + 64, k, tile.group);
  }
}

// The copying warp: fills stages in the order in which the warpgroups read them.
template <Major kMajor, class Arguments>
MG_DEVICE void copy_tiles(const Arguments& a, RowsShared& s, Ring ring, unsigned char* stages, uint32_t tiles, int rank,
                          int step_begin, int step_end) {
  const int sharers = a.split ? 1 : a.cluster;
  const bool elected = cute::elect_one_sync();
  for (uint32_t index = blockIdx.x / a.cluster; index < tiles; index += gridDim.x / a.cluster) {
    const Tile tile = find_tile(a, s, index, rank);
    if (!elected) continue;
    int first = 0, last = tile.rows;  // rows that this block copies, for itself or for all sharers
    if (sharers == 2) {
      const int middle = (tile.rows / 8 + 1) / 2 * 8;
      (rank == 0 ? last : first) = middle;
    }
    const uint64_t w_hint = static_cast<uint64_t>(tile.alone ? cute::TMA::CacheHintSm90::EVICT_FIRST
                                                             : cute::TMA::CacheHintSm90::EVICT_NORMAL);
    const uint64_t x_hint = static_cast<uint64_t>(cute::TMA::CacheHintSm90::EVICT_NORMAL);
    for (int step = step_begin; step < step_end; ++step) {
      Barrier::wait(&s.empty[ring.stage], ring.phase ^ 1);
      uint64_t* full = &s.full[ring.stage];
      unsigned char* to = stages + ring.stage * ring.stage_bytes;
      Barrier::arrive_and_expect_tx(full,
                                    static_cast<uint32_t>(Arguments::kMatrices * kWBytes + tile.rows * kRowBytes));
      const int k = step * kDepth;
      copy_w<kMajor>(a.w_map, full, w_hint, to, k, tile);
      if constexpr (Arguments::kMatrices == 2) copy_w<kMajor>(a.second_map, full, w_hint, to + kWBytes, k, tile);
      to += Arguments::kMatrices * kWBytes;
      int row = first;
      for (int box = 0, height = 64; box < kXBoxes; ++box, height /= 2) {
        for (; last - row >= height; row += height) {
          if (sharers == 2)
            cute::SM90_TMA_LOAD_MULTICAST_2D::copy(&a.x_maps[box], full, 3, x_hint, to + row * kRowBytes, k,
                                                   tile.row + row);
          else
            cute::SM90_TMA_LOAD_2D::copy(&a.x_maps[box], full, x_hint, to + row * kRowBytes, k, tile.row + row);
        }
      }
      ring.next();
    }
  }
}

// Rows of no group.
MG_DEVICE void clear_rest(const RowsArguments& a, int64_t begin, int thread, int threads) {
  for (int64_t n = begin + blockIdx.x; n < a.rows; n += gridDim.x) {
    if (a.whole_vectors) {
      uint16_t* out = static_cast<uint16_t*>(a.out) + n * a.out_stride_n;
      for (int64_t m = thread * 8; m < a.outer; m += threads * 8) *reinterpret_cast<uint4*>(out + m) = uint4{};
    } else {
      for (int64_t m = thread; m < a.outer; m += threads) store_any(a, n * a.out_stride_n + m * a.out_stride_m, 0.0f);
    }
  }
}

// The thread's biases of a matrix.
template <class Half>
MG_DEVICE void read_bias(const RowsArguments& a, const void* data, const Tile& tile, int consumer, float* bias) {
  const int warp = static_cast<int>(threadIdx.x) / 32 % 4, lane = static_cast<int>(threadIdx.x) % 32;
  for (int i = 0; i < 2; ++i) {
    const int64_t m = tile.column + consumer * 64 + warp * 16 + lane / 4 + i * 8;
    bias[i] = 0.0f;
    if (data != nullptr && m < a.outer)
      bias[i] = static_cast<float>(static_cast<const Half*>(data)[tile.group * a.bias_stride_g + m * a.bias_stride_m]);
  }
}

// From sums to out.
template <class Half>
MG_DEVICE void finish(const RowsArguments& a, RowsShared& s, const Tile& tile, int consumer, const float* bias,
                      int rank, uint32_t& phase, float* sums) {
  if (a.split) {
    float joined[kMostSplitRows / 2];
    if (join_sums(a, s, consumer, tile.rows, rank, phase, sums, joined))
      store_tile<Half, kMostSplitRows>(a, s, tile, consumer, bias, joined);
  } else {
    store_tile<Half, kMostRows>(a, s, tile, consumer, bias, sums);
  }
}

template <class Half, Major kMajor, class Arguments>
__global__ void __launch_bounds__(kThreads, 1) rows_sm90(const __grid_constant__ Arguments a) {
  extern __shared__ __align__(1024) unsigned char memory[];
  RowsShared& s = *reinterpret_cast<RowsShared*>(memory + a.stage_room);
  const int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 32, 0);
  const int rank = a.cluster > 1 ? static_cast<int>(cute::block_rank_in_cluster()) : 0;
  const int sharers = a.split ? 1 : a.cluster;
  if (threadIdx.x == 0) {
    for (int i = 0; i < kMostStages; ++i) {
      Barrier::init(&s.full[i], 1);
      Barrier::init(&s.empty[i], kConsumers * 4 * sharers);
    }
    Barrier::init(&s.partial_full, kConsumers * 4 * (a.cluster - 1) + (a.cluster == 1));
    Barrier::init(&s.partial_empty, kConsumers * 4);
    cutlass::arch::fence_barrier_init();
  }
  const int groups = static_cast<int>(a.groups.count);
  block_group_ends(a.groups, a.rows, s.ends, s.scratch);
  count_tiles(s, groups, a.most_rows);
  if (a.cluster > 1) cute::cluster_sync();

  const uint32_t tiles = static_cast<uint32_t>(s.tiles[groups - 1]) * static_cast<uint32_t>(a.column_tiles);
  Ring ring;
  ring.stage_bytes = Arguments::kMatrices * kWBytes + s.tallest * kRowBytes;
  ring.stages = min(kMostStages, a.stage_room / ring.stage_bytes);
  int step_begin = 0, step_end = a.depth_steps;
  if (a.split) {
    step_begin = a.depth_steps * rank / a.cluster;
    step_end = a.depth_steps * (rank + 1) / a.cluster;
  }
  if (warp < 4) {
    cutlass::arch::warpgroup_reg_dealloc<40>();
    if constexpr (Arguments::kCopiers == 4) {
      copy_tiles<kMajor>(a, s, ring, memory, tiles, rank, step_begin, step_end);
      clear_rest(a, s.ends[groups - 1], static_cast<int>(threadIdx.x), 128);
    } else if (warp == 0)
      copy_tiles<kMajor>(a, s, ring, memory, tiles, rank, step_begin, step_end);
    else
      clear_rest(a, s.ends[groups - 1], static_cast<int>(threadIdx.x) - 32, 96);
  } else {
    cutlass::arch::warpgroup_reg_alloc<232>();
    const int consumer = warp / 4 - 1;
    const uint32_t stages_at = cute::cast_smem_ptr_to_uint(memory);
    uint32_t phase = 0;
    for (uint32_t index = blockIdx.x / a.cluster; index < tiles; index += gridDim.x / a.cluster) {
      const Tile tile = find_tile(a, s, index, rank);
      float sums[kMostSums];
      float bias[2 * Arguments::kMatrices];
      read_bias<Half>(a, a.bias, tile, consumer, bias);
      if constexpr (Arguments::kMatrices == 2) read_bias<Half>(a, a.second_bias, tile, consumer, bias + 2);
      multiply_tile<Half, kMajor, Arguments::kMatrices>(tile.rows, s, ring, stages_at, consumer, step_end - step_begin,
                                                        sharers, sums);
      finish<Half>(a, s, tile, consumer, bias, rank, phase, sums);
    }
  }
  __syncwarp();
  if (a.cluster > 1) cute::cluster_sync();  // a block's barriers outlive its neighbour's arrivals
}

}  // namespace sm90
}  // namespace multigemm
