#include "api/guard.hpp"

#include <algorithm>
#include <cstring>
#include <string>

namespace onchip::api {

namespace {

constexpr const char* kUnstorable = "the error message did not fit in memory";

struct LastError {
  std::string text;
  const char* shown = "";
};

LastError& last_error() noexcept {
  thread_local LastError error;
  return error;
}

}  // namespace

void set_last_error(std::string_view message) noexcept {
  LastError& error = last_error();
  try {
    error.text.assign(message);
    error.shown = error.text.c_str();
  } catch (...) {
    error.shown = kUnstorable;
  }
}

void copy_text(std::string_view op, std::string_view text, char* buffer, std::size_t capacity,
               std::size_t* length) {
  if (buffer == nullptr && capacity > 0) {
    throw_invalid(op, "text", "NULL with a capacity above 0", "a buffer, or capacity 0");
  }
  if (length != nullptr) *length = text.size();
  if (capacity == 0) return;
  const std::size_t copied = std::min(text.size(), capacity - 1);
  std::memcpy(buffer, text.data(), copied);
  buffer[copied] = '\0';
}

}  // namespace onchip::api

extern "C" const char* onchip_last_error(void) { return onchip::api::last_error().shown; }
