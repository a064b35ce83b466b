#include "api/guard.hpp"
#include "ops/operators.hpp"

namespace ops = onchip::ops;
using onchip::api::guarded;

extern "C" {

onchip_status onchip_attention_forward_plan(const onchip_attention_forward_args* args,
                                            onchip_plan* plan) {
  return guarded([&] { ops::attention_forward().plan(args, plan); });
}

onchip_status onchip_attention_forward_run(const onchip_plan* plan,
                                           const onchip_attention_forward_args* args,
                                           void* workspace, void* stream) {
  return guarded([&] { ops::attention_forward().run(plan, args, workspace, stream); });
}

onchip_status onchip_attention_backward_plan(const onchip_attention_backward_args* args,
                                             onchip_plan* plan) {
  return guarded([&] { ops::attention_backward().plan(args, plan); });
}

onchip_status onchip_attention_backward_run(const onchip_plan* plan,
                                            const onchip_attention_backward_args* args,
                                            void* workspace, void* stream) {
  return guarded([&] { ops::attention_backward().run(plan, args, workspace, stream); });
}

onchip_status onchip_attention_merge_plan(const onchip_attention_merge_args* args,
                                          onchip_plan* plan) {
  return guarded([&] { ops::attention_merge().plan(args, plan); });
}

onchip_status onchip_attention_merge_run(const onchip_plan* plan,
                                         const onchip_attention_merge_args* args, void* workspace,
                                         void* stream) {
  return guarded([&] { ops::attention_merge().run(plan, args, workspace, stream); });
}

onchip_status onchip_attention_decode_plan(const onchip_attention_decode_args* args,
                                           onchip_plan* plan) {
  return guarded([&] { ops::attention_decode().plan(args, plan); });
}

onchip_status onchip_attention_decode_run(const onchip_plan* plan,
                                          const onchip_attention_decode_args* args, void* workspace,
                                          void* stream) {
  return guarded([&] { ops::attention_decode().run(plan, args, workspace, stream); });
}

}  // extern "C"
