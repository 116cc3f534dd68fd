#include <algorithm>
#include <climits>

#include "blas/blas_gpu.h"
#include "blas/library_hip.h"
#include "runtime/status.h"

namespace multigemm {
namespace {

// Numbers of hipBLAS's and HIP's enumerations.
constexpr int kPlain = 111, kTransposed = 112, kCompute32 = 2, kCompute64 = 7, kDefaultAlgorithm = 160;

int type_of(int32_t dtype) {
  switch (dtype) {
    case MG_FLOAT64: return 1;
    case MG_FLOAT32: return 0;
    case MG_FLOAT16: return 2;
    default: return 14;  // bfloat16
  }
}

int narrow(int64_t value) {
  if (value > INT_MAX)
    throw Failure(MG_UNSUPPORTED, "hipBLAS takes no stride of " + std::to_string(value) +
                                      " elements; leave the implementation out, or "
                                      "make the operand contiguous");
  return static_cast<int>(value);
}

// A row-major operand is its transpose to a column-major library: c^T = b^T a^T.
struct Operand {
  int operation, leading;
};

Operand operand(int64_t rows, int64_t columns, const int64_t* stride) {
  if ((stride[2] == 1 || columns <= 1) && (stride[1] >= columns || rows <= 1))
    return {kPlain, narrow(std::max<int64_t>({stride[1], columns, 1}))};
  return {kTransposed, narrow(std::max<int64_t>({stride[2], rows, 1}))};
}

}  // namespace

std::string blas_refusal() {
  return find_blas() ? "" : "no hipBLAS of ROCm 7 (libhipblas.so.3) is loaded in this process";
}

void check_blas(int status, const char* what) {
  if (status == 0) return;
  throw Failure(MG_DEVICE_ERROR, std::string(what) + " failed: " + blas().status_text(status));
}

// TF32 is allowed, not asked for: hipBLAS's products in float32 are IEEE's.
void blas_product(const mg_matmul& p, int32_t, bool accumulate, const BorrowedHandle& handle) {
  const Operand a = operand(p.rows, p.inner, p.a_stride), b = operand(p.inner, p.cols, p.b_stride);
  const double one64 = 1, beta64 = accumulate ? 1 : 0;
  const float one32 = 1, beta32 = accumulate ? 1 : 0;
  const bool wide = p.dtype == MG_FLOAT64;
  const int type = type_of(p.dtype);
  check_blas(blas().gemm(handle.get(), b.operation, a.operation, narrow(p.cols), narrow(p.rows), narrow(p.inner),
                         wide ? static_cast<const void*>(&one64) : &one32, p.b, type, b.leading, p.b_stride[0], p.a,
                         type, a.leading, p.a_stride[0], wide ? static_cast<const void*>(&beta64) : &beta32, p.c, type,
                         narrow(std::max<int64_t>(p.c_stride[1], p.cols)), p.c_stride[0], narrow(p.batch),
                         wide ? kCompute64 : kCompute32, kDefaultAlgorithm),
             "hipblasGemmStridedBatchedEx");
}

bool has_grouped_products() { return false; }

void blas_products(const std::vector<mg_matmul>&, int32_t, int64_t*, const BorrowedHandle&, void*) {
  throw Failure(MG_INTERNAL, "hipBLAS has no grouped product");
}

int64_t blas_version() { return 0; }

}  // namespace multigemm
