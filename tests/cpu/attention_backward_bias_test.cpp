// How the CPU backend cuts the sums of dbias: the same bits whoever computes which piece, memory
// within its bounds.
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "core/thread_pool.hpp"
#include "cpu/forced_isa.hpp"
#include "support/attention_call.hpp"
#include "support/compare.hpp"

namespace onchip::test {
namespace {

class BiasOn : public EachIsa {
 protected:
  void TearDown() override { set_num_threads(0); }

  void run(AttentionCall& attention) {
    ASSERT_EQ(run_forced(attention.forward_args(), GetParam()), "");
    attention.dbias.poison();
    ASSERT_EQ(run_forced(attention.backward_args(), GetParam()), "");
    EXPECT_EQ(attention.dbias.broken_guard(), "");
  }
};
ONCHIP_FOR_EACH_ISA(BiasOn);

// For the thread sanitizer, which runs what has Thread in its name.
class BiasThreadsOn : public BiasOn {};
ONCHIP_FOR_EACH_ISA(BiasThreadsOn);

// More steps than pieces where sequences and heads are broadcast.
AttentionSpec spec_of(DType dtype, unsigned broadcast) {
  AttentionSpec spec;
  spec.dtype = dtype;
  spec.batch = 3;
  spec.num_heads_kv = 2;
  spec.group = 6;
  spec.seqlen_q = 9;
  spec.seqlen_kv = 400;
  spec.bias = true;
  for (unsigned axis = 0; axis < 4; ++axis)
    spec.bias_broadcast[axis] = (broadcast >> axis & 1) != 0;
  return spec;
}

TEST_P(BiasThreadsOn, EveryBroadcastHasTheBitsOfOneThread) {
  for (const DType dtype : {DType::f64, DType::bf16}) {
    for (unsigned broadcast = 0; broadcast < 16; ++broadcast) {
      Random random(broadcast);
      AttentionCall attention(spec_of(dtype, broadcast), random);
      std::vector<std::byte> first;
      for (const std::int32_t threads : {1, 2, 5}) {
        set_num_threads(threads);
        run(attention);
        if (first.empty()) first = attention.dbias.bytes();
        ASSERT_TRUE(first == attention.dbias.bytes())
            << dtype_name(dtype) << ", broadcast " << broadcast << ", threads " << threads;
      }
    }
  }
}

// One sequence's sums are few enough that each piece is a task. With forty sequences a task is a
// tile: the same bits, so a sequence does not feel the others either.
TEST_P(BiasThreadsOn, TheSumOfASequenceDoesNotFeelTheOthers) {
  AttentionSpec spec;
  spec.batch = 40;
  spec.group = 4;
  spec.seqlen_q = 96;
  spec.seqlen_kv = 384;
  spec.head_dim_qk = spec.head_dim_v = 3;
  spec.bias = true;
  spec.bias_broadcast[1] = true;
  Random random(1);
  AttentionCall all(spec, random);
  run(all);
  const std::vector<double> beside = all.dbias.values();
  spec.batch = 1;
  AttentionCall one(spec, random);
  for (const std::int64_t n : {0, 17, 39}) {
    for (auto [to, from] : {std::pair{&one.q, &all.q},
                            {&one.k, &all.k},
                            {&one.v, &all.v},
                            {&one.d_o, &all.d_o},
                            {&one.bias, &all.bias}}) {
      const std::vector<double> values = from->values();
      const auto count = static_cast<std::int64_t>(to->values().size());
      to->fill_from({values.begin() + n * count, values.begin() + (n + 1) * count});
    }
    run(one);
    const std::vector<double> alone = one.dbias.values();
    ASSERT_TRUE(std::equal(alone.begin(), alone.end(),
                           beside.begin() + n * static_cast<std::int64_t>(alone.size())))
        << "sequence " << n;
  }
}

// Sequences of no rows, of no keys, of one row, and positions that no sequence has.
TEST_P(BiasOn, PackedSequencesOfUnlikeLengths) {
  for (unsigned broadcast = 0; broadcast < 16; ++broadcast) {
    AttentionSpec spec = spec_of(DType::f32, broadcast);
    spec.packed = true;
    spec.batch = 5;
    spec.group = 2;
    spec.slots_q = {1, 0, 130, 7, 40};
    spec.slots_kv = {390, 20, 100, 0, 2};
    Random random(100 + broadcast);
    AttentionCall attention(spec, random);
    run(attention);
    ASSERT_EQ(judge(attention.backward_args(), Saved::own), "") << "broadcast " << broadcast;
  }
}

TEST(BiasPlan, MemoryForPiecesHasBounds) {
  AttentionBackwardProblem problem;
  problem.num_seqs = 64;
  problem.num_heads_q = problem.num_heads_kv = 64;
  problem.slot_q = problem.slot_kv = 1 << 14;
  problem.head_dim_qk = problem.head_dim_v = 64;
  problem.dbias.wanted = true;
  const auto planned = [&](std::int32_t threads) {
    set_num_threads(threads);
    const PlanResult result = cpu::plan_attention_backward(problem, Settings{});
    set_num_threads(0);
    EXPECT_TRUE(std::holds_alternative<BackendPlan>(result));
    return std::get<BackendPlan>(result).workspace_bytes;
  };
  for (unsigned broadcast = 0; broadcast < 16; ++broadcast) {
    problem.dbias.wanted = false;
    problem.dq.wanted = true;
    const std::size_t without[] = {planned(1), planned(9)};
    problem.dq.wanted = false;
    problem.dbias.wanted = true;
    const std::int64_t extents[] = {problem.num_seqs, problem.num_heads_q, problem.slot_q,
                                    problem.slot_kv};
    for (unsigned axis = 0; axis < 4; ++axis) {
      problem.dbias_shape[axis] = (broadcast >> axis & 1) != 0 ? 1 : extents[axis];
    }
    constexpr std::size_t kMiB = std::size_t{1} << 20;
    EXPECT_LE(planned(1), without[0] + 34 * kMiB) << broadcast;
    EXPECT_LE(planned(9), without[1] + 32 * kMiB + 9 * 2 * kMiB) << broadcast;
  }
  // As many as only a view with strides of 0 has.
  problem.num_seqs = problem.dbias_shape[0] = std::int64_t{1} << 40;
  problem.num_heads_q = problem.num_heads_kv = 1;
  problem.slot_q = problem.slot_kv = std::int64_t{1} << 40;
  std::fill(problem.dbias_shape, problem.dbias_shape + 4, std::int64_t{1});
  EXPECT_TRUE(std::holds_alternative<Reject>(cpu::plan_attention_backward(problem, Settings{})));
}

}  // namespace
}  // namespace onchip::test
