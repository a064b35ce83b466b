// Structured fuzzing of the C ABI. A legal call gets 0 to 3 of its fields replaced: pointers stay
// null or lead to guarded buffers, everything else (dtypes, ranks, shapes, strides, devices,
// options, lengths, struct sizes, names) may become anything. A refused call has changed no byte
// anywhere; an accepted one is legal by the independent reading of the contract, equals the
// reference within section 5 of docs/semantics.md, and has written the elements of its outputs and
// nothing else.
//
// Every call is drawn from its own number, so that a failing one repeats alone.
#include <gtest/gtest.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <string>

#include "support/fuzzed_attention.hpp"

namespace onchip::test {
namespace {

class FuzzAbi : public ::testing::TestWithParam<const char*> {};

TEST_P(FuzzAbi, RefusedChangesNothingAcceptedIsRight) {
  const std::string name = GetParam();
  const char* backend = name == "automatic" ? nullptr : GetParam();
  const bool long_run = std::getenv("ONCHIP_TEST_LONG") != nullptr;
  const std::uint64_t calls = long_run ? 200000 : 1500;
  // Under sanitizers time ends the run first: processor time, so that a busy machine does not.
  const double budget_seconds = long_run ? 60.0 : 10.0;
  const std::clock_t start = std::clock();
  FuzzedCall::Tally tally;
  for (std::uint64_t number = 0; number < calls; ++number) {
    const auto spent = static_cast<double>(std::clock() - start) / CLOCKS_PER_SEC;
    if (spent > budget_seconds) break;
    FuzzedCall fuzzed(number, backend);
    const std::string wrong = fuzzed.check(tally);
    ASSERT_EQ(wrong, "") << "call " << number << ", changed: " << fuzzed.story();
  }
  std::printf(
      "%d calls, %d accepted (%d of them changed, %d not to be judged), %d only planned, "
      "%d refused runs\n",
      tally.calls, tally.accepted, tally.mutated_accepted, tally.unjudged, tally.planned_only,
      tally.refused_runs);
  EXPECT_GE(tally.calls, 200);
  EXPECT_GE(tally.accepted, tally.calls * 3 / 10);
  EXPECT_GE(tally.mutated_accepted, tally.calls / 20);
  EXPECT_LE(tally.unjudged, tally.calls / 20);
  EXPECT_GT(tally.refused_runs, 0);
}

INSTANTIATE_TEST_SUITE_P(Backends, FuzzAbi, ::testing::Values("reference", "cpu", "automatic"),
                         [](const auto& test) { return std::string(test.param); });

}  // namespace
}  // namespace onchip::test
