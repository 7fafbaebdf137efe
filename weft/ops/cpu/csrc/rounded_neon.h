// Sums of 8-bit rows with NEON (rounded.h). The instructions depend on the build:
//
//   i8mm       USMMLA and SMMLA for two rows and more: 2 columns x 2 rows x 8 k; USDOT for one row
//   dotprod    SDOT: 4 columns x 4 k
//   neither    SMULL, ADDP and SADALP
//
// Sums are integers and exact, so all builds give equal sums.
#pragma once

#include "gemm_tile.h"

#if defined(__ARM_FEATURE_MATMUL_INT8)
#define WEFT_NEON_I8MM 1
#else
#define WEFT_NEON_I8MM 0
#endif

namespace weft {
namespace {

struct ByteSums {
  int32x4_t a, b, c, d;
};
inline vf as_floats(ByteSums x, int32_t less) {
  const int32x4_t by = vdupq_n_s32(less);
  return {vcvtq_f32_s32(x.a - by), vcvtq_f32_s32(x.b - by), vcvtq_f32_s32(x.c - by), vcvtq_f32_s32(x.d - by)};
}
inline ByteSums read_sums(const int32_t* from) {
  return {vld1q_s32(from), vld1q_s32(from + 4), vld1q_s32(from + 8), vld1q_s32(from + 12)};
}
inline int8x16_t four_bytes(const int8_t* x) { return vreinterpretq_s8_s32(vdupq_n_s32(load_as<int32_t>(x))); }

// sum + products of the 4 k of each of 4 columns
inline int32x4_t dot_bytes(int32x4_t sum, int8x16_t w, int8x16_t x) {
#if defined(__ARM_FEATURE_DOTPROD)
  return vdotq_s32(sum, w, x);
#else
  // Sums of two products fit 16 bits: |w| is at most 128, |x| at most 127.
  const int16x8_t low = vmull_s8(vget_low_s8(w), vget_low_s8(x)), high = vmull_high_s8(w, x);
  return vpadalq_s16(sum, vpaddq_s16(low, high));
#endif
}

// Weights of two kinds: unsigned bytes, and nibbles. `Operand` is what the products take.
struct WholeBytes {
#if WEFT_NEON_I8MM
  using Operand = uint8x16_t;
  static Operand operand(uint8x16_t read) { return read; }
  static int32x4_t dot(int32x4_t sum, Operand w, int8x16_t x) { return vusdotq_s32(sum, w, x); }
  static int32x4_t square(int32x4_t sum, Operand w, int8x16_t x) { return vusmmlaq_s32(sum, w, x); }
#else
  using Operand = int8x16_t;  // bytes minus 128
  static Operand operand(uint8x16_t read) { return vreinterpretq_s8_u8(read ^ 0x80); }
  static int32x4_t dot(int32x4_t sum, Operand w, int8x16_t x) { return dot_bytes(sum, w, x); }
#endif
};

struct HalfBytes {
  using Operand = int8x16_t;
  static Operand low(uint8x16_t read) { return vreinterpretq_s8_u8(read & 15); }
  static Operand high(uint8x16_t read) { return vreinterpretq_s8_u8(vshrq_n_u8(read, 4)); }
  static int32x4_t dot(int32x4_t sum, Operand w, int8x16_t x) { return dot_bytes(sum, w, x); }
#if WEFT_NEON_I8MM
  static int32x4_t square(int32x4_t sum, Operand w, int8x16_t x) { return vmmlaq_s32(sum, w, x); }
#endif
};

// Sums of rows and of `vectors` times 8 columns, int32 [rows, 32]. Never inlined: see `neon_sums`.
template <int rows, int vectors>
__attribute__((noinline)) void byte_dots(const int8_t* codes, int64_t stride, const uint8_t* w, int64_t steps,
                                         bool added, int32_t* to) {
  constexpr int quads = 2 * vectors;
  int32x4_t sum[rows][quads];
#pragma GCC unroll 8
  for (int row = 0; row < rows; ++row)
#pragma GCC unroll 8
    for (int quad = 0; quad < quads; ++quad)
      sum[row][quad] = added ? vld1q_s32(to + row * kBlock + 4 * quad) : vdupq_n_s32(0);
  for (int64_t step = 0; step < steps; ++step, w += kBlock * 4, codes += 4) {
    __builtin_prefetch(w + kAhead);
    if (vectors > 2) __builtin_prefetch(w + kAhead + 64);
    int8x16_t x[rows];
#pragma GCC unroll 8
    for (int row = 0; row < rows; ++row) x[row] = four_bytes(codes + row * stride);
#pragma GCC unroll 8
    for (int quad = 0; quad < quads; ++quad) {
      const auto weights = WholeBytes::operand(sixteen_bytes(w + 16 * quad));
#pragma GCC unroll 8
      for (int row = 0; row < rows; ++row) sum[row][quad] = WholeBytes::dot(sum[row][quad], weights, x[row]);
    }
  }
#pragma GCC unroll 8
  for (int row = 0; row < rows; ++row)
#pragma GCC unroll 8
    for (int quad = 0; quad < quads; ++quad) vst1q_s32(to + row * kBlock + 4 * quad, sum[row][quad]);
}

// Sums of 64 k of nibbles, int32 [rows, 32]: of columns 4 quad .. and 16 + 4 quad .. for each of `quads` quads.
template <int rows, int quads>
__attribute__((noinline)) void nibble_dots(const int8_t* codes, int64_t stride, const uint8_t* w, int32_t* to) {
  int32x4_t sum[rows][2][quads];
#pragma GCC unroll 8
  for (int row = 0; row < rows; ++row)
#pragma GCC unroll 8
    for (int quad = 0; quad < quads; ++quad) sum[row][0][quad] = sum[row][1][quad] = vdupq_n_s32(0);
  for (int step = 0; step < 16; ++step, w += kBlock * 2, codes += 4) {
    int8x16_t x[rows];
#pragma GCC unroll 8
    for (int row = 0; row < rows; ++row) x[row] = four_bytes(codes + row * stride);
#pragma GCC unroll 8
    for (int quad = 0; quad < quads; ++quad) {
      const uint8x16_t both = sixteen_bytes(w + 16 * quad);
      const auto low = HalfBytes::low(both), high = HalfBytes::high(both);
#pragma GCC unroll 8
      for (int row = 0; row < rows; ++row) {
        sum[row][0][quad] = HalfBytes::dot(sum[row][0][quad], low, x[row]);
        sum[row][1][quad] = HalfBytes::dot(sum[row][1][quad], high, x[row]);
      }
    }
  }
#pragma GCC unroll 8
  for (int row = 0; row < rows; ++row)
#pragma GCC unroll 8
    for (int quad = 0; quad < quads; ++quad)
      for (int half = 0; half < 2; ++half)
        vst1q_s32(to + row * kBlock + half * kLanes + 4 * quad, sum[row][half][quad]);
}

#if WEFT_NEON_I8MM

// 8 k of rows 2 pair and 2 pair + 1; the last row stands for a row beyond `rows`.
template <int rows>
inline int8x16_t two_rows(const int8_t* codes, int64_t stride, int pair) {
  return vcombine_s8(vld1_s8(codes + 2 * pair * stride), vld1_s8(codes + std::min(2 * pair + 1, rows - 1) * stride));
}

// The sums of 4 columns of two rows, from the sums of columns 0, 1 and 2, 3 of both rows.
template <int rows>
inline void put_squares(const int32x4_t (&sum)[2], int pair, int32_t* to) {
  vst1q_s32(to + 2 * pair * kBlock, vuzp1q_s32(sum[0], sum[1]));
  if (2 * pair + 1 < rows) vst1q_s32(to + (2 * pair + 1) * kBlock, vuzp2q_s32(sum[0], sum[1]));
}

// Columns 0, 1 and columns 2, 3 of 8 k, from 4 columns of two steps of 4 k.
inline uint8x16_t columns_of(uint8x16_t first, uint8x16_t second, int part) {
  const uint32x4_t a = vreinterpretq_u32_u8(first), b = vreinterpretq_u32_u8(second);
  return vreinterpretq_u8_u32(part ? vzip2q_u32(a, b) : vzip1q_u32(a, b));
}

template <int rows, int vectors>
__attribute__((noinline)) void byte_squares(const int8_t* codes, int64_t stride, const uint8_t* w, int64_t twos,
                                            int32_t* to) {
  constexpr int quads = 2 * vectors, pairs = (rows + 1) / 2;
  int32x4_t sum[pairs][quads][2];
#pragma GCC unroll 4
  for (int pair = 0; pair < pairs; ++pair)
#pragma GCC unroll 8
    for (int quad = 0; quad < quads; ++quad) sum[pair][quad][0] = sum[pair][quad][1] = vdupq_n_s32(0);
  for (int64_t two = 0; two < twos; ++two, w += kBlock * 8, codes += 8) {
    __builtin_prefetch(w + kAhead);
    __builtin_prefetch(w + kAhead + 128);
    int8x16_t x[pairs];
#pragma GCC unroll 4
    for (int pair = 0; pair < pairs; ++pair) x[pair] = two_rows<rows>(codes, stride, pair);
#pragma GCC unroll 8
    for (int quad = 0; quad < quads; ++quad) {
      const uint8x16_t first = sixteen_bytes(w + 16 * quad), second = sixteen_bytes(w + kBlock * 4 + 16 * quad);
#pragma GCC unroll 2
      for (int part = 0; part < 2; ++part) {
        const auto weights = WholeBytes::operand(columns_of(first, second, part));
#pragma GCC unroll 4
        for (int pair = 0; pair < pairs; ++pair)
          sum[pair][quad][part] = WholeBytes::square(sum[pair][quad][part], weights, x[pair]);
      }
    }
  }
#pragma GCC unroll 4
  for (int pair = 0; pair < pairs; ++pair)
#pragma GCC unroll 8
    for (int quad = 0; quad < quads; ++quad) put_squares<rows>(sum[pair][quad], pair, to + 4 * quad);
}

template <int rows, int quads>
__attribute__((noinline)) void nibble_squares(const int8_t* codes, int64_t stride, const uint8_t* w, int32_t* to) {
  constexpr int pairs = (rows + 1) / 2;
  int32x4_t sum[pairs][2][quads][2];
#pragma GCC unroll 4
  for (int pair = 0; pair < pairs; ++pair)
#pragma GCC unroll 8
    for (int i = 0; i < 2 * quads; ++i) sum[pair][i % 2][i / 2][0] = sum[pair][i % 2][i / 2][1] = vdupq_n_s32(0);
  for (int two = 0; two < 8; ++two, w += kBlock * 4, codes += 8) {
    int8x16_t x[pairs];
#pragma GCC unroll 4
    for (int pair = 0; pair < pairs; ++pair) x[pair] = two_rows<rows>(codes, stride, pair);
#pragma GCC unroll 8
    for (int quad = 0; quad < quads; ++quad) {
      const uint8x16_t first = sixteen_bytes(w + 16 * quad), second = sixteen_bytes(w + kBlock * 2 + 16 * quad);
#pragma GCC unroll 2
      for (int part = 0; part < 2; ++part) {
        const uint8x16_t both = columns_of(first, second, part);
        const auto low = HalfBytes::low(both), high = HalfBytes::high(both);
#pragma GCC unroll 4
        for (int pair = 0; pair < pairs; ++pair) {
          sum[pair][0][quad][part] = HalfBytes::square(sum[pair][0][quad][part], low, x[pair]);
          sum[pair][1][quad][part] = HalfBytes::square(sum[pair][1][quad][part], high, x[pair]);
        }
      }
    }
  }
#pragma GCC unroll 4
  for (int pair = 0; pair < pairs; ++pair)
#pragma GCC unroll 8
    for (int i = 0; i < 2 * quads; ++i)
      put_squares<rows>(sum[pair][i % 2][i / 2], pair, to + i % 2 * kLanes + i / 2 * 4);
}

#endif

// Sums of rows and of `vectors` times 8 columns, int32 [rows, 32], over `steps` of 4 k.
template <int rows, int vectors>
inline void byte_sums(const int8_t* codes, int64_t stride, const uint8_t* w, int64_t steps, Ahead, int32_t* to) {
#if WEFT_NEON_I8MM
  if constexpr (rows > 1) {
    const int64_t twos = steps / 2;
    byte_squares<rows, vectors>(codes, stride, w, twos, to);
    if (steps % 2) byte_dots<rows, vectors>(codes + 8 * twos, stride, w + twos * kBlock * 8, 1, true, to);
    return;
  }
#endif
  byte_dots<rows, vectors>(codes, stride, w, steps, false, to);
}

// Sums of rows and of one group of 64 k of nibbles, int32 [rows, 32]. More than two rows: half of the columns at a
// time.
template <int rows>
inline void nibble_sums(const int8_t* codes, int64_t stride, const uint8_t* w, int32_t* to) {
  constexpr int quads = rows > 2 ? 2 : 4;
  for (int quad = 0; quad < 4; quad += quads) {
#if WEFT_NEON_I8MM
    if constexpr (rows > 1) {
      nibble_squares<rows, quads>(codes, stride, w + 16 * quad, to + 4 * quad);
      continue;
    }
#endif
    nibble_dots<rows, quads>(codes, stride, w + 16 * quad, to + 4 * quad);
  }
}

}  // namespace
}  // namespace weft
