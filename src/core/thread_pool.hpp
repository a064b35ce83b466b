// Worker threads of the CPU backends. Work is split by the caller into tasks whose results do not
// depend on which thread runs them, so the pool's size never shows in any bit.
#pragma once

#include <cstdint>
#include <type_traits>

namespace onchip {

// CPUs this process may use: scheduler affinity, and the cgroup's CPU quota rounded up.
std::int32_t available_cpus();

std::int32_t num_threads();
// 0 restores the start value. Takes effect at the next parallel_for.
void set_num_threads(std::int32_t count);

using TaskFunction = void (*)(void* closure, std::int64_t task, std::int32_t worker);

// Runs tasks 0..count-1, each once; `worker` is in 0..num_threads()-1 (as read before the call, at
// most `count` of them) and no two tasks run at once with the same worker number, so it may index
// scratch memory. Nested calls run inline on the calling worker. The first exception a task throws
// is rethrown here once all tasks have ended. Safe from several threads and in a forked child.
void parallel_for(std::int64_t count, std::int32_t max_workers, TaskFunction function,
                  void* closure);

template <typename F>
void parallel_for(std::int64_t count, std::int32_t max_workers, F&& body) {
  using Body = std::remove_reference_t<F>;
  parallel_for(
      count, max_workers,
      [](void* closure, std::int64_t task, std::int32_t worker) {
        (*static_cast<Body*>(closure))(task, worker);
      },
      const_cast<std::remove_const_t<Body>*>(&body));
}

}  // namespace onchip
