#include "ops/linear_contract.hpp"

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "core/status.hpp"
#include "ops/linear_table.hpp"
#include "ops/structs.hpp"

namespace onchip::ops {

namespace {

using Shape = std::vector<std::int64_t>;
using PartNames = std::array<const char*, 4>;  // of a state with one part; of each of several

constexpr PartNames kInitialState = {"initial_state", "initial_state[0]", "initial_state[1]",
                                     "initial_state[2]"};
constexpr PartNames kFinalState = {"final_state", "final_state[0]", "final_state[1]",
                                   "final_state[2]"};
constexpr PartNames kDFinalState = {"d_final_state", "d_final_state[0]", "d_final_state[1]",
                                    "d_final_state[2]"};
constexpr PartNames kDInitialState = {"dinitial_state", "dinitial_state[0]", "dinitial_state[1]",
                                      "dinitial_state[2]"};
constexpr PartNames kState = {"state", "state[0]", "state[1]", "state[2]"};

// The fields of onchip_linear_tensors, to find those that an operator does not take.
struct Field {
  const char* name;
  const onchip_tensor* onchip_linear_tensors::* given;
};
constexpr Field kFields[] = {
    {"q", &onchip_linear_tensors::q},       {"k", &onchip_linear_tensors::k},
    {"v", &onchip_linear_tensors::v},       {"gate", &onchip_linear_tensors::gate},
    {"beta", &onchip_linear_tensors::beta}, {"a", &onchip_linear_tensors::a},
    {"b", &onchip_linear_tensors::b},       {"u", &onchip_linear_tensors::u},
    {"A", &onchip_linear_tensors::A},       {"dt_bias", &onchip_linear_tensors::dt_bias},
    {"D", &onchip_linear_tensors::D},       {"z", &onchip_linear_tensors::z},
};

// One call: what is read once and needed everywhere.
struct LinearCall : Call {
  LinearCall(std::string_view op, const LinearRow& table_row, const onchip_linear_options& given,
             bool one_token)
      : Call(op), row(table_row), options(given), step(one_token) {}

  const LinearRow& row;
  const onchip_linear_options& options;
  bool step;               // rows have no time axis
  bool vk = false;         // state layout
  Shape lead;              // the rows' axes
  std::string axes;        // and their names
  std::int64_t slots = 0;  // first axis of the states
};

onchip_linear_options read_options(std::string_view op, const onchip_linear_options* options) {
  const onchip_linear_options defaults = ONCHIP_LINEAR_OPTIONS_INIT;
  return read_struct(op, "options", options, defaults, sizeof(onchip_linear_options));
}

onchip_linear_tensors read_tensors(std::string_view op, std::string_view name,
                                   const onchip_linear_tensors* tensors) {
  const onchip_linear_tensors defaults = ONCHIP_LINEAR_TENSORS_INIT;
  return read_struct(op, name, tensors, defaults, sizeof(onchip_linear_tensors));
}

std::string list_text(const Shape& shape) {
  std::string text = "[";
  for (const std::int64_t extent : shape) {
    if (text.size() > 1) text += ", ";
    text += std::to_string(extent);
  }
  return text + "]";
}

bool has_shape(const TensorView& tensor, const Shape& shape) {
  return tensor.rank == static_cast<std::int32_t>(shape.size()) &&
         std::equal(shape.begin(), shape.end(), tensor.shape.begin());
}

void require(const LinearCall& call, std::string_view name, const TensorView& tensor,
             const Shape& shape, const std::string& axes) {
  if (has_shape(tensor, shape)) return;
  throw_invalid(call.op(), name, "shape " + shape_text(tensor), axes + " = " + list_text(shape));
}

// ---- options ------------------------------------------------------------------------------------

void refuse_unless_default(const LinearCall& call, std::string_view name, bool is_default,
                           const std::string& got) {
  if (!is_default) {
    throw_invalid(call.op(), name, got,
                  "its default: " + std::string(call.row.name) + " does not have this option");
  }
}

void read_normalisation(const LinearCall& call, LinearProblem& p) {
  const onchip_linear_options& given = call.options;
  const std::string_view op = call.op();
  if (given.normalize < -1 || given.normalize > 1) {
    throw_invalid(op, "normalize", std::to_string(given.normalize), "0, 1, or -1 for the default");
  }
  if (given.gate != ONCHIP_GATE_EXP && given.gate != ONCHIP_GATE_SIGMOID) {
    throw_invalid(op, "gate", std::to_string(given.gate),
                  "ONCHIP_GATE_EXP (0) or ONCHIP_GATE_SIGMOID (1)");
  }
  p.detach_normalizer = flag(op, "detach_normalizer", given.detach_normalizer) == 1;
  if (!(given.eps >= 0.0) || !std::isfinite(given.eps)) {
    throw_invalid(op, "eps", number_text(given.eps), "a finite number, at least 0");
  }
  p.eps = given.eps;
  if ((call.row.options & kTakesNormalize) == 0) {
    refuse_unless_default(call, "normalize", given.normalize == -1,
                          std::to_string(given.normalize));
  }
  if ((call.row.options & kTakesGateOptions) == 0) {
    refuse_unless_default(call, "gate", given.gate == ONCHIP_GATE_EXP,
                          std::to_string(given.gate));
    refuse_unless_default(call, "detach_normalizer", !p.detach_normalizer, "1");
    refuse_unless_default(call, "eps", p.eps == 0.0, number_text(p.eps));
    p.normalised = given.normalize == 1;
    if (p.normalised) p.traits.read = ReadForm::sum_normalised;
    return;
  }
  const bool exponential = given.gate == ONCHIP_GATE_EXP;
  if (exponential && given.normalize == 0) {
    throw_invalid(op, "normalize", "0 with the exponential gate",
                  "1: only the quotient of its two sums is finite", "the sigmoid gate");
  }
  p.stabilised = exponential;
  p.normalised = exponential || given.normalize == 1;
  p.traits.write = exponential ? WriteForm::exp_gate : WriteForm::sigmoid_gate;
  p.traits.read = p.normalised ? ReadForm::mlstm : ReadForm::plain;
  if (!p.normalised) {
    refuse_unless_default(call, "eps", p.eps == 0.0, number_text(p.eps) + " without normalize");
    refuse_unless_default(call, "detach_normalizer", !p.detach_normalizer, "1 without normalize");
  }
}

void read_time_step(const LinearCall& call, LinearProblem& p) {
  const onchip_linear_options& given = call.options;
  p.dt_softplus = flag(call.op(), "dt_softplus", given.dt_softplus) == 1;
  if (!(given.dt_min <= given.dt_max)) {
    throw_invalid(call.op(), "dt_limit",
                  "(" + number_text(given.dt_min) + ", " + number_text(given.dt_max) + ")",
                  "a lower bound that is at most the upper one", "(0, inf)");
  }
  p.dt_min = given.dt_min;
  p.dt_max = given.dt_max;
  if ((call.row.options & kTakesTimeStep) != 0) return;
  refuse_unless_default(call, "dt_softplus", p.dt_softplus, "0");
  refuse_unless_default(call, "dt_limit", p.dt_min == 0.0 && p.dt_max == HUGE_VAL,
                        "(" + number_text(p.dt_min) + ", " + number_text(p.dt_max) + ")");
}

void read_plain_options(LinearCall& call, LinearProblem& p) {
  const onchip_linear_options& given = call.options;
  const std::string_view op = call.op();
  if (given.state_layout < ONCHIP_STATE_DEFAULT || given.state_layout > ONCHIP_STATE_VK) {
    throw_invalid(op, "state_layout", std::to_string(given.state_layout),
                  "ONCHIP_STATE_DEFAULT (0), _KV (1) or _VK (2)");
  }
  call.vk = given.state_layout == ONCHIP_STATE_DEFAULT ? call.row.vk
                                                       : given.state_layout == ONCHIP_STATE_VK;
  if (given.chunk_len < 0 || given.chunk_len % 16 != 0) {
    throw_invalid(op, "chunk_len", std::to_string(given.chunk_len),
                  "a multiple of 16, or 0 to let the backend pick",
                  std::to_string(std::max<std::int64_t>(given.chunk_len / 16, 1) * 16));
  }
  p.chunk_len = given.chunk_len;
  if (call.step) {
    for (const auto& [name, given_one] :
         {std::pair<const char*, bool>{"chunk_len", given.chunk_len != 0},
          {"cu_seqlens", given.cu_seqlens != nullptr},
          {"seqlens", given.seqlens != nullptr}}) {
      if (given_one) throw_invalid(op, name, "a value in a step", "none: it takes one token");
    }
  }
  flag(op, "check", given.check);
  Fingerprint& f = call.fingerprint;
  f.add(given.op);
  for (const double value : {given.scale, given.eps, given.dt_min, given.dt_max}) f.add(value);
  f.add(given.chunk_len);
  for (const std::int32_t value : {given.state_layout, given.normalize, given.gate,
                                   given.detach_normalizer, given.dt_softplus, given.check}) {
    f.add(value);
  }
}

void read_scale(const LinearCall& call, LinearProblem& p) {
  const double given = call.options.scale;
  if (!std::isnan(given)) {
    p.scale = given;
  } else if (call.row.unit_scale || p.head_dim_k == 0) {
    p.scale = 1.0;
  } else {
    p.scale = 1.0 / std::sqrt(static_cast<double>(p.head_dim_k));
  }
  if (!std::isfinite(p.scale)) {
    throw_invalid(call.op(), "scale", number_text(p.scale), "a finite number");
  }
}

// ---- tensors ------------------------------------------------------------------------------------

struct Wanted {
  Shape shape;
  std::string axes;
};

Wanted rows_of(const LinearCall& call, const Shape& rest, const std::string& names) {
  Wanted wanted{call.lead, "[" + call.axes + ", " + names + "]"};
  wanted.shape.insert(wanted.shape.end(), rest.begin(), rest.end());
  return wanted;
}

Wanted wanted_shape(const LinearCall& call, LinearShape shape, const TensorView& tensor,
                    const LinearProblem& p) {
  switch (shape) {
    case LinearShape::key:
      return rows_of(call, {p.num_heads_k, p.head_dim_k}, "Hk, dk");
    case LinearShape::value:
      return rows_of(call, {p.num_heads_v, p.head_dim_v}, "Hv, dv");
    case LinearShape::scalar:
      return rows_of(call, {p.num_heads_v}, "Hv");
    case LinearShape::scalar_or_head:
      if (tensor.rank == 1) return {{p.num_heads_v}, "[Hv]"};
      return rows_of(call, {p.num_heads_v}, "Hv");
    case LinearShape::head:
      return {{p.num_heads_v}, "[Hv]"};
    case LinearShape::head_or_channel:
      if (tensor.rank == 2) return {{p.num_heads_v, p.head_dim_v}, "[Hv, dv]"};
      return {{p.num_heads_v}, "[Hv]"};
  }
  return {};
}

bool is_constant(LinearShape shape, const TensorView& tensor) {
  return shape == LinearShape::head || shape == LinearShape::head_or_channel ||
         (shape == LinearShape::scalar_or_head && tensor.rank == 1);
}

RowsView strided_rows(const LinearCall& call, LinearShape shape, const TensorView& tensor,
                      bool packed) {
  RowsView view;
  if (!tensor.present()) return view;
  view.data = tensor.data;
  view.dtype = tensor.dtype;
  view.wanted = true;
  std::size_t axis = 0;
  if (!is_constant(shape, tensor)) {
    if (!packed) view.batch_stride = bytes(tensor, axis++);
    if (!call.step) view.row_stride = bytes(tensor, axis++);
  }
  view.head_stride = bytes(tensor, axis);
  return view;
}

// Sizes from q and v; everything else has to agree with them.
void read_geometry(LinearCall& call, const TensorView& q, std::string_view q_name,
                   const TensorView& v, std::string_view v_name, LinearProblem& p) {
  const std::string_view op = call.op();
  require_dtype(op, q_name, q, {DType::f64, DType::f32, DType::f16, DType::bf16});
  const std::size_t lead = call.step || p.packed ? 1 : 2;
  call.axes = call.step ? "batch" : p.packed ? "total" : "batch, T";
  for (const auto& [name, tensor] :
       {std::pair<std::string_view, const TensorView*>{q_name, &q}, {v_name, &v}}) {
    if (tensor->rank != static_cast<std::int32_t>(lead + 2)) {
      throw_invalid(op, name, "shape " + shape_text(*tensor),
                    "[" + call.axes + ", heads, dim]" +
                        (call.step  ? ""
                         : p.packed ? " (cu_seqlens given)"
                                    : " (no cu_seqlens)"));
    }
  }
  p.dtype = q.dtype;
  p.device = q.device;
  call.lead.assign(q.shape.begin(), q.shape.begin() + static_cast<std::ptrdiff_t>(lead));
  if (!p.packed) p.num_seqs = q.shape[0];
  p.slot = call.step ? 1 : q.shape[lead - 1];
  p.num_heads_k = q.shape[lead];
  p.head_dim_k = q.shape[lead + 1];
  p.num_heads_v = v.shape[lead];
  p.head_dim_v = v.shape[lead + 1];
  const std::int64_t hk = p.num_heads_k;
  const std::int64_t hv = p.num_heads_v;
  if (hk == 0 ? hv != 0 : hv % hk != 0) {
    const std::int64_t below = hk == 0 ? 0 : hv - hv % hk;
    throw_invalid(op, v_name, std::to_string(hv) + " heads",
                  "a multiple of " + std::string(q_name) + "'s " + std::to_string(hk) + " heads",
                  hk == 0 ? "0" : std::to_string(below > 0 ? below : hk));
  }
}

void require_float(const LinearCall& call, const LinearTensorRow& row, const TensorView& tensor,
                   const LinearProblem& p) {
  const bool operand = row.role.given == &onchip_linear_tensors::q ||
                       row.role.given == &onchip_linear_tensors::k ||
                       row.role.given == &onchip_linear_tensors::v;
  if (operand) {
    require_dtype(call.op(), row.name(), tensor, {p.dtype});
  } else {
    require_dtype(call.op(), row.name(), tensor, {DType::f64, DType::f32, DType::f16, DType::bf16});
  }
}

void refuse_foreign(const LinearCall& call, const onchip_linear_tensors& given,
                    const char* prefix) {
  for (const Field& field : kFields) {
    if (given.*field.given == nullptr) continue;
    const bool taken =
        std::any_of(call.row.tensors.begin(), call.row.tensors.end(),
                    [&](const LinearTensorRow& row) { return row.role.given == field.given; });
    if (!taken) {
      throw_invalid(call.op(), std::string(prefix) + field.name, "a tensor",
                    "none: " + std::string(call.row.name) + " does not take it");
    }
  }
}

// The shapes that gradients repeat, in the table's order.
std::vector<TensorView> read_inputs(LinearCall& call, const onchip_linear_tensors& given,
                                    LinearProblem& p) {
  const std::string_view op = call.op();
  refuse_foreign(call, given, "inputs.");
  std::vector<TensorView> views;
  const LinearTensorRow* q = nullptr;
  const LinearTensorRow* v = nullptr;
  for (const LinearTensorRow& row : call.row.tensors) {
    views.push_back(call.input(row.name(), given.*row.role.given));
    if (!row.optional) require_present(op, row.name(), views.back());
    if (row.role.given == &onchip_linear_tensors::q) q = &row;
    if (row.role.given == &onchip_linear_tensors::v) v = &row;
  }
  const auto view_of = [&](const LinearTensorRow* row) -> const TensorView& {
    return views[static_cast<std::size_t>(row - call.row.tensors.data())];
  };
  read_geometry(call, view_of(q), q->name(), view_of(v), v->name(), p);
  for (std::size_t i = 0; i < views.size(); ++i) {
    const LinearTensorRow& row = call.row.tensors[i];
    if (!views[i].present()) continue;
    require_float(call, row, views[i], p);
    const Wanted wanted = wanted_shape(call, row.shape, views[i], p);
    require(call, row.name(), views[i], wanted.shape, wanted.axes);
    p.inputs.*row.role.view = strided_rows(call, row.shape, views[i], p.packed);
    const bool constant = is_constant(row.shape, views[i]);
    if (row.role.given == &onchip_linear_tensors::gate) p.gate_per_head = constant;
    if (row.role.given == &onchip_linear_tensors::D) {
      p.skip_width = views[i].rank == 2 ? p.head_dim_v : 1;
    }
  }
  if (!p.inputs.gate.wanted && p.traits.gate == GateForm::log_decay) {
    p.traits.gate = GateForm::none;
    p.traits.decay = DecayAxis::none;
  }
  return views;
}

void read_gradients(LinearCall& call, const onchip_linear_tensors& given,
                    const std::vector<TensorView>& inputs, LinearBackwardProblem& p) {
  refuse_foreign(call, given, "gradients.");
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    const LinearTensorRow& row = call.row.tensors[i];
    const TensorView gradient = call.output(row.gradient_name, given.*row.role.given);
    if (!gradient.present()) continue;
    if (!inputs[i].present()) {
      throw_invalid(call.op(), row.gradient_name, "a tensor without " + std::string(row.name()),
                    "none, or a tensor to differentiate");
    }
    require_dtype(call.op(), row.gradient_name, gradient, {inputs[i].dtype});
    const auto rank = static_cast<std::ptrdiff_t>(inputs[i].rank);
    require(call, row.gradient_name, gradient,
            Shape(inputs[i].shape.begin(), inputs[i].shape.begin() + rank),
            std::string(row.name()) + "'s shape");
    p.gradients.*row.role.view = strided_rows(call, row.shape, gradient, p.packed);
  }
}

RowsView read_output_rows(LinearCall& call, std::string_view name, const TensorView& tensor,
                          const LinearProblem& p) {
  require_present(call.op(), name, tensor);
  require_dtype(call.op(), name, tensor, {p.dtype});
  const Wanted wanted = wanted_shape(call, LinearShape::value, tensor, p);
  require(call, name, tensor, wanted.shape, wanted.axes);
  return strided_rows(call, LinearShape::value, tensor, p.packed);
}

// ---- states -------------------------------------------------------------------------------------

std::size_t state_parts(const LinearProblem& p) { return p.stabilised ? 3 : p.normalised ? 2 : 1; }

const char* part_name(const PartNames& names, const LinearProblem& p, std::size_t part) {
  return state_parts(p) == 1 && part == 0 ? names[0] : names[part + 1];
}

StateView state_part(const LinearCall& call, const char* name, const TensorView& tensor,
                     std::size_t part, const LinearProblem& p) {
  StateView view;
  if (!tensor.present()) return view;
  view.data = tensor.data;
  view.dtype = tensor.dtype;
  view.wanted = true;
  const std::int64_t n = call.slots;
  if (part == 0) {
    if (call.vk) {
      require(call, name, tensor, {n, p.num_heads_v, p.head_dim_v, p.head_dim_k},
              "[N, Hv, dv, dk]");
    } else {
      require(call, name, tensor, {n, p.num_heads_v, p.head_dim_k, p.head_dim_v},
              "[N, Hv, dk, dv]");
    }
    view.row_stride = bytes(tensor, call.vk ? 3 : 2);
    view.column_stride = bytes(tensor, call.vk ? 2 : 3);
  } else if (part == 1) {
    require(call, name, tensor, {n, p.num_heads_v, p.head_dim_k}, "[N, Hv, dk]");
    view.row_stride = bytes(tensor, 2);
  } else {
    require(call, name, tensor, {n, p.num_heads_v}, "[N, Hv]");
  }
  view.slot_stride = bytes(tensor, 0);
  view.head_stride = bytes(tensor, 1);
  return view;
}

enum class StateUse { input, output, in_place };

StateViews read_state(LinearCall& call, const PartNames& names,
                      const onchip_tensor* const (&given)[ONCHIP_LINEAR_STATE_PARTS],
                      const LinearProblem& p, StateUse use) {
  StateViews views;
  for (std::size_t part = 0; part < ONCHIP_LINEAR_STATE_PARTS; ++part) {
    const char* name = part_name(names, p, part);
    if (part >= state_parts(p) && given[part] != nullptr) {
      throw_invalid(call.op(), name, "a tensor",
                    "none: this state has " + std::to_string(state_parts(p)) + " part" +
                        (state_parts(p) == 1 ? "" : "s"));
    }
    const TensorView tensor =
        use == StateUse::input ? call.input(name, given[part]) : call.output(name, given[part]);
    if (tensor.present()) {
      if (p.dtype == DType::f64) {
        require_dtype(call.op(), name, tensor, {DType::f64});
      } else if (use == StateUse::in_place) {
        require_dtype(call.op(), name, tensor, {DType::f32, DType::bf16, DType::f16});
      } else {
        require_dtype(call.op(), name, tensor, {DType::f32});
      }
    }
    views[part] = state_part(call, name, tensor, part, p);
  }
  return views;
}

// All parts or none.
bool require_whole(const LinearCall& call, const PartNames& names, const StateViews& views,
                   const LinearProblem& p) {
  const bool any =
      std::any_of(views.begin(), views.end(), [](const StateView& view) { return view.wanted; });
  for (std::size_t part = 0; any && part < state_parts(p); ++part) {
    if (!views[part].wanted) {
      throw_invalid(call.op(), part_name(names, p, part), "no tensor beside the state's others",
                    "all parts of the state or none");
    }
  }
  return any;
}

// ---- values in host memory ----------------------------------------------------------------------

// Only with `check`, which says so: it reads the whole tensor.
void check_sign(const LinearCall& call, std::string_view name, const RowsView& rows, bool constant,
                const LinearProblem& p) {
  const auto refuse_above_zero = [&](std::int64_t batch, std::int64_t row, std::int64_t head) {
    double value = 0.0;
    load_row(rows, batch, row, head, 1, &value);
    if (value <= 0.0) return;
    throw_invalid(call.op(), name,
                  number_text(value) + " for head " + std::to_string(head) +
                      (constant ? "" : ", row " + std::to_string(row)),
                  "numbers in [-inf, 0] (check = 1)");
  };
  for (std::int64_t head = 0; head < p.num_heads_v; ++head) {
    if (constant) refuse_above_zero(0, 0, head);
    for (std::int64_t n = 0; !constant && n < p.num_seqs; ++n) {
      const TokenRange tokens = p.tokens(n);
      for (std::int64_t t = 0; t < tokens.length; ++t) {
        refuse_above_zero(tokens.batch, tokens.begin + t, head);
      }
    }
  }
}

void check_values(const LinearCall& call, const LinearProblem& p) {
  if (call.options.check == 0 || p.device.type != ONCHIP_DEVICE_CPU) return;
  if (p.traits.gate == GateForm::log_decay) {
    check_sign(call, "log_decay", p.inputs.gate, p.gate_per_head, p);
  }
  if (p.traits.gate == GateForm::mamba2) check_sign(call, "A", p.inputs.rate, true, p);
}

void check_state_indices(const LinearCall& call, const TensorView& indices) {
  if (!on_host(indices)) return;
  std::vector<std::int64_t> used;
  for (std::int64_t n = 0; n < indices.shape[0]; ++n) {
    const std::int64_t slot = load_integer(indices.at(n), indices.dtype);
    if (slot < -1 || slot >= call.slots) {
      throw_invalid(call.op(), "state_indices[" + std::to_string(n) + "]", std::to_string(slot),
                    "a slot below " + std::to_string(call.slots) + ", or -1 to skip the row");
    }
    if (slot >= 0) used.push_back(slot);
  }
  std::sort(used.begin(), used.end());
  const auto twice = std::adjacent_find(used.begin(), used.end());
  if (twice != used.end()) {
    throw_invalid(call.op(), "state_indices", "slot " + std::to_string(*twice) + " twice",
                  "each slot once: a step writes it in place");
  }
}

// ---- the calls ----------------------------------------------------------------------------------

// What all three share. Returns the inputs' views in the table's order.
std::vector<TensorView> read_linear(LinearCall& call, const onchip_linear_tensors* inputs,
                                    LinearProblem& p) {
  const std::string_view op = call.op();
  p.op = op.data();
  p.traits = call.row.traits;
  read_plain_options(call, p);
  read_normalisation(call, p);
  read_time_step(call, p);
  p.cu_seqlens = read_lengths(call, "cu_seqlens", call.options.cu_seqlens);
  p.seqlens = read_lengths(call, "seqlens", call.options.seqlens);
  p.packed = p.cu_seqlens.present();
  if (p.packed) {
    if (p.cu_seqlens.shape[0] < 1) {
      throw_invalid(op, "cu_seqlens", "shape " + shape_text(p.cu_seqlens),
                    "num_seqs + 1 entries, at least 1");
    }
    p.num_seqs = p.cu_seqlens.shape[0] - 1;
  }
  std::vector<TensorView> views = read_inputs(call, read_tensors(op, "inputs", inputs), p);
  read_scale(call, p);
  if (p.packed) check_cu_seqlens(call, "cu_seqlens", p.cu_seqlens, p.slot);
  if (p.seqlens.present()) require_shape(op, "seqlens", p.seqlens, {p.num_seqs}, "[num_seqs]");
  check_seqlens(call, "seqlens", p.seqlens, p.cu_seqlens, p.slot);
  call.slots = p.num_seqs;
  return views;
}

void finish(LinearCall& call, const LinearProblem& p, CallFacts& facts) {
  const std::string_view first = call.row.tensors[0].name();
  call.check_devices(p.device, first);
  call.check_aliasing();
  check_values(call, p);
  facts.op = call.op();
  facts.forced_backend = backend_name(call, call.options.backend);
  facts.fingerprint = call.fingerprint.value();
}

}  // namespace

LinearForwardProblem normalise(const onchip_linear_forward_args& args, CallFacts& facts) {
  const onchip_linear_options options = read_options(facts.op, args.options);
  const LinearRow& row = linear_row(facts.op, options.op);
  LinearCall call(row.forward, row, options, false);
  LinearForwardProblem p;
  read_linear(call, args.inputs, p);
  p.o = read_output_rows(call, "o", call.output("o", args.o), p);
  p.initial_state = read_state(call, kInitialState, args.initial_state, p, StateUse::input);
  p.final_state = read_state(call, kFinalState, args.final_state, p, StateUse::output);
  require_whole(call, kInitialState, p.initial_state, p);
  finish(call, p, facts);
  return p;
}

LinearBackwardProblem normalise(const onchip_linear_backward_args& args, CallFacts& facts) {
  const onchip_linear_options options = read_options(facts.op, args.options);
  const LinearRow& row = linear_row(facts.op, options.op);
  LinearCall call(row.backward, row, options, false);
  LinearBackwardProblem p;
  const std::vector<TensorView> inputs = read_linear(call, args.inputs, p);
  p.d_o = read_output_rows(call, "d_o", call.input("d_o", args.d_o), p);
  p.initial_state = read_state(call, kInitialState, args.initial_state, p, StateUse::input);
  p.d_final_state = read_state(call, kDFinalState, args.d_final_state, p, StateUse::input);
  if (p.d_final_state[2].wanted) {
    throw_invalid(call.op(), kDFinalState[3], "a tensor", "none: the stabiliser has no gradient");
  }
  read_gradients(call, read_tensors(call.op(), "gradients", args.gradients), inputs, p);
  p.dinitial_state = read_state(call, kDInitialState, args.dinitial_state, p, StateUse::output);
  const bool initial = require_whole(call, kInitialState, p.initial_state, p);
  for (std::size_t part = 0; part < state_parts(p); ++part) {
    if (p.dinitial_state[part].wanted && !initial) {
      throw_invalid(call.op(), part_name(kDInitialState, p, part), "a tensor without initial_state",
                    "an initial state to differentiate");
    }
  }
  finish(call, p, facts);
  return p;
}

LinearStepProblem normalise(const onchip_linear_step_args& args, CallFacts& facts) {
  const onchip_linear_options options = read_options(facts.op, args.options);
  const LinearRow& row = linear_row(facts.op, options.op);
  LinearCall call(row.step, row, options, true);
  LinearStepProblem p;
  read_linear(call, args.inputs, p);
  p.o = read_output_rows(call, "o", call.output("o", args.o), p);
  p.state_indices = call.input("state_indices", args.state_indices);
  if (p.state_indices.present()) {
    require_dtype(call.op(), "state_indices", p.state_indices, {DType::i32});
    require_shape(call.op(), "state_indices", p.state_indices, {p.num_seqs}, "[batch]");
    const onchip_tensor* pool = args.state[0];
    call.slots = pool != nullptr && pool->rank > 0 ? pool->shape[0] : 0;
  }
  p.state = read_state(call, kState, args.state, p, StateUse::in_place);
  if (!require_whole(call, kState, p.state, p)) {
    throw_invalid(call.op(), part_name(kState, p, 0), "no tensor", "a tensor");
  }
  if (p.state_indices.present()) check_state_indices(call, p.state_indices);
  finish(call, p, facts);
  return p;
}

}  // namespace onchip::ops
