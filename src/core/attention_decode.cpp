#include "core/attention_decode.hpp"

#include <cstring>

namespace onchip {

namespace {

std::int64_t integer_at(const TensorView& tensor, std::int64_t index) {
  return load_integer(tensor.at(index), tensor.dtype);
}

}  // namespace

void Rotator::move_to(std::int64_t position) {
  const std::byte* cos = rotary_.cos + position * rotary_.cos_stride;
  const std::byte* sin = rotary_.sin + position * rotary_.sin_stride;
  for (std::int64_t pair = 0; pair < rotary_.pairs; ++pair) {
    const std::int64_t offset = pair * dtype_size(rotary_.dtype);
    cos_sin_[pair] = load_as_double(cos + offset, rotary_.dtype);
    cos_sin_[rotary_.pairs + pair] = load_as_double(sin + offset, rotary_.dtype);
  }
}

void Rotator::turn(DType dtype, std::int64_t dim, const std::byte* from, std::byte* to) const {
  const std::int64_t pairs = rotary_.pairs;
  const std::int64_t size = dtype_size(dtype);
  double* row = cos_sin_ + 2 * pairs;
  for (std::int64_t d = 0; d < 2 * pairs; ++d) row[d] = load_as_double(from + d * size, dtype);
  const std::int64_t next_pair = rotary_.interleaved ? 2 : 1;
  const std::int64_t partner = rotary_.interleaved ? 1 : pairs;
  for (std::int64_t pair = 0; pair < pairs; ++pair) {
    double& x = row[pair * next_pair];
    double& y = row[pair * next_pair + partner];
    const double cos = cos_sin_[pair];
    const double sin = cos_sin_[pairs + pair];
    const double turned = x * cos - y * sin;
    y = x * sin + y * cos;
    x = turned;
  }
  for (std::int64_t d = 0; d < 2 * pairs; ++d) store_from_double(to + d * size, dtype, row[d]);
  if (to == from || dim == 2 * pairs) return;
  std::memcpy(to + 2 * pairs * size, from + 2 * pairs * size,
              static_cast<std::size_t>((dim - 2 * pairs) * size));
}

DecodeSequence AttentionDecodeProblem::cached_sequence(std::int64_t n) const {
  const SequenceRange rows = AttentionProblem::sequence(n);
  DecodeSequence s;
  s.n = n;
  s.batch = rows.batch;
  s.q_begin = rows.q_begin;
  s.q_len = rows.q_len;
  s.kv_batch = n;
  s.slot = cache_slot.present() ? integer_at(cache_slot, n) : n;
  s.skipped = s.slot < 0;
  if (s.skipped) return s;
  s.cached_len = integer_at(cache_seqlens, n);
  if (appends()) {
    s.new_begin = rows.kv_begin;
    s.new_len = rows.kv_len;
  }
  s.kv_len = s.cached_len + s.new_len;
  return s;
}

std::int64_t AttentionDecodeProblem::block(const DecodeSequence& s, std::int64_t entry) const {
  if (!page_table.present()) return s.slot;
  return load_integer(page_table.at(s.n, entry), page_table.dtype);
}

std::int64_t AttentionDecodeProblem::q_position(const DecodeSequence& s, std::int64_t i) const {
  if (!q_positions.present()) return s.kv_len - s.q_len + i;
  const std::byte* at = packed ? q_positions.at(s.q_begin + i) : q_positions.at(s.batch, i);
  return load_integer(at, q_positions.dtype);
}

void append_row(const AttentionDecodeProblem& problem, const DecodeSequence& s, std::int64_t t,
                double* scratch) {
  const std::int64_t position = s.cached_len + t;
  const auto k_bytes = static_cast<std::size_t>(problem.head_dim_qk * dtype_size(problem.dtype));
  const auto v_bytes = static_cast<std::size_t>(problem.head_dim_v * dtype_size(problem.dtype));
  Rotator rotator(problem.rotary, scratch);
  if (problem.rotary.wanted) rotator.move_to(position);
  for (std::int64_t head = 0; head < problem.num_heads_kv; ++head) {
    if (k_bytes > 0) {
      const std::byte* from = problem.k.at(s.batch, s.new_begin + t, head);
      std::byte* to = problem.cached_row(problem.k_cache, s, position, head);
      if (problem.rotary.wanted) {
        rotator.turn(problem.dtype, problem.head_dim_qk, from, to);
      } else {
        std::memcpy(to, from, k_bytes);
      }
    }
    if (v_bytes > 0 && !problem.v_in_k) {
      std::memcpy(problem.cached_row(problem.v_cache, s, position, head),
                  problem.v.at(s.batch, s.new_begin + t, head), v_bytes);
    }
  }
}

}  // namespace onchip
