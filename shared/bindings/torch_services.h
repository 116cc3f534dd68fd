// What PyTorch lends to one call: threads or a stream, memory, and its own matrix product.
#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <array>
#include <string>
#include <utility>
#include <vector>

#include "multigemm/abi.h"

namespace multigemm {

class Services {
 public:
  // For the device of `x`.
  explicit Services(const torch::stable::Tensor& x);
  Services(const Services&) = delete;
  Services& operator=(const Services&) = delete;

  const mg_host* host() const { return &host_; }
  int32_t device() const { return device_; }
  void* stream() const { return stream_; }
  std::string describe() const;

 private:
  static void* allocate(void* context, int64_t bytes);
  static void release(void* context, void* memory);
  static int32_t matmul(void* context, const mg_matmul* product);

  mg_host host_;
  int32_t device_ = 0;
  void* stream_ = nullptr;
  std::vector<std::pair<void*, torch::stable::Tensor>> lent_;  // tensors keep the memory alive
};

inline void Services::release(void* context, void* memory) {
  auto& lent = static_cast<Services*>(context)->lent_;
  for (auto entry = lent.begin(); entry != lent.end(); ++entry)
    if (entry->first == memory) {
      lent.erase(entry);
      return;
    }
}

inline torch::headeronly::ScalarType scalar_type(int32_t dtype) {
  using torch::headeronly::ScalarType;
  switch (dtype) {
    case MG_FLOAT64: return ScalarType::Double;
    case MG_FLOAT32: return ScalarType::Float;
    case MG_FLOAT16: return ScalarType::Half;
    default: return ScalarType::BFloat16;
  }
}

// 0 on success. mm where there is no batch, bmm otherwise; both write into c.
inline int32_t torch_matmul(const mg_matmul* p, const torch::stable::Device& device) {
  using torch::stable::Tensor;
  auto matrix = [&](const void* data, const int64_t* stride, int64_t rows, int64_t columns) {
    const int64_t sizes[3] = {p->batch, rows, columns};
    const size_t skipped = p->batch == 1 ? 1 : 0;
    return torch::stable::from_blob(const_cast<void*>(data), {sizes + skipped, 3 - skipped},
                                    {stride + skipped, 3 - skipped}, device, scalar_type(p->dtype));
  };
  try {
    std::array<StableIValue, 3> stack{torch::stable::detail::from(matrix(p->a, p->a_stride, p->rows, p->inner)),
                                      torch::stable::detail::from(matrix(p->b, p->b_stride, p->inner, p->cols)),
                                      torch::stable::detail::from(matrix(p->c, p->c_stride, p->rows, p->cols))};
    STABLE_TORCH_ERROR_CODE_CHECK(
        torch_call_dispatcher(p->batch == 1 ? "aten::mm" : "aten::bmm", "out", stack.data(), TORCH_ABI_VERSION));
    torch::stable::detail::to<Tensor>(stack[0]);  // takes the reference that the call gave back
    return 0;
  } catch (...) {
    return 1;
  }
}

}  // namespace multigemm
