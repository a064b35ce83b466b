#include "support/conv_call.hpp"

#include "cpu/conv.hpp"
#include "cpu/norm.hpp"
#include "ops/conv_contract.hpp"

namespace onchip::test {

ConvCall::ConvCall(Random& random, const ConvDraw& draw) : DrawnCall(random), dtype_(draw.dtype) {
  phase_ = random_.one_of({Phase::forward, Phase::backward, Phase::step});
  num_seqs_ = random_.integer(1, 3);
  length_ = random_.integer(0, draw.longest);
  channels_ = random_.integer(1, draw.most_channels);
  width_ = random_.integer(1, draw.widest);
  packed_ = phase_ != Phase::step && random_.chance(0.4);
  options_.activation = random_.one_of({ONCHIP_ACTIVATION_NONE, ONCHIP_ACTIVATION_SILU});
  draw_lengths(draw.longest);
  Shape rows = {num_seqs_, length_, channels_};
  if (packed_) rows = {length_, channels_};
  if (phase_ == Phase::step) rows = {num_seqs_, channels_};
  const Shape state = {num_seqs_, channels_, width_};
  switch (phase_) {
    case Phase::forward:
      draw_forward(rows, state);
      break;
    case Phase::backward:
      draw_backward(rows, state);
      break;
    case Phase::step:
      draw_step(rows);
      break;
  }
  connect();
  forward_.options = backward_.options = step_.options = &options_;
}

DType ConvCall::any_float() {
  return random_.one_of({DType::f64, DType::f32, DType::f16, DType::bf16});
}

void ConvCall::draw_lengths(std::int64_t longest) {
  if (packed_) {
    std::vector<std::int64_t> starts = {random_.integer(0, 2)};
    for (std::int64_t n = 0; n < num_seqs_; ++n) {
      starts.push_back(starts.back() + random_.integer(0, longest));
    }
    length_ = starts.back() + random_.integer(0, 2);
    add_integers("cu_seqlens", &options_.cu_seqlens, starts);
  } else if (phase_ != Phase::step && random_.chance(0.3)) {
    std::vector<std::int64_t> used;
    for (std::int64_t n = 0; n < num_seqs_; ++n) used.push_back(random_.integer(0, length_));
    add_integers("seqlens", &options_.seqlens, used);
  }
}

void ConvCall::draw_forward(const Shape& rows, const Shape& state) {
  add("x", &forward_.x, rows, dtype_, false);
  add("weight", &forward_.weight, {channels_, width_}, any_float(), false);
  if (random_.chance(0.5)) add("bias", &forward_.bias, {channels_}, any_float(), false);
  if (random_.chance(0.5)) add("initial_state", &forward_.initial_state, state, dtype_, false);
  add("y", &forward_.y, rows, dtype_, true);
  if (random_.chance(0.5)) add("final_state", &forward_.final_state, state, dtype_, true);
}

void ConvCall::draw_backward(const Shape& rows, const Shape& state) {
  const DType weight = any_float();
  add("d_y", &backward_.d_y, rows, dtype_, false);
  add("x", &backward_.x, rows, dtype_, false);
  add("weight", &backward_.weight, {channels_, width_}, weight, false);
  if (random_.chance(0.8)) add("dx", &backward_.dx, rows, dtype_, true);
  if (random_.chance(0.8)) {
    add("dweight", &backward_.dweight, {channels_, width_}, weight, true);
  }
  if (random_.chance(0.5)) {
    const DType bias = any_float();
    add("bias", &backward_.bias, {channels_}, bias, false);
    if (random_.chance(0.8)) add("dbias", &backward_.dbias, {channels_}, bias, true);
  }
  if (random_.chance(0.5)) {
    add("initial_state", &backward_.initial_state, state, dtype_, false);
    if (random_.chance(0.8)) add("dinitial_state", &backward_.dinitial_state, state, dtype_, true);
  }
  if (random_.chance(0.5)) add("d_final_state", &backward_.d_final_state, state, dtype_, false);
}

void ConvCall::draw_step(const Shape& rows) {
  const bool indexed = random_.chance(0.5);
  add("x", &step_.x, rows, dtype_, false);
  add("weight", &step_.weight, {channels_, width_}, any_float(), false);
  if (random_.chance(0.5)) add("bias", &step_.bias, {channels_}, any_float(), false);
  add("state", &step_.state, {indexed ? num_seqs_ + 2 : num_seqs_, channels_, width_}, dtype_, true,
      true);
  add("y", &step_.y, rows, dtype_, true);
  if (!indexed) return;
  std::vector<std::int64_t> slots;
  for (std::int64_t n = 0; n < num_seqs_; ++n) {
    slots.push_back(random_.chance(0.2) ? -1 : num_seqs_ + 1 - n);
  }
  add_integers("state_indices", &step_.state_indices, slots);
}

bool ConvCall::mutate_option() {
  if (random_.chance(0.5)) {
    options_.activation = random_.chance(0.5) ? 1 : any_int32();
  } else {
    options_.backend = random_.one_of<const char*>({"cpu", "cuda.sm90", "reference", "none"});
  }
  return false;
}

bool ConvCall::names(const std::string& message) const {
  switch (phase_) {
    case Phase::forward:
      return message.starts_with("causal_conv1d_forward: ");
    case Phase::backward:
      return message.starts_with("causal_conv1d_backward: ");
    case Phase::step:
      return message.starts_with("causal_conv1d_step: ");
  }
  return false;
}

onchip_status ConvCall::plan(onchip_plan& planned) {
  switch (phase_) {
    case Phase::forward:
      return onchip_conv_forward_plan(&forward_, &planned);
    case Phase::backward:
      return onchip_conv_backward_plan(&backward_, &planned);
    case Phase::step:
      return onchip_conv_step_plan(&step_, &planned);
  }
  return ONCHIP_INTERNAL;
}

onchip_status ConvCall::run(const onchip_plan& planned, void* workspace) {
  switch (phase_) {
    case Phase::forward:
      return onchip_conv_forward_run(&planned, &forward_, workspace, nullptr);
    case Phase::backward:
      return onchip_conv_backward_run(&planned, &backward_, workspace, nullptr);
    case Phase::step:
      return onchip_conv_step_run(&planned, &step_, workspace, nullptr);
  }
  return ONCHIP_INTERNAL;
}

std::string ConvCall::run_forced(cpu::Isa isa) {
  switch (phase_) {
    case Phase::forward:
      return run_on_cpu<onchip_conv_forward_args, ConvForwardProblem>(
          forward_, "conv_forward", isa, cpu::plan_conv_forward, cpu::run_conv_forward,
          ops::normalise);
    case Phase::backward:
      return run_on_cpu<onchip_conv_backward_args, ConvBackwardProblem>(
          backward_, "conv_backward", isa, cpu::plan_conv_backward, cpu::run_conv_backward,
          ops::normalise);
    case Phase::step:
      return run_on_cpu<onchip_conv_step_args, ConvStepProblem>(
          step_, "conv_step", isa, cpu::plan_conv_step, cpu::run_conv_step, ops::normalise);
  }
  return "no such phase";
}

// ---- norms --------------------------------------------------------------------------------------

NormCall::NormCall(Random& random, const NormDraw& draw) : DrawnCall(random) {
  backward_pass_ = random_.chance(0.5);
  const std::int64_t group = random_.integer(1, draw.widest);
  const std::int64_t dim = group * random_.integer(1, draw.most_groups);
  Shape shape;
  for (std::int64_t axes = random_.integer(0, draw.most_rank - 1); axes > 0; --axes) {
    shape.push_back(random_.integer(random_.chance(0.1) ? 0 : 1, draw.most_rows));
  }
  shape.push_back(dim);
  const auto any_float = [&] {
    return random_.one_of({DType::f64, DType::f32, DType::f16, DType::bf16});
  };
  const DType gate = any_float();
  const DType weight = any_float();
  options_.kind = random_.one_of({ONCHIP_NORM_L2, ONCHIP_NORM_RMS, ONCHIP_NORM_RMS});
  options_.group_size = random_.chance(0.5) ? group : 0;
  const bool rms = options_.kind == ONCHIP_NORM_RMS;
  const bool gated = rms && random_.chance(0.6);
  const bool weighted = rms && random_.chance(0.6);
  if (gated) {
    options_.activation = random_.one_of({ONCHIP_ACTIVATION_SILU, ONCHIP_ACTIVATION_SIGMOID});
    options_.gate_first = random_.chance(0.5) ? 1 : 0;
  }
  // Channels alone in their group cancel in a true gradient: eps keeps some of it.
  options_.eps = 0.1;
  add("x", backward_pass_ ? &backward_.x : &forward_.x, shape, draw.dtype, false);
  if (gated) add("gate", backward_pass_ ? &backward_.gate : &forward_.gate, shape, gate, false);
  if (weighted) {
    add("weight", backward_pass_ ? &backward_.weight : &forward_.weight, {dim}, weight, false);
  }
  if (backward_pass_) {
    add("d_y", &backward_.d_y, shape, draw.dtype, false);
    if (random_.chance(0.8)) add("dx", &backward_.dx, shape, draw.dtype, true);
    if (gated && random_.chance(0.8)) add("dgate", &backward_.dgate, shape, gate, true);
    if (weighted && random_.chance(0.8)) add("dweight", &backward_.dweight, {dim}, weight, true);
  } else {
    add("y", &forward_.y, shape, draw.dtype, true);
  }
  connect();
  forward_.options = backward_.options = &options_;
}

bool NormCall::mutate_option() {
  switch (random_.integer(0, 5)) {
    case 0:
      options_.eps = any_double();
      break;
    case 1:
      options_.group_size = random_.chance(0.5) ? 1 : any_integer();
      break;
    case 2:
      options_.kind = random_.chance(0.5) ? ONCHIP_NORM_RMS : any_int32();
      break;
    case 3:
      options_.activation = any_int32();
      break;
    case 4:
      options_.gate_first = any_int32();
      break;
    default:
      options_.backend = random_.one_of<const char*>({"cpu", "cuda.sm90", "reference", "none"});
      break;
  }
  return false;
}

bool NormCall::names(const std::string& message) const {
  const char* phase = backward_pass_ ? "backward: " : "forward: ";
  for (const char* kind : {"l2norm_", "rms_norm_gated_", "norm_"}) {
    if (message.starts_with(std::string(kind) + phase)) return true;
  }
  return false;
}

onchip_status NormCall::plan(onchip_plan& planned) {
  return backward_pass_ ? onchip_norm_backward_plan(&backward_, &planned)
                        : onchip_norm_forward_plan(&forward_, &planned);
}

onchip_status NormCall::run(const onchip_plan& planned, void* workspace) {
  return backward_pass_ ? onchip_norm_backward_run(&planned, &backward_, workspace, nullptr)
                        : onchip_norm_forward_run(&planned, &forward_, workspace, nullptr);
}

std::string NormCall::run_forced(cpu::Isa isa) {
  if (backward_pass_) {
    return run_on_cpu<onchip_norm_backward_args, NormBackwardProblem>(
        backward_, "norm_backward", isa, cpu::plan_norm_backward, cpu::run_norm_backward,
        ops::normalise);
  }
  return run_on_cpu<onchip_norm_forward_args, NormForwardProblem>(
      forward_, "norm_forward", isa, cpu::plan_norm_forward, cpu::run_norm_forward, ops::normalise);
}

}  // namespace onchip::test
