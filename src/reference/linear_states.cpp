#include "reference/linear_states.hpp"

#include <algorithm>
#include <limits>

namespace onchip::reference {

namespace {

bool has_slots(const LinearProblem& problem) {
  return problem.traits.engine == LinearEngine::gated_slots;
}

// Calls f(part, element of it, its place in the engine's state).
template <typename F>
void for_each_element(const LinearProblem& problem, const StateViews& parts, std::int64_t slot,
                      std::int64_t head, F&& f) {
  const std::int64_t dk = problem.head_dim_k;
  const std::int64_t dv = problem.head_dim_v;
  const std::int64_t slots = problem.num_slots;
  const auto matrix = [&](const StateView& part, std::int64_t rows, std::int64_t columns,
                          std::int64_t begin, std::int64_t width) {
    if (!part.wanted) return;
    for (std::int64_t i = 0; i < rows; ++i) {
      for (std::int64_t j = 0; j < columns; ++j) {
        f(part, part.at(slot, head, i, j), begin + i * width + j);
      }
    }
  };
  if (has_slots(problem)) {
    matrix(parts[0], dk, slots, 0, slots);
    matrix(parts[1], slots, dv, dk * slots, dv);
    return;
  }
  const std::int64_t width = value_width(problem);
  matrix(parts[0], dk, dv, 0, width);
  if (problem.normalised) matrix(parts[1], dk, 1, dv, width);
}

}  // namespace

std::int64_t state_doubles(const LinearProblem& problem) {
  return has_slots(problem) ? problem.num_slots * (problem.head_dim_k + problem.head_dim_v)
                            : problem.head_dim_k * value_width(problem);
}

std::int64_t scratch_doubles(const LinearProblem& problem) {
  return 2 * std::max(value_width(problem), problem.num_slots);
}

void add_states(const LinearProblem& problem, Layout& layout, std::int64_t count) {
  if (has_slots(problem)) {
    layout.add(problem.num_slots, problem.head_dim_k, count);
    layout.add(problem.num_slots, problem.head_dim_v, count);
  } else {
    layout.add(problem.head_dim_k, value_width(problem), count);
  }
}

void load_state(const LinearProblem& problem, const StateViews& parts, std::int64_t slot,
                std::int64_t head, double* state) {
  std::fill_n(state, state_doubles(problem), 0.0);
  for_each_element(problem, parts, slot, head,
                   [&](const StateView& part, const std::byte* element, std::int64_t at) {
                     state[at] = load_as_double(element, part.dtype);
                   });
}

double load_stabiliser(const LinearProblem& problem, const StateViews& parts, std::int64_t slot,
                       std::int64_t head) {
  const StateView& stabiliser = parts[2];
  if (stabiliser.wanted) return load_as_double(stabiliser.at(slot, head), stabiliser.dtype);
  return problem.traits.read == ReadForm::quotient ? -std::numeric_limits<double>::infinity() : 0.0;
}

void store_state(const LinearProblem& problem, const StateViews& parts, std::int64_t slot,
                 std::int64_t head, const double* state, double third) {
  for_each_element(problem, parts, slot, head,
                   [&](const StateView& part, std::byte* element, std::int64_t at) {
                     store_from_double(element, part.dtype, state[at]);
                   });
  const StateView& stabiliser = parts[2];
  if (stabiliser.wanted) store_from_double(stabiliser.at(slot, head), stabiliser.dtype, third);
}

}  // namespace onchip::reference
