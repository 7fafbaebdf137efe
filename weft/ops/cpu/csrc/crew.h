// Threads of a captured step, and how often threads wait for each other.
//
// Outside a program an operation's loop is a parallel region: all threads begin together and end together, and nobody
// computes while the next operation is being called. Within a program (program.cpp) there is one region for the whole
// step, a *crew*: its leader makes the calls and leaves their loops behind as *jobs*, which all threads walk through in
// order, the leader too when it has nothing left to call. So calls cost little while there is something to compute, and
// a thread that comes late finds the others at work.
//
//   job      a loop of some parts; threads take the next one that is left. It begins when the job before it has ended.
//   tail     a loop of one part belongs to the job before it: the thread that ends the last part runs it.
//   later    leaves a loop behind. It owns what it captures, and the memory it names lives until it has ended: Program
//            keeps what calls are given and give back, `keep` holds the rest.
//   spread   a loop whose end is waited for.
//
// What is called while jobs are left behind may not read what they make: such operations `drain` first. A program does
// so for all but views and the operations that leave loops behind.
//
// INVARIANCE. What a part computes depends on the part alone, and loops are cut so that no row's bits depend on the cut.
#pragma once

#include <algorithm>
#include <atomic>
#include <exception>
#include <functional>
#include <utility>
#include <vector>

#include "common.h"

namespace weft {

// Where threads of this process met, and what they waited there: since the numbers were asked for last.
struct Waits {
  std::atomic<int64_t> meetings{0};     // beginnings and ends of regions, barriers in them, ends of jobs
  std::atomic<int64_t> nanoseconds{0};  // of all threads, added up
  void add(int64_t met, int64_t ns) {
    meetings.fetch_add(met, std::memory_order_relaxed);
    nanoseconds.fetch_add(ns, std::memory_order_relaxed);
  }
};
extern Waits waits;
extern bool use_crews;
extern int64_t alone_bytes;  // of weights, which one thread of a crew reads sooner than others come

int64_t now_ns();

// A number that grows, and that threads wait for: awake for some microseconds, then asleep.
class Gate {
 public:
  uint32_t value() const { return value_.load(std::memory_order_acquire); }
  void reset() { value_.store(0); }
  void open(uint32_t value);
  void wait(uint32_t old);  // until it is not `old`

 private:
  alignas(64) std::atomic<uint32_t> value_{0};
  alignas(64) std::atomic<uint32_t> sleepers_{0};
};

class Crew {
 public:
  using Part = std::function<void(int64_t)>;

  // The crew that this thread leads, while it makes calls; null elsewhere, so in parts of jobs.
  static Crew* current();

  // Runs `calls` in a region of `threads`. Throws what it has thrown, or a job, when nobody is in a job any more.
  static void lead(int threads, const std::function<void(Crew&)>& calls);

  int threads() const { return threads_; }
  // Whether this region should end and another one begin: there is no room for the jobs of many calls.
  bool full() const { return made_ + kSpare > kJobs; }
  // How many jobs there are, and how many of these have ended.
  uint32_t made() const { return made_; }
  uint32_t ended() const { return ended_.value(); }

  void later(int64_t parts, Part part);
  // Takes part in the first job that this thread has not seen the end of, if there is one.
  void advance();
  // The same for all jobs. Throws what one has thrown.
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
  uint32_t made_ = 0, at_ = 0;  // the leader's: jobs made, jobs whose end it has seen
  Gate shown_, ended_;          // jobs that may begin (and kClosed: there will be no more); jobs that have ended
  std::atomic<bool> failed_{false};
  std::exception_ptr failure_;  // written by who set `failed_`, read when all jobs have ended
};

// Threads for a loop of this thread's.
inline int team() {
  if (const Crew* crew = Crew::current()) return crew->threads();
  return at::in_parallel_region() ? 1 : at::get_num_threads();
}

// f(begin, end) for parts of 0 .. n - 1 of at least `grain`, which are waited for.
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

// The same, left behind where there is a crew: f owns what it captures.
template <class F>
void spread_later(int64_t n, int64_t grain, const F& f) {
  Crew* crew = Crew::current();
  if (!crew || n <= 0) return spread(n, grain, f);
  const int64_t parts = std::min<int64_t>(2 * crew->threads(), (n + grain - 1) / grain);
  crew->later(parts, [=](int64_t part) { f(n * part / parts, n * (part + 1) / parts); });
}

// x with its elements in order. A copy is kept for what is left behind.
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
