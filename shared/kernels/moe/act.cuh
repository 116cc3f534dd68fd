// The activations of abi_moe.h and their slopes, for a thread. Coarse: with the fast exponential, for what is rounded
// to 16 bits.
#pragma once

#include <type_traits>

#include "multigemm/abi_moe.h"
#include "vendor/gpu_math.h"

namespace multigemm {
namespace moe {

// A function's value and its slope.
template <class A>
struct Point {
  A value, slope;
};

template <bool kCoarse, class A>
MG_DEVICE A sigmoid(A x) {
  if constexpr (kCoarse) return gpu::fast_quotient(1.0f, 1.0f + gpu::fast_exponential(-x));
  return A(1) / (A(1) + gpu::exponential(-x));
}

// The slope is not computed where nobody reads it: all of this is inlined.
template <bool kCoarse, class A>
MG_DEVICE Point<A> silu(A x) {
  const A s = sigmoid<kCoarse>(x);
  return {x * s, s * (A(1) + x * (A(1) - s))};
}
template <class A>
MG_DEVICE Point<A> gelu(A x) {
  const A area = A(0.5) * (A(1) + gpu::error_function(x * A(0.7071067811865476)));
  return {x * area, area + x * A(0.3989422804014327) * gpu::exponential(A(-0.5) * x * x)};
}
template <bool kCoarse, class A>
MG_DEVICE Point<A> gelu_tanh(A x) {
  const A factor = A(0.7978845608028654), cube = A(0.044715), square = x * x;
  const A z = factor * (x + cube * x * square);
  const A t = kCoarse ? A(2) * sigmoid<kCoarse>(A(2) * z) - A(1) : gpu::tangens_hyperbolicus(z);
  return {A(0.5) * x * (A(1) + t),
          A(0.5) * (A(1) + t) + A(0.5) * x * (A(1) - t * t) * factor * (A(1) + A(3) * cube * square)};
}
template <class A>
MG_DEVICE Point<A> relu(A x) {
  return {x <= A(0) ? A(0) : x, x <= A(0) ? A(0) : A(1)};  // NaN stays
}

// The activation with its slopes along gate and up; without a gate, u is 1.
template <class A>
struct Act {
  A value, gate, up;
};
template <class A>
MG_DEVICE Act<A> product(const Point<A>& f, A u) {
  return {f.value * u, f.slope * u, f.value};
}
template <int kKind, bool kCoarse, class Limits, class A>  // with `alpha` and `limit`
MG_DEVICE Act<A> act(const Limits& p, A g, A u) {
  if constexpr (kKind == MG_MOE_SILU)
    return product(silu<kCoarse>(g), u);
  else if constexpr (kKind == MG_MOE_GELU)
    return product(gelu(g), u);
  else if constexpr (kKind == MG_MOE_GELU_TANH)
    return product(gelu_tanh<kCoarse>(g), u);
  else if constexpr (kKind == MG_MOE_RELU)
    return product(relu(g), u);
  else {
    const A limit = A(p.limit), alpha = A(p.alpha);
    const bool g_over = g > limit, u_over = u > limit, u_under = u < -limit;
    const A x = g_over ? limit : g, y = (u_over ? limit : u_under ? -limit : u) + A(1);
    const A s = sigmoid<kCoarse>(alpha * x);
    return {y * x * s, g_over ? A(0) : y * s * (A(1) + alpha * x * (A(1) - s)), u_over || u_under ? A(0) : x * s};
  }
}

// Calls f with the activation as a constant: once for a pack instead of for each element.
template <class Function>
MG_DEVICE void with_kind(int32_t kind, const Function& f) {
  switch (kind) {
    case MG_MOE_SILU: return f(std::integral_constant<int, MG_MOE_SILU>());
    case MG_MOE_GELU: return f(std::integral_constant<int, MG_MOE_GELU>());
    case MG_MOE_GELU_TANH: return f(std::integral_constant<int, MG_MOE_GELU_TANH>());
    case MG_MOE_RELU: return f(std::integral_constant<int, MG_MOE_RELU>());
    default: return f(std::integral_constant<int, MG_MOE_CLAMPED>());
  }
}

}  // namespace moe
}  // namespace multigemm
