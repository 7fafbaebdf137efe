"""Caches of whole groups in numpy, and a naive transfer of single elements to compare plans with."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from weft.config.cache_layout import TensorLayout, pool_tensors, slot_tensors
from weft.config.sharding import share, share_of_kv
from weft.config.spec import CacheSpec, StatePart
from weft.disagg.protocol.group_layout import blocks_of, placed
from weft.disagg.protocol.spans import Side
from weft.types.transfer import CacheGroupDims, GroupDims, TensorDims

DTYPE = "bfloat16"


def cache(kind: str, layers: int = 2, **facts: object) -> CacheSpec:
    """Return a KV cache group of a model that does not exist."""
    if kind == "state":
        facts["parts"] = (
            StatePart(name="conv_q", shape=(4, 3, 5), wide=False),
            StatePart(name="conv_v", shape=(8, 3, 2), wide=False),
            StatePart(name="memory", shape=(8, 4, 3), wide=True),
        )
    return CacheSpec(kind=kind, layers=tuple(range(1, 1 + layers)), **facts)  # type: ignore[arg-type]


KINDS = {
    "full": cache("full", kv_heads=4, head_dim=3),
    "full, one head": cache("full", kv_heads=1, head_dim=3),
    "full, two heads, fp8": cache("full", kv_heads=2, head_dim=4, fp8=True),
    "window": cache("window", window=11, kv_heads=2, head_dim=2),
    "chunk": cache("chunk", window=10, kv_heads=2, head_dim=2),
    "latent": cache("latent", width=7),
    "latent, fp8": cache("latent", width=8, fp8=True, exact=3),
    "latent, indexer, fp8": cache("latent", layers=1, width=5 + 4, fp8=True, exact=6),
    "compressed, fp8": cache("compressed", ratio=4, width=9, fp8=True, exact=4),
    "latent, indexer": cache("latent", layers=1, width=5 + 4),
    "latent, window": cache("latent", window=8, width=6),
    "compressed": cache("compressed", ratio=4, width=5),
    "state": cache("state"),
    "MTP layers": cache("full", layers=3, kv_heads=2, head_dim=2),
}


@dataclass
class Group:
    """A group of ``ranks``: the tensors of each rank and KV cache group, as uint8 regions and as elements."""

    caches: Sequence[CacheSpec]
    ranks: int
    block_size: int
    num_blocks: int
    snapshots: bool = False
    slots: int = 2
    copies: int = 3

    def __post_init__(self) -> None:
        self.dims = GroupDims(
            ranks=self.ranks,
            kinds=tuple(
                CacheGroupDims(
                    kind=spec.kind,
                    layers=spec.layers,
                    block_size=self.block_size,
                    window=spec.window,
                    ratio=spec.ratio,
                    kv_heads=spec.kv_heads,
                    tensors=tuple(TensorDims(t.name, t.dims, t.dtype) for t in self.tensors(spec)),
                )
                for spec in self.caches
            ),
        )
        layouts = [t for spec in self.caches for t in self.tensors(spec)]
        self.regions = [[np.zeros(t.nbytes, np.uint8) for t in layouts] for _ in range(self.ranks)]
        self.layouts = layouts

    def tensors(self, spec: CacheSpec) -> tuple[TensorLayout, ...]:
        local = local_cache(spec, self.ranks)
        if spec.kind == "state" and not self.snapshots:
            return slot_tensors(local, self.slots, self.copies, DTYPE)
        return pool_tensors(local, self.block_size, self.num_blocks, DTYPE)

    def fill(self, rng: np.random.Generator) -> None:
        """Fill the caches with random bytes. Replicated parts are equal on all ranks."""
        for region, layout in enumerate(self.layouts):
            same = rng.integers(0, 256, layout.nbytes, dtype=np.uint8)
            for rank in range(self.ranks):
                own = rng.integers(0, 256, layout.nbytes, dtype=np.uint8)
                self.regions[rank][region][:] = own if layout.sharded else same
        for kind, spec in enumerate(self.caches):
            if spec.kv_heads and spec.kv_heads < self.ranks:
                for region in self.regions_of(kind):
                    for rank in range(self.ranks):
                        head = share_of_kv(spec.kv_heads, rank, self.ranks)
                        first = next(
                            r for r in range(rank + 1) if share_of_kv(spec.kv_heads, r, self.ranks) == head
                        )
                        self.regions[rank][region][:] = self.regions[first][region]

    def regions_of(self, kind: int) -> list[int]:
        counts = [len(self.tensors(spec)) for spec in self.caches]
        begin = sum(counts[:kind])
        return list(range(begin, begin + counts[kind]))

    def side(self, tables: Sequence[Sequence[int]], start: int, end: int) -> Side:
        blocks = tuple(blocks_of(table) for table in tables)
        return Side(self.dims, placed(blocks, self.dims, start, end))

    def elements(self, rank: int, region: int) -> np.ndarray:
        """Return the region by its dimensions; the last dimension is bytes."""
        layout = self.layouts[region]
        item = layout.nbytes // math.prod(layout.shape)
        return self.regions[rank][region].reshape(*layout.shape, item)


def local_cache(spec: CacheSpec, ranks: int) -> CacheSpec:
    import msgspec

    parts = tuple(
        msgspec.structs.replace(part, shape=(part.shape[0] // ranks, *part.shape[1:])) for part in spec.parts
    )
    heads = max(spec.kv_heads // ranks, 1) if spec.kv_heads else 0
    return msgspec.structs.replace(spec, parts=parts, kv_heads=heads)


def heads_of(spec: CacheSpec, local: int, rank: int, ranks: int) -> tuple[int, int]:
    if spec.kind == "state":
        return share(local * ranks, rank, ranks)
    return share_of_kv(spec.kv_heads, rank, ranks)


def reference(
    sender: Group,
    receiver: Group,
    tables: Sequence[Sequence[int]],
    tables_to: Sequence[Sequence[int]],
    positions: Sequence[Sequence[int]],
) -> list[list[np.ndarray]]:
    """Return the receiver's regions after a transfer of ``positions`` of each KV cache group.

    This plain reference copies element by element.
    """
    after = [[region.copy() for region in regions] for regions in receiver.regions]
    for kind, spec in enumerate(sender.caches):
        for region in sender.regions_of(kind):
            layout, layout_to = sender.layouts[region], receiver.layouts[region]
            for rank in range(receiver.ranks):
                into = after[rank][region].reshape(*layout_to.shape, -1)
                for where, to in places(sender, receiver, kind, region, tables, tables_to, positions, rank):
                    owner, index = where
                    into[to] = sender.elements(owner, region)[index]
            assert [name for name, _ in layout.dims][-1] == [name for name, _ in layout_to.dims][-1]
            assert spec.layers
    return after


def places(sender, receiver, kind, region, tables, tables_to, positions, rank):  # type: ignore[no-untyped-def]
    """Yield ((sender's rank, index there), index here) of every group of elements of rank ``rank``."""
    spec = sender.caches[kind]
    names = [name for name, _ in sender.layouts[region].dims]
    names_to = [name for name, _ in receiver.layouts[region].dims]
    sizes, sizes_to = dict(sender.layouts[region].dims), dict(receiver.layouts[region].dims)
    heads: list[tuple[int, int, int]] = [(0, 0, 0)]
    if "head" in names:
        begin, end = heads_of(spec, sizes_to["head"], rank, receiver.ranks)
        heads = []
        for head in range(begin, end):
            for owner in range(sender.ranks):
                low, high = heads_of(spec, sizes["head"], owner, sender.ranks)
                if low <= head < high:
                    heads.append((owner, head - low, head - begin))
                    break
    entries = [(0, 0, 0, 0)]
    if spec.kind != "state":
        per, per_to = sender.block_size // spec.ratio, receiver.block_size // spec.ratio
        done = sorted({p // spec.ratio for p in positions[kind] if p % spec.ratio == spec.ratio - 1})
        entries = [(tables[kind][e // per], e % per, tables_to[kind][e // per_to], e % per_to) for e in done]
    for layer in range(sizes["layer"]):
        for owner, head, head_to in heads:
            for block, at, block_to, at_to in entries:
                for kv in range(sizes.get("kv", 1)):
                    given = {"layer": layer, "block": block, "kv": kv, "head": head, "position": at}
                    given_to = {**given, "block": block_to, "head": head_to, "position": at_to}
                    if spec.kind == "state":
                        line, line_to = tables[kind][0], tables_to[kind][0]
                        copies = sizes.get("copy", 1)
                        given |= {"slot": line // copies, "copy": line % copies, "block": line}
                        copies = sizes_to.get("copy", 1)
                        given_to |= {"slot": line_to // copies, "copy": line_to % copies, "block": line_to}
                    index = tuple(given[n] if n in given else slice(None) for n in names)
                    index_to = tuple(given_to[n] if n in given_to else slice(None) for n in names_to)
                    yield (owner, index), index_to
