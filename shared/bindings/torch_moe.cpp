// The leaf operators around the products of a mixture-of-experts layer, as torch_stable.cpp has those of the products.
#include <torch/csrc/stable/library.h>

#include "bindings/torch_products.h"
#include "multigemm/abi_moe.h"

namespace {

using multigemm::Services;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;

int32_t float_of(const char* name, const Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case ScalarType::Double: return MG_FLOAT64;
    case ScalarType::Float: return MG_FLOAT32;
    case ScalarType::Half: return MG_FLOAT16;
    case ScalarType::BFloat16: return MG_BFLOAT16;
    default: STD_TORCH_CHECK(false, "multigemm: ", name, " must be of floating point, which kernels take");
  }
  return 0;
}

void expect(bool right, const char* name) {
  STD_TORCH_CHECK(right, "multigemm: ", name, " has a shape, dtype, layout or device that does not fit");
}

ScalarType wide_of(int32_t dtype) { return dtype == MG_FLOAT64 ? ScalarType::Double : ScalarType::Float; }

// One call's tensors and problem: fills what every problem has, and checks each operand against the first one.
class Call {
 public:
  Call(const Tensor& first, int64_t k) : services_(first), device_(first.device()), k_(k) {}

  template <class Problem>
  void begin(Problem& p, int64_t rows, int64_t experts) const {
    p.struct_size = sizeof(p);
    p.top_k = k_;
    STD_TORCH_CHECK(k_ > 0 && rows % k_ == 0, "multigemm: ", rows, " slots are not ", k_, " for each token");
    p.tokens = rows / k_;
    p.experts = experts;
    p.device = services_.device();
    p.stream = services_.stream();
    p.host = services_.host();
  }

  const int32_t* places(const char* name, const Tensor& t, int64_t count) const {
    expect(t.dim() == 1 && t.size(0) == count && t.stride(0) == 1 && t.scalar_type() == ScalarType::Int, name);
    expect(t.device() == device_, name);
    return static_cast<const int32_t*>(t.const_data_ptr());
  }
  // [T, k], contiguous, of that dtype; null where absent.
  void* slots(const char* name, const std::optional<Tensor>& t, int64_t tokens, ScalarType dtype) const {
    if (!t) return nullptr;
    expect(t->dim() == 2 && t->size(0) == tokens && t->size(1) == k_ && t->is_contiguous() &&
               t->scalar_type() == dtype && t->device() == device_,
           name);
    return t->mutable_data_ptr();
  }
  // [rows, width] with unit stride along the width.
  void* matrix(const char* name, const Tensor& t, int64_t rows, int64_t width, int64_t* row) const {
    expect(t.dim() == 2 && t.size(0) == rows && t.size(1) == width && (t.stride(1) == 1 || width <= 1 || rows == 0) &&
               t.device() == device_,
           name);
    *row = t.stride(0);
    return t.mutable_data_ptr();
  }
  // The same, contiguous and of that dtype; null where absent.
  void* packed(const char* name, const std::optional<Tensor>& t, int64_t rows, int64_t width, ScalarType dtype) const {
    if (!t) return nullptr;
    int64_t row = 0;
    void* data = matrix(name, *t, rows, width, &row);
    expect(t->is_contiguous() && t->scalar_type() == dtype, name);
    return data;
  }

  const Services& services() const { return services_; }

  void finish(int32_t status, const char* op, int64_t tokens, int64_t experts) const {
    STD_TORCH_CHECK(status == MG_OK, "multigemm: ", op, " failed with ", MG_NAME(mg_last_error)(), " (",
                    services_.describe(), "; ", tokens, " tokens, ", k_, " slots of each, ", experts, " experts)");
  }

 private:
  Services services_;
  torch::stable::Device device_;
  int64_t k_;
};

void route(std::optional<Tensor> logits, std::optional<Tensor> correction, Tensor experts,
           std::optional<Tensor> weights, Tensor permutation, Tensor inverse, Tensor ends, std::optional<Tensor> x,
           std::optional<Tensor> rows, int64_t score, bool renormalize, int64_t groups, int64_t top_groups,
           int64_t group_score, double scale) {
  const Call call(experts, experts.size(1));
  mg_moe_route_problem p{};
  const int64_t slots = experts.size(0) * experts.size(1);
  call.begin(p, slots, ends.size(0));
  p.dtype = MG_FLOAT32;
  if (logits) {
    p.dtype = float_of("logits", *logits);
    expect(logits->dim() == 2 && logits->size(0) == p.tokens && logits->size(1) == p.experts, "logits");
    expect(logits->device() == experts.device() && weights.has_value(), "weights");
    p.logits = logits->const_data_ptr();
    p.logits_stride[0] = logits->stride(0);
    p.logits_stride[1] = logits->stride(1);
    p.weights = call.slots("weights", weights, p.tokens, wide_of(p.dtype));
  }
  if (correction) {
    expect(correction->dim() == 1 && correction->size(0) == p.experts && correction->is_contiguous() &&
               correction->scalar_type() == wide_of(p.dtype) && correction->device() == experts.device(),
           "correction");
    p.correction = correction->const_data_ptr();
  }
  p.expert_ids = static_cast<int64_t*>(call.slots("experts", experts, p.tokens, ScalarType::Long));
  p.permutation = const_cast<int32_t*>(call.places("permutation", permutation, slots));
  p.inverse = const_cast<int32_t*>(call.places("inverse", inverse, slots));
  p.ends = const_cast<int32_t*>(call.places("ends", ends, p.experts));
  if (x) {
    expect(rows.has_value(), "rows");
    p.x_dtype = float_of("x", *x);
    p.width = x->size(1);
    p.x = call.matrix("x", *x, p.tokens, p.width, &p.x_row);
    p.rows = call.packed("rows", rows, slots, p.width, x->scalar_type());
  }
  p.score = static_cast<int32_t>(score);
  p.renormalize = renormalize;
  p.expert_groups = static_cast<int32_t>(groups);
  p.top_groups = static_cast<int32_t>(top_groups);
  p.group_score = static_cast<int32_t>(group_score);
  p.scale = scale;
  call.finish(MG_NAME(mg_moe_route)(&p), "moe_route", p.tokens, p.experts);
}

void route_backward(Tensor grad_weights, Tensor logits, Tensor experts, Tensor out, int64_t score, bool renormalize,
                    double scale) {
  const Call call(experts, experts.size(1));
  mg_moe_route_problem p{};
  p.dtype = float_of("logits", logits);
  expect(logits.dim() == 2 && logits.size(0) == experts.size(0) && logits.device() == experts.device(), "logits");
  call.begin(p, experts.size(0) * experts.size(1), logits.size(1));
  p.logits = logits.const_data_ptr();
  p.logits_stride[0] = logits.stride(0);
  p.logits_stride[1] = logits.stride(1);
  p.weights = call.slots("grad_weights", grad_weights, p.tokens, wide_of(p.dtype));
  p.expert_ids = static_cast<int64_t*>(call.slots("experts", experts, p.tokens, ScalarType::Long));
  p.grad_logits = call.packed("out", out, p.tokens, p.experts, logits.scalar_type());
  p.score = static_cast<int32_t>(score);
  p.renormalize = renormalize;
  p.expert_groups = p.top_groups = 1;
  p.scale = scale;
  call.finish(MG_NAME(mg_moe_route_backward)(&p), "moe_route_backward", p.tokens, p.experts);
}

void spread(Tensor x, Tensor inverse, Tensor ends, std::optional<Tensor> weights, std::optional<Tensor> other,
            std::optional<Tensor> out, std::optional<Tensor> dots, int64_t k) {
  const Call call(x, k);
  mg_moe_rows_problem p{};
  const int64_t slots = inverse.size(0);
  call.begin(p, slots, ends.size(0));
  p.width = x.size(x.dim() - 1);
  p.from_dtype = p.out_dtype = p.other_dtype = float_of("x", x);
  p.from = call.matrix("x", x, p.tokens, p.width, &p.from_row);
  p.inverse = call.places("inverse", inverse, slots);
  p.ends = call.places("ends", ends, p.experts);
  const ScalarType wide = wide_of(p.from_dtype);
  p.weights = call.slots("weights", weights, p.tokens, wide);
  p.dots = call.slots("dots", dots, p.tokens, wide);
  if (other) {
    p.other_dtype = float_of("other", *other);
    p.other = call.matrix("other", *other, slots, p.width, &p.other_row);
  }
  if (out) {
    p.out_dtype = float_of("out", *out);
    p.out = call.matrix("out", *out, slots, p.width, &p.out_row);
  }
  call.finish(MG_NAME(mg_moe_spread)(&p), "moe_spread", p.tokens, p.experts);
}

void collect(Tensor rows, Tensor inverse, Tensor ends, std::optional<Tensor> weights, std::optional<Tensor> other,
             Tensor out, int64_t k) {
  const Call call(rows, k);
  mg_moe_rows_problem p{};
  const int64_t slots = inverse.size(0);
  call.begin(p, slots, ends.size(0));
  p.width = rows.size(rows.dim() - 1);
  p.from_dtype = p.other_dtype = float_of("rows", rows);
  p.from = call.matrix("rows", rows, slots, p.width, &p.from_row);
  p.inverse = call.places("inverse", inverse, slots);
  p.ends = call.places("ends", ends, p.experts);
  p.weights = call.slots("weights", weights, p.tokens, wide_of(p.from_dtype));
  if (other) {
    p.other_dtype = float_of("other", *other);
    p.other = call.matrix("other", *other, p.tokens, p.width, &p.other_row);
  }
  p.out_dtype = float_of("out", out);
  p.out = call.matrix("out", out, p.tokens, p.width, &p.out_row);
  call.finish(MG_NAME(mg_moe_collect)(&p), "moe_collect", p.tokens, p.experts);
}

// What both directions of the activation share.
mg_moe_activate_problem activation(const Call& call, const Tensor& h, const Tensor& permutation, const Tensor& ends,
                                   const std::optional<Tensor>& weights, int64_t kind, bool gated, bool interleaved,
                                   double alpha, double limit) {
  mg_moe_activate_problem p{};
  const int64_t slots = permutation.size(0);
  call.begin(p, slots, ends.size(0));
  p.width = h.size(h.dim() - 1) / (gated ? 2 : 1);
  p.dtype = float_of("h", h);
  p.h = call.packed("h", h, slots, p.width * (gated ? 2 : 1), h.scalar_type());
  p.permutation = call.places("permutation", permutation, slots);
  p.ends = call.places("ends", ends, p.experts);
  p.weights = call.slots("weights", weights, p.tokens, wide_of(p.dtype));
  p.alpha = alpha;
  p.limit = limit;
  p.activation = static_cast<int32_t>(kind);
  p.gated = gated;
  p.interleaved = interleaved;
  return p;
}

void activate(Tensor h, Tensor permutation, Tensor ends, std::optional<Tensor> weights, Tensor out, int64_t k,
              int64_t kind, bool gated, bool interleaved, double alpha, double limit) {
  const Call call(h, k);
  mg_moe_activate_problem p = activation(call, h, permutation, ends, weights, kind, gated, interleaved, alpha, limit);
  p.out = call.packed("out", out, permutation.size(0), p.width, h.scalar_type());
  call.finish(MG_NAME(mg_moe_activate)(&p), "moe_activate", p.tokens, p.experts);
}

// [N, K] by [G, K, 2 I or I], then the activation -> [N, I], contiguous. Places are those of slots, one for each row;
// or x has rows of tokens, and permutation and inverse say where their slots are.
void up(Tensor x, Tensor w, Tensor ends, std::optional<Tensor> bias, std::optional<Tensor> permutation,
        std::optional<Tensor> inverse, Tensor out, int64_t k, int64_t kind, bool gated, bool interleaved, double alpha,
        double limit, std::string precision, std::string implementation) {
  const Call call(x, k);
  mg_moe_activate_problem p{};
  const int64_t rows = inverse ? x.size(0) * k : x.size(0);
  call.begin(p, rows, ends.size(0));
  p.width = out.size(out.dim() - 1);
  p.dtype = float_of("x", x);
  p.ends = call.places("ends", ends, p.experts);
  p.out = call.packed("out", out, rows, p.width, x.scalar_type());
  const int32_t* places = nullptr;
  if (inverse) {
    expect(permutation.has_value(), "permutation");
    p.permutation = call.places("permutation", *permutation, rows);
    places = call.places("inverse", *inverse, rows);
  }
  p.alpha = alpha;
  p.limit = limit;
  p.activation = static_cast<int32_t>(kind);
  p.gated = gated;
  p.interleaved = interleaved;
  mg_grouped_mm_problem product =
      multigemm::product_of(call.services(), x, w, ends, true, bias, precision, implementation);
  product.rows = rows;
  call.finish(MG_NAME(mg_moe_up)(&product, &p, places), "moe_up", p.tokens, p.experts);
}

// Whether `up` reads the tokens x [T, K] where they are, of k slots each.
bool up_reads_tokens(Tensor x, Tensor w, Tensor ends, std::optional<Tensor> bias, int64_t k, bool gated,
                     bool interleaved, std::string precision, std::string implementation) {
  const Call call(x, k);
  mg_moe_activate_problem p{};
  call.begin(p, x.size(0) * k, ends.size(0));
  p.width = w.size(w.dim() - 1) / (gated ? 2 : 1);
  p.dtype = float_of("x", x);
  p.ends = call.places("ends", ends, p.experts);
  p.out = x.mutable_data_ptr();  // one that is there
  p.gated = gated;
  p.interleaved = interleaved;
  mg_grouped_mm_problem product =
      multigemm::product_of(call.services(), x, w, ends, true, bias, precision, implementation);
  product.rows = x.size(0) * k;
  int32_t answer = 0;
  call.finish(MG_NAME(mg_moe_up_reads_tokens)(&product, &p, &answer), "moe_up", p.tokens, p.experts);
  return answer != 0;
}

void activate_backward(Tensor grad, Tensor h, Tensor permutation, Tensor ends, std::optional<Tensor> weights,
                       Tensor grad_h, std::optional<Tensor> grad_weights, std::optional<Tensor> out, int64_t k,
                       int64_t kind, bool gated, bool interleaved, double alpha, double limit) {
  const Call call(h, k);
  mg_moe_activate_problem p = activation(call, h, permutation, ends, weights, kind, gated, interleaved, alpha, limit);
  const int64_t slots = permutation.size(0);
  p.grad = call.packed("grad", grad, slots, p.width, h.scalar_type());
  p.grad_h = call.packed("grad_h", grad_h, slots, h.size(1), h.scalar_type());
  p.grad_weights = call.slots("grad_weights", grad_weights, p.tokens, wide_of(p.dtype));
  p.out = call.packed("out", out, slots, p.width, h.scalar_type());
  call.finish(MG_NAME(mg_moe_activate_backward)(&p), "moe_activate_backward", p.tokens, p.experts);
}

}  // namespace

#if defined(MG_CUDA) || defined(MG_HIP)
STABLE_TORCH_LIBRARY_IMPL(multigemm, CUDA, m) {
#else
STABLE_TORCH_LIBRARY_IMPL(multigemm, CPU, m) {
#endif
  m.impl("native_moe_route", TORCH_BOX(&route));
  m.impl("native_moe_route_backward", TORCH_BOX(&route_backward));
  m.impl("native_moe_spread", TORCH_BOX(&spread));
  m.impl("native_moe_collect", TORCH_BOX(&collect));
  m.impl("native_moe_activate", TORCH_BOX(&activate));
  m.impl("native_moe_up", TORCH_BOX(&up));
  m.impl("native_moe_up_reads_tokens", TORCH_BOX(&up_reads_tokens));
  m.impl("native_moe_activate_backward", TORCH_BOX(&activate_backward));
}
