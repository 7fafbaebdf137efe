// Latent attention (DeepSeek-V2, arXiv 2405.04434): one line [latent | rotated key] per token serves all heads.
//
//   latent_rope_cache   [q | latent | key] of a token: q normalized; latent normalized, key rotated -> cache line
//
//   absorbed   q_nope x key matrix -> a query as wide as a line; attention over the lines, with latents as values;
//              latent result x value matrix -> out. A piece has the rows of some heads.
//
//   expanded   keys and values of each head are made from lines, for as many positions at a time as a budget of
//              memory allows; then attention of one head at a time. The state of a query is carried from one part
//              of the positions to the next, so the budget changes no bit.
//
//              line                      expanded for a head
//              [latent      | key  ]     [k nope | v]     key of the head: k nope and, from the line, the rotated key
//
// Queries arrive unrotated from their projection and are rotated during packing. Core attention is attend_tile.h, so a
// row's bits do not depend on other rows within each of the two forms. Products with the matrices are in gemm_block.h.

#include "attend_tile.h"
#include "fp8.h"
#include "gemm_block.h"
#include "operators.h"
#include "rows.h"

#include <optional>

namespace weft {
namespace {

constexpr int64_t kProductRows = 112;       // eight tiles
constexpr int64_t kProductGrain = 1 << 15;  // matrix elements below which waking a thread costs more than it gains

template <class T>
using FormatOf = std::conditional_t<std::is_same_v<T, bf16>, Bf16, F32>;

// One matrix [outputs, inputs] per head, packed as in gemm_tile.h: [heads, blocks, steps, 32, k per step].
template <class T>
struct HeadMatrices {
  using F = FormatOf<T>;
  const uint8_t* data;
  int64_t inputs, outputs;

  static HeadMatrices of(const Tensor& packed, int64_t heads, int64_t inputs, int64_t outputs) {
    WEFT_CHECK(packed.dim() == 5 && packed.is_contiguous() && packed.size(0) == heads &&
                   packed.size(1) == divide_up(outputs, kBlock) && packed.size(2) == divide_up(inputs, F::depth) &&
                   packed.size(3) == kBlock && packed.size(4) == F::depth,
               "latent: packed matrices");
    return {static_cast<const uint8_t*>(packed.const_data_ptr()), inputs, outputs};
  }

  // out[row] = matrix of the head * x[row], for `rows` rows.
  void multiply(int64_t head, const T* x, int64_t x_stride, int64_t rows, T* out, int64_t out_stride) const {
    const Layout layout{inputs, outputs, false};
    const int64_t block_bytes = divide_up(inputs, F::depth) * F::bytes, blocks = layout.blocks();
    const Product<T> product{
        layout,           x,   rows,      x_stride, data + head * blocks * block_bytes, nullptr, nullptr,
        Activation::none, out, out_stride};
    const auto summed = for_rows(product, 0, rows);
    Finish finish;
    for (int64_t block = 0; block < blocks; ++block) {
      prepare(product, block, finish);
      run_block<F>(summed, product.weights + block * block_bytes, finish, 0, rows, block * layout.width());
    }
  }
};

// Calls f(head, first row, rows) for every head and part of the rows, on a useful number of threads. May be left
// behind.
template <class F>
void over_heads(int64_t heads, int64_t rows, int64_t elements, F f) {
  const int64_t parts = divide_up(rows, kProductRows);
  const int64_t work = std::max<int64_t>(1, elements * std::min<int64_t>(rows, 4));  // rows may be 0
  spread_later(heads * parts, std::max<int64_t>(1, kProductGrain / work), [=](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t first = i / heads * kProductRows;
      f(i % heads, first, std::min(kProductRows, rows - first));
    }
    release_sums();
  });
}

}  // namespace

// x [T, heads, inputs], strided except in its last dim -> [T, heads, outputs], each head with its own matrix.
Tensor latent_multiply(const Tensor& x, const Tensor& packed, int64_t outputs) {
  WEFT_CHECK(x.dim() == 3 && x.stride(2) == 1 && outputs > 0, "latent_multiply: shapes");
  const int64_t tokens = x.size(0), heads = x.size(1), inputs = x.size(2);
  Tensor made = empty_tensor({tokens, heads, outputs}, x.dtype());
  by_dtype(x, "latent_multiply", [&]<class T>(T) {
    const auto matrices = HeadMatrices<T>::of(packed, heads, inputs, outputs);
    const T* from = x.const_data_ptr<T>();
    T* to = made.mutable_data_ptr<T>();
    const int64_t row_stride = x.stride(0), head_stride = x.stride(1);
    over_heads(heads, tokens, inputs * outputs, [=](int64_t head, int64_t first, int64_t count) {
      matrices.multiply(head, from + first * row_stride + head * head_stride, row_stride, count,
                        to + (first * heads + head) * outputs, heads * outputs);
    });
  });
  return made;
}

namespace {

// --- rotation -------------------------------------------------------------------------------------------------

inline void take_pairs(const bf16* from, int n, vf& first, vf& second) {
  Pairs x{};
  std::memcpy(&x, from, size_t(n) * 2 * sizeof(bf16));
  first = firsts(x);
  second = seconds(x);
}

inline void take_pairs(const float* from, int n, vf& first, vf& second) {
  float a[kLanes] = {}, b[kLanes] = {};
  for (int i = 0; i < n; ++i) a[i] = from[2 * i], b[i] = from[2 * i + 1];
  first = load(a);
  second = load(b);
}

struct Angles {
  const float *cos, *sin;  // [tokens, half]
  int64_t half;
  bool interleaved;  // input pairs are neighbours; output pairs are halves

  static Angles of(const Tensor& cos, const Tensor& sin, int64_t tokens, bool interleaved) {
    WEFT_CHECK(cos.dim() == 2 && cos.size(0) == tokens && cos.sizes() == sin.sizes() && cos.is_contiguous() &&
                   sin.is_contiguous() && cos.dtype() == Dtype::f32 && sin.dtype() == Dtype::f32,
               "latent: angles");
    return {cos.const_data_ptr<float>(), sin.const_data_ptr<float>(), cos.size(1), interleaved};
  }

  template <class T>
  void rotate(int64_t token, const T* from, T* to) const {
    in_steps(half, [&](int64_t i, int n) {
      vf a, b;
      if (interleaved)
        take_pairs(from + 2 * i, n, a, b);
      else
        a = take(from + i, n), b = take(from + half + i, n);
      const vf c = take(cos + token * half + i, n), s = take(sin + token * half + i, n);
      put(to + i, a * c - b * s, n);
      put(to + half + i, b * c + a * s, n);
    });
  }
};

// Check a cache of lines. In 8 bits: codes of latents, their scales, and rotated keys in the model's dtype.
void check_lines(const Tensor& cache, const std::optional<Tensor>& scales, const std::optional<Tensor>& rotated,
                 Dtype type, int64_t lora, int64_t rope) {
  WEFT_CHECK(scales.has_value() == rotated.has_value(), "latent: scales without keys");
  WEFT_CHECK(cache.is_contiguous() && cache.size(2) == (scales ? lora : lora + rope) &&
                 cache.dtype() == (scales ? Dtype::f8 : type),
             "latent: cache");
  WEFT_CHECK(!scales || (lora % kLanes == 0 && lora <= attend::kMaxDim && scales->dtype() == Dtype::f32 &&
                         scales->is_contiguous() && scales->sizes() == cache.sizes().leading(2)),
             "latent: scales");
  WEFT_CHECK(!scales || (rotated->dtype() == type && rotated->is_contiguous() && rotated->dim() == 3 &&
                         rotated->sizes().leading(2) == cache.sizes().leading(2) && rotated->size(2) == rope),
             "latent: rotated keys");
}

// --- the cache line -------------------------------------------------------------------------------------------

}  // namespace

// joined [T, first + lora + rope]. Returns the first part normalized by q_weight [first]. Without q_weight the first
// part is untouched, and an empty tensor is returned. A line may be longer than its latent and key.
Tensor latent_rope_cache(const Tensor& joined, const std::optional<Tensor>& q_weight, const Tensor& weight, double eps,
                         const Tensor& cos, const Tensor& sin, bool interleaved, const Tensor& cache,
                         const Tensor& writes, const std::optional<Tensor>& scales,
                         const std::optional<Tensor>& rotated) {
  WEFT_CHECK(joined.dim() == 2 && joined.stride(1) == 1 && weight.dim() == 1 && weight.is_contiguous(),
             "latent_rope_cache: shapes");
  const int64_t tokens = joined.size(0), lora = weight.size(0);
  const Angles angles = Angles::of(cos, sin, tokens, interleaved);
  const int64_t rope = 2 * angles.half, first = joined.size(1) - lora - rope;
  WEFT_CHECK(first >= 0 && cache.dim() == 3 && (!rotated || rotated->dim() == 3), "latent_rope_cache: cache");
  // Elements behind a latent: the rotated key, and possibly elements that others write.
  const int64_t behind = rotated ? rotated->size(2) : cache.size(2) - lora;
  WEFT_CHECK(behind >= rope, "latent_rope_cache: ", behind, " elements behind a latent, and keys of ", rope);
  check_lines(cache, scales, rotated, joined.dtype(), lora, behind);
  WEFT_CHECK(weight.dtype() == joined.dtype(), "latent_rope_cache: dtypes");
  WEFT_CHECK(
      !q_weight || (q_weight->numel() == first && q_weight->is_contiguous() && q_weight->dtype() == joined.dtype()),
      "latent_rope_cache: norm weight");
  WEFT_CHECK(writes.dim() == 1 && writes.size(0) == tokens && writes.is_contiguous(), "latent_rope_cache: writes");
  const int64_t* place = writes.const_data_ptr<int64_t>();
  const int64_t places = cache.size(0) * cache.size(1);
  for (int64_t t = 0; t < tokens; ++t)
    WEFT_CHECK(place[t] >= 0 && place[t] < places, "latent_rope_cache: token ", t, " goes to ", place[t], " of ",
               places);
  Tensor q = empty_tensor({tokens, q_weight ? first : 0}, joined.dtype());
  by_dtype(joined, "latent_rope_cache", [&]<class T>(T) {
    const T *from = joined.const_data_ptr<T>(), *w = weight.const_data_ptr<T>();
    const T* qw = q_weight ? q_weight->const_data_ptr<T>() : nullptr;
    T *to = q.mutable_data_ptr<T>(), *lines = scales ? nullptr : cache.mutable_data_ptr<T>();
    uint8_t* codes = scales ? static_cast<uint8_t*>(cache.mutable_data_ptr()) : nullptr;
    const int64_t stride = joined.stride(0);
    over_rows_later(tokens, joined.size(1), [=](int64_t begin, int64_t end) {
      T latent[attend::kMaxDim];
      for (int64_t t = begin; t < end; ++t) {
        const T* row = from + t * stride;
        T* line = codes ? latent : lines + place[t] * (lora + behind);
        if (qw) norm_row<T>(row, nullptr, qw, float(eps), first, nullptr, to + t * first);
        norm_row<T>(row + first, nullptr, w, float(eps), lora, nullptr, line);
        if (codes) scales->mutable_data_ptr<float>()[place[t]] = quantize_line(latent, lora, codes + place[t] * lora);
        T* key = codes ? rotated->mutable_data_ptr<T>() + place[t] * behind : line + lora;
        angles.rotate(t, row + first + lora, key);
      }
    });
  });
  return q;
}

namespace attend {
namespace {

constexpr size_t kBudget = 16 << 20;  // bytes of queries, or of expanded keys and values, at once

// Inputs of both forms.
template <class Element>
struct Given {
  using T = Element;
  Rows rows;
  const T* q;
  T* out;
  int64_t q_stride, out_stride;  // between tokens
  const T* cache;
  const uint8_t* codes;  // 8-bit cache, instead of `cache`, with
  const float* scales;   // a scale for each line, and
  const T* rotated;      // the lines' keys
  Angles angles;
  int heads, nope, rope, lora, value, window;
  float scale;  // times log2(e)

  int width() const { return lora + rope; }
  const T* query(int64_t token, int64_t head) const { return q + token * q_stride + head * (nope + rope); }
  const T* line(int64_t id, int64_t offset) const { return cache + (id * rows.block + offset) * width(); }
  int key_stride() const { return codes ? rope : width(); }
  const T* key_of(int64_t id, int64_t offset) const {
    return codes ? rotated + (id * rows.block + offset) * rope : line(id, offset) + lora;
  }
  void take_latent(int64_t id, int64_t offset, T* to) const {
    const int64_t at = id * rows.block + offset;
    if (codes)
      dequantize_line(codes + at * lora, scales[at], lora, to);
    else
      std::memcpy(to, line(id, offset), size_t(lora) * sizeof(T));
  }
};

// --- absorbed -------------------------------------------------------------------------------------------------

template <class Element>
struct Absorbed {
  using T = Element;
  Given<T> given;
  const T* q;  // [tokens, heads, width] from token `begin` on
  T* result;   // [tokens, heads, lora]
  int64_t begin;
  int group, window;
  float scale;
  int key, rest, value;
  int copied = given.codes ? key : 0;

  int64_t place(const Piece& piece, int row) const {
    return (piece.token - begin + row / group) * given.heads + int64_t(piece.head) * group + row % group;
  }
  template <class E>
  void pack_q(const Piece& piece, typename E::elem* to) const {
    for (int t = 0; t < piece.queries; ++t)
      E::pack_q(q + place(piece, t * group) * key, group * key, to + t * group * key);
  }
  void point(Lines<T>& lines, const Piece& piece, int64_t tile, int64_t low, int64_t high) const {
    point_lines(given.rows, lines, piece.row, tile, low, high, [&](int at, int64_t id, int64_t offset, int count) {
      for (int i = 0; copied && i < count; ++i) {
        T* to = lines.copies + (at + i) * copied;
        given.take_latent(id, offset + i, to);
        std::memcpy(to + given.lora, given.key_of(id, offset + i), size_t(given.rope) * sizeof(T));
        lines.k[at + i] = lines.v[at + i] = to;
      }
      if (copied) return;
      const T* line = given.line(id, offset);
      for (int i = 0; i < count; ++i) lines.k[at + i] = lines.v[at + i] = line + i * key;
    });
  }
  T* out(const Piece& piece, int row) const { return result + place(piece, row) * value; }
};

// Returns the number of pieces that share a query's heads. Few long sequences are divided over the threads.
template <class T>
int head_parts(const Given<T>& given) {
  int64_t work = 0, splits = 0;
  for (const Piece& piece : given.rows.cut(kRows, 1, given.window)) {
    work += piece.cost(given.heads);
    splits += piece.splits();
  }
  const int64_t threads = threads_for(work, given.width() + given.lora);
  for (int64_t parts = parts_of_heads(given.rows.count, splits, given.heads, threads);; ++parts)
    if (given.heads % parts == 0 && given.heads / parts <= kRows) return int(parts);
}

// Optional memory around the products, [tokens, heads, lora] each: `more` is added to the absorbed queries, and `sums`
// takes the latent results.
template <class T>
struct Latents {
  const T* more;
  int64_t token, head;  // strides of `more`
  T* sums;

  static Latents of(const std::optional<Tensor>& more, const std::optional<Tensor>& sums, const Tensor& q,
                    int64_t lora) {
    for (const auto* one : {&more, &sums})
      WEFT_CHECK(!*one || ((*one)->dim() == 3 && (*one)->size(0) == q.size(0) && (*one)->size(1) == q.size(1) &&
                           (*one)->size(2) == lora && (*one)->stride(2) == 1 && (*one)->dtype() == q.dtype()),
                 "latent: products of adapters");
    WEFT_CHECK(!sums || sums->is_contiguous(), "latent: sums");
    return {more ? more->const_data_ptr<T>() : nullptr, more ? more->stride(0) : 0, more ? more->stride(1) : 0,
            sums ? sums->mutable_data_ptr<T>() : nullptr};
  }

  void add(int64_t row, int64_t at, int64_t lora, T* to) const {
    const T* from = more + row * token + at * head;
    in_steps(lora, [&](int64_t i, int lanes) { put(to + i, take(to + i, lanes) + take(from + i, lanes), lanes); });
  }
};

template <class T, class E>
void absorbed(const Given<T>& given, const HeadMatrices<T>& keys, const HeadMatrices<T>& values,
              const Latents<T>& latents) {
  const int parts = head_parts(given), group = given.heads / parts, width = given.width();
  const std::vector<Piece> all = given.rows.cut(std::max(1, kRows / group), parts, given.window);
  const int64_t each = int64_t(given.heads) * (width + given.lora) * int64_t(sizeof(T));  // bytes per token
  const int64_t most = std::max<int64_t>(1, int64_t(kBudget) / each);
  static thread_local Kept kept;
  for (size_t i = 0; i < all.size();) {
    const int64_t begin = all[i].token;
    int64_t end = begin;
    std::vector<Piece> pieces;
    for (; i < all.size() && (end == begin || all[i].token + all[i].queries - begin <= most); ++i) {
      pieces.push_back(all[i]);
      end = all[i].token + all[i].queries;
    }
    const size_t bytes = size_t((end - begin) * each);
    if (Crew* crew = Crew::current(); crew && !kept.holds(bytes)) crew->drain();  // pending loops use the old memory
    T* q = reinterpret_cast<T*>(kept.at_least(bytes));
    T* latent = latents.sums ? latents.sums + begin * given.heads * given.lora
                             : q + (end - begin) * given.heads * width;
    over_heads(given.heads, end - begin, keys.inputs * keys.outputs, [=](int64_t head, int64_t first, int64_t count) {
      T* to = q + (first * given.heads + head) * width;
      const int64_t stride = int64_t(given.heads) * width, token = begin + first;
      keys.multiply(head, given.query(token, head), given.q_stride, count, to, stride);
      for (int64_t t = 0; t < count; ++t) {
        if (latents.more) latents.add(token + t, head, given.lora, to + t * stride);
        given.angles.rotate(token + t, given.query(token + t, head) + given.nope, to + t * stride + given.lora);
      }
    });
    const Absorbed<T> scene{given, q, latent, begin, group, given.window, given.scale, width, 0, given.lora};
    run_later<E>(scene, std::move(pieces));
    over_heads(
        given.heads, end - begin, values.inputs * values.outputs, [=](int64_t head, int64_t first, int64_t count) {
          values.multiply(head, latent + (first * given.heads + head) * given.lora, int64_t(given.heads) * given.lora,
                          count, given.out + (begin + first) * given.out_stride + head * given.value, given.out_stride);
        });
  }
}

// --- expanded -------------------------------------------------------------------------------------------------

// Positions begin .. end - 1 of a sequence, expanded at `base` of the buffer.
struct Part {
  int64_t row, begin, end, base;
};

template <class Element>
struct Expanded {
  using T = Element;
  const Given<T>& given;
  const T* made;  // [heads, keys, nope + value]
  int64_t keys;
  int window;
  float scale;
  int key, rest, value;
  int group = 1, copied = 0;

  template <class E>
  void pack_q(const Piece& piece, typename E::elem* to) const {
    T rotated[kMaxDim];
    for (int t = 0; t < piece.queries; ++t, to += key + rest) {
      const T* from = given.query(piece.token + t, piece.head);
      E::pack_q(from, key, to);
      given.angles.rotate(piece.token + t, from + key, rotated);
      E::pack_q(rotated, rest, to + key);
    }
  }
  void point(Lines<T>& lines, const Piece& piece, int64_t tile, int64_t low, int64_t high) const {
    point_lines(given.rows, lines, piece.row, tile, low, high, [&](int at, int64_t id, int64_t offset, int count) {
      const T* own = made + (piece.head * keys + piece.base + tile + at) * (key + value);
      const T* shared = given.key_of(id, offset);
      for (int i = 0; i < count; ++i) {
        lines.k[at + i] = own + i * (key + value);
        lines.rest[at + i] = shared + i * given.key_stride();
        lines.v[at + i] = own + i * (key + value) + key;
      }
    });
  }
  T* out(const Piece& piece, int row) const {
    return given.out + (piece.token + row) * given.out_stride + int64_t(piece.head) * value;
  }
};

// Expand keys and values of all heads for the positions of the parts.
template <class T>
void expand(const Given<T>& given, const HeadMatrices<T>& keys, const HeadMatrices<T>& values,
            const std::vector<Part>& parts, int64_t total, T* made) {
  std::vector<Part> pieces;
  for (const Part& part : parts)
    for (int64_t at = part.begin; at < part.end; at += kProductRows)
      pieces.push_back({part.row, at, std::min(part.end, at + kProductRows), part.base + at - part.begin});
  const int64_t count = int64_t(pieces.size()), stride = given.nope + given.value;
  // Whole pieces if there are enough: a piece's lines are gathered once per item.
  const int64_t some = count >= 4 * num_threads() ? given.heads : 1, groups = given.heads / some;
  spread(count * groups, 1, [&](int64_t begin, int64_t end) {
    static thread_local Kept kept;
    T* lines = reinterpret_cast<T*>(kept.at_least(size_t(kProductRows * given.lora) * sizeof(T)));
    for (int64_t i = begin; i < end; ++i) {
      const Part& piece = pieces[size_t(i / groups)];
      given.rows.blocks(piece.row, piece.begin, piece.begin, piece.end, [&](int at, int64_t id, int64_t offset, int n) {
        for (int r = 0; r < n; ++r) given.take_latent(id, offset + r, lines + (at + r) * given.lora);
      });
      for (int64_t head = i % groups * some; head < (i % groups + 1) * some; ++head) {
        T* to = made + (head * total + piece.base) * stride;
        const int64_t rows = piece.end - piece.begin;
        keys.multiply(head, lines, given.lora, rows, to, stride);
        values.multiply(head, lines, given.lora, rows, to + given.nope, stride);
      }
    }
    release_sums();
  });
}

// The parts of every sequence's positions, in batches of at most `most` keys. All parts except a sequence's first begin
// at multiples of `most`, which is a multiple of the split.
inline std::vector<std::vector<Part>> batches(const Rows& rows, int64_t most, int window) {
  std::vector<std::vector<Part>> made;
  int64_t used = most;
  for (int64_t row = 0; row < rows.count; ++row) {
    const int64_t count = rows.offsets[row + 1] - rows.offsets[row], high = rows.starts[row] + count;
    if (!count) continue;
    for (int64_t begin = lowest(rows.starts[row], window) / kTile * kTile; begin < high;) {
      const int64_t end = std::min(high, (begin / most + 1) * most);
      if (used + end - begin > most) made.emplace_back(), used = 0;
      made.back().push_back({row, begin, end, used});
      used += end - begin;
      begin = end;
    }
  }
  return made;
}

template <class T, class E>
void expanded(const Given<T>& given, const HeadMatrices<T>& keys, const HeadMatrices<T>& values, size_t budget) {
  const int64_t each = int64_t(given.heads) * (given.nope + given.value) * int64_t(sizeof(T));  // bytes per key
  const int64_t most = std::max<int64_t>(1, int64_t(budget) / each / kSplit) * kSplit;
  const auto parts = batches(given.rows, most, given.window);
  std::vector<Piece> all = given.rows.cut(kRows, 1, given.window);
  const int64_t floats = State::floats(kRows, given.value);
  std::vector<size_t> from(size_t(given.rows.count) + 1, all.size());  // first piece of each row
  int64_t carried = 0;
  for (size_t i = all.size(); i-- > 0;) from[size_t(all[i].row)] = i;
  for (int64_t row = given.rows.count; row-- > 0;)
    from[size_t(row)] = std::min(from[size_t(row)], from[size_t(row) + 1]);
  for (Piece& piece : all) {
    piece.partial = carried;  // until the piece is cut
    const bool whole = piece.low / most == (piece.high - 1) / most;
    carried += whole ? 0 : given.heads;
    piece.first = piece.last = whole;
  }
  const Arena carry(size_t(carried * floats) * sizeof(float));
  static thread_local Kept kept;
  for (const std::vector<Part>& batch : parts) {
    const int64_t total = batch.back().base + batch.back().end - batch.back().begin;
    T* made = reinterpret_cast<T*>(kept.at_least(size_t(total * each)));
    expand(given, keys, values, batch, total, made);
    std::vector<Piece> pieces;
    for (const Part& part : batch)
      for (size_t i = from[size_t(part.row)]; i < from[size_t(part.row) + 1]; ++i) {
        const Piece& whole = all[i];
        Piece piece = whole;
        piece.low = std::max(whole.low, part.begin);
        piece.high = std::min(whole.high, part.end);
        if (piece.low >= piece.high) continue;
        piece.base = part.base - part.begin;
        piece.first = whole.low >= part.begin;
        piece.last = whole.high <= part.end;
        piece.partial = -1;
        for (piece.head = 0; piece.head < given.heads; ++piece.head) {
          if (!whole.first)
            piece.carry = reinterpret_cast<float*>(carry.data()) + (whole.partial + piece.head) * floats;
          pieces.push_back(piece);
        }
      }
    const Expanded<T> scene{given, made, total, given.window, given.scale, given.nope, given.rope, given.value};
    run<E>(scene, pieces);
  }
}

// --- entries --------------------------------------------------------------------------------------------------

struct Inputs {
  const Tensor &q, &cos, &sin;
  bool interleaved;
  const Tensor &out, &cache, &offsets, &starts, &table;
  const std::optional<Tensor>&scales, &rotated;
  int64_t window;
  double scale;
  int64_t lora;

  void check() const {
    WEFT_CHECK(
        q.dim() == 3 && out.dim() == 3 && cache.dim() == 3 && out.size(0) == q.size(0) && out.size(1) == q.size(1),
        "latent: shapes");
    WEFT_CHECK(q.dtype() == out.dtype(), "latent: dtypes");
    const int64_t rope = 2 * cos.size(1), nope = q.size(2) - rope, value = out.size(2);
    check_lines(cache, scales, rotated, q.dtype(), lora, rope);
    for (const int64_t size : {rope, nope, value, lora})
      WEFT_CHECK(size > 0 && size % 16 == 0 && size <= kMaxDim, "latent: a part of ", size, " elements");
    WEFT_CHECK(lora + rope <= kMaxDim && nope + rope <= kMaxDim, "latent: lines of ", lora + rope);
    WEFT_CHECK(scale > 0 && window >= 0, "latent: scale ", scale, ", window ", window);
    WEFT_CHECK(q.stride(2) == 1 && q.stride(1) == q.size(2) && out.stride(2) == 1 && out.stride(1) == value,
               "latent: strides");
  }

  // Call f(given, E()) with the element type and the engine.
  template <class F>
  void go(int64_t engine, F f) const {
    const Rows rows = Rows::of(offsets, starts, table, cache.size(1));
    rows.check(q.size(0), cache.size(0), int(window));
    with_engine(q.dtype(), engine, [&]<class T, class E>(T, E) {
      const int rope = int(2 * cos.size(1));
      f(Given<T>{rows, q.const_data_ptr<T>(), out.mutable_data_ptr<T>(), q.stride(0), out.stride(0),
                 scales ? nullptr : cache.const_data_ptr<T>(),
                 scales ? static_cast<const uint8_t*>(cache.const_data_ptr()) : nullptr,
                 scales ? scales->const_data_ptr<float>() : nullptr, scales ? rotated->const_data_ptr<T>() : nullptr,
                 Angles::of(cos, sin, q.size(0), interleaved), int(q.size(1)), int(q.size(2)) - rope, rope, int(lora),
                 int(out.size(2)), int(window), float(scale * 1.4426950408889634)},
        E());
    });
  }
};

}  // namespace

// q: [T, heads, nope + rope], unrotated; cos, sin: [T, rope / 2]; out: [T, heads, value]; cache: [blocks, block, lora +
// rope]; keys: per head [lora, nope]; values: per head [value, lora], both packed by `pack`; more, sums: see `Latents`.
void latent_absorbed(const Tensor& q, const Tensor& cos, const Tensor& sin, bool interleaved, const Tensor& out,
                     const Tensor& cache, const Tensor& offsets, const Tensor& starts, const Tensor& table,
                     const Tensor& keys, const Tensor& values, int64_t lora, int64_t window, double scale,
                     int64_t engine, const std::optional<Tensor>& scales, const std::optional<Tensor>& rotated,
                     const std::optional<Tensor>& more, const std::optional<Tensor>& sums) {
  const Inputs inputs{q,      cos,   sin,    interleaved, out,    cache, offsets,
                      starts, table, scales, rotated,     window, scale, lora};
  inputs.check();
  if (q.size(0) == 0) return;
  inputs.go(engine, [&]<class T, class E>(const Given<T>& given, E) {
    absorbed<T, E>(given, HeadMatrices<T>::of(keys, given.heads, given.nope, lora),
                   HeadMatrices<T>::of(values, given.heads, lora, given.value), Latents<T>::of(more, sums, q, lora));
  });
}

// The same with keys: for each head [nope, lora]; budget: bytes of expanded keys and values, 0 for the default.
void latent_expanded(const Tensor& q, const Tensor& cos, const Tensor& sin, bool interleaved, const Tensor& out,
                     const Tensor& cache, const Tensor& offsets, const Tensor& starts, const Tensor& table,
                     const Tensor& keys, const Tensor& values, int64_t lora, int64_t window, double scale,
                     int64_t engine, int64_t budget, const std::optional<Tensor>& scales,
                     const std::optional<Tensor>& rotated) {
  const Inputs inputs{q,      cos,   sin,    interleaved, out,    cache, offsets,
                      starts, table, scales, rotated,     window, scale, lora};
  inputs.check();
  if (q.size(0) == 0) return;
  inputs.go(engine, [&]<class T, class E>(const Given<T>& given, E) {
    expanded<T, E>(given, HeadMatrices<T>::of(keys, given.heads, lora, given.nope),
                   HeadMatrices<T>::of(values, given.heads, lora, given.value), budget ? size_t(budget) : kBudget);
  });
}

}  // namespace attend
}  // namespace weft
