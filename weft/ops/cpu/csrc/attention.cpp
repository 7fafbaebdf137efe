// Paged attention: one form for prefill and decode rows, for any grouping of heads.
//
//   piece    up to kRows rows of one sequence and one KV head; a row is a (query, query head) pair
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
//   tile     K and V of 64 keys are packed once a piece (K transposed, both with neighbours in K's reduction
//            side by side), then each row block does   scores = Q K^T,   online softmax,   O = O * alpha + P V
//   split    its own maximum, sum and O; splits are merged in order into the row's state
//
// Invariants.
//   * A row's bits depend on its own query and the keys and values it sees: each element is one sequence of
//     operations over absolute tiles and splits, whatever row block it is computed in (`gemm` keeps one order
//     over its reduction for every number of rows). A tile that a row sees nothing of leaves its state as it
//     was, up to the sign of zero and numbers below 2^-126, and `finish` writes both as +0.
//   * A long row may be divided among threads at splits: the merge is the same sequence either way.
//   * Masked keys never enter: positions that no query of the piece sees are packed as zeros, and where a piece's
//     values that only some queries see are not finite, each query gets a tile of its own (`exact_tile`).
//   * Two merged empty states give 0 and -inf.
//
// Engines: DotBf16 (AVX512-bf16 instructions), Wide (float products, any machine), Brgemm (ATen's, where the
// machine has AMX). They differ in bits; one engine serves all calls of a process.

#include "vector.h"

#include <ATen/native/CPUBlas.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <optional>
#include <vector>

namespace weft {
namespace {

using namespace vec;

constexpr int kTile = 64;
constexpr int kSplit = 512;
constexpr int kRows = 192;
constexpr int kMaxDim = 256;
constexpr int kFetchRows = 32;  // pieces of more rows compute long enough on a tile to need no prefetch
constexpr int kStep = 12;  // rows whose softmax is computed together; at most kLanes
// Keys * rows below which waking other threads costs more than it gains.
constexpr int64_t kAlone = 1 << 13;

alignas(64) const uint32_t kZeros[kMaxDim] = {};

// ---- packing ----

// Columns of 16 rows of 16 words: to[c * kTile + r] = rows[r][c], for the first `columns`.
#if WEFT_AVX512
inline void transpose_16(const uint32_t* const* rows, int64_t offset, int columns, uint32_t* to) {
  const __mmask16 mask = __mmask16((1u << columns) - 1);
  __m512i a[16], b[16];
  for (int r = 0; r < 16; ++r) a[r] = _mm512_maskz_loadu_epi32(mask, rows[r] + offset);
  for (int r = 0; r < 16; r += 2) {
    b[r] = _mm512_unpacklo_epi32(a[r], a[r + 1]);
    b[r + 1] = _mm512_unpackhi_epi32(a[r], a[r + 1]);
  }
  for (int r = 0; r < 16; r += 4) {
    a[r] = _mm512_unpacklo_epi64(b[r], b[r + 2]);
    a[r + 1] = _mm512_unpackhi_epi64(b[r], b[r + 2]);
    a[r + 2] = _mm512_unpacklo_epi64(b[r + 1], b[r + 3]);
    a[r + 3] = _mm512_unpackhi_epi64(b[r + 1], b[r + 3]);
  }
  // a[4 g + c] holds, in lane group l, column 4 l + c of rows 4 g .. 4 g + 3
  for (int c = 0; c < 4; ++c) {
    b[c] = _mm512_shuffle_i32x4(a[c], a[4 + c], 0x88);        // lane groups 0, 2
    b[4 + c] = _mm512_shuffle_i32x4(a[c], a[4 + c], 0xdd);    // 1, 3
    b[8 + c] = _mm512_shuffle_i32x4(a[8 + c], a[12 + c], 0x88);
    b[12 + c] = _mm512_shuffle_i32x4(a[8 + c], a[12 + c], 0xdd);
  }
  for (int c = 0; c < 4; ++c) {
    a[c] = _mm512_shuffle_i32x4(b[c], b[8 + c], 0x88);
    a[8 + c] = _mm512_shuffle_i32x4(b[c], b[8 + c], 0xdd);
    a[4 + c] = _mm512_shuffle_i32x4(b[4 + c], b[12 + c], 0x88);
    a[12 + c] = _mm512_shuffle_i32x4(b[4 + c], b[12 + c], 0xdd);
  }
  if (columns == 16) {
#pragma GCC unroll 16
    for (int c = 0; c < 16; ++c) _mm512_storeu_si512(to + c * kTile, a[c]);
  } else {
#pragma GCC unroll 16
    for (int c = 0; c < 16; ++c)
      if (c < columns) _mm512_storeu_si512(to + c * kTile, a[c]);
  }
}
#else
inline void transpose_16(const uint32_t* const* rows, int64_t offset, int columns, uint32_t* to) {
  for (int c = 0; c < columns; ++c)
    for (int r = 0; r < 16; ++r) to[c * kTile + r] = rows[r][offset + c];
}
#endif

inline void fetch(const void* at) { __builtin_prefetch(at, 0, 2); }

// kTile rows of `words` words -> [words, kTile]. Memory is asked for the same part of the rows in `ahead`, if any.
inline void transpose(const uint32_t* const* rows, const uint32_t* const* ahead, int words, uint32_t* to) {
  for (int r = 0; r < kTile; r += 16)
    for (int c = 0; c < words; c += 16) {
      if (ahead)
        for (int i = 0; i < 16; ++i) fetch(ahead[r + i] + c);
      transpose_16(rows + r, c, std::min(16, words - c), to + c * kTile + r);
    }
}

// Rows a and b of dim elements -> dim pairs (a's element in the low half).
inline void interleave(const uint16_t* a, const uint16_t* b, int dim, uint16_t* to) {
  int d = 0;
#if WEFT_AVX512
  const __m512i low = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6, 37,
                                       5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
  const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
  for (; d + 32 <= dim; d += 32) {
    const __m512i x = _mm512_loadu_si512(a + d), y = _mm512_loadu_si512(b + d);
    _mm512_storeu_si512(to + 2 * d, _mm512_permutex2var_epi16(x, low, y));
    _mm512_storeu_si512(to + 2 * d + 32, _mm512_permutex2var_epi16(x, high, y));
  }
#endif
  for (; d < dim; ++d) {
    to[2 * d] = a[d];
    to[2 * d + 1] = b[d];
  }
}

// Keeps x in a register: without it the compiler loads a line again for every row.
inline void hold(vf& x) {
#if WEFT_AVX512
  asm("" : "+v"(x));
#endif
}

// ---- engines ----
//
// `elem` is what packed operands hold. gemm: C[m, n] = A[m, k] B[k, n], or C[i] * alpha[i] + that, where B's
// rows come in groups of elements that share a word, and row strides of A are in elements.

// C = (C * alpha) + A B for R rows and 16 N columns, all accumulators in registers.
template <class E, int R, int N>
inline void micro(int words, const uint32_t* a, int64_t lda, const uint32_t* b, int64_t ldb, float* c,
                  int64_t ldc, const float* alpha) {
  vf sum[R][N];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n)
      sum[r][n] = alpha ? load(c + r * ldc + n * kLanes) * splat(alpha[r]) : splat(0.0f);
  for (int k = 0; k < words; ++k) {
    vf line[N];
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) {
      line[n] = load(reinterpret_cast<const float*>(b + k * ldb) + n * kLanes);
      hold(line[n]);
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const vf value = splat(bits_to_float(a[r * lda + k]));
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) sum[r][n] = E::dot(sum[r][n], value, line[n]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) store(c + r * ldc + n * kLanes, sum[r][n]);
}

template <class E, int N>
inline void micro_rows(int rows, int words, const uint32_t* a, int64_t lda, const uint32_t* b, int64_t ldb,
                       float* c, int64_t ldc, const float* alpha) {
  switch (rows) {
    case 1: return micro<E, 1, N>(words, a, lda, b, ldb, c, ldc, alpha);
    case 2: return micro<E, 2, N>(words, a, lda, b, ldb, c, ldc, alpha);
    case 3: return micro<E, 3, N>(words, a, lda, b, ldb, c, ldc, alpha);
    case 4: return micro<E, 4, N>(words, a, lda, b, ldb, c, ldc, alpha);
    case 5: return micro<E, 5, N>(words, a, lda, b, ldb, c, ldc, alpha);
    default: return micro<E, 6, N>(words, a, lda, b, ldb, c, ldc, alpha);
  }
}

template <class E>
struct Registers {
  // Rows of a block: what the register tile holds.
  static constexpr int kBlock = 6;

  static void gemm(int m, int n, int k, const void* a, int64_t lda, const void* b, float* c, const float* alpha,
                   bool /*exact*/) {
    const auto* left = static_cast<const uint32_t*>(a);
    const auto* right = static_cast<const uint32_t*>(b);
    const int words = k / E::kWide;
    lda /= E::kWide;
    int at = 0;
    for (; at + 64 <= n; at += 64) micro_rows<E, 4>(m, words, left, lda, right + at, n, c + at, n, alpha);
    if (n - at == 48) micro_rows<E, 3>(m, words, left, lda, right + at, n, c + at, n, alpha);
    if (n - at == 32) micro_rows<E, 2>(m, words, left, lda, right + at, n, c + at, n, alpha);
    if (n - at == 16) micro_rows<E, 1>(m, words, left, lda, right + at, n, c + at, n, alpha);
  }
  static void release() {}
};

// bf16 operands in pairs, as VDPBF16PS and AMX take them.
struct PackBf16 {
  using elem = bf16;
  static constexpr int kWide = 2;

  static void pack_q(const bf16* from, int count, bf16* to) { std::memcpy(to, from, count * sizeof(bf16)); }
  static void pack_k(const bf16* const* rows, const bf16* const* ahead, int dim, bf16* to, float*) {
    transpose(reinterpret_cast<const uint32_t* const*>(rows), reinterpret_cast<const uint32_t* const*>(ahead),
              dim / 2, reinterpret_cast<uint32_t*>(to));
  }
  static void pack_v(const bf16* const* rows, const bf16* const* ahead, int dim, bf16* to) {
    for (int r = 0; r < kTile; r += 2) {
      if (ahead)
        for (int d = 0; d < dim; d += 32) fetch(ahead[r] + d), fetch(ahead[r + 1] + d);
      interleave(reinterpret_cast<const uint16_t*>(rows[r]), reinterpret_cast<const uint16_t*>(rows[r + 1]), dim,
                 reinterpret_cast<uint16_t*>(to) + r * dim);
    }
  }
  static void store_p(bf16* to, const vf* p) {
#if WEFT_AVX512_BF16
    _mm512_storeu_si512(to, (__m512i)_mm512_cvtne2ps_pbh(p[1], p[0]));
    _mm512_storeu_si512(to + 32, (__m512i)_mm512_cvtne2ps_pbh(p[3], p[2]));
#else
    for (int i = 0; i < 4; ++i) store(to + i * kLanes, p[i]);
#endif
  }
};

#if WEFT_AVX512_BF16
struct DotBf16 : PackBf16, Registers<DotBf16> {
  static vf dot(vf sum, vf a, vf b) {
    return _mm512_dpbf16_ps(sum, (__m512bh)_mm512_castps_si512(a), (__m512bh)_mm512_castps_si512(b));
  }
};
#endif

// ATen's micro-kernels, which use AMX where there is one.
struct Brgemm : PackBf16 {
  static constexpr int kBlock = 96;

  // Without `exact` it also computes, and adds to, rows of c beyond m: at most up to the next multiple of 16.
  static void gemm(int m, int n, int k, const void* a, int64_t lda, const void* b, float* c, const float* alpha,
                   bool exact) {
    if (alpha)
      for (int r = 0; r < m; ++r)
        for (int i = 0; i < n; i += kLanes) store(c + r * n + i, load(c + r * n + i) * splat(alpha[r]));
    // Few different shapes, because each is compiled at its first use.
    const int rows = exact ? m : m <= 4 ? 4 : (m + 15) / 16 * 16;
    at::native::cpublas::brgemm(rows, n, k, lda, n, n, alpha != nullptr, static_cast<const bf16*>(a),
                                static_cast<const bf16*>(b), c);
  }
  static void release() { at::native::cpublas::brgemm_release(); }
};

// Products in float of anything that widens to it. P is still rounded to T.
template <class T>
struct Wide : Registers<Wide<T>> {
  using elem = float;
  static constexpr int kWide = 1;

  static vf dot(vf sum, vf a, vf b) { return fma(a, b, sum); }
  static void widen_row(const T* from, int count, float* to) {
    for (int d = 0; d < count; d += kLanes) store(to + d, load(from + d));
  }
  static void pack_q(const T* from, int count, float* to) { widen_row(from, count, to); }
  static void pack_k(const T* const* rows, const T* const*, int dim, float* to, float* scratch) {
    const uint32_t* made[kTile];
    for (int r = 0; r < kTile; ++r) {
      widen_row(rows[r], dim, scratch + r * dim);
      made[r] = reinterpret_cast<const uint32_t*>(scratch + r * dim);
    }
    transpose(made, nullptr, dim, reinterpret_cast<uint32_t*>(to));
  }
  static void pack_v(const T* const* rows, const T* const*, int dim, float* to) {
    for (int r = 0; r < kTile; ++r) widen_row(rows[r], dim, to + r * dim);
  }
  static void store_p(float* to, const vf* p) {
    for (int i = 0; i < 4; ++i) {
      T rounded[kLanes];
      store(rounded, p[i]);
      store(to + i * kLanes, load(rounded));
    }
  }
};

// ---- the call ----

template <class T>
struct Call {
  const T* q;
  T* out;
  int64_t q_stride, out_stride;  // between tokens
  const T* cache;
  const int32_t* offsets;
  const int64_t* starts;
  const int64_t* table;
  int64_t table_width;
  int heads, kv_heads, group, dim, block, window;
  float scale;  // times log2(e): exponentials are powers of two
  const float* sinks;  // of each head, likewise; or null

  int64_t lowest(int64_t position) const { return window ? std::max<int64_t>(0, position - window + 1) : 0; }
};

struct Piece {
  int32_t row, head;          // KV head
  int32_t token, queries;     // first query in the segment
  int64_t position;           // of the first query
  int64_t low, high;          // keys that some query sees
  int64_t partial = -1;       // of the first split's state, if divided
  int first_split() const { return int(low / kSplit); }
  int splits() const { return int((high - 1) / kSplit) + 1 - first_split(); }
  int64_t cost(int group) const { return (high - low) * (queries * group + 8); }
};

// A piece, or one split of it.
struct Item {
  int32_t piece, split;  // -1: all splits
  int64_t cost;
};

struct State {  // of kRows rows: maximum (in powers of two), sum of weights, weighted sum of values
  float *m, *l, *o;
  static int64_t floats(int dim) { return kRows * (dim + 2); }
  static State at(float* memory) { return {memory, memory + kRows, memory + 2 * kRows}; }
  void clear(int rows, int dim) const {
    std::fill(m, m + kRows, -kInf);
    std::fill(l, l + kRows, 0.0f);
    std::fill(o, o + int64_t(rows) * dim, 0.0f);
  }
};

inline vf finite_or_zero(vf m) { return select(equal(m, splat(-kInf)), splat(0.0f), m); }

// Adds state `from` to `to`. Two empty states stay empty: 0 and -inf.
void merge(const State& to, const State& from, int rows, int dim) {
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

// Memory of one thread, kept between calls.
class Arena {
 public:
  explicit Arena(size_t bytes) : bytes_(bytes), memory_(std::aligned_alloc(64, (bytes + 63) / 64 * 64)) {
    TORCH_CHECK(memory_ || !bytes, "attend: no memory for ", bytes, " bytes");
  }
  Arena(const Arena&) = delete;
  ~Arena() { std::free(memory_); }
  size_t size() const { return bytes_; }
  char* data() const { return static_cast<char*>(memory_); }

 private:
  size_t bytes_;
  void* memory_;
};

char* scratch(size_t bytes) {
  thread_local std::unique_ptr<Arena> kept;
  if (!kept || kept->size() < bytes) kept = std::make_unique<Arena>(bytes);
  return kept->data();
}

// Where the keys and values of a tile are.
template <class T>
struct Lines {
  const Piece* piece = nullptr;
  int64_t tile = 0;
  const T *k[kTile], *v[kTile];
};

template <class T, class E>
class Worker {
  using elem = typename E::elem;

 public:
  explicit Worker(const Call<T>& call) : c_(call) {
    const size_t dim = call.dim;
    size_t bytes = 0;
    const auto place = [&](size_t size) {
      const size_t at = bytes;
      bytes += (size + 63) / 64 * 64;
      return at;
    };
    const size_t q = place(kRows * dim * sizeof(elem)), k = place(kTile * dim * sizeof(elem));
    const size_t v = place(kTile * dim * sizeof(elem)), wide = place(kTile * dim * sizeof(float));
    const size_t s = place(E::kBlock * kTile * sizeof(float)), p = place(E::kBlock * kTile * sizeof(elem));
    const size_t run = place(State::floats(call.dim) * sizeof(float));
    const size_t total = place(State::floats(call.dim) * sizeof(float));
    char* base = scratch(bytes);
    q_ = reinterpret_cast<elem*>(base + q);
    k_ = reinterpret_cast<elem*>(base + k);
    v_ = reinterpret_cast<elem*>(base + v);
    wide_ = reinterpret_cast<float*>(base + wide);
    s_ = reinterpret_cast<float*>(base + s);
    p_ = reinterpret_cast<elem*>(base + p);
    run_ = State::at(reinterpret_cast<float*>(base + run));
    total_ = State::at(reinterpret_cast<float*>(base + total));
  }
  ~Worker() { E::release(); }

  // All splits of a piece, to the output. `next`, if any, is what this thread does afterwards.
  void whole(const Piece& piece, const Piece* next) {
    begin(piece);
    const int first = piece.first_split(), count = piece.splits();
    for (int i = 0; i < count; ++i) {
      split(piece, first + i, i ? run_ : total_, i + 1 < count ? &piece : next);
      if (i) merge(total_, run_, rows_, c_.dim);
    }
    finish(piece, total_);
  }

  // One split of a piece, to `state`.
  void part(const Piece& piece, int number, const State& state) {
    begin(piece);
    split(piece, piece.first_split() + number, state, nullptr);
  }

  // Merges the states of all splits, in order, into the output.
  void join(const Piece& piece, float* states) {
    rows_ = piece.queries * c_.group;
    const State total = State::at(states);
    for (int i = 1; i < piece.splits(); ++i)
      merge(total, State::at(states + i * State::floats(c_.dim)), rows_, c_.dim);
    finish(piece, total);
  }

 private:
  void begin(const Piece& piece) {
    rows_ = piece.queries * c_.group;
    const int width = c_.group * c_.dim;
    for (int t = 0; t < piece.queries; ++t)
      E::pack_q(c_.q + (piece.token + t) * c_.q_stride + int64_t(piece.head) * width, width, q_ + t * width);
  }

  // Lines of positions tile .. tile + 63; zeros outside [low, high).
  void point(Lines<T>& lines, const Piece& piece, int64_t tile, int64_t low, int64_t high) const {
    const T* zeros = reinterpret_cast<const T*>(kZeros);
    low = std::max(low, tile);
    high = std::min(high, tile + kTile);
    const int64_t* table = c_.table + piece.row * c_.table_width;
    const int64_t plane = int64_t(c_.block) * c_.dim;
    int at = 0;
    for (; at < low - tile; ++at) lines.k[at] = lines.v[at] = zeros;
    while (at < high - tile) {
      const int64_t position = tile + at, offset = position % c_.block;
      const int end = int(std::min(high - tile, at + c_.block - offset));
      const T* k = c_.cache + (table[position / c_.block] * 2 * c_.kv_heads + piece.head) * plane + offset * c_.dim;
      const T* v = k + c_.kv_heads * plane;
      for (; at < end; ++at, k += c_.dim, v += c_.dim) {
        lines.k[at] = k;
        lines.v[at] = v;
      }
    }
    for (; at < kTile; ++at) lines.k[at] = lines.v[at] = zeros;
    lines.piece = &piece;
    lines.tile = tile;
  }

  // The tile's lines become `lines_`; those of the tile after it are looked up for `pack` to fetch.
  bool turn(const Piece& piece, int64_t tile, const Piece* next, int64_t next_tile) {
    if (ahead_.piece == &piece && ahead_.tile == tile)
      std::swap(lines_, ahead_);
    else
      point(lines_, piece, tile, piece.low, piece.high);
    if (next) point(ahead_, *next, next_tile, next->low, next->high);
    return next != nullptr;
  }

  // One split into `state`, which is cleared first. `next`: the piece whose tiles this thread reads next.
  void split(const Piece& piece, int number, const State& state, const Piece* next) {
    state.clear(rows_, c_.dim);
    const int64_t begin = std::max<int64_t>(int64_t(number) * kSplit, piece.low / kTile * kTile);
    const int64_t end = std::min<int64_t>(int64_t(number + 1) * kSplit, piece.high);
    const int64_t last = piece.position + piece.queries - 1;
    if (rows_ > kFetchRows) next = nullptr;
    for (int64_t tile = begin; tile < end; tile += kTile) {
      const bool more = next && (next != &piece || tile + kTile < piece.high);
      const bool inside = tile + kTile < end;
      const Piece* after = inside && rows_ <= kFetchRows ? &piece : more ? next : nullptr;
      const int64_t after_tile = inside || next == &piece ? tile + kTile : next ? next->low / kTile * kTile : 0;
      const bool fetch = turn(piece, tile, after, after_tile);
      E::pack_k(lines_.k, fetch ? ahead_.k : nullptr, c_.dim, k_, wide_);
      E::pack_v(lines_.v, fetch ? ahead_.v : nullptr, c_.dim, v_);
      const bool mixed = piece.queries > 1 && (tile + kTile - 1 > piece.position || tile < c_.lowest(last));
      if (mixed && !values_finite()) {
        exact_tile(piece, tile, state);
        continue;
      }
      for (int row = 0; row < rows_; row += E::kBlock)
        block(piece, tile, state, row, std::min(rows_ - row, E::kBlock));
    }
  }

  bool values_finite() const {
    for (int r = 0; r < kTile; ++r) {
      vf sum = splat(0.0f);
      for (int d = 0; d < c_.dim; d += kLanes) sum = fma(load(lines_.v[r] + d), splat(0.0f), sum);
      if (!(reduce_add(sum) == 0.0f)) return false;
    }
    return true;
  }

  // A tile with values that are not finite, which some queries see and others do not.
  void exact_tile(const Piece& piece, int64_t tile, const State& state) {
    for (int t = 0; t < piece.queries; ++t) {
      const int64_t position = piece.position + t;
      point(lines_, piece, tile, c_.lowest(position), position + 1);
      E::pack_v(lines_.v, nullptr, c_.dim, v_);
      for (int row = 0; row < c_.group; row += E::kBlock)
        block(piece, tile, state, t * c_.group + row, std::min(c_.group - row, E::kBlock), true);
    }
  }

  // Rows row .. row + count - 1 of the piece over one tile. `exact`: later rows of the state are live, too.
  void block(const Piece& piece, int64_t tile, const State& state, int row, int count, bool exact = false) {
    const int64_t first = piece.position + row / c_.group, last = piece.position + (row + count - 1) / c_.group;
    if (tile > last || tile + kTile <= c_.lowest(first)) return;
    const bool masked = tile + kTile - 1 > first || tile < c_.lowest(last);
    alignas(64) float alpha[E::kBlock + kLanes];
    E::gemm(count, kTile, c_.dim, q_ + int64_t(row) * c_.dim, c_.dim, k_, s_, nullptr, exact);
    for (int at = 0; at < count; at += kStep)
      softmax(piece, tile, state, row + at, std::min(count - at, kStep), masked, s_ + at * kTile, p_ + at * kTile,
              alpha + at);
    E::gemm(count, c_.dim, kTile, p_, kTile, v_, state.o + int64_t(row) * c_.dim, alpha, exact);
  }

  // The keys of the tile that a row sees, as bits.
  uint64_t visible(const Piece& piece, int64_t tile, int row) const {
    const int64_t position = piece.position + row / c_.group;
    const int64_t low = std::max<int64_t>(c_.lowest(position) - tile, 0), high = std::min<int64_t>(position + 1 - tile, kTile);
    if (low >= high) return 0;
    return (~uint64_t(0) >> (kTile - (high - low))) << low;
  }

  // Scores to weights, and the state's maximum and sum; `alpha` is what the state's o must be scaled by.
  void softmax(const Piece& piece, int64_t tile, const State& state, int row, int count, bool masked, float* s,
               elem* p, float* alpha) {
    alignas(64) float top[kLanes], base[kLanes], sum[kLanes];
    for (int r = 0; r < count; ++r) {
      float* line = s + r * kTile;
      vf x[4];
      for (int i = 0; i < 4; ++i) x[i] = load(line + i * kLanes);
      if (masked) {
        const uint64_t bits = visible(piece, tile, row + r);
        for (int i = 0; i < 4; ++i) {
          x[i] = select(uint32_t(bits >> (i * kLanes)) & 0xffff, x[i], splat(-kInf));
          store(line + i * kLanes, x[i]);
        }
      }
      top[r] = reduce_max(vmax(vmax(x[0], x[1]), vmax(x[2], x[3])));
    }
    const vf old = load_n(state.m + row, count);
    const vf m = vmax(load(top) * splat(c_.scale), old), shift = finite_or_zero(m);
    const vf scaled = exp2v(old - shift);
    store_n(state.m + row, m, count);
    store(base, shift);
    store_n(alpha, scaled, count);
    for (int r = 0; r < count; ++r) {
      vf e[4];
      for (int i = 0; i < 4; ++i)
        e[i] = exp2v(fma(load(s + r * kTile + i * kLanes), splat(c_.scale), splat(0.0f) - splat(base[r])));
      sum[r] = reduce_add((e[0] + e[1]) + (e[2] + e[3]));
      E::store_p(p + r * kTile, e);
    }
    store_n(state.l + row, fma(load_n(state.l + row, count), scaled, load(sum)), count);
  }

  void finish(const Piece& piece, const State& state) {
    for (int row = 0; row < rows_; ++row) {
      T* to = c_.out + (piece.token + row / c_.group) * c_.out_stride +
              (int64_t(piece.head) * c_.group + row % c_.group) * c_.dim;
      float l = state.l[row];
      if (c_.sinks && l != 0.0f) l += std::exp2(c_.sinks[int64_t(piece.head) * c_.group + row % c_.group] - state.m[row]);
      const vf factor = splat(l == 0.0f ? 0.0f : 1.0f / l);
      for (int d = 0; d < c_.dim; d += kLanes) {
        const vf o = load(state.o + int64_t(row) * c_.dim + d);
        const vf tiny = select(less(vabs(o), splat(std::numeric_limits<float>::min())), splat(0.0f), o);
        store(to + d, tiny * factor);
      }
    }
  }

  const Call<T>& c_;
  int rows_ = 0;
  elem *q_, *k_, *v_, *p_;
  float *wide_, *s_;
  State run_, total_;
  Lines<T> lines_, ahead_;
};

template <class T>
std::vector<Piece> cut(const Call<T>& c, int64_t rows) {
  std::vector<Piece> pieces;
  const int most = std::max(1, kRows / c.group);
  for (int64_t row = 0; row < rows; ++row) {
    const int32_t begin = c.offsets[row], end = c.offsets[row + 1];
    for (int32_t token = begin; token < end; token += most) {
      Piece piece{int32_t(row), 0, token, std::min(most, end - token), c.starts[row] + token - begin, 0, 0};
      piece.low = c.lowest(piece.position);
      piece.high = piece.position + piece.queries;
      for (piece.head = 0; piece.head < c.kv_heads; ++piece.head) pieces.push_back(piece);
    }
  }
  return pieces;
}

// Every thread takes items until none is left.
template <class T, class E, class F>
void drain(const Call<T>& call, int64_t items, int threads, F f) {
  std::atomic<int64_t> next{0};
  const auto work = [&](int64_t, int64_t) {
    Worker<T, E> worker(call);
    for (int64_t i; (i = next++) < items;) {
      const int64_t after = next.load(std::memory_order_relaxed);  // likely this thread's next: worth a prefetch
      f(worker, i, after < items ? after : -1);
    }
  };
  if (threads == 1)
    work(0, 1);
  else
    at::parallel_for(0, threads, 1, work);
}

template <class T, class E>
void run(const Call<T>& call, int64_t rows) {
  std::vector<Piece> pieces = cut(call, rows);
  int64_t total = 0;
  for (const Piece& piece : pieces) total += piece.cost(call.group);
  const int most = at::in_parallel_region() ? 1 : at::get_num_threads();
  const int threads = total < kAlone ? 1 : most;
  std::vector<Item> items;
  std::vector<int32_t> divided;
  int64_t states = 0;
  for (size_t i = 0; i < pieces.size(); ++i) {
    Piece& piece = pieces[i];
    const int64_t cost = piece.cost(call.group);
    if (threads > 1 && piece.splits() > 1 && cost > total / (4 * threads)) {
      piece.partial = states;
      states += piece.splits();
      divided.push_back(int32_t(i));
      for (int s = 0; s < piece.splits(); ++s) items.push_back({int32_t(i), s, cost / piece.splits()});
    } else {
      items.push_back({int32_t(i), -1, cost});
    }
  }
  std::stable_sort(items.begin(), items.end(), [](const Item& a, const Item& b) { return a.cost > b.cost; });
  const int64_t floats = State::floats(call.dim);
  const Arena memory(size_t(states * floats) * sizeof(float));
  float* partial = reinterpret_cast<float*>(memory.data());
  drain<T, E>(call, int64_t(items.size()), threads, [&](Worker<T, E>& worker, int64_t i, int64_t after) {
    const Piece& piece = pieces[items[i].piece];
    if (items[i].split < 0)
      worker.whole(piece, after >= 0 && items[after].split < 0 ? &pieces[items[after].piece] : nullptr);
    else
      worker.part(piece, items[i].split, State::at(partial + (piece.partial + items[i].split) * floats));
  });
  if (!divided.empty())
    drain<T, E>(call, int64_t(divided.size()), threads, [&](Worker<T, E>& worker, int64_t i, int64_t) {
      worker.join(pieces[divided[i]], partial + pieces[divided[i]].partial * floats);
    });
}

enum Engine : int64_t { kAuto = 0, kWideEngine = 1, kDot = 2, kBrgemm = 3 };

int64_t best_engine() {
#if defined(__AMX_TILE__) && defined(__AMX_BF16__)
  return kBrgemm;
#else
  return WEFT_AVX512_BF16 ? kDot : kWideEngine;
#endif
}

template <class T>
Call<T> make_call(const Tensor& q, const Tensor& out, const Tensor& cache, const Tensor& offsets,
                  const Tensor& starts, const Tensor& table, int64_t window, double scale, const float* sinks) {
  Call<T> call;
  call.sinks = sinks;
  call.q = q.const_data_ptr<T>();
  call.out = out.mutable_data_ptr<T>();
  call.q_stride = q.stride(0);
  call.out_stride = out.stride(0);
  call.cache = cache.const_data_ptr<T>();
  call.offsets = offsets.const_data_ptr<int32_t>();
  call.starts = starts.const_data_ptr<int64_t>();
  call.table = table.const_data_ptr<int64_t>();
  call.table_width = table.size(1);
  call.heads = int(q.size(1));
  call.kv_heads = int(cache.size(2));
  call.group = call.heads / call.kv_heads;
  call.dim = int(q.size(2));
  call.block = int(cache.size(3));
  call.window = int(window);
  call.scale = float(scale * 1.4426950408889634);
  return call;
}

// Every table entry that will be read names a block of the cache.
template <class T>
void check_rows(const Call<T>& c, int64_t rows, int64_t tokens, int64_t blocks) {
  TORCH_CHECK(c.offsets[0] == 0 && c.offsets[rows] == tokens, "attend: q_offsets do not cover q");
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t count = c.offsets[row + 1] - c.offsets[row], start = c.starts[row];
    TORCH_CHECK(count >= 0 && start >= 0, "attend: row ", row, " has ", count, " tokens from position ", start);
    if (!count) continue;
    const int64_t last = (start + count - 1) / c.block;
    TORCH_CHECK(last < c.table_width, "attend: row ", row, " reaches block ", last, " of a table of ", c.table_width);
    for (int64_t entry = c.lowest(start) / c.block; entry <= last; ++entry) {
      const int64_t id = c.table[row * c.table_width + entry];
      TORCH_CHECK(id >= 0 && id < blocks, "attend: row ", row, " names block ", id, " of ", blocks);
    }
  }
}

void attend(const Tensor& q, const Tensor& out, const Tensor& cache, const Tensor& offsets, const Tensor& starts,
            const Tensor& table, int64_t window, double scale, int64_t engine, const std::optional<Tensor>& sinks) {
  TORCH_CHECK(q.dim() == 3 && out.sizes() == q.sizes() && cache.dim() == 5 && cache.size(1) == 2, "attend: shapes");
  TORCH_CHECK(q.scalar_type() == out.scalar_type() && q.scalar_type() == cache.scalar_type(), "attend: dtypes");
  TORCH_CHECK(cache.is_contiguous() && table.is_contiguous() && offsets.is_contiguous() && starts.is_contiguous());
  const int64_t rows = offsets.size(0) - 1, heads = q.size(1), dim = q.size(2);
  TORCH_CHECK(starts.size(0) == rows && table.dim() == 2 && table.size(0) == rows, "attend: rows");
  TORCH_CHECK(dim == cache.size(4) && dim % 16 == 0 && dim <= kMaxDim, "attend: head_dim ", dim);
  TORCH_CHECK(heads % cache.size(2) == 0 && heads / cache.size(2) <= kRows, "attend: ", heads, " heads");
  TORCH_CHECK(scale > 0 && window >= 0, "attend: scale ", scale, ", window ", window);
  if (q.size(0) == 0) return;
  TORCH_CHECK(q.stride(2) == 1 && q.stride(1) == dim && out.stride(2) == 1 && out.stride(1) == dim, "attend: strides");
  std::vector<float> drawn;
  if (sinks) {
    TORCH_CHECK(sinks->scalar_type() == q.scalar_type() && sinks->numel() == heads && sinks->is_contiguous(),
                "attend: the sinks must be [", heads, "] in q's dtype");
    for (int64_t i = 0; i < heads; ++i) {
      const float sink = q.scalar_type() == at::kFloat ? sinks->const_data_ptr<float>()[i]
                                                       : widen(sinks->const_data_ptr<bf16>()[i]);
      drawn.push_back(sink * kLog2E);
    }
  }
  if (engine == kAuto) engine = best_engine();
  const auto go = [&]<class T, class E>(T, E) {
    const auto call =
        make_call<T>(q, out, cache, offsets, starts, table, window, scale, sinks ? drawn.data() : nullptr);
    check_rows(call, rows, q.size(0), cache.size(0));
    run<T, E>(call, rows);
  };
  if (q.scalar_type() == at::kFloat) return go(float(), Wide<float>());
  TORCH_CHECK(q.scalar_type() == at::kBFloat16, "attend: bfloat16 or float32");
  if (engine == kBrgemm) return go(bf16(), Brgemm());
#if WEFT_AVX512_BF16
  if (engine == kDot) return go(bf16(), DotBf16());
#endif
  go(bf16(), Wide<bf16>());
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(weft_cpu, m) {
  m.def(
      "attend(Tensor q, Tensor(a!) out, Tensor cache, Tensor q_offsets, Tensor starts, Tensor table, int window, "
      "float scale, int engine=0, Tensor? sinks=None) -> ()");
  m.impl("attend", c10::DispatchKey::CPU, TORCH_FN(attend));
}

}  // namespace weft
