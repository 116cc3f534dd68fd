#include <cblas.h>

#include "blas/blas.h"

namespace multigemm {
namespace {

// OpenBLAS runs a product of at most this many multiply-adds on the calling thread. Such products are spread over the
// host's threads; larger ones are handed over one by one and OpenBLAS spreads each. Its thread count belongs to the
// whole process and this library has no per-thread setting, so it is left alone.
constexpr int64_t kOneThread = int64_t{1} << 18;

struct Operand {
  CBLAS_TRANSPOSE transpose;
  int leading;
};

Operand operand(int64_t rows, int64_t columns, const int64_t* stride) {
  if (stride[2] == 1 && (stride[1] >= columns || rows <= 1))
    return {CblasNoTrans, static_cast<int>(rows <= 1 && stride[1] < columns ? columns : stride[1])};
  return {CblasTrans, static_cast<int>(columns <= 1 && stride[2] < rows ? rows : stride[2])};
}

}  // namespace

void blas_product(const mg_matmul& p, const Host& host) {
  const Operand a = operand(p.rows, p.inner, p.a_stride), b = operand(p.inner, p.cols, p.b_stride);
  const Operand c = operand(p.rows, p.cols, p.c_stride);
  const int m = static_cast<int>(p.rows), n = static_cast<int>(p.cols), k = static_cast<int>(p.inner);
  auto one = [&](int64_t i, int64_t) {
    if (p.dtype == MG_FLOAT64)
      scipy_cblas_dgemm(CblasRowMajor, a.transpose, b.transpose, m, n, k, 1.0,
                        static_cast<const double*>(p.a) + i * p.a_stride[0], a.leading,
                        static_cast<const double*>(p.b) + i * p.b_stride[0], b.leading, 0.0,
                        static_cast<double*>(p.c) + i * p.c_stride[0], c.leading);
    else
      scipy_cblas_sgemm(CblasRowMajor, a.transpose, b.transpose, m, n, k, 1.0f,
                        static_cast<const float*>(p.a) + i * p.a_stride[0], a.leading,
                        static_cast<const float*>(p.b) + i * p.b_stride[0], b.leading, 0.0f,
                        static_cast<float*>(p.c) + i * p.c_stride[0], c.leading);
  };
  if (p.rows * p.cols <= kOneThread / (p.inner < kOneThread ? p.inner : kOneThread))
    host.for_each(p.batch, 8, one);
  else
    for (int64_t i = 0; i < p.batch; ++i) one(i, 0);
}

const char* blas_name() {
  static const char* name = scipy_openblas_get_config();
  return name;
}

}  // namespace multigemm
