// Memory shared by the ranks of one host, for a single purpose: rounds in which all ranks meet.
//
//   word       2 * (arrivals of all ranks since the beginning, modulo 2^31) + aborted. Round n is complete when
//              it has counted n * size arrivals: no rank arrives for round n + 1 before that.
//   seats      by rank: the last round for which the rank arrived
//   slots      two per rank, used in turn: a note about the round, and `bytes` of data
//
// A rank writes its slot of round n, arrives, waits until the round is complete, and reads all slots of round n. The
// slot is written again for round n + 2, after round n + 1 was complete. Arrivals of round n + 1 come after all reads
// of round n, so no slot is overwritten before it is read.
//
// A waiting rank spins briefly (patience.h), then sleeps on `word` (a futex). The last arrival and an abort change
// `word`. Sleepers wake now and then to look for dead peers and for the deadline. After an abort every operation fails.
#pragma once

#include "common.h"
#include "patience.h"

#include <fcntl.h>
#include <linux/futex.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <ctime>
#include <vector>

namespace weft {

using Clock = std::chrono::steady_clock;

constexpr int kMostRanks = 64;
constexpr int64_t kLookMs = 50;  // between two looks for dead peers

// A rank's description of its part of a collective. `begin`, for an exchange: first byte for each rank.
struct Note {
  uint32_t kind;
  uint32_t dtype;
  int64_t bytes;
  int64_t begin[kMostRanks + 1];
};

constexpr int64_t kNoteBytes = (int64_t(sizeof(Note)) + 63) / 64 * 64;

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

class Segment {
 public:
  // `pids`: process of each rank, in a common namespace. `spin`: seconds of waiting without sleep.
  Segment(int fd, int rank, std::vector<int64_t> pids, int64_t bytes, double timeout, double spin)
      : rank(rank), size(int(pids.size())), bytes(bytes), timeout_(timeout), patience_(seconds(spin)) {
    WEFT_CHECK(size > 1 && size <= kMostRanks && rank >= 0 && rank < size, "a segment is for 2 to ", kMostRanks,
               " ranks");
    WEFT_CHECK(bytes >= 64 && bytes % 64 == 0, "the bytes of a slot must be a multiple of 64");
    length_ = kHead + 2 * size * (kNoteBytes + bytes);
    struct stat found {};
    if (rank == 0) WEFT_CHECK(ftruncate(fd, length_) == 0, "no shared memory: ", strerror(errno));
    WEFT_CHECK(fstat(fd, &found) == 0 && found.st_size == length_, "the segment is of another size");
    void* at = mmap(nullptr, length_, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    WEFT_CHECK(at != MAP_FAILED, "the segment cannot be mapped: ", strerror(errno));
    head_ = static_cast<Head*>(at);
#if defined(SYS_pidfd_open)
    for (int peer = 0; peer < size; ++peer) {
      if (pids[peer] == getpid()) continue;
      const int opened = int(syscall(SYS_pidfd_open, pid_t(pids[peer]), 0));
      if (opened >= 0) watched_.push_back({opened, POLLIN, 0}), watched_rank_.push_back(peer);
    }
#endif
  }

  ~Segment() {
    for (const pollfd& one : watched_) close(one.fd);
    munmap(head_, length_);
  }

  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;

  // Begins a collective of one or more rounds. Throws if the group has ended.
  void begin() {
    until_ = Clock::now() + seconds(timeout_);
    WEFT_CHECK(!(head_->word.load(std::memory_order_acquire) & kAborted), kAbortedText);
  }

  // This rank's slot of the next round; another rank's slot of the complete round.
  Note& note() { return *at(rank, round_ + 1); }
  char* data() { return reinterpret_cast<char*>(at(rank, round_ + 1)) + kNoteBytes; }
  const Note& note(int peer) const { return *at(peer, round_); }
  const char* data(int peer) const { return reinterpret_cast<const char*>(at(peer, round_)) + kNoteBytes; }

  // Ends writing, and waits for all ranks. Throws, and ends the group, if a rank is gone or the deadline is over. A
  // round with all arrivals is complete, even if a rank has ended the group since.
  void meet() {
    ++round_;
    const uint32_t complete = round_ * 2 * uint32_t(size);
    head_->seats[rank].store(round_, std::memory_order_relaxed);
    const uint32_t word = head_->word.fetch_add(2) + 2;
    if ((word & ~kAborted) == complete) {
      if (head_->sleepers.load()) wake();
    } else {
      wait(complete);
    }
    WEFT_CHECK(reached(head_->word.load(std::memory_order_acquire), complete), kAbortedText);
  }

  // Ends the group, for all ranks. May be called from any thread.
  void abort() {
    head_->word.fetch_or(kAborted);
    wake();
  }

  const int rank, size;
  const int64_t bytes;

 private:
  static constexpr uint32_t kAborted = 1;
  static constexpr const char* kAbortedText = "the group was aborted";
  static constexpr int64_t kHead = 4096;

  struct Head {
    alignas(64) std::atomic<uint32_t> word;
    std::atomic<uint32_t> sleepers;
    alignas(64) std::atomic<uint32_t> seats[kMostRanks];
  };
  static_assert(sizeof(Head) <= kHead && std::atomic<uint32_t>::is_always_lock_free);

  static Clock::duration seconds(double given) {
    return std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(given));
  }

  Note* at(int of, uint32_t round) const {
    char* const slots = reinterpret_cast<char*>(head_) + kHead;
    return reinterpret_cast<Note*>(slots + (2 * of + (round & 1)) * (kNoteBytes + bytes));
  }

  static bool reached(uint32_t word, uint32_t complete) { return int32_t(word - complete) >= 0; }
  static bool ended(uint32_t word, uint32_t complete) { return (word & kAborted) || reached(word, complete); }

  void wait(uint32_t complete) {
    if (const auto awake = patience_.awake(); awake > Clock::duration::zero()) {
      const bool in_time = spin(complete, Clock::now() + awake);
      patience_.ended(in_time);
      if (in_time) return;
    }
    head_->sleepers.fetch_add(1);
    uint32_t word;
    while (!ended(word = head_->word.load(), complete)) {
      const timespec most{0, kLookMs * 1'000'000};
      if (syscall(SYS_futex, &head_->word, FUTEX_WAIT, word, &most, nullptr, 0) == 0 || errno != ETIMEDOUT) continue;
      if (const char* why = hopeless()) {
        head_->sleepers.fetch_sub(1);
        abort();
        WEFT_CHECK(false, why, ": rank ", missing(), " of ", size);
      }
    }
    head_->sleepers.fetch_sub(1);
  }

  // Returns true if the round, or the group, ended before `until`.
  bool spin(uint32_t complete, Clock::time_point until) const {
    do {
      for (int turn = 0; turn < 32; ++turn) {
        if (ended(head_->word.load(std::memory_order_acquire), complete)) return true;
        pause();
      }
    } while (Clock::now() < until);
    return false;
  }

  void wake() { syscall(SYS_futex, &head_->word, FUTEX_WAKE, INT32_MAX, nullptr, nullptr, 0); }

  const char* hopeless() {
    if (!watched_.empty() && poll(watched_.data(), watched_.size(), 0) > 0)
      for (size_t i = 0; i < watched_.size(); ++i)
        if (watched_[i].revents && absent(watched_rank_[i])) return "a peer's process has ended";
    return Clock::now() >= until_ ? "a peer did not come in time" : nullptr;
  }

  bool absent(int peer) const { return int32_t(head_->seats[peer].load() - round_) < 0; }

  int missing() const {
    for (int peer = 0; peer < size; ++peer)
      if (absent(peer)) return peer;
    return rank;
  }

  const double timeout_;
  Patience patience_;
  Head* head_ = nullptr;
  int64_t length_ = 0;
  uint32_t round_ = 0;
  Clock::time_point until_;
  std::vector<pollfd> watched_;
  std::vector<int> watched_rank_;
};

}  // namespace weft
