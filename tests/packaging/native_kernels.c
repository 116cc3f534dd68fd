/* Kernels for the leaf operators through PyTorch's stable C functions: fill `out` with a constant.
   Compiled with FILL (the constant), or with DEFINE_SCHEMA to do what no backend may: define a schema. */
#include <stdint.h>

typedef void *handle;
int32_t aoti_torch_library_init_impl(const char *, const char *, const char *, uint32_t, handle *);
int32_t aoti_torch_library_init_def(const char *, const char *, uint32_t, handle *);
int32_t aoti_torch_library_impl(handle, const char *, void (*)(uint64_t *, uint64_t, uint64_t));
int32_t aoti_torch_library_def(handle, const char *);
int32_t aoti_torch_get_data_ptr(handle, void **);
int32_t aoti_torch_get_numel(handle, int64_t *);

static handle library;

#ifdef DEFINE_SCHEMA
__attribute__((constructor)) static void define(void) {
    aoti_torch_library_init_def("multigemm", __FILE__, __LINE__, &library);
    aoti_torch_library_def(library, "native_grouped_mm(Tensor x) -> ()");
}
#else
static void fill(uint64_t *stack, uint64_t inputs, uint64_t outputs) {
    handle out = (handle)stack[5]; /* both leaf operators take out as their sixth argument */
    void *data;
    int64_t count;
    (void)inputs, (void)outputs;
    aoti_torch_get_data_ptr(out, &data);
    aoti_torch_get_numel(out, &count);
    for (int64_t i = 0; i < count; ++i) ((float *)data)[i] = FILL;
}

__attribute__((constructor)) static void implement(void) {
    aoti_torch_library_init_impl("multigemm", "CPU", __FILE__, __LINE__, &library);
    aoti_torch_library_impl(library, "native_grouped_mm", fill);
    aoti_torch_library_impl(library, "native_grouped_mm_wgrad", fill);
}
#endif
