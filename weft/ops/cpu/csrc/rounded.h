// Rows rounded to 8 or to 16 bits times weights of 8 and of 4 bits. Sums are integers, so all kernels give equal sums.
//
//   groups     x[m, k] ~ step[m] * code[m, k]
//              8 bits: code -127 to 127, step = largest magnitude of a group of k / 127
//              16 bits: code -32,639 to 32,639 = 256 * high + low, both bytes with a sign; step is a power of two.
//              So numbers in bf16 from a 64th of the largest magnitude on are exact
//   bytes      groups of `Coding::group` k (a multiple of 64), or the whole row
//              w[n, k] = factor[n] * (byte[n, k] - 128)
//              out[m, n] = sum over groups of (sum of code * byte - 128 * sum of codes) * factor[n] * step[m], in this
//              order, in which no product overflows before the result does
//   nibbles    groups of 64 k; w has a scale and a zero point per group
//              out[m, n] = sum over groups of (sum of code * nibble - zero[n] * sum of codes) * (step[m] * scale[n])
//
//   packed     multiples of 64 k of a block. A step is 4 k of 32 columns.
//              Bytes: [column 0: k .. k + 3] .. [column 31: ..].
//              Nibbles: columns 0 to 15 in the low halves, columns 16 to 31 in the high halves. 64 k of nibbles are
//              preceded by 32 scales (float32) and 32 zero points (bytes)
//   rows       codes, with zeros behind the last k, row after row; for AMX tiles: [16 rows][64 k][row of the 16][64].
//              16 bits: the high bytes of a row, then the low bytes
//
// Bytes of weights are unsigned, because vpdpbusd needs one unsigned operand; the sum of a row's codes corrects for the
// offset. Sums have 32 bits and are exact up to 65,000 inputs of a group: |code * byte| is at most 127 * 255 per input.
// With 16 bits, the sum of the low bytes is added to 256 times the sum of the high bytes: |code * byte| is at most
// 32,639 * 255 per input, and a group has at most 128 inputs. Float32 holds a sum of 64 k of nibbles exactly with 8 bits;
// with 16 bits the sum is rounded, in the same way by all kernels.
#pragma once

#include "amx.h"
#include "coded.h"
#include "crew.h"
#include "gemm_tile.h"
#if WEFT_NEON
#include "rounded_neon.h"
#endif

#include <vector>

namespace weft {
namespace {

constexpr int kByteDepth = 4;  // k per step
constexpr int64_t kByteStep = kBlock * kByteDepth;
constexpr int64_t kByteInputs = 65'000;  // inputs of a group with exact sums
constexpr int64_t kByteTileRows = 16, kByteTileDepth = 64;
constexpr int64_t kNibbleHead = kBlock * 5, kNibbleGroup = kNibbleHead + kByteTileDepth / kByteDepth * kByteStep / 2;

static_assert(Coding::kBytes64 == kByteTileDepth / kByteDepth * kByteStep && Coding::kNibbles64 == kNibbleGroup);

struct ByteSteps {
  static constexpr int depth = kByteDepth;
  static constexpr int64_t bytes = kByteStep;
};

// Rows in 8 or 16 bits, from row `first` on.
struct ByteRows {
  int8_t* codes = nullptr;
  int bytes = 1;                 // of a code
  int64_t first = 0, depth = 0;  // depth: k per row in memory, a multiple of 64
  int64_t group = 0;             // k per step of rounding, at most `depth`
  bool tiles = false;            // for AMX
  int64_t rows = 0;              // a multiple of 16
  float* steps = nullptr;        // [groups, rows]
  int32_t* sums = nullptr;       // [groups, rows], sums of codes

  int64_t stride() const { return depth * bytes; }
  // Bytes from the high to the low bytes of a row; 0 for codes of one byte.
  int64_t to_low() const { return bytes == 2 ? depth : 0; }
  // Offset of k `k`, a multiple of 64, of row `row`.
  int64_t at(int64_t row, int64_t k) const {
    if (!tiles) return row * stride() + k;
    return row / kByteTileRows * kByteTileRows * depth + k * kByteTileRows + row % kByteTileRows * kByteTileDepth;
  }
};

// Bits of the largest magnitude. Compared as integers, so infinities and NaN are the largest.
inline uint32_t largest_bits(const float* x, int64_t count) {
  uint32_t most = 0;
  for (int64_t k = 0; k < count; ++k) most = std::max(most, float_to_bits(x[k]) & 0x7fffffffu);
  return most;
}
inline uint32_t largest_bits(const bf16* x, int64_t count) {
  uint16_t most = 0;
  for (int64_t k = 0; k < count; ++k) most = std::max(most, uint16_t(x[k].x & 0x7fffu));
  return uint32_t(most) << 16;
}

#if WEFT_AVX2
// Writes 16 integers of 8 bits.
inline void store_bytes(__m256i first, __m256i second, int8_t* to) {
  const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(first, second), 0xd8);
  const __m128i bytes = _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), bytes);
}

inline int32_t sum_of(__m256i x) {
  const __m128i fours = _mm_add_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
  const __m128i twos = _mm_add_epi32(fours, _mm_unpackhi_epi64(fours, fours));
  return _mm_cvtsi128_si32(twos) + _mm_extract_epi32(twos, 1);
}
#endif

// Writes 64 codes of `left` numbers, with zeros behind; returns the sum of codes. Halves round to even.
template <class X>
int32_t round_bytes(const X* x, int64_t left, float inverse, int8_t* to) {
#if WEFT_AVX512
  __m512i total = _mm512_setzero_si512();
  for (int part = 0; part < 4; ++part) {
    const int count = int(std::clamp<int64_t>(left - 16 * part, 0, 16));
    const vf value = count == 16 ? load(x + 16 * part) : count ? load_n(x + 16 * part, count) : splat(0.0f);
    const __m512i code = _mm512_cvtps_epi32(value * splat(inverse));
    total = _mm512_add_epi32(total, code);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + 16 * part), _mm512_cvtsepi32_epi8(code));
  }
  return _mm512_reduce_add_epi32(total);
#elif WEFT_AVX2
  __m256i total = _mm256_setzero_si256();
  for (int part = 0; part < 4; ++part) {
    const int count = int(std::clamp<int64_t>(left - 16 * part, 0, 16));
    const vf value = count == 16 ? load(x + 16 * part) : count ? load_n(x + 16 * part, count) : splat(0.0f);
    const vf scaled = value * splat(inverse);
    const __m256i first = _mm256_cvtps_epi32(scaled.a), second = _mm256_cvtps_epi32(scaled.b);
    total = _mm256_add_epi32(total, _mm256_add_epi32(first, second));
    store_bytes(first, second, to + 16 * part);
  }
  return sum_of(total);
#elif WEFT_NEON
  int32x4_t total = vdupq_n_s32(0);
  for (int part = 0; part < 4; ++part) {
    const int count = int(std::clamp<int64_t>(left - 16 * part, 0, 16));
    const vf value = count == 16 ? load(x + 16 * part) : count ? load_n(x + 16 * part, count) : splat(0.0f);
    const vf scaled = value * splat(inverse);
    const int32x4_t a = vcvtnq_s32_f32(scaled.a), b = vcvtnq_s32_f32(scaled.b);
    const int32x4_t c = vcvtnq_s32_f32(scaled.c), d = vcvtnq_s32_f32(scaled.d);
    total = total + ((a + b) + (c + d));
    const int16x8_t low = vqmovn_high_s32(vqmovn_s32(a), b), high = vqmovn_high_s32(vqmovn_s32(c), d);
    vst1q_s8(to + 16 * part, vqmovn_high_s16(vqmovn_s16(low), high));
  }
  return vaddvq_s32(total);
#else
  int32_t total = 0;
  for (int64_t k = 0; k < kByteTileDepth; ++k) {
    const int32_t code = k < left ? int32_t(std::nearbyintf(widen(x[k]) * inverse)) : 0;
    to[k] = int8_t(code), total += code;
  }
  return total;
#endif
}

constexpr float kLargestWord = 127 * 256 + 127;

// A power of two: the step of codes of 16 bits for numbers up to `largest`, which is finite.
inline float word_step(float largest) {
  constexpr uint32_t kBits = 14, kExponent = 1 << 23;  // 2^14 <= 2^14 * fraction < 2^15
  const uint32_t most = float_to_bits(kLargestWord) % kExponent, bits = float_to_bits(largest);
  const uint32_t exponent = bits / kExponent + (bits % kExponent > most);
  return bits_to_float((std::max(exponent, kBits + 1) - kBits) * kExponent);
}

// The same as `round_bytes` for codes of 16 bits, 64 high and 64 low bytes.
template <class X>
int32_t round_words(const X* x, int64_t left, float inverse, int8_t* high, int8_t* low) {
#if WEFT_AVX512
  __m512i total = _mm512_setzero_si512();
  for (int part = 0; part < 4; ++part) {
    const int count = int(std::clamp<int64_t>(left - 16 * part, 0, 16));
    const vf value = count == 16 ? load(x + 16 * part) : count ? load_n(x + 16 * part, count) : splat(0.0f);
    const __m512i code = _mm512_cvtps_epi32(value * splat(inverse));
    const __m512i upper = _mm512_srai_epi32(_mm512_add_epi32(code, _mm512_set1_epi32(128)), 8);
    total = _mm512_add_epi32(total, code);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(high + 16 * part), _mm512_cvtepi32_epi8(upper));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(low + 16 * part), _mm512_cvtepi32_epi8(code));
  }
  return _mm512_reduce_add_epi32(total);
#elif WEFT_AVX2
  __m256i total = _mm256_setzero_si256();
  for (int part = 0; part < 4; ++part) {
    const int count = int(std::clamp<int64_t>(left - 16 * part, 0, 16));
    const vf value = count == 16 ? load(x + 16 * part) : count ? load_n(x + 16 * part, count) : splat(0.0f);
    const vf scaled = value * splat(inverse);
    const __m256i codes[2] = {_mm256_cvtps_epi32(scaled.a), _mm256_cvtps_epi32(scaled.b)};
    __m256i upper[2], lower[2];
    for (int half = 0; half < 2; ++half) {
      upper[half] = _mm256_srai_epi32(_mm256_add_epi32(codes[half], _mm256_set1_epi32(128)), 8);
      lower[half] = _mm256_sub_epi32(codes[half], _mm256_slli_epi32(upper[half], 8));
      total = _mm256_add_epi32(total, codes[half]);
    }
    store_bytes(upper[0], upper[1], high + 16 * part);
    store_bytes(lower[0], lower[1], low + 16 * part);
  }
  return sum_of(total);
#else
  int32_t total = 0;
  for (int64_t k = 0; k < kByteTileDepth; ++k) {
    const int32_t code = k < left ? int32_t(std::nearbyintf(widen(x[k]) * inverse)) : 0;
    high[k] = int8_t((code + 128) >> 8), low[k] = int8_t(code), total += code;
  }
  return total;
#endif
}

// A rounding of rows of x; `first` is the number of the first row. group: k with a common step, a multiple of 64;
// bytes: of a code.
struct Rounding {
  int64_t first, rows, inputs, group;
  int bytes;
  bool tiles;

  int64_t depth() const { return divide_up(inputs, kByteTileDepth) * kByteTileDepth; }
  int64_t all() const { return divide_up(rows, kByteTileRows) * kByteTileRows; }
  int64_t groups() const { return divide_up(depth(), group); }
  int64_t memory() const { return all() * (depth() * bytes + 8 * groups()) + 64; }
  // The rows' layout in `memory`.
  ByteRows in(uint8_t* memory) const {
    int8_t* const codes = reinterpret_cast<int8_t*>((reinterpret_cast<uintptr_t>(memory) + 63) / 64 * 64);
    float* const steps = reinterpret_cast<float*>(codes + all() * depth() * bytes);
    int32_t* const sums = reinterpret_cast<int32_t*>(steps + all() * groups());
    return {codes, bytes, first, depth(), std::min(group, depth()), tiles, all(), steps, sums};
  }
};

// Step of a group of a row, and the reciprocal by which numbers are multiplied; 0: all codes are 0.
struct Steps {
  float step, inverse;

  // largest: magnitude. A value that is not finite makes all results of the row NaN, whatever the codes.
  Steps(float largest, int bytes) : step(std::numeric_limits<float>::quiet_NaN()), inverse(0.0f) {
    if (!(largest <= std::numeric_limits<float>::max())) return;
    step = bytes == 2 ? word_step(largest) : largest / 127.0f;
    if (largest == 0.0f) return;
    inverse = bytes == 2 ? 1.0f / step : std::min(127.0f / largest, std::numeric_limits<float>::max());
  }
};

template <class X>
void round_rows(const Rounding& of, const X* x, int64_t x_stride, uint8_t* memory) {
  const ByteRows made = of.in(memory);
  const int64_t groups = of.groups();
  // With more than one tile, tiles of 16 rows are read whole.
  const int64_t filled = of.tiles && of.rows > kByteTileRows ? made.rows : of.rows;
  for (int64_t row = 0; row < filled; ++row, x += x_stride) {
    for (int64_t number = 0; number < groups; ++number) {
      const int64_t begin = number * made.group, until = std::min(made.depth, begin + made.group);
      const int64_t end = std::min(of.inputs, until);
      const float largest = row < of.rows ? bits_to_float(largest_bits(x + begin, end - begin)) : 0.0f;
      const Steps steps(largest, of.bytes);
      int32_t sum = 0;
      for (int64_t k = begin; k < until; k += kByteTileDepth) {
        int8_t* const to = made.codes + made.at(row, k);
        int8_t* const low = to + made.to_low();
        if (steps.inverse == 0.0f)
          std::memset(to, 0, kByteTileDepth), std::memset(low, 0, kByteTileDepth);
        else if (of.bytes == 2)
          sum += round_words(x + k, of.inputs - k, steps.inverse, to, low);
        else
          sum += round_bytes(x + k, of.inputs - k, steps.inverse, to);
      }
      made.steps[number * made.rows + row] = steps.step;
      made.sums[number * made.rows + row] = sum;
    }
  }
}

// --- sums of a tile of rows -----------------------------------------------------------------------------------------

// 16 sums += products of 4 k: x has the 4 codes of a row, w the bytes of 16 columns.
#if WEFT_AVX512
using ByteSums = __m512i;
inline ByteSums no_sums() { return _mm512_setzero_si512(); }
inline __m512i four_bytes(const int8_t* x) { return _mm512_set1_epi32(load_as<int32_t>(x)); }
inline vf as_floats(ByteSums x, int32_t less) {
  return _mm512_cvtepi32_ps(_mm512_sub_epi32(x, _mm512_set1_epi32(less)));
}
inline ByteSums dot_bytes(ByteSums sum, __m512i x, __m512i w) {
#if defined(__AVX512VNNI__)
  return _mm512_dpbusd_epi32(sum, w, x);
#else
  const __m512i low = _mm512_set1_epi32(0x00ff00ff);
  const __m512i even = _mm512_madd_epi16(_mm512_and_si512(w, low), _mm512_srai_epi16(_mm512_slli_epi16(x, 8), 8));
  const __m512i odd = _mm512_madd_epi16(_mm512_srli_epi16(w, 8), _mm512_srai_epi16(x, 8));
  return _mm512_add_epi32(sum, _mm512_add_epi32(even, odd));
#endif
}
inline ByteSums read_sums(const int32_t* from) { return _mm512_loadu_si512(from); }
inline __m512i load_bytes(const uint8_t* w) { return _mm512_loadu_si512(w); }
inline __m512i low_halves(__m512i w) { return _mm512_and_si512(w, _mm512_set1_epi8(15)); }
inline __m512i high_halves(__m512i w) { return low_halves(_mm512_srli_epi16(w, 4)); }
#elif WEFT_AVX2
struct ByteSums {
  __m256i a, b;
};
inline ByteSums no_sums() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
inline __m256i four_bytes(const int8_t* x) { return _mm256_set1_epi32(load_as<int32_t>(x)); }
inline vf as_floats(ByteSums x, int32_t less) {
  const __m256i by = _mm256_set1_epi32(less);
  return {_mm256_cvtepi32_ps(_mm256_sub_epi32(x.a, by)), _mm256_cvtepi32_ps(_mm256_sub_epi32(x.b, by))};
}
inline ByteSums read_sums(const int32_t* from) { return {eight(from), eight(from + 8)}; }
#elif !WEFT_NEON
typedef int32_t ByteSums __attribute__((vector_size(64)));
typedef uint32_t ByteWords __attribute__((vector_size(64)));
inline ByteSums no_sums() { return ByteSums{}; }
inline int32_t four_bytes(const int8_t* x) { return load_as<int32_t>(x); }
inline vf as_floats(ByteSums x, int32_t less) {
  vf made;
  for (int lane = 0; lane < kLanes; ++lane) made[lane] = float(x[lane] - less);
  return made;
}
inline ByteSums dot_bytes(ByteSums sum, int32_t x, ByteWords w) {
  for (int k = 0; k < kByteDepth; ++k)
    sum += recast<ByteSums>(w >> (8 * k) & 255u) * int32_t(int8_t(uint32_t(x) >> (8 * k)));
  return sum;
}
inline ByteSums read_sums(const int32_t* from) { return load_as<ByteSums>(from); }
inline ByteWords load_bytes(const uint8_t* w) { return load_as<ByteWords>(w); }
inline ByteWords low_halves(ByteWords w) { return w & 0x0f0f0f0fu; }
inline ByteWords high_halves(ByteWords w) { return low_halves(w >> 4); }
#endif

// True if the sums of byte tiles have bytes minus 128 as factors.
#if (WEFT_AVX2 && !defined(__AVXVNNI__)) || (WEFT_NEON && !WEFT_NEON_I8MM)
constexpr bool kSignedBytes = true;
#else
constexpr bool kSignedBytes = false;
#endif

// A group of a tile's k.
struct ByteGroup {
  bool first, last;
  float* totals;  // float32 [rows, 32], results of the groups before
};

// Adds a row's sums of one group to the row's results, and writes the results behind the last group. codes: the sum of
// the row's codes in the group.
template <class Out>
inline void finish_bytes(ByteSums first, ByteSums second, int32_t codes, float step, const Finish& finish,
                         const ByteGroup& group, int64_t row, Out* out) {
  const int32_t less = kSignedBytes ? 0 : 128 * codes;
  vf a = as_floats(first, less), b = as_floats(second, less);
  if (finish.scaled) a = a * load(finish.scale), b = b * load(finish.scale + kLanes);
  float* const total = group.totals + row * kBlock;
  a = group.first ? a * splat(step) : fma(a, splat(step), load(total));
  b = group.first ? b * splat(step) : fma(b, splat(step), load(total + kLanes));
  if (group.last) return finish_scaled(a, b, finish, out);
  store(total, a);
  store(total + kLanes, b);
}

constexpr int kByteTile = WEFT_AVX512 ? kRows : WEFT_AVX2 ? 4 : WEFT_NEON ? 6 : 2;

#if WEFT_AVX2

// Weights of 8 columns for products with signed codes of rows.
#if defined(__AVXVNNI__)
struct EightBytes {
  __m256i w;
  explicit EightBytes(__m256i read) : w(read) {}
  __m256i dot(__m256i sum, __m256i x) const { return _mm256_dpbusd_avx_epi32(sum, w, x); }
};
#else
// `vpmaddubsw` adds two products and saturates at 32,767, which is never reached: the size of byte - 128 is at most 128
// (byte 0), and of a code at most 127, so two products are at most 2 * 128 * 127 = 32,512. Codes are never -128, which
// `vpsignb` could not negate: for |x| <= largest, x * (127 / largest) rounds to at most 127 (`round_rows`).
static_assert(2 * 128 * 127 <= INT16_MAX);
struct EightBytes {
  __m256i w, size;
  explicit EightBytes(__m256i read)
      : w(_mm256_xor_si256(read, _mm256_set1_epi8(char(0x80)))), size(_mm256_abs_epi8(w)) {}
  __m256i dot(__m256i sum, __m256i x) const {
    const __m256i twos = _mm256_maddubs_epi16(size, _mm256_sign_epi8(x, w));
    return _mm256_add_epi32(sum, _mm256_madd_epi16(twos, _mm256_set1_epi16(1)));
  }
};
#endif

// Sums of rows and of `vectors` times 8 columns, int32 [rows, 32]. Never inlined: see `float_sums`.
template <int rows, int vectors>
__attribute__((noinline)) void byte_sums(const int8_t* codes, int64_t stride, const uint8_t* w, int64_t steps,
                                         Ahead ahead, int32_t* to) {
  __m256i sum[rows][vectors];
#pragma GCC unroll 4
  for (int row = 0; row < rows; ++row)
#pragma GCC unroll 4
    for (int part = 0; part < vectors; ++part) sum[row][part] = _mm256_setzero_si256();
  for (int64_t step = 0; step < steps; ++step, w += kByteStep) {
    if (step % (kPage / kByteStep) == 0) __builtin_prefetch(w + kPagesAhead);
    if ((step & ahead.mask) == 0) {
      __builtin_prefetch(ahead.at, 0, 2);
      ahead.at += ahead.line;
    }
    __m256i x[rows];
#pragma GCC unroll 4
    for (int row = 0; row < rows; ++row) x[row] = four_bytes(codes + row * stride + step * kByteDepth);
#pragma GCC unroll 4
    for (int part = 0; part < vectors; ++part) {
      const EightBytes weights(eight(w + 32 * part));
#pragma GCC unroll 4
      for (int row = 0; row < rows; ++row) sum[row][part] = weights.dot(sum[row][part], x[row]);
    }
  }
#pragma GCC unroll 4
  for (int row = 0; row < rows; ++row)
#pragma GCC unroll 4
    for (int part = 0; part < vectors; ++part)
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + row * kBlock + 8 * part), sum[row][part]);
}

#endif

// Sums of rows of `codes`, `stride` apart, and of `steps` of a block, int32 [rows, 32].
#if WEFT_AVX2 || WEFT_NEON

template <int rows>
void sum_bytes(const int8_t* codes, int64_t stride, const uint8_t* w, int64_t steps, Ahead ahead, int32_t* to) {
  if constexpr (rows <= 2) {
    byte_sums<rows, 4>(codes, stride, w, steps, ahead, to);
  } else {  // first 16 columns, then the others, so that the sums stay in registers
    byte_sums<rows, 2>(codes, stride, w, steps, ahead, to);
    byte_sums<rows, 2>(codes, stride, w + kByteStep / 2, steps, {w, 0, INT64_MAX}, to + kLanes);
  }
}

#else

// Never inlined: see `tile_sums`.
template <int rows>
__attribute__((noinline)) void sum_bytes(const int8_t* codes, int64_t stride, const uint8_t* w, int64_t steps,
                                         Ahead ahead, int32_t* to) {
  ByteSums total[rows][2];
#pragma GCC unroll 16
  for (int row = 0; row < rows; ++row) total[row][0] = total[row][1] = no_sums();
  for (int64_t step = 0; step < steps; ++step, w += kByteStep) {
    if (step % (kPage / kByteStep) == 0) __builtin_prefetch(w + kPagesAhead);
    if ((step & ahead.mask) == 0) {
      __builtin_prefetch(ahead.at, 0, 2);
      ahead.at += ahead.line;
    }
    const auto first = load_bytes(w), second = load_bytes(w + kByteStep / 2);
#pragma GCC unroll 16
    for (int row = 0; row < rows; ++row) {
      const auto x = four_bytes(codes + row * stride + step * kByteDepth);
      total[row][0] = dot_bytes(total[row][0], x, first);
      total[row][1] = dot_bytes(total[row][1], x, second);
    }
  }
#pragma GCC unroll 16
  for (int row = 0; row < rows; ++row)
    for (int half = 0; half < 2; ++half) std::memcpy(to + row * kBlock + half * kLanes, &total[row][half], 64);
}

#endif

// Calls `sum(rows, codes, stride, whether these are the first codes, sums)` for codes of one or two bytes. Few rows of two
// bytes are twice as many rows of one byte, so that weights are read once. most: rows of a tile.
template <int rows, int most, class Sum>
inline __attribute__((always_inline)) void sum_codes(const int8_t* codes, int64_t stride, int64_t to_low, int32_t* to,
                                                     Sum sum) {
  constexpr std::integral_constant<int, rows> count;
  if (!kWordRows || !to_low) return sum(count, codes, stride, true, to);
  if constexpr (2 * rows <= most) {
    alignas(64) int32_t both[2 * rows * kBlock];
    sum(std::integral_constant<int, 2 * rows>(), codes, to_low, true, both);
    for (int row = 0; row < rows; ++row)
      for (int i = 0; i < kBlock; ++i)
        to[row * kBlock + i] = both[2 * row * kBlock + i] * 256 + both[(2 * row + 1) * kBlock + i];
  } else {
    alignas(64) int32_t low[rows * kBlock];
    sum(count, codes, stride, true, to);
    sum(count, codes + to_low, stride, false, low);
    for (int i = 0; i < rows * kBlock; ++i) to[i] = to[i] * 256 + low[i];
  }
}

// Rows of `codes`, `stride` apart, times one group of a block. to_low: see ByteRows.
template <class Out, int rows>
void byte_tile(const int8_t* codes, int64_t stride, int64_t to_low, const float* steps, const int32_t* sums,
               const uint8_t* w, int64_t inputs, const Finish& finish, const ByteGroup& group, Out* out,
               int64_t out_stride, Ahead ahead) {
  alignas(64) int32_t total[rows * kBlock];
  const auto sum = [&]<int count>(std::integral_constant<int, count>, const int8_t* from, int64_t apart, bool first,
                                  int32_t* to) {
    sum_bytes<count>(from, apart, w, divide_up(inputs, kByteDepth), first ? ahead : Ahead{w, 0, INT64_MAX}, to);
  };
  sum_codes<rows, kByteTile>(codes, stride, to_low, total, sum);
  for (int row = 0; row < rows; ++row, out += out_stride) {
    const int32_t* from = total + row * kBlock;
    finish_bytes(read_sums(from), read_sums(from + kLanes), sums[row], steps[row], finish, group, row, out);
  }
}

template <class Out>
using ByteTile = void (*)(const int8_t*, int64_t, int64_t, const float*, const int32_t*, const uint8_t*, int64_t,
                          const Finish&, const ByteGroup&, Out*, int64_t, Ahead);
template <class Out, int... rows>
constexpr std::array<ByteTile<Out>, sizeof...(rows)> make_byte_tiles(std::integer_sequence<int, rows...>) {
  return {byte_tile<Out, rows + 1>...};
}
template <class Out>
constexpr auto byte_tiles = make_byte_tiles<Out>(std::make_integer_sequence<int, kByteTile>{});

// --- nibbles --------------------------------------------------------------------------------------------------------

// Scales and zero points of 32 columns.
struct NibbleHead {
  vf scale[2], zero[2];
  explicit NibbleHead(const uint8_t* at) {
    for (int half = 0; half < 2; ++half)
      scale[half] = load_as<vf>(at + 64 * half), zero[half] = int8_floats(at + 4 * kBlock + half * kLanes);
  }
  // total + the value of one group's sums. codes: the row's sum. The inner fma is exact for rows in 8 bits.
  vf add(vf total, ByteSums sums, int half, int32_t codes, float step) const {
    return fma(fma(splat(float(-codes)), zero[half], as_floats(sums, 0)), scale[half] * splat(step), total);
  }
};

constexpr int kNibbleTile = WEFT_AVX512 ? 12 : WEFT_AVX2 ? 4 : WEFT_NEON ? 6 : 1;

#if WEFT_AVX2

// Sums of rows and of one group, int32 [rows, 32]: 8 columns of the low and 8 of the high halves at a time. Sums of
// `kAtOnce` steps fit 16 bits. Never inlined: see `float_sums`.
template <int rows>
__attribute__((noinline)) void nibble_sums(const int8_t* codes, int64_t stride, const uint8_t* w, int32_t* to) {
  constexpr int kSteps = kByteTileDepth / kByteDepth, kAtOnce = 8;
  static_assert(kAtOnce * 2 * 15 * 128 <= INT16_MAX);  // neither `vpmaddubsw` nor the sums exceed 16 bits
  const __m256i fifteen = _mm256_set1_epi8(15);
  const auto at = [&](int row, int half) { return reinterpret_cast<__m256i*>(to + row * kBlock + half * kLanes); };
  for (int part = 0; part < 2; ++part, w += 32, to += 8) {
    for (int first = 0; first < kSteps; first += kAtOnce) {
      __m256i sum[rows][2];
#pragma GCC unroll 4
      for (int row = 0; row < rows; ++row) sum[row][0] = sum[row][1] = _mm256_setzero_si256();
#pragma GCC unroll 8
      for (int step = first; step < first + kAtOnce; ++step) {
        const __m256i both = eight(w + step * kByteStep / 2);
        const __m256i half[2] = {_mm256_and_si256(both, fifteen),
                                 _mm256_and_si256(_mm256_srli_epi16(both, 4), fifteen)};
#pragma GCC unroll 4
        for (int row = 0; row < rows; ++row) {
          const __m256i x = four_bytes(codes + row * stride + step * kByteDepth);
#if defined(__AVXVNNI__)
          for (int i = 0; i < 2; ++i) sum[row][i] = _mm256_dpbusd_avx_epi32(sum[row][i], half[i], x);
#else
          for (int i = 0; i < 2; ++i) {
            sum[row][i] = _mm256_add_epi16(sum[row][i], _mm256_maddubs_epi16(half[i], x));
            asm("" : "+x"(sum[row][i]));  // or GCC keeps products in memory and adds them later
          }
#endif
        }
      }
#pragma GCC unroll 4
      for (int row = 0; row < rows; ++row)
        for (int i = 0; i < 2; ++i) {
#if !defined(__AVXVNNI__)
          sum[row][i] = _mm256_madd_epi16(sum[row][i], _mm256_set1_epi16(1));
#endif
          if (first) sum[row][i] = _mm256_add_epi32(sum[row][i], _mm256_loadu_si256(at(row, i)));
          _mm256_storeu_si256(at(row, i), sum[row][i]);
        }
    }
  }
}

#endif

#if !WEFT_AVX2 && !WEFT_NEON

// Sums of rows of `codes`, `stride` apart, and of `steps` of a group, int32 [rows, 32].
template <int rows>
inline __attribute__((always_inline)) void inlined_nibble_sums(const int8_t* codes, int64_t stride, const uint8_t* w,
                                                               int64_t steps, int32_t* to) {
  ByteSums total[rows][2];
#pragma GCC unroll 16
  for (int row = 0; row < rows; ++row) total[row][0] = total[row][1] = no_sums();
  for (int64_t step = 0; step < steps; ++step, w += kByteStep / 2) {
    const auto both = load_bytes(w);
    const auto first = low_halves(both), second = high_halves(both);
#pragma GCC unroll 16
    for (int row = 0; row < rows; ++row) {
      const auto x = four_bytes(codes + row * stride + step * kByteDepth);
      total[row][0] = dot_bytes(total[row][0], x, first);
      total[row][1] = dot_bytes(total[row][1], x, second);
    }
  }
#pragma GCC unroll 16
  for (int row = 0; row < rows; ++row)
    for (int half = 0; half < 2; ++half) std::memcpy(to + row * kBlock + half * kLanes, &total[row][half], 64);
}

// The same for many rows. A compiler that knows the number of steps, or inlines many rows, keeps sums in memory.
template <int rows>
__attribute__((noipa)) void apart_nibble_sums(const int8_t* codes, int64_t stride, const uint8_t* w, int64_t steps,
                                              int32_t* to) {
  inlined_nibble_sums<rows>(codes, stride, w, steps, to);
}

template <int rows>
void nibble_sums(const int8_t* codes, int64_t stride, const uint8_t* w, int32_t* to) {
  constexpr auto sums = rows <= 4 ? inlined_nibble_sums<rows> : apart_nibble_sums<rows>;
  sums(codes, stride, w, kByteTileDepth / kByteDepth, to);
}

#endif

// Rows of `codes`, `stride` apart, times a block of `groups`; to_low, steps and sums: see ByteRows.
template <class Out, int rows>
void nibble_tile(const int8_t* codes, int64_t stride, int64_t to_low, const float* steps, const int32_t* sums,
                 int64_t next_group, const uint8_t* w, int64_t groups, const Finish& finish, Out* out,
                 int64_t out_stride) {
  vf total[rows][2];
  for (auto& row : total) row[0] = row[1] = splat(0.0f);
  alignas(64) int32_t part[rows * kBlock];
  for (int64_t group = 0; group < groups; ++group, codes += kByteTileDepth, steps += next_group, sums += next_group) {
    for (int64_t line = 0; line < kNibbleGroup; line += 64) __builtin_prefetch(w + kAhead + line);
    const auto sum = [&]<int count>(std::integral_constant<int, count>, const int8_t* from, int64_t apart, bool,
                                    int32_t* to) { nibble_sums<count>(from, apart, w + kNibbleHead, to); };
    sum_codes<rows, kNibbleTile>(codes, stride, to_low, part, sum);
    const NibbleHead head(w);
    w += kNibbleGroup;
    for (int row = 0; row < rows; ++row)
      for (int half = 0; half < 2; ++half)
        total[row][half] =
            head.add(total[row][half], read_sums(part + row * kBlock + half * kLanes), half, sums[row], steps[row]);
  }
  for (int row = 0; row < rows; ++row) finish_row(total[row][0], total[row][1], finish, out + row * out_stride);
}

template <class Out>
using NibbleTile = void (*)(const int8_t*, int64_t, int64_t, const float*, const int32_t*, int64_t, const uint8_t*,
                            int64_t, const Finish&, Out*, int64_t);
template <class Out, int... rows>
constexpr std::array<NibbleTile<Out>, sizeof...(rows)> make_nibble_tiles(std::integer_sequence<int, rows...>) {
  return {nibble_tile<Out, rows + 1>...};
}
template <class Out>
constexpr auto nibble_tiles = make_nibble_tiles<Out>(std::make_integer_sequence<int, kNibbleTile>{});

// --- AMX ------------------------------------------------------------------------------------------------------------

#if WEFT_AMX

// Lines of the next block; each step prefetches some.
struct NextLines {
  const uint8_t *at, *end;
  int64_t each;
  NextLines(const uint8_t* next, int64_t bytes, int64_t steps, bool many)
      : at(next), end(next ? next + bytes : nullptr), each(many && next ? divide_up(bytes / 64, steps) : 0) {}
  void ask() {
    for (int64_t i = 0; i < each && at < end; ++i, at += 64) __builtin_prefetch(at, 0, 2);
  }
};

constexpr int64_t kTogether = 2;  // groups of nibbles scaled together, during the products of later groups
constexpr int64_t kBytePair = 2 * kByteTileRows, kByteTileBytes = kByteTileRows * kByteTileDepth;

// Sums of 64 k and the following k, `steps` times, for R tiles of 16 rows.
template <int R, amx::Kind kind>
inline __attribute__((always_inline)) void byte_sums(amx::Left& left, amx::Right& right, int64_t steps, NextLines& next,
                                                     int32_t* to) {
  amx::clear<R, 2>();
  for (int64_t step = 0; step < steps; ++step) {
    next.ask();
    amx::step<R, 2, kind>(left, right);
    left.at = static_cast<const char*>(left.at) + left.deep;
    right.at = static_cast<const char*>(right.at) + 2 * kByteTileBytes;
  }
  amx::put<R, 2>(reinterpret_cast<float*>(to), kBlock);
}

template <class F>
inline __attribute__((always_inline)) void by_tiles(int64_t rows, F f) {
  rows > kByteTileRows ? f(std::integral_constant<int, 2>()) : f(std::integral_constant<int, 1>());
}

// Rows [begin, end) times a block.
template <class Out>
void run_byte_tiles(const ByteRows& x, const uint8_t* w, const Finish& finish, int64_t begin, int64_t end, Out* out,
                    int64_t out_stride, const uint8_t* following) {
  const int64_t steps = x.depth / kByteTileDepth, pairs = divide_up(end - begin, kBytePair);
  const int64_t groups = divide_up(x.depth, x.group), group_steps = x.group / kByteTileDepth;
  NextLines next(following, steps * 2 * kByteTileBytes, pairs * steps, pairs > 1);
  amx::configure(int(std::min<int64_t>(end - begin, kByteTileRows)));
  amx::settle();
  alignas(64) int32_t sums[2][kBytePair * kBlock];
  alignas(64) float totals[kBytePair * kBlock];
  for (int64_t row = begin; row < end; row += kBytePair) {
    const int64_t rows = std::min(kBytePair, end - row), first = row - x.first;
    const auto finish_group = [&](int64_t number) __attribute__((always_inline)) {
      const ByteGroup group{number == 0, number + 1 == groups, totals};
      const int64_t at = number * x.rows + first;
      for (int64_t r = 0; r < rows; ++r) {
        const int32_t* from = sums[number % 2] + r * kBlock;
        finish_bytes(_mm512_load_si512(from), _mm512_load_si512(from + kLanes), x.sums[at + r], x.steps[at + r], finish,
                     group, r, out + (row - begin + r) * out_stride);
      }
    };
    by_tiles(
        rows, [&]<int R>(std::integral_constant<int, R>) __attribute__((always_inline)) {
          amx::Left left{x.codes + x.at(first, 0), kByteTileDepth, kByteTileBytes, kByteTileRows * x.depth};
          amx::Right right{w, kByteStep};
          // A group's sums are scaled during the next group's products.
          for (int64_t number = 0; number < groups; ++number) {
            const int64_t count = std::min(group_steps, steps - number * group_steps);
            byte_sums<R, amx::Kind::bytes>(left, right, count, next, sums[number % 2]);
            if (number > 0) amx::settle(), finish_group(number - 1);
          }
        });
    amx::settle();
    finish_group(groups - 1);
  }
}

// The same for nibbles; `made` has room for the block in bytes, minus zero points. A group's sums are scaled during the
// next group's products.
template <class Out>
void run_nibble_tiles(const ByteRows& x, const uint8_t* w, const Finish& finish, int64_t begin, int64_t end, Out* out,
                      int64_t out_stride, const uint8_t* following, uint8_t* made) {
  const int64_t groups = x.depth / kByteTileDepth, pairs = divide_up(end - begin, kBytePair);
  const auto make = [&](int64_t group, uint8_t * to) __attribute__((always_inline)) {
    const uint8_t* from = w + group * kNibbleGroup + kNibbleHead;
    const auto four_times = [&](int half) {  // zero point of each column
      return _mm512_shuffle_epi8(_mm512_cvtepu8_epi32(load_as<__m128i>(from - kBlock + half * kLanes)),
                                 _mm512_set4_epi32(0x0c0c0c0c, 0x08080808, 0x04040404, 0));
    };
    const __m512i zero[2] = {four_times(0), four_times(1)};
    for (int64_t line = 0; line < kNibbleGroup; line += 64) __builtin_prefetch(from + kAhead + line);
    for (int64_t step = 0; step < kByteTileDepth / kByteDepth; ++step, from += kByteStep / 2, to += kByteStep) {
      const __m512i both = load_bytes(from);
      _mm512_storeu_si512(to, _mm512_sub_epi8(low_halves(both), zero[0]));
      _mm512_storeu_si512(to + kByteStep / 2, _mm512_sub_epi8(high_halves(both), zero[1]));
    }
  };
  const int64_t ready = pairs > 1 ? groups : 1;  // groups made in advance; one pair: made just before use
  for (int64_t group = 0; group < ready; ++group) make(group, made + group * 2 * kByteTileBytes);
  NextLines next(following, groups * kNibbleGroup, pairs * groups, pairs > 1);
  amx::configure(int(std::min<int64_t>(end - begin, kByteTileRows)));
  amx::settle();
  alignas(64) int32_t sums[2][kTogether][kBytePair * kBlock];
  alignas(64) float totals[kBytePair * kBlock];
  for (int64_t row = begin; row < end; row += kBytePair) {
    const int64_t rows = std::min(kBytePair, end - row), first = row - x.first;
    // Adds the results of groups `from` to `until`.
    const auto add = [&](int64_t from, int64_t until) __attribute__((always_inline)) {
      for (int half = 0; half < 2; ++half) {
        vf scale[kTogether];
        for (int64_t group = from; group < until; ++group)
          scale[group - from] = load_as<vf>(w + group * kNibbleGroup + 64 * half);
        const auto part = &sums[from / kTogether % 2];
        const float* steps = x.steps + from * x.rows + first;
        for (int64_t r = 0; r < rows; ++r) {
          const int64_t at = r * kBlock + half * kLanes;
          vf total = from ? load(totals + at) : splat(0.0f);
          for (int64_t i = 0; i < until - from; ++i)
            total =
                fma(as_floats(_mm512_load_si512((*part)[i] + at), 0), scale[i] * splat(steps[i * x.rows + r]), total);
          store(totals + at, total);
        }
      }
    };
    by_tiles(
        rows, [&]<int R>(std::integral_constant<int, R>) __attribute__((always_inline)) {
          amx::Left left{x.codes + x.at(first, 0), kByteTileDepth, kByteTileBytes, kByteTileRows * x.depth};
          amx::Right right{made, kByteStep};
          for (int64_t group = 0; group < groups; ++group) {
            if (pairs == 1) {
              right.at = made + group % 2 * 2 * kByteTileBytes;
              if (group + 1 < groups) make(group + 1, made + (group + 1) % 2 * 2 * kByteTileBytes);
              amx::settle();
            }
            byte_sums<R, amx::Kind::signed_bytes>(left, right, 1, next, sums[group / kTogether % 2][group % kTogether]);
            if (group % kTogether == 0 && group > 0) amx::settle(), add(group - kTogether, group);
          }
        });
    amx::settle();
    add((groups - 1) / kTogether * kTogether, groups);
    for (int64_t r = 0; r < rows; ++r)
      finish_row(load(totals + r * kBlock), load(totals + r * kBlock + kLanes), finish,
                 out + (row - begin + r) * out_stride);
  }
}

#endif

}  // namespace
}  // namespace weft
