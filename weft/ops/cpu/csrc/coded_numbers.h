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

// With AVX2 a converter's `floats` are one half of the columns and one k of a step: the numbers divided by `kUnit`, a
// power of two. So sums of products have the bits of sums with the numbers themselves, except that the former overflow
// from magnitudes of 2^128 * kUnit on (coded.cpp computes such rows again).

// Numbers of up to 8 bits: a signed byte becomes the upper byte of a word, with zeros below. Lanes: columns 0 to 3, 8
// to 11, 4 to 7, 12 to 15 of a half. kTwice: bytes are twice the numbers.
template <bool kTwice = false>
struct InBytes {
  static constexpr float kUnit = kTwice ? 0x1p-25f : 0x1p-24f;

  struct Step {
    __m256i half[2];  // neighbours are the two k of a column

    vf floats(int of, int k) const {
      const auto part = [&](int from) {
        // Places of the upper bytes: from + k, and 2, 4, 6 further on.
        const __m256i first = _mm256_set1_epi32(int((uint32_t(from + k) << 24) | 0x808080));
        const __m256i further = _mm256_broadcastsi128_si256(_mm_setr_epi32(0, 2 << 24, 4 << 24, 6 << 24));
        const __m256i places = _mm256_or_si256(first, further);
        return _mm256_cvtepi32_ps(_mm256_shuffle_epi8(half[of], places));
      };
      return {part(0), part(8)};
    }
    // The numbers themselves, in order: one instruction more.
    vf numbers(int of, int k) const {
      const __m256i words = _mm256_srai_epi16(k ? half[of] : _mm256_slli_epi16(half[of], 8), 8);
      const auto part = [](__m128i x) { return _mm256_cvtepi32_ps(_mm256_cvtepi16_epi32(x)); };
      const vf made = {part(_mm256_castsi256_si128(words)), part(_mm256_extracti128_si256(words, 1))};
      return kTwice ? made * splat(0.5f) : made;
    }
  };

  static Step nibbles(const uint8_t* w) {
    const __m256i read = eight(w), low = _mm256_set1_epi8(15);
    return {{_mm256_and_si256(read, low), _mm256_and_si256(_mm256_srli_epi16(read, 4), low)}};
  }
  // Numbers of a table of 16 bytes.
  static Step look_up(const int8_t* table, const uint8_t* w) {
    const __m256i numbers = _mm256_broadcastsi128_si256(four(table));
    const Step step = nibbles(w);
    return {{_mm256_shuffle_epi8(numbers, step.half[0]), _mm256_shuffle_epi8(numbers, step.half[1])}};
  }
};

// Numbers that become floats by themselves, in order.
struct InFloats {
  static constexpr float kUnit = 1.0f;
};

// Sums of products with the numbers from sums of products with `C`'s floats: in order, times `kUnit`.
template <class C>
inline vf to_sums(vf x) {
  if constexpr (C::kUnit == 1.0f) return x;
  return vf{_mm256_permute2f128_ps(x.a, x.b, 0x20), _mm256_permute2f128_ps(x.a, x.b, 0x31)} * splat(C::kUnit);
}

// The numbers of one half of the columns and one k of a step.
template <class C, class Step>
inline vf numbers_of(const Step& step, int half, int k) {
  if constexpr (C::kUnit == 1.0f)
    return step.floats(half, k);
  else
    return step.numbers(half, k);
}

// Pairs of bf16 of a step, by its floats.
template <class C>
inline Bf16::Step pairs_by_floats(const C& codes, const uint8_t* w) {
  const auto step = codes.read(w);
  const auto number = [&](int half, int k) { return recast<Pairs>(numbers_of<C>(step, half, k)); };
  Bf16::Step made;
  for (int half = 0; half < 2; ++half) made.w[half] = (number(half, 0) >> 16) | (number(half, 1) & 0xffff0000u);
  return made;
}

#define WEFT_BASE(base) : base
#else
#define WEFT_BASE(base)
#endif

#if WEFT_NEON

// 32 bytes of two codes: of the low halves, and of the high halves, words 0 to 15 and 16 to 31. A word is a column and
// one k of a step.
struct Nibbles {
  uint8x16_t at[2][2];
  explicit Nibbles(const uint8_t* w) {
    for (int part = 0; part < 2; ++part) {
      const uint8x16_t read = sixteen_bytes(w + 16 * part);
      at[0][part] = read & 15, at[1][part] = vshrq_n_u8(read, 4);
    }
  }
};

// A table of 16, 32 or 64 numbers in bf16: their low and their high bytes.
template <int parts>
struct NumberTable {
  uint8x16_t low[parts], high[parts];
  explicit NumberTable(const uint16_t* numbers) {
    for (int part = 0; part < parts; ++part) {
      const uint8x16x2_t both = vld2q_u8(reinterpret_cast<const uint8_t*>(numbers + 16 * part));
      low[part] = both.val[0], high[part] = both.val[1];
    }
  }
  static uint8x16_t look(const uint8x16_t (&table)[parts], uint8x16_t code) {
    if constexpr (parts == 1) return vqtbl1q_u8(table[0], code);
    if constexpr (parts == 2) return vqtbl2q_u8({table[0], table[1]}, code);
    if constexpr (parts == 4) return vqtbl4q_u8({table[0], table[1], table[2], table[3]}, code);
  }
  // Numbers of words 0 to 15 and 16 to 31.
  Pairs pairs(uint8x16_t first, uint8x16_t second) const {
    const uint8x16_t a = look(low, first), b = look(high, first), c = look(low, second), d = look(high, second);
    const auto words = [](uint8x16_t x) { return vreinterpretq_u32_u8(x); };
    return {words(vzip1q_u8(a, b)), words(vzip2q_u8(a, b)), words(vzip1q_u8(c, d)), words(vzip2q_u8(c, d))};
  }
  Bf16::Step look_up(const uint8_t* w) const {
    const Nibbles codes(w);
    return {{pairs(codes.at[0][0], codes.at[0][1]), pairs(codes.at[1][0], codes.at[1][1])}};
  }
};

#endif

#if !WEFT_AVX2 && !WEFT_AVX512 && !WEFT_NEON
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
  alignas(64) uint16_t fives[32], iq4[32];  // of i; of i & 15
  alignas(16) int8_t iq4_bytes[16];
  constexpr GgmlTables() : fives(), iq4(), iq4_bytes() {
    for (int i = 0; i < 32; ++i) fives[i] = small_bf16(i), iq4[i] = small_bf16(kIq4[i & 15]);
    for (int i = 0; i < 16; ++i) iq4_bytes[i] = int8_t(kIq4[i]);
  }
};
inline constexpr GgmlTables kGgmlTables;

// 5 bits without a zero point: 32 bytes as 4 bits; then the fifth bits of the low halves, and of the high halves.
struct Int5 WEFT_BASE(InBytes<>) {
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
  Step read(const uint8_t* w) const {
    const __m256i places = _mm256_setr_epi64x(0, 0x0101010101010101, 0x0202020202020202, 0x0303030303030303);
    const __m256i bit = _mm256_set1_epi64x(int64_t(0x8040201008040201u)), sixteen = _mm256_set1_epi8(16);
    Step step = nibbles(w);
    for (int half = 0; half < 2; ++half) {
      const __m256i fifth = _mm256_set1_epi32(load_as<int32_t>(w + 32 + 4 * half));
      const __m256i set = _mm256_cmpeq_epi8(_mm256_and_si256(_mm256_shuffle_epi8(fifth, places), bit), bit);
      step.half[half] = _mm256_or_si256(step.half[half], _mm256_and_si256(set, sixteen));
    }
    return step;
  }
  Bf16::Step load(const uint8_t* w) const { return pairs_by_floats(*this, w); }
#elif WEFT_NEON
  Bf16::Step load(const uint8_t* w) const {
    const NumberTable<2> table(kGgmlTables.fives);
    const uint8x16_t bit = vreinterpretq_u8_u64(vdupq_n_u64(0x8040201008040201u));
    Nibbles codes(w);
    for (int half = 0; half < 2; ++half)
      for (int part = 0; part < 2; ++part) {
        const uint8_t* from = w + 32 + 4 * half + 2 * part;
        const uint8x16_t fifth = vcombine_u8(vdup_n_u8(from[0]), vdup_n_u8(from[1]));
        codes.at[half][part] = codes.at[half][part] | (vtstq_u8(fifth, bit) & 16);
      }
    return {{table.pairs(codes.at[0][0], codes.at[0][1]), table.pairs(codes.at[1][0], codes.at[1][1])}};
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
struct Iq4 WEFT_BASE(InBytes<>) {
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
  static Step read(const uint8_t* w) { return look_up(kGgmlTables.iq4_bytes, w); }
  Bf16::Step load(const uint8_t* w) const { return pairs_by_floats(*this, w); }
#elif WEFT_NEON
  Bf16::Step load(const uint8_t* w) const { return NumberTable<1>(kGgmlTables.iq4).look_up(w); }
#else
  Bf16::Step load(const uint8_t* w) const {
    return by_words([&](int half, int word) { return kGgmlTables.iq4[w[word] >> (4 * half) & 15]; });
  }
#endif
};

}  // namespace weft
