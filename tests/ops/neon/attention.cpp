// Transposition and register tiles of attention against scalar code, and each row against the row alone.
#include "attend_engines.cpp"
#include "attend_tile.h"

#include "expect.h"

using namespace weft;
using namespace weft::attend;

namespace {

void check_transpose() {
  for (int words : {1, 4, 15, 16, 37}) {
    std::vector<uint32_t> from(size_t(kTile * words)), made(size_t(kTile * words));
    for (uint32_t& each : from) each = draw();
    const uint32_t* rows[kTile];
    for (int r = 0; r < kTile; ++r) rows[r] = from.data() + r * words;
    transpose(rows, nullptr, words, made.data());
    for (int r = 0; r < kTile; ++r)
      for (int c = 0; c < words; ++c)
        expect(made[size_t(c * kTile + r)] == from[size_t(r * words + c)], "transpose", r, c);
  }
}

// 1 to 7 rows of float32 times [k, n].
void check_wide() {
  constexpr int k = 24, most = 7;
  const std::vector<float> a = draw_all<float>(most * k);
  for (int n : {16, 32, 48, 64, 128}) {
    const std::vector<float> b = draw_all<float>(size_t(k * n));
    std::vector<float> alone(size_t(most * n)), made(size_t(most * n));
    const std::vector<float> alpha = draw_all<float>(most), start = draw_all<float>(size_t(most * n));
    for (const float* scale : {static_cast<const float*>(nullptr), alpha.data()}) {
      alone = start;
      for (int row = 0; row < most; ++row)
        Wide<float>::gemm(1, n, k, a.data() + row * k, k, b.data(), alone.data() + row * n, scale ? scale + row : scale, true);
      for (int rows = 1; rows <= most; ++rows) {
        made = start;
        Wide<float>::gemm(rows, n, k, a.data(), k, b.data(), made.data(), scale, true);
        for (int i = 0; i < rows * n; ++i) {
          expect_bits(made[size_t(i)], alone[size_t(i)], "a row of attention alone", rows, n);
          float chain = scale ? start[size_t(i)] * scale[i / n] : 0.0f;
          for (int at = 0; at < k; ++at) chain = std::fma(a[size_t(i / n * k + at)], b[size_t(at * n + i % n)], chain);
          expect_bits(made[size_t(i)], chain, "attention", n, i);
        }
      }
    }
  }
}

// 1 to 8 rows of bf16 without packed floats have the bits of packed floats.
void check_few() {
  constexpr int k = 96, most = 8;
  for (int n : {16, 32, 80, 128}) {
    const std::vector<float> a = draw_all<float>(most * k), p = draw_all<float>(most * kTile);
    const std::vector<bf16> keys = draw_all<bf16>(kTile * k), values = draw_all<bf16>(size_t(kTile * n));
    const std::vector<float> alpha = draw_all<float>(most), start = draw_all<float>(size_t(most * n));
    const bf16 *key_lines[kTile], *value_lines[kTile];
    for (int r = 0; r < kTile; ++r) key_lines[r] = keys.data() + r * k, value_lines[r] = values.data() + r * n;
    std::vector<float> packed_k(kTile * k), pairs(kTile * k), packed_v(size_t(kTile * n)), scratch(kTile * k);
    Wide<bf16>::pack_k(key_lines, nullptr, k, packed_k.data(), scratch.data());
    Wide<bf16>::pack_v(value_lines, nullptr, n, packed_v.data());
    PackBf16::pack_k(key_lines, nullptr, k, reinterpret_cast<bf16*>(pairs.data()), nullptr);
    for (int rows = 1; rows <= most; ++rows) {
      std::vector<float> scores(most * kTile), made(most * kTile), sums = start, few = start;
      Wide<bf16>::gemm(rows, kTile, k, a.data(), k, packed_k.data(), scores.data(), nullptr, true);
      few_scores(rows, k, a.data(), pairs.data(), made.data(), key_lines);
      for (int i = 0; i < rows * kTile; ++i) expect_bits(made[size_t(i)], scores[size_t(i)], "few scores", rows, i);
      Wide<bf16>::gemm(rows, n, kTile, p.data(), kTile, packed_v.data(), sums.data(), alpha.data(), true);
      few_values(rows, n, p.data(), value_lines, few.data(), alpha.data(), value_lines);
      for (int i = 0; i < rows * n; ++i) expect_bits(few[size_t(i)], sums[size_t(i)], "few values", rows, i);
    }
  }
}

// Rounding to bf16 in floats is the rounding of a store.
void check_rounding() {
  for (int i = 0; i < 1000; ++i) {
    float x[kLanes], made[kLanes];
    for (float& each : x) each = bits_to_float(draw());
    store(made, rounded_bf16(load(x)));
    for (int l = 0; l < kLanes; ++l)
      if (!std::isnan(x[l])) expect_bits(made[l], bits_to_float(uint32_t(round_bf16(x[l])) << 16), "rounded", i, l);
  }
}

}  // namespace

int main() {
  check_transpose(), check_wide(), check_few(), check_rounding();
  return report();
}
