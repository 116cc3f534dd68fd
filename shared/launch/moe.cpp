// The C entry points of the mixture-of-experts kernels: checks, empty cases, then the device's own launch.
#include "launch/moe.h"

#include "launch/checks.h"
#include "launch/grouped_mm.h"
#include "runtime/status.h"

namespace multigemm {
namespace {

[[noreturn]] void refuse(const std::string& text) { throw Failure(MG_INVALID_ARGUMENT, text); }

void check_range(const char* name, int64_t value, int64_t least, int64_t most) {
  if (value < least || value > most)
    refuse(std::string(name) + " is " + std::to_string(value) + "; allowed are " + std::to_string(least) + " to " +
           std::to_string(most));
}

void check_there(const char* name, const void* pointer) {
  if (!pointer) refuse(std::string(name) + " is null");
}

void check_float(const char* name, int32_t dtype) { check_range(name, dtype, MG_FLOAT64, MG_BFLOAT16); }

template <class Problem>
void check_common(const Problem* p) {
  check_there("problem", p);
  if (p->struct_size != static_cast<int64_t>(sizeof(Problem)))
    refuse("struct_size is " + std::to_string(p->struct_size) + ", but this library has " +
           std::to_string(sizeof(Problem)) + "; build the caller against the same abi_moe.h");
  check_range("experts", p->experts, 1, MG_MOE_MOST_EXPERTS);
  check_range("top_k", p->top_k, 1, MG_MOE_MOST_SLOTS);
  check_range("tokens", p->tokens, 0, 0x7fffffff / p->top_k);  // places are of 32 bits
  if (p->host && p->host->allocate && !p->host->release) refuse("host.release is null, but host.allocate is not");
}

void check_route(const mg_moe_route_problem* p, bool backward) {
  check_common(p);
  check_float("dtype", p->dtype);
  check_range("score", p->score, MG_MOE_SOFTMAX, MG_MOE_SIGMOID);
  check_range("group_score", p->group_score, MG_MOE_TOP2_SUM, MG_MOE_MAX);
  if (p->logits) {
    check_range("top_k", p->top_k, 1, p->experts);
    check_range("expert_groups", p->expert_groups, 1, MG_MOE_MOST_GROUPS);
    if (p->experts % p->expert_groups) refuse("experts is not a multiple of expert_groups");
    check_range("top_groups", p->top_groups, 1, p->expert_groups);
  }
  if (p->tokens == 0) {
    if (!backward) check_there("ends", p->ends);
    return;
  }
  check_there("expert_ids", p->expert_ids);
  if (p->logits || backward) check_there("weights", p->weights);
  if (backward) {
    check_there("logits", p->logits);
    return check_there("grad_logits", p->grad_logits);
  }
  check_there("permutation", p->permutation);
  check_there("inverse", p->inverse);
  check_there("ends", p->ends);
  if (!p->x) return;
  check_float("x_dtype", p->x_dtype);
  check_range("width", p->width, 1, INT64_MAX);
  check_there("rows", p->rows);
}

void check_rows(const mg_moe_rows_problem* p) {
  check_common(p);
  check_range("width", p->width, 1, INT64_MAX);
  check_float("from_dtype", p->from_dtype);
  check_float("out_dtype", p->out_dtype);
  check_float("other_dtype", p->other_dtype);
  if (p->tokens == 0) return;
  check_there("from", p->from);
  check_there("inverse", p->inverse);
  check_there("ends", p->ends);
}

void check_activate(const mg_moe_activate_problem* p, bool reads_h = true) {
  check_common(p);
  check_range("width", p->width, 1, INT64_MAX);
  check_float("dtype", p->dtype);
  check_range("activation", p->activation, MG_MOE_SILU, MG_MOE_CLAMPED);
  if (p->activation == MG_MOE_CLAMPED && !p->gated) refuse("the clamped activation needs a gate");
  if (p->interleaved && !p->gated) refuse("columns can alternate only where there is a gate");
  if (p->tokens == 0) return;
  if (reads_h) check_there("h", p->h);
  if (p->weights) check_there("permutation", p->permutation);
  check_there("ends", p->ends);
}

// Whether one is of the other's result.
void check_up(const mg_grouped_mm_problem* given, const mg_moe_activate_problem* activation) {
  check_there("product", given);
  check_activate(activation, false);
  const mg_grouped_mm_problem& product = *given;
  const mg_moe_activate_problem& a = *activation;
  mg_grouped_mm_problem p = product;
  p.out = a.out;  // the check asks for one
  check(&p);
  if (p.rows != a.tokens * a.top_k || p.outer != a.width * (a.gated ? 2 : 1) || p.batch != 1 || p.dtype != a.dtype ||
      p.out_dtype != a.dtype || p.device != a.device || p.stream != a.stream)
    refuse("the activation is not of what the product gives");
}

}  // namespace

mg_grouped_mm_problem gather_first(const mg_grouped_mm_problem& product, const mg_moe_activate_problem& activation,
                                   const int32_t* inverse, void* rows) {
  mg_moe_rows_problem s{};
  s.struct_size = sizeof(s);
  s.tokens = activation.tokens;
  s.experts = activation.experts;
  s.top_k = activation.top_k;
  s.width = product.inner;
  s.from = product.x;
  s.from_row = product.x_stride[0];
  s.out = rows;
  s.out_row = product.inner;
  s.inverse = inverse;
  s.ends = activation.ends;
  s.from_dtype = s.out_dtype = s.other_dtype = product.dtype;
  s.device = product.device;
  s.stream = product.stream;
  s.host = product.host;
  run_spread(s);
  mg_grouped_mm_problem p = product;
  p.x = rows;
  p.x_stride[0] = p.x_stride[1] = product.inner;
  p.x_stride[2] = 1;
  return p;
}

void run_apart(const mg_grouped_mm_problem& product, const mg_moe_activate_problem& activation, void* h) {
  mg_grouped_mm_problem p = product;
  mg_moe_activate_problem a = activation;
  a.h = p.out = h;
  p.out_stride[0] = p.out_stride[1] = p.outer;
  p.out_stride[2] = 1;
  run(p);
  run_activate(a);
}

}  // namespace multigemm

using namespace multigemm;

extern "C" int32_t MG_NAME(mg_moe_route)(const mg_moe_route_problem* problem) {
  return guarded([&] {
    check_route(problem, false);
    run_route(*problem);  // without tokens too: the ends are zeros
  });
}

extern "C" int32_t MG_NAME(mg_moe_route_backward)(const mg_moe_route_problem* problem) {
  return guarded([&] {
    check_route(problem, true);
    if (problem->tokens) run_route_backward(*problem);
  });
}

extern "C" int32_t MG_NAME(mg_moe_spread)(const mg_moe_rows_problem* problem) {
  return guarded([&] {
    check_rows(problem);
    if (problem->tokens == 0) return;
    if (!problem->out) check_there("dots", problem->dots);
    if (problem->dots) check_there("other", problem->other);
    run_spread(*problem);
  });
}

extern "C" int32_t MG_NAME(mg_moe_collect)(const mg_moe_rows_problem* problem) {
  return guarded([&] {
    check_rows(problem);
    if (problem->tokens == 0) return;
    check_there("out", problem->out);
    run_collect(*problem);
  });
}

extern "C" int32_t MG_NAME(mg_moe_activate)(const mg_moe_activate_problem* problem) {
  return guarded([&] {
    check_activate(problem);
    if (problem->tokens == 0) return;
    check_there("out", problem->out);
    run_activate(*problem);
  });
}

extern "C" int32_t MG_NAME(mg_moe_up)(const mg_grouped_mm_problem* product, const mg_moe_activate_problem* activation,
                                      const int32_t* inverse) {
  return guarded([&] {
    check_up(product, activation);
    if (activation->tokens == 0) return;
    check_there("out", activation->out);
    if (inverse) {
      check_there("permutation", activation->permutation);
      check_range("inner", product->inner, 1, INT64_MAX);
      if (product->inner != 1 && product->x_stride[2] != 1) refuse("x has no unit stride along H");
    }
    run_up(*product, *activation, inverse);
  });
}

extern "C" int32_t MG_NAME(mg_moe_up_reads_tokens)(const mg_grouped_mm_problem* product,
                                                   const mg_moe_activate_problem* activation, int32_t* answer) {
  return guarded([&] {
    check_up(product, activation);
    check_there("answer", answer);
    *answer = activation->tokens != 0 && up_reads_tokens(*product, *activation);
  });
}

extern "C" int32_t MG_NAME(mg_moe_activate_backward)(const mg_moe_activate_problem* problem) {
  return guarded([&] {
    check_activate(problem);
    if (problem->tokens == 0) return;
    check_there("permutation", problem->permutation);
    check_there("grad", problem->grad);
    check_there("grad_h", problem->grad_h);
    run_activate_backward(*problem);
  });
}
