// Contractions whose terms are compiled in: one thread for each row and channel (value, xgrad), or for each channel of
// a chunk of rows in the order of their labels (wgrad).
// Formula: for each weight p and component d the polynomial sum over terms of factor X[i] X[j] X[k], by the rule of
//          Horner, where X[D] = 1; y[d] adds w[p] times it. Along one direction each number carries its derivative.
// Layouts: mg_polynomial_problem. The components of a thread lie in registers, since the terms are constants.
// Dtypes:  float64, float32; sums in the same.
// Architectures: any GPU that nvcc or hipcc compile for, and the host.
// Limits:  the tables of unrolled_terms.h, one direction at most, 2^31 - 1 columns. No atomics: a chunk adds its rows
//          in order, and where a label's rows lie in several chunks a second kernel adds theirs in order.
#pragma once

#include "kernels/indexed_polynomial/unrolled_simt.h"
#include "vendor/gpu.h"

namespace multigemm {
namespace polynomial_unrolled {

constexpr int kOutputs = 3, kMostComponents = 9;
constexpr int kMostThreads = 256;
constexpr int64_t kMostBlocks = 1 << 20;
// Blocks of so many threads on a multiprocessor: what registers allow. For AMD's compiler the fewest, or it spills.
#if defined(__HIP__)
template <int M, class T, bool Value = false>
constexpr int kBlocks = 1;
#else
template <int M, class T, bool Value = false>
constexpr int kBlocks = (sizeof(T) == 4 ? 2 : 1) + (Value && M == 0 ? 1 : 0);
#endif
enum Kind { kValue, kXGrad, kWGrad };

// Ones, which compilers don't know: each group of terms stands behind a branch that is always taken.
struct Always {
  uint32_t bits[4];
};

struct Arguments {
  mg_polynomial_problem p;
  int32_t outputs;                                            // how many there are, of Terms0e, Terms1o and Terms2e
  int32_t which[kOutputs];                                    // which ones
  int32_t first_weight[kOutputs], first_component[kOutputs];  // of each that there is
  Always always;
  int64_t chunk;  // rows, of wgrad
  void* partial;  // [chunks, 2, P, C]: of a label that goes on from or in another one
};

// M = 1: with its derivative along the direction.
template <int M, class T>
struct Number {
  T value;
};
template <class T>
struct Number<1, T> {
  T value, slope;
};

template <class T>
MG_DEVICE T carried(const Number<0, T>& a) {
  return a.value;
}
template <class T>
MG_DEVICE T carried(const Number<1, T>& a) {
  return a.slope;
}
template <class T>
MG_DEVICE T carried_product(const Number<0, T>& a, const Number<0, T>& b) {
  return a.value * b.value;
}
template <class T>
MG_DEVICE T carried_product(const Number<1, T>& a, const Number<1, T>& b) {
  return a.value * b.slope + a.slope * b.value;
}

// Makes 16 registers unknown to the compiler, at no instruction. Or it would compute what thousands of terms have in
// common ahead of them, and hold it in hundreds of registers, which is more than there are. The assembler of a GPU,
// which doesn't see this, needs `Always` too.
template <class T>
MG_DEVICE void forget(T (&registers)[kWidth]) {
  MG_UNROLL
  for (T& r : registers) gpu::opaque(r);
}

template <int M, class T>
struct Components {
  T x[kWidth], v[M ? kWidth : 1];

  // to += a X[I]
  template <int I>
  MG_DEVICE void add_times(const Number<M, T>& a, Number<M, T>& to) const {
    if constexpr (I == kWidth) {
      to.value += a.value;
      if constexpr (M == 1) to.slope += a.slope;
    } else {
      to.value += a.value * x[I];
      if constexpr (M == 1) {
        to.slope += a.slope * x[I];
        to.slope += a.value * v[I];
      }
    }
  }
  // a X[I]
  template <int I>
  MG_DEVICE Number<M, T> times(const Number<M, T>& a) const {
    Number<M, T> product = a;
    if constexpr (I != kWidth) {
      product.value = a.value * x[I];
      if constexpr (M == 1) product.slope = a.slope * x[I] + a.value * v[I];
    }
    return product;
  }
};

// A term of a table, and where those with the same p, d, i or j begin and end.
template <class Table, int E>
struct Term {
  static constexpr uint32_t kCode = Table::kTerms[E];
  static constexpr int kWeight = kCode >> 27, kComponent = kCode >> 23 & 15;
  static constexpr int kI = kCode >> 18 & 31, kJ = kCode >> 13 & 31, kK = kCode >> 8 & 31;
  static constexpr double kFactor = Table::kFactors[kCode & 255];
  static constexpr bool begins(int shift) { return E == 0 || Table::kTerms[E ? E - 1 : 0] >> shift != kCode >> shift; }
  static constexpr bool ends(int shift) {
    constexpr int next = E + 1 < Table::kCount ? E + 1 : E;
    return next == E || Table::kTerms[next] >> shift != kCode >> shift;
  }
  static constexpr bool kBeginsPair = begins(13), kEndsPair = ends(13);
  static constexpr bool kBeginsHead = begins(18), kEndsHead = ends(18);
  static constexpr bool kBeginsComponent = begins(23), kEndsComponent = ends(23);
  static constexpr bool kBeginsWeight = begins(27);
};

// The rule of Horner, one term after the other. Value: `sums` are the components of y; xgrad: of the gradient; wgrad:
// of the weights. w(p) is a weight of the label, g[d] a component of gy.
template <int kKind, class Table, int M, class T, class Weight>
struct Walk {
  Components<M, T> x;
  const Weight& weight;
  const T* g;
  T* sums;
  T w, scale;
  Number<M, T> on_head, on_pair, pair, head, all;

  template <int E>
  MG_DEVICE void step() {
    using Here = Term<Table, E>;
    if constexpr (Here::kBeginsWeight && kKind != kWGrad) w = weight(Here::kWeight);
    if constexpr (Here::kBeginsComponent) {
      forget(x.x);
      if constexpr (M == 1) forget(x.v);
      all = Number<M, T>{};
      if constexpr (kKind == kXGrad) scale = w * g[Here::kComponent];
    }
    if constexpr (Here::kBeginsHead) {
      head = Number<M, T>{};
      if constexpr (kKind == kXGrad) {
        on_head = Number<M, T>{};
        on_head.value = scale;
        on_head = x.template times<Here::kI>(on_head);
      }
    }
    if constexpr (Here::kBeginsPair) {
      pair = Number<M, T>{};
      if constexpr (kKind == kXGrad) on_pair = x.template times<Here::kJ>(on_head);
    }
    Number<M, T> factor{};
    factor.value = T(Here::kFactor);
    if constexpr (Here::kK == kWidth) {
      pair.value += factor.value;
    } else {
      pair.value += factor.value * x.x[Here::kK];
      if constexpr (M == 1) pair.slope += factor.value * x.v[Here::kK];
      if constexpr (kKind == kXGrad) sums[Here::kK] += factor.value * carried(on_pair);
    }
    if constexpr (Here::kEndsPair) {
      x.template add_times<Here::kJ>(pair, head);
      if constexpr (kKind == kXGrad && Here::kJ != kWidth) sums[Here::kJ] += carried_product(on_head, pair);
    }
    if constexpr (Here::kEndsHead) {
      if constexpr (kKind == kXGrad)
        sums[Here::kI] += scale * carried(head);
      else
        x.template add_times<Here::kI>(head, all);
    }
    if constexpr (Here::kEndsComponent && kKind == kValue) sums[Here::kComponent] += w * carried(all);
    if constexpr (Here::kEndsComponent && kKind == kWGrad) sums[Here::kWeight] += g[Here::kComponent] * carried(all);
  }

  // A branch around the terms of each weight, always taken, keeps the compiler from finding what thousands of terms
  // have in common, which it would hold in more registers than there are.
  // Halves of halves, as compilers take long over deep nesting.
  template <int First, int Last>
  MG_DEVICE void groups(const Always& always) {
    if constexpr (Last - First == 1) {
      if (always.bits[First / 32] >> First % 32 & 1) steps<Table::kGroups[First], Table::kGroups[First + 1]>();
    } else {
      groups<First, (First + Last) / 2>(always);
      groups<(First + Last) / 2, Last>(always);
    }
  }

  template <int Begin, int End>
  MG_DEVICE void steps() {
    if constexpr (End - Begin == 1) {
      step<Begin>();
    } else {
      steps<Begin, (Begin + End) / 2>();
      steps<(Begin + End) / 2, End>();
    }
  }
};

template <int kKind, class Table, int M, class T, class Weight>
MG_DEVICE void walk(const Components<M, T>& x, const Weight& weight, const T* g, T* sums, const Always& always) {
  Walk<kKind, Table, M, T, Weight> terms{x, weight, g, sums, T(0), T(0), {}, {}, {}, {}, {}};
  terms.template groups<0, Table::kGroupCount>(always);
}

// Column of component i of channel 0, and from channel to channel: x's, then y's. Volatile: read where they are used,
// instead of kept in registers that are dear.
struct Places {
  volatile int32_t first[kWidth + kMostComponents], step[kWidth + kMostComponents];
  MG_DEVICE int32_t column(int i, int32_t c) const { return first[i] + c * step[i]; }
};

MG_DEVICE void read_places(const mg_polynomial_problem& p, Places& places) {
  for (int i = static_cast<int>(threadIdx.x); i < kWidth + p.components; i += static_cast<int>(blockDim.x)) {
    places.first[i] = static_cast<int32_t>(p.places[2 * i]);
    places.step[i] = static_cast<int32_t>(p.places[2 * i + 1]);
  }
  __syncthreads();
}

template <int M, class T>
MG_DEVICE void load(const mg_polynomial_problem& p, const Places& places, int64_t n, int32_t c, Components<M, T>& to) {
  const T* const x = static_cast<const T*>(p.x) + n * p.x_row;
  MG_UNROLL
  for (int i = 0; i < kWidth; ++i) to.x[i] = x[places.column(i, c)];
  if constexpr (M == 1) {
    const T* const v = static_cast<const T*>(p.direction[0]) + n * p.direction_row[0];
    MG_UNROLL
    for (int i = 0; i < kWidth; ++i) to.v[i] = v[places.column(i, c)];
  }
}

template <class Table, class T>
MG_DEVICE void load_gradient(const mg_polynomial_problem& p, const Places& places, int first, int64_t n, int32_t c,
                             T (&g)[Table::kComponents]) {
  const T* const gy = static_cast<const T*>(p.gy) + n * p.gy_row;
  MG_UNROLL
  for (int d = 0; d < Table::kComponents; ++d) g[d] = gy[places.column(kWidth + first + d, c)];
}

template <class Table, int M, class T>
MG_DEVICE void write_value(const Arguments& a, const Places& places, int first_weight, int first_component, int64_t n,
                           int32_t c) {
  const mg_polynomial_problem& p = a.p;
  const int64_t g = p.labels[n], line = p.w_stride[1];
  T sums[Table::kComponents] = {};
  if (g >= 0 && g < p.groups) {
    Components<M, T> x;
    load(p, places, n, c, x);
    const T* const w = static_cast<const T*>(p.w) + g * p.w_stride[0] + first_weight * line + c;
    walk<kValue, Table>(x, [=](int at) { return w[at * line]; }, static_cast<const T*>(nullptr), sums, a.always);
  }
  T* const out = static_cast<T*>(p.out) + n * p.out_row;
  MG_UNROLL
  for (int d = 0; d < Table::kComponents; ++d) out[places.column(kWidth + first_component + d, c)] = sums[d];
}

template <int M, class T>
MG_KERNEL MG_BLOCK(kMostThreads, (kBlocks<M, T, true>)) void value_kernel(Arguments a) {
  MG_SHARED Places places;
  const mg_polynomial_problem& p = a.p;
  read_places(p, places);
  const int64_t block = int64_t{blockIdx.x} / a.outputs, blocks = int64_t{gridDim.x} / a.outputs;
  const int at = static_cast<int>(int64_t{blockIdx.x} % a.outputs);
  const int weight = a.first_weight[at], component = a.first_component[at];
  for (int64_t i = block * blockDim.x + threadIdx.x; i < p.rows * p.channels; i += blocks * blockDim.x) {
    const int64_t n = i / p.channels;
    const int32_t c = static_cast<int32_t>(i - n * p.channels);
    switch (a.which[at]) {
      case 0: write_value<Terms0e, M, T>(a, places, weight, component, n, c); break;
      case 1: write_value<Terms1o, M, T>(a, places, weight, component, n, c); break;
      default: write_value<Terms2e, M, T>(a, places, weight, component, n, c);
    }
  }
}

template <class Table, int M, class T>
MG_DEVICE void add_xgrad(const Arguments& a, const Places& places, int first_weight, int first_component, int64_t n,
                         int32_t c, const T* w, const Components<M, T>& x, T (&sums)[kWidth]) {
  const mg_polynomial_problem& p = a.p;
  const int64_t line = p.w_stride[1];
  T g[Table::kComponents];
  load_gradient<Table>(p, places, first_component, n, c, g);
  w += first_weight * line;
  walk<kXGrad, Table>(x, [=](int at) { return w[at * line]; }, g, sums, a.always);
}

template <int M, class T>
MG_KERNEL MG_BLOCK(kMostThreads, (kBlocks<M, T>)) void xgrad_kernel(Arguments a) {
  MG_SHARED Places places;
  const mg_polynomial_problem& p = a.p;
  read_places(p, places);
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < p.rows * p.channels;
       i += int64_t{gridDim.x} * blockDim.x) {
    const int64_t n = i / p.channels, label = p.labels[n];
    const int32_t c = static_cast<int32_t>(i - n * p.channels);
    T sums[kWidth] = {};
    if (label >= 0 && label < p.groups) {
      Components<M, T> x;
      load(p, places, n, c, x);
      const T* const w = static_cast<const T*>(p.w) + label * p.w_stride[0] + c;
      for (int at = 0; at < a.outputs; ++at) {
        const int weight = a.first_weight[at], component = a.first_component[at];
        switch (a.which[at]) {
          case 0: add_xgrad<Terms0e>(a, places, weight, component, n, c, w, x, sums); break;
          case 1: add_xgrad<Terms1o>(a, places, weight, component, n, c, w, x, sums); break;
          default: add_xgrad<Terms2e>(a, places, weight, component, n, c, w, x, sums);
        }
      }
    }
    T* const out = static_cast<T*>(p.out) + n * p.out_row;
    MG_UNROLL
    for (int d = 0; d < kWidth; ++d) out[places.column(d, c)] = sums[d];
  }
}

// The end of a label's rows, and with -1 the begin of the first one's. Clamped, as the ends are data.
MG_DEVICE int64_t end_of(const mg_polynomial_problem& p, int64_t g) {
  const int64_t end = g < 0 || p.rows == 0 ? 0 : p.ends[g];
  return end < 0 ? 0 : end < p.rows ? end : p.rows;
}

template <class Table, int M, class T>
MG_DEVICE void add_wgrad(const Arguments& a, const Places& places, int first_weight, int first_component, int64_t chunk,
                         int32_t c) {
  const mg_polynomial_problem& p = a.p;
  const int64_t first = chunk * a.chunk, stop = first + a.chunk < p.rows ? first + a.chunk : p.rows;
  int64_t below = 0, g = p.groups;  // the first label whose rows end past the first one here
  while (below < g) {
    const int64_t middle = below + (g - below) / 2;
    if (end_of(p, middle) <= first)
      below = middle + 1;
    else
      g = middle;
  }
  for (int64_t i = first; i < stop && g < p.groups; ++g) {
    const int64_t begin = i, label_end = end_of(p, g), end = label_end < stop ? label_end : stop;
    if (end <= begin) continue;
    T sums[Table::kWeights] = {};
    for (; i < end; ++i) {
      const int64_t n = p.permutation[i];
      Components<M, T> x;
      T gy[Table::kComponents];
      load(p, places, n, c, x);
      load_gradient<Table>(p, places, first_component, n, c, gy);
      walk<kWGrad, Table>(x, [](int) { return T(0); }, gy, sums, a.always);
    }
    const bool whole = begin == end_of(p, g - 1) && end == label_end;
    const int64_t line = whole ? p.out_stride[1] : p.channels;
    T* to = static_cast<T*>(a.partial) + (2 * chunk + (begin == first ? 0 : 1)) * p.weight_count * line;
    if (whole) to = static_cast<T*>(p.out) + g * p.out_stride[0];
    to += first_weight * line + c;
    MG_UNROLL
    for (int at = 0; at < Table::kWeights; ++at) to[at * line] = sums[at];
  }
}

template <int M, class T>
MG_KERNEL MG_BLOCK(kMostThreads, (kBlocks<M, T>)) void wgrad_kernel(Arguments a) {
  MG_SHARED Places places;
  const mg_polynomial_problem& p = a.p;
  read_places(p, places);
  const int64_t block = int64_t{blockIdx.x} / a.outputs, blocks = int64_t{gridDim.x} / a.outputs;
  const int at = static_cast<int>(int64_t{blockIdx.x} % a.outputs);
  const int weight = a.first_weight[at], component = a.first_component[at];
  const int64_t chunks = (p.rows + a.chunk - 1) / a.chunk;
  for (int64_t i = block * blockDim.x + threadIdx.x; i < chunks * p.channels; i += blocks * blockDim.x) {
    const int64_t chunk = i / p.channels;
    const int32_t c = static_cast<int32_t>(i - chunk * p.channels);
    switch (a.which[at]) {
      case 0: add_wgrad<Terms0e, M, T>(a, places, weight, component, chunk, c); break;
      case 1: add_wgrad<Terms1o, M, T>(a, places, weight, component, chunk, c); break;
      default: add_wgrad<Terms2e, M, T>(a, places, weight, component, chunk, c);
    }
  }
}

// The labels that wgrad_kernel did not write: those without rows, and those with rows in several chunks.
template <class T>
MG_KERNEL MG_BLOCK(kMostThreads, 1) void join_kernel(Arguments a) {
  const mg_polynomial_problem& p = a.p;
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < p.groups * p.weight_count * p.channels;
       i += int64_t{gridDim.x} * blockDim.x) {
    const int64_t c = i % p.channels, weight = i / p.channels % p.weight_count, g = i / p.channels / p.weight_count;
    const int64_t begin = end_of(p, g - 1), end = end_of(p, g);
    T sum = T(0);
    if (begin < end) {
      const int64_t first = begin / a.chunk, last = (end - 1) / a.chunk;
      if (first == last) continue;
      const int64_t step = p.weight_count * p.channels;  // of a slot
      const T* const from = static_cast<const T*>(a.partial) + weight * p.channels + c;
      sum = from[(2 * first + (begin == first * a.chunk ? 0 : 1)) * step];
      MG_UNROLL_BY(8)
      for (int64_t chunk = first + 1; chunk <= last; ++chunk) sum += from[2 * chunk * step];
    }
    static_cast<T*>(p.out)[g * p.out_stride[0] + weight * p.out_stride[1] + c] = sum;
  }
}

// --- host -----------------------------------------------------------------------------------------

constexpr int kWeightsOf[kOutputs] = {Terms0e::kWeights, Terms1o::kWeights, Terms2e::kWeights};
constexpr int kComponentsOf[kOutputs] = {Terms0e::kComponents, Terms1o::kComponents, Terms2e::kComponents};

inline Arguments arguments_of(const mg_polynomial_problem& p, int outputs) {
  Arguments a{p, 0, {}, {}, {}, {{~0u, ~0u, ~0u, ~0u}}, 0, nullptr};
  int32_t weight = 0, component = 0;
  for (int which = 0; which < kOutputs; ++which) {
    if (!(outputs >> which & 1)) continue;
    a.which[a.outputs] = which;
    a.first_weight[a.outputs] = weight;
    a.first_component[a.outputs++] = component;
    weight += kWeightsOf[which];
    component += kComponentsOf[which];
  }
  return a;
}

// Small blocks where there are few of them.
inline int threads_for(int64_t items) { return items < 1 << 18 ? 64 : 128; }
inline int64_t blocks_for(int64_t items, int threads) {
  const int64_t blocks = (items + threads - 1) / threads;
  return blocks < kMostBlocks ? blocks : kMostBlocks;
}

template <int M, class T>
int launch_along(const Arguments& a, const gpu::Queue& queue) {
  const mg_polynomial_problem& p = a.p;
  if (p.kind == MG_POLYNOMIAL_WGRAD) {
    const int64_t items = (p.rows + a.chunk - 1) / a.chunk * p.channels;
    int error = 0;
    if (items != 0) error = gpu::launch(wgrad_kernel<M, T>, a.outputs * blocks_for(items, 64), 64, queue, a);
    if (error != 0) return error;
    const int64_t sums = p.groups * p.weight_count * p.channels;
    return gpu::launch(join_kernel<T>, blocks_for(sums, kMostThreads), kMostThreads, queue, a);
  }
  const int64_t items = p.rows * p.channels;
  const int threads = threads_for(items);
  if (p.kind == MG_POLYNOMIAL_XGRAD)
    return gpu::launch(xgrad_kernel<M, T>, blocks_for(items, threads), threads, queue, a);
  return gpu::launch(value_kernel<M, T>, a.outputs * blocks_for(items, threads), threads, queue, a);
}

// For a problem with outputs_of(p) = `outputs` and room_of(p) bytes at `room`. 0, or the runtime's error number.
template <class T>
int launch(const mg_polynomial_problem& p, int outputs, void* room, const gpu::Queue& queue) {
  Arguments a = arguments_of(p, outputs);
  a.chunk = chunk_of(p);
  a.partial = room;
  return p.directions == 0 ? launch_along<0, T>(a, queue) : launch_along<1, T>(a, queue);
}

}  // namespace polynomial_unrolled
}  // namespace multigemm
