// In place of a vendor's BLAS: loops over what its interface can say of a matrix, a leading dimension and a transpose.
#include <algorithm>

#include "blas/blas_gpu.h"
#include "kernels/grouped_mm/numbers_simt.cuh"
#include "kernels/grouped_mm/simt.h"
#include "runtime/status.h"
#include "stand_in.h"

// Belongs to the device that was current when it was made, as a vendor's does.
struct cublasContext {
  int ordinal;
  void* stream;
  void* workspace;
};

namespace multigemm {
namespace {

constexpr int64_t kWorkspaceBytes = 4096;

struct Steps {
  int64_t row, column;
};

Steps operand(const char* name, int64_t rows, int64_t columns, const int64_t* stride) {
  if ((stride[2] == 1 || columns <= 1) && (stride[1] >= columns || rows <= 1))
    return {std::max<int64_t>({stride[1], columns, 1}), 1};
  if ((stride[1] == 1 || rows <= 1) && (stride[2] >= rows || columns <= 1))
    return {1, std::max<int64_t>({stride[2], rows, 1})};
  throw Failure(MG_INTERNAL, std::string("no BLAS can read ") + name);
}

struct Product {
  mg_matmul p;
  Steps a, b, c;
  bool accumulate;

  Product(const mg_matmul& p, bool accumulate)
      : p(p),
        a(operand("a", p.rows, p.inner, p.a_stride)),
        b(operand("b", p.inner, p.cols, p.b_stride)),
        c{std::max(p.c_stride[1], p.cols), 1},
        accumulate(accumulate) {
    if (p.batch < 1 || p.rows < 1 || p.inner < 1 || p.cols < 1) throw Failure(MG_INTERNAL, "an empty product");
    if ((p.c_stride[2] != 1 && p.cols > 1) || (p.c_stride[1] < p.cols && p.rows > 1))
      throw Failure(MG_INTERNAL, "no BLAS can write c");
  }

  template <class A>
  void run(const void* a_data, const void* b_data, void* c_data) const {
    for (int64_t i = 0; i < p.batch; ++i)
      for (int64_t n = 0; n < p.rows; ++n)
        for (int64_t m = 0; m < p.cols; ++m) {
          const int64_t at = i * p.c_stride[0] + n * c.row + m;
          A sum = accumulate ? simt::load<A>(c_data, p.dtype, at) : A(0);
          for (int64_t k = 0; k < p.inner; ++k)
            sum += simt::load<A>(a_data, p.dtype, i * p.a_stride[0] + n * a.row + k * a.column) *
                   simt::load<A>(b_data, p.dtype, i * p.b_stride[0] + k * b.row + m * b.column);
          simt::store<A>(c_data, p.dtype, at, sum);
        }
  }

  void run(const void* a_data, const void* b_data, void* c_data) const {
    if (p.dtype == MG_FLOAT64)
      run<double>(a_data, b_data, c_data);
    else
      run<float>(a_data, b_data, c_data);
  }
};

// The workspace is the caller's memory: it is written, as a library does.
void use(const BorrowedHandle& handle) {
  if (handle.get()->ordinal != stand_in::current_device())
    check_blas(stand_in::kInvalidDevice, "a product with another device's handle");
  void* const memory = handle.get()->workspace;
  stand_in::enqueue(handle.get()->stream, [memory] { memset(memory, 0xee, kWorkspaceBytes); });
}

}  // namespace

void check_blas(int status, const char* what) {
  if (status) throw Failure(MG_DEVICE_ERROR, std::string(what) + " failed: STAND_IN_" + std::to_string(status));
}

int create_handle(BlasContext** handle) {
  if (const int error = stand_in::answer("handle_made", nullptr)) return error;
  *handle = new cublasContext{stand_in::current_device(), nullptr, nullptr};
  return 0;
}

int destroy_handle(BlasContext* handle) {
  (void)stand_in::answer("handle_destroyed", nullptr, handle->ordinal);
  delete handle;
  return 0;
}

int set_stream(BlasContext* handle, void* stream) {
  handle->workspace = nullptr;
  handle->stream = stream;
  return stand_in::answer("handle_stream", stream, handle->ordinal);
}

int set_workspace(BlasContext* handle, void* memory, int64_t bytes) {
  handle->workspace = memory;
  return stand_in::answer("handle_workspace", handle->stream, bytes);
}

int64_t workspace_bytes(const DeviceFacts&) { return kWorkspaceBytes; }

void blas_product(const mg_matmul& p, int32_t precision, bool accumulate, const BorrowedHandle& handle) {
  check_blas(stand_in::answer("blas_product", handle.get()->stream, precision), "blas_product");
  use(handle);
  const Product product(p, accumulate);
  stand_in::enqueue(handle.get()->stream, [product] { product.run(product.p.a, product.p.b, product.p.c); });
}

bool has_grouped_products() { return stand_in::grouped_products(); }

void blas_products(const std::vector<mg_matmul>& products, int32_t precision, int64_t* room,
                   const BorrowedHandle& handle, void* stream) {
  check_blas(stand_in::answer("blas_products", handle.get()->stream, precision), "blas_products");
  use(handle);
  const size_t count = products.size();
  std::vector<int64_t> pointers;
  std::vector<Product> all;
  for (const mg_matmul& p : products) {
    if (p.batch != 1) throw Failure(MG_INTERNAL, "a grouped product has no batch");
    all.emplace_back(p, false);
    for (const void* data : {p.a, p.b, static_cast<const void*>(p.c)})
      pointers.push_back(reinterpret_cast<int64_t>(data));
  }
  check_gpu(simt::write_numbers(pointers.data(), static_cast<int64_t>(3 * count), room, stream), "writing addresses");
  stand_in::enqueue(handle.get()->stream, [all, room] {
    for (size_t i = 0; i < all.size(); ++i)
      all[i].run(reinterpret_cast<const void*>(room[3 * i]), reinterpret_cast<const void*>(room[3 * i + 1]),
                 reinterpret_cast<void*>(room[3 * i + 2]));
  });
}

int64_t blas_version() { return 130000; }
std::string blas_refusal() { return ""; }

}  // namespace multigemm
