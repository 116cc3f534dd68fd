// Formula: out[g, k, m] = sum over n in group g of x[n, k] gy[n, m]; zeros where g has no rows.
// Layouts: x [N, K], gy [N, M] with unit K and M strides, rows and data aligned to 16 bytes; out with any strides
//          (fastest with a unit M stride and everything else aligned to 16 bytes).
// Dtypes:  bfloat16 or float16 in, float32 sums, bfloat16, float16 or float32 out.
// Architectures: sm_90a (wgmma, TMA, clusters of two blocks).
// Limits:  B absent; G <= kMostBlockGroups; N, K, M < 2^31. Every tile of out is summed by one warpgroup in row order.
//
// A persistent pair of blocks takes two neighbouring tiles of 128 k x 192 m of one group and fetches for both the
// columns that they share. In each block one warp fetches, one cleans what lies between the last row of a group and
// the next multiple of 16, and two warpgroups take turns: one multiplies its tile while the other writes its own.
#pragma once

#include <cutlass/arch/barrier.h>
#include <cutlass/arch/reg_reconfig.h>

#include <cute/arch/cluster_sm90.hpp>
#include <cute/arch/copy_sm90.hpp>
#include <cute/arch/copy_sm90_tma.hpp>
#include <cute/arch/mma_sm90_desc.hpp>
#include <cute/arch/mma_sm90_gmma.hpp>
#include <utility>

#include "kernels/grouped_mm/groups_block.cuh"
#include "kernels/grouped_mm/numbers_simt.cuh"

namespace multigemm {
namespace wgrad_sm90 {

constexpr int kTileK = 128, kTileM = 192;
constexpr int kStepRows = 64;  // rows of one pipeline stage
constexpr int kBoxRows = 32;   // rows of one TMA box: what each block of a pair fetches of shared columns
constexpr int kStages = 4;
constexpr int kColumns = 64;  // columns of one shared-memory panel: 128 bytes, the span of the swizzle
constexpr int kSlice = 16;    // rows of one wgmma
constexpr int kPanelsX = kTileK / kColumns, kPanelsGy = kTileM / kColumns;
constexpr int kWarpsOut = 8, kChunkRows = 16, kChunks = 3;
constexpr int kThreads = 384;
constexpr int kSums = kTileM / 2;  // of one thread in each of the two 64 x 192 halves of a tile
constexpr int kMostSortedGroups = 256;

struct Arguments {
  CUtensorMap x, gy, out;  // out only if out_by_tma
  mg_groups groups;
  void* out_data;
  int64_t out_stride[3];  // G, K, M
  int32_t out_dtype, out_by_tma;
  int32_t rows, inner, outer;
  int32_t pair_along_k;      // the two tiles of a pair are neighbours along K and share gy; else along M and share x
  int32_t k_units, m_units;  // pairs of tiles along the paired dimension, tiles along the other
  int32_t band;              // k units that are walked before the next m unit
};

struct alignas(1024) Shared {
  uint16_t x[kStages][kPanelsX][kStepRows][kColumns];
  uint16_t gy[kStages][kPanelsGy][kStepRows][kColumns];
  uint16_t chunks[kWarpsOut][kChunks][kChunkRows][kColumns];
  uint64_t full[kStages];    // a stage can be read
  uint64_t landed[kStages];  // the i-th stage that must be cleaned first has arrived
  uint64_t empty[kStages];   // both blocks of the pair have read the stage
  int32_t ends[kMostBlockGroups];
  uint16_t order[kMostBlockGroups];
  int32_t scratch[32];
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

using Transaction = cutlass::arch::ClusterTransactionBarrier;
using Barrier = cutlass::arch::ClusterBarrier;

template <class T>
struct Numbers;
template <>
struct Numbers<cutlass::bfloat16_t> {
  using Mma = cute::SM90::GMMA::MMA_64x192x16_F32BF16BF16_SS<cute::SM90::GMMA::Major::MN, cute::SM90::GMMA::Major::MN>;
  MG_DEVICE static uint32_t pack(float low, float high) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return reinterpret_cast<const uint32_t&>(pair);
  }
};
template <>
struct Numbers<cutlass::half_t> {
  using Mma = cute::SM90::GMMA::MMA_64x192x16_F32F16F16_SS<cute::SM90::GMMA::Major::MN, cute::SM90::GMMA::Major::MN>;
  MG_DEVICE static uint32_t pack(float low, float high) {
    const __half2 pair = __floats2half2_rn(low, high);
    return reinterpret_cast<const uint32_t&>(pair);
  }
};

struct Tile {
  int32_t group, begin, rows;
  int32_t k, m;
};

// Where this pair's `turn`-th tiles lie in the walk over all. Neighbouring pairs of blocks work on neighbouring tiles;
// every other turn runs backwards, so that no pair gets the larger of the groups each time.
MG_DEVICE uint32_t place_of(uint32_t turn) {
  const uint32_t pairs = gridDim.x / 2, pair = blockIdx.x / 2;
  return turn * pairs + (turn % 2 ? pairs - 1 - pair : pair);
}

MG_DEVICE bool has_turn(const Arguments& a, uint32_t turn) {
  return place_of(turn) < static_cast<uint32_t>(a.groups.count) * static_cast<uint32_t>(a.k_units * a.m_units);
}

// The `turn`-th tile of this block; false past the last.
MG_DEVICE bool tile_at(const Arguments& a, const Shared& shared, uint32_t turn, Tile& tile) {
  const uint32_t at = place_of(turn), rank = blockIdx.x % 2;
  const uint32_t k_units = static_cast<uint32_t>(a.k_units), m_units = static_cast<uint32_t>(a.m_units);
  const uint32_t of_group = k_units * m_units, place = at / of_group;
  if (place >= static_cast<uint32_t>(a.groups.count)) return false;
  const uint32_t in_group = at - place * of_group, of_band = static_cast<uint32_t>(a.band) * m_units;
  const uint32_t band = in_group / of_band, in_band = in_group - band * of_band;
  const uint32_t first = band * static_cast<uint32_t>(a.band), left = k_units - first;
  const uint32_t width = left < static_cast<uint32_t>(a.band) ? left : static_cast<uint32_t>(a.band);
  const uint32_t m_unit = in_band / width, k_unit = first + in_band - m_unit * width;
  tile.k = static_cast<int32_t>(a.pair_along_k ? 2 * k_unit + rank : k_unit) * kTileK;
  tile.m = static_cast<int32_t>(a.pair_along_k ? m_unit : 2 * m_unit + rank) * kTileM;
  tile.group = shared.order[place];
  tile.begin = tile.group > 0 ? shared.ends[tile.group - 1] : 0;
  tile.rows = shared.ends[tile.group] - tile.begin;
  return true;
}

// Groups with more rows first, so that the last tiles are short. Ends with a barrier.
MG_DEVICE void order_groups(const Arguments& a, Shared& shared) {
  const int count = static_cast<int>(a.groups.count);
  for (int g = static_cast<int>(threadIdx.x); g < count; g += kThreads) {
    int place = g;
    if (count <= kMostSortedGroups) {
      const int32_t mine = shared.ends[g] - (g > 0 ? shared.ends[g - 1] : 0);
      int32_t before = 0;
      place = 0;
      for (int other = 0; other < count; ++other) {
        const int32_t end = shared.ends[other], size = end - before;
        place += size > mine || (size == mine && other < g);
        before = end;
      }
    }
    shared.order[place] = static_cast<uint16_t>(g);
  }
  __syncthreads();
}

// Rows of the last step of a tile, 0 if it has none.
MG_DEVICE int32_t last_rows(const Tile& tile) { return tile.rows > 0 ? (tile.rows - 1) % kStepRows + 1 : 0; }
MG_DEVICE uint32_t steps_of(const Tile& tile) { return static_cast<uint32_t>(tile.rows + kStepRows - 1) / kStepRows; }

// One operand's columns of one step. `shared_columns`: each block of the pair brings half of the rows to both.
template <int kPanels>
MG_DEVICE void fetch(const CUtensorMap& map, uint64_t* barrier, uint16_t (&to)[kPanels][kStepRows][kColumns],
                     int32_t column, int32_t row, bool shared_columns, uint32_t rank) {
  constexpr uint64_t kHint = static_cast<uint64_t>(cute::TMA::CacheHintSm90::EVICT_NORMAL);
#pragma unroll
  for (int panel = 0; panel < kPanels; ++panel) {
    if (shared_columns) {
      const int first = static_cast<int>(rank) * kBoxRows;
      cute::SM90_TMA_LOAD_MULTICAST_2D::copy(&map, barrier, uint16_t{3}, kHint, to[panel][first],
                                             column + panel * kColumns, row + first);
    } else {
#pragma unroll
      for (int first = 0; first < kStepRows; first += kBoxRows)
        cute::SM90_TMA_LOAD_2D::copy(&map, barrier, kHint, to[panel][first], column + panel * kColumns, row + first);
    }
  }
}

MG_DEVICE void produce(const Arguments& a, Shared& shared) {
  const uint32_t rank = blockIdx.x % 2;
  uint32_t step = 0, cleaned = 0;
  Tile tile;
  for (uint32_t turn = 0; tile_at(a, shared, turn, tile); ++turn) {
    for (int32_t row = 0; row < tile.rows; row += kStepRows, ++step) {
      const uint32_t stage = step % kStages, round = step / kStages;
      const int32_t left = tile.rows - row;
      uint64_t* barrier = &shared.full[stage];
      if (left < kStepRows && left % kSlice) barrier = &shared.landed[cleaned++ % kStages];
      Barrier::wait(&shared.empty[stage], (round & 1) ^ 1);
      Transaction::arrive_and_expect_tx(barrier, sizeof(shared.x[0]) + sizeof(shared.gy[0]));
      fetch(a.x, barrier, shared.x[stage], tile.k, tile.begin + row, !a.pair_along_k, rank);
      fetch(a.gy, barrier, shared.gy[stage], tile.m, tile.begin + row, a.pair_along_k, rank);
    }
  }
}

// Rows between the end of a group and the next multiple of kSlice belong to the next group, or to none, and may hold
// anything: zeros in both operands keep them out of the sums. A whole warp calls it.
MG_DEVICE void clean(const Arguments& a, Shared& shared) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  uint32_t step = 0, cleaned = 0;
  Tile tile;
  for (uint32_t turn = 0; tile_at(a, shared, turn, tile); ++turn) {
    step += steps_of(tile);
    const int32_t used = last_rows(tile);
    if (used % kSlice == 0) continue;
    const uint32_t stage = (step - 1) % kStages;
    Barrier::wait(&shared.landed[cleaned % kStages], cleaned / kStages & 1);
    ++cleaned;
    const int vectors = (kSlice - used % kSlice) * (kColumns / 8);
    for (int i = lane; i < vectors; i += 32) {
      const int row = used + i / (kColumns / 8), column = i % (kColumns / 8) * 8;
#pragma unroll
      for (int panel = 0; panel < kPanelsX; ++panel)
        *reinterpret_cast<uint4*>(&shared.x[stage][panel][row][column]) = uint4{0, 0, 0, 0};
#pragma unroll
      for (int panel = 0; panel < kPanelsGy; ++panel)
        *reinterpret_cast<uint4*>(&shared.gy[stage][panel][row][column]) = uint4{0, 0, 0, 0};
    }
    cutlass::arch::fence_view_async_shared();
    __syncwarp();
    if (lane == 0) Barrier::arrive(&shared.full[stage]);
  }
}

template <class Mma, size_t... I>
MG_DEVICE void multiply(uint64_t x, uint64_t gy, float (&sums)[kSums], cute::SM90::GMMA::ScaleOut scale,
                        std::index_sequence<I...>) {
  Mma::fma(x, gy, sums[I]..., scale);
}

MG_DEVICE uint64_t panel_descriptor(const void* panel) {
  cute::GmmaDescriptor descriptor;
  descriptor.desc_ = 0;
  descriptor.bitfield.start_address_ = cute::cast_smem_ptr_to_uint(panel) >> 4;
  descriptor.bitfield.leading_byte_offset_ = kStepRows * kColumns * 2 >> 4;  // to the next 64 columns
  descriptor.bitfield.stride_byte_offset_ = 8 * kColumns * 2 >> 4;           // to the next 8 rows
  descriptor.bitfield.layout_type_ = static_cast<uint8_t>(cute::SM90::GMMA::LayoutType::B128);
  return descriptor.desc_;
}

template <class Mma>
MG_DEVICE void multiply_slice(uint64_t x, uint64_t gy, int slice, float (&sums)[2][kSums],
                              cute::SM90::GMMA::ScaleOut& scale) {
  constexpr int kSliceBytes = kSlice * kColumns * 2, kPanelBytes = kStepRows * kColumns * 2;
  constexpr auto kAll = std::make_index_sequence<kSums>();
  x += slice * (kSliceBytes >> 4);
  gy += slice * (kSliceBytes >> 4);
  multiply<Mma>(x, gy, sums[0], scale, kAll);
  multiply<Mma>(x + (kPanelBytes >> 4), gy, sums[1], scale, kAll);
  scale = cute::SM90::GMMA::ScaleOut::One;
}

MG_DEVICE void fence_sums(float (&sums)[2][kSums]) {
#pragma unroll
  for (int half = 0; half < 2; ++half)
#pragma unroll
    for (int i = 0; i < kSums; ++i) cute::warpgroup_fence_operand(sums[half][i]);
}

// Both blocks of the pair may refill the stage once each warp that reads it has told both.
MG_DEVICE void release(Shared& shared, uint32_t step) {
  const uint32_t lane = threadIdx.x % 32;
  Barrier::arrive(&shared.empty[step % kStages], lane, lane < 2);
}

// Tiles of 16 x 64 go through the warp's own chunks of shared memory, and out by TMA, which clips them.
template <class T>
MG_DEVICE void write_by_tma(const Arguments& a, uint16_t (&chunks)[kChunks][kChunkRows][kColumns], const Tile& tile,
                            const float (&sums)[2][kSums]) {
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32 % 4;
  const int row = lane % 16, odd = lane / 16;
#pragma unroll
  for (int half = 0; half < 2; ++half)
#pragma unroll
    for (int panel = 0; panel < kPanelsGy; ++panel) {
      auto& chunk = chunks[(half * kPanelsGy + panel) % kChunks];
      if (lane == 0) cute::tma_store_wait<kChunks - 1>();
      __syncwarp();
#pragma unroll
      for (int pair = 0; pair < kColumns / 16; ++pair) {
        const float* from = &sums[half][panel * (kColumns / 2) + pair * 8];
        const int vector = (2 * pair + odd) ^ (row % 8);
        cute::SM90_U32x4_STSM_N::copy(Numbers<T>::pack(from[0], from[1]), Numbers<T>::pack(from[2], from[3]),
                                      Numbers<T>::pack(from[4], from[5]), Numbers<T>::pack(from[6], from[7]),
                                      *reinterpret_cast<cute::uint128_t*>(&chunk[row][vector * 8]));
      }
      cutlass::arch::fence_view_async_shared();
      __syncwarp();
      const int32_t k = tile.k + half * 64 + warp * kChunkRows, m = tile.m + panel * kColumns;
      if (lane == 0) {
        if (k < a.inner && m < a.outer) cute::SM90_TMA_STORE_3D::copy(&a.out, chunk, m, k, tile.group);
        cute::tma_store_arrive();
      }
    }
}

// Any strides and dtype: the same chunks hold 16 x 64 sums, which the warp writes one by one, m fastest.
MG_DEVICE void write_by_element(const Arguments& a, uint16_t (&chunks)[kChunks][kChunkRows][kColumns], const Tile& tile,
                                const float (&sums)[2][kSums]) {
  static_assert(sizeof(chunks) >= kChunkRows * kColumns * sizeof(float), "a chunk of sums must fit");
  float* staged = reinterpret_cast<float*>(&chunks[0][0][0]);
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32 % 4;
#pragma unroll
  for (int half = 0; half < 2; ++half)
#pragma unroll
    for (int panel = 0; panel < kPanelsGy; ++panel) {
      __syncwarp();
#pragma unroll
      for (int i = 0; i < kColumns / 2; i += 2) {
        const int row = lane / 4 + i / 2 % 2 * 8, column = i / 4 * 8 + lane % 4 * 2;
        const float* from = &sums[half][panel * (kColumns / 2) + i];
        *reinterpret_cast<float2*>(&staged[row * kColumns + column]) = float2{from[0], from[1]};
      }
      __syncwarp();
#pragma unroll 1
      for (int i = lane; i < kChunkRows * kColumns; i += 32) {
        const int32_t k = tile.k + half * 64 + warp * kChunkRows + i / kColumns;
        const int32_t m = tile.m + panel * kColumns + i % kColumns;
        if (k < a.inner && m < a.outer)
          simt::store<float>(a.out_data, a.out_dtype,
                             tile.group * a.out_stride[0] + k * a.out_stride[1] + m * a.out_stride[2], staged[i]);
      }
    }
}

// The tile of a group without rows. (Not sums of zeros: merged with those of wgmma, they would spill.)
MG_DEVICE void write_zeros(const Arguments& a, uint16_t (&chunks)[kChunks][kChunkRows][kColumns], const Tile& tile) {
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32 % 4;
  const int32_t k0 = tile.k + warp * kChunkRows;
  if (a.out_by_tma) {
    if (lane == 0) cute::tma_store_wait<0>();
    __syncwarp();
    for (int i = lane; i < kChunkRows * kColumns / 8; i += 32)
      *reinterpret_cast<uint4*>(&chunks[0][i / 8][i % 8 * 8]) = uint4{0, 0, 0, 0};
    cutlass::arch::fence_view_async_shared();
    __syncwarp();
    if (lane > 0) return;
    for (int32_t k = k0; k < tile.k + kTileK && k < a.inner; k += 64)
      for (int32_t m = tile.m; m < tile.m + kTileM && m < a.outer; m += kColumns)
        cute::SM90_TMA_STORE_3D::copy(&a.out, chunks[0], m, k, tile.group);
    cute::tma_store_arrive();
    cute::tma_store_wait<0>();
    return;
  }
  for (int half = 0; half < 2; ++half)
    for (int row = 0; row < kChunkRows; ++row)
      for (int32_t m = tile.m + lane; m < tile.m + kTileM && m < a.outer; m += 32) {
        const int32_t k = k0 + half * 64 + row;
        if (k < a.inner)
          simt::store<float>(a.out_data, a.out_dtype,
                             tile.group * a.out_stride[0] + k * a.out_stride[1] + m * a.out_stride[2], 0.f);
      }
}

// Two warpgroups take the block's tiles in turn; a warpgroup starts to multiply when the other has issued its last.
template <class T>
MG_DEVICE void consume(const Arguments& a, Shared& shared, uint32_t warpgroup) {
  using Mma = typename Numbers<T>::Mma;
  using Scale = cute::SM90::GMMA::ScaleOut;
  auto& chunks = shared.chunks[threadIdx.x / 32 - 4];
  const uint64_t x_panel = panel_descriptor(&shared.x[0]), gy_panel = panel_descriptor(&shared.gy[0]);
  float sums[2][kSums];
  uint32_t step = 0;
  Tile tile;
  for (uint32_t turn = 0; tile_at(a, shared, turn, tile); ++turn) {
    const uint32_t steps = steps_of(tile);
    if (turn % 2 != warpgroup) {
      step += steps;
      continue;
    }
    if (turn > 0) cutlass::arch::NamedBarrier::sync(256, warpgroup);
    Scale scale = Scale::Zero;
    const uint32_t end = step + steps, whole = step + static_cast<uint32_t>(tile.rows) / kStepRows;
    const uint32_t first = step;
    fence_sums(sums);
#pragma unroll 1
    for (; step < whole; ++step) {
      const uint32_t stage = step % kStages;
      Barrier::wait(&shared.full[stage], step / kStages & 1);
      const uint64_t x = x_panel + stage * (sizeof(shared.x[0]) >> 4);
      const uint64_t gy = gy_panel + stage * (sizeof(shared.gy[0]) >> 4);
      cute::warpgroup_arrive();
#pragma unroll
      for (int slice = 0; slice < kStepRows / kSlice; ++slice) multiply_slice<Mma>(x, gy, slice, sums, scale);
      cute::warpgroup_commit_batch();
      cute::warpgroup_wait<1>();
      if (step > first) release(shared, step - 1);
    }
    if (step < end) {
      const uint32_t stage = step % kStages;
      Barrier::wait(&shared.full[stage], step / kStages & 1);
      const uint64_t x = x_panel + stage * (sizeof(shared.x[0]) >> 4);
      const uint64_t gy = gy_panel + stage * (sizeof(shared.gy[0]) >> 4);
      cute::warpgroup_arrive();
#pragma unroll 1
      for (int slice = 0; slice < (tile.rows % kStepRows + kSlice - 1) / kSlice; ++slice)
        multiply_slice<Mma>(x, gy, slice, sums, scale);
      cute::warpgroup_commit_batch();
      cute::warpgroup_wait<1>();
      if (step > first) release(shared, step - 1);
      ++step;
    }
    if (has_turn(a, turn + 1)) cutlass::arch::NamedBarrier::arrive(256, warpgroup ^ 1);
    cute::warpgroup_wait<0>();
    fence_sums(sums);
    if (steps == 0) {
      write_zeros(a, chunks, tile);
      continue;
    }
    release(shared, step - 1);
    if (a.out_by_tma)
      write_by_tma<T>(a, chunks, tile, sums);
    else
      write_by_element(a, chunks, tile, sums);
  }
  if (threadIdx.x % 32 == 0) cute::tma_store_wait<0>();
}

#endif

template <class T>
__global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(kThreads, 1)
    wgrad_sm90(const __grid_constant__ Arguments a) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) unsigned char room[];
  Shared& shared = *reinterpret_cast<Shared*>(room);
  const int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 32, 0);
  if (threadIdx.x == 0) {
    cute::prefetch_tma_descriptor(&a.x);
    cute::prefetch_tma_descriptor(&a.gy);
    if (a.out_by_tma) cute::prefetch_tma_descriptor(&a.out);
    for (int i = 0; i < kStages; ++i) {
      Barrier::init(&shared.full[i], 1);
      Barrier::init(&shared.landed[i], 1);
      Barrier::init(&shared.empty[i], 8);  // four warps of either block
    }
    cutlass::arch::fence_barrier_init();
  }
  cute::cluster_arrive_relaxed();
  block_group_ends(a.groups, a.rows, shared.ends, shared.scratch);
  order_groups(a, shared);
  cute::cluster_wait();

  if (warp < 4) {
    cutlass::arch::warpgroup_reg_dealloc<40>();
    if (warp == 0 && cute::elect_one_sync()) produce(a, shared);
    if (warp == 1) clean(a, shared);
  } else {
    cutlass::arch::warpgroup_reg_alloc<232>();
    consume<T>(a, shared, static_cast<uint32_t>(warp) / 4 - 1);
  }
  // The other block may still write to this one's shared memory, or tell it of a stage.
  __syncwarp();
  cute::cluster_arrive();
  cute::cluster_wait();
#endif
}

}  // namespace wgrad_sm90
}  // namespace multigemm
