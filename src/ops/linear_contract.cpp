#include "ops/linear_contract.hpp"

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "core/status.hpp"
#include "ops/linear_arguments.hpp"
#include "ops/linear_table.hpp"
#include "ops/structs.hpp"

namespace onchip::ops {

namespace {

onchip_linear_options read_options(std::string_view op, const onchip_linear_options* options) {
  const onchip_linear_options defaults = ONCHIP_LINEAR_OPTIONS_INIT;
  return read_struct(op, "options", options, defaults, sizeof(onchip_linear_options));
}

onchip_linear_tensors read_tensors(std::string_view op, std::string_view name,
                                   const onchip_linear_tensors* tensors) {
  const onchip_linear_tensors defaults = ONCHIP_LINEAR_TENSORS_INIT;
  return read_struct(op, name, tensors, defaults, sizeof(onchip_linear_tensors));
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
  if (p.traits.read == ReadForm::quotient) p.stabilised = p.normalised = true;
  if ((call.row.options & kTakesGateOptions) == 0) {
    refuse_unless_default(call, "gate", given.gate == ONCHIP_GATE_EXP, std::to_string(given.gate));
    refuse_unless_default(call, "detach_normalizer", !p.detach_normalizer, "1");
    refuse_unless_default(call, "eps", p.eps == 0.0, number_text(p.eps));
    if (given.normalize == 1) {
      p.normalised = true;
      p.traits.read = ReadForm::sum_normalised;
    }
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
  if ((call.row.options & kTakesTimeStep) == 0) {
    refuse_unless_default(call, "dt_softplus", p.dt_softplus, "0");
  }
  if ((call.row.options & kTakesTimeLimit) != 0) return;
  refuse_unless_default(call, "dt_limit", p.dt_min == 0.0 && p.dt_max == HUGE_VAL,
                        "(" + number_text(p.dt_min) + ", " + number_text(p.dt_max) + ")");
  p.dt_min = -HUGE_VAL;  // nothing is clamped, a step below 0 neither
}

// Before the tensors: their shapes follow from it.
void read_householder(const LinearCall& call, LinearProblem& p) {
  const std::int64_t given = call.options.num_householder;
  if ((call.row.options & kTakesHouseholder) == 0) {
    refuse_unless_default(call, "num_householder", given == 1, std::to_string(given));
  } else if (given < 1) {
    throw_invalid(call.op(), "num_householder", std::to_string(given), "rows a token, at least 1",
                  "1");
  }
  p.rows_per_token = given;
}

// After the tensors: A_log says that log_decay and beta are raw.
void read_gates(const LinearCall& call, LinearProblem& p) {
  const onchip_linear_options& given = call.options;
  const std::string_view op = call.op();
  const bool negative = flag(op, "allow_neg_eigval", given.allow_neg_eigval) == 1;
  const bool bounded = !std::isnan(given.lower_bound);
  if ((call.row.options & kTakesRawGates) == 0) {
    refuse_unless_default(call, "lower_bound", !bounded, number_text(given.lower_bound));
    refuse_unless_default(call, "allow_neg_eigval", !negative, "1");
  } else if (!p.inputs.rate.wanted) {
    constexpr const char* kWanted = "A_log beside it, which says that log_decay and beta are raw";
    if (bounded) throw_invalid(op, "lower_bound", number_text(given.lower_bound), kWanted);
    if (negative) throw_invalid(op, "allow_neg_eigval", "1", kWanted);
    if (p.inputs.dt_bias.wanted) throw_invalid(op, "dt_bias", "a tensor", kWanted);
  } else {
    if (!p.inputs.gate.wanted) {
      throw_invalid(op, "log_decay", "A_log without log_decay", "a tensor beside A_log");
    }
    if (bounded && (!(given.lower_bound < 0.0) || !std::isfinite(given.lower_bound))) {
      throw_invalid(op, "lower_bound", number_text(given.lower_bound),
                    "a finite number below 0, or NaN for none", "-5");
    }
    p.traits.gate = bounded ? GateForm::bounded : GateForm::raw;
    p.lower_bound = bounded ? given.lower_bound : 0.0;
    p.beta_factor = negative ? 2.0 : 1.0;
  }
  if (p.traits.gate == GateForm::log_decay && !p.inputs.gate.wanted) {
    p.traits.gate = GateForm::none;
    p.traits.decay = DecayAxis::none;
  }
  p.qk_l2norm = flag(op, "qk_l2norm", given.qk_l2norm) == 1;
  if ((call.row.options & kTakesL2Norm) == 0) {
    refuse_unless_default(call, "qk_l2norm", !p.qk_l2norm, "1");
  }
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
  if (is_scan(p) && p.traits.decay != DecayAxis::key) {
    refuse_unless_default(call, "state_layout", given.state_layout == ONCHIP_STATE_DEFAULT,
                          std::to_string(given.state_layout));
  }
  if (given.chunk_len < 0 || given.chunk_len % 16 != 0) {
    throw_invalid(op, "chunk_len", std::to_string(given.chunk_len),
                  "a multiple of 16, or 0 to let the backend pick",
                  std::to_string(nearest_multiple(std::max<std::int64_t>(given.chunk_len, 1), 16)));
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
  for (const double value :
       {given.scale, given.eps, given.dt_min, given.dt_max, given.lower_bound}) {
    f.add(value);
  }
  f.add(given.chunk_len);
  f.add(given.num_householder);
  for (const std::int32_t value :
       {given.state_layout, given.normalize, given.gate, given.detach_normalizer, given.dt_softplus,
        given.qk_l2norm, given.allow_neg_eigval, given.check}) {
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

// ---- values in host memory ----------------------------------------------------------------------

// Only with `check`, which says so: it reads the whole tensor.
void check_sign(const LinearCall& call, std::string_view name, const RowsView& rows,
                std::int64_t width, bool constant, const LinearProblem& p) {
  std::vector<double> values(static_cast<std::size_t>(width));
  const auto refuse_above_zero = [&](std::int64_t batch, std::int64_t row, std::int64_t head) {
    load_row(rows, batch, row, head, width, values.data());
    for (const double value : values) {
      if (value <= 0.0) continue;
      throw_invalid(call.op(), name,
                    number_text(value) + (is_scan(p) ? " for channel " : " for head ") +
                        std::to_string(head) + (constant ? "" : ", row " + std::to_string(row)),
                    "numbers in [-inf, 0], since check is on");
    }
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
    check_sign(call, "log_decay", p.inputs.gate, p.gate_width, p.gate_per_head, p);
  }
  if (p.traits.gate == GateForm::mamba2) {
    check_sign(call, "A", p.inputs.rate, p.rate_width, true, p);
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
  read_householder(call, p);
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
  read_gates(call, p);
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
  if (p.state_indices.present()) check_state_indices(call, p.state_indices, call.slots);
  finish(call, p, facts);
  return p;
}

}  // namespace onchip::ops
