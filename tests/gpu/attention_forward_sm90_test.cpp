// The host's side of cuda.sm90's attention forward, on a device and a driver that only record.
#include "gpu/kernels/sm90/attention_forward.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <set>
#include <string>
#include <vector>

#include "gpu/kernels/registry.hpp"
#include "gpu/kernels/sm90/attention_forward_plan.hpp"
#include "gpu_test_support.hpp"

namespace onchip::gpu::test {
namespace {

using sm90::AttentionForwardParams;

std::byte* address(std::uintptr_t number) { return reinterpret_cast<std::byte*>(number << 20); }

RowsView rows(std::uintptr_t number, DType dtype, std::int64_t slot, std::int64_t heads,
              std::int64_t dim, bool packed) {
  const std::int64_t size = dtype_size(dtype);
  RowsView view;
  view.data = address(number);
  view.dtype = dtype;
  view.head_stride = dim * size;
  view.row_stride = heads * dim * size;
  view.batch_stride = packed ? 0 : slot * heads * dim * size;
  view.wanted = true;
  return view;
}

// Contiguous bf16 on cuda:0, 2 x 300 x 8 x 128 against 2 x 500 x 2 x 128.
AttentionForwardProblem problem(DType dtype = DType::bf16, std::int64_t dim = 128,
                                bool packed = false) {
  AttentionForwardProblem p;
  p.op = "attention_forward";
  p.dtype = dtype;
  p.device = {ONCHIP_DEVICE_CUDA, 0};
  p.packed = packed;
  p.num_seqs = 2;
  p.slot_q = 300;
  p.slot_kv = 500;
  p.num_heads_q = 8;
  p.num_heads_kv = 2;
  p.head_dim_qk = p.head_dim_v = dim;
  p.options.scale = 0.125;
  p.q = rows(1, dtype, p.slot_q, 8, dim, packed);
  p.k = rows(2, dtype, p.slot_kv, 2, dim, packed);
  p.v = rows(3, dtype, p.slot_kv, 2, dim, packed);
  p.o = rows(4, dtype, p.slot_q, 8, dim, packed);
  p.lse.data = address(5);
  p.lse.batch_stride = packed ? 0 : 4 * 300 * 8;
  p.lse.head_stride = 4 * 300;
  p.lse.row_stride = 4;
  p.lse.wanted = true;
  return p;
}

template <typename Integer>
TensorView lengths(std::vector<Integer>& values, Device device) {
  TensorView view;
  view.data = reinterpret_cast<std::byte*>(values.data());
  view.dtype = sizeof(Integer) == 8 ? DType::i64 : DType::i32;
  view.rank = 1;
  view.device = device;
  view.shape[0] = static_cast<std::int64_t>(values.size());
  view.strides[0] = 1;
  return view;
}

std::string reason(const AttentionForwardProblem& p, const DeviceFacts& device = hopper_facts()) {
  const PlanResult result = sm90::plan_attention_forward_on(device, p);
  const auto* reject = std::get_if<Reject>(&result);
  return reject == nullptr ? "accepted" : reject->reason;
}

BackendPlan plan(const AttentionForwardProblem& p) {
  return std::get<BackendPlan>(sm90::plan_attention_forward_on(hopper_facts(), p));
}

// ---- what is refused

TEST(AttentionForwardSm90, TakesThePlainCases) {
  for (const DType dtype : {DType::f16, DType::bf16}) {
    for (const std::int64_t dim : {64, 128}) {
      EXPECT_EQ(reason(problem(dtype, dim)), "accepted");
      AttentionForwardProblem causal = problem(dtype, dim);
      causal.options.window_right = 0;
      EXPECT_EQ(reason(causal), "accepted");
      const KernelSpec spec = sm90::attention_forward_kernel_spec(plan(causal));
      EXPECT_EQ(spec.values[0], dtype == DType::bf16);
      EXPECT_EQ(spec.values[1], dim);
      EXPECT_EQ(spec.values[3], 1);
    }
  }
}

TEST(AttentionForwardSm90, NamesTheOptionsItLacks) {
  const auto with = [](auto&& change) {
    AttentionForwardProblem p = problem();
    change(p.options);
    return reason(p);
  };
  using Options = AttentionOptions;
  EXPECT_EQ(with([](Options& o) { o.softcap = 30; }), "this kernel has no softcap");
  EXPECT_EQ(with([](Options& o) { o.bias.wanted = true; }), "this kernel has no bias");
  EXPECT_EQ(with([](Options& o) { o.mask.wanted = true; }), "this kernel has no mask");
  EXPECT_EQ(with([](Options& o) { o.alibi_slopes.wanted = true; }),
            "this kernel has no alibi_slopes");
  EXPECT_EQ(with([](Options& o) { o.window_left = 0; }), "this kernel has no window");
  EXPECT_EQ(with([](Options& o) { o.window_right = 1; }), "this kernel has no window");
  EXPECT_EQ(with([](Options& o) { o.q_segment_ids.wanted = true; }),
            "this kernel has no segment ids");
  EXPECT_EQ(with([](Options& o) { o.sink.wanted = true; }), "this kernel has no sink");
  EXPECT_EQ(with([](Options& o) { o.dropout.active = true; }), "this kernel has no dropout");
  EXPECT_EQ(with([](Options& o) {
              o.sink.wanted = true;
              o.softcap = 1;
            }),
            "this kernel has no softcap, sink");
  // What the kernel does anyway.
  EXPECT_EQ(
      with([](Options& o) { o.deterministic = o.batch_invariant = o.check = o.top_left = true; }),
      "accepted");
}

TEST(AttentionForwardSm90, RefusesOtherDevicesAndTypes) {
  AttentionForwardProblem cpu = problem();
  cpu.device = {};
  EXPECT_EQ(reason(cpu), "the tensors are on cpu, wanted a CUDA device");
  EXPECT_EQ(reason(problem(DType::f32)), "dtype: got float32, wanted float16 or bfloat16");
  DeviceFacts other = hopper_facts();
  other.compute_capability = 89;
  other.name = "L4";
  EXPECT_EQ(reason(problem(), other), "cuda:0 (L4) has compute capability 8.9, wanted 9.0");
  DeviceFacts small = hopper_facts();
  small.shared_bytes_per_block = 99 * 1024;
  EXPECT_TRUE(contains(reason(problem(), small), "gives a block 101376 bytes of shared memory"));
}

TEST(AttentionForwardSm90, RefusesSizes) {
  EXPECT_EQ(reason(problem(DType::bf16, 136)), "head_dim_qk: got 136, wanted at most 128");
  AttentionForwardProblem wide = problem();
  wide.head_dim_v = 192;
  EXPECT_EQ(reason(wide), "head_dim_v: got 192, wanted at most 128");
  wide.head_dim_v = 100;
  EXPECT_TRUE(contains(reason(wide), "head_dim_v must be a multiple of 8")) << reason(wide);
  AttentionForwardProblem odd = problem();
  odd.head_dim_qk = 33;
  EXPECT_EQ(reason(odd), "accepted");
  AttentionForwardProblem longer = problem();
  longer.slot_kv = std::int64_t{1} << 33;
  EXPECT_EQ(reason(longer), "seqlen_kv: got 8589934592, wanted at most 1073741823");
  AttentionForwardProblem many = problem();
  many.num_seqs = std::int64_t{1} << 26;
  EXPECT_EQ(reason(many), "more than 2^30 tiles of work");
}

TEST(AttentionForwardSm90, RefusesWhatTheCopyEngineCannotAddress) {
  const auto with = [](auto&& change) {
    AttentionForwardProblem p = problem();
    change(p);
    return reason(p);
  };
  using Problem = AttentionForwardProblem;
  EXPECT_TRUE(contains(with([](Problem& p) { p.q.data += 8; }), "q: "));
  EXPECT_TRUE(contains(with([](Problem& p) { p.k.row_stride += 8; }), "k: "));
  EXPECT_TRUE(contains(with([](Problem& p) { p.v.head_stride = 0; }), "v: "));
  EXPECT_TRUE(contains(with([](Problem& p) { p.v.batch_stride = -4096; }), "v: "));
  EXPECT_TRUE(contains(with([](Problem& p) { p.o.batch_stride = std::int64_t{1} << 40; }), "o: "));
  EXPECT_EQ(with([](Problem& p) { p.q.row_stride *= 3; }), "accepted");
}

// In a child: it starts the driver, if there is one.
TEST(AttentionForwardSm90, WithoutADeviceSaysWhy) {
  for (const DType dtype : {DType::bf16, DType::f32}) {
    const std::string answer = in_child([dtype]() -> std::string {
      AttentionForwardProblem p = problem(dtype);
      p.device.id = 99999;
      const PlanResult result = sm90::plan_attention_forward(p);
      const auto* reject = std::get_if<Reject>(&result);
      if (reject == nullptr) return "planned";
      // Both reasons where the call is at fault as well.
      const std::string wanted =
          device_facts(99999).problem +
          (dtype == DType::bf16 ? "" : "; dtype: got float32, wanted float16 or bfloat16");
      return reject->reason == wanted ? reject->reason : "another reason";
    });
    // "no CUDA driver ...", "no CUDA device ...", "there is no device cuda:99999 ...".
    EXPECT_TRUE(contains(answer, "CUDA") || contains(answer, "cuda:99999")) << answer;
  }
}

// ---- what is launched

struct Launching {
  Driver driver = fake_driver();
  FakeCompiler compiler;
  KernelCache cache{{embedded_text(), "", "", "", [this] { return compiler.state(); }}};
  AttentionForwardParams params{};
  std::vector<std::uint64_t> map_numbers;
  alignas(16) std::byte workspace[4096];

  Launching() {
    fake().on_launch = [this](void** given) {
      for (int i = 0; i < 4; ++i) {
        map_numbers.push_back(static_cast<const TensorMap*>(given[i])->words[0]);
      }
      params = *static_cast<const AttentionForwardParams*>(given[4]);
    };
  }
  void run(const AttentionForwardProblem& p) {
    const RunContext context{workspace, reinterpret_cast<void*>(std::uintptr_t{0x77})};
    sm90::launch_attention_forward(driver, hopper_facts(), cache, plan(p), p, context);
  }
};

TEST(AttentionForwardSm90, LaunchesOnceWithItsMapsAndSizes) {
  Launching launching;
  launching.run(problem());
  EXPECT_EQ(fake().calls["cuLaunchKernelEx"], 1);
  EXPECT_EQ(launching.map_numbers, (std::vector<std::uint64_t>{1, 2, 3, 4}));
  ASSERT_EQ(fake().maps.size(), 4u);
  for (std::uintptr_t i = 0; i < 4; ++i) {
    EXPECT_EQ(fake().maps[i].address, reinterpret_cast<std::uintptr_t>(address(i + 1)));
    EXPECT_EQ(fake().maps[i].dtype, DType::bf16);
    EXPECT_EQ(fake().maps[i].promotion, TensorMapPromotion::bytes256);
  }
  EXPECT_EQ(fake().maps[1].dims[1], 500u);
  EXPECT_EQ(fake().maps[1].dims[2], 2u);
  EXPECT_EQ(fake().maps[3].strides[0], 8u * 128 * 2);

  const sm90::AttentionForwardSpec spec =
      sm90::attention_forward_spec(true, 128, 128, false, false);
  EXPECT_EQ(fake().launch.block_x, static_cast<std::uint32_t>(attention_forward_threads(spec)));
  EXPECT_EQ(fake().launch.dynamic_shared_bytes,
            static_cast<std::uint32_t>(attention_forward_smem(spec).total));
  EXPECT_EQ(fake().max_dynamic_shared, attention_forward_smem(spec).total);
  EXPECT_EQ(fake().launch.grid_x, 2u * 8 * 3) << "three tiles of 128 rows for each head";
  EXPECT_EQ(fake().launch.stream, reinterpret_cast<CuStream>(std::uintptr_t{0x77}));
  EXPECT_TRUE(fake().stack.empty());

  const AttentionForwardParams& params = launching.params;
  EXPECT_EQ(reinterpret_cast<std::byte*>(params.lse), address(5));
  EXPECT_EQ(params.lse_batch_stride, 300 * 8);
  EXPECT_EQ(params.lse_head_stride, 300);
  EXPECT_EQ(params.seqlen_q, 300);
  EXPECT_EQ(params.seqlen_kv, 500);
  EXPECT_EQ(params.heads_per_kv_head, 4);
  EXPECT_EQ(params.cu_seqlens_q, nullptr);
  EXPECT_FLOAT_EQ(params.scale_log2, 0.125f * 1.44269504f);
}

TEST(AttentionForwardSm90, GridIsAtMostOneBlockAMultiprocessor) {
  Launching launching;
  AttentionForwardProblem p = problem();
  p.num_seqs = 1000;
  launching.run(p);
  EXPECT_EQ(fake().launch.grid_x, 132u);
}

TEST(AttentionForwardSm90, BlocksShareTilesThroughTheWorkspaceWhereThereAreMore) {
  Launching launching;
  AttentionForwardProblem p = problem();
  EXPECT_EQ(plan(p).workspace_bytes, 0u);
  launching.run(p);
  EXPECT_EQ(launching.params.counter, nullptr);

  p.num_seqs = 1000;
  EXPECT_EQ(plan(p).workspace_bytes, 16u);
  EXPECT_EQ(plan(p).workspace_alignment, 16u);
  std::set<unsigned long long> numbers;
  for (int i = 0; i < 100; ++i) {
    launching.run(p);
    EXPECT_EQ(launching.params.counter, launching.workspace);
    EXPECT_EQ(launching.params.launch % 2, 0u);
    numbers.insert(launching.params.launch);
  }
  EXPECT_EQ(numbers.size(), 100u);
  EXPECT_EQ(fake().calls["cuMemsetD8Async"], 0) << "whatever lies there";

  // Beside lengths that travel.
  p = problem(DType::f16, 64, true);
  p.slot_q = 30000;
  std::vector<std::int32_t> cu = {0, 100, 300};
  p.cu_seqlens_q = p.cu_seqlens_kv = lengths(cu, {});
  EXPECT_EQ(plan(p).workspace_bytes, 16u + 2 * 12);
  launching.run(p);
  EXPECT_EQ(launching.params.counter, launching.workspace);
  EXPECT_EQ(launching.params.cu_seqlens_q, launching.workspace + 16);
  EXPECT_EQ(launching.params.cu_seqlens_kv, launching.workspace + 28);
}

// ---- the last wave

TEST(AttentionForwardSm90, SplitsTheLastWaveByKeys) {
  const auto split = [](int seqlen_q, int seqlen_kv, bool invariant = false, bool causal = false,
                        bool varlen = false, int dim = 128) {
    const sm90::AttentionForwardSpec spec =
        sm90::attention_forward_spec(true, dim, dim, causal, varlen);
    const sm90::AttentionForwardShape shape = {.batch = 4,
                                               .seqlen_q = seqlen_q,
                                               .seqlen_kv = seqlen_kv,
                                               .num_heads_q = 16,
                                               .num_heads_kv = 16,
                                               .head_dim_qk = dim,
                                               .head_dim_v = dim,
                                               .packed = false,
                                               .top_left = false};
    return sm90::attention_forward_split(spec, shape, 132, invariant);
  };
  // 64 heads of 32 tiles: 68 beyond the fifteenth wave, 32 key blocks each, 2176 / 132 = 16.5.
  const sm90::AttentionForwardSplit dense = split(4096, 4096);
  EXPECT_EQ(dense.tiles, 68);
  EXPECT_EQ(dense.tile_blocks, 32);
  EXPECT_EQ(dense.share_blocks, 17);
  EXPECT_EQ(dense.shares, 128);
  // Fewer tiles than multiprocessors are a last wave too.
  EXPECT_EQ(split(128, 16384).tiles, 64);
  EXPECT_EQ(split(128, 16384).share_blocks, 63);
  EXPECT_EQ(split(4096, 4096, true).tiles, 0) << "batch_invariant";
  EXPECT_EQ(split(4096, 4096, false, true).tiles, 0) << "causal";
  EXPECT_EQ(split(4096, 4096, false, false, true).tiles, 0) << "lengths on the device";
  EXPECT_EQ(split(4096, 4096, false, false, false, 64).tiles, 0) << "head_dim 64";
  EXPECT_EQ(split(4096, 1024).tiles, 0) << "nothing to gain";
  EXPECT_EQ(split(4096, 0).tiles, 0);
  EXPECT_EQ(split(0, 4096).tiles, 0);
  EXPECT_EQ(split(128 * 33, 4096).tiles, 0) << "a whole number of waves";
}

// Every key block of every split tile belongs to one part, parts to slots of their own, and each
// part says of its tile what the others say.
TEST(AttentionForwardSm90, PartsCoverSplitTilesOnce) {
  for (const int dim_v : {64, 128}) {
    for (int heads = 1; heads <= 300; heads += 7) {
      for (const int blocks : {9, 10, 12, 13, 31, 32, 128, 1000}) {
        const sm90::AttentionForwardSpec spec =
            sm90::attention_forward_spec(true, 128, dim_v, false, false);
        const sm90::AttentionForwardShape shape = {.batch = 1,
                                                   .seqlen_q = 100,
                                                   .seqlen_kv = blocks * 128 - 5,
                                                   .num_heads_q = heads,
                                                   .num_heads_kv = heads,
                                                   .head_dim_qk = 128,
                                                   .head_dim_v = dim_v,
                                                   .packed = false,
                                                   .top_left = false};
        const sm90::AttentionForwardSplit split =
            sm90::attention_forward_split(spec, shape, 132, false);
        if (split.tiles == 0) continue;
        ASSERT_EQ(split.tile_blocks, blocks);
        ASSERT_LE(split.shares, 132);
        const auto tiles = static_cast<std::size_t>(split.tiles);
        std::vector<int> covered(tiles), count(tiles), told(tiles), first(tiles, -1);
        std::set<int> slots;
        const int all = split.tiles * blocks;
        for (int share = 0; share < split.shares; ++share) {
          const int begin = share * split.share_blocks;
          ASSERT_LT(begin, all);
          int rest = std::min(split.share_blocks, all - begin);
          for (int position = begin; rest > 0;) {
            const sm90::AttentionForwardPart part =
                sm90::attention_forward_part(split, position, rest);
            const auto tile = static_cast<std::size_t>(part.split_tile);
            ASSERT_LT(part.split_tile, split.tiles);
            ASSERT_EQ(part.begin, covered[tile]) << "parts come in the order of their keys";
            ASSERT_GT(part.blocks, 0);
            covered[tile] += part.blocks;
            ASSERT_TRUE(slots.insert(part.slot).second);
            if (count[tile] == 0) {
              first[tile] = part.first_slot;
              told[tile] = part.parts;
            }
            ASSERT_EQ(part.first_slot, first[tile]);
            ASSERT_EQ(part.parts, told[tile]);
            ASSERT_EQ(part.slot, part.first_slot + count[tile]);
            ++count[tile];
            position += part.blocks;
            rest -= part.blocks;
          }
        }
        EXPECT_EQ(covered, std::vector<int>(tiles, blocks));
        EXPECT_EQ(count, told);
        const long long slot_bytes = spec.warpgroups * 512ll * (dim_v / 2 + 4);
        EXPECT_EQ(attention_forward_parts_bytes(spec, split) -
                      attention_forward_arrival_bytes(spec, split),
                  slot_bytes * (*slots.rbegin() + 1));
      }
    }
  }
}

TEST(AttentionForwardSm90, PartsLieBehindTheCounter) {
  AttentionForwardProblem p = problem();
  p.slot_kv = 4096;
  p.num_seqs = 60;  // 1440 tiles, 120 in the last wave
  EXPECT_EQ(plan(p).workspace_bytes, 16u);
  p.num_seqs = 57;  // 1368 tiles, 48 in the last wave, of 32 key blocks each
  const std::size_t slots = 128 + 48 - 1;
  EXPECT_EQ(plan(p).workspace_bytes, 16 + 48 * 2 * 8 + slots * 2 * 128 * 68 * 4);
  Launching launching;
  launching.run(p);
  EXPECT_EQ(launching.params.counter, launching.workspace);
  EXPECT_EQ(launching.params.parts, launching.workspace + 16);
  EXPECT_EQ(launching.params.split.tiles, 48);
  EXPECT_NE(launching.params.launch, 0u);
  p.options.batch_invariant = true;
  EXPECT_EQ(plan(p).workspace_bytes, 16u);
  launching.run(p);
  EXPECT_EQ(launching.params.parts, nullptr);
  EXPECT_EQ(launching.params.split.tiles, 0);
}

TEST(AttentionForwardSm90, CompilesASpecOnceWhateverTheSizes) {
  Launching launching;
  for (std::int64_t n = 1; n <= 20; ++n) {
    AttentionForwardProblem p = problem();
    p.num_seqs = n;
    p.slot_q = 17 * n;
    p.slot_kv = 1000 - n;
    p.num_heads_q = 2 * n;
    launching.run(p);
  }
  EXPECT_EQ(launching.compiler.count, 1);
  EXPECT_EQ(launching.cache.counts().loaded, 1u);
  EXPECT_EQ(fake().calls["cuLaunchKernelEx"], 20);
}

TEST(AttentionForwardSm90, NothingToComputeLaunchesNothing) {
  for (int which = 0; which < 3; ++which) {
    Launching launching;
    AttentionForwardProblem p = problem();
    if (which == 0) p.num_seqs = 0;
    if (which == 1) p.slot_q = 0;
    if (which == 2) p.num_heads_q = p.num_heads_kv = 0;
    EXPECT_EQ(plan(p).workspace_bytes, 0u);
    launching.run(p);
    EXPECT_TRUE(fake().calls.empty()) << which;
    EXPECT_EQ(launching.compiler.count, 0) << which;
  }
}

TEST(AttentionForwardSm90, NoKeysStillWritesItsRows) {
  Launching launching;
  AttentionForwardProblem p = problem();
  p.slot_kv = 0;
  p.k.data = p.v.data = nullptr;
  launching.run(p);
  EXPECT_EQ(fake().calls["cuLaunchKernelEx"], 1);
}

TEST(AttentionForwardSm90, DeviceLengthsArePassedAsTheyAre) {
  Launching launching;
  AttentionForwardProblem p = problem(DType::f16, 64, true);
  std::vector<std::int64_t> cu_q = {0, 100, 300};
  std::vector<std::int32_t> cu_kv = {0, 200, 500};
  std::vector<std::int32_t> used = {90, 200};
  const Device device{ONCHIP_DEVICE_CUDA, 0};
  p.cu_seqlens_q = lengths(cu_q, device);
  p.cu_seqlens_kv = lengths(cu_kv, device);
  p.seqlens_kv = lengths(used, device);
  EXPECT_EQ(plan(p).workspace_bytes, 0u);
  launching.run(p);
  EXPECT_EQ(fake().calls["cuMemcpyHtoDAsync"], 0);
  EXPECT_EQ(fake().calls["cuStreamIsCapturing"], 0);
  EXPECT_EQ(launching.params.cu_seqlens_q, cu_q.data());
  EXPECT_TRUE(launching.params.cu_seqlens_q_int64);
  EXPECT_EQ(launching.params.cu_seqlens_kv, cu_kv.data());
  EXPECT_FALSE(launching.params.cu_seqlens_kv_int64);
  EXPECT_EQ(launching.params.seqlens_q, nullptr);
  EXPECT_EQ(launching.params.seqlens_kv, used.data());
  EXPECT_TRUE(launching.params.packed);

  p.options.check = true;
  EXPECT_EQ(reason(p), "this kernel has no check of lengths in device memory");
}

TEST(AttentionForwardSm90, HostLengthsTravelThroughTheWorkspace) {
  Launching launching;
  AttentionForwardProblem p = problem(DType::f16, 64, true);
  std::vector<std::int64_t> cu_q = {0, 100, 300};
  std::vector<std::int32_t> cu_kv = {0, 200, 500};
  std::vector<std::int32_t> used = {90, 200};
  p.cu_seqlens_q = lengths(cu_q, {});
  p.cu_seqlens_kv = lengths(cu_kv, {ONCHIP_DEVICE_CUDA, 0});
  p.seqlens_q = lengths(used, {});
  const BackendPlan planned = plan(p);
  EXPECT_EQ(planned.workspace_bytes, 4u * (3 + 2));
  EXPECT_EQ(planned.workspace_alignment, 16u);
  launching.run(p);
  EXPECT_EQ(fake().calls["cuMemcpyHtoDAsync"], 1);
  EXPECT_EQ(fake().copy_target, reinterpret_cast<std::uintptr_t>(launching.workspace));
  std::vector<std::int32_t> copied(5);
  ASSERT_EQ(fake().copied.size(), 20u);
  std::memcpy(copied.data(), fake().copied.data(), 20);
  EXPECT_EQ(copied, (std::vector<std::int32_t>{0, 100, 300, 90, 200}));
  EXPECT_EQ(launching.params.cu_seqlens_q, launching.workspace);
  EXPECT_FALSE(launching.params.cu_seqlens_q_int64);
  EXPECT_EQ(launching.params.cu_seqlens_kv, cu_kv.data());
  EXPECT_EQ(launching.params.seqlens_q, launching.workspace + 12);
}

TEST(AttentionForwardSm90, HostLengthsUnderCaptureAreRefused) {
  Launching launching;
  AttentionForwardProblem p = problem(DType::f16, 64, true);
  std::vector<std::int32_t> cu = {0, 100, 300};
  p.cu_seqlens_q = p.cu_seqlens_kv = lengths(cu, {});
  fake().capture_status = CuCaptureStatus::active;
  const Thrown thrown = thrown_by([&] { launching.run(p); });
  EXPECT_EQ(thrown.code, ONCHIP_UNSUPPORTED);
  EXPECT_EQ(thrown.text,
            "attention_forward: cu_seqlens and seqlens: got host memory while the stream is being "
            "captured, wanted tensors on cuda:0");
  EXPECT_EQ(fake().calls["cuLaunchKernelEx"] + fake().calls["cuMemcpyHtoDAsync"], 0);
  EXPECT_TRUE(fake().stack.empty());

  // Lengths on the device, the kernel loaded or not: a capture is no hindrance.
  std::vector<std::int32_t> same = cu;
  p.cu_seqlens_q = p.cu_seqlens_kv = lengths(same, {ONCHIP_DEVICE_CUDA, 0});
  launching.run(p);
  EXPECT_EQ(fake().calls["cuLaunchKernelEx"], 1);
}

TEST(AttentionForwardSm90, FailuresLeaveTheCallersContext) {
  for (const char* name : {"cuTensorMapEncodeTiled", "cuLaunchKernelEx", "cuModuleLoadData"}) {
    Launching launching;
    fake().stack = {fake_context(33)};
    fake().fails[name] = FakeDriver::kFailure;
    EXPECT_EQ(thrown_by([&] { launching.run(problem()); }).code, ONCHIP_DEVICE_ERROR) << name;
    EXPECT_EQ(fake().stack, std::vector<CuContext>{fake_context(33)}) << name;
  }
}

// ---- host and device see one struct

TEST(AttentionForwardSm90, ParametersLieTheSameOnBothSides) {
  ONCHIP_REQUIRE_NVRTC(nvrtc)
  std::string text = "#include \"" + std::string(sm90::kAttentionForwardFile) +
                     "\"\nusing P = onchip::sm90::AttentionForwardParams;\n";
  const auto expect = [&text](const std::string& what, std::size_t value) {
    text += "static_assert(" + what + " == " + std::to_string(value) + ");\n";
  };
  expect("sizeof(P)", sizeof(AttentionForwardParams));
  expect("alignof(P)", alignof(AttentionForwardParams));
  expect("sizeof(onchip::tile::TensorMap)", sizeof(TensorMap));
  expect("alignof(onchip::tile::TensorMap)", alignof(TensorMap));
#define ONCHIP_EXPECT_OFFSET(field) \
  expect("__INTADDR__(&((P*)0)->" #field ")", offsetof(AttentionForwardParams, field))
  ONCHIP_EXPECT_OFFSET(lse);
  ONCHIP_EXPECT_OFFSET(lse_head_stride);
  ONCHIP_EXPECT_OFFSET(cu_seqlens_q);
  ONCHIP_EXPECT_OFFSET(seqlens_kv);
  ONCHIP_EXPECT_OFFSET(wait_failure);
  ONCHIP_EXPECT_OFFSET(seqlens_kv_int64);
  ONCHIP_EXPECT_OFFSET(packed);
  ONCHIP_EXPECT_OFFSET(q_sign);
  ONCHIP_EXPECT_OFFSET(num_tiles);
  ONCHIP_EXPECT_OFFSET(parts);
  ONCHIP_EXPECT_OFFSET(split);
#undef ONCHIP_EXPECT_OFFSET
  // A program needs a kernel to have machine code.
  text += "extern \"C\" __global__ void onchip_test_kernel() {}\n";
  const auto compile = [&](const std::string& program) {
    return in_child([&] {
      KernelSource source =
          kernel_source(embedded_text(), kernel_definitions()[0]->registered(0), {90, true});
      source.request.text = program;
      const CompileResult result = open_nvrtc(nvrtc).compile(source.request);
      return result.cubin.empty() ? result.log : std::string("compiled");
    });
  };
  EXPECT_EQ(compile(text), "compiled");
  EXPECT_TRUE(contains(compile(text + "static_assert(__INTADDR__(&((P*)0)->num_tiles) == 1);\n"),
                       "static assertion"));
}

// ---- registry

TEST(Registry, DefinitionsAreWhole) {
  for (const KernelDefinition* kernel : kernel_definitions()) {
    EXPECT_GT(kernel->registered_count, 0) << kernel->name;
    EXPECT_LE(kernel->registered_count, kMaxRegisteredSpecs) << kernel->name;
    EXPECT_LE(kernel->fields.size(), kMaxSpecFields) << kernel->name;
    EXPECT_FALSE(kernel->architectures.empty()) << kernel->name;
    for (const Architecture architecture : kernel->architectures) {
      EXPECT_EQ(kernel->architecture_for(architecture.number), architecture) << kernel->name;
    }
    for (std::int32_t i = 0; i < kernel->registered_count; ++i) {
      const KernelSpec spec = kernel->registered(i);
      EXPECT_EQ(spec.kernel, kernel);
      EXPECT_GE(kernel->shared_bytes(spec), 0);
      EXPECT_LE(kernel->shared_bytes(spec), 227 * 1024) << spec_text(spec);
      for (std::int32_t j = 0; j < i; ++j) EXPECT_NE(spec, kernel->registered(j)) << i << " " << j;
    }
  }
}

}  // namespace
}  // namespace onchip::gpu::test
