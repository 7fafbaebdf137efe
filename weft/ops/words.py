"""Layout of packed matrices for products on Hopper GPUs: 32-bit words, each with codes of several inputs.

A matrix is cut into tiles of 64 outputs and steps of 128 inputs. A tile and step is one piece of memory,
and the pieces of a tile follow each other in the order of the inputs. So a program reads one stream.

    4 bits   16 words per output and step: code j of word i is input 16 j + i of the step
    8 bits   32 words per output and step: code j of word i is input 32 j + i of the step

So code j of all words is one operand of a matrix instruction, with neighbouring inputs in neighbouring words.
The bits of floats lie in the word such that few shifts and masks give the bits of bfloat16 (``PIECES``).

Scales are applied in one of three ways:

    row      one scale per output, in ``factors``
    sum      float32 scales multiply the sums of groups of 32, 64 or 128 inputs
    merged   one byte per group of 16 or 32 inputs multiplies the numbers; exact in bfloat16

This module imports no Triton. ``weft.ops.triton.words`` has the kernels.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from weft.ops.coded import Codes, as_bytes, nibbles

Tensor = torch.Tensor

TILE, STEP = 64, 128
"""Outputs of a tile; inputs of a step."""
QUARTERS = 4
"""Zero points of a step: one for each 32 inputs."""
PIECES: dict[str, tuple[tuple[tuple[int, int], ...], ...]] = {
    # For each code of a half of a word: (mask of bits of the code, left shift to their place in the half).
    "int4": tuple(((15, 4 * j),) for j in range(4)),
    "int8": tuple(((255, 8 * j),) for j in range(2)),
    # Shifted left by 0, 3 and 6 bits, sign and magnitude of codes 0 to 2 lie as in bfloat16.
    "e2m1": (((8, 12), (7, 6)), ((8, 9), (7, 3)), ((8, 6), (7, 0)), ((8, 11), (6, 9), (1, 13))),
    # Code 0 is shifted left by 4. Sign and exponent of code 1 lie in place.
    "e4m3": (((128, 4), (127, 0)), ((128, 8), (0x78, 4), (7, 12))),
}


class Merge(NamedTuple):
    """How the byte of a group becomes the bits of a bfloat16: ``byte * shift + base``."""

    shift: int
    base: int


NO_MERGE = Merge(0, 0)
MERGES = {torch.float8_e8m0fnu: Merge(128, 0), torch.float8_e4m3fn: Merge(16, 0x7000)}
"""Exponents as they are, or 5 bits of exponent (from 224 on) and 3 of mantissa."""
UNITS = {"e2m1": 126, "e4m3": 120}
"""The bits of a number, placed as a bfloat16, are too small by 2 to this power."""
PADDING = 1.25
"""Largest growth of a matrix by whole tiles and steps."""
ROUNDED = 1 << 24
"""Numbers that become words at a time."""
SPAN = 120
"""Largest ratio of exponents of a matrix's scales, as a power of two. Products stay above 2^-126."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Words:
    """A quantized matrix [N, K] in words."""

    numbers: str
    """Number format, as in ``Codes``."""
    outputs: int
    inputs: int
    way: str
    """``row``, ``sum`` or ``merged``."""
    groups: int
    """Groups of a step; 1 for ``row``."""
    values: Tensor
    """int32 [tiles, steps, TILE, words]."""
    scales: Tensor
    """sum: float32 [tiles, steps, groups, TILE]. merged: int32 [tiles, steps, groups / 4, TILE], the byte of
    the first group lowest. row: empty."""
    factors: Tensor
    """float32 [tiles * TILE]: factor of each output, with the row's scale."""
    zeros: Tensor | None = None
    """int32 [tiles, steps, TILE]: a byte for each 32 inputs, the first lowest; None: the middle."""
    merge: Merge = NO_MERGE
    order: Tensor | None = None
    """Permutation of inputs, int64 [K], as in ``Codes``."""

    @property
    def four(self) -> bool:
        """True if a code has 4 bits."""
        return self.numbers in ("int4", "e2m1")

    @property
    def steps(self) -> int:
        return self.values.shape[1]

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors())

    def tensors(self) -> list[Tensor]:
        """Return all tensors except ``order``; absent tensors are left out."""
        each = (self.values, self.scales, self.factors, self.zeros)
        return [tensor for tensor in each if tensor is not None]

    def __len__(self) -> int:
        return self.outputs

    def __getitem__(self, rows: Tensor) -> Codes:
        """Return the matrix rows ``rows``, int64 [T], as codes with float32 scales. Does not wait."""
        tile, inside = rows // TILE, rows % TILE
        codes = _natural(self.values[tile, :, inside], self.numbers)[:, : self.inputs]  # [T, K]
        if self.way == "row":
            scales = self.factors[rows].unsqueeze(1)
            return Codes(
                numbers=self.numbers,
                values=nibbles(codes) if self.four else codes,
                inputs=self.inputs,
                group=self.inputs + self.inputs % 2,
                scales=scales,
                order=self.order,
            )
        group = STEP // self.groups
        if self.way == "sum":
            scales = self.scales[tile, :, :, inside].flatten(1)
        else:
            each = _bytes(self.scales[tile, :, :, inside]).flatten(1)  # [T, groups of a row]
            bits = (each * self.merge.shift + self.merge.base).to(torch.int32) << 16
            scales = bits.view(torch.float32) * 2.0 ** -UNITS[self.numbers]
        count = -(-self.inputs // group)
        zeros = None
        if self.zeros is not None:
            quarters = _bytes(self.zeros[tile, :, inside]).flatten(1)  # [T, 4 * steps]
            zeros = quarters[:, :: group // 32][:, :count].to(torch.uint8)
        return Codes(
            numbers=self.numbers,
            values=nibbles(codes) if self.four else codes,
            inputs=self.inputs,
            group=group,
            scales=scales[:, :count].contiguous(),
            zeros=zeros,
            factors=self.factors[rows],
            order=self.order,
        )


def _bytes(words: Tensor) -> Tensor:
    """Return the four bytes of each word, lowest first, int64 [..., 4]."""
    return torch.stack([words >> 8 * i & 255 for i in range(4)], dim=-1).long()


def _natural(words: Tensor, numbers: str) -> Tensor:
    """Return the codes of int32 words [..., steps, words]: uint8 [..., inputs], in order."""
    codes = []
    for half in (0, 16):
        for pieces in PIECES[numbers]:
            # The sign of a word fills the upper bits, so the masks come after the shifts.
            some = [(words >> half + shift) & (mask >> _low(mask)) for mask, shift in _placed(pieces)]
            code = some[0] << _low(pieces[0][0])
            for (mask, _), bits in zip(pieces[1:], some[1:], strict=True):
                code = code | bits << _low(mask)
            codes.append(code.to(torch.uint8))
    return torch.stack(codes, dim=-2).flatten(-3)  # [..., steps, codes of a word, words]


def _low(mask: int) -> int:
    """Return the lowest bit of ``mask``."""
    return (mask & -mask).bit_length() - 1


def _placed(pieces: tuple[tuple[int, int], ...]) -> list[tuple[int, int]]:
    """Return (mask, lowest bit in the half) of each piece."""
    return [(mask, shift + _low(mask)) for mask, shift in pieces]


def _worded(codes: Tensor, numbers: str) -> Tensor:
    """Return the words of codes, uint8 [..., inputs]: int32 [..., steps, words]. See ``_natural``."""
    pieces = PIECES[numbers]
    each = codes.unflatten(-1, (-1, 2 * len(pieces), STEP // (2 * len(pieces)))).unbind(-2)
    words = torch.zeros(each[0].shape, dtype=torch.int32, device=codes.device)
    for j, code in enumerate(each):
        wide = code.to(torch.int32)
        for mask, shift in pieces[j % len(pieces)]:
            words |= (wide & mask) << shift + 16 * (j // len(pieces))
    return words


def words_of(codes: Codes) -> Words | None:
    """Return the matrix in words on the same device; None for formats without words.

    Waits for the device, so this function belongs to loading.
    """
    if codes.values.dim() != 2 or not len(codes):
        return None
    padded = (len(codes) + -len(codes) % TILE) * (codes.inputs + -codes.inputs % STEP)
    if padded > PADDING * len(codes) * codes.inputs:
        return None
    if codes.numbers not in PIECES or (codes.numbers == "int8" and codes.zeros is not None):
        return None
    if codes.group >= codes.inputs:
        if codes.zeros is None:
            return _by_row(codes)
        codes = codes.regrouped(STEP)
    if codes.scales.dtype == torch.float32:
        group = codes.group & -codes.group
        return _by_sums(codes.regrouped(min(group, STEP))) if group >= STEP // QUARTERS else None
    group = min(codes.group & -codes.group, STEP // QUARTERS)
    least = 16 if codes.four else 32
    if codes.numbers not in UNITS or group < least or codes.zeros is not None:
        return None
    return _merged(codes.regrouped(group))


def _made(codes: Codes, way: str, groups: int, scales: Tensor, factors: Tensor | None) -> Words:
    """``scales`` in the shape of ``Words.scales``; ``factors``: float64 [N] of each output, or None."""
    tiles = -(-len(codes) // TILE)
    steps = -(-codes.inputs // STEP)
    width = STEP // (2 * len(PIECES[codes.numbers]))
    device = codes.values.device
    values = torch.empty((tiles, steps, TILE, width), dtype=torch.int32, device=device)
    some = max(1, ROUNDED // (TILE * steps * STEP))
    # A few tiles at a time bound the memory of codes as bytes.
    for first in range(0, tiles, some):
        rows = codes.values[first * TILE : (first + some) * TILE]
        if codes.four:
            rows = torch.stack((rows & 15, rows >> 4), dim=-1).flatten(-2)
        rows = rows[:, : codes.inputs]
        part = values[first : first + some]
        padded = torch.nn.functional.pad(
            rows, (0, steps * STEP - rows.shape[1], 0, len(part) * TILE - len(rows))
        )
        part.copy_(_worded(padded, codes.numbers).unflatten(0, (-1, TILE)).transpose(1, 2))
    whole = torch.ones(tiles * TILE, dtype=torch.float32, device=device)
    if factors is not None:
        whole[: len(codes)] = factors.float()
    return Words(
        numbers=codes.numbers,
        outputs=len(codes),
        inputs=codes.inputs,
        way=way,
        groups=groups,
        values=values,
        scales=scales,
        factors=whole,
        order=codes.order,
    )


def _in_tiles(of_groups: Tensor, groups: int, inputs: int) -> Tensor:
    """Return [tiles, steps, groups, TILE] of values of groups, [N, groups of a row], padded with zeros."""
    steps = -(-inputs // STEP)
    lacking = -len(of_groups) % TILE
    padded = torch.nn.functional.pad(of_groups, (0, steps * groups - of_groups.shape[1], 0, lacking))
    return padded.view(-1, TILE, steps, groups).permute(0, 2, 3, 1).contiguous()


def _by_row(codes: Codes) -> Words:
    factors = codes.scales[:, 0].double()
    if codes.factors is not None:
        factors = factors * codes.factors.double()
    return _made(codes, "row", 1, torch.empty(0, device=factors.device), factors)


def _by_sums(codes: Codes) -> Words:
    groups = STEP // codes.group
    made = _made(codes, "sum", groups, _in_tiles(codes.scales, groups, codes.inputs), codes.factors)
    if codes.zeros is None:
        return made
    quarters = codes.zeros.to(torch.int32).repeat_interleave(QUARTERS // groups, dim=1)
    # [tiles, steps, QUARTERS, TILE]
    return replace(made, zeros=_joined_bytes(_in_tiles(quarters, QUARTERS, codes.inputs)).squeeze(2))


def _joined_bytes(each: Tensor) -> Tensor:
    """Return words of four bytes, int32 [.., G, TILE] -> [.., G / 4, TILE], the first lowest."""
    parts = each.unflatten(2, (-1, 4)).unbind(3)
    words = parts[0]
    for i, part in enumerate(parts[1:], 1):
        words = words | part << 8 * i
    return words.contiguous()


def _merged(codes: Codes) -> Words | None:
    """Return words with scales as bytes that are bits of bfloat16; None if the scales differ too much."""
    merge, unit = MERGES[codes.scales.dtype], UNITS[codes.numbers]
    given = as_bytes(codes.scales).to(torch.int32)
    groups = STEP // codes.group
    if codes.scales.dtype == torch.float8_e8m0fnu:
        largest, least = int(given.max()), int(given.min())
        if largest == 255 or largest - least > SPAN:
            return None
        made = given + (254 - largest)
        power = unit + largest - 254
    else:
        scales = codes.scales.float()
        if not bool(scales.isfinite().all()) or bool((scales < 0).any()):
            return None
        if bool((scales == 0).any()):  # has no byte: the group's numbers become 0 instead
            some = (scales == 0).repeat_interleave(codes.group // 2, dim=1)[:, : codes.values.shape[1]]
            codes = replace(codes, values=codes.values.masked_fill(some, 0))
            scales = scales.masked_fill(scales == 0, 1.0)
        # Exponents of E4M3 are -9 to 8; 13 more fit 5 bits.
        mantissa, exponent = torch.frexp(scales)
        made = (exponent - 1 + 13 << 3) | (mantissa * 16).to(torch.int32) & 7
        power = unit - (merge.base >> 7) + 127 - 13
    factors = torch.full((len(codes),), 2.0**power, dtype=torch.float64, device=given.device)
    if codes.factors is not None:
        factors = factors * codes.factors.double()
    tiles = _joined_bytes(_in_tiles(made, groups, codes.inputs))
    return replace(_made(codes, "merged", groups, tiles, factors), merge=merge)
