// One thread for each row and channel (value, xgrad), or for each label, channel and weight (wgrad).
// Formula, layouts: evaluate.h, mg_polynomial_problem. A thread's components lie in shared memory, as indices are data.
// Dtypes:  float64, float32; sums in the same.
// Architectures: any GPU that nvcc or hipcc compile for, and the host.
// Limits:  none but 64-bit offsets; components that fill shared memory make blocks small. No atomics: the gradient in w
//          adds rows in the order of the permutation, over four slices of them, then the slices in order.
#pragma once

#include "multigemm/abi_polynomial.h"
#include "vendor/gpu.h"

#undef MG_POLYNOMIAL
#define MG_POLYNOMIAL polynomial_simt
#include "kernels/indexed_polynomial/evaluate.h"

namespace multigemm {
namespace polynomial_simt {

constexpr int kSharedBytes = 48 * 1024;
constexpr int kMostThreads = 256;
constexpr int kChannels = 32;  // of a block of wgrad
constexpr int64_t kMostBlocks = 1 << 20;

struct Arguments {
  mg_polynomial_problem p;
  int32_t threads, slices;
};

// The places of one thread: slot s is `at[s * stride]`.
template <class T>
struct Slots {
  T* at;
  int stride;
  MG_DEVICE T& operator()(int64_t slot) const { return at[slot * stride]; }
};

// x and the directions from slot 0 on, each with its component D, which is constant.
template <int M, class T>
MG_DEVICE void load_factors(const mg_polynomial_problem& p, int64_t n, int64_t c, const Slots<T>& slots) {
  const int64_t row = p.width + 1;
  for (int64_t i = 0; i < p.width; ++i) {
    const int64_t column = p.places[2 * i] + c * p.places[2 * i + 1];
    slots(i) = static_cast<const T*>(p.x)[n * p.x_row + column];
    MG_UNROLL
    for (int a = 0; a < M; ++a)
      slots((a + 1) * row + i) = static_cast<const T*>(p.direction[a])[n * p.direction_row[a] + column];
  }
  slots(p.width) = T(1);
  MG_UNROLL
  for (int a = 0; a < M; ++a) slots((a + 1) * row + p.width) = T(0);
}

template <int M, class T, bool Gradient>
MG_KERNEL void rows_simt(Arguments arguments) {
  MG_SHARED double shared[kSharedBytes / sizeof(double)];
  const mg_polynomial_problem& p = arguments.p;
  const Slots<T> slots{reinterpret_cast<T*>(shared) + threadIdx.x, arguments.threads};
  const int64_t row = p.width + 1, sums = (M + 1) * row, count = Gradient ? p.width : p.components;
  const Tables tables{p.heads, p.pairs, p.last};
  auto factor = [=](int a, int32_t i) { return slots(a * row + i); };
  auto to = [=](int32_t at, T v) { slots(sums + at) += v; };
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < p.rows * p.channels;
       i += int64_t{gridDim.x} * blockDim.x) {
    const int64_t n = i / p.channels, c = i % p.channels, g = p.labels[n];
    for (int64_t s = 0; s <= count; ++s) slots(sums + s) = T(0);
    if (g >= 0 && g < p.groups) {
      load_factors<M>(p, n, c, slots);
      const T* w = static_cast<const T*>(p.w) + g * p.w_stride[0] + c;
      const int64_t line = p.w_stride[1];
      const int32_t* last = p.last;
      const T* term_factors = static_cast<const T*>(p.factors);
      auto weight = [=](int32_t t) { return term_factors[t] * w[last[2 * t + 1] * line]; };
      if constexpr (Gradient) {
        const T* gy = static_cast<const T*>(p.gy) + n * p.gy_row;
        const int64_t* places = p.places + 2 * p.width;
        auto gradient = [=](int32_t d) { return gy[places[2 * d] + c * places[2 * d + 1]]; };
        xgrad<M, T>(tables, static_cast<int32_t>(p.head_count), factor, weight, gradient, to);
      } else {
        value<M, T>(tables, static_cast<int32_t>(p.head_count), factor, weight, to);
      }
    }
    T* out = static_cast<T*>(p.out) + n * p.out_row;
    const int64_t* places = p.places + (Gradient ? 0 : 2 * p.width);
    for (int64_t s = 0; s < count; ++s) out[places[2 * s] + c * places[2 * s + 1]] = slots(sums + s);
  }
}

// Blocks of kChannels x slices threads, for one weight each; a slice adds every so many-th row of the label.
template <int M, class T>
MG_KERNEL void wgrad_simt(Arguments arguments) {
  MG_SHARED double shared[kSharedBytes / sizeof(double)];
  const mg_polynomial_problem& p = arguments.p;
  const int threads = arguments.threads, slices = arguments.slices;
  const int lane = static_cast<int>(threadIdx.x) % kChannels, slice = static_cast<int>(threadIdx.x) / kChannels;
  const Slots<T> slots{reinterpret_cast<T*>(shared) + threadIdx.x, threads};
  const int64_t row = p.width + 1, gradients = (M + 1) * row;
  const int64_t channel_blocks = (p.channels + kChannels - 1) / kChannels;
  const T* const factors = static_cast<const T*>(p.factors);
  constexpr int kFull = (1 << M) - 1;
  auto factor = [=](int a, int32_t i) { return slots(a * row + i); };
  for (int64_t b = blockIdx.x; b < p.groups * channel_blocks * p.weight_count; b += gridDim.x) {
    const int64_t weight = b % p.weight_count, c = b / p.weight_count % channel_blocks * kChannels + lane;
    const int64_t g = b / p.weight_count / channel_blocks;
    int64_t begin = p.rows && g > 0 ? p.ends[g - 1] : 0, end = p.rows ? p.ends[g] : 0;  // clamped, as they are data
    begin = begin < 0 ? 0 : begin < p.rows ? begin : p.rows;
    end = end < begin ? begin : end < p.rows ? end : p.rows;
    const int32_t first = p.rows && weight > 0 ? p.entry_ends[weight - 1] : 0;
    const int32_t last = p.rows ? p.entry_ends[weight] : 0;
    T sum = T(0);
    if (c < p.channels)
      for (int64_t i = begin + slice; i < end; i += slices) {
        const int64_t n = p.permutation[i];
        load_factors<M>(p, n, c, slots);
        const T* gy = static_cast<const T*>(p.gy) + n * p.gy_row;
        for (int64_t d = 0; d < p.components; ++d)
          slots(gradients + d) = gy[p.places[2 * (p.width + d)] + c * p.places[2 * (p.width + d) + 1]];
        for (int32_t e = first; e < last; ++e) {
          const int32_t* const entry = p.entries + 5 * e;
          T product[1 << M];
          product_of_pair<M>(entry[1], entry[2], slots(gradients + entry[0]), factor, product);
          T total = M < 3 ? product[kFull] * factor(0, entry[3]) : T(0);
          MG_UNROLL
          for (int a = 0; a < M; ++a) total += product[kFull & ~(1 << a)] * factor(a + 1, entry[3]);
          sum += factors[entry[4]] * total;
        }
      }
    __syncthreads();  // before the slots are used for the slices' sums
    slots(0) = sum;
    __syncthreads();
    if (slice == 0 && c < p.channels) {
      T total = T(0);
      for (int other = 0; other < slices; ++other) total += reinterpret_cast<T*>(shared)[other * kChannels + lane];
      static_cast<T*>(p.out)[g * p.out_stride[0] + weight * p.out_stride[1] + c] = total;
    }
    __syncthreads();
  }
}

template <class T>
int launch_as(const mg_polynomial_problem& p, const gpu::Queue& queue) {
  const int64_t factors = (p.directions + 1) * (p.width + 1);
  const int64_t slots = factors + (p.kind == MG_POLYNOMIAL_XGRAD ? p.width + 1 : p.components + 1);
  const int64_t fitting = kSharedBytes / (slots * static_cast<int64_t>(sizeof(T)));
  if (fitting < (p.kind == MG_POLYNOMIAL_WGRAD ? kChannels : 1)) return -1;
  Arguments a{p, 0, 1};
  if (p.kind == MG_POLYNOMIAL_WGRAD) {
    a.slices = static_cast<int32_t>(fitting / kChannels < 4 ? fitting / kChannels : 4);
    a.threads = kChannels * a.slices;
    const int64_t wanted = p.groups * ((p.channels + kChannels - 1) / kChannels) * p.weight_count;
    const int64_t blocks = wanted < kMostBlocks ? wanted : kMostBlocks;
    switch (p.directions) {
      case 0: return gpu::launch(wgrad_simt<0, T>, blocks, a.threads, queue, a);
      case 1: return gpu::launch(wgrad_simt<1, T>, blocks, a.threads, queue, a);
      case 2: return gpu::launch(wgrad_simt<2, T>, blocks, a.threads, queue, a);
      default: return gpu::launch(wgrad_simt<3, T>, blocks, a.threads, queue, a);
    }
  }
  int64_t threads = fitting < kMostThreads ? fitting : kMostThreads;
  if (threads >= 32) threads -= threads % 32;
  a.threads = static_cast<int32_t>(threads);
  const int64_t wanted = (p.rows * p.channels + threads - 1) / threads;
  const int64_t blocks = wanted < kMostBlocks ? wanted : kMostBlocks;
  if (p.kind == MG_POLYNOMIAL_XGRAD) switch (p.directions) {
      case 0: return gpu::launch(rows_simt<0, T, true>, blocks, a.threads, queue, a);
      case 1: return gpu::launch(rows_simt<1, T, true>, blocks, a.threads, queue, a);
      default: return gpu::launch(rows_simt<2, T, true>, blocks, a.threads, queue, a);
    }
  switch (p.directions) {
    case 0: return gpu::launch(rows_simt<0, T, false>, blocks, a.threads, queue, a);
    case 1: return gpu::launch(rows_simt<1, T, false>, blocks, a.threads, queue, a);
    case 2: return gpu::launch(rows_simt<2, T, false>, blocks, a.threads, queue, a);
    default: return gpu::launch(rows_simt<3, T, false>, blocks, a.threads, queue, a);
  }
}

// 0, the runtime's error number, or -1 where the components of a row pass shared memory.
inline int launch(const mg_polynomial_problem& p, const gpu::Queue& queue) {
  return p.dtype == MG_FLOAT64 ? launch_as<double>(p, queue) : launch_as<float>(p, queue);
}

}  // namespace polynomial_simt
}  // namespace multigemm
