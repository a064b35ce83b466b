// Host side of attention backward on the CPU: what is planned, and how the work is cut into tasks.
//
// Two ways of cutting give the same bits (attention_backward_unit.cpp says why):
// - one pass, a task a (sequence, kv head): the scores are computed once, 5 products in all;
// - two passes, a task a block of query rows for dq and a task a chunk of keys for dk and dv: 7
//   products, but as many tasks as threads could want.
// dbias is a third kind of task (attention_backward_bias.hpp): 2 products more.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <initializer_list>
#include <limits>
#include <string>

#include "core/ceil_div.hpp"
#include "core/thread_pool.hpp"
#include "cpu/attention.hpp"
#include "cpu/attention_backward_bias.hpp"
#include "cpu/attention_backward_host.hpp"
#include "cpu/attention_host.hpp"

namespace onchip::cpu {

namespace {

constexpr double kMinusInfinity = -std::numeric_limits<double>::infinity();

// For 16-bit inputs one pass gathers dq in float32 beside dq itself. Beyond this many bytes for all
// workers together two passes are cheaper than the memory.
constexpr std::size_t kMaxSumsBytes = std::size_t{48} << 20;

// Which of the plan's words says what.
enum Word : std::size_t {
  kIsa,
  kWorkers,
  kTableBytes,
  kShiftBytes,
  kScratchBytes,  // of a worker, like the next two
  kSumsBytes,     // 0: no one-pass plan for 16-bit inputs
  kBiasBytes,
  kBiasPartsBytes,  // of the call
};

// Adds up workspace; views with stride 0 may ask for more than any address space has.
class Bytes {
 public:
  // Returns the piece's own size.
  std::size_t add(std::initializer_list<std::int64_t> extents) {
    double size = 1.0;
    for (const std::int64_t extent : extents) size *= static_cast<double>(extent);
    total_ += size;
    if (!fit()) return 0;
    std::size_t bytes = 1;
    for (const std::int64_t extent : extents) bytes *= static_cast<std::size_t>(extent);
    return rounded_up(bytes);
  }
  bool fit() const { return total_ < 0x1p56; }

 private:
  double total_ = 0.0;
};

// Keys of a task in two passes: a chunk, or a tile where chunks are fewer than threads could share
// evenly. Only the start of a tile shows in bits.
std::int64_t key_task_size(const AttentionProblem& problem, const BackwardShape& shape,
                           std::int64_t workers) {
  const std::int64_t lists = problem.num_heads_kv * (problem.packed ? 1 : problem.num_seqs);
  const bool enough = ceil_div(problem.slot_kv, shape.chunk_keys) * lists >= 4 * workers;
  return enough ? shape.chunk_keys : std::min(shape.chunk_keys, kMaxTileKeys);
}

// Tasks of all sequences: for each the number of the tasks before it.
class BlockTable {
 public:
  struct Block {
    std::int64_t sequence = 0;
    SequenceRange range;
    std::int64_t kv_head = 0;
    std::int64_t begin = 0;
    std::int64_t end = 0;
  };

  // `axis` q: blocks of the row list of a group; kv: chunks of keys.
  BlockTable(const AttentionProblem& problem, RowAxis axis, std::int64_t size,
             std::int64_t* first_task)
      : problem_(problem), axis_(axis), size_(size), first_task_(first_task) {
    count_ = 0;
    for (std::int64_t n = 0; n < live_sequences(problem); ++n) {
      first_task_[n] = count_;
      count_ += problem.num_heads_kv * ceil_div(length(problem.sequence(n)), size_);
    }
  }

  std::int64_t count() const { return count_; }

  // Under a causal mask the last rows and the first keys have most to do: they go first, and the
  // ends of threads meet.
  Block block(std::int64_t index) const {
    const std::int64_t* begin = first_task_;
    const std::int64_t* end = begin + live_sequences(problem_);
    Block block;
    block.sequence = std::upper_bound(begin, end, index) - begin - 1;
    block.range = problem_.sequence(block.sequence);
    const std::int64_t all = length(block.range);
    const std::int64_t blocks = ceil_div(all, size_);
    const std::int64_t in_sequence = index - first_task_[block.sequence];
    block.kv_head = in_sequence / blocks;
    std::int64_t which = in_sequence % blocks;
    if (axis_ == RowAxis::q) which = blocks - 1 - which;
    block.begin = which * size_;
    block.end = std::min(block.begin + size_, all);
    return block;
  }

 private:
  std::int64_t length(const SequenceRange& s) const {
    return axis_ == RowAxis::q ? s.q_len * group_size(problem_) : s.kv_len;
  }

  const AttentionProblem& problem_;
  RowAxis axis_;
  std::int64_t size_;
  std::int64_t* first_task_;
  std::int64_t count_;
};

// Everything one call works with.
class BackwardRun {
 public:
  BackwardRun(const BackendPlan& plan, const AttentionBackwardProblem& problem,
              std::byte* workspace)
      : problem_(problem),
        unit_(unit_of(static_cast<Isa>(plan.words[kIsa]))),
        shape_(backward_shape(problem)),
        group_(group_size(problem)),
        workers_(static_cast<std::int32_t>(plan.words[kWorkers])),
        scratch_bytes_(plan.words[kScratchBytes]),
        sums_bytes_(plan.words[kSumsBytes]),
        worker_bytes_(scratch_bytes_ + sums_bytes_ + plan.words[kBiasBytes]),
        rows_(problem, RowAxis::q, shape_.tile_rows, tables(workspace)),
        keys_(problem, RowAxis::kv, key_task_size(problem, shape_, workers_),
              tables(workspace) + live_sequences(problem)),
        bias_(problem, shape_),
        shift_(workspace + plan.words[kTableBytes]),
        bias_parts_(shift_ + plan.words[kShiftBytes]),
        worker_memory_(bias_parts_ + plan.words[kBiasPartsBytes]) {}

  void run();

 private:
  static std::int64_t* tables(std::byte* workspace) {
    return reinterpret_cast<std::int64_t*>(workspace);
  }
  std::byte* scratch(std::int32_t worker) const { return worker_memory_ + worker * worker_bytes_; }
  std::byte* sums(std::int32_t worker) const { return scratch(worker) + scratch_bytes_; }
  std::byte* bias_sums(std::int32_t worker) const { return sums(worker) + sums_bytes_; }

  BackwardTask task(std::int64_t n, const SequenceRange& s, std::int64_t kv_head) const {
    return backward_task(problem_, shape_, shift_, n, s, kv_head);
  }
  bool one_pass() const;
  void run_list(std::int64_t index, std::int32_t worker) const;
  void run_rows(std::int64_t index, std::int32_t worker) const;
  void run_keys(std::int64_t index, std::int32_t worker) const;
  void run_bias(std::int64_t index, std::int32_t worker) const;
  void sum_sink(std::int64_t head) const;
  void clear_slack() const;

  const AttentionBackwardProblem& problem_;
  const Unit unit_;
  const BackwardShape shape_;
  const std::int64_t group_;
  const std::int32_t workers_;
  const std::size_t scratch_bytes_;
  const std::size_t sums_bytes_;
  const std::size_t worker_bytes_;
  const BlockTable rows_;
  const BlockTable keys_;
  const BiasGradient bias_;
  std::byte* const shift_;  // [batch][head][row]: d_lse - sum(o dO)
  std::byte* const bias_parts_;
  std::byte* const worker_memory_;
};

// Where there are fewer lists than threads could share evenly, the two products that two passes
// cost more are less than what idle threads cost.
bool BackwardRun::one_pass() const {
  const bool both = wants_dq(problem_) && (wants_dk(problem_) || wants_dv(problem_));
  const bool gathers_apart = problem_.dtype == DType::f16 || problem_.dtype == DType::bf16;
  if (!both || (gathers_apart && sums_bytes_ == 0)) return false;
  double all = 0.0;
  double largest = 0.0;
  std::int64_t lists = 0;
  for (std::int64_t n = 0; n < live_sequences(problem_); ++n) {
    const SequenceRange s = problem_.sequence(n);
    const double pairs = static_cast<double>(s.q_len) * static_cast<double>(s.kv_len);
    all += pairs * static_cast<double>(problem_.num_heads_kv);
    largest = std::max(largest, pairs);
    if (pairs > 0.0) lists += problem_.num_heads_kv;
  }
  const double workers = workers_;
  const double longest =
      lists <= workers_ ? largest : all / workers + largest * (1.0 - 1.0 / workers);
  return 5.0 * longest <= 7.0 * all / workers;
}

void BackwardRun::run_list(std::int64_t index, std::int32_t worker) const {
  const std::int64_t n = index / problem_.num_heads_kv;
  const std::int64_t kv_head = index % problem_.num_heads_kv;
  const SequenceRange s = problem_.sequence(n);
  BackwardTask list = task(n, s, kv_head);
  list.dq = unit_rows(problem_.dq, s.batch, s.q_begin, kv_head * group_);
  if (wants_dk(problem_)) list.dk = unit_rows(problem_.dk, s.batch, s.kv_begin, kv_head);
  if (wants_dv(problem_)) list.dv = unit_rows(problem_.dv, s.batch, s.kv_begin, kv_head);
  list.dq_sums = list.dq;
  if (sums_bytes_ > 0) {
    const std::int64_t row_bytes = problem_.head_dim_qk * arithmetic_size(problem_.dtype);
    list.dq_sums = {sums(worker), s.q_len * row_bytes, row_bytes};
  }
  unit_.backward(list, scratch(worker));
}

void BackwardRun::run_rows(std::int64_t index, std::int32_t worker) const {
  const BlockTable::Block block = rows_.block(index);
  const SequenceRange& s = block.range;
  BackwardTask rows = task(block.sequence, s, block.kv_head);
  rows.row_begin = block.begin;
  rows.row_end = block.end;
  rows.dq = unit_rows(problem_.dq, s.batch, s.q_begin, block.kv_head * group_);
  unit_.backward(rows, scratch(worker));
}

void BackwardRun::run_bias(std::int64_t index, std::int32_t worker) const {
  bias_.run(index, unit_, {shift_, scratch(worker), bias_sums(worker), bias_parts_});
}

void BackwardRun::run_keys(std::int64_t index, std::int32_t worker) const {
  const BlockTable::Block block = keys_.block(index);
  const SequenceRange& s = block.range;
  BackwardTask keys = task(block.sequence, s, block.kv_head);
  keys.key_begin = block.begin;
  keys.key_end = block.end;
  if (wants_dk(problem_)) keys.dk = unit_rows(problem_.dk, s.batch, s.kv_begin, block.kv_head);
  if (wants_dv(problem_)) keys.dv = unit_rows(problem_.dv, s.batch, s.kv_begin, block.kv_head);
  unit_.backward(keys, scratch(worker));
}

// ---- dsink --------------------------------------------------------------------------------------

bool sees_a_key(const AttentionProblem& problem, std::int64_t n, const SequenceRange& s,
                std::int64_t head, std::int64_t i) {
  const AttentionOptions& options = problem.options;
  const KeyRange keys = problem.visible_keys(s, i);
  for (std::int64_t j = keys.begin; j < keys.end; ++j) {
    if (options.mask.wanted &&
        load_as_double(options.mask.at(n, head, i, j), options.mask.dtype) == 0.0) {
      continue;
    }
    if (options.q_segment_ids.wanted && options.q_segment_ids.at(s.batch, s.q_begin + i) !=
                                            options.kv_segment_ids.at(s.batch, s.kv_begin + j)) {
      continue;
    }
    if (options.bias.wanted &&
        load_as_double(options.bias.at(n, head, i, j), options.bias.dtype) == kMinusInfinity) {
      continue;
    }
    return true;
  }
  return false;
}

// dO of a row that sees no key has no influence where o is 0, whatever it holds.
double shift_of_empty_row(const AttentionBackwardProblem& problem, const SequenceRange& s,
                          std::int64_t head, std::int64_t i) {
  const std::byte* o = problem.o.at(s.batch, s.q_begin + i, head);
  const std::byte* d_o = problem.d_o.at(s.batch, s.q_begin + i, head);
  double shift = 0.0;
  if (problem.d_lse.wanted) {
    shift = load_as_double(problem.d_lse.at(s.batch, s.q_begin + i, head), problem.d_lse.dtype);
  }
  for (std::int64_t d = 0; d < problem.head_dim_v; ++d) {
    const std::int64_t at = d * dtype_size(problem.dtype);
    const double x = load_as_double(o + at, problem.dtype);
    if (x != 0.0) shift -= x * load_as_double(d_o + at, problem.dtype);
  }
  return shift;
}

void BackwardRun::sum_sink(std::int64_t head) const {
  const HeadScalarsView& sinks = problem_.options.sink;
  const double sink = load_as_double(sinks.at(0, head), sinks.dtype);
  const DType type = problem_.dtype == DType::f64 ? DType::f64 : DType::f32;
  double total = 0.0;
  for (std::int64_t n = 0; n < live_sequences(problem_) && sink != kMinusInfinity; ++n) {
    const SequenceRange s = problem_.sequence(n);
    const UnitRows shifts = task(n, s, head / group_).shift;
    for (std::int64_t i = 0; i < s.q_len; ++i) {
      const double lse =
          load_as_double(problem_.lse.at(s.batch, s.q_begin + i, head), problem_.lse.dtype);
      if (lse == kMinusInfinity) continue;
      double shift = load_as_double(
          shifts.data + head % group_ * shifts.head_stride + i * shifts.row_stride, type);
      if (!std::isfinite(shift) && !sees_a_key(problem_, n, s, head, i)) {
        shift = shift_of_empty_row(problem_, s, head, i);
      }
      total += std::exp(sink - lse) * shift;
    }
  }
  store_from_double(problem_.dsink.at(0, head), problem_.dsink.dtype, total);
}

// ---- all ----------------------------------------------------------------------------------------

void BackwardRun::clear_slack() const {
  const auto clear = [&](RowAxis axis, const RowsView& rows, std::int64_t heads, std::int64_t dim) {
    const auto row_bytes = static_cast<std::size_t>(dim * dtype_size(problem_.dtype));
    for_each_slack(problem_, axis, [&](std::int64_t batch, std::int64_t begin, std::int64_t end) {
      for (std::int64_t row = begin; row < end; ++row) {
        for (std::int64_t head = 0; head < heads; ++head) {
          std::memset(rows.at(batch, row, head), 0, row_bytes);
        }
      }
    });
  };
  const std::int64_t heads_kv = problem_.num_heads_kv;
  if (wants_dq(problem_)) {
    clear(RowAxis::q, problem_.dq, problem_.num_heads_q, problem_.head_dim_qk);
  }
  if (wants_dk(problem_)) clear(RowAxis::kv, problem_.dk, heads_kv, problem_.head_dim_qk);
  if (wants_dv(problem_)) clear(RowAxis::kv, problem_.dv, heads_kv, problem_.head_dim_v);
}

void BackwardRun::run() {
  parallel_for(rows_.count(), workers_, [&](std::int64_t index, std::int32_t) {
    const BlockTable::Block block = rows_.block(index);
    BackwardTask rows = task(block.sequence, block.range, block.kv_head);
    rows.row_begin = block.begin;
    rows.row_end = block.end;
    unit_.backward_shift(rows);
  });
  if (wants_dsink(problem_)) {
    parallel_for(problem_.num_heads_q, workers_,
                 [&](std::int64_t head, std::int32_t) { sum_sink(head); });
  }

  const bool lists = one_pass();
  const std::int64_t list_tasks = lists ? live_sequences(problem_) * problem_.num_heads_kv : 0;
  const std::int64_t row_tasks = !lists && wants_dq(problem_) ? rows_.count() : 0;
  const std::int64_t key_tasks =
      !lists && (wants_dk(problem_) || wants_dv(problem_)) ? keys_.count() : 0;
  parallel_for(list_tasks + row_tasks + key_tasks + bias_.tasks(), workers_,
               [&](std::int64_t index, std::int32_t worker) {
                 const std::int64_t row = index - list_tasks;
                 const std::int64_t key = row - row_tasks;
                 const std::int64_t bias = key - key_tasks;
                 if (row < 0) {
                   run_list(index, worker);
                 } else if (key < 0) {
                   run_rows(row, worker);
                 } else if (bias < 0) {
                   run_keys(key, worker);
                 } else {
                   run_bias(bias, worker);
                 }
               });
  bias_.finish(bias_parts_, workers_);
  clear_slack();
}

}  // namespace

PlanResult plan_attention_backward(const AttentionBackwardProblem& problem,
                                   const Settings& settings) {
  if (auto refusal = attention_refusal(problem, settings)) return *refusal;
  const IsaChoice choice = choose_isa(settings);
  if (!choice.problem.empty()) return Reject{choice.problem, true};
  const Unit unit = unit_of(choice.isa);
  BackendPlan plan;
  plan.kernel = unit.backward_name;
  plan.words[kIsa] = static_cast<std::uint64_t>(choice.isa);
  if (!has_output(problem)) return plan;

  const BackwardShape shape = backward_shape(problem);
  const std::int64_t size = arithmetic_size(problem.dtype);
  const std::int32_t workers = std::max(num_threads(), 1);
  Bytes bytes;
  plan.words[kWorkers] = static_cast<std::uint64_t>(workers);
  plan.words[kTableBytes] =
      bytes.add({2, live_sequences(problem), std::int64_t{sizeof(std::int64_t)}});
  const std::int64_t batches = problem.packed ? 1 : problem.num_seqs;
  plan.words[kShiftBytes] = bytes.add({batches, problem.num_heads_q, problem.slot_q, size});
  plan.words[kScratchBytes] = rounded_up(unit.backward_scratch_bytes(shape));
  if (problem.dtype == DType::f16 || problem.dtype == DType::bf16) {
    Bytes sums;
    const std::size_t worker_sums =
        sums.add({group_size(problem), problem.slot_q, problem.head_dim_qk, size});
    if (sums.fit() && worker_sums <= kMaxSumsBytes / static_cast<std::size_t>(workers)) {
      plan.words[kSumsBytes] = worker_sums;
    }
  }
  const BiasGradient bias(problem, shape);
  plan.words[kBiasBytes] = bias.worker_bytes();
  plan.words[kBiasPartsBytes] = bias.parts_bytes();
  if (!bytes.fit()) return Reject{"the workspace would not fit in any address space"};
  plan.workspace_bytes =
      plan.words[kTableBytes] + plan.words[kShiftBytes] + plan.words[kBiasPartsBytes] +
      static_cast<std::size_t>(workers) *
          (plan.words[kScratchBytes] + plan.words[kSumsBytes] + plan.words[kBiasBytes]);
  plan.workspace_alignment = kScratchAlignment;
  return plan;
}

PlanResult plan_attention_backward(const AttentionBackwardProblem& problem) {
  return plan_attention_backward(problem, settings());
}

void run_attention_backward(const BackendPlan& plan, const AttentionBackwardProblem& problem,
                            const RunContext& context) {
  if (has_output(problem)) BackwardRun(plan, problem, context.workspace).run();
}

}  // namespace onchip::cpu
