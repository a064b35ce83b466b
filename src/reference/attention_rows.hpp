// What the reference's operators of exact attention share: rows in double, the logits of one query
// row over its keys, and its softmax.
#pragma once

#include <cstdint>
#include <limits>
#include <span>

#include "core/attention.hpp"
#include "core/rows.hpp"
#include "reference/workspace.hpp"

namespace onchip::reference {

constexpr double kMinusInfinity = -std::numeric_limits<double>::infinity();

// Four running sums, because a single one would wait for every addition before it.
double dot(const double* a, const double* b, std::int64_t dim);
void add_scaled(double factor, const double* x, std::int64_t dim, double* to);

// A key that one query row sees.
struct Pair {
  std::int64_t j;
  double logit;          // scale q.k, capped, + bias - alibi
  double softcap_slope;  // d capped / d (scale q.k)
};
static_assert(sizeof(Pair) == 3 * sizeof(double) && alignof(Pair) == alignof(double));
constexpr std::int64_t kPairDoubles = 3;

// The keys and values of one (sequence, kv head) in double, and the logits over them.
class Keys {
 public:
  // `count`: the most keys that load will see.
  static void reserve(const AttentionProblem& problem, std::int64_t count, Layout& layout) {
    layout.add(count, problem.head_dim_qk);
    layout.add(count, problem.head_dim_v);
    layout.add(count, kPairDoubles);
  }

  Keys(const AttentionProblem& problem, std::int64_t count, Scratch& scratch)
      : problem_(problem),
        k_(scratch.take(count, problem.head_dim_qk)),
        v_(scratch.take(count, problem.head_dim_v)),
        pairs_(reinterpret_cast<Pair*>(scratch.take(count, kPairDoubles))) {}

  // k_row(j) and v_row(j) are the addresses of key j's rows.
  template <typename KRow, typename VRow>
  void load(std::int64_t count, KRow&& k_row, VRow&& v_row) {
    for (std::int64_t j = 0; j < count; ++j) {
      load_row(k_row(j), problem_.dtype, problem_.head_dim_qk, k_ + j * problem_.head_dim_qk);
      load_row(v_row(j), problem_.dtype, problem_.head_dim_v, v_ + j * problem_.head_dim_v);
    }
  }

  const double* k(std::int64_t j) const { return k_ + j * problem_.head_dim_qk; }
  const double* v(std::int64_t j) const { return v_ + j * problem_.head_dim_v; }

  // The pairs of query row i, whose values are q_row. A pair that any rule excludes is not among
  // them: nothing that its key holds is ever computed with.
  std::span<const Pair> visible_pairs(std::int64_t n, const SequenceRange& s, std::int64_t head,
                                      std::int64_t i, const double* q_row) const;

 private:
  const AttentionProblem& problem_;
  double* k_;
  double* v_;
  Pair* pairs_;
};

double kept_scale(const AttentionProblem& problem, std::int64_t n, std::int64_t head,
                  std::int64_t i, std::int64_t j);

// A sink of -inf is no sink.
double sink_logit(const AttentionProblem& problem, std::int64_t n, std::int64_t head);

// One query row: fills o_row, returns lse.
double forward_row(const AttentionProblem& problem, const Keys& keys, std::span<const Pair> pairs,
                   std::int64_t n, std::int64_t head, std::int64_t i, double* o_row);

void store_scalar(const RowScalarsView& scalars, std::int64_t batch, std::int64_t row,
                  std::int64_t head, double value);
void clear_slack_rows(const AttentionProblem& problem, RowAxis axis, const RowsView& rows,
                      std::int64_t heads, std::int64_t dim);
void clear_slack_lse(const AttentionProblem& problem);

const char* unsupported_options(const AttentionProblem& problem);

}  // namespace onchip::reference
