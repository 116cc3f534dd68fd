// One spelling for CUDA, HIP and the host. Besides kernels of one architecture this is the only file that says
// cuda* or hip*. Without a GPU compiler the same kernel source runs on the CPU: a block's threads are fibers of one
// thread that switch at __syncthreads (gpu_host.h), so an index error or a missing barrier shows without a GPU.
#pragma once

#include <stdint.h>

#if defined(__HIP__)
#include <string.h>

#include "vendor/hip_api.h"
#define MG_GPU 1
#elif defined(__CUDACC__)
#include <cuda_runtime.h>
#define MG_GPU 1
#endif

#if defined(MG_GPU)

#define MG_KERNEL __global__
#define MG_DEVICE __device__ __forceinline__
#define MG_SHARED __shared__
#define MG_DYNAMIC_SHARED(name) extern __shared__ __align__(16) unsigned char name[]
// Of a kernel whose blocks have so many threads, how many of them a multiprocessor keeps. AMD's compiler counts
// wavefronts of one of four units: of 256 threads, each has one.
#if defined(__HIP__)
#define MG_BLOCK(threads, blocks) __attribute__((amdgpu_waves_per_eu((threads) / 256 * (blocks))))
#else
#define MG_BLOCK(threads, blocks) __launch_bounds__(threads, blocks)
#endif
#define MG_UNROLL _Pragma("unroll")
#define MG_PRAGMA(text) _Pragma(#text)
#define MG_UNROLL_BY(count) MG_PRAGMA(unroll count)

namespace multigemm {
namespace gpu {

struct Queue {
  void* stream;
};

// Makes the value of a register unknown to the compiler, at no instruction.
#if defined(__HIP__)
MG_DEVICE void opaque(float& r) { asm volatile("" : "+v"(r)); }
MG_DEVICE void opaque(double& r) { asm volatile("" : "+v"(r)); }
#else
MG_DEVICE void opaque(float& r) { asm volatile("" : "+f"(r)); }
MG_DEVICE void opaque(double& r) { asm volatile("" : "+d"(r)); }
#endif

// 0, or the runtime's error number.
template <class Arguments>
int launch(void (*kernel)(Arguments), int64_t blocks, int threads, const Queue& queue, const Arguments& arguments) {
  const unsigned grid = static_cast<unsigned>(blocks < 0x7fffffff ? blocks : 0x7fffffff);
#if defined(__HIP__)
  void* values[] = {const_cast<Arguments*>(&arguments)};
  return hipLaunchKernel(reinterpret_cast<const void*>(kernel), grid, static_cast<unsigned>(threads), values, 0,
                         static_cast<hipStream_t>(queue.stream));
#elif defined(__CUDACC_RTC__)
  return 0;  // NVRTC compiles kernels; what launches them is the host compiler's
#else
  const cudaStream_t stream = static_cast<cudaStream_t>(queue.stream);
  kernel<<<grid, threads, 0, stream>>>(arguments);
  return static_cast<int>(cudaGetLastError());
#endif
}

#if !defined(__HIP__) && !defined(__CUDACC_RTC__)
constexpr int kInvalidValue = cudaErrorInvalidValue;

// The same with so many bytes of shared memory, no call of the kernel more than `most`. `overlaps`: a kernel for
// compute capability 9.0 that waits itself for the one before it in the stream, and may start earlier.
template <class Arguments>
int launch_shared(void (*kernel)(Arguments), int64_t blocks, int threads, int bytes, int most, bool overlaps,
                  const Queue& queue, const Arguments& arguments) {
  if (bytes > 48 * 1024 - 1024) {  // the rest is for arrays of known size
    const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, most);
    if (error != cudaSuccess) return static_cast<int>(error);
  }
  if (overlaps) {  // code that was translated from PTX for older devices doesn't wait
    cudaFuncAttributes built = {};
    const cudaError_t error = cudaFuncGetAttributes(&built, kernel);
    if (error != cudaSuccess) return static_cast<int>(error);
    overlaps = built.ptxVersion >= 90;
  }
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(blocks < 0x7fffffff ? blocks : 0x7fffffff));
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = static_cast<size_t>(bytes);
  config.stream = static_cast<cudaStream_t>(queue.stream);
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &attribute;
  config.numAttrs = overlaps ? 1 : 0;
  const cudaError_t error = cudaLaunchKernelEx(&config, kernel, arguments);
  if (error != cudaSuccess) (void)cudaGetLastError();
  return static_cast<int>(error);
}
#endif

}  // namespace gpu
}  // namespace multigemm

#else

#include "vendor/gpu_host.h"

#define MG_KERNEL
#define MG_DEVICE inline
#define MG_SHARED static thread_local
#define MG_BLOCK(threads, blocks)
#define MG_UNROLL
#define MG_UNROLL_BY(count)

namespace multigemm {
namespace gpu {

struct Queue {
  const Host* host;
};

inline void opaque(const float&) {}
inline void opaque(const double&) {}

template <class Arguments>
int launch(void (*kernel)(Arguments), int64_t blocks, int threads, const Queue& queue, const Arguments& arguments) {
  run_blocks(*queue.host, kernel, blocks, threads, arguments);
  return 0;
}

}  // namespace gpu
}  // namespace multigemm

#endif
