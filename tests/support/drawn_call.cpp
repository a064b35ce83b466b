#include "support/drawn_call.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "support/call.hpp"

namespace onchip::test {

namespace {

// Rows of a strided view: gaps behind the innermost axis and between the outer ones.
Shape gapped_strides(const Shape& shape, Random& random) {
  Shape strides(shape.size(), 1);
  for (std::size_t axis = shape.size(); axis-- > 1;) {
    const std::int64_t gap = random.integer(0, 3);
    strides[axis - 1] = strides[axis] * std::max<std::int64_t>(shape[axis], 1) + gap;
  }
  return strides;
}

}  // namespace

std::string DrawnCall::run_whole() {
  onchip_plan planned = ONCHIP_PLAN_INIT;
  if (plan(planned) != ONCHIP_OK) return onchip_last_error();
  const GuardedMemory workspace = workspace_for(planned);
  if (run(planned, workspace.data()) != ONCHIP_OK) return onchip_last_error();
  return workspace_guard_holds(workspace) ? "" : "memory behind the workspace was written";
}

std::vector<std::vector<double>> DrawnCall::output_values() const {
  std::vector<std::vector<double>> values;
  for (const Argument& argument : arguments_) {
    if (argument.output) values.push_back(argument.memory.values());
  }
  return values;
}

void DrawnCall::remember() {
  before_.clear();
  for (const Argument& argument : arguments_) before_.push_back(argument.memory.bytes());
}

void DrawnCall::restore() {
  for (std::size_t i = 0; i < arguments_.size(); ++i) {
    std::copy(before_[i].begin(), before_[i].end(), arguments_[i].memory.accessible().begin());
  }
}

std::string DrawnCall::changed(bool after_run) const {
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

std::string DrawnCall::unwritten() const {
  for (const Argument& argument : arguments_) {
    if (!argument.output) continue;
    for (const double value : argument.memory.values()) {
      if (!std::isfinite(value)) return argument.name + " holds " + std::to_string(value);
    }
  }
  return "";
}

void DrawnCall::add(const std::string& name, const onchip_tensor** field, const Shape& shape,
                    DType dtype, bool output, bool in_place) {
  const Shape strides =
      random_.chance(0.3) ? gapped_strides(shape, random_) : contiguous_strides(shape);
  Argument argument{name, field, HostTensor(dtype, shape, strides), {}, output};
  if (!output || in_place) {
    argument.memory.fill([&] { return draw_number(name); });
  }
  arguments_.push_back(std::move(argument));
  *field = &arguments_.back().tensor;  // a mark that it is there: connect() sets it anew
}

void DrawnCall::add_integers(const char* name, const onchip_tensor** field,
                             const std::vector<std::int64_t>& values) {
  Argument argument{
      name, field, HostTensor(DType::i32, {static_cast<std::int64_t>(values.size())}), {}, false};
  argument.memory.fill_integers(values);
  arguments_.push_back(std::move(argument));
  *field = &arguments_.back().tensor;
}

void DrawnCall::connect() {
  for (Argument& argument : arguments_) {
    argument.tensor = argument.memory.view();
    *argument.field = &argument.tensor;
  }
}

std::int64_t DrawnCall::any_integer() {
  return random_.one_of<std::int64_t>({-2, -1, 0, 1, 2, 3, 7, 16, 100, INT32_MAX, INT32_MIN,
                                       std::int64_t{1} << 40, INT64_MAX, INT64_MIN});
}

double DrawnCall::any_double() {
  return random_.one_of({0.0, 1.0, -1.0, 1e-300, 1e300, std::numeric_limits<double>::infinity(),
                         -std::numeric_limits<double>::infinity(),
                         std::numeric_limits<double>::quiet_NaN()});
}

namespace {

void mutate(DrawnCall::Argument& argument, std::byte* other, Random& random) {
  const auto any = [&] {
    return random.one_of<std::int64_t>(
        {-2, -1, 0, 1, 7, 100, INT32_MAX, INT32_MIN, std::int64_t{1} << 40, INT64_MAX, INT64_MIN});
  };
  onchip_tensor& t = argument.tensor;
  const auto axis = [&] {
    return random.integer(0, std::clamp<std::int64_t>(t.rank, 1, ONCHIP_MAX_RANK) - 1);
  };
  // A plan looks at the values of integers: those stay where they are.
  const bool read_by_plan = argument.memory.dtype() == DType::i32;
  switch (read_by_plan ? random.one_of<std::int64_t>({2, 5}) : random.integer(0, 6)) {
    case 0:
      t.dtype = static_cast<std::int32_t>(random.integer(0, 9));
      break;
    case 1:
      t.rank = static_cast<std::int32_t>(random.integer(-1, 7));
      break;
    case 2:
      (random.chance(0.5) ? t.device_type : t.device_id) =
          static_cast<std::int32_t>(random.integer(-1, 3));
      break;
    case 3:
      t.shape[axis()] = random.chance(0.6) ? random.integer(0, 6) : any();
      break;
    case 4:
      t.strides[axis()] = random.chance(0.6) ? random.integer(-30, 60) : any();
      break;
    case 5:
      t.data = nullptr;
      break;
    default:
      t.data = other;
      break;
  }
}

}  // namespace

Fuzzed fuzz(DrawnCall& call, Random& random) {
  Fuzzed result;
  // Whether what the call may touch is the memory that was made for it.
  bool backed = true;
  const std::int64_t mutations = random.one_of<std::int64_t>({0, 0, 1, 1, 2, 3});
  for (std::int64_t m = 0; m < mutations; ++m) {
    if (random.chance(0.4)) {
      result.story += "option ";
      if (call.mutate_option()) backed = false;
      continue;
    }
    auto& arguments = call.arguments();
    const std::int64_t last = static_cast<std::int64_t>(arguments.size()) - 1;
    DrawnCall::Argument& argument = arguments[static_cast<std::size_t>(random.integer(0, last))];
    result.story += argument.name + " ";
    mutate(argument, static_cast<std::byte*>(arguments[0].tensor.data), random);
    backed = false;
  }
  call.remember();
  onchip_plan planned = ONCHIP_PLAN_INIT;
  const onchip_status status = call.plan(planned);
  if (std::string wrong = call.changed(false); !wrong.empty()) {
    result.wrong = "plan changed " + wrong;
    return result;
  }
  if (status != ONCHIP_OK) {
    const std::string message = onchip_last_error();
    if (mutations == 0) {
      result.wrong = "a legal call was refused: " + message;
    } else if (status != ONCHIP_INVALID_ARGUMENT && status != ONCHIP_UNSUPPORTED) {
      result.wrong = "status " + std::to_string(status);
    } else if (!call.names(message)) {
      result.wrong = "message without operator: " + message;
    }
    return result;
  }
  result.accepted = true;
  if (!backed) return result;
  const GuardedMemory workspace = workspace_for(planned);
  if (call.run(planned, workspace.data()) != ONCHIP_OK) {
    result.wrong = std::string("planned, then refused: ") + onchip_last_error();
  } else if (!workspace_guard_holds(workspace)) {
    result.wrong = "memory behind the workspace was written";
  } else if (std::string wrong = call.changed(true); !wrong.empty()) {
    result.wrong = "run changed " + wrong;
  } else if (mutations == 0) {
    result.wrong = call.unwritten();
  }
  return result;
}

}  // namespace onchip::test
