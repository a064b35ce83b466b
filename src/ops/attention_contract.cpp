#include "ops/attention_contract.hpp"

#include <string_view>
#include <utility>

#include "core/status.hpp"
#include "ops/attention_arguments.hpp"
#include "ops/call.hpp"

namespace onchip::ops {

namespace {

constexpr std::string_view kForward = "attention_forward";
constexpr std::string_view kBackward = "attention_backward";
constexpr std::string_view kMerge = "merge";

// The axis sizes of q, k, v (and o), and everything that follows from them.
void read_geometry(const Call& call, const TensorView& q, const TensorView& k, const TensorView& v,
                   AttentionProblem& problem) {
  const std::string_view op = call.op();
  require_present(op, "q", q);
  require_present(op, "k", k);
  require_present(op, "v", v);
  require_q_dtype(op, q);
  require_dtype(op, "k", k, {q.dtype});
  require_dtype(op, "v", v, {q.dtype});
  const bool packed = problem.packed;
  const std::int32_t rank = packed ? 3 : 4;
  const char* axes = packed ? "rank 3 [total, heads, dim] (cu_seqlens given)"
                            : "rank 4 [batch, seqlen, heads, dim] (no cu_seqlens)";
  for (const auto& [name, tensor] :
       {std::pair<std::string_view, const TensorView*>{"q", &q}, {"k", &k}, {"v", &v}}) {
    if (tensor->rank != rank) {
      throw_invalid(op, name, "shape " + shape_text(*tensor), axes);
    }
  }
  const std::size_t row = packed ? 0 : 1;
  problem.dtype = q.dtype;
  problem.device = q.device;
  problem.slot_q = q.shape[row];
  problem.slot_kv = k.shape[row];
  problem.num_heads_q = q.shape[row + 1];
  problem.num_heads_kv = k.shape[row + 1];
  problem.head_dim_qk = q.shape[row + 2];
  problem.head_dim_v = v.shape[row + 2];
  if (packed) {
    require_shape(op, "k", k, {problem.slot_kv, problem.num_heads_kv, problem.head_dim_qk},
                  "[total_kv, num_heads_kv, head_dim_qk]");
    require_shape(op, "v", v, {problem.slot_kv, problem.num_heads_kv, problem.head_dim_v},
                  "[total_kv, num_heads_kv, head_dim_v]");
  } else {
    problem.num_seqs = q.shape[0];
    require_shape(op, "k", k,
                  {problem.num_seqs, problem.slot_kv, problem.num_heads_kv, problem.head_dim_qk},
                  "[batch, seqlen_kv, num_heads_kv, head_dim_qk]");
    require_shape(op, "v", v,
                  {problem.num_seqs, problem.slot_kv, problem.num_heads_kv, problem.head_dim_v},
                  "[batch, seqlen_kv, num_heads_kv, head_dim_v]");
  }
  require_head_groups(op, problem.num_heads_q, problem.num_heads_kv);
  require_at_most(op, "q", "head_dim_qk", problem.head_dim_qk, kMaxHeadDim);
  require_at_most(op, "v", "head_dim_v", problem.head_dim_v, kMaxHeadDim);
}

// What forward and backward share. Returns the bias tensor, whose shape dbias repeats.
TensorView read_attention(Call& call, const onchip_tensor* q_tensor, const onchip_tensor* k_tensor,
                          const onchip_tensor* v_tensor, const onchip_attention_options& options,
                          AttentionProblem& p) {
  p.op = call.op().data();
  const TensorView q = call.input("q", q_tensor);
  const TensorView k = call.input("k", k_tensor);
  const TensorView v = call.input("v", v_tensor);
  read_sequences(call, options, p);
  read_geometry(call, q, k, v, p);
  call.check_devices(p.device, "q");
  check_sequences(call, p);
  TensorView bias = read_score_options(call, options, score_extents(p), p);
  p.q = rows_view(q, p.packed);
  p.k = rows_view(k, p.packed);
  p.v = rows_view(v, p.packed);
  return bias;
}

}  // namespace

AttentionForwardProblem normalise(const onchip_attention_forward_args& args, CallFacts& facts) {
  Call call(kForward);
  const onchip_attention_options options = read_options(kForward, args.options);
  AttentionForwardProblem p;
  read_attention(call, args.q, args.k, args.v, options, p);
  const TensorView o = call.output("o", args.o);
  const TensorView lse = call.output("lse", args.lse);
  require_present(kForward, "o", o);
  require_rows(call, "o", o, p, true, p.head_dim_v);
  if (lse.present()) require_row_scalars(call, "lse", lse, p);
  call.check_devices(p.device, "q");
  call.check_aliasing();
  p.o = rows_view(o, p.packed);
  p.lse = row_scalars_view(lse, p.packed);
  facts.forced_backend = backend_name(call, options.backend);
  facts.fingerprint = call.fingerprint.value();
  return p;
}

AttentionBackwardProblem normalise(const onchip_attention_backward_args& args, CallFacts& facts) {
  Call call(kBackward);
  const onchip_attention_options options = read_options(kBackward, args.options);
  AttentionBackwardProblem p;
  const TensorView bias = read_attention(call, args.q, args.k, args.v, options, p);
  const TensorView d_o = call.input("d_o", args.d_o);
  const TensorView o = call.input("o", args.o);
  const TensorView lse = call.input("lse", args.lse);
  const TensorView d_lse = call.input("d_lse", args.d_lse);
  const TensorView dq = call.output("dq", args.dq);
  const TensorView dk = call.output("dk", args.dk);
  const TensorView dv = call.output("dv", args.dv);
  const TensorView dbias = call.output("dbias", args.dbias);
  const TensorView dsink = call.output("dsink", args.dsink);
  require_present(kBackward, "d_o", d_o);
  require_present(kBackward, "o", o);
  require_present(kBackward, "lse", lse);
  require_rows(call, "d_o", d_o, p, true, p.head_dim_v);
  require_rows(call, "o", o, p, true, p.head_dim_v);
  require_row_scalars(call, "lse", lse, p);
  if (d_lse.present()) require_row_scalars(call, "d_lse", d_lse, p);
  if (dq.present()) require_rows(call, "dq", dq, p, true, p.head_dim_qk);
  if (dk.present()) require_rows(call, "dk", dk, p, false, p.head_dim_qk);
  if (dv.present()) require_rows(call, "dv", dv, p, false, p.head_dim_v);
  if (dbias.present()) {
    if (!bias.present()) {
      throw_invalid(kBackward, "dbias", "a tensor without bias", "a bias to differentiate");
    }
    require_dtype(kBackward, "dbias", dbias, {bias.dtype});
    require_shape(kBackward, "dbias", dbias,
                  {bias.shape[0], bias.shape[1], bias.shape[2], bias.shape[3]}, "bias's shape");
    for (std::size_t axis = 0; axis < 4; ++axis) p.dbias_shape[axis] = dbias.shape[axis];
  }
  if (dsink.present()) {
    if (!p.options.sink.wanted) {
      throw_invalid(kBackward, "dsink", "a tensor without sink", "a sink to differentiate");
    }
    require_dtype(kBackward, "dsink", dsink, {p.options.sink.dtype});
  }
  call.check_devices(p.device, "q");
  call.check_aliasing();
  p.d_o = rows_view(d_o, p.packed);
  p.o = rows_view(o, p.packed);
  p.lse = row_scalars_view(lse, p.packed);
  p.d_lse = row_scalars_view(d_lse, p.packed);
  p.dq = rows_view(dq, p.packed);
  p.dk = rows_view(dk, p.packed);
  p.dv = rows_view(dv, p.packed);
  p.dbias = scores_view(call, "dbias", dbias, p, score_extents(p));
  p.dsink = sink_view(call, "dsink", dsink, p);
  facts.forced_backend = backend_name(call, options.backend);
  facts.fingerprint = call.fingerprint.value();
  return p;
}

AttentionMergeProblem normalise(const onchip_attention_merge_args& args, CallFacts& facts) {
  Call call(kMerge);
  AttentionMergeProblem p;
  p.op = kMerge.data();
  const TensorView o1 = call.input("o1", args.o1);
  const TensorView lse1 = call.input("lse1", args.lse1);
  const TensorView o2 = call.input("o2", args.o2);
  const TensorView lse2 = call.input("lse2", args.lse2);
  const TensorView o = call.output("o", args.o);
  const TensorView lse = call.output("lse", args.lse);
  for (const auto& [name, tensor] : {std::pair<std::string_view, const TensorView*>{"o1", &o1},
                                     {"lse1", &lse1},
                                     {"o2", &o2},
                                     {"lse2", &lse2},
                                     {"o", &o}}) {
    require_present(kMerge, name, *tensor);
  }
  require_dtype(kMerge, "o1", o1, {DType::f64, DType::f32, DType::f16, DType::bf16});
  if (o1.rank != 3 && o1.rank != 4) {
    throw_invalid(kMerge, "o1", "shape " + shape_text(o1),
                  "[batch, seqlen, heads, dim] or packed [total, heads, dim]");
  }
  const bool packed = o1.rank == 3;
  const std::size_t row = packed ? 0 : 1;
  p.dtype = o1.dtype;
  p.device = o1.device;
  p.batch = packed ? 1 : o1.shape[0];
  p.rows = o1.shape[row];
  p.num_heads = o1.shape[row + 1];
  p.head_dim = o1.shape[row + 2];
  require_at_most(kMerge, "o1", "head_dim_v", p.head_dim, kMaxCachedHeadDimV);
  const DType lse_dtype = p.dtype == DType::f64 ? DType::f64 : DType::f32;
  for (const auto& [name, tensor] :
       {std::pair<std::string_view, const TensorView*>{"o2", &o2}, {"o", &o}}) {
    require_dtype(kMerge, name, *tensor, {p.dtype});
    if (packed) {
      require_shape(kMerge, name, *tensor, {p.rows, p.num_heads, p.head_dim}, "o1's shape");
    } else {
      require_shape(kMerge, name, *tensor, {p.batch, p.rows, p.num_heads, p.head_dim},
                    "o1's shape");
    }
  }
  for (const auto& [name, tensor] : {std::pair<std::string_view, const TensorView*>{"lse1", &lse1},
                                     {"lse2", &lse2},
                                     {"lse", &lse}}) {
    if (!tensor->present()) continue;
    require_dtype(kMerge, name, *tensor, {lse_dtype});
    if (packed) {
      require_shape(kMerge, name, *tensor, {p.num_heads, p.rows}, "[heads, total]");
    } else {
      require_shape(kMerge, name, *tensor, {p.batch, p.num_heads, p.rows},
                    "[batch, heads, seqlen]");
    }
  }
  call.check_devices(p.device, "o1");
  call.check_aliasing();
  p.o1 = rows_view(o1, packed);
  p.o2 = rows_view(o2, packed);
  p.o = rows_view(o, packed);
  p.lse1 = row_scalars_view(lse1, packed);
  p.lse2 = row_scalars_view(lse2, packed);
  p.lse = row_scalars_view(lse, packed);
  facts.forced_backend = backend_name(call, args.backend);
  facts.fingerprint = call.fingerprint.value();
  return p;
}

}  // namespace onchip::ops
