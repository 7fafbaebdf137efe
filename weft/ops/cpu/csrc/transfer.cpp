// Copies and digests of spans of bytes (weft/disagg/protocol/digests.py defines the digest, in Python).
//
//   digest_spans(memory, spans, seeds)          spans: int64 [n, 2], offset and length        -> int64 [n]
//   copy_spans(source, target, spans, seeds)    spans: int64 [n, 3], from, to and length      -> int64 [n]
//
// A copy is digested in the same pass, a block at a time while the block is in the L1 cache. So the digest belongs to
// the copied bytes, and costs no second pass over memory. memory, source and target are uint8 [bytes]; every span is
// checked before any byte is touched. Callers do not hold the GIL.
#include "operators.h"

#include <array>
#include <vector>

namespace weft {
namespace {

constexpr int64_t kWords = 128;  // 64-bit words per block
constexpr int64_t kBytes = 8 * kWords;

inline uint64_t mix(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  return x ^ (x >> 31);
}

const std::array<uint64_t, kWords> kKeys = [] {
  std::array<uint64_t, kWords> keys{};
  for (int64_t i = 0; i < kWords; ++i) keys[i] = mix(0x9e3779b97f4a7c15ull * uint64_t(i + 1));
  return keys;
}();

inline uint64_t term(uint64_t word, uint64_t key) {
  const uint32_t low = uint32_t(word) + uint32_t(key);
  const uint32_t high = uint32_t(word >> 32) + uint32_t(key >> 32);
  return uint64_t(low) * high + word;
}

// At most one block. A partial last word is padded with zeros.
uint64_t digest_part(const uint8_t* data, int64_t bytes) {
  uint64_t sum = 0;
  for (int64_t at = 0; at < bytes; at += 8) {
    uint64_t word = 0;
    std::memcpy(&word, data + at, std::min<int64_t>(8, bytes - at));
    sum += term(word, kKeys[at / 8]);
  }
  return sum;
}

#if WEFT_AVX2 || WEFT_AVX512
inline __m256i add_term(__m256i sum, __m256i word, __m256i key) {
  const __m256i keyed = _mm256_add_epi32(word, key);
  const __m256i product = _mm256_mul_epu32(keyed, _mm256_srli_epi64(keyed, 32));
  return _mm256_add_epi64(sum, _mm256_add_epi64(product, word));
}

// One whole block, also written to `to` if given.
template <bool copy>
uint64_t digest_block(const uint8_t* data, uint8_t* to) {
  __m256i sums[4] = {};
  for (int64_t at = 0; at < kWords; at += 16) {
    for (int64_t lane = 0; lane < 4; ++lane) {
      const int64_t word = at + 4 * lane;
      const __m256i x = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(data + 8 * word));
      if constexpr (copy) _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + 8 * word), x);
      sums[lane] = add_term(sums[lane], x, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(&kKeys[word])));
    }
  }
  alignas(32) uint64_t parts[4];
  _mm256_store_si256(reinterpret_cast<__m256i*>(parts),
                     _mm256_add_epi64(_mm256_add_epi64(sums[0], sums[1]), _mm256_add_epi64(sums[2], sums[3])));
  return parts[0] + parts[1] + parts[2] + parts[3];
}
#elif WEFT_NEON
// One whole block, also written to `to` if given.
template <bool copy>
uint64_t digest_block(const uint8_t* data, uint8_t* to) {
  uint64x2_t sums[4] = {};
  for (int64_t at = 0; at < kWords; at += 8)
    for (int64_t lane = 0; lane < 4; ++lane) {
      const int64_t word = at + 2 * lane;
      const uint8x16_t x = vld1q_u8(data + 8 * word);
      if constexpr (copy) vst1q_u8(to + 8 * word, x);
      const uint64x2_t read = vreinterpretq_u64_u8(x);
      const uint32x4_t keyed = vreinterpretq_u32_u8(x) + vreinterpretq_u32_u64(vld1q_u64(&kKeys[word]));
      const uint64x2_t pairs = vreinterpretq_u64_u32(keyed);
      sums[lane] = vmlal_u32(sums[lane] + read, vmovn_u64(pairs), vshrn_n_u64(pairs, 32));
    }
  return vaddvq_u64((sums[0] + sums[1]) + (sums[2] + sums[3]));
}
#else
template <bool copy>
uint64_t digest_block(const uint8_t* data, uint8_t* to) {
  if constexpr (copy) std::memcpy(to, data, kBytes);
  return digest_part(copy ? to : data, kBytes);
}
#endif

template <bool copy>
uint64_t digest_span(const uint8_t* data, uint8_t* to, int64_t bytes, uint64_t seed, std::vector<uint64_t>& sums) {
  sums.clear();
  for (int64_t at = 0; at < bytes; at += kBytes) {
    const int64_t n = std::min(kBytes, bytes - at);
    if (n == kBytes) {
      sums.push_back(digest_block<copy>(data + at, to + at));
    } else {
      if constexpr (copy) std::memcpy(to + at, data + at, n);
      sums.push_back(digest_part(copy ? to + at : data + at, n));
    }
  }
  while (sums.size() > 1) {
    size_t made = 0;
    for (size_t at = 0; at < sums.size(); at += kWords) {
      const size_t n = std::min<size_t>(kWords, sums.size() - at);
      uint64_t sum = 0;
      for (size_t i = 0; i < n; ++i) sum += term(sums[at + i], kKeys[i]);
      sums[made++] = sum;
    }
    sums.resize(made);
  }
  return mix((sums.empty() ? 0 : sums[0]) ^ seed);
}

void check_memory(const Tensor& memory, const char* what) {
  WEFT_CHECK(memory.dtype() == Dtype::u8 && memory.dim() == 1 && memory.is_contiguous(), what, " is not uint8 [bytes]");
  WEFT_CHECK(memory.is_cpu(), what, " is not in the memory of the CPU");
}

int64_t check_spans(const Tensor& spans, const Tensor& seeds, int64_t columns) {
  WEFT_CHECK(spans.dtype() == Dtype::i64 && spans.dim() == 2 && spans.size(1) == columns && spans.is_contiguous(),
             "spans are not int64 [n, ", columns, "]");
  WEFT_CHECK(seeds.dtype() == Dtype::i64 && seeds.dim() == 1 && seeds.is_contiguous() && seeds.size(0) == spans.size(0),
             "seeds are not int64 [n], one a span");
  return spans.size(0);
}

void check_inside(int64_t offset, int64_t bytes, int64_t size, const char* what) {
  WEFT_CHECK(offset >= 0 && bytes >= 0 && bytes <= size && offset <= size - bytes, "a span leaves ", what);
}

}  // namespace

Tensor digest_spans(const Tensor& memory, const Tensor& spans, const Tensor& seeds) {
  check_memory(memory, "memory");
  const int64_t count = check_spans(spans, seeds, 2);
  const int64_t* span = spans.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < count; ++i) check_inside(span[2 * i], span[2 * i + 1], memory.numel(), "memory");
  Tensor out = empty_tensor({count}, seeds.dtype());
  int64_t* digests = out.mutable_data_ptr<int64_t>();
  const uint8_t* data = memory.const_data_ptr<uint8_t>();
  std::vector<uint64_t> sums;
  for (int64_t i = 0; i < count; ++i)
    digests[i] = int64_t(digest_span<false>(data + span[2 * i], nullptr, span[2 * i + 1],
                                            uint64_t(seeds.const_data_ptr<int64_t>()[i]), sums));
  return out;
}

Tensor copy_spans(const Tensor& source, Tensor& target, const Tensor& spans, const Tensor& seeds) {
  check_memory(source, "source");
  check_memory(target, "target");
  const int64_t count = check_spans(spans, seeds, 3);
  const int64_t* span = spans.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < count; ++i) {
    check_inside(span[3 * i], span[3 * i + 2], source.numel(), "source");
    check_inside(span[3 * i + 1], span[3 * i + 2], target.numel(), "target");
  }
  Tensor out = empty_tensor({count}, seeds.dtype());
  int64_t* digests = out.mutable_data_ptr<int64_t>();
  const uint8_t* from = source.const_data_ptr<uint8_t>();
  uint8_t* to = target.mutable_data_ptr<uint8_t>();
  std::vector<uint64_t> sums;
  for (int64_t i = 0; i < count; ++i)
    digests[i] = int64_t(digest_span<true>(from + span[3 * i], to + span[3 * i + 1], span[3 * i + 2],
                                           uint64_t(seeds.const_data_ptr<int64_t>()[i]), sums));
  return out;
}

}  // namespace weft
