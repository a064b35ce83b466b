// Exact attention with the whole score matrix in memory: the plain formula that section 5 of
// docs/semantics.md measures errors with, and, without any rounding, a second reading of section 2
// that shares no line with the library.
#pragma once

#include <vector>

#include "support/attention_case.hpp"

namespace onchip::test {

// Products and sums in fp64 or fp32; every named intermediate is rounded to `stored`.
struct Arithmetic {
  bool fp64_products = true;
  DType stored = DType::f64;

  static Arithmetic exact() { return {}; }
  static Arithmetic plain(DType dtype) { return {dtype == DType::f64, dtype}; }
};

struct PlainForward {
  std::vector<double> o;    // as a compact o tensor
  std::vector<double> lse;  // as a compact lse tensor
};

struct PlainGradients {
  std::vector<double> dq, dk, dv, dbias, dsink;
};

// Where backward takes o and lse from.
enum class Saved {
  own,   // its own forward: the true gradient
  given  // the case's o and lse, whatever they are
};

PlainForward plain_forward(const AttentionCase& attention, const Arithmetic& arithmetic);
PlainGradients plain_backward(const AttentionCase& attention, const Arithmetic& arithmetic,
                              Saved saved);
PlainForward plain_merge(const Values& o1, const Values& lse1, const Values& o2, const Values& lse2,
                         const Arithmetic& arithmetic);

}  // namespace onchip::test
