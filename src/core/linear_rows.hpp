// From the rows of a linear operator to the rows of its engine and from what the engine read to the
// operator's output, with the transposed Jacobians of both: everything of docs/semantics.md section
// 3 that is not a recurrence, one (sequence, value head) at a time, in double precision.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/linear.hpp"

namespace onchip {

// One row of an engine, S_t = alpha_t S_{t-1} + write k x^T, or its gradient.
struct EngineRow {
  double* q = nullptr;      // [dk], not scaled
  double* k = nullptr;      // [dk]
  double* x = nullptr;      // [value_width]
  double* alpha = nullptr;  // [1]; 1 where nothing decays
  double write = 1.0;
};

// Gradients of the raw tensors' rows, before they are rounded or summed over heads.
struct RawGradients {
  double* q = nullptr;     // [dk]
  double* k = nullptr;     // [dk]
  double* v = nullptr;     // [dv]
  double* z = nullptr;     // [dv]
  double* skip = nullptr;  // [skip_width]
  double gate = 0.0;
  double beta = 0.0;
  double rate = 0.0;
  double dt_bias = 0.0;
};

class LinearRows {
 public:
  // Scratch for rows of up to `tokens` tokens a sequence.
  static std::int64_t doubles(const LinearProblem& problem, std::int64_t tokens);

  LinearRows(const LinearProblem& problem, double* scratch, std::int64_t tokens);

  // `stabiliser`: m_0.
  void begin(const TokenRange& tokens, std::int64_t head, double stabiliser);

  // Valid until the next load.
  const EngineRow& load(std::int64_t t);

  // m after the last token.
  double final_stabiliser() const { return stabilisers_[tokens_.length]; }

  // The operator's output [dv] of the loaded row from scale S_t^T q_t [value_width].
  void finish(const double* read, double* y) const;

  // Of the loaded row. `read` as in finish, `dy` the gradient of y: fills `dread` and what the raw
  // tensors get without passing through the engine. pull_row then adds what passes through it.
  void pull_read(const double* read, const double* dy, double* dread, RawGradients& raw) const;
  void pull_row(const EngineRow& gradient, RawGradients& raw) const;

 private:
  double time_step(double raw) const;
  double time_step_slope(double raw) const;
  double normaliser_floor() const;
  double skip(std::int64_t j) const;  // D
  void load_gate();
  void load_write();

  const LinearProblem& problem_;
  double* v_;            // [dv], raw
  double* z_;            // [dv]
  double* stabilisers_;  // [tokens + 1]
  EngineRow row_;
  TokenRange tokens_;
  std::int64_t head_ = 0;
  std::int64_t t_ = 0;
  double gate_ = 0.0;  // raw
  double beta_ = 0.0;
  double rate_ = 0.0;
  double dt_bias_ = 0.0;
};

// Columns of the state that an engine carries: dv, and one more for the normaliser.
inline std::int64_t value_width(const LinearProblem& problem) {
  return problem.head_dim_v + (problem.normalised ? 1 : 0);
}

}  // namespace onchip
