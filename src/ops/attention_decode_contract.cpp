// The contract of attention over caches (docs/semantics.md section 2, Decode).
#include <algorithm>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/status.hpp"
#include "ops/attention_arguments.hpp"
#include "ops/attention_contract.hpp"
#include "ops/call.hpp"

namespace onchip::ops {

namespace {

constexpr std::string_view kDecode = "attention_decode";

// No sequence is longer; keeps max_pages page_size within 64 bits.
constexpr std::int64_t kMostRoom = std::int64_t{1} << 48;

std::string indexed(std::string_view name, std::int64_t n) {
  return std::string(name) + "[" + std::to_string(n) + "]";
}
std::string indexed(std::string_view name, std::int64_t n, std::int64_t e) {
  return std::string(name) + "[" + std::to_string(n) + ", " + std::to_string(e) + "]";
}

// Whether `part` is the first channels of `whole`, as MLA keeps its values within its keys. Two
// tensors without memory may be.
bool first_channels(const onchip_tensor* part, const onchip_tensor* whole) {
  if (part == nullptr || whole == nullptr) return false;
  if (part->rank != 4 || whole->rank != 4 || part->data != whole->data) return false;
  if (part->dtype != whole->dtype || part->device_type != whole->device_type ||
      part->device_id != whole->device_id || part->shape[3] > whole->shape[3]) {
    return false;
  }
  for (int axis = 0; axis < 3; ++axis) {
    if (part->shape[axis] != whole->shape[axis]) return false;
    if (part->shape[axis] > 1 && part->strides[axis] != whole->strides[axis]) return false;
  }
  return true;
}

struct Tensors {
  TensorView q, k_cache, v_cache, k_new, v_new, o, lse;
};

Tensors read_tensors(Call& call, const onchip_attention_decode_args& args,
                     AttentionDecodeProblem& p) {
  const bool appends = args.k_new != nullptr;
  p.v_in_k = first_channels(args.v_cache, args.k_cache) &&
             (args.v_cache->data != nullptr || args.v_new == nullptr);
  call.fingerprint.add(std::int64_t{p.v_in_k});
  Tensors t;
  t.q = call.input("q", args.q);
  if (appends) {
    t.k_cache = call.output("k_cache", args.k_cache);
    t.v_cache =
        p.v_in_k ? call.covered("v_cache", args.v_cache) : call.output("v_cache", args.v_cache);
  } else {
    t.k_cache = call.input("k_cache", args.k_cache);
    t.v_cache = call.input("v_cache", args.v_cache);
  }
  t.k_new = call.input("k_new", args.k_new);
  t.v_new = call.input("v_new", args.v_new);
  p.cache_seqlens = call.input("cache_seqlens", args.cache_seqlens);
  p.page_table = call.input("page_table", args.page_table);
  p.cache_slot = call.input("cache_slot", args.cache_slot);
  p.q_positions = call.input("q_positions", args.q_positions);
  t.o = call.output("o", args.o);
  t.lse = call.output("lse", args.lse);

  for (const auto& [name, tensor] : {std::pair<std::string_view, const TensorView*>{"q", &t.q},
                                     {"k_cache", &t.k_cache},
                                     {"v_cache", &t.v_cache},
                                     {"cache_seqlens", &p.cache_seqlens},
                                     {"o", &t.o}}) {
    require_present(kDecode, name, *tensor);
  }
  if (p.v_in_k && t.v_new.present()) {
    throw_invalid(kDecode, "v_new", "a tensor, with v_cache inside k_cache",
                  "no tensor: the first channels of k_new are the new values");
  }
  if (!p.v_in_k) {
    require_both(kDecode, "k_new", t.k_new.present(), "v_new", t.v_new.present());
  }
  return t;
}

void read_geometry(const Call& call, const Tensors& t, AttentionDecodeProblem& p) {
  require_q_dtype(kDecode, t.q);
  const std::int32_t rank = p.packed ? 3 : 4;
  if (t.q.rank != rank) {
    throw_invalid(kDecode, "q", "shape " + shape_text(t.q),
                  p.packed ? "rank 3 [total, heads, dim] (cu_seqlens_q given)"
                           : "rank 4 [batch, seqlen, heads, dim] (no cu_seqlens_q)");
  }
  const std::size_t row = p.packed ? 0 : 1;
  p.dtype = t.q.dtype;
  p.device = t.q.device;
  if (!p.packed) p.num_seqs = t.q.shape[0];
  p.slot_q = t.q.shape[row];
  p.num_heads_q = t.q.shape[row + 1];
  p.head_dim_qk = t.q.shape[row + 2];

  const bool paged = p.page_table.present();
  const std::string axes =
      paged ? "[pages, page_size, num_heads_kv, " : "[slots, capacity, num_heads_kv, ";
  for (const auto& [name, tensor] :
       {std::pair<std::string_view, const TensorView*>{"k_cache", &t.k_cache},
        {"v_cache", &t.v_cache}}) {
    require_dtype(kDecode, name, *tensor, {p.dtype});
    if (tensor->rank != 4) {
      throw_invalid(kDecode, name, "shape " + shape_text(*tensor), "rank 4 " + axes + "dim]");
    }
  }
  p.num_blocks = t.k_cache.shape[0];
  p.block_rows = t.k_cache.shape[1];
  p.num_heads_kv = t.k_cache.shape[2];
  p.head_dim_v = t.v_cache.shape[3];
  require_shape(kDecode, "k_cache", t.k_cache,
                {p.num_blocks, p.block_rows, p.num_heads_kv, p.head_dim_qk}, axes + "head_dim_qk]");
  require_shape(kDecode, "v_cache", t.v_cache,
                {p.num_blocks, p.block_rows, p.num_heads_kv, p.head_dim_v}, axes + "head_dim_v]");
  require_head_groups(kDecode, p.num_heads_q, p.num_heads_kv);
  require_at_most(kDecode, "q", "head_dim_qk", p.head_dim_qk, kMaxCachedHeadDimQk);
  require_at_most(kDecode, "v_cache", "head_dim_v", p.head_dim_v, kMaxCachedHeadDimV);

  require_dtype(kDecode, "cache_seqlens", p.cache_seqlens, {DType::i32});
  require_shape(kDecode, "cache_seqlens", p.cache_seqlens, {p.num_seqs}, "[batch]");
  if (p.cache_slot.present()) {
    require_dtype(kDecode, "cache_slot", p.cache_slot, {DType::i32});
    require_shape(kDecode, "cache_slot", p.cache_slot, {p.num_seqs}, "[batch]");
  } else if (!paged && p.num_blocks < p.num_seqs) {
    throw_invalid(kDecode, "k_cache", std::to_string(p.num_blocks) + " slots",
                  "one for each of the " + std::to_string(p.num_seqs) + " batch rows",
                  "cache_slot, which says where each row's keys lie");
  }
  p.room = std::min(p.block_rows, kMostRoom);
  if (paged) {
    require_dtype(kDecode, "page_table", p.page_table, {DType::i32});
    if (p.page_table.rank != 2 || p.page_table.shape[0] != p.num_seqs) {
      throw_invalid(kDecode, "page_table", "shape " + shape_text(p.page_table),
                    "[batch, max_pages] with batch = " + std::to_string(p.num_seqs));
    }
    const std::int64_t max_pages = p.page_table.shape[1];
    p.room = max_pages == 0 || p.block_rows <= kMostRoom / max_pages ? max_pages * p.block_rows
                                                                     : kMostRoom;
  }

  if (!t.k_new.present()) return;
  const bool right_rank = t.k_new.rank == rank;
  p.slot_kv = right_rank ? t.k_new.shape[row] : 0;
  require_rows(call, "k_new", t.k_new, p, false, p.head_dim_qk);
  if (t.v_new.present()) require_rows(call, "v_new", t.v_new, p, false, p.head_dim_v);
}

// Lengths of q and of the new rows. Without new rows there is nothing for those to count.
void read_new_lengths(const Call& call, const Tensors& t, AttentionDecodeProblem& p) {
  if (t.k_new.present()) {
    check_sequences(call, p);
    return;
  }
  for (const auto& [name, tensor] :
       {std::pair<std::string_view, const TensorView*>{"cu_seqlens_kv", &p.cu_seqlens_kv},
        {"seqlens_kv", &p.seqlens_kv}}) {
    if (tensor->present()) {
      throw_invalid(kDecode, name, "a tensor without k_new",
                    "no tensor: the lengths of cached keys are cache_seqlens");
    }
  }
  p.slot_kv = p.slot_q;  // absent lengths default to q's, which then hold
  check_sequences(call, p);
  p.slot_kv = 0;
}

void read_rotary(Call& call, const onchip_attention_decode_args& args, AttentionDecodeProblem& p) {
  const TensorView cos = call.input("rotary_cos", args.rotary_cos);
  const TensorView sin = call.input("rotary_sin", args.rotary_sin);
  p.rotary.interleaved = flag(kDecode, "rotary_interleaved", args.rotary_interleaved) == 1;
  call.fingerprint.add(args.rotary_interleaved);
  if (args.reserved != 0) throw_invalid(kDecode, "reserved", std::to_string(args.reserved), "0");
  require_both(kDecode, "rotary_cos", cos.present(), "rotary_sin", sin.present());
  if (!cos.present()) {
    if (p.rotary.interleaved) {
      throw_invalid(kDecode, "rotary_interleaved", "1 without rotary_cos", "tables to rotate by");
    }
    if (p.q_positions.present()) {
      throw_invalid(kDecode, "q_positions", "a tensor without rotary_cos",
                    "tables to rotate by (masks go by seqlen_kv - seqlen_q + i)");
    }
    return;
  }
  require_dtype(kDecode, "rotary_cos", cos,
                p.dtype == DType::f32 ? std::initializer_list<DType>{DType::f32}
                                      : std::initializer_list<DType>{p.dtype, DType::f32});
  require_dtype(kDecode, "rotary_sin", sin, {cos.dtype});
  if (cos.rank != 2 || 2 * cos.shape[1] > p.head_dim_qk) {
    throw_invalid(kDecode, "rotary_cos", "shape " + shape_text(cos),
                  "[max_pos, rotary_dim / 2] with rotary_dim at most head_dim_qk = " +
                      std::to_string(p.head_dim_qk));
  }
  require_shape(kDecode, "rotary_sin", sin, {cos.shape[0], cos.shape[1]}, "rotary_cos's shape");
  p.rotary.cos = cos.data;
  p.rotary.sin = sin.data;
  p.rotary.dtype = cos.dtype;
  p.rotary.cos_stride = bytes(cos, 0);
  p.rotary.sin_stride = bytes(sin, 0);
  p.rotary.positions = cos.shape[0];
  p.rotary.pairs = cos.shape[1];
  p.rotary.wanted = true;
  if (!p.q_positions.present()) return;
  require_dtype(kDecode, "q_positions", p.q_positions, {DType::i32, DType::i64});
  if (p.packed) {
    require_shape(kDecode, "q_positions", p.q_positions, {p.slot_q}, "[total_q]");
  } else {
    require_shape(kDecode, "q_positions", p.q_positions, {p.num_seqs, p.slot_q},
                  "[batch, seqlen_q]");
  }
}

// ---- values in host memory ----------------------------------------------------------------------

bool values_on_host(const AttentionDecodeProblem& p) {
  return on_host(p.cache_seqlens) && (!p.cache_slot.present() || on_host(p.cache_slot)) &&
         (!p.page_table.present() || on_host(p.page_table)) && lengths_on_host(p);
}

std::int64_t entries(const AttentionDecodeProblem& p, const DecodeSequence& s) {
  if (!p.page_table.present()) return 1;
  return s.kv_len == 0 ? 0 : (s.kv_len - 1) / p.block_rows + 1;
}

// Length, slot and pages of one sequence.
void check_cached(const AttentionDecodeProblem& p, const DecodeSequence& s) {
  const bool paged = p.page_table.present();
  if (p.cache_slot.present() && (s.slot < -1 || (!paged && s.slot >= p.num_blocks))) {
    throw_invalid(kDecode, indexed("cache_slot", s.n), std::to_string(s.slot),
                  paged ? "-1 (skip) or, with a page table, any number from 0"
                        : "-1 (skip) or a slot below " + std::to_string(p.num_blocks));
  }
  if (s.skipped) return;
  if (s.new_len > p.room) {
    throw_invalid(
        kDecode, "k_new",
        std::to_string(s.new_len) + " new rows of sequence " + std::to_string(s.n),
        "at most " + std::to_string(p.room) + ", which is all that a sequence has room for");
  }
  if (s.cached_len < 0 || s.kv_len > p.room) {
    throw_invalid(kDecode, indexed("cache_seqlens", s.n), std::to_string(s.cached_len),
                  "0 to " + std::to_string(p.room - s.new_len) + ": room for " +
                      std::to_string(p.room) + " rows" +
                      (paged ? " (max_pages page_size)" : " (capacity)") + ", of which " +
                      std::to_string(s.new_len) + " are new");
  }
  if (!paged) return;
  for (std::int64_t e = 0; e < entries(p, s); ++e) {
    const std::int64_t page = p.block(s, e);
    if (page < 0 || page >= p.num_blocks) {
      throw_invalid(kDecode, indexed("page_table", s.n, e), std::to_string(page),
                    "a page below " + std::to_string(p.num_blocks) + " (sequence " +
                        std::to_string(s.n) + " uses " + std::to_string(entries(p, s)) +
                        " entries)");
    }
  }
}

void check_positions(const AttentionDecodeProblem& p, const DecodeSequence& s) {
  if (!p.rotary.wanted || s.skipped) return;
  const std::int64_t positions = p.rotary.positions;
  const bool explicit_q = p.q_positions.present();
  const std::int64_t last_q = s.q_len > 0 && !explicit_q ? s.kv_len : 0;
  const std::int64_t needed = std::max(s.new_len > 0 ? s.kv_len : 0, last_q);
  if (needed > positions) {
    throw_invalid(
        kDecode, "rotary_cos", std::to_string(positions) + " positions",
        std::to_string(needed) + ": sequence " + std::to_string(s.n) + " reaches that far");
  }
  if (!explicit_q) {
    if (s.q_len > s.kv_len) {
      throw_invalid(kDecode, indexed("cache_seqlens", s.n),
                    std::to_string(s.kv_len) + " keys under " + std::to_string(s.q_len) +
                        " queries with rotary_cos",
                    "as many keys as queries, so that no query's position is negative",
                    "q_positions");
    }
    return;
  }
  if (!on_host(p.q_positions)) return;
  for (std::int64_t i = 0; i < s.q_len; ++i) {
    const std::int64_t position = p.q_position(s, i);
    if (position < 0 || position >= positions) {
      throw_invalid(
          kDecode,
          p.packed ? indexed("q_positions", s.q_begin + i) : indexed("q_positions", s.n, i),
          std::to_string(position), "a position below rotary_cos's " + std::to_string(positions));
    }
  }
}

// A slot, or an entry of a page table that is in use.
struct Block {
  std::int64_t block = 0;
  std::int64_t n = 0;
  std::int64_t entry = 0;
  std::int64_t used = 0;   // its first rows hold keys after the append
  std::int64_t first = 0;  // of them, new from here on; == used: none
};

Block used_block(const AttentionDecodeProblem& p, const DecodeSequence& s, std::int64_t entry) {
  const std::int64_t begin = entry * p.block_rows;
  const std::int64_t used = std::min(p.block_rows, s.kv_len - begin);
  return {p.block(s, entry), s.n, entry, used,
          std::clamp<std::int64_t>(s.cached_len - begin, 0, used)};
}

// No row that a sequence appends may be one that another reads or writes.
void check_appended_apart(const AttentionDecodeProblem& p) {
  std::vector<Block> written;
  for (std::int64_t n = 0; n < p.num_seqs; ++n) {
    const DecodeSequence s = p.cached_sequence(n);
    if (s.new_len == 0) continue;
    for (std::int64_t e = p.page_table.present() ? s.cached_len / p.block_rows : 0;
         e < entries(p, s); ++e) {
      written.push_back(used_block(p, s, e));
    }
  }
  if (written.empty()) return;
  std::sort(written.begin(), written.end(), [](const Block& a, const Block& b) {
    return std::pair(a.block, a.first) < std::pair(b.block, b.first);
  });
  const auto name = [&](const Block& block) {
    return p.page_table.present() ? indexed("page_table", block.n, block.entry)
                                  : indexed("cache_slot", block.n);
  };
  for (std::int64_t n = 0; n < p.num_seqs; ++n) {
    const DecodeSequence s = p.cached_sequence(n);
    if (s.skipped) continue;
    for (std::int64_t e = 0; e < entries(p, s); ++e) {
      const Block reader = used_block(p, s, e);
      auto writer = std::lower_bound(
          written.begin(), written.end(), reader.block,
          [](const Block& block, std::int64_t wanted) { return block.block < wanted; });
      for (; writer != written.end() && writer->block == reader.block; ++writer) {
        if (writer->n == n && writer->entry == e) continue;
        if (writer->first >= reader.used) break;
        throw_invalid(kDecode, name(reader),
                      std::to_string(reader.block) + ", whose row " +
                          std::to_string(writer->first) + " " + name(*writer) + " appends",
                      p.page_table.present() ? "pages of its own where new rows go"
                                             : "a slot of its own where new rows go");
      }
    }
  }
}

ScoreExtents cached_extents(const AttentionDecodeProblem& p, bool values_known) {
  ScoreExtents extents{p.packed ? 0 : p.slot_q, 0, p.packed, true, true};
  if (!values_known) return extents;
  for (std::int64_t n = 0; n < p.num_seqs; ++n) {
    const DecodeSequence s = p.cached_sequence(n);
    if (s.skipped) continue;
    extents.rows = std::max(extents.rows, s.q_len);
    extents.columns = std::max(extents.columns, s.kv_len);
  }
  return extents;
}

void refuse_dropout(const onchip_attention_options& options) {
  if (options.dropout_p != 0.0) {
    throw_invalid(kDecode, "dropout_p", number_text(options.dropout_p),
                  "0: decoding has no dropout");
  }
  if (options.dropout_rng != nullptr) {
    throw_invalid(kDecode, "dropout_rng", "a tensor", "no tensor: decoding has no dropout");
  }
}

}  // namespace

AttentionDecodeProblem normalise(const onchip_attention_decode_args& args, CallFacts& facts) {
  Call call(kDecode);
  const onchip_attention_options options = read_options(kDecode, args.options);
  refuse_dropout(options);
  AttentionDecodeProblem p;
  p.op = kDecode.data();
  const Tensors t = read_tensors(call, args, p);
  read_sequences(call, options, p);
  read_geometry(call, t, p);
  read_rotary(call, args, p);
  call.check_devices(p.device, "q");
  read_new_lengths(call, t, p);
  p.q = rows_view(t.q, p.packed);
  p.k = rows_view(t.k_new, p.packed);
  p.v = rows_view(t.v_new, p.packed);
  p.k_cache = rows_view(t.k_cache, false);
  p.v_cache = rows_view(t.v_cache, false);

  const bool values_known = values_on_host(p);
  if (values_known) {
    for (std::int64_t n = 0; n < p.num_seqs; ++n) {
      const DecodeSequence s = p.cached_sequence(n);
      check_cached(p, s);
      check_positions(p, s);
    }
    check_appended_apart(p);
  }
  read_score_options(call, options, cached_extents(p, values_known), p);

  require_rows(call, "o", t.o, p, true, p.head_dim_v);
  if (t.lse.present()) require_row_scalars(call, "lse", t.lse, p);
  call.check_devices(p.device, "q");
  call.check_aliasing();
  p.o = rows_view(t.o, p.packed);
  p.lse = row_scalars_view(t.lse, p.packed);
  facts.forced_backend = backend_name(call, options.backend);
  facts.fingerprint = call.fingerprint.value();
  return p;
}

}  // namespace onchip::ops
