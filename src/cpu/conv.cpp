// How the work of short causal convolution is cut: blocks of channels, and strips of the row axis
// (of all batch rows together). A strip meets the sequences that have tokens in it; the inputs
// before its first token are read again. Strips follow from shapes alone, so that the sums over
// tokens, one partial sum a strip, have the same bits with any number of threads.
#include "cpu/conv.hpp"

#include <algorithm>
#include <cstring>
#include <string>

#include "core/ceil_div.hpp"
#include "core/thread_pool.hpp"
#include "cpu/conv_unit.hpp"
#include "cpu/cpu_features.hpp"
#include "cpu/isa_table.hpp"

namespace onchip::cpu {

namespace {

constexpr std::int64_t kMinStrip = 64;   // tokens
constexpr std::int64_t kMaxStrips = 64;  // of the whole call: each has sums of its own
constexpr std::int64_t kStepRows =
    16;  // sequences of a step's task: weights are staged once for them
constexpr double kMostTasks = 0x1p40;  // so that sizes of workspaces can be computed

enum Word : std::size_t {
  kIsa,
  kWorkers,
  kScratchBytes,  // of a worker
  kSumsBytes,     // of a strip's block; 0: no sums are wanted
};

struct Unit {
  std::size_t (*scratch_bytes)(DType dtype, std::int64_t width);
  std::size_t (*sums_bytes)(DType dtype, std::int64_t width);
  void (*load_block)(const ConvBlock& block, std::byte* scratch);
  void (*outputs)(const ConvBlock& block, const ConvSequence& sequence, std::int64_t begin,
                  std::int64_t end, const UnitRow& y, std::byte* scratch);
  void (*gradients)(const ConvBlock& block, const ConvSequence& sequence,
                    const ConvGradients& gradients, std::int64_t begin, std::int64_t end,
                    std::byte* scratch);
  void (*state_gradient)(const ConvBlock& block, const ConvSequence& sequence,
                         const ConvGradients& gradients, const UnitTaps& to, std::byte* scratch);
  void (*step)(const ConvBlock& block, const UnitTaps& state, const std::byte* x, std::byte* y,
               std::byte* scratch);
  void (*store_sums)(const ConvBlock& block, const std::byte* sums, std::size_t stride,
                     std::int64_t count, const UnitTaps& dweight, std::byte* dbias);
  const char* forward_name;
  const char* backward_name;
  const char* step_name;
};

#define ONCHIP_CPU_UNIT(isa)                                                                 \
  Unit {                                                                                     \
    isa::conv_scratch_bytes, isa::conv_sums_bytes, isa::conv_load_block, isa::conv_outputs,  \
        isa::conv_gradients, isa::conv_state_gradient, isa::conv_step, isa::conv_store_sums, \
        "conv_forward/" #isa, "conv_backward/" #isa, "conv_step/" #isa                       \
  }

// Only of an instruction set that is available.
Unit unit_of(Isa isa) { ONCHIP_CPU_RETURN_TABLE(isa, ONCHIP_CPU_UNIT); }

#undef ONCHIP_CPU_UNIT

std::int64_t blocks_of(const ConvProblem& problem) {
  return ceil_div(problem.channels, kConvChannels);
}

std::int64_t rows_of(const ConvProblem& problem) {
  return problem.packed ? problem.slot : problem.num_seqs * problem.slot;
}

std::int64_t strip_rows(const ConvProblem& problem) {
  return std::max(kMinStrip, ceil_div(rows_of(problem), kMaxStrips));
}

std::int64_t strips_of(const ConvProblem& problem) {
  return ceil_div(rows_of(problem), strip_rows(problem));
}

// The block's channels of a [D, W] tensor, or of row n of a [N, D, W] one.
UnitTaps unit_taps(const TensorView& tensor, std::int64_t channel) {
  if (!tensor.present() || tensor.data == nullptr) return {};
  return {tensor.at(channel), tensor.dtype, tensor.strides[0] * tensor.element_size()};
}
UnitTaps unit_taps(const TensorView& tensor, std::int64_t n, std::int64_t channel) {
  if (!tensor.present() || tensor.data == nullptr) return {};
  return {tensor.at(n, channel), tensor.dtype, tensor.strides[1] * tensor.element_size()};
}

UnitRow unit_rows(const RowsView& rows, const TokenRange& tokens, std::int64_t channel) {
  if (!rows.wanted || rows.data == nullptr) return {};
  return {rows.at(tokens.batch, tokens.begin, 0) + channel * dtype_size(rows.dtype),
          rows.row_stride};
}

// A block of channels and its place in the tensors.
struct Block {
  std::int64_t channel = 0;
  ConvBlock unit;

  Block(const ConvProblem& problem, std::int64_t index) : channel(index * kConvChannels) {
    unit.dtype = problem.dtype;
    unit.silu = problem.silu;
    unit.width = problem.width;
    unit.channels = std::min(kConvChannels, problem.channels - channel);
    unit.weight = unit_taps(problem.weight, channel);
    if (!problem.bias.present()) return;
    unit.bias = problem.bias.at(channel);
    unit.bias_dtype = problem.bias.dtype;
  }

  ConvSequence sequence(const ConvProblem& problem, const TokenRange& tokens,
                        const TensorView& state, std::int64_t n) const {
    return {unit_rows(problem.x, tokens, channel), unit_taps(state, n, channel), tokens.length};
  }
};

// Calls f(n, tokens, begin, end) for the tokens of every sequence that lie in the strip.
template <typename F>
void for_each_span(const ConvProblem& problem, std::int64_t strip, F&& f) {
  const std::int64_t first = strip * strip_rows(problem);
  const std::int64_t last = std::min(rows_of(problem), first + strip_rows(problem));
  std::int64_t n = 0;
  if (problem.packed) {
    // The first sequence whose slot ends behind the strip's first row.
    for (std::int64_t left = problem.num_seqs; left > 0;) {
      const std::int64_t half = left / 2;
      const std::byte* end = problem.cu_seqlens.at(n + half + 1);
      const bool before = load_integer(end, problem.cu_seqlens.dtype) <= first;
      n = before ? n + half + 1 : n;
      left = before ? left - half - 1 : half;
    }
  } else {
    n = first / problem.slot;
  }
  for (; n < problem.num_seqs; ++n) {
    const TokenRange tokens = problem.tokens(n);
    const std::int64_t row = problem.packed ? tokens.begin : n * problem.slot;
    if (row >= last) return;
    const std::int64_t begin = std::max<std::int64_t>(first - row, 0);
    const std::int64_t end = std::min(last - row, tokens.length);
    if (begin < end) f(n, tokens, begin, end);
  }
}

std::int32_t workers_of(const BackendPlan& plan) {
  return static_cast<std::int32_t>(plan.words[kWorkers]);
}

// f(task, scratch of the worker).
template <typename F>
void each_task(const BackendPlan& plan, const RunContext& context, std::int64_t tasks, F&& f) {
  parallel_for(tasks, workers_of(plan), [&](std::int64_t task, std::int32_t worker) {
    f(task, context.workspace + static_cast<std::size_t>(worker) * plan.words[kScratchBytes]);
  });
}

void clear_slack(const ConvProblem& problem, const RowsView& rows) {
  const auto row_bytes = static_cast<std::size_t>(problem.channels * dtype_size(problem.dtype));
  if (!rows.wanted || row_bytes == 0) return;
  for_each_slack(problem, [&](std::int64_t batch, std::int64_t begin, std::int64_t end) {
    for (std::int64_t row = begin; row < end; ++row) {
      std::memset(rows.at(batch, row, 0), 0, row_bytes);
    }
  });
}

// The last W inputs of sequence n. They are copied, not computed with: every bit is theirs.
template <typename Element>
void copy_last_inputs(const ConvForwardProblem& problem, std::int64_t n, const Block& block) {
  const TokenRange tokens = problem.tokens(n);
  const ConvSequence from = block.sequence(problem, tokens, problem.initial_state, n);
  const UnitTaps to = unit_taps(problem.final_state, n, block.channel);
  constexpr std::int64_t kSize = sizeof(Element);
  for (std::int64_t s = 0; s < problem.width; ++s) {
    const std::int64_t time = tokens.length - problem.width + s;
    const std::byte* source = nullptr;
    std::int64_t stride = kSize;
    if (time >= 0) {
      source = from.x.data + time * from.x.row_stride;
    } else if (from.state.data != nullptr) {
      source = from.state.data + (problem.width + time) * kSize;
      stride = from.state.channel_stride;
    }
    std::byte* target = to.data + s * kSize;
    for (std::int64_t c = 0; c < block.unit.channels; ++c) {
      Element x{};
      if (source != nullptr) std::memcpy(&x, source + c * stride, sizeof(x));
      std::memcpy(target + c * to.channel_stride, &x, sizeof(x));
    }
  }
}

void copy_last_inputs(const ConvForwardProblem& problem, std::int64_t n, const Block& block) {
  switch (dtype_size(problem.dtype)) {
    case 8:
      copy_last_inputs<std::uint64_t>(problem, n, block);
      return;
    case 4:
      copy_last_inputs<std::uint32_t>(problem, n, block);
      return;
    default:
      copy_last_inputs<std::uint16_t>(problem, n, block);
  }
}

PlanResult plan_conv(const ConvProblem& problem, const Settings& settings, bool sums,
                     const char* Unit::* name) {
  if (problem.device.type != ONCHIP_DEVICE_CPU) return Reject{"works on CPU tensors only"};
  if (const std::string& reason = settings.num_threads_problem; !reason.empty()) {
    return Reject{reason, true};
  }
  const IsaChoice choice = choose_isa(settings);
  if (!choice.problem.empty()) return Reject{choice.problem, true};
  if (problem.width > kConvWidth) {
    return Reject{"width " + std::to_string(problem.width) + ": at most " +
                  std::to_string(kConvWidth)};
  }
  const auto real = [](std::int64_t x) { return static_cast<double>(x); };
  const double blocks = real(blocks_of(problem));
  if (real(problem.num_seqs) * std::max({real(problem.slot), blocks, 1.0}) > kMostTasks ||
      real(problem.slot) > kMostTasks || blocks > kMostTasks / kMaxStrips) {
    return Reject{"more tokens or channels than can be counted"};
  }
  const Unit unit = unit_of(choice.isa);
  const std::size_t scratch = unit.scratch_bytes(problem.dtype, problem.width);
  const std::int64_t parts = std::max(strips_of(problem), problem.num_seqs);
  const auto workers = static_cast<std::int32_t>(
      std::clamp<std::int64_t>(parts * blocks_of(problem), 1, std::max(num_threads(), 1)));
  BackendPlan plan;
  plan.kernel = unit.*name;
  plan.words[kIsa] = static_cast<std::uint64_t>(choice.isa);
  plan.words[kWorkers] = static_cast<std::uint64_t>(workers);
  plan.words[kScratchBytes] = scratch;
  plan.words[kSumsBytes] = sums ? unit.sums_bytes(problem.dtype, problem.width) : 0;
  plan.workspace_bytes =
      static_cast<std::size_t>(workers) * scratch +
      static_cast<std::size_t>(strips_of(problem) * blocks_of(problem)) * plan.words[kSumsBytes];
  plan.workspace_alignment = kConvAlignment;
  return plan;
}

}  // namespace

PlanResult plan_conv_forward(const ConvForwardProblem& problem, const Settings& settings) {
  return plan_conv(problem, settings, false, &Unit::forward_name);
}

PlanResult plan_conv_forward(const ConvForwardProblem& problem) {
  return plan_conv_forward(problem, settings());
}

void run_conv_forward(const BackendPlan& plan, const ConvForwardProblem& problem,
                      const RunContext& context) {
  const Unit unit = unit_of(static_cast<Isa>(plan.words[kIsa]));
  const std::int64_t blocks = blocks_of(problem);
  each_task(plan, context, strips_of(problem) * blocks, [&](std::int64_t task, std::byte* scratch) {
    const Block block(problem, task % blocks);
    unit.load_block(block.unit, scratch);
    for_each_span(
        problem, task / blocks,
        [&](std::int64_t n, const TokenRange& tokens, std::int64_t begin, std::int64_t end) {
          unit.outputs(block.unit, block.sequence(problem, tokens, problem.initial_state, n), begin,
                       end, unit_rows(problem.y, tokens, block.channel), scratch);
        });
  });
  if (problem.final_state.present()) {
    each_task(plan, context, problem.num_seqs * blocks, [&](std::int64_t task, std::byte*) {
      copy_last_inputs(problem, task / blocks, Block(problem, task % blocks));
    });
  }
  clear_slack(problem, problem.y);
}

PlanResult plan_conv_backward(const ConvBackwardProblem& problem, const Settings& settings) {
  return plan_conv(problem, settings, problem.dweight.present() || problem.dbias.present(),
                   &Unit::backward_name);
}

PlanResult plan_conv_backward(const ConvBackwardProblem& problem) {
  return plan_conv_backward(problem, settings());
}

void run_conv_backward(const BackendPlan& plan, const ConvBackwardProblem& problem,
                       const RunContext& context) {
  const Unit unit = unit_of(static_cast<Isa>(plan.words[kIsa]));
  const std::int64_t blocks = blocks_of(problem);
  const std::size_t sums_bytes = plan.words[kSumsBytes];
  std::byte* all_sums = context.workspace + plan.words[kWorkers] * plan.words[kScratchBytes];
  const auto sums_of = [&](std::int64_t task) -> std::byte* {
    return sums_bytes == 0 ? nullptr : all_sums + static_cast<std::size_t>(task) * sums_bytes;
  };
  const auto gradients_of = [&](const Block& block, const TokenRange& tokens, std::int64_t n) {
    ConvGradients gradients;
    gradients.d_y = unit_rows(problem.d_y, tokens, block.channel);
    gradients.dx = unit_rows(problem.dx, tokens, block.channel);
    gradients.d_final_state = unit_taps(problem.d_final_state, n, block.channel);
    return gradients;
  };
  if (problem.dx.wanted || sums_bytes > 0) {
    each_task(
        plan, context, strips_of(problem) * blocks, [&](std::int64_t task, std::byte* scratch) {
          const Block block(problem, task % blocks);
          std::byte* sums = sums_of(task);
          if (sums != nullptr) std::memset(sums, 0, sums_bytes);
          unit.load_block(block.unit, scratch);
          for_each_span(
              problem, task / blocks,
              [&](std::int64_t n, const TokenRange& tokens, std::int64_t begin, std::int64_t end) {
                ConvGradients gradients = gradients_of(block, tokens, n);
                gradients.sums = sums;
                unit.gradients(block.unit,
                               block.sequence(problem, tokens, problem.initial_state, n), gradients,
                               begin, end, scratch);
              });
        });
  }
  if (sums_bytes > 0) {
    each_task(plan, context, blocks, [&](std::int64_t task, std::byte*) {
      const Block block(problem, task);
      unit.store_sums(block.unit, sums_of(task), static_cast<std::size_t>(blocks) * sums_bytes,
                      strips_of(problem), unit_taps(problem.dweight, block.channel),
                      problem.dbias.present() ? problem.dbias.at(block.channel) : nullptr);
    });
  }
  if (problem.dinitial_state.present()) {
    each_task(plan, context, problem.num_seqs * blocks, [&](std::int64_t task, std::byte* scratch) {
      const Block block(problem, task % blocks);
      const std::int64_t n = task / blocks;
      const TokenRange tokens = problem.tokens(n);
      unit.load_block(block.unit, scratch);
      unit.state_gradient(block.unit, block.sequence(problem, tokens, problem.initial_state, n),
                          gradients_of(block, tokens, n),
                          unit_taps(problem.dinitial_state, n, block.channel), scratch);
    });
  }
  clear_slack(problem, problem.dx);
}

PlanResult plan_conv_step(const ConvStepProblem& problem, const Settings& settings) {
  return plan_conv(problem, settings, false, &Unit::step_name);
}

PlanResult plan_conv_step(const ConvStepProblem& problem) {
  return plan_conv_step(problem, settings());
}

void run_conv_step(const BackendPlan& plan, const ConvStepProblem& problem,
                   const RunContext& context) {
  const Unit unit = unit_of(static_cast<Isa>(plan.words[kIsa]));
  const std::int64_t blocks = blocks_of(problem);
  each_task(plan, context, ceil_div(problem.num_seqs, kStepRows) * blocks,
            [&](std::int64_t task, std::byte* scratch) {
              const Block block(problem, task % blocks);
              const std::int64_t first = task / blocks * kStepRows;
              const std::int64_t last = std::min(first + kStepRows, problem.num_seqs);
              unit.load_block(block.unit, scratch);
              for (std::int64_t n = first; n < last; ++n) {
                const TokenRange tokens = problem.tokens(n);
                const UnitRow x = unit_rows(problem.x, tokens, block.channel);
                const UnitRow y = unit_rows(problem.y, tokens, block.channel);
                const std::int64_t slot = problem.state_slot(n);
                if (slot < 0) {
                  std::memset(
                      y.data, 0,
                      static_cast<std::size_t>(block.unit.channels * dtype_size(problem.dtype)));
                  continue;
                }
                unit.step(block.unit, unit_taps(problem.state, slot, block.channel), x.data, y.data,
                          scratch);
              }
            });
}

}  // namespace onchip::cpu
