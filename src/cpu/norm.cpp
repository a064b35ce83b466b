// How the norms' rows are cut: into blocks that follow from shapes alone, so that dweight, one sum
// a block, has the same bits with any number of threads. A unit gets rows at equal distances: the
// outer axes of all tensors together are merged into as few as their strides allow.
#include "cpu/norm.hpp"

#include <algorithm>
#include <array>
#include <cstring>
#include <string>

#include "core/ceil_div.hpp"
#include "core/thread_pool.hpp"
#include "cpu/cpu_features.hpp"
#include "cpu/isa_table.hpp"
#include "cpu/norm_unit.hpp"

namespace onchip::cpu {

namespace {

constexpr std::int64_t kMaxBlocks = 128;
constexpr std::int64_t kMinBlock = 4096;    // numbers
constexpr std::int64_t kSumChannels = 512;  // of a task that adds the blocks' sums
constexpr double kMostNumbers = 0x1p46;     // so that sizes of workspaces can be computed

enum Word : std::size_t {
  kIsa,
  kWorkers,
  kScratchBytes,  // of a worker
  kSumsBytes,     // of a block; 0: dweight is not wanted
};

struct Unit {
  std::size_t (*scratch_bytes)(const NormShape& shape);
  std::size_t (*sums_bytes)(const NormShape& shape);
  void (*load_weight)(const NormShape& shape, std::byte* scratch);
  void (*outputs)(const NormShape& shape, const NormRows& rows, std::byte* scratch);
  void (*gradients)(const NormShape& shape, const NormRows& rows, std::byte* sums,
                    std::byte* scratch);
  void (*store_sums)(const NormShape& shape, const std::byte* sums, std::int64_t count,
                     std::int64_t begin, std::int64_t end, std::byte* dweight);
  const char* forward_name;
  const char* backward_name;
};

#define ONCHIP_CPU_UNIT(isa)                                                                   \
  Unit {                                                                                       \
    isa::norm_scratch_bytes, isa::norm_sums_bytes, isa::norm_load_weight, isa::norm_outputs,   \
        isa::norm_gradients, isa::norm_store_sums, "norm_forward/" #isa, "norm_backward/" #isa \
  }

// Only of an instruction set that is available.
Unit unit_of(Isa isa) { ONCHIP_CPU_RETURN_TABLE(isa, ONCHIP_CPU_UNIT); }

#undef ONCHIP_CPU_UNIT

// No rows: any positive number.
std::int64_t block_rows(const NormProblem& problem) {
  const std::int64_t least = ceil_div(kMinBlock, std::max<std::int64_t>(problem.dim, 1));
  return std::max(least, ceil_div(problem.rows, kMaxBlocks));
}

std::int64_t blocks_of(const NormProblem& problem) {
  return ceil_div(problem.rows, block_rows(problem));
}

NormShape norm_shape(const NormProblem& problem) {
  NormShape shape;
  shape.dtype = problem.dtype;
  shape.gate_dtype = problem.gate.dtype;
  shape.weight_dtype = problem.weight.dtype;
  shape.activation = problem.activation;
  shape.l2 = problem.l2;
  shape.gate_first = problem.gate_first;
  shape.eps = problem.eps;
  shape.dim = problem.dim;
  shape.group_size = problem.group_size;
  if (problem.weight.present()) shape.weight = problem.weight.data;
  return shape;
}

// The outer axes of tensors of one shape, merged where all of them allow it. Absent ones do not
// count.
class Rows {
 public:
  static constexpr std::size_t kTensors = 6;

  // In the order of NormRows' fields.
  explicit Rows(const std::array<const TensorView*, kTensors>& tensors) {
    const TensorView& x = *tensors[0];
    for (std::int32_t i = 0; i + 1 < x.rank; ++i) {
      const auto axis = static_cast<std::size_t>(i);
      if (x.shape[axis] == 1) continue;
      Axis next{x.shape[axis], {}};
      for (std::size_t t = 0; t < kTensors; ++t) {
        if (present(tensors[t])) {
          next.strides[t] = tensors[t]->strides[axis] * tensors[t]->element_size();
        }
      }
      if (count_ > 0 && follows(axes_[count_ - 1], next)) {
        next.extent *= axes_[count_ - 1].extent;
        axes_[count_ - 1] = next;
      } else {
        axes_[count_++] = next;
      }
    }
    for (std::size_t t = 0; t < kTensors; ++t) {
      if (present(tensors[t])) base_[t] = tensors[t]->data;
    }
  }

  // Calls f(rows) for runs of equally distant rows that make up begin .. end.
  template <typename F>
  void for_each_run(std::int64_t begin, std::int64_t end, F&& f) const {
    while (begin < end) {
      std::array<UnitRow, kTensors> at;
      for (std::size_t t = 0; t < kTensors; ++t) at[t].data = base_[t];
      std::int64_t rest = begin;
      std::int64_t length = 1;
      for (std::size_t i = count_; i-- > 0;) {
        const Axis& axis = axes_[i];
        const std::int64_t index = rest % axis.extent;
        rest /= axis.extent;
        const bool inner = i + 1 == count_;
        if (inner) length = std::min(axis.extent - index, end - begin);
        for (std::size_t t = 0; t < kTensors; ++t) {
          if (base_[t] == nullptr) continue;
          at[t].data += index * axis.strides[t];
          if (inner) at[t].row_stride = axis.strides[t];
        }
      }
      f(NormRows{length, at[0], at[1], at[2], at[3], at[4], at[5]});
      begin += length;
    }
  }

 private:
  struct Axis {
    std::int64_t extent = 0;
    std::array<std::int64_t, kTensors> strides{};
  };

  static bool present(const TensorView* tensor) { return tensor != nullptr && tensor->present(); }

  static bool follows(const Axis& outer, const Axis& inner) {
    for (std::size_t t = 0; t < kTensors; ++t) {
      if (outer.strides[t] != inner.strides[t] * inner.extent) return false;
    }
    return true;
  }

  std::array<Axis, ONCHIP_MAX_RANK> axes_{};
  std::size_t count_ = 0;
  std::array<std::byte*, kTensors> base_{};
};

PlanResult plan_norm(const NormProblem& problem, const Settings& settings, bool sums,
                     const char* Unit::* name) {
  if (problem.device.type != ONCHIP_DEVICE_CPU) return Reject{"works on CPU tensors only"};
  if (const std::string& reason = settings.num_threads_problem; !reason.empty()) {
    return Reject{reason, true};
  }
  const IsaChoice choice = choose_isa(settings);
  if (!choice.problem.empty()) return Reject{choice.problem, true};
  if (std::max(static_cast<double>(problem.rows), 1.0) * static_cast<double>(problem.dim) >
      kMostNumbers) {
    return Reject{"more numbers than can be counted"};
  }
  const Unit unit = unit_of(choice.isa);
  const NormShape shape = norm_shape(problem);
  const auto workers = static_cast<std::int32_t>(
      std::clamp<std::int64_t>(blocks_of(problem), 1, std::max(num_threads(), 1)));
  BackendPlan plan;
  plan.kernel = unit.*name;
  plan.words[kIsa] = static_cast<std::uint64_t>(choice.isa);
  plan.words[kWorkers] = static_cast<std::uint64_t>(workers);
  plan.words[kScratchBytes] = unit.scratch_bytes(shape);
  plan.words[kSumsBytes] = sums ? unit.sums_bytes(shape) : 0;
  plan.workspace_bytes = static_cast<std::size_t>(workers) * plan.words[kScratchBytes] +
                         static_cast<std::size_t>(blocks_of(problem)) * plan.words[kSumsBytes];
  plan.workspace_alignment = kNormAlignment;
  return plan;
}

// f(block, its first row, its last, scratch of the worker, which holds the weight).
template <typename F>
void each_block(const BackendPlan& plan, const NormProblem& problem, const Unit& unit,
                const NormShape& shape, const RunContext& context, F&& f) {
  const std::int64_t step = block_rows(problem);
  parallel_for(blocks_of(problem), static_cast<std::int32_t>(plan.words[kWorkers]),
               [&](std::int64_t block, std::int32_t worker) {
                 std::byte* scratch = context.workspace +
                                      static_cast<std::size_t>(worker) * plan.words[kScratchBytes];
                 unit.load_weight(shape, scratch);
                 f(block, block * step, std::min(problem.rows, (block + 1) * step), scratch);
               });
}

}  // namespace

PlanResult plan_norm_forward(const NormForwardProblem& problem, const Settings& settings) {
  return plan_norm(problem, settings, false, &Unit::forward_name);
}

PlanResult plan_norm_forward(const NormForwardProblem& problem) {
  return plan_norm_forward(problem, settings());
}

void run_norm_forward(const BackendPlan& plan, const NormForwardProblem& problem,
                      const RunContext& context) {
  const Unit unit = unit_of(static_cast<Isa>(plan.words[kIsa]));
  const NormShape shape = norm_shape(problem);
  const Rows rows({&problem.x, &problem.gate, &problem.y, nullptr, nullptr, nullptr});
  each_block(plan, problem, unit, shape, context,
             [&](std::int64_t, std::int64_t begin, std::int64_t end, std::byte* scratch) {
               rows.for_each_run(begin, end,
                                 [&](const NormRows& run) { unit.outputs(shape, run, scratch); });
             });
}

PlanResult plan_norm_backward(const NormBackwardProblem& problem, const Settings& settings) {
  return plan_norm(problem, settings, problem.dweight.present(), &Unit::backward_name);
}

PlanResult plan_norm_backward(const NormBackwardProblem& problem) {
  return plan_norm_backward(problem, settings());
}

void run_norm_backward(const BackendPlan& plan, const NormBackwardProblem& problem,
                       const RunContext& context) {
  const Unit unit = unit_of(static_cast<Isa>(plan.words[kIsa]));
  const NormShape shape = norm_shape(problem);
  const std::size_t sums_bytes = plan.words[kSumsBytes];
  std::byte* all_sums = context.workspace + plan.words[kWorkers] * plan.words[kScratchBytes];
  const Rows rows({&problem.x, &problem.gate, nullptr, &problem.d_y, &problem.dx, &problem.dgate});
  each_block(plan, problem, unit, shape, context,
             [&](std::int64_t block, std::int64_t begin, std::int64_t end, std::byte* scratch) {
               std::byte* sums = nullptr;
               if (sums_bytes > 0) {
                 sums = all_sums + static_cast<std::size_t>(block) * sums_bytes;
                 std::memset(sums, 0, sums_bytes);
               }
               rows.for_each_run(begin, end, [&](const NormRows& run) {
                 unit.gradients(shape, run, sums, scratch);
               });
             });
  if (sums_bytes == 0) return;
  parallel_for(ceil_div(problem.dim, kSumChannels), static_cast<std::int32_t>(plan.words[kWorkers]),
               [&](std::int64_t task, std::int32_t) {
                 const std::int64_t begin = task * kSumChannels;
                 unit.store_sums(shape, all_sums, blocks_of(problem), begin,
                                 std::min(problem.dim, begin + kSumChannels), problem.dweight.data);
               });
}

}  // namespace onchip::cpu
