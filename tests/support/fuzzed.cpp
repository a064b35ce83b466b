#include "support/fuzzed.hpp"

#include <algorithm>
#include <cstring>

#include "core/dtype.hpp"

namespace onchip::test {

namespace {

__extension__ using Wide = __int128;

constexpr std::int64_t kMostBytes = 1 << 18;
constexpr std::int64_t kMostElements = 1 << 16;
constexpr std::int64_t kLongestAxis = 1024;

struct Reach {
  Wide first = 0;  // bytes from data
  Wide end = 0;    // one past the last
};

Reach reach_of(const onchip_tensor& t) {
  const Wide size = dtype_size(static_cast<DType>(t.dtype));
  Reach reach;
  for (std::int32_t axis = 0; axis < t.rank; ++axis) {
    const Wide step = Wide{t.strides[axis]} * (t.shape[axis] - 1) * size;
    (step < 0 ? reach.first : reach.end) += step;
  }
  reach.end += size;
  return reach;
}

Wide address_of(const void* data) {
  return static_cast<Wide>(reinterpret_cast<std::uintptr_t>(data));
}

void fill_anyhow(const onchip_tensor& t, Random& random) {
  for_each_element(t, [&](std::byte* at) {
    const std::int64_t small = random.integer(0, 3);
    const auto narrow = static_cast<std::int32_t>(small);
    switch (static_cast<DType>(t.dtype)) {
      case DType::i64:
        std::memcpy(at, &small, sizeof(small));
        break;
      case DType::i32:
        std::memcpy(at, &narrow, sizeof(narrow));
        break;
      case DType::boolean:
      case DType::e4m3:
        *at = std::byte{static_cast<unsigned char>(small % 2)};
        break;
      default:
        store_from_double(at, static_cast<DType>(t.dtype), random.normal());
    }
  });
}

std::size_t readable(std::size_t whole, std::size_t stated) {
  constexpr std::size_t kLargest = 4096;
  const std::size_t size = stated > kLargest ? whole : std::max(stated, sizeof(std::size_t));
  return (size + 7) / 8 * 8;
}

}  // namespace

bool well_formed(const onchip_tensor& t) {
  if (t.rank < 0 || t.rank > ONCHIP_MAX_RANK || !is_known_dtype(t.dtype)) return false;
  return std::all_of(t.shape, t.shape + t.rank, [](std::int64_t extent) { return extent >= 0; });
}

bool empty(const onchip_tensor& t) {
  return std::any_of(t.shape, t.shape + t.rank, [](std::int64_t extent) { return extent == 0; });
}

bool share_memory(const onchip_tensor& a, const onchip_tensor& b) {
  if (empty(a) || empty(b)) return false;
  const Reach reach_a = reach_of(a);
  const Reach reach_b = reach_of(b);
  return address_of(a.data) + reach_a.first < address_of(b.data) + reach_b.end &&
         address_of(b.data) + reach_b.first < address_of(a.data) + reach_a.end;
}

StructMemory::StructMemory(const void* value, std::size_t whole, std::size_t stated_size,
                           bool dirty_tail)
    : memory_(readable(whole, stated_size), GuardedMemory::Against::end) {
  std::memset(memory_.data(), 0, memory_.size());
  std::memcpy(memory_.data(), value, std::min(whole, memory_.size()));
  std::memcpy(memory_.data(), &stated_size, sizeof(stated_size));
  if (dirty_tail && memory_.size() > whole) memory_.data()[memory_.size() - 1] = std::byte{1};
}

bool FuzzedMemory::back(onchip_tensor& t, Random& random) {
  if (!well_formed(t)) return true;
  // Also where another extent is 0: loops over the long axis and workspace stay.
  const bool endless = std::any_of(t.shape, t.shape + t.rank,
                                   [](std::int64_t extent) { return extent > kLongestAxis; });
  if (empty(t) || t.data == nullptr || t.device_type != ONCHIP_DEVICE_CPU) return !endless;
  const Reach reach = reach_of(t);
  const Wide address = address_of(t.data);
  const bool inside = std::any_of(buffers_.begin(), buffers_.end(), [&](const auto& buffer) {
    const Wide begin = address_of(buffer.data());
    return address + reach.first >= begin &&
           address + reach.end <= begin + static_cast<Wide>(buffer.size());
  });
  Wide count = 1;
  for (std::int32_t axis = 0; axis < t.rank; ++axis) {
    count *= std::min<Wide>(t.shape[axis], 1 << 20);
  }
  if (count > kMostElements) return false;
  if (inside) return !endless;
  if (reach.end - reach.first > kMostBytes) return false;
  const auto size = static_cast<std::size_t>(reach.end - reach.first);
  const auto misalignment = reinterpret_cast<std::uintptr_t>(t.data) %
                            static_cast<std::uintptr_t>(dtype_size(static_cast<DType>(t.dtype)));
  fresh_.push_back(std::make_unique<GuardedMemory>(size, GuardedMemory::Against::front,
                                                   static_cast<std::size_t>(misalignment)));
  t.data = fresh_.back()->data() - static_cast<std::ptrdiff_t>(reach.first);
  buffers_.push_back(fresh_.back()->accessible());
  fill_anyhow(t, random);
  return !endless;
}

void change_one_value(const onchip_tensor& t, std::int64_t value, Random& random) {
  const auto narrow = static_cast<std::int32_t>(value);
  std::int64_t skip = random.integer(0, std::max<std::int64_t>(element_count(t) - 1, 0));
  for_each_element(t, [&](std::byte* at) {
    if (skip-- != 0) return;
    if (t.dtype == ONCHIP_INT64) {
      std::memcpy(at, &value, sizeof(value));
    } else {
      std::memcpy(at, &narrow, sizeof(narrow));
    }
  });
}

bool misuse_run(std::int64_t way, RunArguments& run, Random& random) {
  onchip_plan& plan = run.plan;
  switch (way) {
    case 0:
      if (plan.workspace_bytes == 0) return false;
      run.workspace = nullptr;
      return true;
    case 1:
      if (plan.workspace_bytes == 0 || plan.workspace_alignment == 1) return false;
      run.workspace = static_cast<std::byte*>(run.workspace) + plan.workspace_alignment / 2;
      return true;
    case 2:
      run.stream = &plan;  // any address: the CPU has no streams
      return true;
    case 3:
      plan.opaque[random.integer(0, 23)] ^= std::uint64_t{1} << random.integer(0, 63);
      return true;
    case 4:
      plan.struct_size = random.one_of<std::size_t>({0, 8, sizeof(plan) + 8, SIZE_MAX});
      return true;
    case 5:
      run.given = nullptr;
      return true;
    default:
      run.given_plan = nullptr;
      return true;
  }
}

std::string judge_refusal(onchip_status status) {
  const std::string message = onchip_last_error();
  if (status == ONCHIP_UNSUPPORTED) return message.empty() ? "no message" : "";
  if (status != ONCHIP_INVALID_ARGUMENT) {
    return std::string("status ") + onchip_status_name(status) + ": " + message;
  }
  if (message.find(": got ") == std::string::npos ||
      message.find(", wanted ") == std::string::npos) {
    return "a message without got and wanted: " + message;
  }
  return "";
}

std::string judge_refused_plan(onchip_status status, bool legal, const char* backend,
                               const onchip_plan& before, const onchip_plan& after) {
  const bool may_decline = backend != nullptr && std::string(backend) != "reference";
  if (legal && !(status == ONCHIP_UNSUPPORTED && may_decline)) {
    return std::string("a legal call was refused: ") + onchip_last_error();
  }
  if (std::memcmp(&before, &after, sizeof(after)) != 0) return "a refused plan was written";
  return judge_refusal(status);
}

// ---- structs ------------------------------------------------------------------------------------

void FuzzedStructs::mutate(Random& random) {
  const auto size = [&](std::size_t whole) {
    return random.one_of<std::size_t>(
        {0, 7, 8, whole - 8, whole - 1, whole, whole + 8, whole + 64, 4096, 4097, SIZE_MAX});
  };
  switch (random.integer(0, 5)) {
    case 0:
      args_size = size(args_sizeof);
      break;
    case 1:
      options_size = size(sizeof(onchip_attention_options));
      break;
    case 2:
      plan_size = size(sizeof(onchip_plan));
      break;
    case 3:
      no_args = random.chance(0.3);
      no_plan = random.chance(0.3);
      break;
    case 4:
      has_options = false;
      break;
    default:
      args_size = args_sizeof + 16;
      options_size = sizeof(onchip_attention_options) + 16;
      dirty_tail = random.chance(0.5);
      break;
  }
}

std::string FuzzedStructs::bad_sizes() const {
  const auto bad = [this](std::size_t stated, std::size_t whole) {
    return stated < whole || stated > 4096 || (dirty_tail && stated > whole);
  };
  if (bad(args_size, args_sizeof)) return "args of size " + std::to_string(args_size);
  if (has_options && bad(options_size, sizeof(onchip_attention_options))) {
    return "options of size " + std::to_string(options_size);
  }
  return "";
}

}  // namespace onchip::test
