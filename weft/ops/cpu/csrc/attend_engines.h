// Packing of tiles, and products of tiles, for attend_tile.h.
//
// Engines: Amx (tiles, amx.h), DotBf16 (AVX512-bf16 instructions), Wide (float products, any machine), Brgemm (ATen's,
// if the kernel does not permit AMX). Engines differ in bits; one engine serves all calls of a process.
#pragma once

#include "amx.h"
#include "brgemm.h"
#include "vector.h"

#include <algorithm>
#include <type_traits>

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
template <class T>
inline void fetch_line(const T* at, int dim) {
  for (int d = 0; d < dim; d += 64 / int(sizeof(T))) fetch(at + d);
}

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
        fetch_line(ahead[r], dim), fetch_line(ahead[r + 1], dim);
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

// ---- few rows with bf16 ----
//
// For few rows, packing takes longer than the products. Keys stay pairs of bf16, [dim / 2, kTile], and values stay in
// the lines. Each element of a result has the chain of operations of `micro` over packed floats, so the same bits.
//
// The products also prefetch the next tile, if `ahead` is not null: one line of the CPU's cache at a time, because a
// burst of prefetches waits for memory while no product runs.

// sum[r][n] += value(r) * line(n). With few rows all values stay in registers, otherwise all lines: at most 16 registers
// of AVX2 are in use. A sum that the compiler keeps in memory makes each product wait for the store before.
template <int R, int N, class Value, class Line>
inline __attribute__((always_inline)) void add_products(vh (&sum)[R][N], Value value, Line line) {
  if constexpr (R <= 3) {
    vh values[R];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) values[r] = splat_part(value(r));
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) {
      const vh x = line(n);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) sum[r][n] = fma(values[r], x, sum[r][n]);
    }
  } else {
    vh lines[N];
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) lines[n] = line(n);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const vh x = splat_part(value(r));
#pragma GCC unroll 8
      for (int n = 0; n < N; ++n) sum[r][n] = fma(x, lines[n], sum[r][n]);
    }
  }
}

// Prefetches of a tile's keys or values, in the order of memory: key by key, the lines of the CPU's cache of each.
struct Ahead {
  static constexpr int kLine = 64 / int(sizeof(bf16));  // elements

  const bf16* const* keys = nullptr;  // null: nothing to prefetch
  int lines = 0, key = 0, line = 0;   // of each key; the next one

  // Begins at line `first` of all lines.
  static Ahead at(const bf16* const* keys, int dim, int first) {
    const int lines = (dim + kLine - 1) / kLine;
    return {keys, lines, first / lines, first % lines};
  }
  void step() {
    fetch(keys[key] + line * kLine);
    if (++line == lines) line = 0, ++key;
  }
};

// C[R, N parts of keys] = A B, for R rows of `words` pairs of floats.
template <int R, int N>
inline void score_rows(int words, const float* a, int64_t lda, const uint32_t* b, float* c, Ahead ahead) {
  vh sum[R][N];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) sum[r][n] = splat_part(0.0f);
  for (int k = 0; k < words; ++k) {
    const uint32_t* line = b + k * kTile;
    const float* x = a + 2 * k;
    add_products<R, N>(
        sum, [&](int r) { return x[r * lda]; }, [&](int n) { return first_parts(line + n * kPart); });
    asm("" : "+r"(line));  // otherwise the compiler keeps the loaded pairs in registers, and sums in memory
    add_products<R, N>(
        sum, [&](int r) { return x[r * lda + 1]; }, [&](int n) { return second_parts(line + n * kPart); });
    // 16 pairs are a line, so 16 steps are enough for a line of 16 keys.
    if (ahead.keys)
#pragma GCC unroll 4
      for (int n = 0; n < N * kPart; n += kLanes) ahead.step();
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) store_part(c + r * kTile + n * kPart, sum[r][n]);
}

// C = C * alpha + P V for R rows and N parts of the values, from element `at` of each line on.
template <int R, int N>
inline void value_rows(const bf16* const* lines, int at, const float* p, float* c, int64_t ldc, const float* alpha,
                       Ahead ahead) {
  vh sum[R][N];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) sum[r][n] = load_part(c + r * ldc + at + n * kPart) * splat_part(alpha[r]);
  for (int k = 0; k < kTile; ++k) {
    const bf16* line = lines[k] + at;
    add_products<R, N>(
        sum, [&](int r) { return p[r * kTile + k]; }, [&](int n) { return load_part(line + n * kPart); });
    if (ahead.keys)
#pragma GCC unroll 4
      for (int n = 0; n < N * kPart; n += Ahead::kLine) ahead.step();
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) store_part(c + r * ldc + at + n * kPart, sum[r][n]);
}

// Call f with the number of rows as a constant, 1 to 6.
template <class F>
inline void with_rows(int rows, F f) {
  switch (rows) {
    case 1:
      return f(std::integral_constant<int, 1>());
    case 2:
      return f(std::integral_constant<int, 2>());
    case 3:
      return f(std::integral_constant<int, 3>());
    case 4:
      return f(std::integral_constant<int, 4>());
    case 5:
      return f(std::integral_constant<int, 5>());
    default:
      return f(std::integral_constant<int, 6>());
  }
}

// Products in float of any type that widens to float. P is still rounded to T.
template <class T>
struct Wide : Registers<Wide<T>> {
  using elem = float;
  static constexpr int kWide = 1;
  // Most rows of a piece that is not packed as floats.
  static constexpr int kFew = std::is_same_v<T, bf16> ? kFetchRows : 0;

  static vf dot(vf sum, vf a, vf b) { return fma(a, b, sum); }
  static void widen_row(const T* from, int count, float* to) {
    for (int d = 0; d < count; d += kLanes) store(to + d, load(from + d));
  }
  static void pack_q(const T* from, int count, float* to) { widen_row(from, count, to); }
  static void pack_k(const T* const* rows, const T* const* ahead, int dim, float* to, float* scratch) {
    if constexpr (std::is_same_v<T, bf16>) {
      uint32_t* pairs = reinterpret_cast<uint32_t*>(scratch);
      PackBf16::pack_k(rows, ahead, dim, reinterpret_cast<bf16*>(pairs), nullptr);
      for (int k = 0; k < dim / 2; ++k)
        for (int at = k * kTile; at < (k + 1) * kTile; at += kLanes) {
          const Pairs line = load_as<Pairs>(pairs + at);
          store(to + k * kTile + at, firsts(line));
          store(to + (k + 1) * kTile + at, seconds(line));
        }
      return;
    }
    const uint32_t* made[kTile];
    for (int r = 0; r < kTile; ++r) {
      widen_row(rows[r], dim, scratch + r * dim);
      made[r] = reinterpret_cast<const uint32_t*>(scratch + r * dim);
    }
    transpose(made, nullptr, dim, reinterpret_cast<uint32_t*>(to));
  }
  static void pack_v(const T* const* rows, const T* const* ahead, int dim, float* to) {
    for (int r = 0; r < kTile; ++r) {
      if (ahead) fetch_line(ahead[r], dim);
      widen_row(rows[r], dim, to + r * dim);
    }
  }
  static void store_p(float* to, const vf* p) {
    for (int i = 0; i < 4; ++i) store(to + i * kLanes, std::is_same_v<T, bf16> ? rounded_bf16(p[i]) : p[i]);
  }

  // For at most kFew rows: C[m, kTile] = A[m, k] K, with K packed by PackBf16.
  static void few_scores(int m, int k, const float* a, const float* pairs, float* c, const bf16* const* ahead) {
    const auto* b = reinterpret_cast<const uint32_t*>(pairs);
    in_register_tiles(m, [&](int row, auto rows) {
      in_columns<rows()>(kTile, [&](int at, auto parts) {
        score_rows<rows(), parts()>(k / 2, a + int64_t(row) * k, k, b + at, c + row * kTile + at,
                                    ahead && !row ? Ahead::at(ahead, k, at * ((k + Ahead::kLine - 1) / Ahead::kLine))
                                                  : Ahead());
      });
    });
  }
  // C[m, n] = C[i] * alpha[i] + P[m, kTile] V, with V in lines.
  static void few_values(int m, int n, const float* p, const bf16* const* lines, float* c, const float* alpha,
                         const bf16* const* ahead) {
    in_register_tiles(m, [&](int row, auto rows) {
      const float* left = p + row * kTile;
      float* to = c + int64_t(row) * n;
      in_columns<rows()>(n, [&](int at, auto parts) {
        // The first of these columns that begins a line of memory, if any.
        const int line = (at + Ahead::kLine - 1) / Ahead::kLine;
        const bool any = ahead && !row && line * Ahead::kLine < at + parts() * kPart;
        value_rows<rows(), parts()>(lines, at, left, to, n, alpha + row,
                                    any ? Ahead::at(ahead, n, line * kTile) : Ahead());
      });
    });
  }

 private:
  // Call f(first column, parts of vectors as a constant) for register tiles of at most 12 of AVX2's 16 registers.
  template <int R, class F>
  static void in_columns(int n, F f) {
    constexpr int one = kLanes / kPart, most = one * (WEFT_AVX512 || R == 1 ? 4 : R <= 3 ? 2 : 1);
    int at = 0;
    for (; at + most * kPart <= n; at += most * kPart) f(at, std::integral_constant<int, most>());
    for (; at < n; at += one * kPart) f(at, std::integral_constant<int, one>());
  }

  // Call f(first row, rows as a constant) for tiles of similar size.
  template <class F>
  static void in_register_tiles(int m, F f) {
    for (int row = 0; row < m;) {
      const int tiles = (m - row + 5) / 6, rows = (m - row + tiles - 1) / tiles;
      with_rows(rows, [&](auto constant) { f(row, constant); });
      row += rows;
    }
  }
};

}  // namespace
}  // namespace weft::attend
