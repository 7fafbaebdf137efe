// Collectives of the ranks of one host, in shared memory (segment.h).
//
//   gather      every rank's x, in order of ranks; x has one shape on all ranks
//   exchange    rows: sends[r] of x to rank r, receives[r] from rank r
//   sum         of every rank's x, in order of ranks: in float32 or wider, rounded once
//
// Data larger than a slot goes in several rounds. In every round all ranks describe their collective: if the
// descriptions differ, the group ends with an error on each rank. Rings are known by numbers (passing an object costs
// Python ten times as much); `ring_close` frees the memory when the last call has ended. Calls of one rank must be
// sequential, from any thread. `abort` may come at any time, and makes waiting calls throw.
//
// A failure in a collective, and every call after an abort, is a DistError for every caller: a program that replays a
// collective (program.h) passes the error on. `ring_times` returns the times of a thread's collectives.
#include "operators.h"
#include "segment.h"

#include <map>
#include <memory>
#include <mutex>

namespace weft {
namespace {

enum Kind : uint32_t { kGather = 1, kExchange, kSum };

constexpr int64_t kBlock = 512;  // elements summed at a time: their wide sums stay in the cache

// Bytes of all ranks. Above, each rank sums a part. Up to here, or with two ranks, all ranks sum everything at once.
constexpr int64_t kOneRound = 1 << 16;

struct half {
  uint16_t bits;
  explicit half(float value) : bits(float_to_half(value)) {}
  explicit operator float() const { return half_to_float(bits); }
};

template <class T>
struct Wide {
  using type = float;
};
template <>
struct Wide<double> {
  using type = double;
};

template <class T>
inline void round_to(float value, T* to) {
  *to = static_cast<T>(value);
}
template <>
inline void round_to(float value, bf16* to) {
  narrow(value, to);
}
inline void round_to(double value, double* to) { *to = value; }

template <class T>
void add_up(const std::vector<const char*>& parts, int64_t count, T* out) {
  using W = typename Wide<T>::type;
  W total[kBlock];
  for (int64_t begin = 0; begin < count; begin += kBlock) {
    const int64_t n = std::min(kBlock, count - begin);
    for (size_t part = 0; part < parts.size(); ++part) {
      const T* from = reinterpret_cast<const T*>(parts[part]) + begin;
      if (part == 0)
        for (int64_t i = 0; i < n; ++i) total[i] = static_cast<W>(from[i]);
      else
        for (int64_t i = 0; i < n; ++i) total[i] += static_cast<W>(from[i]);
    }
    for (int64_t i = 0; i < n; ++i) round_to(total[i], out + begin + i);
  }
}

using Adder = void (*)(const std::vector<const char*>&, int64_t, char*);

template <class T>
void add_bytes(const std::vector<const char*>& parts, int64_t count, char* out) {
  add_up<T>(parts, count, reinterpret_cast<T*>(out));
}

Adder adder(Dtype dtype) {
  switch (dtype) {
    case Dtype::f64:
      return add_bytes<double>;
    case Dtype::f32:
      return add_bytes<float>;
    case Dtype::bf16:
      return add_bytes<bf16>;
    case Dtype::f16:
      return add_bytes<half>;
    default:
      WEFT_CHECK(false, "no sums of ", dtype, " in shared memory");
  }
}

// Begin and end of the collectives of a thread, while recorded: seconds of Python's monotonic clock.
struct Times {
  bool kept = false;
  std::vector<double> seconds;
  void push_back(Clock::time_point began, Clock::time_point ended) {
    for (const auto& time : {began, ended})
      seconds.push_back(std::chrono::duration<double>(time.time_since_epoch()).count());
  }
};

thread_local Times times;

class Ring {
 public:
  Ring(int64_t fd, int64_t rank, std::vector<int64_t> pids, int64_t bytes, double timeout, double spin)
      : shared_(int(fd), int(rank), std::move(pids), bytes, timeout, spin) {}

  void abort() { shared_.abort(); }

  Tensor gather(const Tensor& given) {
    const Tensor x = given.contiguous();
    std::vector<int64_t> shape = x.sizes().vec();
    shape.insert(shape.begin(), shared_.size);
    Tensor out = empty_tensor(shape, x.dtype());
    const int64_t total = bytes_of(x);
    const char* from = static_cast<const char*>(x.const_data_ptr());
    char* to = static_cast<char*>(out.mutable_data_ptr());
    guarded([&] {
      for (int64_t begin = 0; begin < total; begin += shared_.bytes) {
        const int64_t n = std::min(shared_.bytes, total - begin);
        announce(kGather, x, total);
        std::memcpy(shared_.data(), from + begin, n);
        shared_.meet();
        for (int peer = 0; peer < shared_.size; ++peer) {
          agree(peer, kGather, x, total);
          std::memcpy(to + peer * total + begin, peer == shared_.rank ? from + begin : shared_.data(peer), n);
        }
      }
    });
    return out;
  }

  Tensor exchange(const Tensor& given, const std::vector<int64_t>& sends, const std::vector<int64_t>& receives) {
    const Tensor x = given.contiguous();
    const int size = shared_.size;
    WEFT_CHECK(x.dim() > 0 && int(sends.size()) == size && int(receives.size()) == size, "exchange: one count a rank");
    std::vector<int64_t> shape = x.sizes().vec(), ends(size + 1, 0), places(size + 1, 0);
    int64_t row = x.element_size();
    for (size_t dim = 1; dim < shape.size(); ++dim) row *= shape[dim];
    for (int peer = 0; peer < size; ++peer) {
      WEFT_CHECK(sends[peer] >= 0 && receives[peer] >= 0, "exchange: a negative count");
      ends[peer + 1] = ends[peer] + sends[peer] * row;
      places[peer + 1] = places[peer] + receives[peer] * row;
    }
    WEFT_CHECK(ends[size] == bytes_of(x), "exchange: the counts are not those of ", shape[0], " rows");
    shape[0] = 0;
    for (int64_t count : receives) shape[0] += count;
    Tensor out = empty_tensor(shape, x.dtype());
    const char* from = static_cast<const char*>(x.const_data_ptr());
    char* to = static_cast<char*>(out.mutable_data_ptr());
    guarded([&] {
      int64_t longest = 1;  // most bytes sent by any rank, known after the first round
      for (int64_t begin = 0; begin < longest; begin += shared_.bytes) {
        announce(kExchange, x, ends[size]);
        std::copy(ends.begin(), ends.end(), shared_.note().begin);
        if (begin < ends[size]) std::memcpy(shared_.data(), from + begin, std::min(shared_.bytes, ends[size] - begin));
        shared_.meet();
        for (int peer = 0; peer < size; ++peer) {
          longest = std::max(longest, shared_.note(peer).bytes);
          take(peer, x, begin, places[peer + 1] - places[peer], to + places[peer]);
        }
      }
    });
    return out;
  }

  Tensor sum(const Tensor& given) {
    const Tensor x = given.contiguous();
    const Adder add = adder(x.dtype());
    Tensor out = empty_tensor(x.sizes(), x.dtype());
    const int64_t total = bytes_of(x);
    const char* from = static_cast<const char*>(x.const_data_ptr());
    char* to = static_cast<char*>(out.mutable_data_ptr());
    guarded([&] {
      for (int64_t begin = 0; begin < total; begin += shared_.bytes) {
        const int64_t n = std::min(shared_.bytes, total - begin);
        announce(kSum, x, total);
        std::memcpy(shared_.data(), from + begin, n);
        shared_.meet();
        for (int peer = 0; peer < shared_.size; ++peer) agree(peer, kSum, x, total);
        const int64_t item = x.element_size();
        if (shared_.size == 2 || total * shared_.size <= kOneRound)
          add(parts(0), n / item, to + begin);
        else
          sum_shares(add, n / item, item, x, total, to + begin);
      }
    });
    return out;
  }

 private:
  static int64_t bytes_of(const Tensor& x) { return x.numel() * int64_t(x.element_size()); }

  // Every rank's data of the present round, at offset `offset`.
  std::vector<const char*> parts(int64_t offset) const {
    std::vector<const char*> made(shared_.size);
    for (int peer = 0; peer < shared_.size; ++peer) made[peer] = shared_.data(peer) + offset;
    return made;
  }

  // `count` elements are in every slot: sums this rank's share, and takes the shares of the others in another round.
  void sum_shares(Adder add, int64_t count, int64_t item, const Tensor& x, int64_t total, char* to) {
    const int64_t share = (count + shared_.size - 1) / shared_.size;
    const auto first = [&](int64_t rank) { return std::min(rank * share, count); };
    const int64_t mine = first(shared_.rank), n = first(shared_.rank + 1) - mine;
    announce(kSum, x, total);
    add(parts(mine * item), n, shared_.data());
    shared_.meet();
    for (int peer = 0; peer < shared_.size; ++peer) {
      agree(peer, kSum, x, total);
      std::memcpy(to + first(peer) * item, shared_.data(peer), (first(peer + 1) - first(peer)) * item);
    }
  }

  // Copies the part for this rank in the present round, which begins `begin` bytes into the peer's rows.
  void take(int peer, const Tensor& x, int64_t begin, int64_t expected, char* to) {
    const Note& note = shared_.note(peer);
    agree(peer, kExchange, x, note.bytes);
    const int64_t first = note.begin[shared_.rank], last = note.begin[shared_.rank + 1];
    WEFT_CHECK(last - first == expected, "rank ", peer, " sends ", last - first, " bytes where ", expected,
               " are expected");
    const int64_t low = std::max(first, begin), high = std::min(last, begin + shared_.bytes);
    if (low < high) std::memcpy(to + (low - first), shared_.data(peer) + (low - begin), high - low);
  }

  void announce(Kind kind, const Tensor& x, int64_t bytes) {
    Note& note = shared_.note();
    note.kind = kind, note.dtype = uint32_t(x.dtype()), note.bytes = bytes;
  }

  void agree(int peer, Kind kind, const Tensor& x, int64_t bytes) const {
    const Note& note = shared_.note(peer);
    WEFT_CHECK(note.kind == kind && note.dtype == uint32_t(x.dtype()) && note.bytes == bytes, "rank ", peer,
               " is in another collective: kind ", note.kind, " of ", note.bytes, " bytes, and here ", int(kind),
               " of ", bytes);
  }

  // After an error the content of slots is unknown: the group ends.
  template <class Work>
  void guarded(const Work& work) {
    const std::lock_guard<std::mutex> alone(alone_);
    const auto began = Clock::now();
    try {
      shared_.begin();
      work();
    } catch (...) {
      shared_.abort();
      fail_group();
    }
    if (times.kept) times.push_back(began, Clock::now());
  }

  Segment shared_;
  std::mutex alone_;
};

std::mutex rings_lock;
std::map<int64_t, std::shared_ptr<Ring>> rings;  // numbers are never reused
int64_t rings_made = 0;

std::shared_ptr<Ring> find(int64_t number) {
  const std::lock_guard<std::mutex> held(rings_lock);
  const auto found = rings.find(number);
  if (found == rings.end()) fail_group("the group was closed");
  return found->second;
}

}  // namespace

int64_t ring_open(int64_t fd, int64_t rank, std::vector<int64_t> pids, int64_t bytes, double timeout, double spin) {
  auto made = std::make_shared<Ring>(fd, rank, std::move(pids), bytes, timeout, spin);
  const std::lock_guard<std::mutex> held(rings_lock);
  rings.emplace(++rings_made, std::move(made));
  return rings_made;
}

void ring_abort(int64_t number) { find(number)->abort(); }

void ring_close(int64_t number) {
  std::shared_ptr<Ring> last;  // unmapped after the lock is released
  const std::lock_guard<std::mutex> held(rings_lock);
  const auto found = rings.find(number);
  if (found == rings.end()) return;
  last = std::move(found->second);
  rings.erase(found);
}

// float64 [collectives, 2]: begin and end of each collective of this thread since the last call. `keep`: record.
Tensor ring_times(bool keep) {
  Tensor made = empty_tensor({int64_t(times.seconds.size() / 2), 2}, Dtype::f64);
  std::copy(times.seconds.begin(), times.seconds.end(), made.mutable_data_ptr<double>());
  times.seconds.clear();
  times.kept = keep;
  return made;
}

Tensor ring_gather(const Tensor& x, int64_t ring) { return find(ring)->gather(x); }
Tensor ring_sum(const Tensor& x, int64_t ring) { return find(ring)->sum(x); }
Tensor ring_exchange(const Tensor& x, Sizes sends, Sizes receives, int64_t ring) {
  return find(ring)->exchange(x, sends.vec(), receives.vec());
}

}  // namespace weft
