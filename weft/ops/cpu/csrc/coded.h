// Weights of few bits, kept so: what a block of 32 packed columns is made of, and its sums (coded.cpp).
//
//   w[n, k] = (number(code) - zero of its group) * scale of its group * factor of its row
//
//   block      groups of K, one after another; the last may have fewer k
//   group      scales of 32 columns (float32, or bytes: E4M3, E8M0), zero points of 32 columns (bytes), steps
//   step       2 k of 32 columns: 32 bytes of 4-bit codes, 64 bytes of 8-bit codes
//
//   4 bits     byte 2 c + j: column c, k + j in the low half; column 16 + c in the high one
//   8 bits     `eight_slot`
//
// INVARIANCE. A sum is one chain over the k of a group, of exact products (all numbers are exact in bf16); groups are
// added up in order, each times its scale. Neither depends on how many rows there are: where codes are unpacked in
// memory for some numbers of rows and in registers for others, both give the same chain.
#pragma once

#include "common.h"

#include <vector>

namespace weft {

enum class Numbers : int64_t { none = 0, int4 = 1, int8 = 2, e2m1 = 3, e4m3 = 4 };
enum class Scales : int64_t { floats = 0, e4m3 = 1, e8m0 = 2 };

struct Coding {
  Numbers numbers = Numbers::none;  // none: the weights are plain
  Scales scales = Scales::floats;
  bool zeros = false;  // else a zero point is 8 (int4) or 128 (int8)
  int64_t group = 0;   // k a group; even

  explicit operator bool() const { return numbers != Numbers::none; }
  bool four() const { return numbers == Numbers::int4 || numbers == Numbers::e2m1; }
  int64_t scale_bytes() const { return scales == Scales::floats ? 128 : 32; }
  int64_t head() const { return scale_bytes() + (zeros ? 32 : 0); }
  int64_t step() const { return four() ? 32 : 64; }
  int64_t groups(int64_t inputs) const { return (inputs + group - 1) / group; }
  // Bytes from a block's beginning to that of `k`, which begins a group or is the end.
  int64_t offset(int64_t k) const { return groups(k) * head() + (k + 1) / 2 * step(); }

  static Coding of(const std::vector<int64_t>& given) {
    if (given.empty()) return {};
    TORCH_CHECK(given.size() == 4 && given[0] >= 1 && given[0] <= 4 && given[1] >= 0 && given[1] <= 2 &&
                    given[3] >= 2 && given[3] % 2 == 0, "a coding is numbers, scales, zeros, group");
    return {Numbers(given[0]), Scales(given[1]), given[2] != 0, given[3]};
  }
};

// sums[row, column] of `rows` rows against the block at `w`, float32 [rows, 32]; without bias and the rows' factors.
void coded_sums(const Coding& coding, const uint8_t* w, int64_t inputs, const bf16* x, int64_t x_stride, int64_t rows,
                float* sums);
void coded_sums(const Coding& coding, const uint8_t* w, int64_t inputs, const float* x, int64_t x_stride, int64_t rows,
                float* sums);

// The block at `w` in bf16, scaled and rounded, as `pack` lays it out; for brgemm. Until this thread's next call.
const uint8_t* coded_as_bf16(const Coding& coding, const uint8_t* w, int64_t inputs);

}  // namespace weft
