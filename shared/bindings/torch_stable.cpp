// The implementations of the two leaf operators, through PyTorch's stable ABI (target 2.10). The front defines the
// schemas; nothing is defined here, since two definitions of one schema would end the process.
#include <torch/csrc/stable/library.h>

#include "bindings/torch_products.h"

namespace {

using namespace multigemm;

template <class Problem>
void raise_on_failure(int32_t status, const char* op, const Services& services, const Problem& p) {
  STD_TORCH_CHECK(status == MG_OK, "multigemm: ", op, " failed with ", MG_NAME(mg_last_error)(), " (",
                  services.describe(), "; ", describe(p), ")");
}

void grouped_mm(Tensor x, Tensor w, Tensor groups, bool offsets, std::optional<Tensor> bias, Tensor out,
                std::string precision, std::string implementation) {
  Services services(x);
  mg_grouped_mm_problem p = product_of(services, x, w, groups, offsets, bias, precision, implementation);
  expect(out.dim() == x.dim() && out.size(0) == p.rows && out.size(out.dim() - 1) == p.outer &&
             (x.dim() == 2 || out.size(1) == p.batch),
         "out", p);
  p.out_dtype = dtype_of("out", out);
  p.out = out.mutable_data_ptr();
  strides_of(p.out_stride, out, 1);
  raise_on_failure(MG_NAME(mg_grouped_mm)(&p), "grouped_mm", services, p);
}

void grouped_mm_wgrad(Tensor x, Tensor gy, Tensor groups, bool offsets, bool sum_batch, Tensor out,
                      std::string precision, std::string implementation) {
  Services services(x);
  mg_grouped_mm_wgrad_problem p{};
  p.struct_size = sizeof(p);
  const bool has_batch = x.dim() == 3;
  STD_TORCH_CHECK((x.dim() == 2 || has_batch) && gy.dim() == x.dim() && out.dim() == x.dim() + 1,
                  "multigemm: x [N, (B,) K], gy [N, (B,) M] and out [G, (B,) K, M] do not have matching dimensions");
  p.rows = x.size(0);
  p.batch = has_batch ? x.size(1) : 1;
  p.inner = x.size(x.dim() - 1);
  p.outer = gy.size(gy.dim() - 1);
  p.groups = groups_of(groups, offsets, x);
  p.dtype = dtype_of("x", x);
  p.out_dtype = dtype_of("out", out);
  p.sum_batch = sum_batch && has_batch;
  expect(gy.size(0) == p.rows && (!has_batch || gy.size(1) == p.batch) && dtype_of("gy", gy) == p.dtype, "gy", p);
  expect(out.size(0) == p.groups.count && out.size(out.dim() - 2) == p.inner && out.size(out.dim() - 1) == p.outer &&
             (!has_batch || out.size(1) == (sum_batch ? 1 : p.batch)),
         "out", p);
  p.x = x.const_data_ptr();
  strides_of(p.x_stride, x, 1);
  p.gy = gy.const_data_ptr();
  strides_of(p.gy_stride, gy, 1);
  p.out = out.mutable_data_ptr();
  strides_of(p.out_stride, out, 1);
  p.precision = precision_of(precision);
  p.implementation = implementation_of(implementation);
  p.host = services.host();
  p.device = services.device();
  p.stream = services.stream();
  raise_on_failure(MG_NAME(mg_grouped_mm_wgrad)(&p), "grouped_mm_wgrad", services, p);
}

}  // namespace

#if defined(MG_CUDA) || defined(MG_HIP)  // PyTorch calls AMD's devices CUDA too
STABLE_TORCH_LIBRARY_IMPL(multigemm, CUDA, m) {
#else
STABLE_TORCH_LIBRARY_IMPL(multigemm, CPU, m) {
#endif
  m.impl("native_grouped_mm", TORCH_BOX(&grouped_mm));
  m.impl("native_grouped_mm_wgrad", TORCH_BOX(&grouped_mm_wgrad));
}
