// Philox4x32-10 against the known answers published with it, and the shape of the dropout mask.
#include <gtest/gtest.h>

#include <cmath>
#include <set>
#include <tuple>

#include "core/philox.hpp"

namespace onchip {
namespace {

TEST(Philox, KnownAnswers) {
  EXPECT_EQ(philox4x32_10({0u, 0u}, {0u, 0u, 0u, 0u}),
            (PhiloxBlock{0x6627e8d5u, 0xe169c58du, 0xbc57ac4cu, 0x9b00dbd8u}));
  EXPECT_EQ(philox4x32_10({0xffffffffu, 0xffffffffu},
                          {0xffffffffu, 0xffffffffu, 0xffffffffu, 0xffffffffu}),
            (PhiloxBlock{0x408f276du, 0x41c83b0eu, 0xa20bc7c6u, 0x6d5451fdu}));
  EXPECT_EQ(philox4x32_10({0xa4093822u, 0x299f31d0u},
                          {0x243f6a88u, 0x85a308d3u, 0x13198a2eu, 0x03707344u}),
            (PhiloxBlock{0xd16cfe09u, 0x94fdccebu, 0x5001e420u, 0x24126ea1u}));
}

TEST(DropoutMask, EveryScoreHasItsOwnBits) {
  // 64 x 64 scores: as many different (block, field) pairs.
  std::set<std::tuple<PhiloxBlock, int>> seen;
  Dropout dropout;
  dropout.key = {1u, 2u};
  for (std::int64_t i = 0; i < 64; ++i) {
    for (std::int64_t j = 0; j < 64; ++j) {
      const PhiloxBlock bits = dropout.block(5, i, j);
      // field() of a block whose fields are their own index says which field (i, j) takes.
      const PhiloxBlock numbered = {0x00010000u, 0x00030002u, 0x00050004u, 0x00070006u};
      seen.insert({bits, static_cast<int>(Dropout::field(numbered, i, j))});
    }
  }
  EXPECT_EQ(seen.size(), 64u * 64u);
}

TEST(DropoutMask, KeepsTheShareItSays) {
  for (const double p : {0.1, 0.5, 0.9}) {
    Dropout dropout;
    dropout.active = true;
    dropout.threshold = static_cast<std::uint32_t>(std::floor(65536.0 * p + 0.5));
    dropout.key = {123u, 456u};
    dropout.offset = 7;
    constexpr int kSide = 512;
    int kept = 0;
    for (std::int64_t i = 0; i < kSide; ++i) {
      for (std::int64_t j = 0; j < kSide; ++j) kept += dropout.keeps(3, i, j) ? 1 : 0;
    }
    const double count = kSide * kSide;
    EXPECT_NEAR(kept / count, 1.0 - p, 5.0 * std::sqrt(p * (1.0 - p) / count));
    EXPECT_NEAR(dropout.kept_scale() * (1.0 - p), 1.0, 1e-3);
  }
}

TEST(DropoutMask, DependsOnEveryWord) {
  const Dropout dropout = {.active = true, .threshold = 1, .key = {1u, 2u}, .offset = 3};
  Dropout other_key = dropout;
  other_key.key[1] = 9;
  Dropout other_offset = dropout;
  other_offset.offset = 4;
  EXPECT_NE(dropout.block(0, 0, 0), other_key.block(0, 0, 0));
  EXPECT_NE(dropout.block(0, 0, 0), other_offset.block(0, 0, 0));
  EXPECT_NE(dropout.block(0, 0, 0), dropout.block(1, 0, 0));
  EXPECT_NE(dropout.block(0, 0, 0), dropout.block(0, 1, 0));
  EXPECT_NE(dropout.block(0, 0, 0), dropout.block(0, 0, 2));
}

}  // namespace
}  // namespace onchip
