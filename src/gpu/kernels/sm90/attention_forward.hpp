// Exact attention forward on compute capability 9.0: the host's side of attention_forward.cuh.
#pragma once

#include "core/attention.hpp"
#include "core/backend.hpp"
#include "gpu/runtime/driver.hpp"
#include "gpu/runtime/kernel_cache.hpp"
#include "gpu/runtime/kernel_spec.hpp"

namespace onchip::sm90 {

extern const gpu::KernelDefinition attention_forward_kernel;

// The backend's two entries.
PlanResult plan_attention_forward(const AttentionForwardProblem& problem);
void run_attention_forward(const BackendPlan& plan, const AttentionForwardProblem& problem,
                           const RunContext& context);

// What they are made of, with the machine as an argument.

// Everything but whether the kernel can be had.
PlanResult plan_attention_forward_on(const gpu::DeviceFacts& device,
                                     const AttentionForwardProblem& problem);
gpu::KernelSpec attention_forward_kernel_spec(const BackendPlan& plan);
void launch_attention_forward(const gpu::Driver& driver, const gpu::DeviceFacts& device,
                              gpu::KernelCache& cache, const BackendPlan& plan,
                              const AttentionForwardProblem& problem, const RunContext& context);

}  // namespace onchip::sm90
