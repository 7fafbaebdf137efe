// One block of 32 packed columns times some rows: common code of linear layers and experts.
//
// LAYOUT. Blocks of 32 columns (gemm_tile.h), one after another, so a row of x streams the matrix from memory once. In
// a gated matrix a block is 16 gate columns and the 16 up columns of the same outputs:
//
//   plain   block b, column c: row 32 b + c            gated   c < 16: row 16 b + c     c >= 16: row n + 16 b + c - 16
//
// INVARIANCE. The sums of a tile do not depend on its rows (gemm_tile.h). On a CPU with AMX, bf16 sums come from AMX
// tiles (amx.h) on the same layout, also independent of the number of rows (tests check both). If the kernel does not
// permit AMX, ATen's brgemm (oneDNN), with all of K in one call, is the substitute.
#pragma once

#include <bit>
#include <type_traits>
#include <vector>

#include "amx.h"
#include "brgemm.h"
#include "coded.h"
#include "crew.h"
#include "gemm_tile.h"
#include "rounded.h"

namespace weft {

// True if bf16 sums come from AMX, or from ATen's brgemm if the kernel does not permit AMX.
inline bool use_brgemm = WEFT_AMX;

namespace {

constexpr int64_t kChunkBytes = WEFT_AMX ? 1 << 20 : 384 * 1024;  // bytes of x per chunk
constexpr int64_t kBrgemmRows = 32;
constexpr int64_t kMadeDepth = 64;  // k unpacked to bf16 at a time
constexpr int64_t kDeep = 4096;     // products by AMX with more k take kDeepPart at a time, for kDeepRows rows
constexpr int64_t kDeepPart = 2048, kDeepRows = 256, kDeepBlocks = 64;  // the sums of kDeepRows rows take 2 MB
constexpr int64_t kCodedRows = 384;                                     // rows with sums in memory at a time

// Returns a number of rows per part: parts of similar size, at most `most`. A small last part would cost a full read
// (and unpacking) of the weights.
inline int64_t like_parts(int64_t rows, int64_t most) {
  return std::max<int64_t>(1, divide_up(rows, divide_up(std::max<int64_t>(1, rows), most)));
}

// The same for rows of x that stay in the cache. For AMX whole pairs of tiles, so the last part may have few rows.
inline int64_t chunk_of(int64_t rows, int64_t row_bytes) {
  const int64_t part = like_parts(rows, std::max<int64_t>(kRows, kChunkBytes / std::max<int64_t>(1, row_bytes)));
  return WEFT_AMX ? divide_up(part, kBrgemmRows) * kBrgemmRows : part;
}

// Scratch memory of this thread, valid until the next call. Aligned to cache lines: 64-byte loads do not cross lines.
inline uint8_t* memory_of(int64_t bytes) {
  static thread_local std::vector<uint8_t> memory;
  if (memory.size() < size_t(bytes) + 64) memory.resize(size_t(bytes) + 64);
  return memory.data() + (64 - reinterpret_cast<uintptr_t>(memory.data()) % 64) % 64;
}

// --- layout ---------------------------------------------------------------------------------------------------

struct Layout {
  int64_t inputs, rows;  // shape of the weight: [rows, inputs]
  bool gated;

  int64_t outputs() const { return gated ? rows / 2 : rows; }
  int64_t width() const { return gated ? kBlock / 2 : kBlock; }  // outputs per block
  int64_t blocks() const { return divide_up(outputs(), width()); }

  // Row of the weight in column `column` of a block, or -1.
  int64_t row(int64_t block, int column) const {
    const int64_t output = block * width() + column % width();
    if (output >= outputs()) return -1;
    return column < width() ? output : outputs() + output;
  }
};

// --- the product ----------------------------------------------------------------------------------------------

template <class X, class Out = X>
struct Product {
  Layout layout;
  const X* x;
  int64_t rows, x_stride;
  const uint8_t* weights;
  const X* bias;        // [layout.rows] or null
  const float* scales;  // [layout.rows] or null
  Activation activation;
  Out* out;
  int64_t out_stride;
  float limit = 0.0f, alpha = 1.0f;  // of the activation (gemm_tile.h)
  Coding coding = {};                // coding of quantized weights; `scales` are then factors of rows
  const float* x_sums = nullptr;     // [rows, groups] for codings with minimums: `for_rows`
  const bf16* x_tiles = nullptr;     // for AMX, rows from `tiled` on: `for_rows`
  int64_t tiled = 0;
  ByteRows bytes = {};  // for codings that round rows: `for_rows`
  // Rows of bf16 in float32, from row `widened_from` on, with a zero behind an odd number of k: `for_rows`.
  const float* widened = nullptr;
  int64_t widened_from = 0;
};

// Bytes of a block of weights in F's format, or in a coding.
template <class F>
int64_t block_bytes(const Coding& coding, int64_t inputs) {
  return coding ? coding.offset(inputs) : divide_up(inputs, F::depth) * F::bytes;
}

template <class X, class Out>
void prepare(const Product<X, Out>& product, int64_t block, Finish& finish) {
  const Layout& layout = product.layout;
  finish.scaled = product.scales != nullptr;
  finish.biased = product.bias != nullptr;
  finish.activation = product.activation;
  finish.limit = product.limit;
  finish.alpha = product.alpha;
  finish.columns = int(std::min(layout.width(), layout.outputs() - block * layout.width()));
  if (!finish.scaled && !finish.biased) return;
  for (int column = 0; column < kBlock; ++column) {
    const int64_t row = layout.row(block, column);
    finish.scale[column] = finish.scaled && row >= 0 ? product.scales[row] : 1.0f;
    finish.bias[column] = finish.biased && row >= 0 ? widen(product.bias[row]) : 0.0f;
  }
}

// Prefetches per tile of the following block, `next`. The tiles of a block share the prefetches, so memory is read
// during computation. A block with one tile already runs at the speed of memory, and prefetches nothing. `parts`: parts
// of a tile's k, each of which takes its own prefetches.
template <class F>
struct NextBlock {
  NextBlock(const uint8_t* next, int64_t inputs, int64_t tiles, int64_t parts = 1) : at(next) {
    const int64_t steps = divide_up(inputs, F::depth), lines = divide_up(steps * F::bytes, 64);
    if (tiles < 2) at = nullptr;
    if (!at) return;
    every = std::max<int64_t>(1, std::bit_floor(uint64_t(steps * tiles / lines)));
    end = at + steps * F::bytes;
    share = divide_up(divide_up(steps, parts), every) * 64;
  }
  Ahead take(const uint8_t* w) {
    if (!at || at >= end) return {w, 0, INT64_MAX};
    at += share;
    return {at - share, 64, every - 1};
  }

 private:
  const uint8_t *at, *end = nullptr;
  int64_t every = 1, share = 0;
};

// Rows [begin, end) times one block, with portable tiles. `next`: the following block, or null.
template <class F, class Out>
void run_tiles(const Product<typename F::X, Out>& product, const uint8_t* w, const Finish& finish, int64_t begin,
               int64_t end, int64_t column, const uint8_t* next = nullptr) {
  NextBlock<F> ahead(next, product.layout.inputs, divide_up(end - begin, tile_rows<F>));
  for (int64_t row = begin; row < end;) {
    // Tiles of similar size: 32 rows are 11 + 11 + 10, not 14 + 14 + 4
    const int64_t left = end - row, rows = divide_up(left, divide_up(left, tile_rows<F>));
    tiles<F, Out>[rows - 1](product.x + row * product.x_stride, product.x_stride, w, product.layout.inputs, finish,
                            product.out + row * product.out_stride + column, product.out_stride, ahead.take(w));
    row += rows;
  }
}

// For AMX: the scales of a block's groups if scales multiply sums. A null `at` means that scales multiply the numbers
// instead: for groups that tiles of 32 k do not divide and for scales of two levels (both rounded to bf16), and for
// bytes (exact).
struct SumScales {
  const uint8_t* at = nullptr;
  int64_t bytes = 0;    // from one group to the next
  int64_t steps = 0;    // tile steps per group
  bool halves = false;  // float16; float32 otherwise

  static SumScales of(const Coding& coding, const uint8_t* w, int64_t inputs) {
    const bool numbers = coding.scales == Scales::floats || coding.scales == Scales::halves;
    if (!WEFT_AMX || !amx_permitted() || !numbers || (coding.group % 32 != 0 && coding.group < inputs)) return {};
    return {w, coding.offset(coding.group), divide_up(std::min(coding.group, inputs), 32),
            coding.scales == Scales::halves};
  }
};

// Every thread calls this after computing blocks, before other work.
inline void release_sums() {
#if WEFT_AMX
  amx::release();
#endif
  if (use_brgemm) brgemm_release();
}

#if WEFT_AMX

// Rows of x as tiles, [tiles of 16 rows][steps of 32 k][16][32], with zeros for missing rows and k.
inline const bf16* tiles_of_rows(const bf16* x, int64_t x_stride, int64_t rows, int64_t inputs) {
  static thread_local std::vector<__m512i> memory;
  const int64_t steps = divide_up(inputs, amx::kTileDepth), all = divide_up(rows, amx::kTileRows) * amx::kTileRows;
  if (memory.size() < size_t(all * steps)) memory.resize(size_t(all * steps));
  for (int64_t row = 0; row < all; ++row) {
    __m512i* to = memory.data() + row / amx::kTileRows * steps * amx::kTileRows + row % amx::kTileRows;
    const bf16* from = x + row * x_stride;
    for (int64_t step = 0; step < steps; ++step, to += amx::kTileRows, from += amx::kTileDepth) {
      const int64_t left = row < rows ? std::min<int64_t>(amx::kTileDepth, inputs - step * amx::kTileDepth) : 0;
      *to = left == amx::kTileDepth ? _mm512_loadu_si512(from)
                                    : _mm512_maskz_loadu_epi16(__mmask32((uint64_t(1) << left) - 1), from);
    }
  }
  return reinterpret_cast<const bf16*>(memory.data());
}

// Steps of bf16 of a block in memory, with zeros for the missing part of the last 32 k.
class Stored {
 public:
  Stored(const uint8_t* w, int64_t inputs) : w_(w), whole_(inputs / amx::kTileDepth) {
    if (inputs % amx::kTileDepth == 0) return;
    const int64_t bytes = divide_up(inputs % amx::kTileDepth, Bf16::depth) * Bf16::bytes;
    std::memcpy(last_, w + whole_ * kTileBytes, size_t(bytes));
    std::memset(last_ + bytes, 0, sizeof(last_) - size_t(bytes));
  }
  // Address of tile step `step`; steps up to `end` are contiguous.
  const uint8_t* at(int64_t step, int64_t& end) const {
    end = step < whole_ ? whole_ : step + 1;
    return step < whole_ ? w_ + step * kTileBytes : last_;
  }

  static constexpr int64_t kTileBytes = kBlock * amx::kTileDepth * sizeof(bf16);

 private:
  const uint8_t* w_;
  int64_t whole_;
  alignas(64) uint8_t last_[kTileBytes];
};

// The same made from other formats, some k at a time, for tiles that read each step once. Parts are made ahead of their
// use. So they have left the store buffer when the tiles read them, and tiles compute meanwhile.
template <class Make>
class Made {
 public:
  Made(const Make& make, int64_t inputs) : make_(make), inputs_(inputs) {
    for (int64_t part = 0; part < kLead; ++part) prepare(part);
  }
  const uint8_t* at(int64_t step, int64_t& end) const {
    end = std::min(step + kSteps, divide_up(inputs_, amx::kTileDepth));
    prepare(step / kSteps + kLead);
    return parts_[step / kSteps % kParts];
  }

 private:
  static constexpr int64_t kSteps = kMadeDepth / amx::kTileDepth, kLead = 1, kParts = 2;

  void prepare(int64_t part) const {
    const int64_t begin = part * kSteps * amx::kTileDepth, end = std::min(inputs_, begin + kSteps * amx::kTileDepth);
    if (begin >= end) return;
    uint8_t* to = parts_[part % kParts];
    amx::settle();  // the tiles have read the previous content
    make_(begin, end, to);
    const int64_t bytes = divide_up(end - begin, Bf16::depth) * Bf16::bytes;
    std::memset(to + bytes, 0, size_t(divide_up(bytes, Stored::kTileBytes) * Stored::kTileBytes - bytes));
    amx::settle();
  }

  const Make& make_;
  int64_t inputs_;
  alignas(64) mutable uint8_t parts_[kParts][kSteps * Stored::kTileBytes];
};

// total += part * scales of group `group`, for `rows` x 32.
inline void add_scaled(const float* part, const SumScales& scales, int64_t group, int64_t rows, float* total) {
  const uint8_t* at = scales.at + group * scales.bytes;
  const auto scale = [&](int half) {
    return scales.halves ? _mm512_cvtph_ps(load_as<__m256i>(at + 32 * half)) : load_as<vf>(at + 64 * half);
  };
  const vf first = scale(0), second = scale(1);
#pragma GCC unroll 4
  for (int64_t row = 0; row < rows; ++row, part += kBlock, total += kBlock) {
    store(total, fma(load(part), first, load(total)));
    store(total + kLanes, fma(load(part + kLanes), second, load(total + kLanes)));
  }
}

// A part of the k of a product; the sums stay in memory for the following parts.
struct Depth {
  bool first, last;
  float* sums;  // float32 [rows rounded up to 32, 32]
};

// Rows [begin, end) times one block with AMX. Prefetches lines of `next` (`next_bytes`) if there is enough to compute.
// With `depth`, `product` covers only a part of the k.
template <class Out, class Weights>
void run_amx(const Product<bf16, Out>& product, const Weights& weights, const SumScales& scales, const Finish& finish,
             int64_t begin, int64_t end, int64_t column, const uint8_t* next, int64_t next_bytes,
             const Depth* depth = nullptr) {
  constexpr int64_t kPair = kBrgemmRows;
  const int64_t inputs = product.layout.inputs, steps = divide_up(inputs, amx::kTileDepth);
  const bool fresh = !depth || depth->first;
  const int64_t pairs = divide_up(end - begin, kPair);
  const uint8_t* const next_end = next ? next + next_bytes : nullptr;
  const int64_t each = pairs > 1 && next ? divide_up(divide_up(next_bytes, 64), pairs * steps) : 0;
  const bool direct = end - begin <= amx::kTileRows && inputs % amx::kTileDepth == 0;
  const bf16* tiles = product.x_tiles;
  int64_t first = product.tiled;
  if (!direct && !tiles)
    tiles = tiles_of_rows(product.x + begin * product.x_stride, product.x_stride, end - begin, inputs), first = begin;
  amx::configure(direct ? int(end - begin) : amx::kTileRows);
  amx::settle();
  // Sums of a group, of the previous group, and totals: a group's sums are scaled during the next group's products.
  alignas(64) float sums[2][kPair * kBlock], totals[kPair * kBlock];
  for (int64_t row = begin; row < end; row += kPair) {
    const int64_t rows = std::min(kPair, end - row);
    float* const total = depth ? depth->sums + (row - begin) * kBlock : totals;
    const bf16* from = direct ? product.x + row * product.x_stride : tiles + (row - first) * steps * amx::kTileDepth;
    amx::Left left{from, 64, amx::kTileSize * 2, steps * amx::kTileSize * 2};
    if (direct) left.row = product.x_stride * 2, left.deep = 64;
    amx::Right right{nullptr, Bf16::bytes};
    int64_t step = 0, until = 0;
    const auto sum = [&]<int R>(std::integral_constant<int, R>, int64_t last, bool add, float* to)
        __attribute__((always_inline)) {
      add ? amx::take<R, 2>(to, kBlock) : amx::clear<R, 2>();
      while (step < last) {
        if (step == until) right.at = weights.at(step, until);
        for (const int64_t stop = std::min(until, last); step < stop; ++step) {
          for (int64_t i = 0; i < each && next < next_end; ++i, next += 64) __builtin_prefetch(next, 0, 2);
          amx::step<R, 2>(left, right);
          left.at = static_cast<const char*>(left.at) + left.deep;
          right.at = static_cast<const char*>(right.at) + Stored::kTileBytes;
        }
      }
      amx::put<R, 2>(to, kBlock);
    };
    const auto sum_all = [&](auto tiles_of) __attribute__((always_inline)) {
      if (!scales.at) return sum(tiles_of, steps, !fresh, total);
      if (fresh) std::fill(total, total + rows * kBlock, 0.0f);
      int64_t group = 0;
      for (; step < steps; ++group) {
        sum(tiles_of, std::min(steps, step + scales.steps), false, sums[group % 2]);
        if (group > 0) add_scaled(sums[(group - 1) % 2], scales, group - 1, rows, total);
      }
      add_scaled(sums[(group - 1) % 2], scales, group - 1, rows, total);
    };
    if (rows > amx::kTileRows)
      sum_all(std::integral_constant<int, 2>());
    else
      sum_all(std::integral_constant<int, 1>());
    if (depth && !depth->last) continue;
    for (int64_t r = 0; r < rows; ++r)
      finish_row(load(total + r * kBlock), load(total + r * kBlock + kLanes), finish,
                 product.out + (row + r) * product.out_stride + column);
  }
}

#endif

// With AMX, or with brgemm. brgemm needs an even K: a last odd k is a separate call, padded with zeros.
template <class Out>
void run_brgemm(const Product<bf16, Out>& product, const uint8_t* w, const SumScales& scales, const Finish& finish,
                int64_t begin, int64_t end, int64_t column, const uint8_t* next, int64_t next_bytes) {
#if WEFT_AMX
  if (amx_permitted()) {
    const Stored weights(w, product.layout.inputs);
    return run_amx(product, weights, scales, finish, begin, end, column, next, next_bytes);
  }
#endif
  const int64_t inputs = product.layout.inputs, even = inputs / 2 * 2;
  const bf16* weights = reinterpret_cast<const bf16*>(w);
  alignas(64) float sums[kBrgemmRows * kBlock];
  alignas(64) bf16 last[kBrgemmRows * 2];
  for (int64_t row = begin; row < end; row += kBrgemmRows) {
    const int64_t rows = std::min(kBrgemmRows, end - row);
    const bf16* x = product.x + row * product.x_stride;
    if (even > 0) brgemm(rows, kBlock, even, product.x_stride, kBlock, kBlock, false, x, weights, sums);
    if (even < inputs) {
      for (int64_t r = 0; r < rows; ++r) last[2 * r] = x[r * product.x_stride + even], last[2 * r + 1] = bf16(0.0f);
      brgemm(rows, kBlock, 2, 2, kBlock, kBlock, even > 0, last, weights + even * kBlock, sums);
    }
    for (int64_t r = 0; r < rows; ++r)
      finish_row(load(sums + r * kBlock), load(sums + r * kBlock + kLanes), finish,
                 product.out + (row + r) * product.out_stride + column);
  }
}

// True if many rows of bf16 are multiplied as floats, which are made from rows and weights in memory.
constexpr bool kWidens = WEFT_AVX2 || (WEFT_AVX512 && !WEFT_BF16_DOTS);

// Writes `count` numbers in float32, with zeros up to `depth`.
inline void widen_row(const bf16* from, int64_t count, int64_t depth, float* to) {
  int64_t k = 0;
  for (; k + kLanes <= count; k += kLanes) store(to + k, load(from + k));
  for (; k < depth; ++k) to[k] = k < count ? widen(from[k]) : 0.0f;
}

// Rows in float32, as `Product::widened`. Valid until this thread's next call.
inline const float* widened_rows(const bf16* x, int64_t x_stride, int64_t rows, int64_t inputs) {
  static thread_local std::vector<float> memory;
  const int64_t depth = divide_up(inputs, Bf16::depth) * Bf16::depth;
  if (memory.size() < size_t(rows * depth)) memory.resize(size_t(rows * depth));
  for (int64_t row = 0; row < rows; ++row, x += x_stride) widen_row(x, inputs, depth, memory.data() + row * depth);
  return memory.data();
}

// With float32 tiles, on widened weights and rows. Every sum is the same chain as in tiles of F.
template <class F, class Out>
void run_widened(const Product<typename F::X, Out>& product, const uint8_t* w, const Finish& finish, int64_t begin,
                 int64_t end, int64_t column) {
  constexpr bool narrow = std::is_same_v<typename F::X, bf16>;
  const int64_t inputs = product.layout.inputs, steps = divide_up(inputs, F::depth), depth = steps * F::depth;
  float* const weights = reinterpret_cast<float*>(memory_of(kBlock * depth * int64_t(sizeof(float))));
  for (int64_t step = 0; step < steps; ++step) {
    const auto read = F::load(w + step * F::bytes);
    float* to = weights + step * F::depth * kBlock;
    for (int half = 0; half < 2; ++half) {
      if constexpr (narrow) {
        store(to + half * kLanes, recast<vf>(read.w[half] << 16));
        store(to + kBlock + half * kLanes, recast<vf>(read.w[half] & 0xffff0000u));
      } else {
        store(to + half * kLanes, read.w[half]);
      }
    }
  }
  for (int64_t row = begin; row < end;) {
    const int64_t left = end - row, rows = divide_up(left, divide_up(left, kRows));
    const float* x;
    int64_t stride = depth;
    if constexpr (narrow)
      x = product.widened + (row - product.widened_from) * depth;
    else
      x = product.x + row * product.x_stride, stride = product.x_stride;
    const auto* const w = reinterpret_cast<const uint8_t*>(weights);
    tiles<F32, Out>[rows - 1](x, stride, w, depth, finish, product.out + row * product.out_stride + column,
                              product.out_stride, {w, 0, INT64_MAX});
    row += rows;
  }
}

// Unpacking a line takes longer than the hardware prefetcher looks ahead.
inline void ask_ahead(const uint8_t* from, int64_t bytes) {
  for (int64_t line = 0; line < bytes; line += 64) __builtin_prefetch(from + kAhead + line);
}

// Steps of bf16 of k [begin, end), made some at a time, with prefetches of the same distance.
template <class Make>
void make_all(const Make& make, int64_t begin, int64_t end, uint8_t* to) {
  for (int64_t k = begin; k < end; k += kMadeDepth, to += kMadeDepth / Bf16::depth * Bf16::bytes)
    make(k, std::min(end, k + kMadeDepth), to);
}

// Multiplies rows by the bf16 steps that `make(begin, end, to)` writes for k [begin, end), both even except the last
// end. If the rows exceed the tiles, each block is unpacked once per chunk of rows. (Portable tiles unpack numbers on
// the fly, hidden behind the products.)
template <class Out, class Make>
void run_made(const Product<bf16, Out>& product, const Make& make, const SumScales& scales, const Finish& finish,
              int64_t begin, int64_t end, int64_t column, const uint8_t* next, int64_t next_bytes) {
  const int64_t inputs = product.layout.inputs;
#if WEFT_AMX
  if (end - begin <= kBrgemmRows && amx_permitted())
    return run_amx(product, Made<Make>(make, inputs), scales, finish, begin, end, column, next, next_bytes);
#endif
  uint8_t* const whole = memory_of(divide_up(inputs, Bf16::depth) * Bf16::bytes);
  make_all(make, 0, inputs, whole);
  run_brgemm(product, whole, scales, finish, begin, end, column, next, next_bytes);
}

constexpr int64_t kNibbleRows = 6;  // with more rows, AMX multiplies nibbles faster

// True if rows in 8 bits are multiplied with AMX. Few rows with nibbles are not: the numbers would go through memory.
inline bool bytes_by_amx(const Coding& coding, int64_t rows) {
  const bool pays = coding.of_bytes() || rows > kNibbleRows;
  return WEFT_AMX && use_brgemm && amx_permitted() && coding.row_bytes() == 1 && pays;
}

template <class X, class Out>
Rounding rounding_of(const Product<X, Out>& product, int64_t begin, int64_t end) {
  const Coding& coding = product.coding;
  const int64_t rows = end - begin;
  return {begin, rows, product.layout.inputs, coding.group, coding.row_bytes(), bytes_by_amx(coding, rows)};
}

// Returns `product` with data for rows [begin, end) that many blocks need: sums for minimums, tiles for AMX, rows in 8
// or 16 bits or in float32. Valid until this thread's next call.
template <class X, class Out>
Product<X, Out> for_rows(Product<X, Out> product, int64_t begin, int64_t end) {
  if (product.coding.rounds_rows()) {
    if (product.bytes.codes) return product;
    static thread_local std::vector<uint8_t> memory;
    const Rounding rounding = rounding_of(product, begin, end);
    if (memory.size() < size_t(rounding.memory())) memory.resize(size_t(rounding.memory()));
    round_rows(rounding, product.x + begin * product.x_stride, product.x_stride, memory.data());
    product.bytes = rounding.in(memory.data());
    return product;
  }
  if constexpr (kWidens && std::is_same_v<X, bf16>)
    if (!product.coding && end - begin > tile_rows<Bf16>) {
      product.widened =
          widened_rows(product.x + begin * product.x_stride, product.x_stride, end - begin, product.layout.inputs);
      product.widened_from = begin;
      return product;
    }
#if WEFT_AMX
  if constexpr (std::is_same_v<X, bf16>)
    if (use_brgemm && amx_permitted() && (end - begin > amx::kTileRows || product.layout.inputs % amx::kTileDepth)) {
      product.x_tiles =
          tiles_of_rows(product.x + begin * product.x_stride, product.x_stride, end - begin, product.layout.inputs);
      product.tiled = begin;
    }
#endif
  if (!product.coding.minimums() || product.x_sums) return product;
  static thread_local std::vector<float> memory;
  const int64_t groups = product.coding.groups(product.layout.inputs), stride = product.x_stride;
  if (memory.size() < size_t(end * groups)) memory.resize(size_t(end * groups));
  input_sums(product.coding, product.layout.inputs, product.x + begin * stride, stride, end - begin,
             memory.data() + begin * groups);
  product.x_sums = memory.data();
  return product;
}

// Returns the function for `run_made` that makes bf16 steps of a block in another format.
inline auto makes_codes(const Coding& coding, const uint8_t* w, int64_t inputs, bool scaled) {
  const int64_t bytes = coding.offset(inputs);
  return [&coding, w, inputs, scaled, bytes](int64_t first, int64_t last, uint8_t* to) {
    ask_ahead(w + bytes * first / inputs, bytes * (last - first) / inputs);
    coded_as_bf16(coding, w, inputs, first, last, scaled, to);
  };
}
template <class F>
auto makes_steps(const uint8_t* w) {
  return [w](int64_t first, int64_t last, uint8_t* to) {
    const uint8_t* from = w + first / F::depth * F::bytes;
    ask_ahead(from, (last - first) / F::depth * F::bytes);
    for (int64_t step = divide_up(last - first, F::depth); step > 0; --step, from += F::bytes, to += Bf16::bytes) {
      const auto weights = F::load(from);
      std::memcpy(to, &weights, Bf16::bytes);
    }
  };
}

// Rows rounded to 8 or 16 bits times a block.
template <class X, class Out>
void run_bytes(const Product<X, Out>& product, const uint8_t* w, const Finish& finish, int64_t begin, int64_t end,
               int64_t column, const uint8_t* next) {
  const ByteRows& x = product.bytes;
  const bool nibbles = product.coding.of_nibbles();
  Out* out = product.out + begin * product.out_stride + column;
#if WEFT_AMX
  if (x.tiles && nibbles)
    return run_nibble_tiles(x, w, finish, begin, end, out, product.out_stride, next, memory_of(x.depth * kBlock));
  if (x.tiles) return run_byte_tiles(x, w, finish, begin, end, out, product.out_stride, next);
#endif
  if (nibbles) {
    for (int64_t row = begin; row < end;) {
      const int64_t left = end - row, rows = divide_up(left, divide_up(left, kNibbleTile)), at = row - x.first;
      nibble_tiles<Out>[rows - 1](x.codes + x.at(at, 0), x.stride(), x.to_low(), x.steps + at, x.sums + at, x.rows, w,
                                  x.depth / kByteTileDepth, finish, out, product.out_stride);
      row += rows, out += rows * product.out_stride;
    }
    return;
  }
  const int64_t inputs = product.layout.inputs, groups = divide_up(x.depth, x.group);
  NextBlock<ByteSteps> ahead(next, inputs, divide_up(end - begin, kByteTile), groups);
  alignas(64) float totals[kByteTile * kBlock];
  for (int64_t row = begin; row < end;) {
    const int64_t left = end - row, rows = divide_up(left, divide_up(left, kByteTile)), at = row - x.first;
    for (int64_t number = 0, k = 0; number < groups; ++number, k += x.group) {
      const ByteGroup group{number == 0, number + 1 == groups, totals};
      byte_tiles<Out>[rows - 1](x.codes + x.at(at, k), x.stride(), x.to_low(), x.steps + number * x.rows + at,
                                x.sums + number * x.rows + at, w + k / kByteDepth * kByteStep,
                                std::min(x.group, inputs - k), finish, group, out, product.out_stride, ahead.take(w));
    }
    row += rows, out += rows * product.out_stride;
  }
}

template <class X, class Out>
void run_coded(const Product<X, Out>& product, const uint8_t* w, const Finish& finish, int64_t begin, int64_t end,
               int64_t column, const uint8_t* next) {
  const int64_t inputs = product.layout.inputs;
  if (product.coding.rounds_rows()) return run_bytes(product, w, finish, begin, end, column, next);
  if constexpr (kBrgemmBuilt && std::is_same_v<X, bf16>) {
    const SumScales scales = SumScales::of(product.coding, w, inputs);
    if (use_brgemm)
      return run_made(product, makes_codes(product.coding, w, inputs, !scales.at), scales, finish, begin, end, column,
                      next, product.coding.offset(inputs));
  }
  static thread_local std::vector<float> memory;
  memory.resize(size_t(kCodedRows * kBlock));
  const int64_t part = like_parts(end - begin, kCodedRows);
  for (int64_t row = begin; row < end; row += part) {
    const int64_t rows = std::min(part, end - row);
    float* sums = memory.data();
    const int64_t groups = product.x_sums ? product.coding.groups(inputs) : 0;
    const Rows<X> x{product.x, product.x_stride, product.x_sums, groups};
    coded_sums(product.coding, w, inputs, x.from(row), rows, sums);
    for (int64_t r = 0; r < rows; ++r, sums += kBlock)
      finish_row(load(sums), load(sums + kLanes), finish, product.out + (row + r) * product.out_stride + column);
  }
}

template <class F, class Out>
void run_block(const Product<typename F::X, Out>& product, const uint8_t* w, const Finish& finish, int64_t begin,
               int64_t end, int64_t column, const uint8_t* next = nullptr) {
  if (product.coding) return run_coded(product, w, finish, begin, end, column, next);
  if constexpr (kBrgemmBuilt && std::is_same_v<typename F::X, bf16>) {
    if (use_brgemm) {
      const int64_t bytes = divide_up(product.layout.inputs, F::depth) * F::bytes;
      if constexpr (std::is_same_v<F, Bf16>) return run_brgemm(product, w, {}, finish, begin, end, column, next, bytes);
      return run_made(product, makes_steps<F>(w), {}, finish, begin, end, column, next, bytes);
    }
  }
  if constexpr (kWidens && !std::is_same_v<F, F32>)
    if (end - begin > tile_rows<F>) return run_widened<F>(product, w, finish, begin, end, column);
  run_tiles<F>(product, w, finish, begin, end, column, next);
}

#if WEFT_AMX

// Many rows of many k times blocks [block_begin, block_end). Rows and weights of all k would not fit the L2 cache. So
// all blocks process some k of kDeepRows rows, then the next k; sums wait in memory.
template <class F>
void run_deep(const Product<bf16>& product, int64_t row_begin, int64_t row_end, int64_t block_begin,
              int64_t block_end) {
  const Layout& layout = product.layout;
  const Coding& coding = product.coding;
  const int64_t inputs = layout.inputs, bytes = block_bytes<F>(coding, inputs);
  const uint8_t* const first_block = product.weights + block_begin * bytes;
  const bool sum_scales = coding && SumScales::of(coding, first_block, inputs).at;
  const int64_t depth = sum_scales ? std::max<int64_t>(1, kDeepPart / coding.group) * coding.group : kDeepPart;
  const int64_t chunk = divide_up(like_parts(row_end - row_begin, kDeepRows), kBrgemmRows) * kBrgemmRows;
  static thread_local std::vector<float> kept;
  uint8_t* const made = memory_of(divide_up(depth, Bf16::depth) * Bf16::bytes);
  if (kept.size() < size_t((block_end - block_begin) * chunk * kBlock))
    kept.resize(size_t((block_end - block_begin) * chunk * kBlock));
  Finish finish;
  for (int64_t row = row_begin; row < row_end; row += chunk) {
    const int64_t end = std::min(row + chunk, row_end);
    for (int64_t k = 0; k < inputs; k += depth) {
      const int64_t until = std::min(inputs, k + depth);
      Product<bf16> part = product;
      part.layout.inputs = until - k, part.x += k;
      part.x_tiles = tiles_of_rows(product.x + row * product.x_stride + k, product.x_stride, end - row, until - k);
      part.tiled = row;
      for (int64_t block = block_begin; block < block_end; ++block) {
        const uint8_t* const w = product.weights + block * bytes;
        SumScales scales;
        if (sum_scales) scales = SumScales::of(coding, w + coding.offset(k), until - k);
        const Depth of{k == 0, until == inputs, kept.data() + (block - block_begin) * chunk * kBlock};
        if (of.last) prepare(product, block, finish);
        // The same k of the next block.
        const int64_t ahead = coding ? coding.offset(inputs) * k / inputs : k / F::depth * F::bytes;
        const int64_t next_bytes = coding ? bytes * (until - k) / inputs : divide_up(until - k, F::depth) * F::bytes;
        const uint8_t* const next = block + 1 < block_end ? w + bytes + ahead : nullptr;
        const uint8_t* steps = made;
        if (coding)
          make_all(makes_codes(coding, w, inputs, !sum_scales), k, until, made);
        else if constexpr (std::is_same_v<F, Bf16>)
          steps = w + ahead;
        else
          make_all(makes_steps<F>(w), k, until, made);
        run_amx(part, Stored(steps, until - k), scales, finish, row, end, block * layout.width(), next, next_bytes,
                &of);
      }
    }
  }
}

#endif

}  // namespace
}  // namespace weft
