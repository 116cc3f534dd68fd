#include "runtime/device.h"

#include <map>
#include <mutex>

#include "runtime/status.h"
#include "runtime/without.h"
#include "vendor/gpu_context.h"

namespace multigemm {
namespace {

DeviceFacts read_facts(int ordinal) {
  int count = 0;
  check_gpu(gpu::device_count(&count), "counting the devices");
  if (ordinal < 0 || ordinal >= count)
    throw Failure(MG_INVALID_ARGUMENT,
                  "device is " + std::to_string(ordinal) + ", but there are " + std::to_string(count) + " devices");
  auto read = [&](gpu::Attribute which) {
    int value = 0;
    check_gpu(gpu::attribute(&value, which, ordinal), "reading a device's attributes");
    return value;
  };
  DeviceFacts facts;
  facts.ordinal = ordinal;
  facts.major = read(gpu::Attribute::major);
  facts.minor = read(gpu::Attribute::minor);
  facts.multiprocessors = read(gpu::Attribute::multiprocessors);
  facts.shared_bytes = read(gpu::Attribute::shared_bytes);
  facts.l2_bytes = read(gpu::Attribute::l2_bytes);
  return facts;
}

}  // namespace

void check_gpu(int error, const char* what) {
  if (!error) return;
  gpu::clear_error();
  if (error == gpu::kNoKernelImage)
    throw Failure(MG_NO_DEVICE_CODE, std::string(what) + " failed: this library was not built for this device; its " +
                                         "architectures are in backend.json, `multigemm doctor` shows both");
  if (error == gpu::kOldDriver || error == gpu::kOldCompilerOfDriver)
    throw Failure(MG_DRIVER_TOO_OLD, std::string(what) + " failed: " + gpu::error_name(error) + " (" +
                                         gpu::error_text(error) + "); update the device's driver");
  throw Failure(MG_DEVICE_ERROR,
                std::string(what) + " failed: " + gpu::error_name(error) + " (" + gpu::error_text(error) + ")");
}

const DeviceFacts& device_facts(int ordinal) {
  static std::mutex lock;
  static std::map<int, DeviceFacts> known;  // references into a map stay valid
  const std::lock_guard<std::mutex> held(lock);
  auto found = known.find(ordinal);
  if (found == known.end()) found = known.emplace(ordinal, read_facts(ordinal)).first;
  return found->second;
}

DeviceGuard::DeviceGuard(int ordinal) : ordinal_(ordinal) {
  if (!kHasGuard) return;
  check_gpu(gpu::get_device(&before_), "reading the current device");
  if (before_ != ordinal && !gpu::has_context(before_)) {
    void* context = nullptr;
    check_gpu(gpu::enter_context(ordinal, &context), "entering the operands' device");
    entered_ = true;
    return;
  }
  // Also for the device that is current already: a thread that has only asked so far has no context yet, and the
  // driver's own functions, unlike the runtime's, do not make one.
  check_gpu(gpu::set_device(ordinal), "making the operands' device current");
  changed_ = before_ != ordinal;
}

DeviceGuard::~DeviceGuard() {
  if (entered_) gpu::leave_context(ordinal_);
  if (changed_) (void)gpu::set_device(before_);
}

void* stream_of_call(void* given) { return kHasStream ? given : nullptr; }

DeviceMemory::DeviceMemory(const mg_host* host, void* stream, int64_t bytes) : host_(host), stream_(stream) {
  if (bytes <= 0) return;
  if (host_ && host_->allocate)
    memory_ = host_->allocate(host_->context, bytes);
  else if (gpu::allocate(&memory_, bytes, static_cast<gpu::Stream>(stream_)) != 0) {
    gpu::clear_error();
    memory_ = nullptr;
  }
  if (!memory_) throw Failure(MG_OUT_OF_MEMORY, "no workspace of " + std::to_string(bytes) + " bytes on the device");
}

DeviceMemory::~DeviceMemory() {
  if (!memory_) return;
  if (host_ && host_->allocate)
    host_->release(host_->context, memory_);
  else
    (void)gpu::release(memory_, static_cast<gpu::Stream>(stream_));
}

bool is_capturing(void* stream) {
  bool capturing = false;
  check_gpu(gpu::is_capturing(&capturing, static_cast<gpu::Stream>(stream)), "asking whether a graph is captured");
  return capturing;
}

}  // namespace multigemm
