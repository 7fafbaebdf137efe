// Threads of a captured step, and counts of the times that threads wait for each other.
//
// Outside a program, the loop of an operation is a parallel region: all threads begin together and end together, and no
// thread computes while the next operation is called. Within a program (program.cpp), one region covers the whole step.
// The threads of the region are a *crew*. The leader makes the calls and leaves their loops as *jobs*. All threads
// process the jobs in order, including the leader when no call is left. So calls cost little while jobs are waiting,
// and a late thread joins the present job.
//
//   job      a loop of parts; each thread takes the next free part. A job begins after the previous job has ended.
//   tail     a loop of one part is attached to the previous job: the thread that ends the last part runs the tail.
//   later    leaves a loop as a job. The loop owns its captures. Memory named by the loop must live until the job has
//            ended: Program keeps arguments and results of calls, `keep` holds other tensors.
//   spread   runs a loop and waits for its end.
//
// An operation called while jobs are pending must not read the results of these jobs; such an operation calls `drain`
// first. A program drains before every operation, except views and operations that leave jobs.
//
// INVARIANCE. The result of a part depends on the part alone, and no row's bits depend on the cut of a loop.
#pragma once

#include <algorithm>
#include <atomic>
#include <exception>
#include <functional>
#include <utility>
#include <vector>

#include "common.h"

namespace weft {

// Number and duration of waits of this process's threads since the last query.
struct Waits {
  std::atomic<int64_t> meetings{0};     // starts and ends of regions, barriers in regions, ends of jobs
  std::atomic<int64_t> nanoseconds{0};  // sum over all threads
  void add(int64_t met, int64_t ns) {
    meetings.fetch_add(met, std::memory_order_relaxed);
    nanoseconds.fetch_add(ns, std::memory_order_relaxed);
  }
};
extern Waits waits;
extern bool use_crews;
extern int64_t alone_bytes;  // bytes of weights that a single thread of a crew reads before other threads would arrive

int64_t now_ns();

// A growing number that threads wait for: spinning for some microseconds, then asleep.
class Gate {
 public:
  uint32_t value() const { return value_.load(std::memory_order_acquire); }
  void reset() { value_.store(0); }
  void open(uint32_t value);
  void wait(uint32_t old);  // returns when the value differs from `old`

 private:
  alignas(64) std::atomic<uint32_t> value_{0};
  alignas(64) std::atomic<uint32_t> sleepers_{0};
};

class Crew {
 public:
  using Part = std::function<void(int64_t)>;

  // Crew led by this thread while the thread makes calls; null elsewhere, also in parts of jobs.
  static Crew* current();

  // Run `calls` in a region of `threads`. Rethrows an exception of `calls` or of a job, after all threads have left the
  // jobs.
  static void lead(int threads, const std::function<void(Crew&)>& calls);

  int threads() const { return threads_; }
  // True if the region should end and another region begin, because the jobs of many calls would not fit.
  bool full() const { return made_ + kSpare > kJobs; }
  // Number of jobs made, and of jobs ended.
  uint32_t made() const { return made_; }
  uint32_t ended() const { return ended_.value(); }

  void later(int64_t parts, Part part);
  // Take part in the first job whose end this thread has not seen, if any.
  void advance();
  // Take part in all jobs until every job has ended. Rethrows an exception of a job.
  void drain();
  void keep(const Tensor& tensor) { kept_.push_back(tensor); }

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
  uint32_t made_ = 0, at_ = 0;  // of the leader: jobs made; jobs whose end the leader has seen
  Gate shown_, ended_;          // jobs that may begin (and kClosed: no further jobs); jobs that have ended
  std::atomic<bool> failed_{false};
  std::exception_ptr failure_;  // written by the thread that set `failed_`; read after all jobs have ended
};

// Number of threads for a loop of this thread.
inline int team() {
  if (const Crew* crew = Crew::current()) return crew->threads();
  return at::in_parallel_region() ? 1 : at::get_num_threads();
}

// Run f(begin, end) for parts of 0 .. n - 1 of at least `grain`, and wait for the end.
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
  at::parallel_for(0, n, grain, [&](int64_t begin, int64_t end) {
    const bool first = at::get_thread_num() == 0;
    if (!first) waited.fetch_add(now_ns() - began, std::memory_order_relaxed);
    f(begin, end);
    if (first) ended = now_ns();
  });
  waits.add(2, waited.load() + now_ns() - ended);
}

// The same as a job if there is a crew: f owns its captures.
template <class F>
void spread_later(int64_t n, int64_t grain, const F& f) {
  Crew* crew = Crew::current();
  if (!crew || n <= 0) return spread(n, grain, f);
  const int64_t parts = std::min<int64_t>(2 * crew->threads(), (n + grain - 1) / grain);
  crew->later(parts, [=](int64_t part) { f(n * part / parts, n * (part + 1) / parts); });
}

// Return x with elements in order. In a crew, a copy is kept alive for the jobs.
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
