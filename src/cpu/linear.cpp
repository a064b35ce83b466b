// From an engine to its host side.
#include "cpu/linear.hpp"

#include <string>

#include "core/status.hpp"
#include "cpu/linear_engines.hpp"

namespace onchip::cpu {

namespace {

constexpr const char* kOtherEngine =
    "takes operators with one decay a head and delta rules: use reference";

[[noreturn]] void throw_not_planned(const LinearProblem& problem) {
  throw Error(ONCHIP_INTERNAL, std::string(problem.op) + ": cpu plans no such engine");
}

}  // namespace

PlanResult plan_linear_forward(const LinearForwardProblem& problem, const Settings& settings) {
  switch (problem.traits.engine) {
    case LinearEngine::scalar_decay:
      return plan_scalar_forward(problem, settings);
    case LinearEngine::delta_rule:
      return plan_delta_forward(problem, settings);
    case LinearEngine::channel_decay:
    case LinearEngine::dplr:
    case LinearEngine::gated_slots:
    case LinearEngine::scan:
      break;
  }
  return Reject{kOtherEngine};
}

PlanResult plan_linear_forward(const LinearForwardProblem& problem) {
  return plan_linear_forward(problem, settings());
}

void run_linear_forward(const BackendPlan& plan, const LinearForwardProblem& problem,
                        const RunContext& context) {
  switch (problem.traits.engine) {
    case LinearEngine::scalar_decay:
      run_scalar_forward(plan, problem, context);
      return;
    case LinearEngine::delta_rule:
      run_delta_forward(plan, problem, context);
      return;
    case LinearEngine::channel_decay:
    case LinearEngine::dplr:
    case LinearEngine::gated_slots:
    case LinearEngine::scan:
      throw_not_planned(problem);
  }
}

PlanResult plan_linear_backward(const LinearBackwardProblem& problem, const Settings& settings) {
  switch (problem.traits.engine) {
    case LinearEngine::scalar_decay:
      return plan_scalar_backward(problem, settings);
    case LinearEngine::delta_rule:
      return plan_delta_backward(problem, settings);
    case LinearEngine::channel_decay:
    case LinearEngine::dplr:
    case LinearEngine::gated_slots:
    case LinearEngine::scan:
      break;
  }
  return Reject{kOtherEngine};
}

PlanResult plan_linear_backward(const LinearBackwardProblem& problem) {
  return plan_linear_backward(problem, settings());
}

void run_linear_backward(const BackendPlan& plan, const LinearBackwardProblem& problem,
                         const RunContext& context) {
  switch (problem.traits.engine) {
    case LinearEngine::scalar_decay:
      run_scalar_backward(plan, problem, context);
      return;
    case LinearEngine::delta_rule:
      run_delta_backward(plan, problem, context);
      return;
    case LinearEngine::channel_decay:
    case LinearEngine::dplr:
    case LinearEngine::gated_slots:
    case LinearEngine::scan:
      throw_not_planned(problem);
  }
}

PlanResult plan_linear_step(const LinearStepProblem& problem, const Settings& settings) {
  switch (problem.traits.engine) {
    case LinearEngine::scalar_decay:
      return plan_scalar_step(problem, settings);
    case LinearEngine::delta_rule:
      return plan_delta_step(problem, settings);
    case LinearEngine::channel_decay:
    case LinearEngine::dplr:
    case LinearEngine::gated_slots:
    case LinearEngine::scan:
      break;
  }
  return Reject{kOtherEngine};
}

PlanResult plan_linear_step(const LinearStepProblem& problem) {
  return plan_linear_step(problem, settings());
}

void run_linear_step(const BackendPlan& plan, const LinearStepProblem& problem,
                     const RunContext& context) {
  switch (problem.traits.engine) {
    case LinearEngine::scalar_decay:
      run_scalar_step(plan, problem, context);
      return;
    case LinearEngine::delta_rule:
      run_delta_step(plan, problem, context);
      return;
    case LinearEngine::channel_decay:
    case LinearEngine::dplr:
    case LinearEngine::gated_slots:
    case LinearEngine::scan:
      throw_not_planned(problem);
  }
}

}  // namespace onchip::cpu
