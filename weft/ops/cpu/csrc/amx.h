// AMX tiles. One instruction adds to 16 x 16 sums: products of bf16 in float32 for 32 k, or of bytes in 32-bit integers
// for 64 k.
//
//   tiles 0 .. 3   sums: rows x 16, float32           tiles 4, 5   rows of the left operand: rows x 32 k
//   tiles 6, 7     the right operand: 16 pairs of k x 16 columns, in the layout of vdpbf16ps
//
// Compiled if the compiler's target has AMX. Used if the operating system permits this process the registers.
//
// INVARIANCE. A sum is one chain of instructions over k, 32 at a time, in order. The amount that an instruction adds to
// a sum depends on the row and the column of the sum alone. Storing and reloading a sum does not change the sum. So
// neither the number of rows of a tile nor cuts of the chain change a bit. Missing k of the last 32 k are zero.
//
// TRAPS. The tile shape belongs to a thread. After `configure`, call `release` before the thread runs other users of
// AMX (oneDNN, which remembers its own configuration). GCC does not know that tile loads read memory: call `settle`
// between stores and tile loads.
#pragma once

#include "common.h"

#if WEFT_AVX512_BF16 && defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AMX_INT8__)
#define WEFT_AMX 1
#else
#define WEFT_AMX 0
#endif

namespace weft {

// Request the tile registers from the operating system, once per process. Threads and forked processes inherit the
// permission.
bool amx_permitted();

#if WEFT_AMX

namespace amx {

constexpr int kTileRows = 16;
constexpr int kTileDepth = 32;                             // k per tile
constexpr int kTileSize = kTileRows * kTileDepth;          // elements per tile

inline thread_local int configured = 0;  // rows of this thread's tiles 0 .. 5; 0: no shape is configured

inline void configure(int rows) {
  if (configured == rows) return;
  struct alignas(64) {
    uint8_t palette = 1, start = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};
  } shape;
  for (int tile = 0; tile < 8; ++tile) shape.row_bytes[tile] = 64, shape.rows[tile] = uint8_t(tile < 6 ? rows : 16);
  asm volatile("" ::: "memory");
  _tile_loadconfig(&shape);
  configured = rows;
}

inline void release() {
  if (configured) _tile_release(), configured = 0;
}

inline void settle() { asm volatile("" ::: "memory"); }

// Two operands in memory. Left: address of the first tile; bytes between rows of a tile, between tiles 32 k apart, and
// between tiles 16 rows apart. Right: address; bytes between pairs of k (tiles 16 columns apart are 64 bytes apart).
struct Left {
  const void* at;
  int64_t row, deep, down;
};
struct Right {
  const void* at;
  int64_t pair;
};

template <int R, int C>
inline __attribute__((always_inline)) void clear() {
  _tile_zero(0);
  if constexpr (C == 2) _tile_zero(1);
  if constexpr (R == 2) _tile_zero(2);
  if constexpr (R == 2 && C == 2) _tile_zero(3);
}

// Load sums from `from`, or store sums to `to`. Rows are `row` floats apart.
template <int R, int C>
inline __attribute__((always_inline)) void take(const float* from, int64_t row) {
  _tile_loadd(0, from, row * 4);
  if constexpr (C == 2) _tile_loadd(1, from + 16, row * 4);
  if constexpr (R == 2) _tile_loadd(2, from + 16 * row, row * 4);
  if constexpr (R == 2 && C == 2) _tile_loadd(3, from + 16 * row + 16, row * 4);
}
template <int R, int C>
inline __attribute__((always_inline)) void put(float* to, int64_t row) {
  _tile_stored(0, to, row * 4);
  if constexpr (C == 2) _tile_stored(1, to + 16, row * 4);
  if constexpr (R == 2) _tile_stored(2, to + 16 * row, row * 4);
  if constexpr (R == 2 && C == 2) _tile_stored(3, to + 16 * row + 16, row * 4);
}

// Operand types: bf16 (32 k per tile), or bytes (64 k per tile) with a signed left operand, or both operands signed.
enum class Kind { bf16, bytes, signed_bytes };

// Add the next k to R x C tiles of sums. (Instructions take tile numbers as literals, so a macro is needed.)
#define WEFT_AMX_PRODUCTS(multiply)                  \
  multiply(0, 4, 6);                                 \
  if constexpr (C == 2) _tile_loadd(7, b + 64, right.pair); \
  if constexpr (R == 2) multiply(2, 5, 6);           \
  if constexpr (C == 2) multiply(1, 4, 7);           \
  if constexpr (R == 2 && C == 2) multiply(3, 5, 7)

template <int R, int C, Kind kind = Kind::bf16>
inline __attribute__((always_inline)) void step(const Left& left, const Right& right) {
  const char *a = static_cast<const char*>(left.at), *b = static_cast<const char*>(right.at);
  _tile_loadd(4, a, left.row);
  _tile_loadd(6, b, right.pair);
  if constexpr (R == 2) _tile_loadd(5, a + left.down, left.row);
  if constexpr (kind == Kind::bf16) {
    WEFT_AMX_PRODUCTS(_tile_dpbf16ps);
  } else if constexpr (kind == Kind::bytes) {
    WEFT_AMX_PRODUCTS(_tile_dpbsud);
  } else {
    WEFT_AMX_PRODUCTS(_tile_dpbssd);
  }
}

#undef WEFT_AMX_PRODUCTS

}  // namespace amx

#endif

}  // namespace weft
