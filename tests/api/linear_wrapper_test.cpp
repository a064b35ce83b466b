// The C++ API of linear attention, convolution and norms at run time: every field reaches its own
// in the C structs, results are those of the formulas, steps are the forward pass, errors are
// exceptions.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <onchip/onchip.hpp>
#include <string>
#include <string_view>
#include <vector>

namespace onchip {
namespace {

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

// A number that repeats in no short call, the same on every machine.
double number(std::int64_t i) { return std::sin(1.7 * static_cast<double>(i) + 0.3); }

std::vector<double> numbers(std::size_t count, std::int64_t first) {
  std::vector<double> values(count);
  for (std::size_t i = 0; i < count; ++i) values[i] = number(first + static_cast<std::int64_t>(i));
  return values;
}

void expect_near(const std::vector<double>& got, const std::vector<double>& want) {
  ASSERT_EQ(got.size(), want.size());
  for (std::size_t i = 0; i < got.size(); ++i) EXPECT_NEAR(got[i], want[i], 1e-12) << i;
}

double silu(double x) { return x / (1.0 + std::exp(-x)); }
double silu_slope(double x) {
  const double s = 1.0 / (1.0 + std::exp(-x));
  return s * (1.0 + x * (1.0 - s));
}

// Tensors that differ by their addresses.
class Marks {
 public:
  Tensor next() { return tensor(&memory_[count_++], {1}); }

 private:
  std::array<double, 32> memory_{};
  std::size_t count_ = 0;
};

void* address(const onchip_tensor* tensor) { return tensor == nullptr ? nullptr : tensor->data; }

// The fields of `wrapped` and of `c` lie in the same order.
template <std::size_t kCount>
void expect_same(const std::array<Tensor*, kCount>& wrapped,
                 const std::array<const onchip_tensor*, kCount>& c) {
  for (std::size_t i = 0; i < kCount; ++i) EXPECT_EQ(wrapped[i]->raw().data, address(c[i])) << i;
}

TEST(LinearWrapper, FieldsReachTheirOwn) {
  Marks marks;
  LinearTensors t;
  const std::array<Tensor*, 12> fields = {&t.q, &t.k, &t.v,    &t.gate,    &t.beta, &t.a,
                                          &t.b, &t.u, &t.rate, &t.dt_bias, &t.skip, &t.z};
  for (Tensor* field : fields) *field = marks.next();
  const onchip_linear_tensors c = t.c_tensors();
  expect_same<12>(fields,
                  {c.q, c.k, c.v, c.gate, c.beta, c.a, c.b, c.u, c.rate, c.dt_bias, c.skip, c.z});
  const onchip_linear_tensors none = LinearTensors{}.c_tensors();
  EXPECT_EQ(none.q, nullptr);
  EXPECT_EQ(none.struct_size, sizeof(onchip_linear_tensors));
}

TEST(LinearWrapper, OptionsReachTheirOwnAndStartAsTheAbis) {
  Marks marks;
  const LinearOptions options{.scale = 0.25,
                              .eps = 0.5,
                              .dt_min = 0.125,
                              .dt_max = 4.0,
                              .lower_bound = -5.0,
                              .chunk_len = 48,
                              .num_householder = 3,
                              .op = ONCHIP_KDA,
                              .state_layout = ONCHIP_STATE_VK,
                              .normalize = 1,
                              .gate = ONCHIP_GATE_SIGMOID,
                              .detach_normalizer = true,
                              .dt_softplus = false,
                              .qk_l2norm = true,
                              .allow_neg_eigval = true,
                              .check = true,
                              .backend = "reference",
                              .cu_seqlens = marks.next(),
                              .seqlens = marks.next()};
  const onchip_linear_options c = options.c_options();
  EXPECT_EQ(c.struct_size, sizeof(onchip_linear_options));
  EXPECT_EQ(c.scale, 0.25);
  EXPECT_EQ(c.eps, 0.5);
  EXPECT_EQ(c.dt_min, 0.125);
  EXPECT_EQ(c.dt_max, 4.0);
  EXPECT_EQ(c.lower_bound, -5.0);
  EXPECT_EQ(c.chunk_len, 48);
  EXPECT_EQ(c.num_householder, 3);
  EXPECT_EQ(c.op, ONCHIP_KDA);
  EXPECT_EQ(c.state_layout, ONCHIP_STATE_VK);
  EXPECT_EQ(c.normalize, 1);
  EXPECT_EQ(c.gate, ONCHIP_GATE_SIGMOID);
  EXPECT_EQ(c.detach_normalizer, 1);
  EXPECT_EQ(c.dt_softplus, 0);
  EXPECT_EQ(c.qk_l2norm, 1);
  EXPECT_EQ(c.allow_neg_eigval, 1);
  EXPECT_EQ(c.check, 1);
  EXPECT_STREQ(c.backend, "reference");
  EXPECT_EQ(c.cu_seqlens, options.cu_seqlens.get());
  EXPECT_EQ(c.seqlens, options.seqlens.get());

  const onchip_linear_options start = LinearOptions{}.c_options();
  const onchip_linear_options wanted = ONCHIP_LINEAR_OPTIONS_INIT;
  EXPECT_TRUE(std::isnan(start.scale) && std::isnan(start.lower_bound));
  EXPECT_EQ(start.dt_max, wanted.dt_max);
  EXPECT_EQ(start.num_householder, wanted.num_householder);
  EXPECT_EQ(start.normalize, wanted.normalize);
  EXPECT_EQ(start.dt_softplus, wanted.dt_softplus);
  EXPECT_EQ(start.backend, nullptr);
}

TEST(ConvWrapper, FieldsReachTheirOwn) {
  Marks marks;
  ConvForwardTensors f;
  const std::array<Tensor*, 6> forward = {&f.x, &f.weight,     &f.bias, &f.initial_state,
                                          &f.y, &f.final_state};
  for (Tensor* field : forward) *field = marks.next();
  const onchip_conv_forward_args cf = f.c_args(nullptr);
  expect_same<6>(forward, {cf.x, cf.weight, cf.bias, cf.initial_state, cf.y, cf.final_state});

  ConvBackwardTensors b;
  const std::array<Tensor*, 10> backward = {
      &b.d_y,           &b.x,  &b.weight,  &b.bias,  &b.initial_state,
      &b.d_final_state, &b.dx, &b.dweight, &b.dbias, &b.dinitial_state};
  for (Tensor* field : backward) *field = marks.next();
  const onchip_conv_backward_args cb = b.c_args(nullptr);
  expect_same<10>(backward, {cb.d_y, cb.x, cb.weight, cb.bias, cb.initial_state, cb.d_final_state,
                             cb.dx, cb.dweight, cb.dbias, cb.dinitial_state});

  ConvStepTensors s;
  const std::array<Tensor*, 6> step = {&s.x, &s.weight, &s.bias, &s.state, &s.state_indices, &s.y};
  for (Tensor* field : step) *field = marks.next();
  const onchip_conv_step_args cs = s.c_args(nullptr);
  expect_same<6>(step, {cs.x, cs.weight, cs.bias, cs.state, cs.state_indices, cs.y});
}

TEST(NormWrapper, FieldsReachTheirOwn) {
  Marks marks;
  NormForwardTensors f;
  const std::array<Tensor*, 4> forward = {&f.x, &f.gate, &f.weight, &f.y};
  for (Tensor* field : forward) *field = marks.next();
  const onchip_norm_forward_args cf = f.c_args(nullptr);
  expect_same<4>(forward, {cf.x, cf.gate, cf.weight, cf.y});

  NormBackwardTensors b;
  const std::array<Tensor*, 7> backward = {&b.d_y, &b.x,     &b.gate,   &b.weight,
                                           &b.dx,  &b.dgate, &b.dweight};
  for (Tensor* field : backward) *field = marks.next();
  const onchip_norm_backward_args cb = b.c_args(nullptr);
  expect_same<7>(backward, {cb.d_y, cb.x, cb.gate, cb.weight, cb.dx, cb.dgate, cb.dweight});
}

// ---- linear attention ---------------------------------------------------------------------------

constexpr std::int64_t kTokens = 5, kHeadsK = 1, kHeadsV = 2, kDk = 3, kDv = 2;
constexpr double kScale = 0.5;

// simple_gla token by token: S = e^g S + k v^T, o = scale S^T q.
struct Gla {
  std::vector<double> q = numbers(kTokens * kHeadsK * kDk, 0);
  std::vector<double> k = numbers(kTokens * kHeadsK * kDk, 50);
  std::vector<double> v = numbers(kTokens * kHeadsV * kDv, 100);
  std::vector<double> log_decay = numbers(kTokens * kHeadsV, 150);
  std::vector<double> initial = numbers(kHeadsV * kDk * kDv, 200);
  std::vector<double> o = std::vector<double>(kTokens * kHeadsV * kDv, kNaN);
  std::vector<double> final_state = std::vector<double>(kHeadsV * kDk * kDv, kNaN);

  Gla() {
    for (double& g : log_decay) g = -std::fabs(g);
  }

  LinearTensors inputs() {
    return {.q = tensor(q.data(), {1, kTokens, kHeadsK, kDk}),
            .k = tensor(k.data(), {1, kTokens, kHeadsK, kDk}),
            .v = tensor(v.data(), {1, kTokens, kHeadsV, kDv}),
            .gate = tensor(log_decay.data(), {1, kTokens, kHeadsV})};
  }
  LinearForwardTensors forward() {
    return {.inputs = inputs(),
            .o = tensor(o.data(), {1, kTokens, kHeadsV, kDv}),
            .initial_state = {tensor(initial.data(), {1, kHeadsV, kDk, kDv})},
            .final_state = {tensor(final_state.data(), {1, kHeadsV, kDk, kDv})}};
  }

  // (o, final state)
  std::array<std::vector<double>, 2> formula() const {
    std::vector<double> out(o.size());
    std::vector<double> state = initial;
    for (std::int64_t t = 0; t < kTokens; ++t) {
      for (std::int64_t h = 0; h < kHeadsV; ++h) {
        const double alpha = std::exp(log_decay[static_cast<std::size_t>(t * kHeadsV + h)]);
        for (std::int64_t j = 0; j < kDv; ++j) {
          double read = 0.0;
          for (std::int64_t i = 0; i < kDk; ++i) {
            double& s = state[static_cast<std::size_t>((h * kDk + i) * kDv + j)];
            s = alpha * s + k[static_cast<std::size_t>(t * kDk + i)] *
                                v[static_cast<std::size_t>((t * kHeadsV + h) * kDv + j)];
            read += s * q[static_cast<std::size_t>(t * kDk + i)];
          }
          out[static_cast<std::size_t>((t * kHeadsV + h) * kDv + j)] = kScale * read;
        }
      }
    }
    return {out, state};
  }
};

class OnBackend : public ::testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(Backends, OnBackend, ::testing::Values("", "cpu", "reference"));

TEST_P(OnBackend, LinearForwardIsItsFormula) {
  Gla gla;
  linear_forward(gla.forward(), {.scale = kScale, .op = ONCHIP_SIMPLE_GLA, .backend = GetParam()});
  const auto [o, final_state] = gla.formula();
  expect_near(gla.o, o);
  expect_near(gla.final_state, final_state);
}

TEST_P(OnBackend, LinearStepsAreTheForwardPass) {
  Gla gla;
  const LinearOptions options{.scale = kScale, .op = ONCHIP_SIMPLE_GLA, .backend = GetParam()};
  linear_forward(gla.forward(), options);
  // Slot 1 of a pool of two.
  constexpr std::size_t kState = kHeadsV * kDk * kDv;
  std::vector<double> pool(2 * kState, 7.0);
  std::copy(gla.initial.begin(), gla.initial.end(), pool.begin() + kState);
  const std::int32_t slot = 1;
  for (std::int64_t t = 0; t < kTokens; ++t) {
    std::vector<double> o(kHeadsV * kDv, kNaN);
    linear_step({.inputs = {.q = tensor(gla.q.data() + t * kDk, {1, kHeadsK, kDk}),
                            .k = tensor(gla.k.data() + t * kDk, {1, kHeadsK, kDk}),
                            .v = tensor(gla.v.data() + t * kHeadsV * kDv, {1, kHeadsV, kDv}),
                            .gate = tensor(gla.log_decay.data() + t * kHeadsV, {1, kHeadsV})},
                 .o = tensor(o.data(), {1, kHeadsV, kDv}),
                 .state = {tensor(pool.data(), {2, kHeadsV, kDk, kDv})},
                 .state_indices = tensor(&slot, {1})},
                options);
    const auto first = gla.o.begin() + t * kHeadsV * kDv;
    expect_near(o, {first, first + kHeadsV * kDv});
  }
  expect_near({pool.begin() + kState, pool.end()}, gla.final_state);
  for (std::size_t i = 0; i < kState; ++i) EXPECT_EQ(pool[i], 7.0);
}

TEST_P(OnBackend, LinearBackwardIsTheFormulasSlope) {
  Gla gla;
  const std::vector<double> d_o = numbers(gla.o.size(), 300);
  const std::vector<double> d_final = numbers(gla.final_state.size(), 400);
  const auto loss = [&] {
    const auto [o, final_state] = gla.formula();
    double total = 0.0;
    for (std::size_t i = 0; i < o.size(); ++i) total += o[i] * d_o[i];
    for (std::size_t i = 0; i < d_final.size(); ++i) total += final_state[i] * d_final[i];
    return total;
  };
  const std::array<std::vector<double>*, 5> tensors = {&gla.q, &gla.k, &gla.v, &gla.log_decay,
                                                       &gla.initial};
  std::array<std::vector<double>, 5> gradients;
  for (std::size_t i = 0; i < tensors.size(); ++i) gradients[i].assign(tensors[i]->size(), kNaN);
  linear_backward({.inputs = gla.inputs(),
                   .d_o = tensor(d_o.data(), {1, kTokens, kHeadsV, kDv}),
                   .initial_state = {tensor(gla.initial.data(), {1, kHeadsV, kDk, kDv})},
                   .d_final_state = {tensor(d_final.data(), {1, kHeadsV, kDk, kDv})},
                   .gradients = {.q = tensor(gradients[0].data(), {1, kTokens, kHeadsK, kDk}),
                                 .k = tensor(gradients[1].data(), {1, kTokens, kHeadsK, kDk}),
                                 .v = tensor(gradients[2].data(), {1, kTokens, kHeadsV, kDv}),
                                 .gate = tensor(gradients[3].data(), {1, kTokens, kHeadsV})},
                   .dinitial_state = {tensor(gradients[4].data(), {1, kHeadsV, kDk, kDv})}},
                  {.scale = kScale, .op = ONCHIP_SIMPLE_GLA, .backend = GetParam()});
  constexpr double kStep = 1e-5;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    for (std::size_t at = 0; at < tensors[i]->size(); ++at) {
      const double centre = (*tensors[i])[at];
      (*tensors[i])[at] = centre + kStep;
      const double above = loss();
      (*tensors[i])[at] = centre - kStep;
      const double below = loss();
      (*tensors[i])[at] = centre;
      EXPECT_NEAR(gradients[i][at], (above - below) / (2 * kStep), 1e-8) << i << ", " << at;
    }
  }
}

// ---- short causal convolution -------------------------------------------------------------------

constexpr std::int64_t kTotal = 7, kChannels = 3, kWidth = 4;

// Two packed sequences, [0, 2) and [2, 7), behind states of their own.
struct Conv {
  std::vector<double> x = numbers(kTotal * kChannels, 0);
  std::vector<double> weight = numbers(kChannels * kWidth, 50);
  std::vector<double> bias = numbers(kChannels, 100);
  std::vector<double> initial = numbers(2 * kChannels * kWidth, 150);
  std::vector<double> y = std::vector<double>(kTotal * kChannels, kNaN);
  std::vector<double> final_state = std::vector<double>(2 * kChannels * kWidth, kNaN);
  std::array<std::int32_t, 3> cu_seqlens = {0, 2, 7};

  ConvOptions options(const char* backend) const {
    return {.activation = ONCHIP_ACTIVATION_SILU,
            .backend = backend,
            .cu_seqlens = tensor(cu_seqlens.data(), {3})};
  }
  ConvForwardTensors forward() {
    return {.x = tensor(x.data(), {kTotal, kChannels}),
            .weight = tensor(weight.data(), {kChannels, kWidth}),
            .bias = tensor(bias.data(), {kChannels}),
            .initial_state = tensor(initial.data(), {2, kChannels, kWidth}),
            .y = tensor(y.data(), {kTotal, kChannels}),
            .final_state = tensor(final_state.data(), {2, kChannels, kWidth})};
  }

  double input(std::size_t n, std::int64_t time, std::int64_t c) const {
    const std::int64_t state = (static_cast<std::int64_t>(n) * kChannels + c) * kWidth;
    if (time < 0) return initial[static_cast<std::size_t>(state + kWidth + time)];
    return x[static_cast<std::size_t>((cu_seqlens[n] + time) * kChannels + c)];
  }
  double sum(std::size_t n, std::int64_t time, std::int64_t c) const {
    double total = bias[static_cast<std::size_t>(c)];
    for (std::int64_t j = 0; j < kWidth; ++j) {
      total +=
          weight[static_cast<std::size_t>(c * kWidth + j)] * input(n, time - kWidth + 1 + j, c);
    }
    return total;
  }
  // f(row, sequence, time in it, channel) for all elements.
  template <typename F>
  void each(F&& f) const {
    for (std::size_t n = 0; n < 2; ++n) {
      for (std::int64_t row = cu_seqlens[n]; row < cu_seqlens[n + 1]; ++row) {
        for (std::int64_t c = 0; c < kChannels; ++c) f(row, n, row - cu_seqlens[n], c);
      }
    }
  }
};

TEST_P(OnBackend, ConvForwardIsItsFormulaAndStepsAreIt) {
  Conv conv;
  const ConvOptions options = conv.options(GetParam());
  conv_forward(conv.forward(), options);
  conv.each([&](std::int64_t row, std::size_t n, std::int64_t time, std::int64_t c) {
    EXPECT_NEAR(conv.y[static_cast<std::size_t>(row * kChannels + c)], silu(conv.sum(n, time, c)),
                1e-12);
  });
  for (std::size_t n = 0; n < 2; ++n) {
    const std::int64_t length = conv.cu_seqlens[n + 1] - conv.cu_seqlens[n];
    for (std::int64_t i = 0; i < kChannels * kWidth; ++i) {
      const std::int64_t at = static_cast<std::int64_t>(n) * kChannels * kWidth + i;
      EXPECT_EQ(conv.final_state[static_cast<std::size_t>(at)],
                conv.input(n, length - kWidth + i % kWidth, i / kWidth));
    }
  }
  // Two tokens of both sequences.
  std::vector<double> pool = conv.initial;
  for (std::int64_t time = 0; time < 2; ++time) {
    std::vector<double> x;
    for (std::size_t n = 0; n < 2; ++n) {
      for (std::int64_t c = 0; c < kChannels; ++c) x.push_back(conv.input(n, time, c));
    }
    std::vector<double> y(x.size(), kNaN);
    conv_step({.x = tensor(x.data(), {2, kChannels}),
               .weight = tensor(conv.weight.data(), {kChannels, kWidth}),
               .bias = tensor(conv.bias.data(), {kChannels}),
               .state = tensor(pool.data(), {2, kChannels, kWidth}),
               .y = tensor(y.data(), {2, kChannels})},
              {.activation = ONCHIP_ACTIVATION_SILU, .backend = GetParam()});
    for (std::size_t i = 0; i < y.size(); ++i) {
      const auto c = static_cast<std::int64_t>(i % kChannels);
      EXPECT_NEAR(y[i], silu(conv.sum(i / kChannels, time, c)), 1e-12);
    }
  }
}

TEST_P(OnBackend, ConvBackwardIsItsFormula) {
  Conv conv;
  const std::vector<double> d_y = numbers(conv.y.size(), 300);
  const std::vector<double> d_final = numbers(conv.final_state.size(), 400);
  std::vector<double> dx(conv.x.size(), kNaN), dweight(conv.weight.size(), kNaN),
      dbias(conv.bias.size(), kNaN), dinitial(conv.initial.size(), kNaN);
  conv_backward({.d_y = tensor(d_y.data(), {kTotal, kChannels}),
                 .x = tensor(conv.x.data(), {kTotal, kChannels}),
                 .weight = tensor(conv.weight.data(), {kChannels, kWidth}),
                 .bias = tensor(conv.bias.data(), {kChannels}),
                 .initial_state = tensor(conv.initial.data(), {2, kChannels, kWidth}),
                 .d_final_state = tensor(d_final.data(), {2, kChannels, kWidth}),
                 .dx = tensor(dx.data(), {kTotal, kChannels}),
                 .dweight = tensor(dweight.data(), {kChannels, kWidth}),
                 .dbias = tensor(dbias.data(), {kChannels}),
                 .dinitial_state = tensor(dinitial.data(), {2, kChannels, kWidth})},
                conv.options(GetParam()));
  std::vector<double> want_dx(dx.size()), want_dweight(dweight.size()), want_dbias(dbias.size()),
      want_dinitial(dinitial.size());
  // Where the gradient of an input goes.
  const auto place = [&](std::size_t n, std::int64_t time, std::int64_t c) -> double& {
    const std::int64_t state = (static_cast<std::int64_t>(n) * kChannels + c) * kWidth;
    if (time < 0) return want_dinitial[static_cast<std::size_t>(state + kWidth + time)];
    return want_dx[static_cast<std::size_t>((conv.cu_seqlens[n] + time) * kChannels + c)];
  };
  conv.each([&](std::int64_t row, std::size_t n, std::int64_t time, std::int64_t c) {
    const double dp =
        silu_slope(conv.sum(n, time, c)) * d_y[static_cast<std::size_t>(row * kChannels + c)];
    want_dbias[static_cast<std::size_t>(c)] += dp;
    for (std::int64_t j = 0; j < kWidth; ++j) {
      const auto tap = static_cast<std::size_t>(c * kWidth + j);
      want_dweight[tap] += dp * conv.input(n, time - kWidth + 1 + j, c);
      place(n, time - kWidth + 1 + j, c) += dp * conv.weight[tap];
    }
  });
  for (std::size_t n = 0; n < 2; ++n) {
    const std::int64_t length = conv.cu_seqlens[n + 1] - conv.cu_seqlens[n];
    for (std::int64_t i = 0; i < kChannels * kWidth; ++i) {
      const std::int64_t at = static_cast<std::int64_t>(n) * kChannels * kWidth + i;
      place(n, length - kWidth + i % kWidth, i / kWidth) += d_final[static_cast<std::size_t>(at)];
    }
  }
  expect_near(dx, want_dx);
  expect_near(dweight, want_dweight);
  expect_near(dbias, want_dbias);
  expect_near(dinitial, want_dinitial);
}

// ---- norms --------------------------------------------------------------------------------------

TEST_P(OnBackend, NormsAreTheirFormulas) {
  constexpr std::int64_t kRows = 2, kDim = 6, kGroup = 3;
  constexpr double kEps = 0.01;
  const std::vector<double> x = numbers(kRows * kDim, 0);
  const std::vector<double> gate = numbers(kRows * kDim, 50);
  const std::vector<double> weight = numbers(kDim, 100);
  const std::vector<double> d_y = numbers(kRows * kDim, 150);
  std::vector<double> y(x.size(), kNaN), want_y(x.size());
  const NormOptions options{.eps = kEps,
                            .group_size = kGroup,
                            .kind = ONCHIP_NORM_RMS,
                            .activation = ONCHIP_ACTIVATION_SILU,
                            .gate_first = true,
                            .backend = GetParam()};
  norm_forward({.x = tensor(x.data(), {kRows, kDim}),
                .gate = tensor(gate.data(), {kRows, kDim}),
                .weight = tensor(weight.data(), {kDim}),
                .y = tensor(y.data(), {kRows, kDim})},
               options);
  std::vector<double> dx(x.size(), kNaN), dgate(x.size(), kNaN), dweight(weight.size(), kNaN);
  norm_backward({.d_y = tensor(d_y.data(), {kRows, kDim}),
                 .x = tensor(x.data(), {kRows, kDim}),
                 .gate = tensor(gate.data(), {kRows, kDim}),
                 .weight = tensor(weight.data(), {kDim}),
                 .dx = tensor(dx.data(), {kRows, kDim}),
                 .dgate = tensor(dgate.data(), {kRows, kDim}),
                 .dweight = tensor(dweight.data(), {kDim})},
                options);
  std::vector<double> want_dx(x.size()), want_dgate(x.size()), want_dweight(weight.size());
  for (std::int64_t first = 0; first < kRows * kDim; first += kGroup) {
    double squares = 0.0;
    for (std::int64_t i = first; i < first + kGroup; ++i) {
      const auto at = static_cast<std::size_t>(i);
      squares += std::pow(x[at] * silu(gate[at]), 2);
    }
    const double factor = 1.0 / std::sqrt(squares / kGroup + kEps);
    double along = 0.0;
    for (std::int64_t i = first; i < first + kGroup; ++i) {
      const auto at = static_cast<std::size_t>(i);
      const auto channel = static_cast<std::size_t>(i % kDim);
      const double norm = x[at] * silu(gate[at]) * factor;
      want_y[at] = norm * weight[channel];
      want_dweight[channel] += d_y[at] * norm;
      along += norm * d_y[at] * weight[channel] / kGroup;
    }
    for (std::int64_t i = first; i < first + kGroup; ++i) {
      const auto at = static_cast<std::size_t>(i);
      const double norm = x[at] * silu(gate[at]) * factor;
      const double d_u =
          factor * (d_y[at] * weight[static_cast<std::size_t>(i % kDim)] - norm * along);
      want_dx[at] = d_u * silu(gate[at]);
      want_dgate[at] = d_u * x[at] * silu_slope(gate[at]);
    }
  }
  expect_near(y, want_y);
  expect_near(dx, want_dx);
  expect_near(dgate, want_dgate);
  expect_near(dweight, want_dweight);

  // The default kind is the L2 norm, over all of the axis.
  norm_forward({.x = tensor(x.data(), {kRows * kDim}), .y = tensor(y.data(), {kRows * kDim})},
               {.backend = GetParam()});
  double squares = 1e-6;
  for (const double value : x) squares += value * value;
  for (std::size_t i = 0; i < x.size(); ++i) EXPECT_NEAR(y[i], x[i] / std::sqrt(squares), 1e-12);
}

// ---- plans, explain, errors ---------------------------------------------------------------------

TEST(LinearWrapper, APlanRunsInTheCallersWorkspace) {
  Gla gla;
  const LinearOptions options{.scale = kScale, .op = ONCHIP_SIMPLE_GLA, .backend = "cpu"};
  const LinearForwardTensors tensors = gla.forward();
  const onchip_plan planned = plan(tensors, options);
  EXPECT_STREQ(planned.backend, "cpu");
  EXPECT_GT(planned.workspace_bytes, 0U);
  const HostWorkspace workspace(planned);
  run(planned, tensors, options, workspace.get());
  expect_near(gla.o, gla.formula()[0]);
  EXPECT_THROW(run(planned, tensors, options, nullptr), InvalidArgument);
  // Another call's tensors are not what was planned.
  LinearForwardTensors other = tensors;
  other.final_state = {};
  EXPECT_THROW(run(planned, other, options, workspace.get()), InvalidArgument);

  Conv conv;
  const ConvOptions conv_options = conv.options("cpu");
  const onchip_plan conv_plan = plan(conv.forward(), conv_options);
  const HostWorkspace conv_workspace(conv_plan);
  run(conv_plan, conv.forward(), conv_options, conv_workspace.get());
  EXPECT_NEAR(conv.y[0], silu(conv.sum(0, 0, 0)), 1e-12);
}

TEST(LinearWrapper, ExplainNamesTheOperator) {
  Gla gla;
  const LinearOptions options{.op = ONCHIP_SIMPLE_GLA};
  EXPECT_TRUE(explain(gla.forward(), options).starts_with("simple_gla_forward: cpu\n"));
  Conv conv;
  EXPECT_TRUE(
      explain(conv.forward(), conv.options("reference")).starts_with("causal_conv1d_forward: "));
  const NormForwardTensors norm{.x = tensor(gla.o.data(), {kTokens, kHeadsV * kDv}),
                                .y = tensor(conv.y.data(), {kTokens, kHeadsV * kDv})};
  EXPECT_TRUE(explain(norm).starts_with("l2norm_forward: cpu\n"));
}

template <typename F>
std::string refusal(F&& f) {
  try {
    f();
  } catch (const InvalidArgument& error) {
    EXPECT_EQ(error.status(), ONCHIP_INVALID_ARGUMENT);
    return error.what();
  }
  return "";
}

TEST(LinearWrapper, WhatTheContractForbidsIsAnException) {
  Gla gla;
  const std::string no_op = refusal([&] { linear_forward(gla.forward(), {}); });
  EXPECT_TRUE(no_op.starts_with("linear_forward: ")) << no_op;
  LinearForwardTensors tensors = gla.forward();
  tensors.inputs.k = tensor(gla.k.data(), {1, kTokens, kHeadsK, kDk - 1});
  const std::string shape = refusal([&] { linear_forward(tensors, {.op = ONCHIP_SIMPLE_GLA}); });
  EXPECT_TRUE(shape.starts_with("simple_gla_forward: k: got ")) << shape;
  for (const double x : gla.o) EXPECT_TRUE(std::isnan(x));

  Conv conv;
  ConvForwardTensors wrong = conv.forward();
  wrong.bias = tensor(conv.bias.data(), {kChannels - 1});
  const std::string bias = refusal([&] { conv_forward(wrong, conv.options("")); });
  EXPECT_TRUE(bias.starts_with("causal_conv1d_forward: bias: got ")) << bias;
  const std::string backend = refusal([&] { conv_forward(conv.forward(), conv.options("none")); });
  EXPECT_NE(backend.find("cpu, reference"), std::string::npos) << backend;

  // Legal, but wider than the forced backend takes.
  const std::vector<double> taps(5000);
  std::vector<double> y(1, kNaN);
  const ConvForwardTensors wide{.x = tensor(conv.x.data(), {1, 1, 1}),
                                .weight = tensor(taps.data(), {1, 5000}),
                                .y = tensor(y.data(), {1, 1, 1})};
  EXPECT_THROW(conv_forward(wide, {.backend = "cpu"}), Unsupported);
  conv_forward(wide);
  EXPECT_EQ(y[0], 0.0);

  const std::string eps = refusal([&] {
    norm_forward({.x = tensor(conv.x.data(), {2}), .y = tensor(y.data(), {2})}, {.eps = 0.0});
  });
  EXPECT_TRUE(eps.starts_with("l2norm_forward: eps: got ")) << eps;
}

}  // namespace
}  // namespace onchip
