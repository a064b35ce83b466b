#include "reference/attention_rows.hpp"

#include <cmath>

#include "core/thread_pool.hpp"

namespace onchip::reference {

namespace {

double load(const HeadScalarsView& scalars, std::int64_t sequence, std::int64_t head) {
  return load_as_double(scalars.at(sequence, head), scalars.dtype);
}

}  // namespace

double dot(const double* a, const double* b, std::int64_t dim) {
  double sums[4] = {0.0, 0.0, 0.0, 0.0};
  std::int64_t d = 0;
  for (; d + 4 <= dim; d += 4) {
    for (int lane = 0; lane < 4; ++lane) sums[lane] += a[d + lane] * b[d + lane];
  }
  for (; d < dim; ++d) sums[0] += a[d] * b[d];
  return (sums[0] + sums[1]) + (sums[2] + sums[3]);
}

void add_scaled(double factor, const double* x, std::int64_t dim, double* to) {
  for (std::int64_t d = 0; d < dim; ++d) to[d] += factor * x[d];
}

std::span<const Pair> Keys::visible_pairs(std::int64_t n, const SequenceRange& s, std::int64_t head,
                                          std::int64_t i, const double* q_row) const {
  const AttentionOptions& options = problem_.options;
  const std::int64_t diagonal = i + problem_.diagonal_offset(s);
  const double slope =
      options.alibi_slopes.wanted ? reference::load(options.alibi_slopes, n, head) : 0.0;
  std::int32_t q_segment = 0;
  if (options.q_segment_ids.wanted) {
    q_segment = options.q_segment_ids.at(s.batch, s.q_begin + i);
  }

  const KeyRange range = problem_.visible_keys(s, i);
  std::size_t count = 0;
  for (std::int64_t j = range.begin; j < range.end; ++j) {
    if (options.mask.wanted &&
        load_as_double(options.mask.at(n, head, i, j), options.mask.dtype) == 0.0) {
      continue;
    }
    if (options.q_segment_ids.wanted &&
        options.kv_segment_ids.at(s.kv_batch, s.kv_begin + j) != q_segment) {
      continue;
    }
    double bias = 0.0;
    if (options.bias.wanted) {
      bias = load_as_double(options.bias.at(n, head, i, j), options.bias.dtype);
      if (bias == kMinusInfinity) continue;
    }

    double logit = options.scale * dot(q_row, k(j), problem_.head_dim_qk);
    double softcap_slope = 1.0;
    if (options.softcap > 0.0) {
      const double t = std::tanh(logit / options.softcap);
      logit = options.softcap * t;
      softcap_slope = (1.0 - t) * (1.0 + t);
    }
    if (options.bias.wanted) logit += bias;
    if (options.alibi_slopes.wanted) {
      const std::int64_t distance = diagonal < j ? j - diagonal : diagonal - j;
      logit -= slope * static_cast<double>(distance);
    }
    pairs_[count++] = {j, logit, softcap_slope};
  }
  return {pairs_, count};
}

double kept_scale(const AttentionProblem& problem, std::int64_t n, std::int64_t head,
                  std::int64_t i, std::int64_t j) {
  const Dropout& dropout = problem.options.dropout;
  if (!dropout.active) return 1.0;
  return dropout.keeps(problem.dropout_stream(n, head), i, j) ? dropout.kept_scale() : 0.0;
}

double sink_logit(const AttentionProblem& problem, std::int64_t n, std::int64_t head) {
  return problem.options.sink.wanted ? load(problem.options.sink, n, head) : kMinusInfinity;
}

double forward_row(const AttentionProblem& problem, const Keys& keys, std::span<const Pair> pairs,
                   std::int64_t n, std::int64_t head, std::int64_t i, double* o_row) {
  std::fill_n(o_row, problem.head_dim_v, 0.0);
  const double sink = sink_logit(problem, n, head);
  if (pairs.empty()) return sink;

  double largest = sink;
  for (const Pair& pair : pairs) {
    // A NaN stays: no comparison with it is true.
    if (pair.logit > largest || std::isnan(pair.logit)) largest = pair.logit;
  }
  // Every visible key's own score is -inf: none has a weight.
  if (largest == kMinusInfinity) return kMinusInfinity;

  double denominator = std::exp(sink - largest);
  for (const Pair& pair : pairs) denominator += std::exp(pair.logit - largest);
  for (const Pair& pair : pairs) {
    const double p = std::exp(pair.logit - largest) / denominator;
    add_scaled(p * kept_scale(problem, n, head, i, pair.j), keys.v(pair.j), problem.head_dim_v,
               o_row);
  }
  return largest + std::log(denominator);
}

void store_scalar(const RowScalarsView& scalars, std::int64_t batch, std::int64_t row,
                  std::int64_t head, double value) {
  if (scalars.wanted) store_from_double(scalars.at(batch, row, head), scalars.dtype, value);
}

void clear_slack_rows(const AttentionProblem& problem, RowAxis axis, const RowsView& rows,
                      std::int64_t heads, std::int64_t dim) {
  if (!rows.wanted) return;
  for_each_slack(problem, axis, [&](std::int64_t batch, std::int64_t begin, std::int64_t end) {
    for (std::int64_t row = begin; row < end; ++row) {
      for (std::int64_t head = 0; head < heads; ++head) store_zeros(rows, batch, row, head, dim);
    }
  });
}

void clear_slack_lse(const AttentionProblem& problem) {
  if (!problem.lse.wanted) return;
  for_each_slack(problem, RowAxis::q,
                 [&](std::int64_t batch, std::int64_t begin, std::int64_t end) {
                   for (std::int64_t row = begin; row < end; ++row) {
                     for (std::int64_t head = 0; head < problem.num_heads_q; ++head) {
                       store_scalar(problem.lse, batch, row, head, kMinusInfinity);
                     }
                   }
                 });
}

const char* unsupported_options(const AttentionProblem& problem) {
  if (problem.options.tf32) return "precision tf32: all arithmetic is float64 here";
  return unsupported(problem);
}

}  // namespace onchip::reference
