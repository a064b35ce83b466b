// The worker pool: each task once, worker numbers exclusive, exceptions, nesting, several callers,
// forked children.
#include <gtest/gtest.h>

#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <numeric>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "core/thread_pool.hpp"

namespace onchip {
namespace {

class ThreadPool : public ::testing::Test {
 protected:
  void SetUp() override { set_num_threads(4); }
  void TearDown() override { set_num_threads(0); }
};

// The sum of 0..count-1, each task's share added by whoever ran it.
std::int64_t parallel_sum(std::int64_t count) {
  std::vector<std::int64_t> each(static_cast<std::size_t>(count), 0);
  parallel_for(count, 4, [&](std::int64_t task, std::int32_t) {
    each[static_cast<std::size_t>(task)] += task;
  });
  return std::accumulate(each.begin(), each.end(), std::int64_t{0});
}

TEST_F(ThreadPool, EveryTaskRunsOnce) {
  for (const std::int64_t count : {0, 1, 2, 3, 5, 100, 10000}) {
    std::vector<std::atomic<int>> runs(static_cast<std::size_t>(count));
    parallel_for(count, 8, [&](std::int64_t task, std::int32_t) {
      runs[static_cast<std::size_t>(task)].fetch_add(1);
    });
    for (const auto& times : runs) ASSERT_EQ(times.load(), 1);
  }
  parallel_for(-3, 8, [](std::int64_t, std::int32_t) { FAIL(); });
}

TEST_F(ThreadPool, WorkerNumbersAreExclusiveAndBelowTheLimits) {
  for (const std::int32_t limit : {1, 2, 4, 9}) {
    std::vector<std::atomic<int>> inside(4);
    std::atomic<bool> clash{false};
    std::atomic<std::int32_t> highest{0};
    parallel_for(2000, limit, [&](std::int64_t, std::int32_t worker) {
      if (worker < 0 || worker >= 4) {
        clash = true;
        return;
      }
      auto& mine = inside[static_cast<std::size_t>(worker)];
      if (mine.fetch_add(1) != 0) clash = true;
      std::int32_t seen = highest.load();
      while (worker > seen && !highest.compare_exchange_weak(seen, worker)) {
      }
      mine.fetch_sub(1);
    });
    EXPECT_FALSE(clash.load());
    EXPECT_LT(highest.load(), limit);
  }
}

TEST_F(ThreadPool, SeveralThreadsDoTakePart) {
  // Tasks that wait for each other can only end if two run at once.
  std::atomic<int> arrived{0};
  parallel_for(2, 2, [&](std::int64_t, std::int32_t) {
    arrived.fetch_add(1);
    while (arrived.load() < 2) std::this_thread::yield();
  });
  EXPECT_EQ(arrived.load(), 2);
}

TEST_F(ThreadPool, NestedCallsRunInlineOnTheCallingThread) {
  std::atomic<int> wrong_thread{0};
  std::atomic<int> inner{0};
  parallel_for(50, 4, [&](std::int64_t, std::int32_t) {
    const std::thread::id caller = std::this_thread::get_id();
    parallel_for(7, 4, [&](std::int64_t, std::int32_t worker) {
      if (std::this_thread::get_id() != caller || worker != 0) wrong_thread.fetch_add(1);
      inner.fetch_add(1);
    });
  });
  EXPECT_EQ(wrong_thread.load(), 0);
  EXPECT_EQ(inner.load(), 350);
}

TEST_F(ThreadPool, AnExceptionComesOutOnceAllTasksHaveEnded) {
  for (const std::int32_t workers : {1, 4}) {
    std::atomic<int> ended{0};
    try {
      parallel_for(100, workers, [&](std::int64_t task, std::int32_t) {
        ended.fetch_add(1);
        if (task % 10 == 3) throw std::runtime_error("task " + std::to_string(task));
      });
      ADD_FAILURE() << "no exception";
    } catch (const std::runtime_error& error) {
      EXPECT_EQ(std::string(error.what()).rfind("task ", 0), 0u);
      EXPECT_EQ(ended.load(), 100);
    }
    EXPECT_EQ(parallel_sum(1000), 499500);
  }
}

TEST_F(ThreadPool, AnExceptionOfANestedCallTravelsThroughBoth) {
  EXPECT_THROW(parallel_for(8, 4,
                            [](std::int64_t, std::int32_t) {
                              parallel_for(3, 4, [](std::int64_t task, std::int32_t) {
                                if (task == 1) throw std::logic_error("inner");
                              });
                            }),
               std::logic_error);
}

TEST_F(ThreadPool, SeveralCallersAtOnce) {
  std::vector<std::thread> callers;
  std::atomic<int> wrong{0};
  for (int caller = 0; caller < 4; ++caller) {
    callers.emplace_back([&wrong] {
      for (int repeat = 0; repeat < 50; ++repeat) {
        if (parallel_sum(500) != 124750) wrong.fetch_add(1);
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  EXPECT_EQ(wrong.load(), 0);
}

TEST_F(ThreadPool, TheNumberOfThreadsIsWhatWasSet) {
  EXPECT_EQ(num_threads(), 4);
  set_num_threads(1);
  EXPECT_EQ(num_threads(), 1);
  const std::thread::id caller = std::this_thread::get_id();
  parallel_for(20, 8, [&](std::int64_t, std::int32_t worker) {
    EXPECT_EQ(std::this_thread::get_id(), caller);
    EXPECT_EQ(worker, 0);
  });
  set_num_threads(0);
  EXPECT_GE(num_threads(), 1);
  EXPECT_GE(available_cpus(), 1);
}

int exit_code_of(pid_t child) {
  int status = 0;
  if (waitpid(child, &status, 0) != child || !WIFEXITED(status)) return -1;
  return WEXITSTATUS(status);
}

TEST_F(ThreadPool, AForkedChildHasItsOwn) {
#if defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "ThreadSanitizer allows no new threads after a fork of a threaded process";
#endif
  // All of the parent's threads run, past their start: AddressSanitizer's allocator, which a thread
  // uses as it starts, does not let go of its locks in a forked child.
  std::atomic<int> started{0};
  parallel_for(4, 4, [&](std::int64_t, std::int32_t) {
    started.fetch_add(1);
    while (started.load() < 4) std::this_thread::yield();
  });
  ASSERT_EQ(parallel_sum(1000), 499500);
  for (int repeat = 0; repeat < 3; ++repeat) {
    const pid_t child = fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
      alarm(20);  // a child that hangs is killed, and so reported
      std::atomic<int> arrived{0};
      parallel_for(2, 2, [&](std::int64_t, std::int32_t) {
        arrived.fetch_add(1);
        while (arrived.load() < 2) std::this_thread::yield();
      });
      _exit(parallel_sum(1000) == 499500 ? 7 : 8);
    }
    EXPECT_EQ(exit_code_of(child), 7);
    EXPECT_EQ(parallel_sum(1000), 499500);
  }
}

TEST_F(ThreadPool, AChildForkedAmidWorkHasItsOwn) {
#if defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "ThreadSanitizer allows no new threads after a fork of a threaded process";
#elif defined(__SANITIZE_ADDRESS__)
  GTEST_SKIP() << "AddressSanitizer's allocator, in use as the child is made, stays locked in it";
#endif
  std::atomic<bool> stop{false};
  std::thread busy([&stop] {
    while (!stop.load()) parallel_sum(200);
  });
  for (int repeat = 0; repeat < 10; ++repeat) {
    const pid_t child = fork();
    if (child == 0) {
      alarm(20);
      _exit(parallel_sum(1000) == 499500 ? 7 : 8);
    }
    EXPECT_EQ(exit_code_of(child), 7);
  }
  stop = true;
  busy.join();
}

}  // namespace
}  // namespace onchip
