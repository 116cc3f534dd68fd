// Formula: s = softmax(l) or sigmoid(l); the k experts of the largest s + b, barred outside the best groups; of equal
//          ones the first. weight = s / (sum of the k + 1e-20) or s, times a factor; and its derivative.
// Layouts: a team has the logits of one token, a lane those of every kLanes-th expert.
// Dtypes:  logits of float64, float32, float16, bfloat16; computed in float64 or float32.
// Architectures: any GPU that nvcc or hipcc compile for, and the host.
// Limits:  E <= kItems kLanes, groups <= MG_MOE_MOST_GROUPS, k <= MG_MOE_MOST_SLOTS.
#pragma once

#include "kernels/moe/numbers.cuh"
#include "multigemm/abi_moe.h"

namespace multigemm {
namespace moe {

// Threads, teams and bins (experts and what is dropped) of a block, by the experts that a lane has.
template <int kItems>
struct Shape {
#if defined(MG_GPU) && !defined(__HIP__)
  static constexpr int kThreads = kItems <= 8 ? 512 : 256;
#elif defined(MG_GPU)
  static constexpr int kThreads = 256;
#else
  static constexpr int kThreads = 4;  // fibers, so that barriers are exercised
#endif
  static constexpr int kTeams = kThreads / gpu::kLanes;
  static constexpr int kBins = kItems * gpu::kLanes + 1;
};

// Keys have the order of the numbers, NaN above all; what is below any number marks experts that cannot be selected.
MG_DEVICE uint32_t order_key(float value) {
  if (value != value) return 0xffffffffu;
  uint32_t bits;
  value += 0.0f;  // no negative zero
  memcpy(&bits, &value, 4);
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}
MG_DEVICE uint64_t order_key(double value) {
  if (value != value) return ~uint64_t{0};
  uint64_t bits;
  value += 0.0;
  memcpy(&bits, &value, 8);
  return bits >> 63 ? ~bits : bits | uint64_t{1} << 63;
}
constexpr uint32_t kTaken = 0, kBarred = 1;

// Whether a lane keeps its items in registers. More of them than in common models are made again whenever they are
// looked at, as registers do not suffice.
template <int kItems>
constexpr bool kept() {
#if defined(MG_GPU)
  return kItems <= 8;
#else
  return true;
#endif
}
#if defined(__HIP__)
#define MG_UNROLL_ITEMS _Pragma("unroll kItems <= 8 ? kItems : 1")
#elif defined(MG_GPU)
#define MG_UNROLL_ITEMS _Pragma("unroll (kItems <= 8 ? kItems : 1)")
#else
#define MG_UNROLL_ITEMS
#endif
// Few items are looped over without a branch, so that their loads are on the way together.
template <int kItems>
MG_DEVICE bool goes_on(int i, int experts) {
  return i < kItems && (kItems <= 8 || i * gpu::kLanes < experts);
}

template <class A, int kTeams>
struct SelectRoom {
  int32_t expert[kTeams][MG_MOE_MOST_SLOTS];
  A score[kTeams][MG_MOE_MOST_SLOTS];
  A group[kTeams][MG_MOE_MOST_GROUPS];
};

template <class A>
MG_DEVICE A infinity() {
  return A(__builtin_inf());
}

// The scores of a lane's experts.
template <class A, int kItems>
struct Scores {
  A values[kept<kItems>() ? kItems : 1];
  A top, sum;  // of a softmax
};

template <class A>
MG_DEVICE A logit_of(const mg_moe_route_problem& p, int64_t token, int e) {
  return simt::load<A>(p.logits, p.dtype, token * p.logits_stride[0] + e * p.logits_stride[1]);
}
template <class A>
MG_DEVICE A score_of(const mg_moe_route_problem& p, A logit, A top, A sum) {
  return p.score == MG_MOE_SIGMOID ? A(1) / (A(1) + gpu::exponential(-logit)) : gpu::exponential(logit - top) / sum;
}

// Item i of this lane, which is expert e; minus infinity and zero beyond the last expert.
template <class A, int kItems>
MG_DEVICE A score_at(const mg_moe_route_problem& p, int64_t token, const Scores<A, kItems>& s, int i, int e) {
  if constexpr (kept<kItems>())
    return s.values[i];
  else
    return e < p.experts ? score_of(p, logit_of<A>(p, token, e), s.top, s.sum) : A(0);
}

template <class T, class A, int kItems>
MG_DEVICE void load_logits(const mg_moe_route_problem& p, int64_t token, Scores<A, kItems>& s) {
  const T* from = static_cast<const T*>(p.logits) + token * p.logits_stride[0];
  const int experts = static_cast<int>(p.experts);
  s.top = -infinity<A>();
  MG_UNROLL_ITEMS
  for (int i = 0; goes_on<kItems>(i, experts); ++i) {
    const int e = i * gpu::kLanes + gpu::lane_index();
    const A value = e < experts ? static_cast<A>(widen(from[e * p.logits_stride[1]])) : -infinity<A>();
    if constexpr (kept<kItems>())
      s.values[i] = value;
    else if (value > s.top)
      s.top = value;
  }
}

template <class A, int kItems>
MG_DEVICE void compute_scores(const mg_moe_route_problem& p, int64_t token, Scores<A, kItems>& s) {
  const int lane = gpu::lane_index(), experts = static_cast<int>(p.experts);
  switch (p.dtype) {
    case MG_FLOAT64: load_logits<double>(p, token, s); break;
    case MG_FLOAT32: load_logits<float>(p, token, s); break;
    case MG_FLOAT16: load_logits<Half>(p, token, s); break;
    default: load_logits<Bfloat>(p, token, s);
  }
  s.sum = A(1);
  if (p.score == MG_MOE_SOFTMAX) {
    if constexpr (kept<kItems>()) {
      MG_UNROLL_ITEMS
      for (int i = 0; goes_on<kItems>(i, experts); ++i)
        if (s.values[i] > s.top) s.top = s.values[i];
    }
    s.top = gpu::team_max(s.top);
    A sum = A(0);
    MG_UNROLL_ITEMS
    for (int i = 0; goes_on<kItems>(i, experts); ++i) {
      const int e = i * gpu::kLanes + lane;
      A part = A(0);
      if constexpr (kept<kItems>())
        s.values[i] = part = e < experts ? gpu::exponential(s.values[i] - s.top) : A(0);
      else if (e < experts)
        part = gpu::exponential(logit_of<A>(p, token, e) - s.top);
      sum += part;
    }
    s.sum = gpu::team_sum(sum);
  }
  if constexpr (kept<kItems>()) {
    MG_UNROLL_ITEMS
    for (int i = 0; goes_on<kItems>(i, experts); ++i)
      s.values[i] = p.score == MG_MOE_SIGMOID ? score_of(p, s.values[i], s.top, s.sum) : s.values[i] / s.sum;
  }
}

// Of all lanes, the largest key with the smallest index among equal ones.
template <class Key>
MG_DEVICE int largest(Key key, int index) {
  const Key top = gpu::team_max(key);
  return 0x7fffffff - static_cast<int>(gpu::team_max(key == top ? static_cast<uint32_t>(0x7fffffff - index) : 0u));
}

// The groups that may be selected from, as bits.
template <class A, int kItems, class ChoiceOf>
MG_DEVICE uint64_t best_groups(const mg_moe_route_problem& p, const ChoiceOf& choice_of, A* room) {
  const int lane = gpu::lane_index(), experts = static_cast<int>(p.experts), size = experts / p.expert_groups;
  for (int q = 0; q < p.expert_groups; ++q) {
    A first = -infinity<A>(), second = -infinity<A>();
    MG_UNROLL_ITEMS
    for (int i = 0; goes_on<kItems>(i, experts); ++i) {
      const int e = i * gpu::kLanes + lane;
      if (e >= experts || e / size != q) continue;
      const A choice = choice_of(i, e);
      if (choice > first) {
        second = first;
        first = choice;
      } else if (choice > second) {
        second = choice;
      }
    }
    MG_UNROLL
    for (int step = gpu::kLanes / 2; step > 0; step /= 2) {
      const A a = gpu::value_of_lane(first, lane ^ step), b = gpu::value_of_lane(second, lane ^ step);
      const A low = a < first ? a : first, high = b > second ? b : second;
      first = a > first ? a : first;
      second = low > high ? low : high;
    }
    if (lane == 0) room[q] = p.group_score == MG_MOE_MAX ? first : first + second;
  }
  gpu::team_sync();
  uint64_t kept = 0;
  for (int round = 0; round < p.top_groups; ++round) {
    auto key = order_key(A(0));
    key = kTaken;
    int best = 0;
    for (int q = lane; q < p.expert_groups; q += gpu::kLanes) {
      const auto mine = order_key(room[q]);
      if (!(kept >> q & 1) && mine > key) {
        key = mine;
        best = q;
      }
    }
    kept |= uint64_t{1} << largest(key, best);
  }
  return kept;
}

// Selects the experts of one token. Lane j mod kLanes gives slot j's expert and weight to `put`.
template <class A, int kItems, int kTeams, class Put>
MG_DEVICE void select_token(const mg_moe_route_problem& p, int64_t token, SelectRoom<A, kTeams>& room, const Put& put) {
  const int lane = gpu::lane_index(), experts = static_cast<int>(p.experts), k = static_cast<int>(p.top_k);
  const int team = static_cast<int>(threadIdx.x) / gpu::kLanes;
  Scores<A, kItems> s;
  compute_scores(p, token, s);
  const auto choice_of = [&](int i, int e) {
    const A score = score_at<A, kItems>(p, token, s, i, e);
    return p.correction && e < experts ? score + static_cast<const A*>(p.correction)[e] : score;
  };
  const bool grouped = p.expert_groups > 1;
  const uint64_t allowed = grouped ? best_groups<A, kItems>(p, choice_of, room.group[team]) : ~uint64_t{0};
  const int size = grouped ? experts / p.expert_groups : experts;
  using Key = decltype(order_key(A(0)));
  const auto make_key = [&](int i, int e) -> Key {
    if (e >= experts) return kTaken;
    return grouped && !(allowed >> (e / size) & 1) ? Key(kBarred) : order_key(choice_of(i, e));
  };
  Key keys[kept<kItems>() ? kItems : 1];
  uint32_t taken = 0;  // items, where keys are not kept
  if constexpr (kept<kItems>()) {
    MG_UNROLL_ITEMS
    for (int i = 0; goes_on<kItems>(i, experts); ++i) keys[i] = make_key(i, i * gpu::kLanes + lane);
  }
  const auto key_of = [&](int i) -> Key {
    if constexpr (kept<kItems>())
      return keys[i];
    else
      return taken >> i & 1 ? Key(kTaken) : make_key(i, i * gpu::kLanes + lane);
  };
  A total = A(0);
  for (int j = 0; j < k; ++j) {
    Key key = key_of(0);
    int mine = 0;
    MG_UNROLL_ITEMS
    for (int i = 1; goes_on<kItems>(i, experts); ++i) {
      const Key other = key_of(i);
      if (other <= key) continue;
      key = other;
      mine = i;
    }
    const int e = largest(key, mine * gpu::kLanes + lane);
    A score = A(0);
    if constexpr (kept<kItems>()) {
      MG_UNROLL_ITEMS
      for (int i = 0; goes_on<kItems>(i, experts); ++i) {
        if (i * gpu::kLanes + lane != e) continue;
        score = s.values[i];
        keys[i] = kTaken;
      }
    } else if (mine * gpu::kLanes + lane == e) {
      score = score_at<A, kItems>(p, token, s, mine, e);
      taken |= 1u << mine;
    }
    score = gpu::value_of_lane(score, e % gpu::kLanes);
    total += score;
    if (lane == 0) {
      room.expert[team][j] = e;
      room.score[team][j] = score;
    }
  }
  gpu::team_sync();
  for (int j = lane; j < k; j += gpu::kLanes) {
    A weight = room.score[team][j];
    if (p.renormalize) weight /= total + A(1e-20);
    put(j, room.expert[team][j], weight * A(p.scale));
  }
  gpu::team_sync();
}

// dL/dl of one token, from the gradients g of its k weights. With the sum S of the k scores s_j + 1e-20 and factor c,
//   dL/ds_j = c (g_j - sum of g_i (s_i / S)) / S, or c g_j;   dL/dl_e = s_e (dL/ds_e - sum of dL/ds_j s_j) for a
//   softmax, and s_e (1 - s_e) dL/ds_e for a sigmoid.
template <class A, int kItems>
MG_DEVICE void route_gradient(const mg_moe_route_problem& p, int64_t token) {
  const int lane = gpu::lane_index(), experts = static_cast<int>(p.experts), k = static_cast<int>(p.top_k);
  Scores<A, kItems> s;
  compute_scores(p, token, s);
  const int64_t* ids = p.expert_ids + token * p.top_k;
  const A* grads = static_cast<const A*>(p.weights) + token * p.top_k;
  A scores[MG_MOE_MOST_SLOTS], total = A(1e-20), along = A(0);
  int chosen[MG_MOE_MOST_SLOTS];
  MG_UNROLL
  for (int j = 0; j < MG_MOE_MOST_SLOTS; ++j) {
    if (j >= k) continue;
    chosen[j] = static_cast<int>(ids[j]);
    scores[j] = score_of(p, logit_of<A>(p, token, chosen[j]), s.top, s.sum);
    total += scores[j];
  }
  MG_UNROLL
  for (int j = 0; j < MG_MOE_MOST_SLOTS; ++j)
    if (j < k) along += grads[j] * (scores[j] / total);
  A inner = A(0), slopes[MG_MOE_MOST_SLOTS];
  MG_UNROLL
  for (int j = 0; j < MG_MOE_MOST_SLOTS; ++j) {
    if (j >= k) continue;
    slopes[j] = A(p.scale) * (p.renormalize ? (grads[j] - along) / total : grads[j]);
    inner += slopes[j] * scores[j];
  }
  MG_UNROLL_ITEMS
  for (int i = 0; goes_on<kItems>(i, experts); ++i) {
    const int e = i * gpu::kLanes + lane;
    if (e >= experts) continue;
    A slope = A(0);
    MG_UNROLL
    for (int j = 0; j < MG_MOE_MOST_SLOTS; ++j)
      if (j < k && chosen[j] == e) slope = slopes[j];
    const A score = score_at<A, kItems>(p, token, s, i, e);
    const A value = score * (p.score == MG_MOE_SIGMOID ? (A(1) - score) * slope : slope - inner);
    simt::store<A>(p.grad_logits, p.dtype, token * p.experts + e, value);
  }
}

}  // namespace moe
}  // namespace multigemm
