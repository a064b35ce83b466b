#include "support/attention_case.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <initializer_list>
#include <string_view>
#include <unordered_set>
#include <utility>

namespace onchip::test {

namespace {

using TensorPointer = const onchip_tensor*;

bool is_float_number(std::int32_t dtype) {
  return dtype >= ONCHIP_FLOAT64 && dtype <= ONCHIP_BFLOAT16;
}

// Collects the first thing that is wrong.
class Checker {
 public:
  void need(bool holds, std::string_view what) {
    if (!holds && problem_.empty()) problem_ = what;
  }
  bool failed() const { return !problem_.empty(); }
  std::string problem() const { return problem_; }

  void tensor(std::string_view name, TensorPointer t, bool output) {
    if (failed() || t == nullptr) return;
    const std::string prefix = std::string(name) + ": ";
    need(t->dtype >= ONCHIP_FLOAT64 && t->dtype <= ONCHIP_BOOL, prefix + "dtype");
    need(t->rank >= 0 && t->rank <= ONCHIP_MAX_RANK, prefix + "rank");
    need(t->device_type == ONCHIP_DEVICE_CPU && t->device_id == 0, prefix + "not on the CPU");
    if (failed()) return;
    bool empty = false;
    for (std::int32_t axis = 0; axis < t->rank; ++axis) {
      need(t->shape[axis] >= 0, prefix + "negative extent");
      empty = empty || t->shape[axis] == 0;
    }
    if (failed() || empty) return;
    if (t->rank > 0 && t->shape[t->rank - 1] > 1) {
      need(t->strides[t->rank - 1] == 1, prefix + "innermost stride");
    }
    need(t->data != nullptr, prefix + "null data");
    need(reinterpret_cast<std::uintptr_t>(t->data) %
                 static_cast<std::uintptr_t>(dtype_size(static_cast<DType>(t->dtype))) ==
             0,
         prefix + "alignment");
    if (failed()) return;
    tensors_.push_back({std::string(name), t, output});
  }

  // No byte of an output is an element of anything else.
  void aliasing() {
    if (failed()) return;
    std::unordered_set<const std::byte*> written;
    for (const bool outputs : {true, false}) {
      for (const Known& known : tensors_) {
        if (known.output != outputs) continue;
        const std::int64_t size = dtype_size(static_cast<DType>(known.tensor->dtype));
        for_each_element(*known.tensor, [&](const std::byte* at) {
          for (std::int64_t byte = 0; byte < size; ++byte) {
            const bool clash =
                outputs ? !written.insert(at + byte).second : written.contains(at + byte);
            need(!clash, known.name + ": shares memory with an output");
          }
        });
      }
    }
  }

  void shape(std::string_view name, TensorPointer t, const Shape& wanted) {
    if (failed()) return;
    need(t->rank == static_cast<std::int32_t>(wanted.size()) &&
             std::equal(wanted.begin(), wanted.end(), t->shape),
         std::string(name) + ": shape");
  }

 private:
  struct Known {
    std::string name;
    TensorPointer tensor;
    bool output;
  };
  std::string problem_;
  std::vector<Known> tensors_;
};

const onchip_attention_options kDefaults = ONCHIP_ATTENTION_OPTIONS_INIT;

struct Sizes {
  bool packed;
  std::int64_t num_seqs, slot_q, slot_kv, hq, hkv, dqk, dv;

  Shape rows(std::int64_t slot, std::int64_t heads, std::int64_t dim) const {
    return packed ? Shape{slot, heads, dim} : Shape{num_seqs, slot, heads, dim};
  }
  Shape lse() const { return packed ? Shape{hq, slot_q} : Shape{num_seqs, hq, slot_q}; }
};

bool integers(TensorPointer t) { return t->dtype == ONCHIP_INT32 || t->dtype == ONCHIP_INT64; }

void check_flags(Checker& c, const onchip_attention_options& o) {
  for (const std::int32_t flag :
       {o.causal, o.alignment, o.precision, o.deterministic, o.batch_invariant, o.check}) {
    c.need(flag == 0 || flag == 1, "a flag or enumeration");
  }
  c.need(!std::isinf(o.scale), "scale");
  c.need(o.softcap >= 0.0 && !std::isinf(o.softcap), "softcap");
  c.need(o.dropout_p >= 0.0 && o.dropout_p < 65535.5 / 65536.0, "dropout_p");
  for (const std::int64_t bound :
       {o.window_left, o.window_right, o.max_seqlen_q, o.max_seqlen_kv}) {
    c.need(bound >= -1, "a window bound or length hint");
  }
}

struct Lengths {
  std::vector<std::int64_t> q, kv;
};

Lengths check_lengths(Checker& c, const onchip_attention_options& o, const Sizes& s) {
  Lengths lengths;
  const auto slots = [&](TensorPointer cu, std::int64_t slot) {
    std::vector<std::int64_t> result(static_cast<std::size_t>(s.num_seqs), slot);
    if (cu == nullptr) return result;
    c.need(integers(cu), "cu_seqlens: dtype");
    c.shape("cu_seqlens", cu, {s.num_seqs + 1});
    if (c.failed()) return result;
    const std::vector<std::int64_t> values = read_integers(*cu);
    c.need(values.front() >= 0 && values.back() <= slot, "cu_seqlens: range");
    for (std::size_t n = 0; n + 1 < values.size(); ++n) {
      c.need(values[n] <= values[n + 1], "cu_seqlens: order");
      result[n] = values[n + 1] - values[n];
    }
    return result;
  };
  const auto used = [&](TensorPointer seqlens, std::vector<std::int64_t> room) {
    if (seqlens == nullptr || c.failed()) return room;
    c.need(integers(seqlens), "seqlens: dtype");
    c.shape("seqlens", seqlens, {s.num_seqs});
    if (c.failed()) return room;
    const std::vector<std::int64_t> values = read_integers(*seqlens);
    for (std::size_t n = 0; n < values.size(); ++n) {
      c.need(values[n] >= 0 && values[n] <= room[n], "seqlens: range");
    }
    return values;
  };
  const bool own_kv = o.cu_seqlens_kv != nullptr || o.seqlens_kv != nullptr;
  lengths.q = used(o.seqlens_q, slots(o.cu_seqlens_q, s.slot_q));
  lengths.kv =
      used(own_kv ? o.seqlens_kv : o.seqlens_q,
           slots(o.cu_seqlens_kv != nullptr ? o.cu_seqlens_kv : o.cu_seqlens_q, s.slot_kv));
  return lengths;
}

void check_scores(Checker& c, TensorPointer t, const Sizes& s, const Lengths& lengths) {
  if (t == nullptr || c.failed()) return;
  c.need(t->rank == 4, "bias or mask: rank");
  if (c.failed()) return;
  c.need(t->shape[0] == 1 || t->shape[0] == s.num_seqs, "bias or mask: sequences");
  c.need(t->shape[1] == 1 || t->shape[1] == s.hq, "bias or mask: heads");
  for (const auto& [axis, slot, used] :
       {std::tuple{2, s.slot_q, &lengths.q}, std::tuple{3, s.slot_kv, &lengths.kv}}) {
    if (t->shape[axis] == 1) continue;
    if (s.packed) {
      for (const std::int64_t length : *used) {
        c.need(t->shape[axis] >= length, "bias or mask: shorter than a sequence");
      }
    } else {
      c.need(t->shape[axis] == slot, "bias or mask: extent");
    }
  }
}

void check_score_options(Checker& c, const onchip_attention_options& o, const Sizes& s,
                         const Lengths& lengths) {
  for (const TensorPointer t : {o.bias, o.alibi_slopes, o.sink}) {
    if (t != nullptr) c.need(is_float_number(t->dtype), "bias, alibi_slopes or sink: dtype");
  }
  check_scores(c, o.bias, s, lengths);
  check_scores(c, o.mask, s, lengths);
  if (o.mask != nullptr) c.need(o.mask->dtype == ONCHIP_BOOL, "mask: dtype");
  if (o.alibi_slopes != nullptr && o.alibi_slopes->rank == 2) {
    c.shape("alibi_slopes", o.alibi_slopes, {s.num_seqs, s.hq});
  } else if (o.alibi_slopes != nullptr) {
    c.shape("alibi_slopes", o.alibi_slopes, {s.hq});
  }
  if (o.sink != nullptr) c.shape("sink", o.sink, {s.hq});
  c.need((o.q_segment_ids == nullptr) == (o.kv_segment_ids == nullptr), "segment ids: one");
  for (const auto& [t, slot] :
       {std::pair{o.q_segment_ids, s.slot_q}, std::pair{o.kv_segment_ids, s.slot_kv}}) {
    if (t == nullptr) continue;
    c.need(t->dtype == ONCHIP_INT32, "segment ids: dtype");
    c.shape("segment ids", t, s.packed ? Shape{slot} : Shape{s.num_seqs, slot});
  }
  if (o.dropout_rng != nullptr) {
    c.need(o.dropout_rng->dtype == ONCHIP_INT64, "dropout_rng: dtype");
    c.shape("dropout_rng", o.dropout_rng, {2});
  }
  if (o.dropout_p > 0.0) {
    c.need(o.dropout_rng != nullptr, "dropout_rng: absent");
    if (!c.failed()) {
      const std::int64_t offset = read_integers(*o.dropout_rng)[1];
      c.need(offset >= 0 && offset < (std::int64_t{1} << 32), "dropout_rng: offset");
    }
  }
}

// What forward and backward share.
Sizes check_attention(Checker& c, TensorPointer q, TensorPointer k, TensorPointer v,
                      const onchip_attention_options& o) {
  Sizes s{};
  for (const auto& [name, t] :
       {std::pair<std::string_view, TensorPointer>{"q", q}, {"k", k}, {"v", v}}) {
    c.need(t != nullptr, std::string(name) + ": absent");
    c.tensor(name, t, false);
  }
  for (const auto& [name, t] : {std::pair<std::string_view, TensorPointer>{"bias", o.bias},
                                {"mask", o.mask},
                                {"alibi_slopes", o.alibi_slopes},
                                {"q_segment_ids", o.q_segment_ids},
                                {"kv_segment_ids", o.kv_segment_ids},
                                {"sink", o.sink},
                                {"dropout_rng", o.dropout_rng},
                                {"cu_seqlens_q", o.cu_seqlens_q},
                                {"cu_seqlens_kv", o.cu_seqlens_kv},
                                {"seqlens_q", o.seqlens_q},
                                {"seqlens_kv", o.seqlens_kv}}) {
    c.tensor(name, t, false);
  }
  check_flags(c, o);
  c.need(o.cu_seqlens_q != nullptr || o.cu_seqlens_kv == nullptr, "cu_seqlens_q: absent");
  if (c.failed()) return s;
  s.packed = o.cu_seqlens_q != nullptr;
  c.need(is_float_number(q->dtype), "q: dtype");
  c.need(k->dtype == q->dtype && v->dtype == q->dtype, "k or v: dtype");
  c.need(o.precision == 0 || q->dtype == ONCHIP_FLOAT32, "tf32 with other inputs than float32");
  const int rank = s.packed ? 3 : 4;
  c.need(q->rank == rank && k->rank == rank && v->rank == rank, "q, k or v: rank");
  if (s.packed) c.need(o.cu_seqlens_q->rank == 1 && o.cu_seqlens_q->shape[0] >= 1, "cu_seqlens_q");
  if (c.failed()) return s;
  const int row = rank - 3;
  s.num_seqs = s.packed ? o.cu_seqlens_q->shape[0] - 1 : q->shape[0];
  s.slot_q = q->shape[row];
  s.slot_kv = k->shape[row];
  s.hq = q->shape[row + 1];
  s.hkv = k->shape[row + 1];
  s.dqk = q->shape[row + 2];
  s.dv = v->shape[row + 2];
  c.shape("k", k, s.rows(s.slot_kv, s.hkv, s.dqk));
  c.shape("v", v, s.rows(s.slot_kv, s.hkv, s.dv));
  c.need(s.hkv == 0 ? s.hq == 0 : s.hq % s.hkv == 0, "heads");
  c.need(s.dqk <= 256 && s.dv <= 256, "head_dim");
  if (c.failed()) return s;
  const Lengths lengths = check_lengths(c, o, s);
  if (!c.failed()) check_score_options(c, o, s, lengths);
  return s;
}

Values read(TensorPointer t) {
  Values values;
  if (t == nullptr) return values;
  values.dtype = static_cast<DType>(t->dtype);
  values.shape.emplace(t->shape, t->shape + t->rank);
  values.at = read_values(*t);
  return values;
}

AttentionCase read_shared(TensorPointer q, TensorPointer k, TensorPointer v,
                          const onchip_attention_options& o) {
  AttentionCase result;
  result.dtype = static_cast<DType>(q->dtype);
  result.packed = o.cu_seqlens_q != nullptr;
  const int row = result.packed ? 0 : 1;
  result.num_seqs = result.packed ? o.cu_seqlens_q->shape[0] - 1 : q->shape[0];
  result.slot_q = q->shape[row];
  result.slot_kv = k->shape[row];
  result.num_heads_q = q->shape[row + 1];
  result.num_heads_kv = k->shape[row + 1];
  result.head_dim_qk = q->shape[row + 2];
  result.head_dim_v = v->shape[row + 2];
  result.scale = o.scale;
  if (std::isnan(o.scale)) {
    result.scale =
        result.head_dim_qk == 0 ? 1.0 : 1.0 / std::sqrt(static_cast<double>(result.head_dim_qk));
  }
  result.softcap = o.softcap;
  result.dropout_p = o.dropout_p;
  result.window_left = o.window_left;
  result.window_right = o.window_right;
  result.causal = o.causal == 1;
  result.top_left = o.alignment == ONCHIP_TOP_LEFT;
  if (o.dropout_rng != nullptr) {
    const std::vector<std::int64_t> rng = read_integers(*o.dropout_rng);
    result.seed = static_cast<std::uint64_t>(rng[0]);
    result.offset = static_cast<std::uint64_t>(rng[1]);
  }
  const auto lengths = [](TensorPointer t) {
    return t == nullptr ? std::vector<std::int64_t>{} : read_integers(*t);
  };
  result.cu_seqlens_q = lengths(o.cu_seqlens_q);
  result.cu_seqlens_kv = lengths(o.cu_seqlens_kv != nullptr ? o.cu_seqlens_kv : o.cu_seqlens_q);
  result.seqlens_q = lengths(o.seqlens_q);
  const bool own_kv = o.cu_seqlens_kv != nullptr || o.seqlens_kv != nullptr;
  result.seqlens_kv = lengths(own_kv ? o.seqlens_kv : o.seqlens_q);
  result.q = read(q);
  result.k = read(k);
  result.v = read(v);
  result.bias = read(o.bias);
  result.mask = read(o.mask);
  result.alibi_slopes = read(o.alibi_slopes);
  result.q_segment_ids = read(o.q_segment_ids);
  result.kv_segment_ids = read(o.kv_segment_ids);
  result.sink = read(o.sink);
  return result;
}

}  // namespace

std::string illegal(const onchip_attention_forward_args& args) {
  Checker c;
  const Sizes s =
      check_attention(c, args.q, args.k, args.v, args.options ? *args.options : kDefaults);
  c.need(args.o != nullptr, "o: absent");
  c.tensor("o", args.o, true);
  c.tensor("lse", args.lse, true);
  if (c.failed()) return c.problem();
  c.need(args.o->dtype == args.q->dtype, "o: dtype");
  c.shape("o", args.o, s.rows(s.slot_q, s.hq, s.dv));
  if (args.lse != nullptr) {
    c.need(args.lse->dtype == (args.q->dtype == ONCHIP_FLOAT64 ? ONCHIP_FLOAT64 : ONCHIP_FLOAT32),
           "lse: dtype");
    c.shape("lse", args.lse, s.lse());
  }
  c.aliasing();
  return c.problem();
}

std::string illegal(const onchip_attention_backward_args& args) {
  Checker c;
  const onchip_attention_options& options = args.options ? *args.options : kDefaults;
  const Sizes s = check_attention(c, args.q, args.k, args.v, options);
  for (const auto& [name, t] : {std::pair<std::string_view, TensorPointer>{"d_o", args.d_o},
                                {"o", args.o},
                                {"lse", args.lse}}) {
    c.need(t != nullptr, std::string(name) + ": absent");
    c.tensor(name, t, false);
  }
  c.tensor("d_lse", args.d_lse, false);
  for (const auto& [name, t] : {std::pair<std::string_view, TensorPointer>{"dq", args.dq},
                                {"dk", args.dk},
                                {"dv", args.dv},
                                {"dbias", args.dbias},
                                {"dsink", args.dsink}}) {
    c.tensor(name, t, true);
  }
  if (c.failed()) return c.problem();
  const std::int32_t dtype = args.q->dtype;
  const auto rows = [&](std::string_view name, TensorPointer t, const Shape& shape) {
    if (t == nullptr || c.failed()) return;
    c.need(t->dtype == dtype, std::string(name) + ": dtype");
    c.shape(name, t, shape);
  };
  rows("d_o", args.d_o, s.rows(s.slot_q, s.hq, s.dv));
  rows("o", args.o, s.rows(s.slot_q, s.hq, s.dv));
  rows("dq", args.dq, s.rows(s.slot_q, s.hq, s.dqk));
  rows("dk", args.dk, s.rows(s.slot_kv, s.hkv, s.dqk));
  rows("dv", args.dv, s.rows(s.slot_kv, s.hkv, s.dv));
  for (const TensorPointer t : {args.lse, args.d_lse}) {
    if (t == nullptr || c.failed()) continue;
    c.need(t->dtype == (dtype == ONCHIP_FLOAT64 ? ONCHIP_FLOAT64 : ONCHIP_FLOAT32), "lse: dtype");
    c.shape("lse", t, s.lse());
  }
  for (const auto& [gradient, of] :
       {std::pair{args.dbias, options.bias}, std::pair{args.dsink, options.sink}}) {
    if (gradient == nullptr || c.failed()) continue;
    c.need(of != nullptr, "dbias or dsink without bias or sink");
    if (c.failed()) continue;
    c.need(gradient->dtype == of->dtype, "dbias or dsink: dtype");
    c.shape("dbias or dsink", gradient, Shape(of->shape, of->shape + of->rank));
  }
  c.aliasing();
  return c.problem();
}

std::string illegal(const onchip_attention_merge_args& args) {
  Checker c;
  for (const auto& [name, t] : {std::pair<std::string_view, TensorPointer>{"o1", args.o1},
                                {"lse1", args.lse1},
                                {"o2", args.o2},
                                {"lse2", args.lse2},
                                {"o", args.o}}) {
    c.need(t != nullptr, std::string(name) + ": absent");
    c.tensor(name, t, name == "o");
  }
  c.tensor("lse", args.lse, true);
  if (c.failed()) return c.problem();
  c.need(is_float_number(args.o1->dtype), "o1: dtype");
  c.need(args.o1->rank == 3 || args.o1->rank == 4, "o1: rank");
  if (c.failed()) return c.problem();
  const Shape rows(args.o1->shape, args.o1->shape + args.o1->rank);
  c.need(rows.back() <= 512, "head_dim");
  Shape scalars(rows.begin(), rows.end() - 1);
  std::swap(scalars[scalars.size() - 1], scalars[scalars.size() - 2]);
  const std::int32_t lse_dtype = args.o1->dtype == ONCHIP_FLOAT64 ? ONCHIP_FLOAT64 : ONCHIP_FLOAT32;
  for (const TensorPointer t : {args.o2, args.o}) {
    c.need(t->dtype == args.o1->dtype, "o2 or o: dtype");
    c.shape("o2 or o", t, rows);
  }
  for (const TensorPointer t : {args.lse1, args.lse2, args.lse}) {
    if (t == nullptr) continue;
    c.need(t->dtype == lse_dtype, "lse: dtype");
    c.shape("lse", t, scalars);
  }
  c.aliasing();
  return c.problem();
}

AttentionCase read_case(const onchip_attention_forward_args& args) {
  return read_shared(args.q, args.k, args.v, args.options ? *args.options : kDefaults);
}

AttentionCase read_case(const onchip_attention_backward_args& args) {
  AttentionCase result =
      read_shared(args.q, args.k, args.v, args.options ? *args.options : kDefaults);
  result.o = read(args.o);
  result.lse = read(args.lse);
  result.d_o = read(args.d_o);
  result.d_lse = read(args.d_lse);
  result.wants_dbias = args.dbias != nullptr;
  result.wants_dsink = args.dsink != nullptr;
  return result;
}

std::int64_t AttentionCase::length_q(std::int64_t n) const {
  const auto at = static_cast<std::size_t>(n);
  if (!seqlens_q.empty()) return seqlens_q[at];
  return packed ? cu_seqlens_q[at + 1] - cu_seqlens_q[at] : slot_q;
}

std::int64_t AttentionCase::length_kv(std::int64_t n) const {
  const auto at = static_cast<std::size_t>(n);
  if (!seqlens_kv.empty()) return seqlens_kv[at];
  return packed ? cu_seqlens_kv[at + 1] - cu_seqlens_kv[at] : slot_kv;
}

std::int64_t AttentionCase::q_row(std::int64_t n, std::int64_t i, std::int64_t head,
                                  std::int64_t dim) const {
  const std::int64_t row = (packed ? cu_seqlens_q[static_cast<std::size_t>(n)] : n * slot_q) + i;
  return (row * num_heads_q + head) * dim;
}

std::int64_t AttentionCase::kv_row(std::int64_t n, std::int64_t j, std::int64_t head,
                                   std::int64_t dim) const {
  const std::int64_t row = (packed ? cu_seqlens_kv[static_cast<std::size_t>(n)] : n * slot_kv) + j;
  return (row * num_heads_kv + head) * dim;
}

std::int64_t AttentionCase::lse_at(std::int64_t n, std::int64_t i, std::int64_t head) const {
  if (packed) return head * slot_q + cu_seqlens_q[static_cast<std::size_t>(n)] + i;
  return (n * num_heads_q + head) * slot_q + i;
}

}  // namespace onchip::test
