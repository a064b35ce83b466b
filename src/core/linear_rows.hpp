// From the rows of a linear operator to the rows of its engine and from what the engine read to the
// operator's output, with the transposed Jacobians of both: everything of docs/semantics.md section
// 3 that is not a recurrence, one (sequence, value head) at a time, in double precision.
//
// A token has rows_per_token rows (gated_delta_product; 1 elsewhere): its decay is the first one's,
// its query the last one's.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "core/linear.hpp"

namespace onchip {

// One row of an engine, or its gradient. What an engine does not have is left alone.
struct EngineRow {
  double* q = nullptr;      // [dk], not scaled; of rows that read. rwkv4: weight of S_{t-1}
  double* k = nullptr;      // [dk]
  double* x = nullptr;      // [value_width]: what is written at k
  double* e = nullptr;      // [dk]: what is erased (delta_rule), read again (dplr); [slots]
  double* b = nullptr;      // [dk]: where dplr writes what e read
  double* u = nullptr;      // [dk]: bonus of the row's own write in its read; rwkv4: its weight
  double* alpha = nullptr;  // [decay_width]; 1 where nothing decays
  double* write = nullptr;  // [1]: factor of scalar_decay's k x^T
  bool reads = true;
};

// Gradients of the raw tensors' rows, before they are rounded or summed over heads.
struct RawGradients {
  double* q = nullptr;        // [dk]
  double* k = nullptr;        // [dk]
  double* v = nullptr;        // [dv]
  double* a = nullptr;        // [dk] or [slots]
  double* b = nullptr;        // [max(dk, dv)]
  double* u = nullptr;        // [dk]
  double* z = nullptr;        // [dv]
  double* skip = nullptr;     // [skip_width]
  double* gate = nullptr;     // [gate_width]
  double* dt_bias = nullptr;  // [gate_width]
  double* rate = nullptr;     // [rate_width]
  double beta = 0.0;
};

class LinearRows {
 public:
  // Scratch for up to `tokens` tokens a sequence.
  static std::int64_t doubles(const LinearProblem& problem, std::int64_t tokens);

  LinearRows(const LinearProblem& problem, double* scratch, std::int64_t tokens);

  // `stabiliser`: m_0.
  void begin(const TokenRange& tokens, std::int64_t head, double stabiliser);

  // Row `index` of the sequence. Valid until the next load.
  const EngineRow& load(std::int64_t index);

  // m after the last token.
  double final_stabiliser() const { return stabilisers_[tokens_.length]; }

  // The operator's output [dv] of the loaded row, which reads, from scale S_t^T q_t [value_width].
  void finish(const double* read, double* y) const;

  // Of the loaded row. pull_read, where it reads: `read` as in finish, `dy` the gradient of y;
  // fills `dread` and what the raw tensors get without passing through the engine. pull_row adds
  // what passes through it. Both after clear.
  void clear(RawGradients& raw) const;
  void pull_read(const double* read, const double* dy, double* dread, RawGradients& raw) const;
  void pull_row(const EngineRow& gradient, RawGradients& raw) const;

 private:
  double time_step(double raw) const;
  double time_step_slope(double raw) const;
  double normaliser_floor() const;
  double skip(std::int64_t j) const;  // D
  double dt_bias(std::int64_t d) const;
  double log_decay(std::int64_t d) const;
  void load_decay();
  void load_write();
  void load_erase();
  void load_read();
  void pull_gate(const EngineRow& gradient, RawGradients& raw) const;
  void pull_erase(const EngineRow& gradient, RawGradients& raw) const;

  const LinearProblem& problem_;
  double* v_;            // [dv], raw
  double* z_;            // [dv]
  double* a_;            // [dk], raw
  double* b_;            // [max(dk, dv)], raw
  double* gate_;         // [gate_width], raw
  double* rate_;         // [rate_width]: A or A_log, raw
  double* stabilisers_;  // [tokens + 1]
  EngineRow row_;
  TokenRange tokens_;
  std::int64_t head_ = 0;
  std::int64_t t_ = 0;
  bool decays_ = true;   // the loaded row is its token's first
  double beta_ = 0.0;    // raw
  double erase_ = 1.0;   // beta as the recurrence has it
  double bonus_ = 0.0;   // rwkv4's u, raw
  double q_norm_ = 1.0;  // 1 / |q|, where q and k are normalised
  double k_norm_ = 1.0;
};

inline std::int64_t erase_width(const LinearProblem& problem) {
  return std::max(problem.head_dim_k, problem.num_slots);
}

// Columns of the state that an engine carries: dv, and one more for the normaliser.
inline std::int64_t value_width(const LinearProblem& problem) {
  return problem.head_dim_v + (problem.normalised ? 1 : 0);
}

}  // namespace onchip
