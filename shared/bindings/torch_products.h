// From the tensors of a product to its problem, as every binding has it.
#pragma once

#include <optional>
#include <string>

#include "bindings/torch_services.h"
#include "launch/checks.h"
#include "multigemm/abi.h"

namespace multigemm {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

inline int32_t dtype_of(const char* name, const Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case ScalarType::Double: return MG_FLOAT64;
    case ScalarType::Float: return MG_FLOAT32;
    case ScalarType::Half: return MG_FLOAT16;
    case ScalarType::BFloat16: return MG_BFLOAT16;
    case ScalarType::Int: return MG_INT32;
    case ScalarType::Long: return MG_INT64;
    default: STD_TORCH_CHECK(false, "multigemm: ", name, " has a dtype that no kernel takes");
  }
  return 0;
}

inline int32_t implementation_of(const std::string& name) {
  if (name.empty()) return MG_AUTO;
  if (name == "native") return MG_NATIVE;
  if (name == "blas") return MG_BLAS;
  if (name == "torch") return MG_TORCH;
  if (name == "simt") return MG_SIMT;
  STD_TORCH_CHECK(false, "multigemm: implementation is \"", name,
                  "\"; this backend has \"native\", \"blas\", \"torch\", \"simt\" and \"\" for its own choice");
  return MG_AUTO;
}

inline int32_t precision_of(const std::string& name) {
  return name == "ieee" ? MG_PRECISION_IEEE : name == "tf32" ? MG_PRECISION_TF32 : MG_PRECISION_FRAMEWORK;
}

inline mg_groups groups_of(const Tensor& groups, bool offsets, const Tensor& beside) {
  const bool on_host = groups.is_cpu();
  STD_TORCH_CHECK(groups.dim() == 1 && (on_host || (beside.device() == groups.device())),
                  "multigemm: groups must be one-dimensional, on the operands' device or on the CPU");
  const int32_t flags = (offsets ? MG_GROUPS_OFFSETS : 0) | (on_host ? MG_GROUPS_ON_HOST : 0);
  return {groups.const_data_ptr(), groups.size(0), groups.stride(0), dtype_of("groups", groups), flags};
}

// Strides of a tensor whose B (dimension `at`) may be absent or, where `shared`, of size 1 for all of B.
template <size_t Count>
void strides_of(int64_t (&out)[Count], const Tensor& tensor, size_t at, bool shared = false) {
  const bool has_batch = tensor.dim() == static_cast<int64_t>(Count);
  for (size_t i = 0; i < Count; ++i) {
    const bool is_batch = i == at;
    const int64_t dim = static_cast<int64_t>(i) - (!has_batch && i > at ? 1 : 0);
    out[i] = is_batch && (!has_batch || (shared && tensor.size(dim) == 1)) ? 0 : tensor.stride(dim);
  }
}

// The texts are made for failures alone.
template <class Problem>
void expect(bool right, const char* name, const Problem& p) {
  STD_TORCH_CHECK(right, "multigemm: ", name, " has a shape or dtype that does not fit: ", describe(p));
}

// All but where the result goes.
inline mg_grouped_mm_problem product_of(const Services& services, const Tensor& x, const Tensor& w,
                                        const Tensor& groups, bool offsets, const std::optional<Tensor>& bias,
                                        const std::string& precision, const std::string& implementation) {
  mg_grouped_mm_problem p{};
  p.struct_size = sizeof(p);
  const bool has_batch = x.dim() == 3;
  STD_TORCH_CHECK((x.dim() == 2 || has_batch) && w.dim() == x.dim() + 1,
                  "multigemm: x [N, (B,) K] and w [G, (B,) K, M] do not have matching dimensions");
  p.rows = x.size(0);
  p.batch = has_batch ? x.size(1) : 1;
  p.inner = x.size(x.dim() - 1);
  p.outer = w.size(w.dim() - 1);
  p.groups = groups_of(groups, offsets, x);
  p.dtype = dtype_of("x", x);
  p.out_dtype = p.dtype;
  auto batch_fits = [&](const Tensor& t) { return !has_batch || t.size(1) == p.batch || t.size(1) == 1; };
  expect(w.size(0) == p.groups.count && w.size(w.dim() - 2) == p.inner && batch_fits(w) && dtype_of("w", w) == p.dtype,
         "w", p);
  p.x = x.const_data_ptr();
  strides_of(p.x_stride, x, 1);
  p.w = w.const_data_ptr();
  strides_of(p.w_stride, w, 1, true);
  if (bias) {
    expect(bias->dim() == w.dim() - 1 && bias->size(0) == p.groups.count && bias->size(bias->dim() - 1) == p.outer &&
               batch_fits(*bias) && dtype_of("bias", *bias) == p.dtype,
           "bias", p);
    p.bias = bias->const_data_ptr();
    strides_of(p.bias_stride, *bias, 1, true);
  }
  p.precision = precision_of(precision);
  p.implementation = implementation_of(implementation);
  p.host = services.host();
  p.device = services.device();
  p.stream = services.stream();
  return p;
}

}  // namespace multigemm
