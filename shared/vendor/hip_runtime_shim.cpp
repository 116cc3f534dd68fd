// The functions of hip_api.h, passed on to the HIP runtime that is in the process, which PyTorch or the caller brought:
// device memory comes from that one and from no other. Without one the library opens all the same, and a call fails.
// Kernels are registered when the library is loaded; here that is kept, and told to the runtime before its first use.
#include "vendor/hip_api.h"

#include <atomic>
#include <mutex>
#include <vector>

#include "vendor/loaded_library.h"

namespace {

struct Binary {
  const void* image;
  void** handle;
};

struct Kernel {
  size_t binary;
  const void* host;
  char* device;
  const char* name;
  unsigned threads;
};

struct Registry {
  std::mutex lock;
  std::vector<Binary*> binaries;
  std::vector<Kernel> kernels;
  std::atomic<void*> runtime{nullptr};
};

Registry& registry() {
  static Registry* const one = new Registry;  // used before and after the time of static objects
  return *one;
}

extern "C" {
typedef void** RegisterBinary(const void* image);
typedef void RegisterKernel(void** binary, const void* host, char* device, const char* name, unsigned threads, void*,
                            void*, void*, void*, int*);
}

template <class Function>
Function* look_up(void* library, const char* name) {
  return reinterpret_cast<Function*>(dlsym(library, name));
}

// The runtime, which knows this library's kernels; null if none is loaded.
void* runtime() {
  Registry& all = registry();
  if (void* known = all.runtime.load(std::memory_order_acquire)) return known;
  const std::lock_guard<std::mutex> held(all.lock);
  if (void* known = all.runtime.load(std::memory_order_relaxed)) return known;
  void* library = multigemm::gpu::loaded_library("libamdhip64", "hipGetDevice");
  if (!library) return nullptr;
  auto* register_binary = look_up<RegisterBinary>(library, "__hipRegisterFatBinary");
  auto* register_kernel = look_up<RegisterKernel>(library, "__hipRegisterFunction");
  if (!register_binary || !register_kernel) return nullptr;
  for (Binary* binary : all.binaries) binary->handle = register_binary(binary->image);
  for (const Kernel& kernel : all.kernels)
    register_kernel(all.binaries[kernel.binary]->handle, kernel.host, kernel.device, kernel.name, kernel.threads,
                    nullptr, nullptr, nullptr, nullptr, nullptr);
  all.runtime.store(library, std::memory_order_release);
  return library;
}

void* function(const char* name, std::atomic<void*>& kept) {
  if (void* known = kept.load(std::memory_order_relaxed)) return known;
  void* library = runtime();
  void* found = library ? dlsym(library, name) : nullptr;
  if (found) kept.store(found, std::memory_order_relaxed);
  return found;
}

hipError_t missing() { return runtime() ? hipErrorSharedObjectSymbolNotFound : hipErrorNoDevice; }

}  // namespace

#define MG_PASS_ON(name, parameters, arguments)                                             \
  hipError_t name parameters {                                                              \
    static std::atomic<void*> kept{nullptr};                                                \
    void* found = function(#name, kept);                                                    \
    return found ? reinterpret_cast<hipError_t(*) parameters>(found) arguments : missing(); \
  }

extern "C" {

MG_PASS_ON(hipGetLastError, (), ())
MG_PASS_ON(hipGetDevice, (int* device), (device))
MG_PASS_ON(hipSetDevice, (int device), (device))
MG_PASS_ON(hipGetDeviceCount, (int* count), (count))
MG_PASS_ON(hipDeviceGetAttribute, (int* value, hipDeviceAttribute_t attribute, int device), (value, attribute, device))
MG_PASS_ON(hipMallocAsync, (void** memory, size_t bytes, hipStream_t stream), (memory, bytes, stream))
MG_PASS_ON(hipFreeAsync, (void* memory, hipStream_t stream), (memory, stream))
MG_PASS_ON(hipMemcpyAsync, (void* to, const void* from, size_t bytes, hipMemcpyKind kind, hipStream_t stream),
           (to, from, bytes, kind, stream))
MG_PASS_ON(hipStreamSynchronize, (hipStream_t stream), (stream))
MG_PASS_ON(hipStreamIsCapturing, (hipStream_t stream, hipStreamCaptureStatus* status), (stream, status))
MG_PASS_ON(hipThreadExchangeStreamCaptureMode, (hipStreamCaptureMode * mode), (mode))
MG_PASS_ON(hipLaunchKernel,
           (const void* kernel, dim3 grid, dim3 block, void** arguments, size_t shared_bytes, hipStream_t stream),
           (kernel, grid, block, arguments, shared_bytes, stream))

const char* hipGetErrorName(hipError_t error) {
  static std::atomic<void*> kept{nullptr};
  if (void* found = function("hipGetErrorName", kept))
    return reinterpret_cast<const char* (*)(hipError_t)>(found)(error);
  return error == hipErrorNoDevice ? "hipErrorNoDevice" : "hipErrorSharedObjectSymbolNotFound";
}

const char* hipGetErrorString(hipError_t error) {
  static std::atomic<void*> kept{nullptr};
  if (error == hipErrorSharedObjectSymbolNotFound) return "the HIP runtime in this process lacks a function";
  if (void* found = function("hipGetErrorString", kept))
    return reinterpret_cast<const char* (*)(hipError_t)>(found)(error);
  return "no HIP runtime, libamdhip64, is loaded in this process";
}

// What clang's code calls when the library is loaded.

void** __hipRegisterFatBinary(const void* image) {
  Registry& all = registry();
  const std::lock_guard<std::mutex> held(all.lock);
  all.binaries.push_back(new Binary{image, nullptr});
  return reinterpret_cast<void**>(all.binaries.back());
}

void __hipRegisterFunction(void** binary, const void* host, char* device, const char* name, unsigned threads, void*,
                           void*, void*, void*, int*) {
  Registry& all = registry();
  const std::lock_guard<std::mutex> held(all.lock);
  for (size_t i = 0; i < all.binaries.size(); ++i)
    if (reinterpret_cast<void**>(all.binaries[i]) == binary) all.kernels.push_back({i, host, device, name, threads});
}

// At the end of the process, when the runtime may have gone before; the library is never taken out earlier.
void __hipUnregisterFatBinary(void**) {}

// Of the other way to launch, kernel<<<>>>, whose code clang makes for every kernel. launch() does not take it.
hipError_t __hipPopCallConfiguration(dim3*, dim3*, size_t*, hipStream_t*) { return hipErrorNoDevice; }
}
