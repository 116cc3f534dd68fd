#include <dlfcn.h>

#include <mutex>

#include "blas/blas_gpu.h"
#include "blas/library_hip.h"
#include "runtime/status.h"
#include "vendor/loaded_library.h"

namespace multigemm {
namespace {

constexpr int kNoAtomics = 0;  // products of the same operands have the same bits

template <class Function>
bool look_up(void* library, const char* name, Function& function) {
  function = reinterpret_cast<Function>(dlsym(library, name));
  return function != nullptr;
}

// From version 3 on: before, hipblasSetWorkspace was missing and the product took other types.
bool read(void* library, HipBlas& found) {
  return look_up(library, "hipblasSetWorkspace", found.set_workspace) &&
         look_up(library, "hipblasCreate", found.create) && look_up(library, "hipblasDestroy", found.destroy) &&
         look_up(library, "hipblasSetStream", found.set_stream) &&
         look_up(library, "hipblasSetAtomicsMode", found.set_atomics_mode) &&
         look_up(library, "hipblasStatusToString", found.status_text) &&
         look_up(library, "hipblasGemmStridedBatchedEx", found.gemm);
}

}  // namespace

const HipBlas* find_blas() {
  static std::mutex lock;
  static HipBlas found;
  static bool known = false;
  const std::lock_guard<std::mutex> held(lock);
  if (known) return &found;
  // One that nobody has loaded yet is that of the system; it is wanted only where HIP is.
  void* library = gpu::loaded_library("libhipblas", "hipblasCreate");
  if (!library && gpu::loaded_library("libamdhip64", "hipGetDevice"))
    library = dlopen("libhipblas.so.3", RTLD_LAZY | RTLD_LOCAL);
  known = library && read(library, found);
  return known ? &found : nullptr;
}

const HipBlas& blas() {
  const HipBlas* found = find_blas();
  if (!found) throw Failure(MG_UNSUPPORTED, blas_refusal());
  return *found;
}

int create_handle(BlasContext** handle) {
  const int status = blas().create(handle);
  if (status) return status;
  const int mode_status = blas().set_atomics_mode(*handle, kNoAtomics);
  if (mode_status) (void)blas().destroy(*handle);
  return mode_status;
}

int destroy_handle(BlasContext* handle) { return blas().destroy(handle); }

int set_stream(BlasContext* handle, void* stream) { return blas().set_stream(handle, stream); }

int set_workspace(BlasContext* handle, void* memory, int64_t bytes) {
  return blas().set_workspace(handle, memory, static_cast<size_t>(bytes));
}

int64_t workspace_bytes(const DeviceFacts&) { return 32 << 20; }

}  // namespace multigemm
