// Vectors of 16 floats as two registers of 8: AVX2 with FMA. vector.h documents the functions.
//
// Structs, not the compiler's 64-byte vectors: the compiler stores such vectors in memory if registers are narrower.
#pragma once

#include <array>
#include <cmath>
#include <cstring>
#include <type_traits>

#include "common.h"

namespace weft::vec {

struct vf {
  __m256 a, b;
};

inline vf operator+(vf x, vf y) { return {x.a + y.a, x.b + y.b}; }
inline vf operator-(vf x, vf y) { return {x.a - y.a, x.b - y.b}; }
inline vf operator*(vf x, vf y) { return {x.a * y.a, x.b * y.b}; }
inline vf operator/(vf x, vf y) { return {x.a / y.a, x.b / y.b}; }

// 16 words, with operations for 8-bit formats and pairs of bf16.
typedef uint32_t Half __attribute__((vector_size(32)));
struct vu {
  Half a, b;
};

inline vu operator&(vu x, uint32_t y) { return {x.a & y, x.b & y}; }
inline vu operator&(vu x, vu y) { return {x.a & y.a, x.b & y.b}; }
inline vu operator|(vu x, vu y) { return {x.a | y.a, x.b | y.b}; }
inline vu operator~(vu x) { return {~x.a, ~x.b}; }
inline vu operator+(vu x, uint32_t y) { return {x.a + y, x.b + y}; }
inline vu operator+(vu x, vu y) { return {x.a + y.a, x.b + y.b}; }
inline vu operator-(vu x, uint32_t y) { return {x.a - y, x.b - y}; }
inline vu operator<<(vu x, int y) { return {x.a << y, x.b << y}; }
inline vu operator>>(vu x, int y) { return {x.a >> y, x.b >> y}; }
inline vu operator<(vu x, uint32_t y) { return {Half(x.a < y), Half(x.b < y)}; }  // all bits or none

inline __m256i eight(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
inline __m128i two(const void* p) { return _mm_loadl_epi64(static_cast<const __m128i*>(p)); }
inline __m128i four(const void* p) { return _mm_loadu_si128(static_cast<const __m128i*>(p)); }

// The bits of `from` as another type of the same size. Vectors stay in registers: the compiler copies structs of 64
// bytes through memory in parts of 16 bytes, and a load of 32 bytes waits for all of them.
template <class To, class From>
inline To recast(From from) {
  static_assert(sizeof(To) == sizeof(From));
  if constexpr (std::is_same_v<To, From>) {
    return from;
  } else if constexpr (std::is_same_v<To, vf> && std::is_same_v<From, vu>) {
    return {_mm256_castsi256_ps(__m256i(from.a)), _mm256_castsi256_ps(__m256i(from.b))};
  } else if constexpr (std::is_same_v<To, vu> && std::is_same_v<From, vf>) {
    return {Half(_mm256_castps_si256(from.a)), Half(_mm256_castps_si256(from.b))};
  } else {
    To to;
    std::memcpy(&to, &from, sizeof(to));
    return to;
  }
}
template <class V>
inline V load_as(const void* from) {
  if constexpr (std::is_same_v<V, vf> || std::is_same_v<V, vu>) {
    const vu words{Half(eight(from)), Half(eight(static_cast<const uint8_t*>(from) + 32))};
    return recast<V>(words);
  } else {
    V value;
    std::memcpy(&value, from, sizeof(value));
    return value;
  }
}

inline vf splat(float x) {
  const __m256 all = _mm256_set1_ps(x);
  return {all, all};
}
inline vf load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline void store(float* p, vf x) {
  _mm256_storeu_ps(p, x.a);
  _mm256_storeu_ps(p + 8, x.b);
}

// 16 words with all bits set, then 16 words of zero: the 16 words from [16 - n] on have the first n lanes set.
struct Ones {
  alignas(64) int32_t word[32];
  constexpr Ones() : word() {
    for (int i = 0; i < 16; ++i) word[i] = -1;
  }
};
constexpr Ones kOnes;

inline vf load_n(const float* p, int n) {
  const int32_t* mask = kOnes.word + 16 - n;
  return {_mm256_maskload_ps(p, eight(mask)), _mm256_maskload_ps(p + 8, eight(mask + 8))};
}
inline void store_n(float* p, vf x, int n) {
  if (n == 16) return store(p, x);
  const int32_t* mask = kOnes.word + 16 - n;
  _mm256_maskstore_ps(p, eight(mask), x.a);
  _mm256_maskstore_ps(p + 8, eight(mask + 8), x.b);
}

inline __m256 widen8(__m128i x) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(x), 16)); }
inline vf load(const bf16* p) { return {widen8(four(p)), widen8(four(p + 8))}; }
inline vf load_n(const bf16* p, int n) {
  bf16 part[16] = {};
  std::memcpy(static_cast<void*>(part), p, size_t(n) * sizeof(bf16));
  return load(part);
}
// bf16 of each word, in the low half.
inline __m256i narrow8(__m256 x) {
  const __m256i bits = _mm256_castps_si256(x);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i up = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  const __m256 nan = _mm256_cmp_ps(x, x, _CMP_UNORD_Q);
  const __m256 rounded = _mm256_blendv_ps(_mm256_castsi256_ps(up), _mm256_set1_ps(bits_to_float(0x7fc00000u)), nan);
  return _mm256_srli_epi32(_mm256_castps_si256(rounded), 16);
}
inline void store(bf16* p, vf x) {
  const __m256i packed = _mm256_packus_epi32(narrow8(x.a), narrow8(x.b));  // within lanes of 128 bits
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_permute4x64_epi64(packed, 0xd8));
}
inline void store_n(bf16* p, vf x, int n) {
  if (n == 16) return store(p, x);
  bf16 part[16];
  store(part, x);
  std::memcpy(static_cast<void*>(p), part, size_t(n) * sizeof(bf16));
}

inline vf fma(vf a, vf b, vf c) { return {_mm256_fmadd_ps(a.a, b.a, c.a), _mm256_fmadd_ps(a.b, b.b, c.b)}; }
inline vf vmax(vf x, vf y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
inline vf vmin(vf x, vf y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
inline vf vsqrt(vf x) { return {_mm256_sqrt_ps(x.a), _mm256_sqrt_ps(x.b)}; }
inline vf vabs(vf x) {
  const __m256 sign = _mm256_set1_ps(-0.0f);
  return {_mm256_andnot_ps(sign, x.a), _mm256_andnot_ps(sign, x.b)};
}
inline vf select(uint32_t mask, vf x, vf y) {
  const __m256i bits = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
  const auto lanes = [&](uint32_t part) {
    return _mm256_castsi256_ps(_mm256_cmpeq_epi32(_mm256_and_si256(_mm256_set1_epi32(int(part)), bits), bits));
  };
  return {_mm256_blendv_ps(y.a, x.a, lanes(mask)), _mm256_blendv_ps(y.b, x.b, lanes(mask >> 8))};
}
inline uint32_t bits_of(__m256 a, __m256 b) {
  return uint32_t(_mm256_movemask_ps(a)) | uint32_t(_mm256_movemask_ps(b)) << 8;
}
// Lanes with a word of `low` or more.
inline uint32_t at_least(const uint32_t* p, uint32_t low) {
  const __m256i bound = _mm256_set1_epi32(int32_t(low));
  const auto mask = [&](const uint32_t* at) {
    const __m256i x = eight(at), reached = _mm256_cmpeq_epi32(_mm256_max_epu32(x, bound), x);
    return uint32_t(_mm256_movemask_ps(_mm256_castsi256_ps(reached)));
  };
  return mask(p) | mask(p + 8) << 8;
}
inline uint32_t less(vf x, vf y) {
  return bits_of(_mm256_cmp_ps(x.a, y.a, _CMP_LT_OQ), _mm256_cmp_ps(x.b, y.b, _CMP_LT_OQ));
}
inline uint32_t equal(vf x, vf y) {
  return bits_of(_mm256_cmp_ps(x.a, y.a, _CMP_EQ_OQ), _mm256_cmp_ps(x.b, y.b, _CMP_EQ_OQ));
}

// Add lanes i and i + 8, then lanes 4, 2 and 1 apart.
inline float reduce_add(vf x) {
  const __m256 eights = x.a + x.b;
  const __m128 fours = _mm256_castps256_ps128(eights) + _mm256_extractf128_ps(eights, 1);
  const __m128 twos = fours + _mm_movehl_ps(fours, fours);
  return _mm_cvtss_f32(_mm_add_ss(twos, _mm_movehdup_ps(twos)));
}
inline float reduce_max(vf x) {
  const __m256 eights = _mm256_max_ps(x.a, x.b);
  const __m128 fours = _mm_max_ps(_mm256_castps256_ps128(eights), _mm256_extractf128_ps(eights, 1));
  const __m128 twos = _mm_max_ps(fours, _mm_movehl_ps(fours, fours));
  return _mm_cvtss_f32(_mm_max_ss(twos, _mm_movehdup_ps(twos)));
}

inline __m256 fraction8(__m256 x) {
  const __m256 size = _mm256_andnot_ps(_mm256_set1_ps(-0.0f), x);
  const __m256 infinite = _mm256_cmp_ps(size, _mm256_set1_ps(INFINITY), _CMP_EQ_OQ);
  return _mm256_andnot_ps(infinite, x - _mm256_floor_ps(x));
}
inline vf fraction(vf x) { return {fraction8(x.a), fraction8(x.b)}; }

// In two steps; the first is exact for 1 <= x < 2. No single power of two reaches all results.
inline __m256 scale8(__m256 x, __m256 n) {
  const __m256 whole =
      _mm256_min_ps(_mm256_max_ps(_mm256_floor_ps(n), _mm256_set1_ps(-252.0f)), _mm256_set1_ps(254.0f));
  const __m256i power = _mm256_cvtps_epi32(whole), part = _mm256_srai_epi32(power, 1), one = _mm256_set1_epi32(127);
  const auto factor = [&](__m256i of) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(of, one), 23)); };
  return x * factor(part) * factor(_mm256_sub_epi32(power, part));
}
inline vf scale2(vf x, vf n) { return {scale8(x.a, n.a), scale8(x.b, n.b)}; }  // 1 <= x < 2, or NaN

}  // namespace weft::vec
