// The CPU backward on every instruction set: random calls against section 5 of docs/semantics.md,
// and what must hold bit for bit.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "core/thread_pool.hpp"
#include "cpu/forced_isa.hpp"
#include "cpu/long_spec.hpp"
#include "support/attention_call.hpp"
#include "support/compare.hpp"

namespace onchip::test {
namespace {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr double kInfinity = std::numeric_limits<double>::infinity();

class BackwardOn : public EachIsa {
 protected:
  void TearDown() override { set_num_threads(0); }

  // Forward and backward; "" or what went wrong.
  std::string run(const AttentionCall& attention) {
    const std::string problem = run_forced(attention.forward_args(), GetParam());
    return problem.empty() ? run_forced(attention.backward_args(), GetParam()) : problem;
  }
  std::string run_and_judge(const AttentionCall& attention) {
    std::string problem = run(attention);
    if (problem.empty()) problem = judge(attention.backward_args(), Saved::own);
    if (problem.empty()) problem = judge(attention.backward_args(), Saved::given);
    return problem;
  }
};
ONCHIP_FOR_EACH_ISA(BackwardOn);

// For the thread sanitizer, which runs what has Thread in its name.
class BackwardThreadsOn : public BackwardOn {};
ONCHIP_FOR_EACH_ISA(BackwardThreadsOn);

void expect_guards(AttentionCall& attention) {
  for (const auto& [name, tensor] : attention.backward_outputs()) {
    EXPECT_EQ(tensor->broken_guard(), "") << name;
  }
}

std::vector<std::byte> gradients(AttentionCall& attention) {
  std::vector<std::byte> all;
  for (const auto& [name, tensor] : attention.backward_outputs()) {
    const std::vector<std::byte> bytes = tensor->bytes();
    all.insert(all.end(), bytes.begin(), bytes.end());
  }
  return all;
}

void poison_gradients(AttentionCall& attention) {
  for (const auto& [name, tensor] : attention.backward_outputs()) tensor->poison();
}

// Every third one has several chunks of keys.
AttentionSpec backward_spec(int seed, Random& random) {
  AttentionSpec spec = long_spec(random);
  spec.lse = true;
  if (seed % 3 == 0 && !(spec.packed && spec.shared_cu_seqlens)) {
    for (std::int64_t& length : spec.slots_kv) length *= 3;
    spec.seqlen_kv = spec.slots_kv[0];
  }
  return spec;
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

TEST_P(BackwardOn, RandomCalls) {
  for (int seed = 0; seed < 500; ++seed) {
    Random random(0x30000 + static_cast<std::uint64_t>(seed));
    AttentionSpec spec = random_spec(random);
    spec.lse = true;
    AttentionCall attention(spec, random);
    ASSERT_EQ(run_and_judge(attention), "") << "seed " << seed;
    expect_guards(attention);
    ASSERT_FALSE(HasFailure()) << "seed " << seed;
  }
}

TEST_P(BackwardOn, RandomLongCalls) {
  for (int seed = 0; seed < 50; ++seed) {
    Random random(0x40000 + static_cast<std::uint64_t>(seed));
    AttentionSpec spec = backward_spec(seed, random);
    AttentionCall attention(spec, random);
    ASSERT_EQ(run_and_judge(attention), "") << "seed " << seed;
    expect_guards(attention);
    ASSERT_FALSE(HasFailure()) << "seed " << seed;
  }
}

TEST_P(BackwardOn, HeadDims) {
  Random random(7);
  for (const DType dtype : {DType::f64, DType::f32, DType::bf16, DType::f16}) {
    for (const std::int64_t dim : {0, 1, 3, 7, 8, 12, 16, 20, 33, 64, 80, 96, 100, 128, 136, 256}) {
      for (const std::int64_t dim_v : {dim, std::int64_t{1}, std::int64_t{65}, std::int64_t{256}}) {
        AttentionSpec spec;
        spec.dtype = dtype;
        spec.batch = 1;
        spec.seqlen_q = 11;
        spec.seqlen_kv = 35;
        spec.head_dim_qk = dim;
        spec.head_dim_v = dim_v;
        spec.strided = dim % 3 == 1;
        AttentionCall attention(spec, random);
        ASSERT_EQ(run(attention), "");
        ASSERT_EQ(judge(attention.backward_args()), "")
            << dtype_name(dtype) << " " << dim << " " << dim_v;
        expect_guards(attention);
      }
    }
  }
}

// Head dims so wide that blocks and chunks are smaller, several of them.
// Every size of tile: the wider a row in bytes, the smaller.
TEST_P(BackwardOn, WideHeads) {
  Random random(8);
  for (const DType dtype : {DType::f32, DType::f64}) {
    for (const auto& [dim, dim_v] :
         {std::pair<std::int64_t, std::int64_t>{200, 130}, {130, 256}, {256, 256}}) {
      AttentionSpec spec;
      spec.dtype = dtype;
      spec.batch = 1;
      spec.group = 1;
      spec.seqlen_q = 131;
      spec.seqlen_kv = 118;
      spec.head_dim_qk = dim;
      spec.head_dim_v = dim_v;
      spec.causal = true;
      AttentionCall attention(spec, random);
      EXPECT_EQ(run_and_judge(attention), "") << dtype_name(dtype) << " " << dim << " " << dim_v;
    }
  }
}

// One list of rows: one thread takes it in one pass, several share it in two.
TEST_P(BackwardThreadsOn, BitsDependOnNeitherThreadsNorRepetition) {
  for (int seed = 0; seed < 25; ++seed) {
    Random random(0x50000 + static_cast<std::uint64_t>(seed));
    AttentionSpec spec = backward_spec(seed, random);
    AttentionCall attention(spec, random);
    std::vector<std::byte> first;
    for (const std::int32_t threads : {1, 2, 3, 7, 2}) {
      set_num_threads(threads);
      poison_gradients(attention);
      ASSERT_EQ(run(attention), "");
      if (first.empty()) {
        first = gradients(attention);
      } else {
        ASSERT_TRUE(first == gradients(attention)) << "seed " << seed << ", threads " << threads;
      }
    }
  }
}

// What is not asked for changes nothing of the rest.
TEST_P(BackwardOn, AnySubsetOfTheGradients) {
  for (int seed = 0; seed < 12; ++seed) {
    Random random(0x60000 + static_cast<std::uint64_t>(seed));
    AttentionSpec spec = backward_spec(seed, random);
    spec.bias = true;
    spec.sink = true;
    AttentionCall attention(spec, random);
    ASSERT_EQ(run(attention), "");
    std::vector<std::vector<std::byte>> whole;
    const auto outputs = attention.backward_outputs();
    for (const auto& [name, tensor] : outputs) whole.push_back(tensor->bytes());
    for (unsigned subset = 0; subset < 32; ++subset) {
      onchip_attention_backward_args args = attention.backward_args();
      const onchip_tensor** fields[] = {&args.dq, &args.dk, &args.dv, &args.dbias, &args.dsink};
      for (unsigned i = 0; i < 5; ++i) {
        if ((subset >> i & 1) == 0) *fields[i] = nullptr;
      }
      poison_gradients(attention);
      ASSERT_EQ(run_forced(args, GetParam()), "");
      for (unsigned i = 0; i < 5; ++i) {
        if ((subset >> i & 1) == 0) continue;
        ASSERT_TRUE(whole[i] == outputs[i].second->bytes())
            << outputs[i].first << ", subset " << subset << ", seed " << seed;
      }
    }
  }
}

// A sequence alone has the bits that it has beside others.
TEST_P(BackwardOn, SequencesDoNotFeelEachOther) {
  for (const DType dtype : {DType::f64, DType::f32, DType::bf16}) {
    Random random(9);
    AttentionSpec spec = dense_spec(dtype, 150);
    spec.batch = 3;
    spec.num_heads_kv = 2;
    spec.causal = true;
    AttentionCall all(spec, random);
    ASSERT_EQ(run(all), "");
    spec.batch = 1;
    spec.slots_q.clear();
    spec.slots_kv.clear();
    AttentionCall one(spec, random);
    for (std::int64_t n = 0; n < 3; ++n) {
      const auto copy = [&](HostTensor& to, const HostTensor& from) {
        const std::vector<double> values = from.values();
        const auto count = static_cast<std::int64_t>(to.values().size());
        to.fill_from({values.begin() + n * count, values.begin() + (n + 1) * count});
      };
      copy(one.q, all.q);
      copy(one.k, all.k);
      copy(one.v, all.v);
      copy(one.d_o, all.d_o);
      ASSERT_EQ(run(one), "");
      for (const auto& [alone, beside] :
           {std::pair{&one.dq, &all.dq}, {&one.dk, &all.dk}, {&one.dv, &all.dv}}) {
        const std::vector<double> got = alone->values();
        const std::vector<double> wanted = beside->values();
        ASSERT_TRUE(std::equal(got.begin(), got.end(),
                               wanted.begin() + n * static_cast<std::int64_t>(got.size())))
            << "sequence " << n;
      }
    }
  }
}

// A key that no query sees and a query that sees no key, whatever they hold: nothing changes.
TEST_P(BackwardOn, WhatNobodySeesHasNoInfluence) {
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
      const std::vector<std::int64_t> keys = {0, 5, 95, 96, 130, 131, 132, 202};
      const std::vector<std::int64_t> rows = {3, 64, 95, 96, 200};
      const auto among = [](const std::vector<std::int64_t>& list, std::int64_t x) {
        return std::find(list.begin(), list.end(), x) != list.end();
      };
      std::int64_t at = 0;
      hides.fill([&] {
        const bool hide =
            among(keys, at % spec.seqlen_kv) || among(rows, at / spec.seqlen_kv % spec.seqlen_q);
        ++at;
        if (by_bias) return hide ? -kInfinity : random.normal();
        return hide ? 0.0 : 1.0;
      });
      ASSERT_EQ(run_and_judge(attention), "");
      const std::vector<std::byte> finite = gradients(attention);
      for (const double poison : {kNan, kInfinity}) {
        for (const std::int64_t j : keys) {
          for (std::int64_t d = 0; d < spec.head_dim_qk; ++d) attention.k.set({0, j, 0, d}, poison);
          for (std::int64_t d = 0; d < spec.head_dim_v; ++d) attention.v.set({0, j, 0, d}, poison);
        }
        for (const std::int64_t i : rows) {
          for (std::int64_t h = 0; h < 2; ++h) {
            for (std::int64_t d = 0; d < spec.head_dim_qk; ++d) {
              attention.q.set({0, i, h, d}, poison);
            }
            for (std::int64_t d = 0; d < spec.head_dim_v; ++d) {
              attention.d_o.set({0, i, h, d}, poison);
            }
          }
        }
        poison_gradients(attention);
        ASSERT_EQ(run(attention), "");
        ASSERT_TRUE(finite == gradients(attention)) << "poison " << poison;
      }
    }
  }
}

// NaN appears in exactly the gradients where the reference has it.
TEST_P(BackwardOn, AVisibleNanIsNeverLostAndReachesNobodyElse) {
  for (const DType dtype : {DType::f64, DType::f32, DType::bf16, DType::f16}) {
    for (const std::int64_t token : {0, 50, 96, 139}) {
      for (const bool causal : {false, true}) {
        AttentionSpec spec = dense_spec(dtype, 140);
        spec.causal = causal;
        spec.window_left = causal ? 30 : -1;
        for (int which = 0; which < 4; ++which) {
          Random random(12);
          AttentionCall attention(spec, random);
          HostTensor* tensors[] = {&attention.q, &attention.k, &attention.v, &attention.d_o};
          tensors[which]->set({0, token, which == 0 || which == 3 ? 1 : 0, 3}, kNan);
          ASSERT_EQ(run(attention), "");
          ASSERT_EQ(judge(attention.backward_args()), "")
              << dtype_name(dtype) << ", tensor " << which << ", token " << token;
        }
      }
    }
  }
}

// The NaN of one head's row does not reach another head of its group, nor another sequence.
TEST_P(BackwardOn, ANanStaysInItsHead) {
  Random random(13);
  AttentionSpec spec = dense_spec(DType::f32, 40);
  spec.batch = 2;
  spec.group = 3;
  spec.num_heads_kv = 2;
  AttentionCall attention(spec, random);
  ASSERT_EQ(run(attention), "");
  const std::vector<double> before = attention.dq.values();
  attention.q.set({1, 20, 4, 2}, kNan);
  ASSERT_EQ(run(attention), "");
  for (std::int64_t n = 0; n < 2; ++n) {
    for (std::int64_t i = 0; i < 40; ++i) {
      for (std::int64_t h = 0; h < 6; ++h) {
        for (std::int64_t d = 0; d < spec.head_dim_qk; ++d) {
          const double dq = attention.dq.get({n, i, h, d});
          if (n == 1 && i == 20 && h == 4) {
            ASSERT_TRUE(std::isnan(dq));
          } else {
            const auto at = static_cast<std::size_t>(((n * 40 + i) * 6 + h) * 20 + d);
            ASSERT_EQ(dq, before[at]) << n << " " << i << " " << h;
          }
        }
      }
    }
  }
}

TEST_P(BackwardOn, OneTokenHasExactGradients) {
  for (const DType dtype : {DType::f64, DType::f32, DType::bf16, DType::f16}) {
    Random random(14);
    AttentionSpec spec = dense_spec(dtype, 1);
    spec.group = 1;
    spec.magnitude = 3.0;
    spec.head_dim_qk = spec.head_dim_v = 16;
    AttentionCall attention(spec, random);
    ASSERT_EQ(run(attention), "");
    for (const double dq : attention.dq.values()) EXPECT_EQ(dq, 0.0);
    for (const double dk : attention.dk.values()) EXPECT_EQ(dk, 0.0);
    EXPECT_EQ(attention.dv.values(), attention.d_o.values());
  }
}

TEST_P(BackwardOn, EqualTokens) {
  for (const std::int64_t length_kv : {1, 8, 16, 32, 64, 128, 192, 1000}) {
    for (const std::int64_t length_q : {length_kv, length_kv + 1}) {
      Random random(15);
      AttentionSpec spec = dense_spec(DType::f32, length_q);
      spec.seqlen_kv = length_kv;
      spec.group = 1;
      AttentionCall attention(spec, random);
      for (HostTensor* tensor : {&attention.q, &attention.k, &attention.v, &attention.d_o}) {
        tensor->fill([] { return 1.0; });
      }
      ASSERT_EQ(run(attention), "");
      for (const double dq : attention.dq.values()) ASSERT_EQ(dq, 0.0);
      for (const double dk : attention.dk.values()) ASSERT_EQ(dk, 0.0);
      const double wanted = static_cast<double>(length_q) / static_cast<double>(length_kv);
      for (const double dv : attention.dv.values()) ASSERT_NEAR(dv, wanted, 2e-6 * wanted);
    }
  }
}

// Where scores are large, rounding moves lse by more than the logarithm of a weight can bear:
// backward must round its scores as forward did. What is left is the rounding of the stored lse.
TEST_P(BackwardOn, LargeEqualScores) {
  for (const DType dtype : {DType::f32, DType::bf16}) {
    for (const std::int64_t dim : {32, 96, 128, 200}) {
      Random random(16);
      AttentionSpec spec = dense_spec(dtype, 120);
      spec.group = 1;
      spec.head_dim_qk = spec.head_dim_v = dim;
      AttentionCall attention(spec, random);
      for (HostTensor* tensor : {&attention.q, &attention.k, &attention.v}) {
        tensor->fill([] { return 100.0; });
      }
      ASSERT_EQ(run(attention), "");
      const double lse_rounding = 0x1p-23 * attention.lse.get({0, 0, 0});
      const double own = dtype == DType::f32 ? 1e-5 : 0x1p-7;
      for (std::int64_t d = 0; d < dim; ++d) {
        double wanted = 0.0;
        for (std::int64_t i = 0; i < 120; ++i) wanted += attention.d_o.get({0, i, 0, d}) / 120.0;
        for (std::int64_t j = 0; j < 120; ++j) {
          ASSERT_NEAR(attention.dv.get({0, j, 0, d}), wanted,
                      (lse_rounding + own) * std::fabs(wanted) + own)
              << dtype_name(dtype) << " " << dim;
        }
      }
    }
  }
}

// All strides 0, as of the gradient of a sum: the bits of a contiguous copy.
TEST_P(BackwardOn, ExpandedGradient) {
  Random random(17);
  AttentionSpec spec = dense_spec(DType::f32, 110);
  AttentionCall attention(spec, random);
  attention.d_o.fill([] { return 0.75; });
  ASSERT_EQ(run(attention), "");
  const std::vector<std::byte> wanted = gradients(attention);
  const std::vector<float> row(static_cast<std::size_t>(spec.head_dim_v), 0.75f);
  onchip_tensor expanded = *attention.d_o.abi();
  expanded.data = const_cast<float*>(row.data());
  for (int axis = 0; axis < 3; ++axis) expanded.strides[axis] = 0;
  onchip_attention_backward_args args = attention.backward_args();
  args.d_o = &expanded;
  poison_gradients(attention);
  ASSERT_EQ(run_forced(args, GetParam()), "");
  EXPECT_TRUE(wanted == gradients(attention));
}

TEST_P(BackwardOn, LongSequence) {
  Random random(18);
  AttentionSpec spec = dense_spec(DType::f32, 33);
  spec.seqlen_kv = 12000;
  spec.group = 1;
  AttentionCall keys(spec, random);
  EXPECT_EQ(run_and_judge(keys), "");
  std::swap(spec.seqlen_q, spec.seqlen_kv);
  spec.slots_q.clear();
  spec.slots_kv.clear();
  AttentionCall rows(spec, random);
  EXPECT_EQ(run_and_judge(rows), "");
}

AttentionBackwardProblem planned_problem(std::int64_t length) {
  AttentionBackwardProblem problem;
  problem.num_seqs = 1;
  problem.slot_q = problem.slot_kv = length;
  problem.num_heads_q = problem.num_heads_kv = 16;
  problem.head_dim_qk = problem.head_dim_v = 128;
  problem.dq.wanted = problem.dk.wanted = problem.dv.wanted = true;
  return problem;
}

TEST(BackwardPlan, Workspace) {
  for (const std::int64_t length : {1024, 65536}) {
    for (const DType dtype : {DType::f32, DType::bf16}) {
      AttentionBackwardProblem problem = planned_problem(length);
      problem.dtype = dtype;
      for (const std::int32_t threads : {2, 8}) {
        set_num_threads(threads);
        const PlanResult result = cpu::plan_attention_backward(problem, Settings{});
        set_num_threads(0);
        ASSERT_TRUE(std::holds_alternative<BackendPlan>(result));
        EXPECT_LE(std::get<BackendPlan>(result).workspace_bytes, std::size_t{64} << 20);
      }
    }
  }
}

// Extents without any element take no time and no memory, however large.
TEST(BackwardPlan, NothingToCompute) {
  AttentionBackwardProblem problem;
  problem.num_seqs = std::int64_t{1} << 50;
  problem.slot_kv = 1;
  problem.num_heads_q = problem.num_heads_kv = 1;
  problem.dq.wanted = problem.dk.wanted = problem.dv.wanted = true;
  const PlanResult result = cpu::plan_attention_backward(problem, Settings{});
  ASSERT_TRUE(std::holds_alternative<BackendPlan>(result));
  EXPECT_EQ(std::get<BackendPlan>(result).workspace_bytes, 0u);
  cpu::run_attention_backward(std::get<BackendPlan>(result), problem, {});
}

TEST(BackwardPlan, SaysWhyNot) {
  AttentionBackwardProblem problem = planned_problem(16);
  const auto reason = [&](const Settings& settings) {
    const PlanResult result = cpu::plan_attention_backward(problem, settings);
    const auto* reject = std::get_if<Reject>(&result);
    return reject == nullptr ? std::string() : reject->reason;
  };
  EXPECT_EQ(reason(Settings{}), "");
  Settings mistyped;
  mistyped.cpu_isa_problem = "ONCHIP_CPU_ISA: got \"avx3\"";
  EXPECT_EQ(reason(mistyped), mistyped.cpu_isa_problem);
  problem.options.tf32 = true;
  EXPECT_NE(reason(Settings{}).find("tf32"), std::string::npos);
  problem.options.tf32 = false;
  problem.options.scale = 1e300;
  EXPECT_EQ(reason(Settings{}), "scale is outside the range of float32");
  problem.options.scale = 1.0;
  problem.slot_q = std::int64_t{1} << 60;
  EXPECT_EQ(reason(Settings{}), "the workspace would not fit in any address space");
  problem.slot_q = 16;
  problem.device.type = ONCHIP_DEVICE_CUDA;
  EXPECT_NE(reason(Settings{}).find("CPU tensors"), std::string::npos);
}

}  // namespace
}  // namespace onchip::test
