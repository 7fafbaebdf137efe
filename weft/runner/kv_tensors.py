"""The caches' memory: for each cache kind one allocation, for each layer views of it."""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence

import torch

from weft.attention.base import LayerCache
from weft.config.resolved import KVConfig, PoolSpec
from weft.ops import kv_fp8
from weft.ops.torch_ops import wide


def allocate(kv: KVConfig, dtype: torch.dtype, device: torch.device) -> list[LayerCache]:
    """``by_layer`` of fresh memory."""
    return by_layer(kv, stacked(kv, dtype, device))


def stacked(kv: KVConfig, dtype: torch.dtype, device: torch.device) -> list[list[torch.Tensor]]:
    """For each cache kind its tensors, zeros; the first dim of each counts the kind's layers.

    Block 0 is the null block: padding of tables points at it, no row's own positions ever do. Likewise the
    last line of a state is nobody's slot.
    """
    return [
        [zeros((len(pool.cache.layers), *shape), of, device) for shape, of in _shapes(kv, pool, dtype)]
        for pool in kv.pools
    ]


def by_layer(kv: KVConfig, memory: Sequence[Sequence[torch.Tensor]]) -> list[LayerCache]:
    """Each layer's views of ``stacked`` memory, in layer order; shapes as ``LayerCache`` says."""
    layers: dict[int, dict[int, tuple[torch.Tensor, ...]]] = {}
    for kind, pool in enumerate(kv.pools):
        for number, layer in enumerate(pool.cache.layers):
            layers.setdefault(layer, {})[kind] = tuple(tensor[number] for tensor in memory[kind])
    return [layers[number] for number in sorted(layers)]


def _shapes(kv: KVConfig, pool: PoolSpec, dtype: torch.dtype) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """Shape and dtype of each tensor of one layer in the kind of ``pool``."""
    cache, blocks = pool.cache, 1 + pool.num_blocks
    if cache.kind == "state":
        slots = (kv.num_slots + 1, kv.copies)
        return [((*slots, *part.shape), wide(dtype) if part.wide else dtype) for part in cache.parts]
    if cache.width:
        lines: tuple[int, ...] = (blocks, pool.block_size // cache.ratio)
        if not cache.fp8:
            return [((*lines, cache.width), dtype)]
        latent = (*lines, cache.width - cache.exact)
        return [(latent, kv_fp8.VALUES), (lines, torch.float32), ((*lines, cache.exact), dtype)]
    lines = (blocks, 2, cache.kv_heads, pool.block_size)
    if not cache.fp8:
        return [((*lines, cache.head_dim), dtype)]
    return [((*lines, cache.head_dim), kv_fp8.VALUES), (lines, torch.float32)]


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros. On a CPU they are pages that the system gives when they are first written.

    So a cache that a small load never fills costs what was used of it; ``torch.zeros`` would write it all.
    """
    if device.type != "cpu" or not math.prod(shape):
        return torch.zeros(shape, dtype=dtype, device=device)
    pages = mmap.mmap(
        -1, math.prod(shape) * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    )  # the tensor keeps it alive
    return torch.frombuffer(pages, dtype=dtype).view(shape)
