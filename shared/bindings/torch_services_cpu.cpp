#include "bindings/torch_services.h"

namespace multigemm {
namespace {

void parallel_for(void*, int64_t begin, int64_t end, int64_t grain, mg_range_function function, void* argument) {
  STABLE_TORCH_ERROR_CODE_CHECK(torch_parallel_for(begin, end, grain, function, argument));
}

}  // namespace

using torch::stable::Tensor;

Services::Services(const Tensor&)
    : host_{this, static_cast<int64_t>(torch::stable::get_num_threads()), parallel_for, allocate, release, matmul} {}

std::string Services::describe() const { return "device cpu, stream none"; }

// Called from one thread of a call.
void* Services::allocate(void* context, int64_t bytes) {
  try {
    const int64_t size = bytes + 64;
    Tensor memory = torch::stable::empty({&size, 1}, torch::headeronly::ScalarType::Byte);
    void* lent = reinterpret_cast<void*>((reinterpret_cast<uintptr_t>(memory.mutable_data_ptr()) + 63) / 64 * 64);
    static_cast<Services*>(context)->lent_.emplace_back(lent, std::move(memory));
    return lent;
  } catch (...) {
    return nullptr;
  }
}

int32_t Services::matmul(void*, const mg_matmul* product) {
  return torch_matmul(product, torch::stable::Device(torch::headeronly::DeviceType::CPU, 0));
}

}  // namespace multigemm
