// Little-endian fields one after the other, written to and read from a byte string. A read past the
// end fails and stays failed.
#pragma once

#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <type_traits>

namespace onchip::gpu {

class ByteWriter {
 public:
  template <typename T>
  void number(T value) {
    static_assert(std::is_integral_v<T>);
    for (std::size_t i = 0; i < sizeof(T); ++i) {
      bytes_.push_back(static_cast<char>(static_cast<std::uint64_t>(value) >> (8 * i)));
    }
  }
  void raw(std::string_view bytes) { bytes_.append(bytes); }
  void block(std::string_view bytes) {
    number(std::uint64_t{bytes.size()});
    raw(bytes);
  }
  const std::string& bytes() const { return bytes_; }

 private:
  std::string bytes_;
};

class ByteReader {
 public:
  explicit ByteReader(std::string_view bytes) : rest_(bytes) {}

  std::string_view raw(std::uint64_t size) {
    if (failed_ || size > rest_.size()) {
      failed_ = true;
      return {};
    }
    const std::string_view result = rest_.substr(0, static_cast<std::size_t>(size));
    rest_.remove_prefix(result.size());
    return result;
  }
  template <typename T>
  T number() {
    static_assert(std::is_integral_v<T>);
    std::uint64_t value = 0;
    const std::string_view bytes = raw(sizeof(T));
    for (std::size_t i = 0; i < bytes.size(); ++i) {
      value |= std::uint64_t{static_cast<unsigned char>(bytes[i])} << (8 * i);
    }
    return static_cast<T>(value);
  }
  std::string_view block() { return raw(number<std::uint64_t>()); }

  bool failed() const { return failed_; }
  std::string_view rest() const { return rest_; }

 private:
  std::string_view rest_;
  bool failed_ = false;
};

}  // namespace onchip::gpu
