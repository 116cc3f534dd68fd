// Formula: out[n, i] = act(gate, up), gate = sum_k x[n, k] w[g(n), k, i] + bias[g(n), i], up the same with the second
//          matrix; act as in act.cuh, in fp32, with one rounding at the end.
// Layouts: x contiguous along K; w contiguous along K, or along its columns where these are all gates, then all ups;
//          16-byte pointers and other strides. out and bias any.
// Dtypes:  bfloat16, float16; out also float32.
// Architectures: sm_90a.
// Limits:  those of rows_sm90; a gated activation.
//
// The product is that of rows_sm90. A warpgroup multiplies 64 gates and the 64 ups that belong to them, so both sums of
// an element are in one thread.
#pragma once

#include "kernels/grouped_mm/rows_sm90.cuh"
#include "kernels/moe/act.cuh"

namespace multigemm {
namespace sm90 {

struct GatedArguments : RowsArguments {  // of the gates
  static constexpr int kMatrices = 2;
  CUtensorMap second_map;
  const void* second_bias;
  float alpha, limit;
  int32_t activation;
};

// gates = act(gates + biases, ups + biases), of the rows that belong to the group.
template <int kKind, int kSums>
MG_DEVICE void gate(const GatedArguments& a, const float* bias, int valid, float* gates, const float* ups) {
#pragma unroll
  for (int j = 0; j < kSums / 4; ++j) {
    if (j * 8 >= valid) break;
#pragma unroll
    for (int i = 4 * j; i < 4 * j + 4; ++i)
      gates[i] = moe::act<kKind, true>(a, gates[i] + bias[i % 4 / 2], ups[i] + bias[2 + i % 4 / 2]).value;
  }
}
template <int kSums>
MG_DEVICE void gate(const GatedArguments& a, const float* bias, int valid, float* gates, const float* ups) {
  switch (a.activation) {
    case MG_MOE_SILU: return gate<MG_MOE_SILU, kSums>(a, bias, valid, gates, ups);
    case MG_MOE_GELU: return gate<MG_MOE_GELU, kSums>(a, bias, valid, gates, ups);
    case MG_MOE_GELU_TANH: return gate<MG_MOE_GELU_TANH, kSums>(a, bias, valid, gates, ups);
    case MG_MOE_RELU: return gate<MG_MOE_RELU, kSums>(a, bias, valid, gates, ups);
    default: return gate<MG_MOE_CLAMPED, kSums>(a, bias, valid, gates, ups);
  }
}

template <class Half>
MG_DEVICE void finish(const GatedArguments& a, RowsShared& s, const Tile& tile, int consumer, const float* bias,
                      int rank, uint32_t& phase, float* sums) {
  constexpr int kSums = kMostSums / 2;
  constexpr float kNoBias[2] = {0.0f, 0.0f};
  if (a.split) {
    constexpr int kSplitSums = kMostSplitRows / 4;  // half the height: the gates' and the ups' are joined as one tile's
    float both[2 * kSplitSums], joined[2 * kSplitSums];
#pragma unroll
    for (int i = 0; i < kSplitSums; ++i) {
      both[i] = sums[i];
      both[kSplitSums + i] = sums[kSums + i];
    }
    if (!join_sums(a, s, consumer, kMostSplitRows, rank, phase, both, joined)) return;
    gate<kSplitSums>(a, bias, tile.valid, joined, joined + kSplitSums);
    store_tile<Half, kMostSplitRows>(a, s, tile, consumer, kNoBias, joined);
  } else {
    gate<kSums>(a, bias, tile.valid, sums, sums + kSums);
    store_tile<Half, kMostRows / 2>(a, s, tile, consumer, kNoBias, sums);
  }
}

}  // namespace sm90
}  // namespace multigemm
