"""Quantized blocks of GGML, as in a GGUF file: a row is a list of blocks of 32 or 256 numbers with scales.

    Q8_0    w = d q                          32 numbers: float16 d, signed bytes
    Q4_0    w = d (q - 8)                    32: float16 d, halves of bytes
    Q4_K    w = d s q - m t                  256: float16 d and m; s and t, 6 bits for each 32; half bytes
    Q6_K    w = d s (q - 32)                 256: 6 bits in two places; s a signed byte for each 16; float16 d
    Q5_K    w = d s q - m t                  256: as Q4_K, with the fifth bits in 32 bytes
    IQ4_XS  w = d (s - 32) number(q)         256: float16 d; s, 6 bits for each 32; half bytes
    IQ4_NL  w = d number(q)                  32: float16 d, halves of bytes
    Q3_K    w = d (s - 32) (q - 4)           256: 3 bits in two places; s, 6 bits for each 16; float16 d
    Q2_K    w = d s q - m t                  256: s and t, halves of bytes for each 16; 2 bits; float16 d, m

Source: ggml-org/ggml, ggml-common.h and ggml-quants.c. csrc/coded_pack.cpp reads the same blocks.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

Tensor = torch.Tensor


class Coding(NamedTuple):
    """Format of packed codes. Fields and numbers are those of ``Coding`` in csrc/coded.h."""

    numbers: int
    """``Numbers`` in csrc/coded.h: format of a code."""
    scales: int
    """``Scales`` in csrc/coded.h: format of a scale."""
    zeros: int
    """``Zeros`` in csrc/coded.h: middle, zero points or minimums."""
    group: int
    """Inputs that share a scale. Even."""


class GgmlBlock(NamedTuple):
    """Layout of a block, and the corresponding format in csrc/coded.h."""

    numbers: int
    bytes: int
    number: int
    """Number of the type in csrc/coded_pack.cpp."""
    coding: Coding


BLOCKS = {
    "Q8_0": GgmlBlock(32, 34, 0, Coding(numbers=2, scales=3, zeros=0, group=32)),
    "Q4_0": GgmlBlock(32, 18, 1, Coding(numbers=1, scales=3, zeros=0, group=32)),
    "Q4_K": GgmlBlock(256, 144, 2, Coding(numbers=1, scales=4, zeros=2, group=32)),
    "Q6_K": GgmlBlock(256, 210, 3, Coding(numbers=5, scales=4, zeros=0, group=16)),
    "Q5_K": GgmlBlock(256, 176, 4, Coding(numbers=8, scales=4, zeros=2, group=32)),
    "IQ4_XS": GgmlBlock(256, 136, 5, Coding(numbers=9, scales=4, zeros=0, group=32)),
    "Q3_K": GgmlBlock(256, 110, 6, Coding(numbers=1, scales=4, zeros=0, group=16)),
    "IQ4_NL": GgmlBlock(32, 18, 7, Coding(numbers=9, scales=3, zeros=0, group=32)),
    "Q2_K": GgmlBlock(256, 84, 8, Coding(numbers=1, scales=4, zeros=2, group=16)),
}
IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""Numbers of the 16 codes of IQ4_NL and IQ4_XS."""


_SCALES = {
    **dict.fromkeys(("Q8_0", "Q4_0", "IQ4_NL", "IQ4_XS"), (0,)),
    **dict.fromkeys(("Q4_K", "Q5_K"), (0, 2)),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q6_K": (208,),
}
"""Places of the float16 scales in a block, in bytes."""


def dequantize(kind: str, blocks: Tensor, dtype: torch.dtype) -> Tensor:
    """Return blocks, bytes [..., bytes of a row], as numbers [..., numbers of a row] in a wide ``dtype``."""
    each = blocks.unflatten(-1, (-1, BLOCKS[kind].bytes))
    return _READ[kind](each, dtype).flatten(-2)


def finite(kind: str, blocks: Tensor) -> bool:
    """Return True if all float16 scales of ``blocks``, bytes [..., bytes of a row], are finite."""
    each = blocks.unflatten(-1, (-1, BLOCKS[kind].bytes))
    return all(bool(_halves(each, at, torch.float32).isfinite().all()) for at in _SCALES[kind])


def _halves(of: Tensor, begin: int, dtype: torch.dtype) -> Tensor:
    """Return the float16 at byte ``begin`` of each block, [..., blocks, 1]."""
    return of[..., begin : begin + 2].contiguous().view(torch.float16).to(dtype)


def _q8_0(of: Tensor, dtype: torch.dtype) -> Tensor:
    return _halves(of, 0, dtype) * of[..., 2:].contiguous().view(torch.int8).to(dtype)


def _q4_0(of: Tensor, dtype: torch.dtype) -> Tensor:
    codes = of[..., 2:]
    return _halves(of, 0, dtype) * (torch.cat((codes & 15, codes >> 4), dim=-1).to(dtype) - 8)


def _six_bits(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Return (scales, minimums), uint8 [.., 8], of the 12 bytes of Q4_K and Q5_K blocks."""
    # 8 scales and 8 minimums of 6 bits in 12 bytes: the low 6 bits of bytes 0-3 and 4-7, then the low and
    # high halves of bytes 8-11, with their upper 2 bits from the top of bytes 0-7.
    first = packed[..., :4]
    second = packed[..., 4:8]
    rest = packed[..., 8:]
    scales = torch.cat((first & 63, (rest & 15) | (first >> 6 << 4)), dim=-1)
    minimums = torch.cat((second & 63, (rest >> 4) | (second >> 6 << 4)), dim=-1)
    return scales, minimums


def _nibbles(of: Tensor) -> Tensor:
    """Return 4-bit codes of 128 bytes, [.., 8, 32]: 32 bytes have 64 codes, first the low halves."""
    halves = of.unflatten(-1, (4, 1, 32))
    return torch.cat((halves & 15, halves >> 4), dim=-2).flatten(-3, -2)


def _q4_k(of: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the numbers of Q4_K blocks: uint8 [.., bytes of a block] -> [.., 256] in ``dtype``."""
    return _with_minimums(of, _nibbles(of[..., 16:]), dtype)


def _q5_k(of: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the numbers of Q5_K blocks: uint8 [.., bytes of a block] -> [.., 256] in ``dtype``."""
    fifth = torch.stack([of[..., 16:48] >> shift & 1 for shift in range(8)], dim=-2)  # [.., 8, 32]
    return _with_minimums(of, _nibbles(of[..., 48:]) | fifth << 4, dtype)


def _with_minimums(of: Tensor, codes: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the numbers [.., 256] of ``codes`` [.., 8, 32]; the scales are in front of the block."""
    scales, minimums = _six_bits(of[..., 4:16])
    made = (_halves(of, 0, dtype) * scales.to(dtype)).unsqueeze(-1) * codes.to(dtype)
    made -= (_halves(of, 2, dtype) * minimums.to(dtype)).unsqueeze(-1)
    return made.flatten(-2)


def _q6_k(of: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the numbers of Q6_K blocks: uint8 [.., bytes of a block] -> [.., 256] in ``dtype``."""
    low = of[..., :128].unflatten(-1, (2, 1, 64))
    low = torch.cat((low & 15, low >> 4), dim=-2).flatten(-2)  # [.., 2, 128]
    high = of[..., 128:192].unflatten(-1, (2, 1, 32))
    high = torch.cat([high >> shift & 3 for shift in (0, 2, 4, 6)], dim=-2).flatten(-2)
    codes = (low | (high << 4)).flatten(-2).unflatten(-1, (16, 16)).to(dtype) - 32
    scales = _halves(of, 208, dtype) * of[..., 192:208].contiguous().view(torch.int8).to(dtype)
    return (scales.unsqueeze(-1) * codes).flatten(-2)


def _iq4_nl(of: Tensor, dtype: torch.dtype) -> Tensor:
    codes = of[..., 2:]
    return _halves(of, 0, dtype) * _iq4(torch.cat((codes & 15, codes >> 4), dim=-1), dtype)


def _iq4_xs(of: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the numbers of IQ4_XS blocks: uint8 [.., bytes of a block] -> [.., 256] in ``dtype``."""
    low = torch.stack((of[..., 4:8] & 15, of[..., 4:8] >> 4), dim=-1).flatten(-2)
    high = torch.stack([of[..., 2:4] >> shift & 3 for shift in (0, 2, 4, 6)], dim=-1).flatten(-2)
    scales = _halves(of, 0, dtype) * ((low | high << 4).to(dtype) - 32)  # [.., 8]
    codes = of[..., 8:].unflatten(-1, (8, 16))
    return (scales.unsqueeze(-1) * _iq4(torch.cat((codes & 15, codes >> 4), dim=-1), dtype)).flatten(-2)


def _iq4(codes: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.tensor(IQ4, dtype=dtype, device=codes.device)[codes.int()]


def _two_bits(of: Tensor) -> Tensor:
    """Return 2-bit codes of 64 bytes, [.., 256]: 32 bytes have 128 codes, first the lowest bits."""
    quarters = of.unflatten(-1, (2, 1, 32))
    return torch.cat([quarters >> shift & 3 for shift in (0, 2, 4, 6)], dim=-2).flatten(-3)


def _q3_k(of: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the numbers of Q3_K blocks: uint8 [.., bytes of a block] -> [.., 256] in ``dtype``."""
    third = torch.cat([of[..., :32] >> shift & 1 for shift in range(8)], dim=-1)
    codes = (_two_bits(of[..., 32:96]) | third << 2).unflatten(-1, (16, 16)).to(dtype) - 4
    # 16 scales of 6 bits: the low halves of 8 bytes, then the high halves; 2 more bits of each in 4 bytes.
    low = torch.cat((of[..., 96:104] & 15, of[..., 96:104] >> 4), dim=-1)
    high = torch.cat([of[..., 104:108] >> shift & 3 for shift in (0, 2, 4, 6)], dim=-1)
    scales = _halves(of, 108, dtype) * ((low | high << 4).to(dtype) - 32)
    return (scales.unsqueeze(-1) * codes).flatten(-2)


def _q2_k(of: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the numbers of Q2_K blocks: uint8 [.., bytes of a block] -> [.., 256] in ``dtype``."""
    codes = _two_bits(of[..., 16:80]).unflatten(-1, (16, 16)).to(dtype)
    made = (_halves(of, 80, dtype) * (of[..., :16] & 15).to(dtype)).unsqueeze(-1) * codes
    made -= (_halves(of, 82, dtype) * (of[..., :16] >> 4).to(dtype)).unsqueeze(-1)
    return made.flatten(-2)


_READ = {
    "Q8_0": _q8_0,
    "Q4_0": _q4_0,
    "Q4_K": _q4_k,
    "Q6_K": _q6_k,
    "Q5_K": _q5_k,
    "IQ4_XS": _iq4_xs,
    "Q3_K": _q3_k,
    "IQ4_NL": _iq4_nl,
    "Q2_K": _q2_k,
}
