// Vectors of 16 floats and FP8 codes against scalar code.
#include "fp8.h"

#include "expect.h"

using namespace weft;
using namespace weft::vec;

namespace {

const float kSpecial[] = {0.0f, -0.0f, 1.0f, -1.0f, 0.5f, 3.0f, -7.25f, 448.0f, 1e-40f, -1e-40f, 1e-30f, 3e38f,
                          -3e38f, kInf, -kInf, NAN, 0x1.01p0f, 0x1.03p0f, 0x1.0080002p0f, 126.7f, -126.2f, 127.99f};
constexpr int kSpecials = sizeof(kSpecial) / sizeof(float);

void check_lanes() {
  float x[16], y[16], made[16];
  for (int round = 0; round < 200; ++round) {
    for (int i = 0; i < 16; ++i) {
      x[i] = round % 2 ? draw_float() * 100 : kSpecial[draw() % kSpecials];
      y[i] = round % 3 ? draw_float() * 100 : kSpecial[draw() % kSpecials];
    }
    const vf a = load(x), b = load(y);
    const auto each = [&](const char* what, vf got, auto scalar) {
      store(made, got);
      for (int i = 0; i < 16; ++i) expect_bits(made[i], scalar(x[i], y[i]), what, round, i);
    };
    each("sum", a + b, [](float p, float q) { return p + q; });
    each("difference", a - b, [](float p, float q) { return p - q; });
    each("product", a * b, [](float p, float q) { return p * q; });
    each("quotient", a / b, [](float p, float q) { return p / q; });
    each("fma", fma(a, b, a), [](float p, float q) { return std::fma(p, q, p); });
    each("vmax", vmax(a, b), [](float p, float q) { return p > q ? p : q; });
    each("vmin", vmin(a, b), [](float p, float q) { return p < q ? p : q; });
    each("vabs", vabs(a), [](float p, float) { return std::fabs(p); });
    each("vsqrt", vsqrt(a), [](float p, float) { return std::sqrt(p); });
    each("fraction", fraction(a), [](float p, float) { return std::isinf(p) ? 0.0f : p - std::floor(p); });
    const uint32_t mask = draw() & 0xffff;
    store(made, select(mask, a, b));
    for (int i = 0; i < 16; ++i) expect_bits(made[i], mask >> i & 1 ? x[i] : y[i], "select", round, i);
    uint32_t lower = 0, equals = 0, reached = 0, words[16];
    for (int i = 0; i < 16; ++i) {
      words[i] = draw();
      lower |= uint32_t(x[i] < y[i]) << i, equals |= uint32_t(x[i] == y[i]) << i;
      reached |= uint32_t(words[i] >= 0x90000000u) << i;
    }
    expect(less(a, b) == lower, "less", less(a, b), lower);
    expect(equal(a, b) == equals, "equal", equal(a, b), equals);
    expect(at_least(words, 0x90000000u) == reached, "at_least", at_least(words, 0x90000000u), reached);
    float sum[16], most[16];
    std::memcpy(sum, x, sizeof(sum)), std::memcpy(most, x, sizeof(most));
    for (int half = 8; half; half /= 2)
      for (int i = 0; i < half; ++i) {
        sum[i] += sum[i + half];
        most[i] = most[i] > most[i + half] ? most[i] : most[i + half];
      }
    expect_bits(reduce_add(a), sum[0], "reduce_add", round);
    if (round % 2) expect_bits(reduce_max(a), most[0], "reduce_max", round);
  }
}

void check_parts() {
  float x[17], made[17];
  bf16 narrow[17], made_narrow[17];
  for (int i = 0; i < 17; ++i) x[i] = draw_float(), narrow[i] = bf16(x[i]);
  for (int n = 0; n <= 16; ++n) {
    store(made, load_n(x, n));
    for (int i = 0; i < 16; ++i) expect_bits(made[i], i < n ? x[i] : 0.0f, "load_n", n, i);
    store(made, load_n(narrow, n));
    for (int i = 0; i < 16; ++i) expect_bits(made[i], i < n ? widen(narrow[i]) : 0.0f, "load_n of bf16", n, i);
    for (int i = 0; i < 17; ++i) made[i] = 7.0f, made_narrow[i] = bf16(7.0f);
    store_n(made, load(x), n), store_n(made_narrow, load(x), n);
    for (int i = 0; i < 17; ++i) {
      expect_bits(made[i], i < n ? x[i] : 7.0f, "store_n", n, i);
      expect_bits(widen(made_narrow[i]), i < n ? widen(narrow[i]) : 7.0f, "store_n of bf16", n, i);
    }
  }
  for (int round = 0; round < 4000; ++round) {
    bf16 stored[16];
    float values[16];
    for (float& value : values) value = round % 2 ? bits_to_float(draw()) : kSpecial[draw() % kSpecials];
    store(stored, load(values));
    for (int i = 0; i < 16; ++i)
      expect(stored[i].x == round_bf16(values[i]), "bf16", stored[i].x, round_bf16(values[i]), round, i);
  }
}

void check_exp2() {
  float made[16];
  for (float from = -160.0f; from < 130.0f; from += 0.37f) {
    float x[16];
    for (int i = 0; i < 16; ++i) x[i] = from + float(i) * 0.019f;
    store(made, exp2v(load(x)));
    for (int i = 0; i < 16; ++i) {
      const double wanted = std::exp2(double(x[i]));
      if (wanted > 3.4e38) continue;
      expect_close(made[i], wanted, wanted * 1.5e-7 + 0x1p-149, "exp2v", long(from), i);
    }
  }
  const float x[16] = {0.0f, -kInf, NAN, kInf, 200.0f, -200.0f}, wanted[6] = {1.0f, 0.0f, NAN, kInf, kInf, 0.0f};
  store(made, exp2v(load(x)));
  for (int i = 0; i < 6; ++i) expect_bits(made[i], wanted[i], "exp2v of a special value", i);
}

void check_fp8() {
  uint8_t codes[16], back[16];
  float made[16];
  for (int first = 0; first < 256; first += 16) {
    for (int i = 0; i < 16; ++i) codes[i] = uint8_t(first + i);
    const vf values = from_codes(codes);
    store(made, values);
    to_codes(values, back);
    for (int i = 0; i < 16; ++i) {
      const int code = codes[i] & 127, exponent = code >> 3, mantissa = code & 7;
      const float size = exponent ? std::ldexp(float(8 + mantissa), exponent - 10) : std::ldexp(float(mantissa), -9);
      expect_bits(made[i], codes[i] & 128 ? -size : size, "E4M3", codes[i]);
      if (code != 127) expect(back[i] == codes[i], "E4M3 and back", back[i], codes[i]);
    }
  }
  for (int round = 0; round < 500; ++round) {
    float x[16], low[16];
    for (float& value : x) value = draw_float() * 448.0f * std::exp2(-float(draw() % 18));
    to_codes(load(x), back);
    store(low, from_codes(back));
    for (int i = 0; i < 16; ++i) expect_close(low[i], x[i], std::fabs(x[i]) / 16 + 0x1p-10, "E4M3 of a float", round, i);
  }
}

}  // namespace

int main() {
  check_lanes(), check_parts(), check_exp2(), check_fp8();
  return report();
}
