#include "launch/checks.h"

#include "runtime/status.h"

namespace multigemm {
namespace {

[[noreturn]] void refuse(const std::string& text) { throw Failure(MG_INVALID_ARGUMENT, text); }

void check_size(const char* name, int64_t value) {
  if (value < 0) refuse(std::string(name) + " is " + std::to_string(value) + "; sizes are 0 or more");
}

void check_float(const char* name, int32_t dtype) {
  if (dtype < MG_FLOAT64 || dtype > MG_BFLOAT16)
    refuse(std::string(name) + " is " + std::to_string(dtype) +
           "; allowed are MG_FLOAT64 (1), MG_FLOAT32 (2), MG_FLOAT16 (3), MG_BFLOAT16 (4)");
}

void check_pointer(const char* name, const void* pointer, bool has_elements) {
  if (has_elements && !pointer) refuse(std::string(name) + " is null, but it has elements");
}

template <class Problem>
void check_common(const Problem* p) {
  if (!p) refuse("problem is null");
  if (p->struct_size != static_cast<int64_t>(sizeof(Problem)))
    refuse("struct_size is " + std::to_string(p->struct_size) + ", but this library's ABI " + std::to_string(MG_ABI) +
           " has " + std::to_string(sizeof(Problem)) + "; build the caller against the same abi.h");
  check_size("rows", p->rows);
  check_size("batch", p->batch);
  check_size("inner", p->inner);
  check_size("outer", p->outer);
  check_size("groups.count", p->groups.count);
  check_float("dtype", p->dtype);
  check_float("out_dtype", p->out_dtype);
  if (p->groups.dtype != MG_INT32 && p->groups.dtype != MG_INT64)
    refuse("groups.dtype is " + std::to_string(p->groups.dtype) + "; allowed are MG_INT32 (5) and MG_INT64 (6)");
  check_pointer("groups.data", p->groups.data, p->groups.count > 0);
  if (p->implementation < MG_AUTO || p->implementation > MG_SIMT)
    refuse("implementation is " + std::to_string(p->implementation) + "; allowed are 0 to " + std::to_string(MG_SIMT));
  if (p->precision < MG_PRECISION_FRAMEWORK || p->precision > MG_PRECISION_TF32)
    refuse("precision is " + std::to_string(p->precision) + "; allowed are 0, 1 and 2");
  check_pointer("x", p->x, p->rows && p->batch && p->inner);
  if (p->host && p->host->allocate && !p->host->release) refuse("host.release is null, but host.allocate is not");
}

std::string shape(std::initializer_list<int64_t> sizes) {
  std::string text = "[";
  for (int64_t size : sizes) text += (text.size() > 1 ? ", " : "") + std::to_string(size);
  return text + "]";
}

}  // namespace

const char* dtype_name(int32_t dtype) {
  switch (dtype) {
    case MG_FLOAT64: return "float64";
    case MG_FLOAT32: return "float32";
    case MG_FLOAT16: return "float16";
    case MG_BFLOAT16: return "bfloat16";
    case MG_INT32: return "int32";
    case MG_INT64: return "int64";
    default: return "unknown";
  }
}

const char* implementation_name(int32_t implementation) {
  switch (implementation) {
    case MG_NATIVE: return "native";
    case MG_BLAS: return "blas";
    case MG_TORCH: return "torch";
    case MG_SIMT: return "simt";
    default: return "";
  }
}

void check(const mg_grouped_mm_problem* p) {
  check_common(p);
  check_pointer("w", p->w, p->groups.count && p->batch && p->inner && p->outer);
  check_pointer("out", p->out, p->rows && p->batch && p->outer);
}

void check(const mg_grouped_mm_wgrad_problem* p) {
  check_common(p);
  check_pointer("gy", p->gy, p->rows && p->batch && p->outer);
  const bool has_batch = p->batch > 0 || p->sum_batch;
  check_pointer("out", p->out, p->groups.count && has_batch && p->inner && p->outer);
}

std::string describe(const mg_grouped_mm_problem& p) {
  return "x " + shape({p.rows, p.batch, p.inner}) + " " + dtype_name(p.dtype) + ", w " +
         shape({p.groups.count, p.batch, p.inner, p.outer}) + (p.bias ? ", with bias" : "") + ", out " +
         shape({p.rows, p.batch, p.outer}) + " " + dtype_name(p.out_dtype);
}

std::string describe(const mg_grouped_mm_wgrad_problem& p) {
  return "x " + shape({p.rows, p.batch, p.inner}) + " " + dtype_name(p.dtype) + ", gy " +
         shape({p.rows, p.batch, p.outer}) + ", out " +
         shape({p.groups.count, p.sum_batch ? 1 : p.batch, p.inner, p.outer}) + " " + dtype_name(p.out_dtype);
}

}  // namespace multigemm
