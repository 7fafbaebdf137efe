// Decides how long a waiting thread spins before the thread sleeps.
//
// Spinning saves the two thread switches of a sleep, if the wait ends within microseconds. On a contended machine waits
// are longer: the peer is queued for a core, perhaps for the core of the spinning thread, and a thread that spins
// through its time slice is queued longer as well. A process cannot query contention, but long waits reveal contention.
// So after a run of waits beyond the limit, threads stop spinning. From then on every kProbe-th wait spins again, to
// test whether spinning pays. A peer that is always late because of more work looks the same, and sleeping is right in
// this case too.
#pragma once

#include <chrono>

namespace weft {

// For one waiting thread at a time.
class Patience {
 public:
  using Duration = std::chrono::steady_clock::duration;

  // `limit`: duration of a wait without sleep; 0 if spinning cannot pay (more ranks than cores).
  explicit Patience(Duration limit) : limit_(limit) {}

  // Return the spinning time of the wait that begins now.
  Duration awake() {
    if (late_ < kLate) return limit_;
    return ++asleep_ % kProbe == 0 ? limit_ : Duration::zero();
  }

  // Record the end of a spinning wait: in time, or in sleep.
  void ended(bool in_time) { late_ = in_time ? 0 : late_ + (late_ < kLate); }

 private:
  static constexpr int kLate = 4;    // late waits in a row before spinning stops
  static constexpr int kProbe = 16;  // a probe without success costs limit / kProbe per wait

  const Duration limit_;
  int late_ = 0;
  unsigned asleep_ = 0;
};

}  // namespace weft
