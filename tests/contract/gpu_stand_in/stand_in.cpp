#include "stand_in.h"

#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <set>
#include <vector>

#include "vendor/gpu_context.h"

#define MG_CONTROL extern "C" __attribute__((visibility("default")))

namespace multigemm {
namespace stand_in {
namespace {

constexpr size_t kMargin = 256;
constexpr unsigned char kMark = 0xa5, kPoison = 0xff;  // a NaN in every dtype

struct Failing {
  int after, error;
};

struct State {
  std::mutex lock;
  std::string log;
  std::map<std::string, Failing> failing;
  std::map<std::string, int> taking;
  std::map<void*, std::deque<std::function<void()>>> streams;
  std::set<void*> capturing;
  std::set<int> contexts;
  std::map<void*, size_t> lent;
  int64_t overruns = 0, complaints = 0;
  bool grouped = true;
};

State& state() {
  static State* const one = new State;
  return *one;
}

thread_local int device = 0;
thread_local std::vector<int> entered;  // contexts that are current before the device's own

void make_context(int device) {
  const std::lock_guard<std::mutex> held(state().lock);
  state().contexts.insert(device);
}

void free_later(void* memory, size_t bytes) {
  auto* start = static_cast<unsigned char*>(memory) - kMargin;
  for (size_t i = 0; i < kMargin; ++i)
    if (start[i] != kMark || start[kMargin + bytes + i] != kMark) {
      const std::lock_guard<std::mutex> held(state().lock);
      ++state().overruns;
      break;
    }
  std::free(start);
}

}  // namespace

int answer(const std::string& call, void* stream, int64_t detail) {
  const std::lock_guard<std::mutex> held(state().lock);
  state().log += call + " " + std::to_string(current_device()) + " " + std::to_string(reinterpret_cast<uintptr_t>(stream)) + " " +
                 std::to_string(detail) + "\n";
  const auto found = state().failing.find(call);
  if (found == state().failing.end() || found->second.after-- != 0) return 0;
  const int error = found->second.error;
  state().failing.erase(found);
  return error;
}

const char* error_name(int error) {
  static thread_local std::string text;
  text = "standInError" + std::to_string(error);
  return text.c_str();
}

int current_device() { return entered.empty() ? device : entered.back(); }

bool has_context(int device) {
  const std::lock_guard<std::mutex> held(state().lock);
  return state().contexts.count(device) != 0;
}

void enqueue(void* stream, std::function<void()> work) {
  const std::lock_guard<std::mutex> held(state().lock);
  state().streams[stream].push_back(std::move(work));
}

void synchronize(void* stream) {
  for (;;) {
    std::function<void()> work;
    {
      const std::lock_guard<std::mutex> held(state().lock);
      auto& queue = state().streams[stream];
      if (queue.empty()) return;
      work = std::move(queue.front());
      queue.pop_front();
    }
    work();
  }
}

int taking(const std::string& kernel) {
  const std::lock_guard<std::mutex> held(state().lock);
  return state().taking[kernel];
}

bool grouped_products() { return state().grouped; }

void complain() {
  const std::lock_guard<std::mutex> held(state().lock);
  ++state().complaints;
}

}  // namespace stand_in

namespace gpu {

using namespace stand_in;

int get_device(int* device) {
  *device = current_device();
  return answer("get_device", nullptr);
}

int set_device(int device) {
  if (const int error = answer("set_device", nullptr, device)) return error;
  if (device < 0 || device >= kDevices) return kInvalidDevice;
  make_context(device);
  stand_in::device = device;
  return 0;
}

bool has_context(int device) { return stand_in::has_context(device); }

int enter_context(int device, void** context) {
  *context = nullptr;
  if (const int error = answer("enter_context", nullptr, device)) return error;
  if (device < 0 || device >= kDevices) return kInvalidDevice;
  make_context(device);
  entered.push_back(device);
  return 0;
}

void leave_context(int device) {
  if (entered.empty() || entered.back() != device) return complain();
  entered.pop_back();
  (void)answer("leave_context", nullptr, device);
}

int device_count(int* count) {
  *count = kDevices;
  return answer("device_count", nullptr);
}

int attribute(int* value, Attribute which, int device) {
  if (device < 0 || device >= kDevices) return kInvalidDevice;
  const int values[] = {9, 0, 132, 232448, 50 << 20};
  *value = values[static_cast<int>(which)];
  return answer("attribute", nullptr, device);
}

int allocate(void** memory, int64_t bytes, Stream stream) {
  if (const int error = answer("allocate", stream, bytes)) return error;
  const size_t size = static_cast<size_t>(bytes);
  auto* start = static_cast<unsigned char*>(std::aligned_alloc(kMargin, (size + 3 * kMargin) / kMargin * kMargin));
  std::memset(start, kMark, size + 2 * kMargin);
  std::memset(start + kMargin, kPoison, size);
  *memory = start + kMargin;
  const std::lock_guard<std::mutex> held(state().lock);
  state().lent[*memory] = size;
  return 0;
}

int release(void* memory, Stream stream) {
  if (const int error = answer("release", stream)) return error;
  size_t bytes;
  {
    const std::lock_guard<std::mutex> held(state().lock);
    const auto found = state().lent.find(memory);
    if (found == state().lent.end()) return kInvalidValue;
    bytes = found->second;
    state().lent.erase(found);
  }
  enqueue(stream, [memory, bytes] { free_later(memory, bytes); });
  return 0;
}

int copy_to_host(void* to, const void* from, int64_t bytes, Stream stream) {
  if (const int error = answer("copy_to_host", stream, bytes)) return error;
  bool captured = false;
  {
    const std::lock_guard<std::mutex> held(state().lock);
    captured = state().capturing.count(stream) != 0;
  }
  if (captured) return kCaptured;
  synchronize(stream);
  std::memcpy(to, from, static_cast<size_t>(bytes));
  return 0;
}

int is_capturing(bool* capturing, Stream stream) {
  {
    const std::lock_guard<std::mutex> held(state().lock);
    *capturing = state().capturing.count(stream) != 0;
  }
  return answer("is_capturing", stream);
}

}  // namespace gpu
}  // namespace multigemm

using multigemm::stand_in::state;

// Forgets what a test asked for and what was recorded.
MG_CONTROL void stand_in_reset(void) {
  auto& s = state();
  s.log.clear();
  s.failing.clear();
  s.taking.clear();
  s.capturing.clear();
  s.streams.clear();
  s.grouped = true;
  s.overruns = s.complaints = 0;
  s.contexts = {0};  // a process that has used the device that is current
  multigemm::stand_in::device = 0;
}

MG_CONTROL const char* stand_in_log(void) { return state().log.c_str(); }
MG_CONTROL void stand_in_clear_log(void) { state().log.clear(); }
// The call of that name after the next `after` ones answers `error`.
MG_CONTROL void stand_in_fail(const char* call, int after, int error) { state().failing[call] = {after, error}; }
MG_CONTROL void stand_in_take(const char* kernel, int what) { state().taking[kernel] = what; }
MG_CONTROL void stand_in_grouped_products(int there) { state().grouped = there != 0; }
MG_CONTROL void stand_in_capture(void* stream) { state().capturing.insert(stream); }
MG_CONTROL void stand_in_set_device(int device) { (void)multigemm::gpu::set_device(device); }
MG_CONTROL int stand_in_device(void) { return multigemm::stand_in::current_device(); }
// A process that has used no device yet.
MG_CONTROL void stand_in_forget_contexts(void) { state().contexts.clear(); }
MG_CONTROL int stand_in_has_context(int device) { return multigemm::stand_in::has_context(device); }
MG_CONTROL void stand_in_synchronize(void* stream) { multigemm::stand_in::synchronize(stream); }
// Forgets the work of a stream: what a failed call has left there reads memory that the test frees.
MG_CONTROL void stand_in_drop(void* stream) { state().streams.erase(stream); }
MG_CONTROL int64_t stand_in_lent(void) { return static_cast<int64_t>(state().lent.size()); }
MG_CONTROL int64_t stand_in_overruns(void) { return state().overruns; }
MG_CONTROL int64_t stand_in_complaints(void) { return state().complaints; }
MG_CONTROL void stand_in_copy(void* to, const void* from, int64_t bytes, void* stream) {
  multigemm::stand_in::enqueue(stream, [=] { std::memcpy(to, from, static_cast<size_t>(bytes)); });
}
