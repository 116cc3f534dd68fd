// Failures inside the core are exceptions of one type; at the C ABI they become a status and a message.
#pragma once

#include <exception>
#include <new>
#include <string>

#include "multigemm/abi.h"

namespace multigemm {

class Failure : public std::exception {
 public:
  Failure(mg_status status, std::string text) : status_(status), text_(std::move(text)) {}
  mg_status status() const noexcept { return status_; }
  const char* what() const noexcept override { return text_.c_str(); }

 private:
  mg_status status_;
  std::string text_;
};

const char* status_name(int32_t status) noexcept;

// Remembers "STATUS_NAME: text" for the calling thread and gives the status back.
int32_t remember(mg_status status, const char* text) noexcept;
const char* last_error() noexcept;

// Runs `body`; nothing is thrown out of it.
template <class Body>
int32_t guarded(Body&& body) noexcept {
  try {
    body();
    return MG_OK;
  } catch (const Failure& failure) {
    return remember(failure.status(), failure.what());
  } catch (const std::bad_alloc&) {
    return remember(MG_OUT_OF_MEMORY, "no memory for the call's bookkeeping");
  } catch (const std::exception& error) {
    return remember(MG_INTERNAL, error.what());
  }
}

}  // namespace multigemm
