#include "launch/products_gpu.h"

#include <algorithm>
#include <vector>

#include "blas/blas_gpu.h"
#include "kernels/grouped_mm/simt.h"
#include "launch/checks.h"
#include "launch/device_groups.h"
#include "runtime/status.h"

namespace multigemm {
namespace {

const char* moved(const void* data, int64_t elements, int32_t dtype) {
  return static_cast<const char*>(data) + elements * dtype_bytes(dtype);
}

// Fewer products than this are faster one by one than through arrays of addresses.
constexpr size_t kFewProducts = 4;

template <class Problem>
void multiply(const std::vector<mg_matmul>& products, const Problem& p, const DeviceFacts& device, bool by_torch) {
  if (products.empty()) return;
  if (by_torch) {
    for (const mg_matmul& product : products)
      if (p.host->matmul(p.host->context, &product) != 0)
        throw Failure(MG_DEVICE_ERROR, "the host's matrix product failed");
    return;
  }
  const BorrowedHandle handle(device, p.stream, p.host);
  if (p.batch == 1 && products.size() >= kFewProducts && has_grouped_products()) {
    const int64_t count = static_cast<int64_t>(products.size());
    const DeviceMemory room(p.host, p.stream, 3 * count * static_cast<int64_t>(sizeof(int64_t)));
    blas_products(products, p.precision, room.as<int64_t>(), handle, p.stream);
    return;
  }
  for (const mg_matmul& product : products) blas_product(product, p.precision, false, handle);
}

// Groups of equal heights whose rows and matrices follow each other are one strided-batched product.
bool merge_equal(std::vector<mg_matmul>& products, int32_t dtype) {
  if (products.size() < 2 || products[0].batch != 1) return false;
  const mg_matmul &first = products[0], &second = products[1];
  const int64_t bytes = dtype_bytes(dtype);
  auto step = [&](const void* from, const void* to) {
    return (static_cast<const char*>(to) - static_cast<const char*>(from)) / bytes;
  };
  const int64_t a = step(first.a, second.a), b = step(first.b, second.b), c = step(first.c, second.c);
  for (size_t i = 1; i < products.size(); ++i) {
    const mg_matmul &before = products[i - 1], &here = products[i];
    if (here.rows != first.rows || here.inner != first.inner || step(before.a, here.a) != a ||
        step(before.b, here.b) != b || step(before.c, here.c) != c)
      return false;
  }
  mg_matmul merged = first;
  merged.batch = static_cast<int64_t>(products.size());
  merged.a_stride[0] = a;
  merged.b_stride[0] = b;
  merged.c_stride[0] = c;
  products = {merged};
  return true;
}

}  // namespace

void rows_by_products(const mg_grouped_mm_problem& p, const Partition& groups, const DeviceFacts& device,
                      bool by_torch) {
  if (groups.used < p.rows) {  // the rows of no group: a product with no groups at all
    mg_grouped_mm_problem tail = p;
    tail.rows = p.rows - groups.used;
    tail.x = moved(p.x, groups.used * p.x_stride[0], p.dtype);
    tail.out = const_cast<char*>(moved(p.out, groups.used * p.out_stride[0], p.out_dtype));
    tail.groups.count = 0;
    tail.bias = nullptr;
    const DeviceMemory room(p.host, p.stream, simt::room_for(0) * static_cast<int64_t>(sizeof(int64_t)));
    check_gpu(simt::rows(tail, room.as<int64_t>(), p.stream), "the kernel that writes zeros");
  }
  std::vector<mg_matmul> products;
  for (const Block& g : groups.blocks) {
    mg_matmul m{};
    m.batch = p.batch;
    m.rows = g.end - g.begin;
    m.inner = p.inner;
    m.cols = p.outer;
    m.a = moved(p.x, g.begin * p.x_stride[0], p.dtype);
    m.b = moved(p.w, g.group * p.w_stride[0], p.dtype);
    m.c = const_cast<char*>(moved(p.out, g.begin * p.out_stride[0], p.out_dtype));
    const int64_t a[3] = {p.x_stride[1], p.x_stride[0], p.x_stride[2]};
    const int64_t b[3] = {p.w_stride[1], p.w_stride[2], p.w_stride[3]};
    const int64_t c[3] = {p.out_stride[1], p.out_stride[0], p.out_stride[2]};
    for (int i = 0; i < 3; ++i) {
      m.a_stride[i] = a[i];
      m.b_stride[i] = b[i];
      m.c_stride[i] = c[i];
    }
    m.dtype = p.dtype;
    products.push_back(m);
  }
  merge_equal(products, p.dtype);
  multiply(products, p, device, by_torch);
  if (!p.bias || groups.blocks.empty()) return;
  std::vector<int64_t> ends(static_cast<size_t>(p.groups.count), 0);
  for (const Block& g : groups.blocks) ends[static_cast<size_t>(g.group)] = g.end;
  for (size_t g = 1; g < ends.size(); ++g) ends[g] = std::max(ends[g], ends[g - 1]);
  const DeviceMemory room(p.host, p.stream, p.groups.count * static_cast<int64_t>(sizeof(int64_t)));
  check_gpu(simt::write_numbers(ends.data(), p.groups.count, room.as<int64_t>(), p.stream), "writing the group ends");
  check_gpu(simt::add_bias(p, room.as<int64_t>(), p.stream), "the kernel that adds the bias");
}

void wgrad_by_products(const mg_grouped_mm_wgrad_problem& p, const Partition& groups, const DeviceFacts& device,
                       bool by_torch) {
  if (!groups.empty.empty()) {  // all of out, without any row: zeros
    mg_grouped_mm_wgrad_problem nothing = p;
    const NoRows none(p.groups.count, p.host, p.stream);
    nothing.rows = 0;
    nothing.groups = none.get();
    const DeviceMemory room(p.host, p.stream, simt::room_for(p.groups.count) * static_cast<int64_t>(sizeof(int64_t)));
    check_gpu(simt::wgrad(nothing, room.as<int64_t>(), p.stream), "the kernel that writes zeros");
  }
  std::vector<mg_matmul> products;
  for (const Block& g : groups.blocks) {
    mg_matmul m{};
    m.batch = p.batch;
    m.rows = p.inner;
    m.inner = g.end - g.begin;
    m.cols = p.outer;
    m.a = moved(p.x, g.begin * p.x_stride[0], p.dtype);
    m.b = moved(p.gy, g.begin * p.gy_stride[0], p.dtype);
    m.c = const_cast<char*>(moved(p.out, g.group * p.out_stride[0], p.out_dtype));
    const int64_t a[3] = {p.x_stride[1], p.x_stride[2], p.x_stride[0]};
    const int64_t b[3] = {p.gy_stride[1], p.gy_stride[0], p.gy_stride[2]};
    const int64_t c[3] = {p.out_stride[1], p.out_stride[2], p.out_stride[3]};
    for (int i = 0; i < 3; ++i) {
      m.a_stride[i] = a[i];
      m.b_stride[i] = b[i];
      m.c_stride[i] = c[i];
    }
    m.dtype = p.dtype;
    products.push_back(m);
  }
  merge_equal(products, p.dtype);
  multiply(products, p, device, by_torch);
}

}  // namespace multigemm
