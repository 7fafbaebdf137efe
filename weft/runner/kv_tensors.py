"""Memory of the caches: one allocation per KV cache group, and views of the allocation per layer."""

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
    """Return the tensors of each KV cache group, filled with zeros. The first dim counts the layers of the
    group.

    Block 0 is the null block: padding in block tables points at block 0, positions of rows never do.
    ``blocks``: existing memory of the blocks per group, used instead of an allocation. For a state group
    ``blocks`` holds snapshots, so the slots are always allocated here.
    """
    return [
        _allocated(kv.tensors(pool, _name(dtype)), device)
        if blocks is None or pool.cache.kind == "state"
        else list(blocks[kind])
        for kind, pool in enumerate(kv.pools)
    ]


def snapshots(pool: PoolSpec, dtype: torch.dtype, device: torch.device) -> list[torch.Tensor]:
    """Allocate the snapshots of a recurrent state, filled with zeros."""
    return _allocated(pool.tensors(_name(dtype)), device)


def by_layer(kv: KVConfig, memory: Sequence[Sequence[torch.Tensor]]) -> list[LayerCache]:
    """Return the views of ``stacked`` memory for each layer, in layer order. Shapes: see ``LayerCache``."""
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
    """Return a tensor of zeros. On a CPU, the operating system supplies each page at its first write.

    A cache that a small load never fills costs only the used pages; ``torch.zeros`` would write all pages.
    The pages are 2 MB large where possible: a decode step reads 8 kB at scattered places, and with 4 kB pages
    most of these reads would miss the TLB.
    """
    if device.type != "cpu" or not math.prod(shape):
        return torch.zeros(shape, dtype=dtype, device=device)
    pages = mmap.mmap(
        -1, math.prod(shape) * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    )  # the tensor keeps the mapping alive
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without huge pages refuses; small pages work too
            pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=dtype).view(shape)
