#include <dlfcn.h>

#include "bindings/torch_services.h"

namespace multigemm {
namespace {

using torch::stable::Tensor;

// The current stream of a device. The function lives in PyTorch's GPU library, which this one does not link, so that
// it loads beside a PyTorch without GPU support too; there no tensor brings a call here.
void* current_stream(int32_t device) {
  using Function = AOTITorchError (*)(int32_t, void**);
  static const Function function = []() -> Function {
    for (const char* name : {"libtorch_cuda.so", "libtorch_hip.so"})
      if (void* library = dlopen(name, RTLD_LAZY | RTLD_NOLOAD))
        if (void* found = dlsym(library, "aoti_torch_get_current_cuda_stream"))
          return reinterpret_cast<Function>(found);
    return nullptr;
  }();
  STD_TORCH_CHECK(function,
                  "multigemm: this PyTorch has no aoti_torch_get_current_cuda_stream; it needs 2.10 or newer");
  void* stream = nullptr;
  STABLE_TORCH_ERROR_CODE_CHECK(function(device, &stream));
  return stream;
}

}  // namespace

Services::Services(const Tensor& x)
    : host_{this, 1, nullptr, allocate, release, matmul},
      device_(x.get_device_index()),
      stream_(current_stream(device_)) {}

std::string Services::describe() const {
  return "device cuda:" + std::to_string(device_) + ", stream " + std::to_string(reinterpret_cast<uintptr_t>(stream_));
}

// PyTorch's allocator gives memory in the order of the device's current stream, which is the call's.
void* Services::allocate(void* context, int64_t bytes) {
  auto* self = static_cast<Services*>(context);
  try {
    Tensor memory = torch::stable::empty(
        {&bytes, 1}, torch::headeronly::ScalarType::Byte, std::nullopt,
        torch::stable::Device(torch::headeronly::DeviceType::CUDA,
                              static_cast<torch::stable::accelerator::DeviceIndex>(self->device_)));
    void* lent = memory.mutable_data_ptr();
    self->lent_.emplace_back(lent, std::move(memory));
    return lent;
  } catch (...) {
    return nullptr;
  }
}

int32_t Services::matmul(void* context, const mg_matmul* product) {
  const int32_t device = static_cast<Services*>(context)->device_;
  return torch_matmul(product, torch::stable::Device(torch::headeronly::DeviceType::CUDA,
                                                     static_cast<torch::stable::accelerator::DeviceIndex>(device)));
}

}  // namespace multigemm
