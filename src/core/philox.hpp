// Philox4x32-10 (Salmon et al., SC 2011) and the dropout mask of docs/semantics.md section 2.
#pragma once

#include <array>
#include <cstdint>

namespace onchip {

using PhiloxBlock = std::array<std::uint32_t, 4>;

inline PhiloxBlock philox4x32_10(std::array<std::uint32_t, 2> key, PhiloxBlock counter) {
  for (int round = 0; round < 10; ++round) {
    const std::uint64_t p0 = std::uint64_t{0xD2511F53u} * counter[0];
    const std::uint64_t p1 = std::uint64_t{0xCD9E8D57u} * counter[2];
    counter = {
        static_cast<std::uint32_t>(p1 >> 32) ^ counter[1] ^ key[0], static_cast<std::uint32_t>(p1),
        static_cast<std::uint32_t>(p0 >> 32) ^ counter[3] ^ key[1], static_cast<std::uint32_t>(p0)};
    key[0] += 0x9E3779B9u;
    key[1] += 0xBB67AE85u;
  }
  return counter;
}

struct Dropout {
  bool active = false;
  std::uint32_t threshold = 0;  // dropped iff field < threshold; of 65536
  std::array<std::uint32_t, 2> key{};
  std::uint32_t offset = 0;

  // One block covers the eight scores (i, i+8) x (j, j+1, j+8, j+9) around its corner.
  PhiloxBlock block(std::uint32_t sequence_head, std::int64_t i, std::int64_t j) const {
    const auto row = static_cast<std::uint32_t>(8 * (i / 16) + i % 8);
    const auto column = static_cast<std::uint32_t>(4 * (j / 16) + (j % 8) / 2);
    return philox4x32_10(key, {offset, sequence_head, row, column});
  }

  static std::uint32_t field(const PhiloxBlock& bits, std::int64_t i, std::int64_t j) {
    const auto index = static_cast<std::uint32_t>(4 * ((i / 8) % 2) + 2 * ((j / 8) % 2) + j % 2);
    return (bits[index / 2] >> (16 * (index % 2))) & 0xffffu;
  }

  bool keeps(std::uint32_t sequence_head, std::int64_t i, std::int64_t j) const {
    return field(block(sequence_head, i, j), i, j) >= threshold;
  }

  double kept_scale() const { return 65536.0 / (65536.0 - static_cast<double>(threshold)); }
};

}  // namespace onchip
