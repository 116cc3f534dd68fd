// Instances and launch of the Hopper kernel of an expert's first product with its activation.
#include "kernels/moe/up_sm90.h"

#include "kernels/grouped_mm/launch_sm90.h"
#include "kernels/grouped_mm/rows_sm90.h"
#include "kernels/moe/tokens_sm90.cuh"
#include "kernels/moe/up_sm90.cuh"

namespace multigemm {
namespace {

// With more rows a group, the tiles of half the width take longer than a pass of the activation does.
constexpr int64_t kMostRowsEach = 48;

// One of the two products: of the gates, or of the ups.
mg_grouped_mm_problem half_of(const mg_grouped_mm_problem& p, const mg_moe_activate_problem& activation, bool second) {
  mg_grouped_mm_problem half = p;
  half.outer = p.outer / 2;
  half.out = activation.out;
  half.out_dtype = activation.dtype;
  half.out_stride[0] = activation.width;
  half.out_stride[1] = activation.width;
  half.out_stride[2] = 1;
  const int64_t first = !second ? 0 : activation.interleaved ? 1 : half.outer;
  const auto moved = [&](const void* data, int64_t stride) {
    return data ? static_cast<const uint16_t*>(data) + first * stride : nullptr;
  };
  half.w = moved(p.w, p.w_stride[3]);
  half.bias = moved(p.bias, p.bias_stride[2]);
  if (activation.interleaved) {
    half.w_stride[3] *= 2;
    half.bias_stride[2] *= 2;
  }
  return half;
}

// All that x in expert order needs; false where a tensor map can't be made.
bool prepare_up(sm90::GatedArguments* a, sm90::Launch* how, const mg_grouped_mm_problem& p,
                const mg_moe_activate_problem& activation, const DeviceFacts& device) {
  const mg_grouped_mm_problem gates = half_of(p, activation, false), ups = half_of(p, activation, true);
  if (!prepare(a, how, gates, device, sm90::GatedArguments::kMatrices) || !sm90::encode_w(&a->second_map, ups))
    return false;
  a->second_bias = ups.bias;
  a->alpha = static_cast<float>(activation.alpha);
  a->limit = static_cast<float>(activation.limit);
  a->activation = activation.activation;
  return true;
}

}  // namespace

std::string up_sm90_refusal(const mg_grouped_mm_problem& p, const mg_moe_activate_problem& activation,
                            const DeviceFacts& device) {
  if (!activation.gated) return "takes activations with a gate only";
  if (activation.weights) return "weighs no rows";
  if (p.inner == 0) return "needs K";
  if (p.rows > kMostRowsEach * p.groups.count) return "groups have so many rows that the activation is faster apart";
  const std::string refusal = rows_sm90_refusal(half_of(p, activation, false), device);
  return refusal.empty() ? rows_sm90_refusal(half_of(p, activation, true), device) : refusal;
}

bool up_sm90_reads_tokens(const mg_grouped_mm_problem& p, const mg_moe_activate_problem& activation,
                          const DeviceFacts& device) {
  // Rows one by one take longer to copy than boxes of them, for each 128 columns again, but with so few rows as the
  // kernel takes, the matrices of w decide.
  return up_sm90_refusal(p, activation, device).empty();
}

int launch_up_sm90(const mg_grouped_mm_problem& p, const mg_moe_activate_problem& activation, bool of_tokens,
                   const DeviceFacts& device, void* stream) {
  if (tensor_map_encoder() == nullptr) return static_cast<int>(cudaErrorNotSupported);
  sm90::Launch how;
  if (!of_tokens) {
    sm90::GatedArguments a = {};
    if (!prepare_up(&a, &how, p, activation, device)) return static_cast<int>(cudaErrorInvalidValue);
    return launch(a, how, p.dtype, stream);
  }
  sm90::TokenArguments a = {};
  const int64_t sizes[2] = {p.inner, activation.tokens};
  const uint32_t box[2] = {64, 1};
  if (!prepare_up(&a, &how, p, activation, device) ||
      !sm90::encode(&a.token_map, p.dtype, p.x, 2, sizes, p.x_stride, box))
    return static_cast<int>(cudaErrorInvalidValue);
  a.permutation = activation.permutation;
  a.top_k = static_cast<int32_t>(activation.top_k);
  return launch(a, how, p.dtype, stream);
}

}  // namespace multigemm
