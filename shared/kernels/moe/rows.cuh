// Formula: spread  out[p] = w[s] from[s / k], dots[s] = <from[s / k], other[p]>, p = inverse[s]
//          collect out[t] = sum over j = 0 .. k - 1 of w[t, j] from[inverse[t k + j]], + other[t]
// Layouts: rows with unit stride along H. Each team takes one row, or kTile packs of it.
// Dtypes:  float64, float32, float16, bfloat16; one dtype for all in packs of 16 bytes, else each its own.
// Architectures: any GPU that nvcc or hipcc compile for, and the host.
// Limits:  T k < 2^31; offsets of 64 bits. No atomics: a row has one writer, and sums one order.
#pragma once

#include "kernels/moe/numbers.cuh"
#include "multigemm/abi_moe.h"

namespace multigemm {
namespace moe {

struct RowsArguments {
  mg_moe_rows_problem p;
  int64_t packs;  // of one row
  int64_t tile;   // of a row for one team, at most kTile
  int64_t tiles;
  int64_t units;
};

// By tokens, so that a row is read from memory once for all of its slots.
template <class P>
MG_KERNEL void spread(RowsArguments a) {
  using A = typename P::A;
  const mg_moe_rows_problem& p = a.p;
  const int lane = gpu::lane_index();
  const int32_t live = p.ends[p.experts - 1];
  for (int64_t unit = team_number(); unit < a.units; unit += team_total()) {
    const int64_t token = unit / a.tiles, start = unit % a.tiles * a.tile;
    const int64_t last = start + a.tile < a.packs ? start + a.tile : a.packs;
    typename P::Raw raw[kPacks];
    MG_UNROLL
    for (int i = 0; i < kPacks; ++i) {
      const int64_t at = start + i * gpu::kLanes + lane;
      if (at < last) raw[i] = P::read(p.from, p.from_dtype, token * p.from_row, at);
    }
    for (int64_t slot = token * p.top_k; slot < (token + 1) * p.top_k; ++slot) {
      const int64_t place = p.inverse[slot];
      const bool dead = place >= live;
      const A weight = p.weights && !dead ? static_cast<const A*>(p.weights)[slot] : A(1);
      MG_UNROLL
      for (int i = 0; i < kPacks; ++i) {
        const int64_t at = start + i * gpu::kLanes + lane;
        if (at >= last) continue;
        A values[P::kCount] = {};
        if (!dead) {
          P::unpack(raw[i], values);
          MG_UNROLL
          for (int c = 0; c < P::kCount; ++c) values[c] *= weight;
        }
        P::write(p.out, p.out_dtype, place * p.out_row, at, values);
      }
    }
  }
}

// A team sums the whole rows of a token's slots, which it also writes.
template <class P>
MG_KERNEL void spread_with_dots(RowsArguments a) {
  using A = typename P::A;
  const mg_moe_rows_problem& p = a.p;
  const int lane = gpu::lane_index();
  const int32_t live = p.ends[p.experts - 1];
  for (int64_t slot = team_number(); slot < a.units; slot += team_total()) {
    const int64_t token = slot / p.top_k, place = p.inverse[slot];
    const bool dead = place >= live;
    const A weight = p.weights && !dead ? static_cast<const A*>(p.weights)[slot] : A(1);
    A dot = A(0);
    for (int64_t start = 0; start < a.packs; start += kTile) {
      typename P::Raw raw[kPacks], others[kPacks];
      MG_UNROLL
      for (int i = 0; i < kPacks; ++i) {
        const int64_t at = start + i * gpu::kLanes + lane;
        if (at >= a.packs || dead) continue;
        raw[i] = P::read(p.from, p.from_dtype, token * p.from_row, at);
        others[i] = P::read(p.other, p.other_dtype, place * p.other_row, at);
      }
      MG_UNROLL
      for (int i = 0; i < kPacks; ++i) {
        const int64_t at = start + i * gpu::kLanes + lane;
        if (at >= a.packs) continue;
        A values[P::kCount] = {}, with[P::kCount];
        if (!dead) {
          P::unpack(raw[i], values);
          P::unpack(others[i], with);
          MG_UNROLL
          for (int c = 0; c < P::kCount; ++c) {
            dot += values[c] * with[c];
            values[c] *= weight;
          }
        }
        if (p.out) P::write(p.out, p.out_dtype, place * p.out_row, at, values);
      }
    }
    dot = gpu::team_sum(dot);
    if (lane == 0) static_cast<A*>(p.dots)[slot] = dot;
  }
}

template <class P>
MG_KERNEL void collect(RowsArguments a) {
  using A = typename P::A;
  const mg_moe_rows_problem& p = a.p;
  const int lane = gpu::lane_index();
  const int32_t live = p.ends[p.experts - 1];
  for (int64_t unit = team_number(); unit < a.units; unit += team_total()) {
    const int64_t token = unit / a.tiles, start = unit % a.tiles * a.tile;
    const int64_t last = start + a.tile < a.packs ? start + a.tile : a.packs;
    A sums[kPacks][P::kCount] = {};
    for (int64_t slot = token * p.top_k; slot < (token + 1) * p.top_k; ++slot) {
      const int32_t place = p.inverse[slot];
      if (place >= live) continue;
      const A weight = p.weights ? static_cast<const A*>(p.weights)[slot] : A(1);
      typename P::Raw raw[kPacks];
      MG_UNROLL
      for (int i = 0; i < kPacks; ++i) {
        const int64_t at = start + i * gpu::kLanes + lane;
        if (at < last) raw[i] = P::read(p.from, p.from_dtype, place * p.from_row, at);
      }
      MG_UNROLL
      for (int i = 0; i < kPacks; ++i) {
        if (start + i * gpu::kLanes + lane >= last) continue;
        A values[P::kCount];
        P::unpack(raw[i], values);
        MG_UNROLL
        for (int c = 0; c < P::kCount; ++c) sums[i][c] += weight * values[c];
      }
    }
    MG_UNROLL
    for (int i = 0; i < kPacks; ++i) {
      const int64_t at = start + i * gpu::kLanes + lane;
      if (at >= last) continue;
      if (p.other) {
        A others[P::kCount];
        P::unpack(P::read(p.other, p.other_dtype, token * p.other_row, at), others);
        MG_UNROLL
        for (int c = 0; c < P::kCount; ++c) sums[i][c] += others[c];
      }
      P::write(p.out, p.out_dtype, token * p.out_row, at, sums[i]);
    }
  }
}

// Whether all operands can be read in packs: one dtype, everything on 16 bytes.
inline bool in_packs(const mg_moe_rows_problem& p) {
  const auto fits = [&](const void* data, int64_t row, int32_t dtype) {
    return !data || (dtype == p.from_dtype && whole_packs(data, row, dtype));
  };
  return p.width * bytes_of(p.from_dtype) % 16 == 0 && fits(p.from, p.from_row, p.from_dtype) &&
         fits(p.out, p.out_row, p.out_dtype) && fits(p.other, p.other_row, p.other_dtype);
}

// 0, or the runtime's error number.
inline int launch_spread(const mg_moe_rows_problem& p, const gpu::Queue& queue) {
  return with_packs(in_packs(p), p.from_dtype, [&](auto pack) {
    using P = decltype(pack);
    RowsArguments a{p, p.width / P::kCount, kTile, 1, p.tokens * p.top_k};
    if (p.dots) return gpu::launch(spread_with_dots<P>, blocks_for(a.units), kRowThreads, queue, a);
    a.tile = tile_for(p.tokens, a.packs);
    a.tiles = (a.packs + a.tile - 1) / a.tile;
    a.units = p.tokens * a.tiles;
    return gpu::launch(spread<P>, blocks_for(a.units), kRowThreads, queue, a);
  });
}

inline int launch_collect(const mg_moe_rows_problem& p, const gpu::Queue& queue) {
  return with_packs(in_packs(p), p.from_dtype, [&](auto pack) {
    using P = decltype(pack);
    RowsArguments a{p, p.width / P::kCount, 0, 0, 0};
    a.tile = tile_for(p.tokens, a.packs);
    a.tiles = (a.packs + a.tile - 1) / a.tile;
    a.units = p.tokens * a.tiles;
    return gpu::launch(collect<P>, blocks_for(a.units), kRowThreads, queue, a);
  });
}

}  // namespace moe
}  // namespace multigemm
