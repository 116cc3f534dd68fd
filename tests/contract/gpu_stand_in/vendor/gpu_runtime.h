// In place of shared/vendor/gpu_runtime.h: the same functions over the pretend devices of stand_in.cpp.
#pragma once

#include "stand_in.h"

namespace multigemm {
namespace gpu {

typedef void* Stream;

inline const char* error_name(int error) { return stand_in::error_name(error); }
inline const char* error_text(int) { return "asked for by the test"; }
constexpr int kNoKernelImage = stand_in::kNoKernelImage;
constexpr int kOldDriver = 35;
constexpr int kOldCompilerOfDriver = 222;
inline void clear_error() { (void)stand_in::answer("clear_error", nullptr); }

int get_device(int* device);
int set_device(int device);
int device_count(int* count);

enum class Attribute { major, minor, multiprocessors, shared_bytes, l2_bytes };

int attribute(int* value, Attribute which, int device);
int allocate(void** memory, int64_t bytes, Stream stream);
int release(void* memory, Stream stream);
int copy_to_host(void* to, const void* from, int64_t bytes, Stream stream);
int is_capturing(bool* capturing, Stream stream);

class RelaxedCapture {
 public:
  RelaxedCapture() { (void)stand_in::answer("relax_capture", nullptr); }
  ~RelaxedCapture() { (void)stand_in::answer("end_relaxed_capture", nullptr); }
};

}  // namespace gpu
}  // namespace multigemm
