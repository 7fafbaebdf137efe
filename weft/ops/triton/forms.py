"""Tile sizes of attention kernels, by head size and dtype. Imports no Triton."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelForm:
    """Tile sizes and compile options. Equal forms give a query equal bits, whatever the other queries."""

    tile_m: int
    """Lines of a tile: queries times the heads that share a KV head."""
    tile_n: int
    """Keys of a step."""
    warps: int
    stages: int
    """Steps with loads in flight."""
    plain: bool = True
    """True if steps visible to every query use code without a mask, possibly with other rounding."""


def power(number: int) -> int:
    """Return the smallest power of two that is not below ``number``."""
    return 1 << max(number - 1, 0).bit_length()


def narrow(lines: int, dim: int, dtype: torch.dtype) -> KernelForm:
    """Return the form for rows of few queries, which are bound by memory."""
    small, exact = dim <= 128, dtype == torch.float32
    return KernelForm(
        tile_m=max(16, power(lines)),
        tile_n=64 if small and not exact else 32,
        warps=4,
        stages=1 if exact else 3 if small else 2,
    )


def wide(group: int, dim: int, dtype: torch.dtype) -> KernelForm:
    """Return the form for chunks of prompts, which are bound by matrix units.

    ``group``: query heads per KV head.
    """
    if dtype == torch.float32:  # no matrix units for exact float32
        return KernelForm(tile_m=max(32, power(group)), tile_n=32, warps=4, stages=1)
    if dim <= 128:
        return KernelForm(tile_m=128, tile_n=64, warps=8, stages=3)
    return KernelForm(tile_m=max(64, power(group)), tile_n=32, warps=8, stages=2)


def invariant(group: int, dim: int, dtype: torch.dtype) -> KernelForm:
    """Return the form of a model that uses the same operations for prompts and for decode."""
    small, exact = dim <= 128, dtype == torch.float32
    return KernelForm(
        tile_m=max(32 if exact else 64, power(group)),
        tile_n=64 if small and not exact else 32,
        warps=4 if small else 8,
        stages=1 if exact else 2,
        plain=False,
    )


def latent(lines: int, dtype: torch.dtype, fp8: bool = False) -> KernelForm:
    """Return the form of latent attention for rows of few queries. A state is as wide as a latent.

    ``fp8``: the latents are in 8 bits.
    """
    exact = dtype == torch.float32
    # Latents in 8 bits with 32 lines of float16 spill registers.
    few = lines <= 16 or exact or (fp8 and dtype == torch.float16)
    return KernelForm(
        tile_m=16 if few else 32,
        tile_n=16 if exact else 32,
        # 4 warps have too few registers for 32 lines of 512 dims, and for codes that become numbers.
        warps=4 if few and not fp8 else 8,
        stages=1 if exact else 2,
        plain=False,
    )


def sparse(heads: int, dtype: torch.dtype, fp8: bool = False) -> KernelForm:
    """Return the form of sparse attention: lines are heads of one query. One form for all batches.

    ``fp8``: the entries are in 8 bits.
    """
    if fp8:
        # Entries in 8 bits with 32 lines spill registers, most of all if a value has exact elements.
        return latent(16, dtype, fp8)
    if dtype == torch.float32:
        return KernelForm(tile_m=16, tile_n=16, warps=4, stages=1, plain=False)
    if heads <= 16:
        return KernelForm(tile_m=16, tile_n=64, warps=8, stages=2, plain=False)
    # Programs of 64 lines spill registers.
    return KernelForm(tile_m=32, tile_n=32, warps=8, stages=2, plain=False)
