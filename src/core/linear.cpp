#include "core/linear.hpp"

namespace onchip {

TokenRange token_range(bool packed, std::int64_t slot, const TensorView& cu_seqlens,
                       const TensorView& seqlens, std::int64_t n) {
  TokenRange s;
  if (packed) {
    s.begin = load_integer(cu_seqlens.at(n), cu_seqlens.dtype);
    s.length = load_integer(cu_seqlens.at(n + 1), cu_seqlens.dtype) - s.begin;
  } else {
    s.batch = n;
    s.length = slot;
  }
  if (seqlens.present()) s.length = load_integer(seqlens.at(n), seqlens.dtype);
  return s;
}

}  // namespace onchip
