// What the engines of linear attention share: one row forward, one row backward. The walk over
// sequences, heads and chunks is in linear.cpp, everything that is no recurrence in
// core/linear_rows.hpp.
#pragma once

#include <cstdint>

#include "core/linear_rows.hpp"

namespace onchip::reference {

// States are row-major [dk, width]; those of gated_slots [dk, slots], then [slots, width].
struct LinearStep {
  std::int64_t dk = 0;
  std::int64_t width = 0;
  double scale = 1.0;
  bool channels = false;      // alpha has dk numbers, not one
  bool exclusive = false;     // what LinearTraits says
  std::int64_t slots = 0;     // gated_slots: its two matrices follow each other
  double* scratch = nullptr;  // [2 max(width, slots)]

  double alpha(const EngineRow& row, std::int64_t i) const { return row.alpha[channels ? i : 0]; }
};

// A reset forgets even a state that is not finite.
inline double decayed(double alpha, double value) { return alpha == 0.0 ? 0.0 : alpha * value; }

struct LinearEngineFunctions {
  // now = S_t from before = S_{t-1}; where the row reads, read [width] is what.
  void (*forward)(const LinearStep& step, const EngineRow& row, const double* before, double* now,
                  double* read);

  // `d_state` is the gradient of S_t on entry, of S_{t-1} on return; d_read that of `read`, where
  // the row reads. Fills `gradient`.
  void (*reverse)(const LinearStep& step, const EngineRow& row, const double* before,
                  const double* now, const double* d_read, double* d_state,
                  const EngineRow& gradient);
};

LinearEngineFunctions scalar_decay_engine();
LinearEngineFunctions channel_decay_engine();
LinearEngineFunctions delta_rule_engine();
LinearEngineFunctions dplr_engine();
LinearEngineFunctions gated_slots_engine();
LinearEngineFunctions scan_engine();

}  // namespace onchip::reference
