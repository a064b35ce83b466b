#include "api/guard.hpp"
#include "ops/operators.hpp"

namespace ops = onchip::ops;
using onchip::api::guarded;

extern "C" {

onchip_status onchip_conv_forward_plan(const onchip_conv_forward_args* args, onchip_plan* plan) {
  return guarded([&] { ops::conv_forward().plan(args, plan); });
}

onchip_status onchip_conv_forward_run(const onchip_plan* plan, const onchip_conv_forward_args* args,
                                      void* workspace, void* stream) {
  return guarded([&] { ops::conv_forward().run(plan, args, workspace, stream); });
}

onchip_status onchip_conv_backward_plan(const onchip_conv_backward_args* args, onchip_plan* plan) {
  return guarded([&] { ops::conv_backward().plan(args, plan); });
}

onchip_status onchip_conv_backward_run(const onchip_plan* plan,
                                       const onchip_conv_backward_args* args, void* workspace,
                                       void* stream) {
  return guarded([&] { ops::conv_backward().run(plan, args, workspace, stream); });
}

onchip_status onchip_conv_step_plan(const onchip_conv_step_args* args, onchip_plan* plan) {
  return guarded([&] { ops::conv_step().plan(args, plan); });
}

onchip_status onchip_conv_step_run(const onchip_plan* plan, const onchip_conv_step_args* args,
                                   void* workspace, void* stream) {
  return guarded([&] { ops::conv_step().run(plan, args, workspace, stream); });
}

onchip_status onchip_norm_forward_plan(const onchip_norm_forward_args* args, onchip_plan* plan) {
  return guarded([&] { ops::norm_forward().plan(args, plan); });
}

onchip_status onchip_norm_forward_run(const onchip_plan* plan, const onchip_norm_forward_args* args,
                                      void* workspace, void* stream) {
  return guarded([&] { ops::norm_forward().run(plan, args, workspace, stream); });
}

onchip_status onchip_norm_backward_plan(const onchip_norm_backward_args* args, onchip_plan* plan) {
  return guarded([&] { ops::norm_backward().plan(args, plan); });
}

onchip_status onchip_norm_backward_run(const onchip_plan* plan,
                                       const onchip_norm_backward_args* args, void* workspace,
                                       void* stream) {
  return guarded([&] { ops::norm_backward().run(plan, args, workspace, stream); });
}

}  // extern "C"
