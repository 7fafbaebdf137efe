// Cache lines in 8 bits: E4M3 codes and a power of two per line. ops/kv_fp8.py is the definition.
#pragma once

#include "vector.h"

namespace weft {
namespace {

using namespace vec;

typedef uint8_t Codes __attribute__((vector_size(16)));
#if WEFT_AVX2 || WEFT_NEON
using Words = vu;
using Signed = vu;
#else
typedef uint32_t Words __attribute__((vector_size(64)));
typedef int32_t Signed __attribute__((vector_size(64)));  // result of comparing Words: all bits or none
#endif

inline Words pick(Signed mask, Words a, Words b) { return (Words(mask) & a) | (~Words(mask) & b); }

inline Words widen_codes(const uint8_t* codes) {
#if WEFT_AVX512
  return recast<Words>(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes))));
#elif WEFT_AVX2
  return {Half(_mm256_cvtepu8_epi32(two(codes))), Half(_mm256_cvtepu8_epi32(two(codes + 8)))};
#elif WEFT_NEON
  return widen_bytes(sixteen_bytes(codes));
#else
  Codes read;
  std::memcpy(&read, codes, sizeof(read));
  return __builtin_convertvector(read, Words);
#endif
}

inline void narrow_codes(Words x, uint8_t* codes) {
#if WEFT_AVX512
  _mm_storeu_si128(reinterpret_cast<__m128i*>(codes), _mm512_cvtepi32_epi8(recast<__m512i>(x)));
#elif WEFT_AVX2
  const __m256i words = _mm256_permute4x64_epi64(_mm256_packus_epi32(__m256i(x.a), __m256i(x.b)), 0xd8);
  const __m128i bytes = _mm_packus_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(codes), bytes);
#elif WEFT_NEON
  vst1q_u8(codes, narrow_words(x));
#else
  const Codes made = __builtin_convertvector(x, Codes);
  std::memcpy(codes, &made, sizeof(made));
#endif
}

// 16 codes as floats, exactly. The two NaN codes become 480: lines with such codes have the scale NaN.
inline vf from_codes(const uint8_t* codes) {
#if WEFT_NEON
  // The fields of a code are in order in a float16 with the value divided by 2^8.
  const uint8x16_t read = sixteen_bytes(codes);
  const auto half = [](uint16x8_t x) { return vshlq_n_u16(x & 0x80, 8) | vshlq_n_u16(x & 0x7f, 7); };
  return widen_halves(half(vmovl_u8(vget_low_u8(read))), half(vmovl_high_u8(read))) * splat(256.0f);
#else
  const Words x = widen_codes(codes), size = x & 0x7fu, sign = (x & 0x80u) << 24;
  const Words bits = size << 20;
  // Codes below 8 have the exponent of 8, without the leading one.
  const vf small = recast<vf>(bits + (121u << 23)) - splat(0x1p-6f);
  const Words made = pick(size < 8u, recast<Words>(small), bits + (120u << 23));
  return recast<vf>(made | sign);
#endif
}

// Nearest codes of 16 floats of at most 448; halves round to even.
inline void to_codes(vf y, uint8_t* codes) {
  const Words bits = recast<Words>(y), size = bits & 0x7fffffffu, sign = bits >> 24 & 0x80u;
  // Adding 2^14 rounds to multiples of 2^-9, the smallest code.
  const Words small = recast<Words>(recast<vf>(size) + splat(0x1p14f)) - (141u << 23);
  const Words normal = ((size + 0x7ffffu + (size >> 20 & 1u)) >> 20) - (120u << 3);
  narrow_codes(pick(size < (121u << 23), small, normal) | sign, codes);
}

// Scale of a line with largest magnitude `top`: the smallest power of two that maps `top` to at most 448.
inline int line_power(float top) {
  const uint32_t bits = float_to_bits(top), exponent = bits >> 23, mantissa = bits & 0x7fffffu;
  // 448 is 1.75 * 2^8.
  const int power = int(exponent) - 127 - 8 + (mantissa > 0x600000u);
  if (bits == 0) return -9;  // any power would do
  return power < -126 ? -126 : power;
}

inline float power_of_two(int power) { return bits_to_float(uint32_t(power + 127) << 23); }

// Converts a line of n elements, a multiple of 16, to codes; returns the scale.
template <class T>
inline float quantize_line(const T* from, int64_t n, uint8_t* codes) {
  vf top = splat(0.0f), broken = splat(0.0f);
  for (int64_t i = 0; i < n; i += kLanes) {
    const vf x = load(from + i);
    top = vmax(vabs(x), top);
    broken = fma(x, splat(0.0f), broken);  // NaN for values that are not finite
  }
  const bool finite = reduce_add(broken) == 0.0f;
  const int power = finite ? line_power(reduce_max(top)) : 0;
  const vf inverse = splat(power_of_two(-power));
  for (int64_t i = 0; i < n; i += kLanes) to_codes(load(from + i) * inverse, codes + i);
  return finite ? power_of_two(power) : std::numeric_limits<float>::quiet_NaN();
}

#if WEFT_BYTE_TABLES
// Low and high bytes of magnitudes in bf16, which is exact, for codes 0 to 63.
struct CodeTable {
  alignas(64) uint8_t low[64], high[64];
  constexpr CodeTable() : low(), high() {
    for (int code = 1; code < 64; ++code) {
      int exponent = code >> 3, mantissa = code & 7;
      if (exponent == 0) {  // mantissa * 2^-9
        exponent = 1;
        while (mantissa < 8) mantissa <<= 1, --exponent;
        mantissa &= 7;
      }
      const int bits = (exponent - 7 + 127) << 7 | mantissa << 4;
      low[code] = uint8_t(bits), high[code] = uint8_t(bits >> 8);
    }
  }
};
constexpr CodeTable kCodeTable;

// Low and high bytes of 64 codes in bf16. Lookups in 64 bytes are cheap (Int8Halves in gemm_tile.h). A code with a
// magnitude of at least 64 has the bits s1abcdef and becomes s10000ab cdef0000: each byte is a product of the code's
// bits with a matrix.
struct CodeHalves {
  // Byte 7 - i of a matrix is the row of output bit i: a bit for each input bit.
  static constexpr long long kLow = 0x0000000001020408, kHigh = 0x1020000000000080;
  __m512i low, high;
  explicit CodeHalves(__m512i code) {
    const __mmask64 large = _mm512_movepi8_mask(_mm512_add_epi8(code, code));
    low = _mm512_permutexvar_epi8(code, _mm512_load_si512(kCodeTable.low));
    high = _mm512_permutexvar_epi8(code, _mm512_load_si512(kCodeTable.high));
    low = _mm512_mask_gf2p8affine_epi64_epi8(low, large, code, _mm512_set1_epi64(kLow), 0);
    high = _mm512_mask_gf2p8affine_epi64_epi8(high, large, code, _mm512_set1_epi64(kHigh), 0x40);
    high = _mm512_ternarylogic_epi32(high, code, _mm512_set1_epi8(char(0x80)), 0xf8);  // high | (code & sign)
  }
};

// Dequantizes 64 codes at a time by table: a lookup as bf16, then the scale's exponent is added. Returns the number of
// converted codes: all whole groups of 64, or none if a result could leave the exponent range.
inline int64_t dequantize_table(const uint8_t* codes, float scale, int64_t n, bf16* to) {
  const int power = int(float_to_bits(scale) >> 23) - 127;  // 128 for NaN
  if (power < -110 || power > 110) return 0;
  const __m512i add = _mm512_set1_epi16(short(power * 128));
  const __m512i order = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7), size = _mm512_set1_epi16(0x7fff);
  const int64_t whole = n / 64 * 64;
  for (int64_t i = 0; i < whole; i += 64) {
    // Unpacking works within 128 bits: codes 8 i .. 8 i + 7 share a lane with the codes 32 further on.
    const CodeHalves made(_mm512_permutexvar_epi64(order, _mm512_loadu_si512(codes + i)));
    for (int half = 0; half < 2; ++half) {
      const __m512i x =
          half ? _mm512_unpackhi_epi8(made.low, made.high) : _mm512_unpacklo_epi8(made.low, made.high);
      const __mmask32 some = _mm512_test_epi16_mask(x, size);  // zeros stay zero
      _mm512_storeu_si512(to + i + 32 * half, _mm512_mask_add_epi16(x, some, x, add));
    }
  }
  return whole;
}
#elif WEFT_AVX2 && defined(__F16C__)
// Dequantizes 16 codes at a time: the fields of a code are in order in a float16 with the value divided by 2^8. The
// results have at most 4 bits of fraction, so bf16 is their upper half. Returns the number of converted codes: all, or
// none if a result could leave the exponent range.
inline int64_t dequantize_table(const uint8_t* codes, float scale, int64_t n, bf16* to) {
  const int power = int(float_to_bits(scale) >> 23) - 127;  // 128 for NaN
  if (power < -110 || power > 110) return 0;
  const __m256 factor = _mm256_set1_ps(scale * 256.0f);
  const __m128i none = _mm_setzero_si128(), fields = _mm_set1_epi16(short(0xbfff));
  const auto words = [&](__m128i high) {  // of codes in the upper bytes
    const __m128i half = _mm_and_si128(_mm_srai_epi16(high, 1), fields);
    return _mm256_srli_epi32(_mm256_castps_si256(_mm256_cvtph_ps(half) * factor), 16);
  };
  for (int64_t i = 0; i < n; i += kLanes) {
    // The last step packs within 128 bits: codes 0 .. 3, 8 .. 11 are converted first, then the others.
    const __m128i code = _mm_shuffle_epi32(four(codes + i), 0xd8);
    const __m256i made = _mm256_packus_epi32(words(_mm_unpacklo_epi8(none, code)), words(_mm_unpackhi_epi8(none, code)));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + i), made);
  }
  return n;
}
#else
inline int64_t dequantize_table(const uint8_t*, float, int64_t, bf16*) { return 0; }
#endif
inline int64_t dequantize_table(const uint8_t*, float, int64_t, float*) { return 0; }

template <class T>
inline void dequantize_line(const uint8_t* codes, float scale, int64_t n, T* to) {
  for (int64_t i = dequantize_table(codes, scale, n, to); i < n; i += kLanes)
    store(to + i, from_codes(codes + i) * splat(scale));
}

}  // namespace
}  // namespace weft
