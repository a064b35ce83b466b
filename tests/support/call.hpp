// Running an operator through the C ABI: plan, a poisoned workspace of exactly the planned size
// between forbidden pages, run.
#pragma once

#include <onchip/onchip.h>

#include <cstddef>

#include "support/host_tensor.hpp"

namespace onchip::test {

inline onchip_status plan(const onchip_attention_forward_args& args, onchip_plan* plan) {
  return onchip_attention_forward_plan(&args, plan);
}
inline onchip_status plan(const onchip_attention_backward_args& args, onchip_plan* plan) {
  return onchip_attention_backward_plan(&args, plan);
}
inline onchip_status plan(const onchip_attention_merge_args& args, onchip_plan* plan) {
  return onchip_attention_merge_plan(&args, plan);
}
inline onchip_status plan(const onchip_attention_decode_args& args, onchip_plan* plan) {
  return onchip_attention_decode_plan(&args, plan);
}
inline onchip_status run(const onchip_plan& plan, const onchip_attention_forward_args& args,
                         void* workspace, void* stream = nullptr) {
  return onchip_attention_forward_run(&plan, &args, workspace, stream);
}
inline onchip_status run(const onchip_plan& plan, const onchip_attention_backward_args& args,
                         void* workspace, void* stream = nullptr) {
  return onchip_attention_backward_run(&plan, &args, workspace, stream);
}
inline onchip_status run(const onchip_plan& plan, const onchip_attention_merge_args& args,
                         void* workspace, void* stream = nullptr) {
  return onchip_attention_merge_run(&plan, &args, workspace, stream);
}

inline onchip_status run(const onchip_plan& plan, const onchip_attention_decode_args& args,
                         void* workspace, void* stream = nullptr) {
  return onchip_attention_decode_run(&plan, &args, workspace, stream);
}

// Starts at a page's first byte, so any alignment up to a page holds.
inline GuardedMemory workspace_for(const onchip_plan& plan) {
  return GuardedMemory(plan.workspace_bytes, GuardedMemory::Against::front);
}

// Poison beyond the workspace's last byte is still there.
inline bool workspace_guard_holds(const GuardedMemory& workspace) {
  const auto all = workspace.accessible();
  for (std::size_t byte = workspace.size(); byte < all.size(); ++byte) {
    if (all[byte] != std::byte{kPoisonByte}) return false;
  }
  return true;
}

template <typename Args>
onchip_status call(const Args& args) {
  onchip_plan planned = ONCHIP_PLAN_INIT;
  const onchip_status status = plan(args, &planned);
  if (status != ONCHIP_OK) return status;
  const GuardedMemory workspace = workspace_for(planned);
  const onchip_status result = run(planned, args, workspace.data());
  return workspace_guard_holds(workspace) ? result : ONCHIP_INTERNAL;
}

}  // namespace onchip::test
