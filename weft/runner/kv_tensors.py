"""The KV cache's memory: for each cache kind one allocation, for each layer a view of it."""

from __future__ import annotations

import math
import mmap

import torch

from weft.config.resolved import KVConfig


def allocate(kv: KVConfig, dtype: torch.dtype, device: torch.device) -> list[torch.Tensor]:
    """One tensor a layer, in layer order: ``[1 + num_blocks, 2, kv_heads, block, head_dim]``.

    Block 0 is the null block: padding of tables points at it, no row's own positions ever do.
    """
    layers: dict[int, torch.Tensor] = {}
    for pool in kv.pools:
        cache = pool.cache
        block = (2, cache.kv_heads, pool.block_size, cache.head_dim)
        memory = _zeros((len(cache.layers), 1 + pool.num_blocks, *block), dtype, device)
        layers.update(zip(cache.layers, memory, strict=True))
    return [layers[number] for number in sorted(layers)]


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros. On a CPU they are pages that the system gives when they are first written.

    So a cache that a small load never fills costs what was used of it; ``torch.zeros`` would write it all.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    pages = mmap.mmap(
        -1, math.prod(shape) * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    )  # the tensor keeps it alive
    return torch.frombuffer(pages, dtype=dtype).view(shape)
