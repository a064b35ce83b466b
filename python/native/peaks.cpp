#include "peaks.hpp"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <new>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#if defined(__linux__)
#include <sys/mman.h>
#endif

#if defined(__x86_64__)
// gcc 12 takes the header's own undefined pass-through operands for mistakes.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>
#pragma GCC diagnostic pop
#endif

namespace onchip_python {

namespace {

// ---- arithmetic ---------------------------------------------------------------------------------

// Independent sums: more than latency x instructions a clock of any machine here.
constexpr int kSums = 12;

// A loop of kSums multiply-adds in registers; each loop is compiled for its own instruction set, in
// a file that is compiled for none of them. The sums begin with different values: a compiler keeps
// one of several equal ones. The operands keep all of them normal numbers.
#define ONCHIP_TWELVE(X) X(0) X(1) X(2) X(3) X(4) X(5) X(6) X(7) X(8) X(9) X(10) X(11)
#define ONCHIP_START(i) sum[i] = a * static_cast<float>((i) + 1);
#define ONCHIP_STEP(i) sum[i] = multiply_add(sum[i]);
#define ONCHIP_ADD_UP(i) total += sum[i];
#define ONCHIP_PEAK_LOOP(Vec)                             \
  Vec sum[kSums];                                         \
  ONCHIP_TWELVE(ONCHIP_START)                             \
  for (std::int64_t round = 0; round < rounds; ++round) { \
    ONCHIP_TWELVE(ONCHIP_STEP)                            \
  }                                                       \
  Vec total = {};                                         \
  ONCHIP_TWELVE(ONCHIP_ADD_UP)                            \
  float first;                                            \
  std::memcpy(&first, &total, sizeof(first));             \
  return first;

// Any processor: what the portable unit's arithmetic is made of, products and sums apart.
float fp32_portable(std::int64_t rounds, float half) {
  using Vec [[gnu::vector_size(16)]] = float;
  const Vec a = half - Vec{};
#define multiply_add(x) ((x) * a + a)
  ONCHIP_PEAK_LOOP(Vec)
#undef multiply_add
}

#if defined(__x86_64__)

__attribute__((target("avx2,fma"))) float fp32_avx2(std::int64_t rounds, float half) {
  const __m256 a = _mm256_set1_ps(half);
#define multiply_add(x) _mm256_fmadd_ps(x, a, a)
  ONCHIP_PEAK_LOOP(__m256)
#undef multiply_add
}

__attribute__((target("avx512f"))) float fp32_avx512(std::int64_t rounds, float half) {
  const __m512 a = _mm512_set1_ps(half);
#define multiply_add(x) _mm512_fmadd_ps(x, a, a)
  ONCHIP_PEAK_LOOP(__m512)
#undef multiply_add
}

__attribute__((target("avx512f,avx512bw,avx512vl,avx512bf16"))) float bf16_avx512(
    std::int64_t rounds, float half) {
  const __m512 a = _mm512_set1_ps(half * 0x1p-20f);
  const __m512bh pairs = _mm512_cvtne2ps_pbh(a, a);
#define multiply_add(x) _mm512_dpbf16_ps(x, pairs, pairs)
  ONCHIP_PEAK_LOOP(__m512)
#undef multiply_add
}

#endif

#undef ONCHIP_PEAK_LOOP
#undef ONCHIP_ADD_UP
#undef ONCHIP_START
#undef ONCHIP_STEP
#undef ONCHIP_TWELVE

struct Arithmetic {
  const char* name;
  bool available;
  float (*loop)(std::int64_t rounds, float half);
  int flops;  // of one instruction
};

std::vector<Arithmetic> arithmetics() {
  std::vector<Arithmetic> all = {{"fma_fp32_portable_tflops", true, fp32_portable, 8}};
#if defined(__x86_64__)
  __builtin_cpu_init();
  all.push_back({"fma_fp32_avx2_tflops",
                 __builtin_cpu_supports("avx2") != 0 && __builtin_cpu_supports("fma") != 0,
                 fp32_avx2, 16});
  const bool avx512 = __builtin_cpu_supports("avx512f") != 0;
  all.push_back({"fma_fp32_avx512_tflops", avx512, fp32_avx512, 32});
  all.push_back({"dot_bf16_avx512_tflops",
                 avx512 && __builtin_cpu_supports("avx512bw") != 0 &&
                     __builtin_cpu_supports("avx512vl") != 0 &&
                     __builtin_cpu_supports("avx512bf16") != 0,
                 bf16_avx512, 64});
#endif
  return all;
}

// ---- threads ------------------------------------------------------------------------------------

// Seconds that `work(thread)` takes on all threads at once, from a common start to the last's end.
double seconds_on(int num_threads, const std::function<void(int)>& work) {
  std::atomic<int> ready{0};
  std::atomic<bool> go{false};
  std::vector<std::thread> threads;
  threads.reserve(static_cast<std::size_t>(num_threads - 1));
  for (int thread = 1; thread < num_threads; ++thread) {
    threads.emplace_back([&, thread] {
      ready.fetch_add(1);
      while (!go.load()) std::this_thread::yield();
      work(thread);
    });
  }
  while (ready.load() < num_threads - 1) std::this_thread::yield();
  const auto begin = std::chrono::steady_clock::now();
  go.store(true);
  work(0);
  for (std::thread& thread : threads) thread.join();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

constexpr int kRepeats = 5;

template <typename F>
double best_of(F&& seconds) {
  double best = seconds();
  for (int repeat = 1; repeat < kRepeats; ++repeat) best = std::min(best, seconds());
  return best;
}

double best_seconds_on(int num_threads, const std::function<void(int)>& work) {
  return best_of([&] { return seconds_on(num_threads, work); });
}

double tflops(const Arithmetic& arithmetic, int num_threads) {
  constexpr double kSeconds = 0.1;
  // Unknown to the compiler; a sum that is used keeps its loop.
  volatile float half = 0.5f;
  volatile float kept = 0.0f;
  const auto run = [&](std::int64_t rounds) {
    return [&, rounds](int thread) {
      const float sum = arithmetic.loop(rounds, half);
      if (thread == 0) kept = sum;
    };
  };
  std::int64_t rounds = std::int64_t{1} << 18;
  const double first = seconds_on(num_threads, run(rounds));
  rounds = static_cast<std::int64_t>(static_cast<double>(rounds) * std::max(kSeconds / first, 1.0));
  const double seconds = best_seconds_on(num_threads, run(rounds));
  const double flops = 1.0 * arithmetic.flops * kSums * num_threads * static_cast<double>(rounds);
  return flops / seconds / 1e12;
}

// ---- memory -------------------------------------------------------------------------------------

// Beyond the caches of any machine that benchmarks are likely to run on.
constexpr std::size_t kBytes = std::size_t{1} << 29;

using Line [[gnu::vector_size(64)]] = std::uint64_t;

// [begin, end) of a thread's share, in whole lines.
std::pair<std::size_t, std::size_t> share(std::size_t bytes, int thread, int num_threads) {
  const std::size_t lines = bytes / sizeof(Line) / static_cast<std::size_t>(num_threads);
  const auto first = static_cast<std::size_t>(thread) * lines;
  return {first * sizeof(Line), (first + lines) * sizeof(Line)};
}

// Seconds for `bytes` from `data` on, each whole line once.
double read_seconds(const std::byte* data, std::size_t bytes, int num_threads) {
  std::atomic<std::uint64_t> kept{0};
  return seconds_on(num_threads, [&](int thread) {
    const auto [begin, end] = share(bytes, thread, num_threads);
    Line sums[4] = {};
    for (std::size_t at = begin; at + sizeof(sums) <= end; at += sizeof(sums)) {
      Line lines[4];
      std::memcpy(lines, data + at, sizeof(lines));
      for (int i = 0; i < 4; ++i) sums[i] += lines[i];
    }
    kept.fetch_add(sums[0][0] + sums[1][0] + sums[2][0] + sums[3][0]);
  });
}

struct Bandwidth {
  double read_tbps;
  double copy_tbps;  // bytes read and bytes written
};

// In huge pages where the system grants them, as NumPy's large arrays lie: with others reading is
// slower by a third on some machines, and what is measured beside would pass for better than it is.
struct Free {
  void operator()(std::byte* memory) const { std::free(memory); }
};
std::unique_ptr<std::byte[], Free> large_memory() {
  constexpr std::size_t kHugePage = std::size_t{1} << 21;
  std::unique_ptr<std::byte[], Free> memory(
      static_cast<std::byte*>(std::aligned_alloc(kHugePage, kBytes)));
  if (memory == nullptr) throw std::bad_alloc();
#if defined(__linux__)
  madvise(memory.get(), kBytes, MADV_HUGEPAGE);
#endif
  return memory;
}

Bandwidth bandwidth(int num_threads) {
  const auto memory = large_memory();
  std::byte* const data = memory.get();
  // Each thread has touched its pages first.
  seconds_on(num_threads, [&](int thread) {
    const auto [begin, end] = share(kBytes, thread, num_threads);
    std::memset(data + begin, thread + 1, end - begin);
  });
  const double read = best_of([&] { return read_seconds(data, kBytes, num_threads); });
  const double copy = best_seconds_on(num_threads, [&](int thread) {
    const auto [begin, end] = share(kBytes / 2, thread, num_threads);
    std::memcpy(data + kBytes / 2 + begin, data + begin, end - begin);
  });
  const auto bytes = static_cast<double>(kBytes);
  return {bytes / read / 1e12, bytes / copy / 1e12};
}

int threads_of(const char* function, nb::handle num_threads) {
  const Place place{function, "num_threads"};
  const std::int64_t number = count_of(place, num_threads);
  if (number < 1 || number > 1024) refuse(place, describe_value(num_threads), "1 to 1024");
  return static_cast<int>(number);
}

// Memory that some object keeps in one piece.
class Buffer {
 public:
  explicit Buffer(nb::handle object) {
    if (PyObject_GetBuffer(object.ptr(), &view_, PyBUF_C_CONTIGUOUS) != 0) nb::raise_python_error();
  }
  ~Buffer() { PyBuffer_Release(&view_); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  const std::byte* data() const { return static_cast<const std::byte*>(view_.buf); }
  std::size_t bytes() const { return static_cast<std::size_t>(view_.len); }

 private:
  Py_buffer view_;
};

double time_reading(nb::handle memory, nb::handle num_threads) {
  const int threads = threads_of("time_reading", num_threads);
  const Buffer buffer(memory);
  const nb::gil_scoped_release others_run;
  return read_seconds(buffer.data(), buffer.bytes(), threads);
}

nb::dict measure_peaks(nb::handle num_threads) {
  const int threads = threads_of("measure_peaks", num_threads);
  std::vector<std::pair<std::string, double>> found;
  {
    const nb::gil_scoped_release others_run;
    for (const Arithmetic& arithmetic : arithmetics()) {
      if (arithmetic.available) found.emplace_back(arithmetic.name, tflops(arithmetic, threads));
    }
    const Bandwidth memory = bandwidth(threads);
    found.emplace_back("read_tbps", memory.read_tbps);
    found.emplace_back("copy_tbps", memory.copy_tbps);
  }
  nb::dict peaks;
  for (const auto& [name, value] : found) peaks[name.c_str()] = value;
  return peaks;
}

}  // namespace

void bind_peaks(nb::module_& module) {
  module.def("measure_peaks", measure_peaks, nb::arg("num_threads").none(),
             nb::sig("def measure_peaks(num_threads: int) -> dict[str, float]"),
             "What this machine reaches at best on as many threads: multiply-adds per instruction\n"
             "set, bf16 dot products, reading and copying memory. Takes seconds and 512 MiB.");
  module.def("time_reading", time_reading, nb::arg("memory"), nb::arg("num_threads").none(),
             nb::sig("def time_reading(memory: object, num_threads: int) -> float"),
             "Seconds in which as many threads read memory that has Python's buffer protocol and\n"
             "lies in one piece, once: what a decoding step is read against.");
}

}  // namespace onchip_python
