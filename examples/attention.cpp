// Exact attention from C++: a causal call with grouped heads, three rows checked by the formula.
//
//   c++ -std=c++20 attention.cpp $(pkg-config --cflags --libs onchip) && ./a.out
#include <onchip/onchip.hpp>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <iostream>
#include <random>
#include <vector>

namespace {

constexpr std::int64_t kBatch = 2;
constexpr std::int64_t kSeqlen = 500;
constexpr std::int64_t kHeadsQ = 8;
constexpr std::int64_t kHeadsKv = 2;
constexpr std::int64_t kDim = 64;

using Values = std::vector<float>;

Values draw(std::int64_t count, std::mt19937& generator) {
  std::normal_distribution<float> normal;
  Values values(static_cast<std::size_t>(count));
  for (float& value : values) value = normal(generator);
  return values;
}

// Row `i` of head `head` of [batch, seqlen, heads, dim].
const float* row(const Values& x, std::int64_t heads, std::int64_t b, std::int64_t i,
                 std::int64_t head) {
  return x.data() + ((b * kSeqlen + i) * heads + head) * kDim;
}

// o of one query row by the formula, in double precision.
std::vector<double> plain_row(const Values& q, const Values& k, const Values& v, std::int64_t b,
                              std::int64_t i, std::int64_t head) {
  const std::int64_t head_kv = head / (kHeadsQ / kHeadsKv);
  const float* query = row(q, kHeadsQ, b, i, head);
  std::vector<double> scores;
  for (std::int64_t j = 0; j <= i; ++j) {
    const float* key = row(k, kHeadsKv, b, j, head_kv);
    double product = 0.0;
    for (std::int64_t d = 0; d < kDim; ++d) product += double{query[d]} * double{key[d]};
    scores.push_back(product / std::sqrt(static_cast<double>(kDim)));
  }
  const double largest = *std::max_element(scores.begin(), scores.end());
  double sum = 0.0;
  for (double& score : scores) sum += score = std::exp(score - largest);
  std::vector<double> result(static_cast<std::size_t>(kDim), 0.0);
  for (std::int64_t j = 0; j <= i; ++j) {
    const float* value = row(v, kHeadsKv, b, j, head_kv);
    const double weight = scores[static_cast<std::size_t>(j)] / sum;
    for (std::int64_t d = 0; d < kDim; ++d) {
      result[static_cast<std::size_t>(d)] += weight * double{value[d]};
    }
  }
  return result;
}

double largest_error(const Values& q, const Values& k, const Values& v, const Values& o) {
  double error = 0.0;
  for (const std::int64_t i : {std::int64_t{0}, std::int64_t{129}, kSeqlen - 1}) {
    const std::vector<double> wanted = plain_row(q, k, v, kBatch - 1, i, kHeadsQ - 1);
    const float* got = row(o, kHeadsQ, kBatch - 1, i, kHeadsQ - 1);
    for (std::size_t d = 0; d < wanted.size(); ++d) {
      error = std::max(error, std::abs(double{got[d]} - wanted[d]));
    }
  }
  return error;
}

}  // namespace

int main() {
  std::mt19937 generator(0);
  const Values q = draw(kBatch * kSeqlen * kHeadsQ * kDim, generator);
  const Values k = draw(kBatch * kSeqlen * kHeadsKv * kDim, generator);
  const Values v = draw(kBatch * kSeqlen * kHeadsKv * kDim, generator);
  Values o(q.size());
  Values lse(static_cast<std::size_t>(kBatch * kHeadsQ * kSeqlen));

  const onchip::AttentionForwardTensors tensors{
      .q = onchip::tensor(q.data(), {kBatch, kSeqlen, kHeadsQ, kDim}),
      .k = onchip::tensor(k.data(), {kBatch, kSeqlen, kHeadsKv, kDim}),
      .v = onchip::tensor(v.data(), {kBatch, kSeqlen, kHeadsKv, kDim}),
      .o = onchip::tensor(o.data(), {kBatch, kSeqlen, kHeadsQ, kDim}),
      .lse = onchip::tensor(lse.data(), {kBatch, kHeadsQ, kSeqlen}),
  };
  const onchip::AttentionOptions options{.causal = true};
  try {
    std::cout << onchip::explain(tensors, options);
    onchip::attention_forward(tensors, options);
  } catch (const onchip::Exception& error) {
    std::cerr << error.what() << '\n';
    return 1;
  }
  const double error = largest_error(q, k, v, o);
  std::cout << "largest error against the formula: " << error << '\n';
  return error < 1e-5 ? 0 : 1;
}
