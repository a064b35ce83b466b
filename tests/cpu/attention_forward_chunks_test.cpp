// Keys in several chunks, by one worker or by many: right, and the same bits either way.
#include <gtest/gtest.h>

#include <string>
#include <variant>
#include <vector>

#include "core/thread_pool.hpp"
#include "cpu/attention_unit.hpp"
#include "cpu/forced_isa.hpp"
#include "support/attention_call.hpp"
#include "support/compare.hpp"

namespace onchip::test {
namespace {

class ChunksOn : public EachIsa {
 protected:
  void TearDown() override { set_num_threads(0); }

  std::size_t workspace(const AttentionCall& attention) const {
    ops::CallFacts facts;
    const AttentionForwardProblem problem = ops::normalise(attention.forward_args(), facts);
    return std::get<BackendPlan>(cpu::plan_attention_forward(problem, forcing(GetParam())))
        .workspace_bytes;
  }
};
ONCHIP_FOR_EACH_ISA(ChunksOn);

std::vector<std::byte> outputs(AttentionCall& attention) {
  std::vector<std::byte> all;
  for (const auto& [name, tensor] : attention.forward_outputs()) {
    const std::vector<std::byte> bytes = tensor->bytes();
    all.insert(all.end(), bytes.begin(), bytes.end());
  }
  return all;
}

// Few rows, keys that end near or far from a chunk's end, any options.
AttentionSpec spec_of(Random& random) {
  AttentionSpec spec = random_spec(random);
  const auto keys = [&random] {
    return random.one_of({cpu::kChunkKeys - 1, cpu::kChunkKeys, cpu::kChunkKeys + 1,
                          2 * cpu::kChunkKeys + 97, random.integer(1, 3 * cpu::kChunkKeys)});
  };
  spec.batch = random.integer(1, 2);
  spec.num_heads_kv = 1;
  spec.group = random.integer(1, 2);
  spec.shared_cu_seqlens = false;
  spec.used_q.clear();
  spec.used_kv.clear();
  spec.slots_q.clear();
  spec.slots_kv.clear();
  for (std::int64_t n = 0; n < spec.batch; ++n) {
    spec.slots_q.push_back(random.integer(1, 20));
    spec.slots_kv.push_back(keys());
  }
  if (!spec.packed) {
    spec.slots_q.assign(spec.slots_q.size(), spec.slots_q[0]);
    spec.slots_kv.assign(spec.slots_kv.size(), spec.slots_kv[0]);
    spec.seqlen_q = spec.slots_q[0];
    spec.seqlen_kv = spec.slots_kv[0];
  }
  if (random.chance(0.3)) spec.window_left = random.integer(0, 5000);
  if (random.chance(0.3)) spec.used_kv = spec.slots_kv;
  if (!spec.used_kv.empty()) spec.used_q = spec.slots_q;
  for (std::int64_t& used : spec.used_kv) used = random.integer(0, used);
  spec.head_dim_qk = random.integer(1, 9);
  spec.head_dim_v = random.integer(1, 9);
  return spec;
}

TEST_P(ChunksOn, RandomCalls) {
  for (int seed = 0; seed < 60; ++seed) {
    Random random(0x30000 + static_cast<std::uint64_t>(seed));
    AttentionCall attention(spec_of(random), random);
    std::vector<std::byte> first;
    for (const std::int32_t threads : {1, 2, 5}) {
      set_num_threads(threads);
      for (const auto& [name, tensor] : attention.forward_outputs()) tensor->poison();
      ASSERT_EQ(run_forced(attention.forward_args(), GetParam()), "");
      for (const auto& [name, tensor] : attention.forward_outputs()) {
        ASSERT_EQ(tensor->broken_guard(), "") << name;
      }
      if (first.empty()) {
        ASSERT_EQ(judge(attention.forward_args()), "") << "seed " << seed;
        first = outputs(attention);
      } else {
        ASSERT_TRUE(first == outputs(attention)) << "seed " << seed << ", threads " << threads;
      }
    }
  }
}

AttentionSpec long_spec(DType dtype, std::int64_t rows, std::int64_t keys) {
  AttentionSpec spec;
  spec.dtype = dtype;
  spec.batch = 1;
  spec.group = 1;
  spec.seqlen_q = rows;
  spec.seqlen_kv = keys;
  spec.head_dim_qk = 5;
  spec.head_dim_v = 3;
  return spec;
}

// The workspace tells whether workers share the keys of a task.
TEST_P(ChunksOn, FewRowsAreSharedByTheirKeys) {
  Random random(1);
  const auto parts = [&](std::int64_t rows, std::int64_t keys) {
    AttentionCall attention(long_spec(DType::f32, rows, keys), random);
    set_num_threads(1);
    const std::size_t alone = workspace(attention);
    set_num_threads(4);
    return workspace(attention) > 4 * alone;
  };
  EXPECT_TRUE(parts(1, 10 * cpu::kChunkKeys));
  EXPECT_FALSE(parts(1, cpu::kChunkKeys));
  EXPECT_FALSE(parts(32 * 32, 2 * cpu::kChunkKeys));
}

// A row among others, alone, and in a batch beside longer ones: the same bits.
TEST_P(ChunksOn, RowsDoNotFeelWhatElseIsInTheCall) {
  set_num_threads(2);
  for (const DType dtype : {DType::f64, DType::f32, DType::bf16, DType::f16}) {
    Random random(2);
    AttentionSpec spec = long_spec(dtype, 260, 7000);
    spec.causal = true;
    spec.sink = true;
    AttentionCall all(spec, random);
    ASSERT_EQ(run_forced(all.forward_args(), GetParam()), "");
    const auto row = [&](const AttentionCall& call, std::int64_t n, std::int64_t i) {
      std::vector<double> values;
      for (std::int64_t d = 0; d < spec.head_dim_v; ++d) values.push_back(call.o.get({n, i, 0, d}));
      values.push_back(call.lse.get({n, 0, i}));
      return values;
    };
    for (const std::int64_t rows : {1, 33}) {
      for (const std::int64_t batch : {1, 3}) {
        AttentionSpec part_spec = spec;
        part_spec.seqlen_q = rows;
        part_spec.batch = batch;
        AttentionCall part(part_spec, random);
        const std::int64_t n = batch - 1;
        part.sink.fill_from(all.sink.values());
        const auto copy = [&](HostTensor& to, const HostTensor& from, std::int64_t first) {
          for (std::int64_t i = 0; i < to.view().shape[1]; ++i) {
            for (std::int64_t d = 0; d < to.view().shape[3]; ++d) {
              to.set({n, i, 0, d}, from.get({0, first + i, 0, d}));
            }
          }
        };
        copy(part.q, all.q, spec.seqlen_q - rows);
        copy(part.k, all.k, 0);
        copy(part.v, all.v, 0);
        ASSERT_EQ(run_forced(part.forward_args(), GetParam()), "");
        for (std::int64_t i = 0; i < rows; ++i) {
          ASSERT_EQ(row(part, n, i), row(all, 0, spec.seqlen_q - rows + i)) << rows << " " << i;
        }
      }
    }
  }
}

}  // namespace
}  // namespace onchip::test
