"""Pack sequences into one step without a scheduler: every sequence is a prompt from position 0."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import torch

from weft.attention.base import Backends, LayerCache, SegmentInput, StepInput
from weft.config.cache_layout import pool_tensors
from weft.config.resolved import KVConfig, PoolSpec

Tensor = torch.Tensor


def packed_step(
    sequences: Sequence[Sequence[int]],
    logits_index: Sequence[int],
    kv: KVConfig,
    backends: Backends,
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[StepInput, list[LayerCache]]:
    """Return a step over all tokens of ``sequences`` (token ids), and zeroed caches of each layer.

    ``logits_index``: rows with logits, among the T tokens of all sequences. The caches have room for these
    sequences only. Each layer has separate cache tensors, because autograd counts the writes to a tensor.
    """
    counts = np.array([len(one) for one in sequences], np.int32)
    ids = torch.tensor(list(itertools.chain.from_iterable(sequences)), device=device)
    positions = torch.cat([torch.arange(int(count), device=device) for count in counts])
    tables, writes = zip(*(_table(pool, counts, device) for pool in kv.pools), strict=True)
    segment = _segment(counts, tables, device)
    empty = _segment(counts[:0], tuple(table[:0] for table in tables), device, begin=len(ids))
    prepared = tuple(
        tuple(
            backends.prepare(part, kind, pool.cache, pool.block_size, dtype)
            for kind, pool in enumerate(kv.pools)
        )
        for part in (segment, empty)
    )
    step = StepInput(
        ids=ids,
        positions=positions,
        writes=tuple(writes),
        segments=(segment, empty),
        prepared=(prepared[0], prepared[1]),
        logits_index=torch.tensor(logits_index, dtype=torch.int64, device=device),
    )
    return step, _caches(kv, counts, dtype, device)


def _blocks(pool: PoolSpec, counts: np.ndarray) -> np.ndarray:
    """Return the number of blocks of each sequence, int [R]."""
    made: np.ndarray = -(-counts // pool.block_size)
    return made


def _table(pool: PoolSpec, counts: np.ndarray, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return (block table int64 [R, W], cache index of each token int64 [T]). Block 0 is the null block."""
    needed = _blocks(pool, counts)
    table = torch.zeros(len(counts), int(needed.max()), dtype=torch.int64, device=device)
    writes = []
    first = 1
    for row, (blocks, count) in enumerate(zip(needed.tolist(), counts.tolist(), strict=True)):
        table[row, :blocks] = torch.arange(first, first + blocks, device=device)
        # The blocks of a sequence are consecutive, so the cache indices are, too.
        writes.append(first * pool.block_size + torch.arange(count, device=device))
        first += blocks
    return table, torch.cat(writes)


def _segment(
    counts: np.ndarray, tables: tuple[Tensor, ...], device: torch.device, begin: int = 0
) -> SegmentInput:
    """Return a segment of rows that start at position 0."""
    rows = len(counts)
    offsets = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
    zeros = torch.zeros(rows, dtype=torch.int64, device=device)
    return SegmentInput(
        begin=begin,
        rows=rows,
        tokens=int(counts.sum()),
        host_counts=counts,
        host_starts=np.zeros(rows, np.int32),
        q_offsets=torch.from_numpy(offsets).to(device),
        starts=zeros,
        slots=torch.arange(rows, device=device),
        live=zeros,
        tables=tables,
    )


def _caches(kv: KVConfig, counts: np.ndarray, dtype: torch.dtype, device: torch.device) -> list[LayerCache]:
    """Return zeroed caches of each layer, in layer order."""
    name = str(dtype).removeprefix("torch.")
    layers: dict[int, dict[int, tuple[Tensor, ...]]] = {}
    for kind, pool in enumerate(kv.pools):
        layouts = pool_tensors(pool.cache, pool.block_size, int(_blocks(pool, counts).sum()), name)
        for layer in pool.cache.layers:
            layers.setdefault(layer, {})[kind] = tuple(
                torch.zeros(layout.shape[1:], dtype=getattr(torch, layout.dtype), device=device)
                for layout in layouts
            )
    return [layers[number] for number in sorted(layers)]
