#include "support/attention_call.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "support/attention_case.hpp"

namespace onchip::test {

namespace {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

// A storage order of the outer axes, with room between rows; inputs may also repeat or run
// backwards along an axis.
Shape random_strides(const Shape& shape, bool output, Random& random) {
  Shape strides(shape.size(), 1);
  if (shape.empty()) return strides;
  std::vector<std::size_t> order(shape.size() - 1);
  std::iota(order.begin(), order.end(), std::size_t{0});
  for (std::size_t i = order.size(); i > 1; --i) {
    std::swap(order[i - 1],
              order[static_cast<std::size_t>(random.integer(0, static_cast<std::int64_t>(i) - 1))]);
  }
  std::int64_t reach = std::max<std::int64_t>(shape.back(), 1) + random.one_of({0, 0, 1, 3});
  for (const std::size_t axis : order) {
    strides[axis] = reach;
    reach = reach * std::max<std::int64_t>(shape[axis], 1) + random.one_of({0, 0, 2, 5});
  }
  if (!output) {
    for (const std::size_t axis : order) {
      if (random.chance(0.08)) strides[axis] = 0;
      if (random.chance(0.08)) strides[axis] = -strides[axis];
    }
  }
  return strides;
}

std::int64_t sum(const std::vector<std::int64_t>& values) {
  return std::accumulate(values.begin(), values.end(), std::int64_t{0});
}

std::int64_t longest(const std::vector<std::int64_t>& values) {
  return values.empty() ? 0 : *std::max_element(values.begin(), values.end());
}

}  // namespace

AttentionSpec random_spec(Random& random) {
  AttentionSpec spec;
  spec.dtype = random.one_of({DType::f64, DType::f32, DType::f32, DType::f16, DType::bf16});
  const auto length = [&random] {
    if (random.chance(0.06)) return std::int64_t{0};
    return random.chance(0.15) ? random.integer(17, 70) : random.integer(1, 16);
  };
  const auto head_dim = [&random] {
    if (random.chance(0.04)) return std::int64_t{0};
    if (random.chance(0.05)) return random.one_of<std::int64_t>({32, 64, 65, 128, 130});
    return random.integer(1, 20);
  };
  spec.batch = random.chance(0.04) ? 0 : random.integer(1, 3);
  spec.seqlen_q = length();
  spec.seqlen_kv = random.chance(0.3) ? spec.seqlen_q : length();
  spec.num_heads_kv = random.chance(0.03) ? 0 : random.integer(1, 2);
  spec.group = random.integer(1, 3);
  spec.head_dim_qk = head_dim();
  spec.head_dim_v = random.chance(0.5) ? spec.head_dim_qk : head_dim();
  spec.lengths_dtype = random.one_of({DType::i32, DType::i64});

  spec.packed = random.chance(0.35);
  if (spec.packed) {
    spec.shared_cu_seqlens = random.chance(0.3);
    for (std::int64_t n = 0; n < spec.batch; ++n) {
      spec.slots_q.push_back(length());
      spec.slots_kv.push_back(spec.shared_cu_seqlens ? spec.slots_q.back() : length());
    }
    spec.slack = random.chance(0.4) ? random.integer(1, 3) : 0;
  } else {
    spec.slots_q.assign(static_cast<std::size_t>(spec.batch), spec.seqlen_q);
    spec.slots_kv.assign(static_cast<std::size_t>(spec.batch), spec.seqlen_kv);
  }
  if (random.chance(0.25)) {
    for (std::size_t n = 0; n < spec.slots_q.size(); ++n) {
      spec.used_q.push_back(random.integer(0, spec.slots_q[n]));
      spec.used_kv.push_back(random.integer(0, spec.slots_kv[n]));
    }
    if (random.chance(0.3) && spec.slots_q == spec.slots_kv &&
        (!spec.packed || spec.shared_cu_seqlens)) {
      spec.used_kv.clear();  // as the queries'
    }
  }

  if (random.chance(0.3)) {
    spec.default_scale = false;
    spec.scale = random.one_of({-0.7, 0.0, 0.2, 1.0, 2.5});
  }
  if (random.chance(0.2)) spec.softcap = random.one_of({0.5, 1.0, 15.0, 50.0});
  if (random.chance(0.15)) spec.dropout_p = random.one_of({1e-6, 0.1, 0.5, 0.9});
  spec.causal = random.chance(0.35);
  spec.top_left = random.chance(0.3);
  if (random.chance(0.25)) {
    spec.window_left = random.one_of<std::int64_t>({-1, 0, 1, 3, 15, 1000, INT64_MAX});
    spec.window_right = random.one_of<std::int64_t>({-1, 0, 2, 16, 1000, INT64_MAX});
  }
  spec.bias = random.chance(0.3);
  spec.mask = random.chance(0.25);
  for (int axis = 0; axis < 4; ++axis) {
    spec.bias_broadcast[axis] = random.chance(0.4);
    spec.mask_broadcast[axis] = random.chance(0.4);
  }
  spec.bias_dtype = random.one_of({DType::f64, DType::f32, DType::f16, DType::bf16});
  spec.bias_minus_infinities = random.chance(0.3) ? 0.2 : 0.0;
  spec.visible_share = random.one_of({0.1, 0.5, 0.9});
  spec.alibi = random.chance(0.15);
  spec.alibi_per_sequence = random.chance(0.5);
  spec.segments = random.chance(0.15);
  spec.sink = random.chance(0.2);
  spec.sink_dtype = random.one_of({DType::f64, DType::f32, DType::f16, DType::bf16});
  spec.lse = random.chance(0.8);
  spec.d_lse = random.chance(0.4);
  spec.magnitude = random.one_of({0.3, 1.0, 1.0, 4.0});
  spec.strided = random.chance(0.6);
  return spec;
}

AttentionCall::AttentionCall(const AttentionSpec& given, Random& random)
    : spec(given), random_(random) {
  if (!spec.packed && spec.slots_q.empty()) {
    spec.slots_q.assign(static_cast<std::size_t>(spec.batch), spec.seqlen_q);
    spec.slots_kv.assign(static_cast<std::size_t>(spec.batch), spec.seqlen_kv);
  }
  const std::int64_t hq = spec.num_heads_kv * spec.group;
  const auto rows = [this](std::int64_t slot, std::int64_t heads, std::int64_t dim) {
    return spec.packed ? Shape{slot, heads, dim} : Shape{spec.batch, slot, heads, dim};
  };
  if (spec.packed) {
    spec.seqlen_q = sum(spec.slots_q) + 2 * spec.slack;
    spec.seqlen_kv = sum(spec.slots_kv) + 2 * spec.slack;
  }
  const Shape q_shape = rows(spec.seqlen_q, hq, spec.head_dim_qk);
  const Shape k_shape = rows(spec.seqlen_kv, spec.num_heads_kv, spec.head_dim_qk);
  const Shape v_shape = rows(spec.seqlen_kv, spec.num_heads_kv, spec.head_dim_v);
  const Shape o_shape = rows(spec.seqlen_q, hq, spec.head_dim_v);
  const Shape lse_shape =
      spec.packed ? Shape{hq, spec.seqlen_q} : Shape{spec.batch, hq, spec.seqlen_q};
  const DType lse_dtype = spec.dtype == DType::f64 ? DType::f64 : DType::f32;

  q = make(spec.dtype, q_shape, false);
  k = make(spec.dtype, k_shape, false);
  v = make(spec.dtype, v_shape, false);
  d_o = make(spec.dtype, o_shape, false);
  q.fill([&] { return spec.magnitude * random_.normal(); });
  k.fill([&] { return spec.magnitude * random_.normal(); });
  v.fill([&] { return random_.normal(); });
  d_o.fill([&] { return random_.normal(); });
  if (spec.d_lse) {
    d_lse = make(lse_dtype, lse_shape, false);
    d_lse.fill([&] { return random_.normal(); });
  }
  o = make(spec.dtype, o_shape, true);
  lse = make(lse_dtype, lse_shape, true);
  dq = make(spec.dtype, q_shape, true);
  dk = make(spec.dtype, k_shape, true);
  dv = make(spec.dtype, v_shape, true);
  make_lengths();
  make_options();
  if (spec.poisoned) poison_outside_sequences();
}

HostTensor AttentionCall::make(DType dtype, const Shape& shape, bool output) {
  const Shape strides =
      spec.strided ? random_strides(shape, output, random_) : contiguous_strides(shape);
  return HostTensor(
      dtype, shape, strides,
      random_.chance(0.5) ? GuardedMemory::Against::end : GuardedMemory::Against::front);
}

void AttentionCall::make_lengths() {
  const auto integers = [this](const std::vector<std::int64_t>& values) {
    HostTensor tensor = make(spec.lengths_dtype, {static_cast<std::int64_t>(values.size())}, false);
    tensor.fill_integers(values);
    return tensor;
  };
  const auto cumulative = [this](const std::vector<std::int64_t>& slots) {
    std::vector<std::int64_t> result = {spec.slack};
    for (const std::int64_t slot : slots) result.push_back(result.back() + slot);
    return result;
  };
  if (spec.packed) {
    cu_seqlens_q = integers(cumulative(spec.slots_q));
    if (!spec.shared_cu_seqlens) cu_seqlens_kv = integers(cumulative(spec.slots_kv));
  }
  if (!spec.used_q.empty()) seqlens_q = integers(spec.used_q);
  if (!spec.used_kv.empty()) seqlens_kv = integers(spec.used_kv);
  options.cu_seqlens_q = cu_seqlens_q.abi();
  options.cu_seqlens_kv = cu_seqlens_kv.abi();
  options.seqlens_q = seqlens_q.abi();
  options.seqlens_kv = seqlens_kv.abi();
}

void AttentionCall::make_options() {
  const std::int64_t hq = spec.num_heads_kv * spec.group;
  const auto scores_shape = [&](const bool (&broadcast)[4]) {
    const std::int64_t rows =
        spec.packed ? longest(spec.slots_q) + random_.integer(0, 2) : spec.seqlen_q;
    const std::int64_t columns =
        spec.packed ? longest(spec.slots_kv) + random_.integer(0, 2) : spec.seqlen_kv;
    const Shape full = {spec.batch, hq, rows, columns};
    Shape shape(4);
    for (std::size_t axis = 0; axis < 4; ++axis) shape[axis] = broadcast[axis] ? 1 : full[axis];
    return shape;
  };
  if (!spec.default_scale) options.scale = spec.scale;
  options.softcap = spec.softcap;
  options.dropout_p = spec.dropout_p;
  options.window_left = spec.window_left;
  options.window_right = spec.window_right;
  options.causal = spec.causal ? 1 : 0;
  options.alignment = spec.top_left ? ONCHIP_TOP_LEFT : ONCHIP_BOTTOM_RIGHT;
  if (spec.bias) {
    bias = make(spec.bias_dtype, scores_shape(spec.bias_broadcast), false);
    bias.fill([&] {
      return random_.chance(spec.bias_minus_infinities) ? -std::numeric_limits<double>::infinity()
                                                        : random_.normal();
    });
    const onchip_tensor& view = bias.view();
    dbias = make(spec.bias_dtype, Shape(view.shape, view.shape + view.rank), true);
  }
  if (spec.mask) {
    mask = make(DType::boolean, scores_shape(spec.mask_broadcast), false);
    mask.fill([&] { return random_.chance(spec.visible_share) ? 1.0 : 0.0; });
  }
  if (spec.alibi) {
    alibi_slopes =
        make(DType::f32, spec.alibi_per_sequence ? Shape{spec.batch, hq} : Shape{hq}, false);
    alibi_slopes.fill([&] { return 0.5 * random_.uniform(); });
  }
  if (spec.segments) {
    q_segment_ids = make(
        DType::i32, spec.packed ? Shape{spec.seqlen_q} : Shape{spec.batch, spec.seqlen_q}, false);
    kv_segment_ids = make(
        DType::i32, spec.packed ? Shape{spec.seqlen_kv} : Shape{spec.batch, spec.seqlen_kv}, false);
    q_segment_ids.fill([&] { return static_cast<double>(random_.integer(0, 2)); });
    kv_segment_ids.fill([&] { return static_cast<double>(random_.integer(0, 2)); });
  }
  if (spec.sink) {
    sink = make(spec.sink_dtype, {hq}, false);
    sink.fill([&] { return 2.0 * random_.normal(); });
    dsink = make(spec.sink_dtype, {hq}, true);
  }
  if (spec.dropout_p > 0.0) {
    dropout_rng = make(DType::i64, {2}, false);
    dropout_rng.fill_integers({static_cast<std::int64_t>(random_.bits()),
                               random_.integer(0, (std::int64_t{1} << 32) - 1)});
  }
  options.bias = bias.abi();
  options.mask = mask.abi();
  options.alibi_slopes = alibi_slopes.abi();
  options.q_segment_ids = q_segment_ids.abi();
  options.kv_segment_ids = kv_segment_ids.abi();
  options.sink = sink.abi();
  options.dropout_rng = dropout_rng.abi();
}

// Tails and slack rows of the inputs become NaN, unless the layout shares their memory.
void AttentionCall::poison_outside_sequences() {
  const AttentionCase c = read_case(forward_args());
  const auto poison_rows = [&](HostTensor& tensor, bool q_axis) {
    if (!tensor.present() || tensor.numel() == 0) return;
    const onchip_tensor& view = tensor.view();
    for (std::int32_t axis = 0; axis < view.rank; ++axis) {
      if (view.strides[axis] == 0 && view.shape[axis] > 1) return;
    }
    const std::int64_t slot = q_axis ? c.slot_q : c.slot_kv;
    const std::int64_t heads = view.shape[view.rank - 2];
    const std::int64_t dim = view.shape[view.rank - 1];
    for (std::int64_t batch = 0; batch < (c.packed ? 1 : c.num_seqs); ++batch) {
      std::vector<bool> used(static_cast<std::size_t>(slot), false);
      for (std::int64_t n = c.packed ? 0 : batch; n < (c.packed ? c.num_seqs : batch + 1); ++n) {
        const std::int64_t begin =
            !c.packed ? 0
                      : (q_axis ? c.cu_seqlens_q : c.cu_seqlens_kv)[static_cast<std::size_t>(n)];
        const std::int64_t length = q_axis ? c.length_q(n) : c.length_kv(n);
        for (std::int64_t i = 0; i < length; ++i) used[static_cast<std::size_t>(begin + i)] = true;
      }
      for (std::int64_t row = 0; row < slot; ++row) {
        if (used[static_cast<std::size_t>(row)]) continue;
        for (std::int64_t head = 0; head < heads; ++head) {
          for (std::int64_t d = 0; d < dim; ++d) {
            tensor.set(c.packed ? Shape{row, head, d} : Shape{batch, row, head, d}, kNan);
          }
        }
      }
    }
  };
  poison_rows(q, true);
  poison_rows(d_o, true);
  poison_rows(k, false);
  poison_rows(v, false);
}

onchip_attention_forward_args AttentionCall::forward_args() const {
  onchip_attention_forward_args args = ONCHIP_ATTENTION_FORWARD_ARGS_INIT;
  args.q = q.abi();
  args.k = k.abi();
  args.v = v.abi();
  args.o = o.abi();
  args.lse = spec.lse ? lse.abi() : nullptr;
  args.options = &options;
  return args;
}

onchip_attention_backward_args AttentionCall::backward_args() const {
  onchip_attention_backward_args args = ONCHIP_ATTENTION_BACKWARD_ARGS_INIT;
  args.d_o = d_o.abi();
  args.q = q.abi();
  args.k = k.abi();
  args.v = v.abi();
  args.o = o.abi();
  args.lse = lse.abi();
  args.d_lse = d_lse.abi();
  args.dq = dq.abi();
  args.dk = dk.abi();
  args.dv = dv.abi();
  args.dbias = dbias.abi();
  args.dsink = dsink.abi();
  args.options = &options;
  return args;
}

namespace {

std::vector<std::pair<std::string, HostTensor*>> present(
    std::initializer_list<std::pair<const char*, HostTensor*>> tensors) {
  std::vector<std::pair<std::string, HostTensor*>> result;
  for (const auto& [name, tensor] : tensors) {
    if (tensor->present()) result.emplace_back(name, tensor);
  }
  return result;
}

}  // namespace

std::vector<std::pair<std::string, HostTensor*>> AttentionCall::inputs() {
  return present({{"q", &q},
                  {"k", &k},
                  {"v", &v},
                  {"d_o", &d_o},
                  {"d_lse", &d_lse},
                  {"bias", &bias},
                  {"mask", &mask},
                  {"alibi_slopes", &alibi_slopes},
                  {"q_segment_ids", &q_segment_ids},
                  {"kv_segment_ids", &kv_segment_ids},
                  {"sink", &sink},
                  {"dropout_rng", &dropout_rng},
                  {"cu_seqlens_q", &cu_seqlens_q},
                  {"cu_seqlens_kv", &cu_seqlens_kv},
                  {"seqlens_q", &seqlens_q},
                  {"seqlens_kv", &seqlens_kv}});
}

std::vector<std::pair<std::string, HostTensor*>> AttentionCall::forward_outputs() {
  return present({{"o", &o}, {"lse", &lse}});
}

std::vector<std::pair<std::string, HostTensor*>> AttentionCall::backward_outputs() {
  return present({{"dq", &dq}, {"dk", &dk}, {"dv", &dv}, {"dbias", &dbias}, {"dsink", &dsink}});
}

}  // namespace onchip::test
