// Structured fuzzing of the C ABI of linear attention. A legal call of any operator gets 0 to 3 of
// its fields replaced. A refused call has changed no byte anywhere and has a message that names the
// operator; an accepted one has written the elements of its outputs, all of them, and nothing else,
// nor any byte behind the planned workspace. Every call is drawn from its own number, so that a
// failing one repeats alone.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "core/linear.hpp"
#include "ops/linear_table.hpp"
#include "support/call.hpp"
#include "support/host_tensor.hpp"
#include "support/random.hpp"

namespace onchip::test {
namespace {

enum class Phase { forward, backward, step };

struct Argument {
  std::string name;
  const onchip_tensor** field;
  HostTensor memory;
  onchip_tensor tensor;
  bool output;
};

class FuzzedCall {
 public:
  explicit FuzzedCall(std::uint64_t number) : random_(number * 0x9E3779B97F4A7C15u + 3) {
    phase_ = random_.one_of({Phase::forward, Phase::backward, Phase::step});
    options_.op = static_cast<std::int32_t>(random_.integer(1, kOperators));
    row_ = &ops::linear_row("fuzz", options_.op);
    draw();
  }

  // "" or what went wrong.
  std::string check() {
    const std::int64_t mutations = random_.one_of<std::int64_t>({0, 0, 1, 1, 2, 3});
    for (std::int64_t m = 0; m < mutations; ++m) mutate();
    for (Argument& argument : arguments_) *argument.field = &argument.tensor;
    connect();
    remember();
    onchip_plan planned = ONCHIP_PLAN_INIT;
    const onchip_status status = plan(planned);
    if (std::string wrong = changed(false); !wrong.empty()) return "plan changed " + wrong;
    if (status != ONCHIP_OK) {
      if (mutations == 0) return std::string("a legal call was refused: ") + onchip_last_error();
      if (status != ONCHIP_INVALID_ARGUMENT && status != ONCHIP_UNSUPPORTED) {
        return "status " + std::to_string(status);
      }
      const std::string message = onchip_last_error();
      const bool known = options_.op >= 1 && options_.op <= kOperators;
      const bool names = message.starts_with("linear_") ||
                         (known && message.starts_with(ops::linear_row("fuzz", options_.op).name));
      return names ? "" : "message without operator: " + message;
    }
    ++accepted;
    if (unbacked_) return "";  // legal by its shape, but not within the memory that is there
    const GuardedMemory workspace = workspace_for(planned);
    if (run(planned, workspace.data()) != ONCHIP_OK) {
      return std::string("planned, then refused: ") + onchip_last_error();
    }
    if (!workspace_guard_holds(workspace)) return "memory behind the workspace was written";
    if (std::string wrong = changed(true); !wrong.empty()) return "run changed " + wrong;
    return mutations == 0 ? unwritten() : "";
  }

  const std::string& story() const { return story_; }
  static inline int accepted = 0;

 private:
  // ---- a legal call ----------------------------------------------------------------------------

  void draw() {
    dtype_ = random_.one_of({DType::f64, DType::f32, DType::f16, DType::bf16});
    state_dtype_ = dtype_ == DType::f64 ? DType::f64 : DType::f32;
    heads_k_ = random_.integer(1, 2);
    heads_v_ = heads_k_ * random_.integer(1, 2);
    dk_ = random_.integer(1, 5);
    dv_ = random_.integer(1, 5);
    num_seqs_ = random_.integer(1, 3);
    length_ = random_.integer(0, 20);
    packed_ = phase_ != Phase::step && random_.chance(0.4);
    if ((row_->options & ops::kTakesHouseholder) != 0) {
      options_.num_householder = random_.integer(1, 3);
    }
    draw_options();
    if (packed_) {
      std::vector<std::int64_t> starts = {random_.integer(0, 2)};
      for (std::int64_t n = 0; n < num_seqs_; ++n) {
        starts.push_back(starts.back() + random_.integer(0, 8));
      }
      length_ = starts.back() + random_.integer(0, 2);
      add_integers("cu_seqlens", &options_.cu_seqlens, starts);
    } else if (phase_ != Phase::step && random_.chance(0.3)) {
      std::vector<std::int64_t> used;
      for (std::int64_t n = 0; n < num_seqs_; ++n) used.push_back(random_.integer(0, length_));
      add_integers("seqlens", &options_.seqlens, used);
    }
    const bool raw = random_.chance(0.5);
    for (const ops::LinearTensorRow& tensor : row_->tensors) {
      if (skipped(tensor, raw)) continue;
      add(std::string(tensor.name()), &(inputs_.*tensor.role.given), shape_of(tensor.shape),
          tensor_dtype(tensor), false);
    }
    const Shape values = shape_of(ops::LinearShape::value);
    if (phase_ == Phase::forward) {
      add("o", &forward_.o, values, dtype_, true);
      if (random_.chance(0.5))
        add_state("initial_state", forward_.initial_state, num_seqs_, false, 3);
      if (random_.chance(0.5)) add_state("final_state", forward_.final_state, num_seqs_, true, 3);
    } else if (phase_ == Phase::backward) {
      add("d_o", &backward_.d_o, values, dtype_, false);
      const bool initial = random_.chance(0.5);
      if (initial) {
        add_state("initial_state", backward_.initial_state, num_seqs_, false, 3);
        add_state("dinitial_state", backward_.dinitial_state, num_seqs_, true, 3);
      }
      if (random_.chance(0.5))
        add_state("d_final_state", backward_.d_final_state, num_seqs_, false, 2);
      const std::size_t count = arguments_.size();
      for (const ops::LinearTensorRow& tensor : row_->tensors) {
        if (inputs_.*tensor.role.given == nullptr || random_.chance(0.1)) continue;
        for (std::size_t i = 0; i < count; ++i) {
          if (arguments_[i].name != tensor.name()) continue;
          add(tensor.gradient_name, &(gradients_.*tensor.role.given), shape_of(tensor.shape),
              arguments_[i].memory.dtype(), true);
          break;
        }
      }
    } else {
      add("o", &step_.o, values, dtype_, true);
      const bool indexed = random_.chance(0.5);
      add_state("state", step_.state, indexed ? num_seqs_ + 2 : num_seqs_, true, 3);
      if (indexed) {
        std::vector<std::int64_t> slots;
        for (std::int64_t n = 0; n < num_seqs_; ++n) slots.push_back(random_.chance(0.2) ? -1 : n);
        add_integers("state_indices", &step_.state_indices, slots);
      }
    }
    // The vector does not move any more: fields may point into it.
    for (Argument& argument : arguments_) argument.tensor = argument.memory.view();
  }

  void draw_options() {
    if ((row_->options & ops::kTakesNormalize) != 0) {
      options_.normalize = static_cast<std::int32_t>(random_.integer(-1, 1));
    }
    if ((row_->options & ops::kTakesGateOptions) != 0) {
      options_.gate = random_.one_of({ONCHIP_GATE_EXP, ONCHIP_GATE_SIGMOID});
      if (options_.gate == ONCHIP_GATE_EXP) options_.normalize = -1;
      if (options_.gate == ONCHIP_GATE_EXP || options_.normalize == 1) options_.eps = 0.1;
    }
    if ((row_->options & ops::kTakesTimeStep) != 0) options_.dt_max = 2.0;
    if ((row_->options & ops::kTakesL2Norm) != 0 && random_.chance(0.5)) options_.qk_l2norm = 1;
    if (random_.chance(0.3)) options_.state_layout = random_.one_of({1, 2});
    if (random_.chance(0.3) && phase_ != Phase::step) options_.chunk_len = 16;
    options_.backend = "reference";
  }

  bool skipped(const ops::LinearTensorRow& tensor, bool raw) {
    const bool raw_gates = (row_->options & ops::kTakesRawGates) != 0;
    const std::string_view name = tensor.name();
    if (raw_gates && (name == "A_log" || name == "dt_bias")) return !raw;
    if (raw_gates && name == "log_decay") return false;
    return tensor.optional && random_.chance(0.4);
  }

  DType tensor_dtype(const ops::LinearTensorRow& tensor) {
    const auto* field = &tensor.role;
    const bool operand = field->given == &onchip_linear_tensors::q ||
                         field->given == &onchip_linear_tensors::k ||
                         field->given == &onchip_linear_tensors::v;
    return operand ? dtype_ : random_.one_of({dtype_, DType::f32, DType::f64});
  }

  Shape shape_of(ops::LinearShape shape) const {
    Shape rows = phase_ == Phase::step ? Shape{num_seqs_}
                 : packed_             ? Shape{length_}
                                       : Shape{num_seqs_, length_};
    const auto with = [&rows](std::initializer_list<std::int64_t> rest) {
      rows.insert(rows.end(), rest);
      return rows;
    };
    const auto token_rows = [&] {
      if (phase_ == Phase::step) {
        rows.push_back(options_.num_householder);
      } else {
        rows.back() *= options_.num_householder;
      }
    };
    switch (shape) {
      case ops::LinearShape::key_rows:
        token_rows();
        [[fallthrough]];
      case ops::LinearShape::key:
        return with({heads_k_, dk_});
      case ops::LinearShape::value_rows:
        token_rows();
        [[fallthrough]];
      case ops::LinearShape::value:
        return with({heads_v_, dv_});
      case ops::LinearShape::scalar_rows:
        token_rows();
        [[fallthrough]];
      case ops::LinearShape::scalar:
      case ops::LinearShape::scalar_or_head:
        return with({heads_v_});
      case ops::LinearShape::slots:
        return with({heads_v_, kSlots});
      case ops::LinearShape::channel:
        return with({heads_v_, dk_});
      case ops::LinearShape::head:
      case ops::LinearShape::head_or_channel:
        return {heads_v_};
      case ops::LinearShape::head_key:
        return {heads_v_, dk_};
    }
    return {};
  }

  void add(const std::string& name, const onchip_tensor** field, const Shape& shape, DType dtype,
           bool output) {
    Argument argument{name, field, HostTensor(dtype, shape), {}, output};
    const bool decay = name == "log_decay" || name == "A";
    // No sum of weights near 0.
    const bool positive = options_.op == ONCHIP_LINEAR_ATTENTION &&
                          (name == "q" || name == "k" || name.ends_with("state"));
    if (!output || name == "state") {
      argument.memory.fill([&] {
        const double x = 0.3 * random_.normal();
        if (positive) return std::fabs(x) + 0.1;
        return decay ? -std::fabs(x) : x;
      });
    }
    arguments_.push_back(std::move(argument));
    *field = &arguments_.back().tensor;  // a mark: set anew before the call
  }

  void add_integers(const char* name, const onchip_tensor** field,
                    const std::vector<std::int64_t>& values) {
    Argument argument{
        name, field, HostTensor(DType::i32, {static_cast<std::int64_t>(values.size())}), {}, false};
    argument.memory.fill_integers(values);
    arguments_.push_back(std::move(argument));
    *field = &arguments_.back().tensor;
  }

  void add_state(const char* name, const onchip_tensor* (&parts)[ONCHIP_LINEAR_STATE_PARTS],
                 std::int64_t count, bool output, std::size_t most) {
    const bool gates = (row_->options & ops::kTakesGateOptions) != 0;
    const bool exponential = gates && options_.gate == ONCHIP_GATE_EXP;
    const std::size_t wanted = exponential ? 3 : options_.normalize == 1 ? 2 : 1;
    const bool vk = options_.state_layout == ONCHIP_STATE_VK ||
                    (options_.state_layout == ONCHIP_STATE_DEFAULT && row_->vk);
    if (options_.op == ONCHIP_GSA) {
      add(name, &parts[0],
          vk ? Shape{count, heads_v_, kSlots, dk_} : Shape{count, heads_v_, dk_, kSlots},
          state_dtype_, output);
      add(name, &parts[1],
          vk ? Shape{count, heads_v_, dv_, kSlots} : Shape{count, heads_v_, kSlots, dv_},
          state_dtype_, output);
      return;
    }
    const Shape shapes[] = {
        vk ? Shape{count, heads_v_, dv_, dk_} : Shape{count, heads_v_, dk_, dv_},
        {count, heads_v_, dk_},
        {count, heads_v_}};
    for (std::size_t part = 0; part < std::min(wanted, most); ++part) {
      add(name, &parts[part], shapes[part], state_dtype_, output);
    }
  }

  // ---- mutations -------------------------------------------------------------------------------

  std::int64_t any_integer() {
    return random_.one_of<std::int64_t>({-2, -1, 0, 1, 2, 3, 7, 16, 100, INT32_MAX, INT32_MIN,
                                         std::int64_t{1} << 40, INT64_MAX, INT64_MIN});
  }
  double any_double() {
    return random_.one_of({0.0, 1.0, -1.0, 1e-300, 1e300, std::numeric_limits<double>::infinity(),
                           -std::numeric_limits<double>::infinity(),
                           std::numeric_limits<double>::quiet_NaN()});
  }

  void mutate() {
    if (random_.chance(0.4)) return mutate_option();
    Argument& argument = arguments_[static_cast<std::size_t>(
        random_.integer(0, static_cast<std::int64_t>(arguments_.size()) - 1))];
    onchip_tensor& t = argument.tensor;
    story_ += argument.name;
    const auto axis = [&] { return random_.integer(0, std::max<std::int64_t>(t.rank, 1) - 1); };
    // A plan looks at the values of integers: those stay where they are.
    const bool read_by_plan = argument.memory.dtype() == DType::i32;
    switch (read_by_plan ? random_.one_of<std::int64_t>({2, 5}) : random_.integer(0, 6)) {
      case 0:
        t.dtype = static_cast<std::int32_t>(random_.integer(0, 9));
        break;
      case 1:
        t.rank = static_cast<std::int32_t>(random_.integer(-1, 7));
        break;
      case 2:
        (random_.chance(0.5) ? t.device_type : t.device_id) =
            static_cast<std::int32_t>(random_.integer(-1, 3));
        break;
      case 3:
        t.shape[axis()] = random_.chance(0.6) ? random_.integer(0, 6) : any_integer();
        break;
      case 4:
        t.strides[axis()] = random_.chance(0.6) ? random_.integer(-30, 60) : any_integer();
        break;
      case 5:
        t.data = nullptr;
        break;
      default:
        t.data = arguments_[0].tensor.data;
        break;
    }
    story_ += " ";
    // What such a call may touch is not the memory that was made for it.
    unbacked_ = true;
  }

  void mutate_option() {
    story_ += "option ";
    const auto int32 = [&] { return static_cast<std::int32_t>(any_integer()); };
    switch (random_.integer(0, 14)) {
      case 0:
        options_.scale = any_double();
        break;
      case 1:
        options_.eps = any_double();
        break;
      case 2:
        options_.dt_min = any_double();
        break;
      case 3:
        options_.dt_max = any_double();
        break;
      case 4:
        options_.lower_bound = any_double();
        break;
      case 5:
        options_.chunk_len = random_.chance(0.5) ? 32 : any_integer();
        break;
      case 6:
        options_.num_householder = any_integer();
        unbacked_ = true;
        break;
      case 7:
        options_.op =
            random_.chance(0.7) ? static_cast<std::int32_t>(random_.integer(0, 18)) : int32();
        unbacked_ = true;
        break;
      case 8:
        options_.state_layout = random_.chance(0.7) ? 1 : int32();
        unbacked_ = true;
        break;
      case 9:
        options_.normalize = int32();
        break;
      case 10:
        options_.gate = int32();
        break;
      case 11:
        (random_.chance(0.5) ? options_.detach_normalizer : options_.dt_softplus) = int32();
        break;
      case 12:
        (random_.chance(0.5) ? options_.qk_l2norm : options_.allow_neg_eigval) = int32();
        break;
      case 13:
        options_.check = int32();
        break;
      default:
        options_.backend = random_.one_of<const char*>({"cpu", "cuda.sm90", "reference", "none"});
        break;
    }
  }

  // ---- the call --------------------------------------------------------------------------------

  void connect() {
    forward_.inputs = backward_.inputs = step_.inputs = &inputs_;
    forward_.options = backward_.options = step_.options = &options_;
    backward_.gradients = &gradients_;
  }

  onchip_status plan(onchip_plan& planned) {
    switch (phase_) {
      case Phase::forward:
        return onchip_linear_forward_plan(&forward_, &planned);
      case Phase::backward:
        return onchip_linear_backward_plan(&backward_, &planned);
      case Phase::step:
        return onchip_linear_step_plan(&step_, &planned);
    }
    return ONCHIP_INTERNAL;
  }

  onchip_status run(const onchip_plan& planned, void* workspace) {
    switch (phase_) {
      case Phase::forward:
        return onchip_linear_forward_run(&planned, &forward_, workspace, nullptr);
      case Phase::backward:
        return onchip_linear_backward_run(&planned, &backward_, workspace, nullptr);
      case Phase::step:
        return onchip_linear_step_run(&planned, &step_, workspace, nullptr);
    }
    return ONCHIP_INTERNAL;
  }

  void remember() {
    before_.clear();
    for (const Argument& argument : arguments_) before_.push_back(argument.memory.bytes());
  }

  // Elements of outputs may be written by a run, bytes beside them never.
  std::string changed(bool after_run) const {
    for (std::size_t i = 0; i < arguments_.size(); ++i) {
      const Argument& argument = arguments_[i];
      if (after_run && argument.output) {
        if (std::string wrong = argument.memory.broken_guard(); !wrong.empty()) {
          return argument.name + ": " + wrong;
        }
      } else if (argument.memory.bytes() != before_[i]) {
        return argument.name;
      }
    }
    return "";
  }

  // Outputs start as NaN; every element is written, and inputs here give finite ones.
  std::string unwritten() const {
    for (const Argument& argument : arguments_) {
      if (!argument.output) continue;
      for (const double value : argument.memory.values()) {
        if (!std::isfinite(value)) return argument.name + " holds " + std::to_string(value);
      }
    }
    return "";
  }

  static constexpr std::int64_t kOperators = ONCHIP_GSA;
  static constexpr std::int64_t kSlots = 3;

  Random random_;
  Phase phase_ = Phase::forward;
  const ops::LinearRow* row_ = nullptr;
  onchip_linear_options options_ = ONCHIP_LINEAR_OPTIONS_INIT;
  onchip_linear_tensors inputs_ = ONCHIP_LINEAR_TENSORS_INIT;
  onchip_linear_tensors gradients_ = ONCHIP_LINEAR_TENSORS_INIT;
  onchip_linear_forward_args forward_ = ONCHIP_LINEAR_FORWARD_ARGS_INIT;
  onchip_linear_backward_args backward_ = ONCHIP_LINEAR_BACKWARD_ARGS_INIT;
  onchip_linear_step_args step_ = ONCHIP_LINEAR_STEP_ARGS_INIT;
  DType dtype_ = DType::f32;
  DType state_dtype_ = DType::f32;
  std::int64_t heads_k_ = 1, heads_v_ = 1, dk_ = 1, dv_ = 1, num_seqs_ = 1, length_ = 1;
  bool packed_ = false;
  bool unbacked_ = false;
  std::vector<Argument> arguments_;
  std::vector<std::vector<std::byte>> before_;
  std::string story_;
};

TEST(LinearFuzz, RefusedCallsWriteNothingAndAcceptedOnesTheirOutputs) {
  const bool longer = std::getenv("ONCHIP_TEST_LONG") != nullptr;
  const std::uint64_t calls = longer ? 200000 : 6000;
  FuzzedCall::accepted = 0;
  for (std::uint64_t number = 0; number < calls; ++number) {
    FuzzedCall call(number);
    const std::string wrong = call.check();
    ASSERT_EQ(wrong, "") << "call " << number << ": " << call.story();
  }
  // Most calls are legal ones or nearly so.
  EXPECT_GT(FuzzedCall::accepted, static_cast<int>(calls / 3));
}

}  // namespace
}  // namespace onchip::test
