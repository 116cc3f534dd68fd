#include "runtime/status.h"

namespace multigemm {
namespace {
thread_local std::string message;
}

const char* status_name(int32_t status) noexcept {
  switch (status) {
    case MG_OK: return "MG_OK";
    case MG_INVALID_ARGUMENT: return "MG_INVALID_ARGUMENT";
    case MG_UNSUPPORTED: return "MG_UNSUPPORTED";
    case MG_OUT_OF_MEMORY: return "MG_OUT_OF_MEMORY";
    case MG_DEVICE_ERROR: return "MG_DEVICE_ERROR";
    case MG_NO_DEVICE_CODE: return "MG_NO_DEVICE_CODE";
    case MG_DRIVER_TOO_OLD: return "MG_DRIVER_TOO_OLD";
    default: return "MG_INTERNAL";
  }
}

int32_t remember(mg_status status, const char* text) noexcept {
  try {
    message = std::string(status_name(status)) + ": " + text;
  } catch (...) {
    message.clear();  // no memory even for the text: the status still tells the kind
  }
  return status;
}

const char* last_error() noexcept { return message.c_str(); }

}  // namespace multigemm
