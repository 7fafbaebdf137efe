// AMX tiles: products of bf16 in float32, 16 x 16 sums per instruction for 32 k; of bytes in 32-bit integers, for 64 k.
//
//   tiles 0 .. 3   sums: rows x 16, float32           tiles 4, 5   rows of the left operand: rows x 32 k
//   tiles 6, 7     the right operand: 16 pairs of k x 16 columns, in the order of vdpbf16ps
//
// Compiled if the compiler's target has AMX, and used if the kernel permits the registers to this process.
//
// INVARIANCE. A sum is one chain of instructions over k, 32 at a time, in order. The addend of an instruction depends
// on the row and the column alone, and storing and loading a sum does not change the number. So neither the number of a
// tile's rows nor the cuts of the chain change a bit. The missing part of the last 32 k is zero.
//
// TRAPS. The shape of the registers belongs to a thread: after `configure`, call `release` before the thread may reach
// other users of AMX (oneDNN, which remembers its own configuration). GCC's tile loads do not declare their reads of
// memory: call `settle` after stores for tiles.
#pragma once

#include "common.h"

#if WEFT_AVX512_BF16 && defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AMX_INT8__)
#define WEFT_AMX 1
#else
#define WEFT_AMX 0
#endif

#if WEFT_AMX && defined(WEFT_EMULATED_AMX)
#include "amx_emulated.h"
#endif

namespace weft {

// Asks the kernel for the tile registers, once per process. Threads and forked processes inherit the permission.
bool amx_permitted();

#if WEFT_AMX

namespace amx {

constexpr int kTileRows = 16;
constexpr int kTileDepth = 32;                     // k per tile
constexpr int kTileSize = kTileRows * kTileDepth;  // elements per tile

inline thread_local int configured = 0;  // rows of this thread's tiles 0 .. 5; 0: no shape

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

// Two operands in memory. Left: address of the first tile, bytes between rows of a tile, between tiles 32 k apart, and
// between tiles 16 rows apart. Right: bytes between pairs of k (tiles 16 columns apart are 64 bytes apart).
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

// Loads sums from `from`, or stores sums to `to`, with rows `row` floats apart.
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

// Types of operands: bf16, 32 k per tile, or 64 k of bytes: the left operand signed, or both.
enum class Kind { bf16, bytes, signed_bytes };

// The next k of R x C tiles of sums. (Instructions take tiles as literals, and so are compiler macros.)
#define WEFT_AMX_PRODUCTS(multiply)                         \
  multiply(0, 4, 6);                                        \
  if constexpr (C == 2) _tile_loadd(7, b + 64, right.pair); \
  if constexpr (R == 2) multiply(2, 5, 6);                  \
  if constexpr (C == 2) multiply(1, 4, 7);                  \
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
