// Linear attention, convolution and norms on each instruction set: calls drawn at random, their
// tensors and workspace between forbidden pages, on one thread and on several. What the sanitizers
// watch; results are held against the reference's. tests/python judges by the contract's bounds.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdlib>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "cpu/forced_isa.hpp"
#include "support/conv_call.hpp"
#include "support/linear_call.hpp"

namespace onchip::test {
namespace {

constexpr std::array kDTypes = {DType::f64, DType::f32, DType::f16, DType::bf16};

// RMS error over RMS, of outputs that are gradients of gates and of their constants: the largest
// bound of docs/semantics.md section 5 for the dtype.
double bound_of(DType dtype) {
  switch (dtype) {
    case DType::f64:
      return 1e-9;
    case DType::f32:
      return 1e-4;
    case DType::f16:
      return 3e-3;
    default:
      return 2e-2;
  }
}

double rms(const std::vector<double>& values) {
  double sum = 0.0;
  for (const double x : values) sum += x * x;
  return values.empty() ? 0.0 : std::sqrt(sum / static_cast<double>(values.size()));
}

std::size_t coarseness(DType dtype) {
  return static_cast<std::size_t>(std::find(kDTypes.begin(), kDTypes.end(), dtype) -
                                  kDTypes.begin());
}

// "" or which output is far from the reference's. Sums that cancel (constants of gates, dt_bias)
// are measured against the largest output, of which they are made.
std::string compare(DrawnCall& call, DType dtype, const std::vector<std::vector<double>>& wanted) {
  double largest = 0.0;
  for (const std::vector<double>& want : wanted) largest = std::max(largest, rms(want));
  std::size_t index = 0;
  for (const DrawnCall::Argument& argument : call.arguments()) {
    if (!argument.output) continue;
    const std::vector<double>& want = wanted[index++];
    std::vector<double> error = argument.memory.values();
    for (std::size_t i = 0; i < error.size(); ++i) error[i] -= want[i];
    const DType coarser = kDTypes[std::max(coarseness(dtype), coarseness(argument.memory.dtype()))];
    const double scale = std::max({rms(want), largest / 10, 1e-3});
    if (const double off = rms(error) / scale; !(off <= bound_of(coarser))) {
      return argument.name + " is off by " + std::to_string(off);
    }
  }
  return "";
}

class DrawnCallsOnCpu : public EachIsa {
 protected:
  void TearDown() override { onchip_set_num_threads(0); }

  // Returns whether the CPU takes the call; it must where `taken`.
  static bool check(DrawnCall& call, DType dtype, cpu::Isa isa, bool taken) {
    call.remember();
    call.force_backend("reference");
    EXPECT_EQ(call.run_whole(), "");
    const std::vector<std::vector<double>> wanted = call.output_values();
    std::vector<std::vector<std::byte>> bytes;
    for (const std::int32_t threads : {1, 4}) {
      call.restore();
      onchip_set_num_threads(threads);
      const std::string refusal = call.run_forced(isa);
      if (!refusal.empty()) {
        EXPECT_FALSE(taken) << refusal;
        return false;
      }
      EXPECT_EQ(call.changed(true), "");
      EXPECT_EQ(compare(call, dtype, wanted), "");
      for (std::size_t i = 0; i < call.arguments().size(); ++i) {
        const std::vector<std::byte> now = call.arguments()[i].memory.bytes();
        if (threads == 1) {
          bytes.push_back(now);
        } else {
          EXPECT_EQ(now, bytes[i]) << call.arguments()[i].name << ": threads changed bits";
        }
      }
    }
    return true;
  }
};
ONCHIP_FOR_EACH_ISA(DrawnCallsOnCpu);

std::uint64_t rounds(std::uint64_t count) {
  return std::getenv("ONCHIP_TEST_LONG") != nullptr ? 20 * count : count;
}

// Their engines are in src/cpu.
bool is_taken(std::int32_t op) {
  return op <= ONCHIP_MLSTM || (op >= ONCHIP_DELTA_RULE && op <= ONCHIP_GATED_DELTA_PRODUCT);
}

TEST_P(DrawnCallsOnCpu, LinearOnOneThreadAndOnMoreThreads) {
  for (std::uint64_t round = 0; round < rounds(2); ++round) {
    for (std::int32_t op = 1; op <= kLinearOperators; ++op) {
      for (const LinearPhase phase :
           {LinearPhase::forward, LinearPhase::backward, LinearPhase::step}) {
        for (const DType dtype : kDTypes) {
          const std::uint64_t number =
              ((round * 32 + static_cast<std::uint64_t>(op)) * 4 + static_cast<int>(phase)) * 8 +
              static_cast<std::uint64_t>(dtype);
          Random random(number);
          LinearDraw draw;
          draw.op = op;
          draw.phase = phase;
          draw.dtype = dtype;
          draw.widest = random.one_of<std::int64_t>({5, 20, 37});
          draw.longest = random.one_of<std::int64_t>({7, 40, 140});
          LinearCall call(random, draw);
          SCOPED_TRACE(std::string(call.row().name) + ", " + dtype_name(dtype) + ", phase " +
                       std::to_string(static_cast<int>(phase)) + ", number " +
                       std::to_string(number));
          if (!check(call, dtype, GetParam(), is_taken(op))) break;
          if (HasFailure()) return;
        }
      }
    }
  }
}

TEST_P(DrawnCallsOnCpu, ConvolutionOnOneThreadAndOnMoreThreads) {
  for (std::uint64_t number = 0; number < rounds(200); ++number) {
    Random random(number);
    ConvDraw draw;
    draw.dtype = kDTypes[number % 4];
    draw.most_channels = random.one_of<std::int64_t>({5, 40, 270});
    draw.widest = random.one_of<std::int64_t>({4, 9, 40});
    draw.longest = random.one_of<std::int64_t>({5, 70, 200});
    ConvCall call(random, draw);
    SCOPED_TRACE(number);
    check(call, draw.dtype, GetParam(), true);
    if (HasFailure()) return;
  }
}

TEST_P(DrawnCallsOnCpu, NormsOnOneThreadAndOnMoreThreads) {
  for (std::uint64_t number = 0; number < rounds(200); ++number) {
    Random random(number);
    NormDraw draw;
    draw.dtype = kDTypes[number % 4];
    draw.most_rows = random.one_of<std::int64_t>({4, 12});
    draw.widest = random.one_of<std::int64_t>({3, 20, 150});
    NormCall call(random, draw);
    SCOPED_TRACE(number);
    check(call, draw.dtype, GetParam(), true);
    if (HasFailure()) return;
  }
}

}  // namespace
}  // namespace onchip::test
