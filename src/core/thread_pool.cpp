#include "core/thread_pool.hpp"

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <charconv>
#include <condition_variable>
#include <exception>
#include <fstream>
#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "core/settings.hpp"

namespace onchip {

namespace {

// ---- how many CPUs ------------------------------------------------------------------------------

std::int32_t affinity_cpus() {
  // The kernel's mask may be wider than cpu_set_t on large machines: grow until it fits.
  for (int bits = 1024; bits <= (1 << 20); bits *= 2) {
    cpu_set_t* set = CPU_ALLOC(static_cast<std::size_t>(bits));
    if (set == nullptr) break;
    const std::size_t bytes = CPU_ALLOC_SIZE(static_cast<std::size_t>(bits));
    const int failed = sched_getaffinity(0, bytes, set);
    const int count = failed == 0 ? CPU_COUNT_S(bytes, set) : 0;
    CPU_FREE(set);
    if (failed == 0) return std::max(count, 1);
  }
  return static_cast<std::int32_t>(std::max(1u, std::thread::hardware_concurrency()));
}

std::string first_line(const std::string& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

// Quota / period, rounded up; 0 = none.
std::int32_t quota_cpus(const std::string& quota_text, const std::string& period_text) {
  std::int64_t quota = 0;
  std::int64_t period = 0;
  const auto parse = [](const std::string& text, std::int64_t& value) {
    const auto result = std::from_chars(text.data(), text.data() + text.size(), value);
    return result.ec == std::errc{} && value > 0;
  };
  if (!parse(quota_text, quota) || !parse(period_text, period)) return 0;
  return static_cast<std::int32_t>(std::min<std::int64_t>((quota + period - 1) / period, 1 << 20));
}

// The smallest quota on the path from this process's cgroup (version 2, or version 1's cpu
// controller) up to the root.
std::int32_t cgroup_cpus() {
  std::int32_t smallest = 0;
  const auto consider = [&smallest](std::int32_t cpus) {
    if (cpus > 0 && (smallest == 0 || cpus < smallest)) smallest = cpus;
  };
  std::ifstream file("/proc/self/cgroup");
  for (std::string line; std::getline(file, line);) {
    const std::size_t first = line.find(':');
    const std::size_t second = first == std::string::npos ? first : line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers = "," + line.substr(first + 1, second - first - 1) + ",";
    const bool version2 = controllers == ",,";
    if (!version2 && controllers.find(",cpu,") == std::string::npos) continue;
    for (std::string path = line.substr(second + 1);;) {
      if (version2) {
        const std::string text = first_line("/sys/fs/cgroup" + path + "/cpu.max");
        const std::size_t space = text.find(' ');
        if (space != std::string::npos) {
          consider(quota_cpus(text.substr(0, space), text.substr(space + 1)));
        }
      } else {
        const std::string root = "/sys/fs/cgroup/cpu" + path;
        consider(quota_cpus(first_line(root + "/cpu.cfs_quota_us"),
                            first_line(root + "/cpu.cfs_period_us")));
      }
      if (path.empty() || path == "/") break;
      path.erase(path.rfind('/'));
    }
  }
  return smallest;
}

std::atomic<std::int32_t> chosen_threads{0};  // 0: the start value

// ---- the pool -----------------------------------------------------------------------------------

struct Job {
  TaskFunction function;
  void* closure;
  std::int64_t count;
  std::int32_t slots;       // workers that may take part, caller included
  std::int32_t taken = 1;   // worker numbers handed out; guarded by the pool's mutex
  std::int32_t active = 0;  // pool threads inside; guarded by the pool's mutex
  std::atomic<std::int64_t> next{0};
  std::mutex failure_mutex{};
  std::exception_ptr failure{};
};

thread_local bool inside_task = false;

void work(Job& job, std::int32_t worker) {
  inside_task = true;
  for (;;) {
    const std::int64_t task = job.next.fetch_add(1, std::memory_order_relaxed);
    if (task >= job.count) break;
    try {
      job.function(job.closure, task, worker);
    } catch (...) {
      const std::scoped_lock lock(job.failure_mutex);
      if (!job.failure) job.failure = std::current_exception();
    }
  }
  inside_task = false;
}

class Pool {
 public:
  Pool() : owner_(getpid()) {}
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  // At exit. A job that still runs (on a daemon thread, say) is not waited for: its threads are let
  // go, and false says that this object must outlive them.
  bool stop() {
    bool idle = false;
    {
      const std::scoped_lock lock(mutex_);
      stopping_ = true;
      idle = jobs_.empty();
    }
    wake_.notify_all();
    for (std::thread& thread : threads_) {
      if (idle) {
        thread.join();
      } else {
        thread.detach();
      }
    }
    return idle;
  }

  pid_t owner() const { return owner_; }

  void run(Job& job) {
    {
      const std::scoped_lock lock(mutex_);
      grow(job.slots - 1);
      jobs_.push_back(&job);
    }
    wake_.notify_all();
    work(job, 0);
    std::unique_lock lock(mutex_);
    jobs_.remove(&job);
    idle_.wait(lock, [&job] { return job.active == 0; });
  }

 private:
  // A machine that refuses another thread leaves the work to those that run.
  void grow(std::int32_t wanted) {
    if (static_cast<std::int32_t>(threads_.size()) >= wanted) return;
    // Signals belong to the program's own threads.
    sigset_t all;
    sigset_t before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    try {
      while (static_cast<std::int32_t>(threads_.size()) < wanted) {
        threads_.emplace_back([this] { serve(); });
      }
    } catch (const std::exception&) {
      pthread_sigmask(SIG_SETMASK, &before, nullptr);
      return;
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
  }

  Job* open_job() {
    for (Job* job : jobs_) {
      if (job->taken < job->slots && job->next.load(std::memory_order_relaxed) < job->count) {
        return job;
      }
    }
    return nullptr;
  }

  void serve() {
    std::unique_lock lock(mutex_);
    for (;;) {
      Job* job = nullptr;
      wake_.wait(lock, [&] { return stopping_ || (job = open_job()) != nullptr; });
      if (stopping_) return;
      const std::int32_t worker = job->taken++;
      ++job->active;
      lock.unlock();
      work(*job, worker);
      lock.lock();
      if (--job->active == 0) idle_.notify_all();
    }
  }

  const pid_t owner_;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::condition_variable idle_;
  std::list<Job*> jobs_;
  std::vector<std::thread> threads_;
  bool stopping_ = false;
};

// Stopped at exit. A forked child inherits an object whose threads do not exist and whose mutex may
// be held: it abandons that one and makes its own.
class PoolOwner {
 public:
  // A thread that outlives main may still call: it finds no pool and makes one.
  ~PoolOwner() {
    Pool* pool = pool_.exchange(nullptr);
    if (pool != nullptr && pool->owner() == getpid() && pool->stop()) delete pool;
  }

  Pool& get() {
    Pool* pool = pool_.load(std::memory_order_acquire);
    while (pool == nullptr || pool->owner() != getpid()) {
      auto fresh = std::make_unique<Pool>();
      if (pool_.compare_exchange_strong(pool, fresh.get())) return *fresh.release();
    }
    return *pool;
  }

 private:
  std::atomic<Pool*> pool_{nullptr};
};

Pool& shared_pool() {
  static PoolOwner owner;
  return owner.get();
}

}  // namespace

std::int32_t available_cpus() {
  const std::int32_t quota = cgroup_cpus();
  const std::int32_t cpus = affinity_cpus();
  return quota > 0 ? std::min(quota, cpus) : cpus;
}

std::int32_t num_threads() {
  const std::int32_t chosen = chosen_threads.load(std::memory_order_relaxed);
  if (chosen > 0) return chosen;
  static const std::int32_t start =
      settings().num_threads > 0 ? settings().num_threads : available_cpus();
  return start;
}

void set_num_threads(std::int32_t count) { chosen_threads.store(count); }

void parallel_for(std::int64_t count, std::int32_t max_workers, TaskFunction function,
                  void* closure) {
  if (count <= 0) return;
  const auto workers = static_cast<std::int32_t>(
      std::min<std::int64_t>({std::int64_t{num_threads()}, std::int64_t{max_workers}, count}));
  if (workers <= 1 || inside_task) {
    std::exception_ptr failure;
    for (std::int64_t task = 0; task < count; ++task) {
      try {
        function(closure, task, 0);
      } catch (...) {
        if (!failure) failure = std::current_exception();
      }
    }
    if (failure) std::rethrow_exception(failure);
    return;
  }
  Job job{.function = function, .closure = closure, .count = count, .slots = workers};
  shared_pool().run(job);
  if (job.failure) std::rethrow_exception(job.failure);
}

}  // namespace onchip
