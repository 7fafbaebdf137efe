// Products of all formats against scalar code, and each row against the row alone: a row's bits may not depend on the
// other rows of its tile.
#include "coded.cpp"

#include "expect.h"

using namespace weft;

namespace {

constexpr int64_t kInputs[] = {1, 2, 7, 63, 64, 130};

template <class F>
float weight_of(const std::vector<uint8_t>& w, int64_t k, int column) {
  const uint8_t* step = w.data() + k / F::depth * F::bytes;
  if constexpr (std::is_same_v<F, F32>) return load_as<float>(step + 4 * column);
  if constexpr (std::is_same_v<F, Int8F32>) return float(int8_t(step[column]));
  if constexpr (std::is_same_v<F, Int8Bf16>) return float(int8_t(step[int8_slot(column, int(k % 2))]));
  if constexpr (std::is_same_v<F, Bf16>) return widen(load_as<bf16>(step + 4 * column + 2 * (k % 2)));
}

template <class F>
std::vector<uint8_t> draw_weights(int64_t inputs) {
  std::vector<uint8_t> made(size_t(divide_up(inputs, F::depth) * F::bytes));
  for (uint8_t& each : made) each = uint8_t(draw());
  for (int64_t k = 0; k < divide_up(inputs, F::depth) * F::depth; ++k)
    for (int column = 0; column < kBlock; ++column) {
      uint8_t* step = made.data() + k / F::depth * F::bytes;
      const float value = k < inputs ? draw_float() : 0.0f;
      const bf16 rounded = bf16(value);
      if constexpr (std::is_same_v<F, F32>) std::memcpy(step + 4 * column, &value, 4);
      if constexpr (std::is_same_v<F, Bf16>) std::memcpy(step + 4 * column + 2 * (k % 2), &rounded, 2);
      if constexpr (std::is_same_v<F, Int8Bf16>)
        step[int8_slot(column, int(k % 2))] = k < inputs ? int8_code(int(draw() % 255) - 127) : 0;
    }
  return made;
}

template <class F>
void check_tiles(const char* what) {
  using X = typename F::X;
  constexpr bool exact = !WEFT_NEON_BF16 || std::is_same_v<X, float>;
  constexpr int most = tile_rows<F>;
  const auto& of_rows = tiles<F, float>;
  for (int64_t inputs : kInputs) {
    const std::vector<uint8_t> w = draw_weights<F>(inputs);
    const std::vector<X> x = draw_all<X>(size_t(most * inputs + 8));
    const Finish finish{};
    float alone[most * kBlock], made[most * kBlock];
    for (int row = 0; row < most; ++row)
      of_rows[0](x.data() + row * inputs, inputs, w.data(), inputs, finish, alone + row * kBlock, kBlock,
                 {w.data(), 0, INT64_MAX});
    for (int rows = 1; rows <= most; ++rows) {
      of_rows[rows - 1](x.data(), inputs, w.data(), inputs, finish, made, kBlock, {w.data(), 0, INT64_MAX});
      for (int i = 0; i < rows * kBlock; ++i) {
        expect_bits(made[i], alone[i], what, rows, inputs);
        float chain = 0.0f;
        double sum = 0.0, size = 0.0;
        for (int64_t k = 0; k < inputs; ++k) {
          const float a = widen(x[size_t(i / kBlock * inputs + k)]), b = weight_of<F>(w, k, i % kBlock);
          chain = std::fma(a, b, chain), sum += double(a) * b, size += std::fabs(double(a) * b);
        }
        if (exact) expect_bits(made[i], chain, what, inputs, i);
        expect_close(made[i], sum, 1e-5 * size + 1e-9, what, inputs, i);
      }
    }
  }
}

// Rows of codes of 8 bits, and the results of bytes and nibbles.
struct RoundedRows {
  int64_t inputs, depth;
  std::vector<float> x;
  std::vector<uint8_t> memory;
  ByteRows rows;

  RoundedRows(int64_t inputs, int count, int64_t group) : inputs(inputs), x(draw_all<float>(size_t(count * inputs))) {
    const Rounding of{0, count, inputs, group, 1, false};
    depth = of.depth();
    memory.resize(size_t(of.memory()));
    round_rows(of, x.data(), inputs, memory.data());
    rows = of.in(memory.data());
  }
  // Codes and their sums, of rows with one step.
  void check(int count) const {
    for (int row = 0; row < count; ++row) {
      float largest = 0.0f;
      for (int64_t k = 0; k < inputs; ++k) largest = std::max(largest, std::fabs(x[size_t(row * inputs + k)]));
      int32_t sum = 0;
      for (int64_t k = 0; k < depth; ++k) {
        const float wanted = k < inputs ? std::nearbyintf(x[size_t(row * inputs + k)] * (127.0f / largest)) : 0.0f;
        const int code = rows.codes[row * depth + k];
        expect(float(code) == wanted, "code", code, wanted, row, k);
        sum += code;
      }
      expect(sum == rows.sums[row], "sum of codes", rows.sums[row], sum, row);
    }
  }
};

void check_bytes() {
  for (int64_t inputs : kInputs) {
    RoundedRows given(inputs, kByteTile, INT32_MAX);
    given.check(kByteTile);
    std::vector<uint8_t> w(size_t(given.depth / kByteDepth * kByteStep));
    for (uint8_t& each : w) each = uint8_t(draw());
    const Finish finish{};
    const ByteRows& x = given.rows;
    float made[kByteTile * kBlock], totals[kByteTile * kBlock];
    for (int rows = 1; rows <= kByteTile; ++rows) {
      byte_tiles<float>[rows - 1](x.codes, x.stride(), 0, x.steps, x.sums, w.data(), inputs, finish, {true, true, totals}, made,
                                  kBlock, {w.data(), 0, INT64_MAX});
      for (int i = 0; i < rows * kBlock; ++i) {
        int32_t sum = 0;
        for (int64_t k = 0; k < given.depth; ++k)
          sum += x.codes[i / kBlock * given.depth + k] *
                 (int(w[size_t(k / kByteDepth * kByteStep + i % kBlock * kByteDepth + k % kByteDepth)]) - 128);
        expect_bits(made[i], float(sum) * x.steps[i / kBlock], "bytes", rows, inputs);
      }
    }
  }
}

void check_nibbles() {
  for (int64_t groups : {1, 3}) {
    const int64_t inputs = groups * kByteTileDepth;
    const RoundedRows given(inputs, kNibbleTile, kByteTileDepth);
    const ByteRows& x = given.rows;
    std::vector<uint8_t> w(size_t(groups * kNibbleGroup));
    for (uint8_t& each : w) each = uint8_t(draw());
    for (int64_t group = 0; group < groups; ++group)
      for (int column = 0; column < kBlock; ++column) {
        const float scale = draw_float();
        std::memcpy(w.data() + group * kNibbleGroup + 4 * column, &scale, 4);
        w[size_t(group * kNibbleGroup + 4 * kBlock + column)] = uint8_t(draw() % 16);
      }
    const Finish finish{};
    float made[kNibbleTile * kBlock];
    for (int rows = 1; rows <= kNibbleTile; ++rows) {
      nibble_tiles<float>[rows - 1](x.codes, x.stride(), 0, x.steps, x.sums, x.rows, w.data(), groups, finish, made, kBlock);
      for (int i = 0; i < rows * kBlock; ++i) {
        const int row = i / kBlock, column = i % kBlock;
        float total = 0.0f;
        for (int64_t group = 0; group < groups; ++group) {
          const uint8_t* at = w.data() + group * kNibbleGroup;
          int32_t sum = 0;
          for (int k = 0; k < kByteTileDepth; ++k) {
            const int both = at[kNibbleHead + k / kByteDepth * kByteStep / 2 + column % 16 * kByteDepth + k % kByteDepth];
            const int nibble = column < 16 ? both & 15 : both >> 4;
            sum += x.codes[row * given.depth + group * kByteTileDepth + k] * (nibble - at[4 * kBlock + column]);
          }
          total = std::fma(float(sum), load_as<float>(at + 4 * column) * x.steps[group * x.rows + row], total);
        }
        expect_bits(made[i], total, "nibbles", rows, i);
      }
    }
  }
}

// Every number of a step of a format of codes; `scalar` gives the number of a half and a word.
template <class C, class Scalar>
void check_numbers(const char* what, Scalar scalar) {
  uint8_t head[64], w[96];
  for (int round = 0; round < 100; ++round) {
    for (uint8_t& each : head) each = uint8_t(draw() % (C::bytes > 48 ? 256 : 16));
    for (uint8_t& each : w) each = uint8_t(draw());
    const Bf16::Step step = C(head).load(w);
    for (int half = 0; half < 2; ++half) {
      bf16 made[32];
      std::memcpy(made, &step.w[half], sizeof(made));
      for (int word = 0; word < 32; ++word) expect_bits(widen(made[word]), scalar(head, w, half, word), what, half, word);
    }
  }
}

int nibble(const uint8_t* w, int half, int word) { return w[word] >> (4 * half) & 15; }

void check_codes() {
  check_numbers<Int4<Zeros::middle>>("int4", [](auto*, auto* w, int half, int word) { return float(nibble(w, half, word) - 8); });
  check_numbers<Int4<Zeros::minimums>>("int4 with minimums",
                                       [](auto*, auto* w, int half, int word) { return float(nibble(w, half, word)); });
  check_numbers<Int4<Zeros::points>>("int4 with zero points", [](auto* zero, auto* w, int half, int word) {
    return float(nibble(w, half, word) - zero[16 * half + word / 2]);
  });
  check_numbers<Int5>("int5", [](auto*, auto* w, int half, int word) {
    return float(nibble(w, half, word) | (w[32 + 4 * half + word / 8] >> word % 8 & 1) << 4);
  });
  check_numbers<Int6>("int6", [](auto*, auto* w, int half, int word) {
    return float((nibble(w, half, word) | (w[32 + word % 16] >> (word / 16 * 4 + half * 2) & 3) << 4) - 32);
  });
  check_numbers<Iq4>("iq4", [](auto*, auto* w, int half, int word) { return float(kIq4[nibble(w, half, word)]); });
  check_numbers<E2M1>("e2m1", [](auto*, auto* w, int half, int word) {
    const float sizes[8] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f};
    const int code = nibble(w, half, word);
    return code & 8 ? -sizes[code & 7] : sizes[code & 7];
  });
  check_numbers<Int8<false>>("int8", [](auto*, auto* w, int half, int word) {
    return float(int(w[32 * half + word % 2 * 16 + word / 2]) - 128);
  });
  float16_t halves_of[16];
  float wide[16];
  for (float16_t& each : halves_of) each = float16_t(draw_float());
  store(wide, halves(reinterpret_cast<const uint8_t*>(halves_of)));
  for (int i = 0; i < 16; ++i) expect_bits(wide[i], float(halves_of[i]), "float16", i);
}

}  // namespace

int main() {
  check_tiles<Bf16>("bf16");
  check_tiles<Int8Bf16>("int8 times bf16");
  check_tiles<F32>("float32");
  check_tiles<Int8F32>("int8 times float32");
  check_bytes(), check_nibbles(), check_codes();
  return report();
}
