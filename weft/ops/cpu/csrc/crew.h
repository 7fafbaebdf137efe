// Threads of a captured step, with few waits between threads.
//
// Outside a program the loop of an operation is a parallel region: all threads begin and end together, and no thread
// computes while the next operation is called. Inside a program (program.h) one region covers the whole step: a
// *crew*. The leader makes the calls and leaves loops behind as *jobs*. All threads walk through the jobs in order; the
// leader joins in when no call is left. So calls cost little while there is work, and a late thread finds the others
// working.
//
//   job      a loop of several parts; threads take the next free part. A job begins when the job before it has ended.
//   tail     a loop of one part that belongs to the job before it: the thread that ends the last part runs the tail.
//   later    leaves a loop behind. The loop owns its captures. Memory named by the loop lives until the loop has ended:
//            Program retains arguments and results of calls, `keep` retains the rest.
//   spread   a loop with a wait for its end.
//
// Calls must not read results of pending jobs: such operations `drain` first. A program drains for every operation
// except views and operations that leave loops behind.
//
// INVARIANCE. The result of a part depends on the part alone, and loops are cut so that no row's bits depend on the
// cut.
#pragma once

#include <algorithm>
#include <atomic>
#include <exception>
#include <functional>
#include <utility>
#include <vector>

#include "common.h"

namespace weft {

// Waits of this process's threads, since the last query.
struct Waits {
  std::atomic<int64_t> meetings{0};     // beginnings and ends of regions, barriers in them, ends of jobs
  std::atomic<int64_t> nanoseconds{0};  // sum over all threads
  void add(int64_t met, int64_t ns) {
    meetings.fetch_add(met, std::memory_order_relaxed);
    nanoseconds.fetch_add(ns, std::memory_order_relaxed);
  }
};
extern Waits waits;
extern bool use_crews;
extern int64_t alone_bytes;  // bytes of weights below which one thread finishes before others arrive

int64_t now_ns();

// A growing number for threads to wait on: awake for some microseconds, then asleep.
class Gate {
 public:
  uint32_t value() const { return value_.load(std::memory_order_acquire); }
  void reset() { value_.store(0); }
  void open(uint32_t value);
  void wait(uint32_t old);  // until the number differs from `old`

 private:
  alignas(64) std::atomic<uint32_t> value_{0};
  alignas(64) std::atomic<uint32_t> sleepers_{0};
};

class Crew {
 public:
  using Part = std::function<void(int64_t)>;

  // The crew led by this thread while it makes calls; null elsewhere, for example in parts of jobs.
  static Crew* current();

  // Runs `calls` in a region of `threads`. Throws the exception of `calls` or of a job, after all threads left all
  // jobs.
  static void lead(int threads, const std::function<void(Crew&)>& calls);

  int threads() const { return threads_; }
  // True if this region should end and another begin: there is little room left for jobs.
  bool full() const { return made_ + kSpare > kJobs; }
  // Number of jobs, and number of ended jobs.
  uint32_t made() const { return made_; }
  uint32_t ended() const { return ended_.value(); }

  void later(int64_t parts, Part part);
  // Takes part in the first job whose end this thread has not seen, if any.
  void advance();
  // The same for all jobs. Throws the exception of a job.
  void drain();
  // Retains a tensor for loops of the present call; `take_kept` gives the tensors to the caller of the call.
  void keep(const Tensor& tensor) { kept_.push_back(tensor); }
  std::vector<Tensor> take_kept() { return std::exchange(kept_, {}); }

 private:
  static constexpr uint32_t kJobs = 1024, kSpare = 128, kClosed = 1u << 31;

  struct Job {
    alignas(64) std::atomic<int64_t> next{0};
    alignas(64) std::atomic<int64_t> left{0};
    int64_t parts = 0;
    Part part;
    std::vector<Part> tails;
  };
  struct Waited;

  static Crew& own();
  void begin(int threads);
  void show(uint32_t jobs);
  void walk(uint32_t number, Waited& waited);
  void follow();
  void finish();
  void call(const Part& part, int64_t number) noexcept;

  std::vector<Job> jobs_ = std::vector<Job>(kJobs);
  std::vector<Tensor> kept_;
  int threads_ = 1;
  int64_t began_ = 0;
  uint32_t made_ = 0, at_ = 0;  // of the leader: jobs made, jobs seen to end
  Gate shown_, ended_;          // jobs that may begin (kClosed: no more jobs); jobs that have ended
  std::atomic<bool> failed_{false};
  std::exception_ptr failure_;  // written by the thread that set `failed_`, read after all jobs
};

// Number of threads for a loop of this thread.
inline int team() {
  if (const Crew* crew = Crew::current()) return crew->threads();
  return in_parallel_region() ? 1 : num_threads();
}

// Runs f(begin, end) for parts of 0 .. n - 1 of at least `grain`, and waits for the end.
template <class F>
void spread(int64_t n, int64_t grain, const F& f) {
  if (n <= 0) return;
  const int64_t threads = team(), parts = std::min(threads, (n + grain - 1) / grain);
  if (Crew* crew = Crew::current()) {
    if (parts > 1) crew->later(parts, [&](int64_t part) { f(n * part / parts, n * (part + 1) / parts); });
    crew->drain();
    if (parts == 1) f(0, n);
    return;
  }
  if (parts == 1) return f(0, n);
  std::atomic<int64_t> waited{0};
  const int64_t began = now_ns();
  int64_t ended = began;
  parallel_for(n, grain, [&](int64_t begin, int64_t end) {
    const bool first = thread_number() == 0;
    if (!first) waited.fetch_add(now_ns() - began, std::memory_order_relaxed);
    f(begin, end);
    if (first) ended = now_ns();
  });
  waits.add(2, waited.load() + now_ns() - ended);
}

// The same, left behind if there is a crew: f owns its captures.
template <class F>
void spread_later(int64_t n, int64_t grain, const F& f) {
  Crew* crew = Crew::current();
  if (!crew || n <= 0) return spread(n, grain, f);
  const int64_t parts = std::min<int64_t>(2 * crew->threads(), (n + grain - 1) / grain);
  crew->later(parts, [=](int64_t part) { f(n * part / parts, n * (part + 1) / parts); });
}

// x with contiguous elements. A copy is kept for loops left behind.
inline Tensor in_order(const Tensor& x, bool is) {
  if (is) return x;
  Crew* crew = Crew::current();
  if (!crew) return x.contiguous();
  crew->drain();
  const Tensor made = x.contiguous();
  crew->keep(made);
  return made;
}
inline Tensor in_order(const Tensor& x) { return in_order(x, x.is_contiguous()); }

}  // namespace weft
