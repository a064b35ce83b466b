#include "call.hpp"

#include <nanobind/stl/optional.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <span>
#include <string>

#include "tensor.hpp"

namespace onchip_python {

namespace {

// ---- the argument structs as tables -------------------------------------------------------------

enum class Kind : std::uint8_t {
  kTensor,
  kReal,
  kCount,
  kFlag,
  kAlignment,
  kPrecision,
  kStateLayout,
  kInputGate,
  kActivation,
  kName
};

struct Field {
  const char* name;
  Kind kind;
  std::size_t offset;
  nb::handle key = {};  // `name` as an interned Python string, kept for ever
};

#define ONCHIP_FIELD(type, name, kind) \
  Field { #name, Kind::kind, offsetof(type, name) }

std::array options_fields = {
    ONCHIP_FIELD(onchip_attention_options, scale, kReal),
    ONCHIP_FIELD(onchip_attention_options, softcap, kReal),
    ONCHIP_FIELD(onchip_attention_options, dropout_p, kReal),
    ONCHIP_FIELD(onchip_attention_options, window_left, kCount),
    ONCHIP_FIELD(onchip_attention_options, window_right, kCount),
    ONCHIP_FIELD(onchip_attention_options, max_seqlen_q, kCount),
    ONCHIP_FIELD(onchip_attention_options, max_seqlen_kv, kCount),
    ONCHIP_FIELD(onchip_attention_options, causal, kFlag),
    ONCHIP_FIELD(onchip_attention_options, alignment, kAlignment),
    ONCHIP_FIELD(onchip_attention_options, precision, kPrecision),
    ONCHIP_FIELD(onchip_attention_options, deterministic, kFlag),
    ONCHIP_FIELD(onchip_attention_options, batch_invariant, kFlag),
    ONCHIP_FIELD(onchip_attention_options, check, kFlag),
    ONCHIP_FIELD(onchip_attention_options, backend, kName),
    ONCHIP_FIELD(onchip_attention_options, bias, kTensor),
    ONCHIP_FIELD(onchip_attention_options, mask, kTensor),
    ONCHIP_FIELD(onchip_attention_options, alibi_slopes, kTensor),
    ONCHIP_FIELD(onchip_attention_options, q_segment_ids, kTensor),
    ONCHIP_FIELD(onchip_attention_options, kv_segment_ids, kTensor),
    ONCHIP_FIELD(onchip_attention_options, sink, kTensor),
    ONCHIP_FIELD(onchip_attention_options, dropout_rng, kTensor),
    ONCHIP_FIELD(onchip_attention_options, cu_seqlens_q, kTensor),
    ONCHIP_FIELD(onchip_attention_options, cu_seqlens_kv, kTensor),
    ONCHIP_FIELD(onchip_attention_options, seqlens_q, kTensor),
    ONCHIP_FIELD(onchip_attention_options, seqlens_kv, kTensor),
};

std::array forward_fields = {
    ONCHIP_FIELD(onchip_attention_forward_args, q, kTensor),
    ONCHIP_FIELD(onchip_attention_forward_args, k, kTensor),
    ONCHIP_FIELD(onchip_attention_forward_args, v, kTensor),
    ONCHIP_FIELD(onchip_attention_forward_args, o, kTensor),
    ONCHIP_FIELD(onchip_attention_forward_args, lse, kTensor),
};

std::array backward_fields = {
    ONCHIP_FIELD(onchip_attention_backward_args, d_o, kTensor),
    ONCHIP_FIELD(onchip_attention_backward_args, q, kTensor),
    ONCHIP_FIELD(onchip_attention_backward_args, k, kTensor),
    ONCHIP_FIELD(onchip_attention_backward_args, v, kTensor),
    ONCHIP_FIELD(onchip_attention_backward_args, o, kTensor),
    ONCHIP_FIELD(onchip_attention_backward_args, lse, kTensor),
    ONCHIP_FIELD(onchip_attention_backward_args, d_lse, kTensor),
    ONCHIP_FIELD(onchip_attention_backward_args, dq, kTensor),
    ONCHIP_FIELD(onchip_attention_backward_args, dk, kTensor),
    ONCHIP_FIELD(onchip_attention_backward_args, dv, kTensor),
    ONCHIP_FIELD(onchip_attention_backward_args, dbias, kTensor),
    ONCHIP_FIELD(onchip_attention_backward_args, dsink, kTensor),
};

std::array merge_fields = {
    ONCHIP_FIELD(onchip_attention_merge_args, o1, kTensor),
    ONCHIP_FIELD(onchip_attention_merge_args, lse1, kTensor),
    ONCHIP_FIELD(onchip_attention_merge_args, o2, kTensor),
    ONCHIP_FIELD(onchip_attention_merge_args, lse2, kTensor),
    ONCHIP_FIELD(onchip_attention_merge_args, o, kTensor),
    ONCHIP_FIELD(onchip_attention_merge_args, lse, kTensor),
    ONCHIP_FIELD(onchip_attention_merge_args, backend, kName),
};

std::array decode_fields = {
    ONCHIP_FIELD(onchip_attention_decode_args, q, kTensor),
    ONCHIP_FIELD(onchip_attention_decode_args, k_cache, kTensor),
    ONCHIP_FIELD(onchip_attention_decode_args, v_cache, kTensor),
    ONCHIP_FIELD(onchip_attention_decode_args, cache_seqlens, kTensor),
    ONCHIP_FIELD(onchip_attention_decode_args, k_new, kTensor),
    ONCHIP_FIELD(onchip_attention_decode_args, v_new, kTensor),
    ONCHIP_FIELD(onchip_attention_decode_args, page_table, kTensor),
    ONCHIP_FIELD(onchip_attention_decode_args, cache_slot, kTensor),
    ONCHIP_FIELD(onchip_attention_decode_args, rotary_cos, kTensor),
    ONCHIP_FIELD(onchip_attention_decode_args, rotary_sin, kTensor),
    ONCHIP_FIELD(onchip_attention_decode_args, rotary_interleaved, kFlag),
    ONCHIP_FIELD(onchip_attention_decode_args, q_positions, kTensor),
    ONCHIP_FIELD(onchip_attention_decode_args, o, kTensor),
    ONCHIP_FIELD(onchip_attention_decode_args, lse, kTensor),
};

std::array linear_options_fields = {
    ONCHIP_FIELD(onchip_linear_options, scale, kReal),
    ONCHIP_FIELD(onchip_linear_options, eps, kReal),
    ONCHIP_FIELD(onchip_linear_options, dt_min, kReal),
    ONCHIP_FIELD(onchip_linear_options, dt_max, kReal),
    ONCHIP_FIELD(onchip_linear_options, lower_bound, kReal),
    ONCHIP_FIELD(onchip_linear_options, chunk_len, kCount),
    ONCHIP_FIELD(onchip_linear_options, num_householder, kCount),
    ONCHIP_FIELD(onchip_linear_options, state_layout, kStateLayout),
    ONCHIP_FIELD(onchip_linear_options, normalize, kFlag),
    ONCHIP_FIELD(onchip_linear_options, gate, kInputGate),
    ONCHIP_FIELD(onchip_linear_options, detach_normalizer, kFlag),
    ONCHIP_FIELD(onchip_linear_options, dt_softplus, kFlag),
    ONCHIP_FIELD(onchip_linear_options, qk_l2norm, kFlag),
    ONCHIP_FIELD(onchip_linear_options, allow_neg_eigval, kFlag),
    ONCHIP_FIELD(onchip_linear_options, check, kFlag),
    ONCHIP_FIELD(onchip_linear_options, backend, kName),
    ONCHIP_FIELD(onchip_linear_options, cu_seqlens, kTensor),
    ONCHIP_FIELD(onchip_linear_options, seqlens, kTensor),
};

// The tensors of a linear operator by role, and their gradients: two structs of one type.
#define ONCHIP_LINEAR_TENSORS(prefix)                                                   \
  {                                                                                     \
      Field{prefix "q", Kind::kTensor, offsetof(onchip_linear_tensors, q)},             \
      Field{prefix "k", Kind::kTensor, offsetof(onchip_linear_tensors, k)},             \
      Field{prefix "v", Kind::kTensor, offsetof(onchip_linear_tensors, v)},             \
      Field{prefix "gate", Kind::kTensor, offsetof(onchip_linear_tensors, gate)},       \
      Field{prefix "beta", Kind::kTensor, offsetof(onchip_linear_tensors, beta)},       \
      Field{prefix "a", Kind::kTensor, offsetof(onchip_linear_tensors, a)},             \
      Field{prefix "b", Kind::kTensor, offsetof(onchip_linear_tensors, b)},             \
      Field{prefix "u", Kind::kTensor, offsetof(onchip_linear_tensors, u)},             \
      Field{prefix "rate", Kind::kTensor, offsetof(onchip_linear_tensors, rate)},       \
      Field{prefix "dt_bias", Kind::kTensor, offsetof(onchip_linear_tensors, dt_bias)}, \
      Field{prefix "skip", Kind::kTensor, offsetof(onchip_linear_tensors, skip)},       \
      Field{prefix "z", Kind::kTensor, offsetof(onchip_linear_tensors, z)},             \
  }

std::array linear_inputs_fields = ONCHIP_LINEAR_TENSORS("inputs.");
std::array linear_gradients_fields = ONCHIP_LINEAR_TENSORS("gradients.");
#undef ONCHIP_LINEAR_TENSORS

std::array linear_forward_fields = {
    ONCHIP_FIELD(onchip_linear_forward_args, o, kTensor),
    ONCHIP_FIELD(onchip_linear_forward_args, initial_state[0], kTensor),
    ONCHIP_FIELD(onchip_linear_forward_args, initial_state[1], kTensor),
    ONCHIP_FIELD(onchip_linear_forward_args, initial_state[2], kTensor),
    ONCHIP_FIELD(onchip_linear_forward_args, final_state[0], kTensor),
    ONCHIP_FIELD(onchip_linear_forward_args, final_state[1], kTensor),
    ONCHIP_FIELD(onchip_linear_forward_args, final_state[2], kTensor),
};

std::array linear_backward_fields = {
    ONCHIP_FIELD(onchip_linear_backward_args, d_o, kTensor),
    ONCHIP_FIELD(onchip_linear_backward_args, initial_state[0], kTensor),
    ONCHIP_FIELD(onchip_linear_backward_args, initial_state[1], kTensor),
    ONCHIP_FIELD(onchip_linear_backward_args, initial_state[2], kTensor),
    ONCHIP_FIELD(onchip_linear_backward_args, d_final_state[0], kTensor),
    ONCHIP_FIELD(onchip_linear_backward_args, d_final_state[1], kTensor),
    ONCHIP_FIELD(onchip_linear_backward_args, d_final_state[2], kTensor),
    ONCHIP_FIELD(onchip_linear_backward_args, dinitial_state[0], kTensor),
    ONCHIP_FIELD(onchip_linear_backward_args, dinitial_state[1], kTensor),
    ONCHIP_FIELD(onchip_linear_backward_args, dinitial_state[2], kTensor),
};

std::array linear_step_fields = {
    ONCHIP_FIELD(onchip_linear_step_args, o, kTensor),
    ONCHIP_FIELD(onchip_linear_step_args, state[0], kTensor),
    ONCHIP_FIELD(onchip_linear_step_args, state[1], kTensor),
    ONCHIP_FIELD(onchip_linear_step_args, state[2], kTensor),
    ONCHIP_FIELD(onchip_linear_step_args, state_indices, kTensor),
};

std::array conv_options_fields = {
    ONCHIP_FIELD(onchip_conv_options, activation, kActivation),
    ONCHIP_FIELD(onchip_conv_options, backend, kName),
    ONCHIP_FIELD(onchip_conv_options, cu_seqlens, kTensor),
    ONCHIP_FIELD(onchip_conv_options, seqlens, kTensor),
};

std::array norm_options_fields = {
    ONCHIP_FIELD(onchip_norm_options, eps, kReal),
    ONCHIP_FIELD(onchip_norm_options, group_size, kCount),
    ONCHIP_FIELD(onchip_norm_options, activation, kActivation),
    ONCHIP_FIELD(onchip_norm_options, gate_first, kFlag),
    ONCHIP_FIELD(onchip_norm_options, backend, kName),
};

std::array conv_forward_fields = {
    ONCHIP_FIELD(onchip_conv_forward_args, x, kTensor),
    ONCHIP_FIELD(onchip_conv_forward_args, weight, kTensor),
    ONCHIP_FIELD(onchip_conv_forward_args, bias, kTensor),
    ONCHIP_FIELD(onchip_conv_forward_args, initial_state, kTensor),
    ONCHIP_FIELD(onchip_conv_forward_args, y, kTensor),
    ONCHIP_FIELD(onchip_conv_forward_args, final_state, kTensor),
};

std::array conv_backward_fields = {
    ONCHIP_FIELD(onchip_conv_backward_args, d_y, kTensor),
    ONCHIP_FIELD(onchip_conv_backward_args, x, kTensor),
    ONCHIP_FIELD(onchip_conv_backward_args, weight, kTensor),
    ONCHIP_FIELD(onchip_conv_backward_args, bias, kTensor),
    ONCHIP_FIELD(onchip_conv_backward_args, initial_state, kTensor),
    ONCHIP_FIELD(onchip_conv_backward_args, d_final_state, kTensor),
    ONCHIP_FIELD(onchip_conv_backward_args, dx, kTensor),
    ONCHIP_FIELD(onchip_conv_backward_args, dweight, kTensor),
    ONCHIP_FIELD(onchip_conv_backward_args, dbias, kTensor),
    ONCHIP_FIELD(onchip_conv_backward_args, dinitial_state, kTensor),
};

std::array conv_step_fields = {
    ONCHIP_FIELD(onchip_conv_step_args, x, kTensor),
    ONCHIP_FIELD(onchip_conv_step_args, weight, kTensor),
    ONCHIP_FIELD(onchip_conv_step_args, bias, kTensor),
    ONCHIP_FIELD(onchip_conv_step_args, state, kTensor),
    ONCHIP_FIELD(onchip_conv_step_args, state_indices, kTensor),
    ONCHIP_FIELD(onchip_conv_step_args, y, kTensor),
};

std::array norm_forward_fields = {
    ONCHIP_FIELD(onchip_norm_forward_args, x, kTensor),
    ONCHIP_FIELD(onchip_norm_forward_args, gate, kTensor),
    ONCHIP_FIELD(onchip_norm_forward_args, weight, kTensor),
    ONCHIP_FIELD(onchip_norm_forward_args, y, kTensor),
};

std::array norm_backward_fields = {
    ONCHIP_FIELD(onchip_norm_backward_args, d_y, kTensor),
    ONCHIP_FIELD(onchip_norm_backward_args, x, kTensor),
    ONCHIP_FIELD(onchip_norm_backward_args, gate, kTensor),
    ONCHIP_FIELD(onchip_norm_backward_args, weight, kTensor),
    ONCHIP_FIELD(onchip_norm_backward_args, dx, kTensor),
    ONCHIP_FIELD(onchip_norm_backward_args, dgate, kTensor),
    ONCHIP_FIELD(onchip_norm_backward_args, dweight, kTensor),
};

// In the order of onchip_linear_operator, from 1.
constexpr std::array<std::string_view, 18> kLinearNames = {"linear_attention",
                                                           "retention",
                                                           "lightning_attention",
                                                           "simple_gla",
                                                           "mamba2",
                                                           "mlstm",
                                                           "gla",
                                                           "rwkv6",
                                                           "hgrn2",
                                                           "delta_rule",
                                                           "gated_delta_rule",
                                                           "kda",
                                                           "comba",
                                                           "gdn2",
                                                           "gated_delta_product",
                                                           "rwkv7",
                                                           "iplr",
                                                           "gsa"};

#undef ONCHIP_FIELD

union Args {
  std::size_t struct_size;
  onchip_attention_forward_args forward;
  onchip_attention_backward_args backward;
  onchip_attention_merge_args merge;
  onchip_attention_decode_args decode;
  onchip_linear_forward_args linear_forward;
  onchip_linear_backward_args linear_backward;
  onchip_linear_step_args linear_step;
  onchip_conv_forward_args conv_forward;
  onchip_conv_backward_args conv_backward;
  onchip_conv_step_args conv_step;
  onchip_norm_forward_args norm_forward;
  onchip_norm_backward_args norm_backward;
};

// Everything that a call's args point to.
struct Structs {
  Args args{};
  onchip_attention_options options = ONCHIP_ATTENTION_OPTIONS_INIT;
  onchip_linear_options linear_options = ONCHIP_LINEAR_OPTIONS_INIT;
  onchip_linear_tensors inputs = ONCHIP_LINEAR_TENSORS_INIT;
  onchip_linear_tensors gradients = ONCHIP_LINEAR_TENSORS_INIT;
  onchip_conv_options conv_options = ONCHIP_CONV_OPTIONS_INIT;
  onchip_norm_options norm_options = ONCHIP_NORM_OPTIONS_INIT;
};

// One struct of an operator.
struct Section {
  std::span<Field> fields;
  std::size_t offset;  // in Structs
  bool outputs;        // some of its tensors may be
};

const std::array<Section, 2> kForwardSections = {
    {{forward_fields, offsetof(Structs, args), true},
     {options_fields, offsetof(Structs, options), false}}};
const std::array<Section, 2> kBackwardSections = {
    {{backward_fields, offsetof(Structs, args), true},
     {options_fields, offsetof(Structs, options), false}}};
const std::array<Section, 1> kMergeSections = {{{merge_fields, offsetof(Structs, args), true}}};
const std::array<Section, 2> kDecodeSections = {
    {{decode_fields, offsetof(Structs, args), true},
     {options_fields, offsetof(Structs, options), false}}};
const std::array<Section, 3> kLinearForwardSections = {
    {{linear_forward_fields, offsetof(Structs, args), true},
     {linear_inputs_fields, offsetof(Structs, inputs), false},
     {linear_options_fields, offsetof(Structs, linear_options), false}}};
const std::array<Section, 4> kLinearBackwardSections = {
    {{linear_backward_fields, offsetof(Structs, args), true},
     {linear_gradients_fields, offsetof(Structs, gradients), true},
     {linear_inputs_fields, offsetof(Structs, inputs), false},
     {linear_options_fields, offsetof(Structs, linear_options), false}}};
const std::array<Section, 3> kLinearStepSections = {
    {{linear_step_fields, offsetof(Structs, args), true},
     {linear_inputs_fields, offsetof(Structs, inputs), false},
     {linear_options_fields, offsetof(Structs, linear_options), false}}};

const std::array<Section, 2> kConvForwardSections = {
    {{conv_forward_fields, offsetof(Structs, args), true},
     {conv_options_fields, offsetof(Structs, conv_options), false}}};
const std::array<Section, 2> kConvBackwardSections = {
    {{conv_backward_fields, offsetof(Structs, args), true},
     {conv_options_fields, offsetof(Structs, conv_options), false}}};
const std::array<Section, 2> kConvStepSections = {
    {{conv_step_fields, offsetof(Structs, args), true},
     {conv_options_fields, offsetof(Structs, conv_options), false}}};
const std::array<Section, 2> kNormForwardSections = {
    {{norm_forward_fields, offsetof(Structs, args), true},
     {norm_options_fields, offsetof(Structs, norm_options), false}}};
const std::array<Section, 2> kNormBackwardSections = {
    {{norm_backward_fields, offsetof(Structs, args), true},
     {norm_options_fields, offsetof(Structs, norm_options), false}}};

constexpr std::size_t kMostFields = 64;
static_assert(linear_backward_fields.size() + 2 * linear_inputs_fields.size() +
                  linear_options_fields.size() <=
              kMostFields);

struct Operator;
struct Named;

struct Call {
  Call(const nb::str& operator_name, const nb::dict& values);
  Call(const Named& called, const nb::str& operator_name, const nb::dict& values);
  Call(const Call&) = delete;  // args point to options
  Call& operator=(const Call&) = delete;

  void make_plan();
  void bind(const nb::dict& tensors);
  void run(const Tensor* workspace, std::uint64_t stream);
  nb::str explain() const;

  const Operator& op;
  nb::object held_name;
  const char* name;  // of the operator as messages say it
  Structs structs;
  onchip_plan plan = ONCHIP_PLAN_INIT;
  bool planned = false;
  // The Tensors and names that the structs point to, by the fields of the operator's sections.
  std::array<nb::object, kMostFields> held;
};

struct Operator {
  onchip_operator number;
  const char* name;
  std::span<const Section> sections;
  void (*initialise)(Structs& structs);
  onchip_status (*plan)(Call& call);
  onchip_status (*run)(Call& call, void* workspace, void* stream);
};

const std::array<Operator, 14> kOperators = {{
    {ONCHIP_ATTENTION_FORWARD, "attention_forward", kForwardSections,
     [](Structs& structs) {
       structs.args.forward = ONCHIP_ATTENTION_FORWARD_ARGS_INIT;
       structs.args.forward.options = &structs.options;
     },
     [](Call& call) {
       return onchip_attention_forward_plan(&call.structs.args.forward, &call.plan);
     },
     [](Call& call, void* workspace, void* stream) {
       return onchip_attention_forward_run(&call.plan, &call.structs.args.forward, workspace,
                                           stream);
     }},
    {ONCHIP_ATTENTION_BACKWARD, "attention_backward", kBackwardSections,
     [](Structs& structs) {
       structs.args.backward = ONCHIP_ATTENTION_BACKWARD_ARGS_INIT;
       structs.args.backward.options = &structs.options;
     },
     [](Call& call) {
       return onchip_attention_backward_plan(&call.structs.args.backward, &call.plan);
     },
     [](Call& call, void* workspace, void* stream) {
       return onchip_attention_backward_run(&call.plan, &call.structs.args.backward, workspace,
                                            stream);
     }},
    {ONCHIP_ATTENTION_MERGE, "merge", kMergeSections,
     [](Structs& structs) { structs.args.merge = ONCHIP_ATTENTION_MERGE_ARGS_INIT; },
     [](Call& call) { return onchip_attention_merge_plan(&call.structs.args.merge, &call.plan); },
     [](Call& call, void* workspace, void* stream) {
       return onchip_attention_merge_run(&call.plan, &call.structs.args.merge, workspace, stream);
     }},
    {ONCHIP_LINEAR_FORWARD, "linear_forward", kLinearForwardSections,
     [](Structs& structs) {
       structs.args.linear_forward = ONCHIP_LINEAR_FORWARD_ARGS_INIT;
       structs.args.linear_forward.inputs = &structs.inputs;
       structs.args.linear_forward.options = &structs.linear_options;
     },
     [](Call& call) {
       return onchip_linear_forward_plan(&call.structs.args.linear_forward, &call.plan);
     },
     [](Call& call, void* workspace, void* stream) {
       return onchip_linear_forward_run(&call.plan, &call.structs.args.linear_forward, workspace,
                                        stream);
     }},
    {ONCHIP_LINEAR_BACKWARD, "linear_backward", kLinearBackwardSections,
     [](Structs& structs) {
       structs.args.linear_backward = ONCHIP_LINEAR_BACKWARD_ARGS_INIT;
       structs.args.linear_backward.inputs = &structs.inputs;
       structs.args.linear_backward.gradients = &structs.gradients;
       structs.args.linear_backward.options = &structs.linear_options;
     },
     [](Call& call) {
       return onchip_linear_backward_plan(&call.structs.args.linear_backward, &call.plan);
     },
     [](Call& call, void* workspace, void* stream) {
       return onchip_linear_backward_run(&call.plan, &call.structs.args.linear_backward, workspace,
                                         stream);
     }},
    {ONCHIP_LINEAR_STEP, "linear_step", kLinearStepSections,
     [](Structs& structs) {
       structs.args.linear_step = ONCHIP_LINEAR_STEP_ARGS_INIT;
       structs.args.linear_step.inputs = &structs.inputs;
       structs.args.linear_step.options = &structs.linear_options;
     },
     [](Call& call) { return onchip_linear_step_plan(&call.structs.args.linear_step, &call.plan); },
     [](Call& call, void* workspace, void* stream) {
       return onchip_linear_step_run(&call.plan, &call.structs.args.linear_step, workspace, stream);
     }},
    {ONCHIP_ATTENTION_DECODE, "attention_decode", kDecodeSections,
     [](Structs& structs) {
       structs.args.decode = ONCHIP_ATTENTION_DECODE_ARGS_INIT;
       structs.args.decode.options = &structs.options;
     },
     [](Call& call) { return onchip_attention_decode_plan(&call.structs.args.decode, &call.plan); },
     [](Call& call, void* workspace, void* stream) {
       return onchip_attention_decode_run(&call.plan, &call.structs.args.decode, workspace, stream);
     }},
    {ONCHIP_CONV_FORWARD, "causal_conv1d_forward", kConvForwardSections,
     [](Structs& structs) {
       structs.args.conv_forward = ONCHIP_CONV_FORWARD_ARGS_INIT;
       structs.args.conv_forward.options = &structs.conv_options;
     },
     [](Call& call) {
       return onchip_conv_forward_plan(&call.structs.args.conv_forward, &call.plan);
     },
     [](Call& call, void* workspace, void* stream) {
       return onchip_conv_forward_run(&call.plan, &call.structs.args.conv_forward, workspace,
                                      stream);
     }},
    {ONCHIP_CONV_BACKWARD, "causal_conv1d_backward", kConvBackwardSections,
     [](Structs& structs) {
       structs.args.conv_backward = ONCHIP_CONV_BACKWARD_ARGS_INIT;
       structs.args.conv_backward.options = &structs.conv_options;
     },
     [](Call& call) {
       return onchip_conv_backward_plan(&call.structs.args.conv_backward, &call.plan);
     },
     [](Call& call, void* workspace, void* stream) {
       return onchip_conv_backward_run(&call.plan, &call.structs.args.conv_backward, workspace,
                                       stream);
     }},
    {ONCHIP_CONV_STEP, "causal_conv1d_step", kConvStepSections,
     [](Structs& structs) {
       structs.args.conv_step = ONCHIP_CONV_STEP_ARGS_INIT;
       structs.args.conv_step.options = &structs.conv_options;
     },
     [](Call& call) { return onchip_conv_step_plan(&call.structs.args.conv_step, &call.plan); },
     [](Call& call, void* workspace, void* stream) {
       return onchip_conv_step_run(&call.plan, &call.structs.args.conv_step, workspace, stream);
     }},
    {ONCHIP_NORM_FORWARD, "l2norm_forward", kNormForwardSections,
     [](Structs& structs) {
       structs.args.norm_forward = ONCHIP_NORM_FORWARD_ARGS_INIT;
       structs.args.norm_forward.options = &structs.norm_options;
       structs.norm_options.kind = ONCHIP_NORM_L2;
     },
     [](Call& call) {
       return onchip_norm_forward_plan(&call.structs.args.norm_forward, &call.plan);
     },
     [](Call& call, void* workspace, void* stream) {
       return onchip_norm_forward_run(&call.plan, &call.structs.args.norm_forward, workspace,
                                      stream);
     }},
    {ONCHIP_NORM_BACKWARD, "l2norm_backward", kNormBackwardSections,
     [](Structs& structs) {
       structs.args.norm_backward = ONCHIP_NORM_BACKWARD_ARGS_INIT;
       structs.args.norm_backward.options = &structs.norm_options;
       structs.norm_options.kind = ONCHIP_NORM_L2;
     },
     [](Call& call) {
       return onchip_norm_backward_plan(&call.structs.args.norm_backward, &call.plan);
     },
     [](Call& call, void* workspace, void* stream) {
       return onchip_norm_backward_run(&call.plan, &call.structs.args.norm_backward, workspace,
                                       stream);
     }},
    {ONCHIP_NORM_FORWARD, "rms_norm_gated_forward", kNormForwardSections,
     [](Structs& structs) {
       structs.args.norm_forward = ONCHIP_NORM_FORWARD_ARGS_INIT;
       structs.args.norm_forward.options = &structs.norm_options;
       structs.norm_options.kind = ONCHIP_NORM_RMS;
     },
     [](Call& call) {
       return onchip_norm_forward_plan(&call.structs.args.norm_forward, &call.plan);
     },
     [](Call& call, void* workspace, void* stream) {
       return onchip_norm_forward_run(&call.plan, &call.structs.args.norm_forward, workspace,
                                      stream);
     }},
    {ONCHIP_NORM_BACKWARD, "rms_norm_gated_backward", kNormBackwardSections,
     [](Structs& structs) {
       structs.args.norm_backward = ONCHIP_NORM_BACKWARD_ARGS_INIT;
       structs.args.norm_backward.options = &structs.norm_options;
       structs.norm_options.kind = ONCHIP_NORM_RMS;
     },
     [](Call& call) {
       return onchip_norm_backward_plan(&call.structs.args.norm_backward, &call.plan);
     },
     [](Call& call, void* workspace, void* stream) {
       return onchip_norm_backward_run(&call.plan, &call.structs.args.norm_backward, workspace,
                                       stream);
     }},
}};

const Operator* find_operator(std::string_view wanted) {
  const auto* const found = std::find_if(kOperators.begin(), kOperators.end(),
                                         [&](const Operator& op) { return wanted == op.name; });
  return found == kOperators.end() ? nullptr : found;
}

// "mamba2_forward" is linear_forward with the number of mamba2; others have no number.
struct Named {
  const Operator& op;
  std::int32_t linear = 0;
};

Named named(std::string_view name) {
  if (const Operator* op = find_operator(name)) return {*op};
  const std::size_t end = std::min(name.rfind('_'), name.size());
  const auto* const found =
      std::find(kLinearNames.begin(), kLinearNames.end(), name.substr(0, end));
  if (found != kLinearNames.end()) {
    if (const Operator* op = find_operator("linear" + std::string(name.substr(end)))) {
      return {*op, static_cast<std::int32_t>(found - kLinearNames.begin()) + 1};
    }
  }
  throw nb::value_error(("no operator is named '" + std::string(name) + "'").c_str());
}

// ---- Python values into fields ------------------------------------------------------------------

double real_of(const Place& place, nb::handle value) {
  // Not nb::try_cast: that would also swallow a KeyboardInterrupt in somebody's __float__.
  const double number = PyFloat_AsDouble(value.ptr());
  const bool failed = number == -1 && PyErr_Occurred() != nullptr;
  if (failed) drop_error();
  // The C struct marks an absent scale by NaN; here that mark is None.
  if (failed || std::isnan(number)) refuse(place, describe_value(value), "a number");
  return number;
}

// True, False, 0, 1 and NumPy's bool; an array is never taken for a flag.
std::int32_t flag_of(const Place& place, nb::handle value) {
  if (nb::isinstance<nb::int_>(value)) {
    const std::int64_t number = count_of(place, value);
    if (number == 0 || number == 1) return static_cast<std::int32_t>(number);
  } else {
    const nb::object name = nb::getattr(value.type(), "__name__");
    const std::string_view type = utf8(name);
    if (type == "bool_" || type == "bool") return nb::bool_(value) ? 1 : 0;
  }
  refuse(place, describe_value(value), "True or False");
}

std::int32_t choice_of(const Place& place, nb::handle value,
                       std::span<const std::string_view> names, std::int32_t first,
                       const char* wanted) {
  std::string_view name;
  if (nb::try_cast(value, name)) {
    const auto found = std::find(names.begin(), names.end(), name);
    if (found != names.end()) return first + static_cast<std::int32_t>(found - names.begin());
  }
  refuse(place, describe_value(value), wanted);
}

const char* name_of(const Place& place, nb::handle value) {
  constexpr const char* kWanted = "a name or None";
  std::string_view name;
  // The C struct takes an empty name for none.
  if (!nb::try_cast(value, name) || name.empty()) refuse(place, describe_value(value), kWanted);
  if (name.find('\0') != std::string_view::npos) {
    refuse(place, "a name with a zero byte", kWanted);
  }
  return name.data();
}

// `held`: keeps what the field points to.
void set_field(const char* op, const Field& field, void* base, nb::object& held, nb::handle value) {
  static constexpr std::array<std::string_view, 2> kAlignments = {"bottom_right", "top_left"};
  static constexpr std::array<std::string_view, 1> kPrecisions = {"tf32"};
  static constexpr std::array<std::string_view, 2> kStateLayouts = {"kv", "vk"};
  static constexpr std::array<std::string_view, 2> kActivations = {"silu", "sigmoid"};
  static constexpr std::array<std::string_view, 2> kInputGates = {"exp", "sigmoid"};
  const Place place{op, field.name};
  const auto store = [&](auto number) {
    std::memcpy(static_cast<std::byte*>(base) + field.offset, &number, sizeof(number));
  };
  switch (field.kind) {
    case Kind::kTensor: {
      const Tensor* tensor = as_tensor(value);
      if (tensor == nullptr) {
        throw nb::type_error((std::string(field.name) + ": wanted a Tensor").c_str());
      }
      store(&tensor->view);
      held = nb::borrow(value);
      return;
    }
    case Kind::kReal:
      return store(real_of(place, value));
    case Kind::kCount:
      return store(count_of(place, value));
    case Kind::kFlag:
      return store(flag_of(place, value));
    case Kind::kAlignment:
      return store(choice_of(place, value, kAlignments, ONCHIP_BOTTOM_RIGHT,
                             "\"bottom_right\" or \"top_left\""));
    case Kind::kPrecision:
      return store(choice_of(place, value, kPrecisions, ONCHIP_PRECISION_TF32, "None or \"tf32\""));
    case Kind::kStateLayout:
      return store(choice_of(place, value, kStateLayouts, ONCHIP_STATE_KV, "\"kv\" or \"vk\""));
    case Kind::kInputGate:
      return store(choice_of(place, value, kInputGates, ONCHIP_GATE_EXP, "\"exp\" or \"sigmoid\""));
    case Kind::kActivation:
      return store(choice_of(place, value, kActivations, ONCHIP_ACTIVATION_SILU,
                             "None, \"silu\" or \"sigmoid\""));
    case Kind::kName:
      store(name_of(place, value));
      held = nb::borrow(value);
      return;
  }
}

// Calls f(field, its struct, what it holds) for every field of the sections.
template <typename F>
void for_each_field(Call& call, bool outputs_only, F&& f) {
  std::size_t index = 0;
  for (const Section& section : call.op.sections) {
    if (outputs_only && !section.outputs) {
      index += section.fields.size();
      continue;
    }
    std::byte* base = reinterpret_cast<std::byte*>(&call.structs) + section.offset;
    for (const Field& field : section.fields) f(field, base, call.held[index++]);
  }
}

// ---- the type -----------------------------------------------------------------------------------

Call::Call(const nb::str& operator_name, const nb::dict& values)
    : Call(named(utf8(operator_name)), operator_name, values) {}

// None, like an absent key, leaves a field at its default.
Call::Call(const Named& called, const nb::str& operator_name, const nb::dict& values)
    : op(called.op), held_name(operator_name), name(utf8(held_name)) {
  op.initialise(structs);
  if (called.linear != 0) structs.linear_options.op = called.linear;
  std::size_t known = 0;
  for_each_field(*this, false, [&](const Field& field, void* base, nb::object& kept) {
    const nb::object value = values.get(field.key, nb::handle());
    if (!value.is_valid()) return;
    ++known;
    if (!value.is_none()) set_field(name, field, base, kept, value);
  });
  if (known != values.size()) {
    throw nb::type_error((std::string(name) + ": an argument it does not have, among " +
                          utf8(nb::repr(values.keys())))
                             .c_str());
  }
}

void Call::make_plan() {
  check_without_gil([&] { return op.plan(*this); });  // may compile a kernel
  planned = true;
}

// A plan holds for every address with the same 16-byte alignment (onchip.h, conventions); otherwise
// the run makes a new one.
void Call::bind(const nb::dict& tensors) {
  for_each_field(*this, true, [&](const Field& field, void* base, nb::object& kept) {
    const nb::object value = tensors.get(field.key, nb::handle());
    if (!value.is_valid()) return;
    const auto address = [&]() -> std::uintptr_t {
      if (!kept.is_valid()) return 0;
      return reinterpret_cast<std::uintptr_t>(as_tensor(kept)->view.data);
    };
    const std::uintptr_t planned_address = address();
    set_field(name, field, base, kept, value);
    if ((planned_address ^ address()) % 16 != 0) planned = false;
  });
}

void* aligned_workspace(const onchip_plan& plan, const Tensor& workspace) {
  const auto address = reinterpret_cast<std::uintptr_t>(workspace.view.data);
  const std::uintptr_t alignment = plan.workspace_alignment;
  const std::uintptr_t padding = (alignment - address % alignment) % alignment;
  if (workspace.view.rank != 1 || !workspace.has_data ||
      static_cast<std::uint64_t>(workspace.byte_strides[0] * workspace.view.shape[0]) <
          plan.workspace_bytes + padding) {
    throw nb::value_error("the workspace is smaller than the plan wants");
  }
  return static_cast<std::byte*>(workspace.view.data) + padding;
}

void Call::run(const Tensor* workspace, std::uint64_t stream) {
  for_each_field(*this, false, [&](const Field& field, void*, const nb::object& kept) {
    if (field.kind == Kind::kTensor && kept.is_valid() && !as_tensor(kept)->has_data) {
      refuse({name, field.name}, "a shape without data", "an array");
    }
  });
  if (!planned) make_plan();
  void* memory = workspace == nullptr ? nullptr : aligned_workspace(plan, *workspace);
  check_without_gil([&] { return op.run(*this, memory, reinterpret_cast<void*>(stream)); });
}

nb::str Call::explain() const {
  return text_of([&](char* text, std::size_t capacity, std::size_t* length) {
    return onchip_explain(op.number, &structs.args, text, capacity, length);
  });
}

std::optional<std::string_view> name_or_none(const char* name) {
  if (name == nullptr) return std::nullopt;
  return name;
}

void intern_names(std::span<Field> fields) {
  for (Field& field : fields) {
    field.key = PyUnicode_InternFromString(field.name);
    if (!field.key.is_valid()) nb::raise_python_error();
  }
}

}  // namespace

void bind_call(nb::module_& module) {
  for (const Operator& op : kOperators) {
    for (const Section& section : op.sections) intern_names(section.fields);
  }
  nb::class_<Call>(module, "Call", nb::is_final(), nb::pooled(),
                   nb::sig("@typing.final\nclass Call()"),
                   "One call of an operator: its argument struct, plan and run.")
      .def(
          nb::init<const nb::str&, const nb::dict&>(),
          nb::sig("def __init__(self, operator: str, arguments: dict[str, typing.Any], /) -> None"),
          "`arguments` by the names of the C struct and its options; None leaves a default.")
      .def_prop_ro("workspace_bytes", [](const Call& self) { return self.plan.workspace_bytes; })
      .def_prop_ro("workspace_alignment",
                   [](const Call& self) { return self.plan.workspace_alignment; })
      .def_prop_ro("backend", [](const Call& self) { return name_or_none(self.plan.backend); })
      .def_prop_ro("kernel", [](const Call& self) { return name_or_none(self.plan.kernel); })
      .def("plan", &Call::make_plan, nb::sig("def plan(self, /) -> None"),
           "Checks the whole contract and picks a backend.")
      .def("bind", &Call::bind, nb::sig("def bind(self, tensors: dict[str, Tensor], /) -> None"),
           "Replaces Tensors by others of the same shapes.")
      .def("run", &Call::run, nb::arg().none(), nb::arg(),
           nb::sig("def run(self, workspace: Tensor | None, stream: int, /) -> None"),
           "Computes, without holding the GIL.")
      .def("explain", &Call::explain, nb::sig("def explain(self, /) -> str"),
           "Which backend takes the call, and why others do not.");
}

}  // namespace onchip_python
