#include "core/attention.hpp"

namespace onchip {

namespace {

std::int64_t integer_at(const TensorView& tensor, std::int64_t index) {
  return load_integer(tensor.at(index), tensor.dtype);
}

}  // namespace

SequenceRange AttentionProblem::sequence(std::int64_t n) const {
  SequenceRange s;
  if (packed) {
    s.q_begin = integer_at(cu_seqlens_q, n);
    s.q_len = integer_at(cu_seqlens_q, n + 1) - s.q_begin;
    s.kv_begin = integer_at(cu_seqlens_kv, n);
    s.kv_len = integer_at(cu_seqlens_kv, n + 1) - s.kv_begin;
  } else {
    s.batch = s.kv_batch = n;
    s.q_len = slot_q;
    s.kv_len = slot_kv;
  }
  if (seqlens_q.present()) s.q_len = integer_at(seqlens_q, n);
  if (seqlens_kv.present()) s.kv_len = integer_at(seqlens_kv, n);
  return s;
}

}  // namespace onchip
