// delta_rule forward, one chunk of one head (linear_delta_chunk.hpp), whole or in parts. Compiled
// once per instruction set.
#include "cpu/linear_delta_advance.hpp"

namespace onchip::cpu::ONCHIP_CPU_ISA {
namespace {

template <typename T>
struct DeltaForwardScratch {
  DeltaForwardScratch(const DeltaShape& shape, std::byte* base)
      : pieces(base), tiles(shape, pieces), o(pieces.take<T>(kDeltaRows * tiles.value)) {}

  Pieces pieces;
  DeltaTiles<T> tiles;
  T* o;  // [rows][dv]
};

template <typename T>
class DeltaForward {
 public:
  DeltaForward(const DeltaChunk& chunk, std::byte* scratch)
      : chunk_(chunk),
        s_(chunk.shape, scratch),
        t_(s_.tiles),
        algebra_(chunk, t_),
        advance_(chunk, t_, s_.o) {}

  // Pairs are of no use where rows are walked.
  bool prepare() {
    const bool finite = algebra_.load();
    if (finite && !advance_.walks()) algebra_.prepare();
    return finite;
  }

  void advance(const DeltaColumns& columns, const T* before, T* after) {
    advance_.run(t_.padded(columns), before, after);
  }

  void read(const T* before) {
    if (!advance_.walks()) read_chunk(before);
    algebra_.store_reads(s_.o, t_.value, t_.dv, chunk_.o);
  }

  // All at once: what rows read comes before the state is overwritten.
  void run(T* state) {
    const DeltaColumns all = t_.all();
    if (advance_.walks()) {
      advance_.run(all, state, state);
    } else {
      algebra_.solve(all, state);
      if (chunk_.o.data != nullptr) read_chunk(state);
      advance_.update_state(all, state, state);
    }
    algebra_.store_reads(s_.o, t_.value, t_.dv, chunk_.o);
  }

 private:
  void read_chunk(const T* before) {
    products<T>(algebra_.padded(), t_.value_columns,
                {t_.qe_t, t_.kToken, before, t_.value, 0, chunk_.empty ? 0 : t_.dk}, nullptr,
                {t_.pairs_t, t_.kToken, t_.u, t_.value, 0, algebra_.rows()}, Steps::up_to_row, s_.o,
                t_.value);
  }

  const DeltaChunk& chunk_;
  DeltaForwardScratch<T> s_;
  DeltaTiles<T>& t_;
  DeltaAlgebra<T> algebra_;
  DeltaAdvance<T> advance_;
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
    finite = DeltaForward<T>(chunk, scratch).prepare();
    DeltaChunk now = chunk;
    now.row_by_row = chunk.row_by_row || !finite;
    DeltaForward<T>(now, scratch).run(reinterpret_cast<T*>(state));
  });
  return finite;
}

bool delta_prepare(const DeltaChunk& chunk, std::byte* scratch) {
  bool finite = true;
  with_delta_arithmetic(chunk.shape, [&](auto number) {
    finite = DeltaForward<decltype(number)>(chunk, scratch).prepare();
  });
  return finite;
}

void delta_advance(const DeltaChunk& chunk, const DeltaColumns& columns, const std::byte* before,
                   std::byte* after, std::byte* scratch) {
  with_delta_arithmetic(chunk.shape, [&](auto number) {
    using T = decltype(number);
    DeltaForward<T>(chunk, scratch)
        .advance(columns, reinterpret_cast<const T*>(before), reinterpret_cast<T*>(after));
  });
}

void delta_read(const DeltaChunk& chunk, const std::byte* before, std::byte* scratch) {
  with_delta_arithmetic(chunk.shape, [&](auto number) {
    using T = decltype(number);
    DeltaForward<T>(chunk, scratch).read(reinterpret_cast<const T*>(before));
  });
}

}  // namespace onchip::cpu::ONCHIP_CPU_ISA
