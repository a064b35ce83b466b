#include "support/plain_attention.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <limits>

#include "core/philox.hpp"

namespace onchip::test {

namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

std::size_t index(std::int64_t i) { return static_cast<std::size_t>(i); }

// A [rows, columns] matrix of T.
template <typename T>
class Matrix {
 public:
  Matrix(std::int64_t rows, std::int64_t columns, T value = T{0})
      : columns_(columns), at_(index(rows * columns), value) {}
  T& operator()(std::int64_t i, std::int64_t j) { return at_[index(i * columns_ + j)]; }
  const T& operator()(std::int64_t i, std::int64_t j) const { return at_[index(i * columns_ + j)]; }

 private:
  std::int64_t columns_;
  std::vector<T> at_;
};

// Element (n, head, i, j) of a bias or mask, whose axes of extent 1 are shared by all.
std::size_t score_index(const Values& scores, std::int64_t n, std::int64_t head, std::int64_t i,
                        std::int64_t j) {
  std::int64_t at = 0;
  const std::array<std::int64_t, 4> position = {n, head, i, j};
  for (std::size_t axis = 0; axis < 4; ++axis) {
    at = at * scores.extent(axis) + (scores.extent(axis) == 1 ? 0 : position[axis]);
  }
  return index(at);
}

double head_scalar(const Values& values, std::int64_t n, std::int64_t head,
                   std::int64_t num_heads) {
  return values.at[index(values.shape->size() == 2 ? n * num_heads + head : head)];
}

// The mask of section 2, written out from the page.
double dropout_factor(const AttentionCase& c, std::int64_t n, std::int64_t head, std::int64_t i,
                      std::int64_t j) {
  if (c.dropout_p == 0.0) return 1.0;
  const double threshold = std::floor(65536.0 * c.dropout_p + 0.5);
  const auto word = [](std::int64_t x) { return static_cast<std::uint32_t>(x); };
  const PhiloxBlock bits =
      philox4x32_10({static_cast<std::uint32_t>(c.seed), static_cast<std::uint32_t>(c.seed >> 32)},
                    {static_cast<std::uint32_t>(c.offset), word(n * c.num_heads_q + head),
                     word(8 * (i / 16) + i % 8), word(4 * (j / 16) + (j % 8) / 2)});
  std::array<std::uint32_t, 8> fields{};
  for (std::size_t w = 0; w < 4; ++w) {
    fields[2 * w] = bits[w] & 0xffffu;
    fields[2 * w + 1] = bits[w] >> 16;
  }
  const std::uint32_t field = fields[index(4 * ((i / 8) % 2) + 2 * ((j / 8) % 2) + j % 2)];
  return static_cast<double>(field) < threshold ? 0.0 : 65536.0 / (65536.0 - threshold);
}

bool is_visible(const AttentionCase& c, std::int64_t n, std::int64_t head, std::int64_t i,
                std::int64_t j) {
  const std::int64_t off = c.top_left ? 0 : c.length_kv(n) - c.length_q(n);
  if (c.causal && j > i + off) return false;
  if (c.window_left >= 0 && i + off - j > c.window_left) return false;
  if (c.window_right >= 0 && j - (i + off) > c.window_right) return false;
  if (c.mask.present() && c.mask.at[score_index(c.mask, n, head, i, j)] == 0.0) return false;
  if (c.bias.present() && c.bias.at[score_index(c.bias, n, head, i, j)] == -kInfinity) return false;
  if (c.q_segment_ids.present() &&
      c.q_segment_ids.at[index(c.q_row(n, i, 0, 1) / c.num_heads_q)] !=
          c.kv_segment_ids.at[index(c.kv_row(n, j, 0, 1) / c.num_heads_kv)]) {
    return false;
  }
  return true;
}

template <typename T>
class Plain {
 public:
  Plain(const AttentionCase& attention, DType stored) : c_(attention), stored_(stored) {
    const std::int64_t rows_q = (c_.packed ? 1 : c_.num_seqs) * c_.slot_q * c_.num_heads_q;
    const std::int64_t rows_kv = (c_.packed ? 1 : c_.num_seqs) * c_.slot_kv * c_.num_heads_kv;
    forward_.o.assign(index(rows_q * c_.head_dim_v), 0.0);
    forward_.lse.assign(index(rows_q), -kInfinity);
    gradients_.dq.assign(index(rows_q * c_.head_dim_qk), 0.0);
    gradients_.dk.assign(index(rows_kv * c_.head_dim_qk), 0.0);
    gradients_.dv.assign(index(rows_kv * c_.head_dim_v), 0.0);
    if (c_.bias.present()) gradients_.dbias.assign(c_.bias.at.size(), 0.0);
    if (c_.sink.present()) gradients_.dsink.assign(c_.sink.at.size(), 0.0);
  }

  PlainForward forward() {
    for (std::int64_t n = 0; n < c_.num_seqs; ++n) {
      for (std::int64_t head = 0; head < c_.num_heads_q; ++head) Head(*this, n, head).forward();
    }
    return forward_;
  }

  PlainGradients backward(Saved saved) {
    for (std::int64_t n = 0; n < c_.num_seqs; ++n) {
      for (std::int64_t head = 0; head < c_.num_heads_q; ++head) {
        Head h(*this, n, head);
        h.forward();
        h.backward(saved);
      }
    }
    for (std::vector<double>* gradient :
         {&gradients_.dq, &gradients_.dk, &gradients_.dv, &gradients_.dbias, &gradients_.dsink}) {
      for (double& x : *gradient) x = static_cast<double>(round(static_cast<T>(x)));
    }
    return gradients_;
  }

  T round(T x) const {
    std::byte bytes[8];
    store_from_double(bytes, stored_, static_cast<double>(x));
    return static_cast<T>(load_as_double(bytes, stored_));
  }

 private:
  struct Head {
    Head(Plain& plain, std::int64_t sequence, std::int64_t h)
        : a(plain),
          c(plain.c_),
          n(sequence),
          head(h),
          kv_head(h / (c.num_heads_q / c.num_heads_kv)),
          len_q(c.length_q(n)),
          len_kv(c.length_kv(n)),
          visible(len_q, len_kv, 0),
          s(len_q, len_kv),
          softcap_slope(len_q, len_kv, T{1}),
          p(len_q, len_kv),
          p_sink(index(len_q), T{0}) {}

    T q(std::int64_t i, std::int64_t d) const {
      return row(c.q, c.q_row(n, i, head, c.head_dim_qk), d);
    }
    T k(std::int64_t j, std::int64_t d) const {
      return row(c.k, c.kv_row(n, j, kv_head, c.head_dim_qk), d);
    }
    T v(std::int64_t j, std::int64_t d) const {
      return row(c.v, c.kv_row(n, j, kv_head, c.head_dim_v), d);
    }
    T d_o(std::int64_t i, std::int64_t d) const {
      return row(c.d_o, c.q_row(n, i, head, c.head_dim_v), d);
    }
    static T row(const Values& values, std::int64_t start, std::int64_t d) {
      return static_cast<T>(values.at[index(start + d)]);
    }
    T sink() const {
      return c.sink.present() ? static_cast<T>(c.sink.at[index(head)]) : static_cast<T>(-kInfinity);
    }
    T keep(std::int64_t i, std::int64_t j) const {
      return static_cast<T>(dropout_factor(c, n, head, i, j));
    }

    void logits() {
      const std::int64_t off = c.top_left ? 0 : len_kv - len_q;
      for (std::int64_t i = 0; i < len_q; ++i) {
        for (std::int64_t j = 0; j < len_kv; ++j) {
          visible(i, j) = is_visible(c, n, head, i, j) ? 1 : 0;
          if (visible(i, j) == 0) continue;
          T score{0};
          for (std::int64_t d = 0; d < c.head_dim_qk; ++d) score += q(i, d) * k(j, d);
          score = a.round(static_cast<T>(c.scale) * score);
          if (c.softcap > 0.0) {
            const T cap = static_cast<T>(c.softcap);
            const T t = std::tanh(score / cap);
            score = cap * t;
            softcap_slope(i, j) = T{1} - t * t;
          }
          if (c.bias.present()) {
            score += static_cast<T>(c.bias.at[score_index(c.bias, n, head, i, j)]);
          }
          if (c.alibi_slopes.present()) {
            score -= static_cast<T>(head_scalar(c.alibi_slopes, n, head, c.num_heads_q)) *
                     static_cast<T>(std::abs(i + off - j));
          }
          s(i, j) = score;
        }
      }
    }

    void forward() {
      logits();
      for (std::int64_t i = 0; i < len_q; ++i) {
        T largest = sink();
        for (std::int64_t j = 0; j < len_kv; ++j) {
          if (visible(i, j) && !(s(i, j) <= largest)) largest = s(i, j);
        }
        const T shift = largest == static_cast<T>(-kInfinity) ? T{0} : largest;
        T total = std::exp(sink() - shift);
        for (std::int64_t j = 0; j < len_kv; ++j) {
          if (visible(i, j)) total += std::exp(s(i, j) - shift);
        }
        a.forward_.lse[index(c.lse_at(n, i, head))] = static_cast<double>(std::log(total) + shift);
        if (total == T{0}) continue;
        p_sink[index(i)] = std::exp(sink() - shift) / total;
        for (std::int64_t j = 0; j < len_kv; ++j) {
          if (visible(i, j)) p(i, j) = a.round(std::exp(s(i, j) - shift) / total);
        }
      }
      for (std::int64_t i = 0; i < len_q; ++i) {
        for (std::int64_t d = 0; d < c.head_dim_v; ++d) {
          T sum{0};
          for (std::int64_t j = 0; j < len_kv; ++j) {
            if (visible(i, j)) sum += p(i, j) * keep(i, j) * v(j, d);
          }
          a.forward_.o[index(c.q_row(n, i, head, c.head_dim_v) + d)] =
              static_cast<double>(a.round(sum));
        }
      }
    }

    // P = exp(S - lse) with the case's lse.
    void take_given_lse() {
      for (std::int64_t i = 0; i < len_q; ++i) {
        const T lse = static_cast<T>(c.lse.at[index(c.lse_at(n, i, head))]);
        const bool empty = lse == static_cast<T>(-kInfinity);
        p_sink[index(i)] =
            empty || sink() == static_cast<T>(-kInfinity) ? T{0} : std::exp(sink() - lse);
        for (std::int64_t j = 0; j < len_kv; ++j) {
          if (empty) visible(i, j) = 0;
          p(i, j) = visible(i, j) ? a.round(std::exp(s(i, j) - lse)) : T{0};
        }
      }
    }

    void backward(Saved saved) {
      if (saved == Saved::given) take_given_lse();
      const std::vector<double>& o = saved == Saved::given ? c.o.at : a.forward_.o;
      PlainGradients& g = a.gradients_;
      const T scale = static_cast<T>(c.scale);
      for (std::int64_t i = 0; i < len_q; ++i) {
        bool seen = false;
        for (std::int64_t j = 0; j < len_kv; ++j) seen = seen || visible(i, j) != 0;
        // A row without visible key has o = 0 and no such term, whatever dO holds; a given o may be
        // the result over more keys than these.
        T row_term{0};
        for (std::int64_t d = 0; d < c.head_dim_v; ++d) {
          const T saved_o = static_cast<T>(o[index(c.q_row(n, i, head, c.head_dim_v) + d)]);
          if (seen || saved_o != T{0}) row_term -= d_o(i, d) * saved_o;
        }
        if (c.d_lse.present()) row_term += static_cast<T>(c.d_lse.at[index(c.lse_at(n, i, head))]);
        if (c.sink.present()) add(g.dsink[index(head)], p_sink[index(i)] * row_term);
        for (std::int64_t j = 0; j < len_kv; ++j) {
          if (!visible(i, j)) continue;
          T dp{0};
          for (std::int64_t d = 0; d < c.head_dim_v; ++d) dp += d_o(i, d) * v(j, d);
          dp = a.round(dp) * keep(i, j);
          T ds = p(i, j) * (dp + row_term);
          if (c.bias.present()) add(g.dbias[score_index(c.bias, n, head, i, j)], a.round(ds));
          ds = a.round(ds * softcap_slope(i, j));
          for (std::int64_t d = 0; d < c.head_dim_qk; ++d) {
            add(g.dq[index(c.q_row(n, i, head, c.head_dim_qk) + d)], scale * ds * k(j, d));
            add(g.dk[index(c.kv_row(n, j, kv_head, c.head_dim_qk) + d)], scale * ds * q(i, d));
          }
          for (std::int64_t d = 0; d < c.head_dim_v; ++d) {
            add(g.dv[index(c.kv_row(n, j, kv_head, c.head_dim_v) + d)],
                p(i, j) * keep(i, j) * d_o(i, d));
          }
        }
      }
    }

    static void add(double& sum, T term) { sum = static_cast<double>(static_cast<T>(sum) + term); }

    Plain& a;
    const AttentionCase& c;
    std::int64_t n, head, kv_head, len_q, len_kv;
    Matrix<char> visible;
    Matrix<T> s, softcap_slope, p;
    std::vector<T> p_sink;
  };

  const AttentionCase& c_;
  DType stored_;
  PlainForward forward_;
  PlainGradients gradients_;
};

template <typename T>
PlainForward merge(const Values& o1, const Values& lse1, const Values& o2, const Values& lse2,
                   DType stored) {
  const std::size_t rank = o1.shape->size();
  const std::int64_t dim = o1.extent(rank - 1);
  const std::int64_t heads = o1.extent(rank - 2);
  const std::int64_t rows = o1.extent(rank - 3);
  PlainForward result;
  result.o.assign(o1.at.size(), 0.0);
  result.lse.assign(lse1.at.size(), -kInfinity);
  for (std::size_t row = 0; row < lse1.at.size(); ++row) {
    // [batch, row, head] to [batch, head, row].
    const auto at = static_cast<std::int64_t>(row);
    const std::int64_t head = at % heads;
    const std::int64_t i = at / heads % rows;
    const std::int64_t batch = at / heads / rows;
    const std::size_t scalar = index((batch * heads + head) * rows + i);
    const T l1 = static_cast<T>(lse1.at[scalar]);
    const T l2 = static_cast<T>(lse2.at[scalar]);
    const T minus_infinity = static_cast<T>(-kInfinity);
    if (l1 == minus_infinity && l2 == minus_infinity) continue;
    const T larger = std::max(l1, l2);
    const T lse = larger + std::log(std::exp(l1 - larger) + std::exp(l2 - larger));
    result.lse[scalar] = static_cast<double>(lse);
    for (std::int64_t d = 0; d < dim; ++d) {
      const std::size_t element = row * index(dim) + index(d);
      T sum{0};
      if (l1 != minus_infinity) sum += std::exp(l1 - lse) * static_cast<T>(o1.at[element]);
      if (l2 != minus_infinity) sum += std::exp(l2 - lse) * static_cast<T>(o2.at[element]);
      std::byte bytes[8];
      store_from_double(bytes, stored, static_cast<double>(sum));
      result.o[element] = load_as_double(bytes, stored);
    }
  }
  return result;
}

}  // namespace

PlainForward plain_forward(const AttentionCase& attention, const Arithmetic& arithmetic) {
  return arithmetic.fp64_products ? Plain<double>(attention, arithmetic.stored).forward()
                                  : Plain<float>(attention, arithmetic.stored).forward();
}

PlainGradients plain_backward(const AttentionCase& attention, const Arithmetic& arithmetic,
                              Saved saved) {
  return arithmetic.fp64_products ? Plain<double>(attention, arithmetic.stored).backward(saved)
                                  : Plain<float>(attention, arithmetic.stored).backward(saved);
}

PlainForward plain_merge(const Values& o1, const Values& lse1, const Values& o2, const Values& lse2,
                         const Arithmetic& arithmetic) {
  return arithmetic.fp64_products ? merge<double>(o1, lse1, o2, lse2, arithmetic.stored)
                                  : merge<float>(o1, lse1, o2, lse2, arithmetic.stored);
}

}  // namespace onchip::test
