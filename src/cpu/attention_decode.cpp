#include "cpu/attention_decode.hpp"

#include <algorithm>
#include <cstring>
#include <limits>
#include <optional>

#include "core/ceil_div.hpp"
#include "core/thread_pool.hpp"
#include "cpu/attention_decode_unit.hpp"
#include "cpu/attention_host.hpp"
#include "cpu/cpu_features.hpp"
#include "cpu/isa_table.hpp"

namespace onchip::cpu {

namespace {

constexpr double kMinusInfinity = -std::numeric_limits<double>::infinity();
constexpr std::int64_t kSmallestPart = 512;  // keys
constexpr std::int64_t kMostParts = 32;      // of a sequence
constexpr std::int64_t kAppendRows = 64;     // a task
constexpr std::int64_t kFewRows = 16;        // of a kv head: their states are small beside the keys
constexpr double kMaxStatesBytes = 256.0 * 1024.0 * 1024.0;

struct DecodeUnit {
  std::size_t (*state_bytes)(const DecodeShape& shape);
  std::size_t (*scratch_bytes)(const DecodeShape& shape);
  void (*part)(const DecodeTask& task, std::byte* state, std::byte* scratch);
  void (*start)(const DecodeTask& task, std::byte* state);
  void (*fold)(const DecodeTask& task, std::byte* state, const std::byte* part);
  void (*store)(const DecodeTask& task, const std::byte* state);
  const char* name;
  const char* wide_name;
};

#define ONCHIP_CPU_DECODE_UNIT(isa)                                                  \
  DecodeUnit{isa::attention_decode_state_bytes, isa::attention_decode_scratch_bytes, \
             isa::attention_decode_part,        isa::attention_decode_start,         \
             isa::attention_decode_fold,        isa::attention_decode_store,         \
             "attention_decode/" #isa,          "attention_decode/" #isa " in float64"}

// Only of an instruction set that is available.
DecodeUnit decode_unit_of(Isa isa) { ONCHIP_CPU_RETURN_TABLE(isa, ONCHIP_CPU_DECODE_UNIT); }

#undef ONCHIP_CPU_DECODE_UNIT

// Which of the plan's words says what.
enum Word : std::size_t {
  kIsa,
  kWorkers,
  kTaskRows,     // of each kv head of a task
  kTaskHeads,    // kv heads of a task
  kSharesParts,  // 1: every part of a task's keys has a state of its own, for other workers to make
  kStateBytes,
  kScratchBytes,  // of a worker
  kTableBytes,
  kRotatedBytes,  // of the queries, turned
};

std::int64_t word(const BackendPlan& plan, Word which) {
  return static_cast<std::int64_t>(plan.words[which]);
}

// Keys of a part of a sequence: a function of its length alone.
std::int64_t part_keys(std::int64_t length) {
  std::int64_t keys = kSmallestPart;
  while (keys * kMostParts < length) keys *= 2;
  return keys;
}

std::int64_t num_parts(std::int64_t length) { return ceil_div(length, part_keys(length)); }

// Of any sequence that there is room for.
std::int64_t most_parts(std::int64_t room) {
  return std::min(ceil_div(room, kSmallestPart), kMostParts);
}

// Numbers beyond fp32's range need fp64 arithmetic; whether there are any is not looked for.
bool is_wide(const AttentionDecodeProblem& problem) {
  const AttentionOptions& options = problem.options;
  const auto is_f64 = [](const auto& view) { return view.wanted && view.dtype == DType::f64; };
  return problem.dtype != DType::f64 &&
         (is_f64(options.bias) || is_f64(options.sink) || is_f64(options.alibi_slopes));
}

bool has_output(const AttentionDecodeProblem& problem) {
  return problem.slot_q > 0 && problem.num_heads_q > 0 &&
         (problem.head_dim_v > 0 || problem.lse.wanted);
}

// A block is what one task computes, of all keys or of one part of them: some rows of some kv heads
// of a sequence.
class Blocks {
 public:
  Blocks(const BackendPlan& plan, const AttentionDecodeProblem& problem, std::byte* table,
         const RowsView& q)
      : problem_(problem),
        q_(q),
        rows_(word(plan, kTaskRows)),
        heads_(word(plan, kTaskHeads)),
        wide_(is_wide(problem)),
        first_block_(reinterpret_cast<std::int64_t*>(table)),
        first_part_(first_block_ + problem.num_seqs + 1) {
    std::int64_t blocks = 0;
    std::int64_t parts = 0;
    for (std::int64_t n = 0; n < problem.num_seqs; ++n) {
      first_block_[n] = blocks;
      first_part_[n] = parts;
      const DecodeSequence s = problem.cached_sequence(n);
      const std::int64_t own = s.skipped ? 0 : row_blocks(s) * head_blocks();
      blocks += own;
      parts += own * num_parts(s.kv_len);
    }
    first_block_[problem.num_seqs] = blocks;
    first_part_[problem.num_seqs] = parts;
  }

  static std::size_t table_bytes(const AttentionDecodeProblem& problem) {
    return rounded_up(2 * static_cast<std::size_t>(problem.num_seqs + 1) * sizeof(std::int64_t));
  }

  std::int64_t count() const { return first_block_[problem_.num_seqs]; }
  std::int64_t parts() const { return first_part_[problem_.num_seqs]; }

  // All keys.
  DecodeTask block(std::int64_t index, std::int64_t& first_part) const {
    const std::int64_t n = find(first_block_, index);
    const DecodeSequence s = problem_.cached_sequence(n);
    const std::int64_t own = index - first_block_[n];
    first_part = first_part_[n] + own * num_parts(s.kv_len);
    return task(s, own);
  }

  DecodeTask part(std::int64_t index) const {
    const std::int64_t n = find(first_part_, index);
    const DecodeSequence s = problem_.cached_sequence(n);
    const std::int64_t own = index - first_part_[n];
    const std::int64_t parts = num_parts(s.kv_len);
    return part_of(task(s, own / parts), own % parts);
  }

  static DecodeTask part_of(DecodeTask whole, std::int64_t part) {
    const std::int64_t keys = part_keys(whole.call.seqlen_kv);
    whole.key_begin = part * keys;
    whole.key_end = std::min(whole.key_begin + keys, whole.call.seqlen_kv);
    return whole;
  }

 private:
  std::int64_t row_blocks(const DecodeSequence& s) const {
    return ceil_div(s.q_len * group_size(problem_), rows_);
  }
  std::int64_t head_blocks() const { return ceil_div(problem_.num_heads_kv, heads_); }

  std::int64_t find(const std::int64_t* first, std::int64_t index) const {
    return std::upper_bound(first, first + problem_.num_seqs, index) - first - 1;
  }

  DecodeTask task(const DecodeSequence& s, std::int64_t own) const {
    const std::int64_t kv_head = own / row_blocks(s) * heads_;
    DecodeTask task;
    task.call = attention_task(problem_, s.n, s, kv_head);
    task.call.q = unit_rows(q_, s.batch, s.q_begin, kv_head * group_size(problem_));
    task.call.kv_segment_ids = {};
    if (const SegmentIdsView& ids = problem_.options.kv_segment_ids; ids.data != nullptr) {
      task.call.kv_segment_ids = {ids.data + s.kv_batch * ids.batch_stride, ids.row_stride};
    }
    task.call.row_begin = own % row_blocks(s) * rows_;
    task.call.row_end = std::min(task.call.row_begin + rows_, s.q_len * group_size(problem_));
    task.kv_heads = std::min(heads_, problem_.num_heads_kv - kv_head);
    task.group = group_size(problem_);
    const std::int64_t slot = problem_.page_table.present() ? 0 : s.slot;
    task.k_cache = unit_cache(problem_.k_cache, slot, kv_head);
    task.v_cache = unit_cache(problem_.v_cache, slot, kv_head);
    if (problem_.page_table.present()) task.pages = problem_.page_table.at(s.n);
    task.block_rows = problem_.block_rows;
    task.wide = wide_;
    return task;
  }

  static UnitCache unit_cache(const RowsView& cache, std::int64_t slot, std::int64_t head) {
    if (cache.data == nullptr) return {};  // empty
    return {cache.at(slot, 0, head), cache.batch_stride, cache.row_stride, cache.head_stride};
  }

  const AttentionDecodeProblem& problem_;
  RowsView q_;
  std::int64_t rows_;
  std::int64_t heads_;
  bool wide_;
  std::int64_t* first_block_;  // [num_seqs + 1]
  std::int64_t* first_part_;
};

std::int64_t append_blocks(const AttentionDecodeProblem& problem) {
  return ceil_div(std::max(problem.slot_q, problem.slot_kv), kAppendRows);
}

RowsView rotated_view(const AttentionDecodeProblem& problem, std::byte* memory) {
  RowsView view = problem.q;
  view.data = memory;
  view.head_stride = problem.head_dim_qk * dtype_size(problem.dtype);
  view.row_stride = view.head_stride * problem.num_heads_q;
  view.batch_stride = problem.packed ? 0 : view.row_stride * problem.slot_q;
  return view;
}

// Outputs of rows [begin, end) that belong to no sequence, or to a skipped one.
void clear_rows(const AttentionDecodeProblem& problem, std::int64_t batch, std::int64_t begin,
                std::int64_t end) {
  const auto bytes = static_cast<std::size_t>(problem.head_dim_v * dtype_size(problem.dtype));
  for (std::int64_t row = begin; row < end; ++row) {
    for (std::int64_t head = 0; head < problem.num_heads_q; ++head) {
      if (bytes > 0) std::memset(problem.o.at(batch, row, head), 0, bytes);
      if (!problem.lse.wanted) continue;
      store_from_double(problem.lse.at(batch, row, head), problem.lse.dtype, kMinusInfinity);
    }
  }
}

// What comes before attention, for rows [begin, end) of one sequence: new keys and values into the
// caches, queries turned, outputs of skipped rows.
void prepare(const AttentionDecodeProblem& problem, const DecodeSequence& s, std::int64_t begin,
             std::int64_t end, const RowsView& rotated, double* scratch) {
  const std::int64_t last_q = std::min(end, s.q_len);
  if (s.skipped) {
    clear_rows(problem, s.batch, s.q_begin + begin, s.q_begin + last_q);
    return;
  }
  for (std::int64_t t = begin; t < std::min(end, s.new_len); ++t) {
    append_row(problem, s, t, scratch);
  }
  if (!problem.rotary.wanted || !has_output(problem)) return;
  Rotator rotator(problem.rotary, scratch);
  for (std::int64_t i = begin; i < last_q; ++i) {
    rotator.move_to(problem.q_position(s, i));
    for (std::int64_t head = 0; head < problem.num_heads_q; ++head) {
      rotator.turn(problem.dtype, problem.head_dim_qk, problem.q.at(s.batch, s.q_begin + i, head),
                   rotated.at(s.batch, s.q_begin + i, head));
    }
  }
}

}  // namespace

PlanResult plan_attention_decode(const AttentionDecodeProblem& problem, const Settings& settings) {
  if (std::optional<Reject> refusal = attention_refusal(problem, settings)) return *refusal;
  const IsaChoice choice = choose_isa(settings);
  if (!choice.problem.empty()) return Reject{choice.problem, true};
  const DecodeUnit unit = decode_unit_of(choice.isa);
  BackendPlan plan;
  plan.kernel = is_wide(problem) ? unit.wide_name : unit.name;
  plan.words[kIsa] = static_cast<std::uint64_t>(choice.isa);

  // From shapes alone: the lengths may have changed when the plan is run.
  const std::int64_t threads = std::max(num_threads(), 1);
  const std::int64_t list = problem.slot_q * group_size(problem);
  const std::int64_t rows = std::clamp<std::int64_t>(list, 1, kMaxDecodeRows);
  const auto blocks = [&](std::int64_t heads) {
    const std::int64_t row_blocks = problem.packed ? ceil_div(list, rows) + problem.num_seqs
                                                   : ceil_div(list, rows) * problem.num_seqs;
    return row_blocks * ceil_div(problem.num_heads_kv, heads);
  };
  const std::int64_t parts = std::max<std::int64_t>(most_parts(problem.room), 1);
  std::int64_t heads = std::clamp<std::int64_t>(kMaxDecodeRows / rows, 1,
                                                std::max<std::int64_t>(problem.num_heads_kv, 1));
  while (heads > 1 && blocks(heads) * parts < 4 * threads) heads = ceil_div(heads, 2);

  DecodeShape shape;
  shape.dtype = problem.dtype;
  shape.head_dim_qk = problem.head_dim_qk;
  shape.head_dim_v = problem.head_dim_v;
  shape.rows = rows * heads;
  shape.wide = is_wide(problem);
  const std::size_t state = rounded_up(unit.state_bytes(shape));
  // The states of all parts are an addition to the keys that few rows do not notice. Many rows make
  // enough tasks without them.
  const bool shares_parts =
      parts > 1 && (list <= kFewRows || blocks(heads) < 4 * threads) &&
      static_cast<double>(blocks(heads) * parts) * static_cast<double>(state) <= kMaxStatesBytes;
  // A worker's own: the rotation's, a part's and, where no others make its parts, the part's state.
  const std::size_t scratch = std::max(
      rounded_up(unit.scratch_bytes(shape)) + 2 * state,
      rounded_up(static_cast<std::size_t>(Rotator::scratch(problem.rotary)) * sizeof(double)));
  const std::int64_t tasks = std::max(blocks(heads) * (shares_parts ? parts : 1),
                                      problem.num_seqs * append_blocks(problem));
  const std::int32_t workers = workers_for(tasks);

  plan.words[kWorkers] = static_cast<std::uint64_t>(workers);
  plan.words[kTaskRows] = static_cast<std::uint64_t>(rows);
  plan.words[kTaskHeads] = static_cast<std::uint64_t>(heads);
  plan.words[kSharesParts] = shares_parts ? 1 : 0;
  plan.words[kStateBytes] = state;
  plan.words[kScratchBytes] = scratch;
  plan.words[kTableBytes] = Blocks::table_bytes(problem);
  if (problem.rotary.wanted && has_output(problem)) {
    const std::int64_t q_rows = problem.slot_q * (problem.packed ? 1 : problem.num_seqs);
    plan.words[kRotatedBytes] = rounded_up(static_cast<std::size_t>(
        q_rows * problem.num_heads_q * problem.head_dim_qk * dtype_size(problem.dtype)));
  }
  plan.workspace_bytes = plan.words[kTableBytes] + plan.words[kRotatedBytes] +
                         static_cast<std::size_t>(workers) * scratch;
  if (shares_parts) {
    plan.workspace_bytes += static_cast<std::size_t>(blocks(heads) * parts) * state;
  }
  plan.workspace_alignment = kScratchAlignment;
  return plan;
}

PlanResult plan_attention_decode(const AttentionDecodeProblem& problem) {
  return plan_attention_decode(problem, settings());
}

void run_attention_decode(const BackendPlan& plan, const AttentionDecodeProblem& problem,
                          const RunContext& context) {
  const DecodeUnit unit = decode_unit_of(static_cast<Isa>(plan.words[kIsa]));
  const auto workers = static_cast<std::int32_t>(plan.words[kWorkers]);
  std::byte* table = context.workspace;
  std::byte* rotated_memory = table + plan.words[kTableBytes];
  std::byte* scratch = rotated_memory + plan.words[kRotatedBytes];
  std::byte* states = scratch + static_cast<std::size_t>(workers) * plan.words[kScratchBytes];
  const auto scratch_of = [&](std::int32_t worker) {
    return scratch + static_cast<std::size_t>(worker) * plan.words[kScratchBytes];
  };
  const auto state_of = [&](std::int64_t part) {
    return states + static_cast<std::size_t>(part) * plan.words[kStateBytes];
  };
  const RowsView q = problem.rotary.wanted ? rotated_view(problem, rotated_memory) : problem.q;

  const std::int64_t append = append_blocks(problem);
  parallel_for(problem.num_seqs * append, workers, [&](std::int64_t task, std::int32_t worker) {
    const std::int64_t begin = task % append * kAppendRows;
    prepare(problem, problem.cached_sequence(task / append), begin, begin + kAppendRows, q,
            reinterpret_cast<double*>(scratch_of(worker)));
  });
  for_each_slack(problem, RowAxis::q,
                 [&](std::int64_t batch, std::int64_t begin, std::int64_t end) {
                   clear_rows(problem, batch, begin, end);
                 });
  if (!has_output(problem)) return;

  const Blocks blocks(plan, problem, table, q);
  const bool shares_parts = plan.words[kSharesParts] != 0;
  if (shares_parts) {
    parallel_for(blocks.parts(), workers, [&](std::int64_t index, std::int32_t worker) {
      unit.part(blocks.part(index), state_of(index), scratch_of(worker));
    });
  }
  parallel_for(blocks.count(), workers, [&](std::int64_t index, std::int32_t worker) {
    std::int64_t first_part = 0;
    const DecodeTask block = blocks.block(index, first_part);
    std::byte* total = scratch_of(worker);
    std::byte* part = total + plan.words[kStateBytes];
    unit.start(block, total);
    for (std::int64_t p = 0; p < num_parts(block.call.seqlen_kv); ++p) {
      if (shares_parts) {
        unit.fold(block, total, state_of(first_part + p));
      } else {
        unit.part(Blocks::part_of(block, p), part, part + plan.words[kStateBytes]);
        unit.fold(block, total, part);
      }
    }
    unit.store(block, total);
  });
}

}  // namespace onchip::cpu
