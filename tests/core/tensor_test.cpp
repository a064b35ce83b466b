// Tensor views: what is refused, with its message, and overlap against a count of every byte.
#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <string>
#include <vector>

#include "core/status.hpp"
#include "core/tensor.hpp"
#include "support/random.hpp"

namespace onchip {
namespace {

onchip_tensor tensor(void* data, DType dtype, const std::vector<std::int64_t>& shape,
                     const std::vector<std::int64_t>& strides) {
  onchip_tensor t{};
  t.data = data;
  t.dtype = static_cast<std::int32_t>(dtype);
  t.rank = static_cast<std::int32_t>(shape.size());
  t.device_type = ONCHIP_DEVICE_CPU;
  std::copy(shape.begin(), shape.end(), t.shape);
  std::copy(strides.begin(), strides.end(), t.strides);
  return t;
}

std::string refusal(const onchip_tensor& t) {
  try {
    checked_view("op", "x", &t);
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ONCHIP_INVALID_ARGUMENT);
    return error.what();
  }
  return "";
}

class Checked : public ::testing::Test {
 protected:
  alignas(16) std::byte memory[4096]{};
  onchip_tensor good = tensor(memory, DType::f32, {2, 3, 4}, {12, 4, 1});
};

TEST_F(Checked, AbsentAndGood) {
  EXPECT_FALSE(checked_view("op", "x", nullptr).present());
  EXPECT_EQ(refusal(good), "");
  const TensorView view = checked_view("op", "x", &good);
  EXPECT_EQ(view.numel(), 24);
  EXPECT_EQ(view.at(1, 2, 3), memory + std::ptrdiff_t{4} * (12 + 8 + 3));
  EXPECT_EQ(shape_text(view), "[2, 3, 4]");
}

TEST_F(Checked, EveryMessageSaysGotAndWanted) {
  const auto expect = [this](auto change, const std::string& got, const std::string& wanted) {
    onchip_tensor t = good;
    change(t);
    const std::string message = refusal(t);
    EXPECT_EQ(message.find("op: x: got " + got), 0u) << message;
    EXPECT_NE(message.find(", wanted " + wanted), std::string::npos) << message;
  };
  expect([](auto& t) { t.dtype = 0; }, "dtype number 0", "an onchip_dtype");
  expect([](auto& t) { t.dtype = 9; }, "dtype number 9", "an onchip_dtype");
  expect([](auto& t) { t.rank = 7; }, "rank 7", "rank 0..6");
  expect([](auto& t) { t.rank = -1; }, "rank -1", "rank 0..6");
  expect([](auto& t) { t.device_type = 3; }, "device type 3", "1 (CPU) or 2 (CUDA)");
  expect([](auto& t) { t.device_id = 1; }, "device id 1", "0 for the CPU");
  expect([](auto& t) { t.shape[1] = -3; }, "shape [2, -3, 4]", "extents of at least 0");
  expect([](auto& t) { t.shape[0] = INT64_MAX; }, "shape [9223372036854775807, 3, 4]", "a view");
  expect([](auto& t) { t.strides[0] = INT64_MIN; }, "shape [2, 3, 4] with", "a view");
  expect([](auto& t) { t.strides[2] = 2; }, "innermost stride 2", "innermost stride 1");
  expect([](auto& t) { t.data = nullptr; }, "a null data pointer", "an address");
  expect([this](auto& t) { t.data = memory + 2; }, "an address not aligned", "a multiple of 4");
}

TEST_F(Checked, EmptyViewsNeedNeitherAddressNorStrides) {
  good.shape[1] = 0;
  good.data = nullptr;
  good.strides[0] = INT64_MAX;
  good.strides[2] = -5;
  EXPECT_EQ(refusal(good), "");
  const TensorView view = checked_view("op", "x", &good);
  EXPECT_EQ(view.data, nullptr);
  EXPECT_EQ(view.strides[0], 0);
  EXPECT_EQ(view.numel(), 0);
  EXPECT_EQ(footprint(view).low, footprint(view).high);
}

TEST_F(Checked, StrideOfOneElementMayBeAnything) {
  good.shape[0] = 1;
  good.strides[0] = INT64_MIN;
  EXPECT_EQ(refusal(good), "");
  // Strides become bytes: what is kept must not overflow there.
  const TensorView view = checked_view("op", "x", &good);
  EXPECT_LE(view.strides[0], INT64_MAX / 8);
  EXPECT_GE(view.strides[0], -(INT64_MAX / 8));
}

// ---- overlap against a count of every byte ------------------------------------------------------

TensorView random_view(test::Random& random, std::byte* memory) {
  TensorView view;
  view.dtype = random.one_of({DType::f64, DType::f32, DType::f16, DType::boolean});
  view.rank = static_cast<std::int32_t>(random.integer(0, 4));
  for (std::size_t axis = 0; axis < static_cast<std::size_t>(view.rank); ++axis) {
    view.shape[axis] = random.integer(random.chance(0.05) ? 0 : 1, 4);
    view.strides[axis] = random.chance(0.8) ? random.integer(0, 24) : random.integer(-24, 24);
  }
  if (view.rank > 0) view.strides[static_cast<std::size_t>(view.rank - 1)] = 1;
  // Interleaved slices are common: multiples of a row.
  if (random.chance(0.4)) {
    for (std::size_t axis = 0; axis + 1 < static_cast<std::size_t>(view.rank); ++axis) {
      view.strides[axis] = view.strides[axis] / 8 * 8;
    }
  }
  view.data = memory + random.integer(0, 60) * view.element_size();
  return view;
}

std::vector<std::byte*> bytes_of(const TensorView& view) {
  std::vector<std::byte*> bytes;
  for (std::int64_t n = 0; n < view.numel(); ++n) {
    std::int64_t rest = n;
    std::byte* at = view.data;
    for (std::size_t axis = static_cast<std::size_t>(view.rank); axis-- > 0;) {
      at += rest % view.shape[axis] * view.strides[axis] * view.element_size();
      rest /= view.shape[axis];
    }
    for (std::int64_t byte = 0; byte < view.element_size(); ++byte) bytes.push_back(at + byte);
  }
  return bytes;
}

TEST(Overlap, NeverMissedAndSlicesOfOneTensorAreApart) {
  test::Random random(1);
  std::vector<std::byte> memory(1 << 16);
  std::byte* middle = memory.data() + memory.size() / 2;
  int overlapping = 0;
  int apart_inside = 0;
  for (int trial = 0; trial < 20000; ++trial) {
    const TensorView a = random_view(random, middle);
    const TensorView b = random_view(random, middle);
    const std::vector<std::byte*> bytes_a = bytes_of(a);
    const std::set<std::byte*> in_a(bytes_a.begin(), bytes_a.end());
    const std::vector<std::byte*> bytes_b = bytes_of(b);
    const bool shared = std::any_of(bytes_b.begin(), bytes_b.end(),
                                    [&](std::byte* at) { return in_a.contains(at); });
    const bool said = may_overlap(footprint(a), footprint(b));
    if (shared) {
      ++overlapping;
      ASSERT_TRUE(said) << shape_text(a) << " and " << shape_text(b) << ", trial " << trial;
    } else if (!said && footprint(a).low < footprint(b).high &&
               footprint(b).low < footprint(a).high) {
      ++apart_inside;
    }
  }
  EXPECT_GT(overlapping, 1000);
  EXPECT_GT(apart_inside, 10);
}

TEST(Overlap, SlicesOfAPackedTensor) {
  // q, k and v as slices of [rows, 3, heads, dim], and of [rows, heads, 3 dim].
  std::vector<float> memory(std::size_t{10} * 3 * 2 * 8);
  auto* data = reinterpret_cast<std::byte*>(memory.data());
  const auto slice = [&](std::int64_t offset, std::int64_t row, std::int64_t head) {
    TensorView view;
    view.dtype = DType::f32;
    view.rank = 3;
    view.shape = {10, 2, 8};
    view.strides = {row, head, 1};
    view.data = data + offset * 4;
    return view;
  };
  EXPECT_FALSE(may_overlap(footprint(slice(0, 48, 8)), footprint(slice(16, 48, 8))));
  EXPECT_FALSE(may_overlap(footprint(slice(0, 48, 24)), footprint(slice(8, 48, 24))));
  EXPECT_FALSE(may_overlap(footprint(slice(16, 48, 24)), footprint(slice(8, 48, 24))));
  EXPECT_TRUE(may_overlap(footprint(slice(0, 48, 24)), footprint(slice(7, 48, 24))));
  EXPECT_TRUE(may_overlap(footprint(slice(0, 48, 8)), footprint(slice(0, 48, 8))));
}

TEST(SelfOverlap, WhatPassesHasNoByteTwice) {
  test::Random random(2);
  std::vector<std::byte> memory(1 << 16);
  int passed = 0;
  int refused = 0;
  for (int trial = 0; trial < 20000; ++trial) {
    const TensorView view = random_view(random, memory.data() + memory.size() / 2);
    bool accepted = true;
    try {
      require_no_self_overlap("op", "o", view);
    } catch (const Error&) {
      accepted = false;
    }
    (accepted ? passed : refused) += 1;
    if (!accepted) continue;
    const std::vector<std::byte*> bytes = bytes_of(view);
    const std::set<std::byte*> different(bytes.begin(), bytes.end());
    ASSERT_EQ(different.size(), bytes.size()) << shape_text(view) << ", trial " << trial;
  }
  EXPECT_GT(passed, 1000);
  EXPECT_GT(refused, 1000);
}

TEST(SelfOverlap, EveryOrderOfAxesPasses) {
  std::vector<float> memory(std::size_t{2} * 3 * 4 * 5);
  std::vector<int> order = {0, 1, 2, 3};
  const std::vector<std::int64_t> shape = {2, 3, 4, 5};
  do {
    TensorView view;
    view.dtype = DType::f32;
    view.rank = 4;
    view.data = reinterpret_cast<std::byte*>(memory.data());
    std::int64_t stride = 1;
    for (const int axis : order) {
      view.shape[static_cast<std::size_t>(axis)] = shape[static_cast<std::size_t>(axis)];
      view.strides[static_cast<std::size_t>(axis)] = stride;
      stride *= shape[static_cast<std::size_t>(axis)];
    }
    EXPECT_NO_THROW(require_no_self_overlap("op", "o", view));
  } while (std::next_permutation(order.begin(), order.end()));
}

}  // namespace
}  // namespace onchip
