// Formula: out[n, b, m] = sum_k x[n, b, k] w[g(n), b, k, m] + bias[g(n), b, m], one rounding at the end.
// Layouts: unit K stride of x, unit K or M stride of w, unit M stride of out; any other strides, any alignment.
// Dtypes:  float64, float32 (IEEE or TF32), float16, bfloat16; out the same or float32.
// Architectures: sm_80 and up.
// Limits:  G <= 2^24, N < 2^31 - 2^16.
#pragma once

#include "kernels/grouped_mm/tile_sm80.cuh"

namespace multigemm {
namespace sm80 {

struct RowsCall {
  mg_grouped_mm_problem p;
  int64_t tiles_each;     // column tiles times B: tiles for one row tile
  int32_t column_tiles;   // of one b
  int32_t tile_rows;      // of the kernels for short and thin matrices
  uint32_t share;         // of one warp, if it is given its part of all rows and columns at once; else 0
  int32_t column_warps;   // of a block's warps, how many lie side by side; the others take other rows
  bool x_wide, out_wide;  // 16-byte accesses
  bool w_wide;            // along the unit stride
  bool w_along_k;
};

// Block-wide shared memory: `bytes` of work, then the groups' ends and the scan's scratch.
MG_DEVICE int32_t* ends_after(unsigned char* shared, int64_t bytes) {
  return reinterpret_cast<int32_t*>(shared + bytes);
}

// The first group that ends past row n, or G.
template <int kWhich>
MG_DEVICE int first_past(const GroupEnds<kWhich>& ends, int groups, int64_t n) {
  int low = 0, high = groups;
  while (low < high) {
    const int middle = (low + high) / 2;
    if (ends[middle] > n)
      high = middle;
    else
      low = middle + 1;
  }
  return low;
}

// Any K and M: tiles through shared memory, rows of neighbouring tiles in bands that share w in the L2 cache.
template <class Tile, bool kWAlongK>
__global__ __launch_bounds__(Tile::kThreads, Tile::kBlocks) void rows_tile_sm80(const __grid_constant__ RowsCall call) {
  using T = typename Tile::T;
  using Warp = typename Tile::Warp;
  using Sum = typename Warp::Sum;
  using A = typename Tile::template OperandOf<Tile::kM, true>;
  using B = typename Tile::template OperandOf<Tile::kN, kWAlongK>;
  MG_DYNAMIC_SHARED(shared);
  T* work = reinterpret_cast<T*>(shared);
  int32_t* room = ends_after(shared, sizeof(T) * Tile::kStages * (A::kSize + B::kSize));
  const mg_grouped_mm_problem& p = call.p;
  const int groups = static_cast<int>(p.groups.count);
  const auto ends = group_ends(p.groups, p.rows, room);

  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int warp_m = warp % Tile::kWarpsM * Tile::kWarpM, warp_n = warp / Tile::kWarpsM % Tile::kWarpsN * Tile::kWarpN;
  constexpr int kBand = 8;
  TileWalk<kFewOrMany> walk{ends, groups, static_cast<int32_t>(p.rows), Tile::kM};
  RowTile tile;
  for (int64_t t = blockIdx.x; walk.find(static_cast<int32_t>(t / call.tiles_each), tile); t += gridDim.x) {
    int64_t at = t - tile.tiles_before * call.tiles_each;
    const int64_t band = at / (kBand * call.tiles_each), height = (tile.end - tile.begin + Tile::kM - 1) / Tile::kM;
    at -= band * kBand * call.tiles_each;
    const int64_t in_band = height - band * kBand < kBand ? height - band * kBand : kBand;
    const int64_t n0 = tile.begin + (band * kBand + at % in_band) * Tile::kM;
    at /= in_band;
    const int64_t m0 = at % call.column_tiles * Tile::kN, b = at / call.column_tiles;
    const int64_t g = tile.group, rows = tile.end - n0;

    Sum sums[Warp::kSums];
#pragma unroll
    for (int i = 0; i < Warp::kSums; ++i) sums[i] = 0;
    const Source<T> left{static_cast<const T*>(p.x) + n0 * p.x_stride[0] + b * p.x_stride[1], p.x_stride[0], rows,
                         call.x_wide};
    const Source<T> right{static_cast<const T*>(p.w) + g * p.w_stride[0] + b * p.w_stride[1] + m0 * p.w_stride[3],
                          kWAlongK ? p.w_stride[3] : p.w_stride[2], p.outer - m0, call.w_wide};
    tile_product<Tile, A, B>(left, right, g < groups ? p.inner : 0, work, sums);

    if (Tile::kWarpsD > 1 && warp >= Tile::kWarpsM * Tile::kWarpsN) continue;
    const T* bias =
        p.bias && g < groups ? static_cast<const T*>(p.bias) + g * p.bias_stride[0] + b * p.bias_stride[1] : nullptr;
    const bool same = p.out_dtype == p.dtype;
    Warp::template each<A>(lane, sums, [&](int row, int column, const Sum* run) {
      const int64_t m = m0 + warp_n + column;
      if (warp_m + row >= rows || m >= p.outer) return;
      const int count = static_cast<int>(p.outer - m < Warp::kRun ? p.outer - m : Warp::kRun);
      Sum values[Warp::kRun];
#pragma unroll
      for (int i = 0; i < Warp::kRun; ++i) {
        values[i] = run[i];
        if (bias && i < count) values[i] += widen(bias[(m + i) * p.bias_stride[2]]);
      }
      store_either<T, Warp::kRun>(p.out, (n0 + warp_m + row) * p.out_stride[0] + b * p.out_stride[1] + m, same, values,
                                  count, call.out_wide);
    });
  }
}

constexpr int kShortThreads = 128;
constexpr int kShortK = 16;
constexpr int kShortRows = 64;     // most of a unit
constexpr int kShortTogether = 2;  // rows at once
constexpr int kShortStages = 6;    // of as many rows in flight

// Of one warp: the columns of w, and a ring of rows of x.
template <class T>
struct RowsShortWork {
  static constexpr int kRun = 16 / static_cast<int>(sizeof(T));
  T w[kShortK][32 * kRun];
  T x[kShortStages][kShortTogether][kShortK];
};

// K <= kShortK. A warp's unit is a run of rows of one group times 512 bytes of the columns of one b: each thread keeps
// 16 bytes of columns for all K in registers, and rows stream past. Warps work alone; the next unit's w and the next
// rows are on their way meanwhile.
// kWhich: how many groups there may be; few leave registers for another block.
template <class T, int kWhich>
__global__ __launch_bounds__(kShortThreads,
                             kWhich == kFew ? 4 : 3) void rows_short_sm80(const __grid_constant__ RowsCall call) {
  constexpr int kRun = RowsShortWork<T>::kRun;
  MG_DYNAMIC_SHARED(shared);
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  RowsShortWork<T>& work = reinterpret_cast<RowsShortWork<T>*>(shared)[warp];
  int32_t* room = ends_after(shared, sizeof(RowsShortWork<T>) * (kShortThreads / 32));
  const mg_grouped_mm_problem& p = call.p;
  const int groups = static_cast<int>(p.groups.count), inner = static_cast<int>(p.inner);
  const auto ends = group_ends<kWhich>(p.groups, p.rows, room);

  struct Unit {
    int group, b, rows;
    int64_t first, m;
  };
  const uint32_t each = static_cast<uint32_t>(call.tiles_each), step = gridDim.x * (kShortThreads / 32);
  // Where a warp is: at a row tile of the walk and one of its columns, or within its share. There a position counts the
  // rows of a group for each of its columns in turn, so that w changes as seldom as can be.
  struct Cursor {
    TileWalk<kWhich> walk;
    uint32_t at;
  };
  const uint32_t warp_number = blockIdx.x * (kShortThreads / 32) + warp;
  const uint32_t share_total = static_cast<uint32_t>(p.rows) * each, share_at = warp_number * call.share;
  const uint32_t share_end = share_at + call.share < share_total ? share_at + call.share : share_total;
  const auto next_unit = [&](Cursor& cursor, Unit& unit) {
    uint32_t column;
    if (call.share) {
      if (cursor.at >= share_end) return false;
      const int g = first_past(ends, groups, cursor.at / each);
      const uint32_t begin = g > 0 ? ends[g - 1] : 0, rows = (g < groups ? ends[g] : p.rows) - begin;
      const uint32_t local = cursor.at - begin * each;
      column = local / rows;
      const uint32_t row = local - column * rows;
      const uint32_t left = rows - row < share_end - cursor.at ? rows - row : share_end - cursor.at;
      unit.group = g;
      unit.first = begin + row;
      unit.rows = static_cast<int>(left);
      cursor.at += left;
    } else {
      const uint32_t row_tile = cursor.at / each;
      RowTile tile;
      if (!cursor.walk.find(row_tile, tile)) return false;
      column = cursor.at - row_tile * each;
      unit.group = tile.group;
      unit.first = tile.begin + (row_tile - tile.tiles_before) * call.tile_rows;
      unit.rows = static_cast<int>(tile.end - unit.first < call.tile_rows ? tile.end - unit.first : call.tile_rows);
      cursor.at += step;
    }
    unit.b = static_cast<int>(column / static_cast<uint32_t>(call.column_tiles));
    unit.m = static_cast<int64_t>(column - unit.b * call.column_tiles) * (32 * kRun) + lane * kRun;
    return true;
  };
  const auto columns_left = [&](const Unit& unit) {
    return static_cast<int>(p.outer - unit.m < kRun ? p.outer - unit.m : kRun);
  };

  // The rows ahead: each lane copies one piece of the rows of a stage, 16 bytes or one element.
  const int piece = call.x_wide ? kRun : 1, pieces = kShortK / piece;
  const int x_row = lane / pieces, x_at = lane % pieces * piece;
  Cursor ahead{TileWalk<kWhich>{ends, groups, static_cast<int32_t>(p.rows), call.tile_rows},
               call.share ? share_at : warp_number};
  int left_ahead = 0;
  bool copies = false;
  const T* x_ahead = nullptr;
  const auto open_ahead = [&] {
    Unit unit;
    left_ahead = 0;
    if (!next_unit(ahead, unit)) return;
    left_ahead = unit.rows;
    copies = unit.group < groups && x_at < inner;
    x_ahead = static_cast<const T*>(p.x) + (unit.first + x_row) * p.x_stride[0] + unit.b * p.x_stride[1] + x_at;
  };
  const auto fetch = [&](int slot) {
    if (left_ahead > 0) {
      if (x_row < kShortTogether) {
        T* to = &work.x[slot][x_row][x_at];
        if (call.x_wide)
          copy_sixteen(to, x_ahead, 1, copies && x_row < left_ahead, true);
        else
          cute::SM80_CP_ASYNC_CACHEALWAYS_ZFILL<T>::copy(*x_ahead, *to, copies && x_row < left_ahead);
      }
      x_ahead += kShortTogether * p.x_stride[0];
      left_ahead -= kShortTogether;
      if (left_ahead <= 0) open_ahead();
    }
    cute::cp_async_fence();
  };
  const auto fetch_w = [&](const Unit& unit) {
    const T* from =
        static_cast<const T*>(p.w) + unit.group * p.w_stride[0] + unit.b * p.w_stride[1] + unit.m * p.w_stride[3];
    const int count = unit.group < groups ? columns_left(unit) : 0;
#pragma unroll
    for (int k = 0; k < kShortK; ++k) {
      copy_sixteen(&work.w[k][lane * kRun], from, p.w_stride[3], k < inner ? count : 0, call.w_wide && !call.w_along_k);
      from += p.w_stride[2];
    }
  };

  Cursor cursor = ahead;
  Unit next;
  bool more = next_unit(cursor, next);
  if (more) fetch_w(next);
  open_ahead();
#pragma unroll
  for (int s = 0; s < kShortStages - 1; ++s) fetch(s);
  int slot = 0, fetches = kShortStages - 1;  // since w was asked for
  const bool same = p.out_dtype == p.dtype;
  while (more) {
    const int rows = next.rows, count = columns_left(next);
    int64_t to = next.first * p.out_stride[0] + next.b * p.out_stride[1] + next.m;
    if (fetches < kShortStages - 1)
      cute::cp_async_wait<0>();
    else
      cute::cp_async_wait<kShortStages - 2>();
    __syncwarp();
    T w[kShortK][kRun], bias[kRun];
#pragma unroll
    for (int k = 0; k < kShortK; ++k) load_sixteen<From::kShared>(w[k], &work.w[k][lane * kRun]);
    const bool biased = p.bias && next.group < groups;
    const T* bias_at = static_cast<const T*>(p.bias) + next.group * p.bias_stride[0] + next.b * p.bias_stride[1];
#pragma unroll
    for (int i = 0; i < kRun; ++i) bias[i] = biased && i < count ? bias_at[(next.m + i) * p.bias_stride[2]] : T(0);
    __syncwarp();
    more = next_unit(cursor, next);
    if (more) fetch_w(next);
    fetches = 0;

    for (int row = 0; row < rows; row += kShortTogether) {
      cute::cp_async_wait<kShortStages - 2>();
      __syncwarp();
      fetch(slot == 0 ? kShortStages - 1 : slot - 1);
      ++fetches;
      T sums[kShortTogether][kRun];
#pragma unroll
      for (int r = 0; r < kShortTogether; ++r)
#pragma unroll
        for (int i = 0; i < kRun; ++i) sums[r][i] = bias[i];
#pragma unroll
      for (int k = 0; k < kShortK; k += kRun) {
        T left[kShortTogether][kRun];
#pragma unroll
        for (int r = 0; r < kShortTogether; ++r) load_sixteen<From::kShared>(left[r], &work.x[slot][r][k]);
#pragma unroll
        for (int e = 0; e < kRun; ++e)
#pragma unroll
          for (int r = 0; r < kShortTogether; ++r)
#pragma unroll
            for (int i = 0; i < kRun; ++i) sums[r][i] += left[r][e] * w[k + e][i];
      }
#pragma unroll
      for (int r = 0; r < kShortTogether; ++r) {
        if (row + r < rows) store_either<T, kRun>(p.out, to, same, sums[r], count, call.out_wide);
        to += p.out_stride[0];
      }
      slot = slot + 1 == kShortStages ? 0 : slot + 1;
    }
  }
}

constexpr int kThinThreads = 128;

template <class T, int kK>
struct RowsThin {
  static constexpr int kBytes = kK * static_cast<int>(sizeof(T));          // of a row of x for one b
  static constexpr int kRun = 16 / static_cast<int>(sizeof(T));            // columns of one thread
  static constexpr int kUnroll = kBytes == 16 ? 8 : kBytes == 32 ? 4 : 2;  // rows in flight
  static constexpr int kBlocks = kK == 4 ? 6 : kBytes <= 64 ? 4 : 2;
  // Code for other architectures needs a few registers more.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ / 100 != 9
  static constexpr int kLeastBlocks = kBlocks > 2 ? kBlocks - 1 : kBlocks;
#else
  static constexpr int kLeastBlocks = kBlocks;
#endif
};

// K <= kK and few columns: lanes lie along B, and along columns in runs of kRun, so that a warp streams whole lines
// of rows; each thread keeps its part of its matrix in registers. A block has a range of rows, whatever their groups.
template <class T, int kK>
__global__ __launch_bounds__(kThinThreads,
                             RowsThin<T, kK>::kLeastBlocks) void rows_thin_sm80(const __grid_constant__ RowsCall call) {
  constexpr int kUnroll = RowsThin<T, kK>::kUnroll, kRun = RowsThin<T, kK>::kRun;
  MG_DYNAMIC_SHARED(shared);
  int32_t* room = ends_after(shared, 0);
  const mg_grouped_mm_problem& p = call.p;
  const int groups = static_cast<int>(p.groups.count), inner = static_cast<int>(p.inner);

  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int row_step = kThinThreads / 32 / call.column_warps, first = warp / call.column_warps;
  const uint32_t parts = static_cast<uint32_t>(call.column_tiles), each = static_cast<uint32_t>(call.tiles_each);
  const uint32_t range = blockIdx.x / each;
  const uint32_t along = ((blockIdx.x - range * each) * call.column_warps + warp % call.column_warps) * 32 + lane;
  const int64_t b = along / parts, m = along % parts * kRun;
  int64_t n0 = static_cast<int64_t>(range) * call.tile_rows;
  const int64_t range_end = n0 + call.tile_rows < p.rows ? n0 + call.tile_rows : p.rows;
  if (b < p.batch &&
      along % (128 / (RowsThin<T, kK>::kRun * sizeof(T))) == 0)  // under way while the groups are counted
    for (int64_t n = n0 + first; n < range_end; n += row_step) {
      const T* line = static_cast<const T*>(p.x) + n * p.x_stride[0] + b * p.x_stride[1];
#if defined(MG_GPU)
      asm volatile("prefetch.global.L2 [%0];" ::"l"(line));
#endif
    }
  const auto ends = group_ends(p.groups, p.rows, room);
  if (b >= p.batch) return;
  const int count = static_cast<int>(p.outer - m < kRun ? p.outer - m : kRun);
  int g = first_past(ends, groups, n0);
  for (int rows; n0 < range_end; n0 += rows, ++g) {  // the part of each group in the range
    const bool in_group = g < groups;
    const int64_t end = in_group && ends[g] < range_end ? ends[g] : range_end;
    rows = static_cast<int>(end - n0);
    if (rows <= 0) continue;

    T w[kK][kRun], bias[kRun];
    const T* from = static_cast<const T*>(p.w) + g * p.w_stride[0] + b * p.w_stride[1] + m * p.w_stride[3];
    if (in_group && call.w_wide && !call.w_along_k && count == kRun) {
#pragma unroll
      for (int k = 0; k < kK; ++k) load_sixteen<From::kRead>(w[k], from + k * p.w_stride[2], k < inner);
    } else {
#pragma unroll
      for (int k = 0; k < kK; ++k)
#pragma unroll
        for (int i = 0; i < kRun; ++i)
          w[k][i] = in_group && k < inner && i < count ? from[k * p.w_stride[2] + i * p.w_stride[3]] : T(0);
    }
#pragma unroll
    for (int i = 0; i < kRun; ++i)
      bias[i] =
          p.bias && in_group && i < count
              ? static_cast<const T*>(p.bias)[g * p.bias_stride[0] + b * p.bias_stride[1] + (m + i) * p.bias_stride[2]]
              : T(0);

    const bool same = p.out_dtype == p.dtype;
    const T* x = static_cast<const T*>(p.x) + (n0 + first) * p.x_stride[0] + b * p.x_stride[1];
    int64_t to = (n0 + first) * p.out_stride[0] + b * p.out_stride[1] + m;
    const int64_t x_step = row_step * p.x_stride[0], to_step = row_step * p.out_stride[0];
    for (int row = first; row < rows; row += kUnroll * row_step) {
      T left[kUnroll][kK];
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        const bool inside = in_group && row + u * row_step < rows;
        if (call.x_wide) {
#pragma unroll
          for (int k = 0; k < kK; k += kRun) load_sixteen<From::kStreamed>(left[u] + k, x + k, inside && k < inner);
        } else {
#pragma unroll
          for (int k = 0; k < kK; ++k) left[u][k] = inside && k < inner ? x[k] : T(0);
        }
        x += x_step;
      }
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        T sums[kRun] = {};
#pragma unroll
        for (int k = 0; k < kK; ++k)
#pragma unroll
          for (int i = 0; i < kRun; ++i) sums[i] += left[u][k] * w[k][i];
#pragma unroll
        for (int i = 0; i < kRun; ++i) sums[i] += bias[i];
        if (row + u * row_step < rows) store_either<T, kRun>(p.out, to, same, sums, count, call.out_wide);
        to += to_step;
      }
    }
  }
}

}  // namespace sm80
}  // namespace multigemm
