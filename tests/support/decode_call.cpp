#include "support/decode_call.hpp"

#include <algorithm>
#include <map>

namespace onchip::test {

namespace {

// Rows [0, count) of a sequence in a cache; the others keep their poison.
void fill_rows(HostTensor& cache, const std::vector<std::int64_t>& blocks, std::int64_t block_rows,
               std::int64_t count, Random& random) {
  const onchip_tensor& view = cache.view();
  for (std::int64_t j = 0; j < count; ++j) {
    const std::int64_t block = blocks[static_cast<std::size_t>(j / block_rows)];
    for (std::int64_t head = 0; head < view.shape[2]; ++head) {
      for (std::int64_t d = 0; d < view.shape[3]; ++d) {
        cache.set({block, j % block_rows, head, d}, random.normal());
      }
    }
  }
}

}  // namespace

DecodeCall::DecodeCall(Random& random) {
  const DType dtype = random.one_of({DType::f64, DType::f32, DType::f16, DType::bf16});
  const std::int64_t batch = random.integer(0, 3);
  const std::int64_t seqlen_q = random.integer(0, 3);
  const std::int64_t heads_kv = random.integer(1, 2);
  const std::int64_t heads_q = heads_kv * random.integer(1, 3);
  const std::int64_t dim = random.integer(1, 20);
  const std::int64_t dim_v = random.integer(1, 20);
  const std::int64_t longest = random.one_of<std::int64_t>({4, 20, 90});
  const bool appends = random.chance(0.6);
  const bool paged = random.chance(0.5);
  const bool rotates = dim > 1 && random.chance(0.4);
  const std::int64_t rows_new = appends ? random.integer(0, std::min<std::int64_t>(longest, 3)) : 0;

  q = HostTensor(dtype, {batch, seqlen_q, heads_q, dim});
  q.fill([&] { return random.normal(); });
  o = HostTensor(dtype, {batch, seqlen_q, heads_q, dim_v});
  lse = HostTensor(dtype == DType::f64 ? DType::f64 : DType::f32, {batch, heads_q, seqlen_q});
  if (appends) {
    k_new = HostTensor(dtype, {batch, rows_new, heads_kv, dim});
    v_new = HostTensor(dtype, {batch, rows_new, heads_kv, dim_v});
    k_new.fill([&] { return random.normal(); });
    v_new.fill([&] { return random.normal(); });
  }

  const std::int64_t block_rows = paged ? random.integer(1, 8) : longest + random.integer(0, 3);
  const std::int64_t max_pages = (longest + block_rows - 1) / block_rows;
  const std::int64_t blocks = (paged ? batch * max_pages : batch) + random.integer(0, 2);
  k_cache = HostTensor(dtype, {blocks, block_rows, heads_kv, dim});
  v_cache = HostTensor(dtype, {blocks, block_rows, heads_kv, dim_v});
  std::vector<std::int64_t> lengths, slots, table;
  for (std::int64_t n = 0; n < batch; ++n) {
    lengths.push_back(random.integer(std::min(seqlen_q, longest - rows_new), longest - rows_new));
    slots.push_back(random.chance(0.2) ? -1 : blocks - 1 - n);
    std::vector<std::int64_t> own;
    for (std::int64_t e = 0; e < max_pages; ++e) own.push_back(blocks - 1 - (n * max_pages + e));
    if (!paged) own = {slots.back()};
    if (slots.back() >= 0 || paged) {
      fill_rows(k_cache, own, block_rows, lengths.back(), random);
      fill_rows(v_cache, own, block_rows, lengths.back(), random);
    }
    table.insert(table.end(), own.begin(), own.end());
  }
  cache_seqlens = HostTensor(DType::i32, {batch});
  cache_seqlens.fill_integers(lengths);
  cache_slot = HostTensor(DType::i32, {batch});
  cache_slot.fill_integers(slots);
  if (paged) {
    page_table = HostTensor(DType::i32, {batch, max_pages});
    page_table.fill_integers(table);
  }
  if (rotates) {
    const std::int64_t pairs = random.integer(1, dim / 2);
    const DType table_dtype = random.chance(0.5) ? dtype : DType::f32;
    rotary_cos = HostTensor(table_dtype, {longest + 3, pairs});
    rotary_sin = HostTensor(table_dtype, {longest + 3, pairs});
    rotary_cos.fill([&] { return 2.0 * random.uniform() - 1.0; });
    rotary_sin.fill([&] { return 2.0 * random.uniform() - 1.0; });
    interleaved = random.chance(0.5);
    q_positions = HostTensor(DType::i64, {batch, seqlen_q});
    std::vector<std::int64_t> positions;
    for (std::int64_t i = 0; i < batch * seqlen_q; ++i) {
      positions.push_back(random.integer(0, longest + 2));
    }
    q_positions.fill_integers(positions);
  }
  if (random.chance(0.3)) {
    bias = HostTensor(DType::f32, {1, heads_q, 1, longest});
    bias.fill([&] { return random.normal(); });
    options.bias = bias.abi();
  }
  if (random.chance(0.3)) {
    sink = HostTensor(DType::f32, {heads_q});
    sink.fill([&] { return random.normal(); });
    options.sink = sink.abi();
  }
  options.causal = random.chance(0.5) ? 1 : 0;
  if (random.chance(0.3)) options.window_left = random.integer(0, longest);
  if (random.chance(0.2)) options.softcap = 3.0;
}

onchip_attention_decode_args DecodeCall::args() const {
  onchip_attention_decode_args args = ONCHIP_ATTENTION_DECODE_ARGS_INIT;
  args.q = q.abi();
  args.k_cache = k_cache.abi();
  args.v_cache = v_cache.abi();
  args.cache_seqlens = cache_seqlens.abi();
  args.k_new = k_new.abi();
  args.v_new = v_new.abi();
  args.page_table = page_table.abi();
  args.cache_slot = cache_slot.abi();
  args.rotary_cos = rotary_cos.abi();
  args.rotary_sin = rotary_sin.abi();
  args.q_positions = q_positions.abi();
  args.o = o.abi();
  args.lse = lse.abi();
  args.options = &options;
  args.rotary_interleaved = interleaved ? 1 : 0;
  return args;
}

std::vector<std::pair<std::string, HostTensor*>> DecodeCall::tensors() {
  std::vector<std::pair<std::string, HostTensor*>> all = {{"q", &q},
                                                          {"k_cache", &k_cache},
                                                          {"v_cache", &v_cache},
                                                          {"cache_seqlens", &cache_seqlens},
                                                          {"k_new", &k_new},
                                                          {"v_new", &v_new},
                                                          {"page_table", &page_table},
                                                          {"cache_slot", &cache_slot},
                                                          {"rotary_cos", &rotary_cos},
                                                          {"rotary_sin", &rotary_sin},
                                                          {"q_positions", &q_positions},
                                                          {"bias", &bias},
                                                          {"sink", &sink},
                                                          {"o", &o},
                                                          {"lse", &lse}};
  std::erase_if(all, [](const auto& named) { return !named.second->present(); });
  return all;
}

CachedRows cached_rows(const onchip_attention_decode_args& args) {
  CachedRows rows;
  const auto integers = [](const onchip_tensor* t) {
    return t == nullptr ? std::vector<std::int64_t>() : read_integers(*t);
  };
  const std::vector<std::int64_t> lengths = integers(args.cache_seqlens);
  const std::vector<std::int64_t> slots = integers(args.cache_slot);
  const std::vector<std::int64_t> table = integers(args.page_table);
  const std::vector<std::int64_t> positions = integers(args.q_positions);
  const onchip_tensor* used_q = args.options == nullptr ? nullptr : args.options->seqlens_q;
  const onchip_tensor* used_kv = args.options == nullptr ? nullptr : args.options->seqlens_kv;
  if (used_kv == nullptr) used_kv = used_q;
  const std::int64_t block_rows = args.k_cache->shape[1];
  const std::int64_t pages = args.page_table == nullptr ? 1 : args.page_table->shape[1];
  const std::int64_t slot_q = args.q->shape[1];
  std::map<std::pair<std::int64_t, std::int64_t>, int> touched;
  for (std::int64_t n = 0; n < args.q->shape[0]; ++n) {
    const auto at = static_cast<std::size_t>(n);
    if (args.cache_slot != nullptr && slots[at] == -1) continue;
    const std::int64_t q_len = used_q == nullptr ? slot_q : integers(used_q)[at];
    std::int64_t new_len = 0;
    if (args.k_new != nullptr) {
      new_len = used_kv == nullptr ? args.k_new->shape[1] : integers(used_kv)[at];
    }
    const std::int64_t kv_len = lengths[at] + new_len;
    if (q_len < 0 || q_len > slot_q || new_len < 0 ||
        (args.k_new != nullptr && new_len > args.k_new->shape[1])) {
      rows.illegal = "lengths of new rows";
    }
    if (lengths[at] < 0 || kv_len > pages * block_rows) rows.illegal = "cache_seqlens";
    if (!rows.illegal.empty()) return rows;
    for (std::int64_t j = 0; j < kv_len; ++j) {
      std::int64_t block = args.cache_slot == nullptr ? n : slots[at];
      if (args.page_table != nullptr) {
        block = table[static_cast<std::size_t>(n * pages + j / block_rows)];
      }
      if (block < 0 || block >= args.k_cache->shape[0]) rows.illegal = "block outside the caches";
      ++touched[{block, j % block_rows}];
      if (j >= lengths[at]) rows.appended.emplace_back(block, j % block_rows);
    }
    if (args.rotary_cos == nullptr) continue;
    const std::int64_t most = args.rotary_cos->shape[0];
    if (new_len > 0 && kv_len > most) rows.illegal = "keys beyond the rotary tables";
    for (std::int64_t i = 0; i < q_len; ++i) {
      const std::int64_t position = args.q_positions == nullptr
                                        ? kv_len - q_len + i
                                        : positions[static_cast<std::size_t>(n * slot_q + i)];
      if (position < 0 || position >= most) rows.illegal = "query beyond the rotary tables";
    }
  }
  for (const auto& row : rows.appended) {
    if (touched[row] != 1) rows.illegal = "an appended row that is touched twice";
  }
  return rows;
}

}  // namespace onchip::test
