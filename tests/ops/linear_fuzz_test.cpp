// Structured fuzzing of the C ABI of linear attention, convolution and norms (fuzz() in
// support/drawn_call.hpp says how). Every call is drawn from its own number, so that a failing one
// repeats alone.
#include <gtest/gtest.h>

#include <cstdlib>
#include <functional>
#include <memory>
#include <string>

#include "support/conv_call.hpp"
#include "support/linear_call.hpp"

namespace onchip::test {
namespace {

DType any_float(Random& random) {
  return random.one_of({DType::f64, DType::f32, DType::f16, DType::bf16});
}

// Most calls are legal ones or nearly so: a third of them are accepted.
void fuzz_calls(std::uint64_t salt, std::uint64_t calls,
                const std::function<std::unique_ptr<DrawnCall>(Random&)>& draw) {
  if (std::getenv("ONCHIP_TEST_LONG") != nullptr) calls *= 30;
  std::uint64_t accepted = 0;
  for (std::uint64_t number = 0; number < calls; ++number) {
    Random random(number * 0x9E3779B97F4A7C15u + salt);
    const std::unique_ptr<DrawnCall> call = draw(random);
    // NULL picks the CPU where it takes the call.
    call->force_backend(random.one_of<const char*>({nullptr, "reference"}));
    const Fuzzed result = fuzz(*call, random);
    ASSERT_EQ(result.wrong, "") << "call " << number << ": " << result.story;
    accepted += result.accepted ? 1 : 0;
  }
  EXPECT_GT(accepted, calls / 3);
}

TEST(LinearFuzz, RefusedCallsWriteNothingAndAcceptedOnesTheirOutputs) {
  fuzz_calls(3, 6000, [](Random& random) {
    LinearDraw draw;
    draw.phase = random.one_of({LinearPhase::forward, LinearPhase::backward, LinearPhase::step});
    draw.op = static_cast<std::int32_t>(random.integer(1, kLinearOperators));
    draw.dtype = any_float(random);
    return std::make_unique<LinearCall>(random, draw);
  });
}

TEST(ConvFuzz, RefusedCallsWriteNothingAndAcceptedOnesTheirOutputs) {
  fuzz_calls(5, 4000, [](Random& random) {
    ConvDraw draw;
    draw.dtype = any_float(random);
    return std::make_unique<ConvCall>(random, draw);
  });
}

TEST(NormFuzz, RefusedCallsWriteNothingAndAcceptedOnesTheirOutputs) {
  fuzz_calls(7, 4000, [](Random& random) {
    NormDraw draw;
    draw.dtype = any_float(random);
    return std::make_unique<NormCall>(random, draw);
  });
}

}  // namespace
}  // namespace onchip::test
