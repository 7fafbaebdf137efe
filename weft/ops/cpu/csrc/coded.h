// Quantized weights in packed form: the layout of a block of 32 packed columns, and its sums (coded.cpp).
//
//   w[n, k] = ((number(code) - zero of its group) * scale of its group - minimum of its group) * factor of its row
//
//   block      groups of K, one after another; the last group may have fewer k
//   group      scales of 32 columns (float32, float16, or bytes: E4M3, E8M0), zero points of 32 columns (bytes), steps
//   step       2 k of 32 columns: 32, 40, 48 or 64 bytes of 4-, 5-, 6- or 8-bit codes
//
//   4 bits     byte 2 c + j: column c, k + j in the low half; column 16 + c in the high one
//   5 bits     the low four as 4 bits; then the fifth bits of the codes in the low halves, and in the high halves
//   6 bits     the low four as 4 bits; then byte i has, from its lowest bits on, the high two of the codes in the low
//              and the high half of byte i, then of byte 16 + i
//   8 bits     `eight_slot`
//
// For rows rounded to 8 or 16 bits (`rounds_rows`) the layout of blocks is in rounded.h.
//
// With scales in two levels (GGML's K-quants) a group has signed bytes, two per column with minimums. In front of 256 k
// each column has a float16 factor of its scales, and a second float16 factor of its minimums. With minimums, integers
// are stored without a zero point. The minimum times the sum of a group's x is subtracted; callers compute these sums
// once for all blocks (`input_sums`).
//
// INVARIANCE. A sum is one chain of exact products over the k of a group (all numbers are exact in bf16). Groups are
// added in order, each times its scale. Neither depends on the number of rows: codes are unpacked in memory for some
// row counts and in registers for others, and both give the same chain. With AMX, scales multiply the numbers in some
// codings, for every number of rows (`SumScales`, gemm_block.h).
#pragma once

#include "common.h"

namespace weft {

enum class Numbers : int64_t {
  none = 0,
  int4 = 1,
  int8 = 2,
  e2m1 = 3,
  e4m3 = 4,
  int6 = 5,
  bytes = 6,    // rounded.h
  nibbles = 7,  // rounded.h
  int5 = 8,     // with minimums
  iq4 = 9,      // 4 bits for the numbers of `kIq4` (coded_numbers.h)
  bytes_by_words = 10,   // bytes, for rows in 16 bits
  nibbles_by_words = 11  // nibbles, for rows in 16 bits
};
enum class Scales : int64_t { floats = 0, e4m3 = 1, e8m0 = 2, halves = 3, levels = 4 };
enum class Zeros : int64_t { middle = 0, points = 1, minimums = 2 };  // middle: 8 (int4), 32 (int6), 128 (int8)

// True if rows may have 16 bits: products of bytes are more than twice as fast as other products. Low bytes may be -128,
// which products without VNNI do not take.
constexpr bool kWordRows = WEFT_WORD_ROWS;

struct Coding {
  Numbers numbers = Numbers::none;  // none: plain weights
  Scales scales = Scales::floats;
  Zeros zeros = Zeros::middle;
  int64_t group = 0;  // k per group; even. Bytes: k of a row of x with a common step; may exceed the row

  static constexpr int64_t kBytes64 = 2048, kNibbles64 = 1184;  // bytes of 64 k, see rounded.h
  static constexpr int64_t kWordGroup = 128;  // largest group of rows in 16 bits
  static constexpr int64_t kSpan = 256;                         // k with a common upper level

  explicit operator bool() const { return numbers != Numbers::none; }
  bool four() const { return numbers == Numbers::int4 || numbers == Numbers::e2m1 || numbers == Numbers::iq4; }
  bool five() const { return numbers == Numbers::int5; }
  bool of_bytes() const { return numbers == Numbers::bytes || numbers == Numbers::bytes_by_words; }
  bool of_nibbles() const { return numbers == Numbers::nibbles || numbers == Numbers::nibbles_by_words; }
  bool rounds_rows() const { return of_bytes() || of_nibbles(); }
  // Bytes of a number of a rounded row.
  int row_bytes() const { return numbers == Numbers::bytes_by_words || numbers == Numbers::nibbles_by_words ? 2 : 1; }
  bool minimums() const { return zeros == Zeros::minimums; }
  int64_t scale_bytes() const { return scales == Scales::floats ? 128 : scales == Scales::halves ? 64 : 32; }
  int64_t head() const { return scale_bytes() + (zeros == Zeros::middle ? 0 : 32); }
  int64_t upper() const { return scales != Scales::levels ? 0 : minimums() ? 128 : 64; }  // bytes per kSpan k
  int64_t step() const { return four() ? 32 : five() ? 40 : numbers == Numbers::int6 ? 48 : 64; }
  int64_t groups(int64_t inputs) const { return (inputs + group - 1) / group; }
  // Bytes from the start of a block to `k`. `k` begins a group or is the end.
  int64_t offset(int64_t k) const {
    if (rounds_rows()) return (k + 63) / 64 * (of_bytes() ? kBytes64 : kNibbles64);
    return groups(k) * head() + (k + 1) / 2 * step() + (k + kSpan - 1) / kSpan * upper();
  }
  // Bytes to the head of the group at `k`, after an upper level at `k`.
  int64_t head_at(int64_t k) const { return offset(k) + (k % kSpan == 0 ? upper() : 0); }
  // Bytes to the upper level of `k`.
  int64_t upper_at(int64_t k) const { return offset(k / kSpan * kSpan); }

  // The coding of Python's numbers (weft/ops/coding.py).
  static Coding of(int64_t numbers, int64_t scales, int64_t zeros, int64_t group) {
    WEFT_CHECK(numbers >= 1 && numbers <= 11 && scales >= 0 && scales <= 4 && zeros >= 0 && zeros <= 2 && group >= 2 &&
                   group % 2 == 0,
               "no coding of numbers ", numbers, ", scales ", scales, ", zeros ", zeros, ", group ", group);
    const Coding made{Numbers(numbers), Scales(scales), Zeros(zeros), group};
    WEFT_CHECK(made.scales == Scales::levels ? kSpan % made.group == 0 : !made.minimums(), "a coding of two levels");
    WEFT_CHECK(!made.of_nibbles() || made.group == 64, "nibbles have groups of 64");
    WEFT_CHECK(!made.of_bytes() || made.group % 64 == 0, "groups of bytes are multiples of 64");
    WEFT_CHECK(made.row_bytes() == 1 || (kWordRows && made.group <= kWordGroup), "no rows in 16 bits, or large groups");
    WEFT_CHECK(!made.minimums() || made.numbers == Numbers::int4 || made.five(), "minimums are of 4 or 5 bits");
    WEFT_CHECK(made.minimums() || !made.five(), "5 bits have minimums");
    return made;
  }
};

// Rows to multiply; `sums`: sum of each group of x, for codings with minimums (`input_sums`).
template <class X>
struct Rows {
  const X* x;
  int64_t x_stride;
  const float* sums;  // [rows, sums_stride]
  int64_t sums_stride;

  Rows from(int64_t row) const { return {x + row * x_stride, x_stride, sums + row * sums_stride, sums_stride}; }
};

// sums[row, column] of `rows` rows times the block at `w`, float32 [rows, 32]; without bias and the rows' factors.
void coded_sums(const Coding& coding, const uint8_t* w, int64_t inputs, const Rows<bf16>& x, int64_t rows, float* sums);
void coded_sums(const Coding& coding, const uint8_t* w, int64_t inputs, const Rows<float>& x, int64_t rows,
                float* sums);

// Sum of each group of x, float32 [rows, groups], each in one fixed order.
void input_sums(const Coding& coding, int64_t inputs, const bf16* x, int64_t x_stride, int64_t rows, float* sums);
void input_sums(const Coding& coding, int64_t inputs, const float* x, int64_t x_stride, int64_t rows, float* sums);

// Writes the `inputs` numbers of column `column` of the block at `w`, without the row's factor.
void coded_column(const Coding& coding, const uint8_t* w, int64_t inputs, int column, float* to);

// Writes k [begin, end) of the block at `w` in bf16, in the layout of `pack`, for AMX: plain numbers, or scaled and
// rounded numbers. `begin` must be even.
void coded_as_bf16(const Coding& coding, const uint8_t* w, int64_t inputs, int64_t begin, int64_t end, bool scaled,
                   uint8_t* to);

}  // namespace weft
