#include "ops/conv_contract.hpp"

#include <cmath>
#include <string>
#include <utility>

#include "core/status.hpp"
#include "ops/structs.hpp"

namespace onchip::ops {

namespace {

constexpr std::string_view kForward = "causal_conv1d_forward";
constexpr std::string_view kBackward = "causal_conv1d_backward";
constexpr std::string_view kStep = "causal_conv1d_step";

onchip_conv_options read_options(std::string_view op, const onchip_conv_options* options) {
  const onchip_conv_options defaults = ONCHIP_CONV_OPTIONS_INIT;
  if (options == nullptr) return defaults;
  return read_struct(op, "options", options, defaults, sizeof(onchip_conv_options));
}

void require_float(const Call& call, std::string_view name, const TensorView& tensor) {
  require_dtype(call.op(), name, tensor, {DType::f64, DType::f32, DType::f16, DType::bf16});
}

RowsView channel_rows(const TensorView& tensor, bool packed, bool step) {
  RowsView view;
  if (!tensor.present()) return view;
  view.data = tensor.data;
  view.dtype = tensor.dtype;
  view.wanted = true;
  std::size_t axis = 0;
  if (!packed) view.batch_stride = bytes(tensor, axis++);
  if (!step) view.row_stride = bytes(tensor, axis);
  return view;
}

void require_rows(const Call& call, std::string_view name, const TensorView& tensor,
                  const ConvProblem& p, bool step) {
  require_present(call.op(), name, tensor);
  require_dtype(call.op(), name, tensor, {p.dtype});
  if (step) {
    require_shape(call.op(), name, tensor, {p.num_seqs, p.channels}, "[batch, D]");
  } else if (p.packed) {
    require_shape(call.op(), name, tensor, {p.slot, p.channels}, "[total, D]");
  } else {
    require_shape(call.op(), name, tensor, {p.num_seqs, p.slot, p.channels}, "[batch, T, D]");
  }
}

void read_conv(Call& call, const onchip_tensor* x_tensor, const onchip_tensor* weight,
               const onchip_tensor* bias, const onchip_conv_options& options, bool step,
               ConvProblem& p) {
  const std::string_view op = call.op();
  p.op = op.data();
  if (options.activation != ONCHIP_ACTIVATION_NONE &&
      options.activation != ONCHIP_ACTIVATION_SILU) {
    throw_invalid(op, "activation", std::to_string(options.activation),
                  "ONCHIP_ACTIVATION_NONE (0) or ONCHIP_ACTIVATION_SILU (1)");
  }
  p.silu = options.activation == ONCHIP_ACTIVATION_SILU;
  call.fingerprint.add(options.activation);
  const TensorView x = call.input("x", x_tensor);
  p.weight = call.input("weight", weight);
  p.bias = call.input("bias", bias);
  p.cu_seqlens = read_lengths(call, "cu_seqlens", options.cu_seqlens);
  p.seqlens = read_lengths(call, "seqlens", options.seqlens);
  if (step && (p.cu_seqlens.present() || p.seqlens.present())) {
    throw_invalid(op, p.cu_seqlens.present() ? "cu_seqlens" : "seqlens", "a value in a step",
                  "none: it takes one token");
  }
  require_present(op, "x", x);
  require_present(op, "weight", p.weight);
  require_float(call, "x", x);
  require_float(call, "weight", p.weight);
  p.packed = p.cu_seqlens.present();
  const std::int32_t rank = step || p.packed ? 2 : 3;
  if (x.rank != rank) {
    const char* dense = step ? "[batch, D]" : "[batch, T, D] (no cu_seqlens)";
    throw_invalid(op, "x", "shape " + shape_text(x),
                  p.packed ? "[total, D] (cu_seqlens given)" : dense);
  }
  const auto last = static_cast<std::size_t>(rank - 1);
  p.dtype = x.dtype;
  p.device = x.device;
  p.channels = x.shape[last];
  p.slot = step ? 1 : x.shape[last - 1];
  if (p.packed) {
    if (p.cu_seqlens.shape[0] < 1) {
      throw_invalid(op, "cu_seqlens", "shape " + shape_text(p.cu_seqlens),
                    "num_seqs + 1 entries, at least 1");
    }
    p.num_seqs = p.cu_seqlens.shape[0] - 1;
    check_cu_seqlens(call, "cu_seqlens", p.cu_seqlens, p.slot);
  } else {
    p.num_seqs = x.shape[0];
  }
  if (p.seqlens.present()) require_shape(op, "seqlens", p.seqlens, {p.num_seqs}, "[num_seqs]");
  check_seqlens(call, "seqlens", p.seqlens, p.cu_seqlens, p.slot);
  if (p.weight.rank != 2 || p.weight.shape[0] != p.channels || p.weight.shape[1] < 1) {
    throw_invalid(op, "weight", "shape " + shape_text(p.weight),
                  "[D, W] with D = " + std::to_string(p.channels) + ", W at least 1");
  }
  p.width = p.weight.shape[1];
  if (p.bias.present()) {
    require_float(call, "bias", p.bias);
    require_shape(op, "bias", p.bias, {p.channels}, "[D]");
  }
  p.x = channel_rows(x, p.packed, step);
}

void require_state(const Call& call, std::string_view name, const TensorView& state,
                   const ConvProblem& p, std::int64_t count) {
  if (!state.present()) return;
  require_dtype(call.op(), name, state, {p.dtype});
  require_shape(call.op(), name, state, {count, p.channels, p.width}, "[N, D, W]");
}

void finish(Call& call, const char* backend, Device device, CallFacts& facts) {
  call.check_devices(device, "x");
  call.check_aliasing();
  facts.op = call.op();
  facts.forced_backend = backend_name(call, backend);
  facts.fingerprint = call.fingerprint.value();
}

}  // namespace

ConvForwardProblem normalise(const onchip_conv_forward_args& args, CallFacts& facts) {
  Call call(kForward);
  const onchip_conv_options options = read_options(kForward, args.options);
  ConvForwardProblem p;
  read_conv(call, args.x, args.weight, args.bias, options, false, p);
  p.initial_state = call.input("initial_state", args.initial_state);
  const TensorView y = call.output("y", args.y);
  p.final_state = call.output("final_state", args.final_state);
  require_rows(call, "y", y, p, false);
  require_state(call, "initial_state", p.initial_state, p, p.num_seqs);
  require_state(call, "final_state", p.final_state, p, p.num_seqs);
  p.y = channel_rows(y, p.packed, false);
  finish(call, options.backend, p.device, facts);
  return p;
}

ConvBackwardProblem normalise(const onchip_conv_backward_args& args, CallFacts& facts) {
  Call call(kBackward);
  const onchip_conv_options options = read_options(kBackward, args.options);
  ConvBackwardProblem p;
  read_conv(call, args.x, args.weight, args.bias, options, false, p);
  const TensorView d_y = call.input("d_y", args.d_y);
  p.initial_state = call.input("initial_state", args.initial_state);
  p.d_final_state = call.input("d_final_state", args.d_final_state);
  const TensorView dx = call.output("dx", args.dx);
  p.dweight = call.output("dweight", args.dweight);
  p.dbias = call.output("dbias", args.dbias);
  p.dinitial_state = call.output("dinitial_state", args.dinitial_state);
  require_rows(call, "d_y", d_y, p, false);
  if (dx.present()) require_rows(call, "dx", dx, p, false);
  require_state(call, "initial_state", p.initial_state, p, p.num_seqs);
  require_state(call, "d_final_state", p.d_final_state, p, p.num_seqs);
  require_state(call, "dinitial_state", p.dinitial_state, p, p.num_seqs);
  if (p.dinitial_state.present() && !p.initial_state.present()) {
    throw_invalid(kBackward, "dinitial_state", "a tensor without initial_state",
                  "an initial state to differentiate");
  }
  if (p.dweight.present()) {
    require_dtype(kBackward, "dweight", p.dweight, {p.weight.dtype});
    require_shape(kBackward, "dweight", p.dweight, {p.channels, p.width}, "[D, W]");
  }
  if (p.dbias.present()) {
    if (!p.bias.present()) {
      throw_invalid(kBackward, "dbias", "a tensor without bias", "a bias to differentiate");
    }
    require_dtype(kBackward, "dbias", p.dbias, {p.bias.dtype});
    require_shape(kBackward, "dbias", p.dbias, {p.channels}, "[D]");
  }
  p.d_y = channel_rows(d_y, p.packed, false);
  p.dx = channel_rows(dx, p.packed, false);
  finish(call, options.backend, p.device, facts);
  return p;
}

ConvStepProblem normalise(const onchip_conv_step_args& args, CallFacts& facts) {
  Call call(kStep);
  const onchip_conv_options options = read_options(kStep, args.options);
  ConvStepProblem p;
  read_conv(call, args.x, args.weight, args.bias, options, true, p);
  p.state_indices = call.input("state_indices", args.state_indices);
  p.state = call.output("state", args.state);
  const TensorView y = call.output("y", args.y);
  require_rows(call, "y", y, p, true);
  require_present(kStep, "state", p.state);
  std::int64_t slots = p.num_seqs;
  if (p.state_indices.present()) {
    require_dtype(kStep, "state_indices", p.state_indices, {DType::i32});
    require_shape(kStep, "state_indices", p.state_indices, {p.num_seqs}, "[batch]");
    slots = p.state.rank > 0 ? p.state.shape[0] : 0;
  }
  require_state(call, "state", p.state, p, slots);
  if (p.state_indices.present()) check_state_indices(call, p.state_indices, slots);
  p.y = channel_rows(y, false, true);
  finish(call, options.backend, p.device, facts);
  return p;
}

// ---- norms --------------------------------------------------------------------------------------

namespace {

constexpr std::string_view kNormNames[2][2] = {
    {"l2norm_forward", "l2norm_backward"}, {"rms_norm_gated_forward", "rms_norm_gated_backward"}};

onchip_norm_options read_options(std::string_view op, const onchip_norm_options* options) {
  const onchip_norm_options defaults = ONCHIP_NORM_OPTIONS_INIT;
  if (options == nullptr) return defaults;
  return read_struct(op, "options", options, defaults, sizeof(onchip_norm_options));
}

std::string_view norm_name(std::string_view op, const onchip_norm_options& options, bool backward) {
  if (options.kind != ONCHIP_NORM_L2 && options.kind != ONCHIP_NORM_RMS) {
    throw_invalid(op, "kind", std::to_string(options.kind),
                  "ONCHIP_NORM_L2 (0) or ONCHIP_NORM_RMS (1)");
  }
  return kNormNames[options.kind][backward ? 1 : 0];
}

void require_like_x(const Call& call, std::string_view name, const TensorView& tensor,
                    const TensorView& x) {
  bool same = tensor.rank == x.rank;
  for (std::int32_t i = 0; same && i < x.rank; ++i) {
    const auto axis = static_cast<std::size_t>(i);
    same = tensor.shape[axis] == x.shape[axis];
  }
  if (!same) {
    throw_invalid(call.op(), name, "shape " + shape_text(tensor), "x's shape " + shape_text(x));
  }
}

void read_norm(Call& call, const onchip_tensor* x, const onchip_tensor* gate,
               const onchip_tensor* weight, const onchip_norm_options& options, NormProblem& p) {
  const std::string_view op = call.op();
  p.op = op.data();
  p.x = call.input("x", x);
  p.gate = call.input("gate", gate);
  p.weight = call.input("weight", weight);
  require_present(op, "x", p.x);
  require_float(call, "x", p.x);
  if (p.x.rank < 1) throw_invalid(op, "x", "a number", "[.., D]");
  p.dtype = p.x.dtype;
  p.device = p.x.device;
  p.dim = p.x.shape[static_cast<std::size_t>(p.x.rank - 1)];
  p.rows = p.dim == 0 ? 0 : p.x.numel() / p.dim;
  p.l2 = options.kind == ONCHIP_NORM_L2;
  for (const auto& [name, tensor] :
       {std::pair<std::string_view, const TensorView*>{"gate", &p.gate}, {"weight", &p.weight}}) {
    if (!tensor->present()) continue;
    if (p.l2) throw_invalid(op, name, "a tensor", "none: the L2 norm does not take it");
    require_float(call, name, *tensor);
  }
  if (p.gate.present()) require_like_x(call, "gate", p.gate, p.x);
  if (p.weight.present()) require_shape(op, "weight", p.weight, {p.dim}, "[D]");
  if (!(options.eps > 0.0) || !std::isfinite(options.eps)) {
    throw_invalid(op, "eps", number_text(options.eps), "a finite number above 0", "1e-6");
  }
  p.eps = options.eps;
  p.group_size = options.group_size == 0 ? p.dim : options.group_size;
  if (options.group_size < 0 || (p.group_size != 0 && p.dim % p.group_size != 0)) {
    throw_invalid(op, "group_size", std::to_string(options.group_size),
                  "a divisor of D = " + std::to_string(p.dim) + ", or 0 for D", "0");
  }
  const bool gated = p.gate.present();
  require_both(op, "gate", gated, "activation", options.activation != ONCHIP_ACTIVATION_NONE);
  const bool named = options.activation == ONCHIP_ACTIVATION_SILU ||
                     options.activation == ONCHIP_ACTIVATION_SIGMOID;
  if (gated && !named) {
    throw_invalid(op, "activation", std::to_string(options.activation),
                  "ONCHIP_ACTIVATION_SILU (1) or ONCHIP_ACTIVATION_SIGMOID (2)");
  }
  p.activation = gated ? static_cast<Activation>(options.activation) : Activation::none;
  p.gate_first = flag(op, "gate_first", options.gate_first) == 1;
  if (p.gate_first && !gated) {
    throw_invalid(op, "gate_first", "1 without a gate", "0, or a gate");
  }
  call.fingerprint.add(options.eps);
  call.fingerprint.add(options.group_size);
  for (const std::int32_t value : {options.kind, options.activation, options.gate_first}) {
    call.fingerprint.add(value);
  }
}

}  // namespace

NormForwardProblem normalise(const onchip_norm_forward_args& args, CallFacts& facts) {
  const onchip_norm_options options = read_options(facts.op, args.options);
  Call call(norm_name(facts.op, options, false));
  NormForwardProblem p;
  read_norm(call, args.x, args.gate, args.weight, options, p);
  p.y = call.output("y", args.y);
  require_present(call.op(), "y", p.y);
  require_dtype(call.op(), "y", p.y, {p.dtype});
  require_like_x(call, "y", p.y, p.x);
  finish(call, options.backend, p.device, facts);
  return p;
}

NormBackwardProblem normalise(const onchip_norm_backward_args& args, CallFacts& facts) {
  const onchip_norm_options options = read_options(facts.op, args.options);
  Call call(norm_name(facts.op, options, true));
  NormBackwardProblem p;
  read_norm(call, args.x, args.gate, args.weight, options, p);
  p.d_y = call.input("d_y", args.d_y);
  p.dx = call.output("dx", args.dx);
  p.dgate = call.output("dgate", args.dgate);
  p.dweight = call.output("dweight", args.dweight);
  require_present(call.op(), "d_y", p.d_y);
  require_dtype(call.op(), "d_y", p.d_y, {p.dtype});
  require_like_x(call, "d_y", p.d_y, p.x);
  if (p.dx.present()) {
    require_dtype(call.op(), "dx", p.dx, {p.dtype});
    require_like_x(call, "dx", p.dx, p.x);
  }
  if (p.dgate.present()) {
    if (!p.gate.present()) throw_invalid(call.op(), "dgate", "a tensor without gate", "a gate");
    require_dtype(call.op(), "dgate", p.dgate, {p.gate.dtype});
    require_like_x(call, "dgate", p.dgate, p.x);
  }
  if (p.dweight.present()) {
    if (!p.weight.present()) {
      throw_invalid(call.op(), "dweight", "a tensor without weight", "a weight");
    }
    require_dtype(call.op(), "dweight", p.dweight, {p.weight.dtype});
    require_shape(call.op(), "dweight", p.dweight, {p.dim}, "[D]");
  }
  finish(call, options.backend, p.device, facts);
  return p;
}

}  // namespace onchip::ops
