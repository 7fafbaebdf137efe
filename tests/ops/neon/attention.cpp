// Transposition and register tiles of attention against scalar code, and each row against the row alone.
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

}  // namespace

int main() {
  check_transpose(), check_wide();
  return report();
}
