// Packing of quantized weights (coded.h): from separate codes and scales, and from GGML blocks; rows of packed tables.
#include "gemm_block.h"
#include "operators.h"
#include "weights.h"

#include <sys/mman.h>
#include <unistd.h>

namespace weft {
namespace {

// True if 8-bit integers without zero points use a byte table, if there is a table, like E4M3.
bool looked_up(const Coding& coding) {
  return coding.numbers == Numbers::e4m3 || (WEFT_BYTE_TABLES && coding.zeros == Zeros::middle);
}

// Place of the 8 bits of (column, k of the pair) in a step.
inline int eight_slot(const Coding& coding, int column, int k) {
  return looked_up(coding) ? int8_slot(column, k) : column / 16 * 32 + k * 16 + column % 16;
}

// Stored byte of an 8-bit integer with lookup.
inline uint8_t eight_byte(const Coding& coding, int code) {
  if (coding.numbers == Numbers::e4m3 || !looked_up(coding)) return uint8_t(code);
  return code == 0 ? kNoInt8 : int8_code(code - 128);
}

struct Published {
  const uint8_t *values, *zeros, *scales;  // zeros: null without zero points
  int64_t line, groups;                    // bytes per row of values, scales per row

  int code(bool four, int64_t row, int64_t k) const {
    if (!four) return values[row * line + k];
    return values[row * line + k / 2] >> (k % 2 * 4) & 15;
  }
};

bool fits(const Tensor& part, Dtype type, int64_t rows, int64_t width) {
  return part.dtype() == type && part.is_contiguous() && part.dim() == 2 && part.size(0) == rows &&
         part.size(1) == width;
}

// The code of 0.
int nothing(const Coding& coding) {
  return coding.numbers == Numbers::int4 ? 8 : coding.numbers == Numbers::int8 ? 128 : 0;
}

// Writes a code to the place of (k, column) in the zeroed steps of its group.
inline void put(const Coding& coding, uint8_t* steps, int column, int64_t k, int code) {
  uint8_t* step = steps + k / 2 * coding.step();
  const int word = 2 * (column % 16) + int(k % 2), half = column / 16;
  if (coding.numbers != Numbers::int6 && !coding.four() && !coding.five()) {
    step[eight_slot(coding, column, int(k % 2))] = eight_byte(coding, code);
    return;
  }
  step[word] = uint8_t(step[word] | (code & 15) << (4 * half));
  if (coding.five()) step[32 + 4 * half + word / 8] = uint8_t(step[32 + 4 * half + word / 8] | code >> 4 << word % 8);
  if (coding.numbers == Numbers::int6)
    step[32 + word % 16] = uint8_t(step[32 + word % 16] | code >> 4 << (word / 16 * 4 + half * 2));
}

void pack_block(const Coding& coding, const Published& from, const Layout& layout, int64_t block, uint8_t* to) {
  const int64_t inputs = layout.inputs, wide = coding.scales == Scales::floats ? 4 : 1;
  for (int64_t group = 0; group < coding.groups(inputs); ++group) {
    const int64_t begin = group * coding.group, end = std::min(inputs, begin + coding.group);
    uint8_t* head = to + coding.offset(begin);
    uint8_t* steps = head + coding.head();
    std::memset(head, 0, size_t(coding.head() + divide_up(end - begin, 2) * coding.step()));
    for (int column = 0; column < kBlock; ++column) {
      const int64_t row = layout.row(block, column);
      int zero = nothing(coding);
      if (row >= 0) std::memcpy(head + column * wide, from.scales + (row * from.groups + group) * wide, size_t(wide));
      const bool points = coding.zeros == Zeros::points;
      if (row >= 0 && points) zero = from.zeros[row * from.groups + group];
      if (points) head[coding.scale_bytes() + column] = uint8_t(zero);
      for (int64_t k = begin; k < begin + divide_up(end - begin, 2) * 2; ++k)
        put(coding, steps, column, k - begin, row >= 0 && k < end ? from.code(coding.four(), row, k) : zero);
    }
  }
}

}  // namespace

// values: bytes [rows, inputs], or [rows, inputs / 2 rounded up] of 4 bits, the first of a pair in the low half; scales
// [rows, groups], float32 or bytes; zeros: bytes [rows, groups] -> bytes [blocks, bytes of a block]
Tensor pack_coded(const Tensor& values, const Tensor& scales, const std::optional<Tensor>& zeros, int64_t inputs,
                  bool gated, const Coding& coding) {
  WEFT_CHECK(bool(coding) && (coding.zeros == Zeros::points) == zeros.has_value() && coding.numbers != Numbers::int6 &&
                 !coding.five() && coding.numbers != Numbers::iq4 && !coding.rounds_rows() &&
                 coding.scales != Scales::halves && coding.scales != Scales::levels,
             "pack_coded: numbers, scales and zero points as the coding says");
  WEFT_CHECK(values.dtype() == Dtype::u8 && values.dim() == 2 && values.is_contiguous(), "pack_coded: values");
  const int64_t rows = values.size(0), groups = coding.groups(inputs);
  WEFT_CHECK(!gated || rows % 2 == 0, "a gated weight must have an even number of rows");
  WEFT_CHECK(values.size(1) == (coding.four() ? divide_up(inputs, 2) : inputs), "pack_coded: values");
  WEFT_CHECK(fits(scales, coding.scales == Scales::floats ? Dtype::f32 : Dtype::u8, rows, groups),
             "pack_coded: scales");
  WEFT_CHECK(!zeros || fits(*zeros, Dtype::u8, rows, groups), "pack_coded: zeros");
  const Layout layout{inputs, rows, gated};
  const int64_t block_bytes = coding.offset(inputs);
  Tensor packed = empty_weights({layout.blocks(), block_bytes}, values.dtype());
  const Published from{values.const_data_ptr<uint8_t>(), zeros ? zeros->const_data_ptr<uint8_t>() : nullptr,
                       static_cast<const uint8_t*>(scales.const_data_ptr()), values.size(1), groups};
  uint8_t* to = packed.mutable_data_ptr<uint8_t>();
  parallel_for(layout.blocks(), 1, [&](int64_t begin, int64_t end) {
    for (int64_t block = begin; block < end; ++block) pack_block(coding, from, layout, block, to + block * block_bytes);
  });
  return packed;
}

// values: int8 [rows, inputs], -127 to 127 -> bytes [blocks, bytes of a block], for rows in 8 or 16 bits (rounded.h).
// group: k of a row with a common step; may exceed the row
Tensor pack_bytes(const Tensor& values, bool gated, int64_t group) {
  WEFT_CHECK(values.dtype() == Dtype::i8 && values.dim() == 2 && values.is_contiguous(), "pack_bytes: values");
  WEFT_CHECK(!gated || values.size(0) % 2 == 0, "a gated weight must have an even number of rows");
  WEFT_CHECK(std::min(group, values.size(1)) <= kByteInputs, "rows of more than ", kByteInputs,
             " inputs have no common step of rounding");
  const Layout layout{values.size(1), values.size(0), gated};
  const int64_t block_bytes = Coding{Numbers::bytes}.offset(layout.inputs);
  Tensor packed = empty_weights({layout.blocks(), block_bytes}, Dtype::u8);
  const int8_t* from = values.const_data_ptr<int8_t>();
  uint8_t* made = packed.mutable_data_ptr<uint8_t>();
  parallel_for(layout.blocks(), 1, [&](int64_t begin, int64_t end) {
    for (int64_t block = begin; block < end; ++block) {
      uint8_t* to = made + block * block_bytes;
      std::memset(to, 128, size_t(block_bytes));
      for (int column = 0; column < kBlock; ++column) {
        const int64_t row = layout.row(block, column);
        for (int64_t k = 0; row >= 0 && k < layout.inputs; ++k)
          to[(k / kByteDepth * kBlock + column) * kByteDepth + k % kByteDepth] =
              uint8_t(from[row * layout.inputs + k] + 128);
      }
    }
  });
  return packed;
}

// values: bytes [rows, inputs / 2 rounded up], the first of a pair in the low half; scales float32 and zeros bytes
// [rows, groups of 64] -> bytes [blocks, bytes of a block], for rows in 8 or 16 bits (rounded.h)
Tensor pack_nibbles(const Tensor& values, const Tensor& scales, const Tensor& zeros, int64_t inputs, bool gated) {
  const int64_t rows = values.size(0), groups = divide_up(inputs, kByteTileDepth);
  WEFT_CHECK(fits(values, Dtype::u8, rows, divide_up(inputs, 2)) && fits(scales, Dtype::f32, rows, groups) &&
                 fits(zeros, Dtype::u8, rows, groups),
             "pack_nibbles: values, scales and zeros");
  WEFT_CHECK(!gated || rows % 2 == 0, "a gated weight must have an even number of rows");
  const Layout layout{inputs, rows, gated};
  const int64_t block_bytes = Coding{Numbers::nibbles}.offset(inputs), line = values.size(1);
  Tensor packed = empty_weights({layout.blocks(), block_bytes}, values.dtype());
  const uint8_t *from = values.const_data_ptr<uint8_t>(), *zero = zeros.const_data_ptr<uint8_t>();
  const float* scale = scales.const_data_ptr<float>();
  uint8_t* made = packed.mutable_data_ptr<uint8_t>();
  parallel_for(layout.blocks(), 1, [&](int64_t begin, int64_t end) {
    for (int64_t block = begin; block < end; ++block) {
      uint8_t* to = made + block * block_bytes;
      std::memset(to, 0, size_t(block_bytes));
      for (int column = 0; column < kBlock; ++column) {
        const int64_t row = layout.row(block, column);
        for (int64_t k = 0; row >= 0 && k < inputs; ++k) {
          const int64_t group = k / kByteTileDepth, within = k % kByteTileDepth;
          uint8_t* head = to + group * kNibbleGroup;
          std::memcpy(head + 4 * column, scale + row * groups + group, 4);
          head[4 * kBlock + column] = zero[row * groups + group];
          const int code = from[row * line + k / 2] >> (k % 2 * 4) & 15;
          uint8_t& byte =
              head[kNibbleHead + (within / kByteDepth * kLanes + column % kLanes) * kByteDepth + within % kByteDepth];
          byte = uint8_t(byte | code << (column / kLanes * 4));
        }
      }
    }
  });
  return packed;
}

// Uninitialized bytes for packed weights.
Tensor weight_bytes(Sizes sizes) { return empty_weights(sizes, Dtype::u8); }

namespace {

// --- GGML's blocks --------------------------------------------------------------------------------------------
//
// A row is blocks of 32 or 256 numbers, each with its scales (float16 d, and minimums m):
//
//   Q8_0   d, 32 signed bytes                                                                    34 bytes of 32
//   Q4_0   d, 16 bytes: number i in the low half of byte i, 16 + i in the high one; 8 is 0       18 bytes of 32
//   Q4_K   d, m, 12 bytes of 6-bit scales and minimums for each 32, 128 bytes of halves          144 bytes of 256
//   Q6_K   the low four bits, 128 bytes; the high two, 64; signed scales for each 16, 16; d      210 bytes of 256
//   Q5_K   the 16 bytes that begin a Q4_K block, 32 bytes of fifth bits, 128 bytes of halves     176 bytes of 256
//   IQ4_XS d, the high 2 bits of scales for each 32, the low 4 bits, 128 bytes of halves         136 bytes of 256
//   IQ4_NL the form of Q4_0 with the numbers of IQ4_XS                                           18 bytes of 32
//   Q3_K   the third bits, 32 bytes; the low two, 64; 6-bit scales for each 16, 12; d            110 bytes of 256
//   Q2_K   a scale and a minimum in a byte for each 16, 16 bytes; 64 bytes of 2 bits; d, m       84 bytes of 256
//
// Source: ggml-org/ggml, ggml-common.h and ggml-quants.c.

enum class Kind : int64_t { q8_0, q4_0, q4_k, q6_k, q5_k, iq4_xs, q3_k, iq4_nl, q2_k };
constexpr int64_t kNumbers[] = {32, 32, 256, 256, 256, 256, 256, 32, 256};
constexpr int64_t kBytes[] = {34, 18, 144, 210, 176, 136, 110, 18, 84};

int64_t numbers_of(Kind kind) { return kNumbers[int64_t(kind)]; }
int64_t bytes_of(Kind kind) { return kBytes[int64_t(kind)]; }

constexpr int64_t kDropBytes = 1 << 20;  // bytes of a mapped file to drop at a time

Coding coding_of(Kind kind) {
  switch (kind) {
    case Kind::q8_0:
      return {Numbers::int8, Scales::halves, Zeros::middle, 32};
    case Kind::q4_0:
      return {Numbers::int4, Scales::halves, Zeros::middle, 32};
    case Kind::q4_k:
      return {Numbers::int4, Scales::levels, Zeros::minimums, 32};
    case Kind::q5_k:
      return {Numbers::int5, Scales::levels, Zeros::minimums, 32};
    case Kind::iq4_xs:
      return {Numbers::iq4, Scales::levels, Zeros::middle, 32};
    case Kind::iq4_nl:
      return {Numbers::iq4, Scales::halves, Zeros::middle, 32};
    case Kind::q3_k:  // 3 bits as 4 bits with another middle
      return {Numbers::int4, Scales::levels, Zeros::middle, 16};
    case Kind::q2_k:  // 2 bits as 4 bits
      return {Numbers::int4, Scales::levels, Zeros::minimums, 16};
    default:
      return {Numbers::int6, Scales::levels, Zeros::middle, 16};
  }
}

// Scale and minimum of 32 numbers of a Q4_K or Q5_K block; `at`: the 12 bytes of the block.
std::array<uint8_t, 2> six_bits(const uint8_t* at, int64_t group) {
  if (group < 4) return {uint8_t(at[group] & 63), uint8_t(at[group + 4] & 63)};
  return {uint8_t((at[group + 4] & 15) | at[group - 4] >> 6 << 4), uint8_t(at[group + 4] >> 4 | at[group] >> 6 << 4)};
}

// Return the code of number i of a block.
int ggml_code(Kind kind, const uint8_t* block, int64_t i) {
  switch (kind) {
    case Kind::q8_0:
      return int(int8_t(block[2 + i])) + 128;
    case Kind::q4_0:
    case Kind::iq4_nl:
      return block[2 + i % 16] >> (i / 16 * 4) & 15;
    case Kind::q4_k:  // 64 numbers in 32 bytes
      return block[16 + i / 64 * 32 + i % 32] >> (i / 32 % 2 * 4) & 15;
    case Kind::q5_k:
      return (block[48 + i / 64 * 32 + i % 32] >> (i / 32 % 2 * 4) & 15) | (block[16 + i % 32] >> i / 32 & 1) << 4;
    case Kind::iq4_xs:
      return block[8 + i / 32 * 16 + i % 16] >> (i / 16 % 2 * 4) & 15;
    case Kind::q3_k:  // numbers -4 to 3; the middle of 4 bits is 8
      return 4 + ((block[32 + i / 128 * 32 + i % 32] >> (i / 32 % 4 * 2) & 3) | (block[i % 32] >> i / 32 & 1) << 2);
    case Kind::q2_k:
      return block[16 + i / 128 * 32 + i % 32] >> (i / 32 % 4 * 2) & 3;
    default: {  // 128 numbers in 64 bytes, and in 32 of high bits
      const int64_t part = i / 128, in = i % 128;
      return (block[part * 64 + in % 64] >> (in / 64 * 4) & 15) |
             (block[128 + part * 32 + in % 32] >> (in / 32 * 2) & 3) << 4;
    }
  }
}

// Writes the scale (and minimum) of the group at number `within` of a block with scales in two levels, and the block's
// float16.
void pack_levels(Kind kind, const uint8_t* block, int64_t within, int column, uint8_t* head, uint8_t* upper) {
  const int64_t sixteen = within / 16, group = within / 32;
  int64_t factor = 0;  // bytes to d; m follows
  int scale = 0, minimum = 0;
  switch (kind) {
    case Kind::q4_k:
    case Kind::q5_k:
      scale = six_bits(block + 4, group)[0], minimum = six_bits(block + 4, group)[1];
      break;
    case Kind::q2_k:
      scale = block[sixteen] & 15, minimum = block[sixteen] >> 4, factor = 80;
      break;
    case Kind::q3_k:
      scale = (block[96 + sixteen % 8] >> (sixteen / 8 * 4) & 15) - 32;
      scale += (block[104 + sixteen % 4] >> (sixteen / 4 * 2) & 3) << 4;
      factor = 108;
      break;
    case Kind::iq4_xs:
      scale = (block[4 + group / 2] >> (group % 2 * 4) & 15) - 32;
      scale += (block[2 + group / 4] >> (group % 4 * 2) & 3) << 4;
      break;
    default:
      scale = block[192 + sixteen], factor = 208;
  }
  head[column] = uint8_t(scale);
  if (coding_of(kind).minimums()) head[32 + column] = uint8_t(minimum);
  std::memcpy(upper + 2 * column, block + factor, 2);
  if (coding_of(kind).minimums()) std::memcpy(upper + 64 + 2 * column, block + factor + 2, 2);
}

// Writes one column of a zeroed packed block at `to`; row: the row's GGML blocks.
void pack_ggml_column(Kind kind, const uint8_t* row, int64_t inputs, int column, uint8_t* to) {
  const Coding coding = coding_of(kind);
  const int64_t each = numbers_of(kind), size = bytes_of(kind);
  for (int64_t k = 0; k < inputs; k += coding.group) {
    const uint8_t* block = row + k / each * size;
    const int64_t within = k % each;
    uint8_t *head = to + coding.head_at(k), *upper = to + coding.upper_at(k);
    if (coding.scales == Scales::halves)
      std::memcpy(head + 2 * column, block, 2);
    else
      pack_levels(kind, block, within, column, head, upper);
    for (int64_t i = 0; i < coding.group; ++i)
      put(coding, head + coding.head(), column, i, ggml_code(kind, block, within + i));
  }
}

// Releases whole pages of a mapped, unmodified file from this process; later reads load the pages again.
void drop_pages(const uint8_t* begin, const uint8_t* end) {
  const uintptr_t page = uintptr_t(sysconf(_SC_PAGESIZE)), first = (uintptr_t(begin) + page - 1) / page * page;
  const uintptr_t last = uintptr_t(end) / page * page;
  if (first < last) madvise(reinterpret_cast<void*>(first), last - first, MADV_DONTNEED);
}

}  // namespace

// blocks: bytes [rows, bytes of a row] of `kind` (Kind) -> bytes [blocks, bytes of a block]. mapped: `blocks` are a
// private mapping of an unmodified file; pages are dropped after reading.
Tensor pack_ggml(const Tensor& blocks, int64_t inputs, bool gated, int64_t given, bool mapped) {
  WEFT_CHECK(given >= 0 && given <= 8, "pack_ggml: kind");
  const Kind kind = Kind(given);
  const Coding coding = coding_of(kind);
  WEFT_CHECK(blocks.dtype() == Dtype::u8 && blocks.dim() == 2 && (blocks.size(0) == 0 || blocks.stride(1) == 1) &&
                 inputs % numbers_of(kind) == 0 && blocks.size(1) == inputs / numbers_of(kind) * bytes_of(kind),
             "pack_ggml: blocks");
  WEFT_CHECK(!gated || blocks.size(0) % 2 == 0, "a gated weight must have an even number of rows");
  const Layout layout{inputs, blocks.size(0), gated};
  const int64_t block_bytes = coding.offset(inputs), line = blocks.stride(0);
  Tensor packed = empty_weights({layout.blocks(), block_bytes}, blocks.dtype());
  const uint8_t* from = blocks.const_data_ptr<uint8_t>();
  uint8_t* made = packed.mutable_data_ptr<uint8_t>();
  parallel_for(layout.blocks(), 1, [&](int64_t begin, int64_t end) {
    int64_t dropped = begin * kBlock;  // rows up to here are dropped
    for (int64_t block = begin; block < end; ++block) {
      uint8_t* to = made + block * block_bytes;
      std::memset(to, 0, size_t(block_bytes));
      for (int column = 0; column < kBlock; ++column) {
        const int64_t row = layout.row(block, column);
        if (row >= 0) pack_ggml_column(kind, from + row * line, inputs, column, to);
      }
      const int64_t read = std::min((block + 1) * kBlock, layout.rows);
      if (mapped && !gated && ((read - dropped) * line > kDropBytes || block + 1 == end)) {
        drop_pages(from + dropped * line, from + (read - 1) * line + blocks.size(1));
        dropped = read;
      }
    }
  });
  return packed;
}

// --- rows of a table ------------------------------------------------------------------------------------------

// ids int64 [T] -> [T, inputs] of a packed matrix of `rows` rows; factors: float32 [rows] or none.
Tensor embedding_coded(const Tensor& ids, const Tensor& packed, int64_t rows, int64_t inputs,
                       const std::optional<Tensor>& factors, const Coding& coding, Dtype type) {
  WEFT_CHECK(ids.dtype() == Dtype::i64 && ids.dim() == 1, "ids must be int64 [T]");
  WEFT_CHECK(type == Dtype::bf16 || type == Dtype::f32, "rows are bfloat16 or float32");
  WEFT_CHECK(coding && !coding.of_nibbles() && packed.dtype() == Dtype::u8 && packed.is_contiguous() &&
                 packed.dim() == 2 && packed.size(0) == divide_up(rows, kBlock) &&
                 packed.size(1) == coding.offset(inputs),
             "the packed table is of another shape");
  WEFT_CHECK(!factors || (factors->dtype() == Dtype::f32 && factors->numel() == rows), "factors");
  const Tensor list = ids.contiguous();
  const int64_t* wanted = list.const_data_ptr<int64_t>();
  for (int64_t token = 0; token < ids.size(0); ++token)
    WEFT_CHECK_INDEX(wanted[token] >= 0 && wanted[token] < rows, "id ", wanted[token], " is not in a table of ", rows);
  Tensor out = empty_tensor({ids.size(0), inputs}, type);
  const uint8_t* from = packed.const_data_ptr<uint8_t>();
  const auto fill = [&]<class X>(X* to) {
    spread(ids.size(0), 4, [&](int64_t begin, int64_t end) {
      std::vector<float> row(static_cast<size_t>(inputs));
      for (int64_t token = begin; token < end; ++token) {
        const int64_t id = wanted[token];
        coded_column(coding, from + id / kBlock * packed.size(1), inputs, int(id % kBlock), row.data());
        const float factor = factors ? factors->const_data_ptr<float>()[id] : 1.0f;
        for (int64_t i = 0; i < inputs; ++i) narrow(row[size_t(i)] * factor, to + token * inputs + i);
      }
    });
  };
  if (type == Dtype::bf16)
    fill(out.mutable_data_ptr<bf16>());
  else
    fill(out.mutable_data_ptr<float>());
  return out;
}

}  // namespace weft
