#include "operators.hpp"

#include <algorithm>
#include <string>

namespace onchip_python {

namespace {

#define ONCHIP_FIELD(type, name, kind) \
  Field { #name, Kind::kind, offsetof(type, name) }
#define ONCHIP_PART_OF(argument, type, name, kind) \
  Field { #name, Kind::kind, offsetof(type, name), #argument }

std::array options_fields = {
    ONCHIP_FIELD(onchip_attention_options, scale, kRealOrNone),
    ONCHIP_FIELD(onchip_attention_options, softcap, kReal),
    ONCHIP_FIELD(onchip_attention_options, dropout_p, kReal),
    ONCHIP_PART_OF(window, onchip_attention_options, window_left, kCount),
    ONCHIP_PART_OF(window, onchip_attention_options, window_right, kCount),
    ONCHIP_FIELD(onchip_attention_options, max_seqlen_q, kCountOrNone),
    ONCHIP_FIELD(onchip_attention_options, max_seqlen_kv, kCountOrNone),
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
    ONCHIP_FIELD(onchip_linear_options, scale, kRealOrNone),
    ONCHIP_FIELD(onchip_linear_options, eps, kReal),
    ONCHIP_PART_OF(dt_limit, onchip_linear_options, dt_min, kReal),
    ONCHIP_PART_OF(dt_limit, onchip_linear_options, dt_max, kReal),
    ONCHIP_FIELD(onchip_linear_options, lower_bound, kRealOrNone),
    ONCHIP_FIELD(onchip_linear_options, chunk_len, kCountOrNone),
    ONCHIP_FIELD(onchip_linear_options, num_householder, kCount),
    ONCHIP_FIELD(onchip_linear_options, state_layout, kStateLayout),
    ONCHIP_FIELD(onchip_linear_options, normalize, kFlagOrNone),
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
    ONCHIP_FIELD(onchip_conv_options, activation, kConvActivation),
    ONCHIP_FIELD(onchip_conv_options, backend, kName),
    ONCHIP_FIELD(onchip_conv_options, cu_seqlens, kTensor),
    ONCHIP_FIELD(onchip_conv_options, seqlens, kTensor),
};

std::array norm_options_fields = {
    ONCHIP_FIELD(onchip_norm_options, eps, kReal),
    ONCHIP_FIELD(onchip_norm_options, group_size, kCountOrNone),
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
constexpr std::array<std::string_view, 21> kLinearNames = {"linear_attention",
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
                                                           "gsa",
                                                           "hgrn",
                                                           "mamba1",
                                                           "rwkv4"};

#undef ONCHIP_FIELD
#undef ONCHIP_PART_OF

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

static_assert(linear_backward_fields.size() + 2 * linear_inputs_fields.size() +
                  linear_options_fields.size() <=
              kMostFields);

const std::array<Operator, 14> kOperators = {{
    {ONCHIP_ATTENTION_FORWARD, "attention_forward", kForwardSections,
     [](Structs& structs) {
       structs.args.forward = ONCHIP_ATTENTION_FORWARD_ARGS_INIT;
       structs.args.forward.options = &structs.options;
     },
     [](const Structs& structs, onchip_plan& plan) {
       return onchip_attention_forward_plan(&structs.args.forward, &plan);
     },
     [](const Structs& structs, const onchip_plan& plan, void* workspace, void* stream) {
       return onchip_attention_forward_run(&plan, &structs.args.forward, workspace, stream);
     }},
    {ONCHIP_ATTENTION_BACKWARD, "attention_backward", kBackwardSections,
     [](Structs& structs) {
       structs.args.backward = ONCHIP_ATTENTION_BACKWARD_ARGS_INIT;
       structs.args.backward.options = &structs.options;
     },
     [](const Structs& structs, onchip_plan& plan) {
       return onchip_attention_backward_plan(&structs.args.backward, &plan);
     },
     [](const Structs& structs, const onchip_plan& plan, void* workspace, void* stream) {
       return onchip_attention_backward_run(&plan, &structs.args.backward, workspace, stream);
     }},
    {ONCHIP_ATTENTION_MERGE, "merge", kMergeSections,
     [](Structs& structs) { structs.args.merge = ONCHIP_ATTENTION_MERGE_ARGS_INIT; },
     [](const Structs& structs, onchip_plan& plan) {
       return onchip_attention_merge_plan(&structs.args.merge, &plan);
     },
     [](const Structs& structs, const onchip_plan& plan, void* workspace, void* stream) {
       return onchip_attention_merge_run(&plan, &structs.args.merge, workspace, stream);
     }},
    {ONCHIP_LINEAR_FORWARD, "linear_forward", kLinearForwardSections,
     [](Structs& structs) {
       structs.args.linear_forward = ONCHIP_LINEAR_FORWARD_ARGS_INIT;
       structs.args.linear_forward.inputs = &structs.inputs;
       structs.args.linear_forward.options = &structs.linear_options;
     },
     [](const Structs& structs, onchip_plan& plan) {
       return onchip_linear_forward_plan(&structs.args.linear_forward, &plan);
     },
     [](const Structs& structs, const onchip_plan& plan, void* workspace, void* stream) {
       return onchip_linear_forward_run(&plan, &structs.args.linear_forward, workspace, stream);
     }},
    {ONCHIP_LINEAR_BACKWARD, "linear_backward", kLinearBackwardSections,
     [](Structs& structs) {
       structs.args.linear_backward = ONCHIP_LINEAR_BACKWARD_ARGS_INIT;
       structs.args.linear_backward.inputs = &structs.inputs;
       structs.args.linear_backward.gradients = &structs.gradients;
       structs.args.linear_backward.options = &structs.linear_options;
     },
     [](const Structs& structs, onchip_plan& plan) {
       return onchip_linear_backward_plan(&structs.args.linear_backward, &plan);
     },
     [](const Structs& structs, const onchip_plan& plan, void* workspace, void* stream) {
       return onchip_linear_backward_run(&plan, &structs.args.linear_backward, workspace, stream);
     }},
    {ONCHIP_LINEAR_STEP, "linear_step", kLinearStepSections,
     [](Structs& structs) {
       structs.args.linear_step = ONCHIP_LINEAR_STEP_ARGS_INIT;
       structs.args.linear_step.inputs = &structs.inputs;
       structs.args.linear_step.options = &structs.linear_options;
     },
     [](const Structs& structs, onchip_plan& plan) {
       return onchip_linear_step_plan(&structs.args.linear_step, &plan);
     },
     [](const Structs& structs, const onchip_plan& plan, void* workspace, void* stream) {
       return onchip_linear_step_run(&plan, &structs.args.linear_step, workspace, stream);
     }},
    {ONCHIP_ATTENTION_DECODE, "attention_decode", kDecodeSections,
     [](Structs& structs) {
       structs.args.decode = ONCHIP_ATTENTION_DECODE_ARGS_INIT;
       structs.args.decode.options = &structs.options;
     },
     [](const Structs& structs, onchip_plan& plan) {
       return onchip_attention_decode_plan(&structs.args.decode, &plan);
     },
     [](const Structs& structs, const onchip_plan& plan, void* workspace, void* stream) {
       return onchip_attention_decode_run(&plan, &structs.args.decode, workspace, stream);
     }},
    {ONCHIP_CONV_FORWARD, "causal_conv1d_forward", kConvForwardSections,
     [](Structs& structs) {
       structs.args.conv_forward = ONCHIP_CONV_FORWARD_ARGS_INIT;
       structs.args.conv_forward.options = &structs.conv_options;
     },
     [](const Structs& structs, onchip_plan& plan) {
       return onchip_conv_forward_plan(&structs.args.conv_forward, &plan);
     },
     [](const Structs& structs, const onchip_plan& plan, void* workspace, void* stream) {
       return onchip_conv_forward_run(&plan, &structs.args.conv_forward, workspace, stream);
     }},
    {ONCHIP_CONV_BACKWARD, "causal_conv1d_backward", kConvBackwardSections,
     [](Structs& structs) {
       structs.args.conv_backward = ONCHIP_CONV_BACKWARD_ARGS_INIT;
       structs.args.conv_backward.options = &structs.conv_options;
     },
     [](const Structs& structs, onchip_plan& plan) {
       return onchip_conv_backward_plan(&structs.args.conv_backward, &plan);
     },
     [](const Structs& structs, const onchip_plan& plan, void* workspace, void* stream) {
       return onchip_conv_backward_run(&plan, &structs.args.conv_backward, workspace, stream);
     }},
    {ONCHIP_CONV_STEP, "causal_conv1d_step", kConvStepSections,
     [](Structs& structs) {
       structs.args.conv_step = ONCHIP_CONV_STEP_ARGS_INIT;
       structs.args.conv_step.options = &structs.conv_options;
     },
     [](const Structs& structs, onchip_plan& plan) {
       return onchip_conv_step_plan(&structs.args.conv_step, &plan);
     },
     [](const Structs& structs, const onchip_plan& plan, void* workspace, void* stream) {
       return onchip_conv_step_run(&plan, &structs.args.conv_step, workspace, stream);
     }},
    {ONCHIP_NORM_FORWARD, "l2norm_forward", kNormForwardSections,
     [](Structs& structs) {
       structs.args.norm_forward = ONCHIP_NORM_FORWARD_ARGS_INIT;
       structs.args.norm_forward.options = &structs.norm_options;
       structs.norm_options.kind = ONCHIP_NORM_L2;
     },
     [](const Structs& structs, onchip_plan& plan) {
       return onchip_norm_forward_plan(&structs.args.norm_forward, &plan);
     },
     [](const Structs& structs, const onchip_plan& plan, void* workspace, void* stream) {
       return onchip_norm_forward_run(&plan, &structs.args.norm_forward, workspace, stream);
     }},
    {ONCHIP_NORM_BACKWARD, "l2norm_backward", kNormBackwardSections,
     [](Structs& structs) {
       structs.args.norm_backward = ONCHIP_NORM_BACKWARD_ARGS_INIT;
       structs.args.norm_backward.options = &structs.norm_options;
       structs.norm_options.kind = ONCHIP_NORM_L2;
     },
     [](const Structs& structs, onchip_plan& plan) {
       return onchip_norm_backward_plan(&structs.args.norm_backward, &plan);
     },
     [](const Structs& structs, const onchip_plan& plan, void* workspace, void* stream) {
       return onchip_norm_backward_run(&plan, &structs.args.norm_backward, workspace, stream);
     }},
    {ONCHIP_NORM_FORWARD, "rms_norm_gated_forward", kNormForwardSections,
     [](Structs& structs) {
       structs.args.norm_forward = ONCHIP_NORM_FORWARD_ARGS_INIT;
       structs.args.norm_forward.options = &structs.norm_options;
       structs.norm_options.kind = ONCHIP_NORM_RMS;
     },
     [](const Structs& structs, onchip_plan& plan) {
       return onchip_norm_forward_plan(&structs.args.norm_forward, &plan);
     },
     [](const Structs& structs, const onchip_plan& plan, void* workspace, void* stream) {
       return onchip_norm_forward_run(&plan, &structs.args.norm_forward, workspace, stream);
     }},
    {ONCHIP_NORM_BACKWARD, "rms_norm_gated_backward", kNormBackwardSections,
     [](Structs& structs) {
       structs.args.norm_backward = ONCHIP_NORM_BACKWARD_ARGS_INIT;
       structs.args.norm_backward.options = &structs.norm_options;
       structs.norm_options.kind = ONCHIP_NORM_RMS;
     },
     [](const Structs& structs, onchip_plan& plan) {
       return onchip_norm_backward_plan(&structs.args.norm_backward, &plan);
     },
     [](const Structs& structs, const onchip_plan& plan, void* workspace, void* stream) {
       return onchip_norm_backward_run(&plan, &structs.args.norm_backward, workspace, stream);
     }},
}};

const Operator* find_operator(std::string_view wanted) {
  const auto* const found = std::find_if(kOperators.begin(), kOperators.end(),
                                         [&](const Operator& op) { return wanted == op.name; });
  return found == kOperators.end() ? nullptr : found;
}

void intern_names(std::span<Field> fields) {
  for (Field& field : fields) {
    field.key = PyUnicode_InternFromString(field.name);
    if (!field.key.is_valid()) nb::raise_python_error();
  }
}

}  // namespace

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

void intern_field_names() {
  for (const Operator& op : kOperators) {
    for (const Section& section : op.sections) intern_names(section.fields);
  }
}

}  // namespace onchip_python
