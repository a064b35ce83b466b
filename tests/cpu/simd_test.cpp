// The bounds that cpu/simd.hpp and cpu/logistic.hpp state, on every instruction set.
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <limits>
#include <string>
#include <vector>

#include "core/dtype.hpp"
#include "cpu/forced_isa.hpp"
#include "cpu/simd_probe.hpp"
#include "support/host_tensor.hpp"
#include "support/random.hpp"

namespace onchip::test {

SimdProbe simd_probe(cpu::Isa isa) {
  switch (isa) {
#if ONCHIP_CPU_HAS_AVX2
    case cpu::Isa::avx2:
      return cpu::avx2::simd_probe();
#endif
#if ONCHIP_CPU_HAS_AVX512
    case cpu::Isa::avx512:
      return cpu::avx512::simd_probe();
#endif
#if ONCHIP_CPU_HAS_AVX512_BF16
    case cpu::Isa::avx512_bf16:
      return cpu::avx512_bf16::simd_probe();
#endif
    default:
      return cpu::portable::simd_probe();
  }
}

namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

class SimdOn : public EachIsa {
 protected:
  void SetUp() override {
    EachIsa::SetUp();
    if (!IsSkipped()) probe_ = simd_probe(GetParam());
  }
  SimdProbe probe_{};
};
ONCHIP_FOR_EACH_ISA(SimdOn);

template <typename T>
void pad(std::vector<T>& values) {
  while (values.size() % 64 != 0) values.push_back(values.back());
}

// Distance in units of the last place of `exact` in T.
template <typename T>
double ulps(T got, long double exact) {
  const int digits = std::numeric_limits<T>::digits;
  int exponent = 0;
  std::frexp(exact, &exponent);
  exponent = std::max(exponent, std::numeric_limits<T>::min_exponent);
  return static_cast<double>(
      std::fabs(std::ldexp(static_cast<long double>(got) - exact, digits - exponent)));
}

// Negative numbers of every magnitude: all bit patterns at a step that is no power of two.
std::vector<float> negative_floats(std::uint32_t step) {
  std::vector<float> values;
  for (std::uint64_t bits = 0x80000000u; bits <= 0xff800000u; bits += step) {
    values.push_back(std::bit_cast<float>(static_cast<std::uint32_t>(bits)));
  }
  for (float x = -0.0f; x >= -130.0f; x -= 0.5f) {
    for (const float near : {x, std::nextafter(x, -kInf), std::nextafter(x, kInf)}) {
      if (near <= 0.0f) values.push_back(near);
    }
  }
  pad(values);
  return values;
}

std::vector<double> negative_doubles(int count) {
  Random random(1);
  std::vector<double> values;
  for (int i = 0; i < count; ++i) {
    values.push_back(-1030.0 * random.uniform());
    values.push_back(-std::ldexp(random.uniform(), static_cast<int>(random.integer(-60, 11))));
  }
  for (double x = -0.0; x >= -1030.0; x -= 0.5) {
    values.push_back(x);
    values.push_back(std::nextafter(x, -static_cast<double>(kInf)));
  }
  pad(values);
  return values;
}

TEST_P(SimdOn, Exp2F32) {
  const std::vector<float> x = negative_floats(1009);
  std::vector<float> y(x.size());
  probe_.exp2_f32(x.data(), y.data(), x.size());
  double worst = 0.0;
  for (std::size_t i = 0; i < x.size(); ++i) {
    if (x[i] < -126.0f) {
      ASSERT_EQ(y[i], 0.0f) << x[i];
    } else {
      worst = std::max(worst, ulps(y[i], std::exp2(static_cast<double>(x[i]))));
    }
  }
  EXPECT_LE(worst, 1.5);
}

// In units of the last place that fp32 has at `exact`, a normal number of fp32.
double ulps_of_f32(float got, double exact) {
  const auto exponent = std::bit_cast<std::uint64_t>(exact) & 0x7ff0000000000000u;
  return std::fabs(got - exact) / std::bit_cast<double>(exponent) * 0x1p23;
}

// Every float from -0 down to -126 and then to -inf; a sample unless the long tests run.
TEST_P(SimdOn, Exp2OfEveryF32) {
  const bool all = std::getenv("ONCHIP_TEST_LONG") != nullptr;
  constexpr std::uint64_t kBegin = 0x80000000u;
  constexpr std::uint64_t kSmallest = 0xc2fc0000u;  // -126
  constexpr std::uint64_t kEnd = 0xff800000u;       // -inf
  const std::uint64_t step = all ? 1 : 331;
  std::vector<float> x(std::size_t{1} << 16);
  std::vector<float> y(x.size());
  double worst = 0.0;
  std::uint64_t bits = kBegin;
  while (bits <= kEnd) {
    std::size_t count = 0;
    for (; count < x.size() && bits <= kEnd; bits += step) {
      x[count++] = std::bit_cast<float>(static_cast<std::uint32_t>(bits));
    }
    std::fill(x.begin() + static_cast<std::ptrdiff_t>(count), x.end(), -1.0f);
    probe_.exp2_f32(x.data(), y.data(), x.size());
    for (std::size_t i = 0; i < count; ++i) {
      if (std::bit_cast<std::uint32_t>(x[i]) > kSmallest) {
        ASSERT_EQ(y[i], 0.0f) << x[i];
      } else {
        worst = std::max(worst, ulps_of_f32(y[i], std::exp2(static_cast<double>(x[i]))));
      }
    }
  }
  RecordProperty("worst_ulps", std::to_string(worst));
  // docs/numerics.md, section 4.
  EXPECT_LE(worst, GetParam() == cpu::Isa::portable ? 1.25 : 1.0);
}

TEST_P(SimdOn, Exp2F64) {
  const std::vector<double> x = negative_doubles(200000);
  std::vector<double> y(x.size());
  probe_.exp2_f64(x.data(), y.data(), x.size());
  double worst = 0.0;
  for (std::size_t i = 0; i < x.size(); ++i) {
    if (x[i] < -1022.0) {
      ASSERT_EQ(y[i], 0.0) << x[i];
    } else {
      worst = std::max(worst, ulps(y[i], std::exp2(static_cast<long double>(x[i]))));
    }
  }
  EXPECT_LE(worst, 1.5);
}

TEST_P(SimdOn, Exp2OfSpecialValues) {
  std::vector<float> x = {0.0f, -0.0f, -kInf, kNan, -kNan, std::numeric_limits<float>::lowest()};
  x.push_back(std::bit_cast<float>(0xffffffffu));
  x.push_back(std::bit_cast<float>(0x7fc00001u));
  pad(x);
  std::vector<float> y(x.size());
  probe_.exp2_f32(x.data(), y.data(), x.size());
  std::vector<double> x64(x.begin(), x.end());
  std::vector<double> y64(x.size());
  probe_.exp2_f64(x64.data(), y64.data(), x.size());
  for (const std::vector<double>& result :
       {std::vector<double>(y.begin(), y.end()), std::vector<double>(y64.begin(), y64.end())}) {
    EXPECT_EQ(result[0], 1.0);
    EXPECT_EQ(result[1], 1.0);
    EXPECT_EQ(result[2], 0.0);
    EXPECT_TRUE(std::isnan(result[3]));
    EXPECT_TRUE(std::isnan(result[4]));
    EXPECT_EQ(result[5], 0.0);
    EXPECT_TRUE(std::isnan(result[6]));
    EXPECT_TRUE(std::isnan(result[7]));
  }
}

TEST_P(SimdOn, TanhF32) {
  std::vector<float> x = negative_floats(2003);
  for (std::size_t i = 0; i < x.size(); i += 2) x[i] = -x[i];
  std::vector<float> y(x.size());
  probe_.tanh_f32(x.data(), y.data(), x.size());
  double worst = 0.0;
  for (std::size_t i = 0; i < x.size(); ++i) {
    worst = std::max(worst, ulps(y[i], std::tanh(static_cast<double>(x[i]))));
    ASSERT_LE(std::fabs(y[i]), 1.0f) << x[i];
  }
  EXPECT_LE(worst, 2.5);
}

TEST_P(SimdOn, TanhF64) {
  std::vector<double> x = negative_doubles(200000);
  for (std::size_t i = 0; i < x.size(); i += 2) x[i] = -x[i];
  std::vector<double> y(x.size());
  probe_.tanh_f64(x.data(), y.data(), x.size());
  double worst = 0.0;
  for (std::size_t i = 0; i < x.size(); ++i) {
    worst = std::max(worst, ulps(y[i], std::tanh(static_cast<long double>(x[i]))));
    ASSERT_LE(std::fabs(y[i]), 1.0) << x[i];
  }
  EXPECT_LE(worst, 2.5);
}

TEST_P(SimdOn, TanhOfSpecialValues) {
  std::vector<float> x = {0.0f, kInf, -kInf, kNan};
  pad(x);
  std::vector<float> y(x.size());
  probe_.tanh_f32(x.data(), y.data(), x.size());
  std::vector<double> x64(x.begin(), x.end());
  std::vector<double> y64(x.size());
  probe_.tanh_f64(x64.data(), y64.data(), x.size());
  EXPECT_EQ(y[0], 0.0f);
  EXPECT_EQ(y[1], 1.0f);
  EXPECT_EQ(y[2], -1.0f);
  EXPECT_TRUE(std::isnan(y[3]));
  EXPECT_EQ(y64[1], 1.0);
  EXPECT_EQ(y64[2], -1.0);
  EXPECT_TRUE(std::isnan(y64[3]));
}

// e^-|x| is a power of a rounded product: 1.25 |x| ulp beside those of the function itself.
template <typename T>
void expect_gates_near(const std::vector<T>& x, const std::vector<T>& softplus,
                       const std::vector<T>& logistic, const std::vector<T>& slope) {
  constexpr T kTiny = std::numeric_limits<T>::min();
  constexpr long double kOne = 1.0L;
  for (std::size_t i = 0; i < x.size(); ++i) {
    const auto exact = static_cast<long double>(x[i]);
    const long double e = std::exp(-std::fabs(exact));
    const long double wanted[] = {exact > 20.0L ? exact : std::max(exact, 0.0L) + std::log1p(e),
                                  (exact < 0.0L ? e : kOne) / (kOne + e),
                                  e / ((kOne + e) * (kOne + e))};
    const T got[] = {softplus[i], logistic[i], slope[i]};
    const double allowed = 4.0 + 1.25 * std::fabs(static_cast<double>(x[i]));
    for (std::size_t f = 0; f < 3; ++f) {
      if (wanted[f] < 2.0L * kTiny) {
        ASSERT_LE(std::fabs(got[f]), 4.0 * kTiny) << x[i] << " function " << f;
      } else {
        ASSERT_LE(ulps(got[f], wanted[f]), f == 0 && x[i] > T{-1} ? 3.0 : allowed)
            << x[i] << " function " << f;
      }
    }
  }
}

TEST_P(SimdOn, GatesF32) {
  std::vector<float> x = negative_floats(4001);
  for (std::size_t i = 0; i < x.size(); i += 2) x[i] = -x[i];
  std::vector<float> softplus(x.size());
  std::vector<float> logistic(x.size());
  std::vector<float> slope(x.size());
  probe_.softplus_f32(x.data(), softplus.data(), x.size());
  probe_.logistic_f32(x.data(), logistic.data(), slope.data(), x.size());
  expect_gates_near(x, softplus, logistic, slope);
}

TEST_P(SimdOn, GatesF64) {
  std::vector<double> x = negative_doubles(100000);
  for (std::size_t i = 0; i < x.size(); i += 2) x[i] = -x[i];
  std::vector<double> softplus(x.size());
  std::vector<double> logistic(x.size());
  std::vector<double> slope(x.size());
  probe_.softplus_f64(x.data(), softplus.data(), x.size());
  probe_.logistic_f64(x.data(), logistic.data(), slope.data(), x.size());
  expect_gates_near(x, softplus, logistic, slope);
}

TEST_P(SimdOn, GatesOfSpecialValues) {
  std::vector<float> x = {0.0f, kInf, -kInf, kNan, 20.5f, std::numeric_limits<float>::max()};
  pad(x);
  std::vector<float> softplus(x.size());
  std::vector<float> logistic(x.size());
  std::vector<float> slope(x.size());
  probe_.softplus_f32(x.data(), softplus.data(), x.size());
  probe_.logistic_f32(x.data(), logistic.data(), slope.data(), x.size());
  EXPECT_EQ(logistic[0], 0.5f);
  EXPECT_EQ(slope[0], 0.25f);
  EXPECT_EQ(softplus[1], kInf);
  EXPECT_EQ(logistic[1], 1.0f);
  EXPECT_EQ(slope[1], 0.0f);
  EXPECT_EQ(softplus[2], 0.0f);
  EXPECT_EQ(logistic[2], 0.0f);
  EXPECT_EQ(slope[2], 0.0f);
  EXPECT_TRUE(std::isnan(softplus[3]) && std::isnan(logistic[3]) && std::isnan(slope[3]));
  EXPECT_EQ(softplus[4], 20.5f);
  EXPECT_EQ(softplus[5], std::numeric_limits<float>::max());
}

TEST_P(SimdOn, HalvesWidenExactly) {
  std::vector<std::uint16_t> x(65536);
  for (std::size_t i = 0; i < x.size(); ++i) x[i] = static_cast<std::uint16_t>(i);
  std::vector<float> bf16(x.size());
  std::vector<float> f16(x.size());
  probe_.from_bf16(x.data(), bf16.data(), x.size());
  probe_.from_f16(x.data(), f16.data(), x.size());
  for (std::size_t i = 0; i < x.size(); ++i) {
    const float wanted_bf16 = to_float(BFloat16{x[i]});
    const float wanted_f16 = to_float(Float16{x[i]});
    ASSERT_EQ(std::isnan(wanted_bf16), std::isnan(bf16[i])) << i;
    ASSERT_EQ(std::isnan(wanted_f16), std::isnan(f16[i])) << i;
    if (!std::isnan(wanted_bf16)) {
      ASSERT_EQ(std::bit_cast<std::uint32_t>(wanted_bf16), std::bit_cast<std::uint32_t>(bf16[i]));
    }
    if (!std::isnan(wanted_f16)) {
      ASSERT_EQ(std::bit_cast<std::uint32_t>(wanted_f16), std::bit_cast<std::uint32_t>(f16[i]));
    }
  }
}

// Every half, the midpoints between neighbours, and their neighbours; then all patterns at a step.
std::vector<float> rounding_cases() {
  std::vector<float> values;
  const auto around = [&](std::uint32_t bits) {
    for (const std::uint32_t near : {bits - 1, bits, bits + 1}) {
      values.push_back(std::bit_cast<float>(near));
    }
  };
  for (std::uint32_t half = 0; half < 65536; ++half) {
    around(half << 16);
    around((half << 16) | 0x8000u);
    around(std::bit_cast<std::uint32_t>(to_float(Float16{static_cast<std::uint16_t>(half)})));
    around(std::bit_cast<std::uint32_t>(to_float(Float16{static_cast<std::uint16_t>(half)})) |
           0x1000u);
  }
  for (std::uint64_t bits = 0; bits < (std::uint64_t{1} << 32); bits += 8191) {
    values.push_back(std::bit_cast<float>(static_cast<std::uint32_t>(bits)));
  }
  pad(values);
  return values;
}

TEST_P(SimdOn, HalvesRoundToNearestEven) {
  const std::vector<float> x = rounding_cases();
  std::vector<std::uint16_t> bf16(x.size());
  std::vector<std::uint16_t> f16(x.size());
  probe_.to_bf16(x.data(), bf16.data(), x.size());
  probe_.to_f16(x.data(), f16.data(), x.size());
  for (std::size_t i = 0; i < x.size(); ++i) {
    if (std::isnan(x[i])) {
      ASSERT_TRUE(std::isnan(to_float(BFloat16{bf16[i]})));
      ASSERT_TRUE(std::isnan(to_float(Float16{f16[i]})));
    } else {
      ASSERT_EQ(bf16[i], to_bfloat16(x[i]).bits) << x[i];
      ASSERT_EQ(f16[i], to_float16(x[i]).bits) << x[i];
    }
  }
}

TEST_P(SimdOn, MaxAndSelect) {
  std::vector<float> a = {1.0f, 2.0f, kNan, 3.0f, kNan, -kInf, kInf, 0.0f};
  std::vector<float> b = {2.0f, 1.0f, 3.0f, kNan, kNan, -1.0f, 1.0f, -kInf};
  pad(a);
  pad(b);
  std::vector<float> largest(a.size());
  std::vector<float> selected(a.size());
  probe_.max_f32(a.data(), b.data(), largest.data(), a.size());
  probe_.select_f32(a.data(), b.data(), selected.data(), a.size());
  const std::vector<double> a64(a.begin(), a.end());
  const std::vector<double> b64(b.begin(), b.end());
  std::vector<double> largest64(a.size());
  std::vector<double> selected64(a.size());
  probe_.max_f64(a64.data(), b64.data(), largest64.data(), a.size());
  probe_.select_f64(a64.data(), b64.data(), selected64.data(), a.size());
  const auto same = [](double x, double y) { return x == y || (std::isnan(x) && std::isnan(y)); };
  for (std::size_t i = 0; i < a.size(); ++i) {
    const double wanted_max = a[i] > b[i] ? a[i] : b[i];
    const double wanted_min = a[i] < b[i] ? a[i] : b[i];
    EXPECT_TRUE(same(largest[i], wanted_max)) << i;
    EXPECT_TRUE(same(largest64[i], wanted_max)) << i;
    EXPECT_TRUE(same(selected[i], wanted_min)) << i;
    EXPECT_TRUE(same(selected64[i], wanted_min)) << i;
  }
}

TEST_P(SimdOn, Transpose) {
  std::vector<float> x(256);
  std::vector<double> x64(256);
  for (std::size_t i = 0; i < x.size(); ++i) {
    x[i] = static_cast<float>(i);
    x64[i] = static_cast<double>(i);
  }
  std::vector<float> y(256);
  std::vector<double> y64(256);
  const auto lanes = static_cast<std::size_t>(probe_.transpose_f32(x.data(), y.data()));
  const auto lanes64 = static_cast<std::size_t>(probe_.transpose_f64(x64.data(), y64.data()));
  EXPECT_EQ(lanes, 2 * lanes64);
  for (std::size_t i = 0; i < lanes; ++i) {
    for (std::size_t j = 0; j < lanes; ++j) ASSERT_EQ(y[i * lanes + j], x[j * lanes + i]);
  }
  for (std::size_t i = 0; i < lanes64; ++i) {
    for (std::size_t j = 0; j < lanes64; ++j) ASSERT_EQ(y64[i * lanes64 + j], x64[j * lanes64 + i]);
  }
}

TEST_P(SimdOn, PartsTouchNothingElse) {
  std::vector<float> square(256);
  std::vector<float> transposed(256);
  const int lanes = probe_.transpose_f32(square.data(), transposed.data());
  for (int count = 1; count <= lanes; ++count) {
    // Each array ends at a forbidden page.
    HostTensor x(DType::f32, {count});
    HostTensor y(DType::f32, {count});
    double next = 0.5;
    x.fill([&] { return next += 1.0; });
    HostTensor x16(DType::bf16, {count});
    HostTensor y16(DType::bf16, {count});
    x16.fill_from(x.values());
    probe_.copy_f32(static_cast<const float*>(x.view().data), static_cast<float*>(y.view().data),
                    count);
    probe_.copy_bf16(static_cast<const std::uint16_t*>(x16.view().data),
                     static_cast<std::uint16_t*>(y16.view().data), count);
    EXPECT_EQ(x.values(), y.values());
    EXPECT_EQ(x16.values(), y16.values());
    EXPECT_EQ(y.broken_guard(), "");
    EXPECT_EQ(y16.broken_guard(), "");
  }
}

}  // namespace
}  // namespace onchip::test
