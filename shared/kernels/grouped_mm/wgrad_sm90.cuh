// Formula: out[g, k, m] = sum over n in group g of x[n, k] gy[n, m]; zeros where g has no rows.
// Layouts: x [N, K], gy [N, M] with unit K and M strides, rows and data aligned to 16 bytes; out with any strides
//          (fastest with a unit M stride and everything else aligned to 16 bytes).
// Dtypes:  bfloat16 or float16 in, float32 sums, bfloat16, float16 or float32 out.
// Architectures: sm_90a (wgmma, TMA, clusters of two blocks).
// Limits:  B absent; G <= 2^24; N, K, M < 2^31 - 1024. Every tile of out is summed by one warpgroup in row
// order.
//
// A persistent pair of blocks takes two neighbouring tiles of 128 k x 192 m of one group and fetches for both the
// columns that they share. Of a group with few rows the columns of x stay in shared memory for a run of tiles along M.
// In each block two warps fetch, one cleans what lies between the last row of a group and the next multiple of 16, and
// two warpgroups take turns: one multiplies its tile while the other writes its own.
#pragma once

#include <cuda.h>
#include <cutlass/arch/barrier.h>
#include <cutlass/arch/reg_reconfig.h>
#include <cutlass/fast_math.h>

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
constexpr int kStepRows = 64;             // rows of one pipeline stage
constexpr int kHalfRows = kStepRows / 2;  // what each block of a pair fetches of shared columns
constexpr int kStagesX = 5, kStagesGy = 4;
constexpr int kMostKeptRows = kStagesX * kStepRows;  // of a group whose columns of x stay for a run of tiles
constexpr int kColumns = 64;  // columns of one shared-memory panel: 128 bytes, the span of the swizzle
constexpr int kSlice = 16;    // rows of one wgmma
constexpr int kPanelsX = kTileK / kColumns, kPanelsGy = kTileM / kColumns;
constexpr int kWarpsOut = 8, kChunkRows = 16, kChunks = 2;
constexpr int kThreads = 384;
constexpr int kSums = kTileM / 2;  // of one thread in each of the two 64 x 192 halves of a tile
constexpr int kMostSortedGroups = 256;

struct Arguments {
  CUtensorMap x, gy, out;           // out only if out_by_tma
  int32_t x_by_panel, gy_by_panel;  // one box holds one panel: the columns are not whole panels
  mg_groups groups;
  void* out_data;
  int64_t out_stride[3];  // G, K, M
  int32_t out_dtype, out_by_tma;
  int32_t rows, inner, outer;
  int32_t pair_along_k;  // the two tiles of a pair are neighbours along K and share gy; else along M and share x
  // A unit of a tall group is one pair of tiles, and bands along M are walked one after another: a band's units of M
  // for each of K. A unit of another group is a run of `run` pairs along M.
  int32_t m_units, band_units, last_band, run;
  cutlass::FastDivmod of_tall, of_band, width, last_width;  // units of a tall group and of a band; units of M of a band
  cutlass::FastDivmod of_short, of_run;                     // units of another group and of K
};

template <int kStages>
struct Fences {
  uint64_t full[kStages];    // a stage can be read
  uint64_t landed[kStages];  // the i-th stage that must be cleaned first has arrived
  uint64_t empty[kStages];   // both blocks of the pair have read the stage
};

struct alignas(1024) Shared {
  uint16_t x[kStagesX][2][kPanelsX][kHalfRows][kColumns];
  uint16_t gy[kStagesGy][2][kPanelsGy][kHalfRows][kColumns];
  uint16_t chunks[kWarpsOut][kChunks][kChunkRows][kColumns];
  Fences<kStagesX> x_fences;
  Fences<kStagesGy> gy_fences;
  int32_t ends[kMostBlockGroups];
  uint16_t order[kMostBlockGroups];
  int32_t scratch[32];
  int32_t tall, units;  // tall groups; units of this block
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

using Transaction = cutlass::arch::ClusterTransactionBarrier;
using Barrier = cutlass::arch::ClusterBarrier;

template <int kStages>
MG_DEVICE void init(Fences<kStages>& fences) {
  for (int i = 0; i < kStages; ++i) {
    Barrier::init(&fences.full[i], 1);
    Barrier::init(&fences.landed[i], 1);
    Barrier::init(&fences.empty[i], 8);  // four warps of either block
  }
}

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
  bool first, last, second_last;  // of its unit
};

// Where this pair's `turn`-th unit lies in the walk over all. Neighbouring pairs of blocks work on neighbouring tiles;
// every other turn runs backwards, so that no pair gets the larger of the groups each time.
MG_DEVICE int place_of(int turn) {
  const int pairs = static_cast<int>(gridDim.x / 2), pair = static_cast<int>(blockIdx.x / 2);
  return turn * pairs + (turn % 2 ? pairs - 1 - pair : pair);
}

// Walks the tiles of this block.
struct Walk {
  int unit = 0, left = 0;  // the next unit; tiles left of this one
  Tile tile;

  MG_DEVICE bool more(const Shared& shared) const { return left > 0 || unit < shared.units; }

  // False past the last.
  MG_DEVICE bool next(const Arguments& a, const Shared& shared) {
    if (left > 0) {
      tile.m += a.pair_along_k ? kTileM : 2 * kTileM;
      tile.first = false;
      --left;
    } else {
      if (unit >= shared.units) return false;
      open(a, shared, place_of(unit++));
    }
    tile.last = left == 0;
    tile.second_last = left == 1;
    return true;
  }

 private:
  MG_DEVICE void open(const Arguments& a, const Shared& shared, int number) {
    const int rank = static_cast<int>(blockIdx.x % 2);
    const int of_tall = shared.tall * a.of_tall.divisor;
    int place, in_group, k_unit, m_unit;
    if (number < of_tall) {
      int band, in_band;
      a.of_tall(place, in_group, number);
      a.of_band(band, in_band, in_group);
      if (band == a.last_band)
        a.last_width(k_unit, m_unit, in_band);
      else
        a.width(k_unit, m_unit, in_band);
      m_unit += band * a.band_units;
      left = 0;
    } else {
      a.of_short(place, in_group, number - of_tall);
      place += shared.tall;
      a.of_run(m_unit, k_unit, in_group);
      m_unit *= a.run;
      left = (a.m_units - m_unit < a.run ? a.m_units - m_unit : a.run) - 1;
    }
    const bool many = a.groups.count > kMostBlockGroups;
    tile.k = (a.pair_along_k ? 2 * k_unit + rank : k_unit) * kTileK;
    tile.m = (a.pair_along_k ? m_unit : 2 * m_unit + rank) * kTileM;
    tile.group = many ? place : shared.order[place];
    const int32_t* end = (many ? static_cast<const int32_t*>(a.groups.data) : shared.ends) + tile.group;
    tile.begin = tile.group > 0 ? end[-1] : 0;
    tile.rows = *end - tile.begin;
    tile.first = true;
  }
};

// Puts tall groups first, and as far as there are few groups, those with more rows, so that the last units are short.
// Ends with a barrier.
MG_DEVICE void order_groups(const Arguments& a, Shared& shared) {
  const int count = static_cast<int>(a.groups.count <= kMostBlockGroups ? a.groups.count : 0);
  const auto rows_of = [&](int g) { return shared.ends[g] - (g > 0 ? shared.ends[g - 1] : 0); };
  for (int first = 0; first < count; first += kThreads) {
    const int g = first + static_cast<int>(threadIdx.x);
    const unsigned tall = __ballot_sync(0xffffffffu, g < count && rows_of(g) > kMostKeptRows);
    if (g % 32 == 0 && g < kMostBlockGroups) shared.scratch[g / 32] = static_cast<int32_t>(tall);
  }
  __syncthreads();
  const auto tall_before = [&](int g) {
    int sum = 0;
    for (int i = 0; i < g / 32; ++i) sum += __popc(shared.scratch[i]);
    return g % 32 ? sum + __popc(shared.scratch[g / 32] & ((1u << g % 32) - 1)) : sum;
  };
  const int tall = count > 0 ? tall_before(count) : static_cast<int>(a.groups.count);
  if (threadIdx.x == 0) {
    const int groups = static_cast<int>(a.groups.count), pairs = static_cast<int>(gridDim.x / 2);
    const int units = tall * a.of_tall.divisor + (groups - tall) * a.of_short.divisor, whole = units / pairs;
    shared.tall = tall;
    shared.units = whole + (place_of(whole) < units);
  }
  for (int g = static_cast<int>(threadIdx.x); g < count; g += kThreads) {
    const int32_t mine = rows_of(g);
    int place = 0;
    if (count <= kMostSortedGroups) {
      int32_t before = 0;
      for (int other = 0; other < count; ++other) {
        const int32_t end = shared.ends[other], size = end - before;
        place += size > mine || (size == mine && other < g);
        before = end;
      }
    } else {
      place = tall_before(g);
      if (mine <= kMostKeptRows) place = tall + g - place;
    }
    shared.order[place] = static_cast<uint16_t>(g);
  }
  __syncthreads();
}

// Rows of the last step of a tile, 0 if it has none.
MG_DEVICE int32_t last_rows(const Tile& tile) { return tile.rows > 0 ? (tile.rows - 1) % kStepRows + 1 : 0; }
MG_DEVICE uint32_t steps_of(const Tile& tile) { return static_cast<uint32_t>(tile.rows + kStepRows - 1) / kStepRows; }

// A number that is the same in all lanes of a warp. CUDA 12's compiler has to see that: it takes a loop over any other
// for a divergent one, in which each wgmma waits for the one before.
template <class T>
MG_DEVICE T of_warp(T number) {
#if __CUDACC_VER_MAJOR__ < 13
  return __shfl_sync(0xffffffffu, number, 0);
#else
  return number;
#endif
}

// Half of the rows of one operand's columns of one step, to this block or to both of the pair.
template <int kPanels>
MG_DEVICE void fetch_half(const CUtensorMap& map, uint64_t* barrier, uint16_t (&to)[kPanels][kHalfRows][kColumns],
                          int32_t column, int32_t row, bool by_panel, bool to_both) {
  // Other tiles of the group read the same soon; what is written would drive it out of the L2 cache.
  constexpr uint64_t kHint = static_cast<uint64_t>(cute::TMA::CacheHintSm90::EVICT_LAST);
  const int boxes = by_panel ? kPanels : 1;
  for (int box = 0; box < boxes; ++box) {
    const int32_t first = by_panel ? column + box * kColumns : 0, panel = by_panel ? 0 : column / kColumns;
    if (to_both)
      cute::SM90_TMA_LOAD_MULTICAST_3D::copy(&map, barrier, uint16_t{3}, kHint, to[box], first, row, panel);
    else
      cute::SM90_TMA_LOAD_3D::copy(&map, barrier, kHint, to[box], first, row, panel);
  }
}

// One thread brings x, another gy: what one alone can issue does not keep up with the matrix units. Of columns that
// the pair shares, each block brings half of the rows to both. Rows come in halves of a step, the second only if the
// group has it.
template <bool kIsX, int kStages, int kPanels>
MG_DEVICE void produce(const Arguments& a, Shared& shared, Fences<kStages>& fences,
                       uint16_t (&stages)[kStages][2][kPanels][kHalfRows][kColumns]) {
  const int rank = static_cast<int>(blockIdx.x % 2);
  const bool to_both = kIsX ? !a.pair_along_k : a.pair_along_k, by_panel = kIsX ? a.x_by_panel : a.gy_by_panel;
  const CUtensorMap& map = kIsX ? a.x : a.gy;
  uint32_t step = 0, cleaned = 0;
  Walk walk;
  bool more = walk.next(a, shared);
  while (more) {
    const Tile tile = walk.tile;
    const bool wanted = !kIsX || tile.first;
    int32_t row = 0;
    do {
      if (wanted && row < tile.rows) {
        const uint32_t stage = step % kStages, round = step / kStages;
        const int32_t left = tile.rows - row;
        const int halves = left > kHalfRows ? 2 : 1;
        uint64_t* barrier = &fences.full[stage];
        if (left < kStepRows && left % kSlice) barrier = &fences.landed[cleaned++ % kStages];
        Barrier::wait(&fences.empty[stage], (round & 1) ^ 1);
        Transaction::arrive_and_expect_tx(barrier, static_cast<uint32_t>(sizeof(stages[0][0])) * halves);
        const int32_t column = kIsX ? tile.k : tile.m;
        for (int half = to_both ? rank : 0; half < (to_both ? rank + 1 : 2); ++half)
          if (half < halves)
            fetch_half(map, barrier, stages[stage][half], column, tile.begin + row + half * kHalfRows, by_panel,
                       to_both);
        ++step;
      }
      if (row == 0) more = walk.next(a, shared);  // while the stages are full
      row += kStepRows;
    } while (wanted && row < tile.rows);
  }
}

// Zeros in rows [used, next multiple of kSlice) of the stage, by a whole warp, once it has landed.
template <int kStages, int kPanels>
MG_DEVICE void clean_stage(Fences<kStages>& fences, uint16_t (&stages)[kStages][2][kPanels][kHalfRows][kColumns],
                           uint32_t stage, uint32_t cleaned, int used) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  Barrier::wait(&fences.landed[cleaned % kStages], cleaned / kStages & 1);
  const int vectors = (kSlice - used % kSlice) * (kColumns / 8);
  for (int i = lane; i < vectors; i += 32) {
    const int row = used + i / (kColumns / 8), column = i % (kColumns / 8) * 8;
#pragma unroll
    for (int panel = 0; panel < kPanels; ++panel)
      *reinterpret_cast<uint4*>(&stages[stage][row / kHalfRows][panel][row % kHalfRows][column]) = uint4{0, 0, 0, 0};
  }
  cutlass::arch::fence_view_async_shared();
  __syncwarp();
  if (lane == 0) Barrier::arrive(&fences.full[stage]);
}

// Rows between the end of a group and the next multiple of kSlice belong to the next group, or to none, and may hold
// anything: zeros in both operands keep them out of the sums. A whole warp calls it.
MG_DEVICE void clean(const Arguments& a, Shared& shared) {
  uint32_t step = 0, x_step = 0, cleaned = 0, x_cleaned = 0;
  Walk walk;
  while (walk.next(a, shared)) {
    const Tile& tile = walk.tile;
    const int32_t used = last_rows(tile);
    step += steps_of(tile);
    if (tile.first) x_step += steps_of(tile);
    if (used % kSlice == 0) continue;
    if (tile.first) clean_stage(shared.x_fences, shared.x, (x_step - 1) % kStagesX, x_cleaned++, used);
    clean_stage(shared.gy_fences, shared.gy, (step - 1) % kStagesGy, cleaned++, used);
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
  descriptor.bitfield.leading_byte_offset_ = kHalfRows * kColumns * 2 >> 4;  // to the next 64 columns
  descriptor.bitfield.stride_byte_offset_ = 8 * kColumns * 2 >> 4;           // to the next 8 rows
  descriptor.bitfield.layout_type_ = static_cast<uint8_t>(cute::SM90::GMMA::LayoutType::B128);
  return descriptor.desc_;
}

template <class Mma>
MG_DEVICE void multiply_slice(uint64_t x, uint64_t gy, int slice, float (&sums)[2][kSums],
                              cute::SM90::GMMA::ScaleOut& scale) {
  constexpr int kSliceBytes = kSlice * kColumns * 2, kPanelBytes = kHalfRows * kColumns * 2;
  constexpr int kSlicesOfHalf = kHalfRows / kSlice;
  constexpr auto kAll = std::make_index_sequence<kSums>();
  const int half = slice / kSlicesOfHalf, in_half = slice % kSlicesOfHalf;
  x += (half * kPanelsX * kPanelBytes + in_half * kSliceBytes) >> 4;
  gy += (half * kPanelsGy * kPanelBytes + in_half * kSliceBytes) >> 4;
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
MG_DEVICE void release(uint64_t* empty) {
  const uint32_t lane = threadIdx.x % 32;
  Barrier::arrive(empty, lane, lane < 2);
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
  constexpr int kPart = kColumns / 2;
  float* staged = reinterpret_cast<float*>(&chunks[0][0][0]);
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32 % 4;
#pragma unroll
  for (int half = 0; half < 2; ++half)
#pragma unroll
    for (int part = 0; part < kTileM / kPart; ++part) {
      __syncwarp();
#pragma unroll
      for (int i = 0; i < kPart / 2; i += 2) {
        const int row = lane / 4 + i / 2 % 2 * 8, column = i / 4 * 8 + lane % 4 * 2;
        const float* from = &sums[half][part * (kPart / 2) + i];
        *reinterpret_cast<float2*>(&staged[row * kPart + column]) = float2{from[0], from[1]};
      }
      __syncwarp();
#pragma unroll 1
      for (int row = 0; row < kChunkRows; ++row) {
        const int32_t k = tile.k + half * 64 + warp * kChunkRows + row;
        const int32_t m = tile.m + part * kPart + lane;
        if (k < a.inner && m < a.outer)
          simt::store<float>(a.out_data, a.out_dtype,
                             tile.group * a.out_stride[0] + k * a.out_stride[1] + m * a.out_stride[2],
                             staged[row * kPart + lane]);
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
  constexpr uint32_t kDone = 2;  // the barriers after those of the turns
  auto& chunks = shared.chunks[threadIdx.x / 32 - 4];
  const uint64_t x_panel = panel_descriptor(&shared.x[0]), gy_panel = panel_descriptor(&shared.gy[0]);
  float sums[2][kSums];
  uint32_t step = 0, x_step = 0;
  Walk walk;
  for (uint32_t turn = 0; walk.next(a, shared); ++turn) {
    const Tile& tile = walk.tile;
    const uint32_t steps = of_warp(steps_of(tile));
    const int32_t rows = of_warp(tile.rows);
    if (turn % 2 != warpgroup) {
      step += steps;
      if (tile.last) x_step += steps;
      continue;
    }
    if (turn > 0) cutlass::arch::NamedBarrier::sync(256, warpgroup);
    Scale scale = Scale::Zero;
    const uint32_t first = step, end = step + steps, whole = step + static_cast<uint32_t>(rows) / kStepRows;
    const uint32_t x_ahead = x_step - step;
    const int last_slices = (rows % kStepRows + kSlice - 1) / kSlice;
    const bool more = walk.more(shared);
    const auto begin_step = [&](uint64_t& x, uint64_t& gy) {
      const uint32_t stage = step % kStagesGy, at = step + x_ahead, x_stage = at % kStagesX;
      Barrier::wait(&shared.x_fences.full[x_stage], at / kStagesX & 1);
      Barrier::wait(&shared.gy_fences.full[stage], step / kStagesGy & 1);
      x = x_panel + x_stage * (sizeof(shared.x[0]) >> 4);
      gy = gy_panel + stage * (sizeof(shared.gy[0]) >> 4);
      cute::warpgroup_arrive();
    };
    const auto end_reads = [&](uint32_t of) {
      release(&shared.gy_fences.empty[of % kStagesGy]);
      if (tile.last) release(&shared.x_fences.empty[(of + x_ahead) % kStagesX]);
    };
    const auto end_step = [&] {
      cute::warpgroup_commit_batch();
      // The last tile of a unit gives back x, so the tile before it must have been multiplied.
      if (step == first && tile.last && !tile.first) cutlass::arch::NamedBarrier::sync(256, kDone + warpgroup);
      if (step + 1 == end && more) cutlass::arch::NamedBarrier::arrive(256, warpgroup ^ 1);
      cute::warpgroup_wait<1>();
      if (step > first) end_reads(step - 1);
    };
    uint64_t x, gy;
    fence_sums(sums);
#pragma unroll 1
    for (; step < whole; ++step) {
      begin_step(x, gy);
#pragma unroll
      for (int slice = 0; slice < kStepRows / kSlice; ++slice) multiply_slice<Mma>(x, gy, slice, sums, scale);
      end_step();
    }
    if (step < end) {
      begin_step(x, gy);
#pragma unroll 1
      for (int slice = 0; slice < last_slices; ++slice) multiply_slice<Mma>(x, gy, slice, sums, scale);
      end_step();
      ++step;
    }
    if (steps == 0 && more) cutlass::arch::NamedBarrier::arrive(256, warpgroup ^ 1);
    cute::warpgroup_wait<0>();
    fence_sums(sums);
    if (steps == 0) {
      write_zeros(a, chunks, tile);
      continue;
    }
    if (tile.second_last) cutlass::arch::NamedBarrier::arrive(256, kDone + (warpgroup ^ 1));
    end_reads(step - 1);
    if (tile.last) x_step += steps;
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
    init(shared.x_fences);
    init(shared.gy_fences);
    cutlass::arch::fence_barrier_init();
  }
  cute::cluster_arrive_relaxed();
  if (a.groups.count <= kMostBlockGroups) block_group_ends(a.groups, a.rows, shared.ends, shared.scratch);
  order_groups(a, shared);
  cute::cluster_wait();

  if (warp < 4) {
    cutlass::arch::warpgroup_reg_dealloc<40>();
    if (warp == 0 && cute::elect_one_sync()) produce<true>(a, shared, shared.x_fences, shared.x);
    if (warp == 2 && cute::elect_one_sync()) produce<false>(a, shared, shared.gy_fences, shared.gy);
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
