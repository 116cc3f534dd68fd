// Vectors of channels of one row: value and xgrad for a range of rows, wgrad for all rows of one label.
// Layouts: operands with unit stride along columns, components anywhere in them (mg_polynomial_problem.places).
// Dtypes:  float64, float32.
// Included once for each CPU level.
#pragma once

#include "kernels/grouped_mm/simd.h"
#include "kernels/indexed_polynomial/cpu_task.h"
#include "multigemm/abi_polynomial.h"

#undef MG_POLYNOMIAL
#define MG_POLYNOMIAL MG_LEVEL
#include "kernels/indexed_polynomial/evaluate.h"

namespace multigemm {
namespace MG_LEVEL {

template <class T>
struct PolynomialTask {
  using Lanes = Vector<T, kVectorBytes>;
  using V = typename Lanes::type;
  static constexpr int64_t kLanes = Lanes::lanes;

  PolynomialTask(const mg_polynomial_problem& problem, const PolynomialPiece& piece, void* scratch)
      : p(problem), c0(piece.block * kLanes), left(p.channels - c0 < kLanes ? p.channels - c0 : kLanes) {
    x = static_cast<V*>(scratch);
    sums = x + (1 + p.directions) * (p.width + 1);
    gy = sums + most(p);
    for (int64_t a = 0; a <= p.directions; ++a) {
      V one = {};
      if (a == 0) one += T(1);
      x[a * (p.width + 1) + p.width] = one;
    }
  }

  // Of the gradient's accumulators: by component of x or y, or by weight.
  static int64_t most(const mg_polynomial_problem& p) {
    const int64_t components = (p.width > p.components ? p.width : p.components) + 1;
    return p.kind == MG_POLYNOMIAL_WGRAD ? p.weight_count : components;
  }
  static int64_t scratch_bytes(const mg_polynomial_problem& p) {
    return ((1 + p.directions) * (p.width + 1) + most(p) + p.components + 1) * int64_t{sizeof(V)};
  }

  // Component `places[at]` of the row's channels; absent channels are zero.
  V load(const T* row, int64_t at) const {
    const int64_t first = p.places[2 * at], step = p.places[2 * at + 1];
    const T* from = row + first + c0 * step;
    if (step == 1 && left == kLanes) return Lanes::load(from);
    V v = {};
    for (int64_t c = 0; c < left; ++c) v[c] = from[c * step];
    return v;
  }
  void store(T* row, int64_t at, V v) const {
    const int64_t first = p.places[2 * at], step = p.places[2 * at + 1];
    T* to = row + first + c0 * step;
    if (step == 1 && left == kLanes) return Lanes::store(to, v);
    for (int64_t c = 0; c < left; ++c) to[c * step] = v[c];
  }
  V load_line(const T* from) const {
    if (left == kLanes) return Lanes::load(from);
    V v = {};
    for (int64_t c = 0; c < left; ++c) v[c] = from[c];
    return v;
  }

  void load_row(int64_t n) {
    const T* from = static_cast<const T*>(p.x) + n * p.x_row;
    for (int64_t i = 0; i < p.width; ++i) x[i] = load(from, i);
    for (int64_t a = 0; a < p.directions; ++a) {
      const T* v = static_cast<const T*>(p.direction[a]) + n * p.direction_row[a];
      for (int64_t i = 0; i < p.width; ++i) x[(a + 1) * (p.width + 1) + i] = load(v, i);
    }
    if (!p.gy) return;
    const T* g = static_cast<const T*>(p.gy) + n * p.gy_row;
    for (int64_t d = 0; d < p.components; ++d) gy[d] = load(g, p.width + d);
  }

  template <int M>
  void rows(const PolynomialPiece& piece) {
    const bool is_value = p.kind == MG_POLYNOMIAL_VALUE;
    const int64_t count = is_value ? p.components : p.width, first = is_value ? p.width : 0;
    const int64_t stride = p.width + 1;
    const Tables tables{p.heads, p.pairs, p.last};
    const int32_t heads = static_cast<int32_t>(p.head_count);
    V* const factors = x;
    V* const totals = sums;
    V* const gradients = gy;
    auto factor = [=](int a, int32_t i) { return factors[a * stride + i]; };
    auto to = [=](int32_t at, const V& v) { totals[at] += v; };
    auto gradient = [=](int32_t d) { return gradients[d]; };
    for (int64_t n = piece.begin; n < piece.end; ++n) {
      for (int64_t i = 0; i <= count; ++i) totals[i] = V{};
      const int64_t g = p.labels[n];
      if (g >= 0 && g < p.groups) {
        load_row(n);
        const T* const w = static_cast<const T*>(p.w) + g * p.w_stride[0] + c0;
        const int64_t line = p.w_stride[1];
        const int32_t* const last = p.last;
        const T* const term_factors = static_cast<const T*>(p.factors);
        auto whole = [=](int32_t t) -> V { return term_factors[t] * Lanes::load(w + last[2 * t + 1] * line); };
        auto part = [=](int32_t t) -> V { return term_factors[t] * load_line(w + last[2 * t + 1] * line); };
        if (is_value && left == kLanes)
          value<M, V>(tables, heads, factor, whole, to);
        else if (is_value)
          value<M, V>(tables, heads, factor, part, to);
        else if constexpr (M < 3) {
          if (left == kLanes)
            xgrad<M, V>(tables, heads, factor, whole, gradient, to);
          else
            xgrad<M, V>(tables, heads, factor, part, gradient, to);
        }
      }
      T* out = static_cast<T*>(p.out) + n * p.out_row;
      for (int64_t i = 0; i < count; ++i) store(out, first + i, totals[i]);
    }
  }

  template <int M>
  void weights(const PolynomialPiece& piece) {
    const Tables tables{p.heads, p.pairs, p.last};
    const int64_t stride = p.width + 1;
    V* const factors = x;
    V* const totals = sums;
    V* const gradients = gy;
    const int32_t* const last = p.last;
    const T* const term_factors = static_cast<const T*>(p.factors);
    auto factor = [=](int a, int32_t i) { return factors[a * stride + i]; };
    auto to = [=](int32_t t, const V& v) { totals[last[2 * t + 1]] += term_factors[t] * v; };
    auto gradient = [=](int32_t d) { return gradients[d]; };
    for (int64_t t = 0; t < p.weight_count; ++t) totals[t] = V{};
    for (int64_t i = piece.begin; i < piece.end; ++i) {
      load_row(p.permutation[i]);
      wgrad<M, V>(tables, static_cast<int32_t>(p.head_count), factor, gradient, to);
    }
    T* out = static_cast<T*>(p.out) + piece.group * p.out_stride[0] + c0;
    for (int64_t t = 0; t < p.weight_count; ++t) {
      T* line = out + t * p.out_stride[1];
      if (left == kLanes)
        Lanes::store(line, totals[t]);
      else
        for (int64_t c = 0; c < left; ++c) line[c] = totals[t][c];
    }
  }

  template <int M>
  void run(const PolynomialPiece& piece) {
    p.kind == MG_POLYNOMIAL_WGRAD ? weights<M>(piece) : rows<M>(piece);
  }

  const mg_polynomial_problem& p;
  int64_t c0, left;
  V *x, *sums, *gy;
};

template <class T>
void polynomial_task_of(const mg_polynomial_problem& p, const PolynomialPiece& piece, void* scratch) {
  PolynomialTask<T> task(p, piece, scratch);
  switch (p.directions) {
    case 0: return task.template run<0>(piece);
    case 1: return task.template run<1>(piece);
    case 2: return task.template run<2>(piece);
    default: return task.template run<3>(piece);
  }
}

inline void polynomial(const mg_polynomial_problem& p, const PolynomialPiece& piece, void* scratch) {
  p.dtype == MG_FLOAT64 ? polynomial_task_of<double>(p, piece, scratch) : polynomial_task_of<float>(p, piece, scratch);
}

inline int64_t polynomial_scratch(const mg_polynomial_problem& p) {
  return p.dtype == MG_FLOAT64 ? PolynomialTask<double>::scratch_bytes(p) : PolynomialTask<float>::scratch_bytes(p);
}

constexpr int kPolynomialVectorBytes = kVectorBytes;

}  // namespace MG_LEVEL
}  // namespace multigemm
