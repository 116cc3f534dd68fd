#include "launch/products_cpu.h"

#include <algorithm>
#include <cstring>

#include "kernels/grouped_mm/cpu_levels.h"
#include "launch/checks.h"

namespace multigemm {
namespace {

constexpr int64_t kWorkspaceBytes = 32 << 20;  // for each of the three operands

// A matrix [rows, columns] somewhere in memory.
struct View {
  char* data;
  int64_t row, column;
  int32_t dtype;
  View at(int64_t r, int64_t c) const {
    return {data + (r * row + c * column) * dtype_bytes(dtype), row, column, dtype};
  }
};

View view(const void* data, int32_t dtype, int64_t offset, int64_t row, int64_t column) {
  return {static_cast<char*>(const_cast<void*>(data)) + offset * dtype_bytes(dtype), row, column, dtype};
}

bool readable(const View& v, int64_t rows, int64_t columns, int32_t dtype) {
  if (v.dtype != dtype) return false;
  return (v.column == 1 && (v.row >= columns || rows <= 1)) || (v.row == 1 && (v.column >= rows || columns <= 1));
}

bool writable(const View& v, int64_t rows, int64_t columns, int32_t dtype) {
  return v.dtype == dtype && v.column == 1 && (v.row >= columns || rows <= 1);
}

void convert(const View& from, const View& to, int64_t rows, int64_t columns, const Host& host,
             const View* bias = nullptr) {
  Conversion c{from.data, from.row, from.column, from.dtype, to.data, to.row,
               to.column, to.dtype, columns,     nullptr,    0,       0};
  if (bias) {
    c.bias = bias->data;
    c.bias_stride = bias->column;
    c.bias_dtype = bias->dtype;
  }
  const int64_t piece = std::max<int64_t>(1, 16384 / std::max<int64_t>(columns, 1));
  host.for_each((rows + piece - 1) / piece, 1,
                [&](int64_t i, int64_t) { cpu_level().convert(c, i * piece, std::min(rows, (i + 1) * piece)); });
}

void add(const View& to, const View& from, int64_t rows, int64_t columns, const Host& host) {
  host.for_each(rows, 16, [&](int64_t r, int64_t) {
    if (to.dtype == MG_FLOAT64) {
      auto* t = reinterpret_cast<double*>(to.at(r, 0).data);
      auto* f = reinterpret_cast<const double*>(from.at(r, 0).data);
      for (int64_t c = 0; c < columns; ++c) t[c] += f[c];
    } else {
      auto* t = reinterpret_cast<float*>(to.at(r, 0).data);
      auto* f = reinterpret_cast<const float*>(from.at(r, 0).data);
      for (int64_t c = 0; c < columns; ++c) t[c] += f[c];
    }
  });
}

mg_matmul matmul(int32_t dtype, int64_t rows, int64_t inner, int64_t columns, const View& a, const View& b,
                 const View& c) {
  return {1,      rows,
          inner,  columns,
          a.data, {0, a.row, a.column},
          b.data, {0, b.row, b.column},
          c.data, {0, c.row, c.column},
          dtype,  0};
}

int64_t fitting(int64_t wanted, int64_t bytes_each) {
  return std::max<int64_t>(1, std::min(wanted, kWorkspaceBytes / std::max<int64_t>(bytes_each, 1)));
}

int32_t accumulator(int32_t dtype) { return dtype == MG_FLOAT64 ? MG_FLOAT64 : MG_FLOAT32; }

}  // namespace

void rows_by_products(const mg_grouped_mm_problem& p, const Partition& groups, const Host& host,
                      const Product& product) {
  const int32_t sum = accumulator(p.dtype);
  const int64_t bytes = dtype_bytes(sum), tallest = groups.tallest;
  auto x_at = [&](const Block& g, int64_t b) {
    return view(p.x, p.dtype, g.begin * p.x_stride[0] + b * p.x_stride[1], p.x_stride[0], p.x_stride[2]);
  };
  auto w_at = [&](const Block& g, int64_t b) {
    return view(p.w, p.dtype, g.group * p.w_stride[0] + b * p.w_stride[1], p.w_stride[2], p.w_stride[3]);
  };
  auto out_at = [&](const Block& g, int64_t b) {
    return view(p.out, p.out_dtype, g.begin * p.out_stride[0] + b * p.out_stride[1], p.out_stride[0], p.out_stride[2]);
  };
  const Block any{0, 0, tallest};
  const bool x_direct = readable(x_at(any, 0), tallest, p.inner, sum);
  const bool w_direct = readable(w_at(any, 0), p.inner, p.outer, sum);
  const bool out_direct = writable(out_at(any, 0), tallest, p.outer, sum);

  const int64_t columns_at_once = w_direct && out_direct ? p.outer : fitting(p.outer, p.inner * bytes);
  const int64_t rows_at_once = std::min(x_direct ? tallest : fitting(tallest, p.inner * bytes),
                                        out_direct ? tallest : fitting(tallest, columns_at_once * bytes));
  const Workspace x_room(host, x_direct ? 0 : rows_at_once * p.inner * bytes);
  const Workspace w_room(host, w_direct ? 0 : p.inner * columns_at_once * bytes);
  const Workspace out_room(host, out_direct ? 0 : rows_at_once * columns_at_once * bytes);
  const View x_copy{x_room.at<char>(0), p.inner, 1, sum};

  for (const Block& g : groups.blocks) {
    const int64_t height = g.end - g.begin;
    auto bias_at = [&](int64_t b) {
      return view(p.bias, p.dtype, g.group * p.bias_stride[0] + b * p.bias_stride[1], 0, p.bias_stride[2]);
    };
    if (x_direct && w_direct && out_direct) {
      mg_matmul all = matmul(sum, height, p.inner, p.outer, x_at(g, 0), w_at(g, 0), out_at(g, 0));
      all.batch = p.batch;
      all.a_stride[0] = p.x_stride[1];
      all.b_stride[0] = p.w_stride[1];
      all.c_stride[0] = p.out_stride[1];
      product(all);
      if (p.bias)
        for (int64_t b = 0; b < p.batch; ++b) {
          const View bias = bias_at(b), out = out_at(g, b);
          convert(out, out, height, p.outer, host, &bias);
        }
      continue;
    }
    for (int64_t b = 0; b < p.batch; ++b)
      for (int64_t m0 = 0; m0 < p.outer; m0 += columns_at_once) {
        const int64_t columns = std::min(columns_at_once, p.outer - m0);
        View w = w_at(g, b).at(0, m0);
        if (!w_direct) {
          const View copy{w_room.at<char>(0), columns, 1, sum};
          convert(w, copy, p.inner, columns, host);
          w = copy;
        }
        for (int64_t n0 = 0; n0 < height; n0 += rows_at_once) {
          const int64_t rows = std::min(rows_at_once, height - n0);
          View x = x_at(g, b).at(n0, 0);
          if (!x_direct) {
            convert(x, x_copy, rows, p.inner, host);
            x = x_copy;
          }
          const View out = out_at(g, b).at(n0, m0);
          const View sums = out_direct ? out : View{out_room.at<char>(0), columns, 1, sum};
          product(matmul(sum, rows, p.inner, columns, x, w, sums));
          if (out_direct && !p.bias) continue;
          const View bias = p.bias ? bias_at(b).at(0, m0) : View{};
          convert(sums, out, rows, columns, host, p.bias ? &bias : nullptr);
        }
      }
  }
}

void wgrad_by_products(const mg_grouped_mm_wgrad_problem& p, const Partition& groups, const Host& host,
                       const Product& product) {
  const int32_t sum = accumulator(p.dtype);
  const int64_t bytes = dtype_bytes(sum), tallest = groups.tallest;
  auto x_at = [&](const Block& g, int64_t b) {  // transposed: [K, N]
    return view(p.x, p.dtype, g.begin * p.x_stride[0] + b * p.x_stride[1], p.x_stride[2], p.x_stride[0]);
  };
  auto gy_at = [&](const Block& g, int64_t b) {
    return view(p.gy, p.dtype, g.begin * p.gy_stride[0] + b * p.gy_stride[1], p.gy_stride[0], p.gy_stride[2]);
  };
  auto out_at = [&](const Block& g, int64_t b) {
    return view(p.out, p.out_dtype, g.group * p.out_stride[0] + b * p.out_stride[1], p.out_stride[2], p.out_stride[3]);
  };
  const Block any{0, 0, tallest};
  const bool x_direct = readable(x_at(any, 0), p.inner, tallest, sum);
  const bool gy_direct = readable(gy_at(any, 0), tallest, p.outer, sum);
  const bool out_direct = writable(out_at(any, 0), p.inner, p.outer, sum);
  const int64_t rows_at_once = std::min(x_direct ? tallest : fitting(tallest, p.inner * bytes),
                                        gy_direct ? tallest : fitting(tallest, p.outer * bytes));
  const bool pieces = rows_at_once < tallest || (p.sum_batch && p.batch > 1);
  const int64_t out_bytes = p.inner * p.outer * bytes;
  const Workspace x_room(host, x_direct ? 0 : rows_at_once * p.inner * bytes);
  const Workspace gy_room(host, gy_direct ? 0 : rows_at_once * p.outer * bytes);
  const Workspace out_room(host, out_direct ? 0 : out_bytes);
  const Workspace piece_room(host, pieces ? out_bytes : 0);
  const View piece{piece_room.at<char>(0), p.outer, 1, sum};

  for (const Block& g : groups.blocks) {
    const int64_t height = g.end - g.begin;
    if (x_direct && gy_direct && out_direct && !pieces) {
      mg_matmul all = matmul(sum, p.inner, height, p.outer, x_at(g, 0), gy_at(g, 0), out_at(g, 0));
      all.batch = p.batch;
      all.a_stride[0] = p.x_stride[1];
      all.b_stride[0] = p.gy_stride[1];
      all.c_stride[0] = p.out_stride[1];
      product(all);
      continue;
    }
    const int64_t summed = p.sum_batch ? p.batch : 1;
    for (int64_t out_b = 0; out_b < (p.sum_batch ? 1 : p.batch); ++out_b) {
      const View out = out_at(g, out_b);
      const View sums = out_direct ? out : View{out_room.at<char>(0), p.outer, 1, sum};
      bool first = true;
      for (int64_t b = out_b; b < out_b + summed; ++b)
        for (int64_t n0 = 0; n0 < height; n0 += rows_at_once, first = false) {
          const int64_t rows = std::min(rows_at_once, height - n0);
          View x = x_at(g, b).at(0, n0), gy = gy_at(g, b).at(n0, 0);
          if (!x_direct) {
            // [N, K] in memory, as the source most likely is; the product reads it transposed.
            const View copy{x_room.at<char>(0), 1, p.inner, sum};
            convert({x.data, x.column, x.row, x.dtype}, {copy.data, copy.column, copy.row, sum}, rows, p.inner, host);
            x = copy;
          }
          if (!gy_direct) {
            const View copy{gy_room.at<char>(0), p.outer, 1, sum};
            convert(gy, copy, rows, p.outer, host);
            gy = copy;
          }
          product(matmul(sum, p.inner, rows, p.outer, x, gy, first ? sums : piece));
          if (!first) add(sums, piece, p.inner, p.outer, host);
        }
      if (!out_direct) convert(sums, out, p.inner, p.outer, host);
    }
  }
}

void fill_zeros(void* out, int64_t bytes, const int64_t* sizes, const int64_t* strides, const Host& host) {
  const int64_t rows = sizes[0], batch = sizes[1], columns = sizes[2];
  if (rows <= 0 || batch <= 0 || columns <= 0) return;
  const bool solid = strides[2] == 1 && (strides[1] == columns || batch == 1);
  const int64_t lines = solid ? rows : rows * batch, line = (solid ? batch * columns : columns) * bytes;
  // A matrix of zeros can be one long line: all threads take pieces of it.
  const int64_t piece = std::min<int64_t>(line, 256 * 1024), pieces = (line + piece - 1) / piece;
  host.for_each(lines * pieces, std::max<int64_t>(1, 65536 / piece), [&](int64_t task, int64_t) {
    const int64_t i = task / pieces, first = task % pieces * piece;
    char* at =
        static_cast<char*>(out) + (solid ? i * strides[0] : i / batch * strides[0] + i % batch * strides[1]) * bytes;
    if (strides[2] == 1)
      std::memset(at + first, 0, static_cast<size_t>(std::min(piece, line - first)));
    else if (first == 0)
      for (int64_t c = 0; c < columns; ++c) std::memset(at + c * strides[2] * bytes, 0, static_cast<size_t>(bytes));
  });
}

}  // namespace multigemm
