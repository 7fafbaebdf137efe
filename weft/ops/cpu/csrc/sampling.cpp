// From logits to tokens: argmax, and the Gumbel maximum of the sampling rule. Each reads a row once or twice.
//
// greedy   blocks of kBlock: maximum and NaN; the first block with the largest maximum, in it the first equal.
// sample   argmax over tokens of  double(x) + g,  x = logit / temperature in float,  g = -log(-log(u)),
//          u = (word + 1/2) * 2^-32, words by Philox (weft/ops/philox.py), without computing most of them:
//
//   best = score so far; it starts as the score of the largest logit.
//   A token wins only if  x + g >= best,  that is  -log(u) <= exp(x - best);  and 1 - u <= -log(u). So
//     * a group of 64 tokens whose largest x has exp(x - best) < 2^-33 <= 1 - u needs no words;
//     * a token needs its logarithms only if  1 - u <= exp(x - best).
//   Both tests are done in float with an allowance for every rounding; what passes is scored in double.
//
// Ties go to the lowest id. A row with NaN, +inf or nothing finite after the division is an error.
//
// With a mask (bit i of word w is token 32 w + i) a token whose bit is clear counts as -inf; NaN and +inf are looked
// for in the logits as they are.

#include "crew.h"
#include "operators.h"
#include "vector.h"

#include <algorithm>
#include <tuple>

namespace weft {
namespace {

using namespace vec;

constexpr int kBlock = 1024;
constexpr int kGroup = 64;
constexpr uint32_t kMultiply[2] = {0xD2511F53u, 0xCD9E8D57u};
constexpr uint32_t kWeyl[2] = {0x9E3779B9u, 0xBB67AE85u};

#if WEFT_AVX512
inline bool any_nan(vf x) { return _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q) != 0; }
#else
inline bool any_nan(vf x) { return equal(x, x) != 0xffff; }
#endif

struct Top {
  float value = -kInf;
  int64_t id = 0;
  bool nan = false;
  bool broken() const { return nan || !std::isfinite(value); }
};

// Set lanes of x[i ...] with clear bits to -inf; i is a multiple of kLanes.
template <bool kMasked>
inline vf allowed(vf v, const int32_t* mask, int64_t i) {
  if constexpr (!kMasked) return v;
  return select(uint32_t(mask[i >> 5]) >> (i & 31) & 0xffffu, v, splat(-kInf));
}

// The largest of n numbers and its first place. `groups`, if any, gets the maximum of each kGroup.
template <bool kMasked, class T>
Top top_of(const T* x, int64_t n, const int32_t* mask, float* groups) {
  Top top;
  int64_t block = 0;
  for (int64_t begin = 0; begin < n; begin += kBlock) {
    const int64_t end = std::min<int64_t>(begin + kBlock, n);
    vf largest = splat(-kInf), check = splat(0.0f);
    for (int64_t from = begin; from < end; from += kGroup) {
      vf here = splat(-kInf);
      int64_t i = from;
      const int64_t until = std::min<int64_t>(from + kGroup, end);
      for (; i + kLanes <= until; i += kLanes) {
        const vf v = load(x + i);
        check = check + (v - v);  // NaN for NaN and infinities
        here = vmax(allowed<kMasked>(v, mask, i), here);
      }
      if (i < until) {
        const int left = int(until - i);
        const vf v = load_n(x + i, left);
        check = check + (v - v);
        here = vmax(select((1u << left) - 1, allowed<kMasked>(v, mask, i), splat(-kInf)), here);
      }
      if (groups) groups[from / kGroup] = reduce_max(here);
      largest = vmax(here, largest);
    }
    if (any_nan(check))
      for (int64_t i = begin; i < end; ++i) top.nan |= std::isnan(widen(x[i])) || (kMasked && widen(x[i]) == kInf);
    const float value = reduce_max(largest);
    if (value > top.value) top.value = value, block = begin;
  }
  const auto is_top = [&](int64_t id) {
    return widen(x[id]) == top.value && (!kMasked || uint32_t(mask[id >> 5]) >> (id & 31) & 1);
  };
  for (top.id = block; top.id < n - 1 && !is_top(top.id); ++top.id) {
  }
  return top;
}

// ---- noise ----

struct Key {
  uint32_t low, high, position, choice;
};

inline void philox(const Key& of, uint32_t counter, uint32_t* words) {
  uint32_t c[4] = {counter, of.position, of.choice, 0}, k[2] = {of.low, of.high};
  for (int round = 0; round < 10; ++round) {
    const uint64_t a = uint64_t(kMultiply[0]) * c[0], b = uint64_t(kMultiply[1]) * c[2];
    const uint32_t next[4] = {uint32_t(b >> 32) ^ c[1] ^ k[0], uint32_t(b), uint32_t(a >> 32) ^ c[3] ^ k[1],
                              uint32_t(a)};
    std::memcpy(c, next, sizeof(c));
    k[0] += kWeyl[0];
    k[1] += kWeyl[1];
  }
  std::memcpy(words, c, sizeof(c));
}

// Compute the words of tokens first .. first + 63, in order; first is a multiple of 4.
#if WEFT_AVX512
inline void multiply(__m512i x, uint32_t by, __m512i& high, __m512i& low) {
  const __m512i factor = _mm512_set1_epi64(by);
  const __m512i even = _mm512_mul_epu32(x, factor), odd = _mm512_mul_epu32(_mm512_srli_epi64(x, 32), factor);
  high = _mm512_mask_blend_epi32(0xaaaa, _mm512_srli_epi64(even, 32), odd);
  low = _mm512_mask_blend_epi32(0xaaaa, even, _mm512_slli_epi64(odd, 32));
}

inline void words_of(const Key& of, uint32_t first, uint32_t* words) {
  // Lane 4 g + q has counter 4 q + g, so the two rounds of unpacking below restore the order of words.
  const __m512i order = _mm512_set_epi32(15, 11, 7, 3, 14, 10, 6, 2, 13, 9, 5, 1, 12, 8, 4, 0);
  __m512i c0 = _mm512_add_epi32(_mm512_set1_epi32(int(first >> 2)), order);
  __m512i c1 = _mm512_set1_epi32(int(of.position)), c2 = _mm512_set1_epi32(int(of.choice));
  __m512i c3 = _mm512_setzero_si512();
  uint32_t k0 = of.low, k1 = of.high;
  for (int round = 0; round < 10; ++round) {
    __m512i a_high, a_low, b_high, b_low;
    multiply(c0, kMultiply[0], a_high, a_low);
    multiply(c2, kMultiply[1], b_high, b_low);
    c0 = _mm512_ternarylogic_epi32(b_high, c1, _mm512_set1_epi32(int(k0)), 0x96);  // xor of three
    c2 = _mm512_ternarylogic_epi32(a_high, c3, _mm512_set1_epi32(int(k1)), 0x96);
    c1 = b_low;
    c3 = a_low;
    k0 += kWeyl[0];
    k1 += kWeyl[1];
  }
  const __m512i a = _mm512_unpacklo_epi32(c0, c1), b = _mm512_unpackhi_epi32(c0, c1);
  const __m512i c = _mm512_unpacklo_epi32(c2, c3), d = _mm512_unpackhi_epi32(c2, c3);
  _mm512_store_si512(words, _mm512_unpacklo_epi64(a, c));
  _mm512_store_si512(words + 16, _mm512_unpackhi_epi64(a, c));
  _mm512_store_si512(words + 32, _mm512_unpacklo_epi64(b, d));
  _mm512_store_si512(words + 48, _mm512_unpackhi_epi64(b, d));
}
// (1 - u) * 2^32, rounded
inline vf gap_of(const uint32_t* words) {
  const __m512i flipped = _mm512_xor_si512(_mm512_load_si512(words), _mm512_set1_epi32(-1));
  return _mm512_cvtepu32_ps(flipped) + splat(0.5f);
}
#elif WEFT_AVX2
inline void multiply(__m256i x, uint32_t by, __m256i& high, __m256i& low) {
  const __m256i factor = _mm256_set1_epi64x(by);
  const __m256i even = _mm256_mul_epu32(x, factor), odd = _mm256_mul_epu32(_mm256_srli_epi64(x, 32), factor);
  high = _mm256_blend_epi32(_mm256_srli_epi64(even, 32), odd, 0xaa);
  low = _mm256_blend_epi32(even, _mm256_slli_epi64(odd, 32), 0xaa);
}

inline void words_of(const Key& of, uint32_t first, uint32_t* words) {
  for (int part = 0; part < 2; ++part, words += 32) {
    // Lane 4 g + q has counter 2 q + g, so the two rounds of unpacking below restore the order of words.
    const __m256i order = _mm256_setr_epi32(0, 2, 4, 6, 1, 3, 5, 7);
    __m256i c0 = _mm256_add_epi32(_mm256_set1_epi32(int(first >> 2) + 8 * part), order);
    __m256i c1 = _mm256_set1_epi32(int(of.position)), c2 = _mm256_set1_epi32(int(of.choice));
    __m256i c3 = _mm256_setzero_si256();
    uint32_t k0 = of.low, k1 = of.high;
    for (int round = 0; round < 10; ++round) {
      __m256i a_high, a_low, b_high, b_low;
      multiply(c0, kMultiply[0], a_high, a_low);
      multiply(c2, kMultiply[1], b_high, b_low);
      c0 = _mm256_xor_si256(_mm256_xor_si256(b_high, c1), _mm256_set1_epi32(int(k0)));
      c2 = _mm256_xor_si256(_mm256_xor_si256(a_high, c3), _mm256_set1_epi32(int(k1)));
      c1 = b_low;
      c3 = a_low;
      k0 += kWeyl[0];
      k1 += kWeyl[1];
    }
    const __m256i a = _mm256_unpacklo_epi32(c0, c1), b = _mm256_unpackhi_epi32(c0, c1);
    const __m256i c = _mm256_unpacklo_epi32(c2, c3), d = _mm256_unpackhi_epi32(c2, c3);
    __m256i* to = reinterpret_cast<__m256i*>(words);
    _mm256_store_si256(to, _mm256_unpacklo_epi64(a, c));
    _mm256_store_si256(to + 1, _mm256_unpackhi_epi64(a, c));
    _mm256_store_si256(to + 2, _mm256_unpacklo_epi64(b, d));
    _mm256_store_si256(to + 3, _mm256_unpackhi_epi64(b, d));
  }
}

// Rounded once: both halves of a word are exact, and only the sum is rounded.
inline __m256 gap8(const uint32_t* words) {
  const __m256i flipped = _mm256_xor_si256(eight(words), _mm256_set1_epi32(-1));
  const __m256 high = _mm256_cvtepi32_ps(_mm256_srli_epi32(flipped, 16));
  const __m256 low = _mm256_cvtepi32_ps(_mm256_and_si256(flipped, _mm256_set1_epi32(0xffff)));
  return _mm256_fmadd_ps(high, _mm256_set1_ps(65536.0f), low) + _mm256_set1_ps(0.5f);
}
inline vf gap_of(const uint32_t* words) { return {gap8(words), gap8(words + 8)}; }
#elif WEFT_NEON
inline void multiply(uint32x4_t x, uint32_t by, uint32x4_t& high, uint32x4_t& low) {
  const uint32x4_t factor = vdupq_n_u32(by);
  const uint32x4_t first = vreinterpretq_u32_u64(vmull_u32(vget_low_u32(x), vget_low_u32(factor)));
  const uint32x4_t second = vreinterpretq_u32_u64(vmull_high_u32(x, factor));
  high = vuzp2q_u32(first, second), low = vuzp1q_u32(first, second);
}

inline void words_of(const Key& of, uint32_t first, uint32_t* words) {
  for (int i = 0; i < kGroup; i += 16) {
    const uint32_t order[4] = {0, 1, 2, 3};
    uint32x4x4_t c = {vld1q_u32(order) + ((first + i) >> 2), vdupq_n_u32(of.position), vdupq_n_u32(of.choice),
                      vdupq_n_u32(0)};
    uint32_t k0 = of.low, k1 = of.high;
    for (int round = 0; round < 10; ++round) {
      uint32x4_t a_high, a_low, b_high, b_low;
      multiply(c.val[0], kMultiply[0], a_high, a_low);
      multiply(c.val[2], kMultiply[1], b_high, b_low);
      c = {b_high ^ c.val[1] ^ k0, b_low, a_high ^ c.val[3] ^ k1, a_low};
      k0 += kWeyl[0];
      k1 += kWeyl[1];
    }
    vst4q_u32(words + i, c);
  }
}
// (1 - u) * 2^32, rounded
inline vf gap_of(const uint32_t* words) {
  const auto four = [&](int i) { return vcvtq_f32_u32(~vld1q_u32(words + 4 * i)); };
  return vf{four(0), four(1), four(2), four(3)} + splat(0.5f);
}
#else
inline void words_of(const Key& of, uint32_t first, uint32_t* words) {
  for (int i = 0; i < kGroup; i += 4) philox(of, (first + i) >> 2, words + i);
}
inline vf gap_of(const uint32_t* words) {
  return lanes([&](int i) { return float(~words[i]) + 0.5f; });
}
#endif

inline double gumbel(uint32_t word) { return -std::log(-std::log((double(word) + 0.5) * 0x1p-32)); }

struct Best {
  double score;
  int64_t id;
  void offer(double other, int64_t at) {
    if (other > score || (other == score && at < id)) score = other, id = at;
  }
};

// Run steps 5 to 7, without top_k and top_p, on one row of n logits.
template <bool kMasked, class T>
std::tuple<int64_t, bool> sample_row(const T* x, int64_t n, const int32_t* mask, float temperature, double min_p,
                                     const Key& key, float* groups) {
  const Top top = top_of<kMasked>(x, n, mask, groups);
  const float largest = top.value / temperature;
  if (top.nan || !std::isfinite(largest)) return {0, true};
  const auto scaled = [&](int64_t id) { return double(widen(x[id]) / temperature); };
  uint32_t four[4];
  philox(key, uint32_t(top.id >> 2), four);
  Best best{double(largest) + gumbel(four[top.id & 3]), top.id};
  // Upper bound of x = logit / temperature above (logit - top) / temperature + largest, and of the float sums below.
  const float allowance = 1e-4f + 4e-7f * (std::fabs(largest) + 30.0f);
  const float inverse = kLog2E / temperature;
  // Upper bound of log2 of exp(x - best) * 2^32 for a logit
  const auto shift_of = [&] { return float(double(largest) - best.score + allowance) * kLog2E + 32.0f + 1e-4f; };
  float shift = shift_of();
  const float floor = min_p > 0 ? float(std::log(min_p)) - allowance : -kInf;
  alignas(64) uint32_t words[kGroup];
  for (int64_t from = 0; from < n; from += kGroup) {
    const float below = (groups[from / kGroup] - top.value) * inverse;
    if (below + shift < -1.01f || below < floor * kLog2E) continue;
    words_of(key, uint32_t(from), words);
    for (int64_t i = from; i < std::min<int64_t>(from + kGroup, n); i += kLanes) {
      const int left = int(std::min<int64_t>(kLanes, n - i));
      const vf v = allowed<kMasked>(left == kLanes ? load(x + i) : load_n(x + i, left), mask, i);
      const vf reach = exp2v(fma(v - splat(top.value), splat(inverse), splat(shift)));
      uint32_t may = (~less(reach, gap_of(words + (i - from)))) & ((1u << left) - 1);
      for (; may; may &= may - 1) {
        const int64_t id = i + __builtin_ctz(may);
        const double value = scaled(id);
        if (min_p > 0 && !(std::exp(value - double(largest)) >= min_p)) continue;
        best.offer(value + gumbel(words[id - from]), id);
        shift = shift_of();
      }
    }
  }
  return {best.id, false};
}

// ---- entries ----

struct Rows {
  int64_t count, stride, vocab;
  const int64_t* index;
};

Rows check(const Tensor& logits, const Tensor& rows, int64_t vocab, const char* op) {
  WEFT_CHECK(logits.dim() == 2 && logits.stride(1) == 1 && vocab > 0 && vocab <= logits.size(1), op, ": logits");
  WEFT_CHECK(rows.dim() == 1 && rows.is_contiguous(), op, ": rows");
  const int64_t* index = rows.const_data_ptr<int64_t>();
  for (int64_t r = 0; r < rows.size(0); ++r)
    WEFT_CHECK(index[r] >= 0 && index[r] < logits.size(0), op, ": row ", index[r], " of ", logits.size(0));
  return {rows.size(0), logits.stride(0), vocab, index};
}

// Mask of each row: `words` int32 [masks, ceil(vocab / 32)], `places` int64 [rows]. Without words every token is
// allowed.
struct Masks {
  Tensor words, places;
  int64_t width = 0;
  const int32_t* first = nullptr;
  const int64_t* place = nullptr;
  const int32_t* of(int64_t row) const { return first + place[row] * width; }
};

Masks masks_of(const std::optional<Tensor>& words, const std::optional<Tensor>& places, const Rows& of,
               const char* op) {
  if (!words.has_value()) return {};
  Masks made{*words, places.value(), (of.vocab + 31) / 32};
  WEFT_CHECK(made.places.dim() == 1 && made.places.size(0) == of.count && made.places.is_contiguous(), op, ": places");
  WEFT_CHECK(made.words.dim() == 2 && made.words.size(1) == made.width && made.words.is_contiguous(), op, ": words");
  made.first = made.words.const_data_ptr<int32_t>();
  made.place = made.places.const_data_ptr<int64_t>();
  for (int64_t r = 0; r < of.count; ++r)
    WEFT_CHECK(made.place[r] >= 0 && made.place[r] < made.words.size(0), op, ": mask ", made.place[r], " of ",
               made.words.size(0));
  return made;
}

template <class F>
auto by_dtype(const Tensor& x, const char* op, F f) {
  if (x.dtype() == Dtype::bf16) return f(bf16());
  WEFT_CHECK(x.dtype() == Dtype::f32, op, ": bfloat16 or float32, not ", x.dtype());
  return f(float());
}

}  // namespace

std::tuple<Tensor, Tensor> greedy(const Tensor& logits, const Tensor& rows, int64_t vocab,
                                  const std::optional<Tensor>& words, const std::optional<Tensor>& places) {
  const Rows of = check(logits, rows, vocab, "greedy");
  const Masks masks = masks_of(words, places, of, "greedy");
  Tensor ids = empty_tensor({of.count}, rows.dtype());
  Tensor error = empty_tensor({of.count}, Dtype::boolean);
  by_dtype(logits, "greedy", [&]<class T>(T) {
    const T* x = logits.const_data_ptr<T>();
    int64_t* id = ids.mutable_data_ptr<int64_t>();
    bool* wrong = error.mutable_data_ptr<bool>();
    spread(of.count, std::max<int64_t>(1, (1 << 16) / vocab), [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r) {
        const T* row = x + of.index[r] * of.stride;
        const Top top =
            masks.first ? top_of<true>(row, vocab, masks.of(r), nullptr) : top_of<false>(row, vocab, nullptr, nullptr);
        id[r] = top.id;
        wrong[r] = top.broken();
      }
    });
  });
  return {ids, error};
}

std::tuple<Tensor, Tensor> sample(const Tensor& logits, const Tensor& rows, int64_t vocab, const Tensor& temperature,
                                  const Tensor& min_p, const Tensor& seed, const Tensor& choice, const Tensor& position,
                                  const std::optional<Tensor>& words, const std::optional<Tensor>& places) {
  const Rows of = check(logits, rows, vocab, "sample");
  const Masks masks = masks_of(words, places, of, "sample");
  for (const Tensor* column : {&temperature, &min_p, &seed, &choice, &position})
    WEFT_CHECK(column->dim() == 1 && column->size(0) == of.count, "sample: columns");
  const Tensor degrees = temperature.contiguous(), least = min_p.contiguous(), seeds = seed.contiguous(),
               choices = choice.contiguous(), positions = position.contiguous();
  const double *t = degrees.const_data_ptr<double>(), *p = least.const_data_ptr<double>();
  const int64_t *s = seeds.const_data_ptr<int64_t>(), *c = choices.const_data_ptr<int64_t>(),
                *at = positions.const_data_ptr<int64_t>();
  Tensor ids = empty_tensor({of.count}, rows.dtype());
  Tensor error = empty_tensor({of.count}, Dtype::boolean);
  by_dtype(logits, "sample", [&]<class T>(T) {
    const T* x = logits.const_data_ptr<T>();
    int64_t* id = ids.mutable_data_ptr<int64_t>();
    bool* wrong = error.mutable_data_ptr<bool>();
    spread(of.count, std::max<int64_t>(1, (1 << 14) / vocab), [&](int64_t begin, int64_t end) {
      std::vector<float> groups(size_t(vocab + kGroup - 1) / kGroup);
      for (int64_t r = begin; r < end; ++r) {
        const Key key{uint32_t(s[r]), uint32_t(uint64_t(s[r]) >> 32), uint32_t(at[r]), uint32_t(c[r])};
        const T* row = x + of.index[r] * of.stride;
        std::tie(id[r], wrong[r]) =
            masks.first ? sample_row<true>(row, vocab, masks.of(r), float(t[r]), p[r], key, groups.data())
                        : sample_row<false>(row, vocab, nullptr, float(t[r]), p[r], key, groups.data());
      }
    });
  });
  return {ids, error};
}

namespace {

// A column of the slots' parameters, with any stride.
template <class T>
struct Column {
  const T* first;
  int64_t stride;
  Column(const Tensor& of, int64_t slots, Dtype type, const char* name)
      : first(of.dim() == 1 && of.size(0) >= slots && of.dtype() == type ? of.const_data_ptr<T>() : nullptr),
        stride(of.dim() == 1 ? of.stride(0) : 0) {
    WEFT_CHECK(first, "end_decode_: ", name);
  }
  T operator[](int64_t slot) const { return first[slot * stride]; }
};

}  // namespace

// End of a decode step with one token per row: row r of the logits gives slot `slots[r]` its next token, by `greedy`
// for a temperature below kGreedy and otherwise by `sample`, and the slot advances by one position:
//
//   history[slot, num_computed[slot] + 1] = token (0 for an error)     num_computed[slot] += 1      live[slot] = 0
//
// temperature, min_p, seed, choice: one column each, for all slots.
std::tuple<Tensor, Tensor> end_decode(const Tensor& logits, const Tensor& slots, int64_t vocab,
                                      const Tensor& temperature, const Tensor& min_p, const Tensor& seed,
                                      const Tensor& choice, const Tensor& history, const Tensor& num_computed,
                                      const std::optional<Tensor>& live) {
  constexpr double kGreedy = 1e-5;  // see weft/runner/sampling/slot_params.py
  WEFT_CHECK(logits.dim() == 2 && logits.stride(1) == 1 && vocab > 0 && vocab <= logits.size(1) && slots.dim() == 1 &&
                 slots.is_contiguous() && slots.size(0) <= logits.size(0),
             "end_decode_: logits");
  WEFT_CHECK(history.dim() == 2 && history.is_contiguous() && num_computed.dim() == 1 && num_computed.is_contiguous() &&
                 num_computed.size(0) == history.size(0) &&
                 (!live || (live->is_contiguous() && live->numel() == history.size(0))),
             "end_decode_: slots");
  const int64_t count = slots.size(0), length = history.size(1), most = temperature.size(0);
  const int64_t* slot = slots.const_data_ptr<int64_t>();
  const Column<double> t(temperature, most, Dtype::f64, "temperature"), p(min_p, most, Dtype::f64, "min_p");
  const Column<int64_t> s(seed, most, Dtype::i64, "seed"), c(choice, most, Dtype::i64, "choice");
  int32_t* ids = history.mutable_data_ptr<int32_t>();
  int64_t* computed = num_computed.mutable_data_ptr<int64_t>();
  int64_t* state = live ? live->mutable_data_ptr<int64_t>() : nullptr;
  for (int64_t r = 0; r < count; ++r) {
    WEFT_CHECK(slot[r] >= 0 && slot[r] < std::min(most, history.size(0)), "end_decode_: slot ", slot[r], " of ", most);
    WEFT_CHECK(computed[slot[r]] >= 0 && computed[slot[r]] + 1 < length, "end_decode_: slot ", slot[r], " is full");
  }
  Tensor made = empty_tensor({count}, slots.dtype());
  Tensor error = empty_tensor({count}, Dtype::boolean);
  int64_t* token = made.mutable_data_ptr<int64_t>();
  bool* wrong = error.mutable_data_ptr<bool>();
  by_dtype(logits, "end_decode_", [&]<class T>(T) {
    const T* x = logits.const_data_ptr<T>();
    spread(count, std::max<int64_t>(1, (1 << 15) / vocab), [&](int64_t begin, int64_t end) {
      std::vector<float> groups;
      for (int64_t r = begin; r < end; ++r) {
        const T* row = x + r * logits.stride(0);
        const int64_t of = slot[r];
        if (t[of] < kGreedy) {
          const Top top = top_of<false>(row, vocab, nullptr, nullptr);
          token[r] = top.id, wrong[r] = top.broken();
          continue;
        }
        groups.resize(size_t(vocab + kGroup - 1) / kGroup);
        const Key key{uint32_t(s[of]), uint32_t(uint64_t(s[of]) >> 32), uint32_t(computed[of] + 1), uint32_t(c[of])};
        std::tie(token[r], wrong[r]) = sample_row<false>(row, vocab, nullptr, float(t[of]), p[of], key, groups.data());
      }
    });
  });
  for (int64_t r = 0; r < count; ++r) {
    const int64_t of = slot[r];
    if (wrong[r]) token[r] = 0;
    ids[of * length + ++computed[of]] = int32_t(token[r]);
    if (state) state[of] = 0;
  }
  return {made, error};
}

// Return rows of logits in float, with -inf for tokens with a clear bit in the row's mask; and broken rows.
std::tuple<Tensor, Tensor> allow_bits(const Tensor& logits, const Tensor& rows, int64_t vocab, const Tensor& words,
                                      const Tensor& places) {
  const Rows of = check(logits, rows, vocab, "allow_bits");
  const Masks masks = masks_of(words, places, of, "allow_bits");
  Tensor made = empty_tensor({of.count, vocab}, Dtype::f32);
  Tensor error = empty_tensor({of.count}, Dtype::boolean);
  float* out = made.mutable_data_ptr<float>();
  bool* wrong = error.mutable_data_ptr<bool>();
  by_dtype(logits, "allow_bits", [&]<class T>(T) {
    const T* x = logits.const_data_ptr<T>();
    spread(of.count, std::max<int64_t>(1, (1 << 16) / vocab), [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r) {
        const T* from = x + of.index[r] * of.stride;
        const int32_t* mask = masks.of(r);
        float* to = out + r * vocab;
        vf largest = splat(-kInf), check = splat(0.0f);
        for (int64_t i = 0; i < vocab; i += kLanes) {
          const int left = int(std::min<int64_t>(kLanes, vocab - i));
          const uint32_t bits = uint32_t(mask[i >> 5]) >> (i & 31) & 0xffffu, there = (1u << left) - 1;
          const vf v = left == kLanes ? load(from + i) : load_n(from + i, left);
          check = check + (v - v);  // NaN for NaN and infinities
          largest = vmax(select(there, v, splat(-kInf)), largest);
          const vf kept = select(bits, v, splat(-kInf));
          if (left == kLanes)
            store(to + i, kept);
          else
            store_n(to + i, kept, left);
        }
        bool nan = false;
        if (any_nan(check))
          for (int64_t i = 0; i < vocab; ++i) nan |= std::isnan(widen(from[i]));
        wrong[r] = nan || !std::isfinite(reduce_max(largest));
      }
    });
  });
  return {made, error};
}

}  // namespace weft
