// Planning and running the CPU backend with one instruction set, whatever the process's settings
// say.
#pragma once

#include <gtest/gtest.h>
#include <onchip/onchip.h>

#include <string>
#include <utility>
#include <variant>

#include "core/settings.hpp"
#include "cpu/attention.hpp"
#include "cpu/attention_decode.hpp"
#include "cpu/cpu_features.hpp"
#include "ops/attention_contract.hpp"
#include "support/host_tensor.hpp"

namespace onchip::test {

inline Settings forcing(cpu::Isa isa) {
  Settings settings;
  settings.cpu_isa = cpu::isa_name(isa);
  return settings;
}

// Plans and runs in a poisoned workspace of exactly the planned size, between forbidden pages.
// "" or what went wrong.
inline std::string run_forced(const onchip_attention_forward_args& args, cpu::Isa isa) {
  ops::CallFacts facts;
  const AttentionForwardProblem problem = ops::normalise(args, facts);
  const PlanResult result = cpu::plan_attention_forward(problem, forcing(isa));
  if (const auto* reject = std::get_if<Reject>(&result)) return reject->reason;
  const auto& plan = std::get<BackendPlan>(result);
  const GuardedMemory workspace(plan.workspace_bytes, GuardedMemory::Against::end);
  cpu::run_attention_forward(plan, problem, {workspace.data(), nullptr});
  return "";
}

inline std::string run_forced(const onchip_attention_backward_args& args, cpu::Isa isa) {
  ops::CallFacts facts;
  const AttentionBackwardProblem problem = ops::normalise(args, facts);
  const PlanResult result = cpu::plan_attention_backward(problem, forcing(isa));
  if (const auto* reject = std::get_if<Reject>(&result)) return reject->reason;
  const auto& plan = std::get<BackendPlan>(result);
  const GuardedMemory workspace(plan.workspace_bytes, GuardedMemory::Against::end);
  cpu::run_attention_backward(plan, problem, {workspace.data(), nullptr});
  return "";
}

inline std::string run_forced(const onchip_attention_merge_args& args, cpu::Isa isa) {
  ops::CallFacts facts;
  const AttentionMergeProblem problem = ops::normalise(args, facts);
  const PlanResult result = cpu::plan_attention_merge(problem, forcing(isa));
  if (const auto* reject = std::get_if<Reject>(&result)) return reject->reason;
  const auto& plan = std::get<BackendPlan>(result);
  cpu::run_attention_merge(plan, problem, {nullptr, nullptr});
  return "";
}

inline std::string run_forced(const onchip_attention_decode_args& args, cpu::Isa isa) {
  ops::CallFacts facts;
  const AttentionDecodeProblem problem = ops::normalise(args, facts);
  const PlanResult result = cpu::plan_attention_decode(problem, forcing(isa));
  if (const auto* reject = std::get_if<Reject>(&result)) return reject->reason;
  const auto& plan = std::get<BackendPlan>(result);
  const GuardedMemory workspace(plan.workspace_bytes, GuardedMemory::Against::end);
  cpu::run_attention_decode(plan, problem, {workspace.data(), nullptr});
  return "";
}

// A test for each instruction set; one that this machine lacks says so and is skipped.
class EachIsa : public ::testing::TestWithParam<cpu::Isa> {
 protected:
  void SetUp() override {
    const std::string problem = cpu::isa_problem(GetParam());
    if (!problem.empty()) GTEST_SKIP() << problem;
  }
};

inline std::string isa_test_name(const ::testing::TestParamInfo<cpu::Isa>& info) {
  return cpu::isa_name(info.param);
}

#define ONCHIP_FOR_EACH_ISA(suite) \
  INSTANTIATE_TEST_SUITE_P(Isas, suite, ::testing::ValuesIn(cpu::kIsas), isa_test_name)

}  // namespace onchip::test
