// delta_rule forward, one chunk of one head (linear_delta_chunk.hpp), and row by row for short
// chunks and for what is not finite. Compiled once per instruction set.
#include "cpu/linear_delta_chunk.hpp"

namespace onchip::cpu::ONCHIP_CPU_ISA {
namespace {

template <typename T>
struct DeltaForwardScratch {
  DeltaForwardScratch(const DeltaShape& shape, std::byte* base)
      : pieces(base), tiles(shape, pieces), o(pieces.take<T>(kDeltaRows * tiles.value)) {}

  LinearPieces pieces;
  DeltaTiles<T> tiles;
  T* o;  // [rows][dv]
};

template <typename T>
class DeltaForward {
 public:
  DeltaForward(const DeltaChunk& chunk, T* state, std::byte* scratch)
      : chunk_(chunk),
        gates_(*chunk.gates),
        state_tile_(chunk.shape.linear),
        s_(chunk.shape, scratch),
        t_(s_.tiles),
        algebra_(chunk, t_),
        state_(state) {}

  bool run() {
    const bool finite = algebra_.load();
    if (!finite || chunk_.row_by_row || gates_.rows <= kDeltaRowByRow) {
      walk();
    } else {
      run_chunk();
    }
    algebra_.store_reads(s_.o, t_.value, t_.dv, chunk_.o);
    return finite;
  }

 private:
  void run_chunk() {
    algebra_.prepare();
    algebra_.solve(state_);
    if (chunk_.o.data != nullptr) read_chunk();
    decayed_update<T>(state_tile_.rows, t_.value_columns,
                      {t_.scaled_k, t_.key, t_.u, t_.value, 0, gates_.rows}, t_.whole,
                      chunk_.empty ? nullptr : state_, state_, t_.value);
  }

  void read_chunk() {
    products<T>(algebra_.padded(), t_.value_columns,
                {t_.qe_t, t_.kToken, state_, t_.value, 0, chunk_.empty ? 0 : t_.dk}, nullptr,
                {t_.pairs_t, t_.kToken, t_.u, t_.value, 0, gates_.rows}, Steps::up_to_row, s_.o,
                t_.value);
  }

  // A block of columns at a time, so that it stays in the cache from one row to the next.
  void walk() {
    if (chunk_.empty) fill_zeros(state_, state_tile_.size());
    constexpr std::int64_t kBlock = 4 * kLanes<T>;
    std::int64_t n = 0;
    for (; n + kBlock <= t_.value_columns; n += kBlock) walk_columns<4>(n);
    for (; n < t_.value_columns; n += kLanes<T>) walk_columns<1>(n);
  }

  template <int kVectors>
  void walk_columns(std::int64_t n) {
    using S = Simd<T>;
    const bool exclusive = chunk_.shape.exclusive;
    const T* e_rows = t_.qe + algebra_.padded() * t_.key;
    for (std::int64_t i = 0; i < gates_.rows; ++i) {
      const T one = scalar_decay(i);
      const T* channels = chunk_.shape.channels ? t_.alpha + i * t_.key : nullptr;
      const auto decay = [&](std::int64_t d) {
        if (i == 0 && chunk_.empty) return T{0};
        return channels == nullptr ? one : channels[d];
      };
      const T* e = e_rows + i * t_.key;
      const T* k = t_.k + i * t_.key;
      const T* q = t_.qe + i * t_.key;
      Vec<T> y[kVectors];
      unroll<kVectors>([&](auto v) { y[v] = S::load(t_.u + i * t_.value + n + v * kLanes<T>); });
      for (std::int64_t d = 0; d < t_.dk; ++d) {
        const T alpha = exclusive ? T{1} : decay(d);
        if (alpha == T{0}) continue;
        const Vec<T> by = S::broadcast(-(e[d] * alpha));
        const T* row = state_ + d * t_.value + n;
        unroll<kVectors>([&](auto v) { y[v] = S::fma(by, S::load(row + v * kLanes<T>), y[v]); });
      }
      Vec<T> o[kVectors] = {};
      for (std::int64_t d = 0; d < t_.dk; ++d) {
        const T alpha = decay(d);
        const Vec<T> by = S::broadcast(alpha);
        const Vec<T> key = S::broadcast(k[d]);
        const Vec<T> query = S::broadcast(q[d]);
        T* row = state_ + d * t_.value + n;
        unroll<kVectors>([&](auto v) {
          const Vec<T> kept = alpha == T{0} ? Vec<T>{} : by * S::load(row + v * kLanes<T>);
          const Vec<T> now = S::fma(key, y[v], kept);
          S::store(row + v * kLanes<T>, now);
          o[v] = S::fma(query, now, o[v]);
        });
      }
      const Vec<T> scale = S::broadcast(static_cast<T>(chunk_.shape.scale));
      unroll<kVectors>(
          [&](auto v) { S::store(s_.o + i * t_.value + n + v * kLanes<T>, scale * o[v]); });
    }
  }

  T scalar_decay(std::int64_t i) const {
    if (i == 0) return gates_.reset ? T{0} : power_of<T>(gates_.first);
    return power_of<T>(gates_.cumulative[i] - gates_.cumulative[i - 1]);
  }

  const DeltaChunk& chunk_;
  const DeltaGates& gates_;
  StateTile<T> state_tile_;
  DeltaForwardScratch<T> s_;
  DeltaTiles<T>& t_;
  DeltaAlgebra<T> algebra_;
  T* state_;
};

}  // namespace

std::size_t delta_state_bytes(const DeltaShape& shape) {
  std::size_t bytes = 0;
  with_delta_arithmetic(shape, [&](auto number) {
    using T = decltype(number);
    bytes = static_cast<std::size_t>(StateTile<T>(shape.linear).size()) * sizeof(T);
  });
  return bytes;
}

StateContent delta_load_state(const DeltaShape& shape, const UnitState& matrix, std::byte* state) {
  StateContent content;
  with_delta_arithmetic(shape, [&](auto number) {
    using T = decltype(number);
    const StateTile<T> tile(shape.linear);
    T* to = reinterpret_cast<T*>(state);
    content.empty = !load_state_tile<T>(tile, matrix, {}, to);
    if (content.empty) return;
    Vec<T> zeros{};
    for (std::int64_t i = 0; i < tile.dk; ++i) {
      for (std::int64_t d = 0; d < tile.columns; d += kLanes<T>) {
        zeros = zeros + Simd<T>::load(to + i * tile.stride + d) * Vec<T>{};
      }
    }
    content.finite = sum_of_lanes<T>(zeros) == T{0};
  });
  return content;
}

void delta_store_state(const DeltaShape& shape, const std::byte* state, const UnitState& matrix) {
  with_delta_arithmetic(shape, [&](auto number) {
    using T = decltype(number);
    store_state_tile<T>(StateTile<T>(shape.linear), reinterpret_cast<const T*>(state), matrix, {});
  });
}

std::size_t delta_forward_scratch_bytes(const DeltaShape& shape) {
  std::size_t bytes = 0;
  with_delta_arithmetic(shape, [&](auto number) {
    bytes = DeltaForwardScratch<decltype(number)>(shape, nullptr).pieces.bytes();
  });
  return bytes;
}

bool delta_forward(const DeltaChunk& chunk, std::byte* state, std::byte* scratch) {
  bool finite = true;
  with_delta_arithmetic(chunk.shape, [&](auto number) {
    using T = decltype(number);
    finite = DeltaForward<T>(chunk, reinterpret_cast<T*>(state), scratch).run();
  });
  return finite;
}

}  // namespace onchip::cpu::ONCHIP_CPU_ISA
