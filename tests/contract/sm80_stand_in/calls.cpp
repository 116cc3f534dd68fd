// The kernels for Ampere and later by name, for a device that the test describes.
#include <cstring>
#include <vector>

#include "kernels/grouped_mm/row_pieces.cuh"
#include "kernels/grouped_mm/rows_sm80.h"
#include "kernels/grouped_mm/simt.h"
#include "kernels/grouped_mm/wgrad_sm80.h"
#include "stand_in.h"

#define MG_CALL extern "C" MG_EXPORT

namespace {

using multigemm::DeviceFacts;

// The memory that a launch is lent, NaN at first, with marks on both sides.
class Room {
 public:
  explicit Room(int64_t bytes) : bytes_(static_cast<size_t>(bytes)), memory_(bytes_ + 2 * kMargin, kMark) {
    std::memset(data(), 0xff, bytes_);
  }
  unsigned char* data() { return memory_.data() + kMargin; }
  bool kept() const {
    for (size_t i = 0; i < kMargin; ++i)
      if (memory_[i] != kMark || memory_[kMargin + bytes_ + i] != kMark) return false;
    return true;
  }

 private:
  static constexpr size_t kMargin = 256;
  static constexpr unsigned char kMark = 0xa5;
  size_t bytes_;
  std::vector<unsigned char> memory_;
};

std::string refusal(const mg_grouped_mm_problem& p, const DeviceFacts& device) {
  return multigemm::rows_sm80_refusal(p, device);
}
std::string refusal(const mg_grouped_mm_wgrad_problem& p, const DeviceFacts& device) {
  return multigemm::wgrad_sm80_refusal(p, device);
}
int64_t room_of(const mg_grouped_mm_problem&, const DeviceFacts&) { return 0; }
int64_t room_of(const mg_grouped_mm_wgrad_problem& p, const DeviceFacts& device) {
  return multigemm::wgrad_sm80_room(p, device);
}
int launch(const mg_grouped_mm_problem& p, const DeviceFacts& device, void*, void* stream) {
  return multigemm::launch_rows_sm80(p, device, stream);
}
int launch(const mg_grouped_mm_wgrad_problem& p, const DeviceFacts& device, void* room, void* stream) {
  return multigemm::launch_wgrad_sm80(p, device, room, stream);
}

DeviceFacts facts(int multiprocessors) {
  DeviceFacts facts;
  facts.major = 8;
  facts.multiprocessors = multiprocessors;
  facts.shared_bytes = 163 * 1024;
  return facts;
}

// Runs it to its end; the reason in `text` if it is refused. -2: something was written beside the workspace.
template <class Problem>
int run(const Problem* problem, int multiprocessors, int64_t* room_bytes, char* text, int capacity) {
  const DeviceFacts device = facts(multiprocessors);
  const std::string reason = refusal(*problem, device);
  std::strncpy(text, reason.c_str(), static_cast<size_t>(capacity) - 1);
  if (!reason.empty()) return -1;
  Problem p = *problem;
  void* const stream = &p;
  std::vector<int32_t> counted;
  if (p.groups.count > multigemm::kMostBlockGroups) {
    counted.resize(static_cast<size_t>(3 * p.groups.count));
    const int error = multigemm::simt::count_groups(p.groups, p.rows, 1, counted.data(), stream);
    if (error) return error;
    p.groups = {counted.data(), p.groups.count, 1, MG_INT32, MG_GROUPS_OFFSETS};
  }
  *room_bytes = room_of(p, device);
  Room room(*room_bytes);
  const int error = launch(p, device, *room_bytes > 0 ? room.data() : nullptr, stream);
  multigemm::stand_in::synchronize(stream);
  return error ? error : room.kept() ? 0 : -2;
}

}  // namespace

MG_CALL int sm80_rows(const mg_grouped_mm_problem* p, int multiprocessors, int64_t* room, char* text, int capacity) {
  return run(p, multiprocessors, room, text, capacity);
}
MG_CALL int sm80_wgrad(const mg_grouped_mm_wgrad_problem* p, int multiprocessors, int64_t* room, char* text,
                       int capacity) {
  return run(p, multiprocessors, room, text, capacity);
}
MG_CALL int64_t sm80_wgrad_room(const mg_grouped_mm_wgrad_problem* p, int multiprocessors) {
  return multigemm::wgrad_sm80_room(*p, facts(multiprocessors));
}

namespace {

struct ListParts {
  mg_groups groups;
  int64_t rows;
  int32_t height;
  int32_t* out;  // how many parts there are, then of each begin, end, whether a whole group, and its number
  int32_t* cut;  // how many groups are cut, then their numbers
};

MG_KERNEL void list_parts(ListParts call) {
  MG_SHARED int32_t room[32 + 2 * multigemm::kMostBlockGroups];
  const auto ends = multigemm::group_ends(call.groups, call.rows, room);
  const auto parts = multigemm::row_parts(ends, call.height, room + 32 + call.groups.count, room);
  const int thread = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x);
  if (thread == 0) {
    call.out[0] = parts.count();
    call.cut[0] = parts.groups_cut();
  }
  for (int32_t i = thread; i < parts.count(); i += threads) {
    const multigemm::RowPart part = parts[i];
    const int32_t numbers[] = {part.begin, part.end, part.whole(), part.number()};
    std::memcpy(call.out + 1 + 4 * i, numbers, sizeof numbers);
  }
  for (int32_t i = thread; i < parts.groups_cut(); i += threads) call.cut[1 + i] = parts.cut_group(i);
}

}  // namespace

// The parts that a block of so many threads finds.
MG_CALL int sm80_parts(const int64_t* sizes, int64_t groups, int64_t rows, int height, int threads, int32_t* out,
                       int32_t* cut) {
  const ListParts call{{sizes, groups, 1, MG_INT64, 0}, rows, height, out, cut};
  const int error = multigemm::gpu::launch(list_parts, 1, threads, {out}, call);
  multigemm::stand_in::synchronize(out);
  return error;
}
