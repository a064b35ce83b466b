// A norm over groups of the last axis, in double precision. With r = 1 / sqrt(mean u^2 + eps) (the
// sum for L2), n = u r and g the gate's function: y = n weight g(gate) with u = x, or, gate first,
// y = n weight with u = x g(gate). Backward: du = r (dn - n <n, dn> / D), D = 1 for L2.
#include <algorithm>
#include <array>
#include <cmath>

#include "reference/conv.hpp"
#include "reference/workspace.hpp"

namespace onchip::reference {

namespace {

// dweight is summed in blocks of rows that do not depend on the number of threads.
constexpr std::int64_t kBlocks = 64;

struct Gate {
  double value = 1.0;
  double slope = 0.0;
};

Gate gate_of(Activation activation, double x) {
  const double s = x >= 0.0 ? 1.0 / (1.0 + std::exp(-x)) : std::exp(x) / (1.0 + std::exp(x));
  switch (activation) {
    case Activation::none:
      return {};
    case Activation::silu:
      return {x * s, s * (1.0 + x * (1.0 - s))};
    case Activation::sigmoid:
      return {s, s * (1.0 - s)};
  }
  return {};
}

// Address of row `row` of a tensor of x's shape.
std::byte* row_of(const TensorView& tensor, std::int64_t row) {
  std::int64_t offset = 0;
  for (std::int32_t axis = tensor.rank - 2; axis >= 0; --axis) {
    const auto at = static_cast<std::size_t>(axis);
    offset += row % tensor.shape[at] * tensor.strides[at];
    row /= tensor.shape[at];
  }
  return tensor.data + offset * tensor.element_size();
}

double at(const std::byte* row, DType dtype, std::int64_t d) {
  return load_as_double(row + d * dtype_size(dtype), dtype);
}

void put(std::byte* row, DType dtype, std::int64_t d, double value) {
  store_from_double(row + d * dtype_size(dtype), dtype, value);
}

// One group of one row: what backward needs of the forward pass.
struct Group {
  const NormProblem& problem;
  const std::byte* x;
  const std::byte* gate;
  std::int64_t begin;
  double factor = 0.0;  // r

  Group(const NormProblem& norm, std::int64_t row, std::int64_t first)
      : problem(norm),
        x(row_of(norm.x, row)),
        gate(norm.gate.present() ? row_of(norm.gate, row) : nullptr),
        begin(first) {
    double squares = 0.0;
    for (std::int64_t d = begin; d < begin + problem.group_size; ++d) squares += u(d) * u(d);
    if (!problem.l2) squares /= static_cast<double>(problem.group_size);
    factor = 1.0 / std::sqrt(squares + problem.eps);
  }

  Gate gated(std::int64_t d) const {
    if (gate == nullptr) return {};
    return gate_of(problem.activation, at(gate, problem.gate.dtype, d));
  }
  double input(std::int64_t d) const { return at(x, problem.dtype, d); }
  double u(std::int64_t d) const {
    return problem.gate_first ? input(d) * gated(d).value : input(d);
  }
  double weight(std::int64_t d) const {
    return problem.weight.present() ? at(problem.weight.data, problem.weight.dtype, d) : 1.0;
  }
  // What the norm is multiplied with besides the weight.
  double behind(std::int64_t d) const { return problem.gate_first ? 1.0 : gated(d).value; }
};

std::int64_t block_begin(const NormProblem& problem, std::int64_t block) {
  return problem.rows / kBlocks * block + std::min(block, problem.rows % kBlocks);
}

}  // namespace

PlanResult plan_norm_forward(const NormForwardProblem& problem) {
  if (const char* reason = unsupported(problem)) return Reject{reason};
  return plan_with(kBlocks, Layout{}, Layout{});
}

void run_norm_forward(const BackendPlan& plan, const NormForwardProblem& problem,
                      const RunContext&) {
  parallel_for(kBlocks, planned_workers(plan), [&](std::int64_t block, std::int32_t) {
    for (std::int64_t row = block_begin(problem, block); row < block_begin(problem, block + 1);
         ++row) {
      std::byte* y = row_of(problem.y, row);
      for (std::int64_t begin = 0; begin < problem.dim; begin += problem.group_size) {
        const Group group(problem, row, begin);
        for (std::int64_t d = begin; d < begin + problem.group_size; ++d) {
          put(y, problem.dtype, d, group.u(d) * group.factor * group.weight(d) * group.behind(d));
        }
      }
    }
  });
}

PlanResult plan_norm_backward(const NormBackwardProblem& problem) {
  if (const char* reason = unsupported(problem)) return Reject{reason};
  Layout shared;
  if (problem.dweight.present()) shared.add(kBlocks, problem.dim);
  shared.finish_line();
  return plan_with(kBlocks, Layout{}, shared);
}

void run_norm_backward(const BackendPlan& plan, const NormBackwardProblem& problem,
                       const RunContext& context) {
  double* sums = as_doubles(context.workspace);
  std::fill_n(sums, plan.words[kSharedDoubles], 0.0);
  parallel_for(kBlocks, planned_workers(plan), [&](std::int64_t block, std::int32_t) {
    double* dweight = sums + block * problem.dim;
    for (std::int64_t row = block_begin(problem, block); row < block_begin(problem, block + 1);
         ++row) {
      const std::byte* d_y = row_of(problem.d_y, row);
      std::byte* dx = problem.dx.present() ? row_of(problem.dx, row) : nullptr;
      std::byte* dgate = problem.dgate.present() ? row_of(problem.dgate, row) : nullptr;
      for (std::int64_t begin = 0; begin < problem.dim; begin += problem.group_size) {
        const Group group(problem, row, begin);
        const auto d_norm = [&](std::int64_t d) {
          return at(d_y, problem.dtype, d) * group.weight(d) * group.behind(d);
        };
        double along = 0.0;
        for (std::int64_t d = begin; d < begin + problem.group_size; ++d) {
          along += group.u(d) * group.factor * d_norm(d);
        }
        if (!problem.l2) along /= static_cast<double>(problem.group_size);
        for (std::int64_t d = begin; d < begin + problem.group_size; ++d) {
          const double norm = group.u(d) * group.factor;
          const double dy = at(d_y, problem.dtype, d);
          const double du = group.factor * (d_norm(d) - norm * along);
          const Gate gate = group.gated(d);
          if (problem.dweight.present()) dweight[d] += dy * norm * group.behind(d);
          if (dx != nullptr) put(dx, problem.dtype, d, problem.gate_first ? du * gate.value : du);
          if (dgate == nullptr) continue;
          const double d_value =
              problem.gate_first ? du * group.input(d) : dy * norm * group.weight(d);
          put(dgate, problem.gate.dtype, d, d_value * gate.slope);
        }
      }
    }
  });
  for (std::int64_t d = 0; problem.dweight.present() && d < problem.dim; ++d) {
    double total = 0.0;
    for (std::int64_t block = 0; block < kBlocks; ++block) total += sums[block * problem.dim + d];
    store_from_double(problem.dweight.at(d), problem.dweight.dtype, total);
  }
}

}  // namespace onchip::reference
