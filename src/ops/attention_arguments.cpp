#include "ops/attention_arguments.hpp"

#include <algorithm>
#include <cmath>
#include <utility>

#include "core/status.hpp"
#include "ops/structs.hpp"

namespace onchip::ops {

namespace {

// Window bounds beyond any sequence act as no bound; clamping keeps i + bound from overflowing.
constexpr std::int64_t kLongestSequence = std::int64_t{1} << 48;

std::string_view at_least_text(const ScoreExtents& extents) {
  if (extents.more_rows) return " (the last two at least)";
  return extents.more_columns ? " (the last at least)" : "";
}

SegmentIdsView segment_ids_view(const Call& call, std::string_view name, const TensorView& tensor,
                                const AttentionProblem& p, std::int64_t slot) {
  SegmentIdsView view;
  if (!tensor.present()) return view;
  require_dtype(call.op(), name, tensor, {DType::i32});
  if (p.packed) {
    require_shape(call.op(), name, tensor, {slot}, "[total]");
  } else {
    require_shape(call.op(), name, tensor, {p.num_seqs, slot}, "[batch, seqlen]");
  }
  view.data = tensor.data;
  view.batch_stride = p.packed ? 0 : bytes(tensor, 0);
  view.row_stride = bytes(tensor, p.packed ? 0 : 1);
  view.wanted = true;
  return view;
}

SegmentIdsView cached_segment_ids_view(const Call& call, const TensorView& tensor,
                                       const AttentionProblem& p, const ScoreExtents& extents) {
  SegmentIdsView view;
  if (!tensor.present()) return view;
  require_dtype(call.op(), "kv_segment_ids", tensor, {DType::i32});
  if (tensor.rank != 2 || tensor.shape[0] != p.num_seqs || tensor.shape[1] < extents.columns) {
    throw_invalid(call.op(), "kv_segment_ids", "shape " + shape_text(tensor),
                  "[batch, seqlen_kv] with sizes " + shape_text({p.num_seqs, extents.columns}) +
                      " (the last at least)");
  }
  view.data = tensor.data;
  view.batch_stride = bytes(tensor, 0);
  view.row_stride = bytes(tensor, 1);
  view.rows = tensor.shape[1];
  view.wanted = true;
  return view;
}

HeadScalarsView alibi_view(const Call& call, const TensorView& tensor, const AttentionProblem& p) {
  HeadScalarsView view;
  if (!tensor.present()) return view;
  const bool per_sequence = tensor.rank == 2;
  if (per_sequence) {
    require_shape(call.op(), "alibi_slopes", tensor, {p.num_seqs, p.num_heads_q},
                  "[num_heads_q] or [num_seqs, num_heads_q]");
  } else {
    require_shape(call.op(), "alibi_slopes", tensor, {p.num_heads_q},
                  "[num_heads_q] or [num_seqs, num_heads_q]");
  }
  view.data = tensor.data;
  view.dtype = tensor.dtype;
  view.sequence_stride = per_sequence ? bytes(tensor, 0) : 0;
  view.head_stride = bytes(tensor, per_sequence ? 1 : 0);
  view.wanted = true;
  return view;
}

void read_dropout(const Call& call, double p, const TensorView& rng, AttentionOptions& options) {
  const std::string_view op = call.op();
  if (!(p >= 0.0 && p < 1.0)) throw_invalid(op, "dropout_p", number_text(p), "0 <= p < 1");
  if (rng.present()) {
    require_dtype(op, "dropout_rng", rng, {DType::i64});
    require_shape(op, "dropout_rng", rng, {2}, "[seed, offset]");
  }
  options.dropout_p = p;
  options.dropout_rng = rng;
  if (p == 0.0) return;
  if (!rng.present()) {
    throw_invalid(op, "dropout_rng", "dropout_p = " + number_text(p) + " without dropout_rng",
                  "(seed, offset), int64 [2]");
  }
  const auto threshold = static_cast<std::uint32_t>(std::floor(65536.0 * p + 0.5));
  if (threshold >= 65536) {
    throw_invalid(op, "dropout_p", number_text(p), "a probability that rounds below 1 in 1/65536",
                  number_text(65535.0 / 65536.0));
  }
  // A p below 2^-17 keeps everything: the mask's resolution is 1/65536.
  options.dropout.active = true;
  options.dropout.threshold = threshold;
  if (!on_host(rng)) return;
  const auto seed = static_cast<std::uint64_t>(load_integer(rng.at(0), DType::i64));
  const std::int64_t offset = load_integer(rng.at(1), DType::i64);
  if (offset < 0 || offset >= (std::int64_t{1} << 32)) {
    throw_invalid(op, "dropout_rng[1]", std::to_string(offset), "an offset from 0 to 2^32 - 1");
  }
  options.dropout.key = {static_cast<std::uint32_t>(seed), static_cast<std::uint32_t>(seed >> 32)};
  options.dropout.offset = static_cast<std::uint32_t>(offset);
}

std::int64_t window_bound(std::string_view op, std::string_view name, std::int64_t value) {
  if (value < -1) {
    throw_invalid(op, name, std::to_string(value), "a number of keys, or -1 for no bound", "-1");
  }
  return std::min(value, kLongestSequence);
}

}  // namespace

void require_q_dtype(std::string_view op, const TensorView& q) {
  require_dtype(op, "q", q, {DType::f64, DType::f32, DType::f16, DType::bf16, DType::e4m3});
  if (q.dtype == DType::e4m3) {
    throw Error(ONCHIP_UNSUPPORTED, std::string(op) +
                                        ": q: float8_e4m3 needs scales from quantize, which no "
                                        "backend has yet; supported: float64, float32, float16, "
                                        "bfloat16");
  }
}

void require_head_groups(std::string_view op, std::int64_t num_heads_q, std::int64_t num_heads_kv) {
  if (num_heads_kv == 0 ? num_heads_q == 0 : num_heads_q % num_heads_kv == 0) return;
  throw_invalid(
      op, "num_heads_q", std::to_string(num_heads_q),
      "a multiple of num_heads_kv = " + std::to_string(num_heads_kv),
      std::to_string(num_heads_kv == 0 ? 0 : nearest_multiple(num_heads_q, num_heads_kv)));
}

RowScalarsView row_scalars_view(const TensorView& tensor, bool packed) {
  RowScalarsView view;
  if (!tensor.present()) return view;
  const std::size_t first = packed ? 0 : 1;
  view.data = tensor.data;
  view.dtype = tensor.dtype;
  view.batch_stride = packed ? 0 : bytes(tensor, 0);
  view.head_stride = bytes(tensor, first);
  view.row_stride = bytes(tensor, first + 1);
  view.wanted = true;
  return view;
}

void require_rows(const Call& call, std::string_view name, const TensorView& tensor,
                  const AttentionProblem& p, bool q_axis, std::int64_t dim) {
  const std::int64_t slot = q_axis ? p.slot_q : p.slot_kv;
  const std::int64_t heads = q_axis ? p.num_heads_q : p.num_heads_kv;
  require_dtype(call.op(), name, tensor, {p.dtype});
  if (p.packed) {
    require_shape(call.op(), name, tensor, {slot, heads, dim}, "[total, heads, dim]");
  } else {
    require_shape(call.op(), name, tensor, {p.num_seqs, slot, heads, dim},
                  "[batch, seqlen, heads, dim]");
  }
}

void require_row_scalars(const Call& call, std::string_view name, const TensorView& tensor,
                         const AttentionProblem& p) {
  require_dtype(call.op(), name, tensor, {p.dtype == DType::f64 ? DType::f64 : DType::f32});
  if (p.packed) {
    require_shape(call.op(), name, tensor, {p.num_heads_q, p.slot_q}, "[num_heads_q, total_q]");
  } else {
    require_shape(call.op(), name, tensor, {p.num_seqs, p.num_heads_q, p.slot_q},
                  "[batch, num_heads_q, seqlen_q]");
  }
}

void read_sequences(Call& call, const onchip_attention_options& options, AttentionProblem& p) {
  const std::string_view op = call.op();
  p.cu_seqlens_q = read_lengths(call, "cu_seqlens_q", options.cu_seqlens_q);
  p.cu_seqlens_kv = read_lengths(call, "cu_seqlens_kv", options.cu_seqlens_kv);
  p.seqlens_q = read_lengths(call, "seqlens_q", options.seqlens_q);
  p.seqlens_kv = read_lengths(call, "seqlens_kv", options.seqlens_kv);
  p.packed = p.cu_seqlens_q.present();
  if (!p.packed && p.cu_seqlens_kv.present()) {
    throw_invalid(op, "cu_seqlens_q", "cu_seqlens_kv without cu_seqlens_q", "both or neither");
  }
  if (p.packed) {
    if (p.cu_seqlens_q.shape[0] < 1) {
      throw_invalid(op, "cu_seqlens_q", "shape " + shape_text(p.cu_seqlens_q),
                    "num_seqs + 1 entries, at least 1");
    }
    p.num_seqs = p.cu_seqlens_q.shape[0] - 1;
  }
  for (const auto& [name, value] :
       {std::pair<std::string_view, std::int64_t>{"max_seqlen_q", options.max_seqlen_q},
        {"max_seqlen_kv", options.max_seqlen_kv}}) {
    if (value < -1) throw_invalid(op, name, std::to_string(value), "a length, or -1 for none");
    call.fingerprint.add(value);
  }
  p.max_seqlen_q = options.max_seqlen_q;
  p.max_seqlen_kv = options.max_seqlen_kv;
}

// Needs num_seqs and the slots: runs after read_geometry.
void check_sequences(const Call& call, AttentionProblem& p) {
  const std::string_view op = call.op();
  const bool own_kv = p.cu_seqlens_kv.present() || p.seqlens_kv.present();
  if (p.packed) {
    if (!p.cu_seqlens_kv.present()) p.cu_seqlens_kv = p.cu_seqlens_q;
    require_shape(op, "cu_seqlens_kv", p.cu_seqlens_kv, {p.num_seqs + 1}, "[num_seqs + 1]");
    check_cu_seqlens(call, "cu_seqlens_q", p.cu_seqlens_q, p.slot_q);
    check_cu_seqlens(call, "cu_seqlens_kv", p.cu_seqlens_kv, p.slot_kv);
  }
  if (!own_kv) p.seqlens_kv = p.seqlens_q;
  if (p.seqlens_q.present()) {
    require_shape(op, "seqlens_q", p.seqlens_q, {p.num_seqs}, "[num_seqs]");
  }
  if (p.seqlens_kv.present()) {
    require_shape(op, "seqlens_kv", p.seqlens_kv, {p.num_seqs}, "[num_seqs]");
  }
  check_seqlens(call, "seqlens_q", p.seqlens_q, p.cu_seqlens_q, p.slot_q);
  check_seqlens(call, "seqlens_kv", p.seqlens_kv, p.cu_seqlens_kv, p.slot_kv);
}

bool lengths_on_host(const AttentionProblem& p) {
  for (const TensorView* tensor :
       {&p.cu_seqlens_q, &p.cu_seqlens_kv, &p.seqlens_q, &p.seqlens_kv}) {
    if (tensor->present() && !on_host(*tensor)) return false;
  }
  return true;
}

ScoreExtents score_extents(const AttentionProblem& p) {
  ScoreExtents extents{p.slot_q, p.slot_kv, p.packed, p.packed, false};
  if (!p.packed) return extents;
  extents.rows = extents.columns = 0;
  if (!lengths_on_host(p)) return extents;
  for (std::int64_t n = 0; n < p.num_seqs; ++n) {
    const SequenceRange s = p.sequence(n);
    extents.rows = std::max(extents.rows, s.q_len);
    extents.columns = std::max(extents.columns, s.kv_len);
  }
  return extents;
}

ScoresView scores_view(const Call& call, std::string_view name, const TensorView& tensor,
                       const AttentionProblem& p, const ScoreExtents& extents) {
  ScoresView view;
  if (!tensor.present()) return view;
  const std::string_view op = call.op();
  const std::string wanted =
      "[num_seqs|1, num_heads_q|1, seqlen_q|1, seqlen_kv|1] with sizes " +
      shape_text({p.num_seqs, p.num_heads_q, extents.rows, extents.columns}) +
      std::string(at_least_text(extents));
  const auto refuse = [&] { throw_invalid(op, name, "shape " + shape_text(tensor), wanted); };
  if (tensor.rank != 4) refuse();
  if (tensor.shape[0] != 1 && tensor.shape[0] != p.num_seqs) refuse();
  if (tensor.shape[1] != 1 && tensor.shape[1] != p.num_heads_q) refuse();
  const auto reaches = [](std::int64_t extent, std::int64_t wanted_extent, bool or_more) {
    return extent == 1 || extent == wanted_extent || (or_more && extent > wanted_extent);
  };
  if (!reaches(tensor.shape[2], extents.rows, extents.more_rows) ||
      !reaches(tensor.shape[3], extents.columns, extents.more_columns)) {
    refuse();
  }
  const auto stride = [&tensor](std::size_t axis) {
    return tensor.shape[axis] == 1 ? 0 : bytes(tensor, axis);
  };
  view.data = tensor.data;
  view.dtype = tensor.dtype;
  view.sequence_stride = stride(0);
  view.head_stride = stride(1);
  view.row_stride = stride(2);
  view.column_stride = stride(3);
  if (tensor.shape[2] != 1) view.rows = tensor.shape[2];
  if (tensor.shape[3] != 1) view.columns = tensor.shape[3];
  view.wanted = true;
  return view;
}

HeadScalarsView sink_view(const Call& call, std::string_view name, const TensorView& tensor,
                          const AttentionProblem& p) {
  HeadScalarsView view;
  if (!tensor.present()) return view;
  require_shape(call.op(), name, tensor, {p.num_heads_q}, "[num_heads_q]");
  view.data = tensor.data;
  view.dtype = tensor.dtype;
  view.head_stride = bytes(tensor, 0);
  view.wanted = true;
  return view;
}

onchip_attention_options read_options(std::string_view op,
                                      const onchip_attention_options* options) {
  const onchip_attention_options defaults = ONCHIP_ATTENTION_OPTIONS_INIT;
  if (options == nullptr) return defaults;
  return read_struct(op, "options", options, defaults, sizeof(onchip_attention_options));
}

TensorView read_score_options(Call& call, const onchip_attention_options& given,
                              const ScoreExtents& extents, AttentionProblem& p) {
  const std::string_view op = call.op();
  AttentionOptions& o = p.options;
  if (std::isnan(given.scale)) {
    o.scale = p.head_dim_qk == 0 ? 1.0 : 1.0 / std::sqrt(static_cast<double>(p.head_dim_qk));
  } else {
    o.scale = given.scale;
  }
  if (!std::isfinite(o.scale)) throw_invalid(op, "scale", number_text(o.scale), "a finite number");
  if (!(given.softcap >= 0.0) || !std::isfinite(given.softcap)) {
    throw_invalid(op, "softcap", number_text(given.softcap), "0 (none) or a finite cap above 0");
  }
  o.softcap = given.softcap;
  o.window_left = window_bound(op, "window_left", given.window_left);
  o.window_right = window_bound(op, "window_right", given.window_right);
  if (flag(op, "causal", given.causal) == 1) o.window_right = 0;
  if (given.alignment != ONCHIP_BOTTOM_RIGHT && given.alignment != ONCHIP_TOP_LEFT) {
    throw_invalid(op, "alignment", std::to_string(given.alignment),
                  "ONCHIP_BOTTOM_RIGHT (0) or ONCHIP_TOP_LEFT (1)");
  }
  o.top_left = given.alignment == ONCHIP_TOP_LEFT;
  if (given.precision != ONCHIP_PRECISION_DEFAULT && given.precision != ONCHIP_PRECISION_TF32) {
    throw_invalid(op, "precision", std::to_string(given.precision),
                  "ONCHIP_PRECISION_DEFAULT (0) or ONCHIP_PRECISION_TF32 (1)");
  }
  o.tf32 = given.precision == ONCHIP_PRECISION_TF32;
  if (o.tf32 && p.dtype != DType::f32) {
    throw_invalid(op, "precision", std::string("tf32 with ") + dtype_name(p.dtype),
                  "float32 inputs");
  }
  o.deterministic = flag(op, "deterministic", given.deterministic) == 1;
  o.batch_invariant = flag(op, "batch_invariant", given.batch_invariant) == 1;
  o.check = flag(op, "check", given.check) == 1;

  const TensorView bias = call.input("bias", given.bias);
  const TensorView mask = call.input("mask", given.mask);
  const TensorView alibi = call.input("alibi_slopes", given.alibi_slopes);
  const TensorView q_ids = call.input("q_segment_ids", given.q_segment_ids);
  const TensorView kv_ids = call.input("kv_segment_ids", given.kv_segment_ids);
  const TensorView sink = call.input("sink", given.sink);
  const TensorView rng = call.input("dropout_rng", given.dropout_rng);
  for (const auto& [name, tensor] : {std::pair<std::string_view, const TensorView*>{"bias", &bias},
                                     {"alibi_slopes", &alibi},
                                     {"sink", &sink}}) {
    if (tensor->present()) {
      require_dtype(op, name, *tensor, {DType::f64, DType::f32, DType::f16, DType::bf16});
    }
  }
  if (mask.present()) require_dtype(op, "mask", mask, {DType::boolean});
  require_both(op, "q_segment_ids", q_ids.present(), "kv_segment_ids", kv_ids.present());
  o.bias = scores_view(call, "bias", bias, p, extents);
  o.mask = scores_view(call, "mask", mask, p, extents);
  o.alibi_slopes = alibi_view(call, alibi, p);
  o.sink = sink_view(call, "sink", sink, p);
  o.q_segment_ids = segment_ids_view(call, "q_segment_ids", q_ids, p, p.slot_q);
  o.kv_segment_ids = extents.cached_keys
                         ? cached_segment_ids_view(call, kv_ids, p, extents)
                         : segment_ids_view(call, "kv_segment_ids", kv_ids, p, p.slot_kv);
  read_dropout(call, given.dropout_p, rng, o);

  Fingerprint& f = call.fingerprint;
  f.add(o.scale);
  f.add(o.softcap);
  f.add(o.dropout_p);
  f.add(o.window_left);
  f.add(o.window_right);
  f.add((std::int64_t{o.top_left} << 4) | (std::int64_t{o.tf32} << 3) |
        (std::int64_t{o.deterministic} << 2) | (std::int64_t{o.batch_invariant} << 1) |
        std::int64_t{o.check});
  return bias;
}

}  // namespace onchip::ops
