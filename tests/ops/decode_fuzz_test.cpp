// Structured fuzzing of attention_decode's C ABI. A legal call gets 0 to 3 of its fields or of its
// lengths, slots, pages and positions replaced; pointers stay null or lead to guarded buffers. A
// refused call has changed no byte anywhere. An accepted one keeps within its caches by an
// independent reading of its tables, has written the elements of its outputs, the cached rows that
// it appends and nothing else, and equals the reference.
//
// Every call is drawn from its own number, so that a failing one repeats alone.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <functional>
#include <limits>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "support/call.hpp"
#include "support/compare.hpp"
#include "support/decode_call.hpp"
#include "support/fuzzed.hpp"

namespace onchip::test {
namespace {

using Args = onchip_attention_decode_args;
using Options = onchip_attention_options;

// One tensor argument: the struct that the call sees, and where its address stands.
struct Slot {
  std::string name;
  const onchip_tensor** field;
  onchip_tensor tensor;
};

struct Tally {
  int calls = 0;
  int accepted = 0;
  int changed_accepted = 0;
  int judged = 0;
  int planned_only = 0;
  int refused_runs = 0;
};

class FuzzedDecode {
 public:
  FuzzedDecode(std::uint64_t number, const char* backend)
      : random_(number * 0x9E3779B97F4A7C15u + 11), backend_(backend), call_(random_) {
    args_ = call_.args();
    options_ = call_.options;
    options_.backend = backend;
    for (const auto& [name, tensor] : call_.tensors()) memory_.add(tensor->accessible());
    add_more();
    add_arguments();
  }

  // "" or what went wrong.
  std::string check(Tally& tally) {
    const std::int64_t changes = random_.one_of<std::int64_t>({0, 0, 1, 1, 1, 2, 3});
    for (std::int64_t change = 0; change < changes; ++change) mutate();
    if (!structs_.has_options) {
      // With the struct, all that it points to leaves the call.
      std::erase_if(slots_, [this](const Slot& slot) { return in_options(slot); });
    }
    back_with_memory();
    build_structs();
    const Bytes before = bytes();
    ++tally.calls;

    onchip_plan planned = ONCHIP_PLAN_INIT;
    planned.struct_size = structs_.plan_size;
    const onchip_plan untouched = planned;
    const onchip_status status =
        onchip_attention_decode_plan(args(), structs_.no_plan ? nullptr : &planned);
    if (std::string wrong = changed(before, {}); !wrong.empty()) return "plan changed " + wrong;
    if (status != ONCHIP_OK) {
      return judge_refused_plan(status, changes == 0, backend_, untouched, planned);
    }
    if (structs_.no_plan || structs_.no_args || structs_.plan_size != sizeof(onchip_plan)) {
      return "accepted without plan or args";
    }
    if (std::string why = structs_.bad_sizes(); !why.empty()) return "accepted: " + why;
    if (unbacked_) {
      ++tally.planned_only;
      return "";
    }
    const CachedRows rows = cached_rows(*args());
    if (!rows.illegal.empty()) return "accepted an illegal call: " + rows.illegal;

    const GuardedMemory workspace = workspace_for(planned);
    if (std::string wrong = refused_run(planned, workspace, before, tally); !wrong.empty()) {
      return wrong;
    }
    if (onchip_attention_decode_run(&planned, args(), workspace.data(), nullptr) != ONCHIP_OK) {
      return std::string("planned, then refused: ") + onchip_last_error();
    }
    if (!workspace_guard_holds(workspace)) return "memory behind the workspace was written";
    if (std::string wrong = changed(before, written(rows)); !wrong.empty()) {
      return "run changed " + wrong;
    }
    ++tally.accepted;
    tally.changed_accepted += changes > 0 ? 1 : 0;
    const std::string wrong = judged(before, changes, tally);
    return wrong.empty() ? "" : std::string(planned.backend) + ": " + wrong;
  }

  const std::string& story() const { return story_; }

 private:
  using Bytes = std::vector<std::vector<std::byte>>;

  // ---- a legal call ----------------------------------------------------------------------------

  // Options that DecodeCall leaves alone, and values within keys.
  void add_more() {
    const onchip_tensor& q = *args_.q;
    const std::int64_t longest = std::max<std::int64_t>(90, args_.k_cache->shape[1]);
    const auto keep = [&](HostTensor& tensor, const onchip_tensor*& field, DType dtype,
                          const Shape& shape, const std::function<double()>& next) {
      tensor = HostTensor(dtype, shape);
      tensor.fill(next);
      memory_.add(tensor.accessible());
      field = tensor.abi();
    };
    if (random_.chance(0.2)) {
      keep(mask_, options_.mask, DType::boolean,
           {random_.chance(0.5) ? 1 : q.shape[0], 1, q.shape[1], longest},
           [this] { return random_.chance(0.7) ? 1.0 : 0.0; });
    }
    if (random_.chance(0.2)) {
      keep(alibi_, options_.alibi_slopes, DType::f32, {q.shape[2]},
           [this] { return random_.uniform(); });
    }
    // Fewer new rows than there is room for, and fewer queries.
    if (random_.chance(0.2)) {
      const DType dtype = random_.one_of({DType::i32, DType::i64});
      const auto lengths = [&](HostTensor& tensor, std::int64_t most) {
        std::vector<std::int64_t> values;
        for (std::int64_t n = 0; n < q.shape[0]; ++n) values.push_back(random_.integer(0, most));
        tensor = HostTensor(dtype, {q.shape[0]});
        tensor.fill_integers(values);
        memory_.add(tensor.accessible());
        return tensor.abi();
      };
      options_.seqlens_q = lengths(used_q_, q.shape[1]);
      if (args_.k_new != nullptr) options_.seqlens_kv = lengths(used_kv_, args_.k_new->shape[1]);
    }
    if (args_.v_cache->shape[3] <= args_.k_cache->shape[3] && random_.chance(0.3)) {
      values_in_keys_ = *args_.k_cache;
      values_in_keys_.shape[3] = args_.v_cache->shape[3];
      args_.v_cache = &values_in_keys_;
      args_.v_new = nullptr;
    }
  }

  void add_arguments() {
    add("q", args_.q);
    add("k_cache", args_.k_cache);
    add("v_cache", args_.v_cache);
    add("cache_seqlens", args_.cache_seqlens);
    add("k_new", args_.k_new);
    add("v_new", args_.v_new);
    add("page_table", args_.page_table);
    add("cache_slot", args_.cache_slot);
    add("rotary_cos", args_.rotary_cos);
    add("rotary_sin", args_.rotary_sin);
    add("q_positions", args_.q_positions);
    add("o", args_.o);
    add("lse", args_.lse);
    add("bias", options_.bias);
    add("mask", options_.mask);
    add("alibi_slopes", options_.alibi_slopes);
    add("sink", options_.sink);
    add("seqlens_q", options_.seqlens_q);
    add("seqlens_kv", options_.seqlens_kv);
  }

  void add(const char* name, const onchip_tensor*& field) {
    if (field != nullptr) slots_.push_back({name, &field, *field});
  }

  bool in_options(const Slot& slot) const {
    const auto at = reinterpret_cast<std::uintptr_t>(slot.field);
    return at >= reinterpret_cast<std::uintptr_t>(&options_) &&
           at < reinterpret_cast<std::uintptr_t>(&options_ + 1);
  }

  static bool read_by_plan(const Slot& slot) {
    for (const char* name : {"cache_seqlens", "page_table", "cache_slot", "q_positions",
                             "seqlens_q", "seqlens_kv", "cu_seqlens_q", "cu_seqlens_kv"}) {
      if (slot.name == name) return true;
    }
    return false;
  }

  // ---- changes ---------------------------------------------------------------------------------

  std::int64_t any_integer() {
    return random_.one_of<std::int64_t>({-2, -1, 0, 1, 2, 3, 7, 16, 100, 65535, INT32_MAX,
                                         INT32_MIN, std::int64_t{1} << 40, INT64_MAX, INT64_MIN,
                                         static_cast<std::int64_t>(random_.bits())});
  }
  std::int32_t any_int32() { return static_cast<std::int32_t>(any_integer()); }
  double any_double() {
    return random_.one_of(
        {0.0, -0.0, 1.0, -1.0, 0.5, 1e-300, 1e300, 7.5, std::numeric_limits<double>::infinity(),
         -std::numeric_limits<double>::infinity(), std::numeric_limits<double>::quiet_NaN()});
  }

  Slot& any_slot() {
    const auto last = static_cast<std::int64_t>(slots_.size()) - 1;
    return slots_[static_cast<std::size_t>(random_.integer(0, last))];
  }

  void mutate() {
    switch (random_.integer(0, 9)) {
      case 0:
      case 1:
      case 2:
        return mutate_tensor(any_slot());
      case 3:
      case 4:
        return mutate_option();
      case 5:
      case 6:
      case 7: {
        std::vector<std::string> names;
        for (const Slot& slot : slots_) {
          if (read_by_plan(slot)) names.push_back(slot.name);
        }
        if (names.empty()) return mutate_tensor(any_slot());
        const auto last = static_cast<std::int64_t>(names.size()) - 1;
        value_changes_.push_back(names[static_cast<std::size_t>(random_.integer(0, last))]);
        story_ += "values of " + value_changes_.back() + " ";
        return;
      }
      case 8:
        return mutate_presence();
      default:
        story_ += "struct ";
        return structs_.mutate(random_);
    }
  }

  void mutate_tensor(Slot& slot) {
    onchip_tensor& t = slot.tensor;
    const auto axis = [&] {
      return random_.integer(0, std::clamp<std::int64_t>(t.rank, 1, ONCHIP_MAX_RANK) - 1);
    };
    const std::int64_t what = random_.integer(0, 9);
    story_ += slot.name + " by " + std::to_string(what) + " ";
    switch (what) {
      case 0:
        t.dtype =
            random_.chance(0.7) ? static_cast<std::int32_t>(random_.integer(0, 9)) : any_int32();
        break;
      case 1:
        t.rank =
            random_.chance(0.7) ? static_cast<std::int32_t>(random_.integer(-1, 7)) : any_int32();
        break;
      case 2:
        (random_.chance(0.5) ? t.device_type : t.device_id) =
            random_.chance(0.7) ? static_cast<std::int32_t>(random_.integer(-1, 3)) : any_int32();
        break;
      case 3:
      case 4:
        t.shape[axis()] = random_.chance(0.7) ? random_.integer(0, 6) : any_integer();
        break;
      case 5:
      case 6:
        t.strides[axis()] = random_.chance(0.7) ? random_.integer(-30, 90) : any_integer();
        break;
      case 7:
        t.data = nullptr;
        break;
      case 8:
        t.data = reinterpret_cast<void*>(reinterpret_cast<std::uintptr_t>(t.data) +
                                         static_cast<std::uintptr_t>(random_.integer(-9, 9)));
        break;
      default:
        t.data = any_slot().tensor.data;
        break;
    }
  }

  void mutate_option() {
    const std::int64_t what = random_.integer(0, 13);
    story_ += "option " + std::to_string(what) + " ";
    static const std::string endless(10000, 'x');
    std::int32_t* const flags[] = {&options_.causal,          &options_.alignment,
                                   &options_.precision,       &options_.deterministic,
                                   &options_.batch_invariant, &options_.check,
                                   &args_.rotary_interleaved, &args_.reserved};
    std::int64_t* const numbers[] = {&options_.window_left, &options_.window_right,
                                     &options_.max_seqlen_q, &options_.max_seqlen_kv};
    double* const doubles[] = {&options_.scale, &options_.softcap, &options_.dropout_p};
    if (what < 6) {
      *flags[random_.integer(0, 7)] =
          random_.chance(0.6) ? static_cast<std::int32_t>(random_.integer(0, 1)) : any_int32();
    } else if (what < 9) {
      *numbers[random_.integer(0, 3)] = any_integer();
    } else if (what < 12) {
      *doubles[random_.integer(0, 2)] = any_double();
    } else {
      options_.backend = random_.one_of<const char*>(
          {nullptr, "", "reference", "Reference", "cuda.sm90", "nonsense", endless.c_str()});
    }
  }

  // A tensor goes, or appears in a field that was empty: another argument's, so most often misfit.
  void mutate_presence() {
    if (random_.chance(0.6)) {
      const auto last = static_cast<std::int64_t>(slots_.size()) - 1;
      const std::int64_t at = random_.integer(0, last);
      story_ += slots_[static_cast<std::size_t>(at)].name + " = NULL ";
      *slots_[static_cast<std::size_t>(at)].field = nullptr;
      slots_.erase(slots_.begin() + at);
      return;
    }
    const std::pair<const char*, const onchip_tensor**> fields[] = {
        {"k_new", &args_.k_new},
        {"v_new", &args_.v_new},
        {"page_table", &args_.page_table},
        {"cache_slot", &args_.cache_slot},
        {"rotary_cos", &args_.rotary_cos},
        {"q_positions", &args_.q_positions},
        {"kv_segment_ids", &options_.kv_segment_ids},
        {"dropout_rng", &options_.dropout_rng},
        {"seqlens_q", &options_.seqlens_q},
        {"seqlens_kv", &options_.seqlens_kv},
        {"cu_seqlens_kv", &options_.cu_seqlens_kv}};
    const auto& [name, field] = fields[random_.integer(0, 10)];
    if (*field != nullptr) return mutate_tensor(any_slot());
    slots_.push_back({name, field, any_slot().tensor});
    *field = &slots_.back().tensor;  // a mark that it is there: build_structs() sets it anew
    story_ += std::string("added ") + name + " ";
  }

  // ---- memory ----------------------------------------------------------------------------------

  void back_with_memory() {
    for (Slot& slot : slots_) {
      if (memory_.back(slot.tensor, random_)) continue;
      unbacked_ = true;
      // What plan reads must be there: that tensor goes.
      if (read_by_plan(slot)) {
        slot.tensor.shape[0] = 0;
        slot.tensor.rank = std::max(slot.tensor.rank, 1);
      }
    }
    for (const std::string& name : value_changes_) {
      for (const Slot& slot : slots_) {
        const onchip_tensor& t = slot.tensor;
        if (slot.name != name || !well_formed(t) || empty(t) || t.data == nullptr ||
            t.device_type != ONCHIP_DEVICE_CPU ||
            (t.dtype != ONCHIP_INT32 && t.dtype != ONCHIP_INT64)) {
          continue;
        }
        change_one_value(t, random_.chance(0.7) ? random_.integer(-1, 12) : any_integer(), random_);
      }
    }
  }

  void build_structs() {
    for (Slot& slot : slots_) *slot.field = &slot.tensor;
    options_memory_ =
        std::make_unique<StructMemory>(options_, structs_.options_size, structs_.dirty_tail);
    args_.options =
        structs_.has_options ? static_cast<const Options*>(options_memory_->data()) : nullptr;
    args_memory_ = std::make_unique<StructMemory>(args_, structs_.args_size, structs_.dirty_tail);
  }

  const Args* args() const {
    return structs_.no_args ? nullptr : static_cast<const Args*>(args_memory_->data());
  }

  // ---- nothing else changes --------------------------------------------------------------------

  // Every buffer, and the structs last.
  std::vector<std::span<std::byte>> watched() {
    std::vector<std::span<std::byte>> all = memory_.buffers();
    all.push_back(options_memory_->accessible());
    all.push_back(args_memory_->accessible());
    for (Slot& slot : slots_) all.push_back(std::as_writable_bytes(std::span(&slot.tensor, 1)));
    return all;
  }

  Bytes bytes() {
    Bytes result;
    for (const auto& buffer : watched()) result.emplace_back(buffer.begin(), buffer.end());
    return result;
  }

  // Elements of the outputs, and of the rows that are appended: sorted addresses of bytes.
  std::vector<const std::byte*> written(const CachedRows& rows) const {
    std::vector<const std::byte*> all;
    const auto add_elements = [&](const onchip_tensor* t) {
      if (t == nullptr) return;
      const std::int64_t size = dtype_size(static_cast<DType>(t->dtype));
      for_each_element(*t, [&](std::byte* at) {
        for (std::int64_t byte = 0; byte < size; ++byte) all.push_back(at + byte);
      });
    };
    add_elements(args()->o);
    add_elements(args()->lse);
    for (const auto& [block, row] : rows.appended) {
      for (const onchip_tensor* cache : {args()->k_cache, args()->v_cache}) {
        onchip_tensor part = *cache;
        part.data =
            static_cast<std::byte*>(part.data) + (block * part.strides[0] + row * part.strides[1]) *
                                                     dtype_size(static_cast<DType>(part.dtype));
        part.shape[0] = part.shape[1] = 1;
        add_elements(&part);
      }
    }
    std::sort(all.begin(), all.end());
    return all;
  }

  // "" unless a byte differs that is none of `written`.
  std::string changed(const Bytes& before, const std::vector<const std::byte*>& written) {
    const auto all = watched();
    for (std::size_t b = 0; b < all.size(); ++b) {
      for (std::size_t i = 0; i < all[b].size(); ++i) {
        if (all[b][i] == before[b][i]) continue;
        if (std::binary_search(written.begin(), written.end(), &all[b][i])) continue;
        return "byte " + std::to_string(i) + " of buffer " + std::to_string(b);
      }
    }
    return "";
  }

  // ---- the calls -------------------------------------------------------------------------------

  // One way of misusing run, or none: refused, and nothing written.
  std::string refused_run(const onchip_plan& planned, const GuardedMemory& workspace,
                          const Bytes& before, Tally& tally) {
    RunArguments misused{planned, nullptr, args(), workspace.data(), nullptr};
    misused.given_plan = &misused.plan;
    // May be a shorter struct where the call does not have it.
    auto* options = structs_.has_options ? static_cast<Options*>(options_memory_->data()) : nullptr;
    const double planned_scale = structs_.has_options ? options->scale : 0.0;
    // One way more is another scale than the planned one; the last two are none.
    const std::int64_t way = random_.integer(0, kWaysToMisuseRun + 2);
    if (way < kWaysToMisuseRun) {
      if (!misuse_run(way, misused, random_)) return "";
    } else if (way == kWaysToMisuseRun && structs_.has_options) {
      options->scale = planned_scale == 0.3125 ? 0.4375 : 0.3125;
    } else {
      return "";
    }
    const onchip_status status =
        onchip_attention_decode_run(misused.given_plan, static_cast<const Args*>(misused.given),
                                    misused.workspace, misused.stream);
    if (structs_.has_options) options->scale = planned_scale;
    ++tally.refused_runs;
    if (status != ONCHIP_INVALID_ARGUMENT) return "a misused run was not refused";
    if (std::string wrong = changed(before, {}); !wrong.empty()) {
      return "a refused run changed " + wrong;
    }
    return judge_refusal(status);
  }

  // Caches to the byte as the reference leaves them, o and lse near its own. Where those are no
  // numbers (poison in rows that a changed length shows, a scale of infinity) there is nothing to
  // compare with.
  std::string judged(const Bytes& before, std::int64_t changes, Tally& tally) {
    const std::vector<double> o = read_values(*args()->o);
    const std::vector<double> lse = lse_values();
    const Bytes after = bytes();
    const auto all = watched();
    for (std::size_t b = 0; b < all.size(); ++b) {
      std::copy(before[b].begin(), before[b].end(), all[b].begin());
    }
    Options options = structs_.has_options ? options_ : Options ONCHIP_ATTENTION_OPTIONS_INIT;
    options.struct_size = sizeof(options);
    options.backend = "reference";
    Args again = args_;
    again.struct_size = sizeof(again);
    again.options = &options;
    if (call(again) != ONCHIP_OK) {
      return std::string("the reference refuses what was accepted: ") + onchip_last_error();
    }
    const std::vector<double> wanted_o = read_values(*args()->o);
    const std::vector<double> wanted_lse = lse_values();
    constexpr double kMinusInfinity = -std::numeric_limits<double>::infinity();
    const auto number = [](double x) { return std::fabs(x) < 1e30; };
    const auto number_or_nothing = [&](double x) { return number(x) || x == kMinusInfinity; };
    if (!std::all_of(wanted_o.begin(), wanted_o.end(), number) ||
        !std::all_of(wanted_lse.begin(), wanted_lse.end(), number_or_nothing)) {
      return changes == 0 ? "outputs of a legal call are no numbers" : "";
    }
    ++tally.judged;
    if (std::string wrong = changed(after, written({})); !wrong.empty()) {
      return wrong + " is not as the reference leaves it";
    }
    const auto dtype = static_cast<DType>(args()->q->dtype);
    double eps = 1e-5;
    if (dtype == DType::f64) eps = 1e-11;
    if (dtype == DType::f16) eps = 2e-3;
    if (dtype == DType::bf16) eps = 1.6e-2;
    // Rounding errors of scores grow with them.
    const double sharpness = std::isnan(options.scale) ? 1.0 : 10.0 * std::fabs(options.scale);
    const auto largest = [&](const std::vector<double>& values) {
      double result = 1e-6;
      for (const double x : values) {
        if (number(x)) result = std::max(result, std::fabs(x));
      }
      return result;
    };
    std::string wrong =
        disagreement("o", o, wanted_o, eps * std::max(1.0, sharpness) * largest(wanted_o));
    if (!wrong.empty()) return wrong;
    return disagreement("lse", lse, wanted_lse,
                        (dtype == DType::f64 ? 1e-12 : 1e-5) * std::max(1.0, largest(wanted_lse)));
  }

  std::vector<double> lse_values() const {
    return args()->lse == nullptr ? std::vector<double>() : read_values(*args()->lse);
  }

  Random random_;
  const char* backend_;
  DecodeCall call_;
  HostTensor mask_, alibi_, used_q_, used_kv_;
  onchip_tensor values_in_keys_{};
  Args args_ = ONCHIP_ATTENTION_DECODE_ARGS_INIT;
  Options options_ = ONCHIP_ATTENTION_OPTIONS_INIT;
  std::string story_;
  FuzzedStructs structs_{sizeof(Args), true};
  bool unbacked_ = false;
  std::vector<Slot> slots_;
  std::vector<std::string> value_changes_;
  FuzzedMemory memory_;
  std::unique_ptr<StructMemory> args_memory_;
  std::unique_ptr<StructMemory> options_memory_;
};

class DecodeFuzz : public ::testing::TestWithParam<const char*> {};

TEST_P(DecodeFuzz, RefusedChangesNothingAcceptedIsRight) {
  const std::string name = GetParam();
  const char* backend = name == "automatic" ? nullptr : GetParam();
  const bool long_run = std::getenv("ONCHIP_TEST_LONG") != nullptr;
  const std::uint64_t calls = long_run ? 200000 : 3000;
  // Under sanitizers time ends the run first: processor time, so that a busy machine does not.
  const double budget_seconds = long_run ? 60.0 : 10.0;
  const std::clock_t start = std::clock();
  Tally tally;
  for (std::uint64_t number = 0; number < calls; ++number) {
    const auto spent = static_cast<double>(std::clock() - start) / CLOCKS_PER_SEC;
    if (spent > budget_seconds) break;
    FuzzedDecode fuzzed(number, backend);
    const std::string wrong = fuzzed.check(tally);
    ASSERT_EQ(wrong, "") << "call " << number << ", changed: " << fuzzed.story();
  }
  std::printf(
      "%d calls, %d accepted (%d of them changed, %d compared), %d only planned, %d refused runs\n",
      tally.calls, tally.accepted, tally.changed_accepted, tally.judged, tally.planned_only,
      tally.refused_runs);
  EXPECT_GE(tally.calls, 200);
  EXPECT_GE(tally.accepted, tally.calls * 3 / 10);
  EXPECT_GE(tally.changed_accepted, tally.calls / 20);
  EXPECT_GE(tally.judged, tally.accepted * 3 / 4);
  EXPECT_GT(tally.refused_runs, 0);
}

INSTANTIATE_TEST_SUITE_P(Backends, DecodeFuzz, ::testing::Values("reference", "cpu", "automatic"),
                         [](const auto& test) { return std::string(test.param); });

}  // namespace
}  // namespace onchip::test
