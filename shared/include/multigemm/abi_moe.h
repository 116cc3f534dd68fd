/* The C ABI of what surrounds the two products of a mixture-of-experts layer. The rules of abi.h hold.
 *
 * Letters: T tokens, E experts, k slots of each token, H width of a token, I inner width of an expert. A slot s = t k +
 * j has a place in expert order: inverse[s], and at place p stands slot permutation[p], of token permutation[p] / k.
 * ends[e] is the cumulative end of expert e. Slots whose expert is outside 0 .. E - 1 are dropped: they stand at the
 * places from ends[E - 1] on. "Wide" is float64 where the operands are float64, and float32 otherwise. */
#ifndef MULTIGEMM_ABI_MOE_H
#define MULTIGEMM_ABI_MOE_H

#include "multigemm/abi.h"

#ifdef __cplusplus
extern "C" {
#endif

#define MG_MOE_MOST_EXPERTS 1024
#define MG_MOE_MOST_GROUPS 64
#define MG_MOE_MOST_SLOTS 16

typedef enum mg_moe_score { MG_MOE_SOFTMAX = 0, MG_MOE_SIGMOID = 1 } mg_moe_score;
typedef enum mg_moe_group_score { MG_MOE_TOP2_SUM = 0, MG_MOE_MAX = 1 } mg_moe_group_score;
typedef enum mg_moe_activation {
  MG_MOE_SILU = 0,
  MG_MOE_GELU = 1,
  MG_MOE_GELU_TANH = 2,
  MG_MOE_RELU = 3,
  MG_MOE_CLAMPED = 4 /* gated only: (u + 1) g sigmoid(alpha g), g at most `limit`, u within it on both sides */
} mg_moe_activation;

/* mg_moe_route: logits [T, E] -> expert_ids and weights [T, k], and the order of the slots. Without logits, expert_ids
 * are read. With x [T, H], rows [T k, H] in expert order are written too, zeros at the places of dropped slots.
 * mg_moe_route_backward: from logits, expert_ids and `weights`, which holds the gradient of the weights, to
 * grad_logits. */
typedef struct mg_moe_route_problem {
  int64_t struct_size;
  int64_t tokens, experts, top_k;
  const void* logits;       /* may be null */
  int64_t logits_stride[2]; /* T, E */
  const void* correction;   /* [E], wide, added to the scores for the selection alone; may be null */
  int64_t* expert_ids;      /* [T, k] */
  void* weights;            /* [T, k], wide */
  int32_t* permutation;     /* [T k] */
  int32_t* inverse;         /* [T k] */
  int32_t* ends;            /* [E] */
  const void* x;            /* unit stride along H; may be null */
  int64_t x_row, width;
  void* rows;        /* contiguous */
  void* grad_logits; /* [T, E], contiguous, of the dtype of the logits */
  double scale;      /* factor on the weights */
  int32_t dtype;     /* of the logits */
  int32_t x_dtype;
  int32_t score, renormalize;
  int32_t expert_groups, top_groups, group_score;
  int32_t device;
  void* stream;
  const mg_host* host; /* may be null */
} mg_moe_route_problem;

/* mg_moe_spread: out[inverse[s]] = weights[s] from[s / k], and dots[s] = <from[s / k], other[inverse[s]]>; `out` or
 * `dots` may be null. Places from ends[E - 1] on get zeros. mg_moe_collect: out[t] = sum over j in order of weights[t,
 * j] from[inverse[t k + j]], plus other[t], rounded once; dropped slots add nothing, whatever their weights. */
typedef struct mg_moe_rows_problem {
  int64_t struct_size;
  int64_t tokens, experts, top_k, width;
  const void* from; /* unit stride along H, as out and other */
  int64_t from_row;
  void* out;
  int64_t out_row;
  const void* other; /* may be null */
  int64_t other_row;
  const void* weights; /* [T, k], wide; null counts as ones */
  void* dots;          /* [T, k], wide */
  const int32_t* inverse;
  const int32_t* ends;
  int32_t from_dtype, out_dtype, other_dtype;
  int32_t device;
  void* stream;
  const mg_host* host;
} mg_moe_rows_problem;

/* mg_moe_activate: out[p] = weight(p) act(h[p]), h [T k, 2 I or I] and out [T k, I], both contiguous; `permutation` may
 * be null where `weights` is.
 * mg_moe_activate_backward: grad [T k, I] -> grad_h, grad_weights [T, k] (wide, may be null) and, where it is not null,
 * `out` again. Places from ends[E - 1] on get zeros. */
typedef struct mg_moe_activate_problem {
  int64_t struct_size;
  int64_t tokens, experts, top_k, width;
  const void* h;
  void* out;
  const void* grad;
  void* grad_h;
  const void* weights; /* [T, k], wide; null counts as ones */
  void* grad_weights;
  const int32_t* permutation;
  const int32_t* ends;
  double alpha, limit;
  int32_t activation, gated;
  int32_t interleaved; /* columns gate, up, gate, up ... instead of all gates, then all ups */
  int32_t dtype;
  int32_t device, reserved;
  void* stream;
  const mg_host* host;
} mg_moe_activate_problem;

MG_STATIC_ASSERT(sizeof(mg_moe_route_problem) == 200);
MG_STATIC_ASSERT(offsetof(mg_moe_route_problem, dtype) == 152);
MG_STATIC_ASSERT(sizeof(mg_moe_rows_problem) == 152);
MG_STATIC_ASSERT(offsetof(mg_moe_rows_problem, from_dtype) == 120);
MG_STATIC_ASSERT(sizeof(mg_moe_activate_problem) == 160);
MG_STATIC_ASSERT(offsetof(mg_moe_activate_problem, activation) == 120);

MG_EXPORT int32_t MG_NAME(mg_moe_route)(const mg_moe_route_problem* problem);
MG_EXPORT int32_t MG_NAME(mg_moe_route_backward)(const mg_moe_route_problem* problem);
MG_EXPORT int32_t MG_NAME(mg_moe_spread)(const mg_moe_rows_problem* problem);
MG_EXPORT int32_t MG_NAME(mg_moe_collect)(const mg_moe_rows_problem* problem);
MG_EXPORT int32_t MG_NAME(mg_moe_activate)(const mg_moe_activate_problem* problem);
/* The activation of a product, h being the product's result, which is kept nowhere: product.out and activation.h are
 * not read. One kernel may compute both, and rounds once less then. With `inverse` [T k], which may be null, product.x
 * has a row for each token, not for each place, with unit stride along H; activation.permutation must be there then. */
MG_EXPORT int32_t MG_NAME(mg_moe_up)(const mg_grouped_mm_problem* product, const mg_moe_activate_problem* activation,
                                     const int32_t* inverse);
/* Stores in `answer` whether mg_moe_up, given `inverse`, would read tokens where they are (1) or gather them in expert
 * order first (0). Reads no operand. */
MG_EXPORT int32_t MG_NAME(mg_moe_up_reads_tokens)(const mg_grouped_mm_problem* product,
                                                  const mg_moe_activate_problem* activation, int32_t* answer);
MG_EXPORT int32_t MG_NAME(mg_moe_activate_backward)(const mg_moe_activate_problem* problem);

#ifdef __cplusplus
}
#endif
#endif
