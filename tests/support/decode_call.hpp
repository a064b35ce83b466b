// A legal call of attention_decode with its tensors, drawn at random: contiguous or paged caches,
// with or without new rows, slots to skip, rotation, a bias.
#pragma once

#include <onchip/onchip.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "support/host_tensor.hpp"
#include "support/random.hpp"

namespace onchip::test {

class DecodeCall {
 public:
  explicit DecodeCall(Random& random);
  DecodeCall(const DecodeCall&) = delete;
  DecodeCall& operator=(const DecodeCall&) = delete;

  // Points into this object.
  onchip_attention_decode_args args() const;

  // Every tensor of the call with its name; absent ones left out.
  std::vector<std::pair<std::string, HostTensor*>> tensors();

  onchip_attention_options options = ONCHIP_ATTENTION_OPTIONS_INIT;
  HostTensor q, k_cache, v_cache, k_new, v_new, cache_seqlens, page_table, cache_slot;
  HostTensor rotary_cos, rotary_sin, q_positions, bias, sink, o, lse;
  bool interleaved = false;
};

// What a call whose shapes fit reads and appends, by its integers alone. Not for packed calls.
struct CachedRows {
  std::string illegal;
  std::vector<std::pair<std::int64_t, std::int64_t>> appended;  // block, row in it
};
CachedRows cached_rows(const onchip_attention_decode_args& args);

}  // namespace onchip::test
