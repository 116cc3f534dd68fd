// Formula: sums += A B for a tile of rows and columns over a depth, by a block of four wavefronts; and the way from the
// sums to memory.
// Layouts: an operand's lines have a unit stride, along the depth or across it; any alignment.
// Dtypes:  those of instruction_mfma.cuh; sums in float32 or float64.
// Architectures: gfx90a and gfx942, whose wavefronts have 64 lanes; the host, with the instruction emulated.
// Limits:  kThreads threads. Depth and row tails are zeros in shared memory, whatever lies there.
#pragma once

#include "kernels/grouped_mm/groups_block.cuh"
#include "kernels/grouped_mm/instruction_mfma.cuh"

namespace multigemm {
namespace mfma {

// --- dtypes ---------------------------------------------------------------------------------------------------------
// Bits are moved as words: two 16-bit elements, one of 32, or half a float64.

MG_DEVICE uint16_t narrow_to(Bfloat16, float value) {
  const uint32_t bits = simt::float_to_bits(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>(bits >> 16 | 0x40);
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
MG_DEVICE uint16_t narrow_to(Float16, float value) {
#if defined(__HIP__)
  return bits_of<uint16_t>(static_cast<_Float16>(value));
#else
  return simt::narrow_16(static_cast<double>(value), 5, 10);
#endif
}

// A 16 x 16 piece of the tile whose columns are neighbours in memory. Of the instruction's sums a lane has those of
// one column in four rows, so 16-bit and 32-bit operands change places: it then has four neighbours of one row.
template <class Kind_, class Sums_, int kBytes_, int32_t kDtype_>
struct Narrow {
  using Kind = Kind_;
  using Sums = Sums_;
  using Sum = float;
  static constexpr int kBytes = kBytes_, kRun = 4;
  static constexpr int32_t kDtype = kDtype_;
  MG_DEVICE static void piece(const uint32_t* rows, const uint32_t* columns, Sums& sums) {
    multiply(Kind(), columns, rows, sums);
  }
  MG_DEVICE static int row(int lane, int) { return lane % 16; }
  MG_DEVICE static int column(int lane) { return lane / 16 * 4; }
};

struct Double {
  using Kind = Float64;
  using Sums = DoubleSums;
  using Sum = double;
  static constexpr int kBytes = 8, kRun = 1;
  static constexpr int32_t kDtype = MG_FLOAT64;
  MG_DEVICE static void piece(const uint32_t* rows, const uint32_t* columns, Sums& sums) {
    multiply(Kind(), rows, columns, sums);
  }
  MG_DEVICE static int row(int lane, int r) { return Float64::row(lane, r); }
  MG_DEVICE static int column(int lane) { return lane % 16; }
};

using Brain = Narrow<Bfloat16, FloatSums, 2, MG_BFLOAT16>;
using Half = Narrow<Float16, FloatSums, 2, MG_FLOAT16>;
using Single = Narrow<Float32, FloatSums, 4, MG_FLOAT32>;
using SingleTf32 = Narrow<Tf32, FloatSums, 4, MG_FLOAT32>;

// --- operands -------------------------------------------------------------------------------------------------------

// One operand of a tile: its first element there, bytes from line to line, what is left of its width.
struct Source {
  const char* data;
  int64_t line_bytes;
  int64_t width;
  bool wide;  // lines begin at, and are, whole 16 bytes
};

constexpr int kPacks = 4;  // of 16 bytes along the depth, one for each 16 lanes of a wavefront

// Of the threads of a block, each brings in `kShare` packs. kAlong: lines lie along the depth.
template <int kBytes, int kWidth_, bool kAlong_>
struct Operand {
  static constexpr bool kAlong = kAlong_;
  static constexpr int kWidth = kWidth_, kPack = 16 / kBytes, kDepth = kPacks * kPack;
  static constexpr int kShare = kWidth * kPacks / kThreads;
  // Eight lanes that write neighbouring packs of a line, or neighbouring lines, meet in no bank of shared memory.
  static constexpr int kPitch = kWidth + 2, kSize = kPacks * kPitch;
  static_assert(kShare == 1 || kShare == 2);

  uint32_t words[kShare][4];  // on their way: along, packs; across, for each element of the depth `kShare` neighbours

  MG_DEVICE static int line_of(int i) { return static_cast<int>(threadIdx.x) / kPacks + i * (kThreads / kPacks); }

  MG_DEVICE static uint32_t element(const char* at) {
    if constexpr (kBytes == 2)
      return *reinterpret_cast<const uint16_t*>(at);
    else
      return *reinterpret_cast<const uint32_t*>(at);
  }

  // Starts to bring in the tile from `depth` on; `left` of it are there.
  MG_DEVICE void load(const Source& from, int64_t depth, int64_t left) {
    if constexpr (kAlong)
      load_along(from, depth, left);
    else
      load_across(from, depth, left);
  }

  MG_DEVICE void load_along(const Source& from, int64_t depth, int64_t left) {
    const int at = static_cast<int>(threadIdx.x) % kPacks * kPack;
    const int64_t there = left - at;
    const char* const start = from.data + (depth + at) * kBytes;
    MG_UNROLL
    for (int i = 0; i < kShare; ++i) {
      MG_UNROLL
      for (int w = 0; w < 4; ++w) words[i][w] = 0;
      if (line_of(i) >= from.width || there <= 0) continue;
      const char* const line = start + line_of(i) * from.line_bytes;
      if (from.wide) {
        memcpy(words[i], __builtin_assume_aligned(line, 16), 16);
      } else if constexpr (kBytes == 8) {
        MG_UNROLL
        for (int e = 0; e < 2; ++e)
          if (e < there) memcpy(words[i] + 2 * e, __builtin_assume_aligned(line + 8 * e, 8), 8);
      } else {
        MG_UNROLL
        for (int e = 0; e < kPack; ++e)
          if (e < there) words[i][e * kBytes / 4] |= element(line + e * kBytes) << (e * kBytes % 4 * 8);
      }
    }
  }

  // This thread's columns, and its pack of the depth; columns are neighbours of the next thread's.
  MG_DEVICE static int column_of() { return static_cast<int>(threadIdx.x) % (kThreads / kPacks) * kShare; }
  MG_DEVICE static int pack_of() { return static_cast<int>(threadIdx.x) / (kThreads / kPacks); }

  MG_DEVICE void load_across(const Source& from, int64_t depth, int64_t left) {
    constexpr int kRun = kShare * kBytes;  // bytes of a line
    const int64_t there = from.width - column_of();
    const int64_t lines = left - pack_of() * kPack;
    const char* line = from.data + (depth + pack_of() * kPack) * from.line_bytes + column_of() * kBytes;
    uint32_t* const flat = &words[0][0];
    MG_UNROLL
    for (int w = 0; w < kShare * 4; ++w) flat[w] = 0;
    MG_UNROLL
    for (int d = 0; d < kPack; ++d, line += from.line_bytes) {
      if (d >= lines || there <= 0) continue;
      if constexpr (kRun == 2) {
        flat[d / 2] |= element(line) << (d % 2 * 16);
      } else if (from.wide) {
        memcpy(flat + d * (kRun / 4), __builtin_assume_aligned(line, kRun), kRun);
      } else if constexpr (kBytes == 8) {
        MG_UNROLL
        for (int e = 0; e < kShare; ++e)
          if (e < there) memcpy(flat + 2 * (d * kShare + e), __builtin_assume_aligned(line + 8 * e, 8), 8);
      } else {
        MG_UNROLL
        for (int e = 0; e < kShare; ++e)
          if (e < there) flat[(d * kRun + e * kBytes) / 4] |= element(line + e * kBytes) << (e * kBytes % 4 * 8);
      }
    }
  }

  // Puts what came into the tile: [pack of the depth][width].
  MG_DEVICE void store(Pack* tile) const {
    if constexpr (kAlong) {
      Pack* const to = tile + static_cast<int>(threadIdx.x) % kPacks * kPitch;
      MG_UNROLL
      for (int i = 0; i < kShare; ++i) to[line_of(i)] = {{words[i][0], words[i][1], words[i][2], words[i][3]}};
    } else {
      Pack* const to = tile + pack_of() * kPitch + column_of();
      const uint32_t* const flat = &words[0][0];
      MG_UNROLL
      for (int e = 0; e < kShare; ++e) {
        Pack pack;
        MG_UNROLL
        for (int w = 0; w < 4; ++w) {
          if constexpr (kBytes == 2 && kShare == 2)  // neighbours of two lines become two lines of neighbours
            pack.words[w] = e == 0 ? (flat[2 * w] & 0xffffu) | flat[2 * w + 1] << 16
                                   : flat[2 * w] >> 16 | (flat[2 * w + 1] & 0xffff0000u);
          else if constexpr (kBytes == 8)
            pack.words[w] = flat[(w / 2 * kShare + e) * 2 + w % 2];
          else
            pack.words[w] = flat[w * kShare + e];
        }
        to[e] = pack;
      }
    }
  }
};

// --- the product ----------------------------------------------------------------------------------------------------

// Four wavefronts as 2 x 2 cover kSide x kSide numbers.
template <class Type_, int kSide_>
struct Tile {
  using Type = Type_;
  static constexpr int kSide = kSide_, kWaveSide = kSide / 2, kPieces = kWaveSide / 16;
  template <bool kAlong>
  using OperandOf = Operand<Type::kBytes, kSide, kAlong>;
  static constexpr int kShared = OperandOf<true>::kSize;  // packs of one operand's tile

  typename Type::Sums sums[kPieces][kPieces];

  MG_DEVICE void clear() {
    MG_UNROLL
    for (int i = 0; i < kPieces; ++i) MG_UNROLL
    for (int j = 0; j < kPieces; ++j) MG_UNROLL
    for (int r = 0; r < 4; ++r) sums[i][j][r] = 0;
  }

  // First row and column of this thread's wavefront.
  MG_DEVICE static int wave_row() { return static_cast<int>(threadIdx.x) / kWave % 2 * kWaveSide; }
  MG_DEVICE static int wave_column() { return static_cast<int>(threadIdx.x) / kWave / 2 * kWaveSide; }

  // One step of the depth, from shared memory. All sums of a number come in the order of the depth, in every tile.
  MG_DEVICE void step(const Pack* rows, const Pack* columns) {
    constexpr int kWords = Type::Kind::kEach * Type::kBytes / 4;  // that one instruction takes of a pack
    const int lane = static_cast<int>(threadIdx.x) % kWave;
    const int at = lane / 16 * OperandOf<true>::kPitch + lane % 16;
    Pack right[kPieces];
    MG_UNROLL
    for (int j = 0; j < kPieces; ++j) right[j] = columns[at + wave_column() + 16 * j];
    MG_UNROLL
    for (int i = 0; i < kPieces; ++i) {
      const Pack left = rows[at + wave_row() + 16 * i];
      MG_UNROLL
      for (int w = 0; w < 4; w += kWords) MG_UNROLL
      for (int j = 0; j < kPieces; ++j) Type::piece(left.words + w, right[j].words + w, sums[i][j]);
    }
  }

  // sums += rows columns over `depth`. Ends with all reads of shared memory still to be waited for.
  template <bool kRowsAlong, bool kColumnsAlong>
  MG_DEVICE void multiply(const Source& row_source, const Source& column_source, int64_t depth, Pack* row_tile,
                          Pack* column_tile) {
    OperandOf<kRowsAlong> rows;
    OperandOf<kColumnsAlong> columns;
    constexpr int kDepth = OperandOf<true>::kDepth;
    if (depth <= 0) return;
    rows.load(row_source, 0, depth);
    columns.load(column_source, 0, depth);
    const bool active = wave_row() < row_source.width && wave_column() < column_source.width;
    for (int64_t d = 0; d < depth; d += kDepth) {
      __syncthreads();
      rows.store(row_tile);
      columns.store(column_tile);
      __syncthreads();
      if (d + kDepth < depth) {
        rows.load(row_source, d + kDepth, depth - d - kDepth);
        columns.load(column_source, d + kDepth, depth - d - kDepth);
      }
      if (active) step(row_tile, column_tile);
    }
  }

  // Calls visit(row, column, first of kRun neighbouring sums).
  template <class Visit>
  MG_DEVICE void each(Visit visit) const {
    const int lane = static_cast<int>(threadIdx.x) % kWave;
    MG_UNROLL
    for (int i = 0; i < kPieces; ++i) MG_UNROLL
    for (int j = 0; j < kPieces; ++j) MG_UNROLL
    for (int r = 0; r < 4; r += Type::kRun) {
      typename Type::Sum run[Type::kRun];
      MG_UNROLL
      for (int e = 0; e < Type::kRun; ++e) run[e] = sums[i][j][r + e];
      visit(wave_row() + 16 * i + Type::row(lane, r), wave_column() + 16 * j + Type::column(lane), run);
    }
  }
};

// The first `count` of a run of sums, rounded once, to out[at ...]; `same`: in the operands' dtype, else float32.
// `wide`: runs begin at whole multiples of their size.
template <class Type>
MG_DEVICE void store_run(void* out, int64_t at, bool same, const typename Type::Sum* values, int count, bool wide) {
  constexpr int kRun = Type::kRun;
  if constexpr (Type::kBytes == 2) {
    if (same) {
      uint16_t* const to = static_cast<uint16_t*>(out) + at;
      uint16_t narrowed[kRun];
      MG_UNROLL
      for (int e = 0; e < kRun; ++e) narrowed[e] = narrow_to(typename Type::Kind(), values[e]);
      if (wide && count >= kRun) {
        memcpy(__builtin_assume_aligned(to, 2 * kRun), narrowed, 2 * kRun);
        return;
      }
      MG_UNROLL
      for (int e = 0; e < kRun; ++e)
        if (e < count) to[e] = narrowed[e];
      return;
    }
  }
  if constexpr (Type::kBytes == 8) {
    if (same)
      static_cast<double*>(out)[at] = values[0];
    else
      static_cast<float*>(out)[at] = static_cast<float>(values[0]);
  } else {
    float* const to = static_cast<float*>(out) + at;
    if (wide && count >= kRun) {
      memcpy(__builtin_assume_aligned(to, 4 * kRun), values, 4 * kRun);
      return;
    }
    MG_UNROLL
    for (int e = 0; e < kRun; ++e)
      if (e < count) to[e] = values[e];
  }
}

}  // namespace mfma
}  // namespace multigemm
