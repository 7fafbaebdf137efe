// Sparse attention (DeepSeek-V3.2; DeepSeek-V4, section 2.3): each token has a separate list of entries.
//
//   list of a token   [ entries of the window, oldest first | groups, lowest first: all visible groups, or a choice ]
//   sparse_attend     a piece is one token with some of its heads; for attend_tile.h the list's places 0 .. n - 1
//                     are positions, all visible
//   sparse_select     scores of all groups visible to a token, a tile of keys at a time for several tokens; then its
//                     `top` highest, with the lowest places first among equals
//
// A row's bits depend on its query and its list alone; a score's bits on its query, its weights and one key.

#include "attend_tile.h"
#include "fp8.h"
#include "operators.h"

#include <bit>
#include <numeric>
#include <optional>

namespace weft {
namespace attend {
namespace {

// Tensors of a cache in 8 bits beside the codes: a scale for each entry, and the elements behind the codes.
struct InEight {
  const std::optional<Tensor>&scales, &exact;

  void check(const Tensor& codes, int64_t dim) const {
    if (!exact) return;
    WEFT_CHECK(codes.dim() == 3 && codes.is_contiguous() && codes.dtype() == Dtype::f8 &&
                   codes.size(2) % kLanes == 0 && codes.size(2) <= dim &&
                   codes.sizes().leading(2) == exact->sizes().leading(2),
               "sparse: codes");
    WEFT_CHECK(scales->dtype() == Dtype::f32 && scales->is_contiguous() &&
                   scales->sizes() == codes.sizes().leading(2),
               "sparse: scales");
  }
};

// A paged cache of entries of `width` elements; `dim` elements from `from` on are read. In 8 bits an entry has `coded`
// codes and a scale, and `width` elements behind the codes.
template <class T>
struct Entries {
  const T* data = nullptr;
  const int64_t* table = nullptr;
  int64_t table_width = 0, block = 1, blocks = 0, width = 0, from = 0;
  const uint8_t* codes = nullptr;
  const float* scales = nullptr;
  int64_t coded = 0;

  static Entries of(const Tensor& cache, const Tensor& table, int64_t rows, int64_t dim, bool last) {
    WEFT_CHECK(cache.dim() == 3 && cache.is_contiguous() && cache.dtype() == dtype_of<T>, "sparse: cache");
    WEFT_CHECK(table.dim() == 2 && table.is_contiguous() && table.size(0) == rows, "sparse: table");
    WEFT_CHECK(dim > 0 && dim % kLanes == 0 && dim <= std::min<int64_t>(kMaxDim, cache.size(2)), "sparse: ", dim,
               " elements of entries of ", cache.size(2));
    return {cache.const_data_ptr<T>(),
            table.const_data_ptr<int64_t>(),
            table.size(1),
            cache.size(1),
            cache.size(0),
            cache.size(2),
            last ? cache.size(2) - dim : 0};
  }

  // The first `dim` elements of the entries of `cache`, or of the codes `cache` and what is beside the codes.
  static Entries first(const Tensor& cache, const InEight& beside, const Tensor& table, int64_t rows, int64_t dim) {
    WEFT_CHECK(beside.scales.has_value() == beside.exact.has_value(), "sparse: scales without exact elements");
    if (!beside.exact) return of(cache, table, rows, dim, false);
    const Tensor& exact = *beside.exact;
    WEFT_CHECK(exact.dim() == 3 && exact.is_contiguous() && exact.dtype() == dtype_of<T>, "sparse: exact elements");
    WEFT_CHECK(table.dim() == 2 && table.is_contiguous() && table.size(0) == rows, "sparse: table");
    beside.check(cache, dim);
    WEFT_CHECK(dim % kLanes == 0 && dim <= std::min<int64_t>(kMaxDim, cache.size(2) + exact.size(2)), "sparse: ", dim,
               " elements of entries of ", cache.size(2) + exact.size(2));
    return {exact.const_data_ptr<T>(),
            table.const_data_ptr<int64_t>(),
            table.size(1),
            exact.size(1),
            exact.size(0),
            exact.size(2),
            0,
            static_cast<const uint8_t*>(cache.const_data_ptr()),
            beside.scales->const_data_ptr<float>(),
            cache.size(2)};
  }

  int64_t place(int64_t row, int64_t entry) const {
    return table[row * table_width + entry / block] * block + entry % block;
  }
  const T* at(int64_t row, int64_t entry) const { return data + place(row, entry) * width + from; }

  // The first `dim` elements of an entry. An entry in 8 bits is dequantized to `copy`.
  const T* line(int64_t row, int64_t entry, int64_t dim, T* copy) const {
    if (!codes) return at(row, entry);
    const int64_t line = place(row, entry);
    dequantize_line(codes + line * coded, scales[line], coded, copy);
    std::memcpy(copy + coded, data + line * width, size_t(dim - coded) * sizeof(T));
    return copy;
  }

  // Checks that every table entry from `low` on, below `high`, names a block of the cache.
  void check(int64_t row, int64_t low, int64_t high) const {
    if (low >= high) return;
    WEFT_CHECK((high - 1) / block < table_width, "sparse: row ", row, " reaches entry ", high - 1, " of a table of ",
               table_width);
    for (int64_t i = low / block; i <= (high - 1) / block; ++i) {
      const int64_t id = table[row * table_width + i];
      WEFT_CHECK(id >= 0 && id < blocks, "sparse: row ", row, " names block ", id, " of ", blocks);
    }
  }
};

// Calls f(row, token, position) for every token.
template <class F>
void over_tokens(const Tensor& offsets, const Tensor& starts, int64_t tokens, F f) {
  WEFT_CHECK(offsets.is_contiguous() && starts.is_contiguous() && offsets.size(0) == starts.size(0) + 1,
             "sparse: rows");
  const int32_t* bounds = offsets.const_data_ptr<int32_t>();
  const int64_t* first = starts.const_data_ptr<int64_t>();
  WEFT_CHECK(bounds[0] == 0 && bounds[starts.size(0)] == tokens, "sparse: q_offsets do not cover q");
  for (int64_t row = 0; row < starts.size(0); ++row) {
    WEFT_CHECK(bounds[row] <= bounds[row + 1] && first[row] >= 0, "sparse: row ", row);
    for (int64_t token = bounds[row]; token < bounds[row + 1]; ++token) f(row, token, first[row] + token - bounds[row]);
  }
}

// --- attention ------------------------------------------------------------------------------------------------

struct List {
  int64_t row;
  int64_t low;     // first entry of the window
  int64_t window;  // number of entries of the window
  int64_t groups;
};

template <class Element>
struct Chosen {
  using T = Element;
  const T* q;
  T* result;
  int64_t q_stride, out_stride;  // between tokens
  Entries<T> entries, groups;
  const std::vector<List>& lists;  // one list per token
  const int64_t* chosen;           // [tokens, top], or null
  int64_t top;
  int group;
  float scale;
  const float* sinks;  // per head, times log2(e), or null
  int key, value;
  int rest = 0, copied = entries.codes || groups.codes ? key : 0, window = 0;

  template <class E>
  void pack_q(const Piece& piece, typename E::elem* to) const {
    E::pack_q(q + piece.token * q_stride + int64_t(piece.head) * group * key, group * key, to);
  }
  void point(Lines<T>& lines, const Piece& piece, int64_t tile, int64_t low, int64_t high) const {
    const List& list = lists[size_t(piece.token)];
    for (int at = 0; at < kTile; ++at) {
      const int64_t place = tile + at;
      if (place < low || place >= high) {
        lines.zero(at);
        continue;
      }
      const int64_t number = place - list.window;
      T* copy = copied ? lines.copies + at * copied : nullptr;
      lines.k[at] = lines.v[at] =
          number < 0 ? entries.line(list.row, list.low + place, key, copy)
                     : groups.line(list.row, chosen ? chosen[piece.token * top + number] : number, key, copy);
    }
  }
  float sink(const Piece& piece, int row, float most) const {
    return sinks ? std::exp2(sinks[int64_t(piece.head) * group + row] - most) : 0.0f;
  }
  T* out(const Piece& piece, int row) const {
    return result + piece.token * out_stride + (int64_t(piece.head) * group + row) * value;
  }
};

// Number of groups chosen by a token. The groups come first, ascending; -1 follows.
inline int64_t count_chosen(const int64_t* chosen, int64_t top, int64_t limit) {
  int64_t count = 0;
  for (; count < top && chosen[count] >= 0; ++count)
    WEFT_CHECK(chosen[count] < limit && (!count || chosen[count - 1] < chosen[count]), "sparse_attend: group ",
               chosen[count], " of ", limit, " chosen after ", count ? chosen[count - 1] : -1);
  return count;
}

}  // namespace

// q: [T, heads, dim]; out: [T, heads, value]; entries: [blocks, block, width >= dim] at positions; groups: the same at
// multiples of `ratio`; chosen: int64 [T, top]; sinks: float [heads]. In 8 bits entries and groups are codes, with
// float scales [blocks, block] and exact elements behind the codes [blocks, block, ..].
void sparse_attend(const Tensor& q, const Tensor& out, const Tensor& offsets, const Tensor& starts,
                   const std::optional<Tensor>& entries, const std::optional<Tensor>& entry_table, int64_t window,
                   const std::optional<Tensor>& groups, const std::optional<Tensor>& group_table, int64_t ratio,
                   const std::optional<Tensor>& chosen, const std::optional<Tensor>& sinks, double scale,
                   int64_t engine, const std::optional<Tensor>& entry_scales,
                   const std::optional<Tensor>& entry_exact, const std::optional<Tensor>& group_scales,
                   const std::optional<Tensor>& group_exact) {
  WEFT_CHECK(q.dim() == 3 && out.dim() == 3 && out.size(0) == q.size(0) && out.size(1) == q.size(1) &&
                 q.dtype() == out.dtype(),
             "sparse_attend: shapes");
  const int64_t tokens = q.size(0), heads = q.size(1), dim = q.size(2), value = out.size(2);
  WEFT_CHECK(value > 0 && value <= dim && value % kLanes == 0, "sparse_attend: values of ", value);
  WEFT_CHECK(q.stride(2) == 1 && q.stride(1) == dim && out.stride(2) == 1 && out.stride(1) == value,
             "sparse_attend: strides");
  WEFT_CHECK(entries.has_value() == entry_table.has_value() && groups.has_value() == group_table.has_value() &&
                 (!entries || window > 0) && ratio > 0 && scale > 0,
             "sparse_attend: caches");
  WEFT_CHECK(!chosen || (groups && chosen->dtype() == Dtype::i64 && chosen->is_contiguous() && chosen->dim() == 2 &&
                         chosen->size(0) == tokens),
             "sparse_attend: chosen");
  WEFT_CHECK(!sinks || (sinks->dtype() == Dtype::f32 && sinks->numel() == heads && sinks->is_contiguous()),
             "sparse_attend: sinks");
  if (tokens == 0) return;
  std::vector<float> drawn;
  for (int64_t i = 0; sinks && i < heads; ++i) drawn.push_back(sinks->const_data_ptr<float>()[i] * kLog2E);
  with_engine(q.dtype(), engine, [&]<class T, class E>(T, E) {
    const int64_t rows = starts.size(0), top = chosen ? chosen->size(1) : 0;
    Entries<T> near, far;
    if (entries) near = Entries<T>::first(*entries, {entry_scales, entry_exact}, *entry_table, rows, dim);
    if (groups) far = Entries<T>::first(*groups, {group_scales, group_exact}, *group_table, rows, dim);
    const int64_t* picks = chosen ? chosen->const_data_ptr<int64_t>() : nullptr;
    std::vector<List> lists;
    lists.reserve(size_t(tokens));
    int64_t splits = 0;
    over_tokens(offsets, starts, tokens, [&](int64_t row, int64_t token, int64_t position) {
      List list{row, entries ? lowest(position, int(window)) : 0, 0, 0};
      const int64_t limit = groups ? (position + 1) / ratio : 0;
      if (entries) list.window = position + 1 - list.low;
      list.groups = picks ? count_chosen(picks + token * top, top, limit) : limit;
      near.check(row, list.low, list.low + list.window);
      if (!picks)
        far.check(row, 0, list.groups);
      else if (list.groups)
        far.check(row, picks[token * top], picks[token * top + list.groups - 1] + 1);
      lists.push_back(list);
      splits += (list.window + list.groups + kSplit - 1) / kSplit;
    });
    int64_t parts = parts_of_heads(tokens, splits, heads, num_threads());
    while (heads % parts || heads / parts > kRows) ++parts;
    const Chosen<T> scene{q.const_data_ptr<T>(),
                          out.mutable_data_ptr<T>(),
                          q.stride(0),
                          out.stride(0),
                          near,
                          far,
                          lists,
                          picks,
                          top,
                          int(heads / parts),
                          float(scale * 1.4426950408889634),
                          sinks ? drawn.data() : nullptr,
                          int(dim),
                          int(value)};
    std::vector<Piece> pieces;
    for (int64_t token = 0; token < tokens; ++token) {
      const List& list = lists[size_t(token)];
      const int64_t count = list.window + list.groups;
      if (!count) {  // nothing visible
        std::fill_n(scene.result + token * scene.out_stride, heads * value, T(0.0f));
        continue;
      }
      for (int64_t part = 0; part < parts; ++part)
        pieces.push_back({int32_t(list.row), int32_t(part), int32_t(token), 1, count - 1, 0, count});
    }
    run<E>(scene, pieces);
  });
}

namespace {

// --- the choice of groups -------------------------------------------------------------------------------------

constexpr int64_t kTogether = 8;      // tokens with a common packed tile
constexpr int64_t kTiles = 16;        // tiles per item of work
constexpr int64_t kScores = 4 << 20;  // scores in memory at a time (one token may have more)

struct Asked {
  int64_t row, token, limit;
};

// The scores of tokens of one sequence for the groups of some tiles, added over heads in order.
template <class T, class E>
class Scorer {
  using elem = typename E::elem;

 public:
  Scorer(const T* q, int64_t q_stride, const float* weights, int heads, int dim, const Entries<T>& keys)
      : q_(q), q_stride_(q_stride), weights_(weights), heads_(heads), dim_(dim), keys_(keys) {
    static thread_local Kept kept;
    const size_t queries = size_t(kTogether) * heads * dim * sizeof(elem), tile = size_t(kTile) * dim * sizeof(elem);
    const size_t wide = size_t(kTile) * dim * sizeof(float), made = (E::kBlock + kLanes) * kTile * sizeof(float);
    const auto up = [](size_t bytes) { return (bytes + 63) / 64 * 64; };
    char* base = kept.at_least(up(queries) + up(tile) + up(wide) + up(made));
    packed_ = reinterpret_cast<elem*>(base);
    k_ = reinterpret_cast<elem*>(base + up(queries));
    wide_ = reinterpret_cast<float*>(base + up(queries) + up(tile));
    made_ = reinterpret_cast<float*>(base + up(queries) + up(tile) + up(wide));
  }
  ~Scorer() { E::release(); }

  // Write scores[i * stride + group] of asked[i], for groups begin .. end - 1. begin must be a multiple of kTile.
  void score(const Asked* asked, int64_t count, int64_t begin, int64_t end, float* scores, int64_t stride) {
    for (int64_t i = 0; i < count; ++i)
      E::pack_q(q_ + asked[i].token * q_stride_, heads_ * dim_, packed_ + i * heads_ * dim_);
    int64_t most = 0;
    for (int64_t i = 0; i < count; ++i) most = std::max(most, asked[i].limit);
    end = std::min(end, most);
    const T *lines[kTile], *ahead[kTile];
    const auto point = [&](int64_t tile, const T** to) {
      for (int at = 0; at < kTile; ++at)
        to[at] = tile + at < most ? keys_.at(asked[0].row, tile + at) : reinterpret_cast<const T*>(kZeros);
    };
    const bool fetched = count * heads_ <= kFetchRows;  // with more rows the computation of a tile is long enough
    if (begin < end) point(begin, ahead);
    for (int64_t tile = begin; tile < end; tile += kTile) {
      std::copy_n(ahead, kTile, lines);
      if (tile + kTile < end) point(tile + kTile, ahead);
      E::pack_k(lines, fetched && tile + kTile < end ? ahead : nullptr, dim_, k_, wide_);
      for (int64_t i = 0; i < count; ++i)
        if (tile < asked[i].limit)
          sum(packed_ + i * heads_ * dim_, weights_ + asked[i].token * heads_, scores + i * stride + tile);
    }
  }

 private:
  void sum(const elem* q, const float* weights, float* to) {
    vf sums[kTile / kLanes];
    for (vf& x : sums) x = splat(0.0f);
    for (int head = 0; head < heads_; head += E::kBlock) {
      const int count = std::min(heads_ - head, E::kBlock);
      E::gemm(count, kTile, dim_, q + int64_t(head) * dim_, dim_, k_, made_, nullptr, true);
      for (int r = 0; r < count; ++r)
        for (int n = 0; n < kTile / kLanes; ++n)
          sums[n] = fma(splat(weights[head + r]), vmax(load(made_ + r * kTile + n * kLanes), splat(0.0f)), sums[n]);
    }
    for (int n = 0; n < kTile / kLanes; ++n) store(to + n * kLanes, sums[n] + splat(0.0f));  // no -0
  }

  const T* q_;
  int64_t q_stride_;
  const float* weights_;
  int heads_, dim_;
  const Entries<T>& keys_;
  elem *packed_, *k_;
  float *wide_, *made_;
};

// Scores as integers of the same order: -NaN, -inf .. -0, 0 .. inf, NaN. Padded with 0 to whole vectors.
struct Ascending {
  std::vector<uint32_t> keys;
  uint32_t all, any;  // bits set in every score, and bits set in some score

  void take(const float* scores, int64_t count) {
    keys.resize(size_t((count + kLanes - 1) / kLanes * kLanes));
    std::fill(keys.begin() + count, keys.end(), 0u);
    uint32_t *to = keys.data(), in_all = ~0u, in_any = 0;
    for (int64_t i = 0; i < count; ++i) {
      const uint32_t bits = float_to_bits(scores[i]), key = bits ^ (uint32_t(int32_t(bits) >> 31) | 0x80000000u);
      to[i] = key;
      in_all &= key;
      in_any |= key;
    }
    all = in_all;
    any = in_any;
  }

  // Number of scores of `low` or more; `low` is never 0.
  int64_t reach(uint32_t low) const {
    int64_t found = 0;
    for (size_t i = 0; i < keys.size(); i += kLanes) found += std::popcount(at_least(&keys[i], low));
    return found;
  }
};

// Writes the places of the `top` highest of `count` scores, ascending; the lowest places win among equals. top <=
// count. The threshold is found bit by bit, in at most 32 passes of compare and count, for any scores.
inline void highest(const float* scores, int64_t count, int64_t top, int64_t* to) {
  static thread_local Ascending sorted;
  sorted.take(scores, count);
  int bit = int(std::bit_width(sorted.all ^ sorted.any));
  uint32_t low = bit < 32 ? sorted.any >> bit << bit : 0;  // all scores begin with these bits
  while (bit-- > 0) {
    const uint32_t more = low | 1u << bit;
    const int64_t found = sorted.reach(more);
    if (found >= top) low = more;
    if (found == top) break;
  }
  int64_t equals = low < ~0u ? top - sorted.reach(low + 1) : top;  // number of places for scores equal to `low`
  int64_t made = 0;
  for (int64_t i = 0; made < top; i += kLanes) {
    const uint32_t reached = at_least(&sorted.keys[size_t(i)], low);
    if (!reached) continue;
    const uint32_t above = low < ~0u ? at_least(&sorted.keys[size_t(i)], low + 1) : 0;
    uint32_t equal = reached & ~above;
    while (std::popcount(equal) > equals) equal ^= std::bit_floor(equal);
    equals -= std::popcount(equal);
    for (uint32_t taken = above | equal; taken; taken &= taken - 1) to[made++] = i + std::countr_zero(taken);
  }
}

}  // namespace

// q [T, heads, dim]; weights float [T, heads]; cache [blocks, per block, width], entries end with a key of dim. Returns
// int64 [T, top]: ascending, then -1.
Tensor sparse_select(const Tensor& q, const Tensor& weights, const Tensor& cache, const Tensor& offsets,
                     const Tensor& starts, const Tensor& table, int64_t ratio, int64_t top, int64_t engine) {
  WEFT_CHECK(q.dim() == 3 && weights.dim() == 2 && weights.sizes() == q.sizes().leading(2) &&
                 weights.dtype() == Dtype::f32 && weights.is_contiguous(),
             "sparse_select: shapes");
  WEFT_CHECK(q.stride(2) == 1 && q.stride(1) == q.size(2) && ratio > 0 && top > 0, "sparse_select: strides");
  const int64_t tokens = q.size(0);
  Tensor made = empty_tensor({tokens, top}, Dtype::i64);
  int64_t* to = made.mutable_data_ptr<int64_t>();
  with_engine(q.dtype(), engine, [&]<class T, class E>(T, E) {
    const Entries<T> keys = Entries<T>::of(cache, table, starts.size(0), q.size(2), true);
    std::vector<Asked> asked;
    over_tokens(offsets, starts, tokens, [&](int64_t row, int64_t token, int64_t position) {
      const int64_t limit = (position + 1) / ratio;
      int64_t* mine = to + token * top;
      if (limit > top) {
        keys.check(row, 0, limit);
        asked.push_back({row, token, limit});
        return;
      }
      std::iota(mine, mine + limit, 0);
      std::fill(mine + limit, mine + top, -1);
    });
    std::vector<float> scores;
    for (size_t first = 0; first < asked.size();) {
      // As many tokens as there is room for scores; tokens of one group belong to one sequence.
      std::vector<std::pair<size_t, size_t>> shared;
      int64_t stride = 0;
      size_t end = first;
      for (; end < asked.size(); ++end) {
        const int64_t wanted = std::max(stride, (asked[end].limit + kTile - 1) / kTile * kTile);
        if (end > first && wanted * int64_t(end + 1 - first) > kScores) break;
        stride = wanted;
        if (end == first || asked[end].row != asked[end - 1].row || end - shared.back().first == kTogether)
          shared.emplace_back(end, end);
        shared.back().second = end + 1;
      }
      scores.resize(std::max(scores.size(), size_t(stride) * (end - first)));
      const int64_t chunks = (stride / kTile + kTiles - 1) / kTiles, items = int64_t(shared.size()) * chunks;
      spread(items, 1, [&](int64_t begin, int64_t stop) {
        Scorer<T, E> scorer(q.const_data_ptr<T>(), q.stride(0), weights.const_data_ptr<float>(), int(q.size(1)),
                            int(q.size(2)), keys);
        for (int64_t i = begin; i < stop; ++i) {
          const auto [low, high] = shared[size_t(i / chunks)];
          const int64_t from = i % chunks * kTiles * kTile;
          scorer.score(&asked[low], int64_t(high - low), from, std::min(stride, from + kTiles * kTile),
                       scores.data() + int64_t(low - first) * stride, stride);
        }
      });
      spread(int64_t(end - first), 1, [&](int64_t begin, int64_t stop) {
        for (int64_t i = int64_t(first) + begin; i < int64_t(first) + stop; ++i)
          highest(scores.data() + (i - int64_t(first)) * stride, asked[size_t(i)].limit, top,
                  to + asked[size_t(i)].token * top);
      });
      first = end;
    }
  });
  return made;
}

}  // namespace attend
}  // namespace weft
