// Numbers of codes in bf16 (coded.cpp): common helpers, and the converters for two types of GGML's blocks.
#pragma once

#include "gemm_block.h"

namespace weft {

// bf16 of an integer of at most 8 bits.
constexpr uint16_t small_bf16(int value) {
  const int size = value < 0 ? -value : value;
  if (size == 0) return 0;
  int exponent = 0;
  while (size >> (exponent + 1)) ++exponent;
  return uint16_t((value < 0 ? 0x8000 : 0) | (127 + exponent) << 7 | (size << (7 - exponent) & 0x7f));
}

#if WEFT_AVX2
inline Half words_of(__m128i low, __m128i high) {
  return Half(_mm256_set_m128i(_mm_unpackhi_epi8(low, high), _mm_unpacklo_epi8(low, high)));
}
#elif !WEFT_AVX512
template <class F>
inline Bf16::Step by_words(F f) {
  uint16_t words[2][32];
  for (int half = 0; half < 2; ++half)
    for (int word = 0; word < 32; ++word) words[half][word] = f(half, word);
  return {{load_as<Pairs>(words[0]), load_as<Pairs>(words[1])}};
}
#endif

// Numbers of the 16 codes of IQ4_NL and IQ4_XS. Source: ggml-org/ggml, ggml-common.h.
constexpr int kIq4[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};

struct GgmlTables {
  alignas(64) uint16_t fives[32], iq4[32];       // of i; of i & 15
  alignas(16) uint8_t iq4_low[16], iq4_high[16];  // bytes
  constexpr GgmlTables() : fives(), iq4(), iq4_low(), iq4_high() {
    for (int i = 0; i < 32; ++i) fives[i] = small_bf16(i), iq4[i] = small_bf16(kIq4[i & 15]);
    for (int i = 0; i < 16; ++i) iq4_low[i] = uint8_t(iq4[i]), iq4_high[i] = uint8_t(iq4[i] >> 8);
  }
};
inline constexpr GgmlTables kGgmlTables;

// 5 bits without a zero point: 32 bytes as 4 bits; then the fifth bits of the low halves, and of the high halves.
struct Int5 {
  static constexpr int64_t bytes = 40;
  explicit Int5(const uint8_t*) {}
#if WEFT_AVX512
  Bf16::Step load(const uint8_t* w) const {
    const __m512i table = load_as<__m512i>(kGgmlTables.fives), sixteen = _mm512_set1_epi16(16);
    const __m512i both = _mm512_cvtepu8_epi16(load_as<__m256i>(w));
    const __m512i low = _mm512_and_si512(both, _mm512_set1_epi16(15)), high = _mm512_srli_epi16(both, 4);
    const __m512i first = _mm512_mask_add_epi16(low, load_as<__mmask32>(w + 32), low, sixteen);
    const __m512i second = _mm512_mask_add_epi16(high, load_as<__mmask32>(w + 36), high, sixteen);
    return {{recast<Pairs>(_mm512_permutexvar_epi16(first, table)),
             recast<Pairs>(_mm512_permutexvar_epi16(second, table))}};
  }
#elif WEFT_AVX2
  // 16 codes: the low four bits, and the fifth bits at `fifth`.
  static Half part(__m128i code, const uint8_t* fifth) {
    const __m128i places = _mm_setr_epi8(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1);
    const __m128i bit = _mm_set1_epi64x(int64_t(0x8040201008040201u));
    const __m128i spread = _mm_shuffle_epi8(_mm_set1_epi16(load_as<int16_t>(fifth)), places);
    const __m128i set = _mm_cmpeq_epi8(_mm_and_si128(spread, bit), bit);
    const Half words = Half(_mm256_cvtepu8_epi16(_mm_or_si128(code, _mm_and_si128(set, _mm_set1_epi8(16)))));
    const auto bits = [](Half codes) { return Half(_mm256_castps_si256(_mm256_cvtepi32_ps(__m256i(codes)))); };
    return (bits(words & 0xffffu) >> 16) | bits(words >> 16);
  }
  Bf16::Step load(const uint8_t* w) const {
    const __m128i a = four(w), b = four(w + 16), low = _mm_set1_epi8(15);
    const auto upper = [&](__m128i x) { return _mm_and_si128(_mm_srli_epi16(x, 4), low); };
    return {{{part(_mm_and_si128(a, low), w + 32), part(_mm_and_si128(b, low), w + 34)},
             {part(upper(a), w + 36), part(upper(b), w + 38)}}};
  }
#else
  Bf16::Step load(const uint8_t* w) const {
    return by_words([&](int half, int word) {
      const int fifth = w[32 + 4 * half + word / 8] >> word % 8 & 1;
      return small_bf16((w[word] >> (4 * half) & 15) | fifth << 4);
    });
  }
#endif
};

// 4 bits that stand for the numbers of `kIq4`.
struct Iq4 {
  static constexpr int64_t bytes = 32;
  explicit Iq4(const uint8_t*) {}
#if WEFT_AVX512
  Bf16::Step load(const uint8_t* w) const {
    const __m512i table = load_as<__m512i>(kGgmlTables.iq4);  // twice 16: the fifth bit has no effect
    const __m512i both = _mm512_cvtepu8_epi16(load_as<__m256i>(w));
    return {{recast<Pairs>(_mm512_permutexvar_epi16(both, table)),
             recast<Pairs>(_mm512_permutexvar_epi16(_mm512_srli_epi16(both, 4), table))}};
  }
#elif WEFT_AVX2
  static Half part(__m128i code) {
    return words_of(_mm_shuffle_epi8(four(kGgmlTables.iq4_low), code),
                    _mm_shuffle_epi8(four(kGgmlTables.iq4_high), code));
  }
  Bf16::Step load(const uint8_t* w) const {
    const __m128i a = four(w), b = four(w + 16), low = _mm_set1_epi8(15);
    const auto upper = [&](__m128i x) { return _mm_and_si128(_mm_srli_epi16(x, 4), low); };
    return {{{part(_mm_and_si128(a, low)), part(_mm_and_si128(b, low))}, {part(upper(a)), part(upper(b))}}};
  }
#else
  Bf16::Step load(const uint8_t* w) const {
    return by_words([&](int half, int word) { return kGgmlTables.iq4[w[word] >> (4 * half) & 15]; });
  }
#endif
};

}  // namespace weft
