// A team of workers: each task of each loop once, loops one after the other, worker numbers
// exclusive, exceptions, nesting, several callers, threads that never come.
#include <gtest/gtest.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <thread>
#include <vector>

#include "core/thread_pool.hpp"
#include "core/thread_team.hpp"

namespace onchip {
namespace {

class Team : public ::testing::TestWithParam<std::int32_t> {
 protected:
  void SetUp() override { set_num_threads(GetParam()); }
  void TearDown() override { set_num_threads(0); }
};
INSTANTIATE_TEST_SUITE_P(Threads, Team, ::testing::Values(1, 2, 4, 9));

// Each loop adds to what the one before left: whether all of it was there.
bool loops_follow_each_other(std::int32_t workers) {
  bool right = true;
  ThreadTeam::run(workers, [&](ThreadTeam& team) {
    constexpr std::int64_t kCounts[] = {1, 7, 0, 100, 3, 1000, 2};
    std::vector<int> numbers(1000, 0);
    for (int round = 0; round < 300; ++round) {
      const std::int64_t count = kCounts[round % 7];
      std::vector<int> before = numbers;
      team.for_each(count, [&](std::int64_t task, std::int32_t) {
        numbers[static_cast<std::size_t>(task)] += 1 + static_cast<int>(task % 3);
      });
      for (std::int64_t task = 0; task < count; ++task) {
        before[static_cast<std::size_t>(task)] += 1 + static_cast<int>(task % 3);
      }
      right = right && numbers == before;
    }
  });
  return right;
}

TEST_P(Team, LoopsFollowEachOther) {
  for (const std::int32_t workers : {1, 2, 3, 8, 40}) {
    EXPECT_TRUE(loops_follow_each_other(workers)) << workers;
  }
}

TEST_P(Team, WorkerNumbersAreExclusiveAndBelowTheLimit) {
  constexpr std::int32_t kLimit = 3;
  std::vector<std::atomic<int>> inside(kLimit);
  std::atomic<bool> clash{false};
  ThreadTeam::run(kLimit, [&](ThreadTeam& team) {
    for (int round = 0; round < 50; ++round) {
      team.for_each(100, [&](std::int64_t, std::int32_t worker) {
        if (worker < 0 || worker >= kLimit) {
          clash = true;
          return;
        }
        auto& mine = inside[static_cast<std::size_t>(worker)];
        if (mine.fetch_add(1) != 0) clash = true;
        mine.fetch_sub(1);
      });
    }
  });
  EXPECT_FALSE(clash);
}

TEST_P(Team, ExceptionsOfTasksAndOfTheProgramArrive) {
  int loops = 0;
  EXPECT_THROW(ThreadTeam::run(4,
                               [&](ThreadTeam& team) {
                                 team.for_each(10, [&](std::int64_t, std::int32_t) {});
                                 ++loops;
                                 team.for_each(100, [](std::int64_t task, std::int32_t) {
                                   if (task % 10 == 3) throw std::runtime_error("task");
                                 });
                                 ++loops;
                               }),
               std::runtime_error);
  EXPECT_EQ(loops, 1);
  EXPECT_THROW(ThreadTeam::run(4, [](ThreadTeam&) { throw std::logic_error("program"); }),
               std::logic_error);
  EXPECT_TRUE(loops_follow_each_other(4));
}

TEST_P(Team, NestedTeamsAndSeveralCallers) {
  std::atomic<int> right{0};
  parallel_for(4, 4, [&](std::int64_t, std::int32_t) {
    if (loops_follow_each_other(4)) ++right;
  });
  std::vector<std::thread> callers;
  callers.reserve(4);
  for (int i = 0; i < 4; ++i) {
    callers.emplace_back([&] {
      if (loops_follow_each_other(4)) ++right;
    });
  }
  for (std::thread& caller : callers) caller.join();
  EXPECT_EQ(right, 8);
}

}  // namespace
}  // namespace onchip
