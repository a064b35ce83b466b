// Several parallel loops in a row on one set of workers. Between two parallel_for calls the pool's
// threads sleep, and waking them takes as long as a few matrix products; a team's workers wait for
// the next loop awake.
#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
#include <mutex>
#include <type_traits>

#include "core/thread_pool.hpp"

namespace onchip {

class ThreadTeam {
 public:
  ThreadTeam(const ThreadTeam&) = delete;
  ThreadTeam& operator=(const ThreadTeam&) = delete;

  // program(team) on one worker; the others take part in its loops. Workers may join late or not
  // at all: what a loop waits for is only ever being computed by a running thread.
  template <typename F>
  static void run(std::int32_t max_workers, F&& program) {
    ThreadTeam team(max_workers);
    parallel_for(max_workers, max_workers, [&](std::int64_t task, std::int32_t worker) {
      if (task > 0) {
        team.help(worker);
        return;
      }
      const Finish finish{team.finished_};
      team.leader_ = worker;
      program(team);
    });
  }

  // body(task, worker) for 0 .. count - 1, as parallel_for; for the team's program alone.
  template <typename F>
  void for_each(std::int64_t count, F&& body) {
    using Body = std::remove_reference_t<F>;
    run_loop(
        count,
        [](void* closure, std::int64_t task, std::int32_t worker) {
          (*static_cast<Body*>(closure))(task, worker);
        },
        const_cast<std::remove_const_t<Body>*>(&body));
  }

 private:
  struct Finish {
    std::atomic<bool>& finished;
    ~Finish() { finished.store(true, std::memory_order_release); }
  };

  explicit ThreadTeam(std::int32_t max_workers) : alone_(max_workers <= 1) {}

  void run_loop(std::int64_t count, TaskFunction function, void* closure);
  void help(std::int32_t worker);
  void work(std::int32_t worker);

  const bool alone_;
  std::int32_t leader_ = 0;
  // Of the loop: its count in the upper half, its next task in the lower one. Who gets a task that
  // is below the count owns it, and keeps function_ and closure_ from changing until it is done.
  std::atomic<std::uint64_t> ticket_{0};
  std::atomic<std::uint32_t> done_{0};
  std::atomic<bool> finished_{false};
  TaskFunction function_ = nullptr;
  void* closure_ = nullptr;
  std::mutex failure_mutex_;
  std::exception_ptr failure_;
};

}  // namespace onchip
