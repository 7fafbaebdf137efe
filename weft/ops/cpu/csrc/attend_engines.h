// Packing of tiles, and engines: products of tiles, for attend_tile.h. Register tiles are in attend_engines.cpp:
// three sources have attention, and each source would compile all register tiles again.
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

// ---- products in registers, attend_engines.cpp ----
//
// C[m, n] = A[m, k] B[k, n], or C[i] * alpha[i] + A B if alpha is not null. Row strides of A are in elements.

void float_products(int m, int n, int k, const float* a, int64_t lda, const float* b, float* c, const float* alpha);
#if WEFT_AVX512_BF16 || WEFT_NEON_BF16
// B in pairs of k: [k / 2, n, 2].
void pair_products(int m, int n, int k, const bf16* a, int64_t lda, const bf16* b, float* c, const float* alpha);
#endif

// The same bits as `float_products` for few rows with bf16, without packing as floats. Keys: C[m, 64] = A[m, k] K, with
// K packed by `PackBf16`. Values: C[m, n] = C[i] * alpha[i] + P[m, 64] V, with V in lines. Both also prefetch the lines
// in `ahead`, if any.
void few_scores(int m, int k, const float* a, const float* pairs, float* c, const bf16* const* ahead);
void few_values(int m, int n, const float* p, const bf16* const* lines, float* c, const float* alpha,
                const bf16* const* ahead);

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

// ---- engines ----
//
// `elem` is the type of packed operands. gemm: C[m, n] = A[m, k] B[k, n], or C[i] * alpha[i] + A B. Rows of B come in
// groups of elements that share a word. Row strides of A are in elements.

// Engines of attend_engines.cpp: rows of a block, with a common softmax computation. Blocks begin at multiples of
// kAligned rows.
struct Registers {
  static constexpr int kBlock = WEFT_AVX512 ? 12 : 6, kAligned = 1;

  static void release() {}
};

// bf16 operands in pairs, for VDPBF16PS and AMX.
struct PackBf16 {
  using elem = bf16;

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
struct DotBf16 : PackBf16, Registers {
  static void gemm(int m, int n, int k, const bf16* a, int64_t lda, const bf16* b, float* c, const float* alpha,
                   bool /*exact*/) {
    pair_products(m, n, k, a, lda, b, c, alpha);
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
struct Wide : Registers {
  using elem = float;
  // Most rows of a piece that is not packed as floats: `few_scores`, `few_values`.
  static constexpr int kFew = std::is_same_v<T, bf16> ? kFetchRows : 0;

  static void gemm(int m, int n, int k, const float* a, int64_t lda, const float* b, float* c, const float* alpha,
                   bool /*exact*/) {
    float_products(m, n, k, a, lda, b, c, alpha);
  }
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
};

}  // namespace
}  // namespace weft::attend
