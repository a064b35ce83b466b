// Backward of each backend against central differences of its own forward, in float64, element by
// element: every option alone, then random combinations.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "support/attention_call.hpp"
#include "support/call.hpp"

namespace onchip::test {
namespace {

struct Option {
  const char* name;
  void (*apply)(AttentionSpec& spec);
};

AttentionSpec small() {
  AttentionSpec spec;
  spec.dtype = DType::f64;
  spec.d_lse = true;
  spec.bias_dtype = DType::f64;
  spec.sink_dtype = DType::f64;
  return spec;
}

// sum(o dO) + sum(lse d_lse) over the rows that have them.
double loss(AttentionCall& call_, const onchip_attention_forward_args& args) {
  if (call(args) != ONCHIP_OK) {
    ADD_FAILURE() << onchip_last_error();
    return 0.0;
  }
  double total = 0.0;
  const auto add = [&total](const HostTensor& x, const HostTensor& d) {
    const std::vector<double> values = x.values();
    const std::vector<double> gradient = d.values();
    for (std::size_t i = 0; i < values.size(); ++i) {
      // Rows outside the sequences hold 0 or -inf and have a poisoned gradient; empty rows -inf.
      if (std::isfinite(values[i]) && std::isfinite(gradient[i])) total += values[i] * gradient[i];
    }
  };
  add(call_.o, call_.d_o);
  if (call_.d_lse.present()) add(call_.lse, call_.d_lse);
  return total;
}

void check(AttentionCall& attention, const char* backend) {
  SCOPED_TRACE(backend);
  attention.options.backend = backend;
  const auto forward = attention.forward_args();
  const auto backward = attention.backward_args();
  ASSERT_EQ(call(forward), ONCHIP_OK) << onchip_last_error();
  ASSERT_EQ(call(backward), ONCHIP_OK) << onchip_last_error();
  const std::pair<HostTensor*, HostTensor*> pairs[] = {{&attention.q, &attention.dq},
                                                       {&attention.k, &attention.dk},
                                                       {&attention.v, &attention.dv},
                                                       {&attention.bias, &attention.dbias},
                                                       {&attention.sink, &attention.dsink}};
  const char* names[] = {"dq", "dk", "dv", "dbias", "dsink"};
  constexpr double kStep = 1e-5;
  for (std::size_t p = 0; p < std::size(pairs); ++p) {
    HostTensor& input = *pairs[p].first;
    if (!input.present()) continue;
    const std::vector<double> base = input.values();
    const std::vector<double> gradient = pairs[p].second->values();
    double scale = 1.0;
    for (const double g : gradient) scale = std::max(scale, std::fabs(g));
    for (std::size_t i = 0; i < base.size(); ++i) {
      std::vector<double> moved = base;
      // Poison outside the sequences and excluded pairs: a number there changes nothing.
      if (!std::isfinite(base[i])) {
        ASSERT_EQ(gradient[i], 0.0) << names[p] << "[" << i << "]";
        continue;
      }
      moved[i] = base[i] + kStep;
      input.fill_from(moved);
      const double above = loss(attention, forward);
      moved[i] = base[i] - kStep;
      input.fill_from(moved);
      const double below = loss(attention, forward);
      const double difference = (above - below) / (2.0 * kStep);
      ASSERT_NEAR(gradient[i], difference, 2e-8 * scale) << names[p] << "[" << i << "]";
    }
    input.fill_from(base);
  }
}

class EachOption : public ::testing::TestWithParam<Option> {};

TEST_P(EachOption, BackwardIsTheDerivativeOfForward) {
  for (std::uint64_t seed = 0; seed < 3; ++seed) {
    SCOPED_TRACE(seed);
    Random random(seed);
    AttentionSpec spec = small();
    GetParam().apply(spec);
    AttentionCall attention(spec, random);
    for (const char* backend : {"reference", "cpu"}) check(attention, backend);
  }
}

const Option kOptions[] = {
    {"plain", [](AttentionSpec&) {}},
    {"no_d_lse", [](AttentionSpec& s) { s.d_lse = false; }},
    {"scale",
     [](AttentionSpec& s) {
       s.default_scale = false;
       s.scale = -0.8;
     }},
    {"scale_zero",
     [](AttentionSpec& s) {
       s.default_scale = false;
       s.scale = 0.0;
     }},
    {"softcap",
     [](AttentionSpec& s) {
       s.softcap = 1.5;
       s.magnitude = 2.0;
     }},
    {"causal_short_queries", [](AttentionSpec& s) { s.causal = true; }},
    {"causal_long_queries",
     [](AttentionSpec& s) {
       s.causal = true;
       s.seqlen_q = 7;
       s.seqlen_kv = 4;
     }},
    {"causal_top_left",
     [](AttentionSpec& s) {
       s.causal = true;
       s.top_left = true;
     }},
    {"window",
     [](AttentionSpec& s) {
       s.window_left = 1;
       s.window_right = 2;
     }},
    {"bias", [](AttentionSpec& s) { s.bias = true; }},
    {"bias_with_minus_infinities",
     [](AttentionSpec& s) {
       s.bias = true;
       s.bias_minus_infinities = 0.3;
     }},
    {"bias_over_sequences",
     [](AttentionSpec& s) {
       s.bias = true;
       s.bias_broadcast[0] = true;
     }},
    {"bias_over_heads",
     [](AttentionSpec& s) {
       s.bias = true;
       s.num_heads_kv = 2;
       s.bias_broadcast[1] = true;
     }},
    {"bias_over_rows",
     [](AttentionSpec& s) {
       s.bias = true;
       s.bias_broadcast[2] = true;
     }},
    {"bias_over_everything",
     [](AttentionSpec& s) {
       s.bias = true;
       for (bool& axis : s.bias_broadcast) axis = true;
     }},
    {"mask",
     [](AttentionSpec& s) {
       s.mask = true;
       s.visible_share = 0.4;
     }},
    {"alibi", [](AttentionSpec& s) { s.alibi = true; }},
    {"alibi_per_sequence",
     [](AttentionSpec& s) {
       s.alibi = true;
       s.alibi_per_sequence = true;
       s.top_left = true;
     }},
    {"segments", [](AttentionSpec& s) { s.segments = true; }},
    {"sink", [](AttentionSpec& s) { s.sink = true; }},
    {"sink_with_empty_rows",
     [](AttentionSpec& s) {
       s.sink = true;
       s.causal = true;
       s.seqlen_q = 8;
       s.seqlen_kv = 3;
     }},
    {"dropout", [](AttentionSpec& s) { s.dropout_p = 0.4; }},
    {"heads",
     [](AttentionSpec& s) {
       s.num_heads_kv = 2;
       s.group = 3;
     }},
    {"value_dim",
     [](AttentionSpec& s) {
       s.head_dim_qk = 3;
       s.head_dim_v = 6;
     }},
    {"no_query_dim", [](AttentionSpec& s) { s.head_dim_qk = 0; }},
    {"used_lengths",
     [](AttentionSpec& s) {
       s.used_q = {3, 0};
       s.used_kv = {5, 7};
     }},
    {"packed",
     [](AttentionSpec& s) {
       s.packed = true;
       s.slots_q = {2, 0, 4};
       s.slots_kv = {3, 2, 4};
       s.batch = 3;
       s.slack = 1;
       s.causal = true;
     }},
    {"packed_used_bias",
     [](AttentionSpec& s) {
       s.packed = true;
       s.slots_q = {3, 4};
       s.slots_kv = {5, 2};
       s.used_q = {2, 4};
       s.used_kv = {4, 1};
       s.bias = true;
       s.strided = true;
       s.lengths_dtype = DType::i64;
     }},
};

INSTANTIATE_TEST_SUITE_P(Options, EachOption, ::testing::ValuesIn(kOptions),
                         [](const auto& test) { return std::string(test.param.name); });

TEST(Gradients, RandomCombinations) {
  for (std::uint64_t seed = 0; seed < 60; ++seed) {
    SCOPED_TRACE(seed);
    Random random(1000 + seed);
    AttentionSpec spec = random_spec(random);
    spec.dtype = DType::f64;
    spec.bias_dtype = DType::f64;
    spec.sink_dtype = DType::f64;
    spec.lse = true;
    spec.magnitude = std::min(spec.magnitude, 1.0);
    // Differences of every element cost two passes each, and inputs that share memory have none.
    spec.strided = false;
    const auto shorten = [](std::int64_t& length) { length = std::min<std::int64_t>(length, 6); };
    for (std::int64_t* size :
         {&spec.seqlen_q, &spec.seqlen_kv, &spec.head_dim_qk, &spec.head_dim_v}) {
      shorten(*size);
    }
    for (auto* lengths : {&spec.slots_q, &spec.slots_kv}) {
      for (std::int64_t& length : *lengths) shorten(length);
    }
    for (std::size_t n = 0; n < spec.used_q.size(); ++n) {
      spec.used_q[n] = std::min(spec.used_q[n], spec.slots_q[n]);
    }
    for (std::size_t n = 0; n < spec.used_kv.size(); ++n) {
      spec.used_kv[n] = std::min(spec.used_kv[n], spec.slots_kv[n]);
    }
    AttentionCall attention(spec, random);
    for (const char* backend : {"reference", "cpu"}) check(attention, backend);
    if (HasFatalFailure()) return;
  }
}

}  // namespace
}  // namespace onchip::test
