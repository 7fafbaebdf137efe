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
// Engines: Amx (tiles, amx.h), DotBf16 (AVX512-bf16 instructions), Wide (float products, any machine), Brgemm (ATen's,
// if the kernel does not permit AMX). Engines differ in bits; one engine serves all calls of a process.
//
// A SCENE defines the memory and the masks. Members:
//
//   T                        type of lines and outputs
//   key, rest, value         elements of a key's two parts, which may lie apart (rest may be 0), and of a value;
//                            multiples of 16
//   group, window, scale     rows per query in a piece; keys visible to a query, 0: all, negative: see `lowest`;
//                            factor of scores, times
//   log2(e) pack_q<E>(piece, to)     writes the piece's rows, [rows, key + rest] point(lines, piece, tile, low, high)
//                            finds the keys and values of positions low .. high of a tile; others are `kZeros`
//   copied                   elements of memory per key of a tile for `point`, `Lines::copies`; 0 for none
//   out(piece, row)          address of a row's `value` output elements
//   ends                     optional: null, or by token the end of the visible keys, if behind the token itself. In a
//                            row of tokens the ends never decrease
#pragma once

#include "amx.h"
#include "brgemm.h"
#include "crew.h"
#include "vector.h"

#include <algorithm>
#include <atomic>
#include <memory>
#include <vector>

namespace weft::attend {
namespace {

using namespace vec;

constexpr int kTile = 64;
constexpr int kSplit = 512;
constexpr int kRows = 192;
constexpr int kMaxDim = 1024;
constexpr int kFetchRows = 32;  // pieces with more rows compute long enough on a tile to need no prefetch
constexpr int kStep = 12;       // rows with a common softmax computation; at most kLanes
// Keys * rows of 128 elements (key and value) below which waking other threads costs more than it gains.
constexpr int64_t kAlone = 1 << 13;

alignas(64) const uint32_t kZeros[kMaxDim] = {};

// ---- packing ----

// Transpose 16 rows of 16 words: to[c * kTile + r] = rows[r][c], for the first `columns` columns.
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
  // a[4 g + c] contains, in lane group l, column 4 l + c of rows 4 g .. 4 g + 3
  for (int c = 0; c < 4; ++c) {
    b[c] = _mm512_shuffle_i32x4(a[c], a[4 + c], 0x88);      // lane groups 0, 2
    b[4 + c] = _mm512_shuffle_i32x4(a[c], a[4 + c], 0xdd);  // 1, 3
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
#elif WEFT_AVX2
// Transpose 8 rows of 8 words.
inline void transpose_8(const uint32_t* const* rows, int64_t offset, uint32_t* to) {
  __m256 a[8], b[8];
  for (int r = 0; r < 8; ++r) a[r] = _mm256_loadu_ps(reinterpret_cast<const float*>(rows[r] + offset));
  for (int r = 0; r < 8; r += 2) {
    b[r] = _mm256_unpacklo_ps(a[r], a[r + 1]);
    b[r + 1] = _mm256_unpackhi_ps(a[r], a[r + 1]);
  }
  for (int r = 0; r < 8; r += 4) {
    a[r] = _mm256_shuffle_ps(b[r], b[r + 2], 0x44);
    a[r + 1] = _mm256_shuffle_ps(b[r], b[r + 2], 0xee);
    a[r + 2] = _mm256_shuffle_ps(b[r + 1], b[r + 3], 0x44);
    a[r + 3] = _mm256_shuffle_ps(b[r + 1], b[r + 3], 0xee);
  }
  // a[4 g + c] contains, in lane group l, column 4 l + c of rows 4 g .. 4 g + 3
  for (int c = 0; c < 4; ++c) {
    float* at = reinterpret_cast<float*>(to + c * kTile);
    _mm256_storeu_ps(at, _mm256_permute2f128_ps(a[c], a[4 + c], 0x20));
    _mm256_storeu_ps(at + 4 * kTile, _mm256_permute2f128_ps(a[c], a[4 + c], 0x31));
  }
}

inline void transpose_16(const uint32_t* const* rows, int64_t offset, int columns, uint32_t* to) {
  int c = 0;
  for (; c + 8 <= columns; c += 8)
    for (int r = 0; r < 16; r += 8) transpose_8(rows + r, offset + c, to + c * kTile + r);
  for (; c < columns; ++c)
    for (int r = 0; r < 16; ++r) to[c * kTile + r] = rows[r][offset + c];
}
#elif WEFT_NEON
// Transpose 4 rows of 4 words.
inline void transpose_4(const uint32_t* const* rows, int64_t offset, uint32_t* to) {
  const uint32x4_t a = vld1q_u32(rows[0] + offset), b = vld1q_u32(rows[1] + offset);
  const uint32x4_t c = vld1q_u32(rows[2] + offset), d = vld1q_u32(rows[3] + offset);
  const auto twice = [](uint32x4_t x) { return vreinterpretq_u64_u32(x); };
  const uint64x2_t even_low = twice(vtrn1q_u32(a, b)), odd_low = twice(vtrn2q_u32(a, b));
  const uint64x2_t even_high = twice(vtrn1q_u32(c, d)), odd_high = twice(vtrn2q_u32(c, d));
  vst1q_u32(to, vreinterpretq_u32_u64(vtrn1q_u64(even_low, even_high)));
  vst1q_u32(to + kTile, vreinterpretq_u32_u64(vtrn1q_u64(odd_low, odd_high)));
  vst1q_u32(to + 2 * kTile, vreinterpretq_u32_u64(vtrn2q_u64(even_low, even_high)));
  vst1q_u32(to + 3 * kTile, vreinterpretq_u32_u64(vtrn2q_u64(odd_low, odd_high)));
}

inline void transpose_16(const uint32_t* const* rows, int64_t offset, int columns, uint32_t* to) {
  int c = 0;
  for (; c + 4 <= columns; c += 4)
    for (int r = 0; r < 16; r += 4) transpose_4(rows + r, offset + c, to + c * kTile + r);
  for (; c < columns; ++c)
    for (int r = 0; r < 16; ++r) to[c * kTile + r] = rows[r][offset + c];
}
#else
inline void transpose_16(const uint32_t* const* rows, int64_t offset, int columns, uint32_t* to) {
  for (int c = 0; c < columns; ++c)
    for (int r = 0; r < 16; ++r) to[c * kTile + r] = rows[r][offset + c];
}
#endif

inline void fetch(const void* at) { __builtin_prefetch(at, 0, 2); }

// kTile rows of `words` words -> [words, kTile]. Prefetches the same part of the rows in `ahead`, if any.
inline void transpose(const uint32_t* const* rows, const uint32_t* const* ahead, int words, uint32_t* to) {
  for (int r = 0; r < kTile; r += 16)
    for (int c = 0; c < words; c += 16) {
      if (ahead)
        for (int i = 0; i < 16; ++i) fetch(ahead[r + i] + c);
      transpose_16(rows + r, c, std::min(16, words - c), to + c * kTile + r);
    }
}

// Interleave rows a and b of dim elements -> dim pairs (the element of a in the low half).
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

// Keeps x in a register. Otherwise the compiler loads a line again for every row.
inline void hold(vf& x) {
#if WEFT_AVX512
  asm("" : "+v"(x));
#elif WEFT_AVX2
  asm("" : "+x"(x.a), "+x"(x.b));
#endif
}

// ---- engines ----
//
// `elem` is the type of packed operands. gemm: C[m, n] = A[m, k] B[k, n], or C[i] * alpha[i] + A B. Rows of B come in
// groups of elements that share a word. Row strides of A are in elements.

// C = (C * alpha) + A B for R rows and 16 N columns, with all accumulators in registers.
template <class E, int R, int N>
inline void micro(int words, const uint32_t* a, int64_t lda, const uint32_t* b, int64_t ldb, float* c, int64_t ldc,
                  const float* alpha) {
  vf sum[R][N];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) sum[r][n] = alpha ? load(c + r * ldc + n * kLanes) * splat(alpha[r]) : splat(0.0f);
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
inline void micro_rows(int rows, int words, const uint32_t* a, int64_t lda, const uint32_t* b, int64_t ldb, float* c,
                       int64_t ldc, const float* alpha) {
  switch (rows) {
    case 1:
      return micro<E, 1, N>(words, a, lda, b, ldb, c, ldc, alpha);
    case 2:
      return micro<E, 2, N>(words, a, lda, b, ldb, c, ldc, alpha);
    case 3:
      return micro<E, 3, N>(words, a, lda, b, ldb, c, ldc, alpha);
    case 4:
      return micro<E, 4, N>(words, a, lda, b, ldb, c, ldc, alpha);
    case 5:
      return micro<E, 5, N>(words, a, lda, b, ldb, c, ldc, alpha);
    default:
      return micro<E, 6, N>(words, a, lda, b, ldb, c, ldc, alpha);
  }
}

template <class E>
struct Registers {
  // Rows of a block, with a common softmax computation, and rows of the register tile. Blocks begin at multiples of
  // kAligned rows.
  static constexpr int kBlock = WEFT_AVX512 ? 12 : 6, kTileRows = 6, kAligned = 1;

  static void gemm(int m, int n, int k, const void* a, int64_t lda, const void* b, float* c, const float* alpha,
                   bool /*exact*/) {
    const auto* left = static_cast<const uint32_t*>(a);
    const auto* right = static_cast<const uint32_t*>(b);
    const int words = k / E::kWide;
    lda /= E::kWide;
    while (m > 0) {
      const int tiles = (m + kTileRows - 1) / kTileRows, rows = (m + tiles - 1) / tiles;
      tile(rows, n, words, left, lda, right, c, alpha);
      m -= rows, left += rows * lda, c += int64_t(rows) * n;
      if (alpha) alpha += rows;
    }
  }
  static void release() {}

 private:
  static void tile(int m, int n, int words, const uint32_t* left, int64_t lda, const uint32_t* right, float* c,
                   const float* alpha) {
    int at = 0;
    // 16 registers of 8 floats: 12 of sums. A single row takes 64 columns, so its sums are 8 chains.
    if ((WEFT_AVX2 || WEFT_NEON) && m > 1) {
      for (; at + 32 <= n && m <= 3; at += 32) micro_rows<E, 2>(m, words, left, lda, right + at, n, c + at, n, alpha);
      for (; at < n; at += 16) micro_rows<E, 1>(m, words, left, lda, right + at, n, c + at, n, alpha);
      return;
    }
    for (; at + 64 <= n; at += 64) micro_rows<E, 4>(m, words, left, lda, right + at, n, c + at, n, alpha);
    if (n - at == 48) micro_rows<E, 3>(m, words, left, lda, right + at, n, c + at, n, alpha);
    if (n - at == 32) micro_rows<E, 2>(m, words, left, lda, right + at, n, c + at, n, alpha);
    if (n - at == 16) micro_rows<E, 1>(m, words, left, lda, right + at, n, c + at, n, alpha);
  }
};

// bf16 operands in pairs, for VDPBF16PS and AMX.
struct PackBf16 {
  using elem = bf16;
  static constexpr int kWide = 2;

  static void pack_q(const bf16* from, int count, bf16* to) { std::memcpy(to, from, count * sizeof(bf16)); }
  static void pack_k(const bf16* const* rows, const bf16* const* ahead, int dim, bf16* to, float*) {
    transpose(reinterpret_cast<const uint32_t* const*>(rows), reinterpret_cast<const uint32_t* const*>(ahead), dim / 2,
              reinterpret_cast<uint32_t*>(to));
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

#if WEFT_AVX512_BF16 || WEFT_NEON_BF16
struct DotBf16 : PackBf16, Registers<DotBf16> {
  static vf dot(vf sum, vf a, vf b) {
#if WEFT_NEON_BF16
    return bf16_dot(sum, recast<vu>(a), recast<vu>(b));
#else
    return _mm512_dpbf16_ps(sum, (__m512bh)_mm512_castps_si512(a), (__m512bh)_mm512_castps_si512(b));
#endif
  }
};
#endif

// Micro-kernels of ATen, which use AMX if available.
struct Brgemm : PackBf16 {
  static constexpr int kBlock = 96, kAligned = 16;

  // Without `exact` also computes and changes rows of c beyond m, up to the next multiple of 16.
  static void gemm(int m, int n, int k, const void* a, int64_t lda, const void* b, float* c, const float* alpha,
                   bool exact) {
    if (alpha)
      for (int r = 0; r < m; ++r)
        for (int i = 0; i < n; i += kLanes) store(c + r * n + i, load(c + r * n + i) * splat(alpha[r]));
    // Few different shapes, because each shape is compiled at its first use.
    const int rows = exact ? m : m <= 4 ? 4 : (m + 15) / 16 * 16;
    brgemm(rows, n, k, lda, n, n, alpha != nullptr, static_cast<const bf16*>(a), static_cast<const bf16*>(b), c);
  }
  static void release() { brgemm_release(); }
};

#if WEFT_AMX
struct Amx : PackBf16 {
  static constexpr int kBlock = 96, kAligned = amx::kTileRows;

  // Without `exact` also computes and changes rows of c beyond m, up to the next multiple of 16.
  static void gemm(int m, int n, int k, const void* a, int64_t lda, const void* b, float* c, const float* alpha,
                   bool exact) {
    if (alpha)
      for (int r = 0; r < m; ++r)
        if (alpha[r] != 1.0f)
          for (int i = 0; i < n; i += kLanes) store(c + r * n + i, load(c + r * n + i) * splat(alpha[r]));
    const auto* left = static_cast<const bf16*>(a);
    const auto* right = static_cast<const bf16*>(b);
    const bool add = alpha != nullptr;
    for (; m > 16 && !(exact && m < 32); m -= 32, left += 32 * lda, c += 32 * n)
      rows<2>(16, n, k, left, lda, right, c, add);
    for (; m > 0; m -= 16, left += 16 * lda, c += 16 * n)
      rows<1>(exact ? std::min(m, 16) : m <= 4 ? 4 : m <= 8 ? 8 : 16, n, k, left, lda, right, c, add);
  }
  static void release() { amx::release(); }

 private:
  // Process R tiles of `each` rows.
  template <int R>
  static void rows(int each, int n, int k, const bf16* a, int64_t lda, const bf16* b, float* c, bool add) {
    amx::configure(each);
    amx::settle();
    alignas(64) bf16 left[R * amx::kTileSize], right[2 * amx::kTileSize];
    const int whole = k / amx::kTileDepth, rest = k % amx::kTileDepth;
    if (rest)
      for (int r = 0; r < R * each; ++r) {
        bf16* to = left + r * amx::kTileDepth;
        std::memcpy(to, a + r * lda + k - rest, size_t(rest) * sizeof(bf16));
        std::memset(to + rest, 0, size_t(amx::kTileDepth - rest) * sizeof(bf16));
      }
    const auto columns = [&]<int C>(int at, std::integral_constant<int, C>) __attribute__((always_inline)) {
      add ? amx::take<R, C>(c + at, n) : amx::clear<R, C>();
      for (int step = 0; step < whole; ++step)
        amx::step<R, C>({a + step * amx::kTileDepth, lda * 2, 0, 16 * lda * 2},
                        {b + (step * kTileWords * n + at) * 2, n * 4});
      if (rest) {
        for (int pair = 0; pair < kTileWords; ++pair) {
          bf16* to = right + pair * 2 * 32;
          const size_t bytes = C * 16 * 2 * sizeof(bf16);
          if (pair < rest / 2)
            std::memcpy(to, b + ((whole * kTileWords + pair) * n + at) * 2, bytes);
          else
            std::memset(to, 0, bytes);
        }
        amx::settle();
        amx::step<R, C>({left, amx::kTileDepth * 2, 0, amx::kTileSize * 2}, {right, 2 * 32 * 2});
      }
      amx::put<R, C>(c + at, n);
    };
    int at = 0;
    for (; at + 32 <= n; at += 32) columns(at, std::integral_constant<int, 2>());
    if (at < n) columns(at, std::integral_constant<int, 1>());
  }

  static constexpr int kTileWords = amx::kTileDepth / 2;
};
#endif

// Products in float of any type that widens to float. P is still rounded to T.
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
  int64_t partial = -1;            // of the first split's state, if divided
  int64_t base = 0;                // for use by the scene
  float* carry = nullptr;          // state between parts; null with a single part
  bool first = true, last = true;  // part of the keys

  int first_split() const { return int(low / kSplit); }
  int splits() const { return int((high - 1) / kSplit) + 1 - first_split(); }
  int64_t cost(int group) const { return (high - low) * (queries * group + 8); }
};

// A piece, or one split of a piece.
struct Item {
  int32_t piece, split;  // -1: all splits
  int64_t cost;
};

struct State {  // kRows rows: maximum (in powers of two), sum of weights, weighted sum of values
  float *m, *l, *o;
  static int64_t floats(int dim) { return kRows * (dim + 2); }
  static State at(float* memory) { return {memory, memory + kRows, memory + 2 * kRows}; }
  void clear(int rows, int dim) const {
    std::fill(m, m + kRows, -kInf);
    std::fill(l, l + kRows, 0.0f);
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
    const size_t run = place(State::floats(scene.value) * sizeof(float));
    const size_t total = place(State::floats(scene.value) * sizeof(float));
    const size_t each = kTile * size_t(scene.copied) * sizeof(T), lines = place(2 * each);
    static thread_local Kept kept;
    char* base = kept.at_least(bytes);
    q_ = reinterpret_cast<elem*>(base + q);
    k_ = reinterpret_cast<elem*>(base + k);
    v_ = reinterpret_cast<elem*>(base + v);
    wide_ = reinterpret_cast<float*>(base + wide);
    scores_ = reinterpret_cast<float*>(base + s);
    p_ = reinterpret_cast<elem*>(base + p);
    run_ = State::at(reinterpret_cast<float*>(base + run));
    total_ = State::at(reinterpret_cast<float*>(base + total));
    lines_.copies = reinterpret_cast<T*>(base + lines);
    ahead_.copies = reinterpret_cast<T*>(base + lines + each);
  }
  ~Worker() { E::release(); }

  // All splits of a piece, to the output. `next`, if any, is this thread's next piece.
  void whole(const Piece& piece, const Piece* next) {
    begin(piece);
    const State total = piece.carry ? State::at(piece.carry) : total_;
    const int first = piece.first_split(), count = piece.splits();
    for (int i = 0; i < count; ++i) {
      const bool fresh = piece.first && i == 0;
      split(piece, first + i, fresh ? total : run_, i + 1 < count ? &piece : next);
      if (!fresh) merge(total, run_, rows_, s_.value);
    }
    if (piece.last) finish(piece, total);
  }

  // Process one split of a piece into `state`.
  void part(const Piece& piece, int number, const State& state) {
    begin(piece);
    split(piece, piece.first_split() + number, state, nullptr);
  }

  // Merge the states of all splits, in order, and write the output.
  void join(const Piece& piece, float* states) {
    rows_ = piece.queries * s_.group;
    State total = State::at(states);
    if (piece.carry) {
      total = State::at(piece.carry);
      if (piece.first) total.clear(rows_, s_.value);
    }
    for (int i = piece.carry ? 0 : 1; i < piece.splits(); ++i)
      merge(total, State::at(states + i * State::floats(s_.value)), rows_, s_.value);
    if (piece.last) finish(piece, total);
  }

 private:
  void begin(const Piece& piece) {
    rows_ = piece.queries * s_.group;
    s_.template pack_q<E>(piece, q_);
  }

  // Puts the tile's lines in `lines_`, and looks up the lines of the following tile for prefetches by `pack`.
  bool turn(const Piece& piece, int64_t tile, const Piece* next, int64_t next_tile) {
    if (ahead_.piece == &piece && ahead_.tile == tile)
      std::swap(lines_, ahead_);
    else
      point(lines_, piece, tile, piece.low, piece.high);
    if (next) point(ahead_, *next, next_tile, next->low, next->high);
    return next != nullptr;
  }

  void point(Lines<T>& lines, const Piece& piece, int64_t tile, int64_t low, int64_t high) const {
    s_.point(lines, piece, tile, std::max(low, tile), std::min(high, tile + kTile));
    lines.piece = &piece;
    lines.tile = tile;
  }

  // One split into `state`, which is cleared first. `next`: piece of the tiles that this thread reads next.
  void split(const Piece& piece, int number, const State& state, const Piece* next) {
    state.clear(rows_, s_.value);
    const int64_t begin = std::max<int64_t>(int64_t(number) * kSplit, piece.low / kTile * kTile);
    const int64_t end = std::min<int64_t>(int64_t(number + 1) * kSplit, piece.high);
    const int64_t last = piece.position + piece.queries - 1;
    // Blocks of similar size: 8 rows are 4 + 4, not 6 + 2.
    const int blocks = (rows_ + E::kBlock - 1) / E::kBlock;
    const int most = ((rows_ + blocks - 1) / blocks + E::kAligned - 1) / E::kAligned * E::kAligned;
    if (rows_ > kFetchRows) next = nullptr;
    for (int64_t tile = begin; tile < end; tile += kTile) {
      const bool more = next && (next != &piece || tile + kTile < piece.high);
      const bool inside = tile + kTile < end;
      const Piece* after = inside && rows_ <= kFetchRows ? &piece : more ? next : nullptr;
      const int64_t after_tile = inside || next == &piece ? tile + kTile : next ? next->low / kTile * kTile : 0;
      pack(turn(piece, tile, after, after_tile));
      const bool mixed = piece.queries > 1 && (tile + kTile > end_of(piece, 0) || tile < lowest(last, s_.window));
      if (mixed && !values_finite()) {
        exact_tile(piece, tile, state);
        continue;
      }
      for (int row = 0; row < rows_; row += most) block(piece, tile, state, row, std::min(rows_ - row, most));
    }
  }

  void pack(bool fetch) {
    E::pack_k(lines_.k, fetch ? ahead_.k : nullptr, s_.key, k_, wide_);
    if (s_.rest) E::pack_k(lines_.rest, fetch ? ahead_.rest : nullptr, s_.rest, k_ + s_.key * kTile, wide_);
    E::pack_v(lines_.v, fetch && lines_.v[0] != lines_.k[0] ? ahead_.v : nullptr, s_.value, v_);
  }

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
      E::pack_v(lines_.v, nullptr, s_.value, v_);
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
    E::gemm(count, kTile, dim_, q_ + int64_t(row) * dim_, dim_, k_, scores_, nullptr, exact);
    for (int at = 0; at < count; at += kStep)
      softmax(piece, tile, state, row + at, std::min(count - at, kStep), masked, scores_ + at * kTile, p_ + at * kTile,
              alpha + at);
    E::gemm(count, s_.value, kTile, p_, kTile, v_, state.o + int64_t(row) * s_.value, alpha, exact);
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
  elem *q_, *k_, *v_, *p_;
  float *wide_, *scores_;
  alignas(64) float across_[kLanes][kLanes] = {};
  State run_, total_;
  Lines<T> lines_, ahead_;
};

// ---- all pieces ----

// For `work` keys * rows of `elements` each.
inline int threads_for(int64_t work, int64_t elements) { return work * elements < 128 * kAlone ? 1 : team(); }

// Data shared by the threads of one call. The scene is a copy; objects behind its pointers must live as long.
template <class E, class S>
class Attending {
 public:
  Attending(const S& scene, std::vector<Piece>&& given) : scene_(scene), pieces_(std::move(given)) {
    int64_t total = 0, states = 0;
    for (const Piece& piece : pieces_) total += piece.cost(scene.group);
    threads = threads_for(total, scene.key + scene.rest + scene.value);
    for (size_t i = 0; i < pieces_.size(); ++i) {
      Piece& piece = pieces_[i];
      const int64_t cost = piece.cost(scene.group);
      if (threads > 1 && piece.splits() > 1 && cost > total / (4 * threads)) {
        piece.partial = states;
        states += piece.splits();
        divided_.push_back(int32_t(i));
        for (int s = 0; s < piece.splits(); ++s) items_.push_back({int32_t(i), s, cost / piece.splits()});
      } else {
        items_.push_back({int32_t(i), -1, cost});
      }
    }
    std::stable_sort(items_.begin(), items_.end(), [](const Item& a, const Item& b) { return a.cost > b.cost; });
    memory_ = std::make_unique<Arena>(size_t(states * floats()) * sizeof(float));
  }

  // The work of one thread: pieces and parts of pieces; then, after all threads, joins of parts.
  void attend() {
    take(next_, int64_t(items_.size()), [&](Worker<S, E>& worker, int64_t i, int64_t after) {
      const Piece& piece = pieces_[items_[i].piece];
      if (items_[i].split < 0)
        worker.whole(piece, after >= 0 && items_[after].split < 0 ? &pieces_[items_[after].piece] : nullptr);
      else
        worker.part(piece, items_[i].split, State::at(partial(piece) + items_[i].split * floats()));
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
  int64_t floats() const { return State::floats(scene_.value); }
  float* partial(const Piece& piece) const {
    return reinterpret_cast<float*>(memory_->data()) + piece.partial * floats();
  }

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
  return WEFT_AVX512_BF16 || WEFT_NEON_BF16 ? kDot : kWideEngine;
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
