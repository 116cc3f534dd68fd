// The part of HIP that this library uses, in its own declarations: a build needs no ROCm, and the library none of a
// certain release. The signatures and numbers below are the same in ROCm 5, 6 and 7. hip_runtime_shim.cpp defines the
// functions. Compilers of kernels read the second half: clang's own names for what a kernel asks of its device.
#pragma once

#include <stddef.h>
#include <stdint.h>

#if defined(__HIP__)
#define MG_HIP_BOTH __attribute__((host)) __attribute__((device))
#else
#define MG_HIP_BOTH
#endif

struct dim3 {
  unsigned x, y, z;
  MG_HIP_BOTH constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

typedef struct ihipStream_t* hipStream_t;

enum hipError_t : int {
  hipSuccess = 0,
  hipErrorNoDevice = 100,
  hipErrorNoBinaryForGpu = 209,
  hipErrorSharedObjectSymbolNotFound = 302,
};
enum hipDeviceAttribute_t : int {
  hipDeviceAttributeL2CacheSize = 19,
  hipDeviceAttributeComputeCapabilityMajor = 23,
  hipDeviceAttributeComputeCapabilityMinor = 61,
  hipDeviceAttributeMultiprocessorCount = 63,
  hipDeviceAttributeMaxSharedMemoryPerBlock = 74,
};
enum hipMemcpyKind : int { hipMemcpyDeviceToHost = 2 };
enum hipStreamCaptureStatus : int { hipStreamCaptureStatusNone = 0 };
enum hipStreamCaptureMode : int { hipStreamCaptureModeRelaxed = 2 };

extern "C" {
const char* hipGetErrorName(hipError_t error);
const char* hipGetErrorString(hipError_t error);
hipError_t hipGetLastError();
hipError_t hipGetDevice(int* device);
hipError_t hipSetDevice(int device);
hipError_t hipGetDeviceCount(int* count);
hipError_t hipDeviceGetAttribute(int* value, hipDeviceAttribute_t attribute, int device);
hipError_t hipMallocAsync(void** memory, size_t bytes, hipStream_t stream);
hipError_t hipFreeAsync(void* memory, hipStream_t stream);
hipError_t hipMemcpyAsync(void* to, const void* from, size_t bytes, hipMemcpyKind kind, hipStream_t stream);
hipError_t hipStreamSynchronize(hipStream_t stream);
hipError_t hipStreamIsCapturing(hipStream_t stream, hipStreamCaptureStatus* status);
hipError_t hipThreadExchangeStreamCaptureMode(hipStreamCaptureMode* mode);
hipError_t hipLaunchKernel(const void* kernel, dim3 grid, dim3 block, void** arguments, size_t shared_bytes,
                           hipStream_t stream);
}

#if defined(__HIP__)

#define __host__ __attribute__((host))
#define __device__ __attribute__((device))
// No block has more threads; a compiler that knows it need not keep values in memory.
#define __global__ __attribute__((global)) __attribute__((amdgpu_flat_work_group_size(1, 256)))
#define __shared__ __attribute__((shared))
#define __forceinline__ inline __attribute__((always_inline))

// For kernels; the C library's is the host's.
__device__ inline void* memcpy(void* to, const void* from, size_t bytes) { return __builtin_memcpy(to, from, bytes); }

namespace multigemm {
namespace gpu {

struct Index {
  unsigned x;
};
__device__ inline Index thread_index() { return {__builtin_amdgcn_workitem_id_x()}; }
__device__ inline Index block_index() { return {__builtin_amdgcn_workgroup_id_x()}; }
__device__ inline Index block_size() { return {__builtin_amdgcn_workgroup_size_x()}; }
// All blocks are whole, so this division has no rest.
__device__ inline Index grid_size() { return {__builtin_amdgcn_grid_size_x() / __builtin_amdgcn_workgroup_size_x()}; }

__device__ __attribute__((convergent)) inline void barrier() {
  __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
  __builtin_amdgcn_s_barrier();
  __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
}

// The value of the lane `step` before, in wavefronts of 32 or 64; unspecified where there is none.
__device__ __attribute__((convergent)) inline int shuffle_up(int value, int step) {
  const int lane = static_cast<int>(__builtin_amdgcn_mbcnt_hi(~0u, __builtin_amdgcn_mbcnt_lo(~0u, 0u)));
  return __builtin_amdgcn_ds_bpermute(4 * (lane - step), value);
}

}  // namespace gpu
}  // namespace multigemm

#define threadIdx ::multigemm::gpu::thread_index()
#define blockIdx ::multigemm::gpu::block_index()
#define blockDim ::multigemm::gpu::block_size()
#define gridDim ::multigemm::gpu::grid_size()
#define __syncthreads() ::multigemm::gpu::barrier()
// Callers look at neighbours among 32 only, as CUDA has them.
#define __shfl_up_sync(mask, value, step) ::multigemm::gpu::shuffle_up(value, step)

#endif
