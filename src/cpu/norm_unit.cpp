// Rows of the norms. With r = 1 / sqrt(mean u^2 + eps) (the sum for L2), n = u r and g the gate's
// function: y = n weight g with u = x, or, gate first, y = n weight with u = x g. Backward:
// dn = dy weight (g), du = r (dn - n mean(n dn)). Compiled once per instruction set. Squares and
// products are summed in fp64: no x that is finite overflows or vanishes in them, and sums over
// many rows keep fp32's accuracy.
#include "cpu/norm_unit.hpp"

#include "cpu/any_dtype.hpp"
#include "cpu/simd.hpp"

namespace onchip::cpu::ONCHIP_CPU_ISA {
namespace {

// Numbers up to whole lines: vectors that start in front of the end may read beyond it.
std::int64_t padded(std::int64_t count) { return (count + 15) / 16 * 16 + 16; }

template <typename T>
struct NormScratch {
  T* weight;  // [dim]
  T* u;       // [group_size], as those below
  T* gate;    // g
  T* slope;   // g'
  T* d_norm;
  std::size_t bytes = 0;

  NormScratch(const NormShape& shape, std::byte* base) {
    weight = take(base, shape.dim);
    u = take(base, shape.group_size);
    gate = take(base, shape.group_size);
    slope = take(base, shape.group_size);
    d_norm = take(base, shape.group_size);
  }

 private:
  T* take(std::byte* base, std::int64_t count) {
    T* piece = base == nullptr ? nullptr : reinterpret_cast<T*>(base + bytes);
    bytes += static_cast<std::size_t>(padded(count)) * sizeof(T);
    return piece;
  }
};

// Vectors of fp64 from one of fp32.
template <int... kI>
ONCHIP_INLINE void widen(Vec<float> x, Vec<double> (&to)[2], IndexList<kI...>) {
  constexpr int kHalf = kLanes<double>;
  to[0] = __builtin_convertvector(__builtin_shufflevector(x, x, kI...), Vec<double>);
  to[1] = __builtin_convertvector(__builtin_shufflevector(x, x, (kHalf + kI)...), Vec<double>);
}

template <typename T>
struct Wide {
  static constexpr int kVectors = sizeof(T) == sizeof(float) ? 2 : 1;
  Vec<double> parts[kVectors];

  explicit ONCHIP_INLINE Wide(Vec<T> x) {
    if constexpr (kVectors == 2) {
      using Lanes = MakeIndexList<kLanes<double>>::Type;
      widen(x, parts, Lanes{});
    } else {
      parts[0] = x;
    }
  }
};

// sum a b, in fp64.
template <typename T>
class WideSum {
 public:
  ONCHIP_INLINE void add(Vec<T> a, Vec<T> b) {
    const Wide<T> left(a);
    const Wide<T> right(b);
    unroll<Wide<T>::kVectors>(
        [&](auto i) { sums_[i] = Simd<double>::fma(left.parts[i], right.parts[i], sums_[i]); });
  }

  double total() const {
    double sum = 0.0;
    for (const Vec<double>& part : sums_) {
      for (int lane = 0; lane < kLanes<double>; ++lane) sum += part[lane];
    }
    return sum;
  }

 private:
  Vec<double> sums_[Wide<T>::kVectors] = {};
};

// The first `count` lanes of x into numbers of fp64.
template <typename T>
ONCHIP_INLINE void add_wide(double* to, Vec<T> x, int count) {
  if (count < kLanes<T>) {
    for (int lane = 0; lane < count; ++lane) to[lane] += static_cast<double>(x[lane]);
    return;
  }
  const Wide<T> wide(x);
  unroll<Wide<T>::kVectors>([&](auto i) {
    double* at = to + i * kLanes<double>;
    Simd<double>::store(at, Simd<double>::load(at) + wide.parts[i]);
  });
}

template <typename T>
inline constexpr DType kOwnDType = sizeof(T) == sizeof(float) ? DType::f32 : DType::f64;

// Calls f(d, lanes in use) for every vector of a group.
template <typename T, typename F>
ONCHIP_INLINE void each_vector(std::int64_t count, F&& f) {
  std::int64_t d = 0;
  for (; d + kLanes<T> <= count; d += kLanes<T>) f(d, kLanes<T>);
  if (d < count) f(d, static_cast<int>(count - d));
}

template <DType kStored>
class Norm {
 public:
  using T = Arithmetic<kStored>::T;
  using S = Simd<T>;
  static constexpr std::int64_t kSize = sizeof(typename Arithmetic<kStored>::Element);

  Norm(const NormShape& shape, const NormRows& rows, std::byte* scratch)
      : shape_(shape), rows_(rows), scratch_(shape, scratch), gated_(rows.gate.data != nullptr) {}

  void outputs() const {
    for (std::int64_t row = 0; row < rows_.count; ++row) {
      for (std::int64_t begin = 0; begin < shape_.dim; begin += shape_.group_size) {
        const Vec<T> factor = S::broadcast(stage(row, begin, false));
        std::byte* y = rows_.y.data + row * rows_.y.row_stride + begin * kSize;
        each_vector<T>(shape_.group_size, [&](std::int64_t d, int count) {
          const Vec<T> norm = S::load(scratch_.u + d) * factor;
          store_numbers<kStored, T>(y + d * kSize, behind(d, weighed(begin + d, norm, count)),
                                    count);
        });
      }
    }
  }

  void gradients(double* sums) const {
    for (std::int64_t row = 0; row < rows_.count; ++row) {
      for (std::int64_t begin = 0; begin < shape_.dim; begin += shape_.group_size) {
        group_gradients(row, begin, sums);
      }
    }
  }

 private:
  ONCHIP_INLINE Vec<T> weighed(std::int64_t channel, Vec<T> x, int count) const {
    if (shape_.weight == nullptr) return x;
    const auto* at = reinterpret_cast<const std::byte*>(scratch_.weight + channel);
    return x * load_vector<kOwnDType<T>>(at, count);
  }

  // Times what the norm is multiplied with besides the weight.
  ONCHIP_INLINE Vec<T> behind(std::int64_t d, Vec<T> x) const {
    return gated_ && !shape_.gate_first ? x * S::load(scratch_.gate + d) : x;
  }

  void stage_gate(std::int64_t row, std::int64_t begin, bool slopes) const {
    const std::byte* from =
        rows_.gate.data + row * rows_.gate.row_stride + begin * dtype_size(shape_.gate_dtype);
    with_stored(shape_.gate_dtype, [&](auto stored) {
      constexpr DType kGate = decltype(stored)::kDType;
      constexpr std::int64_t kGateSize = sizeof(typename Arithmetic<kGate>::Element);
      const Vec<T> one = S::broadcast(T{1});
      const bool silu = shape_.activation == Activation::silu;
      each_vector<T>(shape_.group_size, [&](std::int64_t d, int count) {
        const Vec<T> x = load_numbers<kGate, T>(from + d * kGateSize, count);
        const Sigmoid<T> s = sigmoid_and_rest<T>(x);
        S::store(scratch_.gate + d, silu ? x * s.value : s.value);
        if (slopes) {
          S::store(scratch_.slope + d, s.value * (silu ? S::fma(x, s.rest, one) : s.rest));
        }
      });
    });
  }

  // u of a group and what the gate makes; returns r.
  T stage(std::int64_t row, std::int64_t begin, bool slopes) const {
    if (gated_) stage_gate(row, begin, slopes);
    const std::byte* x = rows_.x.data + row * rows_.x.row_stride + begin * kSize;
    WideSum<T> squares;
    each_vector<T>(shape_.group_size, [&](std::int64_t d, int count) {
      Vec<T> u = load_numbers<kStored, T>(x + d * kSize, count);
      if (shape_.gate_first) u = u * S::load(scratch_.gate + d);
      S::store(scratch_.u + d, u);
      squares.add(u, u);
    });
    double mean = squares.total();
    if (!shape_.l2) mean /= static_cast<double>(shape_.group_size);
    const double factor = 1.0 / __builtin_sqrt(mean + shape_.eps);
    // Where u is 0 and eps below fp32's range: 0 times infinity is no norm.
    if (sizeof(T) == sizeof(float) && factor > double{__FLT_MAX__}) {
      return static_cast<T>(__FLT_MAX__);
    }
    return static_cast<T>(factor);
  }

  void group_gradients(std::int64_t row, std::int64_t begin, double* sums) const {
    const T r = stage(row, begin, rows_.dgate.data != nullptr);
    const Vec<T> factor = S::broadcast(r);
    const std::byte* d_y = rows_.d_y.data + row * rows_.d_y.row_stride + begin * kSize;
    WideSum<T> products;
    each_vector<T>(shape_.group_size, [&](std::int64_t d, int count) {
      const Vec<T> gated = behind(d, load_numbers<kStored, T>(d_y + d * kSize, count));
      const Vec<T> d_norm = weighed(begin + d, gated, count);
      const Vec<T> u = S::load(scratch_.u + d);
      S::store(scratch_.d_norm + d, d_norm);
      products.add(u, d_norm);
      if (sums != nullptr) add_wide<T>(sums + begin + d, gated * (u * factor), count);
    });
    double mean = products.total() * static_cast<double>(r);
    if (!shape_.l2) mean /= static_cast<double>(shape_.group_size);
    const Vec<T> along = S::broadcast(static_cast<T>(mean));
    // Of one channel dn - n (n dn) is r^2 eps dn: rounded terms would leave nothing of that.
    const bool alone = shape_.group_size == 1;
    const double wide = r;
    const Vec<T> alone_factor = S::broadcast(static_cast<T>(wide * wide * shape_.eps * wide));
    const auto d_input = [&](std::int64_t d) {
      const Vec<T> d_norm = S::load(scratch_.d_norm + d);
      if (alone) return alone_factor * d_norm;
      return factor * (d_norm - S::load(scratch_.u + d) * factor * along);
    };
    const bool first = shape_.gate_first;
    if (rows_.dx.data != nullptr) {
      std::byte* dx = rows_.dx.data + row * rows_.dx.row_stride + begin * kSize;
      each_vector<T>(shape_.group_size, [&](std::int64_t d, int count) {
        Vec<T> d_u = d_input(d);
        if (first) d_u = d_u * S::load(scratch_.gate + d);
        store_numbers<kStored, T>(dx + d * kSize, d_u, count);
      });
    }
    if (rows_.dgate.data == nullptr) return;
    const std::byte* x = rows_.x.data + row * rows_.x.row_stride + begin * kSize;
    const std::int64_t gate_size = dtype_size(shape_.gate_dtype);
    std::byte* dgate = rows_.dgate.data + row * rows_.dgate.row_stride + begin * gate_size;
    each_vector<T>(shape_.group_size, [&](std::int64_t d, int count) {
      Vec<T> d_value{};
      if (first) {
        d_value = d_input(d) * load_numbers<kStored, T>(x + d * kSize, count);
      } else {
        const Vec<T> plain = load_numbers<kStored, T>(d_y + d * kSize, count);
        d_value = weighed(begin + d, plain * (S::load(scratch_.u + d) * factor), count);
      }
      store_any<T>(dgate + d * gate_size, shape_.gate_dtype, d_value * S::load(scratch_.slope + d),
                   count);
    });
  }

  const NormShape& shape_;
  const NormRows& rows_;
  NormScratch<T> scratch_;
  bool gated_;
};

}  // namespace

std::size_t norm_scratch_bytes(const NormShape& shape) {
  return shape.dtype == DType::f64 ? NormScratch<double>(shape, nullptr).bytes
                                   : NormScratch<float>(shape, nullptr).bytes;
}

std::size_t norm_sums_bytes(const NormShape& shape) {
  return static_cast<std::size_t>(padded(shape.dim)) * sizeof(double);
}

void norm_load_weight(const NormShape& shape, std::byte* scratch) {
  if (shape.weight == nullptr) return;
  with_stored(shape.dtype, [&](auto stored) {
    using T = Arithmetic<decltype(stored)::kDType>::T;
    const NormScratch<T> to(shape, scratch);
    const std::int64_t size = dtype_size(shape.weight_dtype);
    each_vector<T>(shape.dim, [&](std::int64_t d, int count) {
      Simd<T>::store(to.weight + d,
                     load_any<T>(shape.weight + d * size, shape.weight_dtype, count));
    });
  });
}

void norm_outputs(const NormShape& shape, const NormRows& rows, std::byte* scratch) {
  with_stored(shape.dtype,
              [&](auto stored) { Norm<decltype(stored)::kDType>(shape, rows, scratch).outputs(); });
}

void norm_gradients(const NormShape& shape, const NormRows& rows, std::byte* sums,
                    std::byte* scratch) {
  with_stored(shape.dtype, [&](auto stored) {
    Norm<decltype(stored)::kDType>(shape, rows, scratch).gradients(reinterpret_cast<double*>(sums));
  });
}

void norm_store_sums(const NormShape& shape, const std::byte* sums, std::int64_t count,
                     std::int64_t begin, std::int64_t end, std::byte* dweight) {
  const auto* from = reinterpret_cast<const double*>(sums);
  const std::int64_t size = dtype_size(shape.weight_dtype);
  for (std::int64_t d = begin; d < end; d += kLanes<double>) {
    Vec<double> sum{};
    for (std::int64_t i = 0; i < count; ++i) {
      sum = sum + Simd<double>::load(from + i * padded(shape.dim) + d);
    }
    for (int lane = 0; lane < kLanes<double> && d + lane < end; ++lane) {
      store_from_double(dweight + (d + lane) * size, shape.weight_dtype, sum[lane]);
    }
  }
}

}  // namespace onchip::cpu::ONCHIP_CPU_ISA
