"""Rows over caches of entries and of groups, and a plain reference of sparse attention."""

from __future__ import annotations

import random
from typing import NamedTuple

import numpy as np
import torch

from weft.attention.base import CoreInput, SegmentInput
from weft.attention.sparse.sparse import Reads, SparseBackend
from weft.attention.sparse.sparse_torch import TorchSparse
from weft.ops import kv_fp8

Tensor = torch.Tensor


class Sizes(NamedTuple):
    """Sizes of queries, entries and the indexer."""

    heads: int
    dim: int
    index_heads: int
    index_dim: int


SMALL = Sizes(heads=3, dim=6, index_heads=4, index_dim=5)


def segment_of(rows: list[tuple[int, int]], tables: tuple[Tensor, ...], bound: int = 0) -> SegmentInput:
    counts = np.array([count for _, count in rows], np.int32)
    starts = np.array([start for start, _ in rows], np.int32)
    return SegmentInput(
        begin=0,
        rows=len(rows),
        tokens=int(counts.sum()),
        host_counts=counts,
        host_starts=starts + np.int32(bound),
        q_offsets=torch.tensor([0, *np.cumsum(counts).tolist()], dtype=torch.int32),
        starts=torch.tensor(starts.tolist(), dtype=torch.int64),
        slots=torch.arange(len(rows)),
        live=torch.zeros(len(rows), dtype=torch.int64),
        tables=tables,
    )


class Scene:
    """Rows over a cache of entries and a cache of groups. All other entries are NaN."""

    def __init__(
        self,
        rows: list[tuple[int, int]],
        *,
        window: int = 5,
        ratio: int = 4,
        top: int = 0,
        block: int = 4,
        bound: int = 0,
        values: int = 0,
        sinks: bool = True,
        coded: int = 0,
        dtype: torch.dtype = torch.float64,
        sizes: Sizes = SMALL,
        backend: SparseBackend | None = None,
    ) -> None:
        torch.manual_seed(0)
        heads, dim, index_heads, index_dim = sizes
        self.rows, self.values, self.sizes = rows, values or dim, sizes
        self.backend = backend or TorchSparse()
        self.reads = Reads(
            entries=0 if window else None,
            window=window,
            groups=1 if ratio else None,
            ratio=ratio or 1,
            top=top,
            heads=heads,
            dim=dim,
            index_heads=index_heads,
        )
        per_block, width = 2, dim + index_dim
        spans = (block, per_block * (ratio or 1))
        tables = []
        longest = max((start + count + bound for start, count in rows), default=0)
        for size in spans:
            columns = -(-longest // size)
            order = random.Random(0).sample(range(1, len(rows) * columns + 1), len(rows) * columns)
            tables.append(torch.tensor(order, dtype=torch.int64).view(len(rows), columns))
        blocks = [1 + table.numel() for table in tables]
        self.caches: dict[int, tuple[Tensor, ...]] = {
            0: (torch.full((blocks[0], block, dim), torch.nan, dtype=dtype),),
            1: (torch.full((blocks[1], per_block, width), torch.nan, dtype=dtype),),
        }
        self.entries, self.groups = [], []
        for row, (start, count) in enumerate(rows):
            end = start + count
            self.entries.append(torch.randn(end, dim, dtype=torch.float64).to(dtype))
            self.groups.append(torch.randn(end // self.reads.ratio, width, dtype=torch.float64).to(dtype))
            for p in range(max(0, start - window + 1), end):
                self.caches[0][0][tables[0][row, p // block], p % block] = self.entries[row][p]
            for g in range(end // self.reads.ratio if ratio else 0):
                place = tables[1][row, g // per_block]
                self.caches[1][0][place, g % per_block] = self.groups[row][g]
        if coded:
            self._to_8_bits(coded)
        self.segment = segment_of(rows, tuple(tables), bound)
        tokens = self.segment.tokens
        self.q = torch.randn(tokens, heads, dim, dtype=torch.float64).to(dtype)
        self.index_q = torch.randn(tokens, index_heads, index_dim, dtype=torch.float64).to(dtype)
        self.weights = torch.randn(tokens, index_heads, dtype=torch.float64)
        self.sinks = torch.randn(heads, dtype=torch.float64) if sinks else None

    def _to_8_bits(self, coded: int) -> None:
        """Round the first ``coded`` elements of all entries. Unwritten entries are NaN."""
        for kind, (cache,) in self.caches.items():
            values, scales = kv_fp8.quantize(cache[..., :coded])
            values.view(torch.uint8)[scales.isnan()] = 0x7F
            self.caches[kind] = (values, scales, cache[..., coded:].contiguous())
        for rows in (self.entries, self.groups):
            for lines in rows:
                lines[:, :coded] = kv_fp8.dequantize(*kv_fp8.quantize(lines[:, :coded]), lines.dtype)

    def dequantized(self) -> dict[int, tuple[Tensor, ...]]:
        """Return plain caches with the entries of the caches in 8 bits."""
        made = dict[int, tuple[Tensor, ...]]()
        for kind, (values, scales, exact) in self.caches.items():
            made[kind] = (torch.cat((kv_fp8.dequantize(values, scales, exact.dtype), exact), dim=-1),)
        return made

    def core(self) -> CoreInput:
        plan = self.backend.plan(self.segment, self.reads, self.caches)
        return CoreInput(self.segment, self.caches, 0.4, plan, self.sinks)

    def select(self) -> Tensor | None:
        return self.backend.select(self.index_q, self.weights, self.core(), self.reads)

    def run(self) -> Tensor:
        core = self.core()
        selected = None
        if self.reads.top:
            selected = self.backend.select(self.index_q, self.weights, core, self.reads)
        out = torch.full((len(self.q), self.sizes.heads, self.values), torch.nan, dtype=self.q.dtype)
        self.backend.attend(self.q, out, core, self.reads, selected)
        return out

    def alone(self, row: int, position: int) -> SegmentInput:
        """Return the segment of one token."""
        tables = tuple(table[row : row + 1] for table in self.segment.tables)
        return segment_of([(position, 1)], tables)

    def tokens(self) -> list[tuple[int, int]]:
        """Return (row, position) of each token."""
        return [(r, p) for r, (start, count) in enumerate(self.rows) for p in range(start, start + count)]

    def chosen(self, token: int, row: int, p: int) -> list[int]:
        """Return the groups that a token reads, by the plain rule. Ties go to the lowest group."""
        seen = range((p + 1) // self.reads.ratio if self.reads.groups is not None else 0)
        if not self.reads.top:
            return list(seen)
        scores = []
        for g in seen:
            key = self.groups[row][g, self.sizes.dim :].double()
            each = [
                max(0.0, float(self.index_q[token, h].double() @ key)) for h in range(self.sizes.index_heads)
            ]
            scores.append(sum(float(self.weights[token, h]) * each[h] for h in range(self.sizes.index_heads)))
        return sorted(sorted(seen, key=lambda g: (-scores[g], g))[: self.reads.top])

    def expected(self) -> Tensor:
        made = torch.empty(len(self.q), self.sizes.heads, self.values, dtype=torch.float64)
        for token, (row, p) in enumerate(self.tokens()):
            keys = []
            if self.reads.entries is not None:
                keys += [self.entries[row][i] for i in range(max(0, p - self.reads.window + 1), p + 1)]
            keys += [self.groups[row][g, : self.sizes.dim] for g in self.chosen(token, row, p)]
            for head in range(self.sizes.heads):
                scores = [float(self.q[token, head].double() @ key.double()) * 0.4 for key in keys]
                if self.sinks is not None:
                    scores.append(float(self.sinks[head]))
                weights = torch.tensor(scores, dtype=torch.float64).softmax(0)
                of_keys = zip(weights.tolist(), keys, strict=False)  # a sink has no value
                zero = torch.zeros(self.values, dtype=torch.float64)
                made[token, head] = sum((w * k[: self.values].double() for w, k in of_keys), zero)
        return made


def scores_of(kind: str, count: int) -> Tensor:
    """Return float32 [count]: scores with many equal, close, tiny or infinite values; others are random."""
    generator = torch.Generator().manual_seed(count)
    made = torch.randn(count, generator=generator)
    if kind == "few":
        return made.mul(2).round()
    if kind == "equal":
        return torch.full((count,), 0.25)
    if kind == "zeros":
        return torch.where(made > 0, 0.0, -0.0)
    if kind == "close":  # different in the last bits
        return (torch.full((count,), 0x40490FDB) + torch.arange(count) % 5).int().view(torch.float32)
    if kind == "falling":
        return torch.arange(count, 0, -1).float()
    if kind == "small":
        return made * 1e-40
    if kind == "infinite":
        return torch.where(made > 0.5, torch.inf, torch.where(made < 0, -torch.inf, made))
    return made
