// CPU decoding on every instruction set: against the reference, and the same bits whatever the
// number of threads and however rows, heads and parts are shared among them.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "core/thread_pool.hpp"
#include "cpu/forced_isa.hpp"
#include "support/call.hpp"
#include "support/compare.hpp"
#include "support/decode_call.hpp"

namespace onchip::test {
namespace {

class CpuDecode : public EachIsa {};

double tolerance(DType dtype) {
  switch (dtype) {
    case DType::f64:
      return 1e-11;
    case DType::f32:
      return 1e-5;
    case DType::f16:
      return 2e-3;
    default:
      return 1.6e-2;
  }
}

double largest(const std::vector<double>& values) {
  double result = 1e-6;
  for (const double x : values) {
    if (std::isfinite(x)) result = std::max(result, std::fabs(x));
  }
  return result;
}

TEST_P(CpuDecode, RandomCallsAgreeWithTheReference) {
  for (std::uint64_t seed = 0; seed < 150; ++seed) {
    Random for_reference(seed + 1000);
    DecodeCall wanted(for_reference);
    wanted.options.backend = "reference";
    ASSERT_EQ(call(wanted.args()), ONCHIP_OK) << onchip_last_error();
    Random random(seed + 1000);
    DecodeCall drawn(random);
    ASSERT_EQ(run_forced(drawn.args(), GetParam()), "") << seed;
    EXPECT_EQ(drawn.k_cache.bytes(), wanted.k_cache.bytes()) << seed;
    EXPECT_EQ(drawn.v_cache.bytes(), wanted.v_cache.bytes()) << seed;
    EXPECT_EQ(drawn.o.broken_guard(), "");
    const std::vector<double> o = wanted.o.values();
    EXPECT_EQ(disagreement("o", drawn.o.values(), o, tolerance(drawn.q.dtype()) * largest(o)), "")
        << seed;
  }
}

struct Long {
  Long(DType dtype, std::int64_t seqlen_q, std::int64_t heads_kv, std::int64_t group,
       std::vector<std::int64_t> cached) {
    Random random(7);
    const auto batch = static_cast<std::int64_t>(cached.size());
    const std::int64_t capacity = *std::max_element(cached.begin(), cached.end());
    q = HostTensor(dtype, {batch, seqlen_q, heads_kv * group, 24});
    k = HostTensor(dtype, {batch, capacity, heads_kv, 24});
    v = HostTensor(dtype, {batch, capacity, heads_kv, 20});
    lengths = HostTensor(DType::i32, {batch});
    o = HostTensor(dtype, {batch, seqlen_q, heads_kv * group, 20});
    lse = HostTensor(dtype == DType::f64 ? DType::f64 : DType::f32,
                     {batch, heads_kv * group, seqlen_q});
    for (HostTensor* t : {&q, &k, &v}) t->fill([&] { return random.normal(); });
    lengths.fill_integers(cached);
    options.causal = 1;
  }

  onchip_attention_decode_args args() const {
    onchip_attention_decode_args a = ONCHIP_ATTENTION_DECODE_ARGS_INIT;
    a.q = q.abi();
    a.k_cache = k.abi();
    a.v_cache = v.abi();
    a.cache_seqlens = lengths.abi();
    a.o = o.abi();
    a.lse = lse.abi();
    a.options = &options;
    return a;
  }

  HostTensor q, k, v, lengths, o, lse;
  onchip_attention_options options = ONCHIP_ATTENTION_OPTIONS_INIT;
};

TEST_P(CpuDecode, ThreadsShowInNoBit) {
  struct Shape {
    std::int64_t seqlen_q, heads_kv, group;
  };
  // One row a head, a group that fills no block, and more rows than a task takes.
  for (const Shape shape : {Shape{1, 3, 1}, Shape{1, 2, 7}, Shape{40, 1, 3}}) {
    std::vector<std::byte> o;
    std::vector<std::byte> lse;
    for (const std::int32_t threads : {1, 2, 3, 7, 64}) {
      set_num_threads(threads);
      Long call(DType::f32, shape.seqlen_q, shape.heads_kv, shape.group, {1700, 512, 513, 3});
      ASSERT_EQ(run_forced(call.args(), GetParam()), "");
      if (threads == 1) {
        o = call.o.bytes();
        lse = call.lse.bytes();
      }
      EXPECT_EQ(call.o.bytes(), o) << threads;
      EXPECT_EQ(call.lse.bytes(), lse) << threads;
    }
    set_num_threads(0);
  }
}

// Beyond 32 parts of 512 keys a part is longer; a shorter sequence beside it keeps its own parts.
TEST_P(CpuDecode, LongSequencesKeepTheBitsOfShortOnesBesideThem) {
  Long together(DType::f32, 1, 1, 2, {16500, 16384});
  ASSERT_EQ(run_forced(together.args(), GetParam()), "");
  Long alone(DType::f32, 1, 1, 2, {16500, 16384});
  const std::vector<double> values = together.o.values();
  alone.lengths.fill_integers({0, 16384});
  ASSERT_EQ(run_forced(alone.args(), GetParam()), "");
  const std::vector<double> own = alone.o.values();
  const auto half = static_cast<std::ptrdiff_t>(values.size() / 2);
  EXPECT_TRUE(std::equal(values.begin() + half, values.end(), own.begin() + half));

  together.options.backend = "reference";
  const std::vector<double> computed = together.o.values();
  ASSERT_EQ(call(together.args()), ONCHIP_OK) << onchip_last_error();
  EXPECT_EQ(disagreement("o", computed, together.o.values(), 1e-5 * largest(computed)), "");
}

// What the instruction for pairs of bf16 takes as 0, or cannot sum: subnormal numbers in a query,
// or in keys where queries or the scale are so large that they show.
struct Odd {
  const char* name;
  double scale;
  double query[2];  // of channels with an even and an odd number
  double key[2];
};

void make_odd(const Odd& odd, Long& drawn) {
  drawn.options.scale = odd.scale;
  for (std::int64_t d = 0; d < 24; ++d) {
    // Two of the four query heads of the first kv head, and keys whose signs alternate.
    for (const std::int64_t head : {1, 2}) drawn.q.set({0, 0, head, d}, odd.query[d % 2]);
    for (std::int64_t j = 0; j < 150; ++j) {
      drawn.k.set({0, j, 0, d}, j % 3 == 0 ? odd.key[d % 2] : -0.5 * odd.key[d % 2]);
    }
  }
}

TEST_P(CpuDecode, NumbersThatPairsOfBfloat16CannotMultiply) {
  for (const Odd& odd : {Odd{"subnormal query", 0.25, {1e-39, 0.5}, {2e38, 0.5}},
                         Odd{"subnormal keys", 0.25, {1e38, 0.5}, {1e-39, 0.5}},
                         Odd{"large query", 0.25, {1e37, -1e37}, {1e-37, 2e-37}},
                         Odd{"large scale", 1e36, {1.0, 0.5}, {1e-36, 2e-36}},
                         Odd{"tiny scale", 1e-37, {1e18, 5e17}, {1e19, 2e19}},
                         Odd{"no scale", 0.0, {3e38, 3e38}, {3e38, 3e38}}}) {
    SCOPED_TRACE(odd.name);
    Long wanted(DType::bf16, 1, 2, 4, {150});
    make_odd(odd, wanted);
    wanted.options.backend = "reference";
    ASSERT_EQ(call(wanted.args()), ONCHIP_OK) << onchip_last_error();
    Long drawn(DType::bf16, 1, 2, 4, {150});
    make_odd(odd, drawn);
    ASSERT_EQ(run_forced(drawn.args(), GetParam()), "");
    EXPECT_EQ(disagreement("lse", drawn.lse.values(), wanted.lse.values(),
                           1e-5 * largest(wanted.lse.values())),
              "");
    EXPECT_EQ(disagreement("o", drawn.o.values(), wanted.o.values(),
                           tolerance(DType::bf16) * largest(wanted.o.values())),
              "");
  }
}

// Rows that share a block with a query whose scores are not sums over pairs keep their own bits.
TEST_P(CpuDecode, AnOddQueryShowsInNoOther) {
  std::vector<double> o[2];
  for (const bool odd : {false, true}) {
    Long drawn(DType::bf16, 1, 2, 7, {300});
    if (odd) drawn.q.set({0, 0, 2, 5}, 1e-39);
    ASSERT_EQ(run_forced(drawn.args(), GetParam()), "");
    o[odd ? 1 : 0] = drawn.o.values();
  }
  for (std::size_t i = 0; i < o[0].size(); ++i) {
    if (i / 20 == 2) continue;
    ASSERT_EQ(o[0][i], o[1][i]) << i;
  }
}

TEST_P(CpuDecode, NumbersBeyondFloat32InASinkOrBias) {
  for (const bool in_bias : {false, true}) {
    std::vector<double> results[2];
    for (const bool reference : {false, true}) {
      Long call_of(DType::f32, 1, 1, 2, {70});
      HostTensor sink(DType::f64, {2});
      sink.fill_from({1e300, -1e300});
      HostTensor bias(DType::f64, {1, 2, 1, 70});
      bias.fill([] { return -1e300; });
      bias.set({0, 0, 0, 3}, -2e300);
      (in_bias ? call_of.options.bias : call_of.options.sink) = in_bias ? bias.abi() : sink.abi();
      call_of.options.backend = "reference";
      if (reference) {
        ASSERT_EQ(call(call_of.args()), ONCHIP_OK) << onchip_last_error();
      } else {
        ASSERT_EQ(run_forced(call_of.args(), GetParam()), "");
      }
      results[reference ? 1 : 0] = call_of.o.values();
    }
    EXPECT_EQ(disagreement("o", results[0], results[1], 1e-5), "");
  }
}

ONCHIP_FOR_EACH_ISA(CpuDecode);

}  // namespace
}  // namespace onchip::test
