// Tiles of a matrix product with NEON (gemm_tile.h): four columns of weights at a time serve all rows, so that the sums
// of three rows (24 registers) stay in registers. With bf16 instructions a pair of k is one BFDOT, otherwise two FMLA.
#pragma once

#include "gemm_tile.h"

namespace weft {
namespace {

// 4 signed bytes as floats.
inline float32x4_t four_floats(const uint8_t* from) {
  const int8x8_t bytes = vcreate_s8(load_as<uint32_t>(from));
  return vcvtq_f32_s32(vmovl_s16(vget_low_s16(vmovl_s8(bytes))));
}

// Pairs of bf16 of columns 4 quad .. 4 quad + 3.
template <class F>
inline uint32x4_t quad_pairs(const uint8_t* w, int quad) {
  if constexpr (std::is_same_v<F, Bf16>) {
    return vreinterpretq_u32_u8(sixteen_bytes(w + 16 * quad));
  } else {
    const uint8_t* from = w + quad / 4 * 32 + quad % 4 * 4;
    const float32x4_t first = four_floats(from), second = four_floats(from + 16);
    return vsriq_n_u32(vreinterpretq_u32_f32(second), vreinterpretq_u32_f32(first), 16);
  }
}

// Floats of columns 4 quad .. 4 quad + 3.
template <class F>
inline float32x4_t quad_floats(const uint8_t* w, int quad) {
  if constexpr (std::is_same_v<F, F32>) return vld1q_f32(reinterpret_cast<const float*>(w) + 4 * quad);
  return four_floats(w + 4 * quad);
}

// One step of bf16: sums [rows, 32 columns] += products of a pair of k; x: pairs of the rows.
template <class F, int rows>
inline __attribute__((always_inline)) void add_pairs(float32x4_t (&sum)[rows][8], const uint32x2_t (&x)[rows],
                                                     const uint8_t* w) {
#if !WEFT_NEON_BF16
  const int32x2_t shift = vcreate_s32(16);  // of the first k of a pair
  const uint32x2_t mask = vcreate_u32(0xffff0000ffffffff);
  float32x2_t value[rows];
#pragma GCC unroll 4
  for (int row = 0; row < rows; ++row) value[row] = vreinterpret_f32_u32(vshl_u32(x[row], shift) & mask);
#endif
#pragma GCC unroll 8
  for (int quad = 0; quad < 8; ++quad) {
    const uint32x4_t pairs = quad_pairs<F>(w, quad);
#if WEFT_NEON_BF16
#pragma GCC unroll 4
    for (int row = 0; row < rows; ++row)
      sum[row][quad] =
          vbfdotq_lane_f32(sum[row][quad], vreinterpretq_bf16_u32(pairs), vreinterpret_bf16_u32(x[row]), 0);
#else
    const float32x4_t first = vreinterpretq_f32_u32(pairs << 16), second = vreinterpretq_f32_u32(pairs & 0xffff0000u);
#pragma GCC unroll 4
    for (int row = 0; row < rows; ++row) sum[row][quad] = vfmaq_lane_f32(sum[row][quad], first, value[row], 0);
#pragma GCC unroll 4
    for (int row = 0; row < rows; ++row) sum[row][quad] = vfmaq_lane_f32(sum[row][quad], second, value[row], 1);
#endif
  }
}

// Sums of rows of x, `x_stride` apart, times a block: float32 [rows, 32]. Each sum is one chain over k, in order. Never
// inlined: code after the loop would take registers of the loop.
template <class F, int rows>
__attribute__((noinline)) void neon_sums(const typename F::X* x, int64_t x_stride, const uint8_t* w, int64_t inputs,
                                         float* to) {
  float32x4_t sum[rows][8];
#pragma GCC unroll 4
  for (int row = 0; row < rows; ++row)
#pragma GCC unroll 8
    for (int quad = 0; quad < 8; ++quad) sum[row][quad] = vdupq_n_f32(0.0f);
  int64_t k = 0;
  for (; k + F::depth <= inputs; k += F::depth, w += F::bytes) {
    __builtin_prefetch(w + kAhead);
    if (F::bytes > 64) __builtin_prefetch(w + kAhead + 64);
    if constexpr (std::is_same_v<typename F::X, bf16>) {
      uint32x2_t value[rows];
#pragma GCC unroll 4
      for (int row = 0; row < rows; ++row) value[row] = vdup_n_u32(load_as<uint32_t>(x + row * x_stride + k));
      add_pairs<F, rows>(sum, value, w);
    } else {
      float32x4_t value[rows];
#pragma GCC unroll 4
      for (int row = 0; row < rows; ++row) value[row] = vld1q_dup_f32(x + row * x_stride + k);
#pragma GCC unroll 8
      for (int quad = 0; quad < 8; ++quad) {
        const float32x4_t weights = quad_floats<F>(w, quad);
#pragma GCC unroll 4
        for (int row = 0; row < rows; ++row) sum[row][quad] = vfmaq_f32(sum[row][quad], weights, value[row]);
      }
    }
  }
  if constexpr (std::is_same_v<typename F::X, bf16>) {
    if (k < inputs) {
      uint32x2_t value[rows];
#pragma GCC unroll 4
      for (int row = 0; row < rows; ++row) value[row] = vdup_n_u32(x[row * x_stride + k].x);
      add_pairs<F, rows>(sum, value, w);
    }
  }
#pragma GCC unroll 4
  for (int row = 0; row < rows; ++row)
#pragma GCC unroll 8
    for (int quad = 0; quad < 8; ++quad) vst1q_f32(to + row * kBlock + 4 * quad, sum[row][quad]);
}

template <class F, class Out, int rows>
void narrow_tile(const typename F::X* x, int64_t x_stride, const uint8_t* w, int64_t inputs, const Finish& finish,
                 Out* out, int64_t out_stride, Ahead) {
  alignas(64) float sums[rows * kBlock];
  neon_sums<F, rows>(x, x_stride, w, inputs, sums);
  for (int row = 0; row < rows; ++row)
    finish_row(load(sums + row * kBlock), load(sums + row * kBlock + kLanes), finish, out + row * out_stride);
}

}  // namespace
}  // namespace weft
