/* In place of AMD's libraries, for a machine without them: what was called with which device, stream and handle, as
   text. Memory is the host's and kernels do not run, but products of float32 matrices are computed.
   With -DBLAS it is hipBLAS, without it the HIP runtime. */
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static char text[1 << 16];
static size_t used;
static char failing[64];
static int failure;

static void note(const char *format, ...) {
    va_list values;
    va_start(values, format);
    used += (size_t)vsnprintf(text + used, sizeof text - used, format, values);
    va_end(values);
    if (used > sizeof text - 200) abort();
}

static int outcome(const char *name) { return strcmp(name, failing) == 0 ? failure : 0; }

#ifndef BLAS

/* What was noted since the last time. */
const char *hip_log(void) {
    static char copy[sizeof text];
    memcpy(copy, text, sizeof text);
    memset(text, 0, used);
    used = 0;
    return copy;
}

void hip_fail(const char *name, int error) {
    snprintf(failing, sizeof failing, "%s", name);
    failure = error;
}

typedef struct {
    unsigned x, y, z;
} dim3;
static struct {
    const void *address;
    const char *name;
} kernels[4096];
static int known, device, last;

static int done(const char *name) { return last = outcome(name); }

void **__hipRegisterFatBinary(const void *image) {
    static void *handle;
    note("register %.4s\n", (const char *)image);
    return &handle;
}
void __hipRegisterFunction(void **binary, const void *host, char *kernel, const char *name, unsigned threads, void *a,
                           void *b, void *c, void *d, int *e) {
    (void)binary, (void)kernel, (void)threads, (void)a, (void)b, (void)c, (void)d, (void)e;
    if (known == sizeof kernels / sizeof *kernels) abort();
    kernels[known].address = host;
    kernels[known++].name = name;
}
int hipLaunchKernel(const void *kernel, dim3 grid, dim3 block, void **arguments, size_t bytes, void *stream) {
    const char *name = "unknown";
    for (int i = 0; i < known; ++i)
        if (kernels[i].address == kernel) name = kernels[i].name;
    note("launch %s device %d stream %p blocks %u threads %u,%u,%u shared %zu arguments %d\n", name, device, stream,
         grid.x, block.x, block.y * grid.y, block.z * grid.z, bytes, arguments && arguments[0]);
    return done("hipLaunchKernel");
}
int hipGetDevice(int *out) {
    *out = device;
    return done("hipGetDevice");
}
int hipSetDevice(int ordinal) {
    note("device %d\n", ordinal);
    if (done("hipSetDevice") == 0) device = ordinal;
    return last;
}
int hipGetDeviceCount(int *count) {
    *count = 2;
    return done("hipGetDeviceCount");
}
/* An MI300X. */
int hipDeviceGetAttribute(int *value, int attribute, int ordinal) {
    (void)ordinal;
    *value = attribute == 23 ? 9 : attribute == 61 ? 4 : attribute == 63 ? 304 : attribute == 74 ? 65536 : 4 << 20;
    return done("hipDeviceGetAttribute");
}
int hipMalloc(void **memory, size_t bytes) {
    note("allocate %zu device %d\n", bytes, device);
    *memory = calloc(1, bytes);
    return done("hipMalloc");
}
int hipFree(void *memory) {
    note("free device %d\n", device);
    free(memory);
    return done("hipFree");
}
int hipMemcpy(void *to, const void *from, size_t bytes, int kind) {
    note("copy %zu kind %d device %d\n", bytes, kind, device);
    memcpy(to, from, bytes);
    return done("hipMemcpy");
}
int hipMallocAsync(void **memory, size_t bytes, void *stream) {
    note("allocate %zu stream %p\n", bytes, stream);
    *memory = calloc(1, bytes);
    return done("hipMallocAsync");
}
int hipFreeAsync(void *memory, void *stream) {
    note("free stream %p\n", stream);
    free(memory);
    return done("hipFreeAsync");
}
int hipMemcpyAsync(void *to, const void *from, size_t bytes, int kind, void *stream) {
    note("copy %zu kind %d stream %p\n", bytes, kind, stream);
    memcpy(to, from, bytes);
    return done("hipMemcpyAsync");
}
int hipStreamSynchronize(void *stream) {
    note("synchronize stream %p\n", stream);
    return done("hipStreamSynchronize");
}
int hipStreamIsCapturing(void *stream, int *status) {
    (void)stream;
    *status = 0;
    return done("hipStreamIsCapturing");
}
int hipThreadExchangeStreamCaptureMode(int *mode) {
    static int current;
    const int before = current;
    note("capture mode %d\n", *mode);
    current = *mode;
    *mode = before;
    return done("hipThreadExchangeStreamCaptureMode");
}
int hipGetLastError(void) {
    const int error = last;
    last = 0;
    return error;
}
const char *hipGetErrorName(int error) { return error == 719 ? "hipErrorLaunchFailure" : "hipErrorOther"; }
const char *hipGetErrorString(int error) { return error == 719 ? "unspecified launch failure" : "another error"; }

#else

const char *hipblas_log(void) {
    static char copy[sizeof text];
    memcpy(copy, text, sizeof text);
    memset(text, 0, used);
    used = 0;
    return copy;
}

void hipblas_fail(const char *name, int status) {
    snprintf(failing, sizeof failing, "%s", name);
    failure = status;
}

typedef struct {
    int number;
} handle;

int hipblasCreate(handle **out) {
    static int made;
    *out = malloc(sizeof(handle));
    (*out)->number = ++made;
    note("create %d\n", made);
    return outcome("hipblasCreate");
}
int hipblasDestroy(handle *h) {
    note("destroy %d\n", h->number);
    free(h);
    return 0;
}
int hipblasSetStream(handle *h, void *stream) {
    note("handle %d stream %p\n", h->number, stream);
    return outcome("hipblasSetStream");
}
#ifndef OLDER
int hipblasSetWorkspace(handle *h, void *memory, size_t bytes) {
    note("handle %d workspace %zu\n", h->number, memory ? bytes : 0);
    return outcome("hipblasSetWorkspace");
}
#endif
int hipblasSetAtomicsMode(handle *h, int mode) {
    note("handle %d atomics %d\n", h->number, mode);
    return outcome("hipblasSetAtomicsMode");
}
const char *hipblasStatusToString(int status) {
    return status == 7 ? "HIPBLAS_STATUS_NOT_SUPPORTED" : "HIPBLAS_STATUS_UNKNOWN";
}
int hipblasGemmStridedBatchedEx(handle *h, int a_operation, int b_operation, int m, int n, int k, const void *alpha,
                                const float *a, int a_type, int lda, int64_t a_stride, const float *b, int b_type,
                                int ldb, int64_t b_stride, const void *beta, float *c, int c_type, int ldc,
                                int64_t c_stride, int count, int compute, int algorithm) {
    note("handle %d gemm %d %d m %d n %d k %d count %d types %d %d %d compute %d algorithm %d\n", h->number,
         a_operation, b_operation, m, n, k, count, a_type, b_type, c_type, compute, algorithm);
    if (outcome("hipblasGemmStridedBatchedEx")) return outcome("hipblasGemmStridedBatchedEx");
    if (a_type != 0) return 0;
    for (int i = 0; i < count; ++i)
        for (int column = 0; column < n; ++column)
            for (int row = 0; row < m; ++row) {
                float sum = 0, *to = c + i * c_stride + (int64_t)column * ldc + row;
                for (int j = 0; j < k; ++j)
                    sum += a[i * a_stride + (a_operation == 111 ? row + (int64_t)j * lda : j + (int64_t)row * lda)] *
                           b[i * b_stride + (b_operation == 111 ? j + (int64_t)column * ldb : column + (int64_t)j * ldb)];
                *to = *(const float *)alpha * sum + (*(const float *)beta != 0 ? *(const float *)beta * *to : 0);
            }
    return 0;
}

#endif
