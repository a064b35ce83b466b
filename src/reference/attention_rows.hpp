// What the reference's operators of exact attention share: rows in double, the logits of one query
// row over its keys, its softmax, and the workspace of their plans.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <span>

#include "core/attention.hpp"
#include "core/backend.hpp"
#include "core/settings.hpp"

namespace onchip::reference {

constexpr double kMinusInfinity = -std::numeric_limits<double>::infinity();
constexpr std::size_t kAlignment = 64;

// Workspace in doubles. Its size follows from shapes alone: a plan outlives the lengths it saw.
class Layout {
 public:
  void add(std::int64_t count, std::int64_t width = 1) { doubles_ += Wide{count} * width; }

  // Rounded up so that what follows starts on its own cache line.
  void finish_line() {
    constexpr Wide kLine = kAlignment / sizeof(double);
    doubles_ = (doubles_ + kLine - 1) / kLine * kLine;
  }
  void repeat(std::int64_t times) { doubles_ *= times; }

  bool fits() const { return doubles_ <= kLimit; }
  std::int64_t doubles() const { return static_cast<std::int64_t>(doubles_); }

 private:
  __extension__ using Wide = __int128;
  static constexpr Wide kLimit = Wide{1} << 56;  // more than any address space holds
  Wide doubles_ = 0;
};

// Hands out consecutive pieces of a worker's workspace.
class Scratch {
 public:
  explicit Scratch(double* next) : next_(next) {}

  double* take(std::int64_t count, std::int64_t width = 1) {
    double* piece = next_;
    next_ += count * width;
    return piece;
  }

 private:
  double* next_;
};

inline double* as_doubles(std::byte* workspace) { return reinterpret_cast<double*>(workspace); }

void load_row(const std::byte* from, DType dtype, std::int64_t dim, double* to);
void load_row(const RowsView& rows, std::int64_t batch, std::int64_t row, std::int64_t head,
              std::int64_t dim, double* to);
void store_row(const RowsView& rows, std::int64_t batch, std::int64_t row, std::int64_t head,
               std::int64_t dim, const double* from);
void store_zeros(const RowsView& rows, std::int64_t batch, std::int64_t row, std::int64_t head,
                 std::int64_t dim);

// Four running sums, because a single one would wait for every addition before it.
double dot(const double* a, const double* b, std::int64_t dim);
void add_scaled(double factor, const double* x, std::int64_t dim, double* to);

// A key that one query row sees.
struct Pair {
  std::int64_t j;
  double logit;          // scale q.k, capped, + bias - alibi
  double softcap_slope;  // d capped / d (scale q.k)
};
static_assert(sizeof(Pair) == 3 * sizeof(double) && alignof(Pair) == alignof(double));
constexpr std::int64_t kPairDoubles = 3;

// The keys and values of one (sequence, kv head) in double, and the logits over them.
class Keys {
 public:
  // `count`: the most keys that load will see.
  static void reserve(const AttentionProblem& problem, std::int64_t count, Layout& layout) {
    layout.add(count, problem.head_dim_qk);
    layout.add(count, problem.head_dim_v);
    layout.add(count, kPairDoubles);
  }

  Keys(const AttentionProblem& problem, std::int64_t count, Scratch& scratch)
      : problem_(problem),
        k_(scratch.take(count, problem.head_dim_qk)),
        v_(scratch.take(count, problem.head_dim_v)),
        pairs_(reinterpret_cast<Pair*>(scratch.take(count, kPairDoubles))) {}

  // k_row(j) and v_row(j) are the addresses of key j's rows.
  template <typename KRow, typename VRow>
  void load(std::int64_t count, KRow&& k_row, VRow&& v_row) {
    for (std::int64_t j = 0; j < count; ++j) {
      load_row(k_row(j), problem_.dtype, problem_.head_dim_qk, k_ + j * problem_.head_dim_qk);
      load_row(v_row(j), problem_.dtype, problem_.head_dim_v, v_ + j * problem_.head_dim_v);
    }
  }

  const double* k(std::int64_t j) const { return k_ + j * problem_.head_dim_qk; }
  const double* v(std::int64_t j) const { return v_ + j * problem_.head_dim_v; }

  // The pairs of query row i, whose values are q_row. A pair that any rule excludes is not among
  // them: nothing that its key holds is ever computed with.
  std::span<const Pair> visible_pairs(std::int64_t n, const SequenceRange& s, std::int64_t head,
                                      std::int64_t i, const double* q_row) const;

 private:
  const AttentionProblem& problem_;
  double* k_;
  double* v_;
  Pair* pairs_;
};

double kept_scale(const AttentionProblem& problem, std::int64_t n, std::int64_t head,
                  std::int64_t i, std::int64_t j);

// A sink of -inf is no sink.
double sink_logit(const AttentionProblem& problem, std::int64_t n, std::int64_t head);

// One query row: fills o_row, returns lse.
double forward_row(const AttentionProblem& problem, const Keys& keys, std::span<const Pair> pairs,
                   std::int64_t n, std::int64_t head, std::int64_t i, double* o_row);

void store_scalar(const RowScalarsView& scalars, std::int64_t batch, std::int64_t row,
                  std::int64_t head, double value);
void clear_slack_rows(const AttentionProblem& problem, RowAxis axis, const RowsView& rows,
                      std::int64_t heads, std::int64_t dim);
void clear_slack_lse(const AttentionProblem& problem);

// `worker`: of each of as many workers as there are tasks and threads; `shared`: once, in front.
PlanResult plan_with(std::int64_t tasks, Layout worker, Layout shared);

// Which of the plan's words says what.
enum Word : std::size_t { kWorkers, kWorkerDoubles, kSharedDoubles };

std::int32_t planned_workers(const BackendPlan& plan);

template <typename Problem>
const char* unsupported(const Problem& problem) {
  if (problem.device.type != ONCHIP_DEVICE_CPU) return "works on CPU tensors only";
  if (!is_float(problem.dtype)) return "takes float64, float32, float16 and bfloat16 only";
  if (const std::string& reason = settings().num_threads_problem; !reason.empty()) {
    return reason.c_str();
  }
  return nullptr;
}

const char* unsupported_options(const AttentionProblem& problem);

}  // namespace onchip::reference
