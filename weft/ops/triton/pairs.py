"""Numbers of words (``weft.ops.words``) as kernels unpack them: in pairs, by PTX.

``unpacking_of`` writes the PTX of a format. Triton's interpreter runs no PTX, so the same numbers are also
computed without PTX (``_plain``).
"""

from __future__ import annotations

import triton
import triton.language as tl

from weft.ops.words import PIECES, UNITS, Words


def unpacking_of(words: Words) -> str:
    """Return PTX that makes bfloat16 numbers of two words; see ``unpacked`` for the operands.

    Operands are the results, one for each code of a word, as a pair of the two words' numbers; then the two
    words; then the argument of the format, twice: zero points, or the multipliers of each group. Both words
    belong to one output, so only the first of the two arguments is read.
    """
    pieces = PIECES[words.numbers]
    count = 2 * len(pieces)
    lines = [".reg .b32 h, t, c, s;"]
    for j in range(count):
        if j % len(pieces) == 0:
            selector = "0x5410" if j == 0 else "0x7632"
            lines.append(f"prmt.b32 h, ${count}, ${count + 1}, {selector};")
        lines += _CODES[words.numbers](j % len(pieces), f"${j}")
        lines += _numbers(words, j, count)
    return "{\n" + "\n".join(lines) + "\n}"


def _numbers(words: Words, j: int, count: int) -> list[str]:
    """Return PTX that makes numbers of the bits of code ``j``."""
    out = f"${j}"
    if words.numbers == "int8":
        return [f"sub.rn.bf16x2 {out}, {out}, c;"]
    if words.numbers == "int4":
        if words.zeros is None:
            return ["mov.b32 c, 0x43084308;", f"sub.rn.bf16x2 {out}, {out}, c;"]
        quarter = j // 2 // (4 // words.groups) * (4 // words.groups)
        if j % (8 // words.groups) == 0:
            # 128 + the zero point, twice
            made = [f"mov.b32 s, 0x43434343;\nprmt.b32 c, ${count + 2}, s, 0x4{quarter}4{quarter};"]
        else:
            made = []
        return [*made, f"sub.rn.bf16x2 {out}, {out}, c;"]
    if words.way == "merged":
        group = j * words.groups // count
        return [f"mul.rn.bf16x2 {out}, {out}, ${count + 2 + 2 * group};"]
    unit = 127 + UNITS[words.numbers] << 7
    return [f"mov.b32 c, 0x{unit:04x}{unit:04x};", f"mul.rn.bf16x2 {out}, {out}, c;"]


def _int4(j: int, out: str) -> list[str]:
    shift = [f"shr.u32 t, h, {4 * j};"] if j else []
    return [*shift, f"lop3.b32 {out}, {'t' if j else 'h'}, 0x000f000f, 0x43004300, 0xea;"]


def _int8(j: int, out: str) -> list[str]:
    """128 + the lower 7 bits, less 128 or, if the highest bit is 0, 256."""
    shift = [f"shr.u32 t, h, {8 * j};"] if j else ["mov.b32 t, h;"]
    return [
        *shift,
        f"lop3.b32 {out}, t, 0x007f007f, 0x43004300, 0xea;",
        "lop3.b32 c, t, 0x00800080, 0x43804380, 0x6a;",
    ]


def _e2m1(j: int, out: str) -> list[str]:
    if j < 3:
        shift = [f"shl.b32 t, h, {3 * j};"] if j else []
        return [*shift, f"and.b32 {out}, {'t' if j else 'h'}, 0x81c081c0;"]
    return [
        f"shr.u32 t, h, 3;\nand.b32 {out}, t, 0x01800180;",
        f"shr.u32 t, h, 7;\nlop3.b32 {out}, t, 0x00400040, {out}, 0xea;",
        f"shl.b32 t, h, 1;\nlop3.b32 {out}, t, 0x80008000, {out}, 0xea;",
    ]


def _e4m3(j: int, out: str) -> list[str]:
    if j == 0:
        return [f"shl.b32 t, h, 4;\nand.b32 {out}, t, 0x87f087f0;"]
    return [
        "shr.u32 t, h, 8;\nand.b32 t, t, 0x00700070;",
        f"lop3.b32 {out}, h, 0x87808780, t, 0xea;",
    ]


_CODES = {"int4": _int4, "int8": _int8, "e2m1": _e2m1, "e4m3": _e4m3}
"""Number format -> PTX of the bits of code j of a half of a word, from ``h`` (both words' halves)."""


# --- in kernels ---


@triton.jit
def _bits(words, j: tl.constexpr, NUMBERS: tl.constexpr):
    """Return the bits of bfloat16 of E2M1 or E4M3, too small by UNITS, as float32. Without PTX."""
    PER: tl.constexpr = 4 if NUMBERS == "e2m1" else 2
    half = (words >> (16 * (j // PER))) & 0xFFFF
    i: tl.constexpr = j % PER
    if NUMBERS == "e2m1":
        if i < 3:
            made = (half << (3 * i)) & 0x81C0
        else:
            made = ((half >> 3) & 0x180) | ((half >> 7) & 0x40) | ((half << 1) & 0x8000)
    else:
        if i == 0:
            made = (half << 4) & 0x87F0
        else:
            made = (half & 0x8780) | ((half >> 8) & 0x70)
    return (made << 16).to(tl.float32, bitcast=True)


@triton.jit
def _number(words, zeros, j: tl.constexpr, NUMBERS: tl.constexpr, ZEROS: tl.constexpr, TYPE: tl.constexpr):
    """Return the numbers of code ``j`` without PTX, for the interpreter."""
    if NUMBERS == "int4":
        zero = ((zeros >> (8 * (j // 2))) & 255).to(tl.float32) if ZEROS else 8.0
        made = ((words >> (4 * j)) & 15).to(tl.float32) - zero
    elif NUMBERS == "int8":
        made = ((words >> (8 * j)) & 255).to(tl.float32) - 128.0
    elif NUMBERS == "e2m1":
        made = _bits(words, j, NUMBERS) * (2.0**126)
    else:
        made = _bits(words, j, NUMBERS) * (2.0**120)
    return made.to(TYPE)


@triton.jit
def _plain(words, zeros, NUMBERS: tl.constexpr, ZEROS: tl.constexpr, TYPE: tl.constexpr):
    """Return the numbers of all codes without PTX."""
    n0 = _number(words, zeros, 0, NUMBERS, ZEROS, TYPE)
    n1 = _number(words, zeros, 1, NUMBERS, ZEROS, TYPE)
    n2 = _number(words, zeros, 2, NUMBERS, ZEROS, TYPE)
    n3 = _number(words, zeros, 3, NUMBERS, ZEROS, TYPE)
    if NUMBERS == "int4" or NUMBERS == "e2m1":
        n4 = _number(words, zeros, 4, NUMBERS, ZEROS, TYPE)
        n5 = _number(words, zeros, 5, NUMBERS, ZEROS, TYPE)
        n6 = _number(words, zeros, 6, NUMBERS, ZEROS, TYPE)
        n7 = _number(words, zeros, 7, NUMBERS, ZEROS, TYPE)
        made = (n0, n1, n2, n3, n4, n5, n6, n7)
    else:
        made = (n0, n1, n2, n3)  # type: ignore[assignment]
    return made


@triton.jit
def _scaled(words, multiplier, j: tl.constexpr, NUMBERS: tl.constexpr, TYPE: tl.constexpr):
    """Return the numbers of code ``j`` times the multiplier, without PTX."""
    return (_bits(words, j, NUMBERS) * (multiplier << 16).to(tl.float32, bitcast=True)).to(TYPE)


@triton.jit
def _plain_merged(words, each, NUMBERS: tl.constexpr, TYPE: tl.constexpr):
    """Return the numbers of all codes times the multipliers of ``each`` code, without PTX."""
    n0 = _scaled(words, each[0], 0, NUMBERS, TYPE)
    n1 = _scaled(words, each[1], 1, NUMBERS, TYPE)
    n2 = _scaled(words, each[2], 2, NUMBERS, TYPE)
    n3 = _scaled(words, each[3], 3, NUMBERS, TYPE)
    if NUMBERS == "e2m1":
        n4 = _scaled(words, each[4], 4, NUMBERS, TYPE)
        n5 = _scaled(words, each[5], 5, NUMBERS, TYPE)
        n6 = _scaled(words, each[6], 6, NUMBERS, TYPE)
        n7 = _scaled(words, each[7], 7, NUMBERS, TYPE)
        made = (n0, n1, n2, n3, n4, n5, n6, n7)
    else:
        made = (n0, n1, n2, n3)  # type: ignore[assignment]
    return made


@triton.jit
def _multiplier(scales, i: tl.constexpr, SHIFT: tl.constexpr, BASE: tl.constexpr):
    """Return the bits of bfloat16, twice, of byte ``i`` of words of scales."""
    byte = (scales >> (8 * i)) & 255
    return byte * (SHIFT * 0x10001) + BASE * 0x10001


@triton.jit
def line(parts, FIRST: tl.constexpr, COUNT: tl.constexpr, N: tl.constexpr, W: tl.constexpr):
    """Return COUNT parts [N, W] one after the other: [N, COUNT * W]."""
    if COUNT == 1:
        made = parts[FIRST]
    elif COUNT == 2:
        both = tl.join(parts[FIRST], parts[FIRST + 1])
        made = tl.reshape(tl.permute(both, (0, 2, 1)), [N, 2 * W])
    elif COUNT == 4:
        even = tl.join(parts[FIRST], parts[FIRST + 2])
        odd = tl.join(parts[FIRST + 1], parts[FIRST + 3])
        made = tl.reshape(tl.permute(tl.join(even, odd), (0, 2, 3, 1)), [N, 4 * W])
    else:
        even = tl.join(tl.join(parts[0], parts[4]), tl.join(parts[2], parts[6]))
        odd = tl.join(tl.join(parts[1], parts[5]), tl.join(parts[3], parts[7]))
        made = tl.reshape(tl.permute(tl.join(even, odd), (0, 2, 3, 4, 1)), [N, 8 * W])
    return made


@triton.jit
def unpacked(
    words,  # int32 [TILE_N, W]
    zeros_ptrs,  # int32 [TILE_N], with ZEROS
    scales_ptrs,  # int32 [TILE_N], if MERGED
    UNPACK: tl.constexpr,
    NUMBERS: tl.constexpr,
    MERGED: tl.constexpr,
    GROUPS: tl.constexpr,
    ZEROS: tl.constexpr,
    SHIFT: tl.constexpr,
    BASE: tl.constexpr,
    TILE: tl.constexpr,
    TYPE: tl.constexpr,
):
    """Return the numbers of each code of the words: a tuple of [TILE_N, W]."""
    COUNT: tl.constexpr = 8 if NUMBERS == "int4" or NUMBERS == "e2m1" else 4
    if MERGED:
        scales = tl.load(scales_ptrs)[:, None]
        more = tl.load(scales_ptrs + TILE)[:, None] if GROUPS == 8 else scales
        g0 = _multiplier(scales, 0, SHIFT, BASE)
        g1 = _multiplier(scales, 1, SHIFT, BASE)
        g2 = _multiplier(scales, 2, SHIFT, BASE)
        g3 = _multiplier(scales, 3, SHIFT, BASE)
        g4 = _multiplier(more, 0, SHIFT, BASE)
        g5 = _multiplier(more, 1, SHIFT, BASE)
        g6 = _multiplier(more, 2, SHIFT, BASE)
        g7 = _multiplier(more, 3, SHIFT, BASE)
        if UNPACK == "":
            if GROUPS == 8:
                each = (g0, g1, g2, g3, g4, g5, g6, g7)
            elif COUNT == 8:
                each = (g0, g0, g1, g1, g2, g2, g3, g3)
            else:
                each = (g0, g1, g2, g3)  # type: ignore[assignment]
            made = _plain_merged(words, each, NUMBERS, TYPE)
        elif GROUPS == 8:
            made = tl.inline_asm_elementwise(
                asm=UNPACK,
                constraints="=r,=r,=r,=r,=r,=r,=r,=r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r",
                args=[words, g0, g1, g2, g3, g4, g5, g6, g7],
                dtype=(tl.bfloat16,) * 8,
                is_pure=True,
                pack=2,
            )
        elif COUNT == 8:
            made = tl.inline_asm_elementwise(
                asm=UNPACK,
                constraints="=r,=r,=r,=r,=r,=r,=r,=r,r,r,r,r,r,r,r,r,r,r",
                args=[words, g0, g1, g2, g3],
                dtype=(tl.bfloat16,) * 8,
                is_pure=True,
                pack=2,
            )
        else:
            made = tl.inline_asm_elementwise(
                asm=UNPACK,
                constraints="=r,=r,=r,=r,r,r,r,r,r,r,r,r,r,r",
                args=[words, g0, g1, g2, g3],
                dtype=(tl.bfloat16,) * 4,
                is_pure=True,
                pack=2,
            )
    else:
        zeros = words
        if ZEROS:
            zeros = tl.load(zeros_ptrs)[:, None]
        if UNPACK == "":
            made = _plain(words, zeros, NUMBERS, ZEROS, TYPE)
        elif COUNT == 8:
            made = tl.inline_asm_elementwise(
                asm=UNPACK,
                constraints="=r,=r,=r,=r,=r,=r,=r,=r,r,r,r,r",
                args=[words, zeros],
                dtype=(tl.bfloat16,) * 8,
                is_pure=True,
                pack=2,
            )
        else:
            made = tl.inline_asm_elementwise(
                asm=UNPACK,
                constraints="=r,=r,=r,=r,r,r",
                args=[words],
                dtype=(tl.bfloat16,) * 4,
                is_pure=True,
                pack=2,
            )
    return made
