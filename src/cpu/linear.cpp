// From an engine to its host side.
#include "cpu/linear.hpp"

#include "cpu/linear_engines.hpp"

namespace onchip::cpu {

PlanResult plan_linear_forward(const LinearForwardProblem& problem, const Settings& settings) {
  switch (problem.traits.engine) {
    case LinearEngine::scalar_decay:
      return plan_scalar_forward(problem, settings);
  }
  return Reject{"has no such engine"};
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
  }
}

PlanResult plan_linear_step(const LinearStepProblem& problem, const Settings& settings) {
  switch (problem.traits.engine) {
    case LinearEngine::scalar_decay:
      return plan_scalar_step(problem, settings);
  }
  return Reject{"has no such engine"};
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
  }
}

}  // namespace onchip::cpu
