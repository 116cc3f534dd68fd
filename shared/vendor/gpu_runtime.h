// The runtime calls that host code of a GPU backend makes, under one name for CUDA and HIP. Each returns the runtime's
// error number, 0 for success. Host compilers read this file; kernels read gpu.h.
#pragma once

#include <stdint.h>

#if defined(MG_HIP)
#include "vendor/hip_api.h"
#define MG_RUNTIME(name) hip##name
#else
#include <cuda_runtime_api.h>
#define MG_RUNTIME(name) cuda##name
#endif

namespace multigemm {
namespace gpu {

typedef MG_RUNTIME(Stream_t) Stream;

inline const char* error_name(int error) { return MG_RUNTIME(GetErrorName)(static_cast<MG_RUNTIME(Error_t)>(error)); }
inline const char* error_text(int error) { return MG_RUNTIME(GetErrorString)(static_cast<MG_RUNTIME(Error_t)>(error)); }
// The library has no machine code for the device.
#if defined(MG_HIP)
constexpr int kNoKernelImage = hipErrorNoBinaryForGpu;
constexpr int kOldDriver = 35;            // hipErrorInsufficientDriver
constexpr int kOldCompilerOfDriver = 35;  // the same: it compiles no intermediate code
#else
constexpr int kNoKernelImage = cudaErrorNoKernelImageForDevice;
constexpr int kOldDriver = cudaErrorInsufficientDriver;
constexpr int kOldCompilerOfDriver = cudaErrorUnsupportedPtxVersion;
#endif
// A sticky error stays; any other is taken off, so that the caller's next check does not meet it.
inline void clear_error() { (void)MG_RUNTIME(GetLastError)(); }

inline int get_device(int* device) { return MG_RUNTIME(GetDevice)(device); }
inline int set_device(int device) { return MG_RUNTIME(SetDevice)(device); }
inline int device_count(int* count) { return MG_RUNTIME(GetDeviceCount)(count); }

enum class Attribute { major, minor, multiprocessors, shared_bytes, l2_bytes };

inline int attribute(int* value, Attribute which, int device) {
#if defined(MG_HIP)
  const hipDeviceAttribute_t names[] = {hipDeviceAttributeComputeCapabilityMajor,
                                        hipDeviceAttributeComputeCapabilityMinor, hipDeviceAttributeMultiprocessorCount,
                                        hipDeviceAttributeMaxSharedMemoryPerBlock, hipDeviceAttributeL2CacheSize};
  return hipDeviceGetAttribute(value, names[static_cast<int>(which)], device);
#else
  const cudaDeviceAttr names[] = {cudaDevAttrComputeCapabilityMajor, cudaDevAttrComputeCapabilityMinor,
                                  cudaDevAttrMultiProcessorCount, cudaDevAttrMaxSharedMemoryPerBlockOptin,
                                  cudaDevAttrL2CacheSize};
  return cudaDeviceGetAttribute(value, names[static_cast<int>(which)], device);
#endif
}

inline int allocate(void** memory, int64_t bytes, Stream stream) {
  return MG_RUNTIME(MallocAsync)(memory, static_cast<size_t>(bytes), stream);
}
inline int release(void* memory, Stream stream) { return MG_RUNTIME(FreeAsync)(memory, stream); }

inline int copy_to_host(void* to, const void* from, int64_t bytes, Stream stream) {
  const int error =
      MG_RUNTIME(MemcpyAsync)(to, from, static_cast<size_t>(bytes), MG_RUNTIME(MemcpyDeviceToHost), stream);
  return error ? error : static_cast<int>(MG_RUNTIME(StreamSynchronize)(stream));
}

inline int is_capturing(bool* capturing, Stream stream) {
  MG_RUNTIME(StreamCaptureStatus) status;
  const int error = MG_RUNTIME(StreamIsCapturing)(stream, &status);
  *capturing = status != MG_RUNTIME(StreamCaptureStatusNone);
  return error;
}

// While it lives, calls of this thread that a capture elsewhere would forbid (such as making a BLAS handle) are let by.
class RelaxedCapture {
 public:
  RelaxedCapture() { (void)MG_RUNTIME(ThreadExchangeStreamCaptureMode)(&mode_); }
  ~RelaxedCapture() { (void)MG_RUNTIME(ThreadExchangeStreamCaptureMode)(&mode_); }
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;

 private:
  MG_RUNTIME(StreamCaptureMode) mode_ = MG_RUNTIME(StreamCaptureModeRelaxed);
};

}  // namespace gpu
}  // namespace multigemm
