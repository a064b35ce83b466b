// An outside C++20 program that has only what an installation gives: one query over two keys with
// equal scores returns the mean of the values, and what the contract forbids is an exception.
#include <cmath>
#include <cstdio>
#include <exception>
#include <onchip/onchip.hpp>
#include <string>

namespace {

bool near(float got, float wanted) { return std::fabs(got - wanted) <= 1e-6F; }

bool computes() {
  const float q[] = {1.0F, 2.0F};
  const float k[] = {3.0F, 0.0F, 1.0F, 1.0F};
  const float v[] = {1.0F, 2.0F, 5.0F, 10.0F};
  float o[2] = {};
  float lse[1] = {};
  onchip::attention_forward({.q = onchip::tensor(q, {1, 1, 1, 2}),
                             .k = onchip::tensor(k, {1, 2, 1, 2}),
                             .v = onchip::tensor(v, {1, 2, 1, 2}),
                             .o = onchip::tensor(o, {1, 1, 1, 2}),
                             .lse = onchip::tensor(lse, {1, 1, 1})},
                            {.scale = 0.5});
  // Both scores are 0.5 * 3.
  return near(o[0], 3.0F) && near(o[1], 6.0F) && near(lse[0], 1.5F + std::log(2.0F));
}

bool refuses() {
  float data[2] = {};
  const onchip::Tensor one = onchip::tensor(data, {1, 1, 1, 2});
  const onchip::Tensor wrong = onchip::tensor(data, {1, 1, 2});
  try {
    onchip::attention_forward({.q = one, .k = wrong, .v = one, .o = one});
  } catch (const onchip::InvalidArgument& error) {
    return !std::string(error.what()).empty();
  }
  return false;
}

}  // namespace

int main() {
  try {
    if (!computes() || !refuses()) {
      std::fprintf(stderr, "wrong result\n");
      return 1;
    }
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
  std::printf("C++ consumer: onchip %s\n", onchip_version());
  return 0;
}
