"""Quantized blocks of GGML, as in a GGUF file: a row is a list of blocks of 32 or 256 numbers with scales.

    Q8_0    w = d q                          32 numbers: float16 d, signed bytes
    Q4_0    w = d (q - 8)                    32: float16 d, halves of bytes
    Q4_K    w = d s q - m t                  256: float16 d and m; s and t, 6 bits for each 32; half bytes
    Q6_K    w = d s (q - 32)                 256: 6 bits in two places; s a signed byte for each 16; float16 d

Source: ggml-org/ggml, ggml-common.h and ggml-quants.c. csrc/coded_pack.cpp reads the same blocks.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from weft.ops.coding import Coding

Tensor = torch.Tensor


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
}


def dequantize(kind: str, blocks: Tensor, dtype: torch.dtype) -> Tensor:
    """Return blocks, bytes [..., bytes of a row], as numbers [..., numbers of a row] in a wide ``dtype``."""
    each = blocks.unflatten(-1, (-1, BLOCKS[kind].bytes))
    return _READ[kind](each, dtype).flatten(-2)


def _halves(of: Tensor, begin: int, dtype: torch.dtype) -> Tensor:
    """Return the float16 at byte ``begin`` of each block, [..., blocks, 1]."""
    return of[..., begin : begin + 2].contiguous().view(torch.float16).to(dtype)


def _q8_0(of: Tensor, dtype: torch.dtype) -> Tensor:
    return _halves(of, 0, dtype) * of[..., 2:].contiguous().view(torch.int8).to(dtype)


def _q4_0(of: Tensor, dtype: torch.dtype) -> Tensor:
    codes = of[..., 2:]
    return _halves(of, 0, dtype) * (torch.cat((codes & 15, codes >> 4), dim=-1).to(dtype) - 8)


def _q4_k(of: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the numbers of Q4_K blocks: uint8 [.., bytes of a block] -> [.., 256] in ``dtype``."""
    # 8 scales and 8 minimums of 6 bits in 12 bytes: the low 6 bits of bytes 0-3 and 4-7, then the low and
    # high halves of bytes 8-11, with their upper 2 bits from the top of bytes 0-7.
    packed = of[..., 4:16]
    first = packed[..., :4]
    second = packed[..., 4:8]
    rest = packed[..., 8:]
    scales = torch.cat((first & 63, (rest & 15) | (first >> 6 << 4)), dim=-1)
    minimums = torch.cat((second & 63, (rest >> 4) | (second >> 6 << 4)), dim=-1)
    # [.., 4, 1, 32]: 32 bytes hold 64 codes
    halves = of[..., 16:].unflatten(-1, (4, 1, 32))
    codes = torch.cat((halves & 15, halves >> 4), dim=-2).flatten(-3, -2)  # [.., 8, 32]
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


_READ = {"Q8_0": _q8_0, "Q4_0": _q4_0, "Q4_K": _q4_k, "Q6_K": _q6_k}
