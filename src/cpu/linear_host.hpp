// The host side that the engines of CPU linear attention share: gates of a chunk's rows in double
// precision and their gradients, where rows and states lie, what a plan refuses, slack rows.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>

#include "core/backend.hpp"
#include "core/ceil_div.hpp"
#include "core/linear.hpp"
#include "core/settings.hpp"
#include "cpu/cpu_features.hpp"
#include "cpu/linear_unit.hpp"

namespace onchip::cpu {

inline std::size_t linear_rounded_up(std::size_t bytes) {
  return (bytes + kLinearAlignment - 1) / kLinearAlignment * kLinearAlignment;
}

inline std::int64_t chunks_of(std::int64_t tokens) { return ceil_div(tokens, kChunkRows); }

// "" or why the CPU cannot take the call; settings that are at fault give `by_setting`.
struct LinearRefusal {
  std::string reason;
  bool by_setting = false;
};
LinearRefusal refuse_linear(const LinearProblem& problem, const Settings& settings);

LinearShape linear_shape(const LinearProblem& problem);

// Rows begin .. of one head.
UnitRow unit_row(const RowsView& rows, std::int64_t batch, std::int64_t row, std::int64_t head);
UnitState unit_state(const StateView& part, std::int64_t slot, std::int64_t head);

double load_stabiliser(const StateViews& parts, std::int64_t slot, std::int64_t head);
void store_stabiliser(const StateViews& parts, std::int64_t slot, std::int64_t head, double value);

// scalar_decay's gates of one value head of a sequence, chunk by chunk in order: only mlstm's
// stabiliser links one chunk to the next.
class LinearGates {
 public:
  LinearGates(const LinearProblem& problem, const TokenRange& tokens, std::int64_t head);

  // The chunk that begins at token `first`; `stabiliser` is m before it, the result m after it.
  double load(std::int64_t first, double stabiliser, ChunkGates& gates) const;

  // Gradients of the raw gates' row from those of the row's log decay and of its weight.
  struct Raw {
    double gate = 0.0;
    double beta = 0.0;
    double rate = 0.0;
    double dt_bias = 0.0;
  };
  Raw pull(std::int64_t t, double d_decay, double d_write, double write) const;

 private:
  double time_step(double raw) const;
  double time_step_slope(double raw) const;

  const LinearProblem& problem_;
  TokenRange tokens_;
  std::int64_t head_ = 0;
  double rate_ = 0.0;
  double dt_bias_ = 0.0;
};

// Zeros in the rows that no sequence has; an absent tensor is left out.
void clear_slack(const LinearProblem& problem, const RowsView& rows, std::int64_t heads,
                 std::int64_t dim);

}  // namespace onchip::cpu
