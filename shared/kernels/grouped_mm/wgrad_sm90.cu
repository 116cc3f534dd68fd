// Instances and launch of wgrad_sm90.cuh.
#include "kernels/grouped_mm/wgrad_sm90.h"

#include "kernels/grouped_mm/tensor_map_sm90.h"
#include "kernels/grouped_mm/wgrad_sm90.cuh"

namespace multigemm {
namespace wgrad_sm90 {
namespace {

constexpr int64_t kMostExtent = (int64_t{1} << 31) - 1024;  // coordinates past the last tile are int32 too
constexpr int64_t kMostStrideBytes = int64_t{1} << 40;      // of a tensor map
constexpr int64_t kMostRun = 2, kLeastTurns = 12;           // tiles in a run, runs of a block
constexpr int64_t kBandColumns = 4096;                      // of gy that run together, so that they stay in L2

int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

bool is_16_bit(int32_t dtype) { return dtype == MG_BFLOAT16 || dtype == MG_FLOAT16; }

// A stride of 16-bit numbers that a tensor map can hold; of an extent of 1 it does not matter.
bool stride_fits(int64_t extent, int64_t stride) {
  return extent == 1 || (stride > 0 && stride % 8 == 0 && stride < kMostStrideBytes / 2);
}

bool pointer_fits(const void* data) { return reinterpret_cast<uintptr_t>(data) % 16 == 0; }

bool out_fits(const mg_grouped_mm_wgrad_problem& p) {
  return p.out_dtype == p.dtype && pointer_fits(p.out) && (p.outer == 1 || p.out_stride[3] == 1) &&
         stride_fits(p.inner, p.out_stride[2]) && stride_fits(p.groups.count, p.out_stride[0]);
}

std::string operand_refusal(const char* name, const void* data, int64_t rows, int64_t columns, const int64_t* stride) {
  const std::string start = std::string(name) + " has ";
  if (columns > 1 && stride[2] != 1) return start + "a column stride other than 1";
  if (rows > 1 && stride[0] == 0) return start + "expanded rows";
  if (!stride_fits(rows, stride[0])) return start + "rows that are not a multiple of 16 bytes apart";
  if (!pointer_fits(data)) return start + "data not aligned to 16 bytes";
  return "";
}

// A map with boxes of 64 columns x `box_rows` rows x `box_matrices`; `extent` from columns to matrices, `stride` of
// rows and matrices.
bool encode(CUtensorMap* map, int32_t dtype, const void* data, const int64_t (&extent)[3], const int64_t (&stride)[2],
            int box_rows, int box_matrices) {
  cuuint64_t extents[3], strides[2];
  for (int i = 0; i < 3; ++i) extents[i] = static_cast<cuuint64_t>(extent[i]);
  int64_t least = divide_up(extent[0], 8) * 8;
  for (int i = 0; i < 2; ++i) {
    const int64_t elements = extent[i + 1] == 1 ? least : stride[i];
    strides[i] = static_cast<cuuint64_t>(elements) * 2;
    least = elements * extent[i + 1];
  }
  const cuuint32_t box[3] = {kColumns, static_cast<cuuint32_t>(box_rows), static_cast<cuuint32_t>(box_matrices)};
  return encode_tensor_map(map, dtype, data, 3, extents, strides, box);
}

// x or gy: [panels, rows, 64] if its columns are whole panels, so that one box can hold several; else [1, rows,
// columns].
bool encode_operand(CUtensorMap* map, int32_t dtype, const void* data, int64_t rows, int64_t columns,
                    int64_t row_stride, int panels) {
  if (columns % kColumns) return encode(map, dtype, data, {columns, rows, 1}, {row_stride, 0}, kHalfRows, 1);
  return encode(map, dtype, data, {kColumns, rows, columns / kColumns}, {row_stride, kColumns}, kHalfRows, panels);
}

template <class T>
int launch(const Arguments& a, int blocks, cudaStream_t stream) {
  const cudaError_t error =
      cudaFuncSetAttribute(wgrad_sm90<T>, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(Shared));
  if (error != cudaSuccess) return static_cast<int>(error);
  wgrad_sm90<T><<<blocks, kThreads, sizeof(Shared), stream>>>(a);
  return static_cast<int>(cudaGetLastError());
}

}  // namespace
}  // namespace wgrad_sm90

std::string wgrad_sm90_refusal(const mg_grouped_mm_wgrad_problem& p, const DeviceFacts& device) {
  using namespace wgrad_sm90;
  if (device.major != 9 || device.minor != 0) return "needs compute capability 9.0";
  if (device.shared_bytes < static_cast<int>(sizeof(Shared)) || device.multiprocessors < 2)
    return "needs " + std::to_string(sizeof(Shared)) + " bytes of shared memory and two multiprocessors";
  if (!is_16_bit(p.dtype)) return "x and gy must be bfloat16 or float16";
  if (!is_16_bit(p.out_dtype) && p.out_dtype != MG_FLOAT32) return "out must be bfloat16, float16 or float32";
  if (p.batch != 1) return "B must be absent";
  if (p.groups.count > kMostCountedGroups) return "too many groups";
  if (p.rows >= kMostExtent || p.inner >= kMostExtent || p.outer >= kMostExtent)
    return "N, K or M of 2^31 - 1024 or more";
  const int64_t tiles = divide_up(p.inner, kTileK) * divide_up(p.outer, kTileM);
  if (tiles >= kMostExtent / 8 / p.groups.count) return "too many tiles";
  const std::string x = operand_refusal("x", p.x, p.rows, p.inner, p.x_stride);
  return x.empty() ? operand_refusal("gy", p.gy, p.rows, p.outer, p.gy_stride) : x;
}

int launch_wgrad_sm90(const mg_grouped_mm_wgrad_problem& p, const DeviceFacts& device, void* stream) {
  using namespace wgrad_sm90;
  if (!tensor_map_encoder()) return static_cast<int>(cudaErrorNotSupported);
  if (!groups_fit(p.groups)) return static_cast<int>(cudaErrorInvalidValue);
  Arguments a{};
  const int64_t k_tiles = divide_up(p.inner, kTileK), m_tiles = divide_up(p.outer, kTileM);
  a.pair_along_k = divide_up(k_tiles, 2) * m_tiles <= k_tiles * divide_up(m_tiles, 2);
  const int64_t k_units = a.pair_along_k ? divide_up(k_tiles, 2) : k_tiles;
  const int64_t m_units = a.pair_along_k ? m_tiles : divide_up(m_tiles, 2);
  const int64_t band = divide_up(m_units, divide_up(p.outer, kBandColumns)), last = (m_units - 1) / band;
  a.band_units = static_cast<int32_t>(band);
  a.last_band = static_cast<int32_t>(last);
  a.width = cutlass::FastDivmod(static_cast<int>(band));
  a.last_width = cutlass::FastDivmod(static_cast<int>(m_units - last * band));
  a.of_band = cutlass::FastDivmod(static_cast<int>(band * k_units));
  a.of_tall = cutlass::FastDivmod(static_cast<int>(k_units * m_units));
  a.m_units = static_cast<int32_t>(m_units);
  // Longer runs fetch less, but were slower: what they write lies further apart.
  const int64_t pairs = p.groups.count * k_units * m_units, most = device.multiprocessors / 2;
  const int64_t longest = pairs / (kLeastTurns * most) < kMostRun ? pairs / (kLeastTurns * most) : kMostRun;
  const int64_t runs = divide_up(m_units, longest > 1 ? longest : 1);
  a.run = static_cast<int32_t>(divide_up(m_units, runs));
  a.of_short = cutlass::FastDivmod(static_cast<int>(k_units * divide_up(m_units, a.run)));
  a.of_run = cutlass::FastDivmod(static_cast<int>(k_units));
  const int blocks = 2 * static_cast<int>(pairs < most ? pairs : most);
  a.out_by_tma = out_fits(p);
  a.x_by_panel = p.inner % kColumns != 0;
  a.gy_by_panel = p.outer % kColumns != 0;
  if (!encode_operand(&a.x, p.dtype, p.x, p.rows, p.inner, p.x_stride[0], kPanelsX) ||
      !encode_operand(&a.gy, p.dtype, p.gy, p.rows, p.outer, p.gy_stride[0], kPanelsGy) ||
      (a.out_by_tma && !encode(&a.out, p.dtype, p.out, {p.outer, p.inner, p.groups.count},
                               {p.out_stride[2], p.out_stride[0]}, kChunkRows, 1)))
    return static_cast<int>(cudaErrorInvalidValue);
  a.groups = p.groups;
  a.out_data = p.out;
  a.out_stride[0] = p.out_stride[0];
  a.out_stride[1] = p.out_stride[2];
  a.out_stride[2] = p.out_stride[3];
  a.out_dtype = p.out_dtype;
  a.rows = static_cast<int32_t>(p.rows);
  a.inner = static_cast<int32_t>(p.inner);
  a.outer = static_cast<int32_t>(p.outer);
  const cudaStream_t queue = static_cast<cudaStream_t>(stream);
  return p.dtype == MG_BFLOAT16 ? launch<cutlass::bfloat16_t>(a, blocks, queue)
                                : launch<cutlass::half_t>(a, blocks, queue);
}

}  // namespace multigemm
