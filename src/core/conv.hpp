// Normalised arguments of short causal convolution and of the norms. Strides in bytes, but for the
// norms' tensors, which may have any rank.
#pragma once

#include <onchip/onchip.h>

#include <cstdint>

#include "core/linear.hpp"
#include "core/rows.hpp"
#include "core/tensor.hpp"

namespace onchip {

enum class Activation { none, silu, sigmoid };

// A token's row is [D]; rows have one head.
struct ConvProblem {
  const char* op = "";
  DType dtype = DType::f32;
  Device device;
  bool packed = false;
  bool silu = false;
  std::int64_t num_seqs = 0;
  std::int64_t slot = 0;  // tokens on the row axis: T, or total when packed
  std::int64_t channels = 0;
  std::int64_t width = 0;
  TensorView cu_seqlens;  // present iff packed
  TensorView seqlens;
  RowsView x;
  TensorView weight;
  TensorView bias;

  // Valid only where cu_seqlens and seqlens are in host memory.
  TokenRange tokens(std::int64_t n) const {
    return token_range(packed, slot, cu_seqlens, seqlens, n);
  }
};

// States [N, D, W].
struct ConvForwardProblem : ConvProblem {
  RowsView y;
  TensorView initial_state, final_state;
};

struct ConvBackwardProblem : ConvProblem {
  RowsView d_y, dx;
  TensorView initial_state, d_final_state, dweight, dbias, dinitial_state;
};

// slot = 1: one token for each row of the batch.
struct ConvStepProblem : ConvProblem {
  RowsView y;
  TensorView state;
  TensorView state_indices;  // int32 [batch]; absent: slot n for row n

  std::int64_t state_slot(std::int64_t n) const {
    return state_indices.present() ? load_integer(state_indices.at(n), state_indices.dtype) : n;
  }
};

struct NormProblem {
  const char* op = "";
  DType dtype = DType::f32;
  Device device;
  bool l2 = false;  // the sum of squares in place of their mean
  bool gate_first = false;
  double eps = 0.0;
  std::int64_t rows = 0;
  std::int64_t dim = 0;
  std::int64_t group_size = 0;  // divides dim; 0 where dim is 0
  Activation activation = Activation::none;
  TensorView x, gate, weight;
};

struct NormForwardProblem : NormProblem {
  TensorView y;
};

struct NormBackwardProblem : NormProblem {
  TensorView d_y, dx, dgate, dweight;
};

}  // namespace onchip
