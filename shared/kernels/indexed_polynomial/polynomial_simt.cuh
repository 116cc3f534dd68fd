// One thread for each row and channel (value, xgrad), or for each label, channel and eight terms (wgrad).
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
constexpr int kTerms = 8;      // of a thread of wgrad
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
      auto weight = [=](int32_t t) { return w[t * line]; };
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

// The term's head and pair, which a search in the tables finds.
MG_DEVICE int32_t last_before(const int32_t* table, int32_t count, int column, int32_t value) {
  int32_t low = 0, high = count;  // the first whose range ends after the value
  while (low < high) {
    const int32_t middle = low + (high - low) / 2;
    if (table[4 * middle + column] > value)
      high = middle;
    else
      low = middle + 1;
  }
  return low;
}

// Blocks of kChannels x slices threads; each slice adds every so many-th row of the label.
template <int M, class T>
MG_KERNEL void wgrad_simt(Arguments arguments) {
  MG_SHARED double shared[kSharedBytes / sizeof(double)];
  const mg_polynomial_problem& p = arguments.p;
  const int threads = arguments.threads, slices = arguments.slices;
  const int lane = static_cast<int>(threadIdx.x) % kChannels, slice = static_cast<int>(threadIdx.x) / kChannels;
  const Slots<T> slots{reinterpret_cast<T*>(shared) + threadIdx.x, threads};
  const int64_t row = p.width + 1, gradients = (M + 1) * row;
  const int64_t channel_blocks = (p.channels + kChannels - 1) / kChannels;
  const int64_t term_blocks = (p.term_count + kTerms - 1) / kTerms;
  constexpr int kFull = (1 << M) - 1;
  auto factor = [=](int a, int32_t i) { return slots(a * row + i); };
  for (int64_t b = blockIdx.x; b < p.groups * channel_blocks * term_blocks; b += gridDim.x) {
    const int64_t t0 = b % term_blocks * kTerms, c = b / term_blocks % channel_blocks * kChannels + lane;
    const int64_t g = b / term_blocks / channel_blocks;
    int64_t begin = p.rows && g > 0 ? p.ends[g - 1] : 0, end = p.rows ? p.ends[g] : 0;  // clamped, as they are data
    begin = begin < 0 ? 0 : begin < p.rows ? begin : p.rows;
    end = end < begin ? begin : end < p.rows ? end : p.rows;
    int32_t index[kTerms][4];
    T sums[kTerms];
    MG_UNROLL
    for (int s = 0; s < kTerms; ++s) {
      sums[s] = T(0);
      const int32_t t = static_cast<int32_t>(t0 + s < p.term_count ? t0 + s : t0);
      const int32_t q = last_before(p.pairs, static_cast<int32_t>(p.pair_count), 2, t);
      const int32_t h = last_before(p.heads, static_cast<int32_t>(p.head_count), 3, q);
      index[s][0] = p.heads[4 * h];
      index[s][1] = p.heads[4 * h + 1];
      index[s][2] = p.pairs[4 * q];
      index[s][3] = p.last[t];
    }
    if (c < p.channels)
      for (int64_t i = begin + slice; i < end; i += slices) {
        const int64_t n = p.permutation[i];
        load_factors<M>(p, n, c, slots);
        const T* gy = static_cast<const T*>(p.gy) + n * p.gy_row;
        for (int64_t d = 0; d < p.components; ++d)
          slots(gradients + d) = gy[p.places[2 * (p.width + d)] + c * p.places[2 * (p.width + d) + 1]];
        MG_UNROLL
        for (int s = 0; s < kTerms; ++s) {
          T product[1 << M];
          product_of_pair<M>(index[s][1], index[s][2], slots(gradients + index[s][0]), factor, product);
          if (M < 3) sums[s] += product[kFull] * factor(0, index[s][3]);
          MG_UNROLL
          for (int a = 0; a < M; ++a) sums[s] += product[kFull & ~(1 << a)] * factor(a + 1, index[s][3]);
        }
      }
    __syncthreads();  // before the slots are used for the slices' sums
    MG_UNROLL
    for (int s = 0; s < kTerms; ++s) slots(s) = sums[s];
    __syncthreads();
    if (slice == 0 && c < p.channels)
      for (int s = 0; s < kTerms && t0 + s < p.term_count; ++s) {
        T total = T(0);
        for (int other = 0; other < slices; ++other)
          total += reinterpret_cast<T*>(shared)[s * threads + other * kChannels + lane];
        static_cast<T*>(p.out)[g * p.out_stride[0] + (t0 + s) * p.out_stride[1] + c] = total;
      }
    __syncthreads();
  }
}

template <class T>
int launch_as(const mg_polynomial_problem& p, const gpu::Queue& queue) {
  const int64_t factors = (p.directions + 1) * (p.width + 1);
  const int64_t slots =
      factors + (p.kind == MG_POLYNOMIAL_XGRAD ? p.width + 1 : p.components + 1) + (factors < kTerms ? kTerms : 0);
  const int64_t fitting = kSharedBytes / (slots * static_cast<int64_t>(sizeof(T)));
  if (fitting < (p.kind == MG_POLYNOMIAL_WGRAD ? kChannels : 1)) return -1;
  Arguments a{p, 0, 1};
  if (p.kind == MG_POLYNOMIAL_WGRAD) {
    a.slices = static_cast<int32_t>(fitting / kChannels < 4 ? fitting / kChannels : 4);
    a.threads = kChannels * a.slices;
    const int64_t wanted =
        p.groups * ((p.channels + kChannels - 1) / kChannels) * ((p.term_count + kTerms - 1) / kTerms);
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
