// Contexts: what a process has on a device that it uses, some hundred megabytes of its memory. CUDA makes one when a
// device is made current, so that going back to a device that nobody has used yet would leave one there.
#pragma once

#include "vendor/gpu_runtime.h"

#if !defined(MG_HIP)
#include <dlfcn.h>
#endif

namespace multigemm {
namespace gpu {

#if defined(MG_HIP)

// HIP makes nothing of the kind before a device has work.
inline bool has_context(int) { return true; }
inline int enter_context(int, void**) { return 1; }
inline void leave_context(int) {}

#else

// The driver's functions, which take its own numbers of devices; looked up, so that nothing links the driver.
struct ContextFunctions {
  int (*device)(int* handle, int ordinal) = nullptr;
  int (*state)(int handle, unsigned* flags, int* active) = nullptr;
  int (*retain)(void** context, int handle) = nullptr;
  int (*release)(int handle) = nullptr;
  int (*push)(void* context) = nullptr;
  int (*pop)(void** context) = nullptr;
  bool there = false;

  ContextFunctions() {
    void* const driver = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_LOCAL);
    there = driver && find(driver, "cuDeviceGet", device) && find(driver, "cuDevicePrimaryCtxGetState", state) &&
            find(driver, "cuDevicePrimaryCtxRetain", retain) && find(driver, "cuDevicePrimaryCtxRelease_v2", release) &&
            find(driver, "cuCtxPushCurrent_v2", push) && find(driver, "cuCtxPopCurrent_v2", pop);
  }

 private:
  template <class Function>
  static bool find(void* library, const char* name, Function& function) {
    function = reinterpret_cast<Function>(dlsym(library, name));
    return function != nullptr;
  }
};

inline const ContextFunctions& context_functions() {
  static const ContextFunctions functions;
  return functions;
}

// Whether the process has a context on the device; true also where nobody can tell. Makes none.
inline bool has_context(int ordinal) {
  const ContextFunctions& driver = context_functions();
  int handle = 0, active = 0;
  unsigned flags = 0;
  return !driver.there || driver.device(&handle, ordinal) != 0 || driver.state(handle, &flags, &active) != 0 ||
         active != 0;
}

// Makes a device's context current to the thread; the device that the runtime has chosen for it stays as it is, and
// is the thread's again after leave_context. 0, or the runtime's error number.
inline int enter_context(int ordinal, void** context) {
  const ContextFunctions& driver = context_functions();
  int handle = 0;
  if (driver.device(&handle, ordinal) != 0 || driver.retain(context, handle) != 0) return cudaErrorInvalidDevice;
  if (driver.push(*context) == 0) return cudaSuccess;
  (void)driver.release(handle);
  return cudaErrorDeviceUninitialized;
}

inline void leave_context(int ordinal) {
  const ContextFunctions& driver = context_functions();
  void* left = nullptr;
  int handle = 0;
  (void)driver.pop(&left);
  // The memory and the stream of the call belong to somebody who holds the context too, so it stays.
  if (driver.device(&handle, ordinal) == 0) (void)driver.release(handle);
}

#endif

}  // namespace gpu
}  // namespace multigemm
