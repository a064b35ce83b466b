// The operators: each a name, its argument struct's defaults and an ordered backend table.
#pragma once

#include <onchip/onchip.h>

#include <span>
#include <string>
#include <string_view>

#include "core/attention.hpp"
#include "core/conv.hpp"
#include "core/linear.hpp"
#include "ops/attention_contract.hpp"
#include "ops/conv_contract.hpp"
#include "ops/dispatch.hpp"
#include "ops/linear_contract.hpp"
#include "ops/structs.hpp"

namespace onchip::ops {

// Every call checks the whole contract anew, at run too: addresses and host-side lengths may have
// changed since the plan, and checking costs less than a microsecond.
template <typename Args, typename Problem>
struct Operator {
  onchip_operator id;
  std::string_view name;
  Args defaults;
  std::span<const Backend<Problem>> backends;  // fastest first; the reference takes what is left

  void plan(const Args* given, onchip_plan* plan) const {
    check_plan_target(name, plan);
    const Read call = read(given);
    const Choice<Problem> choice =
        choose(call.facts.op, call.facts.forced_backend, backends, call.problem);
    write_plan(call.facts.op,
               {.op = id,
                .backend = static_cast<std::uint32_t>(choice.index),
                .fingerprint = call.facts.fingerprint,
                .plan = choice.plan},
               backends[choice.index].name, plan);
  }

  void run(const onchip_plan* plan, const Args* given, void* workspace, void* stream) const {
    const Read call = read(given);
    const StoredPlan stored =
        read_plan(call.facts.op, id, call.facts.fingerprint, backends.size(), plan);
    const RunContext context =
        checked_context(call.facts.op, stored.plan, call.problem.device.type == ONCHIP_DEVICE_CPU,
                        workspace, stream);
    backends[stored.backend].run(stored.plan, call.problem, context);
  }

  std::string explain(const void* given) const {
    const Read call = read(static_cast<const Args*>(given));
    return explain_call(call.facts.op, call.facts.forced_backend, backends, call.problem);
  }

 private:
  struct Read {
    CallFacts facts;
    Problem problem;
  };

  Read read(const Args* given) const {
    const Args args = read_struct(name, "args", given, defaults, sizeof(Args));
    Read call;
    call.facts.op = name;
    call.problem = normalise(args, call.facts);
    return call;
  }
};

using AttentionForward = Operator<onchip_attention_forward_args, AttentionForwardProblem>;
using AttentionBackward = Operator<onchip_attention_backward_args, AttentionBackwardProblem>;
using AttentionDecode = Operator<onchip_attention_decode_args, AttentionDecodeProblem>;
using AttentionMerge = Operator<onchip_attention_merge_args, AttentionMergeProblem>;
using LinearForward = Operator<onchip_linear_forward_args, LinearForwardProblem>;
using LinearBackward = Operator<onchip_linear_backward_args, LinearBackwardProblem>;
using LinearStepOperator = Operator<onchip_linear_step_args, LinearStepProblem>;
using ConvForward = Operator<onchip_conv_forward_args, ConvForwardProblem>;
using ConvBackward = Operator<onchip_conv_backward_args, ConvBackwardProblem>;
using ConvStep = Operator<onchip_conv_step_args, ConvStepProblem>;
using NormForward = Operator<onchip_norm_forward_args, NormForwardProblem>;
using NormBackward = Operator<onchip_norm_backward_args, NormBackwardProblem>;

const AttentionForward& attention_forward();
const AttentionBackward& attention_backward();
const AttentionDecode& attention_decode();
const AttentionMerge& attention_merge();
const LinearForward& linear_forward();
const LinearBackward& linear_backward();
const LinearStepOperator& linear_step();
const ConvForward& conv_forward();
const ConvBackward& conv_backward();
const ConvStep& conv_step();
const NormForward& norm_forward();
const NormBackward& norm_backward();

// The text of onchip_explain.
std::string explain(onchip_operator op, const void* args);

// The library as JSON text (onchip_describe).
std::string describe();

}  // namespace onchip::ops
