// Tiles of a matrix product: some rows of x times one block of 32 packed columns, over all of K.
//
// PACKED WEIGHTS. A block has 32 output columns, one *step* of K after another:
//
//   bf16   step = 2 k:  [column 0: k, k+1][column 1: k, k+1] .. [column 31: k, k+1]        128 bytes
//   f32    step = 1 k:  [column 0] .. [column 31]                                          128 bytes
//   int8   step for the dtype of the activations, one byte per weight: 64 or 32 bytes, see int8_slot
//
//   Columns beyond N are zero. If K is odd, the second k of the last step is zero.
//
// A TILE has rows x 32 float sums in registers. Each sum is one chain over k, in order. A tile of fewer rows is the
// same code with fewer sums, so a row's bits do not depend on its tile. int8 weights become bf16 or float, exactly, and
// then take the same chain; the scale is applied to the sum.
#pragma once

#include <algorithm>
#include <array>
#include <type_traits>
#include <utility>

#include "vector.h"

namespace weft {
namespace {

using namespace vec;

constexpr int kBlock = 32;

inline int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

#if WEFT_AVX512
constexpr int kRows = 14;  // rows of a tile: 28 registers of sums, 2 of weights, 1 of x
#else
constexpr int kRows = 3;
#endif

// --- registers ------------------------------------------------------------------------------------------------

// sum + x.first * w.first + x.second * w.second
inline vf dot_pairs(vf sum, Pairs x, Pairs w) {
#if WEFT_BF16_DOTS && WEFT_AVX512
  return _mm512_dpbf16_ps(sum, recast<__m512bh>(x), recast<__m512bh>(w));
#elif WEFT_BF16_DOTS
  return bf16_dot(sum, x, w);
#else
  sum = fma(recast<vf>(x << 16), recast<vf>(w << 16), sum);
  return fma(recast<vf>(x & 0xffff0000u), recast<vf>(w & 0xffff0000u), sum);
#endif
}

// --- formats: contents of a step of K --------------------------------------------------------------------------

struct Bf16 {
  using X = bf16;
  struct Step {
    Pairs w[2];
  };
  static constexpr int depth = 2;        // k per step
  static constexpr int64_t bytes = 128;  // bytes of weights per step
  static Step load(const uint8_t* w) { return {{load_as<Pairs>(w), load_as<Pairs>(w + 64)}}; }
  static Pairs x(const bf16* from) { return Pairs{} + load_as<uint32_t>(from); }
  static Pairs x_last(const bf16* from) { return Pairs{} + uint32_t(from->x); }  // the second k is missing
  static vf dot(vf sum, Pairs x, Pairs w) { return dot_pairs(sum, x, w); }
#if WEFT_AVX2
  // 16 columns of half `half` for k `k` of the step
  static vf floats(const uint8_t* w, int half, int k) {
    const Pairs read = load_as<Pairs>(w + 64 * half);
    return recast<vf>(k ? read & 0xffff0000u : read << 16);
  }
#endif
};

struct F32 {
  using X = float;
  struct Step {
    vf w[2];
  };
  static constexpr int depth = 1;
  static constexpr int64_t bytes = 128;
  static Step load(const uint8_t* w) { return {{load_as<vf>(w), load_as<vf>(w + 64)}}; }
  static vf x(const float* from) { return splat(*from); }
  static vf x_last(const float* from) { return splat(*from); }
  static vf dot(vf sum, vf x, vf w) { return fma(x, w, sum); }
};

// Place of (column, k of the pair) in an int8 step for bf16. With a byte table, the low and high bytes of a step's 64
// weights are looked up and interleaved within lanes of 128 bits. A lane therefore has 4 pairs of the first 16 columns,
// then 4 of the last 16. Without a table, a step is four rows of 16: (half of the columns, k).
inline int int8_slot(int column, int k) {
  if (WEFT_BYTE_TABLES) return column % 16 / 4 * 16 + column / 16 * 8 + column % 4 * 2 + k;
  return column / 16 * 32 + k * 16 + column % 16;
}

// Stored byte for bf16, of -127 to 127: two's complement. For the table: six low bits of the magnitude, above them the
// sign, and a bit that is set for magnitudes below 64. No number has the byte `kNoInt8`.
inline uint8_t int8_code(int value) {
  if (!WEFT_BYTE_TABLES) return uint8_t(value);
  const int size = value < 0 ? -value : value;
  return uint8_t((size < 64 ? 0x80 : 0) | (value < 0 ? 0x40 : 0) | (size & 63));
}
constexpr uint8_t kNoInt8 = 0xc0;

typedef int8_t Bytes __attribute__((vector_size(16)));
typedef int32_t Ints __attribute__((vector_size(64)));
typedef float Floats __attribute__((vector_size(64)));

inline vf int8_floats(const uint8_t* from) {
#if WEFT_AVX512
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(load_as<__m128i>(from)));
#elif WEFT_AVX2
  return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(two(from))), _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(two(from + 8)))};
#elif WEFT_NEON
  return floats_of(vld1q_s8(reinterpret_cast<const int8_t*>(from)));
#else
  return recast<vf>(__builtin_convertvector(__builtin_convertvector(load_as<Bytes>(from), Ints), Floats));
#endif
}

#if WEFT_BYTE_TABLES
// Low and high bytes of bf16(magnitude), which is exact, for magnitudes 0 to 63.
struct Int8Table {
  alignas(64) uint8_t low[64], high[64];
  constexpr Int8Table() : low(), high() {
    for (int value = 1, exponent = 0; value < 64; ++value) {
      if (value >> (exponent + 1)) ++exponent;
      const int code = (127 + exponent) << 7 | (value << (7 - exponent) & 0x7f);
      low[value] = uint8_t(code), high[value] = uint8_t(code >> 8);
    }
  }
};
constexpr Int8Table kInt8Table;

// Low and high bytes of 64 numbers in bf16; `kNoInt8` is -0. On Intel's CPUs a lookup in 64 bytes is one instruction,
// and a lookup in 128 bytes is several, on a port that `vdpbf16ps` needs too. So magnitudes from 64 on are computed:
// the high byte is 0x42, and the low byte is twice the magnitude.
struct Int8Halves {
  __m512i low, high;
  explicit Int8Halves(__m512i code) {
    const __m512i sign = _mm512_set1_epi8(char(0x80)), twice = _mm512_add_epi8(code, code);
    const __mmask64 small = _mm512_movepi8_mask(code);
    const __m512i large = _mm512_or_si512(twice, sign);
    low = _mm512_mask_permutexvar_epi8(large, small, code, _mm512_load_si512(kInt8Table.low));
    high = _mm512_mask_permutexvar_epi8(_mm512_set1_epi8(0x42), small, code, _mm512_load_si512(kInt8Table.high));
    high = _mm512_ternarylogic_epi32(high, twice, sign, 0xf8);  // high | (twice & sign)
  }
};

// A step of 64 numbers from their low and high bytes.
template <class Halves>
inline Bf16::Step step_of(const Halves& made) {
  return {{recast<Pairs>(_mm512_unpacklo_epi8(made.low, made.high)),
           recast<Pairs>(_mm512_unpackhi_epi8(made.low, made.high))}};
}
#endif

struct Int8Bf16 : Bf16 {
  static constexpr int64_t bytes = 64;
#if WEFT_AVX2
  static vf floats(const uint8_t* w, int half, int k) { return int8_floats(w + 32 * half + 16 * k); }
#endif
  static Step load(const uint8_t* w) {
#if WEFT_BYTE_TABLES
    return step_of(Int8Halves(_mm512_loadu_si512(w)));
#else
    Step step;
    for (int half = 0; half < 2; ++half) {
      const Pairs first = recast<Pairs>(int8_floats(w + 32 * half));
      const Pairs second = recast<Pairs>(int8_floats(w + 32 * half + 16));
      step.w[half] = (first >> 16) | (second & 0xffff0000u);
    }
    return step;
#endif
  }
};

struct Int8F32 : F32 {
  static constexpr int64_t bytes = 32;
  static Step load(const uint8_t* w) { return {{int8_floats(w), int8_floats(w + 16)}}; }
  static vf floats(const uint8_t* w, int half, int) { return int8_floats(w + 16 * half); }
};

// --- from sums to results -----------------------------------------------------------------------------------

enum class Activation : int { none = 0, silu = 1, gelu_tanh = 2, gelu = 3, relu = 4, swiglu = 5 };

struct Finish {
  alignas(64) float scale[kBlock];  // 1 without scales
  alignas(64) float bias[kBlock];
  bool scaled = false, biased = false;
  Activation activation = Activation::none;  // of the first 16 columns, times the last 16
  int columns = kBlock;                      // outputs of this block: at most 32, or 16 with an activation
  float limit = 0.0f;                        // > 0: gates are at most `limit`, and their factors within +-limit
  float alpha = 1.0f;                        // swiglu: gate * sigmoid(alpha * gate) * (up + 1)
};

inline vf activate(vf x, Activation activation) {
  switch (activation) {
    case Activation::silu:
      return sigmoid_times(x, x);
    case Activation::gelu_tanh:  // x * sigmoid(2 u), u = sqrt(2 / pi) * (x + 0.044715 x^3)
      return sigmoid_times(x, fma(splat(0.044715f) * x * x, x, x) * splat(1.5957691216057308f));
    case Activation::relu:
      return vmax(splat(0.0f), x);
    case Activation::gelu: {
      float lanes[kLanes];
      store(lanes, x);
      for (float& lane : lanes) lane *= 0.5f * (1.0f + std::erf(lane * 0.70710678118654752f));
      return load(lanes);
    }
    case Activation::none:
    case Activation::swiglu:
      break;
  }
  return x;
}

// activation(gate) * up
inline vf gate_up(vf gate, vf up, const Finish& finish) {
  if (finish.limit > 0.0f) {
    gate = vmin(splat(finish.limit), gate);  // NaN stays NaN
    up = vmax(splat(-finish.limit), vmin(splat(finish.limit), up));
  }
  if (finish.activation == Activation::swiglu)
    return sigmoid_times(gate, gate * splat(finish.alpha)) * (up + splat(1.0f));
  return activate(gate, finish.activation) * up;
}

// Sums with scales applied.
template <class X>
inline void finish_scaled(vf first, vf second, const Finish& finish, X* out) {
  if (finish.biased) {
    first = first + load(finish.bias);
    second = second + load(finish.bias + kLanes);
  }
  if (finish.activation != Activation::none) {
    store_n(out, gate_up(first, second, finish), finish.columns);
    return;
  }
  store_n(out, first, std::min(finish.columns, kLanes));
  if (finish.columns > kLanes) store_n(out + kLanes, second, finish.columns - kLanes);
}

template <class X>
inline void finish_row(vf first, vf second, const Finish& finish, X* out) {
  if (finish.scaled) first = first * load(finish.scale), second = second * load(finish.scale + kLanes);
  finish_scaled(first, second, finish, out);
}

// --- a tile ---------------------------------------------------------------------------------------------------

constexpr int64_t kAhead = 2048;  // bytes of weights from prefetch to use; may run past the end

// The hardware prefetches within a page of 4 kB, faster than explicit prefetches of each line. But the hardware does
// not find the next pages, so one line of each following page is prefetched.
constexpr int64_t kPage = 4096, kPagesAhead = 2 * kPage;

// Weights to prefetch during a tile's computation: a line every `mask` + 1 steps. Without such weights, `w` again.
struct Ahead {
  const uint8_t* at;
  int64_t line, mask;
};

// rows x 32 sums in float32. Never inlined: code after the loop would take registers of the loop.
template <class F, int rows>
__attribute__((noinline)) void tile_sums(const typename F::X* x, int64_t x_stride, const uint8_t* w, int64_t inputs,
                                         Ahead ahead, float* to) {
  vf sum[rows][2];
#pragma GCC unroll 16
  for (int row = 0; row < rows; ++row) sum[row][0] = sum[row][1] = splat(0.0f);
  // The chain over k: each sum adds its products in order, for any number of rows.
  const int64_t steps = inputs / F::depth;
  for (int64_t step = 0; step < steps; ++step, w += F::bytes) {
    if (step % (kPage / F::bytes) == 0) __builtin_prefetch(w + kPagesAhead);
    if ((step & ahead.mask) == 0) {
      __builtin_prefetch(ahead.at, 0, 2);
      ahead.at += ahead.line;
    }
    const auto weights = F::load(w);
#pragma GCC unroll 16
    for (int row = 0; row < rows; ++row) {
      const auto value = F::x(x + row * x_stride + step * F::depth);
      sum[row][0] = F::dot(sum[row][0], value, weights.w[0]);
      sum[row][1] = F::dot(sum[row][1], value, weights.w[1]);
    }
  }
  if (inputs % F::depth) {
    const auto weights = F::load(w);
#pragma GCC unroll 16
    for (int row = 0; row < rows; ++row) {
      const auto value = F::x_last(x + row * x_stride + inputs - 1);
      sum[row][0] = F::dot(sum[row][0], value, weights.w[0]);
      sum[row][1] = F::dot(sum[row][1], value, weights.w[1]);
    }
  }
#pragma GCC unroll 16
  for (int row = 0; row < rows; ++row) {
    store(to + row * kBlock, sum[row][0]);
    store(to + row * kBlock + kLanes, sum[row][1]);
  }
}

template <class F, class Out, int rows>
void tile(const typename F::X* x, int64_t x_stride, const uint8_t* w, int64_t inputs, const Finish& finish, Out* out,
          int64_t out_stride, Ahead ahead) {
  alignas(64) float sums[rows * kBlock];
  tile_sums<F, rows>(x, x_stride, w, inputs, ahead, sums);
  for (int row = 0; row < rows; ++row)
    finish_row(load(sums + row * kBlock), load(sums + row * kBlock + kLanes), finish, out + row * out_stride);
}

#if WEFT_AVX2

// rows x 32 sums in float32. Each quarter of a step's weights serves all rows: 12 registers of sums, 3 of x, 1 of
// weights. Never inlined: code after the loop would take registers of the loop.
template <int rows>
__attribute__((noinline)) void float_sums(const float* x, int64_t x_stride, const float* w, int64_t inputs, float* to) {
  __m256 sum[rows][4];
#pragma GCC unroll 4
  for (int row = 0; row < rows; ++row)
#pragma GCC unroll 4
    for (int part = 0; part < 4; ++part) sum[row][part] = _mm256_setzero_ps();
  for (int64_t k = 0; k < inputs; ++k, w += kBlock) {
    __builtin_prefetch(reinterpret_cast<const uint8_t*>(w) + kAhead);
    __builtin_prefetch(reinterpret_cast<const uint8_t*>(w) + kAhead + 64);
    __m256 value[rows];
#pragma GCC unroll 4
    for (int row = 0; row < rows; ++row) value[row] = _mm256_broadcast_ss(x + row * x_stride + k);
#pragma GCC unroll 4
    for (int part = 0; part < 4; ++part) {
      __m256 weights = _mm256_loadu_ps(w + 8 * part);
      asm("" : "+x"(weights));  // keeps the load out of the loop over rows
#pragma GCC unroll 4
      for (int row = 0; row < rows; ++row) sum[row][part] = _mm256_fmadd_ps(value[row], weights, sum[row][part]);
    }
  }
#pragma GCC unroll 4
  for (int row = 0; row < rows; ++row)
#pragma GCC unroll 4
    for (int part = 0; part < 4; ++part) _mm256_storeu_ps(to + row * kBlock + 8 * part, sum[row][part]);
}

// The same with weights widened in registers.
template <class F, int rows>
__attribute__((noinline)) void widened_sums(const typename F::X* x, int64_t x_stride, const uint8_t* w, int64_t inputs,
                                            float* to) {
  vf sum[rows][2];
#pragma GCC unroll 4
  for (int row = 0; row < rows; ++row) sum[row][0] = sum[row][1] = splat(0.0f);
  const auto add = [&](int64_t k, int of_step) __attribute__((always_inline)) {
    vf value[rows];
#pragma GCC unroll 4
    for (int row = 0; row < rows; ++row) value[row] = splat(widen(x[row * x_stride + k]));
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
      const vf weights = F::floats(w, half, of_step);
#pragma GCC unroll 4
      for (int row = 0; row < rows; ++row) sum[row][half] = fma(value[row], weights, sum[row][half]);
    }
  };
  int64_t k = 0;
  for (; k + F::depth <= inputs; k += F::depth, w += F::bytes) {
    __builtin_prefetch(w + kAhead);
    if (F::bytes > 64) __builtin_prefetch(w + kAhead + 64);
#pragma GCC unroll 2
    for (int of_step = 0; of_step < F::depth; ++of_step) add(k + of_step, of_step);
  }
  if (k < inputs) add(k, 0);
#pragma GCC unroll 4
  for (int row = 0; row < rows; ++row) {
    store(to + row * kBlock, sum[row][0]);
    store(to + row * kBlock + kLanes, sum[row][1]);
  }
}

template <class F, class Out, int rows>
void narrow_tile(const typename F::X* x, int64_t x_stride, const uint8_t* w, int64_t inputs, const Finish& finish,
                 Out* out, int64_t out_stride, Ahead) {
  alignas(32) float sums[rows * kBlock];
  if constexpr (std::is_same_v<F, F32>)
    float_sums<rows>(x, x_stride, reinterpret_cast<const float*>(w), inputs, sums);
  else
    widened_sums<F, rows>(x, x_stride, w, inputs, sums);
  for (int row = 0; row < rows; ++row)
    finish_row(load(sums + row * kBlock), load(sums + row * kBlock + kLanes), finish, out + row * out_stride);
}

#endif

#if WEFT_NEON
}  // namespace
}  // namespace weft
#include "gemm_neon.h"
namespace weft {
namespace {
#endif

template <class F, class Out>
using Tile = void (*)(const typename F::X*, int64_t, const uint8_t*, int64_t, const Finish&, Out*, int64_t, Ahead);

template <class F, class Out, int... rows>
constexpr std::array<Tile<F, Out>, sizeof...(rows)> make_tiles(std::integer_sequence<int, rows...>) {
#if WEFT_AVX2 || WEFT_NEON
  return {narrow_tile<F, Out, rows + 1>...};
#else
  return {tile<F, Out, rows + 1>...};
#endif
}

// Rows of a tile of a format. With AVX2, weights widened in registers leave room for fewer rows. For more rows than
// that, a block's weights are widened in memory (gemm_block.h), and F32's tiles are used.
template <class F>
constexpr int tile_rows = WEFT_AVX2 && !std::is_same_v<F, F32> ? 2 : kRows;

// tiles<F, Out>[rows - 1]: tile of `rows` rows; results are rounded to Out
template <class F, class Out = typename F::X>
constexpr auto tiles = make_tiles<F, Out>(std::make_integer_sequence<int, tile_rows<F>>{});

}  // namespace
}  // namespace weft
