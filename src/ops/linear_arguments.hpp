// The tensors and states of a linear operator's call, checked against its row of the table.
#pragma once

#include <onchip/onchip.h>

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "core/linear.hpp"
#include "ops/call.hpp"
#include "ops/linear_table.hpp"

namespace onchip::ops {

using PartNames = std::array<const char*, 4>;  // of a state with one part; of each of several

inline constexpr PartNames kInitialState = {"initial_state", "initial_state[0]", "initial_state[1]",
                                            "initial_state[2]"};
inline constexpr PartNames kFinalState = {"final_state", "final_state[0]", "final_state[1]",
                                          "final_state[2]"};
inline constexpr PartNames kDFinalState = {"d_final_state", "d_final_state[0]", "d_final_state[1]",
                                           "d_final_state[2]"};
inline constexpr PartNames kDInitialState = {"dinitial_state", "dinitial_state[0]",
                                             "dinitial_state[1]", "dinitial_state[2]"};
inline constexpr PartNames kState = {"state", "state[0]", "state[1]", "state[2]"};

// One call: what is read once and needed everywhere.
struct LinearCall : Call {
  LinearCall(std::string_view op, const LinearRow& table_row, const onchip_linear_options& given,
             bool one_token)
      : Call(op), row(table_row), options(given), step(one_token) {}

  const LinearRow& row;
  const onchip_linear_options& options;
  bool step;                       // rows have no time axis
  bool vk = false;                 // state layout
  bool one_group = false;          // mamba1's B and C have no axis of groups
  std::vector<std::int64_t> lead;  // the rows' axes
  std::string axes;                // and their names
  std::int64_t slots = 0;          // first axis of the states

  // A scan's channels stand for heads.
  bool scan() const { return row.traits.engine == LinearEngine::scan; }
  std::string_view heads() const { return scan() ? "D" : "Hv"; }
};

// The shapes that gradients repeat, in the table's order. Sets the problem's sizes and input views.
std::vector<TensorView> read_inputs(LinearCall& call, const onchip_linear_tensors& given,
                                    LinearProblem& p);

void read_gradients(LinearCall& call, const onchip_linear_tensors& given,
                    const std::vector<TensorView>& inputs, LinearBackwardProblem& p);

// o or its gradient.
RowsView read_output_rows(const LinearCall& call, std::string_view name, const TensorView& tensor,
                          const LinearProblem& p);

std::size_t state_parts(const LinearProblem& p);

// As messages call it.
const char* part_name(const PartNames& names, const LinearProblem& p, std::size_t part);

enum class StateUse { input, output, in_place };

StateViews read_state(LinearCall& call, const PartNames& names,
                      const onchip_tensor* const (&given)[ONCHIP_LINEAR_STATE_PARTS],
                      const LinearProblem& p, StateUse use);

// All parts or none; whether there are any.
bool require_whole(const LinearCall& call, const PartNames& names, const StateViews& views,
                   const LinearProblem& p);

}  // namespace onchip::ops
