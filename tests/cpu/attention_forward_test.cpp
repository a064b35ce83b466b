// The CPU forward on every instruction set: random calls against section 5 of docs/semantics.md,
// and what must hold bit for bit.
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <string>
#include <vector>

#include "core/thread_pool.hpp"
#include "cpu/forced_isa.hpp"
#include "cpu/long_spec.hpp"
#include "support/attention_call.hpp"
#include "support/compare.hpp"

namespace onchip::test {
namespace {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

class ForwardOn : public EachIsa {
 protected:
  void TearDown() override { set_num_threads(0); }

  std::string run(const AttentionCall& attention) {
    return run_forced(attention.forward_args(), GetParam());
  }
  std::string run_and_judge(const AttentionCall& attention) {
    const std::string problem = run(attention);
    return problem.empty() ? judge(attention.forward_args()) : problem;
  }
};
ONCHIP_FOR_EACH_ISA(ForwardOn);

void expect_guards(AttentionCall& attention) {
  for (const auto& [name, tensor] : attention.forward_outputs()) {
    EXPECT_EQ(tensor->broken_guard(), "") << name;
  }
}

TEST_P(ForwardOn, RandomCalls) {
  for (int seed = 0; seed < 1500; ++seed) {
    Random random(static_cast<std::uint64_t>(seed));
    AttentionCall attention(random_spec(random), random);
    ASSERT_EQ(run_and_judge(attention), "") << "seed " << seed;
    expect_guards(attention);
    ASSERT_FALSE(HasFailure()) << "seed " << seed;
  }
}

TEST_P(ForwardOn, RandomLongCalls) {
  for (int seed = 0; seed < 120; ++seed) {
    Random random(0x10000 + static_cast<std::uint64_t>(seed));
    AttentionCall attention(long_spec(random), random);
    ASSERT_EQ(run_and_judge(attention), "") << "seed " << seed;
    expect_guards(attention);
    ASSERT_FALSE(HasFailure()) << "seed " << seed;
  }
}

TEST_P(ForwardOn, HeadDims) {
  Random random(7);
  for (const DType dtype : {DType::f64, DType::f32, DType::bf16, DType::f16}) {
    for (const std::int64_t dim : {0, 1, 3, 7, 8, 12, 16, 20, 33, 64, 96, 100, 128, 136, 256}) {
      for (const std::int64_t dim_v : {dim, std::int64_t{1}, std::int64_t{65}}) {
        AttentionSpec spec;
        spec.dtype = dtype;
        spec.batch = 1;
        spec.seqlen_q = 19;
        spec.seqlen_kv = 101;
        spec.head_dim_qk = dim;
        spec.head_dim_v = dim_v;
        spec.strided = dim % 3 == 1;
        AttentionCall attention(spec, random);
        ASSERT_EQ(run_and_judge(attention), "") << dtype_name(dtype) << " " << dim << " " << dim_v;
        expect_guards(attention);
      }
    }
  }
}

// A head dim so wide that a task has fewer rows.
TEST_P(ForwardOn, WidestHeads) {
  Random random(8);
  AttentionSpec spec;
  spec.batch = 1;
  spec.group = 1;
  spec.seqlen_q = 70;
  spec.seqlen_kv = 40;
  spec.head_dim_qk = 256;
  spec.head_dim_v = 256;
  AttentionCall attention(spec, random);
  EXPECT_EQ(run_and_judge(attention), "");
}

std::vector<std::byte> outputs(AttentionCall& attention) {
  std::vector<std::byte> all;
  for (const auto& [name, tensor] : attention.forward_outputs()) {
    const std::vector<std::byte> bytes = tensor->bytes();
    all.insert(all.end(), bytes.begin(), bytes.end());
  }
  return all;
}

TEST_P(ForwardOn, BitsDependOnNeitherThreadsNorRepetition) {
  for (int seed = 0; seed < 25; ++seed) {
    Random random(0x20000 + static_cast<std::uint64_t>(seed));
    AttentionCall attention(long_spec(random), random);
    std::vector<std::byte> first;
    for (const std::int32_t threads : {1, 2, 3, 2}) {
      set_num_threads(threads);
      for (const auto& [name, tensor] : attention.forward_outputs()) tensor->poison();
      ASSERT_EQ(run(attention), "");
      if (first.empty()) {
        first = outputs(attention);
      } else {
        ASSERT_TRUE(first == outputs(attention)) << "seed " << seed << ", threads " << threads;
      }
    }
  }
}

// Results of row i, head h: o and lse.
std::vector<double> row_results(const AttentionCall& attention, std::int64_t i, std::int64_t h) {
  std::vector<double> row;
  for (std::int64_t d = 0; d < attention.spec.head_dim_v; ++d) {
    row.push_back(attention.o.get({0, i, h, d}));
  }
  row.push_back(attention.lse.get({0, h, i}));
  return row;
}

AttentionSpec dense_spec(DType dtype, std::int64_t length) {
  AttentionSpec spec;
  spec.dtype = dtype;
  spec.batch = 1;
  spec.seqlen_q = length;
  spec.seqlen_kv = length;
  spec.head_dim_qk = 20;
  spec.head_dim_v = 13;
  return spec;
}

TEST_P(ForwardOn, CausalRowsDoNotFeelLaterTokens) {
  for (const DType dtype : {DType::f64, DType::f32, DType::bf16}) {
    for (const std::int64_t token : {1, 40, 95, 96, 97, 150, 255}) {
      Random random(9);
      AttentionSpec spec = dense_spec(dtype, 256);
      spec.causal = true;
      AttentionCall attention(spec, random);
      ASSERT_EQ(run(attention), "");
      std::vector<std::vector<double>> before;
      for (std::int64_t i = 0; i < token; ++i) before.push_back(row_results(attention, i, 1));
      for (HostTensor* tensor : {&attention.k, &attention.v}) {
        for (std::int64_t d = 0; d < tensor->view().shape[3]; ++d) {
          tensor->set({0, token, 0, d}, -3.0 * random.normal());
        }
      }
      ASSERT_EQ(run(attention), "");
      for (std::int64_t i = 0; i < token; ++i) {
        ASSERT_EQ(before[static_cast<std::size_t>(i)], row_results(attention, i, 1))
            << "token " << token << ", row " << i;
      }
      ASSERT_EQ(judge(attention.forward_args()), "");
    }
  }
}

// A row computed alone, as the last row of a shorter query, has the bits it has among all.
TEST_P(ForwardOn, RowsDoNotFeelOtherRows) {
  for (const DType dtype : {DType::f64, DType::f32, DType::bf16, DType::f16}) {
    Random random(10);
    AttentionSpec spec = dense_spec(dtype, 300);
    spec.causal = true;
    spec.bias = true;
    AttentionCall all(spec, random);
    ASSERT_EQ(run(all), "");
    for (const std::int64_t rows : {1, 2, 15, 17, 31, 33, 130}) {
      AttentionSpec part_spec = spec;
      part_spec.seqlen_q = rows;
      AttentionCall part(part_spec, random);
      const std::int64_t first = spec.seqlen_q - rows;
      part.k.fill_from(all.k.values());
      part.v.fill_from(all.v.values());
      for (std::int64_t i = 0; i < rows; ++i) {
        for (std::int64_t h = 0; h < 2; ++h) {
          for (std::int64_t d = 0; d < spec.head_dim_qk; ++d) {
            part.q.set({0, i, h, d}, all.q.get({0, first + i, h, d}));
          }
          for (std::int64_t n = 0; n < part.bias.view().shape[0]; ++n) {
            for (std::int64_t j = 0; j < spec.seqlen_kv; ++j) {
              part.bias.set({n, h, i, j}, all.bias.get({n, h, first + i, j}));
            }
          }
        }
      }
      ASSERT_EQ(run(part), "");
      for (std::int64_t i = 0; i < rows; ++i) {
        for (std::int64_t h = 0; h < 2; ++h) {
          ASSERT_EQ(row_results(part, i, h), row_results(all, first + i, h))
              << rows << " rows, row " << i;
        }
      }
    }
  }
}

// A key that no query sees, whatever it holds: nothing at all changes.
TEST_P(ForwardOn, KeysThatNobodySeesHaveNoInfluence) {
  for (const DType dtype : {DType::f64, DType::f32, DType::bf16}) {
    for (const bool by_bias : {false, true}) {
      Random random(11);
      AttentionSpec spec = dense_spec(dtype, 203);
      spec.mask = !by_bias;
      spec.bias = by_bias;
      spec.visible_share = 1.0;
      spec.sink = true;
      AttentionCall attention(spec, random);
      HostTensor& hides = by_bias ? attention.bias : attention.mask;
      const std::vector<std::int64_t> hidden = {0, 5, 95, 96, 130, 131, 132, 202};
      const auto is_hidden = [&](std::int64_t j) {
        return std::find(hidden.begin(), hidden.end(), j) != hidden.end();
      };
      std::int64_t at = 0;
      hides.fill([&] {
        const bool hide = is_hidden(at++ % spec.seqlen_kv);
        if (by_bias) return hide ? -std::numeric_limits<double>::infinity() : random.normal();
        return hide ? 0.0 : 1.0;
      });
      ASSERT_EQ(run_and_judge(attention), "");
      const std::vector<std::byte> finite = outputs(attention);
      for (const double poison : {kNan, std::numeric_limits<double>::infinity()}) {
        for (const std::int64_t j : hidden) {
          for (HostTensor* tensor : {&attention.k, &attention.v}) {
            for (std::int64_t d = 0; d < tensor->view().shape[3]; ++d) {
              tensor->set({0, j, 0, d}, poison);
            }
          }
        }
        ASSERT_EQ(run(attention), "");
        ASSERT_TRUE(finite == outputs(attention));
      }
    }
  }
}

TEST_P(ForwardOn, AVisibleNanIsNeverLost) {
  for (const DType dtype : {DType::f64, DType::f32, DType::bf16, DType::f16}) {
    for (const std::int64_t token : {0, 1, 50, 96, 139}) {
      Random random(12);
      AttentionSpec spec = dense_spec(dtype, 140);
      AttentionCall attention(spec, random);
      attention.q.set({0, token, 1, 3}, kNan);
      ASSERT_EQ(run_and_judge(attention), "") << "q, token " << token;

      AttentionCall keys(spec, random);
      keys.k.set({0, token, 0, 3}, kNan);
      ASSERT_EQ(run_and_judge(keys), "") << "k, token " << token;

      AttentionCall values(spec, random);
      values.v.set({0, token, 0, 3}, kNan);
      ASSERT_EQ(run_and_judge(values), "") << "v, token " << token;
    }
  }
}

// Rows far from the one that reads a NaN stay exact.
TEST_P(ForwardOn, ANanReachesNoRowFarFromItsReaders) {
  Random random(13);
  AttentionSpec spec = dense_spec(DType::f32, 700);
  spec.window_left = 20;
  spec.window_right = 0;
  AttentionCall attention(spec, random);
  ASSERT_EQ(run(attention), "");
  std::vector<std::vector<double>> before;
  for (std::int64_t i = 0; i < 700; ++i) before.push_back(row_results(attention, i, 0));
  attention.v.set({0, 350, 0, 2}, kNan);
  ASSERT_EQ(run(attention), "");
  for (std::int64_t i = 0; i < 700; ++i) {
    const std::vector<double> row = row_results(attention, i, 0);
    if (i >= 350 && i <= 370) {
      EXPECT_TRUE(row[2] != row[2]) << i;
    }
    if (i < 350 - 256 || i > 370 + 256) {
      EXPECT_EQ(row, before[static_cast<std::size_t>(i)]) << i;
    }
  }
}

// Finite additive "minus infinities": columns with them drop out, a row of nothing else is uniform.
TEST_P(ForwardOn, LargestNegativeBias) {
  Random random(14);
  AttentionSpec spec = dense_spec(DType::f32, 141);
  spec.bias = true;
  AttentionCall attention(spec, random);
  constexpr double kMin = std::numeric_limits<float>::lowest();
  attention.bias.fill([] { return 0.0; });
  for (std::int64_t h = 0; h < 2; ++h) {
    for (std::int64_t i = 0; i < 141; ++i) {
      for (std::int64_t j = 0; j < (i == 17 ? 141 : 60); ++j) {
        attention.bias.set({0, h, i, j}, kMin);
      }
    }
  }
  ASSERT_EQ(run(attention), "");
  for (std::int64_t d = 0; d < spec.head_dim_v; ++d) {
    double mean = 0.0;
    for (std::int64_t j = 0; j < 141; ++j) mean += attention.v.get({0, j, 0, d}) / 141.0;
    EXPECT_NEAR(attention.o.get({0, 17, 0, d}), mean, 1e-6);
  }
  EXPECT_EQ(attention.lse.get({0, 0, 17}), kMin);
  const std::vector<double> o = attention.o.values();
  attention.bias.fill([] { return 0.0; });
  for (std::int64_t h = 0; h < 2; ++h) {
    for (std::int64_t i = 0; i < 141; ++i) {
      for (std::int64_t j = 0; j < 60; ++j) {
        if (i != 17) attention.bias.set({0, h, i, j}, -std::numeric_limits<double>::infinity());
      }
    }
  }
  ASSERT_EQ(run_and_judge(attention), "");
  const std::vector<double> excluded = attention.o.values();
  for (std::size_t at = 0; at < o.size(); ++at) {
    const std::int64_t row = static_cast<std::int64_t>(at) / (2 * spec.head_dim_v);
    if (row != 17) {
      ASSERT_EQ(o[at], excluded[at]);
    }
  }
}

TEST_P(ForwardOn, EqualKeysGiveExactlyTheirValue) {
  for (const std::int64_t length_kv : {1, 8, 16, 32, 64, 128, 192, 1000}) {
    Random random(15);
    AttentionSpec spec = dense_spec(DType::f32, 65);
    spec.seqlen_kv = length_kv;
    AttentionCall attention(spec, random);
    for (HostTensor* tensor : {&attention.q, &attention.k, &attention.v}) {
      tensor->fill([] { return 1.0; });
    }
    ASSERT_EQ(run(attention), "");
    for (const double o : attention.o.values()) ASSERT_EQ(o, 1.0);
  }
}

// The bound of a long sequence: rounding errors do not grow with the number of keys.
TEST_P(ForwardOn, LongSequence) {
  Random random(16);
  AttentionSpec spec = dense_spec(DType::f32, 33);
  spec.seqlen_kv = 20000;
  spec.group = 1;
  AttentionCall attention(spec, random);
  EXPECT_EQ(run_and_judge(attention), "");
}

TEST(ForwardPlan, Workspace) {
  for (const std::int64_t length : {1024, 65536}) {
    AttentionForwardProblem problem;
    problem.num_seqs = 1;
    problem.slot_q = problem.slot_kv = length;
    problem.num_heads_q = problem.num_heads_kv = 16;
    problem.head_dim_qk = problem.head_dim_v = 128;
    set_num_threads(8);
    const PlanResult result = cpu::plan_attention_forward(problem, Settings{});
    set_num_threads(0);
    ASSERT_TRUE(std::holds_alternative<BackendPlan>(result));
    EXPECT_LE(std::get<BackendPlan>(result).workspace_bytes, std::size_t{16} << 20);
  }
}

// float64's own lowest number as a bias of float32 scores: still finite, so not an exclusion.
TEST_P(ForwardOn, BiasBeyondFloat32) {
  Random random(17);
  AttentionSpec spec = dense_spec(DType::f32, 50);
  spec.bias = true;
  spec.bias_dtype = DType::f64;
  AttentionCall attention(spec, random);
  attention.bias.fill([] { return std::numeric_limits<double>::lowest(); });
  ASSERT_EQ(run(attention), "");
  for (std::int64_t d = 0; d < spec.head_dim_v; ++d) {
    double mean = 0.0;
    for (std::int64_t j = 0; j < 50; ++j) mean += attention.v.get({0, j, 0, d}) / 50.0;
    EXPECT_NEAR(attention.o.get({0, 17, 0, d}), mean, 1e-6);
  }
}

// Extents without any element take no time and no memory, however large.
TEST(ForwardPlan, NothingToCompute) {
  AttentionForwardProblem problem;
  problem.num_seqs = std::int64_t{1} << 50;
  problem.slot_kv = 1;
  problem.num_heads_q = problem.num_heads_kv = 1;
  const PlanResult result = cpu::plan_attention_forward(problem, Settings{});
  ASSERT_TRUE(std::holds_alternative<BackendPlan>(result));
  EXPECT_EQ(std::get<BackendPlan>(result).workspace_bytes, 0u);
  cpu::run_attention_forward(std::get<BackendPlan>(result), problem, {});
}

TEST(ForwardPlan, SaysWhyNot) {
  AttentionForwardProblem problem;
  const auto reason = [&](const Settings& settings) {
    const PlanResult result = cpu::plan_attention_forward(problem, settings);
    const auto* reject = std::get_if<Reject>(&result);
    return reject == nullptr ? std::string() : reject->reason;
  };
  const auto blames_setting = [&](const Settings& settings) {
    return std::get<Reject>(cpu::plan_attention_forward(problem, settings)).by_setting;
  };
  EXPECT_EQ(reason(Settings{}), "");
  Settings mistyped;
  mistyped.cpu_isa_problem = "ONCHIP_CPU_ISA: got \"avx3\"";
  EXPECT_EQ(reason(mistyped), mistyped.cpu_isa_problem);
  EXPECT_TRUE(blames_setting(mistyped));
  Settings threads;
  threads.num_threads_problem = "ONCHIP_NUM_THREADS: got \"x\"";
  EXPECT_EQ(reason(threads), threads.num_threads_problem);
  EXPECT_TRUE(blames_setting(threads));
  for (const cpu::Isa isa : cpu::kIsas) {
    EXPECT_EQ(reason(forcing(isa)).empty(), cpu::isa_available(isa));
  }
  problem.options.tf32 = true;
  EXPECT_NE(reason(Settings{}).find("tf32"), std::string::npos);
  EXPECT_FALSE(blames_setting(Settings{}));
  problem.options.tf32 = false;
  problem.options.softcap = 1e-60;
  EXPECT_EQ(reason(Settings{}), "softcap is outside the range of float32");
  problem.dtype = DType::f64;
  EXPECT_EQ(reason(Settings{}), "");
  problem.dtype = DType::bf16;
  problem.options.softcap = 0.0;
  problem.options.scale = 1e300;
  EXPECT_EQ(reason(Settings{}), "scale is outside the range of float32");
  problem.options.scale = 1.0;
  problem.device.type = ONCHIP_DEVICE_CUDA;
  EXPECT_NE(reason(Settings{}).find("CPU tensors"), std::string::npos);
}

}  // namespace
}  // namespace onchip::test
