// Attention over tiles of keys: packing, engines, states, and the worker that processes a piece tile by tile.
//
//   piece    up to kRows rows of one sequence with common keys and values; a row is a (query, head) pair
//
//              keys      0        64       128      192      256   ...    absolute positions
//                        |--tile--|--tile--|--tile--|--tile--|--
//   rows                 |--------------split (kSplit keys)--------------|--------split--------
//   p   h0 \             |########|########|###-----|        |
//   p   h1  | row block  |########|########|###-----|        |            # visible
//   p+1 h0  |            |########|########|####----|        |            - masked: score -inf, so weight 0
//   p+1 h1 /             |########|########|####----|        |
//   p+2 h0 ...
//
//   tile     K and V of 64 keys are packed once per piece (K transposed, both with neighbours in K's reduction
//            side by side), then each row block does   scores = Q K^T,   online softmax,   O = O * alpha + P V
//   split    has a separate maximum, sum and O; splits are merged in order into the row's state
//
// Invariants.
//   * A row's bits depend only on its query and on visible keys and values: each element is one sequence of
//     operations over absolute tiles and splits, in any row block (`gemm` keeps one order of its reduction for
//     every number of rows). A tile without visible keys leaves a row's state unchanged, up to the sign of zero
//     and numbers below 2^-126, and `finish` writes both as +0.
//   * A long row may be divided among threads at splits, or its keys come in several calls of `run` that each
//     begin at a split (`Piece::carry`): the merges are the same sequence either way.
//   * Masked keys never enter: positions invisible to all queries of the piece are packed as zeros. If values
//     visible to some queries only are not finite, each query gets a separate tile (`exact_tile`).
//   * Two merged empty states give 0 and -inf.
//
// A SCENE defines the memory and the masks. Members:
//
//   T                        type of lines and outputs
//   key, rest, value         elements of a key's two parts, which may lie apart (rest may be 0), and of a value;
//                            multiples of 16
//   group, window, scale     rows per query in a piece; keys visible to a query, 0: all, negative: see `lowest`;
//                            factor of scores, times log2(e)
//   pack_q<E>(piece, to)     writes the piece's rows, [rows, key + rest]
//   point(lines, piece, tile, low, high)
//                            finds the keys and values of positions low .. high of a tile; others are `kZeros`
//   copied                   elements of memory per key of a tile for `point`, `Lines::copies`; 0 for none
//   out(piece, row)          address of a row's `value` output elements
//   ends                     optional: null, or by token the end of the visible keys, if behind the token itself. In a
//                            row of tokens the ends never decrease
#pragma once

#include "attend_engines.h"
#include "crew.h"

#include <algorithm>
#include <atomic>
#include <memory>
#include <vector>

namespace weft::attend {
namespace {

// ---- pieces and states ----

// Lowest key that a query at `position` sees. A negative window: size of the chunks of positions.
inline int64_t lowest(int64_t position, int window) {
  if (window < 0) return position - position % -window;
  return window ? std::max<int64_t>(0, position - window + 1) : 0;
}

struct Piece {
  int32_t row, head;               // sequence; whatever the scene calls heads
  int32_t token, queries;          // first query in the segment
  int64_t position;                // of the first query
  int64_t low, high;               // keys to attend to: keys visible to some query, or a part of these from a split on
  int64_t partial = -1;            // place of the first split's state in floats, if divided
  int64_t base = 0;                // for use by the scene
  float* carry = nullptr;          // state between parts; null with a single part
  bool first = true, last = true;  // part of the keys

  int first_split() const { return int(low / kSplit); }
  int splits() const { return int((high - 1) / kSplit) + 1 - first_split(); }
  int64_t cost(int group) const { return (high - low) * (queries * group + 8); }
};

// A tile of a piece, or nothing.
struct Place {
  const Piece* piece = nullptr;
  int64_t tile = 0;
};

// A piece, or one split of a piece.
struct Item {
  int32_t piece, split;  // -1: all splits
  int64_t cost;
};

struct State {  // up to kRows rows: maximum (in powers of two), sum of weights, weighted sum of values
  float *m, *l, *o;
  static int64_t padded(int rows) { return (rows + kLanes - 1) / kLanes * kLanes; }
  static int64_t floats(int rows, int dim) { return padded(rows) * (dim + 2); }
  static State at(float* memory, int rows) { return {memory, memory + padded(rows), memory + 2 * padded(rows)}; }
  void clear(int rows, int dim) const {
    std::fill(m, m + padded(rows), -kInf);
    std::fill(l, l + padded(rows), 0.0f);
    std::fill(o, o + int64_t(rows) * dim, 0.0f);
  }
};

// tanh(x * ln(2) / 2). NaN stays NaN.
inline vf tanh_half(vf x) { return splat(1.0f) - splat(2.0f) / (exp2v(vmin(splat(126.0f), x)) + splat(1.0f)); }

inline vf finite_or_zero(vf m) { return select(equal(m, splat(-kInf)), splat(0.0f), m); }

// Merge state `from` into `to`. Two empty states stay empty: 0 and -inf.
inline void merge(const State& to, const State& from, int rows, int dim) {
  alignas(64) float keep[kRows], add[kRows];
  for (int i = 0; i < rows; i += kLanes) {
    const vf mine = load(to.m + i), other = load(from.m + i);
    const vf m = vmax(mine, other), base = finite_or_zero(m);
    const vf a = exp2v(mine - base), b = exp2v(other - base);
    store(to.m + i, m);
    store(to.l + i, fma(load(to.l + i), a, load(from.l + i) * b));
    store(keep + i, a);
    store(add + i, b);
  }
  for (int i = 0; i < rows; ++i) {
    float* o = to.o + int64_t(i) * dim;
    const float* other = from.o + int64_t(i) * dim;
    for (int d = 0; d < dim; d += kLanes)
      store(o + d, fma(load(o + d), splat(keep[i]), load(other + d) * splat(add[i])));
  }
}

// ---- memory ----

class Arena {
 public:
  explicit Arena(size_t bytes) : bytes_(bytes), memory_(std::aligned_alloc(64, (bytes + 63) / 64 * 64)) {
    WEFT_CHECK(memory_ || !bytes, "attend: no memory for ", bytes, " bytes");
  }
  Arena(const Arena&) = delete;
  ~Arena() { std::free(memory_); }
  size_t size() const { return bytes_; }
  char* data() const { return static_cast<char*>(memory_); }

 private:
  size_t bytes_;
  void* memory_;
};

// Memory of one thread, retained between calls. `at_least`: bytes, valid until the next request.
class Kept {
 public:
  char* at_least(size_t bytes) {
    if (!arena_ || arena_->size() < bytes) {
      arena_.reset();
      arena_ = std::make_unique<Arena>(bytes);
    }
    return arena_->data();
  }
  bool holds(size_t bytes) const { return arena_ && arena_->size() >= bytes; }

 private:
  std::unique_ptr<Arena> arena_;
};

// Addresses of the keys and values of a tile.
template <class T>
struct Lines {
  const Piece* piece = nullptr;
  int64_t tile = 0;
  const T *k[kTile], *rest[kTile], *v[kTile];
  T* copies = nullptr;  // kTile times the scene's `copied` elements: for lines with another form in the cache

  void zero(int at) { k[at] = rest[at] = v[at] = reinterpret_cast<const T*>(kZeros); }
};

// ---- the worker ----

template <class S, class E>
class Worker {
  using T = typename S::T;
  using elem = typename E::elem;

 public:
  explicit Worker(const S& scene) : s_(scene), dim_(scene.key + scene.rest) {
    const size_t dim = dim_, value = scene.value;
    size_t bytes = 0;
    const auto place = [&](size_t size) {
      const size_t at = bytes;
      bytes += (size + 63) / 64 * 64;
      return at;
    };
    const size_t q = place(kRows * dim * sizeof(elem)), k = place(kTile * dim * sizeof(elem));
    const size_t v = place(kTile * value * sizeof(elem)), wide = place(kTile * dim * sizeof(float));
    const size_t s = place(E::kBlock * kTile * sizeof(float)), p = place(E::kBlock * kTile * sizeof(elem));
    const size_t run = place(State::floats(kRows, scene.value) * sizeof(float));
    const size_t total = place(State::floats(kRows, scene.value) * sizeof(float));
    const size_t each = kTile * size_t(scene.copied) * sizeof(T), lines = place(2 * each);
    static thread_local Kept kept;
    char* base = kept.at_least(bytes);
    q_ = reinterpret_cast<elem*>(base + q);
    k_ = reinterpret_cast<elem*>(base + k);
    v_ = reinterpret_cast<elem*>(base + v);
    wide_ = reinterpret_cast<float*>(base + wide);
    scores_ = reinterpret_cast<float*>(base + s);
    p_ = reinterpret_cast<elem*>(base + p);
    run_ = State::at(reinterpret_cast<float*>(base + run), kRows);
    total_ = State::at(reinterpret_cast<float*>(base + total), kRows);
    lines_.copies = reinterpret_cast<T*>(base + lines);
    ahead_.copies = reinterpret_cast<T*>(base + lines + each);
  }
  ~Worker() { E::release(); }

  // All splits of a piece, to the output. `next`: the tile that this thread likely reads next.
  void whole(const Piece& piece, Place next) {
    begin(piece);
    const State total = piece.carry ? State::at(piece.carry, rows_) : total_;
    const int first = piece.first_split(), count = piece.splits();
    for (int i = 0; i < count; ++i) {
      const bool fresh = piece.first && i == 0;
      const Place after = i + 1 < count ? Place{&piece, int64_t(first + i + 1) * kSplit} : next;
      split(piece, first + i, fresh ? total : run_, after);
      if (!fresh) merge(total, run_, rows_, s_.value);
    }
    if (piece.last) finish(piece, total);
  }

  // Process one split of a piece into `state`.
  void part(const Piece& piece, int number, const State& state, Place next) {
    begin(piece);
    split(piece, piece.first_split() + number, state, next);
  }

  // Merge the states of all splits, in order, and write the output.
  void join(const Piece& piece, float* states) {
    rows_ = piece.queries * s_.group;
    State total = State::at(states, rows_);
    if (piece.carry) {
      total = State::at(piece.carry, rows_);
      if (piece.first) total.clear(rows_, s_.value);
    }
    for (int i = piece.carry ? 0 : 1; i < piece.splits(); ++i)
      merge(total, State::at(states + i * State::floats(rows_, s_.value), rows_), rows_, s_.value);
    if (piece.last) finish(piece, total);
  }

 private:
  void begin(const Piece& piece) {
    rows_ = piece.queries * s_.group;
    s_.template pack_q<E>(piece, q_);
  }

  // Puts the tile's lines in `lines_`, and looks up the lines of the following tile for prefetches by `pack`.
  bool turn(const Piece& piece, int64_t tile, Place next) {
    if (ahead_.piece == &piece && ahead_.tile == tile)
      std::swap(lines_, ahead_);
    else
      point(lines_, piece, tile, piece.low, piece.high);
    if (next.piece) point(ahead_, *next.piece, next.tile, next.piece->low, next.piece->high);
    return next.piece != nullptr;
  }

  void point(Lines<T>& lines, const Piece& piece, int64_t tile, int64_t low, int64_t high) const {
    s_.point(lines, piece, tile, std::max(low, tile), std::min(high, tile + kTile));
    lines.piece = &piece;
    lines.tile = tile;
  }

  // One split into `state`, which is cleared first. `next`: the tile that this thread reads next.
  void split(const Piece& piece, int number, const State& state, Place next) {
    state.clear(rows_, s_.value);
    const int64_t begin = std::max<int64_t>(int64_t(number) * kSplit, piece.low / kTile * kTile);
    const int64_t end = std::min<int64_t>(int64_t(number + 1) * kSplit, piece.high);
    const int64_t last = piece.position + piece.queries - 1;
    // Blocks of similar size: 8 rows are 4 + 4, not 6 + 2.
    const int blocks = (rows_ + E::kBlock - 1) / E::kBlock;
    const int most = ((rows_ + blocks - 1) / blocks + E::kAligned - 1) / E::kAligned * E::kAligned;
    for (int64_t tile = begin; tile < end; tile += kTile) {
      const Place after = rows_ > kFetchRows ? Place{} : tile + kTile < end ? Place{&piece, tile + kTile} : next;
      fetching_ = turn(piece, tile, after);
      pack();
      const bool mixed = piece.queries > 1 && (tile + kTile > end_of(piece, 0) || tile < lowest(last, s_.window));
      if (mixed && !values_finite()) {
        exact_tile(piece, tile, state);
        continue;
      }
      for (int row = 0; row < rows_; row += most) block(piece, tile, state, row, std::min(rows_ - row, most));
    }
  }

  static constexpr int most_few() {
    if constexpr (requires { E::kFew; }) return E::kFew;
    return 0;
  }
  // True if the piece's keys stay pairs of bf16, and the values stay in the lines.
  bool few() const { return rows_ <= most_few(); }

  void pack() {
    if constexpr (most_few() > 0) {
      if (few()) return pack_few();
    }
    E::pack_k(lines_.k, fetching_ ? ahead_.k : nullptr, s_.key, k_, wide_);
    if (s_.rest) E::pack_k(lines_.rest, fetching_ ? ahead_.rest : nullptr, s_.rest, k_ + s_.key * kTile, wide_);
    E::pack_v(lines_.v, values_ahead(), s_.value, v_);
  }

  void pack_few() {
    bf16* to = reinterpret_cast<bf16*>(k_);
    PackBf16::pack_k(lines_.k, nullptr, s_.key, to, nullptr);
    if (s_.rest) PackBf16::pack_k(lines_.rest, fetching_ ? ahead_.rest : nullptr, s_.rest, to + s_.key * kTile, nullptr);
  }

  // Values of the next tile to prefetch, or null.
  const T* const* values_ahead() const { return fetching_ && lines_.v[0] != lines_.k[0] ? ahead_.v : nullptr; }

  bool values_finite() const {
    for (int r = 0; r < kTile; ++r) {
      vf sum = splat(0.0f);
      for (int d = 0; d < s_.value; d += kLanes) sum = fma(load(lines_.v[r] + d), splat(0.0f), sum);
      if (!(reduce_add(sum) == 0.0f)) return false;
    }
    return true;
  }

  // A tile with values that are not finite and visible to some queries only.
  void exact_tile(const Piece& piece, int64_t tile, const State& state) {
    for (int t = 0; t < piece.queries; ++t) {
      const int64_t position = piece.position + t;
      point(lines_, piece, tile, std::max(piece.low, lowest(position, s_.window)),
            std::min(piece.high, end_of(piece, t)));
      if (!few()) E::pack_v(lines_.v, nullptr, s_.value, v_);
      for (int row = 0; row < s_.group; row += E::kBlock)
        block(piece, tile, state, t * s_.group + row, std::min(s_.group - row, E::kBlock), true);
    }
  }

  // Rows row .. row + count - 1 of the piece over one tile. `exact`: later rows of the state are also in use.
  void block(const Piece& piece, int64_t tile, const State& state, int row, int count, bool exact = false) {
    const int64_t first = piece.position + row / s_.group, last = piece.position + (row + count - 1) / s_.group;
    const int64_t end = end_of(piece, last - piece.position);
    if (tile >= end || tile + kTile <= lowest(first, s_.window)) return;
    const bool masked = tile + kTile > end_of(piece, first - piece.position) || tile < lowest(last, s_.window);
    alignas(64) float alpha[E::kBlock + kLanes];
    if constexpr (most_few() > 0) {
      const bool fetch = fetching_ && row == 0 && !exact;
      if (few()) few_scores(count, dim_, q_ + int64_t(row) * dim_, k_, scores_, fetch ? ahead_.k : nullptr);
    }
    if (!few()) E::gemm(count, kTile, dim_, q_ + int64_t(row) * dim_, dim_, k_, scores_, nullptr, exact);
    for (int at = 0; at < count; at += kStep)
      softmax(piece, tile, state, row + at, std::min(count - at, kStep), masked, scores_ + at * kTile, p_ + at * kTile,
              alpha + at);
    float* o = state.o + int64_t(row) * s_.value;
    if constexpr (most_few() > 0) {
      const T* const* ahead = row == 0 && !exact ? values_ahead() : nullptr;
      if (few()) return few_values(count, s_.value, p_, lines_.v, o, alpha, ahead);
    }
    E::gemm(count, s_.value, kTile, p_, kTile, v_, o, alpha, exact);
  }

  // End of the keys visible to a query of the piece.
  int64_t end_of(const Piece& piece, int64_t query) const {
    const int64_t own = piece.position + query + 1;
    if constexpr (requires { s_.ends; })
      if (s_.ends) return std::max(own, s_.ends[piece.token + query]);
    return own;
  }

  // Visible keys of a row in the tile, as bits.
  uint64_t visible(const Piece& piece, int64_t tile, int row) const {
    const int64_t position = piece.position + row / s_.group;
    const int64_t low = std::max<int64_t>(lowest(position, s_.window) - tile, 0);
    const int64_t high = std::min<int64_t>(end_of(piece, row / s_.group) - tile, kTile);
    if (low >= high) return 0;
    return (~uint64_t(0) >> (kTile - (high - low))) << low;
  }

  // Turns scores into weights, and updates the state's maximum and sum. `alpha`: factor for the state's o.
  void softmax(const Piece& piece, int64_t tile, const State& state, int row, int count, bool masked, float* s, elem* p,
               float* alpha) {
    alignas(64) float base[kLanes];
    for (int r = 0; r < count; ++r) {
      float* line = s + r * kTile;
      vf x[4];
      for (int i = 0; i < 4; ++i) x[i] = load(line + i * kLanes);
      if constexpr (requires { s_.cap; }) {
        if (s_.cap > 0) {
          for (int i = 0; i < 4; ++i) {
            x[i] = tanh_half(x[i] * splat(s_.cap));
            store(line + i * kLanes, x[i]);
          }
        }
      }
      if (masked) {
        const uint64_t bits = visible(piece, tile, row + r);
        for (int i = 0; i < 4; ++i) {
          x[i] = select(uint32_t(bits >> (i * kLanes)) & 0xffff, x[i], splat(-kInf));
          store(line + i * kLanes, x[i]);
        }
      }
      store(across_[r], vmax(vmax(x[0], x[1]), vmax(x[2], x[3])));
    }
    const vf old = load_n(state.m + row, count);
    const vf m = vmax(max_of_rows(across_, count) * splat(s_.scale), old), shift = finite_or_zero(m);
    const vf scaled = exp2v(old - shift);
    store_n(state.m + row, m, count);
    store(base, shift);
    store_n(alpha, scaled, count);
    for (int r = 0; r < count; ++r) {
      vf e[4];
      for (int i = 0; i < 4; ++i)
        e[i] = exp2v(fma(load(s + r * kTile + i * kLanes), splat(s_.scale), splat(0.0f) - splat(base[r])));
      store(across_[r], (e[0] + e[1]) + (e[2] + e[3]));
      E::store_p(p + r * kTile, e);
    }
    store_n(state.l + row, fma(load_n(state.l + row, count), scaled, sum_of_rows(across_, count)), count);
  }

  void finish(const Piece& piece, const State& state) {
    for (int row = 0; row < rows_; ++row) {
      T* to = s_.out(piece, row);
      float l = state.l[row];
      if constexpr (requires { s_.sink(piece, row, 0.0f); })
        if (l != 0.0f) l += s_.sink(piece, row, state.m[row]);
      const vf factor = splat(l == 0.0f ? 0.0f : 1.0f / l);
      for (int d = 0; d < s_.value; d += kLanes) {
        const vf made = load(state.o + int64_t(row) * s_.value + d) * factor;
        store(to + d, select(less(vabs(made), splat(std::numeric_limits<float>::min())), splat(0.0f), made));
      }
    }
  }

  const S& s_;
  const int dim_;
  int rows_ = 0;
  bool fetching_ = false;  // `ahead_` has the next tile's lines
  elem *q_, *k_, *v_, *p_;
  float *wide_, *scores_;
  alignas(64) float across_[kLanes][kLanes] = {};
  State run_, total_;
  Lines<T> lines_, ahead_;
};

// ---- all pieces ----

// For `work` keys * rows of `elements` each.
inline int threads_for(int64_t work, int64_t elements) { return work * elements < 128 * kAlone ? 1 : team(); }

// Returns the least number of parts that share a token's heads. Splits of keys are enough work for all threads if there
// are `splits` of them; otherwise few sequences divide their heads, and each part reads all keys.
inline int64_t parts_of_heads(int64_t sequences, int64_t splits, int64_t heads, int64_t threads) {
  const bool divided = sequences < threads && (heads > kFetchRows || splits < 2 * threads);
  return divided ? std::max<int64_t>(1, std::min(threads, heads / 4)) : 1;
}

// Data shared by the threads of one call. The scene is a copy; objects behind its pointers must live as long.
template <class E, class S>
class Attending {
 public:
  Attending(const S& scene, std::vector<Piece>&& given) : scene_(scene), pieces_(std::move(given)) {
    int64_t total = 0, floats = 0;
    for (const Piece& piece : pieces_) total += piece.cost(scene.group);
    threads = threads_for(total, scene.key + scene.rest + scene.value);
    for (size_t i = 0; i < pieces_.size(); ++i) {
      Piece& piece = pieces_[i];
      const int64_t cost = piece.cost(scene.group);
      if (threads > 1 && piece.splits() > 1 && cost > total / (4 * threads)) {
        piece.partial = floats;
        floats += piece.splits() * state_floats(piece);
        divided_.push_back(int32_t(i));
        for (int s = 0; s < piece.splits(); ++s) items_.push_back({int32_t(i), s, cost / piece.splits()});
      } else {
        items_.push_back({int32_t(i), -1, cost});
      }
    }
    std::stable_sort(items_.begin(), items_.end(), [](const Item& a, const Item& b) { return a.cost > b.cost; });
    memory_ = std::make_unique<Arena>(size_t(floats) * sizeof(float));
  }

  // The work of one thread: pieces and parts of pieces; then, after all threads, joins of parts.
  void attend() {
    take(next_, int64_t(items_.size()), [&](Worker<S, E>& worker, int64_t i, int64_t after) {
      const Item& item = items_[i];
      const Piece& piece = pieces_[item.piece];
      const Place next = after >= 0 ? first_tile(items_[after]) : Place{};
      if (item.split < 0)
        worker.whole(piece, next);
      else
        worker.part(piece, item.split,
                    State::at(partial(piece) + item.split * state_floats(piece), piece.queries * scene_.group), next);
    });
  }
  void join() {
    take(next_joined_, joins(), [&](Worker<S, E>& worker, int64_t i, int64_t) {
      worker.join(pieces_[divided_[i]], partial(pieces_[divided_[i]]));
    });
  }
  int64_t joins() const { return int64_t(divided_.size()); }

  int threads;

 private:
  // Every thread takes items until no item is left.
  template <class F>
  void take(std::atomic<int64_t>& next, int64_t items, F f) {
    Worker<S, E> worker(scene_);
    for (int64_t i; (i = next++) < items;) {
      const int64_t after = next.load(std::memory_order_relaxed);  // likely this thread's next item: worth a prefetch
      f(worker, i, after < items ? after : -1);
    }
  }
  Place first_tile(const Item& item) const {
    const Piece& piece = pieces_[item.piece];
    const int64_t begin = item.split < 0 ? 0 : int64_t(piece.first_split() + item.split) * kSplit;
    return {&piece, std::max(begin, piece.low / kTile * kTile)};
  }
  int64_t state_floats(const Piece& piece) const { return State::floats(piece.queries * scene_.group, scene_.value); }
  float* partial(const Piece& piece) const { return reinterpret_cast<float*>(memory_->data()) + piece.partial; }

  const S scene_;
  std::vector<Piece> pieces_;
  std::vector<Item> items_;
  std::vector<int32_t> divided_;
  std::unique_ptr<Arena> memory_;
  std::atomic<int64_t> next_{0}, next_joined_{0};
};

// In a crew, the work is left as jobs.
template <class E, class S>
void run_later(const S& scene, std::vector<Piece>&& pieces) {
  const auto all = std::make_shared<Attending<E, S>>(scene, std::move(pieces));
  spread_later(all->threads, 1, [all](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) all->attend();
  });
  if (all->joins())
    spread_later(std::min<int64_t>(all->threads, all->joins()), 1, [all](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) all->join();
    });
}

template <class E, class S>
void run(const S& scene, std::vector<Piece>& pieces) {
  run_later<E>(scene, std::move(pieces));
  if (Crew* crew = Crew::current()) crew->drain();
}

// ---- rows of a segment ----

// Rows of a segment: q_offsets int32 [R + 1], starts int64 [R], table int64 [R, W].
struct Rows {
  const int32_t* offsets;
  const int64_t* starts;
  const int64_t* table;
  int64_t count, table_width, block;

  static Rows of(const Tensor& offsets, const Tensor& starts, const Tensor& table, int64_t block) {
    const int64_t rows = offsets.size(0) - 1;
    WEFT_CHECK(table.is_contiguous() && offsets.is_contiguous() && starts.is_contiguous(), "attend: rows");
    WEFT_CHECK(starts.size(0) == rows && table.dim() == 2 && table.size(0) == rows, "attend: rows");
    return {offsets.const_data_ptr<int32_t>(),
            starts.const_data_ptr<int64_t>(),
            table.const_data_ptr<int64_t>(),
            rows,
            table.size(1),
            block};
  }

  // Checks that every table entry to be read names a block of the cache.
  void check(int64_t tokens, int64_t blocks, int window) const {
    WEFT_CHECK(offsets[0] == 0 && offsets[count] == tokens, "attend: q_offsets do not cover q");
    for (int64_t row = 0; row < count; ++row) {
      const int64_t queries = offsets[row + 1] - offsets[row], start = starts[row];
      WEFT_CHECK(queries >= 0 && start >= 0, "attend: row ", row, " has ", queries, " tokens from position ", start);
      if (!queries) continue;
      const int64_t last = (start + queries - 1) / block;
      WEFT_CHECK(last < table_width, "attend: row ", row, " reaches block ", last, " of a table of ", table_width);
      for (int64_t entry = lowest(start, window) / block; entry <= last; ++entry) {
        const int64_t id = table[row * table_width + entry];
        WEFT_CHECK(id >= 0 && id < blocks, "attend: row ", row, " names block ", id, " of ", blocks);
      }
    }
  }

  // Cuts rows into pieces of at most `most` queries, in token order, one piece for each of `heads`.
  std::vector<Piece> cut(int most, int heads, int window) const {
    std::vector<Piece> pieces;
    for (int64_t row = 0; row < count; ++row) {
      const int32_t begin = offsets[row], end = offsets[row + 1];
      for (int32_t token = begin; token < end; token += most) {
        Piece piece{int32_t(row), 0, token, std::min(most, end - token), starts[row] + token - begin, 0, 0};
        piece.low = lowest(piece.position, window);
        piece.high = piece.position + piece.queries;
        for (piece.head = 0; piece.head < heads; ++piece.head) pieces.push_back(piece);
      }
    }
    return pieces;
  }

  // Call f(place in the tile, block id, offset in the block, count) for positions low .. high of a tile.
  template <class F>
  void blocks(int64_t row, int64_t tile, int64_t low, int64_t high, F f) const {
    const int64_t* ids = table + row * table_width;
    for (int64_t position = low; position < high;) {
      const int64_t offset = position % block, end = std::min(high, position + block - offset);
      f(int(position - tile), ids[position / block], offset, int(end - position));
      position = end;
    }
  }
};

// Lines of a tile: zeros outside low .. high; otherwise put(place in the tile, block id, offset, count).
template <class T, class F>
inline void point_lines(const Rows& rows, Lines<T>& lines, int64_t row, int64_t tile, int64_t low, int64_t high,
                        F put) {
  const int begin = int(std::clamp<int64_t>(low - tile, 0, kTile));
  const int end = int(std::clamp<int64_t>(high - tile, begin, kTile));
  for (int at = 0; at < begin; ++at) lines.zero(at);
  rows.blocks(row, tile, tile + begin, tile + end, put);
  for (int at = end; at < kTile; ++at) lines.zero(at);
}

// ---- engines by number ----

enum Engine : int64_t { kAuto = 0, kWideEngine = 1, kDot = 2, kBrgemm = 3, kAmx = 4 };

inline int64_t best_engine() {
  if (WEFT_AMX) return amx_permitted() ? kAmx : kBrgemm;
  return WEFT_BF16_DOTS ? kDot : kWideEngine;
}

// Call go(T(), E()) with the element type and the engine.
template <class F>
void with_engine(Dtype type, int64_t engine, F go) {
  if (engine == kAuto) engine = best_engine();
  if (type == Dtype::f32) return go(float(), Wide<float>());
  WEFT_CHECK(type == Dtype::bf16, "attend: bfloat16 or float32");
  if constexpr (kBrgemmBuilt)
    if (engine == kBrgemm) return go(bf16(), Brgemm());
#if WEFT_AMX
  if (engine == kAmx && amx_permitted()) return go(bf16(), Amx());
#endif
#if WEFT_AVX512_BF16 || WEFT_NEON_BF16
  if (engine == kDot) return go(bf16(), DotBf16());
#endif
  go(bf16(), Wide<bf16>());
}

}  // namespace
}  // namespace weft::attend
