// attention_decode through the C ABI: what is refused and in which words, that a refused call
// leaves every byte as it was, that an accepted one writes its outputs and the appended rows and
// nothing else, and that every backend and instruction set agrees with the reference.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "support/call.hpp"
#include "support/compare.hpp"
#include "support/decode_call.hpp"

namespace onchip::test {
namespace {

using Bytes = std::vector<std::vector<std::byte>>;

Bytes bytes_of(DecodeCall& call) {
  Bytes bytes;
  for (const auto& [name, tensor] : call.tensors()) bytes.push_back(tensor->bytes());
  return bytes;
}

// ---- contract -----------------------------------------------------------------------------------

// A call with everything in it: two sequences of 5 and 3 cached rows, one new row each.
struct Whole {
  explicit Whole(bool paged) : random(1) {
    q = HostTensor(DType::f32, {2, 1, 4, 8});
    k_cache = HostTensor(DType::f32, paged ? Shape{4, 4, 2, 8} : Shape{3, 8, 2, 8});
    v_cache = HostTensor(DType::f32, paged ? Shape{4, 4, 2, 6} : Shape{3, 8, 2, 6});
    k_new = HostTensor(DType::f32, {2, 1, 2, 8});
    v_new = HostTensor(DType::f32, {2, 1, 2, 6});
    o = HostTensor(DType::f32, {2, 1, 4, 6});
    lse = HostTensor(DType::f32, {2, 4, 1});
    cos = HostTensor(DType::f32, {6, 3});
    sin = HostTensor(DType::f32, {6, 3});
    lengths = HostTensor(DType::i32, {2});
    slots = HostTensor(DType::i32, {2});
    table = HostTensor(DType::i32, {2, 2});
    for (HostTensor* t : {&q, &k_cache, &v_cache, &k_new, &v_new, &cos, &sin}) {
      t->fill([this] { return random.normal(); });
    }
    lengths.fill_integers({5, 3});
    slots.fill_integers({2, 0});
    table.fill_integers({3, 1, 0, -9});
    args.q = q.abi();
    args.k_cache = k_cache.abi();
    args.v_cache = v_cache.abi();
    args.cache_seqlens = lengths.abi();
    args.k_new = k_new.abi();
    args.v_new = v_new.abi();
    args.cache_slot = slots.abi();
    args.page_table = paged ? table.abi() : nullptr;
    args.rotary_cos = cos.abi();
    args.rotary_sin = sin.abi();
    args.o = o.abi();
    args.lse = lse.abi();
    args.options = &options;
  }

  std::vector<HostTensor*> tensors() {
    return {&q, &k_cache, &v_cache, &k_new, &v_new, &o, &lse, &cos, &sin, &lengths, &slots, &table};
  }

  Random random;
  HostTensor q, k_cache, v_cache, k_new, v_new, o, lse, cos, sin, lengths, slots, table;
  onchip_tensor changed{};
  onchip_attention_options options = ONCHIP_ATTENTION_OPTIONS_INIT;
  onchip_attention_decode_args args = ONCHIP_ATTENTION_DECODE_ARGS_INIT;
};

struct Refusal {
  const char* name;
  bool paged;
  const char* message;  // its beginning, behind the operator's name
  std::function<void(Whole&)> change;
};

void PrintTo(const Refusal& refusal, std::ostream* out) { *out << refusal.name; }

std::function<void(Whole&)> reshaped(const onchip_tensor* onchip_attention_decode_args::* field,
                                     const std::function<void(onchip_tensor&)>& change) {
  return [=](Whole& w) {
    w.changed = *(w.args.*field);
    change(w.changed);
    w.args.*field = &w.changed;
  };
}

using Args = onchip_attention_decode_args;

const Refusal kRefusals[] = {
    {"no_q", false, "q: got no tensor", [](Whole& w) { w.args.q = nullptr; }},
    {"no_cache", false, "v_cache: got no tensor", [](Whole& w) { w.args.v_cache = nullptr; }},
    {"no_lengths", false, "cache_seqlens: got no tensor",
     [](Whole& w) { w.args.cache_seqlens = nullptr; }},
    {"no_o", false, "o: got no tensor", [](Whole& w) { w.args.o = nullptr; }},
    {"new_values_missing", false, "v_new: got k_new without v_new, wanted both or neither",
     [](Whole& w) { w.args.v_new = nullptr; }},
    {"new_keys_missing", false, "k_new: got v_new without k_new, wanted both or neither",
     [](Whole& w) { w.args.k_new = nullptr; }},
    {"cache_rank", false, "k_cache: got shape [3, 8, 2], wanted rank 4 [slots, capacity",
     reshaped(&Args::k_cache, [](onchip_tensor& t) { t.rank = 3, t.strides[2] = 1; })},
    {"page_rank", true, "k_cache: got shape [4, 4, 2], wanted rank 4 [pages, page_size",
     reshaped(&Args::k_cache, [](onchip_tensor& t) { t.rank = 3, t.strides[2] = 1; })},
    {"cache_dim", false, "k_cache: got shape [3, 8, 2, 7], wanted [slots, capacity",
     reshaped(&Args::k_cache, [](onchip_tensor& t) { t.shape[3] = 7; })},
    {"lengths_dtype", false, "cache_seqlens: got int64, wanted int32",
     reshaped(&Args::cache_seqlens, [](onchip_tensor& t) { t.dtype = ONCHIP_INT64; })},
    {"lengths_batch", false, "cache_seqlens: got shape [1], wanted [batch] = [2]",
     reshaped(&Args::cache_seqlens, [](onchip_tensor& t) { t.shape[0] = 1; })},
    {"full", false, "cache_seqlens[1]: got 8, wanted 0 to 7: room for 8 rows (capacity)",
     [](Whole& w) { w.lengths.fill_integers({5, 8}); }},
    {"full_pages", true, "cache_seqlens[0]: got 8, wanted 0 to 7: room for 8 rows (max_pages",
     [](Whole& w) { w.lengths.fill_integers({8, 3}); }},
    {"negative", false, "cache_seqlens[0]: got -1, wanted 0 to 7",
     [](Whole& w) { w.lengths.fill_integers({-1, 3}); }},
    {"slot", false, "cache_slot[0]: got 3, wanted -1 (skip) or a slot below 3",
     [](Whole& w) { w.slots.fill_integers({3, 0}); }},
    {"slot_below", true, "cache_slot[1]: got -2, wanted -1 (skip)",
     [](Whole& w) { w.slots.fill_integers({0, -2}); }},
    {"shared_slot", false, "cache_slot[0]: got 2, whose row 3 cache_slot[1] appends",
     [](Whole& w) { w.slots.fill_integers({2, 2}); }},
    {"page", true, "page_table[0, 1]: got 4, wanted a page below 4",
     [](Whole& w) { w.table.fill_integers({3, 4, 0, -9}); }},
    {"shared_page", true, "page_table[0, 1]: got 0, whose row 3 page_table[1, 0] appends",
     [](Whole& w) {
       w.args.rotary_cos = w.args.rotary_sin = nullptr;
       w.table.fill_integers({3, 0, 0, -9});
       w.lengths.fill_integers({7, 3});
     }},
    {"few_slots", false, "k_cache: got 1 slots, wanted one for each of the 2 batch rows",
     [](Whole& w) {
       w.args.cache_slot = nullptr;
       w.changed = *w.args.k_cache;
       w.changed.shape[0] = 1;
       w.args.k_cache = &w.changed;
       static onchip_tensor v;
       v = *w.args.v_cache;
       v.shape[0] = 1;
       w.args.v_cache = &v;
     }},
    {"sine", false, "rotary_sin: got rotary_cos without rotary_sin, wanted both or neither",
     [](Whole& w) { w.args.rotary_sin = nullptr; }},
    {"pairs", false, "rotary_cos: got shape [2, 9], wanted [max_pos, rotary_dim / 2]",
     reshaped(&Args::rotary_cos,
              [](onchip_tensor& t) {
                t.shape[0] = 2;
                t.shape[1] = 9;
              })},
    {"positions", false, "rotary_cos: got 5 positions, wanted 6: sequence 0 reaches that far",
     [](Whole& w) {
       static onchip_tensor sin;
       sin = *w.args.rotary_sin;
       w.changed = *w.args.rotary_cos;
       sin.shape[0] = w.changed.shape[0] = 5;
       w.args.rotary_cos = &w.changed;
       w.args.rotary_sin = &sin;
     }},
    {"interleaved", false, "rotary_interleaved: got 2, wanted 0 or 1",
     [](Whole& w) { w.args.rotary_interleaved = 2; }},
    {"interleaved_alone", false, "rotary_interleaved: got 1 without rotary_cos",
     [](Whole& w) {
       w.args.rotary_cos = w.args.rotary_sin = nullptr;
       w.args.rotary_interleaved = 1;
     }},
    {"reserved", false, "reserved: got 1, wanted 0", [](Whole& w) { w.args.reserved = 1; }},
    {"dropout", false, "dropout_p: got 0.5, wanted 0: decoding has no dropout",
     [](Whole& w) { w.options.dropout_p = 0.5; }},
    {"new_lengths", false, "seqlens_kv: got a tensor without k_new",
     [](Whole& w) {
       w.args.k_new = w.args.v_new = nullptr;
       w.options.seqlens_kv = w.lengths.abi();
     }},
    {"o_in_cache", false, "k_cache: got memory it shares with o",
     [](Whole& w) {
       w.changed = *w.args.o;
       w.changed.data = w.k_cache.view().data;
       w.args.o = &w.changed;
     }},
    {"new_in_cache", false, "k_cache: got memory it shares with k_new",
     [](Whole& w) {
       w.changed = *w.args.k_new;
       w.changed.data = w.k_cache.view().data;
       w.args.k_new = &w.changed;
     }},
    {"cache_over_itself", false, "k_cache: got an output whose elements overlap",
     reshaped(&Args::k_cache, [](onchip_tensor& t) { t.strides[0] = 0; })},
    {"values_in_keys", false, "v_new: got a tensor, with v_cache inside k_cache",
     [](Whole& w) {
       w.changed = *w.args.k_cache;
       w.changed.shape[3] = 6;
       w.args.v_cache = &w.changed;
     }},
    {"short_struct", false, "args.struct_size: got", [](Whole& w) { w.args.struct_size = 64; }},
};

class DecodeRefusals : public ::testing::TestWithParam<Refusal> {};

TEST_P(DecodeRefusals, SayWhyAndWriteNothing) {
  const Refusal& refusal = GetParam();
  Whole whole(refusal.paged);
  onchip_plan planned = ONCHIP_PLAN_INIT;
  ASSERT_EQ(plan(whole.args, &planned), ONCHIP_OK) << onchip_last_error();
  const GuardedMemory workspace = workspace_for(planned);
  refusal.change(whole);
  Bytes before;
  for (HostTensor* tensor : whole.tensors()) before.push_back(tensor->bytes());

  const std::string wanted = std::string("attention_decode: ") + refusal.message;
  onchip_plan untouched = ONCHIP_PLAN_INIT;
  EXPECT_EQ(plan(whole.args, &untouched), ONCHIP_INVALID_ARGUMENT);
  EXPECT_EQ(std::string(onchip_last_error()).substr(0, wanted.size()), wanted);
  EXPECT_EQ(untouched.backend, nullptr);
  EXPECT_EQ(onchip_explain(ONCHIP_ATTENTION_DECODE, &whole.args, nullptr, 0, nullptr),
            ONCHIP_INVALID_ARGUMENT);
  // Values may have changed since the plan: run looks again.
  EXPECT_EQ(run(planned, whole.args, workspace.data()), ONCHIP_INVALID_ARGUMENT);
  std::size_t at = 0;
  for (HostTensor* tensor : whole.tensors()) EXPECT_EQ(tensor->bytes(), before[at++]);
}

INSTANTIATE_TEST_SUITE_P(Contract, DecodeRefusals, ::testing::ValuesIn(kRefusals),
                         [](const auto& test) { return std::string(test.param.name); });

TEST(Decode, APlanServesEveryLengthAndTable) {
  Whole whole(true);
  onchip_plan planned = ONCHIP_PLAN_INIT;
  ASSERT_EQ(plan(whole.args, &planned), ONCHIP_OK) << onchip_last_error();
  const GuardedMemory workspace = workspace_for(planned);
  for (const std::vector<std::int64_t>& lengths :
       {std::vector<std::int64_t>{5, 3}, {0, 0}, {3, 5}, {4, 1}}) {
    whole.lengths.fill_integers(lengths);
    whole.table.fill_integers({0, 2, 3, 1});
    EXPECT_EQ(run(planned, whole.args, workspace.data()), ONCHIP_OK) << onchip_last_error();
  }
}

// ---- random calls -------------------------------------------------------------------------------

struct Results {
  std::vector<double> o, lse;
  std::vector<std::byte> k, v;
};

Results results_of(DecodeCall& call) {
  return {call.o.values(), call.lse.values(), call.k_cache.bytes(), call.v_cache.bytes()};
}

double largest(const std::vector<double>& values) {
  double result = 0.0;
  for (const double x : values) {
    if (std::isfinite(x)) result = std::max(result, std::fabs(x));
  }
  return result;
}

TEST(Decode, RandomCallsAgreeWithTheReferenceAndWriteNothingElse) {
  for (std::uint64_t seed = 0; seed < 300; ++seed) {
    Results wanted;
    for (const char* backend : {"reference", "cpu"}) {
      Random random(seed);
      DecodeCall drawn(random);
      drawn.options.backend = backend;
      const Bytes before = bytes_of(drawn);
      ASSERT_EQ(call(drawn.args()), ONCHIP_OK) << seed << ": " << onchip_last_error();
      const Bytes after = bytes_of(drawn);
      std::size_t at = 0;
      for (const auto& [name, tensor] : drawn.tensors()) {
        const bool written = name == "o" || name == "lse" ||
                             (drawn.k_new.present() && (name == "k_cache" || name == "v_cache"));
        if (!written) {
          EXPECT_EQ(before[at], after[at]) << seed << ", " << name;
        }
        EXPECT_EQ(tensor->broken_guard(), "") << seed << ", " << name;
        ++at;
      }
      const Results results = results_of(drawn);
      if (std::string(backend) == "reference") {
        wanted = results;
        continue;
      }
      EXPECT_EQ(results.k, wanted.k) << seed;
      EXPECT_EQ(results.v, wanted.v) << seed;
      double eps = 1e-5;
      if (drawn.q.dtype() == DType::f64) eps = 1e-11;
      if (drawn.q.dtype() == DType::f16) eps = 2e-3;
      if (drawn.q.dtype() == DType::bf16) eps = 1.6e-2;
      EXPECT_EQ(disagreement("o", results.o, wanted.o, eps * (1e-6 + largest(wanted.o))), "")
          << seed;
      EXPECT_EQ(disagreement("lse", results.lse, wanted.lse,
                             (drawn.q.dtype() == DType::f64 ? 1e-12 : 1e-5) *
                                 std::max(1.0, largest(wanted.lse))),
                "")
          << seed;
    }
  }
}

// Any field of a legal call replaced: refused without a byte changed, or run without a byte changed
// that is no element of its outputs or of the caches it appends to.
TEST(Decode, ChangedCallsAreRefusedOrStayWithinTheirOutputs) {
  int accepted = 0;
  int refused = 0;
  for (std::uint64_t seed = 0; seed < 3000; ++seed) {
    Random random(seed + 77777);
    DecodeCall drawn(random);
    drawn.options.backend = random.one_of<const char*>({"reference", "cpu", nullptr});
    onchip_attention_decode_args args = drawn.args();
    const onchip_tensor** fields[] = {
        &args.q,          &args.k_cache,    &args.v_cache,     &args.cache_seqlens,
        &args.k_new,      &args.v_new,      &args.page_table,  &args.cache_slot,
        &args.rotary_cos, &args.rotary_sin, &args.q_positions, &args.o,
        &args.lse};
    onchip_tensor changed[2];
    for (onchip_tensor& t : changed) {
      const onchip_tensor** field = fields[random.integer(0, 12)];
      if (*field == nullptr) continue;
      t = **field;
      const auto axis = static_cast<std::size_t>(random.integer(0, std::max(t.rank - 1, 0)));
      // What lies in memory may only become a smaller part of itself.
      switch (random.integer(0, 6)) {
        case 0:
          t.shape[axis] = random.integer(0, t.shape[axis]);
          break;
        case 1:
          t.strides[axis] = random.one_of<std::int64_t>({0, t.strides[axis], -t.strides[axis]});
          if (t.strides[axis] < 0) {
            t.data = static_cast<std::byte*>(t.data) -
                     t.strides[axis] * std::max<std::int64_t>(t.shape[axis] - 1, 0) *
                         dtype_size(static_cast<DType>(t.dtype));
          }
          break;
        case 2:
          t.dtype = static_cast<std::int32_t>(random.integer(0, 9));
          if (dtype_size(static_cast<DType>(t.dtype)) >
              dtype_size(static_cast<DType>((*field)->dtype))) {
            t.dtype = (*field)->dtype;
          }
          break;
        case 3:
          t.rank = static_cast<std::int32_t>(random.integer(-1, t.rank));
          break;
        case 4:
          t.device_type = static_cast<std::int32_t>(random.integer(0, 3));
          break;
        case 5:
          *field = nullptr;
          continue;
        default:
          // A value instead: lengths, slots and pages of any size.
          if (t.dtype == ONCHIP_INT32 && element_count(t) > 0) {
            const std::int32_t value = random.one_of<std::int32_t>(
                {-2, -1, 0, 1, 2, 3, 5, 90, 1 << 20, std::numeric_limits<std::int32_t>::max()});
            std::memcpy(t.data, &value, sizeof(value));
          }
          break;
      }
      *field = &t;
    }
    std::vector<std::byte*> written;
    for (const onchip_tensor* t : {args.o, args.lse, args.k_new == nullptr ? nullptr : args.k_cache,
                                   args.k_new == nullptr ? nullptr : args.v_cache}) {
      if (t == nullptr || t->rank < 0 || t->device_type != ONCHIP_DEVICE_CPU ||
          dtype_size(static_cast<DType>(t->dtype)) == 0) {
        continue;
      }
      for_each_element(*t, [&](std::byte* at) {
        for (std::int64_t b = 0; b < dtype_size(static_cast<DType>(t->dtype)); ++b) {
          written.push_back(at + b);
        }
      });
    }
    std::sort(written.begin(), written.end());
    const Bytes before = bytes_of(drawn);
    const onchip_status status = call(args);
    (status == ONCHIP_OK ? accepted : refused) += 1;
    ASSERT_TRUE(status == ONCHIP_OK || status == ONCHIP_INVALID_ARGUMENT ||
                status == ONCHIP_UNSUPPORTED)
        << seed << ": " << onchip_last_error();
    if (status == ONCHIP_INVALID_ARGUMENT) {
      const std::string message = onchip_last_error();
      EXPECT_NE(message.find(": got "), std::string::npos) << message;
      EXPECT_NE(message.find(", wanted "), std::string::npos) << message;
    }
    std::size_t at = 0;
    for (const auto& [name, tensor] : drawn.tensors()) {
      const auto now = tensor->accessible();
      for (std::size_t byte = 0; byte < now.size(); ++byte) {
        if (now[byte] == before[at][byte]) continue;
        ASSERT_EQ(status, ONCHIP_OK) << seed << ": a refused call changed " << name;
        ASSERT_TRUE(std::binary_search(written.begin(), written.end(), &now[byte]))
            << seed << ": " << name << " changed";
      }
      ++at;
    }
  }
  EXPECT_GT(accepted, 600);
  EXPECT_GT(refused, 600);
}

}  // namespace
}  // namespace onchip::test
