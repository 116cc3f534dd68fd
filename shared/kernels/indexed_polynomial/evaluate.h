// Formula: y[d] = sum over terms (d, i, j, k, p) of factor w[p] X[i] X[j] X[k], differentiated once along each of M
//          directions; the gradient of g y in one more direction, and in w. X[D] = 1, and 0 in a direction.
// Layouts: whatever the accessors read: one lane or a vector of them, in registers, memory or a GPU's shared memory.
// Limits:  M up to 3 (2 for the gradient in a direction): the fourth derivative of a monomial of degree 3 is zero.
//
// The rule of Horner runs along heads (d, i) and pairs (d, i, j). A sum or product may carry any subset of the
// directions; subsets are bits, and a factor carries one direction at most. Compiled for each CPU level and by GPU
// compilers: MG_POLYNOMIAL names the namespace, nothing of a standard library is used.
#pragma once

#include <stdint.h>

#ifndef MG_POLYNOMIAL
#error "define MG_POLYNOMIAL as the namespace that this file is compiled for"
#endif
#if defined(__CUDACC__) || defined(__HIP__)
#define MG_EVERYWHERE __device__ __forceinline__
#define MG_UNROLLED _Pragma("unroll")
#else
#define MG_EVERYWHERE inline __attribute__((always_inline))
#define MG_UNROLLED _Pragma("GCC unroll 8")
#endif

namespace multigemm {
namespace MG_POLYNOMIAL {

struct Tables {
  const int32_t* heads;
  const int32_t* pairs;
  const int32_t* last;  // k and p of each term
};

MG_EVERYWHERE constexpr int size_of(int set) {
  int size = 0;
  for (; set != 0; set >>= 1) size += set & 1;
  return size;
}

// factor(a, i): component i of x (a = 0) or of direction a. sums[0]: sum over the pair's terms of w X[k], sums[a] of
// w V_a[k]. `each(t, w, k)` is called for each term.
template <int M, class V, class Factor, class Weight, class Each>
MG_EVERYWHERE void sum_of_pair(const Tables& tables, int32_t begin, int32_t end, const Factor& factor,
                               const Weight& weight, V (&sums)[M + 1], const Each& each) {
  MG_UNROLLED
  for (int a = 0; a <= M; ++a) sums[a] = V{};
  for (int32_t t = begin; t < end; ++t) {
    const int32_t k = tables.last[2 * t];
    const V w = weight(t);
    MG_UNROLLED
    for (int a = 0; a <= M; ++a) sums[a] += w * factor(a, k);
    each(t, w, k);
  }
}

// middle[A] += the part of X[j] times the pair's sum that carries the directions A.
template <int M, class V, class Factor>
MG_EVERYWHERE void add_pair(int32_t j, const Factor& factor, const V (&sums)[M + 1], V (&middle)[1 << M]) {
  MG_UNROLLED
  for (int set = 0; set < (1 << M); ++set) {
    if (size_of(set) == 0) middle[set] += factor(0, j) * sums[0];
    MG_UNROLLED
    for (int a = 0; a < M; ++a) {
      const int bit = 1 << a;
      if (set == bit) middle[set] += factor(0, j) * sums[a + 1];  // on the pair's sum
      if (!(set & bit)) continue;
      const int rest = set & ~bit;  // direction a on X[j], the rest on the sum
      if (rest == 0) middle[set] += factor(a + 1, j) * sums[0];
      MG_UNROLLED
      for (int b = 0; b < M; ++b)
        if (rest == 1 << b) middle[set] += factor(a + 1, j) * sums[b + 1];
    }
  }
}

// to(d, value) adds.
template <int M, class V, class Factor, class Weight, class To>
MG_EVERYWHERE void value(const Tables& tables, int32_t head_count, const Factor& factor, const Weight& weight,
                         const To& to) {
  constexpr int kFull = (1 << M) - 1;
  for (int32_t h = 0; h < head_count; ++h) {
    const int32_t d = tables.heads[4 * h], i = tables.heads[4 * h + 1];
    V middle[1 << M];
    MG_UNROLLED
    for (int set = 0; set <= kFull; ++set) middle[set] = V{};
    for (int32_t q = tables.heads[4 * h + 2]; q < tables.heads[4 * h + 3]; ++q) {
      V sums[M + 1];
      sum_of_pair<M>(tables, tables.pairs[4 * q + 1], tables.pairs[4 * q + 2], factor, weight, sums,
                     [](int32_t, const V&, int32_t) {});
      add_pair<M>(tables.pairs[4 * q], factor, sums, middle);
    }
    V total = M < 3 ? V(factor(0, i) * middle[kFull]) : V{};
    MG_UNROLLED
    for (int a = 0; a < M; ++a) total += factor(a + 1, i) * middle[kFull & ~(1 << a)];
    to(d, total);
  }
}

// Of the product of X[i] and X[j], the part that carries the directions A, for |A| <= 2; times g.
template <int M, class V, class Factor>
MG_EVERYWHERE void product_of_pair(int32_t i, int32_t j, const V& g, const Factor& factor, V (&product)[1 << M]) {
  MG_UNROLLED
  for (int set = 0; set < (1 << M); ++set) {
    product[set] = V{};
    if (set == 0) product[set] = g * factor(0, i) * factor(0, j);
    MG_UNROLLED
    for (int a = 0; a < M; ++a) {
      const int bit = 1 << a;
      if (set == bit) product[set] += g * (factor(a + 1, i) * factor(0, j) + factor(0, i) * factor(a + 1, j));
      MG_UNROLLED
      for (int b = a + 1; b < M; ++b)
        if (set == (bit | 1 << b))
          product[set] += g * (factor(a + 1, i) * factor(b + 1, j) + factor(b + 1, i) * factor(a + 1, j));
    }
  }
}

// gradient(d) is gy; to(i, value) adds, also to component D, which nobody reads.
template <int M, class V, class Factor, class Weight, class Gradient, class To>
MG_EVERYWHERE void xgrad(const Tables& tables, int32_t head_count, const Factor& factor, const Weight& weight,
                         const Gradient& gradient, const To& to) {
  constexpr int kFull = (1 << M) - 1;
  for (int32_t h = 0; h < head_count; ++h) {
    const int32_t d = tables.heads[4 * h], i = tables.heads[4 * h + 1];
    const V g = gradient(d);
    V middle[1 << M];
    MG_UNROLLED
    for (int set = 0; set <= kFull; ++set) middle[set] = V{};
    for (int32_t q = tables.heads[4 * h + 2]; q < tables.heads[4 * h + 3]; ++q) {
      const int32_t j = tables.pairs[4 * q];
      V product[1 << M], sums[M + 1];
      product_of_pair<M>(i, j, g, factor, product);
      sum_of_pair<M>(tables, tables.pairs[4 * q + 1], tables.pairs[4 * q + 2], factor, weight, sums,
                     [&](int32_t, const V& w, int32_t k) { to(k, V(w * product[kFull])); });
      add_pair<M>(j, factor, sums, middle);
      // The new direction on X[j]: the others on X[i] and the sum.
      V on_j = V{};
      if (M == 0) on_j = factor(0, i) * sums[0];
      if (M == 1) on_j = factor(0, i) * sums[M] + factor(M, i) * sums[0];
      if (M == 2) on_j = factor(M / 2, i) * sums[M] + factor(M, i) * sums[M / 2];
      to(j, V(g * on_j));
    }
    to(i, V(g * middle[kFull]));
  }
}

// to(t, value) adds.
template <int M, class V, class Factor, class Gradient, class To>
MG_EVERYWHERE void wgrad(const Tables& tables, int32_t head_count, const Factor& factor, const Gradient& gradient,
                         const To& to) {
  constexpr int kFull = (1 << M) - 1;
  for (int32_t h = 0; h < head_count; ++h) {
    const int32_t i = tables.heads[4 * h + 1];
    const V g = gradient(tables.heads[4 * h]);
    for (int32_t q = tables.heads[4 * h + 2]; q < tables.heads[4 * h + 3]; ++q) {
      V product[1 << M];
      product_of_pair<M>(i, tables.pairs[4 * q], g, factor, product);
      for (int32_t t = tables.pairs[4 * q + 1]; t < tables.pairs[4 * q + 2]; ++t) {
        const int32_t k = tables.last[2 * t];
        V total = M < 3 ? V(product[kFull] * factor(0, k)) : V{};
        MG_UNROLLED
        for (int a = 0; a < M; ++a) total += product[kFull & ~(1 << a)] * factor(a + 1, k);
        to(t, total);
      }
    }
  }
}

}  // namespace MG_POLYNOMIAL
}  // namespace multigemm
