// Vectors of 16 floats as four registers of 4: NEON of AArch64. vector.h documents the functions.
//
// Structs, not the compiler's 64-byte vectors: the compiler stores such vectors in memory if registers are narrower.
#pragma once

#include <arm_neon.h>

#include <cmath>
#include <cstring>
#include <type_traits>

#include "common.h"

namespace weft::vec {

struct vf {
  float32x4_t a, b, c, d;
};

// A function of each register.
template <class F>
inline __attribute__((always_inline)) vf each(F f, vf x) {
  return {f(x.a), f(x.b), f(x.c), f(x.d)};
}
template <class F>
inline __attribute__((always_inline)) vf each(F f, vf x, vf y) {
  return {f(x.a, y.a), f(x.b, y.b), f(x.c, y.c), f(x.d, y.d)};
}

inline vf operator+(vf x, vf y) { return {x.a + y.a, x.b + y.b, x.c + y.c, x.d + y.d}; }
inline vf operator-(vf x, vf y) { return {x.a - y.a, x.b - y.b, x.c - y.c, x.d - y.d}; }
inline vf operator*(vf x, vf y) { return {x.a * y.a, x.b * y.b, x.c * y.c, x.d * y.d}; }
inline vf operator/(vf x, vf y) { return {x.a / y.a, x.b / y.b, x.c / y.c, x.d / y.d}; }

// 16 words, with operations for 8-bit formats and pairs of bf16.
struct vu {
  uint32x4_t a, b, c, d;
};

inline vu operator&(vu x, uint32_t y) { return {x.a & y, x.b & y, x.c & y, x.d & y}; }
inline vu operator&(vu x, vu y) { return {x.a & y.a, x.b & y.b, x.c & y.c, x.d & y.d}; }
inline vu operator|(vu x, vu y) { return {x.a | y.a, x.b | y.b, x.c | y.c, x.d | y.d}; }
inline vu operator~(vu x) { return {~x.a, ~x.b, ~x.c, ~x.d}; }
inline vu operator+(vu x, uint32_t y) { return {x.a + y, x.b + y, x.c + y, x.d + y}; }
inline vu operator+(vu x, vu y) { return {x.a + y.a, x.b + y.b, x.c + y.c, x.d + y.d}; }
inline vu operator-(vu x, uint32_t y) { return {x.a - y, x.b - y, x.c - y, x.d - y}; }
inline vu operator<<(vu x, int y) { return {x.a << y, x.b << y, x.c << y, x.d << y}; }
inline vu operator>>(vu x, int y) { return {x.a >> y, x.b >> y, x.c >> y, x.d >> y}; }
inline vu operator<(vu x, uint32_t y) {  // all bits or none
  const uint32x4_t by = vdupq_n_u32(y);
  return {vcltq_u32(x.a, by), vcltq_u32(x.b, by), vcltq_u32(x.c, by), vcltq_u32(x.d, by)};
}

// The bits of `from` as another type of the same size. Vectors stay in registers.
template <class To, class From>
inline To recast(From from) {
  static_assert(sizeof(To) == sizeof(From));
  if constexpr (std::is_same_v<To, From>) {
    return from;
  } else if constexpr (std::is_same_v<To, vf> && std::is_same_v<From, vu>) {
    return {vreinterpretq_f32_u32(from.a), vreinterpretq_f32_u32(from.b), vreinterpretq_f32_u32(from.c),
            vreinterpretq_f32_u32(from.d)};
  } else if constexpr (std::is_same_v<To, vu> && std::is_same_v<From, vf>) {
    return {vreinterpretq_u32_f32(from.a), vreinterpretq_u32_f32(from.b), vreinterpretq_u32_f32(from.c),
            vreinterpretq_u32_f32(from.d)};
  } else {
    To to;
    std::memcpy(&to, &from, sizeof(to));
    return to;
  }
}

inline uint8x16_t sixteen_bytes(const void* p) { return vld1q_u8(static_cast<const uint8_t*>(p)); }

template <class V>
inline V load_as(const void* from) {
  if constexpr (std::is_same_v<V, vf> || std::is_same_v<V, vu>) {
    const uint8_t* at = static_cast<const uint8_t*>(from);
    const auto four = [&](int i) { return vreinterpretq_u32_u8(sixteen_bytes(at + 16 * i)); };
    return recast<V>(vu{four(0), four(1), four(2), four(3)});
  } else {
    V value;
    std::memcpy(&value, from, sizeof(value));
    return value;
  }
}

inline vf splat(float x) {
  const float32x4_t all = vdupq_n_f32(x);
  return {all, all, all, all};
}
inline vf load(const float* p) { return {vld1q_f32(p), vld1q_f32(p + 4), vld1q_f32(p + 8), vld1q_f32(p + 12)}; }
inline void store(float* p, vf x) {
  vst1q_f32(p, x.a);
  vst1q_f32(p + 4, x.b);
  vst1q_f32(p + 8, x.c);
  vst1q_f32(p + 12, x.d);
}

// NEON has no masked loads: part of a vector goes through memory.
inline vf load_n(const float* p, int n) {
  if (n == 16) return load(p);
  float part[16] = {};
  std::memcpy(part, p, size_t(n) * sizeof(float));
  return load(part);
}
inline void store_n(float* p, vf x, int n) {
  if (n == 16) return store(p, x);
  float part[16];
  store(part, x);
  std::memcpy(p, part, size_t(n) * sizeof(float));
}

inline vf widen16(uint16x8_t low, uint16x8_t high) {
  return recast<vf>(vu{vshll_n_u16(vget_low_u16(low), 16), vshll_high_n_u16(low, 16),
                       vshll_n_u16(vget_low_u16(high), 16), vshll_high_n_u16(high, 16)});
}
inline vf load(const bf16* p) {
  const uint16_t* at = reinterpret_cast<const uint16_t*>(p);
  return widen16(vld1q_u16(at), vld1q_u16(at + 8));
}
inline vf load_n(const bf16* p, int n) {
  bf16 part[16] = {};
  std::memcpy(static_cast<void*>(part), p, size_t(n) * sizeof(bf16));
  return load(part);
}
// bf16 of each word, in the upper half.
inline uint32x4_t narrow4(float32x4_t x) {
  const uint32x4_t bits = vreinterpretq_u32_f32(x), odd = vshrq_n_u32(bits, 16) & 1u;
  const uint32x4_t up = bits + odd + 0x7fffu;
  return vbslq_u32(vceqq_f32(x, x), up, vdupq_n_u32(0x7fc00000u));
}
inline void store(bf16* p, vf x) {
  const auto words = [](float32x4_t low, float32x4_t high) {
    return vuzp2q_u16(vreinterpretq_u16_u32(narrow4(low)), vreinterpretq_u16_u32(narrow4(high)));
  };
  uint16_t* to = reinterpret_cast<uint16_t*>(p);
  vst1q_u16(to, words(x.a, x.b));
  vst1q_u16(to + 8, words(x.c, x.d));
}
inline void store_n(bf16* p, vf x, int n) {
  if (n == 16) return store(p, x);
  bf16 part[16];
  store(part, x);
  std::memcpy(static_cast<void*>(p), part, size_t(n) * sizeof(bf16));
}

inline vf fma(vf x, vf y, vf z) {
  return {vfmaq_f32(z.a, x.a, y.a), vfmaq_f32(z.b, x.b, y.b), vfmaq_f32(z.c, x.c, y.c), vfmaq_f32(z.d, x.d, y.d)};
}
// By comparisons, because the NEON instructions for extremes return NaN where x is NaN.
inline float32x4_t max4(float32x4_t x, float32x4_t y) { return vbslq_f32(vcgtq_f32(x, y), x, y); }
inline float32x4_t min4(float32x4_t x, float32x4_t y) { return vbslq_f32(vcltq_f32(x, y), x, y); }
inline vf vmax(vf x, vf y) { return each(max4, x, y); }
inline vf vmin(vf x, vf y) { return each(min4, x, y); }
inline vf vsqrt(vf x) {
  return each([](float32x4_t of) { return vsqrtq_f32(of); }, x);
}
inline vf vabs(vf x) {
  return each([](float32x4_t of) { return vabsq_f32(of); }, x);
}

inline uint32x4_t bits_of_lanes() {
  const uint32_t bits[4] = {1, 2, 4, 8};
  return vld1q_u32(bits);
}
inline vf select(uint32_t mask, vf x, vf y) {
  const uint32x4_t all = vdupq_n_u32(mask), bits = bits_of_lanes();
  return {vbslq_f32(vtstq_u32(all, bits), x.a, y.a), vbslq_f32(vtstq_u32(all, bits << 4), x.b, y.b),
          vbslq_f32(vtstq_u32(all, bits << 8), x.c, y.c), vbslq_f32(vtstq_u32(all, bits << 12), x.d, y.d)};
}
// One bit of each lane; lanes have all bits or none.
inline uint32_t bits_of(uint32x4_t a, uint32x4_t b, uint32x4_t c, uint32x4_t d) {
  const uint32x4_t bits = bits_of_lanes();
  return vaddvq_u32((a & bits) | (b & (bits << 4)) | (c & (bits << 8)) | (d & (bits << 12)));
}
// Lanes with a word of `low` or more.
inline uint32_t at_least(const uint32_t* p, uint32_t low) {
  const uint32x4_t bound = vdupq_n_u32(low);
  const auto reached = [&](int i) { return vcgeq_u32(vld1q_u32(p + 4 * i), bound); };
  return bits_of(reached(0), reached(1), reached(2), reached(3));
}
inline uint32_t less(vf x, vf y) {
  return bits_of(vcltq_f32(x.a, y.a), vcltq_f32(x.b, y.b), vcltq_f32(x.c, y.c), vcltq_f32(x.d, y.d));
}
inline uint32_t equal(vf x, vf y) {
  return bits_of(vceqq_f32(x.a, y.a), vceqq_f32(x.b, y.b), vceqq_f32(x.c, y.c), vceqq_f32(x.d, y.d));
}

// Add lanes i and i + 8, then lanes 4, 2 and 1 apart.
inline float reduce_add(vf x) {
  const float32x4_t fours = (x.a + x.c) + (x.b + x.d);
  const float32x2_t twos = vget_low_f32(fours) + vget_high_f32(fours);
  return vget_lane_f32(twos, 0) + vget_lane_f32(twos, 1);
}
inline float reduce_max(vf x) {
  const float32x4_t fours = max4(max4(x.a, x.c), max4(x.b, x.d));
  const float32x4_t twos = max4(fours, vextq_f32(fours, fours, 2));
  return vgetq_lane_f32(max4(twos, vextq_f32(twos, twos, 1)), 0);
}

inline vf fraction(vf x) {
  return each(
      [](float32x4_t of) {
        const uint32x4_t infinite = vceqq_f32(vabsq_f32(of), vdupq_n_f32(INFINITY));
        return vreinterpretq_f32_u32(vbicq_u32(vreinterpretq_u32_f32(of - vrndmq_f32(of)), infinite));
      },
      x);
}

// In two steps; the first is exact for 1 <= x < 2. No single power of two reaches all results.
inline float32x4_t scale4(float32x4_t x, float32x4_t n) {
  const float32x4_t whole = vminq_f32(vmaxq_f32(vrndmq_f32(n), vdupq_n_f32(-252.0f)), vdupq_n_f32(254.0f));
  const int32x4_t power = vcvtq_s32_f32(whole), part = vshrq_n_s32(power, 1), one = vdupq_n_s32(127);
  const auto factor = [&](int32x4_t of) { return vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(of, one), 23)); };
  return x * factor(part) * factor(vsubq_s32(power, part));
}
inline vf scale2(vf x, vf n) { return each(scale4, x, n); }  // 1 <= x < 2, or NaN

// 16 unsigned bytes as words, and signed bytes as floats.
inline vu widen_bytes(uint8x16_t x) {
  const uint16x8_t low = vmovl_u8(vget_low_u8(x)), high = vmovl_high_u8(x);
  return {vmovl_u16(vget_low_u16(low)), vmovl_high_u16(low), vmovl_u16(vget_low_u16(high)), vmovl_high_u16(high)};
}
inline uint8x16_t narrow_words(vu x) {
  const uint16x8_t low = vmovn_high_u32(vmovn_u32(x.a), x.b), high = vmovn_high_u32(vmovn_u32(x.c), x.d);
  return vmovn_high_u16(vmovn_u16(low), high);
}
inline vf floats_of(int8x16_t x) {
  const int16x8_t low = vmovl_s8(vget_low_s8(x)), high = vmovl_high_s8(x);
  return {vcvtq_f32_s32(vmovl_s16(vget_low_s16(low))), vcvtq_f32_s32(vmovl_high_s16(low)),
          vcvtq_f32_s32(vmovl_s16(vget_low_s16(high))), vcvtq_f32_s32(vmovl_high_s16(high))};
}
inline vf floats_of(vu x) {  // words as signed integers
  const auto floats = [](uint32x4_t of) { return vcvtq_f32_s32(vreinterpretq_s32_u32(of)); };
  return {floats(x.a), floats(x.b), floats(x.c), floats(x.d)};
}

// 16 float16, converted exactly.
inline vf widen_halves(uint16x8_t low, uint16x8_t high) {
  const float16x8_t a = vreinterpretq_f16_u16(low), b = vreinterpretq_f16_u16(high);
  return {vcvt_f32_f16(vget_low_f16(a)), vcvt_high_f32_f16(a), vcvt_f32_f16(vget_low_f16(b)), vcvt_high_f32_f16(b)};
}

// 16 words + pairs of bf16 products: sum + x.first * w.first + x.second * w.second.
#if WEFT_NEON_BF16
inline float32x4_t dot4(float32x4_t sum, uint32x4_t x, uint32x4_t w) {
  return vbfdotq_f32(sum, vreinterpretq_bf16_u32(x), vreinterpretq_bf16_u32(w));
}
inline vf bf16_dot(vf sum, vu x, vu w) {
  return {dot4(sum.a, x.a, w.a), dot4(sum.b, x.b, w.b), dot4(sum.c, x.c, w.c), dot4(sum.d, x.d, w.d)};
}
#endif

}  // namespace weft::vec
