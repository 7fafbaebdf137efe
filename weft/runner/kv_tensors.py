"""The caches' memory: for each cache kind one allocation, for each layer views of it."""

from __future__ import annotations

import contextlib
import math
import mmap
from collections.abc import Sequence

import torch

from weft.attention.base import LayerCache
from weft.config.cache_layout import TensorLayout
from weft.config.resolved import KVConfig, PoolSpec


def stacked(
    kv: KVConfig,
    dtype: torch.dtype,
    device: torch.device,
    blocks: Sequence[Sequence[torch.Tensor]] | None = None,
) -> list[list[torch.Tensor]]:
    """For each cache kind its tensors, zeros; the first dim of each counts the kind's layers.

    Block 0 is the null block: padding of tables points at it, no row's own positions ever do. ``blocks``: for
    each kind the memory of its blocks, where there is some; of a state those are snapshots, not its slots.
    """
    return [
        _allocated(kv.tensors(pool, _name(dtype)), device)
        if blocks is None or pool.cache.kind == "state"
        else list(blocks[kind])
        for kind, pool in enumerate(kv.pools)
    ]


def snapshots(pool: PoolSpec, dtype: torch.dtype, device: torch.device) -> list[torch.Tensor]:
    """Memory for the snapshots of a recurrent kind, zeros."""
    return _allocated(pool.tensors(_name(dtype)), device)


def by_layer(kv: KVConfig, memory: Sequence[Sequence[torch.Tensor]]) -> list[LayerCache]:
    """Each layer's views of ``stacked`` memory, in layer order; shapes as ``LayerCache`` says."""
    layers: dict[int, dict[int, tuple[torch.Tensor, ...]]] = {}
    for kind, pool in enumerate(kv.pools):
        for number, layer in enumerate(pool.cache.layers):
            layers.setdefault(layer, {})[kind] = tuple(tensor[number] for tensor in memory[kind])
    return [layers[number] for number in sorted(layers)]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _allocated(tensors: Sequence[TensorLayout], device: torch.device) -> list[torch.Tensor]:
    return [zeros(tensor.shape, getattr(torch, tensor.dtype), device) for tensor in tensors]


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros. On a CPU they are pages that the system gives when they are first written.

    So a cache that a small load never fills costs what was used of it; ``torch.zeros`` would write it all.
    Pages are of 2 MB where the system has some: a decode step reads 8 kB here and 8 kB there, and with pages
    of 4 kB misses the address cache as often.
    """
    if device.type != "cpu" or not math.prod(shape):
        return torch.zeros(shape, dtype=dtype, device=device)
    pages = mmap.mmap(
        -1, math.prod(shape) * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    )  # the tensor keeps it alive
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them refuses, and small pages do
            pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=dtype).view(shape)
