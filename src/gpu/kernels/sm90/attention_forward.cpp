#include "gpu/kernels/sm90/attention_forward.hpp"

#include <array>
#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "core/status.hpp"
#include "gpu/kernels/sm90/attention_forward_plan.hpp"
#include "gpu/runtime/launch.hpp"
#include "gpu/runtime/tensor_map.hpp"

namespace onchip::sm90 {

// ---- the kernel, as the cache knows it

namespace {

constexpr int kFields = AttentionForwardSpec::kFields;
constexpr std::array<const char*, kFields> kFieldNames = {
    "bf16",       "head_dim_qk", "head_dim_v",     "causal",      "varlen",
    "warpgroups", "tile_n",      "q_in_registers", "turn_taking", "debug_waits"};
constexpr std::array<gpu::Architecture, 1> kArchitectures = {{{90, true}}};
static_assert(kFields <= static_cast<int>(gpu::kMaxSpecFields));
static_assert(kAttentionForwardSpecCount <= gpu::kMaxRegisteredSpecs);

gpu::KernelSpec to_kernel_spec(const AttentionForwardSpec& spec) {
  gpu::KernelSpec result;
  result.kernel = &attention_forward_kernel;
  for (int i = 0; i < kFields; ++i) result.values[static_cast<std::size_t>(i)] = spec.field(i);
  return result;
}

AttentionForwardSpec from_kernel_spec(const gpu::KernelSpec& spec) {
  const auto& f = spec.values;
  return {f[0] != 0, f[1], f[2], f[3] != 0, f[4] != 0, f[5], f[6], f[7] != 0, f[8] != 0, f[9] != 0};
}

}  // namespace

constexpr gpu::KernelDefinition attention_forward_kernel = {
    .name = "cuda.sm90/attention_forward",
    .file = kAttentionForwardFile,
    .entry = kAttentionForwardEntry,
    .macro = kAttentionForwardMacro,
    .fields = kFieldNames,
    .shared_bytes =
        [](const gpu::KernelSpec& spec) {
          return std::int32_t{attention_forward_smem(from_kernel_spec(spec)).total};
        },
    .architecture_for =
        [](std::int32_t compute_capability) {
          return compute_capability == 90 ? kArchitectures[0] : gpu::Architecture{};
        },
    .architectures = kArchitectures,
    .registered_count = kAttentionForwardSpecCount,
    .registered = [](std::int32_t i) { return to_kernel_spec(attention_forward_registered(i)); },
};

// ---- plan or reject

namespace {

constexpr std::int64_t kMaxSize = 1 << 30;

bool is_varlen(const AttentionForwardProblem& p) {
  return p.packed || p.seqlens_q.present() || p.seqlens_kv.present();
}

bool on_host(const TensorView& tensor) {
  return tensor.present() && tensor.device.type == ONCHIP_DEVICE_CPU;
}
bool on_device(const TensorView& tensor) { return tensor.present() && !on_host(tensor); }

// Lengths in the order of AttentionForwardParams.
std::array<const TensorView*, 4> lengths(const AttentionForwardProblem& p) {
  return {&p.cu_seqlens_q, &p.cu_seqlens_kv, &p.seqlens_q, &p.seqlens_kv};
}

std::string why_not_these_options(const AttentionForwardProblem& p) {
  const AttentionOptions& o = p.options;
  std::string names;
  const auto refuse = [&names](bool given, const char* name) {
    if (given) names += names.empty() ? name : std::string(", ") + name;
  };
  refuse(o.softcap != 0.0, "softcap");
  refuse(o.bias.wanted, "bias");
  refuse(o.mask.wanted, "mask");
  refuse(o.alibi_slopes.wanted, "alibi_slopes");
  refuse(o.window_left >= 0 || o.window_right > 0, "window");
  refuse(o.q_segment_ids.wanted || o.kv_segment_ids.wanted, "segment ids");
  refuse(o.sink.wanted, "sink");
  refuse(o.dropout.active, "dropout");
  // Lengths in host memory have been checked already.
  bool device_lengths = false;
  for (const TensorView* tensor : lengths(p)) device_lengths = device_lengths || on_device(*tensor);
  refuse(o.check && device_lengths, "check of lengths in device memory");
  return names.empty() ? names : "this kernel has no " + names;
}

std::string size_text(const char* name, std::int64_t got, std::int64_t limit) {
  return std::string(name) + ": got " + std::to_string(got) + ", wanted at most " +
         std::to_string(limit);
}

AttentionForwardTensor to_tensor(const RowsView& view, const AttentionForwardProblem& p,
                                 std::int64_t rows, std::int64_t heads, std::int64_t head_dim) {
  return {static_cast<unsigned long long>(reinterpret_cast<std::uintptr_t>(view.data)),
          view.batch_stride,
          view.row_stride,
          view.head_stride,
          p.packed ? 1 : static_cast<int>(p.num_seqs),
          static_cast<int>(rows),
          static_cast<int>(heads),
          static_cast<int>(head_dim)};
}

struct Operands {
  AttentionForwardTensor q, k, v, o;
};

Operands operands(const AttentionForwardProblem& p) {
  return {to_tensor(p.q, p, p.slot_q, p.num_heads_q, p.head_dim_qk),
          to_tensor(p.k, p, p.slot_kv, p.num_heads_kv, p.head_dim_qk),
          to_tensor(p.v, p, p.slot_kv, p.num_heads_kv, p.head_dim_v),
          to_tensor(p.o, p, p.slot_q, p.num_heads_q, p.head_dim_v)};
}

AttentionForwardShape shape_of(const AttentionForwardProblem& p) {
  return {static_cast<int>(p.num_seqs),
          static_cast<int>(p.slot_q),
          static_cast<int>(p.slot_kv),
          static_cast<int>(p.num_heads_q),
          static_cast<int>(p.num_heads_kv),
          static_cast<int>(p.head_dim_qk),
          static_cast<int>(p.head_dim_v),
          p.packed,
          p.options.top_left};
}

AttentionForwardSplit split_of(const gpu::DeviceFacts& device, const AttentionForwardSpec& spec,
                               const AttentionForwardProblem& p) {
  return attention_forward_split(spec, shape_of(p), device.multiprocessors,
                                 p.options.batch_invariant);
}

// Of the workspace, in this order.
struct Workspace {
  std::size_t counter_bytes, parts_bytes;

  std::size_t lengths() const { return counter_bytes + parts_bytes; }
};

Workspace workspace_of(const AttentionForwardSpec& spec, const AttentionForwardShape& shape,
                       const AttentionForwardSplit& split, int grid) {
  return {static_cast<std::size_t>(attention_forward_counter_bytes(spec, shape, split, grid)),
          static_cast<std::size_t>(attention_forward_parts_bytes(spec, split))};
}

// What the problem alone says against this kernel, whatever the machine.
std::optional<Reject> reject_problem(const AttentionForwardProblem& p) {
  if (p.device.type != ONCHIP_DEVICE_CUDA) {
    return Reject{"the tensors are on " + device_text(p.device) + ", wanted a CUDA device"};
  }
  if (p.dtype != DType::f16 && p.dtype != DType::bf16) {
    return Reject{"dtype: got " + std::string(dtype_name(p.dtype)) +
                  ", wanted float16 or bfloat16"};
  }
  const std::string options = why_not_these_options(p);
  if (!options.empty()) return Reject{options};
  for (const auto& [name, got, limit] :
       {std::tuple<const char*, std::int64_t, std::int64_t>{"head_dim_qk", p.head_dim_qk, 128},
        {"head_dim_v", p.head_dim_v, 128},
        {p.packed ? "total_q" : "seqlen_q", p.slot_q, kMaxSize - 1},
        {p.packed ? "total_kv" : "seqlen_kv", p.slot_kv, kMaxSize - 1},
        {p.packed ? "num_seqs" : "batch", p.num_seqs, kMaxSize - 1},
        {"num_heads_q", p.num_heads_q, kMaxSize - 1}}) {
    if (got > limit) return Reject{size_text(name, got, limit)};
  }
  // Before strides are looked at: those of a tensor without columns are all 0.
  if (p.head_dim_qk < 1 || p.head_dim_v < 1) return Reject{"head_dim must be at least 1"};
  const Operands t = operands(p);
  for (const auto& [name, tensor] :
       {std::pair<const char*, const AttentionForwardTensor*>{"q", &t.q},
        {"k", &t.k},
        {"v", &t.v},
        {"o", &t.o}}) {
    const char* reason = attention_forward_reject_tensor(*tensor);
    if (reason != nullptr) return Reject{std::string(name) + ": " + reason};
  }
  return std::nullopt;
}

// words: [0..2] the spec's fields, 16 bits each; [3] the grid, 0 where there is nothing to do.
constexpr std::size_t kGridWord = 3;
static_assert(kFields <= 12);

}  // namespace

gpu::KernelSpec attention_forward_kernel_spec(const BackendPlan& plan) {
  gpu::KernelSpec spec;
  spec.kernel = &attention_forward_kernel;
  for (std::size_t i = 0; i < kFields; ++i) {
    spec.values[i] = static_cast<std::int32_t>(plan.words[i / 4] >> (16 * (i % 4)) & 0xffff);
  }
  return spec;
}

PlanResult plan_attention_forward_on(const gpu::DeviceFacts& device,
                                     const AttentionForwardProblem& problem) {
  if (std::optional<Reject> reject = reject_problem(problem)) return *reject;
  if (device.compute_capability != 90) {
    return Reject{device_text(problem.device) + " (" + device.name + ") has compute capability " +
                  std::to_string(device.compute_capability / 10) + "." +
                  std::to_string(device.compute_capability % 10) + ", wanted 9.0"};
  }
  const AttentionForwardSpec spec = attention_forward_spec(
      problem.dtype == DType::bf16, static_cast<int>(problem.head_dim_qk),
      static_cast<int>(problem.head_dim_v), problem.options.window_right == 0, is_varlen(problem));
  const AttentionForwardShape shape = shape_of(problem);
  BackendPlan plan;
  plan.kernel = "attention_forward";
  for (std::size_t i = 0; i < kFields; ++i) {
    plan.words[i / 4] |= static_cast<std::uint64_t>(spec.field(static_cast<int>(i)))
                         << (16 * (i % 4));
  }
  const bool empty_output =
      shape.seqlen_q == 0 || shape.num_heads_q == 0 || (!shape.packed && shape.batch == 0);
  if (empty_output) return plan;
  if (const char* reason = attention_forward_reject(spec, shape)) return Reject{reason};
  const int shared_bytes = attention_forward_smem(spec).total;
  if (shared_bytes > device.shared_bytes_per_block) {
    return Reject{device_text(problem.device) + " (" + device.name + ") gives a block " +
                  std::to_string(device.shared_bytes_per_block) +
                  " bytes of shared memory, wanted " + std::to_string(shared_bytes)};
  }
  const AttentionForwardSplit split = split_of(device, spec, problem);
  const int grid = attention_forward_grid(spec, shape, split, device.multiprocessors);
  plan.words[kGridWord] = static_cast<std::uint64_t>(grid);
  plan.workspace_bytes = workspace_of(spec, shape, split, grid).lengths();
  if (plan.workspace_bytes != 0) plan.workspace_alignment = 16;
  for (const TensorView* tensor : lengths(problem)) {
    if (on_host(*tensor)) {
      plan.workspace_bytes += sizeof(std::int32_t) * static_cast<std::size_t>(tensor->shape[0]);
      plan.workspace_alignment = 16;
    }
  }
  return plan;
}

PlanResult plan_attention_forward(const AttentionForwardProblem& problem) {
  const std::optional<Reject> reject = reject_problem(problem);
  // Before the driver is touched: a call with CPU tensors must not start CUDA in the process.
  if (reject && problem.device.type != ONCHIP_DEVICE_CUDA) return *reject;
  const gpu::DeviceResult device = gpu::device_facts(problem.device.id);
  if (device.facts == nullptr) {
    // Whoever mends the call is not to learn of the machine only then.
    return Reject{reject ? device.problem + "; " + reject->reason : device.problem};
  }
  if (reject) return *reject;
  PlanResult result = plan_attention_forward_on(*device.facts, problem);
  const auto* plan = std::get_if<BackendPlan>(&result);
  if (plan != nullptr && plan->words[kGridWord] != 0) {
    std::string problem_text = gpu::kernel_cache().why_unobtainable(
        attention_forward_kernel_spec(*plan), kArchitectures[0]);
    if (!problem_text.empty()) return Reject{std::move(problem_text)};
  }
  return result;
}

// ---- run

namespace {

gpu::TensorMap encode(const gpu::Driver& driver, DType dtype, const AttentionForwardMap& from) {
  gpu::TensorMapShape shape;
  shape.address = from.address;
  shape.dtype = dtype;
  shape.rank = 5;
  for (std::size_t i = 0; i < 5; ++i) {
    shape.dims[i] = from.dims[i];
    shape.box[i] = from.box[i];
    if (i < 4) shape.strides[i] = from.strides[i];
  }
  gpu::TensorMap map;
  gpu::encode_tensor_map(driver, shape, map);
  return map;
}

struct DeviceLengths {
  const void* data = nullptr;
  bool int64 = false;
};

// Lengths where the kernel can read them: those in host memory travel through the workspace, as
// int32 (the plan has refused larger tensors), in one copy.
std::array<DeviceLengths, 4> place_lengths(const gpu::Driver& driver,
                                           const AttentionForwardProblem& problem,
                                           std::byte* workspace, gpu::CuStream stream) {
  std::array<DeviceLengths, 4> placed;
  std::vector<std::int32_t> staged;
  const auto tensors = lengths(problem);
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const TensorView& tensor = *tensors[i];
    if (!tensor.present()) continue;
    if (!on_host(tensor)) {
      placed[i] = {tensor.data, tensor.dtype == DType::i64};
      continue;
    }
    placed[i].data = workspace + sizeof(std::int32_t) * staged.size();
    for (std::int64_t n = 0; n < tensor.shape[0]; ++n) {
      staged.push_back(static_cast<std::int32_t>(load_integer(tensor.at(n), tensor.dtype)));
    }
  }
  if (staged.empty()) return placed;
  if (gpu::is_capturing(driver, stream)) {
    // A captured copy would read host memory again at each replay, long after it was freed.
    throw Error(ONCHIP_UNSUPPORTED,
                std::string(problem.op) +
                    ": cu_seqlens and seqlens: got host memory while the stream is being captured, "
                    "wanted tensors on " +
                    device_text(problem.device));
  }
  // From pageable memory the driver takes the bytes before it returns.
  gpu::check_driver(
      driver,
      driver.cuMemcpyHtoDAsync(
          static_cast<gpu::CuDevicePointer>(reinterpret_cast<std::uintptr_t>(workspace)),
          staged.data(), sizeof(std::int32_t) * staged.size(), stream),
      "cuMemcpyHtoDAsync(lengths)");
  return placed;
}

// The number under which a launch opens its counter and counts arriving parts: even, and not in the
// workspace already, where anything may lie, but for a chance of 2^-63. The time, through the
// finaliser of splitmix64 (Steele et al., "Fast splittable pseudorandom number generators", 2014).
// A launch that is captured keeps its number: every replay leaves the counter closed, and the
// parts' counts full.
unsigned long long launch_number() {
  auto x = static_cast<std::uint64_t>(std::chrono::steady_clock::now().time_since_epoch().count());
  x += 0x9e3779b97f4a7c15u;
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
  x = (x ^ x >> 27) * 0x94d049bb133111ebu;
  return (x ^ x >> 31) & ~std::uint64_t{1};
}

}  // namespace

void launch_attention_forward(const gpu::Driver& driver, const gpu::DeviceFacts& device,
                              gpu::KernelCache& cache, const BackendPlan& plan,
                              const AttentionForwardProblem& problem, const RunContext& context) {
  const auto grid = static_cast<std::uint32_t>(plan.words[kGridWord]);
  if (grid == 0) return;
  const gpu::KernelSpec kernel_spec = attention_forward_kernel_spec(plan);
  const AttentionForwardSpec spec = from_kernel_spec(kernel_spec);
  const AttentionForwardShape shape = shape_of(problem);
  auto* stream = static_cast<gpu::CuStream>(context.stream);

  const gpu::ContextScope scope(driver, device);
  gpu::CuFunction function = cache.function(driver, device, scope, kernel_spec, stream);

  const AttentionForwardSplit split = split_of(device, spec, problem);
  AttentionForwardParams params =
      attention_forward_params(spec, shape, split, problem.options.scale);
  if (problem.lse.wanted) {
    constexpr auto kSize = static_cast<std::int64_t>(sizeof(float));
    params.lse = reinterpret_cast<float*>(problem.lse.data);
    params.lse_batch_stride = problem.lse.batch_stride / kSize;
    params.lse_head_stride = problem.lse.head_stride / kSize;
  }
  const Workspace layout = workspace_of(spec, shape, split, static_cast<int>(grid));
  if (layout.counter_bytes != 0) params.counter = context.workspace;
  if (layout.parts_bytes != 0) params.parts = context.workspace + layout.counter_bytes;
  if (layout.lengths() != 0) params.launch = launch_number();
  const std::array<DeviceLengths, 4> placed =
      place_lengths(driver, problem, context.workspace + layout.lengths(), stream);
  params.cu_seqlens_q = placed[0].data;
  params.cu_seqlens_kv = placed[1].data;
  params.seqlens_q = placed[2].data;
  params.seqlens_kv = placed[3].data;
  params.cu_seqlens_q_int64 = placed[0].int64;
  params.cu_seqlens_kv_int64 = placed[1].int64;
  params.seqlens_q_int64 = placed[2].int64;
  params.seqlens_kv_int64 = placed[3].int64;

  using Operand = AttentionForwardOperand;
  const Operands t = operands(problem);
  const auto map = [&](Operand operand, const AttentionForwardTensor& tensor) {
    return encode(driver, problem.dtype, attention_forward_map(spec, shape, operand, tensor));
  };
  gpu::TensorMap q_map = map(Operand::q, t.q);
  gpu::TensorMap k_map = map(Operand::k, t.k);
  gpu::TensorMap v_map = map(Operand::v, t.v);
  gpu::TensorMap o_map = map(Operand::o, t.o);
  std::array<void*, 5> parameters = {&q_map, &k_map, &v_map, &o_map, &params};
  gpu::launch(
      driver, function,
      {.grid = grid,
       .block = static_cast<std::uint32_t>(attention_forward_threads(spec)),
       .dynamic_shared_bytes = static_cast<std::uint32_t>(attention_forward_smem(spec).total)},
      stream, parameters.data(), attention_forward_kernel.name);
}

void run_attention_forward(const BackendPlan& plan, const AttentionForwardProblem& problem,
                           const RunContext& context) {
  const gpu::DeviceResult device = gpu::device_facts(problem.device.id);
  if (device.facts == nullptr) throw Error(ONCHIP_DEVICE_ERROR, device.problem);
  launch_attention_forward(*gpu::driver_state().driver, *device.facts, gpu::kernel_cache(), plan,
                           problem, context);
}

}  // namespace onchip::sm90
