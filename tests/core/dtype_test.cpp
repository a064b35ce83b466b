// Conversions of the 16-bit floats, over every bit pattern and every rounding boundary.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>

#include "core/dtype.hpp"

namespace onchip {
namespace {

struct Format {
  int fraction_bits;
  int exponent_bits;
};
constexpr Format kFloat16 = {10, 5};
constexpr Format kBFloat16 = {7, 8};

// The value of a bit pattern, from the definition of the format.
double decode(std::uint16_t bits, Format format) {
  const double sign = (bits & 0x8000u) != 0 ? -1.0 : 1.0;
  const int exponent = (bits & 0x7fff) >> format.fraction_bits;
  const int fraction = bits & ((1 << format.fraction_bits) - 1);
  const int special = (1 << format.exponent_bits) - 1;
  const int bias = special / 2;
  if (exponent == special) {
    return fraction == 0 ? sign * std::numeric_limits<double>::infinity() : std::nan("");
  }
  const int hidden = exponent == 0 ? 0 : 1 << format.fraction_bits;
  return sign * std::ldexp(hidden + fraction,
                           (exponent == 0 ? 1 : exponent) - bias - format.fraction_bits);
}

struct Float16Conversions {
  static constexpr Format kFormat = kFloat16;
  static constexpr DType kDType = DType::f16;
  static float up(std::uint16_t bits) { return to_float(Float16{bits}); }
  static std::uint16_t down(float x) { return to_float16(x).bits; }
  static std::uint16_t down(double x) { return to_float16(x).bits; }
};

struct BFloat16Conversions {
  static constexpr Format kFormat = kBFloat16;
  static constexpr DType kDType = DType::bf16;
  static float up(std::uint16_t bits) { return to_float(BFloat16{bits}); }
  static std::uint16_t down(float x) { return to_bfloat16(x).bits; }
  static std::uint16_t down(double x) { return to_bfloat16(x).bits; }
};

template <typename Conversions>
class SixteenBits : public ::testing::Test {};
using Formats = ::testing::Types<Float16Conversions, BFloat16Conversions>;
TYPED_TEST_SUITE(SixteenBits, Formats);

TYPED_TEST(SixteenBits, EveryPatternUpAndBack) {
  for (std::uint32_t bits = 0; bits < 0x10000u; ++bits) {
    const auto pattern = static_cast<std::uint16_t>(bits);
    const double value = decode(pattern, TypeParam::kFormat);
    const float up = TypeParam::up(pattern);
    if (std::isnan(value)) {
      ASSERT_TRUE(std::isnan(up)) << bits;
      const std::uint16_t back = TypeParam::down(up);
      ASSERT_TRUE(std::isnan(decode(back, TypeParam::kFormat))) << bits;
      ASSERT_TRUE(std::isnan(decode(TypeParam::down(std::nan("")), TypeParam::kFormat)));
      continue;
    }
    ASSERT_EQ(static_cast<double>(up), value) << bits;
    ASSERT_EQ(std::signbit(up), std::signbit(value)) << bits;
    ASSERT_EQ(TypeParam::down(up), pattern);
    ASSERT_EQ(TypeParam::down(value), pattern);
  }
}

// Between each two neighbours: the middle goes to the even one, and what is on either side of the
// middle, by as little as a double can say, to the nearer one.
TYPED_TEST(SixteenBits, EveryRoundingBoundary) {
  const int special = (1 << TypeParam::kFormat.exponent_bits) - 1;
  const int infinity = special << TypeParam::kFormat.fraction_bits;
  for (int below = 0; below < infinity; ++below) {
    const double low = decode(static_cast<std::uint16_t>(below), TypeParam::kFormat);
    // Past the largest finite number, the next step's value would be the next power of two.
    const double high =
        below + 1 == infinity
            ? 2.0 * low - decode(static_cast<std::uint16_t>(below - 1), TypeParam::kFormat)
            : decode(static_cast<std::uint16_t>(below + 1), TypeParam::kFormat);
    const double middle = (low + high) / 2.0;
    const auto even = static_cast<std::uint16_t>(below + below % 2);
    for (const std::uint16_t sign : {std::uint16_t{0}, std::uint16_t{0x8000}}) {
      const double s = sign == 0 ? 1.0 : -1.0;
      const auto with_sign = [sign](int bits) { return static_cast<std::uint16_t>(bits | sign); };
      ASSERT_EQ(TypeParam::down(s * middle), with_sign(even)) << below;
      ASSERT_EQ(TypeParam::down(s * std::nextafter(middle, 0.0)), with_sign(below)) << below;
      ASSERT_EQ(TypeParam::down(s * std::nextafter(middle, 1e300)), with_sign(below + 1)) << below;
      const auto middle32 = static_cast<float>(middle);
      if (static_cast<double>(middle32) != middle) continue;
      const auto s32 = static_cast<float>(s);
      ASSERT_EQ(TypeParam::down(s32 * middle32), with_sign(even)) << below;
      ASSERT_EQ(TypeParam::down(s32 * std::nextafter(middle32, 0.0F)), with_sign(below)) << below;
      ASSERT_EQ(
          TypeParam::down(s32 * std::nextafter(middle32, std::numeric_limits<float>::infinity())),
          with_sign(below + 1))
          << below;
    }
  }
}

TYPED_TEST(SixteenBits, OutOfRange) {
  const double infinity = std::numeric_limits<double>::infinity();
  for (const double x : {1e300, -1e300, infinity, -infinity}) {
    EXPECT_EQ(decode(TypeParam::down(x), TypeParam::kFormat), x > 0 ? infinity : -infinity);
  }
  for (const double x : {1e-300, -1e-300, 0.0, -0.0}) {
    const double rounded = decode(TypeParam::down(x), TypeParam::kFormat);
    EXPECT_EQ(rounded, 0.0);
    EXPECT_EQ(std::signbit(rounded), std::signbit(x));
  }
}

TYPED_TEST(SixteenBits, LoadAndStoreTakeOneRounding) {
  // In fp32 this would become the tie exactly.
  const double tie =
      decode(0x3c01, TypeParam::kFormat) / 2.0 + decode(0x3c00, TypeParam::kFormat) / 2.0;
  alignas(8) std::byte bytes[8];
  store_from_double(bytes, TypeParam::kDType, tie + 1e-14);
  EXPECT_EQ(load_as_double(bytes, TypeParam::kDType), decode(0x3c01, TypeParam::kFormat));
  store_from_double(bytes, TypeParam::kDType, tie);
  EXPECT_EQ(load_as_double(bytes, TypeParam::kDType), decode(0x3c00, TypeParam::kFormat));
}

TEST(DType, LoadAndStoreOfTheOthers) {
  alignas(8) std::byte bytes[8];
  store_from_double(bytes, DType::f64, 1.0 / 3.0);
  EXPECT_EQ(load_as_double(bytes, DType::f64), 1.0 / 3.0);
  store_from_double(bytes, DType::f32, 1.0 / 3.0);
  EXPECT_EQ(load_as_double(bytes, DType::f32), static_cast<double>(1.0F / 3.0F));
  const std::int64_t large = -(std::int64_t{1} << 62);
  std::memcpy(bytes, &large, sizeof(large));
  EXPECT_EQ(load_integer(bytes, DType::i64), large);
  const std::int32_t small = -7;
  std::memcpy(bytes, &small, sizeof(small));
  EXPECT_EQ(load_integer(bytes, DType::i32), -7);
  EXPECT_EQ(load_as_double(bytes, DType::i32), -7.0);
  bytes[0] = std::byte{2};
  EXPECT_EQ(load_as_double(bytes, DType::boolean), 1.0);
  bytes[0] = std::byte{0};
  EXPECT_EQ(load_as_double(bytes, DType::boolean), 0.0);
}

TEST(DType, NamesAndSizes) {
  EXPECT_STREQ(dtype_name(DType::bf16), "bfloat16");
  EXPECT_STREQ(dtype_name(DType::e4m3), "float8_e4m3");
  EXPECT_EQ(dtype_size(DType::f64), 8);
  EXPECT_EQ(dtype_size(DType::bf16), 2);
  EXPECT_EQ(dtype_size(DType::boolean), 1);
  EXPECT_FALSE(is_known_dtype(0));
  EXPECT_FALSE(is_known_dtype(9));
  EXPECT_FALSE(is_float(DType::e4m3));
}

}  // namespace
}  // namespace onchip
