// What is refused, in which words, and that a refused call leaves everything as it was.
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <ostream>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "ops/structs.hpp"
#include "support/attention_call.hpp"
#include "support/call.hpp"
#include "support/compare.hpp"

namespace onchip::test {
namespace {

// A dense call with every option that a tensor belongs to, as its caller may change it.
struct Everything {
  Everything() : random(1), call(spec(), random) {
    call.options.backend = "reference";
    forward = call.forward_args();
    backward = call.backward_args();
  }
  static AttentionSpec spec() {
    AttentionSpec s;
    s.num_heads_kv = 2;
    s.bias = s.mask = s.alibi = s.segments = s.sink = s.d_lse = true;
    s.dropout_p = 0.2;
    s.used_q = {5, 3};
    s.used_kv = {7, 2};
    return s;
  }

  Random random;
  AttentionCall call;
  onchip_attention_forward_args forward;
  onchip_attention_backward_args backward;
};

using Tensors = std::vector<std::pair<std::string, HostTensor*>>;

std::vector<std::vector<std::byte>> bytes_of(AttentionCall& call) {
  std::vector<std::vector<std::byte>> result;
  for (const Tensors& tensors : {call.inputs(), call.forward_outputs(), call.backward_outputs()}) {
    for (const auto& [name, tensor] : tensors) result.push_back(tensor->bytes());
  }
  return result;
}

// A copy of one of the call's tensors with something changed, in place of the original.
class Replacement {
 public:
  Replacement(const onchip_tensor*& field, const std::function<void(onchip_tensor&)>& change)
      : tensor_(*field) {
    change(tensor_);
    field = &tensor_;
  }
  Replacement(const Replacement&) = delete;
  Replacement& operator=(const Replacement&) = delete;

 private:
  onchip_tensor tensor_;
};

struct Refusal {
  const char* name;
  // Of plan's message: "<operator>: <argument>: got <got>, wanted <wanted>".
  const char* argument;
  const char* got;
  const char* wanted;
  // Breaks the call, and says "backward" where that is the operator to ask.
  std::function<void(Everything&, std::vector<std::unique_ptr<Replacement>>&)> change;
  bool is_backward = false;
};

void PrintTo(const Refusal& refusal, std::ostream* out) { *out << refusal.name; }

using Kept = std::vector<std::unique_ptr<Replacement>>;

void replace(Kept& kept, const onchip_tensor*& field,
             const std::function<void(onchip_tensor&)>& change) {
  kept.push_back(std::make_unique<Replacement>(field, change));
}

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr double kInfinity = std::numeric_limits<double>::infinity();

const Refusal kRefusals[] = {
    {"no_q", "q", "no tensor", "a tensor", [](Everything& e, Kept&) { e.forward.q = nullptr; }},
    {"no_o", "o", "no tensor", "a tensor", [](Everything& e, Kept&) { e.forward.o = nullptr; }},
    {"q_dtype", "q", "int32", "float64 or float32",
     [](Everything& e, Kept& k) {
       replace(k, e.forward.q, [](onchip_tensor& t) { t.dtype = ONCHIP_INT32; });
     }},
    {"k_dtype", "k", "float16", "float32",
     [](Everything& e, Kept& k) {
       replace(k, e.forward.k, [](onchip_tensor& t) { t.dtype = ONCHIP_FLOAT16; });
     }},
    {"q_rank", "q", "shape [2, 5, 4]", "rank 4 [batch, seqlen, heads, dim]",
     [](Everything& e, Kept& k) {
       replace(k, e.forward.q, [](onchip_tensor& t) {
         t.rank = 3;
         t.strides[2] = 1;
       });
     }},
    {"k_shape", "k", "shape [2, 7, 2, 3]", "[batch, seqlen_kv, num_heads_kv, head_dim_qk]",
     [](Everything& e, Kept& k) {
       replace(k, e.forward.k, [](onchip_tensor& t) { t.shape[3] = 3; });
     }},
    {"v_shape", "v", "shape [2, 6, 2, 4]", "[batch, seqlen_kv, num_heads_kv, head_dim_v]",
     [](Everything& e, Kept& k) {
       replace(k, e.forward.v, [](onchip_tensor& t) { t.shape[1] = 6; });
     }},
    {"heads", "num_heads_q", "3", "a multiple of num_heads_kv = 2",
     [](Everything& e, Kept& k) {
       replace(k, e.forward.q, [](onchip_tensor& t) { t.shape[2] = 3; });
     }},
    {"head_dim_qk", "q", "head_dim_qk = 257", "head_dim_qk at most 256; nearest legal: 256",
     [](Everything& e, Kept& k) {
       replace(k, e.forward.q, [](onchip_tensor& t) { t.shape[3] = 257; });
       replace(k, e.forward.k, [](onchip_tensor& t) { t.shape[3] = 257; });
     }},
    {"head_dim_v", "v", "head_dim_v = 320", "head_dim_v at most 256; nearest legal: 256",
     [](Everything& e, Kept& k) {
       replace(k, e.forward.v, [](onchip_tensor& t) { t.shape[3] = 320; });
     }},
    {"innermost_stride", "v", "innermost stride 2", "innermost stride 1",
     [](Everything& e, Kept& k) {
       replace(k, e.forward.v, [](onchip_tensor& t) { t.strides[3] = 2; });
     }},
    {"o_shape", "o", "shape [2, 5, 4, 3]", "[batch, seqlen, heads, dim] = [2, 5, 4, 4]",
     [](Everything& e, Kept& k) {
       replace(k, e.forward.o, [](onchip_tensor& t) { t.shape[3] = 3; });
     }},
    {"o_dtype", "o", "bfloat16", "float32",
     [](Everything& e, Kept& k) {
       replace(k, e.forward.o, [](onchip_tensor& t) { t.dtype = ONCHIP_BFLOAT16; });
     }},
    {"o_overlaps_itself", "o", "an output whose elements overlap", "strides that keep",
     [](Everything& e, Kept& k) {
       replace(k, e.forward.o, [](onchip_tensor& t) { t.strides[0] = 0; });
     }},
    {"o_aliases_v", "o", "memory it shares with v", "an output apart",
     [](Everything& e, Kept& k) {
       void* v = e.forward.v->data;
       replace(k, e.forward.o, [v](onchip_tensor& t) { t.data = v; });
     }},
    {"o_aliases_lse", "o", "memory it shares with lse", "an output apart",
     [](Everything& e, Kept& k) {
       void* o = e.forward.o->data;
       replace(k, e.forward.lse, [o](onchip_tensor& t) { t.data = o; });
     }},
    {"lse_dtype", "lse", "float64", "float32",
     [](Everything& e, Kept& k) {
       replace(k, e.forward.lse, [](onchip_tensor& t) { t.dtype = ONCHIP_FLOAT64; });
     }},
    {"lse_shape", "lse", "shape [2, 5, 4]", "[batch, num_heads_q, seqlen_q] = [2, 4, 5]",
     [](Everything& e, Kept& k) {
       replace(k, e.forward.lse, [](onchip_tensor& t) { std::swap(t.shape[1], t.shape[2]); });
     }},
    {"k_device", "k", "cuda:1", "q's device cpu",
     [](Everything& e, Kept& k) {
       replace(k, e.forward.k, [](onchip_tensor& t) {
         t.device_type = ONCHIP_DEVICE_CUDA;
         t.device_id = 1;
       });
     }},
    {"scale_infinite", "scale", "inf", "a finite number",
     [](Everything& e, Kept&) { e.call.options.scale = kInfinity; }},
    {"softcap_negative", "softcap", "-1", "0 (none) or a finite cap",
     [](Everything& e, Kept&) { e.call.options.softcap = -1.0; }},
    {"softcap_nan", "softcap", "nan", "0 (none) or a finite cap",
     [](Everything& e, Kept&) { e.call.options.softcap = kNan; }},
    {"dropout_one", "dropout_p", "1", "0 <= p < 1",
     [](Everything& e, Kept&) { e.call.options.dropout_p = 1.0; }},
    {"dropout_nearly_one", "dropout_p", "0.99999999", "a probability that rounds below 1",
     [](Everything& e, Kept&) { e.call.options.dropout_p = 0.99999999; }},
    {"dropout_without_rng", "dropout_rng", "dropout_p = 0.2 without dropout_rng",
     "(seed, offset), int64 [2]",
     [](Everything& e, Kept&) { e.call.options.dropout_rng = nullptr; }},
    {"dropout_offset", "dropout_rng[1]", "4294967296", "an offset from 0 to 2^32 - 1",
     [](Everything& e, Kept&) { e.call.dropout_rng.fill_integers({1, std::int64_t{1} << 32}); }},
    {"window", "window_left", "-2", "a number of keys, or -1",
     [](Everything& e, Kept&) { e.call.options.window_left = -2; }},
    {"causal", "causal", "2", "0 or 1", [](Everything& e, Kept&) { e.call.options.causal = 2; }},
    {"alignment", "alignment", "2", "ONCHIP_BOTTOM_RIGHT (0) or ONCHIP_TOP_LEFT (1)",
     [](Everything& e, Kept&) { e.call.options.alignment = 2; }},
    {"precision", "precision", "-1", "ONCHIP_PRECISION_DEFAULT (0)",
     [](Everything& e, Kept&) { e.call.options.precision = -1; }},
    {"max_seqlen", "max_seqlen_q", "-2", "a length, or -1",
     [](Everything& e, Kept&) { e.call.options.max_seqlen_q = -2; }},
    {"bias_dtype", "bias", "bool", "float64 or float32",
     [](Everything& e, Kept& k) {
       replace(k, e.call.options.bias, [](onchip_tensor& t) { t.dtype = ONCHIP_BOOL; });
     }},
    {"bias_shape", "bias", "shape [2, 4, 5, 6]", "",
     [](Everything& e, Kept& k) {
       replace(k, e.call.options.bias, [](onchip_tensor& t) { t.shape[3] = 6; });
     }},
    {"mask_dtype", "mask", "int32", "bool",
     [](Everything& e, Kept& k) {
       replace(k, e.call.options.mask, [](onchip_tensor& t) { t.dtype = ONCHIP_INT32; });
     }},
    {"alibi_shape", "alibi_slopes", "shape [3]", "[num_heads_q] or [num_seqs, num_heads_q]",
     [](Everything& e, Kept& k) {
       replace(k, e.call.options.alibi_slopes, [](onchip_tensor& t) { t.shape[0] = 3; });
     }},
    {"one_segment_tensor", "kv_segment_ids", "q_segment_ids without kv_segment_ids",
     "both or neither", [](Everything& e, Kept&) { e.call.options.kv_segment_ids = nullptr; }},
    {"segment_shape", "q_segment_ids", "shape [2, 4]", "[batch, seqlen] = [2, 5]",
     [](Everything& e, Kept& k) {
       replace(k, e.call.options.q_segment_ids, [](onchip_tensor& t) { t.shape[1] = 4; });
     }},
    {"sink_shape", "sink", "shape [3]", "[num_heads_q] = [4]",
     [](Everything& e, Kept& k) {
       replace(k, e.call.options.sink, [](onchip_tensor& t) { t.shape[0] = 3; });
     }},
    {"seqlens_dtype", "seqlens_q", "float32", "int32 or int64",
     [](Everything& e, Kept& k) {
       replace(k, e.call.options.seqlens_q, [](onchip_tensor& t) { t.dtype = ONCHIP_FLOAT32; });
     }},
    {"seqlens_too_long", "seqlens_q[1]", "6", "0 to the slot's 5 rows",
     [](Everything& e, Kept&) { e.call.seqlens_q.fill_integers({5, 6}); }},
    {"seqlens_negative", "seqlens_kv[0]", "-1", "0 to the slot's 7 rows",
     [](Everything& e, Kept&) { e.call.seqlens_kv.fill_integers({-1, 6}); }},
    {"cu_seqlens_kv_alone", "cu_seqlens_q", "cu_seqlens_kv without cu_seqlens_q", "both or neither",
     [](Everything& e, Kept&) { e.call.options.cu_seqlens_kv = e.call.seqlens_q.abi(); }},
    {"backend", "backend", "\"fast\"", "",
     [](Everything& e, Kept&) { e.call.options.backend = "fast"; }},
    {"no_d_o", "d_o", "no tensor", "a tensor",
     [](Everything& e, Kept&) { e.backward.d_o = nullptr; }, true},
    {"no_lse", "lse", "no tensor", "a tensor",
     [](Everything& e, Kept&) { e.backward.lse = nullptr; }, true},
    {"dq_shape", "dq", "shape [2, 4, 4, 4]", "[batch, seqlen, heads, dim] = [2, 5, 4, 4]",
     [](Everything& e, Kept& k) {
       replace(k, e.backward.dq, [](onchip_tensor& t) { t.shape[1] = 4; });
     },
     true},
    {"dk_aliases_dv", "dk", "memory it shares with dv", "an output apart",
     [](Everything& e, Kept& k) {
       void* dk = e.backward.dk->data;
       replace(k, e.backward.dv, [dk](onchip_tensor& t) { t.data = dk; });
     },
     true},
    {"dq_aliases_o", "dq", "memory it shares with o", "an output apart",
     [](Everything& e, Kept& k) {
       void* o = e.backward.o->data;
       replace(k, e.backward.dq, [o](onchip_tensor& t) { t.data = o; });
     },
     true},
    {"dbias_without_bias", "dbias", "a tensor without bias", "a bias to differentiate",
     [](Everything& e, Kept&) { e.call.options.bias = nullptr; }, true},
    {"dsink_without_sink", "dsink", "a tensor without sink", "a sink to differentiate",
     [](Everything& e, Kept&) { e.call.options.sink = nullptr; }, true},
    {"dbias_dtype", "dbias", "float16", "float32",
     [](Everything& e, Kept& k) {
       replace(k, e.backward.dbias, [](onchip_tensor& t) { t.dtype = ONCHIP_FLOAT16; });
     },
     true},
    {"d_lse_dtype", "d_lse", "float16", "float32",
     [](Everything& e, Kept& k) {
       replace(k, e.backward.d_lse, [](onchip_tensor& t) { t.dtype = ONCHIP_FLOAT16; });
     },
     true},
};

class Refused : public ::testing::TestWithParam<Refusal> {};

TEST_P(Refused, InItsWordsAndWithoutATrace) {
  const Refusal& refusal = GetParam();
  Everything e;
  ASSERT_EQ(illegal(e.forward), "");
  ASSERT_EQ(illegal(e.backward), "");
  Kept kept;
  refusal.change(e, kept);
  const auto before = bytes_of(e.call);
  onchip_plan planned = ONCHIP_PLAN_INIT;
  const onchip_plan untouched = planned;
  const onchip_status status =
      refusal.is_backward ? plan(e.backward, &planned) : plan(e.forward, &planned);
  EXPECT_EQ(status, ONCHIP_INVALID_ARGUMENT);
  const std::string message = onchip_last_error();
  const std::string op = refusal.is_backward ? "attention_backward" : "attention_forward";
  EXPECT_EQ(message.find(op + ": " + refusal.argument + ": got "), 0u) << message;
  EXPECT_NE(message.find(std::string("got ") + refusal.got), std::string::npos) << message;
  EXPECT_NE(message.find(std::string(", wanted ") + refusal.wanted), std::string::npos) << message;
  EXPECT_EQ(std::memcmp(&planned, &untouched, sizeof(planned)), 0);
  EXPECT_EQ(before, bytes_of(e.call));
  // The independent reading of the contract agrees; a backend's name is not part of it.
  if (std::string(refusal.argument) != "backend") {
    EXPECT_NE(refusal.is_backward ? illegal(e.backward) : illegal(e.forward), "");
  }
}

INSTANTIATE_TEST_SUITE_P(Contract, Refused, ::testing::ValuesIn(kRefusals),
                         [](const auto& test) { return std::string(test.param.name); });

TEST(Contract, PackedLengthsAreRefusedByEntry) {
  Random random(2);
  AttentionSpec spec;
  spec.packed = true;
  spec.batch = 2;
  spec.slots_q = {2, 3};
  spec.slots_kv = {3, 4};
  const auto refusal = [&](const std::vector<std::int64_t>& cu_q, const char* text) {
    AttentionCall call(spec, random);
    call.cu_seqlens_q.fill_integers(cu_q);
    onchip_plan planned = ONCHIP_PLAN_INIT;
    EXPECT_EQ(plan(call.forward_args(), &planned), ONCHIP_INVALID_ARGUMENT);
    EXPECT_NE(std::string(onchip_last_error()).find(text), std::string::npos)
        << onchip_last_error();
  };
  refusal({0, 3, 2}, "cu_seqlens_q[2]: got 2, wanted at least 3");
  refusal({-1, 2, 5}, "cu_seqlens_q[0]: got -1");
  refusal({0, 2, 6}, "cu_seqlens_q[2]: got 6, wanted at least 2 and at most the 5 rows");

  // A mask or bias that does not cover the longest sequence.
  spec.bias = true;
  AttentionCall call(spec, random);
  onchip_tensor bias = call.bias.view();
  bias.shape[3] = 3;
  call.options.bias = &bias;
  onchip_plan planned = ONCHIP_PLAN_INIT;
  onchip_attention_forward_args args = call.forward_args();
  EXPECT_EQ(plan(args, &planned), ONCHIP_INVALID_ARGUMENT);
  EXPECT_EQ(std::string(onchip_last_error()).find("attention_forward: bias: got "), 0u)
      << onchip_last_error();
}

TEST(Contract, LegalButUnsupportedNamesTheReason) {
  Everything e;
  e.call.options.precision = ONCHIP_PRECISION_TF32;
  onchip_plan planned = ONCHIP_PLAN_INIT;
  EXPECT_EQ(plan(e.forward, &planned), ONCHIP_UNSUPPORTED);
  std::string message = onchip_last_error();
  EXPECT_NE(message.find("reference: precision tf32"), std::string::npos) << message;

  e.call.options.backend = nullptr;
  EXPECT_EQ(plan(e.forward, &planned), ONCHIP_UNSUPPORTED);
  message = onchip_last_error();
  EXPECT_NE(message.find("reference: precision tf32"), std::string::npos) << message;
  EXPECT_NE(message.find("cpu: "), std::string::npos) << message;
}

TEST(Contract, ABackendWithoutTheOperatorIsUnsupported) {
  Everything e;
  onchip_plan planned = ONCHIP_PLAN_INIT;
  for (const char* name : {"cuda.sm80", "cuda.sm90"}) {
    e.call.options.backend = name;
    EXPECT_EQ(plan(e.backward, &planned), ONCHIP_UNSUPPORTED);
    EXPECT_EQ(onchip_last_error(),
              "attention_backward: the forced backend does not take this call:\n  " +
                  std::string(name) + ": it does not have this operator");
  }
  e.call.options.backend = "cuda.sm75";
  EXPECT_EQ(plan(e.backward, &planned), ONCHIP_INVALID_ARGUMENT);
  EXPECT_STREQ(onchip_last_error(),
               "attention_backward: backend: got \"cuda.sm75\", wanted cuda.sm90, cuda.sm80, cpu, "
               "reference");
}

TEST(Contract, TheNearestNumberOfHeadsIsNamed) {
  for (const auto& [q, kv, nearest] :
       {std::array<std::int64_t, 3>{8, 3, 9}, {7, 3, 6}, {10, 4, 12}, {1, 4, 4}, {5, 2, 6}}) {
    AttentionSpec spec;
    spec.num_heads_kv = kv;
    spec.group = 1;
    Random random(3);
    AttentionCall call(spec, random);
    onchip_tensor heads = call.q.view();
    heads.shape[2] = q;
    onchip_attention_forward_args args = call.forward_args();
    args.q = &heads;
    onchip_plan planned = ONCHIP_PLAN_INIT;
    EXPECT_EQ(plan(args, &planned), ONCHIP_INVALID_ARGUMENT);
    const std::string message = onchip_last_error();
    EXPECT_TRUE(message.ends_with("; nearest legal: " + std::to_string(nearest))) << message;
  }
}

TEST(Contract, MergeRefusesMisfits) {
  HostTensor o(DType::f32, {2, 5, 3, 4});
  HostTensor lse(DType::f32, {2, 3, 5});
  HostTensor out(DType::f32, {2, 5, 3, 4});
  HostTensor lse_out(DType::f32, {2, 3, 5});
  HostTensor wide(DType::f32, {2, 5, 3, 5});
  HostTensor longest(DType::f32, {2, 5, 3, 513});
  HostTensor lse64(DType::f64, {2, 3, 5});
  onchip_attention_merge_args good = ONCHIP_ATTENTION_MERGE_ARGS_INIT;
  good.o1 = good.o2 = o.abi();
  good.lse1 = good.lse2 = lse.abi();
  good.o = out.abi();
  good.lse = lse_out.abi();
  onchip_plan planned = ONCHIP_PLAN_INIT;
  EXPECT_EQ(plan(good, &planned), ONCHIP_OK) << onchip_last_error();
  const auto expect = [&](auto change, const std::string& text) {
    onchip_attention_merge_args args = good;
    change(args);
    EXPECT_EQ(plan(args, &planned), ONCHIP_INVALID_ARGUMENT);
    EXPECT_EQ(std::string(onchip_last_error()).find("merge: " + text), 0u) << onchip_last_error();
  };
  expect([&](auto& a) { a.o1 = longest.abi(); },
         "o1: got head_dim_v = 513, wanted head_dim_v at most 512");
  expect([&](auto& a) { a.o2 = wide.abi(); }, "o2: got shape [2, 5, 3, 5], wanted ");
  expect([&](auto& a) { a.lse1 = lse64.abi(); }, "lse1: got float64, wanted float32");
  expect([&](auto& a) { a.lse2 = nullptr; }, "lse2: got no tensor, wanted ");
  expect([&](auto& a) { a.o = o.abi(); }, "o: got memory it shares with o1");
  expect([&](auto& a) { a.lse = lse.abi(); }, "lse: got memory it shares with lse1");
  expect([&](auto& a) { a.backend = "fast"; }, "backend: got \"fast\", wanted ");
}

// ---- plans -------------------------------------------------------------------------------------

class Plans : public ::testing::Test {
 protected:
  Plans() : random(3), call(spec(), random) { call.options.backend = "reference"; }
  static AttentionSpec spec() {
    AttentionSpec s;
    s.packed = true;
    s.batch = 2;
    s.slots_q = {4, 4};
    s.slots_kv = {5, 5};
    return s;
  }
  Random random;
  AttentionCall call;
};

TEST_F(Plans, HoldForOtherValuesAndAddresses) {
  const auto args = call.forward_args();
  onchip_plan planned = ONCHIP_PLAN_INIT;
  ASSERT_EQ(plan(args, &planned), ONCHIP_OK) << onchip_last_error();
  EXPECT_STREQ(planned.backend, "reference");
  EXPECT_NE(std::string(planned.kernel), "");
  const GuardedMemory workspace = workspace_for(planned);
  ASSERT_EQ(run(planned, args, workspace.data()), ONCHIP_OK);
  EXPECT_EQ(judge(args), "");

  // Longer sequences than those the plan saw: the workspace must be enough all the same.
  call.cu_seqlens_q.fill_integers({0, 0, 8});
  call.cu_seqlens_kv.fill_integers({0, 0, 10});
  AttentionCall other(spec(), random);
  onchip_attention_forward_args moved = args;
  moved.q = other.q.abi();
  ASSERT_EQ(moved.q->strides[0], args.q->strides[0]);
  ASSERT_EQ(run(planned, moved, workspace.data()), ONCHIP_OK) << onchip_last_error();
  EXPECT_TRUE(workspace_guard_holds(workspace));
  EXPECT_EQ(judge(moved), "");
}

TEST_F(Plans, AreRefusedForOtherArguments) {
  const auto args = call.forward_args();
  onchip_plan planned = ONCHIP_PLAN_INIT;
  ASSERT_EQ(plan(args, &planned), ONCHIP_OK);
  const GuardedMemory workspace = workspace_for(planned);
  const auto before = bytes_of(call);
  const auto refused = [&](const onchip_attention_forward_args& other) {
    EXPECT_EQ(run(planned, other, workspace.data()), ONCHIP_INVALID_ARGUMENT);
    EXPECT_NE(std::string(onchip_last_error()).find("a new plan"), std::string::npos)
        << onchip_last_error();
  };
  call.options.causal = 1;
  refused(args);
  call.options.causal = 0;
  call.options.scale = 0.3;
  refused(args);
  call.options.scale = std::nan("");
  call.options.max_seqlen_q = 4;
  refused(args);
  call.options.max_seqlen_q = -1;

  onchip_attention_forward_args other = args;
  other.lse = nullptr;
  refused(other);
  onchip_tensor tensor = *args.v;
  tensor.strides[0] += 4;
  other = args;
  other.v = &tensor;
  refused(other);
  // An address with another 16-byte alignment.
  alignas(16) std::byte memory[8192];
  tensor = *args.q;
  const auto misalignment = reinterpret_cast<std::uintptr_t>(args.q->data) % 16;
  tensor.data = memory + (misalignment + 4) % 16;
  other = args;
  other.q = &tensor;
  refused(other);
  EXPECT_EQ(before, bytes_of(call));
  EXPECT_EQ(run(planned, args, workspace.data()), ONCHIP_OK) << onchip_last_error();
}

TEST_F(Plans, OfAnotherOperatorOrNoneAreRefused) {
  const auto args = call.forward_args();
  ASSERT_EQ(test::call(args), ONCHIP_OK);
  onchip_plan backward = ONCHIP_PLAN_INIT;
  ASSERT_EQ(plan(call.backward_args(), &backward), ONCHIP_OK) << onchip_last_error();
  const GuardedMemory workspace = workspace_for(backward);
  EXPECT_EQ(run(backward, args, workspace.data()), ONCHIP_INVALID_ARGUMENT);
  const onchip_plan unplanned = ONCHIP_PLAN_INIT;
  EXPECT_EQ(run(unplanned, args, workspace.data()), ONCHIP_INVALID_ARGUMENT);
  EXPECT_NE(std::string(onchip_last_error()).find("memory that holds no plan"), std::string::npos);
}

// ---- structs of other versions -----------------------------------------------------------------

struct Tail {
  onchip_attention_forward_args args;
  std::uint64_t unknown[2];
};

TEST_F(Plans, TakeANewerHeadersStructOnlyWithZeroTail) {
  Tail newer{call.forward_args(), {0, 0}};
  newer.args.struct_size = sizeof(newer);
  onchip_plan planned = ONCHIP_PLAN_INIT;
  EXPECT_EQ(onchip_attention_forward_plan(&newer.args, &planned), ONCHIP_OK) << onchip_last_error();
  newer.unknown[1] = 1;
  EXPECT_EQ(onchip_attention_forward_plan(&newer.args, &planned), ONCHIP_INVALID_ARGUMENT);
  EXPECT_NE(std::string(onchip_last_error()).find("fields this library's version does not know"),
            std::string::npos);
  newer.args.struct_size = 12;
  EXPECT_EQ(onchip_attention_forward_plan(&newer.args, &planned), ONCHIP_INVALID_ARGUMENT);
  EXPECT_NE(std::string(onchip_last_error()).find("args.struct_size: got 12"), std::string::npos);
}

TEST(Structs, AnOlderHeadersMissingFieldsTakeTheirDefaults) {
  struct Grown {
    std::size_t struct_size;
    std::int64_t old_field;
    std::int64_t new_field;
  };
  const Grown defaults = {sizeof(Grown), 1, 2};
  const Grown given = {16, 10, 20};
  const Grown read = ops::read_struct("op", "args", &given, defaults, 16);
  EXPECT_EQ(read.struct_size, sizeof(Grown));
  EXPECT_EQ(read.old_field, 10);
  EXPECT_EQ(read.new_field, 2);
  EXPECT_EQ(ops::read_struct("op", "args", &given, given, 16).new_field, 20);
}

TEST(Structs, NullOptionsAreTheDefaults) {
  Random random(4);
  AttentionSpec spec;
  AttentionCall with(spec, random);
  auto args = with.forward_args();
  ASSERT_EQ(call(args), ONCHIP_OK) << onchip_last_error();
  const std::vector<double> o = with.o.values();
  args.options = nullptr;
  with.o.poison();
  ASSERT_EQ(call(args), ONCHIP_OK) << onchip_last_error();
  EXPECT_EQ(o, with.o.values());
  EXPECT_EQ(judge(args), "");
}

// ---- text --------------------------------------------------------------------------------------

TEST(Text, BuffersGetWhatFitsAndTheWholeLength) {
  Everything e;
  const auto explain = [&](char* text, std::size_t capacity, std::size_t* length) {
    return onchip_explain(ONCHIP_ATTENTION_FORWARD, &e.forward, text, capacity, length);
  };
  const auto describe = [](char* text, std::size_t capacity, std::size_t* length) {
    return onchip_describe(text, capacity, length);
  };
  const std::vector<std::function<onchip_status(char*, std::size_t, std::size_t*)>> calls = {
      explain, describe};
  for (const auto& text_of : calls) {
    std::size_t length = 0;
    ASSERT_EQ(text_of(nullptr, 0, &length), ONCHIP_OK) << onchip_last_error();
    ASSERT_GT(length, 20u);
    std::vector<char> buffer(length + 8, '#');
    ASSERT_EQ(text_of(buffer.data(), length + 1, nullptr), ONCHIP_OK);
    const std::string whole = buffer.data();
    EXPECT_EQ(whole.size(), length);
    EXPECT_EQ(buffer[length + 1], '#');
    for (const std::size_t capacity : {std::size_t{1}, std::size_t{10}, length}) {
      std::fill(buffer.begin(), buffer.end(), '#');
      std::size_t again = 0;
      ASSERT_EQ(text_of(buffer.data(), capacity, &again), ONCHIP_OK);
      EXPECT_EQ(again, length);
      EXPECT_EQ(std::string(buffer.data()), whole.substr(0, capacity - 1));
      EXPECT_EQ(buffer[capacity], '#');
    }
    EXPECT_EQ(text_of(nullptr, 5, &length), ONCHIP_INVALID_ARGUMENT);
  }
}

std::string explained(onchip_operator op, const void* args) {
  std::string text(10000, '\0');
  std::size_t length = 0;
  if (onchip_explain(op, args, text.data(), text.size(), &length) != ONCHIP_OK) {
    return std::string("refused: ") + onchip_last_error();
  }
  text.resize(length);
  return text;
}

TEST(Text, ExplainSaysWhichBackendAndWhyNotTheOthers) {
  Everything e;
  std::string text = explained(ONCHIP_ATTENTION_FORWARD, &e.forward);
  EXPECT_EQ(text.find("attention_forward: reference"), 0u) << text;
  EXPECT_NE(text.find("\n  reference: chosen: "), std::string::npos) << text;
  EXPECT_NE(text.find("\n  cpu: "), std::string::npos) << text;
  EXPECT_TRUE(text.ends_with("\n  cuda.sm80: rejected: it does not have this operator\n")) << text;
  text = explained(ONCHIP_ATTENTION_BACKWARD, &e.backward);
  EXPECT_NE(text.find("\n  reference: chosen: "), std::string::npos) << text;

  e.call.options.precision = ONCHIP_PRECISION_TF32;
  text = explained(ONCHIP_ATTENTION_FORWARD, &e.forward);
  EXPECT_NE(text.find("no backend takes this call"), std::string::npos) << text;
  EXPECT_NE(text.find("reference: rejected: precision tf32"), std::string::npos) << text;

  e.call.options.causal = 7;
  text = explained(ONCHIP_ATTENTION_FORWARD, &e.forward);
  EXPECT_EQ(text.find("refused: attention_forward: causal: got 7"), 0u) << text;
  EXPECT_EQ(explained(99, &e.forward).find("refused: explain: op: got 99"), 0u);
  EXPECT_EQ(explained(ONCHIP_ATTENTION_FORWARD, nullptr).find("refused: attention_forward: args"),
            0u);
}

TEST(Text, ErrorsBelongToTheirThread) {
  EXPECT_EQ(onchip_attention_forward_plan(nullptr, nullptr), ONCHIP_INVALID_ARGUMENT);
  const std::string mine = onchip_last_error();
  EXPECT_NE(mine, "");
  std::thread other([] {
    EXPECT_STREQ(onchip_last_error(), "");
    EXPECT_EQ(onchip_set_num_threads(-5), ONCHIP_INVALID_ARGUMENT);
    EXPECT_EQ(std::string(onchip_last_error()),
              "set_num_threads: num_threads: got -5, wanted 0 (the start value) to 1024");
  });
  other.join();
  EXPECT_EQ(mine, onchip_last_error());
}

TEST(Text, StatusNamesAndVersion) {
  EXPECT_STREQ(onchip_status_name(ONCHIP_OK), "ok");
  EXPECT_STREQ(onchip_status_name(ONCHIP_UNSUPPORTED), "unsupported");
  EXPECT_STREQ(onchip_status_name(1234), "unknown");
  EXPECT_EQ(std::string(onchip_version()), std::to_string(ONCHIP_VERSION_MAJOR) + "." +
                                               std::to_string(ONCHIP_VERSION_MINOR) + "." +
                                               std::to_string(ONCHIP_VERSION_PATCH));
}

}  // namespace
}  // namespace onchip::test
