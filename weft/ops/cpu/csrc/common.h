// Common includes and helpers of the CPU extension.
//
// Rules of the extension:
//   * A row's bits depend on the row alone: not on the number of rows or threads, or on the division of work.
//     So each output element has one fixed sequence of floating-point operations. The compiler may not fuse
//     products and sums by itself (-ffp-contract=off): fused operations are written explicitly.
//   * bf16 is widened to float exactly, and rounded once, to nearest even.
//   * Checks of shapes and dtypes stand at the entry; kernels below trust their arguments. A check is a WEFT_CHECK
//     (check.h), without streams.
//   * Only library.cpp includes torch's headers. Kernels get tensors as plain pointers and sizes (tensor.h).
#pragma once

#include "check.h"

#include <algorithm>
#include <cstdint>
#include <cstring>

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)
#define WEFT_AVX512 1
#include <immintrin.h>
#else
#define WEFT_AVX512 0
#endif

#if !WEFT_AVX512 && defined(__AVX2__) && defined(__FMA__)
#define WEFT_AVX2 1
#include <immintrin.h>
#else
#define WEFT_AVX2 0
#endif

#if WEFT_AVX512 && defined(__AVX512BF16__)
#define WEFT_AVX512_BF16 1
#else
#define WEFT_AVX512_BF16 0
#endif

// Numbers of 8 bits become bf16 by tables.
#if WEFT_AVX512 && defined(__AVX512VBMI__) && defined(__GFNI__)
#define WEFT_BYTE_TABLES 1
#else
#define WEFT_BYTE_TABLES 0
#endif

#if defined(__aarch64__) && defined(__ARM_NEON)
#define WEFT_NEON 1
#else
#define WEFT_NEON 0
#endif

#if WEFT_NEON && defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#define WEFT_NEON_BF16 1
#else
#define WEFT_NEON_BF16 0
#endif

// Products of pairs of bf16 by one instruction. Intel's CPUs compute the same products faster by two fused products of
// floats: `vdpbf16ps` takes two cycles there, and a product of floats half a cycle.
#if (WEFT_AVX512_BF16 && !defined(WEFT_NO_BF16_DOTS)) || WEFT_NEON_BF16
#define WEFT_BF16_DOTS 1
#else
#define WEFT_BF16_DOTS 0
#endif

// Products of rows in 16 bits, as two bytes (rounded.h), where these are faster than products of bf16.
#if defined(__AVXVNNI__) && WEFT_AVX2
#define WEFT_WORD_ROWS 1
#elif defined(__AVX512VNNI__) && WEFT_AVX512 && !WEFT_BF16_DOTS && !defined(__AMX_INT8__)
#define WEFT_WORD_ROWS 1
#else
#define WEFT_WORD_ROWS 0
#endif

namespace weft {

inline float bits_to_float(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

inline uint32_t float_to_bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

inline float widen(bf16 value) { return bits_to_float(uint32_t(value.x) << 16); }
inline float widen(float value) { return value; }

// Round to nearest even; NaN stays NaN.
inline uint16_t round_bf16(float value) {
  const uint32_t bits = float_to_bits(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fc0;
  return uint16_t((bits + 0x7fffu + ((bits >> 16) & 1)) >> 16);
}

inline bf16::bf16(float value) : x(round_bf16(value)) {}
inline bf16::operator float() const { return widen(*this); }

// IEEE float16 and float32; rounds to nearest even.
#if defined(__F16C__)
inline float half_to_float(uint16_t bits) { return _cvtsh_ss(bits); }
inline uint16_t float_to_half(float value) { return _cvtss_sh(value, 0); }
#elif WEFT_NEON
inline float half_to_float(uint16_t bits) {
  __fp16 value;
  std::memcpy(&value, &bits, sizeof(value));
  return float(value);
}
inline uint16_t float_to_half(float value) {
  const __fp16 rounded = __fp16(value);
  uint16_t bits;
  std::memcpy(&bits, &rounded, sizeof(bits));
  return bits;
}
#else  // in torch.h
float half_to_float(uint16_t bits);
uint16_t float_to_half(float value);
#endif

inline void narrow(float value, bf16* to) { to->x = round_bf16(value); }
inline void narrow(float value, float* to) { *to = value; }

}  // namespace weft
