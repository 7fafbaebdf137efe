// AMX tiles in software, for tests on CPUs without AMX (level `amx_emulated`): the intrinsics of amx.h by AVX-512.
//
// A use of a tile without a shape ends the process, as on a CPU with AMX. Sums of bytes are exact. A sum of bf16 adds
// the first product of each pair before the second. A CPU with AMX may round otherwise in the last bit.
//
// Source: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 2, TDPBSSD and TDPBF16PS.
#pragma once

#include "common.h"

#include <cstring>

namespace weft::amx::emulated {

struct Tile {
  alignas(64) uint8_t lines[16][64];
  int rows = 0, bytes = 0;
};
inline thread_local Tile tiles[8];

inline Tile& shaped(int number) {
  if (!tiles[number].rows) __builtin_trap();
  return tiles[number];
}

// `shape`: palette and start in 16 bytes, 16 numbers of bytes per row, 16 numbers of rows.
inline void configure(const void* shape) {
  const uint8_t* at = static_cast<const uint8_t*>(shape);
  for (int number = 0; number < 8; ++number) {
    uint16_t bytes;
    std::memcpy(&bytes, at + 16 + 2 * number, sizeof(bytes));
    tiles[number].bytes = bytes, tiles[number].rows = at[48 + number];
    std::memset(tiles[number].lines, 0, sizeof(tiles[number].lines));
  }
}
inline void release() {
  for (Tile& tile : tiles) tile.rows = tile.bytes = 0;
}
inline void zero(int number) { std::memset(shaped(number).lines, 0, sizeof(Tile::lines)); }
inline void load(int number, const void* from, int64_t stride) {
  Tile& tile = shaped(number);
  std::memset(tile.lines, 0, sizeof(tile.lines));
  for (int row = 0; row < tile.rows; ++row)
    std::memcpy(tile.lines[row], static_cast<const char*>(from) + row * stride, size_t(tile.bytes));
}
inline void store(int number, void* to, int64_t stride) {
  const Tile& tile = shaped(number);
  for (int row = 0; row < tile.rows; ++row)
    std::memcpy(static_cast<char*>(to) + row * stride, tile.lines[row], size_t(tile.bytes));
}

// Adds products of 4 bytes of row `row` of tile `left` (`word`) and a line of tile `right` to a row of sums.
template <class Add>
inline void multiply(int sums, int left, int right, Add add) {
  Tile &to = shaped(sums), &a = shaped(left), &b = shaped(right);
  for (int row = 0; row < to.rows; ++row) {
    __m512i sum = _mm512_load_si512(to.lines[row]);
    for (int at = 0; at < a.bytes / 4; ++at) {
      int32_t word;
      std::memcpy(&word, a.lines[row] + 4 * at, sizeof(word));
      sum = add(sum, _mm512_set1_epi32(word), _mm512_load_si512(b.lines[at]));
    }
    _mm512_store_si512(to.lines[row], sum);
  }
}

// Signed bytes of `left` times unsigned bytes of `right`.
inline void multiply_bytes(int sums, int left, int right) {
  multiply(sums, left, right, [](__m512i sum, __m512i a, __m512i b) { return _mm512_dpbusd_epi32(sum, b, a); });
}

// Signed bytes on both sides.
inline void multiply_signed(int sums, int left, int right) {
  multiply(sums, left, right, [](__m512i sum, __m512i a, __m512i b) {
    const __m512i offset = _mm512_set1_epi8(char(0x80));
    const __m512i more = _mm512_dpbusd_epi32(_mm512_setzero_si512(), offset, a);
    return _mm512_sub_epi32(_mm512_dpbusd_epi32(sum, _mm512_xor_si512(b, offset), a), more);
  });
}

inline void multiply_bf16(int sums, int left, int right) {
  multiply(sums, left, right, [](__m512i sum, __m512i a, __m512i b) {
    const auto first = [](__m512i x) { return _mm512_castsi512_ps(_mm512_slli_epi32(x, 16)); };
    const auto second = [](__m512i x) {
      return _mm512_castsi512_ps(_mm512_and_si512(x, _mm512_set1_epi32(int(0xffff0000u))));
    };
    const __m512 half = _mm512_fmadd_ps(first(a), first(b), _mm512_castsi512_ps(sum));
    return _mm512_castps_si512(_mm512_fmadd_ps(second(a), second(b), half));
  });
}

}  // namespace weft::amx::emulated

#undef _tile_loadconfig
#undef _tile_release
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbf16ps
#undef _tile_dpbsud
#undef _tile_dpbssd
#define _tile_loadconfig(shape) emulated::configure(shape)
#define _tile_release() emulated::release()
#define _tile_zero(tile) emulated::zero(tile)
#define _tile_loadd(tile, from, stride) emulated::load(tile, from, stride)
#define _tile_stored(tile, to, stride) emulated::store(tile, to, stride)
#define _tile_dpbf16ps(sums, left, right) emulated::multiply_bf16(sums, left, right)
#define _tile_dpbsud(sums, left, right) emulated::multiply_bytes(sums, left, right)
#define _tile_dpbssd(sums, left, right) emulated::multiply_signed(sums, left, right)
