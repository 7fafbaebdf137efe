#include "crew.h"

#include "operators.h"

#include <linux/futex.h>
#include <omp.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <chrono>
#include <climits>
#include <memory>

namespace weft {

Waits waits;
bool use_crews = true;
int64_t alone_bytes = 1 << 15;

int64_t now_ns() {
  using namespace std::chrono;
  return duration_cast<nanoseconds>(steady_clock::now().time_since_epoch()).count();
}

namespace {

constexpr int64_t kAwake = 15'000;  // ns of waiting awake, from docs/adr/0007 for regions

thread_local Crew* led = nullptr;

inline void breathe() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

}  // namespace

// A thread counts as a sleeper before its last look at the number, and the number changes before the look at the
// sleepers. So at least one side sees the other.
void Gate::open(uint32_t value) {
  value_.store(value);
  if (sleepers_.load()) syscall(SYS_futex, &value_, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
}

void Gate::wait(uint32_t old) {
  const int64_t until = now_ns() + kAwake;
  do {
    for (int turn = 0; turn < 32; ++turn) {
      if (value() != old) return;
      breathe();
    }
  } while (now_ns() < until);
  sleepers_.fetch_add(1);
  while (value_.load() == old) syscall(SYS_futex, &value_, FUTEX_WAIT_PRIVATE, old, nullptr, nullptr, 0);
  sleepers_.fetch_sub(1);
}

// Waits of one thread in a region.
struct Crew::Waited {
  int64_t meetings = 0, ns = 0;
  ~Waited() { waits.add(meetings, ns); }
  // Waits until the gate's number differs from `old`.
  void at(Gate& gate, uint32_t old) {
    const int64_t began = now_ns();
    gate.wait(old);
    ns += now_ns() - began;
  }
};

Crew* Crew::current() { return led; }

Crew& Crew::own() {
  static thread_local std::unique_ptr<Crew> crew;
  if (!crew) crew.reset(new Crew());
  return *crew;
}

void Crew::begin(int threads) {
  threads_ = threads;
  made_ = at_ = 0;
  shown_.reset(), ended_.reset();
  failed_ = false, failure_ = nullptr;
  began_ = now_ns();
}

void Crew::lead(int threads, const std::function<void(Crew&)>& calls) {
  Crew& crew = own();
  crew.begin(threads);
  std::exception_ptr failure;
  int64_t left = 0;
#pragma omp parallel num_threads(threads)
  {
    if (omp_get_thread_num() > 0) {
      crew.follow();
    } else {
      led = &crew;
      try {
        calls(crew);
        crew.drain();
      } catch (...) {
        failure = std::current_exception();
      }
      crew.finish();
      led = nullptr;
      left = now_ns();
    }
  }
  waits.add(2, now_ns() - left);
  for (uint32_t i = 0; i < crew.made_; ++i) crew.jobs_[i].part = nullptr, crew.jobs_[i].tails.clear();
  crew.kept_.clear();
  if (failure) std::rethrow_exception(failure);
}

void Crew::show(uint32_t jobs) {
  if (shown_.value() != jobs) shown_.open(jobs);
}

// The latest job is shown when another job follows or a wait begins. Until then the job may get tails.
void Crew::later(int64_t parts, Part part) {
  if (parts <= 0) return;
  if (made_ == kJobs) {
    drain();
    for (int64_t i = 0; i < parts; ++i) part(i);
    return;
  }
  if (parts == 1 && made_ > shown_.value()) return jobs_[made_ - 1].tails.push_back(std::move(part));
  show(made_);
  Job& job = jobs_[made_++];
  job.next.store(0, std::memory_order_relaxed);
  job.left.store(parts, std::memory_order_relaxed);
  job.parts = parts;
  job.part = std::move(part);
}

void Crew::call(const Part& part, int64_t number) noexcept {
  if (failed_.load(std::memory_order_acquire)) return;  // results of earlier jobs may be missing
  try {
    part(number);
  } catch (...) {
    if (!failed_.exchange(true)) failure_ = std::current_exception();
  }
}

// Takes parts of a shown job, and returns when the job has ended.
void Crew::walk(uint32_t number, Waited& waited) {
  Job& job = jobs_[number];
  int64_t did = 0;
  for (int64_t i; (i = job.next.fetch_add(1, std::memory_order_relaxed)) < job.parts; ++did) call(job.part, i);
  if (did && job.left.fetch_sub(did, std::memory_order_acq_rel) == did) {
    for (const Part& tail : job.tails) call(tail, 0);
    ++waited.meetings;
    ended_.open(number + 1);
    return;
  }
  for (uint32_t ended; (ended = ended_.value()) <= number;) waited.at(ended_, ended);
}

void Crew::follow() {
  Waited waited;
  waited.ns += now_ns() - began_;
  for (uint32_t at = 0;;) {
    at = std::max(at, ended_.value());
    uint32_t shown = shown_.value();
    if ((shown & ~kClosed) > at) {
      walk(at++, waited);
    } else if (shown & kClosed) {
      return;
    } else {
      waited.at(shown_, shown);
    }
  }
}

void Crew::advance() {
  at_ = std::max(at_, ended_.value());
  if (at_ == made_) return;
  show(made_);
  Waited waited;
  led = nullptr;  // a part must not make jobs
  walk(at_++, waited);
  led = this;
}

void Crew::drain() {
  while (at_ < made_ && ended_.value() < made_) advance();
  at_ = made_;
  if (failed_.load()) std::rethrow_exception(failure_);
}

// Ends the jobs and releases the other threads.
void Crew::finish() {
  try {
    drain();
  } catch (...) {  // already thrown to the caller
  }
  shown_.open(made_ | kClosed);
}

// {meetings, nanoseconds waited} since the previous call.
std::vector<int64_t> take_waits() { return {waits.meetings.exchange(0), waits.nanoseconds.exchange(0)}; }

// Sets whether programs run with a crew, and the bytes of a product for one thread. Returns the previous value of the
// first. For tests and measurements.
bool set_crews(bool value, int64_t alone) {
  alone_bytes = alone;
  return std::exchange(use_crews, value);
}

}  // namespace weft
