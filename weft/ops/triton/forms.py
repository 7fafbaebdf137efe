"""How attention launches are cut into tiles, by head size and dtype. No Triton here."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelForm:
    """Sizes of a tile, and how it is compiled. Equal forms give a query equal bits, whatever is beside it."""

    tile_m: int
    """Lines: queries times the heads that share a KV head."""
    tile_n: int
    """Keys of a step."""
    warps: int
    stages: int
    """Steps whose loads are in flight."""
    plain: bool = True
    """Whether steps that every query sees leave out the mask (other code, so perhaps other rounding)."""


def power(number: int) -> int:
    """The smallest power of two that is not below ``number``."""
    return 1 << max(number - 1, 0).bit_length()


def narrow(lines: int, dim: int, dtype: torch.dtype) -> KernelForm:
    """For rows of few queries, where memory is what is waited for."""
    small, exact = dim <= 128, dtype == torch.float32
    return KernelForm(
        tile_m=max(16, power(lines)),
        tile_n=64 if small and not exact else 32,
        warps=4,
        stages=1 if exact else 3 if small else 2,
    )


def wide(group: int, dim: int, dtype: torch.dtype) -> KernelForm:
    """For chunks of prompts, where the matrix units are. ``group``: query heads of a KV head."""
    if dtype == torch.float32:  # no matrix units for exact float32
        return KernelForm(tile_m=max(32, power(group)), tile_n=32, warps=4, stages=1)
    if dim <= 128:
        return KernelForm(tile_m=128, tile_n=64, warps=8, stages=3)
    return KernelForm(tile_m=max(64, power(group)), tile_n=32, warps=8, stages=2)


def invariant(group: int, dim: int, dtype: torch.dtype) -> KernelForm:
    """The one form of a model that computes prompts and decodes with the same operations."""
    small, exact = dim <= 128, dtype == torch.float32
    return KernelForm(
        tile_m=max(32 if exact else 64, power(group)),
        tile_n=64 if small and not exact else 32,
        warps=4 if small else 8,
        stages=1 if exact else 2,
        plain=False,
    )


def latent(lines: int, dtype: torch.dtype) -> KernelForm:
    """For rows of few queries against lines of latent attention: states are as wide as a latent."""
    exact = dtype == torch.float32
    few = lines <= 16 or exact
    return KernelForm(
        tile_m=16 if few else 32,
        tile_n=16 if exact else 32,
        warps=4 if few else 8,  # 4 have too few registers for 32 lines of 512 dims
        stages=1 if exact else 2,
        plain=False,
    )
