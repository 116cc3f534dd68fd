#include <cublas_v2.h>
#include <dlfcn.h>

#include <algorithm>

#include "blas/blas_gpu.h"
#include "kernels/grouped_mm/simt.h"
#include "runtime/status.h"

namespace multigemm {
namespace {

cudaDataType type_of(int32_t dtype) {
  switch (dtype) {
    case MG_FLOAT64: return CUDA_R_64F;
    case MG_FLOAT32: return CUDA_R_32F;
    case MG_FLOAT16: return CUDA_R_16F;
    default: return CUDA_R_16BF;
  }
}

cublasComputeType_t compute_of(int32_t dtype, int32_t precision) {
  if (dtype == MG_FLOAT64) return CUBLAS_COMPUTE_64F;
  return dtype == MG_FLOAT32 && precision == MG_PRECISION_TF32 ? CUBLAS_COMPUTE_32F_FAST_TF32 : CUBLAS_COMPUTE_32F;
}

// A row-major operand is its transpose to a column-major library: c^T = b^T a^T.
struct Operand {
  cublasOperation_t operation;
  int64_t leading;
};

Operand operand(int64_t rows, int64_t columns, const int64_t* stride) {
  if ((stride[2] == 1 || columns <= 1) && (stride[1] >= columns || rows <= 1))
    return {CUBLAS_OP_N, std::max<int64_t>({stride[1], columns, 1})};
  return {CUBLAS_OP_T, std::max<int64_t>({stride[2], rows, 1})};
}

void set_math(const BorrowedHandle& handle) {
  // Halves are summed in float32 throughout, split sums too.
  check_blas(cublasSetMathMode(
                 handle.get(),
                 static_cast<cublasMath_t>(CUBLAS_DEFAULT_MATH | CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION)),
             "setting the math mode of a cuBLAS handle");
}

using GroupedProducts = cublasStatus_t (*)(cublasHandle_t, const cublasOperation_t*, const cublasOperation_t*,
                                           const int*, const int*, const int*, const void*, const void* const*,
                                           cudaDataType_t, const int*, const void* const*, cudaDataType_t, const int*,
                                           const void*, void* const*, cudaDataType_t, const int*, int, const int*,
                                           cublasComputeType_t);

GroupedProducts grouped_products() {
  // By name from the library that is loaded: an older one of the same major lacks it.
  static const GroupedProducts function = [] {
    void* library = dlopen("libcublas.so." MG_BLAS_MAJOR, RTLD_LAZY | RTLD_NOLOAD);
    return library ? reinterpret_cast<GroupedProducts>(dlsym(library, "cublasGemmGroupedBatchedEx")) : nullptr;
  }();
  return function;
}

}  // namespace

// A library that is linked is there, but what has its name may be a stand-in that answers nothing.
std::string blas_refusal() {
  static const bool answers = blas_version() > 0;
  return answers ? "" : "the libcublas.so." MG_BLAS_MAJOR " of this process tells no version, so it is none";
}

void check_blas(int status, const char* what) {
  if (status == CUBLAS_STATUS_SUCCESS) return;
  throw Failure(MG_DEVICE_ERROR,
                std::string(what) + " failed: " + cublasGetStatusName(static_cast<cublasStatus_t>(status)));
}

void blas_product(const mg_matmul& p, int32_t precision, bool accumulate, const BorrowedHandle& handle) {
  set_math(handle);
  const Operand a = operand(p.rows, p.inner, p.a_stride), b = operand(p.inner, p.cols, p.b_stride);
  const double one64 = 1, beta64 = accumulate ? 1 : 0;
  const float one32 = 1, beta32 = accumulate ? 1 : 0;
  const bool wide = p.dtype == MG_FLOAT64;
  const cudaDataType type = type_of(p.dtype);
  check_blas(cublasGemmStridedBatchedEx_64(handle.get(), b.operation, a.operation, p.cols, p.rows, p.inner,
                                           wide ? static_cast<const void*>(&one64) : &one32, p.b, type, b.leading,
                                           p.b_stride[0], p.a, type, a.leading, p.a_stride[0],
                                           wide ? static_cast<const void*>(&beta64) : &beta32, p.c, type,
                                           std::max<int64_t>(p.c_stride[1], p.cols), p.c_stride[0], p.batch,
                                           compute_of(p.dtype, precision), CUBLAS_GEMM_DEFAULT),
             "cublasGemmStridedBatchedEx");
}

bool has_grouped_products() { return grouped_products() != nullptr; }

void blas_products(const std::vector<mg_matmul>& products, int32_t precision, int64_t* room,
                   const BorrowedHandle& handle, void* stream) {
  set_math(handle);
  const size_t count = products.size();
  std::vector<cublasOperation_t> b_operation(count), a_operation(count);
  std::vector<int> m(count), n(count), k(count), b_leading(count), a_leading(count), c_leading(count), ones(count, 1);
  std::vector<int64_t> pointers(3 * count);
  std::vector<double> one64(count, 1), zero64(count, 0);
  std::vector<float> one32(count, 1), zero32(count, 0);
  for (size_t i = 0; i < count; ++i) {
    const mg_matmul& p = products[i];
    const Operand a = operand(p.rows, p.inner, p.a_stride), b = operand(p.inner, p.cols, p.b_stride);
    b_operation[i] = b.operation;
    a_operation[i] = a.operation;
    m[i] = static_cast<int>(p.cols);
    n[i] = static_cast<int>(p.rows);
    k[i] = static_cast<int>(p.inner);
    b_leading[i] = static_cast<int>(b.leading);
    a_leading[i] = static_cast<int>(a.leading);
    c_leading[i] = static_cast<int>(std::max<int64_t>(p.c_stride[1], p.cols));
    pointers[i] = reinterpret_cast<int64_t>(p.b);
    pointers[count + i] = reinterpret_cast<int64_t>(p.a);
    pointers[2 * count + i] = reinterpret_cast<int64_t>(p.c);
  }
  check_gpu(simt::write_numbers(pointers.data(), static_cast<int64_t>(pointers.size()), room, stream),
            "writing the operands' addresses");
  const int32_t dtype = products[0].dtype;
  const bool wide = dtype == MG_FLOAT64;
  const auto* at = reinterpret_cast<const void* const*>(room);
  check_blas(grouped_products()(handle.get(), b_operation.data(), a_operation.data(), m.data(), n.data(), k.data(),
                                wide ? static_cast<const void*>(one64.data()) : one32.data(), at, type_of(dtype),
                                b_leading.data(), at + count, type_of(dtype), a_leading.data(),
                                wide ? static_cast<const void*>(zero64.data()) : zero32.data(),
                                const_cast<void* const*>(at + 2 * count), type_of(dtype), c_leading.data(),
                                static_cast<int>(count), ones.data(), compute_of(dtype, precision)),
             "cublasGemmGroupedBatchedEx");
}

int64_t blas_version() {
  int major = 0, minor = 0, patch = 0;
  (void)cublasGetProperty(MAJOR_VERSION, &major);
  (void)cublasGetProperty(MINOR_VERSION, &minor);
  (void)cublasGetProperty(PATCH_LEVEL, &patch);
  return major * 10000 + minor * 100 + patch;
}

}  // namespace multigemm
