// Register tiles of attention (attend_engines.h).
#include "attend_engines.h"

namespace weft::attend {
namespace {

// Keeps x in a register. Otherwise the compiler loads a line again for every row.
inline void hold(vf& x) {
#if WEFT_AVX512
  asm("" : "+v"(x));
#elif WEFT_AVX2
  asm("" : "+x"(x.a), "+x"(x.b));
#endif
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

// ---- tiles of packed operands ----

// Products of words: floats, or pairs of bf16.
struct Floats {
  static constexpr int kWide = 1;

  static vf dot(vf sum, vf a, vf b) { return fma(a, b, sum); }
};

#if WEFT_AVX512_BF16 || WEFT_NEON_BF16
struct PairsOfBf16 {
  static constexpr int kWide = 2;

  static vf dot(vf sum, vf a, vf b) {
#if WEFT_NEON_BF16
    return bf16_dot(sum, recast<vu>(a), recast<vu>(b));
#else
    return _mm512_dpbf16_ps(sum, (__m512bh)_mm512_castps_si512(a), (__m512bh)_mm512_castps_si512(b));
#endif
  }
};
#endif

// C = (C * alpha) + A B for R rows and 16 N columns, with all accumulators in registers.
template <class P, int R, int N>
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
      for (int n = 0; n < N; ++n) sum[r][n] = P::dot(sum[r][n], value, line[n]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) store(c + r * ldc + n * kLanes, sum[r][n]);
}

template <class P, int N>
inline void micro_rows(int rows, int words, const uint32_t* a, int64_t lda, const uint32_t* b, int64_t ldb, float* c,
                       int64_t ldc, const float* alpha) {
  with_rows(rows, [&](auto constant) { micro<P, constant(), N>(words, a, lda, b, ldb, c, ldc, alpha); });
}

template <class P>
struct Tiles {
  static constexpr int kTileRows = 6;

  static void multiply(int m, int n, int k, const void* a, int64_t lda, const void* b, float* c, const float* alpha) {
    const auto* left = static_cast<const uint32_t*>(a);
    const auto* right = static_cast<const uint32_t*>(b);
    const int words = k / P::kWide;
    lda /= P::kWide;
    while (m > 0) {
      const int tiles = (m + kTileRows - 1) / kTileRows, rows = (m + tiles - 1) / tiles;
      tile(rows, n, words, left, lda, right, c, alpha);
      m -= rows, left += rows * lda, c += int64_t(rows) * n;
      if (alpha) alpha += rows;
    }
  }

 private:
  static void tile(int m, int n, int words, const uint32_t* left, int64_t lda, const uint32_t* right, float* c,
                   const float* alpha) {
    int at = 0;
    // 16 registers of 8 floats: 12 of sums. A single row takes 64 columns, so its sums are 8 chains.
    if ((WEFT_AVX2 || WEFT_NEON) && m > 1) {
      for (; at + 32 <= n && m <= 3; at += 32) micro_rows<P, 2>(m, words, left, lda, right + at, n, c + at, n, alpha);
      for (; at < n; at += 16) micro_rows<P, 1>(m, words, left, lda, right + at, n, c + at, n, alpha);
      return;
    }
    for (; at + 64 <= n; at += 64) micro_rows<P, 4>(m, words, left, lda, right + at, n, c + at, n, alpha);
    if (n - at == 48) micro_rows<P, 3>(m, words, left, lda, right + at, n, c + at, n, alpha);
    if (n - at == 32) micro_rows<P, 2>(m, words, left, lda, right + at, n, c + at, n, alpha);
    if (n - at == 16) micro_rows<P, 1>(m, words, left, lda, right + at, n, c + at, n, alpha);
  }
};

// ---- few rows with bf16 ----
//
// For few rows, packing takes longer than the products. Keys stay pairs of bf16, [dim / 2, kTile], and values stay in
// the lines. Each element of a result has the chain of operations of `micro` over packed floats, so the same bits.
//
// The products also prefetch the next tile, if `ahead` is not null: one line of the CPU's cache at a time, because a
// burst of prefetches waits for memory while no product runs.

// sum[r][n] += value(r) * line(n). With few rows all values stay in registers, otherwise all lines: at most 16
// registers of AVX2 are in use. A sum that the compiler keeps in memory makes each product wait for the store before.
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

// Call f(first column, parts of vectors as a constant) for register tiles of at most 12 of AVX2's 16 registers.
template <int R, class F>
inline void in_columns(int n, F f) {
  constexpr int one = kLanes / kPart, most = one * (WEFT_AVX512 || R == 1 ? 4 : R <= 3 ? 2 : 1);
  int at = 0;
  for (; at + most * kPart <= n; at += most * kPart) f(at, std::integral_constant<int, most>());
  for (; at < n; at += one * kPart) f(at, std::integral_constant<int, one>());
}

// Call f(first row, rows as a constant) for tiles of similar size.
template <class F>
inline void in_register_tiles(int m, F f) {
  for (int row = 0; row < m;) {
    const int tiles = (m - row + 5) / 6, rows = (m - row + tiles - 1) / tiles;
    with_rows(rows, [&](auto constant) { f(row, constant); });
    row += rows;
  }
}

}  // namespace

void float_products(int m, int n, int k, const float* a, int64_t lda, const float* b, float* c, const float* alpha) {
  Tiles<Floats>::multiply(m, n, k, a, lda, b, c, alpha);
}

#if WEFT_AVX512_BF16 || WEFT_NEON_BF16
void pair_products(int m, int n, int k, const bf16* a, int64_t lda, const bf16* b, float* c, const float* alpha) {
  Tiles<PairsOfBf16>::multiply(m, n, k, a, lda, b, c, alpha);
}
#endif

void few_scores(int m, int k, const float* a, const float* pairs, float* c, const bf16* const* ahead) {
  const auto* b = reinterpret_cast<const uint32_t*>(pairs);
  in_register_tiles(m, [&](int row, auto rows) {
    in_columns<rows()>(kTile, [&](int at, auto parts) {
      score_rows<rows(), parts()>(k / 2, a + int64_t(row) * k, k, b + at, c + row * kTile + at,
                                  ahead && !row ? Ahead::at(ahead, k, at * ((k + Ahead::kLine - 1) / Ahead::kLine))
                                                : Ahead());
    });
  });
}

void few_values(int m, int n, const float* p, const bf16* const* lines, float* c, const float* alpha,
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

}  // namespace weft::attend
