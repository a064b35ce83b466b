// Vectors of fp32 and fp64 for one instruction set: the only file with intrinsics.
//
// A file that includes this one is compiled once per instruction set with ONCHIP_CPU_ISA =
// portable, avx2, avx512 or avx512_bf16. Everything here has internal linkage, so that no copy made
// for one instruction set can stand in for another at link time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "core/dtype.hpp"

#define ONCHIP_CPU_JOIN_(a, b) a##b
#define ONCHIP_CPU_JOIN(a, b) ONCHIP_CPU_JOIN_(a, b)
#define ONCHIP_CPU_LEVEL_portable 0
#define ONCHIP_CPU_LEVEL_avx2 1
#define ONCHIP_CPU_LEVEL_avx512 2
#define ONCHIP_CPU_LEVEL_avx512_bf16 3
#define ONCHIP_CPU_LEVEL ONCHIP_CPU_JOIN(ONCHIP_CPU_LEVEL_, ONCHIP_CPU_ISA)

#define ONCHIP_INLINE inline __attribute__((always_inline))

#if ONCHIP_CPU_LEVEL > 0
// gcc 12 takes the header's own undefined pass-through operands for mistakes.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>
#pragma GCC diagnostic pop
#endif

namespace onchip::cpu::ONCHIP_CPU_ISA {
namespace {

// ---- compile-time loops -------------------------------------------------------------------------

template <int kValue>
struct Index {
  constexpr operator int() const { return kValue; }
};

template <int... kValues>
struct IndexList {};

template <int kCount, int... kValues>
struct MakeIndexList : MakeIndexList<kCount - 1, kCount - 1, kValues...> {};
template <int... kValues>
struct MakeIndexList<0, kValues...> {
  using Type = IndexList<kValues...>;
};

template <typename F, int... kValues>
ONCHIP_INLINE void unroll_list(F&& f, IndexList<kValues...>) {
  (f(Index<kValues>{}), ...);
}

// f(Index<0>{}), ..., f(Index<kCount - 1>{}): arrays of vectors indexed by them live in registers.
template <int kCount, typename F>
ONCHIP_INLINE void unroll(F&& f) {
  unroll_list(f, typename MakeIndexList<kCount>::Type{});
}

// ---- vectors ------------------------------------------------------------------------------------

template <typename T>
struct Bits;
template <>
struct Bits<float> {
  using Signed = std::int32_t;
  using Unsigned = std::uint32_t;
};
template <>
struct Bits<double> {
  using Signed = std::int64_t;
  using Unsigned = std::uint64_t;
};

// What all instruction sets share, on the compiler's vector types.
template <typename T, int kBytes>
struct VectorBase {
  static constexpr int kLanes = kBytes / static_cast<int>(sizeof(T));
  using Vec [[gnu::vector_size(kBytes)]] = T;
  using Signed [[gnu::vector_size(kBytes)]] = Bits<T>::Signed;
  using Unsigned [[gnu::vector_size(kBytes)]] = Bits<T>::Unsigned;

  static ONCHIP_INLINE Vec load(const T* from) {
    Vec x;
    std::memcpy(&x, from, sizeof(x));
    return x;
  }
  static ONCHIP_INLINE void store(T* to, Vec x) { std::memcpy(to, &x, sizeof(x)); }
  static ONCHIP_INLINE Vec broadcast(T x) { return x - Vec{}; }
};

#if ONCHIP_CPU_LEVEL < 2

// A mask is a vector of all-ones and all-zeros lanes.
template <typename T, int kBytes>
struct VectorCommon : VectorBase<T, kBytes> {
  using Base = VectorBase<T, kBytes>;
  using Vec = typename Base::Vec;
  using Mask = typename Base::Signed;

  static ONCHIP_INLINE Mask less(Vec a, Vec b) { return a < b; }
  static ONCHIP_INLINE Mask less_equal(Vec a, Vec b) { return a <= b; }
  static ONCHIP_INLINE Mask equal(Vec a, Vec b) { return a == b; }
  static ONCHIP_INLINE Mask both(Mask a, Mask b) { return a & b; }
  static ONCHIP_INLINE Mask either(Mask a, Mask b) { return a | b; }
  static ONCHIP_INLINE Mask complement(Mask a) { return ~a; }
  static ONCHIP_INLINE Mask all_true() { return ~Mask{}; }
  static ONCHIP_INLINE Vec select(Mask mask, Vec a, Vec b) { return mask ? a : b; }
};

#endif

// Lane by lane. max(a, b) is b where either is NaN; comparisons with NaN are false.
template <typename T>
struct Simd;

#if ONCHIP_CPU_LEVEL == 0

template <typename T>
struct PortableSimd : VectorCommon<T, 16> {
  using Base = VectorCommon<T, 16>;
  using typename Base::Mask;
  using typename Base::Vec;

  static ONCHIP_INLINE Vec fma(Vec a, Vec b, Vec c) { return a * b + c; }
  static ONCHIP_INLINE Vec max(Vec a, Vec b) { return a > b ? a : b; }
  static ONCHIP_INLINE bool any(Mask mask) {
    typename Bits<T>::Signed bits = 0;
    for (int lane = 0; lane < Base::kLanes; ++lane) bits |= mask[lane];
    return bits != 0;
  }
};

template <>
struct Simd<float> : PortableSimd<float> {};
template <>
struct Simd<double> : PortableSimd<double> {};

#elif ONCHIP_CPU_LEVEL == 1

template <>
struct Simd<float> : VectorCommon<float, 32> {
  static ONCHIP_INLINE Vec fma(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }
  static ONCHIP_INLINE Vec max(Vec a, Vec b) { return _mm256_max_ps(a, b); }
  static ONCHIP_INLINE bool any(Mask mask) { return _mm256_movemask_ps((__m256)mask) != 0; }
};

template <>
struct Simd<double> : VectorCommon<double, 32> {
  static ONCHIP_INLINE Vec fma(Vec a, Vec b, Vec c) { return _mm256_fmadd_pd(a, b, c); }
  static ONCHIP_INLINE Vec max(Vec a, Vec b) { return _mm256_max_pd(a, b); }
  static ONCHIP_INLINE bool any(Mask mask) { return _mm256_movemask_pd((__m256d)mask) != 0; }
};

#else

template <>
struct Simd<float> : VectorBase<float, 64> {
  using Mask = __mmask16;

  static ONCHIP_INLINE Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
  static ONCHIP_INLINE Vec max(Vec a, Vec b) { return _mm512_max_ps(a, b); }
  static ONCHIP_INLINE Mask less(Vec a, Vec b) { return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ); }
  static ONCHIP_INLINE Mask less_equal(Vec a, Vec b) {
    return _mm512_cmp_ps_mask(a, b, _CMP_LE_OQ);
  }
  static ONCHIP_INLINE Mask equal(Vec a, Vec b) { return _mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ); }
  static ONCHIP_INLINE Mask both(Mask a, Mask b) { return static_cast<Mask>(a & b); }
  static ONCHIP_INLINE Mask either(Mask a, Mask b) { return static_cast<Mask>(a | b); }
  static ONCHIP_INLINE Mask complement(Mask a) { return static_cast<Mask>(~a); }
  static ONCHIP_INLINE Mask all_true() { return 0xffff; }
  static ONCHIP_INLINE Vec select(Mask mask, Vec a, Vec b) {
    return _mm512_mask_blend_ps(mask, b, a);
  }
  static ONCHIP_INLINE bool any(Mask mask) { return mask != 0; }
  static ONCHIP_INLINE Vec round(Vec x) { return _mm512_roundscale_ps(x, 0); }
  // x 2^n where the mask is set, else 0.
  static ONCHIP_INLINE Vec scale_where(Mask mask, Vec x, Vec n) {
    return _mm512_maskz_scalef_ps(mask, x, n);
  }
};

template <>
struct Simd<double> : VectorBase<double, 64> {
  using Mask = __mmask8;

  static ONCHIP_INLINE Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_pd(a, b, c); }
  static ONCHIP_INLINE Vec max(Vec a, Vec b) { return _mm512_max_pd(a, b); }
  static ONCHIP_INLINE Mask less(Vec a, Vec b) { return _mm512_cmp_pd_mask(a, b, _CMP_LT_OQ); }
  static ONCHIP_INLINE Mask less_equal(Vec a, Vec b) {
    return _mm512_cmp_pd_mask(a, b, _CMP_LE_OQ);
  }
  static ONCHIP_INLINE Mask equal(Vec a, Vec b) { return _mm512_cmp_pd_mask(a, b, _CMP_EQ_OQ); }
  static ONCHIP_INLINE Mask both(Mask a, Mask b) { return static_cast<Mask>(a & b); }
  static ONCHIP_INLINE Mask either(Mask a, Mask b) { return static_cast<Mask>(a | b); }
  static ONCHIP_INLINE Mask complement(Mask a) { return static_cast<Mask>(~a); }
  static ONCHIP_INLINE Mask all_true() { return 0xff; }
  static ONCHIP_INLINE Vec select(Mask mask, Vec a, Vec b) {
    return _mm512_mask_blend_pd(mask, b, a);
  }
  static ONCHIP_INLINE bool any(Mask mask) { return mask != 0; }
  static ONCHIP_INLINE Vec round(Vec x) { return _mm512_roundscale_pd(x, 0); }
  static ONCHIP_INLINE Vec scale_where(Mask mask, Vec x, Vec n) {
    return _mm512_maskz_scalef_pd(mask, x, n);
  }
};

#endif

template <typename T>
using Vec = Simd<T>::Vec;
template <typename T>
inline constexpr int kLanes = Simd<T>::kLanes;

template <typename T>
inline constexpr T kInfinity = static_cast<T>(__builtin_inf());

// ---- exp2 ---------------------------------------------------------------------------------------

template <typename T>
struct Exp2;

// 2^f - 1 over f, f in [-1/2, 1/2]: minimax of the relative error of 2^f, 2.0e-9.
template <>
struct Exp2<float> {
  static constexpr float kSmallest = -126.0f;
  static constexpr float kRound = 0x1.8p23f;  // adding it leaves an integer in the low bits
  static constexpr int kFractionBits = 23;
  static constexpr std::int32_t kOne = 0x3f800000;
  static constexpr float kCoefficients[] = {0.00015353355676363469312f, 0.0013398874253073119061f,
                                            0.0096184373781830529399f,  0.0555033247167530887f,
                                            0.24022647913509807886f,    0.69314720285476217952f};
};

// The same for fp64: 3.4e-18.
template <>
struct Exp2<double> {
  static constexpr double kSmallest = -1022.0;
  static constexpr double kRound = 0x1.8p52;
  static constexpr int kFractionBits = 52;
  static constexpr std::int64_t kOne = 0x3ff0000000000000;
  static constexpr double kCoefficients[] = {
      4.4347712982003767083e-10, 7.0737832485031332991e-9,   1.0178199571842137974e-7,
      1.3215435282308487999e-6,  0.000015252733493127489347, 0.0001540353045711209086,
      0.0013333558146774620517,  0.0096181291075941200896,   0.055504108664820083227,
      0.2402265069591013126,     0.69314718055994532581};
};

// 2^x for x <= 0, within 1 ulp in fp32 (portable: 1.25) and 1.5 ulp in fp64; below 2^-126 (fp64:
// 2^-1022) exactly 0, so also for -inf; exactly 1 at 0; NaN stays NaN.
template <typename T>
ONCHIP_INLINE Vec<T> exp2(Vec<T> x) {
  using S = Simd<T>;
  using E = Exp2<T>;
  constexpr int kTerms = static_cast<int>(sizeof(E::kCoefficients) / sizeof(T));
  const auto is_zero = S::less(x, S::broadcast(E::kSmallest));
#if ONCHIP_CPU_LEVEL >= 2
  const Vec<T> n = S::round(x);
#else
  // n comes from a number that is finite whatever x is, f from x itself: NaN gets through in f.
  const Vec<T> shifted = S::max(x, S::broadcast(E::kSmallest)) + S::broadcast(E::kRound);
  const Vec<T> n = shifted - S::broadcast(E::kRound);
#endif
  const Vec<T> f = x - n;
  Vec<T> p = S::broadcast(E::kCoefficients[0]);
  unroll<kTerms - 1>([&](auto i) { p = S::fma(p, f, S::broadcast(E::kCoefficients[i + 1])); });
  p = S::fma(p, f, S::broadcast(T{1}));
#if ONCHIP_CPU_LEVEL >= 2
  return S::scale_where(S::complement(is_zero), p, n);
#else
  const auto exponent = ((typename S::Signed)shifted << E::kFractionBits) + E::kOne;
  return S::select(is_zero, Vec<T>{}, p * (Vec<T>)exponent);
#endif
}

// ---- tanh ---------------------------------------------------------------------------------------

template <typename T>
struct Tanh;

// (tanh(x) / x - 1) / x^2 as a polynomial in x^2 for |x| <= 5/8: 1.7e-8 of tanh.
template <>
struct Tanh<float> {
  static constexpr float kCoefficients[] = {-0.0060967141659081975745f, 0.020997178999074750572f,
                                            -0.053850909578513580828f, 0.13332769736976327858f,
                                            -0.33333328944134254565f};
};

// The same for fp64: 1.5e-18.
template <>
struct Tanh<double> {
  static constexpr double kCoefficients[] = {
      6.48516348279311315e-6,     -0.000031201101425797400033, 0.000092571161295567682707,
      -0.00023759064960555619551, 0.0005896606577757043347,    -0.0014557754120478055104,
      0.0035921217511549622695,   -0.008863235103240877925,    0.021869488519008305756,
      -0.05396825396789699169,    0.13333333333333041602,      -0.33333333333333332938};
};

template <typename T>
inline constexpr T kLog2E = static_cast<T>(1.4426950408889634074);

// tanh(x) for every x, within 2.5 ulp; +-1 at infinity; NaN stays NaN.
template <typename T>
ONCHIP_INLINE Vec<T> tanh(Vec<T> x) {
  using S = Simd<T>;
  using C = Tanh<T>;
  constexpr int kTerms = static_cast<int>(sizeof(C::kCoefficients) / sizeof(T));
  const auto negative = S::less(x, Vec<T>{});
  const Vec<T> magnitude = S::select(negative, -x, x);

  const Vec<T> square = x * x;
  Vec<T> p = S::broadcast(C::kCoefficients[0]);
  unroll<kTerms - 1>([&](auto i) { p = S::fma(p, square, S::broadcast(C::kCoefficients[i + 1])); });
  const Vec<T> near_zero = S::fma(p * square, x, x);

  const Vec<T> one = S::broadcast(T{1});
  const Vec<T> e = exp2<T>(magnitude * S::broadcast(T{-2} * kLog2E<T>));
  const Vec<T> far = (one - e) / (one + e);
  const auto is_near = S::less(magnitude, S::broadcast(T{0.625}));
  return S::select(is_near, near_zero, S::select(negative, -far, far));
}

// ---- sigmoid ------------------------------------------------------------------------------------

// s = 1 / (1 + e^-x) and 1 - s, each to full relative precision: slopes are products of both.
template <typename T>
struct Sigmoid {
  Vec<T> value;
  Vec<T> rest;
};

template <typename T>
ONCHIP_INLINE Sigmoid<T> sigmoid_and_rest(Vec<T> x) {
  using S = Simd<T>;
  const Vec<T> one = S::broadcast(T{1});
  const auto negative = S::less(x, Vec<T>{});
  const Vec<T> e = exp2<T>(S::select(negative, x, -x) * S::broadcast(kLog2E<T>));
  const Vec<T> large = one / (one + e);
  const Vec<T> small = e * large;
  return {S::select(negative, small, large), S::select(negative, large, small)};
}

template <typename T>
ONCHIP_INLINE Vec<T> sigmoid(Vec<T> x) {
  return sigmoid_and_rest<T>(x).value;
}

// ---- 16-bit floats ------------------------------------------------------------------------------

constexpr int kFloatLanes = kLanes<float>;
using Halves [[gnu::vector_size(2 * kFloatLanes)]] = std::uint16_t;
using Words = Simd<float>::Unsigned;

ONCHIP_INLINE Words widened(Halves x) {
  // NOTE(codegen): gcc 12 makes five instructions of a __builtin_convertvector that could be one.
#if ONCHIP_CPU_LEVEL >= 2
  return (Words)_mm512_cvtepu16_epi32((__m256i)x);
#elif ONCHIP_CPU_LEVEL == 1
  return (Words)_mm256_cvtepu16_epi32((__m128i)x);
#else
  return __builtin_convertvector(x, Words);
#endif
}

ONCHIP_INLINE Vec<float> from_bf16(Halves x) { return (Vec<float>)(widened(x) << 16); }

// Round to nearest even; NaN stays a quiet NaN.
ONCHIP_INLINE Halves to_bf16(Vec<float> x) {
  const Words bits = (Words)x;
  const Words rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
  const Words quiet = bits | 0x400000u;
  const Words result = (bits & 0x7fffffffu) > 0x7f800000u ? quiet : rounded;
  return __builtin_convertvector(result >> 16, Halves);
}

#if ONCHIP_CPU_LEVEL >= 2

ONCHIP_INLINE Vec<float> from_f16(Halves x) { return _mm512_cvtph_ps((__m256i)x); }
ONCHIP_INLINE Halves to_f16(Vec<float> x) {
  return (Halves)_mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

#elif ONCHIP_CPU_LEVEL == 1

ONCHIP_INLINE Vec<float> from_f16(Halves x) { return _mm256_cvtph_ps((__m128i)x); }
ONCHIP_INLINE Halves to_f16(Vec<float> x) {
  return (Halves)_mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

#else

ONCHIP_INLINE Vec<float> from_f16(Halves x) {
  const Words wide = __builtin_convertvector(x, Words);
  const Words sign = (wide & 0x8000u) << 16;
  // Read with fp32's exponent bias, a half is 2^112 times too small, subnormal or not.
  const Words magnitude = (Words)((Vec<float>)((wide & 0x7fffu) << 13) * 0x1p112f);
  const Words special = magnitude | 0x7f800000u;
  return (Vec<float>)(((wide & 0x7c00u) == 0x7c00u ? special : magnitude) | sign);
}
ONCHIP_INLINE Halves to_f16(Vec<float> x) {
  Halves result{};
  for (int lane = 0; lane < kFloatLanes; ++lane) result[lane] = to_float16(x[lane]).bits;
  return result;
}

#endif

#if ONCHIP_CPU_LEVEL >= 3

// Vectors of pairs of bf16, one pair a lane, the first in the low half: sum + a_high b_high, then
// + a_low b_low, two fused steps in fp32, to nearest even. Subnormal numbers, read or made, become
// 0.
ONCHIP_INLINE Vec<float> dot_pairs(Vec<float> sum, Words a, Words b) {
  return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b);
}

// Rounds to nearest even; subnormal numbers become 0.
ONCHIP_INLINE Words to_pairs(Vec<float> low, Vec<float> high) {
  const auto apart = (__m512i)_mm512_cvtne2ps_pbh(high, low);
  const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24,
                                         8, 23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  return (Words)_mm512_permutexvar_epi16(order, apart);
}

#endif

// ---- elements in memory -------------------------------------------------------------------------

// The arithmetic of a stored type.
template <DType kStored>
struct Arithmetic {
  using T = float;
  using Element = std::uint16_t;
};
template <>
struct Arithmetic<DType::f32> {
  using T = float;
  using Element = float;
};
template <>
struct Arithmetic<DType::f64> {
  using T = double;
  using Element = double;
};

// One number of any float type. A finite one that T does not reach becomes T's largest: as the bias
// of a score it must not turn into an excluding -inf.
template <typename T>
T load_number(const std::byte* from, DType dtype) {
  const double x = load_as_double(from, dtype);
  if constexpr (sizeof(T) == sizeof(float)) {
    constexpr double kLargest = __FLT_MAX__;
    if (x > kLargest && x != kInfinity<double>) return static_cast<T>(kLargest);
    if (x < -kLargest && x != -kInfinity<double>) return static_cast<T>(-kLargest);
  }
  return static_cast<T>(x);
}

template <DType kStored>
ONCHIP_INLINE Vec<typename Arithmetic<kStored>::T> load_vector(const std::byte* from) {
  if constexpr (kStored == DType::bf16 || kStored == DType::f16) {
    Halves halves;
    std::memcpy(&halves, from, sizeof(halves));
    return kStored == DType::bf16 ? from_bf16(halves) : from_f16(halves);
  } else {
    Vec<typename Arithmetic<kStored>::T> x;
    std::memcpy(&x, from, sizeof(x));
    return x;
  }
}

template <DType kStored>
ONCHIP_INLINE void store_vector(std::byte* to, Vec<typename Arithmetic<kStored>::T> x) {
  if constexpr (kStored == DType::bf16 || kStored == DType::f16) {
    const Halves halves = kStored == DType::bf16 ? to_bf16(x) : to_f16(x);
    std::memcpy(to, &halves, sizeof(halves));
  } else {
    std::memcpy(to, &x, sizeof(x));
  }
}

// The first `count` lanes, at least one; the others are 0 and their memory is not touched.
template <DType kStored>
ONCHIP_INLINE Vec<typename Arithmetic<kStored>::T> load_vector(const std::byte* from, int count) {
  using Element = Arithmetic<kStored>::Element;
  constexpr int kCount = kLanes<typename Arithmetic<kStored>::T>;
  if (count == kCount) return load_vector<kStored>(from);
  Element buffer[kCount] = {};
  std::memcpy(buffer, from, static_cast<std::size_t>(count) * sizeof(Element));
  return load_vector<kStored>(reinterpret_cast<const std::byte*>(buffer));
}

template <DType kStored>
ONCHIP_INLINE void store_vector(std::byte* to, Vec<typename Arithmetic<kStored>::T> x, int count) {
  using Element = Arithmetic<kStored>::Element;
  constexpr int kCount = kLanes<typename Arithmetic<kStored>::T>;
  if (count == kCount) {
    store_vector<kStored>(to, x);
    return;
  }
  Element buffer[kCount];
  store_vector<kStored>(reinterpret_cast<std::byte*>(buffer), x);
  std::memcpy(to, buffer, static_cast<std::size_t>(count) * sizeof(Element));
}

// The same in an arithmetic other than the stored type's own, number by number.
template <DType kStored, typename T>
ONCHIP_INLINE Vec<T> load_numbers(const std::byte* from, int count) {
  if constexpr (sizeof(T) == sizeof(typename Arithmetic<kStored>::T)) {
    return load_vector<kStored>(from, count);
  } else {
    constexpr int kSize = sizeof(typename Arithmetic<kStored>::Element);
    T buffer[kLanes<T>] = {};
    for (int i = 0; i < count; ++i) {
      buffer[i] = static_cast<T>(load_as_double(from + i * kSize, kStored));
    }
    return Simd<T>::load(buffer);
  }
}

template <DType kStored, typename T>
ONCHIP_INLINE void store_numbers(std::byte* to, Vec<T> x, int count) {
  if constexpr (sizeof(T) == sizeof(typename Arithmetic<kStored>::T)) {
    store_vector<kStored>(to, x, count);
  } else {
    constexpr int kSize = sizeof(typename Arithmetic<kStored>::Element);
    for (int i = 0; i < count; ++i) store_from_double(to + i * kSize, kStored, x[i]);
  }
}

// ---- transposition ------------------------------------------------------------------------------

template <typename T, int... kI>
ONCHIP_INLINE Vec<T> interleave_low(Vec<T> a, Vec<T> b, IndexList<kI...>) {
  constexpr int kCount = kLanes<T>;
  return __builtin_shufflevector(a, b, (kI / 2 + kI % 2 * kCount)...);
}
template <typename T, int... kI>
ONCHIP_INLINE Vec<T> interleave_high(Vec<T> a, Vec<T> b, IndexList<kI...>) {
  constexpr int kCount = kLanes<T>;
  return __builtin_shufflevector(a, b, (kCount / 2 + kI / 2 + kI % 2 * kCount)...);
}

// The square of kLanes<T> rows, in place. Interleaving row i with row i + kLanes / 2 moves one bit
// of the row number into the column number; log2(kLanes) rounds move them all.
template <typename T>
ONCHIP_INLINE void transpose(Vec<T> (&rows)[kLanes<T>]) {
  constexpr int kCount = kLanes<T>;
  using Lanes = MakeIndexList<kCount>::Type;
  constexpr int kRounds = __builtin_ctz(kCount);
  unroll<kRounds>([&](auto) {
    Vec<T> mixed[kCount];
    unroll<kCount / 2>([&](auto i) {
      mixed[2 * i] = interleave_low<T>(rows[i], rows[i + kCount / 2], Lanes{});
      mixed[2 * i + 1] = interleave_high<T>(rows[i], rows[i + kCount / 2], Lanes{});
    });
    unroll<kCount>([&](auto i) { rows[i] = mixed[i]; });
  });
}

}  // namespace
}  // namespace onchip::cpu::ONCHIP_CPU_ISA
