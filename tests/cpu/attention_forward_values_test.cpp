// The CPU forward on values at the ends of their types' ranges.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "cpu/forced_isa.hpp"
#include "support/attention_call.hpp"
#include "support/compare.hpp"

namespace onchip::test {
namespace {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr double kInf = std::numeric_limits<double>::infinity();

class ValuesOn : public EachIsa {
 protected:
  std::string run(const AttentionCall& attention) {
    return run_forced(attention.forward_args(), GetParam());
  }
  std::string run_and_judge(const AttentionCall& attention) {
    const std::string problem = run(attention);
    return problem.empty() ? judge(attention.forward_args()) : problem;
  }
};
ONCHIP_FOR_EACH_ISA(ValuesOn);

AttentionSpec dense_spec(DType dtype, std::int64_t length) {
  AttentionSpec spec;
  spec.dtype = dtype;
  spec.batch = 1;
  spec.seqlen_q = length;
  spec.seqlen_kv = length;
  spec.head_dim_qk = 21;
  spec.head_dim_v = 13;
  return spec;
}

// Some value rows far smaller than the others and some subnormal numbers, under any options.
TEST_P(ValuesOn, RandomBf16Calls) {
  for (int seed = 0; seed < 300; ++seed) {
    Random random(0x40000 + static_cast<std::uint64_t>(seed));
    AttentionSpec spec = random_spec(random);
    spec.dtype = DType::bf16;
    AttentionCall attention(spec, random);
    if (random.chance(0.5)) {
      for (HostTensor* tensor : {&attention.q, &attention.k, &attention.v}) {
        std::vector<double> values = tensor->values();
        for (double& x : values) {
          if (random.chance(0.02)) x *= random.one_of({0x1p-60, 0x1p-95, 0x1p-128, 0.0});
        }
        tensor->fill_from(values);
      }
    }
    ASSERT_EQ(run_and_judge(attention), "") << "seed " << seed;
  }
}

// Row r of q, k or v holds one number everywhere.
void fill_row(HostTensor& tensor, std::int64_t row, double value) {
  for (std::int64_t h = 0; h < tensor.view().shape[2]; ++h) {
    for (std::int64_t d = 0; d < tensor.view().shape[3]; ++d) tensor.set({0, row, h, d}, value);
  }
}

// Subnormal numbers of q meet large ones of k, and the other way round: the scores are of order 1.
TEST_P(ValuesOn, SubnormalQueriesAndKeys) {
  for (const bool small_queries : {false, true}) {
    for (const bool causal : {false, true}) {
      Random random(1);
      AttentionSpec spec = dense_spec(DType::bf16, 140);
      spec.causal = causal;
      spec.default_scale = false;
      spec.scale = 0.3;
      AttentionCall attention(spec, random);
      HostTensor& small = small_queries ? attention.q : attention.k;
      HostTensor& large = small_queries ? attention.k : attention.q;
      small.fill([&] { return random.normal() * 0x1p-127; });
      large.fill([&] { return random.normal() * 0x1p125; });
      ASSERT_EQ(run_and_judge(attention), "") << small_queries;
      // As if all were of order 1: the products differ by a power of two alone.
      const std::vector<double> lse = attention.lse.values();
      double spread = 0.0;
      for (const double x : lse) spread = std::max(spread, std::fabs(x - std::log(140.0)));
      EXPECT_GT(spread, 0.01);
    }
  }
}

// A subnormal number changes the scores that it is part of, and nothing else by a single bit.
TEST_P(ValuesOn, SubnormalKeysOfLaterTokensAreNotFelt) {
  Random random(2);
  AttentionSpec spec = dense_spec(DType::bf16, 100);
  spec.causal = true;
  AttentionCall attention(spec, random);
  ASSERT_EQ(run(attention), "");
  const std::vector<double> before = attention.o.values();
  fill_row(attention.k, 70, 0x1p-130);
  fill_row(attention.v, 71, 0x1p-120);
  fill_row(attention.q, 72, 0x1p-128);
  ASSERT_EQ(run_and_judge(attention), "");
  const std::vector<double> after = attention.o.values();
  const auto row = static_cast<std::size_t>(2 * spec.head_dim_v);
  for (std::size_t at = 0; at < 70 * row; ++at) ASSERT_EQ(before[at], after[at]) << at;
  bool differs = false;
  for (std::size_t at = 70 * row; at < before.size(); ++at) differs |= before[at] != after[at];
  EXPECT_TRUE(differs);
}

TEST_P(ValuesOn, SmallValues) {
  for (const DType dtype : {DType::f32, DType::bf16}) {
    for (const double size : {0x1p-80, 0x1p-89, 0x1p-91, 0x1p-100, 0x1p-120, 0x1p-126, 0x1p-130}) {
      for (const bool few : {false, true}) {
        for (const double dropout : {0.0, 0.4}) {
          Random random(3);
          AttentionSpec spec = dense_spec(dtype, 131);
          spec.dropout_p = dropout;
          spec.causal = few;
          AttentionCall attention(spec, random);
          std::int64_t at = 0;
          attention.v.fill([&] {
            const bool is_small = !few || at++ / spec.head_dim_v % 17 == 3;
            return random.normal() * (is_small ? size : 1.0);
          });
          ASSERT_EQ(run_and_judge(attention), "") << dtype_name(dtype) << " " << size << " " << few;
        }
      }
    }
  }
}

TEST_P(ValuesOn, LargeValuesAndScores) {
  for (const DType dtype : {DType::f32, DType::bf16}) {
    for (const double scale : {0x1p-70, -0x1.8p-60, 0x1.7p-66}) {
      Random random(4);
      AttentionSpec spec = dense_spec(dtype, 60);
      spec.default_scale = false;
      spec.scale = scale;
      AttentionCall attention(spec, random);
      // scale q is of order 1 and k too, but q . k is beyond fp32 without the scale.
      attention.q.fill([&] { return random.normal() / scale * 0x1p-8; });
      attention.k.fill([&] { return random.normal() * 0x1p7; });
      attention.v.fill([&] { return random.normal() * 0x1p125; });
      ASSERT_EQ(run_and_judge(attention), "") << scale;
      attention.q.fill([&] { return random.normal() * 0x1p70; });
      attention.k.fill([&] { return random.normal() * 0x1p68 / std::fabs(scale) * 0x1p-136; });
      ASSERT_EQ(run_and_judge(attention), "") << scale;
    }
  }
}

// Rows whose every visible score is -inf: nothing has a weight, so not even a NaN shows.
TEST_P(ValuesOn, ScoresOfMinusInfinity) {
  for (const DType dtype : {DType::f64, DType::f32, DType::bf16, DType::f16}) {
    for (const bool causal : {false, true}) {
      Random random(5);
      AttentionSpec spec = dense_spec(dtype, 110);
      spec.causal = causal;
      AttentionCall attention(spec, random);
      attention.q.fill([] { return 1.0; });
      attention.k.fill([] { return -kInf; });
      attention.v.fill([] { return 0.5; });
      fill_row(attention.v, 3, kNan);
      fill_row(attention.v, 100, kInf);
      ASSERT_EQ(run(attention), "");
      for (const double o : attention.o.values()) ASSERT_EQ(o, 0.0);
      for (const double lse : attention.lse.values()) ASSERT_EQ(lse, -kInf);
      const PlainForward reference = reference_forward(read_case(attention.forward_args()));
      ASSERT_EQ(attention.o.values(), reference.o);
      ASSERT_EQ(attention.lse.values(), reference.lse);
    }
  }
}

// Numbers of float64 that float32 does not reach, in a bias, a sink and slopes of narrower inputs.
TEST_P(ValuesOn, BeyondFloat32) {
  for (const DType dtype : {DType::f32, DType::bf16, DType::f16}) {
    for (const double size : {-1.5e308, 1.5e308, -1e60, 1e60}) {
      Random random(6);
      AttentionSpec spec = dense_spec(dtype, 50);
      spec.bias = true;
      spec.bias_dtype = DType::f64;
      AttentionCall equal(spec, random);
      equal.bias.fill([&] { return size; });
      ASSERT_EQ(run(equal), "");
      double mean = 0.0;
      for (std::int64_t j = 0; j < 50; ++j) mean += equal.v.get({0, j, 0, 2}) / 50.0;
      EXPECT_NEAR(equal.o.get({0, 17, 0, 2}), mean, dtype == DType::f32 ? 1e-6 : 4e-3);
      for (const double lse : equal.lse.values()) ASSERT_EQ(lse, size < 0 ? -kInf : kInf);

      AttentionCall different(spec, random);
      different.bias.fill([&] { return size * (0.5 + 0.5 * random.uniform()); });
      ASSERT_EQ(run_and_judge(different), "") << size;

      spec.bias = false;
      spec.sink = true;
      spec.sink_dtype = DType::f64;
      AttentionCall sink(spec, random);
      std::int64_t head = 0;
      sink.sink.fill([&] { return head++ == 0 ? size : 0.5; });
      ASSERT_EQ(run_and_judge(sink), "") << size;
    }
  }
}

// |error of lse| / |lse| where all products of a score have one sign, or one of them is all of it.
TEST_P(ValuesOn, LseOfLargeScores) {
  double worst = 0.0;
  for (const std::int64_t dim : {64, 96, 128, 256}) {
    for (const bool constant : {false, true}) {
      Random random(7);
      AttentionSpec spec = dense_spec(DType::f32, 64);
      spec.head_dim_qk = dim;
      AttentionCall attention(spec, random);
      for (HostTensor* tensor : {&attention.q, &attention.k}) {
        tensor->fill([&] {
          if (constant) return 1.7;
          return random.chance(0.02) ? 40.0 * random.normal() : 0.3 + random.normal();
        });
      }
      ASSERT_EQ(run_and_judge(attention), "");
      const PlainForward exact = reference_forward(read_case(attention.forward_args()));
      const std::vector<double> lse = attention.lse.values();
      for (std::size_t i = 0; i < lse.size(); ++i) {
        worst = std::max(worst, std::fabs(lse[i] - exact.lse[i]) / std::fabs(exact.lse[i]));
      }
    }
  }
  RecordProperty("worst_half_ulps", std::to_string(worst * 0x1p24));
  // docs/numerics.md, section 5.
  EXPECT_LE(worst, 0x1p-21);
}

}  // namespace
}  // namespace onchip::test
