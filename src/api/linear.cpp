#include "api/guard.hpp"
#include "ops/operators.hpp"

namespace ops = onchip::ops;
using onchip::api::guarded;

extern "C" {

onchip_status onchip_linear_forward_plan(const onchip_linear_forward_args* args,
                                         onchip_plan* plan) {
  return guarded([&] { ops::linear_forward().plan(args, plan); });
}

onchip_status onchip_linear_forward_run(const onchip_plan* plan,
                                        const onchip_linear_forward_args* args, void* workspace,
                                        void* stream) {
  return guarded([&] { ops::linear_forward().run(plan, args, workspace, stream); });
}

onchip_status onchip_linear_backward_plan(const onchip_linear_backward_args* args,
                                          onchip_plan* plan) {
  return guarded([&] { ops::linear_backward().plan(args, plan); });
}

onchip_status onchip_linear_backward_run(const onchip_plan* plan,
                                         const onchip_linear_backward_args* args, void* workspace,
                                         void* stream) {
  return guarded([&] { ops::linear_backward().run(plan, args, workspace, stream); });
}

onchip_status onchip_linear_step_plan(const onchip_linear_step_args* args, onchip_plan* plan) {
  return guarded([&] { ops::linear_step().plan(args, plan); });
}

onchip_status onchip_linear_step_run(const onchip_plan* plan, const onchip_linear_step_args* args,
                                     void* workspace, void* stream) {
  return guarded([&] { ops::linear_step().run(plan, args, workspace, stream); });
}

}  // extern "C"
