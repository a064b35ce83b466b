#include "support/linear_call.hpp"

#include <algorithm>
#include <cmath>

#include "cpu/linear.hpp"
#include "ops/linear_contract.hpp"

namespace onchip::test {

LinearCall::LinearCall(Random& random, const LinearDraw& draw)
    : DrawnCall(random), draw_(draw), row_(ops::linear_row("draw", draw.op)) {
  options_.op = draw.op;
  state_dtype_ = draw.dtype == DType::f64 ? DType::f64 : DType::f32;
  heads_k_ = random_.integer(1, draw.most_heads);
  heads_v_ = heads_k_ * random_.integer(1, 2);
  dk_ = random_.integer(1, draw.widest);
  dv_ = random_.integer(1, draw.widest);
  num_seqs_ = random_.integer(1, 3);
  length_ = random_.integer(0, draw.longest);
  one_group_ = is_scan() && random_.chance(0.5);
  packed_ = draw.phase != LinearPhase::step && random_.chance(0.4);
  draw_options();
  draw_lengths();
  draw_tensors();
  const Shape values = shape_of(is_scan() ? ops::LinearShape::scalar : ops::LinearShape::value);
  switch (draw.phase) {
    case LinearPhase::forward:
      draw_forward(values);
      break;
    case LinearPhase::backward:
      draw_backward(values);
      break;
    case LinearPhase::step:
      draw_step(values);
      break;
  }
  connect();
  forward_.inputs = backward_.inputs = step_.inputs = &inputs_;
  forward_.options = backward_.options = step_.options = &options_;
  backward_.gradients = &gradients_;
}

void LinearCall::draw_options() {
  if ((row_.options & ops::kTakesHouseholder) != 0) {
    options_.num_householder = random_.integer(1, 3);
  }
  if ((row_.options & ops::kTakesNormalize) != 0) {
    options_.normalize = static_cast<std::int32_t>(random_.integer(-1, 1));
  }
  if ((row_.options & ops::kTakesGateOptions) != 0) {
    options_.gate = random_.one_of({ONCHIP_GATE_EXP, ONCHIP_GATE_SIGMOID});
    if (options_.gate == ONCHIP_GATE_EXP) options_.normalize = -1;
    if (options_.gate == ONCHIP_GATE_EXP || options_.normalize == 1) options_.eps = 0.1;
  }
  if ((row_.options & ops::kTakesTimeStep) != 0) options_.dt_softplus = random_.one_of({0, 1});
  if ((row_.options & ops::kTakesTimeLimit) != 0) options_.dt_max = 2.0;
  if ((row_.options & ops::kTakesL2Norm) != 0 && random_.chance(0.5)) options_.qk_l2norm = 1;
  const bool matrix = options_.op != ONCHIP_HGRN && options_.op != ONCHIP_RWKV4;
  if (matrix && random_.chance(0.3)) options_.state_layout = random_.one_of({1, 2});
  if (random_.chance(0.3) && draw_.phase != LinearPhase::step) options_.chunk_len = 16;
}

void LinearCall::draw_lengths() {
  if (packed_) {
    std::vector<std::int64_t> starts = {random_.integer(0, 2)};
    for (std::int64_t n = 0; n < num_seqs_; ++n) {
      starts.push_back(starts.back() + random_.integer(0, draw_.longest));
    }
    length_ = starts.back() + random_.integer(0, 2);
    add_integers("cu_seqlens", &options_.cu_seqlens, starts);
  } else if (draw_.phase != LinearPhase::step && random_.chance(0.3)) {
    std::vector<std::int64_t> used;
    for (std::int64_t n = 0; n < num_seqs_; ++n) used.push_back(random_.integer(0, length_));
    add_integers("seqlens", &options_.seqlens, used);
  }
}

void LinearCall::draw_tensors() {
  const bool raw = random_.chance(0.5);
  for (const ops::LinearTensorRow& tensor : row_.tensors) {
    if (skipped(tensor, raw)) continue;
    add(std::string(tensor.name()), &(inputs_.*tensor.role.given), shape_of(tensor.shape),
        tensor_dtype(tensor), false);
  }
}

void LinearCall::draw_forward(const Shape& values) {
  add("o", &forward_.o, values, draw_.dtype, true);
  const bool initial = random_.chance(0.5);
  if (initial) {
    add_state("initial_state", forward_.initial_state, num_seqs_, state_dtype_, false, 3);
  }
  // No number that is not finite: rwkv4's empty state has a maximum of -inf.
  if ((initial || options_.op != ONCHIP_RWKV4) && random_.chance(0.5)) {
    add_state("final_state", forward_.final_state, num_seqs_, state_dtype_, true, 3);
  }
}

void LinearCall::draw_backward(const Shape& values) {
  add("d_o", &backward_.d_o, values, draw_.dtype, false);
  if (random_.chance(0.5)) {
    add_state("initial_state", backward_.initial_state, num_seqs_, state_dtype_, false, 3);
    add_state("dinitial_state", backward_.dinitial_state, num_seqs_, state_dtype_, true, 3);
  }
  if (random_.chance(0.5)) {
    add_state("d_final_state", backward_.d_final_state, num_seqs_, state_dtype_, false, 2);
  }
  const std::size_t count = arguments_.size();
  for (const ops::LinearTensorRow& tensor : row_.tensors) {
    if (inputs_.*tensor.role.given == nullptr || random_.chance(0.1)) continue;
    for (std::size_t i = 0; i < count; ++i) {
      if (arguments_[i].name != tensor.name()) continue;
      add(tensor.gradient_name, &(gradients_.*tensor.role.given), shape_of(tensor.shape),
          arguments_[i].memory.dtype(), true);
      break;
    }
  }
}

void LinearCall::draw_step(const Shape& values) {
  add("o", &step_.o, values, draw_.dtype, true);
  const bool indexed = random_.chance(0.5);
  const DType pool = draw_.dtype == DType::f64
                         ? DType::f64
                         : random_.one_of({DType::f32, DType::f32, DType::bf16, DType::f16});
  add_state("state", step_.state, indexed ? num_seqs_ + 2 : num_seqs_, pool, true, 3);
  if (!indexed) return;
  std::vector<std::int64_t> slots;
  for (std::int64_t n = 0; n < num_seqs_; ++n) slots.push_back(random_.chance(0.2) ? -1 : n);
  add_integers("state_indices", &step_.state_indices, slots);
}

bool LinearCall::skipped(const ops::LinearTensorRow& tensor, bool raw) {
  const bool raw_gates = (row_.options & ops::kTakesRawGates) != 0;
  const std::string_view name = tensor.name();
  if (raw_gates && (name == "A_log" || name == "dt_bias")) return !raw;
  if (raw_gates && name == "log_decay") return false;
  return tensor.optional && random_.chance(0.4);
}

DType LinearCall::tensor_dtype(const ops::LinearTensorRow& tensor) {
  const auto* field = &tensor.role;
  const bool operand = field->given == &onchip_linear_tensors::q ||
                       field->given == &onchip_linear_tensors::k ||
                       field->given == &onchip_linear_tensors::v;
  return operand ? draw_.dtype : random_.one_of({draw_.dtype, DType::f32, DType::f64});
}

Shape LinearCall::shape_of(ops::LinearShape shape) const {
  const bool step = draw_.phase == LinearPhase::step;
  Shape rows = step || packed_ ? Shape{step ? num_seqs_ : length_} : Shape{num_seqs_, length_};
  const auto with = [&rows](std::initializer_list<std::int64_t> rest) {
    rows.insert(rows.end(), rest);
    return rows;
  };
  const auto token_rows = [&] {
    if (step) {
      rows.push_back(options_.num_householder);
    } else {
      rows.back() *= options_.num_householder;
    }
  };
  switch (shape) {
    case ops::LinearShape::key_rows:
      token_rows();
      [[fallthrough]];
    case ops::LinearShape::key:
      return with({heads_k_, dk_});
    case ops::LinearShape::value_rows:
      token_rows();
      [[fallthrough]];
    case ops::LinearShape::value:
      return with({heads_v_, dv_});
    case ops::LinearShape::scalar_rows:
      token_rows();
      [[fallthrough]];
    case ops::LinearShape::scalar:
    case ops::LinearShape::scalar_or_head:
      return with({heads_v_});
    case ops::LinearShape::shared:
      return one_group_ ? with({dk_}) : with({heads_k_, dk_});
    case ops::LinearShape::slots:
      return with({heads_v_, kSlots});
    case ops::LinearShape::channel:
      return with({heads_v_, dk_});
    case ops::LinearShape::head:
    case ops::LinearShape::head_or_channel:
      return {heads_v_};
    case ops::LinearShape::head_key:
      return {heads_v_, dk_};
  }
  return {};
}

double LinearCall::draw_number(const std::string& name) {
  const double x = 0.3 * random_.normal();
  // No sum of weights near 0.
  const bool positive = options_.op == ONCHIP_LINEAR_ATTENTION &&
                        (name == "q" || name == "k" || name.ends_with("state"));
  if (positive) return std::fabs(x) + 0.1;
  return name == "log_decay" || name == "A" ? -std::fabs(x) : x;
}

void LinearCall::add_state(const char* name,
                           const onchip_tensor* (&parts)[ONCHIP_LINEAR_STATE_PARTS],
                           std::int64_t count, DType dtype, bool output, std::size_t most) {
  const bool in_place = draw_.phase == LinearPhase::step;
  const bool vk = options_.state_layout == ONCHIP_STATE_VK ||
                  (options_.state_layout == ONCHIP_STATE_DEFAULT && row_.vk);
  const auto matrix = [&](std::int64_t rows, std::int64_t columns) {
    return vk ? Shape{count, heads_v_, columns, rows} : Shape{count, heads_v_, rows, columns};
  };
  if (is_scan()) {
    const std::size_t own = options_.op == ONCHIP_RWKV4 ? 3 : 1;
    const Shape numbers = vk ? Shape{count, heads_v_, dk_} : Shape{count, dk_, heads_v_};
    for (std::size_t part = 0; part < std::min(own, most); ++part) {
      add(name, &parts[part], options_.op == ONCHIP_MAMBA1 ? numbers : Shape{count, heads_v_},
          dtype, output, in_place);
    }
    return;
  }
  if (options_.op == ONCHIP_GSA) {
    add(name, &parts[0], matrix(dk_, kSlots), dtype, output, in_place);
    add(name, &parts[1], matrix(kSlots, dv_), dtype, output, in_place);
    return;
  }
  const bool gates = (row_.options & ops::kTakesGateOptions) != 0;
  const bool exponential = gates && options_.gate == ONCHIP_GATE_EXP;
  const std::size_t wanted = exponential ? 3 : options_.normalize == 1 ? 2 : 1;
  const Shape shapes[] = {matrix(dk_, dv_), {count, heads_v_, dk_}, {count, heads_v_}};
  for (std::size_t part = 0; part < std::min(wanted, most); ++part) {
    add(name, &parts[part], shapes[part], dtype, output, in_place);
  }
}

bool LinearCall::mutate_option() {
  switch (random_.integer(0, 14)) {
    case 0:
      options_.scale = any_double();
      return false;
    case 1:
      options_.eps = any_double();
      return false;
    case 2:
      options_.dt_min = any_double();
      return false;
    case 3:
      options_.dt_max = any_double();
      return false;
    case 4:
      options_.lower_bound = any_double();
      return false;
    case 5:
      options_.chunk_len = random_.chance(0.5) ? 32 : any_integer();
      return false;
    case 6:
      options_.num_householder = any_integer();
      return true;
    case 7:
      options_.op = random_.chance(0.7)
                        ? static_cast<std::int32_t>(random_.integer(0, kLinearOperators))
                        : any_int32();
      return true;
    case 8:
      options_.state_layout = random_.chance(0.7) ? 1 : any_int32();
      return true;
    case 9:
      options_.normalize = any_int32();
      return false;
    case 10:
      options_.gate = any_int32();
      return false;
    case 11:
      (random_.chance(0.5) ? options_.detach_normalizer : options_.dt_softplus) = any_int32();
      return false;
    case 12:
      (random_.chance(0.5) ? options_.qk_l2norm : options_.allow_neg_eigval) = any_int32();
      return false;
    case 13:
      // Not 1: a plan would read the values of tensors, which another mutation may have moved.
      options_.check = random_.one_of({-1, 2, 100});
      return false;
    default:
      options_.backend = random_.one_of<const char*>({"cpu", "cuda.sm90", "reference", "none"});
      return false;
  }
}

bool LinearCall::names(const std::string& message) const {
  const bool known = options_.op >= 1 && options_.op <= kLinearOperators;
  return message.starts_with("linear_") ||
         (known && message.starts_with(ops::linear_row("fuzz", options_.op).name));
}

onchip_status LinearCall::plan(onchip_plan& planned) {
  switch (draw_.phase) {
    case LinearPhase::forward:
      return onchip_linear_forward_plan(&forward_, &planned);
    case LinearPhase::backward:
      return onchip_linear_backward_plan(&backward_, &planned);
    case LinearPhase::step:
      return onchip_linear_step_plan(&step_, &planned);
  }
  return ONCHIP_INTERNAL;
}

onchip_status LinearCall::run(const onchip_plan& planned, void* workspace) {
  switch (draw_.phase) {
    case LinearPhase::forward:
      return onchip_linear_forward_run(&planned, &forward_, workspace, nullptr);
    case LinearPhase::backward:
      return onchip_linear_backward_run(&planned, &backward_, workspace, nullptr);
    case LinearPhase::step:
      return onchip_linear_step_run(&planned, &step_, workspace, nullptr);
  }
  return ONCHIP_INTERNAL;
}

std::string LinearCall::run_forced(cpu::Isa isa) {
  switch (draw_.phase) {
    case LinearPhase::forward:
      return run_on_cpu<onchip_linear_forward_args, LinearForwardProblem>(
          forward_, row_.forward, isa, cpu::plan_linear_forward, cpu::run_linear_forward,
          ops::normalise);
    case LinearPhase::backward:
      return run_on_cpu<onchip_linear_backward_args, LinearBackwardProblem>(
          backward_, row_.backward, isa, cpu::plan_linear_backward, cpu::run_linear_backward,
          ops::normalise);
    case LinearPhase::step:
      return run_on_cpu<onchip_linear_step_args, LinearStepProblem>(
          step_, row_.step, isa, cpu::plan_linear_step, cpu::run_linear_step, ops::normalise);
  }
  return "no such phase";
}

}  // namespace onchip::test
