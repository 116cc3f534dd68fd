// Formula: experts and weights of each token (select.cuh); count of slots by expert; the stable order of the slots,
//          inverse[s] = slots of smaller experts + earlier slots of the same; rows[inverse[t k + j]] = x[t].
// Layouts: expert_ids, weights [T, k], permutation, inverse [T k], ends [E], rows [T k, H] contiguous.
// Dtypes:  logits as select.cuh; x is copied as it is.
// Architectures: any GPU that nvcc or hipcc compile for, and the host.
// Limits:  those of select.cuh; T k < 2^31. One launch up to kFewSlots slots, in which every block finds the whole
// order
//          for itself; else two: blocks count the experts of their chunk of tokens, then place them. No atomics.
#pragma once

#include <type_traits>

#include "kernels/moe/select.cuh"

namespace multigemm {
namespace moe {

constexpr int kFewTokens = 64, kFewSlots = 1024;
constexpr int kMostChunks = 256;
constexpr int kChunkTokens = 32;  // at least

struct RouteArguments {
  mg_moe_route_problem p;
  int32_t* counts;       // [chunks, E + 1]
  int64_t chunk_tokens;  // of each chunk but the last
  int64_t chunks;
};

template <int kItems>
struct OrderRoom {
  static constexpr int kTeams = Shape<kItems>::kTeams, kBins = Shape<kItems>::kBins;
  int32_t counts[kTeams][kBins];  // by team; then how many of a bin come before the team's
  int32_t starts[kBins];          // place of a bin's first slot
};

// Slots are dealt to teams in whole stretches, so that their order is that of the teams.
struct Stretch {
  int64_t first, last;
};
MG_DEVICE Stretch stretch_of_team(int64_t slots) {
  const int teams = static_cast<int>(blockDim.x) / gpu::kLanes, team = static_cast<int>(threadIdx.x) / gpu::kLanes;
  const int64_t whole = (slots + gpu::kLanes - 1) / gpu::kLanes;
  const int64_t share = (whole + teams - 1) / teams * gpu::kLanes;
  const int64_t first = team * share < slots ? team * share : slots;
  return {first, first + share < slots ? first + share : slots};
}

MG_DEVICE int32_t bin_of(int64_t expert, int64_t experts) {
  return static_cast<int32_t>(expert < 0 || expert >= experts ? experts : expert);
}

// room.counts[team][bin] = slots of this chunk in that bin before the team's. `total(bin, count)` is given each bin's
// number of slots, by one thread. Ends with a barrier.
template <class Room, class BinOf, class Total>
MG_DEVICE void count_bins(int bins, int64_t slots, Room& room, const BinOf& bin_of_slot, const Total& total) {
  const int teams = static_cast<int>(blockDim.x) / gpu::kLanes, team = static_cast<int>(threadIdx.x) / gpu::kLanes;
  for (int i = static_cast<int>(threadIdx.x); i < teams * bins; i += static_cast<int>(blockDim.x))
    room.counts[i / bins][i % bins] = 0;
  __syncthreads();
  const Stretch mine = stretch_of_team(slots);
  for (int64_t start = mine.first; start < mine.last; start += gpu::kLanes) {
    const int64_t slot = start + gpu::lane_index();
    const int32_t bin = slot < mine.last ? bin_of_slot(slot) : -1;
    const gpu::Same same = gpu::team_same(bin);
    if (bin >= 0 && same.before == 0) room.counts[team][bin] += same.count;
    gpu::team_sync();
  }
  __syncthreads();
  for (int bin = static_cast<int>(threadIdx.x); bin < bins; bin += static_cast<int>(blockDim.x)) {
    int32_t before = 0;
    for (int t = 0; t < teams; ++t) {
      const int32_t count = room.counts[t][bin];
      room.counts[t][bin] = before;
      before += count;
    }
    total(bin, before);
  }
  __syncthreads();
}

// starts[bin] = sum of starts[b] for b < bin, by the block's first team; begins after a barrier and ends with one.
MG_DEVICE void scan_starts(int bins, int32_t* starts) {
  if (static_cast<int>(threadIdx.x) < gpu::kLanes) {
    const int share = (bins + gpu::kLanes - 1) / gpu::kLanes, lane = gpu::lane_index();
    const int first = lane * share < bins ? lane * share : bins, last = first + share < bins ? first + share : bins;
    int32_t sum = 0;
    for (int bin = first; bin < last; ++bin) sum += starts[bin];
    int32_t before = gpu::team_before(sum);
    for (int bin = first; bin < last; ++bin) {
      const int32_t count = starts[bin];
      starts[bin] = before;
      before += count;
    }
  }
  __syncthreads();
}

// Gives each slot of the chunk its place; uses up room.counts. Ends with a barrier.
template <class Room, class BinOf, class Put>
MG_DEVICE void place_slots(int64_t slots, Room& room, const BinOf& bin_of_slot, const Put& put) {
  const int team = static_cast<int>(threadIdx.x) / gpu::kLanes;
  const Stretch mine = stretch_of_team(slots);
  for (int64_t start = mine.first; start < mine.last; start += gpu::kLanes) {
    const int64_t slot = start + gpu::lane_index();
    const int32_t bin = slot < mine.last ? bin_of_slot(slot) : -1;
    const gpu::Same same = gpu::team_same(bin);
    if (bin >= 0) put(slot, room.starts[bin] + room.counts[team][bin] + same.before);
    gpu::team_sync();
    if (bin >= 0 && same.before == 0) room.counts[team][bin] += same.count;
    gpu::team_sync();
  }
  __syncthreads();
}

// rows[place of each slot of tokens [first, last)] = x[token], by words of type Word; zeros from place `live` on.
template <class Word, class PlaceOf>
MG_DEVICE void copy_words(const mg_moe_route_problem& p, int64_t bytes, int64_t first, int64_t last, int64_t team,
                          int64_t teams, int32_t live, const PlaceOf& place_of) {
  const int64_t words = p.width * bytes / static_cast<int64_t>(sizeof(Word));
  const int64_t tiles = (words + kTile - 1) / kTile;
  for (int64_t unit = team; unit < (last - first) * tiles; unit += teams) {
    const int64_t token = first + unit / tiles, start = unit % tiles * kTile;
    const Word* from = reinterpret_cast<const Word*>(static_cast<const char*>(p.x) + token * p.x_row * bytes);
    Word taken[kPacks];
    MG_UNROLL
    for (int i = 0; i < kPacks; ++i) {
      const int64_t at = start + i * gpu::kLanes + gpu::lane_index();
      if (at < words) taken[i] = from[at];
    }
    for (int j = 0; j < static_cast<int>(p.top_k); ++j) {
      const int32_t place = place_of(token * p.top_k + j);
      Word* to = static_cast<Word*>(p.rows) + place * words;
      MG_UNROLL
      for (int i = 0; i < kPacks; ++i) {
        const int64_t at = start + i * gpu::kLanes + gpu::lane_index();
        if (at < words) to[at] = place < live ? taken[i] : Word{};
      }
    }
  }
}

template <class PlaceOf>
MG_DEVICE void copy_tokens(const mg_moe_route_problem& p, int64_t first, int64_t last, int64_t team, int64_t teams,
                           int32_t live, const PlaceOf& place_of) {
  if (!p.x) return;
  const int64_t bytes = p.x_dtype == MG_FLOAT64 ? 8 : p.x_dtype == MG_FLOAT32 ? 4 : 2;
  const uint64_t together = reinterpret_cast<uint64_t>(p.x) | reinterpret_cast<uint64_t>(p.rows) |
                            static_cast<uint64_t>(p.x_row * bytes) | static_cast<uint64_t>(p.width * bytes);
  if (together % 16 == 0) return copy_words<Word16>(p, bytes, first, last, team, teams, live, place_of);
  if (together % 4 == 0) return copy_words<uint32_t>(p, bytes, first, last, team, teams, live, place_of);
  copy_words<uint16_t>(p, bytes, first, last, team, teams, live, place_of);
}

// All of it for few tokens: each block finds the order for itself and copies its share; the first one writes the rest.
template <class A, int kItems>
MG_KERNEL void route_few(RouteArguments a) {
  MG_SHARED OrderRoom<kItems> room;
  MG_SHARED SelectRoom<A, Shape<kItems>::kTeams> select;
  MG_SHARED int16_t slot_bins[kFewSlots];
  MG_SHARED int32_t places[kFewSlots];
  const mg_moe_route_problem& p = a.p;
  const int thread = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x);
  const int k = static_cast<int>(p.top_k), slots = static_cast<int>(p.tokens) * k;
  const int bins = static_cast<int>(p.experts) + 1;
  const bool writes = blockIdx.x == 0;
  if (p.logits) {
    for (int token = thread / gpu::kLanes; token < static_cast<int>(p.tokens); token += threads / gpu::kLanes)
      select_token<A, kItems>(p, token, select, [&](int j, int e, A weight) {
        slot_bins[token * k + j] = static_cast<int16_t>(e);
        if (!writes) return;
        p.expert_ids[token * k + j] = e;
        static_cast<A*>(p.weights)[token * k + j] = weight;
      });
  } else {
    for (int slot = thread; slot < slots; slot += threads)
      slot_bins[slot] = static_cast<int16_t>(bin_of(p.expert_ids[slot], p.experts));
  }
  __syncthreads();
  const auto bin_of_slot = [&](int64_t slot) { return static_cast<int32_t>(slot_bins[slot]); };
  count_bins(bins, slots, room, bin_of_slot, [&](int bin, int32_t count) { room.starts[bin] = count; });
  scan_starts(bins, room.starts);
  if (writes)
    for (int e = thread; e + 1 < bins; e += threads) p.ends[e] = room.starts[e + 1];
  place_slots(slots, room, bin_of_slot, [&](int64_t slot, int32_t place) {
    places[slot] = place;
    if (!writes) return;
    p.inverse[slot] = place;
    p.permutation[place] = static_cast<int32_t>(slot);
  });
  copy_tokens(p, 0, p.tokens, team_number(), team_total(), room.starts[bins - 1],
              [&](int64_t slot) { return places[slot]; });
}

// The first of two launches: selects, and counts the experts of each chunk.
template <class A, int kItems>
MG_KERNEL void route_select(RouteArguments a) {
  MG_SHARED OrderRoom<kItems> room;
  MG_SHARED SelectRoom<A, Shape<kItems>::kTeams> select;
  const mg_moe_route_problem& p = a.p;
  const int64_t first = blockIdx.x * a.chunk_tokens;
  const int64_t last = first + a.chunk_tokens < p.tokens ? first + a.chunk_tokens : p.tokens;
  if (p.logits) {
    for (int64_t token = first + threadIdx.x / gpu::kLanes; token < last; token += blockDim.x / gpu::kLanes)
      select_token<A, kItems>(p, token, select, [&](int j, int e, A weight) {
        p.expert_ids[token * p.top_k + j] = e;
        static_cast<A*>(p.weights)[token * p.top_k + j] = weight;
      });
    __syncthreads();
  }
  const int bins = static_cast<int>(p.experts) + 1;
  int32_t* counts = a.counts + int64_t{blockIdx.x} * bins;
  count_bins(
      bins, (last - first) * p.top_k, room,
      [&](int64_t slot) { return bin_of(p.expert_ids[first * p.top_k + slot], p.experts); },
      [&](int bin, int32_t count) { counts[bin] = count; });
}

// sums[bin] = slots of the chunks below `chunks` in that bin, by all teams. Ends with a barrier.
template <class Room>
MG_DEVICE void add_chunks(const int32_t* counts, int chunks, int bins, Room& room, int32_t* sums) {
  const int teams = static_cast<int>(blockDim.x) / gpu::kLanes, team = static_cast<int>(threadIdx.x) / gpu::kLanes;
  for (int bin = gpu::lane_index(); bin < bins; bin += gpu::kLanes) {
    int32_t sum = 0;
    MG_UNROLL
    for (int chunk = team; chunk < chunks; chunk += teams) sum += counts[chunk * bins + bin];
    room.counts[team][bin] = sum;
  }
  __syncthreads();
  for (int bin = static_cast<int>(threadIdx.x); bin < bins; bin += static_cast<int>(blockDim.x)) {
    int32_t sum = 0;
    for (int t = 0; t < teams; ++t) sum += room.counts[t][bin];
    sums[bin] = sum;
  }
  __syncthreads();
}

// The second: adds up the chunks' counts, places the slots of a chunk and copies its tokens.
template <int kItems>
MG_KERNEL void route_place(RouteArguments a) {
  MG_SHARED OrderRoom<kItems> room;
  MG_SHARED int32_t before[Shape<kItems>::kBins];
  const mg_moe_route_problem& p = a.p;
  const int thread = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x);
  const int bins = static_cast<int>(p.experts) + 1, chunk = static_cast<int>(blockIdx.x);
  const int64_t first = chunk * a.chunk_tokens;
  const int64_t last = first + a.chunk_tokens < p.tokens ? first + a.chunk_tokens : p.tokens;
  const int64_t first_slot = first * p.top_k;
  const auto bin_of_slot = [&](int64_t slot) { return bin_of(p.expert_ids[first_slot + slot], p.experts); };
  add_chunks(a.counts, static_cast<int>(a.chunks), bins, room, room.starts);
  add_chunks(a.counts, chunk, bins, room, before);
  scan_starts(bins, room.starts);
  if (chunk == 0)
    for (int e = thread; e + 1 < bins; e += threads) p.ends[e] = room.starts[e + 1];
  const int32_t live = room.starts[bins - 1];
  count_bins(bins, (last - first) * p.top_k, room, bin_of_slot, [&](int bin, int32_t) {
    for (int t = 0; t < threads / gpu::kLanes; ++t) room.counts[t][bin] += before[bin];
  });
  place_slots((last - first) * p.top_k, room, bin_of_slot, [&](int64_t slot, int32_t place) {
    p.inverse[first_slot + slot] = place;
    p.permutation[place] = static_cast<int32_t>(first_slot + slot);
  });
  copy_tokens(p, first, last, thread / gpu::kLanes, threads / gpu::kLanes, live,
              [&](int64_t slot) { return p.inverse[slot]; });
}

template <class A, int kItems>
MG_KERNEL void route_backward(RouteArguments a) {
  for (int64_t token = team_number(); token < a.p.tokens; token += team_total()) route_gradient<A, kItems>(a.p, token);
}

inline int64_t chunk_tokens_for(int64_t tokens) {
  const int64_t share = (tokens + kMostChunks - 1) / kMostChunks;
  return share > kChunkTokens ? share : kChunkTokens;
}
inline bool is_few(const mg_moe_route_problem& p) { return p.tokens <= kFewTokens && p.tokens * p.top_k <= kFewSlots; }

// int32 elements of workspace.
inline int64_t route_room(const mg_moe_route_problem& p) {
  const int64_t chunk = chunk_tokens_for(p.tokens);
  return is_few(p) ? 0 : (p.tokens + chunk - 1) / chunk * (p.experts + 1);
}

template <class A, int kItems>
int launch_route_of(const RouteArguments& a, const gpu::Queue& queue) {
  const mg_moe_route_problem& p = a.p;
  constexpr int threads = Shape<kItems>::kThreads;
  if (!is_few(p)) {
    const int error = gpu::launch(route_select<A, kItems>, a.chunks, threads, queue, a);
    return error ? error : gpu::launch(route_place<kItems>, a.chunks, threads, queue, a);
  }
#if defined(MG_GPU)
  const int64_t units = p.x ? p.tokens * ((p.width * bytes_of(p.x_dtype) + 16 * kTile - 1) / (16 * kTile)) : 0;
  const int64_t teams = threads / gpu::kLanes, wanted = (units + teams - 1) / teams + (units == 0);
  const int64_t blocks = wanted < kMostChunks ? wanted : kMostChunks;
#else
  const int64_t blocks = 1;
#endif
  return gpu::launch(route_few<A, kItems>, blocks, threads, queue, a);
}

// Calls f with the type of the scores and the experts of a lane.
template <class Function>
int with_items(const mg_moe_route_problem& p, const Function& f) {
  constexpr int most = MG_MOE_MOST_EXPERTS / gpu::kLanes;
  if (p.dtype == MG_FLOAT64) return f(double(), std::integral_constant<int, most>());
#if defined(MG_GPU)
  if (p.experts <= 128) return f(float(), std::integral_constant<int, 4>());
  if (p.experts <= 256) return f(float(), std::integral_constant<int, 8>());
#endif
  return f(float(), std::integral_constant<int, most>());
}

// `room`: route_room(p) elements. 0, or the runtime's error number.
inline int launch_route(const mg_moe_route_problem& p, int32_t* room, const gpu::Queue& queue) {
  const int64_t chunk = chunk_tokens_for(p.tokens);
  const RouteArguments a{p, room, chunk, (p.tokens + chunk - 1) / chunk};
  return with_items(
      p, [&](auto number, auto items) { return launch_route_of<decltype(number), decltype(items)::value>(a, queue); });
}

inline int launch_route_backward(const mg_moe_route_problem& p, const gpu::Queue& queue) {
  const RouteArguments a{p, nullptr, 0, 0};
  return with_items(p, [&](auto number, auto items) {
    return gpu::launch(route_backward<decltype(number), decltype(items)::value>, blocks_for(p.tokens), kRowThreads,
                       queue, a);
  });
}

}  // namespace moe
}  // namespace multigemm
