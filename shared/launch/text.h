// Texts into a caller's buffer.
#pragma once

#include <cstring>
#include <string>

#include "runtime/status.h"

namespace multigemm {

inline void copy_text(const std::string& from, char* text, int64_t capacity, int64_t* length) {
  if (!length) throw Failure(MG_INVALID_ARGUMENT, "length is null");
  *length = static_cast<int64_t>(from.size());
  if (!text || capacity <= 0) return;
  const size_t count = from.size() < static_cast<size_t>(capacity) ? from.size() : static_cast<size_t>(capacity) - 1;
  std::memcpy(text, from.data(), count);
  text[count] = 0;
}

}  // namespace multigemm
