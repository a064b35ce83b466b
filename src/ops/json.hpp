// JSON text, written field by field.
#pragma once

#include <string>
#include <string_view>

namespace onchip::ops {

std::string json_string(std::string_view text);

// Fields of an object, in the order given.
class JsonObject {
 public:
  JsonObject& text(std::string_view name, std::string_view value) {
    return raw(name, json_string(value));
  }
  template <typename Integer>
  JsonObject& number(std::string_view name, Integer value) {
    return raw(name, std::to_string(value));
  }
  // `value` is JSON already.
  JsonObject& raw(std::string_view name, std::string_view value) {
    if (!fields_.empty()) fields_ += ", ";
    fields_.append(json_string(name)).append(": ").append(value);
    return *this;
  }
  std::string done() const { return "{" + fields_ + "}"; }

 private:
  std::string fields_;
};

class JsonArray {
 public:
  void add(std::string_view value) {
    if (!items_.empty()) items_ += ", ";
    items_.append(value);
  }
  std::string done() const { return "[" + items_ + "]"; }

 private:
  std::string items_;
};

}  // namespace onchip::ops
