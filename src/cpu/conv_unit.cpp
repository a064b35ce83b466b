// A block of channels of short causal convolution, a vector of channels at a time:
//   p_t = bias + sum_j w_j x_(t - W + 1 + j),  y_t = f(p_t);
// with dp = f'(p) dy: dx_s = sum_j w_j dp_(s + W - 1 - j), dw_j = sum_t dp_t x_(t - W + 1 + j).
// Compiled once per instruction set. Rows are staged in scratch tiles [row][kConvChannels] in the
// arithmetic's type, the W - 1 inputs before a tile among them, so that neither the state, the
// sequence's ends nor the stored type shows in the loops. Every p_t is one sum in one order:
// forward, backward and step, however the tokens are cut, agree in every bit.
#include "cpu/conv_unit.hpp"

#include "cpu/any_dtype.hpp"
#include "cpu/simd.hpp"

namespace onchip::cpu::ONCHIP_CPU_ISA {
namespace {

constexpr std::int64_t kRow = kConvChannels;  // numbers between the rows of a tile

// Rows of a tile: wide convolutions have longer ones, or most of a tile were its neighbours' rows.
std::int64_t tile_rows(std::int64_t width) { return width < 32 ? 32 : width; }

template <typename T>
struct ConvScratch {
  T* weight;   // [W]
  T* bias;     // [1]
  T* inputs;   // [rows + 2 (W - 1)]
  T* slopes;   // [rows + W - 1]: dp
  T* d_final;  // [W]
  std::size_t bytes = 0;

  ConvScratch(std::int64_t width, std::byte* base) {
    const std::int64_t rows = tile_rows(width);
    weight = take(base, width);
    bias = take(base, 1);
    inputs = take(base, rows + 2 * (width - 1));
    slopes = take(base, rows + width - 1);
    d_final = take(base, width);
  }

 private:
  T* take(std::byte* base, std::int64_t rows) {
    T* piece = base == nullptr ? nullptr : reinterpret_cast<T*>(base + bytes);
    bytes += static_cast<std::size_t>(rows * kRow) * sizeof(T);
    return piece;
  }
};

ONCHIP_INLINE int lanes_left(std::int64_t channels, std::int64_t c, int lanes) {
  return static_cast<int>(channels - c < lanes ? channels - c : std::int64_t{lanes});
}

template <typename T>
void clear_rows(T* to, std::int64_t rows) {
  if (rows > 0) __builtin_memset(to, 0, static_cast<std::size_t>(rows * kRow) * sizeof(T));
}

// to[row] = from's row, zeros behind the channels up to a whole vector.
template <DType kStored, typename T>
void stage_rows(const std::byte* from, std::int64_t stride, std::int64_t rows,
                std::int64_t channels, T* to) {
  constexpr std::int64_t kSize = sizeof(typename Arithmetic<kStored>::Element);
  for (std::int64_t row = 0; row < rows; ++row) {
    for (std::int64_t c = 0; c < channels; c += kLanes<T>) {
      const int count = lanes_left(channels, c, kLanes<T>);
      Simd<T>::store(to + row * kRow + c,
                     load_numbers<kStored, T>(from + row * stride + c * kSize, count));
    }
  }
}

template <typename T, int... kI>
ONCHIP_INLINE Vec<T> take_even(Vec<T> a, Vec<T> b, IndexList<kI...>) {
  return __builtin_shufflevector(a, b, (2 * kI)...);
}
template <typename T, int... kI>
ONCHIP_INLINE Vec<T> take_odd(Vec<T> a, Vec<T> b, IndexList<kI...>) {
  return __builtin_shufflevector(a, b, (2 * kI + 1)...);
}

// Four numbers a channel, channel after channel, into a vector for each of the four; two rounds of
// taking the numbers' places apart by their last bit.
template <typename T>
ONCHIP_INLINE void split_taps(Vec<T> (&x)[4]) {
  using Lanes = MakeIndexList<kLanes<T>>::Type;
  unroll<2>([&](auto) {
    const Vec<T> halves[4] = {take_even<T>(x[0], x[1], Lanes{}), take_even<T>(x[2], x[3], Lanes{}),
                              take_odd<T>(x[0], x[1], Lanes{}), take_odd<T>(x[2], x[3], Lanes{})};
    unroll<4>([&](auto i) { x[i] = halves[i]; });
  });
}

// The way back.
template <typename T>
ONCHIP_INLINE void join_taps(Vec<T> (&x)[4]) {
  using Lanes = MakeIndexList<kLanes<T>>::Type;
  unroll<2>([&](auto) {
    const Vec<T> mixed[4] = {
        interleave_low<T>(x[0], x[2], Lanes{}), interleave_high<T>(x[0], x[2], Lanes{}),
        interleave_low<T>(x[1], x[3], Lanes{}), interleave_high<T>(x[1], x[3], Lanes{})};
    unroll<4>([&](auto i) { x[i] = mixed[i]; });
  });
}

// Taps slots .. slots + count of every channel into rows of a tile; absent ones are 0.
template <typename T>
void load_taps(const UnitTaps& from, std::int64_t width, std::int64_t slot, std::int64_t count,
               std::int64_t channels, T* to) {
  clear_rows(to, count);
  if (from.data == nullptr) return;
  with_stored(from.dtype, [&](auto stored) {
    constexpr DType kStored = decltype(stored)::kDType;
    constexpr std::int64_t kSize = sizeof(typename Arithmetic<kStored>::Element);
    std::int64_t c = 0;
    if (width == 4 && from.channel_stride == 4 * kSize) {
      for (; c + kLanes<T> <= channels; c += kLanes<T>) {
        Vec<T> x[4];
        unroll<4>([&](auto i) {
          x[i] = load_numbers<kStored, T>(from.data + (4 * c + i * kLanes<T>)*kSize, kLanes<T>);
        });
        split_taps<T>(x);
        for (std::int64_t i = 0; i < count; ++i) Simd<T>::store(to + i * kRow + c, x[slot + i]);
      }
    }
    for (; c < channels; ++c) {
      const std::byte* taps = from.data + c * from.channel_stride + slot * kSize;
      for (std::int64_t i = 0; i < count; ++i) {
        to[i * kRow + c] = static_cast<T>(load_as_double(taps + i * kSize, kStored));
      }
    }
  });
}

// All `width` taps of every channel from rows of a tile.
template <typename T>
void store_taps(const T* from, std::int64_t width, std::int64_t channels, const UnitTaps& to) {
  with_stored(to.dtype, [&](auto stored) {
    constexpr DType kStored = decltype(stored)::kDType;
    constexpr std::int64_t kSize = sizeof(typename Arithmetic<kStored>::Element);
    std::int64_t c = 0;
    if (width == 4 && to.channel_stride == 4 * kSize) {
      for (; c + kLanes<T> <= channels; c += kLanes<T>) {
        Vec<T> x[4];
        unroll<4>([&](auto i) { x[i] = Simd<T>::load(from + i * kRow + c); });
        join_taps<T>(x);
        unroll<4>([&](auto i) {
          store_numbers<kStored, T>(to.data + (4 * c + i * kLanes<T>)*kSize, x[i], kLanes<T>);
        });
      }
    }
    for (; c < channels; ++c) {
      std::byte* taps = to.data + c * to.channel_stride;
      for (std::int64_t i = 0; i < width; ++i) {
        store_from_double(taps + i * kSize, kStored, static_cast<double>(from[i * kRow + c]));
      }
    }
  });
}

// The weights of one vector of channels: in registers where the width is known.
template <typename T, int kWidth>
struct Weights {
  Vec<T> w[kWidth];

  Weights(const T* weight, std::int64_t) {
    unroll<kWidth>([&](auto j) { w[j] = Simd<T>::load(weight + j * kRow); });
  }

  // sum + sum_j w_j rows[j]
  ONCHIP_INLINE Vec<T> forward(const T* rows, Vec<T> sum) const {
    unroll<kWidth>([&](auto j) { sum = Simd<T>::fma(w[j], Simd<T>::load(rows + j * kRow), sum); });
    return sum;
  }
  // sum + sum_j w_j rows[W - 1 - j]
  ONCHIP_INLINE Vec<T> backward(const T* rows, Vec<T> sum) const {
    unroll<kWidth>([&](auto j) {
      sum = Simd<T>::fma(w[j], Simd<T>::load(rows + (kWidth - 1 - j) * kRow), sum);
    });
    return sum;
  }
};

template <typename T>
struct Weights<T, 0> {
  const T* weight;
  std::int64_t width;

  Weights(const T* from, std::int64_t count) : weight(from), width(count) {}

  ONCHIP_INLINE Vec<T> forward(const T* rows, Vec<T> sum) const {
    for (std::int64_t j = 0; j < width; ++j) {
      sum = Simd<T>::fma(Simd<T>::load(weight + j * kRow), Simd<T>::load(rows + j * kRow), sum);
    }
    return sum;
  }
  ONCHIP_INLINE Vec<T> backward(const T* rows, Vec<T> sum) const {
    for (std::int64_t j = 0; j < width; ++j) {
      sum = Simd<T>::fma(Simd<T>::load(weight + j * kRow),
                         Simd<T>::load(rows + (width - 1 - j) * kRow), sum);
    }
    return sum;
  }
};

// sums_j += sum over rows of dp x_j, and the last of dp alone.
template <typename T, int kWidth>
ONCHIP_INLINE void add_sums(const T* dp, const T* inputs, std::int64_t rows, std::int64_t width,
                            T* sums) {
  using S = Simd<T>;
  if constexpr (kWidth > 0) {
    Vec<T> total[kWidth + 1] = {};
    for (std::int64_t r = 0; r < rows; ++r) {
      const Vec<T> slope = S::load(dp + r * kRow);
      unroll<kWidth>(
          [&](auto j) { total[j] = S::fma(slope, S::load(inputs + (r + j) * kRow), total[j]); });
      total[kWidth] = total[kWidth] + slope;
    }
    unroll<kWidth + 1>(
        [&](auto j) { S::store(sums + j * kRow, S::load(sums + j * kRow) + total[j]); });
  } else {
    for (std::int64_t j = 0; j <= width; ++j) {
      Vec<T> total{};
      for (std::int64_t r = 0; r < rows; ++r) {
        const Vec<T> slope = S::load(dp + r * kRow);
        total = j == width ? total + slope : S::fma(slope, S::load(inputs + (r + j) * kRow), total);
      }
      S::store(sums + j * kRow, S::load(sums + j * kRow) + total);
    }
  }
}

template <DType kStored, int kWidth>
class Convolution {
 public:
  using T = Arithmetic<kStored>::T;
  static constexpr std::int64_t kSize = sizeof(typename Arithmetic<kStored>::Element);

  Convolution(const ConvBlock& block, std::byte* scratch)
      : block_(block), width_(block.width), scratch_(block.width, scratch) {}

  void outputs(const ConvSequence& sequence, std::int64_t begin, std::int64_t end,
               const UnitRow& y) const {
    const std::int64_t step = tile_rows(width_);
    for (std::int64_t t = begin; t < end; t += step) {
      const std::int64_t rows = end - t < step ? end - t : step;
      stage(sequence, t - (width_ - 1), t + rows);
      store_outputs(rows, y.data + t * y.row_stride, y.row_stride);
    }
  }

  void gradients(const ConvSequence& sequence, const ConvGradients& gradients, std::int64_t begin,
                 std::int64_t end) const {
    const std::int64_t step = tile_rows(width_);
    for (std::int64_t t = begin; t < end; t += step) {
      const std::int64_t rows = end - t < step ? end - t : step;
      if (gradients.dx.data == nullptr) {
        stage_slopes(sequence, gradients, t, t + rows, 0);
      } else {
        // dx of the tile's last rows needs dp of the W - 1 rows behind it.
        const std::int64_t known = shorter(t + rows + width_ - 1, sequence.length);
        stage_slopes(sequence, gradients, t, known, t + rows + width_ - 1 - known);
        store_dx(sequence, gradients, t, rows);
      }
      if (gradients.sums == nullptr) continue;
      T* sums = reinterpret_cast<T*>(gradients.sums);
      for (std::int64_t c = 0; c < block_.channels; c += kLanes<T>) {
        add_sums<T, kWidth>(scratch_.slopes + c, scratch_.inputs + c, rows, width_, sums + c);
      }
    }
  }

  // Slot s is the input at s - W, which token t weighs with j = s - 1 - t; slot 0 no token weighs.
  void state_gradient(const ConvSequence& sequence, const ConvGradients& gradients,
                      const UnitTaps& to) const {
    using S = Simd<T>;
    const std::int64_t known = shorter(width_ - 1, sequence.length);
    stage_slopes(sequence, gradients, 0, known, 0);
    load_taps<T>(gradients.d_final_state, width_, 0, width_, block_.channels, scratch_.d_final);
    T* result = scratch_.inputs;  // the slopes are made: [W] of it is free
    for (std::int64_t c = 0; c < block_.channels; c += kLanes<T>) {
      for (std::int64_t s = 0; s < width_; ++s) {
        Vec<T> sum{};
        if (s >= sequence.length)
          sum = S::load(scratch_.d_final + (s - sequence.length) * kRow + c);
        const std::int64_t first = s - 1 - (shorter(s, known) - 1);
        for (std::int64_t j = first; j < s; ++j) {
          sum = S::fma(S::load(scratch_.weight + j * kRow + c),
                       S::load(scratch_.slopes + (s - 1 - j) * kRow + c), sum);
        }
        S::store(result + s * kRow + c, sum);
      }
    }
    store_taps<T>(result, width_, block_.channels, to);
  }

  void step(const UnitTaps& state, const std::byte* x, std::byte* y) const {
    load_taps<T>(state, width_, 1, width_ - 1, block_.channels, scratch_.inputs);
    stage_rows<kStored, T>(x, 0, 1, block_.channels, scratch_.inputs + (width_ - 1) * kRow);
    store_outputs(1, y, 0);
    store_taps<T>(scratch_.inputs, width_, block_.channels, state);
  }

 private:
  static std::int64_t shorter(std::int64_t a, std::int64_t b) { return a < b ? a : b; }

  // Inputs at times begin .. end, those before the first token from the state.
  void stage(const ConvSequence& sequence, std::int64_t begin, std::int64_t end) const {
    T* to = scratch_.inputs;
    if (begin < 0) {
      const std::int64_t before = shorter(end, 0) - begin;
      load_taps<T>(sequence.state, width_, width_ + begin, before, block_.channels, to);
      to += before * kRow;
      begin += before;
    }
    if (begin >= end) return;
    stage_rows<kStored, T>(sequence.x.data + begin * sequence.x.row_stride, sequence.x.row_stride,
                           end - begin, block_.channels, to);
  }

  // p of `row` of the tile.
  ONCHIP_INLINE Vec<T> sum(const Weights<T, kWidth>& weights, Vec<T> bias, std::int64_t row,
                           std::int64_t c) const {
    return weights.forward(scratch_.inputs + row * kRow + c, bias);
  }

  void store_outputs(std::int64_t rows, std::byte* y, std::int64_t stride) const {
    for (std::int64_t c = 0; c < block_.channels; c += kLanes<T>) {
      const int count = lanes_left(block_.channels, c, kLanes<T>);
      const Weights<T, kWidth> weights(scratch_.weight + c, width_);
      const Vec<T> bias = Simd<T>::load(scratch_.bias + c);
      for (std::int64_t r = 0; r < rows; ++r) {
        Vec<T> p = sum(weights, bias, r, c);
        if (block_.silu) p = p * sigmoid<T>(p);
        store_numbers<kStored, T>(y + r * stride + c * kSize, p, count);
      }
    }
  }

  // dp of tokens begin .. end, then `zeros` rows of 0; their inputs stay staged.
  void stage_slopes(const ConvSequence& sequence, const ConvGradients& gradients,
                    std::int64_t begin, std::int64_t end, std::int64_t zeros) const {
    using S = Simd<T>;
    T* slopes = scratch_.slopes;
    const std::int64_t rows = end - begin;
    stage(sequence, begin - (width_ - 1), end);
    if (rows > 0) {
      stage_rows<kStored, T>(gradients.d_y.data + begin * gradients.d_y.row_stride,
                             gradients.d_y.row_stride, rows, block_.channels, slopes);
    }
    clear_rows(slopes + rows * kRow, zeros);
    if (!block_.silu) return;
    const Vec<T> one = S::broadcast(T{1});
    for (std::int64_t c = 0; c < block_.channels; c += kLanes<T>) {
      const Weights<T, kWidth> weights(scratch_.weight + c, width_);
      const Vec<T> bias = S::load(scratch_.bias + c);
      for (std::int64_t r = 0; r < rows; ++r) {
        T* at = slopes + r * kRow + c;
        const Vec<T> p = sum(weights, bias, r, c);
        const Sigmoid<T> s = sigmoid_and_rest<T>(p);
        S::store(at, S::load(at) * (s.value * S::fma(p, s.rest, one)));
      }
    }
  }

  void store_dx(const ConvSequence& sequence, const ConvGradients& gradients, std::int64_t begin,
                std::int64_t rows) const {
    const UnitRow& dx = gradients.dx;
    // The last W inputs are the final state's.
    const std::int64_t kept = sequence.length - width_;
    const bool keeps = gradients.d_final_state.data != nullptr && begin + rows > kept;
    if (keeps) {
      load_taps<T>(gradients.d_final_state, width_, 0, width_, block_.channels, scratch_.d_final);
    }
    for (std::int64_t c = 0; c < block_.channels; c += kLanes<T>) {
      const int count = lanes_left(block_.channels, c, kLanes<T>);
      const Weights<T, kWidth> weights(scratch_.weight + c, width_);
      for (std::int64_t r = 0; r < rows; ++r) {
        const std::int64_t slot = begin + r - kept;
        Vec<T> d_x{};
        if (keeps && slot >= 0) d_x = Simd<T>::load(scratch_.d_final + slot * kRow + c);
        d_x = weights.backward(scratch_.slopes + r * kRow + c, d_x);
        store_numbers<kStored, T>(dx.data + (begin + r) * dx.row_stride + c * kSize, d_x, count);
      }
    }
  }

  const ConvBlock& block_;
  std::int64_t width_;
  ConvScratch<T> scratch_;
};

// f(Convolution) of the block's dtype and width: nearly all are 4 wide.
template <typename F>
ONCHIP_INLINE void with_convolution(const ConvBlock& block, std::byte* scratch, F&& f) {
  with_stored(block.dtype, [&](auto stored) {
    constexpr DType kStored = decltype(stored)::kDType;
    if (block.width == 4) {
      f(Convolution<kStored, 4>(block, scratch));
    } else {
      f(Convolution<kStored, 0>(block, scratch));
    }
  });
}

}  // namespace

std::size_t conv_scratch_bytes(DType dtype, std::int64_t width) {
  return dtype == DType::f64 ? ConvScratch<double>(width, nullptr).bytes
                             : ConvScratch<float>(width, nullptr).bytes;
}

std::size_t conv_sums_bytes(DType dtype, std::int64_t width) {
  return static_cast<std::size_t>((width + 1) * kRow) *
         (dtype == DType::f64 ? sizeof(double) : sizeof(float));
}

void conv_load_block(const ConvBlock& block, std::byte* scratch) {
  with_stored(block.dtype, [&](auto stored) {
    using T = Arithmetic<decltype(stored)::kDType>::T;
    const ConvScratch<T> to(block.width, scratch);
    load_taps<T>(block.weight, block.width, 0, block.width, block.channels, to.weight);
    clear_rows(to.bias, 1);
    if (block.bias == nullptr) return;
    const std::int64_t size = dtype_size(block.bias_dtype);
    for (std::int64_t c = 0; c < block.channels; c += kLanes<T>) {
      const int count = lanes_left(block.channels, c, kLanes<T>);
      Simd<T>::store(to.bias + c, load_any<T>(block.bias + c * size, block.bias_dtype, count));
    }
  });
}

void conv_outputs(const ConvBlock& block, const ConvSequence& sequence, std::int64_t begin,
                  std::int64_t end, const UnitRow& y, std::byte* scratch) {
  with_convolution(block, scratch, [&](const auto& one) { one.outputs(sequence, begin, end, y); });
}

void conv_gradients(const ConvBlock& block, const ConvSequence& sequence,
                    const ConvGradients& gradients, std::int64_t begin, std::int64_t end,
                    std::byte* scratch) {
  with_convolution(block, scratch,
                   [&](const auto& one) { one.gradients(sequence, gradients, begin, end); });
}

void conv_state_gradient(const ConvBlock& block, const ConvSequence& sequence,
                         const ConvGradients& gradients, const UnitTaps& to, std::byte* scratch) {
  with_convolution(block, scratch,
                   [&](const auto& one) { one.state_gradient(sequence, gradients, to); });
}

void conv_step(const ConvBlock& block, const UnitTaps& state, const std::byte* x, std::byte* y,
               std::byte* scratch) {
  with_convolution(block, scratch, [&](const auto& one) { one.step(state, x, y); });
}

void conv_store_sums(const ConvBlock& block, const std::byte* sums, std::size_t stride,
                     std::int64_t count, const UnitTaps& dweight, std::byte* dbias) {
  with_stored(block.dtype, [&](auto stored) {
    using T = Arithmetic<decltype(stored)::kDType>::T;
    using S = Simd<T>;
    T total[kConvChannels];
    for (std::int64_t j = 0; j <= block.width; ++j) {
      for (std::int64_t c = 0; c < kConvChannels; c += kLanes<T>) {
        Vec<T> sum{};
        for (std::int64_t i = 0; i < count; ++i) {
          const std::byte* from = sums + static_cast<std::size_t>(i) * stride;
          sum = sum + S::load(reinterpret_cast<const T*>(from) + j * kRow + c);
        }
        S::store(total + c, sum);
      }
      const bool last = j == block.width;
      std::byte* to = last ? dbias : dweight.data;
      if (to == nullptr) continue;
      const DType dtype = last ? block.bias_dtype : dweight.dtype;
      const std::int64_t size = dtype_size(dtype);
      for (std::int64_t c = 0; c < block.channels; ++c) {
        std::byte* at = last ? to + c * size : to + c * dweight.channel_stride + j * size;
        store_from_double(at, dtype, static_cast<double>(total[c]));
      }
    }
  });
}

}  // namespace onchip::cpu::ONCHIP_CPU_ISA
