// Formula: out[p] = w[s] act(g, u), s = permutation[p]; backward from d = grad[p]:
//          grad_g = w[s] d act_g, grad_u = w[s] d act_u, grad_w[s] = sum over I of d act, and out once more.
//          act(g, u) = f(g) u where gated, f(g) where plain, f: silu, gelu, relu; clamped as abi_moe.h says.
// Layouts: h [T k, 2 I], gates then ups or in turn, or [T k, I] where plain; all contiguous.
// Dtypes:  float64, float32, float16, bfloat16, one for all; computed in float64 or float32, rounded once.
// Architectures: any GPU that nvcc or hipcc compile for, and the host.
// Limits:  T k < 2^31; offsets of 64 bits.
#pragma once

#include <initializer_list>

#include "kernels/moe/act.cuh"
#include "kernels/moe/numbers.cuh"
#include "multigemm/abi_moe.h"

namespace multigemm {
namespace moe {

struct ActivateArguments {
  mg_moe_activate_problem p;
  int64_t packs, tile, tiles, units;
};

// The two packs of h that pack `at` of the result needs, or one where plain.
template <class P>
struct Pair {
  typename P::Raw first, second;
};
template <class P>
MG_DEVICE Pair<P> read_pair(const ActivateArguments& a, int64_t place, int64_t at) {
  const mg_moe_activate_problem& p = a.p;
  if (!p.gated) return {P::read(p.h, p.dtype, place * p.width, at), {}};
  const int64_t row = place * 2 * p.width;
  if (p.interleaved) return {P::read(p.h, p.dtype, row, 2 * at), P::read(p.h, p.dtype, row, 2 * at + 1)};
  return {P::read(p.h, p.dtype, row, at), P::read(p.h, p.dtype, row, a.packs + at)};
}
template <class P>
MG_DEVICE void unpack_pair(const mg_moe_activate_problem& p, const Pair<P>& raw, typename P::A* g, typename P::A* u) {
  constexpr int n = P::kCount;
  typename P::A both[2 * n] = {};
  P::unpack(raw.first, both);
  if (p.gated) P::unpack(raw.second, both + n);
  MG_UNROLL
  for (int c = 0; c < n; ++c) {
    const typename P::A even = both[2 * c], odd = both[2 * c + 1], low = both[c], high = both[n + c];
    g[c] = p.interleaved ? even : low;
    u[c] = !p.gated ? 1 : p.interleaved ? odd : high;
  }
}
template <class P>
MG_DEVICE void write_pair(const ActivateArguments& a, int64_t place, int64_t at, const typename P::A* g,
                          const typename P::A* u) {
  constexpr int n = P::kCount;
  const mg_moe_activate_problem& p = a.p;
  if (!p.gated) return P::write(p.grad_h, p.dtype, place * p.width, at, g);
  typename P::A both[2 * n];
  MG_UNROLL
  for (int c = 0; c < 2 * n; ++c) {
    const typename P::A alternate = c % 2 ? u[c / 2] : g[c / 2], apart = c < n ? g[c % n] : u[c % n];
    both[c] = p.interleaved ? alternate : apart;
  }
  const int64_t row = place * 2 * p.width;
  P::write(p.grad_h, p.dtype, row, p.interleaved ? 2 * at : at, both);
  P::write(p.grad_h, p.dtype, row, p.interleaved ? 2 * at + 1 : a.packs + at, both + n);
}

template <class P>
MG_KERNEL void activate(ActivateArguments a) {
  using A = typename P::A;
  const mg_moe_activate_problem& p = a.p;
  const int lane = gpu::lane_index();
  const int32_t live = p.ends[p.experts - 1];
  for (int64_t unit = team_number(); unit < a.units; unit += team_total()) {
    const int64_t place = unit / a.tiles, start = unit % a.tiles * a.tile;
    const int64_t last = start + a.tile < a.packs ? start + a.tile : a.packs;
    const A weight = p.weights && place < live ? static_cast<const A*>(p.weights)[p.permutation[place]] : A(1);
    Pair<P> raw[kPacks];
    MG_UNROLL
    for (int i = 0; i < kPacks; ++i) {
      const int64_t at = start + i * gpu::kLanes + lane;
      if (at < last && place < live) raw[i] = read_pair<P>(a, place, at);
    }
    MG_UNROLL
    for (int i = 0; i < kPacks; ++i) {
      const int64_t at = start + i * gpu::kLanes + lane;
      if (at >= last) continue;
      A values[P::kCount] = {};
      if (place < live) {
        A g[P::kCount], u[P::kCount];
        unpack_pair<P>(p, raw[i], g, u);
        with_kind(p.activation, [&](auto kind) {
          MG_UNROLL
          for (int c = 0; c < P::kCount; ++c)
            values[c] = weight * act<decltype(kind)::value, P::kCoarse>(p, g[c], u[c]).value;
        });
      }
      P::write(p.out, p.dtype, place * p.width, at, values);
    }
  }
}

template <class P>
MG_KERNEL void activate_backward(ActivateArguments a) {
  using A = typename P::A;
  constexpr int n = P::kCount;
  const mg_moe_activate_problem& p = a.p;
  const int lane = gpu::lane_index();
  const int32_t live = p.ends[p.experts - 1];
  for (int64_t unit = team_number(); unit < a.units; unit += team_total()) {
    const int64_t place = unit / a.tiles, piece = unit % a.tiles;
    const int32_t slot = p.permutation[place];
    const bool dead = place >= live;
    const A weight = p.weights && !dead ? static_cast<const A*>(p.weights)[slot] : A(1);
    const int64_t first = piece * a.tile, last = first + a.tile < a.packs ? first + a.tile : a.packs;
    A dot = A(0);
    for (int64_t at = first + lane; at < last; at += gpu::kLanes) {
      A g_grad[n] = {}, u_grad[n] = {}, out[n] = {};
      if (!dead) {
        A g[n], u[n], d[n];
        const Pair<P> raw = read_pair<P>(a, place, at);
        P::unpack(P::read(p.grad, p.dtype, place * p.width, at), d);
        unpack_pair<P>(p, raw, g, u);
        with_kind(p.activation, [&](auto kind) {
          MG_UNROLL
          for (int c = 0; c < n; ++c) {
            const Act<A> f = act<decltype(kind)::value, P::kCoarse>(p, g[c], u[c]);
            dot += d[c] * f.value;
            out[c] = weight * f.value;
            g_grad[c] = weight * d[c] * f.gate;
            u_grad[c] = weight * d[c] * f.up;
          }
        });
      }
      write_pair<P>(a, place, at, g_grad, u_grad);
      if (p.out) P::write(p.out, p.dtype, place * p.width, at, out);
    }
    if (p.grad_weights) {
      dot = gpu::team_sum(dot);
      if (lane == 0) static_cast<A*>(p.grad_weights)[slot] = dot;
    }
  }
}

inline bool in_packs(const mg_moe_activate_problem& p) {
  for (const void* data : {p.h, static_cast<const void*>(p.out), p.grad, static_cast<const void*>(p.grad_h)})
    if (data && !whole_packs(data, p.width, p.dtype)) return false;
  return true;
}

// 0, or the runtime's error number.
inline int launch_activate(const mg_moe_activate_problem& p, const gpu::Queue& queue) {
  return with_packs(in_packs(p), p.dtype, [&](auto pack) {
    using P = decltype(pack);
    ActivateArguments a{p, p.width / P::kCount, 0, 0, 0};
    a.tile = tile_for(p.tokens * p.top_k, a.packs);
    a.tiles = (a.packs + a.tile - 1) / a.tile;
    a.units = p.tokens * p.top_k * a.tiles;
    return gpu::launch(activate<P>, blocks_for(a.units), kRowThreads, queue, a);
  });
}

inline int launch_activate_backward(const mg_moe_activate_problem& p, const gpu::Queue& queue) {
  return with_packs(in_packs(p), p.dtype, [&](auto pack) {
    using P = decltype(pack);
    ActivateArguments a{p, p.width / P::kCount, 0, 0, 0};
    a.tile = p.grad_weights ? a.packs : tile_for(p.tokens * p.top_k, a.packs);  // one team sums a whole row
    a.tiles = (a.packs + a.tile - 1) / a.tile;
    a.units = p.tokens * p.top_k * a.tiles;
    return gpu::launch(activate_backward<P>, blocks_for(a.units), kRowThreads, queue, a);
  });
}

}  // namespace moe
}  // namespace multigemm
