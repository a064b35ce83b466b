#include "tensor.hpp"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstring>
#include <limits>
#include <new>
#include <optional>
#include <span>
#include <utility>

namespace onchip_python {

namespace {

constexpr std::array<DTypeRow, 8> kDTypes = {{
    {"float64", ONCHIP_FLOAT64, 8, dlpack::kFloat},
    {"float32", ONCHIP_FLOAT32, 4, dlpack::kFloat},
    {"float16", ONCHIP_FLOAT16, 2, dlpack::kFloat},
    {"bfloat16", ONCHIP_BFLOAT16, 2, dlpack::kBfloat},
    {"float8_e4m3", ONCHIP_FLOAT8_E4M3, 1, dlpack::kFloat8E4m3Fn},
    {"int64", ONCHIP_INT64, 8, dlpack::kInt},
    {"int32", ONCHIP_INT32, 4, dlpack::kInt},
    {"bool", ONCHIP_BOOL, 1, dlpack::kBool},
}};

// The library says what an argument takes instead of a dtype that it knows; these stand for the
// dtypes that it cannot be told of.
struct Wanted {
  std::string_view argument;
  const char* dtypes;
};
constexpr const char* kFloats = "float64, float32, float16 or bfloat16";
constexpr const char* kLengths = "int32 or int64";
constexpr std::array<Wanted, 11> kWanted = {{
    {"bias", kFloats},
    {"sink", kFloats},
    {"alibi_slopes", kFloats},
    {"mask", "bool"},
    {"q_segment_ids", "int32"},
    {"kv_segment_ids", "int32"},
    {"dropout_rng", "int64"},
    {"cu_seqlens_q", kLengths},
    {"cu_seqlens_kv", kLengths},
    {"seqlens_q", kLengths},
    {"seqlens_kv", kLengths},
}};

// Shapes without data get addresses that no process has memory at, each its own range, so that
// they overlap nothing.
constexpr std::uint64_t kFirstAddress = std::uint64_t{1} << 56;
constexpr std::uint64_t kLastAddress = std::uint64_t{1} << 57;
constexpr std::uint64_t kPage = 4096;

constexpr std::int64_t kCopyAlignment = 64;

template <typename Predicate>
const DTypeRow* find_row(Predicate&& wanted) {
  const auto* row = std::find_if(kDTypes.begin(), kDTypes.end(), wanted);
  return row == kDTypes.end() ? nullptr : row;
}

const DTypeRow& dtype_of(const onchip_tensor& view) {
  return *find_row([&](const DTypeRow& row) { return row.dtype == view.dtype; });
}

bool is_empty(const onchip_tensor& view) {
  return std::any_of(view.shape, view.shape + view.rank, [](std::int64_t n) { return n == 0; });
}

std::int64_t saturating_product(std::int64_t a, std::int64_t b) {
  std::int64_t product = 0;
  return __builtin_mul_overflow(a, b, &product) ? std::numeric_limits<std::int64_t>::max()
                                                : product;
}

using IntTuple = nb::typed<nb::tuple, int, nb::ellipsis>;

IntTuple int_tuple(std::span<const std::int64_t> values) {
  nb::tuple_builder builder(values.size());
  for (const std::int64_t value : values) builder.put(value);
  return builder.commit();
}

void copy_elements(const Tensor& from, const Tensor& to, std::int64_t size) {
  const onchip_tensor& view = from.view;
  const int inner = view.rank - 1;
  const std::int64_t run = inner < 0 ? 1 : view.shape[inner];
  const std::int64_t step = inner < 0 ? 0 : from.byte_strides[inner];
  std::array<std::int64_t, ONCHIP_MAX_RANK> index{};
  const auto* source = static_cast<const std::byte*>(view.data);
  auto* target = static_cast<std::byte*>(to.view.data);
  for (;;) {
    for (std::int64_t i = 0; i < run; ++i) {
      std::memcpy(target + i * size, source + i * step, static_cast<std::size_t>(size));
    }
    int axis = inner - 1;
    for (; axis >= 0; --axis) {
      // An axis that repeats its source stays one in the copy.
      const std::int64_t extent = to.byte_strides[axis] == 0 ? 1 : view.shape[axis];
      if (++index[static_cast<std::size_t>(axis)] < extent) {
        source += from.byte_strides[axis];
        target += to.byte_strides[axis];
        break;
      }
      source -= (extent - 1) * from.byte_strides[axis];
      target -= (extent - 1) * to.byte_strides[axis];
      index[static_cast<std::size_t>(axis)] = 0;
    }
    if (axis < 0) return;
  }
}

// A row-major copy in host memory. Outer axes of stride 0 stay so: a broadcast array costs no more
// than what it repeats.
Tensor contiguous_copy(const Tensor& tensor) {
  if (tensor.view.device_type != ONCHIP_DEVICE_CPU) {
    throw nb::type_error("contiguous() copies host memory only");
  }
  const std::int64_t size = dtype_of(tensor.view).size;
  Tensor copy;
  copy.view = tensor.view;
  std::int64_t bytes = size;
  for (int axis = tensor.view.rank - 1; axis >= 0; --axis) {
    const bool repeats = axis < tensor.view.rank - 1 && tensor.byte_strides[axis] == 0;
    copy.byte_strides[axis] = repeats ? 0 : bytes;
    if (!repeats) bytes = saturating_product(bytes, tensor.view.shape[axis]);
  }
  // Python's allocator, so that tracemalloc counts it.
  void* memory = bytes > std::numeric_limits<std::int64_t>::max() - kCopyAlignment
                     ? nullptr
                     : PyMem_Malloc(static_cast<std::size_t>(bytes + kCopyAlignment));
  if (memory == nullptr) throw std::bad_alloc();
  copy.owner = Owner(memory, PyMem_Free);
  const auto address = reinterpret_cast<std::uintptr_t>(memory);
  copy.view.data = static_cast<std::byte*>(memory) + (kCopyAlignment - address % kCopyAlignment);
  copy.set_strides();
  const nb::gil_scoped_release others_run;
  copy_elements(tensor, copy, size);
  return copy;
}

std::uint64_t next_address(std::int64_t bytes) {
  static std::uint64_t next = kFirstAddress;  // guarded by the GIL
  const std::uint64_t room = kLastAddress - kFirstAddress;
  const std::uint64_t length = std::min(static_cast<std::uint64_t>(bytes) / kPage * kPage, room);
  if (kLastAddress - next < length + kPage) next = kFirstAddress;
  const std::uint64_t address = next;
  next += length + kPage;
  return address;
}

Tensor tensor_of_shape(const char* op, const char* argument, nb::handle shape, const char* dtype,
                       std::int32_t device_type, std::int32_t device_id) {
  const Place place{op, argument};
  Tensor tensor;
  onchip_tensor& view = tensor.view;
  tensor.has_data = false;
  const nb::tuple extents(shape);
  tensor.set_rank(place, static_cast<std::int64_t>(extents.size()));
  std::int64_t* next_extent = view.shape;
  for (const nb::handle extent : extents) {
    *next_extent = count_of(place, extent);
    if (*next_extent++ < 0) refuse(place, "a negative extent", "extents of 0 or more");
  }
  const DTypeRow* row = find_dtype(dtype);
  if (row == nullptr)
    refuse(place, "dtype " + describe_value(nb::str(dtype)), dtypes_wanted(place));
  view.dtype = row->dtype;
  view.device_type = device_type;
  view.device_id = device_id;
  tensor.set_row_major();
  std::int64_t bytes = row->size;
  for (std::int32_t i = 0; i < view.rank; ++i) bytes = saturating_product(bytes, view.shape[i]);
  view.data = reinterpret_cast<void*>(next_address(bytes));
  return tensor;
}

}  // namespace

const char* dtypes_wanted(const Place& place) {
  const auto* found = std::find_if(kWanted.begin(), kWanted.end(), [&](const Wanted& wanted) {
    return std::string_view(place.argument) == wanted.argument;
  });
  return found == kWanted.end()
             ? "float64, float32, float16, bfloat16, float8_e4m3, int64, int32 or bool"
             : found->dtypes;
}

const DTypeRow* find_dtype(std::string_view name) {
  return find_row([&](const DTypeRow& row) { return row.name == name; });
}

const DTypeRow* find_dtype(dlpack::DataType type) {
  return find_row([&](const DTypeRow& row) {
    return row.code == type.code && row.size * 8 == type.bits && type.lanes == 1;
  });
}

void Tensor::set_rank(const Place& place, std::int64_t rank) {
  if (rank > ONCHIP_MAX_RANK) {
    refuse(place, "rank " + std::to_string(rank),
           "rank " + std::to_string(ONCHIP_MAX_RANK) + " at most");
  }
  view.rank = static_cast<std::int32_t>(rank);
}

void Tensor::set_row_major() {
  const std::int64_t size = dtype_of(view).size;
  std::int64_t stride = 1;
  for (int axis = view.rank - 1; axis >= 0; --axis) {
    // As set_strides does: a plan compares strides.
    view.strides[axis] = view.shape[axis] == 1 ? 1 : stride;
    byte_strides[axis] = saturating_product(view.strides[axis], size);
    stride = saturating_product(stride, std::max<std::int64_t>(view.shape[axis], 1));
  }
}

// Every size is a power of two, and 64-bit divisions would take longer than all the rest.
void Tensor::set_strides() {
  if (is_empty(view)) return set_row_major();
  const std::int64_t size = dtype_of(view).size;
  const int size_log2 = std::countr_zero(static_cast<std::uint64_t>(size));
  for (int axis = 0; axis < view.rank; ++axis) {
    // The stride of an axis with one element is never used, and producers leave anything there.
    if (view.shape[axis] == 1) byte_strides[axis] = size;
    view.strides[axis] = byte_strides[axis] >> size_log2;
  }
}

std::string Tensor::layout_problem() const {
  if (is_empty(view)) return {};
  const std::int64_t size = dtype_of(view).size;
  const auto is_multiple = [&](std::int64_t bytes) { return (bytes & (size - 1)) == 0; };
  for (int axis = view.rank - 1; axis >= 0; --axis) {
    if (!is_multiple(byte_strides[axis])) {
      return "stride of " + std::to_string(byte_strides[axis]) + " bytes";
    }
    if (axis == view.rank - 1 && byte_strides[axis] != size) {
      return "innermost stride " + std::to_string(view.strides[axis]);
    }
  }
  if (!is_multiple(static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(view.data)))) {
    return "address not a multiple of " + std::to_string(size);
  }
  return {};
}

void bind_tensor(nb::module_& module) {
  const auto extents = [](const Tensor& tensor, const std::int64_t* values) {
    return int_tuple({values, static_cast<std::size_t>(tensor.view.rank)});
  };
  nb::class_<Tensor> type(module, "Tensor", nb::is_final(), nb::pooled(),
                          nb::sig("@typing.final\nclass Tensor()"),
                          "A strided view of an array's memory, kept alive.");
  tensor_type = type;
  type.def_prop_ro("shape", [=](const Tensor& self) { return extents(self, self.view.shape); })
      .def_prop_ro("byte_strides",
                   [=](const Tensor& self) { return extents(self, self.byte_strides); })
      .def_prop_ro("dtype", [](const Tensor& self) { return dtype_of(self.view).name; })
      .def_prop_ro(
          "device",
          [](const Tensor& self) { return std::pair(self.view.device_type, self.view.device_id); },
          "(DLPack device type, ordinal): (1, 0) is the CPU, (2, n) a CUDA GPU.")
      .def_prop_ro(
          "address",
          [](const Tensor& self) { return reinterpret_cast<std::uintptr_t>(self.view.data); })
      .def_prop_ro("has_data", [](const Tensor& self) { return self.has_data; })
      .def_prop_ro(
          "layout_problem",
          [](const Tensor& self) {
            std::string problem = self.layout_problem();
            return problem.empty() ? std::nullopt : std::optional(std::move(problem));
          },
          "Why the C library would not take this layout (\"innermost stride 64\").")
      .def(
          "contiguous",
          [](nb::pointer_and_handle<Tensor> self) {
            return self.p->layout_problem().empty() ? nb::borrow(self.h)
                                                    : nb::cast(contiguous_copy(*self.p));
          },
          nb::sig("def contiguous(self, /) -> Tensor"),
          "Itself where the layout is fine, else a copy in host memory. Outer axes that repeat\n"
          "(stride 0) still do in the copy.")
      .def(
          "copy", [](const Tensor& self) { return contiguous_copy(self); },
          nb::sig("def copy(self, /) -> Tensor"), "The same values in host memory of its own.");
  module.def("shape", tensor_of_shape,
             nb::sig("def shape(op: str, argument: str, shape: collections.abc.Sequence[int], "
                     "dtype: str, device_type: int, device_id: int, /) -> Tensor"),
             "A row-major shape without memory: it can be planned and explained, not run.");
}

}  // namespace onchip_python
