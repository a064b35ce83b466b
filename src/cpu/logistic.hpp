// softplus and the logistic function, lane by lane, for the gates of linear attention.
#pragma once

#include "cpu/simd.hpp"

namespace onchip::cpu::ONCHIP_CPU_ISA {
namespace {

template <typename T>
struct Atanh;

// atanh(s) / s as a polynomial in s^2 for 0 <= s <= 1/3: minimax of the relative error, 4.0e-9.
template <>
struct Atanh<float> {
  static constexpr float kCoefficients[] = {0.14089168006177044882f, 0.13980301194500612351f,
                                            0.20012455159575512609f, 0.33333157340541770771f, 1.0f};
};

// The same for fp64: 1.2e-18.
template <>
struct Atanh<double> {
  static constexpr double kCoefficients[] = {0.085300319672076310395,
                                             0.041578417467180933313,
                                             0.060561245855577759533,
                                             0.066500512427789691633,
                                             0.076933177281840510573,
                                             0.090908698938088405959,
                                             0.11111112055888008117,
                                             0.14285714272462556219,
                                             0.20000000000095162339,
                                             0.33333333333333067125,
                                             1.0};
};

// softplus(x) = x from here on.
constexpr double kSoftplusLinear = 20.0;

// e^-|x|.
template <typename T>
ONCHIP_INLINE Vec<T> exp_minus_magnitude(Vec<T> x) {
  using S = Simd<T>;
  const Vec<T> minus = S::select(S::less(x, Vec<T>{}), x, -x);
  return exp2<T>(minus * S::broadcast(kLog2E<T>));
}

// log(1 + e^x) = max(x, 0) + 2 atanh(e / (2 + e)), e = e^-|x|, for every x; x above 20. Within 3
// ulp where x > -1, below within 4 + 1.25 |x|: e is a power of a rounded product.
template <typename T>
ONCHIP_INLINE Vec<T> softplus(Vec<T> x) {
  using S = Simd<T>;
  using C = Atanh<T>;
  constexpr int kTerms = static_cast<int>(sizeof(C::kCoefficients) / sizeof(T));
  const Vec<T> e = exp_minus_magnitude<T>(x);
  const Vec<T> s = e / (S::broadcast(T{2}) + e);
  const Vec<T> square = s * s;
  Vec<T> p = S::broadcast(C::kCoefficients[0]);
  unroll<kTerms - 1>([&](auto i) { p = S::fma(p, square, S::broadcast(C::kCoefficients[i + 1])); });
  const Vec<T> curved = S::fma(s + s, p, S::max(Vec<T>{}, x));
  return S::select(S::less(S::broadcast(static_cast<T>(kSoftplusLinear)), x), x, curved);
}

// 1 / (1 + e^-x), and its slope in `slope`, which does not cancel where the function is near 1;
// both within 4 + 1.25 |x| ulp.
template <typename T>
ONCHIP_INLINE Vec<T> logistic(Vec<T> x, Vec<T>& slope) {
  const Sigmoid<T> s = sigmoid_and_rest<T>(x);
  slope = s.value * s.rest;
  return s.value;
}

}  // namespace
}  // namespace onchip::cpu::ONCHIP_CPU_ISA
