// How long a waiting thread stays awake before it sleeps.
//
// To wait awake saves the two thread switches of a sleep, if what is waited for comes within microseconds. On a
// contended machine it does not come: the peer is queued for a core, perhaps for the one that the waiting thread
// keeps busy, and a thread that burns its time slice awake is queued longer itself. Nothing tells a process that
// the machine is contended, but its own waits show it. So a run of waits that all outlasted the limit ends waiting
// awake, and from then on every kProbe-th wait is awake to see whether that pays again. A peer that is always late
// because it has more to compute gives the same signs, and there the sleep is right, too.
#pragma once

#include <chrono>

namespace weft {

// Of one waiting thread at a time.
class Patience {
 public:
  using Duration = std::chrono::steady_clock::duration;

  // `limit`: of a wait without sleep; 0 where waiting awake cannot pay (more ranks than cores).
  explicit Patience(Duration limit) : limit_(limit) {}

  // How long the wait that begins now stays awake.
  Duration awake() {
    if (late_ < kLate) return limit_;
    return ++asleep_ % kProbe == 0 ? limit_ : Duration::zero();
  }

  // A wait that was awake has ended: before its limit, or in sleep.
  void ended(bool in_time) { late_ = in_time ? 0 : late_ + (late_ < kLate); }

 private:
  static constexpr int kLate = 4;    // so many in a row are no accident
  static constexpr int kProbe = 16;  // a probe in vain costs limit / kProbe a wait

  const Duration limit_;
  int late_ = 0;
  unsigned asleep_ = 0;
};

}  // namespace weft
