#include "ops/linear_arguments.hpp"

#include <algorithm>
#include <limits>
#include <utility>

#include "core/status.hpp"

namespace onchip::ops {

namespace {

using Shape = std::vector<std::int64_t>;

// The fields of onchip_linear_tensors, to find those that an operator does not take.
struct Field {
  const char* name;
  const onchip_tensor* onchip_linear_tensors::* given;
};
constexpr Field kFields[] = {
    {"q", &onchip_linear_tensors::q},       {"k", &onchip_linear_tensors::k},
    {"v", &onchip_linear_tensors::v},       {"gate", &onchip_linear_tensors::gate},
    {"beta", &onchip_linear_tensors::beta}, {"a", &onchip_linear_tensors::a},
    {"b", &onchip_linear_tensors::b},       {"u", &onchip_linear_tensors::u},
    {"rate", &onchip_linear_tensors::rate}, {"dt_bias", &onchip_linear_tensors::dt_bias},
    {"skip", &onchip_linear_tensors::skip}, {"z", &onchip_linear_tensors::z},
};

std::string list_text(const Shape& shape) {
  std::string text = "[";
  for (const std::int64_t extent : shape) {
    if (text.size() > 1) text += ", ";
    text += std::to_string(extent);
  }
  return text + "]";
}

bool has_shape(const TensorView& tensor, const Shape& shape) {
  return tensor.rank == static_cast<std::int32_t>(shape.size()) &&
         std::equal(shape.begin(), shape.end(), tensor.shape.begin());
}

void require(const LinearCall& call, std::string_view name, const TensorView& tensor,
             const Shape& shape, const std::string& axes) {
  if (has_shape(tensor, shape)) return;
  throw_invalid(call.op(), name, "shape " + shape_text(tensor), axes + " = " + list_text(shape));
}

struct Wanted {
  Shape shape;
  std::string axes;
};

Wanted rows_of(const LinearCall& call, const Shape& rest, const std::string& names) {
  Wanted wanted{call.lead, "[" + call.axes + ", " + names + "]"};
  wanted.shape.insert(wanted.shape.end(), rest.begin(), rest.end());
  return wanted;
}

// With rows_per_token rows in place of each token: a step then has an axis for them.
Wanted token_rows_of(const LinearCall& call, const LinearProblem& p, const Shape& rest,
                     const std::string& names) {
  const std::int64_t each = p.rows_per_token;
  Wanted wanted{call.lead,
                "[" + call.axes + (call.step ? ", " : " ") + "num_householder, " + names + "]"};
  if (call.step) {
    wanted.shape.push_back(each);
  } else {
    constexpr std::int64_t kMost = std::numeric_limits<std::int64_t>::max();
    wanted.shape.back() = wanted.shape.back() > kMost / each ? kMost : wanted.shape.back() * each;
  }
  wanted.shape.insert(wanted.shape.end(), rest.begin(), rest.end());
  return wanted;
}

Wanted wanted_shape(const LinearCall& call, LinearShape shape, const TensorView& tensor,
                    const LinearProblem& p) {
  const std::int64_t hk = p.num_heads_k;
  const std::int64_t hv = p.num_heads_v;
  const std::int64_t dk = p.head_dim_k;
  const std::int64_t dv = p.head_dim_v;
  switch (shape) {
    case LinearShape::key:
      return rows_of(call, {hk, dk}, "Hk, dk");
    case LinearShape::value:
      return rows_of(call, {hv, dv}, "Hv, dv");
    case LinearShape::scalar:
      return rows_of(call, {hv}, std::string(call.heads()));
    case LinearShape::channel:
      return rows_of(call, {hv, dk}, "Hv, dk");
    case LinearShape::slots:
      return rows_of(call, {hv, p.num_slots}, "Hv, M");
    case LinearShape::key_rows:
      return token_rows_of(call, p, {hk, dk}, "Hk, dk");
    case LinearShape::value_rows:
      return token_rows_of(call, p, {hv, dv}, "Hv, dv");
    case LinearShape::scalar_rows:
      return token_rows_of(call, p, {hv}, "Hv");
    case LinearShape::scalar_or_head:
      if (tensor.rank == 1) return {{hv}, "[Hv]"};
      return rows_of(call, {hv}, "Hv");
    case LinearShape::head:
      return {{hv}, "[" + std::string(call.heads()) + "]"};
    case LinearShape::head_key:
      return {{hv, dk}, call.scan() ? "[D, N]" : "[Hv, dk]"};
    case LinearShape::shared:
      // C, which gives the groups, says with its rank whether all channels share one.
      if (call.one_group) return rows_of(call, {dk}, "N");
      return rows_of(call, {hk, dk}, "groups, N");
    case LinearShape::head_or_channel:
      if (tensor.rank == 2) return {{hv, dv}, "[Hv, dv]"};
      return {{hv}, "[Hv]"};
  }
  return {};
}

bool has_token_rows(LinearShape shape) {
  return shape == LinearShape::key_rows || shape == LinearShape::value_rows ||
         shape == LinearShape::scalar_rows;
}

bool is_constant(LinearShape shape, const TensorView& tensor) {
  return shape == LinearShape::head || shape == LinearShape::head_key ||
         shape == LinearShape::head_or_channel ||
         (shape == LinearShape::scalar_or_head && tensor.rank == 1);
}

RowsView strided_rows(const LinearCall& call, LinearShape shape, const TensorView& tensor,
                      bool packed) {
  RowsView view;
  if (!tensor.present()) return view;
  view.data = tensor.data;
  view.dtype = tensor.dtype;
  view.wanted = true;
  std::size_t axis = 0;
  if (shape == LinearShape::shared && call.one_group) {
    if (!packed) view.batch_stride = bytes(tensor, axis++);
    if (!call.step) view.row_stride = bytes(tensor, axis);
    return view;
  }
  if (!is_constant(shape, tensor)) {
    if (!packed) view.batch_stride = bytes(tensor, axis++);
    if (!call.step || has_token_rows(shape)) view.row_stride = bytes(tensor, axis++);
  }
  view.head_stride = bytes(tensor, axis);
  return view;
}

void name_rows(LinearCall& call, const LinearProblem& p) {
  if (call.step) {
    call.axes = "batch";
  } else {
    call.axes = p.packed ? "total" : "batch, T";
  }
}

std::string_view why_these_rows(const LinearCall& call, const LinearProblem& p) {
  if (call.step) return "";
  return p.packed ? " (cu_seqlens given)" : " (no cu_seqlens)";
}

void read_rows(LinearCall& call, const TensorView& first, std::size_t lead, LinearProblem& p) {
  p.dtype = first.dtype;
  p.device = first.device;
  call.lead.assign(first.shape.begin(), first.shape.begin() + static_cast<std::ptrdiff_t>(lead));
  if (!p.packed) p.num_seqs = first.shape[0];
  p.slot = call.step ? 1 : first.shape[lead - 1];
}

void require_groups(const LinearCall& call, const LinearTensorRow& q_row,
                    const LinearTensorRow& v_row, const LinearProblem& p) {
  const std::int64_t hk = p.num_heads_k;
  const std::int64_t hv = p.num_heads_v;
  if (hk == 0 ? hv == 0 : hv % hk == 0) return;
  throw_invalid(call.op(), v_row.name(),
                std::to_string(hv) + (call.scan() ? " channels" : " heads"),
                "a multiple of " + std::string(q_row.name()) + "'s " + std::to_string(hk) +
                    (call.scan() ? " groups" : " heads"),
                std::to_string(hk == 0 ? 0 : nearest_multiple(hv, hk)));
}

// Sizes of a scan: channels from v, and from q, where there is one, the numbers of each state.
void read_channels(LinearCall& call, const TensorView& v, const LinearTensorRow& v_row,
                   const TensorView* q, const LinearTensorRow* q_row, LinearProblem& p) {
  const std::string_view op = call.op();
  require_dtype(op, v_row.name(), v, {DType::f64, DType::f32, DType::f16, DType::bf16});
  const std::size_t lead = call.step || p.packed ? 1 : 2;
  name_rows(call, p);
  if (v.rank != static_cast<std::int32_t>(lead + 1)) {
    throw_invalid(op, v_row.name(), "shape " + shape_text(v),
                  "[" + call.axes + ", D]" + std::string(why_these_rows(call, p)));
  }
  read_rows(call, v, lead, p);
  p.num_heads_v = p.num_heads_k = v.shape[lead];
  p.head_dim_v = p.head_dim_k = 1;
  if (q == nullptr) return;
  const auto rank = static_cast<std::size_t>(q->rank);
  if (rank != lead + 1 && rank != lead + 2) {
    throw_invalid(op, q_row->name(), "shape " + shape_text(*q),
                  "[" + call.axes + ", N] or [" + call.axes + ", groups, N]" +
                      std::string(why_these_rows(call, p)));
  }
  call.one_group = rank == lead + 1;
  p.num_heads_k = call.one_group ? 1 : q->shape[lead];
  p.head_dim_k = q->shape[rank - 1];
  require_at_most(op, q_row->name(), "N", p.head_dim_k, kMaxKeyDim);
  p.decay_width = p.rate_width = p.head_dim_k;
  require_groups(call, *q_row, v_row, p);
}

// Sizes from q and v; everything else has to agree with them.
void read_geometry(LinearCall& call, const TensorView& q, const LinearTensorRow& q_row,
                   const TensorView& v, const LinearTensorRow& v_row, LinearProblem& p) {
  const std::string_view op = call.op();
  require_dtype(op, q_row.name(), q, {DType::f64, DType::f32, DType::f16, DType::bf16});
  const std::size_t lead = call.step || p.packed ? 1 : 2;
  const std::size_t v_lead = call.step && has_token_rows(v_row.shape) ? 2 : lead;
  name_rows(call, p);
  const std::string why(why_these_rows(call, p));
  const auto require_rank = [&](std::string_view name, const TensorView& tensor, std::size_t axes) {
    if (tensor.rank == static_cast<std::int32_t>(axes + 2)) return;
    throw_invalid(
        op, name, "shape " + shape_text(tensor),
        "[" + call.axes + (axes > lead ? ", num_householder" : "") + ", heads, dim]" + why);
  };
  require_rank(q_row.name(), q, lead);
  require_rank(v_row.name(), v, v_lead);
  read_rows(call, q, lead, p);
  p.num_heads_k = q.shape[lead];
  p.head_dim_k = q.shape[lead + 1];
  p.num_heads_v = v.shape[v_lead];
  p.head_dim_v = v.shape[v_lead + 1];
  require_at_most(op, q_row.name(), "dk", p.head_dim_k, kMaxKeyDim);
  require_at_most(op, v_row.name(), "dv", p.head_dim_v, kMaxValueDim);
  if (p.traits.decay == DecayAxis::key) p.decay_width = p.gate_width = p.head_dim_k;
  require_groups(call, q_row, v_row, p);
}

void require_float(const LinearCall& call, const LinearTensorRow& row, const TensorView& tensor,
                   const LinearProblem& p) {
  const bool operand = row.role.given == &onchip_linear_tensors::q ||
                       row.role.given == &onchip_linear_tensors::k ||
                       row.role.given == &onchip_linear_tensors::v;
  if (operand) {
    require_dtype(call.op(), row.name(), tensor, {p.dtype});
  } else {
    require_dtype(call.op(), row.name(), tensor, {DType::f64, DType::f32, DType::f16, DType::bf16});
  }
}

void refuse_foreign(const LinearCall& call, const onchip_linear_tensors& given,
                    const char* prefix) {
  for (const Field& field : kFields) {
    if (given.*field.given == nullptr) continue;
    const bool taken =
        std::any_of(call.row.tensors.begin(), call.row.tensors.end(),
                    [&](const LinearTensorRow& row) { return row.role.given == field.given; });
    if (!taken) {
      throw_invalid(call.op(), std::string(prefix) + field.name, "a tensor",
                    "none: " + std::string(call.row.name) + " does not take it");
    }
  }
}

StateView state_part(const LinearCall& call, const char* name, const TensorView& tensor,
                     std::size_t part, const LinearProblem& p) {
  StateView view;
  if (!tensor.present()) return view;
  view.data = tensor.data;
  view.dtype = tensor.dtype;
  view.wanted = true;
  const std::int64_t n = call.slots;
  view.slot_stride = bytes(tensor, 0);
  view.head_stride = bytes(tensor, 1);
  if (is_scan(p)) {
    if (p.traits.decay != DecayAxis::key) {
      require(call, name, tensor, {n, p.num_heads_v}, "[N, D]");
      return view;
    }
    const Shape shape =
        call.vk ? Shape{n, p.num_heads_v, p.head_dim_k} : Shape{n, p.head_dim_k, p.num_heads_v};
    require(call, name, tensor, shape, call.vk ? "[num_seqs, D, N]" : "[num_seqs, N, D]");
    view.head_stride = bytes(tensor, call.vk ? 1 : 2);
    view.row_stride = bytes(tensor, call.vk ? 2 : 1);
    return view;
  }
  const bool slots = p.traits.engine == LinearEngine::gated_slots;
  if (part == 0 || slots) {
    const std::int64_t rows = part == 0 ? p.head_dim_k : p.num_slots;
    const std::int64_t columns = part == 0 && slots ? p.num_slots : p.head_dim_v;
    const std::string rows_name = part == 0 ? "dk" : "M";
    const std::string columns_name = part == 0 && slots ? "M" : "dv";
    if (call.vk) {
      require(call, name, tensor, {n, p.num_heads_v, columns, rows},
              "[N, Hv, " + columns_name + ", " + rows_name + "]");
    } else {
      require(call, name, tensor, {n, p.num_heads_v, rows, columns},
              "[N, Hv, " + rows_name + ", " + columns_name + "]");
    }
    view.row_stride = bytes(tensor, call.vk ? 3 : 2);
    view.column_stride = bytes(tensor, call.vk ? 2 : 3);
  } else if (part == 1) {
    require(call, name, tensor, {n, p.num_heads_v, p.head_dim_k}, "[N, Hv, dk]");
    view.row_stride = bytes(tensor, 2);
  } else {
    require(call, name, tensor, {n, p.num_heads_v}, "[N, Hv]");
  }
  return view;
}

}  // namespace

std::vector<TensorView> read_inputs(LinearCall& call, const onchip_linear_tensors& given,
                                    LinearProblem& p) {
  const std::string_view op = call.op();
  refuse_foreign(call, given, "inputs.");
  std::vector<TensorView> views;
  const std::size_t none = call.row.tensors.size();
  std::size_t q = none;
  std::size_t v = 0;
  std::size_t slots = none;
  for (std::size_t i = 0; i < call.row.tensors.size(); ++i) {
    const LinearTensorRow& row = call.row.tensors[i];
    views.push_back(call.input(row.name(), given.*row.role.given));
    if (!row.optional) require_present(op, row.name(), views.back());
    if (row.role.given == &onchip_linear_tensors::q) q = i;
    if (row.role.given == &onchip_linear_tensors::v) v = i;
    if (row.shape == LinearShape::slots && slots == none) slots = i;
  }
  if (call.scan()) {
    read_channels(call, views[v], call.row.tensors[v], q == none ? nullptr : &views[q],
                  q == none ? nullptr : &call.row.tensors[q], p);
  } else {
    read_geometry(call, views[q], call.row.tensors[q], views[v], call.row.tensors[v], p);
  }
  std::string sizes = " (sizes of ";
  if (q != none) sizes += std::string(call.row.tensors[q].name()) + " and ";
  sizes += std::string(call.row.tensors[v].name()) + ")";
  if (slots != none) {
    const TensorView& first = views[slots];
    const std::size_t rank = call.lead.size() + 2;
    if (first.rank != static_cast<std::int32_t>(rank)) {
      throw_invalid(op, call.row.tensors[slots].name(), "shape " + shape_text(first),
                    "[" + call.axes + ", Hv, M]");
    }
    p.num_slots = first.shape[rank - 1];
    p.decay_width = p.gate_width = p.num_slots;
    sizes.insert(sizes.size() - 1, ", M of " + std::string(call.row.tensors[slots].name()));
  }
  for (std::size_t i = 0; i < views.size(); ++i) {
    const LinearTensorRow& row = call.row.tensors[i];
    if (!views[i].present()) continue;
    require_float(call, row, views[i], p);
    const Wanted wanted = wanted_shape(call, row.shape, views[i], p);
    if (!has_shape(views[i], wanted.shape)) {
      throw_invalid(op, row.name(), "shape " + shape_text(views[i]),
                    wanted.axes + " = " + list_text(wanted.shape) + sizes);
    }
    p.inputs.*row.role.view = strided_rows(call, row.shape, views[i], p.packed);
    const bool constant = is_constant(row.shape, views[i]);
    if (row.role.given == &onchip_linear_tensors::gate) p.gate_per_head = constant;
    if (row.role.given == &onchip_linear_tensors::skip) {
      p.skip_width = views[i].rank == 2 ? p.head_dim_v : 1;
    }
  }
  return views;
}

void read_gradients(LinearCall& call, const onchip_linear_tensors& given,
                    const std::vector<TensorView>& inputs, LinearBackwardProblem& p) {
  refuse_foreign(call, given, "gradients.");
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    const LinearTensorRow& row = call.row.tensors[i];
    const TensorView gradient = call.output(row.gradient_name, given.*row.role.given);
    if (!gradient.present()) continue;
    if (!inputs[i].present()) {
      throw_invalid(call.op(), row.gradient_name, "a tensor without " + std::string(row.name()),
                    "none, or a tensor to differentiate");
    }
    require_dtype(call.op(), row.gradient_name, gradient, {inputs[i].dtype});
    const auto rank = static_cast<std::ptrdiff_t>(inputs[i].rank);
    require(call, row.gradient_name, gradient,
            Shape(inputs[i].shape.begin(), inputs[i].shape.begin() + rank),
            std::string(row.name()) + "'s shape");
    p.gradients.*row.role.view = strided_rows(call, row.shape, gradient, p.packed);
  }
}

RowsView read_output_rows(const LinearCall& call, std::string_view name, const TensorView& tensor,
                          const LinearProblem& p) {
  require_present(call.op(), name, tensor);
  require_dtype(call.op(), name, tensor, {p.dtype});
  const LinearShape shape = call.scan() ? LinearShape::scalar : LinearShape::value;
  const Wanted wanted = wanted_shape(call, shape, tensor, p);
  require(call, name, tensor, wanted.shape, wanted.axes);
  return strided_rows(call, shape, tensor, p.packed);
}

// ---- states -------------------------------------------------------------------------------------

std::size_t state_parts(const LinearProblem& p) {
  if (p.traits.engine == LinearEngine::gated_slots) return 2;
  if (p.stabilised) return 3;
  return p.normalised ? 2 : 1;
}

const char* part_name(const PartNames& names, const LinearProblem& p, std::size_t part) {
  return state_parts(p) == 1 && part == 0 ? names[0] : names[part + 1];
}

StateViews read_state(LinearCall& call, const PartNames& names,
                      const onchip_tensor* const (&given)[ONCHIP_LINEAR_STATE_PARTS],
                      const LinearProblem& p, StateUse use) {
  StateViews views;
  for (std::size_t part = 0; part < ONCHIP_LINEAR_STATE_PARTS; ++part) {
    const char* name = part_name(names, p, part);
    if (part >= state_parts(p) && given[part] != nullptr) {
      throw_invalid(call.op(), name, "a tensor",
                    "none: this state has " + std::to_string(state_parts(p)) + " part" +
                        (state_parts(p) == 1 ? "" : "s"));
    }
    const TensorView tensor =
        use == StateUse::input ? call.input(name, given[part]) : call.output(name, given[part]);
    if (tensor.present()) {
      if (p.dtype == DType::f64) {
        require_dtype(call.op(), name, tensor, {DType::f64});
      } else if (use == StateUse::in_place) {
        require_dtype(call.op(), name, tensor, {DType::f32, DType::bf16, DType::f16});
      } else {
        require_dtype(call.op(), name, tensor, {DType::f32});
      }
    }
    views[part] = state_part(call, name, tensor, part, p);
  }
  return views;
}

bool require_whole(const LinearCall& call, const PartNames& names, const StateViews& views,
                   const LinearProblem& p) {
  const bool any =
      std::any_of(views.begin(), views.end(), [](const StateView& view) { return view.wanted; });
  for (std::size_t part = 0; any && part < state_parts(p); ++part) {
    if (!views[part].wanted) {
      throw_invalid(call.op(), part_name(names, p, part), "no tensor beside the state's others",
                    "all parts of the state or none");
    }
  }
  return any;
}

}  // namespace onchip::ops
