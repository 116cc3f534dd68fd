#include "launch/products_gpu.h"

#include <algorithm>
#include <optional>
#include <vector>

#include "blas/blas_gpu.h"
#include "kernels/grouped_mm/simt.h"
#include "launch/call_gpu.h"
#include "launch/checks.h"
#include "launch/device_groups.h"
#include "runtime/status.h"

namespace multigemm {
namespace {

const char* moved(const void* data, int64_t elements, int32_t dtype) {
  return static_cast<const char*>(data) + elements * dtype_bytes(dtype);
}

constexpr int64_t kNumber = static_cast<int64_t>(sizeof(int64_t));

// Fewer products than this are faster one by one than through arrays of addresses.
constexpr size_t kFewProducts = 4;

// What the products of halves are summed in. A library rounds its sums to their dtype, so halves become float32 first
// where something else would round them once more; TF32 has room for all of their bits.
int32_t sums_of(int32_t dtype, bool rounded_again) { return is_half(dtype) && rounded_again ? MG_FLOAT32 : dtype; }

// The grouped product takes strides of 32 bits, the others of 64.
bool suits_grouped(const std::vector<mg_matmul>& products) {
  const mg_matmul& any = products[0];  // the strides of all
  int64_t widest = 0;
  for (int i = 1; i < 3; ++i) widest = std::max({widest, any.a_stride[i], any.b_stride[i], any.c_stride[i]});
  return any.batch == 1 && products.size() >= kFewProducts && widest <= 0x7fffffff && has_grouped_products();
}

template <class Problem>
void multiply(const std::vector<mg_matmul>& products, const Problem& p, const DeviceFacts& device, bool by_torch,
              bool accumulate) {
  if (products.empty()) return;
  if (by_torch) {
    for (const mg_matmul& product : products)
      if (p.host->matmul(p.host->context, &product) != 0)
        throw Failure(MG_DEVICE_ERROR, "the host's matrix product failed");
    return;
  }
  const BorrowedHandle handle(device, p.stream, p.host);
  const int32_t precision = products[0].dtype == p.dtype ? p.precision : MG_PRECISION_TF32;
  if (!accumulate && suits_grouped(products)) {
    const int64_t count = static_cast<int64_t>(products.size());
    const DeviceMemory room(p.host, p.stream, 3 * count * kNumber);
    blas_products(products, precision, room.as<int64_t>(), handle, p.stream);
    return;
  }
  for (const mg_matmul& product : products) blas_product(product, precision, accumulate, handle);
}

// Groups of equal heights whose rows and matrices follow each other are one strided-batched product.
void merge_equal(std::vector<mg_matmul>& products, int32_t dtype) {
  if (products.size() < 2 || products[0].batch != 1) return;
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
      return;
  }
  mg_matmul merged = first;
  merged.batch = static_cast<int64_t>(products.size());
  merged.a_stride[0] = a;
  merged.b_stride[0] = b;
  merged.c_stride[0] = c;
  products = {merged};
}

// A library sees matrices: each operand has a unit stride along its rows or its columns, and no element twice.
bool readable(int64_t rows, int64_t columns, int64_t row_stride, int64_t column_stride) {
  return ((column_stride == 1 || columns == 1) && (row_stride >= columns || rows == 1)) ||
         ((row_stride == 1 || rows == 1) && (column_stride >= rows || columns == 1));
}

// An operand, copied where a library can't read it as it is, and to the dtype of the sums.
class Readable {
 public:
  Readable(const Operand& from, int32_t sum, bool copied, const mg_host* host, void* stream)
      : data(from.data), stride{from.stride[0], from.stride[1], from.stride[2]} {
    if (!copied && sum == from.dtype) return;
    const int64_t row = from.batch * from.columns;
    memory_.emplace(host, stream, from.rows * row * dtype_bytes(sum));
    copy_operand(from, memory_->as<void>(), row, sum, stream);
    data = memory_->as<void>();
    stride[0] = row;
    stride[1] = from.columns;
    stride[2] = 1;
  }
  const void* data;
  int64_t stride[3];

 private:
  std::optional<DeviceMemory> memory_;
};

void set(int64_t (&to)[3], int64_t batch, int64_t row, int64_t column) {
  to[0] = batch;
  to[1] = row;
  to[2] = column;
}

// w [G, B, K, M] in rows: one copy for each entry of B, since it is asked for and seldom.
void pack_w(mg_grouped_mm_problem& p, int32_t sum, std::optional<DeviceMemory>& memory) {
  if (sum == p.dtype && readable(p.inner, p.outer, p.w_stride[2], p.w_stride[3])) return;
  const int64_t bytes = dtype_bytes(sum), batch = p.w_stride[1] == 0 ? 1 : p.batch, matrix = p.inner * p.outer;
  memory.emplace(p.host, p.stream, p.groups.count * batch * matrix * bytes);
  for (int64_t b = 0; b < batch; ++b)
    copy_operand({moved(p.w, b * p.w_stride[1], p.dtype),
                  {p.w_stride[0], p.w_stride[2], p.w_stride[3]},
                  p.groups.count,
                  p.inner,
                  p.outer,
                  p.dtype},
                 memory->as<char>() + b * matrix * bytes, batch * matrix, sum, p.stream);
  p.w = memory->as<void>();
  p.w_stride[0] = batch * matrix;
  p.w_stride[1] = p.w_stride[1] == 0 ? 0 : matrix;
  p.w_stride[2] = p.outer;
  p.w_stride[3] = 1;
}

void write_zero_rows(const mg_grouped_mm_problem& p, int64_t used) {
  if (used == p.rows) return;
  mg_grouped_mm_problem tail = p;  // the rows of no group: a product with no groups at all
  tail.rows = p.rows - used;
  tail.x = moved(p.x, used * p.x_stride[0], p.dtype);
  tail.out = const_cast<char*>(moved(p.out, used * p.out_stride[0], p.out_dtype));
  tail.groups.count = 0;
  tail.bias = nullptr;
  run_simt(tail);
}

}  // namespace

void rows_by_products(const mg_grouped_mm_problem& given, const Partition& groups, const DeviceFacts& device,
                      bool by_torch) {
  mg_grouped_mm_problem p = given;
  const int32_t sum = sums_of(p.dtype, p.out_dtype != p.dtype || (p.bias && by_torch));
  const bool x_copied = !readable(p.rows, p.inner, p.x_stride[0], p.x_stride[2]);
  const Readable x(operand_x(p), sum, x_copied, p.host, p.stream);
  std::optional<DeviceMemory> w;
  pack_w(p, sum, w);
  const bool direct =
      p.out_dtype == sum && (p.out_stride[2] == 1 || p.outer == 1) && (p.out_stride[0] >= p.outer || p.rows == 1);
  const int64_t line = p.batch * p.outer, count = p.groups.count;
  const DeviceMemory sums(p.host, p.stream, direct ? 0 : p.rows * line * dtype_bytes(sum));
  void* const out = direct ? p.out : sums.as<void>();
  const int64_t out_stride[3] = {direct ? p.out_stride[0] : line, direct ? p.out_stride[1] : p.outer, 1};

  // Halves take their bias before the products, which are added to it with one rounding.
  const bool bias_first = p.bias && is_half(sum), bias_last = p.bias && !bias_first;
  const bool needs_ends = !direct || p.bias;
  const DeviceMemory room(p.host, p.stream, needs_ends ? (count + simt::room_for(count)) * kNumber : 0);
  int64_t* const ends = room.as<int64_t>();
  if (needs_ends)
    check_gpu(simt::write_numbers(ends_of(groups, count).data(), count, ends, p.stream), "writing the group ends");
  if (bias_first) {
    mg_grouped_mm_problem bias = p;  // empty sums and the bias; zeros in the rows of no group
    bias.inner = 0;
    bias.out = out;
    bias.out_dtype = sum;
    std::copy(out_stride, out_stride + 3, bias.out_stride);
    bias.groups = {ends, count, 1, MG_INT64, MG_GROUPS_OFFSETS};
    check_gpu(simt::rows(bias, ends + count, p.stream), "the kernel that writes the bias");
    p.bias = nullptr;
  } else if (direct) {
    write_zero_rows(p, groups.used);
  }

  std::vector<mg_matmul> products;
  for (const Block& g : groups.blocks) {
    mg_matmul m{};
    m.batch = p.batch;
    m.rows = g.end - g.begin;
    m.inner = p.inner;
    m.cols = p.outer;
    m.a = moved(x.data, g.begin * x.stride[0], sum);
    m.b = moved(p.w, g.group * p.w_stride[0], sum);
    m.c = const_cast<char*>(moved(out, g.begin * out_stride[0], sum));
    set(m.a_stride, x.stride[1], x.stride[0], x.stride[2]);
    set(m.b_stride, p.w_stride[1], p.w_stride[2], p.w_stride[3]);
    set(m.c_stride, out_stride[1], out_stride[0], out_stride[2]);
    m.dtype = sum;
    products.push_back(m);
  }
  merge_equal(products, sum);
  multiply(products, p, device, by_torch, bias_first);
  if (direct && (!bias_last || groups.blocks.empty())) return;
  check_gpu(simt::finish_rows(p, ends, direct ? nullptr : out, sum, p.stream), "the kernel that ends a product");
}

void wgrad_by_products(const mg_grouped_mm_wgrad_problem& given, const Partition& groups, const DeviceFacts& device,
                       bool by_torch) {
  mg_grouped_mm_wgrad_problem p = given;
  const int32_t sum = sums_of(p.dtype, p.out_dtype != p.dtype);
  // Summed over B, the entries of B are more rows of the same product; the copies make them so.
  const bool folded = p.sum_batch && p.batch > 1;
  const bool x_copied = folded || !readable(p.rows, p.inner, p.x_stride[0], p.x_stride[2]);
  const bool gy_copied = folded || !readable(p.rows, p.outer, p.gy_stride[0], p.gy_stride[2]);
  const Readable x(operand_x(p), sum, x_copied, p.host, p.stream);
  const Readable gy(operand_gy(p), sum, gy_copied, p.host, p.stream);
  const int64_t matrix = p.inner * p.outer, batch = p.sum_batch ? 1 : p.batch, rows_each = folded ? p.batch : 1;
  const bool direct =
      p.out_dtype == sum && (p.out_stride[3] == 1 || p.outer == 1) && (p.out_stride[2] >= p.outer || p.inner == 1);
  const DeviceMemory sums(p.host, p.stream, direct ? 0 : p.groups.count * batch * matrix * dtype_bytes(sum));
  mg_grouped_mm_wgrad_problem to = p;  // where the sums are written
  if (!direct) {
    to.out = sums.as<void>();
    to.out_dtype = sum;
    const int64_t stride[4] = {batch * matrix, matrix, p.outer, 1};
    std::copy(stride, stride + 4, to.out_stride);
  }
  if (!groups.empty.empty()) {  // all of it, without any row: zeros
    mg_grouped_mm_wgrad_problem nothing = to;
    const NoRows none(p.groups.count, p.host, p.stream);
    nothing.rows = 0;
    nothing.groups = none.get();
    run_simt(nothing);
  }
  std::vector<mg_matmul> products;
  for (const Block& g : groups.blocks) {
    mg_matmul m{};
    m.batch = batch;
    m.rows = p.inner;
    m.inner = (g.end - g.begin) * rows_each;
    m.cols = p.outer;
    m.a = moved(x.data, g.begin * x.stride[0], sum);
    m.b = moved(gy.data, g.begin * gy.stride[0], sum);
    m.c = const_cast<char*>(moved(to.out, g.group * to.out_stride[0], sum));
    set(m.a_stride, x.stride[1], x.stride[2], folded ? x.stride[1] : x.stride[0]);
    set(m.b_stride, gy.stride[1], folded ? gy.stride[1] : gy.stride[0], gy.stride[2]);
    set(m.c_stride, to.out_stride[1], to.out_stride[2], 1);
    m.dtype = sum;
    products.push_back(m);
  }
  merge_equal(products, sum);
  multiply(products, to, device, by_torch, false);
  if (!direct) check_gpu(simt::finish_wgrad(p, to.out, sum, p.stream), "the kernel that ends a product");
}

}  // namespace multigemm
