// Time for which a waiting thread stays awake before sleep.
//
// Waiting awake saves the two thread switches of a sleep if the awaited event comes within microseconds. On a contended
// machine the event comes later: the peer is queued for a core, perhaps for the core of the waiting thread. A thread
// that spends its time slice awake is then queued longer as well. No system call reports contention, but the waits show
// it. So a run of waits beyond the limit ends waiting awake. From then on every kProbe-th wait is awake, as a test. A
// peer with more work than this thread looks the same, and sleep is right then, too.
#pragma once

#include <chrono>

namespace weft {

// State of one waiting thread.
class Patience {
 public:
  using Duration = std::chrono::steady_clock::duration;

  // `limit`: of a wait without sleep; 0 if waiting awake cannot pay (more ranks than cores).
  explicit Patience(Duration limit) : limit_(limit) {}

  // Returns how long the wait that begins now stays awake.
  Duration awake() {
    if (late_ < kLate) return limit_;
    return ++asleep_ % kProbe == 0 ? limit_ : Duration::zero();
  }

  // Reports the end of an awake wait: before the limit, or in sleep.
  void ended(bool in_time) { late_ = in_time ? 0 : late_ + (late_ < kLate); }

 private:
  static constexpr int kLate = 4;    // a run this long is no accident
  static constexpr int kProbe = 16;  // a failed probe costs limit / kProbe per wait

  const Duration limit_;
  int late_ = 0;
  unsigned asleep_ = 0;
};

}  // namespace weft
