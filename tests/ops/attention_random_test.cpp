// Random legal calls through the C ABI, forward and backward, every backend forced by name, judged
// by section 5 of docs/semantics.md: values, guards around every tensor, inputs unchanged.
#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

#include "support/attention_call.hpp"
#include "support/call.hpp"
#include "support/compare.hpp"

namespace onchip::test {
namespace {

using Tensors = std::vector<std::pair<std::string, HostTensor*>>;

class Snapshot {
 public:
  explicit Snapshot(Tensors tensors) : tensors_(std::move(tensors)) {
    for (const auto& [name, tensor] : tensors_) bytes_.push_back(tensor->bytes());
  }
  void expect_unchanged() const {
    for (std::size_t i = 0; i < tensors_.size(); ++i) {
      EXPECT_EQ(bytes_[i] == tensors_[i].second->bytes(), true) << tensors_[i].first << " changed";
    }
  }

 private:
  Tensors tensors_;
  std::vector<std::vector<std::byte>> bytes_;
};

void expect_guards(const Tensors& tensors) {
  for (const auto& [name, tensor] : tensors) {
    EXPECT_EQ(tensor->broken_guard(), "") << name;
  }
}

class RandomCalls : public ::testing::TestWithParam<const char*> {};

TEST_P(RandomCalls, ForwardThenBackward) {
  const std::string backend = GetParam();
  int accepted_forward = 0;
  int accepted_backward = 0;
  constexpr int kCalls = 300;
  for (int seed = 0; seed < kCalls; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    Random random(static_cast<std::uint64_t>(seed));
    AttentionCall attention(random_spec(random), random);
    attention.options.backend = backend.c_str();
    const Snapshot inputs(attention.inputs());

    const auto forward = attention.forward_args();
    ASSERT_EQ(illegal(forward), "");
    ASSERT_EQ(call(forward), ONCHIP_OK) << onchip_last_error();
    ++accepted_forward;
    ASSERT_EQ(judge(forward), "");
    expect_guards(attention.forward_outputs());

    if (!attention.spec.lse) continue;
    const Snapshot saved(attention.forward_outputs());
    const auto backward = attention.backward_args();
    ASSERT_EQ(illegal(backward), "");
    ASSERT_EQ(call(backward), ONCHIP_OK) << onchip_last_error();
    ++accepted_backward;
    ASSERT_EQ(judge(backward, Saved::own), "");
    ASSERT_EQ(judge(backward, Saved::given), "");
    expect_guards(attention.backward_outputs());
    inputs.expect_unchanged();
    saved.expect_unchanged();
    ASSERT_FALSE(HasFailure());
  }
  EXPECT_EQ(accepted_forward, kCalls);
  EXPECT_GE(accepted_backward, kCalls / 2);
}

INSTANTIATE_TEST_SUITE_P(Backends, RandomCalls, ::testing::Values("reference", "cpu"),
                         [](const auto& test) { return std::string(test.param); });

}  // namespace
}  // namespace onchip::test
