// Vectors of 16 floats: AVX-512 if the build has it, pairs of AVX2 vectors (vector_avx2.h), four NEON vectors
// (vector_neon.h), otherwise the compiler's portable vectors.
//
// Every function computes each lane by one fixed sequence of operations, and the sums over lanes (`reduce_add`) have
// one fixed tree. So a kernel built on these functions is invariant if its own order is. `fma` rounds once, except with
// portable vectors, where it rounds twice: bits differ between builds, never within one build.
#pragma once

// GCC 12 warns about undefined operands inside its own intrinsics.
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"

#include <cmath>
#include <cstring>
#include <limits>

#include "common.h"
#if WEFT_AVX2
#include "vector_avx2.h"
#endif
#if WEFT_NEON
#include "vector_neon.h"
#endif

namespace weft::vec {

constexpr int kLanes = 16;
constexpr float kInf = std::numeric_limits<float>::infinity();

#if !WEFT_AVX2 && !WEFT_NEON

// The bits of `from` as another type of the same size.
template <class To, class From>
inline To recast(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof(to));
  return to;
}
template <class V>
inline V load_as(const void* from) {
  V value;
  std::memcpy(&value, from, sizeof(value));
  return value;
}

#endif

#if WEFT_AVX512

using vf = __m512;

inline vf splat(float x) { return _mm512_set1_ps(x); }
inline vf load(const float* p) { return _mm512_loadu_ps(p); }
inline void store(float* p, vf x) { _mm512_storeu_ps(p, x); }
// The first n lanes. Loads set other lanes to 0; stores leave other lanes in memory unchanged.
inline vf load_n(const float* p, int n) { return _mm512_maskz_loadu_ps(__mmask16((1u << n) - 1), p); }
inline void store_n(float* p, vf x, int n) { _mm512_mask_storeu_ps(p, __mmask16((1u << n) - 1), x); }

inline vf widen16(__m256i x) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16)); }
inline vf load(const bf16* p) { return widen16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
inline vf load_n(const bf16* p, int n) { return widen16(_mm256_maskz_loadu_epi16(__mmask16((1u << n) - 1), p)); }
inline __m256i narrow16(vf x) {
#if WEFT_AVX512_BF16
  return (__m256i)_mm512_cvtneps_pbh(x);  // numbers below 2^-126 become zero
#else
  const __m512i bits = _mm512_castps_si512(x);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i up = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  const __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
  const __m512i rounded = _mm512_mask_mov_epi32(up, nan, _mm512_set1_epi32(0x7fc00000));
  return _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16));
#endif
}
inline void store(bf16* p, vf x) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), narrow16(x)); }
inline void store_n(bf16* p, vf x, int n) { _mm256_mask_storeu_epi16(p, __mmask16((1u << n) - 1), narrow16(x)); }

inline vf fma(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); }
inline vf vmax(vf a, vf b) { return _mm512_max_ps(a, b); }  // b where either is NaN
inline vf vmin(vf a, vf b) { return _mm512_min_ps(a, b); }  // b where either is NaN
inline vf vsqrt(vf x) { return _mm512_sqrt_ps(x); }
inline vf vabs(vf x) { return _mm512_abs_ps(x); }
// a where the bit of the lane is set, else b
inline vf select(uint32_t mask, vf a, vf b) { return _mm512_mask_blend_ps(__mmask16(mask), b, a); }
inline uint32_t less(vf a, vf b) { return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ); }
inline uint32_t equal(vf a, vf b) { return _mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ); }
inline float reduce_add(vf x) { return _mm512_reduce_add_ps(x); }
inline float reduce_max(vf x) { return _mm512_reduce_max_ps(x); }
// Lanes with a word of `low` or more.
inline uint32_t at_least(const uint32_t* p, uint32_t low) {
  return _mm512_cmpge_epu32_mask(_mm512_loadu_si512(p), _mm512_set1_epi32(int32_t(low)));
}
inline vf fraction(vf x) { return _mm512_reduce_ps(x, 0x09); }   // x - floor(x); 0 for infinities
inline vf scale2(vf x, vf n) { return _mm512_scalef_ps(x, n); }  // x * 2^floor(n), for exp2v

#elif !WEFT_AVX2 && !WEFT_NEON

typedef float vf __attribute__((vector_size(64), aligned(4)));
typedef int32_t vi __attribute__((vector_size(64), aligned(4)));

template <class F>
inline vf lanes(F f) {
  vf made;
  for (int i = 0; i < kLanes; ++i) made[i] = f(i);
  return made;
}
inline vf splat(float x) { return x - vf{}; }
inline vf load(const float* p) {
  vf x;
  std::memcpy(&x, p, sizeof(x));
  return x;
}
inline void store(float* p, vf x) { std::memcpy(p, &x, sizeof(x)); }
inline vf load_n(const float* p, int n) {
  return lanes([&](int i) { return i < n ? p[i] : 0.0f; });
}
inline void store_n(float* p, vf x, int n) {
  for (int i = 0; i < n; ++i) p[i] = x[i];
}
inline vf load(const bf16* p) {
  return lanes([&](int i) { return widen(p[i]); });
}
inline vf load_n(const bf16* p, int n) {
  return lanes([&](int i) { return i < n ? widen(p[i]) : 0.0f; });
}
inline void store_n(bf16* p, vf x, int n) {
  for (int i = 0; i < n; ++i) narrow(x[i], p + i);
}
inline void store(bf16* p, vf x) { store_n(p, x, kLanes); }

inline vf fma(vf a, vf b, vf c) { return a * b + c; }
inline vf vmax(vf a, vf b) { return a > b ? a : b; }
inline vf vmin(vf a, vf b) { return a < b ? a : b; }
inline vf vsqrt(vf x) {
  return lanes([&](int i) { return std::sqrt(x[i]); });
}
inline vf vabs(vf x) { return x < 0.0f ? -x : x; }
inline vf select(uint32_t mask, vf a, vf b) {
  return lanes([&](int i) { return mask >> i & 1 ? a[i] : b[i]; });
}
inline uint32_t less(vf a, vf b) {
  uint32_t mask = 0;
  for (int i = 0; i < kLanes; ++i) mask |= uint32_t(a[i] < b[i]) << i;
  return mask;
}
inline uint32_t equal(vf a, vf b) {
  uint32_t mask = 0;
  for (int i = 0; i < kLanes; ++i) mask |= uint32_t(a[i] == b[i]) << i;
  return mask;
}
inline uint32_t at_least(const uint32_t* p, uint32_t low) {
  uint32_t mask = 0;
  for (int i = 0; i < kLanes; ++i) mask |= uint32_t(p[i] >= low) << i;
  return mask;
}
template <class F>
inline float reduce(vf x, F f) {
  float part[kLanes];
  store(part, x);
  for (int half = kLanes / 2; half; half /= 2)
    for (int i = 0; i < half; ++i) part[i] = f(part[i], part[i + half]);
  return part[0];
}
inline float reduce_add(vf x) {
  return reduce(x, [](float a, float b) { return a + b; });
}
inline float reduce_max(vf x) {
  return reduce(x, [](float a, float b) { return a > b ? a : b; });
}
inline vf fraction(vf x) {
  return lanes([&](int i) { return std::isinf(x[i]) ? 0.0f : x[i] - std::floor(x[i]); });
}
inline vf scale2(vf x, vf n) {
  return lanes([&](int i) {
    return n[i] < -150.0f ? x[i] * 0.0f : n[i] > 130.0f ? x[i] * kInf : std::ldexp(x[i], int(std::floor(n[i])));
  });
}

#endif

// 16 pairs of bf16; the first value of a pair is in the low half
#if WEFT_AVX2 || WEFT_NEON
using Pairs = vu;
#else
typedef uint32_t Pairs __attribute__((vector_size(64)));
#endif

// Parts of vectors of `kPart` floats, for register tiles that a whole vector does not fit: a register of AVX2, otherwise a
// vector. `first_parts` and `second_parts`: the first or second numbers of pairs of bf16.
#if WEFT_AVX2
constexpr int kPart = 8;
using vh = __m256;
inline vh splat_part(float x) { return _mm256_set1_ps(x); }
inline vh load_part(const float* p) { return _mm256_loadu_ps(p); }
inline vh load_part(const bf16* p) { return widen8(four(p)); }
inline void store_part(float* p, vh x) { _mm256_storeu_ps(p, x); }
inline vh fma(vh a, vh b, vh c) { return _mm256_fmadd_ps(a, b, c); }
inline vh first_parts(const uint32_t* p) { return _mm256_castsi256_ps(_mm256_slli_epi32(eight(p), 16)); }
// By two shifts: a mask would occupy a register.
inline vh second_parts(const uint32_t* p) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_srli_epi32(eight(p), 16), 16));
}
#else
constexpr int kPart = kLanes;
using vh = vf;
inline vh splat_part(float x) { return splat(x); }
inline vh load_part(const float* p) { return load(p); }
inline vh load_part(const bf16* p) { return load(p); }
inline void store_part(float* p, vh x) { store(p, x); }
inline vh first_parts(const uint32_t* p) { return recast<vf>(load_as<Pairs>(p) << 16); }
inline vh second_parts(const uint32_t* p) { return recast<vf>(load_as<Pairs>(p) & 0xffff0000u); }
#endif

inline vf firsts(Pairs x) { return recast<vf>(x << 16); }
inline vf seconds(Pairs x) { return recast<vf>(x & 0xffff0000u); }

// Floats rounded to bf16, to nearest even. A NaN stays a NaN if one of its upper 16 bits of fraction is set: so are the
// NaNs of instructions and of bf16.
inline vf rounded_bf16(vf x) {
  const Pairs bits = recast<Pairs>(x);
  return seconds(bits + ((bits >> 16 & 1u) + 0x7fffu));
}

// Lane r is row r's, of `count` rows at most kLanes; other lanes are undefined. A row's bits equal `reduce_add` or
// `reduce_max` of the row, independent of the other rows.
#if WEFT_AVX512
template <class Op>
inline vf across_rows(const float (*rows)[kLanes], Op op) {
  vf fours[4];  // rows j, 4 + j, 8 + j, 12 + j: a group of 4 lanes each
  for (int j = 0; j < 4; ++j) {
    const vf a = load(rows[j]), b = load(rows[4 + j]), c = load(rows[8 + j]), d = load(rows[12 + j]);
    const vf ab = op(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xee));
    const vf cd = op(_mm512_shuffle_f32x4(c, d, 0x44), _mm512_shuffle_f32x4(c, d, 0xee));
    fours[j] = op(_mm512_shuffle_f32x4(ab, cd, 0x88), _mm512_shuffle_f32x4(ab, cd, 0xdd));
  }
  const auto twos = [&](vf x, vf y) {
    const __m512d a = _mm512_castps_pd(x), b = _mm512_castps_pd(y);
    return op(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)), _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)));
  };
  const vf x = twos(fours[0], fours[1]), y = twos(fours[2], fours[3]);
  return op(_mm512_shuffle_ps(x, y, 0x88), _mm512_shuffle_ps(x, y, 0xdd));
}
inline vf sum_of_rows(const float (*rows)[kLanes], int) {
  return across_rows(rows, [](vf a, vf b) { return a + b; });
}
inline vf max_of_rows(const float (*rows)[kLanes], int) {
  return across_rows(rows, [](vf a, vf b) { return vmax(a, b); });
}
#elif WEFT_AVX2
// The same for 8 rows: one register.
template <class Op>
inline __m256 across_eight(const float (*rows)[kLanes], Op op) {
  const auto eights = [&](int r) { return op(_mm256_loadu_ps(rows[r]), _mm256_loadu_ps(rows[r] + 8)); };
  const auto fours = [&](int r) {  // rows r and r + 4: a group of 4 lanes each
    const __m256 a = eights(r), b = eights(r + 4);
    return op(_mm256_permute2f128_ps(a, b, 0x20), _mm256_permute2f128_ps(a, b, 0x31));
  };
  const auto twos = [&](int r) {  // rows r, r + 1, r + 4 and r + 5
    const __m256d a = _mm256_castps_pd(fours(r)), b = _mm256_castps_pd(fours(r + 1));
    return op(_mm256_castpd_ps(_mm256_unpacklo_pd(a, b)), _mm256_castpd_ps(_mm256_unpackhi_pd(a, b)));
  };
  const __m256 x = twos(0), y = twos(2);
  return op(_mm256_shuffle_ps(x, y, 0x88), _mm256_shuffle_ps(x, y, 0xdd));
}
// Few rows are reduced one by one. Other rows in memory are read, so all 16 rows must exist.
template <class Op, class One>
inline vf across_rows(const float (*rows)[kLanes], int count, Op op, One one) {
  if (count > 3) return {across_eight(rows, op), count > 8 ? across_eight(rows + 8, op) : __m256{}};
  alignas(64) float made[kLanes] = {};
  for (int r = 0; r < count; ++r) made[r] = one(load(rows[r]));
  return load(made);
}
inline vf sum_of_rows(const float (*rows)[kLanes], int count) {
  return across_rows(rows, count, [](__m256 a, __m256 b) { return a + b; }, reduce_add);
}
inline vf max_of_rows(const float (*rows)[kLanes], int count) {
  return across_rows(rows, count, [](__m256 a, __m256 b) { return _mm256_max_ps(a, b); }, reduce_max);
}
#else
inline vf sum_of_rows(const float (*rows)[kLanes], int count) {
  alignas(64) float made[kLanes] = {};
  for (int r = 0; r < count; ++r) made[r] = reduce_add(load(rows[r]));
  return load(made);
}
inline vf max_of_rows(const float (*rows)[kLanes], int count) {
  alignas(64) float made[kLanes] = {};
  for (int r = 0; r < count; ++r) made[r] = reduce_max(load(rows[r]));
  return load(made);
}
#endif

// 2^x, relative error below 1.5e-7. Exactly 1 at 0 and 0 at -inf; NaN stays NaN.
// 2^x = 2^floor(x) * p(x - floor(x)), p a minimax polynomial on [0, 1) with p(0) = 1.
inline vf exp2v(vf x) {
  const vf r = fraction(x);
  vf p = splat(0.0018671301659196615f);
  p = fma(p, r, splat(0.009017029777169228f));
  p = fma(p, r, splat(0.05579991266131401f));
  p = fma(p, r, splat(0.24016444385051727f));
  p = fma(p, r, splat(0.6931512951850891f));
  p = fma(p, r, splat(1.0f));
  return scale2(p, x);
}

constexpr float kLog2E = 1.4426950408889634f;

// x * sigmoid(y)
inline vf sigmoid_times(vf x, vf y) { return x / (splat(1.0f) + exp2v(y * splat(-kLog2E))); }

}  // namespace weft::vec
