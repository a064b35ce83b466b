#include "core/thread_team.hpp"

#include <stdexcept>
#include <thread>
#include <utility>

namespace onchip {

namespace {

constexpr std::int64_t kMostTasks = std::int64_t{1} << 31;  // of a loop at once

std::uint32_t count_of(std::uint64_t ticket) { return static_cast<std::uint32_t>(ticket >> 32); }
std::uint32_t task_of(std::uint64_t ticket) { return static_cast<std::uint32_t>(ticket); }

// Awake for about as long as waking up takes, then leaving the processor to others.
class Wait {
 public:
  void operator()() {
    if (++rounds_ > kSpins) {
      std::this_thread::yield();
      return;
    }
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
  }

 private:
  static constexpr int kSpins = 1000;
  int rounds_ = 0;
};

}  // namespace

void ThreadTeam::work(std::int32_t worker) {
  for (;;) {
    const std::uint64_t seen = ticket_.load(std::memory_order_relaxed);
    if (task_of(seen) >= count_of(seen)) return;
    const std::uint64_t ticket = ticket_.fetch_add(1, std::memory_order_acquire);
    if (task_of(ticket) >= count_of(ticket)) return;
    try {
      function_(closure_, task_of(ticket), worker);
    } catch (...) {
      const std::scoped_lock lock(failure_mutex_);
      if (!failure_) failure_ = std::current_exception();
    }
    done_.fetch_add(1, std::memory_order_release);
  }
}

void ThreadTeam::help(std::int32_t worker) {
  Wait wait;
  while (!finished_.load(std::memory_order_acquire)) {
    const std::uint64_t ticket = ticket_.load(std::memory_order_relaxed);
    if (task_of(ticket) < count_of(ticket)) {
      work(worker);
      wait = {};
    } else {
      wait();
    }
  }
}

void ThreadTeam::run_loop(std::int64_t count, TaskFunction function, void* closure) {
  if (count <= 0) return;
  if (alone_) {
    for (std::int64_t task = 0; task < count; ++task) function(closure, task, leader_);
    return;
  }
  if (count > kMostTasks) throw std::length_error("ThreadTeam: too many tasks");
  function_ = function;
  closure_ = closure;
  done_.store(0, std::memory_order_relaxed);
  ticket_.store(static_cast<std::uint64_t>(count) << 32, std::memory_order_release);
  work(leader_);
  Wait wait;
  while (done_.load(std::memory_order_acquire) < static_cast<std::uint32_t>(count)) wait();
  if (failure_) std::rethrow_exception(std::exchange(failure_, nullptr));
}

}  // namespace onchip
