// The scans through the C++ API: a state of one row of numbers a channel, of three parts, and of
// none; steps are the forward pass; what they have not is refused in their words.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <onchip/onchip.hpp>
#include <string>
#include <vector>

namespace onchip {
namespace {

constexpr std::int64_t kTokens = 6;
constexpr std::int64_t kChannels = 4;
constexpr std::int64_t kNumbers = 3;
constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

std::vector<double> numbers(std::int64_t count, double first) {
  std::vector<double> values(static_cast<std::size_t>(count));
  for (std::size_t i = 0; i < values.size(); ++i) {
    values[i] = std::sin(1.7 * static_cast<double>(i) + first);
  }
  return values;
}

std::vector<double> empty(std::int64_t count) {
  return std::vector<double>(static_cast<std::size_t>(count), kNaN);
}

void expect_near(const std::vector<double>& got, const std::vector<double>& want) {
  ASSERT_EQ(got.size(), want.size());
  for (std::size_t i = 0; i < got.size(); ++i) EXPECT_NEAR(got[i], want[i], 1e-12) << i;
}

// One sequence.
struct Rwkv4 {
  std::vector<double> k = numbers(kTokens * kChannels, 0.1);
  std::vector<double> v = numbers(kTokens * kChannels, 0.7);
  std::vector<double> log_decay{-0.1, -0.5, -2.0, 0.0};
  std::vector<double> u = numbers(kChannels, 0.3);

  LinearTensors inputs(std::int64_t token = -1) {
    const bool whole = token < 0;
    const auto rows = [&](std::vector<double>& x) {
      if (whole) return tensor(x.data(), {1, kTokens, kChannels});
      return tensor(x.data() + token * kChannels, {1, kChannels});
    };
    return {.v = rows(v),
            .gate = tensor(log_decay.data(), {kChannels}),
            .beta = rows(k),
            .u = tensor(u.data(), {kChannels})};
  }

  std::vector<double> formula() const {
    std::vector<double> o = empty(kTokens * kChannels);
    for (std::int64_t d = 0; d < kChannels; ++d) {
      double p = 0.0;
      double q = 0.0;
      const auto c = static_cast<std::size_t>(d);
      for (std::int64_t t = 0; t < kTokens; ++t) {
        const auto at = static_cast<std::size_t>(t * kChannels + d);
        const double own = std::exp(u[c] + k[at]);
        o[at] = (p + own * v[at]) / (q + own);
        p = std::exp(log_decay[c]) * p + std::exp(k[at]) * v[at];
        q = std::exp(log_decay[c]) * q + std::exp(k[at]);
      }
    }
    return o;
  }
};

TEST(ScanWrapper, Rwkv4IsItsFormulaAndStepsAreIt) {
  Rwkv4 rwkv4;
  const LinearOptions options{.op = ONCHIP_RWKV4};
  std::vector<double> o = empty(kTokens * kChannels);
  std::vector<std::vector<double>> final(3, empty(kChannels));
  const auto state_of = [](std::vector<std::vector<double>>& parts) {
    LinearState state;
    for (std::size_t i = 0; i < 3; ++i) state[i] = tensor(parts[i].data(), {1, kChannels});
    return state;
  };
  linear_forward({.inputs = rwkv4.inputs(),
                  .o = tensor(o.data(), {1, kTokens, kChannels}),
                  .final_state = state_of(final)},
                 options);
  expect_near(o, rwkv4.formula());

  constexpr double kMinusInfinity = -std::numeric_limits<double>::infinity();
  std::vector<std::vector<double>> pool(3, std::vector<double>(kChannels, 0.0));
  pool[2].assign(kChannels, kMinusInfinity);
  std::vector<double> steps = empty(kTokens * kChannels);
  for (std::int64_t t = 0; t < kTokens; ++t) {
    linear_step({.inputs = rwkv4.inputs(t),
                 .o = tensor(steps.data() + t * kChannels, {1, kChannels}),
                 .state = state_of(pool)},
                options);
  }
  expect_near(steps, o);
  for (std::size_t part = 0; part < 3; ++part) expect_near(pool[part], final[part]);
}

TEST(ScanWrapper, Mamba1InBothLayoutsAndItsGradientOfThePassedState) {
  std::vector<double> u = numbers(kTokens * kChannels, 0.2);
  std::vector<double> delta = numbers(kTokens * kChannels, 0.9);
  std::vector<double> rate(static_cast<std::size_t>(kChannels * kNumbers), -0.5);
  std::vector<double> b = numbers(kTokens * kNumbers, 0.4);
  std::vector<double> c = numbers(kTokens * kNumbers, 0.6);
  std::vector<double> first = numbers(kNumbers * kChannels, 0.8);
  const LinearTensors inputs{.q = tensor(c.data(), {1, kTokens, kNumbers}),
                             .k = tensor(b.data(), {1, kTokens, kNumbers}),
                             .v = tensor(u.data(), {1, kTokens, kChannels}),
                             .gate = tensor(delta.data(), {1, kTokens, kChannels}),
                             .rate = tensor(rate.data(), {kChannels, kNumbers})};
  std::vector<double> want = empty(kTokens * kChannels);
  std::vector<double> turned = empty(kNumbers * kChannels);
  for (std::int64_t d = 0; d < kChannels; ++d) {
    for (std::int64_t n = 0; n < kNumbers; ++n) {
      turned[static_cast<std::size_t>(d * kNumbers + n)] =
          first[static_cast<std::size_t>(n * kChannels + d)];
    }
    std::vector<double> h(turned.begin() + d * kNumbers, turned.begin() + (d + 1) * kNumbers);
    for (std::int64_t t = 0; t < kTokens; ++t) {
      const auto at = static_cast<std::size_t>(t * kChannels + d);
      const double step = std::log1p(std::exp(delta[at]));
      want[at] = 0.0;
      for (std::size_t n = 0; n < kNumbers; ++n) {
        const std::size_t row = static_cast<std::size_t>(t * kNumbers) + n;
        h[n] = std::exp(-0.5 * step) * h[n] + step * b[row] * u[at];
        want[at] += c[row] * h[n];
      }
    }
  }
  std::vector<double> o = empty(kTokens * kChannels);
  LinearForwardTensors tensors{.inputs = inputs, .o = tensor(o.data(), {1, kTokens, kChannels})};
  tensors.initial_state[0] = tensor(turned.data(), {1, kChannels, kNumbers});
  linear_forward(tensors, {.op = ONCHIP_MAMBA1});
  expect_near(o, want);
  std::fill(o.begin(), o.end(), kNaN);
  tensors.initial_state[0] = tensor(first.data(), {1, kNumbers, kChannels});
  linear_forward(tensors, {.op = ONCHIP_MAMBA1, .state_layout = ONCHIP_STATE_KV});
  expect_near(o, want);

  // Without output gradient, what the initial state gets is d_final_state decayed.
  std::vector<double> zeros(o.size(), 0.0);
  std::vector<double> d_final(first.size(), 1.0);
  std::vector<double> d_initial = empty(kNumbers * kChannels);
  LinearBackwardTensors backward{.inputs = inputs,
                                 .d_o = tensor(zeros.data(), {1, kTokens, kChannels})};
  backward.initial_state[0] = tensor(turned.data(), {1, kChannels, kNumbers});
  backward.d_final_state[0] = tensor(d_final.data(), {1, kChannels, kNumbers});
  backward.dinitial_state[0] = tensor(d_initial.data(), {1, kChannels, kNumbers});
  linear_backward(backward, {.op = ONCHIP_MAMBA1});
  for (std::int64_t d = 0; d < kChannels; ++d) {
    double total = 0.0;
    for (std::int64_t t = 0; t < kTokens; ++t) {
      total += std::log1p(std::exp(delta[static_cast<std::size_t>(t * kChannels + d)]));
    }
    for (std::int64_t n = 0; n < kNumbers; ++n) {
      EXPECT_NEAR(d_initial[static_cast<std::size_t>(d * kNumbers + n)], std::exp(-0.5 * total),
                  1e-12);
    }
  }
}

TEST(ScanWrapper, WhatScansHaveNotIsRefused) {
  Rwkv4 rwkv4;
  std::vector<double> o = empty(kTokens * kChannels);
  const LinearForwardTensors tensors{.inputs = rwkv4.inputs(),
                                     .o = tensor(o.data(), {1, kTokens, kChannels})};
  const auto refusal = [&](const LinearForwardTensors& given, const LinearOptions& options) {
    try {
      linear_forward(given, options);
    } catch (const InvalidArgument& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  for (const std::int32_t layout : {ONCHIP_STATE_KV, ONCHIP_STATE_VK}) {
    const std::string message = refusal(tensors, {.op = ONCHIP_RWKV4, .state_layout = layout});
    EXPECT_TRUE(message.starts_with("rwkv4_forward: state_layout: got ")) << message;
  }
  const std::string softplus = refusal(tensors, {.op = ONCHIP_RWKV4, .dt_softplus = false});
  EXPECT_TRUE(softplus.starts_with("rwkv4_forward: dt_softplus: got ")) << softplus;
  const std::string limit = refusal(tensors, {.dt_max = 2.0, .op = ONCHIP_MAMBA1});
  EXPECT_TRUE(limit.starts_with("mamba1_forward: dt_limit: got ")) << limit;
  const std::string foreign = refusal(tensors, {.op = ONCHIP_HGRN});
  EXPECT_TRUE(foreign.starts_with("hgrn_forward: inputs.")) << foreign;
  LinearForwardTensors headed = tensors;
  headed.inputs.v = tensor(rwkv4.v.data(), {1, kTokens, 2, kChannels / 2});
  const std::string heads = refusal(headed, {.op = ONCHIP_RWKV4});
  EXPECT_NE(heads.find("wanted [batch, T, D]"), std::string::npos) << heads;
  for (const double x : o) EXPECT_TRUE(std::isnan(x));
  EXPECT_TRUE(explain(tensors, {.op = ONCHIP_RWKV4}).starts_with("rwkv4_forward: reference\n"));
}

}  // namespace
}  // namespace onchip
