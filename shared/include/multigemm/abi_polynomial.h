/* The C ABI of indexed_polynomial and its gradients; conventions as in abi.h.
 *
 * Letters: N rows, C channels, G labels, P weights, D components of x, O of y, T terms, in Q pairs, in H heads. */
#ifndef MULTIGEMM_ABI_POLYNOMIAL_H
#define MULTIGEMM_ABI_POLYNOMIAL_H

#include "multigemm/abi.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum mg_polynomial_kind {
  MG_POLYNOMIAL_VALUE = 0, /* y[n, d, c] = sum over t of factor t w[g(n), p(t), c] monomial t of x[n, :, c] */
  MG_POLYNOMIAL_XGRAD = 1, /* the gradient of the sum of gy * y in one more direction */
  MG_POLYNOMIAL_WGRAD = 2  /* the gradient of the sum of gy * y in w */
} mg_polynomial_kind;

/* A monomial is X[i] X[j] X[k] with X[D] = 1, differentiated once along each direction. Component i of channel c is
 * column places[2 i] + c places[2 i + 1] of x, the directions and their gradient, and component d with row D + d of
 * `places` of y and gy. All but `host` lies on the device. */
typedef struct mg_polynomial_problem {
  int64_t struct_size;
  int64_t rows, channels, groups;             /* N, C, G */
  int64_t width, components;                  /* D, O */
  int64_t head_count, pair_count, term_count; /* H, Q, T */
  int64_t weight_count;                       /* P */
  const void* x;
  const void* direction[3];
  const void* w;                                    /* [G, P, C]; null for the gradient in w */
  const void* gy;                                   /* null for the value */
  void* out;                                        /* rows as those of y or x, or [G, P, C] */
  int64_t x_row, direction_row[3], gy_row, out_row; /* of rows, in elements; columns have unit stride */
  int64_t w_stride[2], out_stride[2];               /* G, P, of [G, P, C] with unit stride along C */
  const int64_t* labels;                            /* [N] */
  const int64_t* permutation; /* [N], the rows in the order of their labels; for the gradient in w */
  const int64_t* ends;        /* [G], the cumulative ends of the labels' rows there */
  const int32_t* heads;       /* [H, 4]: d, i, begin and end of the pairs */
  const int32_t* pairs;       /* [Q, 4]: j, begin and end of the terms, d */
  const int32_t* last;        /* [T, 2]: k, p */
  const void* factors;        /* [T], of the dtype of x */
  const int32_t* entries;     /* [T, 5], the terms in the order of their weights: d, i, j, k, t */
  const int32_t* entry_ends;  /* [P], the ends of the weights' terms there */
  const int64_t* places;      /* [D + O, 2] */
  int64_t fingerprint;        /* of heads to entry_ends: tables known by it have kernels of their own; 0: none */
  int32_t kind, directions, dtype, implementation;
  int32_t device, reserved;
  void* stream;
  const mg_host* host; /* may be null */
} mg_polynomial_problem;

MG_STATIC_ASSERT(sizeof(mg_polynomial_problem) == 344);
MG_STATIC_ASSERT(offsetof(mg_polynomial_problem, x_row) == 136);
MG_STATIC_ASSERT(offsetof(mg_polynomial_problem, labels) == 216);
MG_STATIC_ASSERT(offsetof(mg_polynomial_problem, kind) == 304);
MG_STATIC_ASSERT(offsetof(mg_polynomial_problem, host) == 336);

MG_EXPORT int32_t MG_NAME(mg_indexed_polynomial)(const mg_polynomial_problem* problem);

#ifdef __cplusplus
}
#endif
#endif
