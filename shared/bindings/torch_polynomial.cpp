// The leaf operator of indexed_polynomial, as torch_stable.cpp has those of the products.
#include <torch/csrc/stable/library.h>

#include "bindings/torch_services.h"
#include "multigemm/abi_polynomial.h"

namespace {

using multigemm::Services;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;

void expect(bool right, const char* name) {
  STD_TORCH_CHECK(right, "multigemm: ", name, " has a shape, dtype, layout or device that does not fit");
}

// One operand after the other, each against the first.
class Operands {
 public:
  explicit Operands(const Tensor& x) : device_(x.device()), dtype_(x.scalar_type()) {}

  // [rows, columns] with unit stride along the columns.
  void* matrix(const char* name, const Tensor& t, int64_t rows, int64_t columns, int64_t* row) const {
    expect(t.dim() == 2 && t.size(0) == rows && t.size(1) == columns &&
               (t.stride(1) == 1 || columns <= 1 || rows == 0) && ours(t),
           name);
    *row = t.stride(0);
    return t.mutable_data_ptr();
  }
  // [G, P, C] with unit stride along C.
  void* lines(const char* name, const Tensor& t, int64_t groups, int64_t weights, int64_t channels,
              int64_t (&stride)[2]) const {
    expect(t.dim() == 3 && t.size(0) == groups && t.size(1) == weights && t.size(2) == channels &&
               (t.stride(2) == 1 || channels <= 1 || t.numel() == 0) && ours(t),
           name);
    stride[0] = t.stride(0);
    stride[1] = t.stride(1);
    return t.mutable_data_ptr();
  }
  // Contiguous, of `dtype`, with rows of `columns` elements.
  template <class T>
  const T* table(const char* name, const Tensor& t, int64_t rows, int64_t columns, ScalarType dtype) const {
    expect(t.is_contiguous() && t.scalar_type() == dtype && t.numel() == rows * columns && t.device() == device_, name);
    return static_cast<const T*>(t.const_data_ptr());
  }

 private:
  bool ours(const Tensor& t) const { return t.device() == device_ && t.scalar_type() == dtype_; }
  torch::stable::Device device_;
  ScalarType dtype_;
};

int32_t kind_of(const std::string& name) {
  if (name == "value") return MG_POLYNOMIAL_VALUE;
  if (name == "xgrad") return MG_POLYNOMIAL_XGRAD;
  STD_TORCH_CHECK(name == "wgrad", "multigemm: kind is \"", name, "\"; there are value, xgrad and wgrad");
  return MG_POLYNOMIAL_WGRAD;
}

void indexed_polynomial(std::string kind, Tensor x, std::vector<Tensor> directions, std::optional<Tensor> w,
                        std::optional<Tensor> gy, Tensor labels, std::optional<Tensor> permutation,
                        std::optional<Tensor> ends, Tensor heads, Tensor pairs, Tensor last, Tensor factors,
                        Tensor entries, Tensor entry_ends, Tensor places, int64_t fingerprint, Tensor out,
                        std::string implementation) {
  const Services services(x);
  const Operands operands(x);
  mg_polynomial_problem p{};
  p.struct_size = sizeof(p);
  p.kind = kind_of(kind);
  const bool value = p.kind == MG_POLYNOMIAL_VALUE, weights = p.kind == MG_POLYNOMIAL_WGRAD;
  expect(x.scalar_type() == ScalarType::Double || x.scalar_type() == ScalarType::Float, "x");
  p.dtype = x.scalar_type() == ScalarType::Double ? MG_FLOAT64 : MG_FLOAT32;
  expect(value != gy.has_value() && weights != w.has_value(), "w or gy");
  const Tensor& coefficients = weights ? out : *w;
  expect(x.dim() == 2 && coefficients.dim() == 3 && heads.dim() == 2 && pairs.dim() == 2 && places.dim() == 2, "x");
  p.rows = x.size(0);
  p.groups = coefficients.size(0);
  p.channels = coefficients.size(2);
  p.width = p.channels ? x.size(1) / p.channels : 0;
  p.components = p.channels ? places.size(0) - p.width : 0;
  p.head_count = heads.size(0);
  p.pair_count = pairs.size(0);
  p.term_count = factors.numel();
  p.weight_count = coefficients.size(1);
  p.x = operands.matrix("x", x, p.rows, p.width * p.channels, &p.x_row);
  expect(directions.size() <= 3, "directions");
  p.directions = static_cast<int32_t>(directions.size());
  for (size_t a = 0; a < directions.size(); ++a)
    p.direction[a] = operands.matrix("a direction", directions[a], p.rows, x.size(1), &p.direction_row[a]);
  if (w) p.w = operands.lines("w", *w, p.groups, p.weight_count, p.channels, p.w_stride);
  if (gy) p.gy = operands.matrix("gy", *gy, p.rows, p.components * p.channels, &p.gy_row);
  if (weights)
    p.out = operands.lines("out", out, p.groups, p.weight_count, p.channels, p.out_stride);
  else
    p.out = operands.matrix("out", out, p.rows, (value ? p.components : p.width) * p.channels, &p.out_row);
  p.labels = operands.table<int64_t>("labels", labels, p.rows, 1, ScalarType::Long);
  if (weights) {
    expect(permutation && ends, "permutation or ends");
    p.permutation = operands.table<int64_t>("permutation", *permutation, p.rows, 1, ScalarType::Long);
    p.ends = operands.table<int64_t>("ends", *ends, p.groups, 1, ScalarType::Long);
  }
  p.heads = operands.table<int32_t>("heads", heads, p.head_count, 4, ScalarType::Int);
  p.pairs = operands.table<int32_t>("pairs", pairs, p.pair_count, 4, ScalarType::Int);
  p.last = operands.table<int32_t>("last", last, p.term_count, 2, ScalarType::Int);
  p.factors = operands.table<char>("factors", factors, p.term_count, 1, x.scalar_type());
  p.entries = operands.table<int32_t>("entries", entries, p.term_count, 5, ScalarType::Int);
  p.entry_ends = operands.table<int32_t>("entry_ends", entry_ends, p.weight_count, 1, ScalarType::Int);
  p.places = operands.table<int64_t>("places", places, places.size(0), 2, ScalarType::Long);
  p.fingerprint = fingerprint;
  p.implementation = implementation == "simt" ? MG_SIMT : MG_AUTO;
  p.device = services.device();
  p.stream = services.stream();
  p.host = services.host();
  STD_TORCH_CHECK(MG_NAME(mg_indexed_polynomial)(&p) == MG_OK, "multigemm: indexed_polynomial failed with ",
                  MG_NAME(mg_last_error)(), " (", services.describe(), "; ", kind, " of ", p.rows, " rows, ",
                  p.channels, " channels, ", p.term_count, " terms)");
}

}  // namespace

#if defined(MG_CUDA) || defined(MG_HIP)  // PyTorch calls AMD's devices CUDA too
STABLE_TORCH_LIBRARY_IMPL(multigemm, CUDA, m) {
#else
STABLE_TORCH_LIBRARY_IMPL(multigemm, CPU, m) {
#endif
  m.impl("native_weighted_polynomial", TORCH_BOX(&indexed_polynomial));
}
