// The CPU merge on every instruction set.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "core/thread_pool.hpp"
#include "cpu/forced_isa.hpp"
#include "support/attention_call.hpp"
#include "support/compare.hpp"

namespace onchip::test {
namespace {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr double kMinusInfinity = -std::numeric_limits<double>::infinity();

class MergeOn : public EachIsa {
 protected:
  void TearDown() override { set_num_threads(0); }
};
ONCHIP_FOR_EACH_ISA(MergeOn);

struct MergeCall {
  MergeCall(DType dtype, const Shape& rows, Random& random)
      : o1(dtype, rows), o2(dtype, rows), o(dtype, rows) {
    Shape scalars(rows.begin(), rows.end() - 1);
    std::swap(scalars[scalars.size() - 1], scalars[scalars.size() - 2]);
    const DType lse_dtype = dtype == DType::f64 ? DType::f64 : DType::f32;
    for (HostTensor* tensor : {&lse1, &lse2, &lse}) *tensor = HostTensor(lse_dtype, scalars);
    for (HostTensor* tensor : {&o1, &o2}) tensor->fill([&] { return random.normal(); });
    for (HostTensor* tensor : {&lse1, &lse2}) {
      tensor->fill([&] { return random.chance(0.2) ? kMinusInfinity : 5.0 * random.normal(); });
    }
  }

  onchip_attention_merge_args args() const {
    onchip_attention_merge_args result = ONCHIP_ATTENTION_MERGE_ARGS_INIT;
    result.o1 = o1.abi();
    result.lse1 = lse1.abi();
    result.o2 = o2.abi();
    result.lse2 = lse2.abi();
    result.o = o.abi();
    result.lse = lse.abi();
    return result;
  }

  HostTensor o1, o2, o, lse1, lse2, lse;
};

TEST_P(MergeOn, RandomRows) {
  Random random(1);
  for (const DType dtype : {DType::f64, DType::f32, DType::f16, DType::bf16}) {
    for (const Shape& rows :
         {Shape{2, 5, 3, 7}, Shape{1, 200, 2, 64}, Shape{130, 2, 33}, Shape{3, 0, 2, 8},
          Shape{4, 3, 0}, Shape{1, 1, 1, 1}, Shape{2, 3, 2, 200}}) {
      MergeCall merge(dtype, rows, random);
      ASSERT_EQ(run_forced(merge.args(), GetParam()), "");
      ASSERT_EQ(judge(merge.args()), "") << dtype_name(dtype);
      EXPECT_EQ(merge.o.broken_guard(), "");
      EXPECT_EQ(merge.lse.broken_guard(), "");
    }
  }
}

TEST_P(MergeOn, EmptyPartsHaveNoInfluence) {
  Random random(2);
  for (const DType dtype : {DType::f64, DType::f32, DType::f16, DType::bf16}) {
    MergeCall merge(dtype, {1, 3, 1, 21}, random);
    merge.lse1.fill_from({1.5, kMinusInfinity, kMinusInfinity});
    merge.lse2.fill_from({kMinusInfinity, -2.0, kMinusInfinity});
    for (std::int64_t d = 0; d < 21; ++d) {
      merge.o2.set({0, 0, 0, d}, kNan);
      merge.o1.set({0, 1, 0, d}, kNan);
      merge.o1.set({0, 2, 0, d}, kNan);
      merge.o2.set({0, 2, 0, d}, kNan);
    }
    ASSERT_EQ(run_forced(merge.args(), GetParam()), "");
    for (std::int64_t d = 0; d < 21; ++d) {
      EXPECT_EQ(merge.o.get({0, 0, 0, d}), merge.o1.get({0, 0, 0, d}));
      EXPECT_EQ(merge.o.get({0, 1, 0, d}), merge.o2.get({0, 1, 0, d}));
      EXPECT_EQ(merge.o.get({0, 2, 0, d}), 0.0);
    }
    EXPECT_EQ(merge.lse.values(), (std::vector<double>{1.5, -2.0, kMinusInfinity}));
  }
}

TEST_P(MergeOn, ANanIsNotLost) {
  Random random(3);
  MergeCall merge(DType::f32, {1, 2, 1, 20}, random);
  merge.lse1.fill_from({kNan, 1.0});
  merge.lse2.fill_from({0.0, 0.0});
  merge.o2.set({0, 1, 0, 17}, kNan);
  ASSERT_EQ(run_forced(merge.args(), GetParam()), "");
  EXPECT_EQ(judge(merge.args()), "");
  EXPECT_TRUE(std::isnan(merge.lse.get({0, 0, 0})));
  EXPECT_TRUE(std::isnan(merge.o.get({0, 0, 0, 0})));
  EXPECT_TRUE(std::isnan(merge.o.get({0, 1, 0, 17})));
  EXPECT_FALSE(std::isnan(merge.o.get({0, 1, 0, 16})));
}

TEST_P(MergeOn, VeryDifferentParts) {
  Random random(4);
  MergeCall merge(DType::f32, {1, 4, 1, 5}, random);
  merge.lse1.fill_from({1e30, -1e30, 3.0e38, 100.0});
  merge.lse2.fill_from({0.0, -2e30, -3.0e38, -50.0});
  ASSERT_EQ(run_forced(merge.args(), GetParam()), "");
  EXPECT_EQ(merge.o.values(), merge.o1.values());
  EXPECT_EQ(merge.lse.values(), merge.lse1.values());
}

// Split keys, forward on each half, merge: one pass over all keys.
TEST_P(MergeOn, MergedHalvesAreTheWhole) {
  Random random(5);
  AttentionSpec spec;
  spec.batch = 2;
  spec.seqlen_q = 40;
  spec.seqlen_kv = 150;
  spec.head_dim_qk = spec.head_dim_v = 24;
  AttentionCall whole(spec, random);
  ASSERT_EQ(run_forced(whole.forward_args(), GetParam()), "");

  MergeCall merge(DType::f32, {2, 40, 2, 24}, random);
  for (const int half : {0, 1}) {
    const std::int64_t split = 70;
    onchip_tensor k = whole.k.view();
    onchip_tensor v = whole.v.view();
    for (onchip_tensor* tensor : {&k, &v}) {
      tensor->shape[1] = half == 0 ? split : spec.seqlen_kv - split;
      if (half == 1) {
        tensor->data = static_cast<float*>(tensor->data) + split * tensor->strides[1];
      }
    }
    onchip_attention_forward_args args = whole.forward_args();
    args.k = &k;
    args.v = &v;
    args.o = half == 0 ? merge.o1.abi() : merge.o2.abi();
    args.lse = half == 0 ? merge.lse1.abi() : merge.lse2.abi();
    ASSERT_EQ(run_forced(args, GetParam()), "");
  }
  ASSERT_EQ(run_forced(merge.args(), GetParam()), "");
  EXPECT_EQ(disagreement("o", merge.o.values(), whole.o.values(), 1e-6), "");
  EXPECT_EQ(disagreement("lse", merge.lse.values(), whole.lse.values(), 2e-6), "");
}

TEST_P(MergeOn, BitsDoNotDependOnThreads) {
  Random random(6);
  MergeCall merge(DType::f32, {2, 333, 3, 40}, random);
  std::vector<std::byte> first;
  for (const std::int32_t threads : {1, 2, 3}) {
    set_num_threads(threads);
    merge.o.poison();
    ASSERT_EQ(run_forced(merge.args(), GetParam()), "");
    if (first.empty()) first = merge.o.bytes();
    ASSERT_TRUE(first == merge.o.bytes());
  }
}

}  // namespace
}  // namespace onchip::test
