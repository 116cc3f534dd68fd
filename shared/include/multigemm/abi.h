/* The C ABI of every multigemm backend: plain C, no framework, nothing thrown across it.
 *
 * Letters: N rows, G groups, B batch, K inner width, M outer width. Strides count elements.
 * Each exported name carries the backend's suffix (mg_query_cpu, mg_query_cu13, ...), so that several
 * backends can live in one process. Structs are frozen: a change of any size or offset below needs a
 * new MG_ABI number. Functions return a status; mg_last_error_* holds the text for the calling thread. */
#ifndef MULTIGEMM_ABI_H
#define MULTIGEMM_ABI_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#if defined(__CUDACC_RTC__)  // has no constant offsetof; the host's compiler sees the same structs
#define MG_STATIC_ASSERT(condition)
#else
#define MG_STATIC_ASSERT(condition) static_assert(condition, #condition)
#endif
#else
#define MG_STATIC_ASSERT(condition) _Static_assert(condition, #condition)
#endif

#define MG_ABI 1
#define MG_PROTOCOL 1

#ifndef MG_SUFFIX
#define MG_SUFFIX cpu
#endif
#define MG_JOIN_(name, suffix) name##_##suffix
#define MG_JOIN(name, suffix) MG_JOIN_(name, suffix)
#define MG_NAME(name) MG_JOIN(name, MG_SUFFIX)
#define MG_EXPORT __attribute__((visibility("default")))

typedef enum mg_status {
  MG_OK = 0,
  MG_INVALID_ARGUMENT = 1, /* the call is wrong; the message names the argument */
  MG_UNSUPPORTED = 2,      /* the call is right, but the asked implementation can't do it */
  MG_OUT_OF_MEMORY = 3,    /* a workspace could not be had */
  MG_DEVICE_ERROR = 4,     /* the device runtime or a vendor library reported a failure */
  MG_INTERNAL = 5,
  MG_NO_DEVICE_CODE = 6, /* the library was not built for the device's architecture */
  MG_DRIVER_TOO_OLD = 7  /* the device's driver is older than the library's toolkit needs */
} mg_status;

typedef enum mg_dtype {
  MG_FLOAT64 = 1,
  MG_FLOAT32 = 2,
  MG_FLOAT16 = 3,
  MG_BFLOAT16 = 4,
  MG_INT32 = 5, /* groups only */
  MG_INT64 = 6  /* groups only */
} mg_dtype;

typedef enum mg_precision { MG_PRECISION_FRAMEWORK = 0, MG_PRECISION_IEEE = 1, MG_PRECISION_TF32 = 2 } mg_precision;

typedef enum mg_implementation {
  MG_AUTO = 0,
  MG_NATIVE = 1, /* the best kernel of this library */
  MG_BLAS = 2,   /* the BLAS this library links */
  MG_TORCH = 3,  /* the host's own matrix product (mg_host.matmul) */
  MG_SIMT = 4    /* the portable kernel */
} mg_implementation;

/* Either G sizes or G cumulative ends, in memory of the operands' device unless a flag says otherwise. */
typedef enum mg_groups_flags { MG_GROUPS_OFFSETS = 1, MG_GROUPS_ON_HOST = 2 } mg_groups_flags;

typedef struct mg_groups {
  const void* data;
  int64_t count;
  int64_t stride;
  int32_t dtype; /* MG_INT32 or MG_INT64 */
  int32_t flags; /* MG_GROUPS_OFFSETS: cumulative ends, not sizes; MG_GROUPS_ON_HOST: `data` is host memory */
} mg_groups;

/* c[i] = a[i] b[i] for i < batch, a [rows, inner], b [inner, cols], c [rows, cols].
 * Strides: batch, row, column. The dtype is MG_FLOAT64 or MG_FLOAT32. */
typedef struct mg_matmul {
  int64_t batch, rows, inner, cols;
  const void* a;
  int64_t a_stride[3];
  const void* b;
  int64_t b_stride[3];
  void* c;
  int64_t c_stride[3];
  int32_t dtype;
  int32_t reserved;
} mg_matmul;

typedef void (*mg_range_function)(int64_t begin, int64_t end, void* argument);

/* What the caller lends for one call. Any callback may be null: then work runs on the calling thread,
 * workspaces come from the C library, and MG_TORCH is not available. */
typedef struct mg_host {
  void* context;
  int64_t threads; /* how many ranges parallel_for runs at once; 0 counts as 1 */
  void (*parallel_for)(void* context, int64_t begin, int64_t end, int64_t grain, mg_range_function function,
                       void* argument);
  void* (*allocate)(void* context, int64_t bytes); /* aligned to 64 bytes, null when there is no memory */
  void (*release)(void* context, void* memory);
  int32_t (*matmul)(void* context, const mg_matmul* product); /* 0 on success */
} mg_host;

/* out[n, b, :] = x[n, b, :] w[g(n), b] + bias[g(n), b]; rows that belong to no group become zeros. */
typedef struct mg_grouped_mm_problem {
  int64_t struct_size; /* sizeof of this struct as the caller knows it */
  int64_t rows, batch, inner, outer;
  const void* x;
  int64_t x_stride[3]; /* N, B, K */
  const void* w;
  int64_t w_stride[4];    /* G, B, K, M; B may be 0 */
  const void* bias;       /* may be null */
  int64_t bias_stride[3]; /* G, B, M; B may be 0 */
  void* out;
  int64_t out_stride[3]; /* N, B, M */
  mg_groups groups;
  int32_t dtype, out_dtype; /* of x, w, bias; of out */
  int32_t precision, implementation;
  int32_t device, reserved;
  void* stream;
  const mg_host* host; /* may be null */
} mg_grouped_mm_problem;

/* out[g, b] = sum over the rows n of group g of x[n, b, :]^T gy[n, b, :], summed over b too if sum_batch. */
typedef struct mg_grouped_mm_wgrad_problem {
  int64_t struct_size;
  int64_t rows, batch, inner, outer;
  const void* x;
  int64_t x_stride[3]; /* N, B, K */
  const void* gy;
  int64_t gy_stride[3]; /* N, B, M */
  void* out;
  int64_t out_stride[4]; /* G, B, K, M; B unused if sum_batch */
  mg_groups groups;
  int32_t dtype, out_dtype; /* of x and gy; of out */
  int32_t precision, implementation;
  int32_t device, sum_batch;
  void* stream;
  const mg_host* host;
} mg_grouped_mm_wgrad_problem;

MG_STATIC_ASSERT(sizeof(mg_groups) == 32);
MG_STATIC_ASSERT(offsetof(mg_groups, dtype) == 24);
MG_STATIC_ASSERT(sizeof(mg_matmul) == 136);
MG_STATIC_ASSERT(offsetof(mg_matmul, c_stride) == 104);
MG_STATIC_ASSERT(sizeof(mg_host) == 48);
MG_STATIC_ASSERT(offsetof(mg_host, matmul) == 40);
MG_STATIC_ASSERT(sizeof(mg_grouped_mm_problem) == 248);
MG_STATIC_ASSERT(offsetof(mg_grouped_mm_problem, groups) == 176);
MG_STATIC_ASSERT(offsetof(mg_grouped_mm_problem, dtype) == 208);
MG_STATIC_ASSERT(offsetof(mg_grouped_mm_problem, host) == 240);
MG_STATIC_ASSERT(sizeof(mg_grouped_mm_wgrad_problem) == 216);
MG_STATIC_ASSERT(offsetof(mg_grouped_mm_wgrad_problem, groups) == 144);
MG_STATIC_ASSERT(offsetof(mg_grouped_mm_wgrad_problem, dtype) == 176);
MG_STATIC_ASSERT(offsetof(mg_grouped_mm_wgrad_problem, host) == 208);

/* A JSON object: protocol, abi, version, name, kind, kernels by operator, the CPU or GPU level in use. */
MG_EXPORT const char* MG_NAME(mg_query)(void);

MG_EXPORT int32_t MG_NAME(mg_grouped_mm)(const mg_grouped_mm_problem* problem);
MG_EXPORT int32_t MG_NAME(mg_grouped_mm_wgrad)(const mg_grouped_mm_wgrad_problem* problem);

/* Writes a JSON text (kernel, implementation, why, and for each other kernel why not), cut at `capacity` bytes
 * with its final zero, and stores the full length without that zero. Launches nothing. */
MG_EXPORT int32_t MG_NAME(mg_grouped_mm_explain)(const mg_grouped_mm_problem* problem, char* text, int64_t capacity,
                                                 int64_t* length);
MG_EXPORT int32_t MG_NAME(mg_grouped_mm_wgrad_explain)(const mg_grouped_mm_wgrad_problem* problem, char* text,
                                                       int64_t capacity, int64_t* length);

/* GPU backends: what a device of these numbers would run, without one. */
typedef struct mg_device {
  int32_t major, minor; /* compute capability */
  int32_t multiprocessors;
  int32_t shared_bytes; /* that one block may use */
  int64_t l2_bytes;
} mg_device;

MG_EXPORT int32_t MG_NAME(mg_grouped_mm_plan)(const mg_grouped_mm_problem* problem, const mg_device* device, char* text,
                                              int64_t capacity, int64_t* length);
MG_EXPORT int32_t MG_NAME(mg_grouped_mm_wgrad_plan)(const mg_grouped_mm_wgrad_problem* problem, const mg_device* device,
                                                    char* text, int64_t capacity, int64_t* length);

/* The message of the calling thread's last failure, "STATUS_NAME: text"; valid until its next call. */
MG_EXPORT const char* MG_NAME(mg_last_error)(void);

/* Stores up to `count` struct sizes in the order of this file (groups, matmul, host, grouped_mm, wgrad);
 * returns how many there are. */
MG_EXPORT int64_t MG_NAME(mg_abi_sizes)(int64_t* sizes, int64_t count);

#ifdef __cplusplus
}
#endif
#endif
