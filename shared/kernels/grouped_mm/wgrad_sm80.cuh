// Formula: out[g, b, k, m] = sum over n in group g of x[n, b, k] gy[n, b, m]; over b too if sum_batch.
// Layouts: unit K stride of x, unit M stride of gy and of out; any other strides, any alignment.
// Dtypes:  float64, float32 (IEEE or TF32), float16, bfloat16; out the same or float32.
// Architectures: sm_80 and up.
// Limits:  G <= 2^24, N < 2^31 - 2^16; each part of out is summed by one block, or in pieces of its rows by several,
//          and then by one; always in one order.
#pragma once

#include "kernels/grouped_mm/row_pieces.cuh"
#include "kernels/grouped_mm/tile_sm80.cuh"

namespace multigemm {
namespace sm80 {

struct WgradCall {
  mg_grouped_mm_wgrad_problem p;
  int64_t tiles;       // of all groups
  int64_t tiles_each;  // of one group
  int32_t k_tiles, m_tiles;
  int32_t row_warps;               // how many warps share out the rows of the kernel for short matrices
  int32_t piece_rows;              // 0: no group is cut
  void* sums;                      // [pieces, B, K, M], of the pieces, as they are summed
  bool x_wide, gy_wide, out_wide;  // 16-byte accesses
};

struct GroupRows {
  int32_t begin, end;
};

MG_DEVICE GroupRows rows_of(const GroupEnds<kFewOrMany>& ends, int64_t g) { return {g > 0 ? ends[g - 1] : 0, ends[g]}; }

// The parts of a call, for all threads of a block; `room` as in group_ends, and once more as many numbers if groups are
// cut.
MG_DEVICE RowParts parts_of(const WgradCall& call, int32_t* room) {
  const mg_groups& groups = call.p.groups;
  const auto ends = group_ends(groups, call.p.rows, room);
  return row_parts(ends, call.piece_rows, room + 32 + groups.count, room);
}

// The launch after this one may start when all blocks of this one have.
MG_DEVICE void let_next_start() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

// Ends when the launch before this one is done and what it wrote can be read.
MG_DEVICE void wait_for_previous() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

template <class T, class Sum>
MG_DEVICE void store_one(void* out, int64_t at, bool same, Sum sum) {
  if (same)
    static_cast<T*>(out)[at] = narrow<T>(sum);
  else
    static_cast<float*>(out)[at] = narrow<float>(sum);
}

// Where the matrix of one part and b goes: out, or the sums of a piece.
struct Target {
  void* data;
  int64_t at, line;  // the first element, and from one k to the next
  bool same, wide;   // of the operands' dtype, else float32; runs of the kernel's length at once
};

template <class T, int kRun>
MG_DEVICE Target target_of(const WgradCall& call, const RowPart& part, int64_t b) {
  const mg_grouped_mm_wgrad_problem& p = call.p;
  if (part.whole())
    return {p.out, part.number() * p.out_stride[0] + b * p.out_stride[1], p.out_stride[2], p.out_dtype == p.dtype,
            call.out_wide};
  const int64_t matrix = part.number() * (p.sum_batch ? 1 : p.batch) + b;
  return {call.sums, matrix * p.inner * p.outer, p.outer, std::is_same<typename SumOf<T>::type, T>::value,
          p.outer % kRun == 0};
}

// Any K and M: tiles of x^T and gy through shared memory.
template <class Tile>
__global__ __launch_bounds__(Tile::kThreads,
                             least_blocks(Tile::kBlocks)) void wgrad_tile_sm80(const __grid_constant__ WgradCall call) {
  using T = typename Tile::T;
  using Warp = typename Tile::Warp;
  using Sum = typename Warp::Sum;
  using A = typename Tile::template OperandOf<Tile::kM, false>;
  using B = typename Tile::template OperandOf<Tile::kN, false>;
  static_assert(Tile::kWarpsD == 1);
  MG_DYNAMIC_SHARED(shared);
  T* work = reinterpret_cast<T*>(shared);
  int32_t* room = reinterpret_cast<int32_t*>(shared + sizeof(T) * Tile::kStages * (A::kSize + B::kSize));
  const mg_grouped_mm_wgrad_problem& p = call.p;
  const RowParts parts = parts_of(call, room);
  if (call.piece_rows > 0) let_next_start();

  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int warp_m = warp % Tile::kWarpsM * Tile::kWarpM, warp_n = warp / Tile::kWarpsM * Tile::kWarpN;
  for (int64_t t = blockIdx.x; t < parts.count() * call.tiles_each; t += gridDim.x) {
    const int32_t index = static_cast<int32_t>(t / call.tiles_each);
    const RowPart rows = parts[index];
    int64_t at = t - index * call.tiles_each;
    const int64_t m0 = at % call.m_tiles * Tile::kN;
    at /= call.m_tiles;
    const int64_t k0 = at % call.k_tiles * Tile::kM, out_b = at / call.k_tiles;
    Sum sums[Warp::kSums];
#pragma unroll
    for (int i = 0; i < Warp::kSums; ++i) sums[i] = 0;
    const int64_t last_b = p.sum_batch ? p.batch : out_b + 1;
    for (int64_t b = out_b; b < last_b; ++b) {
      const Source<T> left{static_cast<const T*>(p.x) + rows.begin * p.x_stride[0] + b * p.x_stride[1] + k0,
                           p.x_stride[0], p.inner - k0, call.x_wide};
      const Source<T> right{static_cast<const T*>(p.gy) + rows.begin * p.gy_stride[0] + b * p.gy_stride[1] + m0,
                            p.gy_stride[0], p.outer - m0, call.gy_wide};
      tile_product<Tile, A, B>(left, right, rows.end - rows.begin, work, sums);
    }
    const Target to = target_of<T, Warp::kRun>(call, rows, out_b);
    Warp::template each<A>(lane, sums, [&](int row, int column, const Sum* run) {
      const int64_t k = k0 + warp_m + row, m = m0 + warp_n + column;
      if (k >= p.inner || m >= p.outer) return;
      const int count = static_cast<int>(p.outer - m < Warp::kRun ? p.outer - m : Warp::kRun);
      store_either<T, Warp::kRun>(to.data, to.at + k * to.line + m, to.same, run, count, to.wide);
    });
  }
}

constexpr int kShortThreads = 128;
constexpr int kShortWidth = 16;
constexpr int kShortTogether = 2;  // rows at once

// Of one warp: a ring of rows, 512 bytes of the broad operand and all of the narrow one.
template <class T>
struct WgradShortWork {
  static constexpr int kRun = 16 / static_cast<int>(sizeof(T)), kStages = sizeof(T) == 4 ? 7 : 6;
  T broad[kStages][kShortTogether][32 * kRun];
  T narrow[kStages][kShortTogether][kShortWidth];
};

// K or M <= kShortWidth; kNarrowX: K is. A unit is 512 bytes of the broad operand's columns of one group and b: each
// thread keeps the sums of 16 bytes of columns with all of the narrow operand in registers, and rows stream past. One
// warp does a unit, or several share out its rows and add up in order; the rows ahead, also of the warp's next unit,
// are on their way meanwhile.
template <class T, bool kNarrowX>
__global__ __launch_bounds__(kShortThreads,
                             least_blocks(kNarrowX ? 4
                                                   : 3)) void wgrad_short_sm80(const __grid_constant__ WgradCall call) {
  constexpr int kRun = WgradShortWork<T>::kRun, kStages = WgradShortWork<T>::kStages, kWarps = kShortThreads / 32;
  constexpr int kPartial = kShortWidth * kRun * 32;
  MG_DYNAMIC_SHARED(shared);
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  WgradShortWork<T>& work = reinterpret_cast<WgradShortWork<T>*>(shared)[warp];
  T* partial = reinterpret_cast<T*>(shared + sizeof(WgradShortWork<T>) * kWarps);  // sums of two warps
  int32_t* room = reinterpret_cast<int32_t*>(partial + 2 * kPartial);
  const mg_grouped_mm_wgrad_problem& p = call.p;
  const auto ends = group_ends(p.groups, p.rows, room);

  const int row_warps = call.row_warps, units_together = kWarps / row_warps;
  const int first = warp / units_together;  // of the rows
  const int tiles = kNarrowX ? call.m_tiles : call.k_tiles;
  const int64_t columns = kNarrowX ? p.outer : p.inner;
  const int width = static_cast<int>(kNarrowX ? p.inner : p.outer);
  const int64_t narrow_step = kNarrowX ? p.x_stride[0] : p.gy_stride[0];
  const int64_t broad_step = kNarrowX ? p.gy_stride[0] : p.x_stride[0];
  const bool narrow_wide = kNarrowX ? call.x_wide : call.gy_wide, broad_wide = kNarrowX ? call.gy_wide : call.x_wide;

  struct Unit {
    int group, b, count, rows, begin;
    int64_t column;
  };
  const uint32_t each = static_cast<uint32_t>(call.tiles_each), total = static_cast<uint32_t>(call.tiles);
  const uint32_t step = gridDim.x * units_together;
  const auto open = [&](uint32_t t) {
    Unit unit;
    unit.group = static_cast<int>(t / each);
    const uint32_t at = t - unit.group * each;
    unit.b = static_cast<int>(at / static_cast<uint32_t>(tiles));
    unit.column = static_cast<int64_t>(at - unit.b * tiles) * (32 * kRun) + lane * kRun;
    unit.count = static_cast<int>(columns - unit.column < kRun ? columns - unit.column : kRun);
    const GroupRows rows = rows_of(ends, unit.group);
    unit.begin = rows.begin + first;
    const int left = rows.end - unit.begin;
    unit.rows = left > 0 ? (left + row_warps - 1) / row_warps : 0;
    return unit;
  };

  // The rows ahead: each lane copies 16 bytes of broad rows and one piece of the narrow ones, 16 bytes or one element.
  const int piece = narrow_wide ? kRun : 1, pieces = kShortWidth / piece;
  const int narrow_row = lane / pieces, narrow_at = lane % pieces * piece;
  uint32_t t_ahead = blockIdx.x * units_together + warp % units_together;
  int left_ahead = 0, count_ahead = 0;
  const T* broad_ahead = nullptr;
  const T* narrow_ahead = nullptr;
  const auto open_ahead = [&] {
    for (left_ahead = 0; left_ahead == 0 && t_ahead < total; t_ahead += step) {
      const Unit unit = open(t_ahead);
      left_ahead = unit.rows;
      count_ahead = unit.count;
      const int64_t n = unit.begin;
      const T* x = static_cast<const T*>(p.x) + n * p.x_stride[0] + unit.b * p.x_stride[1];
      const T* gy = static_cast<const T*>(p.gy) + n * p.gy_stride[0] + unit.b * p.gy_stride[1];
      broad_ahead = (kNarrowX ? gy : x) + unit.column;
      narrow_ahead = (kNarrowX ? x : gy) + narrow_row * row_warps * narrow_step + narrow_at;
    }
  };
  const auto fetch = [&](int slot) {
    if (left_ahead > 0) {
#pragma unroll
      for (int r = 0; r < kShortTogether; ++r) {
        copy_sixteen(&work.broad[slot][r][lane * kRun], broad_ahead, 1, r < left_ahead ? count_ahead : 0, broad_wide);
        broad_ahead += row_warps * broad_step;
      }
      if (narrow_row < kShortTogether) {
        T* to = &work.narrow[slot][narrow_row][narrow_at];
        const bool there = narrow_row < left_ahead && narrow_at < width;
        if (narrow_wide)
          copy_sixteen(to, narrow_ahead, 1, there, true);
        else
          cute::SM80_CP_ASYNC_CACHEALWAYS_ZFILL<T>::copy(*narrow_ahead, *to, there);
      }
      narrow_ahead += kShortTogether * row_warps * narrow_step;
      left_ahead -= kShortTogether;
      if (left_ahead <= 0) open_ahead();
    }
    cute::cp_async_fence();
  };

  uint32_t t = t_ahead;
  open_ahead();
#pragma unroll
  for (int s = 0; s < kStages - 1; ++s) fetch(s);
  int slot = 0;
  const bool same = p.out_dtype == p.dtype;
  for (uint32_t t0 = blockIdx.x * units_together; t0 < total; t0 += step, t += step) {
    const int rows = t < total ? open(t).rows : 0;
    T sums[kShortWidth][kRun];
#pragma unroll
    for (int i = 0; i < kShortWidth; ++i)
#pragma unroll
      for (int j = 0; j < kRun; ++j) sums[i][j] = 0;
    for (int row = 0; row < rows; row += kShortTogether) {
      cute::cp_async_wait<kStages - 2>();
      __syncwarp();
      fetch(slot == 0 ? kStages - 1 : slot - 1);
#pragma unroll
      for (int r = 0; r < kShortTogether; ++r) {
        T right[kRun];
        load_sixteen<From::kShared>(right, &work.broad[slot][r][lane * kRun]);
#pragma unroll
        for (int i = 0; i < kShortWidth; i += kRun) {
          T values[kRun];
          load_sixteen<From::kShared>(values, &work.narrow[slot][r][i]);
#pragma unroll
          for (int e = 0; e < kRun; ++e)
#pragma unroll
            for (int j = 0; j < kRun; ++j) sums[i + e][j] += values[e] * right[j];
        }
      }
      slot = slot + 1 == kStages ? 0 : slot + 1;
    }
    for (int half = row_warps / 2; half > 0; half /= 2) {
      T* shelf = partial + (warp % (half * units_together)) * kPartial + lane;
      if (first >= half && first < 2 * half)
#pragma unroll
        for (int i = 0; i < kShortWidth; ++i)
#pragma unroll
          for (int j = 0; j < kRun; ++j) shelf[(i * kRun + j) * 32] = sums[i][j];
      __syncthreads();
      if (first < half)
#pragma unroll
        for (int i = 0; i < kShortWidth; ++i)
#pragma unroll
          for (int j = 0; j < kRun; ++j) sums[i][j] += shelf[(i * kRun + j) * 32];
      __syncthreads();
    }
    if (first == 0 && t < total) {
      const Unit unit = open(t);
      const int64_t c = unit.column, to = unit.group * p.out_stride[0] + unit.b * p.out_stride[1];
      if constexpr (kNarrowX) {
        if (unit.count > 0)
#pragma unroll
          for (int i = 0; i < kShortWidth; ++i)
            if (i < width)
              store_either<T, kRun>(p.out, to + i * p.out_stride[2] + c, same, sums[i], unit.count, call.out_wide);
      } else if (width == kShortWidth && same && call.out_wide) {
        // A thread's columns are lines of out: turned in shared memory, so that a warp writes whole sectors.
        constexpr int kHalf = kShortWidth / 2, kPieces = kHalf / kRun;
        using V = typename Sixteen<T>::type;
        V* turned = reinterpret_cast<V*>(partial + warp * (kPartial / 2));
        T* line = static_cast<T*>(p.out) + to;
#pragma unroll
        for (int h = 0; h < kShortWidth; h += kHalf) {
#pragma unroll
          for (int j = 0; j < kRun; ++j)
#pragma unroll
            for (int i = 0; i < kPieces; ++i) {
              T run[kRun];
#pragma unroll
              for (int e = 0; e < kRun; ++e) run[e] = sums[h + i * kRun + e][j];
              turned[lane * 8 + ((j * kPieces + i) ^ lane % 8)] = Sixteen<T>::gather(run);
            }
          __syncwarp();
#pragma unroll
          for (int i = 0; i < 8; ++i) {
            const int owner = i * 4 + lane / 8, at = lane % 8;
            const int64_t column = c + (owner - lane) * kRun + at / kPieces;
            if (column < columns)
              __stcs(reinterpret_cast<V*>(line + column * p.out_stride[2] + h + at % kPieces * kRun),
                     turned[owner * 8 + (at ^ owner % 8)]);
          }
          __syncwarp();
        }
      } else {
        int64_t line = to + c * p.out_stride[2];
#pragma unroll
        for (int j = 0; j < kRun; ++j) {
          if (j >= unit.count) break;
#pragma unroll
          for (int i = 0; i < kShortWidth; i += kRun) {
            T run[kRun];
#pragma unroll
            for (int e = 0; e < kRun; ++e) run[e] = sums[i + e][j];
            store_either<T, kRun>(p.out, line + i, same, run, width - i, call.out_wide);
          }
          line += p.out_stride[2];
        }
      }
    }
    if (!kNarrowX && row_warps > 1) __syncthreads();  // before others shelve sums where columns were turned
  }
}

constexpr int kThinThreads = 256;
constexpr int kThinSide = 4;  // each thread sums a block of this many K by this many M

// Few K and M: lanes lie along B, and along the blocks of each matrix, so that a warp streams whole lines of rows; the
// rows of a group are shared out over the block's warps, whose sums are added in order.
template <class T>
__global__ __launch_bounds__(kThinThreads, least_blocks(sizeof(T) == 4 ? 3 : 1)) void wgrad_thin_sm80(
    const __grid_constant__ WgradCall call) {
  constexpr int kChunk = 16 / static_cast<int>(sizeof(T)), kUnroll = 4, kWarps = kThinThreads / 32;
  constexpr int kSums = kThinSide * kThinSide;
  MG_SHARED T partial[kWarps][kSums][33];
  MG_DYNAMIC_SHARED(shared);
  int32_t* room = reinterpret_cast<int32_t*>(shared);
  const mg_grouped_mm_wgrad_problem& p = call.p;
  const RowParts parts = parts_of(call, room);
  if (call.piece_rows > 0) let_next_start();

  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int blocks = call.k_tiles * call.m_tiles;  // of one matrix
  for (int64_t t = blockIdx.x; t < parts.count() * call.tiles_each; t += gridDim.x) {
    const int32_t index = static_cast<int32_t>(t / call.tiles_each);
    const int64_t first = (t - index * call.tiles_each) * 32;
    const RowPart rows = parts[index];
    const int64_t along = first + lane, b = along / blocks;
    const int part = static_cast<int>(along % blocks);
    const int64_t k0 = part / call.m_tiles * kThinSide, m0 = part % call.m_tiles * kThinSide;
    const int height = static_cast<int>(p.inner - k0 < kThinSide ? p.inner - k0 : kThinSide);
    const int width = static_cast<int>(p.outer - m0 < kThinSide ? p.outer - m0 : kThinSide);
    T sums[kThinSide][kThinSide];
#pragma unroll
    for (int i = 0; i < kThinSide; ++i)
#pragma unroll
      for (int j = 0; j < kThinSide; ++j) sums[i][j] = 0;
    if (b < p.batch) {
      const int64_t start = rows.begin + warp;
      const T* x = static_cast<const T*>(p.x) + start * p.x_stride[0] + b * p.x_stride[1] + k0;
      const T* gy = static_cast<const T*>(p.gy) + start * p.gy_stride[0] + b * p.gy_stride[1] + m0;
      for (int n = rows.begin + warp; n < rows.end; n += kUnroll * kWarps) {
        T left[kUnroll][kThinSide], right[kUnroll][kThinSide];
        const auto load = [&](T* to, const T* line, bool inside, bool wide, int length) {
          if (wide) {
#pragma unroll
            for (int i = 0; i < kThinSide; i += kChunk)
              load_sixteen<From::kStreamed>(to + i, line + i, inside && i < length);
          } else {
#pragma unroll
            for (int i = 0; i < kThinSide; ++i) to[i] = inside && i < length ? line[i] : T(0);
          }
        };
#pragma unroll
        for (int u = 0; u < kUnroll; ++u) {
          const bool inside = n + u * kWarps < rows.end;
          load(left[u], x + u * kWarps * p.x_stride[0], inside, call.x_wide, height);
          load(right[u], gy + u * kWarps * p.gy_stride[0], inside, call.gy_wide, width);
        }
#pragma unroll
        for (int u = 0; u < kUnroll; ++u)
#pragma unroll
          for (int i = 0; i < kThinSide; ++i)
#pragma unroll
            for (int j = 0; j < kThinSide; ++j) sums[i][j] += left[u][i] * right[u][j];
        x += kUnroll * kWarps * p.x_stride[0];
        gy += kUnroll * kWarps * p.gy_stride[0];
      }
    }
#pragma unroll
    for (int i = 0; i < kThinSide; ++i)
#pragma unroll
      for (int j = 0; j < kThinSide; ++j) partial[warp][i * kThinSide + j][lane] = sums[i][j];
    __syncthreads();
    for (int i = static_cast<int>(threadIdx.x); i < 32 * kSums; i += kThinThreads) {
      const int at = i / kSums, of = i % kSums;
      const int64_t owner = first + at, out_b = owner / blocks;
      const int its = static_cast<int>(owner % blocks);
      const int64_t k = its / call.m_tiles * kThinSide + of / kThinSide;
      const int64_t m = its % call.m_tiles * kThinSide + of % kThinSide;
      if (out_b >= p.batch || k >= p.inner || m >= p.outer) continue;
      T sum = partial[0][of][at];
#pragma unroll
      for (int other = 1; other < kWarps; ++other) sum += partial[other][of][at];
      const Target to = target_of<T, 1>(call, rows, out_b);
      store_one<T>(to.data, to.at + k * to.line + m, to.same, sum);
    }
    __syncthreads();
  }
}

constexpr int kJoinThreads = 256;

// Adds up the pieces of each group that is cut, in their order; a thread for each element of its matrices.
template <class T>
__global__ __launch_bounds__(kJoinThreads) void wgrad_join_sm80(const __grid_constant__ WgradCall call) {
  using Sum = typename SumOf<T>::type;
  constexpr int kTogether = 8;  // loads on their way
  MG_DYNAMIC_SHARED(shared);
  const mg_grouped_mm_wgrad_problem& p = call.p;
  const RowParts parts = parts_of(call, reinterpret_cast<int32_t*>(shared));
  wait_for_previous();
  const int64_t elements = (p.sum_batch ? 1 : p.batch) * p.inner * p.outer;
  const int64_t blocks_each = (elements + kJoinThreads - 1) / kJoinThreads, blocks = parts.groups_cut() * blocks_each;
  for (int64_t t = blockIdx.x; t < blocks; t += gridDim.x) {
    const int32_t index = static_cast<int32_t>(t / blocks_each);
    const int64_t element = (t - index * blocks_each) * kJoinThreads + threadIdx.x;
    if (element >= elements) continue;
    const int32_t g = parts.cut_group(index), begin = parts.begin_of(g);
    const int32_t pieces = pieces_of(begin, parts.ends[g], parts.height);
    const Sum* from = static_cast<const Sum*>(call.sums) + multiples_before(begin, parts.height) * elements + element;
    Sum sum = 0;
    for (int32_t i = 0; i < pieces; i += kTogether, from += kTogether * elements) {
      Sum values[kTogether];
#pragma unroll
      for (int j = 0; j < kTogether; ++j) values[j] = i + j < pieces ? __ldcs(from + j * elements) : Sum(0);
#pragma unroll
      for (int j = 0; j < kTogether; ++j) sum += values[j];
    }
    const int64_t line = element / p.outer, m = element - line * p.outer, b = line / p.inner, k = line - b * p.inner;
    store_one<T>(p.out, g * p.out_stride[0] + b * p.out_stride[1] + k * p.out_stride[2] + m, p.out_dtype == p.dtype,
                 sum);
  }
}

}  // namespace sm80
}  // namespace multigemm
