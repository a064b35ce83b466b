#include "core/status.hpp"

namespace onchip {

const char* status_name(onchip_status status) {
  switch (status) {
    case ONCHIP_OK:
      return "ok";
    case ONCHIP_INVALID_ARGUMENT:
      return "invalid_argument";
    case ONCHIP_UNSUPPORTED:
      return "unsupported";
    case ONCHIP_OUT_OF_MEMORY:
      return "out_of_memory";
    case ONCHIP_COMPILE_FAILED:
      return "compile_failed";
    case ONCHIP_DEVICE_ERROR:
      return "device_error";
    case ONCHIP_INTERNAL:
      return "internal";
    default:
      return "unknown";
  }
}

void throw_invalid(std::string_view op, std::string_view argument, std::string_view got,
                   std::string_view wanted, std::string_view nearest) {
  std::string text;
  text.append(op).append(": ").append(argument).append(": got ").append(got);
  text.append(", wanted ").append(wanted);
  if (!nearest.empty()) text.append("; nearest legal: ").append(nearest);
  throw Error(ONCHIP_INVALID_ARGUMENT, std::move(text));
}

}  // namespace onchip
