// Quantized weights: the sums of a block (coded.h).
//
// Few bf16 rows are multiplied by codes unpacked in registers, hidden behind reading the codes. For more rows than a
// tile has, some groups at a time are unpacked in memory, once for all rows. With AVX-512 the result is steps of bf16,
// for tiles of half the height, so the totals of groups stay in registers. With AVX2, and for float32 rows everywhere,
// the result is floats. AMX works differently (gemm_block.h), with bf16 steps from `coded_as_bf16`.
#include "coded.h"

#include "coded_numbers.h"
#include "fp8.h"
#include "gemm_block.h"

namespace weft {
namespace {

constexpr int64_t kUnpacked = 256;  // k at a time, to stay in the L1 cache
// Rows of a tile: registers for sums, and for unpacking.
constexpr int kDirectRows = WEFT_AVX512 ? 12 : WEFT_AVX2 ? 3 : 2;
constexpr int64_t kManyRows = 13;  // rows from which codes are unpacked in memory, with AVX-512
constexpr int64_t kDearRows = 9;   // the same for expensive groups: fewer than 32 k, or minimums
constexpr int kTotalRows = 7;      // rows of a tile: registers for sums and totals
constexpr int kTurn = 8;           // pairs of k at a time: the size of the smallest common groups
constexpr int64_t kLine = 64;      // bytes of a cache line
constexpr uint32_t kHigh = 0xffff0000u;

// --- codes to pairs of bf16, exactly --------------------------------------------------------------------------

inline vf to_floats(Words x) {
#if WEFT_AVX512
  return _mm512_cvtepi32_ps(recast<__m512i>(x));
#elif WEFT_AVX2
  return {_mm256_cvtepi32_ps(__m256i(x.a)), _mm256_cvtepi32_ps(__m256i(x.b))};
#elif WEFT_NEON
  return floats_of(x);
#else
  return recast<vf>(__builtin_convertvector(recast<Ints>(x), Floats));
#endif
}

inline Pairs pairs_of(vf first, vf second) { return (recast<Pairs>(first) >> 16) | (recast<Pairs>(second) & kHigh); }

// bf16 of an E2M1 code.
constexpr uint16_t e2m1_bf16(int code) {
  constexpr uint16_t magnitude[8] = {0, 0x3f00, 0x3f80, 0x3fc0, 0x4000, 0x4040, 0x4080, 0x40c0};
  return uint16_t((code & 8) << 12 | magnitude[code & 7]);
}

struct Tables {
  alignas(64) uint16_t integers[32], e2m1[32], sixes[64];  // of i - 16; of i & 15; of i - 32
  alignas(16) int8_t e2m1_twice[16];                       // integers
  constexpr Tables() : integers(), e2m1(), sixes(), e2m1_twice() {
    for (int i = 0; i < 64; ++i) sixes[i] = small_bf16(i - 32);
    for (int i = 0; i < 32; ++i) integers[i] = small_bf16(i - 16), e2m1[i] = e2m1_bf16(i & 15);
    constexpr int8_t twice[8] = {0, 1, 2, 3, 4, 6, 8, 12};
    for (int i = 0; i < 16; ++i) e2m1_twice[i] = int8_t(i < 8 ? twice[i] : -twice[i - 8]);
  }
};
constexpr Tables kTables;

// Each converter is made at the beginning of a group, from its zero points if any, and reads one step after another.
template <Zeros zeros>
struct Int4 WEFT_BASE(InBytes<>) {
  static constexpr int64_t bytes = 32;
  static constexpr int kZero = zeros == Zeros::minimums ? 0 : 8;
#if WEFT_AVX512
  __m512i shift[2];
  explicit Int4(const uint8_t* zero) {
    for (int half = 0; half < 2; ++half) {
      shift[half] = _mm512_set1_epi16(16 - kZero);
      if (zeros != Zeros::points) continue;
      const __m512i read = _mm512_cvtepu8_epi32(load_as<__m128i>(zero + 16 * half));
      shift[half] = _mm512_sub_epi16(_mm512_set1_epi16(16), _mm512_or_si512(read, _mm512_slli_epi32(read, 16)));
    }
  }
  Bf16::Step load(const uint8_t* w) const {
    const __m512i table = load_as<__m512i>(kTables.integers);
    const __m512i both = _mm512_cvtepu8_epi16(load_as<__m256i>(w));
    const __m512i first = _mm512_add_epi16(_mm512_and_si512(both, _mm512_set1_epi16(15)), shift[0]);
    const __m512i second = _mm512_add_epi16(_mm512_srli_epi16(both, 4), shift[1]);
    return {{recast<Pairs>(_mm512_permutexvar_epi16(first, table)),
             recast<Pairs>(_mm512_permutexvar_epi16(second, table))}};
  }
#elif WEFT_AVX2
  __m256i zero[2];
  explicit Int4(const uint8_t* from) {
    for (int half = 0; half < 2; ++half) {
      zero[half] = _mm256_set1_epi8(kZero);
      if (zeros != Zeros::points) continue;
      const __m128i read = four(from + 16 * half);
      zero[half] = _mm256_set_m128i(_mm_unpackhi_epi8(read, read), _mm_unpacklo_epi8(read, read));
    }
  }
  InBytes<>::Step read(const uint8_t* w) const {
    const InBytes<>::Step step = InBytes<>::nibbles(w);
    if constexpr (kZero == 0) return step;
    return {{_mm256_sub_epi8(step.half[0], zero[0]), _mm256_sub_epi8(step.half[1], zero[1])}};
  }
  Bf16::Step load(const uint8_t* w) const { return pairs_by_floats(*this, w); }
#elif WEFT_NEON
  uint8x16_t shift[2][2];  // of a half's words 0 to 15, and 16 to 31
  explicit Int4(const uint8_t* zero) {
    for (int half = 0; half < 2; ++half) {
      shift[half][0] = shift[half][1] = vdupq_n_u8(16 - kZero);
      if (zeros != Zeros::points) continue;
      const uint8x16_t less = vdupq_n_u8(16) - sixteen_bytes(zero + 16 * half);
      shift[half][0] = vzip1q_u8(less, less), shift[half][1] = vzip2q_u8(less, less);
    }
  }
  Bf16::Step load(const uint8_t* w) const {
    const NumberTable<2> table(kTables.integers);
    const Nibbles codes(w);
    return {{table.pairs(codes.at[0][0] + shift[0][0], codes.at[0][1] + shift[0][1]),
             table.pairs(codes.at[1][0] + shift[1][0], codes.at[1][1] + shift[1][1])}};
  }
#else
  const uint8_t* zero;
  explicit Int4(const uint8_t* from) : zero(from) {}
  Bf16::Step load(const uint8_t* w) const {
    return by_words([&](int half, int word) {
      return small_bf16((w[word] >> (4 * half) & 15) - (zeros == Zeros::points ? zero[16 * half + word / 2] : kZero));
    });
  }
#endif
};

struct E2M1 WEFT_BASE(InBytes<true>) {
  static constexpr int64_t bytes = 32;
  explicit E2M1(const uint8_t*) {}
#if WEFT_AVX512
  Bf16::Step load(const uint8_t* w) const {
    const __m512i table = load_as<__m512i>(kTables.e2m1);  // twice 16: the fifth bit has no effect
    const __m512i both = _mm512_cvtepu8_epi16(load_as<__m256i>(w));
    return {{recast<Pairs>(_mm512_permutexvar_epi16(both, table)),
             recast<Pairs>(_mm512_permutexvar_epi16(_mm512_srli_epi16(both, 4), table))}};
  }
#elif WEFT_AVX2
  static Step read(const uint8_t* w) { return look_up(kTables.e2m1_twice, w); }
  Bf16::Step load(const uint8_t* w) const { return pairs_by_floats(*this, w); }
#elif WEFT_NEON
  Bf16::Step load(const uint8_t* w) const { return NumberTable<1>(kTables.e2m1).look_up(w); }
#else
  Bf16::Step load(const uint8_t* w) const {
    return by_words([&](int half, int word) { return e2m1_bf16(w[word] >> (4 * half) & 15); });
  }
#endif
};

struct Int6 WEFT_BASE(InBytes<>) {
  static constexpr int64_t bytes = 48;
  explicit Int6(const uint8_t*) {}
#if WEFT_AVX512
  Bf16::Step load(const uint8_t* w) const {
    const __m512i low = load_as<__m512i>(kTables.sixes), high = load_as<__m512i>(kTables.sixes + 32);
    const __m512i both = _mm512_cvtepu8_epi16(load_as<__m256i>(w)), upper = _mm512_set1_epi16(0x30);
    const __m256i bits = _mm256_cvtepu8_epi16(load_as<__m128i>(w + 32));
    const __m512i more = _mm512_inserti64x4(_mm512_castsi256_si512(_mm256_slli_epi16(bits, 4)), bits, 1);
    const __m512i fours = _mm512_set1_epi16(15);
    // both halves: (fours & both) | (upper & more)
    const __m512i first = _mm512_ternarylogic_epi32(_mm512_and_si512(fours, both), upper, more, 0xf8);
    const __m512i second =
        _mm512_ternarylogic_epi32(_mm512_srli_epi16(both, 4), upper, _mm512_srli_epi16(more, 2), 0xf8);
    return {{recast<Pairs>(_mm512_permutex2var_epi16(low, first, high)),
             recast<Pairs>(_mm512_permutex2var_epi16(low, second, high))}};
  }
#elif WEFT_AVX2
  Step read(const uint8_t* w) const {
    const __m128i bits = four(w + 32);
    const __m256i two = _mm256_set1_epi8(0x30), middle = _mm256_set1_epi8(32);
    const __m256i more = _mm256_set_m128i(bits, _mm_slli_epi16(bits, 4));
    const __m256i upper[2] = {more, _mm256_set_m128i(_mm_srli_epi16(bits, 2), _mm_slli_epi16(bits, 2))};
    Step step = nibbles(w);
    for (int half = 0; half < 2; ++half) {
      const __m256i code = _mm256_or_si256(step.half[half], _mm256_and_si256(upper[half], two));
      step.half[half] = _mm256_sub_epi8(code, middle);
    }
    return step;
  }
  Bf16::Step load(const uint8_t* w) const { return pairs_by_floats(*this, w); }
#elif WEFT_NEON
  Bf16::Step load(const uint8_t* w) const {
    const NumberTable<4> table(kTables.sixes);
    const Nibbles codes(w);
    const uint8x16_t more = sixteen_bytes(w + 32), upper = vdupq_n_u8(0x30);
    return {
        {table.pairs(codes.at[0][0] | (vshlq_n_u8(more, 4) & upper), codes.at[0][1] | (more & upper)),
         table.pairs(codes.at[1][0] | (vshlq_n_u8(more, 2) & upper), codes.at[1][1] | (vshrq_n_u8(more, 2) & upper))}};
  }
#else
  Bf16::Step load(const uint8_t* w) const {
    return by_words([&](int half, int word) {
      return small_bf16(((w[word] >> (4 * half) & 15) | (w[32 + word % 16] >> (word / 16 * 4 + half * 2) & 3) << 4) -
                        32);
    });
  }
#endif
};

template <bool zeros>
struct Int8 WEFT_BASE(InFloats) {
  static constexpr int64_t bytes = 64;
  vf zero[2];
  explicit Int8(const uint8_t* from) {
    for (int half = 0; half < 2; ++half) zero[half] = zeros ? to_floats(widen_codes(from + 16 * half)) : splat(128.0f);
  }
#if WEFT_BYTE_TABLES
  static Bf16::Step look_up(const uint8_t* w) {
    const __m512i code = _mm512_loadu_si512(w);
    Int8Halves made(code);
    const __mmask64 least = _mm512_cmpeq_epi8_mask(code, _mm512_set1_epi8(char(kNoInt8)));
    made.high = _mm512_mask_mov_epi8(made.high, least, _mm512_set1_epi8(char(0xc3)));  // -128 has the low byte 0
    return step_of(made);
  }
#endif
#if WEFT_AVX2
  struct Step {
    const Int8& codes;  // a copy of the zero points would go through memory
    const uint8_t* w;
    vf floats(int half, int k) const { return to_floats(widen_codes(w + 32 * half + 16 * k)) - codes.zero[half]; }
  };
  Step read(const uint8_t* w) const { return {*this, w}; }
#endif
  Bf16::Step load(const uint8_t* w) const {
#if WEFT_BYTE_TABLES
    if constexpr (!zeros) return look_up(w);
#endif
    Bf16::Step step;
    for (int half = 0; half < 2; ++half)
      step.w[half] = pairs_of(to_floats(widen_codes(w + 32 * half)) - zero[half],
                              to_floats(widen_codes(w + 32 * half + 16)) - zero[half]);
    return step;
  }
};

struct E4M3 WEFT_BASE(InFloats) {
  static constexpr int64_t bytes = 64;
  explicit E4M3(const uint8_t*) {}
#if WEFT_AVX2
  struct Step {
    const uint8_t* w;
    vf floats(int half, int k) const { return from_codes(w + 32 * half + 16 * k); }
  };
  static Step read(const uint8_t* w) { return {w}; }
#endif
  Bf16::Step load(const uint8_t* w) const {
#if WEFT_BYTE_TABLES
    return step_of(CodeHalves(_mm512_loadu_si512(w)));
#else
    Bf16::Step step;
    for (int half = 0; half < 2; ++half)
      step.w[half] = pairs_of(from_codes(w + 32 * half), from_codes(w + 32 * half + 16));
    return step;
#endif
  }
};

template <class F>
auto by_numbers(const Coding& coding, F f) {
  switch (coding.numbers) {
    case Numbers::int4:
      if (coding.minimums()) return f.template operator()<Int4<Zeros::minimums>>();
      if (coding.zeros == Zeros::points) return f.template operator()<Int4<Zeros::points>>();
      return f.template operator()<Int4<Zeros::middle>>();
    case Numbers::int8:
      if (coding.zeros == Zeros::points) return f.template operator()<Int8<true>>();
      return f.template operator()<Int8<false>>();
    case Numbers::int6:
      return f.template operator()<Int6>();
    case Numbers::int5:
      return f.template operator()<Int5>();
    case Numbers::iq4:
      return f.template operator()<Iq4>();
    case Numbers::e2m1:
      return f.template operator()<E2M1>();
    default:
      return f.template operator()<E4M3>();
  }
}

// --- sums -----------------------------------------------------------------------------------------------------

// Head of a group, its upper level of scales, and its number.
struct Head {
  const uint8_t *at, *upper;
  int64_t number;
};

// 16 float16, converted exactly.
inline vf halves(const uint8_t* from) {
#if WEFT_AVX512
  return _mm512_cvtph_ps(load_as<__m256i>(from));
#elif WEFT_AVX2 && defined(__F16C__)
  return {_mm256_cvtph_ps(four(from)), _mm256_cvtph_ps(four(from + 16))};
#elif WEFT_NEON
  const uint16_t* at = reinterpret_cast<const uint16_t*>(from);
  return widen_halves(vld1q_u16(at), vld1q_u16(at + 8));
#else
  float made[kLanes];
  uint16_t read[kLanes];
  std::memcpy(read, from, sizeof(read));
  for (int i = 0; i < kLanes; ++i) made[i] = half_to_float(read[i]);
  return load(made);
#endif
}

inline vf scales_of(const Coding& coding, const Head& head, int half) {
  switch (coding.scales) {
    case Scales::floats:
      return load_as<vf>(head.at + 64 * half);
    case Scales::halves:
      return halves(head.at + 32 * half);
    case Scales::levels:
      return int8_floats(head.at + 16 * half) * halves(head.upper + 32 * half);  // exact: 7 + 11 bits
    case Scales::e4m3:
      return from_codes(head.at + 16 * half);
    default: {
      const Words power = widen_codes(head.at + 16 * half);
      return recast<vf>(pick(power < 1u, power + 0x400000u, power << 23));  // 2^-127 is subnormal
    }
  }
}

inline vf minimums_of(const Head& head, int half) {
  return int8_floats(head.at + 32 + 16 * half) * halves(head.upper + 64 + 32 * half);
}

// Whole groups of a block, from k `begin` to `end` of `inputs`.
struct Range {
  const Coding& coding;
  const uint8_t* block;
  int64_t inputs, begin, end;

  template <class F>
  void each(F f) const {
    if (begin >= end) return;
    const int64_t upper = coding.upper(), group = coding.group, head = coding.head(), step = coding.step();
    Head now{block + coding.head_at(begin), block + coding.upper_at(begin), begin / group};
    for (int64_t k = begin;;) {
      const int64_t count = std::min(group, end - k);
      f(k, count, now);
      if ((k += group) >= end) return;
      now.at += head + group / 2 * step, ++now.number;
      if (upper && k % Coding::kSpan == 0) now.upper = now.at, now.at += upper;
    }
  }
};

// Reader of a group's steps for add_groups: from codes, or from the output of `unpack`.
template <class C>
struct Direct {
  using Codes = C;
  using F = std::conditional_t<WEFT_AVX2, F32, Bf16>;
  static constexpr int64_t bytes = C::bytes;
  C codes;
  const uint8_t* at;
  Direct(const Range& range, const uint8_t*, const Head& head, int64_t)
      : codes(head.at + range.coding.scale_bytes()), at(head.at + range.coding.head()) {}
  Bf16::Step load(int64_t step) const { return codes.load(at + step * bytes); }
};

struct Unpacked {
  using Codes = void;
  using F = F32;
  static constexpr int64_t bytes = F::bytes;
  const uint8_t* at;
  Unpacked(const Range& range, const uint8_t* made, const Head&, int64_t k) : at(made + (k - range.begin) * bytes) {}
  F::Step load(int64_t step) const { return F::load(at + step * bytes); }
};

#if WEFT_AVX2

// Sums of one group: a chain over its k for each row and column. Codes become floats in registers.
template <class Read, int rows>
__attribute__((noinline)) void group_sums(const Read& read, const float* x, int64_t x_stride, int64_t count,
                                          vf (&to)[rows][2]) {
  using C = typename Read::Codes;
  if constexpr (std::is_void_v<C>) {
    float_sums<rows>(x, x_stride, reinterpret_cast<const float*>(read.at), count, reinterpret_cast<float*>(to));
  } else {
    const C codes = read.codes;
    const uint8_t* at = read.at;
    vf sum[rows][2];
#pragma GCC unroll 4
    for (int row = 0; row < rows; ++row) sum[row][0] = sum[row][1] = splat(0.0f);
    const auto add = [&](const auto& step, int64_t k) __attribute__((always_inline)) {
      vf value[rows];
#pragma GCC unroll 4
      for (int row = 0; row < rows; ++row) value[row] = splat(x[row * x_stride + k]);
#pragma GCC unroll 2
      for (int half = 0; half < 2; ++half) {
        const vf weights = step.floats(half, int(k % 2));
#pragma GCC unroll 4
        for (int row = 0; row < rows; ++row) sum[row][half] = fma(value[row], weights, sum[row][half]);
      }
    };
    int64_t k = 0;
    for (; k + 2 <= count; k += 2, at += C::bytes) {
      __builtin_prefetch(at + kAhead);
      const auto step = codes.read(at);
      add(step, k), add(step, k + 1);
    }
    if (k < count) add(codes.read(at), k);
#pragma GCC unroll 4
    for (int row = 0; row < rows; ++row)
      for (int half = 0; half < 2; ++half) to[row][half] = to_sums<C>(sum[row][half]);
  }
}

#else

// Sums of one group: a chain over its k for each row and column.
template <class Read, int rows>
inline __attribute__((always_inline)) void group_sums(const Read& read, const typename Read::F::X* x, int64_t x_stride,
                                                      int64_t count, vf (&to)[rows][2]) {
  using F = typename Read::F;
  vf sum[rows][2];
#pragma GCC unroll 16
  for (int row = 0; row < rows; ++row) sum[row][0] = sum[row][1] = splat(0.0f);
  const int64_t steps = count / F::depth;
  for (int64_t step = 0; step < steps; ++step) {
    __builtin_prefetch(read.at + step * Read::bytes + kAhead);
    const auto weights = read.load(step);
#pragma GCC unroll 16
    for (int row = 0; row < rows; ++row) {
      const auto value = F::x(x + row * x_stride + step * F::depth);
      sum[row][0] = F::dot(sum[row][0], value, weights.w[0]);
      sum[row][1] = F::dot(sum[row][1], value, weights.w[1]);
    }
  }
  if (count % F::depth) {
    const auto weights = read.load(steps);
#pragma GCC unroll 16
    for (int row = 0; row < rows; ++row) {
      const auto value = F::x_last(x + row * x_stride + count - 1);
      sum[row][0] = F::dot(sum[row][0], value, weights.w[0]);
      sum[row][1] = F::dot(sum[row][1], value, weights.w[1]);
    }
  }
#pragma GCC unroll 16
  for (int row = 0; row < rows; ++row) to[row][0] = sum[row][0], to[row][1] = sum[row][1];
}

#endif

// Adds a range's sums, each group times its scales, to float32 [rows, 32].
template <class Read, int rows>
void add_groups(const Range& range, const uint8_t* made, const Rows<typename Read::F::X>& x, float* sums) {
  range.each([&](int64_t k, int64_t count, const Head& head) {
    const Read read(range, made, head, k);
    vf sum[rows][2];
    group_sums<Read, rows>(read, x.x + (k - range.begin), x.x_stride, count, sum);
    for (int half = 0; half < 2; ++half) {
      const vf scale = scales_of(range.coding, head, half);
#pragma GCC unroll 16
      for (int row = 0; row < rows; ++row) {
        float* to = sums + row * kBlock + half * kLanes;
        store(to, fma(sum[row][half], scale, load(to)));
      }
      if (!range.coding.minimums()) continue;
      const vf minimum = minimums_of(head, half);
      const float* of_x = x.sums + head.number;
#pragma GCC unroll 16
      for (int row = 0; row < rows; ++row) {
        float* to = sums + row * kBlock + half * kLanes;
        store(to, fma(splat(-of_x[row * x.sums_stride]), minimum, load(to)));
      }
    }
  });
}

template <class Read>
using Adds = void (*)(const Range&, const uint8_t*, const Rows<typename Read::F::X>&, float*);

template <class Read, int... rows>
constexpr std::array<Adds<Read>, sizeof...(rows)> make_adds(std::integer_sequence<int, rows...>) {
  return {add_groups<Read, rows + 1>...};
}

template <class Read, int most>
constexpr auto adds = make_adds<Read>(std::make_integer_sequence<int, most>{});

// All rows, in tiles of similar size.
template <class Read, int most>
void add_rows(const Range& range, const uint8_t* made, const Rows<typename Read::F::X>& x, int64_t rows, float* sums) {
  for (int64_t row = 0; row < rows;) {
    const int64_t left = rows - row, tile = divide_up(left, divide_up(left, most));
    adds<Read, most>[tile - 1](range, made, x.from(row), sums + row * kBlock);
    row += tile;
  }
}

// --- in memory ------------------------------------------------------------------------------------------------

// Writes the numbers of a range without scales: steps of bf16's format, or of float32's.
template <class Form>
void unpack(const Range& range, uint8_t* made) {
  by_numbers(range.coding, [&]<class C>() {
    range.each([&](int64_t k, int64_t count, const Head& head) {
      const C codes(head.at + range.coding.scale_bytes());
      const uint8_t* from = head.at + range.coding.head();
      uint8_t* to = made + (k - range.begin) / Form::depth * Form::bytes;
      const int64_t steps = divide_up(count, 2);
      for (int64_t step = 0; step < steps; ++step, to += 2 / Form::depth * Form::bytes) {
#if WEFT_AVX2
        if constexpr (std::is_same_v<Form, F32>) {
          const auto read = codes.read(from + step * C::bytes);
          float* floats = reinterpret_cast<float*>(to);
          for (int of = 0; of < 2; ++of)
            for (int half = 0; half < 2; ++half)
              store(floats + of * kBlock + half * kLanes, numbers_of<C>(read, half, of));
          continue;
        }
#endif
        const Bf16::Step read = codes.load(from + step * C::bytes);
        if constexpr (std::is_same_v<Form, Bf16>) {
          for (int half = 0; half < 2; ++half) std::memcpy(to + 64 * half, &read.w[half], 64);
        } else {
          float* floats = reinterpret_cast<float*>(to);
          for (int half = 0; half < 2; ++half) {
            store(floats + half * kLanes, recast<vf>(read.w[half] << 16));
            store(floats + kBlock + half * kLanes, recast<vf>(read.w[half] & kHigh));
          }
        }
      }
    });
  });
}

// Calls `run(range, unpacked numbers)` for consecutive groups.
template <class Run>
void in_ranges(const Coding& coding, const uint8_t* w, int64_t inputs, Run run) {
  const int64_t most = std::max<int64_t>(1, kUnpacked / coding.group) * coding.group;
  uint8_t* made = memory_of((most + 2) * F32::bytes);
  for (int64_t k = 0; k < inputs; k += most) {
    const Range range{coding, w, inputs, k, std::min(inputs, k + most)};
    unpack<F32>(range, made);
    run(range, made);
  }
}

#if WEFT_AVX2 || WEFT_AVX512

// k `begin` to `end` of rows, in float32. Valid until this thread's next call.
Rows<float> in_floats(const Rows<bf16>& x, int64_t rows, int64_t begin, int64_t end) {
  static thread_local std::vector<float> memory;
  const int64_t count = end - begin;
  if (memory.size() < size_t(rows * count)) memory.resize(size_t(rows * count));
  for (int64_t row = 0; row < rows; ++row)
    widen_row(x.x + row * x.x_stride + begin, count, count, memory.data() + row * count);
  return {memory.data(), count, x.sums, x.sums_stride};
}

#endif

#if WEFT_AVX512

// A range in memory: steps of the format of Many, and for each group the scales (and minimums) of 32 columns.
struct Whole {
  const uint8_t* steps;
  const float *scales, *minimums;
};

// Numbers and rows of x as many rows multiply them.
using Many = std::conditional_t<kWidens, F32, Bf16>;

Whole unpack_whole(const Range& range) {
  const int64_t groups = range.coding.groups(range.end - range.begin);
  const int64_t bytes = ((range.end - range.begin) / 2 + groups) * (2 / Many::depth) * Many::bytes;
  uint8_t* made = memory_of(bytes + 2 * groups * kBlock * int64_t(sizeof(float)));
  float* scales = reinterpret_cast<float*>(made + bytes);
  float* minimums = scales + groups * kBlock;
  unpack<Many>(range, made);
  const int64_t first = range.begin / range.coding.group;
  range.each([&](int64_t, int64_t, const Head& head) {
    for (int half = 0; half < 2; ++half) {
      const int64_t at = (head.number - first) * kBlock + half * kLanes;
      store(scales + at, scales_of(range.coding, head, half));
      if (range.coding.minimums()) store(minimums + at, minimums_of(head, half));
    }
  });
  return {made, scales, minimums};
}

// The k of a range of rows.
template <class X>
Rows<X> part_of(const Rows<bf16>& x, int64_t rows, const Range& range) {
  if constexpr (std::is_same_v<X, float>)
    return in_floats(x, rows, range.begin, range.end);
  else
    return {x.x + range.begin, x.x_stride, x.sums, x.sums_stride};
}

// The same sequence of operations as `add_groups`, with totals in registers. x: from the range's first k on. turns: of
// 2 kTurn k in a group; 0: a whole number of turns; -1: any number of k.
template <int rows, int turns>
void add_whole(const Range& range, const Whole& whole, const Rows<Many::X>& x, float* sums) {
  const int64_t group = range.coding.group;
  vf total[rows][2], sum[rows][2];
#pragma GCC unroll 8
  for (int row = 0; row < rows; ++row)
    for (int half = 0; half < 2; ++half) total[row][half] = load(sums + row * kBlock + half * kLanes);
  const uint8_t* w = whole.steps;
  const int64_t first = range.begin / group;  // number among all groups
  const auto add = [&](auto read, const Many::X* from) __attribute__((always_inline)) {
    const auto weights = Many::load(w);
#pragma GCC unroll 8
    for (int row = 0; row < rows; ++row) {
      const auto value = read(from + row * x.x_stride);
      sum[row][0] = Many::dot(sum[row][0], value, weights.w[0]);
      sum[row][1] = Many::dot(sum[row][1], value, weights.w[1]);
    }
    w += Many::bytes;
  };
  for (int64_t k = range.begin, at = 0; k < range.end; k += group, ++at) {
    const int64_t count = std::min(group, range.end - k);
#pragma GCC unroll 8
    for (int row = 0; row < rows; ++row) sum[row][0] = sum[row][1] = splat(0.0f);
    const Many::X* from = x.x + (k - range.begin);
    if constexpr (turns >= 0) {
      const int64_t all = turns ? turns : count / (2 * kTurn);
      for (int64_t turn = 0; turn < all; ++turn)
#pragma GCC unroll 16
        for (int step = 0; step < 2 * kTurn / Many::depth; ++step, from += Many::depth) add(Many::x, from);
    } else {
      for (int64_t step = 0; step < count / Many::depth; ++step, from += Many::depth) add(Many::x, from);
      if (count % Many::depth) add(Many::x_last, from);
    }
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
      const vf scale = load(whole.scales + at * kBlock + half * kLanes);
#pragma GCC unroll 8
      for (int row = 0; row < rows; ++row) total[row][half] = fma(sum[row][half], scale, total[row][half]);
      if (!range.coding.minimums()) continue;
      const vf minimum = load(whole.minimums + at * kBlock + half * kLanes);
#pragma GCC unroll 8
      for (int row = 0; row < rows; ++row)
        total[row][half] = _mm512_fnmadd_ps(splat(x.sums[row * x.sums_stride + first + at]), minimum, total[row][half]);
    }
  }
#pragma GCC unroll 8
  for (int row = 0; row < rows; ++row)
    for (int half = 0; half < 2; ++half) store(sums + row * kBlock + half * kLanes, total[row][half]);
}

using AddWhole = void (*)(const Range&, const Whole&, const Rows<Many::X>&, float*);

template <int turns, int... rows>
constexpr std::array<AddWhole, sizeof...(rows)> make_wholes(std::integer_sequence<int, rows...>) {
  return {add_whole<rows + 1, turns>...};
}
template <int turns>
constexpr auto wholes = make_wholes<turns>(std::make_integer_sequence<int, kTotalRows>{});

const AddWhole* wholes_of(const Coding& coding, int64_t inputs) {
  constexpr int64_t turn = 2 * kTurn;
  const int64_t left = inputs % coding.group;
  if (coding.group % turn || left % turn) return wholes<-1>.data();
  if (coding.group == turn) return wholes<1>.data();
  return coding.group == 2 * turn && !left ? wholes<2>.data() : wholes<0>.data();
}

// Each range is unpacked once for all rows. Nothing of the following block is read meanwhile, so each tile prefetches a
// part of it. Memory after the last block is harmless to prefetch.
void add_many(const Coding& coding, const uint8_t* w, int64_t inputs, const Rows<bf16>& x, int64_t rows, float* sums) {
  const AddWhole* of_rows = wholes_of(coding, inputs);
  const int64_t most = std::max<int64_t>(1, kUnpacked / coding.group) * coding.group;
  for (int64_t k = 0; k < inputs; k += most) {
    const Range range{coding, w, inputs, k, std::min(inputs, k + most)};
    const int64_t end = coding.offset(range.end), begin = range.end < inputs ? range.end : 0;
    const int64_t bytes = coding.offset(std::min(inputs, begin + most)) - coding.offset(begin);
    const int64_t lines = divide_up(bytes, kLine);
    const Whole whole = unpack_whole(range);
    const Rows<Many::X> part = part_of<Many::X>(x, rows, range);
    for (int64_t row = 0; row < rows;) {
      const int64_t left = rows - row, tile = divide_up(left, divide_up(left, kTotalRows));
      for (int64_t line = lines * row / rows; line < lines * (row + tile) / rows; ++line)
        __builtin_prefetch(w + end + line * kLine);
      of_rows[tile - 1](range, whole, part.from(row), sums + row * kBlock);
      row += tile;
    }
  }
}

// True from fewer rows on, if groups are expensive.
bool unpacked_once(const Coding& coding, int64_t rows) {
  return rows >= (coding.group < 32 || coding.minimums() ? kDearRows : kManyRows);
}

#endif

#if WEFT_AVX2

Rows<float> in_floats(const Rows<float>& x, int64_t, int64_t begin, int64_t) {
  return {x.x + begin, x.x_stride, x.sums, x.sums_stride};
}
bool all_finite(const float* x, int64_t count) {
  vf broken = splat(0.0f);
  for (int64_t i = 0; i < count; i += kLanes) broken = fma(load(x + i), splat(0.0f), broken);  // NaN stays
  return reduce_add(broken) == 0.0f;
}

// Few rows by codes in registers, many rows by numbers in memory. Few rows of very large x take the second way as well:
// in registers their sums can overflow where sums of numbers do not (`kUnit`). All other sums have the same bits.
template <class X>
void float_coded_sums(const Coding& coding, const uint8_t* w, int64_t inputs, const Rows<X>& x, int64_t rows,
                      float* sums) {
  std::fill(sums, sums + rows * kBlock, 0.0f);
  if (rows <= kDirectRows) {
    const Rows<float> whole = in_floats(x, rows, 0, inputs);
    const bool done = by_numbers(coding, [&]<class C>() {
      add_rows<Direct<C>, kDirectRows>({coding, w, inputs, 0, inputs}, nullptr, whole, rows, sums);
      return C::kUnit == 1.0f || all_finite(sums, rows * kBlock);
    });
    if (done) return;
    std::fill(sums, sums + rows * kBlock, 0.0f);
  }
  in_ranges(coding, w, inputs, [&](const Range& range, const uint8_t* made) {
    add_rows<Unpacked, kRows>(range, made, in_floats(x, rows, range.begin, range.end), rows, sums);
  });
}

#endif

}  // namespace

#if WEFT_AVX2

void coded_sums(const Coding& coding, const uint8_t* w, int64_t inputs, const Rows<bf16>& x, int64_t rows,
                float* sums) {
  float_coded_sums(coding, w, inputs, x, rows, sums);
}

void coded_sums(const Coding& coding, const uint8_t* w, int64_t inputs, const Rows<float>& x, int64_t rows,
                float* sums) {
  float_coded_sums(coding, w, inputs, x, rows, sums);
}

#else

void coded_sums(const Coding& coding, const uint8_t* w, int64_t inputs, const Rows<bf16>& x, int64_t rows,
                float* sums) {
  std::fill(sums, sums + rows * kBlock, 0.0f);
#if WEFT_AVX512
  if (unpacked_once(coding, rows)) return add_many(coding, w, inputs, x, rows, sums);
#endif
  by_numbers(coding, [&]<class C>() {
    add_rows<Direct<C>, kDirectRows>({coding, w, inputs, 0, inputs}, nullptr, x, rows, sums);
  });
}

void coded_sums(const Coding& coding, const uint8_t* w, int64_t inputs, const Rows<float>& x, int64_t rows,
                float* sums) {
  std::fill(sums, sums + rows * kBlock, 0.0f);
  in_ranges(coding, w, inputs, [&](const Range& range, const uint8_t* made) {
    add_rows<Unpacked, kRows>(range, made, {x.x + range.begin, x.x_stride, x.sums, x.sums_stride}, rows, sums);
  });
}

#endif

namespace {

template <class X>
void sum_groups(const Coding& coding, int64_t inputs, const X* x, int64_t x_stride, int64_t rows, float* sums) {
  for (int64_t row = 0; row < rows; ++row, x += x_stride)
    for (int64_t k = 0; k < inputs; k += coding.group) {
      const int64_t end = std::min(inputs, k + coding.group);
      vf sum = splat(0.0f);
      for (int64_t at = k; at < end; at += kLanes) sum = sum + load_n(x + at, int(std::min<int64_t>(kLanes, end - at)));
      *sums++ = reduce_add(sum);
    }
}

// Writes a range's numbers in float32, scaled: [k, 32].
void scale_up(const Range& range, float* made) {
  unpack<F32>(range, reinterpret_cast<uint8_t*>(made));
  range.each([&](int64_t k, int64_t count, const Head& head) {
    for (int half = 0; half < 2; ++half) {
      const vf scale = scales_of(range.coding, head, half);
      const vf minimum = range.coding.minimums() ? minimums_of(head, half) : splat(0.0f);
      float* at = made + (k - range.begin) * kBlock + half * kLanes;
      for (int64_t i = 0; i < count; ++i, at += kBlock) store(at, load(at) * scale - minimum);
    }
  });
}

// Pairs of bf16, rounded to nearest even.
inline Pairs rounded_pairs(vf first, vf second) {
#if WEFT_AVX512_BF16
  static constexpr auto kInTurns = [] {
    struct alignas(64) {
      uint16_t at[32];
    } made{};
    for (int i = 0; i < 32; ++i) made.at[i] = uint16_t(i / 2 + i % 2 * 16);
    return made;
  }();
  const __m512i apart = (__m512i)_mm512_cvtne2ps_pbh(second, first);
  return recast<Pairs>(_mm512_permutexvar_epi16(load_as<__m512i>(kInTurns.at), apart));
#else
  bf16 rounded[2][kLanes];
  store(rounded[0], first), store(rounded[1], second);
  return pairs_of(load(rounded[0]), load(rounded[1]));
#endif
}

// Write the steps of one group.
template <class C>
void plain_steps(const C& codes, const uint8_t* from, int64_t steps, uint8_t* to) {
#pragma GCC unroll 4
  for (int64_t step = 0; step < steps; ++step, from += C::bytes, to += Bf16::bytes) {
    const Bf16::Step read = codes.load(from);
    for (int half = 0; half < 2; ++half) std::memcpy(to + 64 * half, &read.w[half], 64);
  }
}

// The same, scaled and rounded; `exact`: without rounding.
template <class C, bool minimums, bool exact>
void scaled_steps(const Coding& coding, const Head& head, const C& codes, const uint8_t* from, int64_t steps,
                  uint8_t* to) {
  vf scale[2], minimum[2];
  for (int half = 0; half < 2; ++half) {
    scale[half] = scales_of(coding, head, half);
    if (minimums) minimum[half] = minimums_of(head, half);
  }
  for (int64_t step = 0; step < steps; ++step, from += C::bytes, to += Bf16::bytes) {
    const Bf16::Step read = codes.load(from);
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
      vf first = recast<vf>(read.w[half] << 16) * scale[half], second = recast<vf>(read.w[half] & kHigh) * scale[half];
      if (minimums) first = first - minimum[half], second = second - minimum[half];
      const Pairs pairs = exact ? pairs_of(first, second) : rounded_pairs(first, second);
      std::memcpy(to + 64 * half, &pairs, sizeof(pairs));
    }
  }
}

#if WEFT_AVX512

// E2M1 times powers of two: exponents are added, except for 0. False if an exponent would not fit.
bool raised_steps(const Head& head, const E2M1& codes, const uint8_t* from, int64_t steps, uint8_t* to) {
  const __m256i power = load_as<__m256i>(head.at), low = _mm256_set1_epi8(2), high = _mm256_set1_epi8(char(252));
  const __m256i within = _mm256_and_si256(_mm256_cmpeq_epi8(_mm256_max_epu8(power, low), power),
                                          _mm256_cmpeq_epi8(_mm256_min_epu8(power, high), power));
  if (_mm256_movemask_epi8(within) != -1) return false;
  __m512i raise[2];
  for (int half = 0; half < 2; ++half) {
    const __m512i read = _mm512_cvtepu8_epi32(load_as<__m128i>(head.at + 16 * half));
    const __m512i both = _mm512_or_si512(read, _mm512_slli_epi32(read, 16));
    raise[half] = _mm512_slli_epi16(_mm512_sub_epi16(both, _mm512_set1_epi16(127)), 7);
  }
#pragma GCC unroll 4
  for (int64_t step = 0; step < steps; ++step, from += E2M1::bytes, to += Bf16::bytes) {
    const Bf16::Step read = codes.load(from);
    for (int half = 0; half < 2; ++half) {
      const __m512i number = recast<__m512i>(read.w[half]);
      const __mmask32 some = _mm512_test_epi16_mask(number, _mm512_set1_epi16(0x7fff));
      _mm512_storeu_si512(to + 64 * half, _mm512_mask_add_epi16(number, some, number, raise[half]));
    }
  }
  return true;
}

#endif

// Write the steps of one group for AMX, see `coded_as_bf16`.
template <class C>
void make_steps(const Coding& coding, const Head& head, const uint8_t* from, int64_t steps, bool scaled, uint8_t* to) {
  const C codes(head.at + coding.scale_bytes());
  if (!scaled) return plain_steps(codes, from, steps, to);
  if constexpr (std::is_same_v<C, E2M1>) {
#if WEFT_AVX512
    if (coding.scales == Scales::e8m0 && raised_steps(head, codes, from, steps, to)) return;
#endif
    if (coding.scales == Scales::e8m0 || coding.scales == Scales::e4m3)
      return scaled_steps<C, false, true>(coding, head, codes, from, steps, to);
  }
  if (coding.minimums()) return scaled_steps<C, true, false>(coding, head, codes, from, steps, to);
  scaled_steps<C, false, false>(coding, head, codes, from, steps, to);
}

}  // namespace

void input_sums(const Coding& coding, int64_t inputs, const bf16* x, int64_t x_stride, int64_t rows, float* sums) {
  sum_groups(coding, inputs, x, x_stride, rows, sums);
}

void input_sums(const Coding& coding, int64_t inputs, const float* x, int64_t x_stride, int64_t rows, float* sums) {
  sum_groups(coding, inputs, x, x_stride, rows, sums);
}

void coded_as_bf16(const Coding& coding, const uint8_t* w, int64_t inputs, int64_t begin, int64_t end, bool scaled,
                   uint8_t* to) {
  by_numbers(coding, [&]<class C>() {
    for (int64_t k = begin; k < end;) {
      const int64_t number = k / coding.group, first = number * coding.group;
      const int64_t count = std::min(end, first + coding.group) - k, steps = divide_up(count, 2);
      const Head head{w + coding.head_at(first), w + coding.upper_at(first), number};
      const uint8_t* from = head.at + coding.head() + (k - first) / 2 * C::bytes;
      make_steps<C>(coding, head, from, steps, scaled, to);
      to += steps * Bf16::bytes, k += count;
    }
  });
}

void coded_column(const Coding& coding, const uint8_t* w, int64_t inputs, int column, float* to) {
  if (coding.of_bytes()) {
    for (int64_t k = 0; k < inputs; ++k)
      to[k] = float(w[(k / kByteDepth * kBlock + column) * kByteDepth + k % kByteDepth] - 128);
    return;
  }
  static thread_local std::vector<float> floats;
  floats.resize(size_t((coding.group + 2) * kBlock));
  for (int64_t k = 0; k < inputs; k += coding.group) {
    const int64_t end = std::min(inputs, k + coding.group);
    scale_up({coding, w, inputs, k, end}, floats.data());
    for (int64_t at = k; at < end; ++at) to[at] = floats[size_t((at - k) * kBlock + column)];
  }
}

}  // namespace weft
