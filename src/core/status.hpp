// Errors inside the library: one exception type, turned into a code and a message at the C edge.
#pragma once

#include <onchip/onchip.h>

#include <exception>
#include <string>
#include <string_view>
#include <utility>

namespace onchip {

class Error : public std::exception {
 public:
  Error(onchip_status code, std::string message) : code_(code), message_(std::move(message)) {}
  const char* what() const noexcept override { return message_.c_str(); }
  onchip_status code() const noexcept { return code_; }

 private:
  onchip_status code_;
  std::string message_;
};

const char* status_name(onchip_status status);

// "operator: argument: got X, wanted Y" with an optional "; nearest legal: Z".
[[noreturn]] void throw_invalid(std::string_view op, std::string_view argument,
                                std::string_view got, std::string_view wanted,
                                std::string_view nearest = {});

}  // namespace onchip
