// Random calls of the CPU backend's own sizes.
#pragma once

#include "support/attention_call.hpp"

namespace onchip::test {

// Lengths that need several panels, tiles of keys and tasks.
inline AttentionSpec long_spec(Random& random) {
  AttentionSpec spec = random_spec(random);
  spec.batch = random.integer(1, 2);
  spec.num_heads_kv = 1;
  spec.packed = random.chance(0.3);
  spec.used_q.clear();
  spec.used_kv.clear();
  spec.slots_q.clear();
  spec.slots_kv.clear();
  for (std::int64_t n = 0; n < spec.batch; ++n) {
    spec.slots_q.push_back(random.integer(1, 150));
    spec.slots_kv.push_back(spec.shared_cu_seqlens && spec.packed ? spec.slots_q.back()
                                                                  : random.integer(1, 330));
  }
  if (!spec.packed) {
    spec.slots_q.assign(spec.slots_q.size(), spec.slots_q[0]);
    spec.slots_kv.assign(spec.slots_kv.size(), spec.slots_kv[0]);
    spec.seqlen_q = spec.slots_q[0];
    spec.seqlen_kv = spec.slots_kv[0];
  }
  if (random.chance(0.3)) {
    spec.window_left = random.integer(0, 200);
    spec.window_right = random.integer(0, 40);
  }
  spec.head_dim_qk = random.chance(0.3) ? random.integer(1, 140) : random.integer(1, 24);
  spec.head_dim_v = random.chance(0.5) ? spec.head_dim_qk : random.integer(1, 40);
  return spec;
}

}  // namespace onchip::test
