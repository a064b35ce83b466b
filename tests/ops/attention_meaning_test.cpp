// What docs/semantics.md section 1 and 2 promise beyond the formula: non-finite values, empty rows,
// partial results, threads, dropout. The reference is exact in all of it.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "core/thread_pool.hpp"
#include "support/attention_call.hpp"
#include "support/call.hpp"
#include "support/compare.hpp"

namespace onchip::test {
namespace {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr double kInfinity = std::numeric_limits<double>::infinity();

struct Results {
  std::vector<double> o, lse, dq, dk, dv, dbias, dsink;
};

Results results_of(AttentionCall& attention) {
  attention.options.backend = "reference";
  EXPECT_EQ(call(attention.forward_args()), ONCHIP_OK) << onchip_last_error();
  EXPECT_EQ(call(attention.backward_args()), ONCHIP_OK) << onchip_last_error();
  Results r;
  r.o = attention.o.values();
  r.lse = attention.lse.values();
  r.dq = attention.dq.values();
  r.dk = attention.dk.values();
  r.dv = attention.dv.values();
  if (attention.dbias.present()) r.dbias = attention.dbias.values();
  if (attention.dsink.present()) r.dsink = attention.dsink.values();
  return r;
}

AttentionSpec f64_spec() {
  AttentionSpec spec;
  spec.dtype = DType::f64;
  return spec;
}

void fill_row(HostTensor& tensor, std::int64_t batch, std::int64_t row, double value) {
  const onchip_tensor& view = tensor.view();
  for (std::int64_t head = 0; head < view.shape[2]; ++head) {
    for (std::int64_t d = 0; d < view.shape[3]; ++d) tensor.set({batch, row, head, d}, value);
  }
}

// Key 3 is excluded for every query, in each way there is; what it holds changes no bit.
TEST(NonFinite, AnExcludedKeyHasNoInfluence) {
  for (const char* way : {"mask", "bias", "segments", "causal", "window", "used length"}) {
    SCOPED_TRACE(way);
    AttentionSpec spec = f64_spec();
    spec.seqlen_q = 3;
    spec.seqlen_kv = 4;
    const std::string name = way;
    spec.mask = name == "mask";
    spec.bias = name == "bias";
    spec.segments = name == "segments";
    if (name == "causal") spec.causal = spec.top_left = true;
    if (name == "window") {
      spec.top_left = true;
      spec.window_right = 0;
    }
    if (name == "used length") {
      spec.used_q = {3, 3};
      spec.used_kv = {3, 3};
    }
    spec.poisoned = false;
    Random random(5);
    AttentionCall attention(spec, random);
    if (spec.segments) {
      attention.q_segment_ids.fill([] { return 0.0; });
      attention.kv_segment_ids.fill_integers({0, 0, 0, 9, 0, 0, 0, 9});
    }
    for (HostTensor* scores : {&attention.mask, &attention.bias}) {
      if (!scores->present()) continue;
      std::vector<double> values = scores->values();
      for (std::size_t i = 0; i < values.size(); ++i) {
        if (scores == &attention.mask) values[i] = i % 4 == 3 ? 0.0 : 1.0;
        if (scores == &attention.bias && i % 4 == 3) values[i] = -kInfinity;
      }
      scores->fill_from(values);
    }
    const Results clean = results_of(attention);
    for (const double value : {kNan, kInfinity, -kInfinity, 1e300}) {
      for (std::int64_t n = 0; n < 2; ++n) {
        fill_row(attention.k, n, 3, value);
        fill_row(attention.v, n, 3, value);
      }
      const Results poisoned = results_of(attention);
      EXPECT_EQ(clean.o, poisoned.o);
      EXPECT_EQ(clean.lse, poisoned.lse);
      EXPECT_EQ(clean.dq, poisoned.dq);
      EXPECT_EQ(clean.dk, poisoned.dk);
      EXPECT_EQ(clean.dv, poisoned.dv);
    }
    for (const double gradient : clean.dk) EXPECT_TRUE(std::isfinite(gradient));
  }
}

// A NaN key that rows 2.. see under causal masking: they show it, the rows before do not.
TEST(NonFinite, AVisibleOneShowsWhereItIsSeenAndNowhereElse) {
  AttentionSpec spec = f64_spec();
  spec.batch = 1;
  spec.seqlen_q = spec.seqlen_kv = 5;
  spec.causal = true;
  Random random(6);
  AttentionCall attention(spec, random);
  const Results clean = results_of(attention);
  fill_row(attention.v, 0, 2, kNan);
  const Results shown = results_of(attention);
  const std::size_t row = std::size_t{2} * 4;  // heads x dim
  for (std::size_t i = 0; i < clean.o.size(); ++i) {
    if (i / row >= 2) {
      EXPECT_TRUE(std::isnan(shown.o[i]));
    } else {
      EXPECT_EQ(shown.o[i], clean.o[i]);
    }
  }
  EXPECT_EQ(shown.lse, clean.lse);

  fill_row(attention.v, 0, 2, 0.0);
  fill_row(attention.q, 0, 0, kNan);
  const Results query = results_of(attention);
  for (std::size_t i = 0; i < query.o.size(); ++i) {
    EXPECT_EQ(std::isnan(query.o[i]), i / row == 0) << i;
  }
}

TEST(EmptyRows, AreZeroWithMinusInfinityOrTheSink) {
  for (const bool with_sink : {false, true}) {
    AttentionSpec spec = f64_spec();
    spec.batch = 1;
    spec.seqlen_q = 6;
    spec.seqlen_kv = 2;
    spec.causal = true;  // rows 0..3 see nothing
    spec.sink = with_sink;
    spec.sink_dtype = DType::f64;
    spec.d_lse = true;
    Random random(7);
    AttentionCall attention(spec, random);
    // dO of an empty row has no influence either.
    for (std::int64_t row = 0; row < 4; ++row) fill_row(attention.d_o, 0, row, kNan);
    const Results r = results_of(attention);
    double dsink0 = 0.0;
    for (std::int64_t row = 0; row < 4; ++row) {
      for (std::int64_t head = 0; head < 2; ++head) {
        EXPECT_EQ(attention.o.get({0, row, head, 1}), 0.0);
        EXPECT_EQ(attention.dq.get({0, row, head, 1}), 0.0);
        EXPECT_EQ(attention.lse.get({0, head, row}),
                  with_sink ? attention.sink.get({head}) : -kInfinity);
      }
      dsink0 += attention.d_lse.get({0, 0, row});
    }
    for (const double x : r.dk) EXPECT_TRUE(std::isfinite(x));
    for (const double x : r.dv) EXPECT_TRUE(std::isfinite(x));
    if (!with_sink) continue;
    // Without the rows that see keys, dsink is the sum of d_lse.
    for (const std::int64_t row : {4, 5}) {
      fill_row(attention.d_o, 0, row, 0.0);
      for (const std::int64_t head : {0, 1}) attention.d_lse.set({0, head, row}, 0.0);
    }
    EXPECT_NEAR(results_of(attention).dsink[0], dsink0, 1e-14);
  }
}

TEST(EmptyRows, HugeNegativeLogitsAreNotEmpty) {
  AttentionSpec spec;
  spec.batch = 1;
  spec.seqlen_q = 3;
  spec.seqlen_kv = 5;
  spec.bias = true;
  spec.bias_dtype = DType::f64;
  Random random(8);
  AttentionCall attention(spec, random);
  attention.bias.fill([] { return -1e30; });
  results_of(attention);
  // The scores vanish beside -1e30: a plain mean of v.
  for (std::int64_t d = 0; d < 4; ++d) {
    double mean = 0.0;
    for (std::int64_t j = 0; j < 5; ++j) mean += attention.v.get({0, j, 0, d}) / 5.0;
    EXPECT_NEAR(attention.o.get({0, 1, 1, d}), mean, 1e-6);
  }
  EXPECT_NEAR(attention.lse.get({0, 0, 0}), -1e30, 1e24);
}

TEST(EmptyRows, NoQueryDimensionGivesTheMeanOfV) {
  AttentionSpec spec = f64_spec();
  spec.head_dim_qk = 0;
  spec.batch = 1;
  Random random(9);
  AttentionCall attention(spec, random);
  results_of(attention);
  double mean = 0.0;
  for (std::int64_t j = 0; j < 7; ++j) mean += attention.v.get({0, j, 0, 2}) / 7.0;
  EXPECT_NEAR(attention.o.get({0, 3, 1, 2}), mean, 1e-15);
  EXPECT_NEAR(attention.lse.get({0, 0, 0}), std::log(7.0), 1e-15);
}

// Keys in two halves, merged; then backward of each half with the whole's o and lse: the gradients
// add up to the whole's. Row 0 sees nothing of the first half, row 1 nothing at all.
TEST(Parts, MergeAndTheirGradientsAddUpToTheWhole) {
  for (const DType dtype : {DType::f64, DType::f32, DType::f16, DType::bf16}) {
    AttentionSpec spec;
    spec.dtype = dtype;
    spec.batch = 1;
    spec.seqlen_q = 4;
    spec.seqlen_kv = 6;
    spec.mask = true;
    spec.mask_broadcast[1] = true;
    spec.d_lse = true;
    Random random(10);
    AttentionCall whole(spec, random);
    whole.options.backend = "reference";
    whole.mask.fill([n = 0]() mutable {
      const int row = n / 6;
      const int key = n % 6;
      ++n;
      return row == 1 || (row == 0 && key < 3) ? 0.0 : 1.0;
    });
    const Results all = results_of(whole);

    spec.seqlen_kv = 3;
    Random other(11);
    AttentionCall first(spec, other);
    AttentionCall second(spec, other);
    std::vector<double> dq_sum(all.dq.size(), 0.0);
    AttentionCall* parts[] = {&first, &second};
    for (std::int64_t part = 0; part < 2; ++part) {
      AttentionCall& half = *parts[part];
      half.options.backend = "reference";
      half.q.fill_from(whole.q.values());
      half.d_o.fill_from(whole.d_o.values());
      half.d_lse.fill_from(whole.d_lse.values());
      for (std::int64_t j = 0; j < 3; ++j) {
        for (std::int64_t d = 0; d < 4; ++d) {
          half.k.set({0, j, 0, d}, whole.k.get({0, 3 * part + j, 0, d}));
          half.v.set({0, j, 0, d}, whole.v.get({0, 3 * part + j, 0, d}));
        }
      }
      half.mask.fill([n = 0, part]() mutable {
        const int row = n / 3;
        ++n;
        return row == 1 || (row == 0 && part == 0) ? 0.0 : 1.0;
      });
      ASSERT_EQ(call(half.forward_args()), ONCHIP_OK) << onchip_last_error();
    }

    HostTensor o(dtype, {1, 4, 2, 4});
    HostTensor lse(whole.lse.dtype(), {1, 2, 4});
    onchip_attention_merge_args args = ONCHIP_ATTENTION_MERGE_ARGS_INIT;
    args.o1 = first.o.abi();
    args.lse1 = first.lse.abi();
    args.o2 = second.o.abi();
    args.lse2 = second.lse.abi();
    args.o = o.abi();
    args.lse = lse.abi();
    for (const char* backend : {"reference", "cpu"}) {
      args.backend = backend;
      o.poison();
      ASSERT_EQ(call(args), ONCHIP_OK) << onchip_last_error();
      EXPECT_EQ(judge(args), "") << backend;
      const double eps = dtype == DType::f64   ? 1e-14
                         : dtype == DType::f32 ? 1e-6
                         : dtype == DType::f16 ? 2e-3
                                               : 1.6e-2;
      EXPECT_EQ(disagreement("merged o", o.values(), all.o, 2.0 * eps), "") << backend;
      EXPECT_EQ(
          disagreement("merged lse", lse.values(), all.lse, dtype == DType::f64 ? 1e-14 : 1e-6), "")
          << backend;
    }

    if (dtype != DType::f64) continue;
    for (std::int64_t part = 0; part < 2; ++part) {
      AttentionCall& half = *parts[part];
      half.o.fill_from(all.o);
      half.lse.fill_from(all.lse);
      ASSERT_EQ(call(half.backward_args()), ONCHIP_OK) << onchip_last_error();
      const std::vector<double> dq = half.dq.values();
      for (std::size_t i = 0; i < dq.size(); ++i) dq_sum[i] += dq[i];
      for (std::int64_t j = 0; j < 3; ++j) {
        for (std::int64_t d = 0; d < 4; ++d) {
          EXPECT_NEAR(half.dk.get({0, j, 0, d}), whole.dk.get({0, 3 * part + j, 0, d}), 1e-13);
          EXPECT_NEAR(half.dv.get({0, j, 0, d}), whole.dv.get({0, 3 * part + j, 0, d}), 1e-13);
        }
      }
    }
    EXPECT_EQ(disagreement("sum of dq", dq_sum, all.dq, 1e-13), "");
  }
}

TEST(Parts, TwoEmptyOnesMergeToAnEmptyOne) {
  HostTensor o(DType::f32, {1, 1, 1, 2});
  o.fill([] { return kNan; });  // an empty part's row is not read
  HostTensor lse(DType::f32, {1, 1, 1});
  lse.fill([] { return -kInfinity; });
  HostTensor merged(DType::f32, {1, 1, 1, 2});
  HostTensor merged_lse(DType::f32, {1, 1, 1});
  onchip_attention_merge_args args = ONCHIP_ATTENTION_MERGE_ARGS_INIT;
  args.o1 = args.o2 = o.abi();
  args.lse1 = args.lse2 = lse.abi();
  args.o = merged.abi();
  args.lse = merged_lse.abi();
  args.backend = "reference";
  ASSERT_EQ(call(args), ONCHIP_OK) << onchip_last_error();
  EXPECT_EQ(merged.values(), (std::vector<double>{0.0, 0.0}));
  EXPECT_EQ(merged_lse.values(), (std::vector<double>{-kInfinity}));
}

TEST(Threads, ChangeNoBit) {
  for (const DType dtype : {DType::f64, DType::f32, DType::bf16}) {
    AttentionSpec spec;
    spec.dtype = dtype;
    spec.batch = 3;
    spec.seqlen_q = 33;
    spec.seqlen_kv = 47;
    spec.num_heads_kv = 2;
    spec.bias = spec.sink = true;
    spec.bias_broadcast[0] = true;  // sums over sequences
    Random random(12);
    AttentionCall attention(spec, random);
    set_num_threads(1);
    const Results one = results_of(attention);
    for (const std::int32_t threads : {2, 3, 16}) {
      set_num_threads(threads);
      const Results many = results_of(attention);
      EXPECT_EQ(one.o, many.o);
      EXPECT_EQ(one.lse, many.lse);
      EXPECT_EQ(one.dq, many.dq);
      EXPECT_EQ(one.dk, many.dk);
      EXPECT_EQ(one.dv, many.dv);
      EXPECT_EQ(one.dbias, many.dbias);
      EXPECT_EQ(one.dsink, many.dsink);
    }
    set_num_threads(0);
  }
}

// A plan made for many threads runs on fewer, and the other way round.
TEST(Threads, MayChangeBetweenPlanAndRun) {
  AttentionSpec spec = f64_spec();
  Random random(13);
  AttentionCall attention(spec, random);
  attention.options.backend = "reference";
  const auto args = attention.forward_args();
  for (const auto& [planned_for, run_with] : {std::pair{8, 1}, {1, 8}, {2, 3}}) {
    set_num_threads(planned_for);
    onchip_plan planned = ONCHIP_PLAN_INIT;
    ASSERT_EQ(plan(args, &planned), ONCHIP_OK);
    const GuardedMemory workspace = workspace_for(planned);
    set_num_threads(run_with);
    attention.o.poison();
    ASSERT_EQ(run(planned, args, workspace.data()), ONCHIP_OK);
    EXPECT_TRUE(workspace_guard_holds(workspace));
    EXPECT_EQ(judge(args), "");
  }
  set_num_threads(0);
}

// v = identity reads the weights: P where kept, scaled, 0 where dropped.
TEST(DropoutOfAttention, OneMaskForASeedAndOffset) {
  AttentionSpec spec = f64_spec();
  spec.batch = 2;
  spec.num_heads_kv = 2;
  spec.group = 1;
  spec.seqlen_q = spec.seqlen_kv = spec.head_dim_v = 64;
  spec.dropout_p = 0.25;
  spec.magnitude = 0.1;
  Random random(14);
  AttentionCall attention(spec, random);
  attention.v.fill([n = 0]() mutable {
    const int key = n / 128 % 64;
    const int d = n % 64;
    ++n;
    return key == d ? 1.0 : 0.0;
  });
  attention.options.backend = "reference";
  const auto args = attention.forward_args();
  ASSERT_EQ(call(args), ONCHIP_OK) << onchip_last_error();
  const std::vector<double> first = attention.o.values();
  double kept = 0.0;
  for (const double p : first) kept += p != 0.0 ? 1.0 : 0.0;
  const auto count = static_cast<double>(first.size());
  EXPECT_NEAR(kept / count, 0.75, 5.0 * std::sqrt(0.25 * 0.75 / count));
  ASSERT_EQ(call(args), ONCHIP_OK);
  EXPECT_EQ(first, attention.o.values());

  const auto rng = read_integers(attention.dropout_rng.view());
  attention.dropout_rng.fill_integers({rng[0], (rng[1] + 1) % (std::int64_t{1} << 32)});
  ASSERT_EQ(call(args), ONCHIP_OK);
  EXPECT_NE(first, attention.o.values());

  attention.options.dropout_p = 0.0;
  ASSERT_EQ(call(args), ONCHIP_OK);
  const std::vector<double> whole = attention.o.values();
  for (std::size_t i = 0; i < whole.size(); ++i) {
    if (first[i] == 0.0) continue;
    ASSERT_NEAR(first[i], whole[i] / 0.75, 1e-15);
  }
  attention.options.dropout_rng = nullptr;
  ASSERT_EQ(call(args), ONCHIP_OK);
  EXPECT_EQ(whole, attention.o.values());
}

// Rounding happens once, when the result is stored.
TEST(Precision, SixteenBitResultsAreTheNearest) {
  for (const DType dtype : {DType::f16, DType::bf16}) {
    AttentionSpec spec;
    spec.dtype = dtype;
    spec.seqlen_q = spec.seqlen_kv = 40;
    Random random(15);
    AttentionCall attention(spec, random);
    attention.options.backend = "reference";
    ASSERT_EQ(call(attention.forward_args()), ONCHIP_OK);
    const PlainForward exact =
        plain_forward(read_case(attention.forward_args()), Arithmetic::exact());
    const std::vector<double> o = attention.o.values();
    for (std::size_t i = 0; i < o.size(); ++i) {
      std::byte bytes[8];
      store_from_double(bytes, dtype, exact.o[i]);
      EXPECT_EQ(o[i], load_as_double(bytes, dtype)) << i;
    }
  }
}

// Packed sequences give what each gives alone, bit by bit.
TEST(Packed, EqualsEachSequenceAlone) {
  AttentionSpec spec;
  spec.packed = true;
  spec.batch = 3;
  spec.slots_q = {3, 0, 6};
  spec.slots_kv = {5, 2, 6};
  spec.causal = true;
  spec.slack = 1;
  Random random(16);
  AttentionCall packed(spec, random);
  results_of(packed);
  std::int64_t q_begin = spec.slack;
  std::int64_t kv_begin = spec.slack;
  for (std::size_t n = 0; n < 3; ++n) {
    AttentionSpec alone_spec;
    alone_spec.batch = 1;
    alone_spec.seqlen_q = spec.slots_q[n];
    alone_spec.seqlen_kv = spec.slots_kv[n];
    alone_spec.causal = true;
    AttentionCall alone(alone_spec, random);
    const auto copy = [](HostTensor& to, const HostTensor& from, std::int64_t begin) {
      const onchip_tensor view = to.view();
      for (std::int64_t row = 0; row < view.shape[1]; ++row) {
        for (std::int64_t head = 0; head < view.shape[2]; ++head) {
          for (std::int64_t d = 0; d < view.shape[3]; ++d) {
            to.set({0, row, head, d}, from.get({begin + row, head, d}));
          }
        }
      }
    };
    copy(alone.q, packed.q, q_begin);
    copy(alone.d_o, packed.d_o, q_begin);
    copy(alone.k, packed.k, kv_begin);
    copy(alone.v, packed.v, kv_begin);
    results_of(alone);
    const auto expect_rows = [](const HostTensor& one, const HostTensor& all, std::int64_t begin) {
      const onchip_tensor& view = one.view();
      for (std::int64_t row = 0; row < view.shape[1]; ++row) {
        for (std::int64_t head = 0; head < view.shape[2]; ++head) {
          for (std::int64_t d = 0; d < view.shape[3]; ++d) {
            EXPECT_EQ(one.get({0, row, head, d}), all.get({begin + row, head, d}));
          }
        }
      }
    };
    expect_rows(alone.o, packed.o, q_begin);
    expect_rows(alone.dq, packed.dq, q_begin);
    expect_rows(alone.dk, packed.dk, kv_begin);
    expect_rows(alone.dv, packed.dv, kv_begin);
    q_begin += spec.slots_q[n];
    kv_begin += spec.slots_kv[n];
  }
  // The slack rows in front and behind.
  for (const std::int64_t row : {std::int64_t{0}, q_begin}) {
    EXPECT_EQ(packed.o.get({row, 0, 0}), 0.0);
    EXPECT_EQ(packed.dq.get({row, 1, 2}), 0.0);
    EXPECT_EQ(packed.lse.get({0, row}), -kInfinity);
  }
  EXPECT_EQ(packed.dk.get({0, 0, 0}), 0.0);
  EXPECT_EQ(packed.dv.get({kv_begin, 0, 3}), 0.0);
}

}  // namespace
}  // namespace onchip::test
