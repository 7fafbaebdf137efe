"""Cache layout of a group, as exchanged by the two sides of a transfer: built from the configuration,
compared and addressed.

A *region* is the memory of one tensor of one KV cache group on one rank. Regions are numbered by KV cache
group, then by tensor. The numbers are the same on all ranks of a group and in all groups that serve one
model.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from weft.config.cache_layout import ITEM_BYTES, TensorLayout, embedding_tensor
from weft.config.resolved import KVConfig
from weft.config.sharding import share, share_of_kv
from weft.types.media_item import BLOCK_ROWS
from weft.types.transfer import Blocks, CacheGroupDims, GroupDims, TensorDims, TransferMessageError

_BEFORE_ENTRIES = ("layer", "block", "slot", "copy", "kv", "head")
_MOST_BYTES = 1 << 50


class Tensor(NamedTuple):
    """Addresses of one tensor. Strides are in bytes; 0 for a missing dim."""

    layers: int
    layer_stride: int
    blocks: int
    """Blocks of the pool. For a recurrent state: copies of slots, or snapshots."""
    block_stride: int
    kv: int
    kv_stride: int
    heads: int
    """Number of heads; 0 for a tensor without heads."""
    head_stride: int
    entries: int
    """Entries in a block; 1 for a recurrent state."""
    entry_bytes: int

    @property
    def nbytes(self) -> int:
        # The first dim is the layer; in a layout with the pages first, the block.
        return max(self.layers * self.layer_stride, self.blocks * self.block_stride)


class Place(NamedTuple):
    """Location of a sequence in the pool of one KV cache group; the same on every rank of a group."""

    first: int
    """Block table index of the first element of ``ids``."""
    ids: np.ndarray
    """int64 block ids."""


def group_dims(whole: KVConfig, local: KVConfig, ranks: int, dtype: str, snapshots: bool) -> GroupDims:
    """Return the cache layout of a group, as sent to peers. ``whole``: configuration of the whole model;
    ``local``: configuration of one of the ``ranks``.

    ``snapshots``: True if states move through snapshots; False: through the copies of slots.
    """
    kinds = []
    for model, pool in zip(whole.pools, local.pools, strict=True):
        cache = pool.cache
        tensors = pool.tensors(dtype) if snapshots else local.tensors(pool, dtype)
        kinds.append(
            CacheGroupDims(
                kind=cache.kind,
                layers=cache.layers,
                block_size=pool.block_size,
                window=cache.window,
                ratio=cache.ratio,
                kv_heads=model.cache.kv_heads,
                tensors=tuple(_dims(tensor) for tensor in tensors),
            )
        )
    return GroupDims(ranks=ranks, kinds=tuple(kinds))


def embedding_dims(
    levels: int, width: int, num_blocks: int, ranks: int, dtype: str, shards: bool
) -> GroupDims:
    """Return the layout of a group's pool of image embeddings, as sent to peers. Every rank has the whole
    pool.

    ``levels``: rows of ``width`` for each token of an image. ``shards``: see ``CacheGroupDims.shards``.
    """
    kind = CacheGroupDims(
        kind="embedding",
        layers=tuple(range(levels)),
        block_size=BLOCK_ROWS,
        window=0,
        ratio=1,
        kv_heads=0,
        tensors=(_dims(embedding_tensor(levels, width, num_blocks, dtype)),),
        shards=shards and ranks > 1,
    )
    return GroupDims(ranks=ranks, kinds=(kind,))


def tensor_of(dims: TensorDims) -> Tensor:
    """Return the strides and sizes of a tensor, from the dims sent by a peer. Raises TransferMessageError
    for dims unknown to every cache."""
    names = [name for name, _ in dims.dims]
    sizes = dict(dims.dims)
    item = ITEM_BYTES.get(dims.dtype)
    # The dims come from another process: check all before any arithmetic with the sizes.
    layers_first = names[:1] == ["layer"] or names[:2] == ["block", "layer"]
    if item is None or len(sizes) != len(names) or not layers_first:
        raise TransferMessageError(f"tensor {dims.name!r}: not a cache's dims or dtype")
    if math.prod(sizes.values()) * item > _MOST_BYTES or 0 in sizes.values():
        raise TransferMessageError(f"tensor {dims.name!r}: invalid sizes")
    # Tensors are contiguous: the stride of a dim is the product of all later sizes.
    strides, stride = dict[str, int](), item
    for name, size in reversed(dims.dims):
        strides[name] = stride
        stride *= size
    block = "block" if "block" in sizes else "copy"
    blocks = sizes.get("block", sizes.get("slot", 1) * sizes.get("copy", 1))
    # One entry: all inner dims except the position, e.g. [head_dim] of one head.
    inner = [name for name in names if name not in _BEFORE_ENTRIES]
    entry_bytes = item * math.prod(sizes[name] for name in inner if name != "position")
    return Tensor(
        layers=sizes["layer"],
        layer_stride=strides["layer"],
        blocks=blocks,
        block_stride=strides.get(block, 0),
        kv=sizes.get("kv", 1),
        kv_stride=strides.get("kv", 0),
        heads=sizes.get("head", 0),
        head_stride=strides.get("head", 0),
        entries=sizes.get("position", 1),
        entry_bytes=entry_bytes,
    )


def tensors_of(dims: GroupDims) -> list[list[Tensor]]:
    """Return the tensors of each KV cache group. Raises TransferMessageError if a tensor contradicts the
    group."""
    found = [[tensor_of(tensor) for tensor in kind.tensors] for kind in dims.kinds]
    for kind, tensors in zip(dims.kinds, found, strict=True):
        if kind.block_size % kind.ratio:
            raise TransferMessageError(
                f"the block size {kind.block_size} is not a multiple of the ratio {kind.ratio}"
            )
        if kind.shards and kind.kind != "embedding":
            raise TransferMessageError(f"each rank must have all rows of KV cache group {kind.kind}")
        for tensor in tensors:
            # A tensor holds one entry per `ratio` positions; a state holds one entry in all.
            entries = 1 if kind.kind == "state" else kind.block_size // kind.ratio
            if tensor.layers != len(kind.layers) or tensor.entries != entries:
                raise TransferMessageError(
                    f"a tensor of KV cache group {kind.kind} has other layers or positions than the group"
                )
            if tensor.heads and tensor.heads != heads_of(kind, tensor, 0, dims.ranks).size:
                raise TransferMessageError(
                    f"a tensor of KV cache group {kind.kind} does not have one rank's share of heads"
                )
    return found


class Heads(NamedTuple):
    """Range [begin, end) of the whole model's heads."""

    begin: int
    end: int

    @property
    def size(self) -> int:
        return self.end - self.begin


def heads_of(kind: CacheGroupDims, tensor: Tensor, rank: int, ranks: int) -> Heads:
    """Return the heads of a tensor on ``rank``. The tensor must be made of heads."""
    if kind.kind == "state":
        return Heads(*share(tensor.heads * ranks, rank, ranks))
    return Heads(*share_of_kv(kind.kv_heads, rank, ranks))


def compatible(one: GroupDims, other: GroupDims) -> str | None:
    """Return the reason why caches of one group cannot move to the other group; None if the groups are
    compatible."""
    if len(one.kinds) != len(other.kinds):
        return f"{len(one.kinds)} KV cache groups here, {len(other.kinds)} there"
    for number, (a, b) in enumerate(zip(one.kinds, other.kinds, strict=True)):
        # Block sizes and numbers of ranks may differ: span plans cut at both sides' block ends.
        for field in ("kind", "layers", "window", "ratio", "kv_heads"):
            here, there = getattr(a, field), getattr(b, field)
            if here != there:
                return f"KV cache group {number}: {field} is {here} here and {there} there"
        if [(t.name, t.dtype) for t in a.tensors] != [(t.name, t.dtype) for t in b.tensors]:
            return f"KV cache group {number}: other tensors or dtypes there"
        for mine, theirs in zip(a.tensors, b.tensors, strict=True):
            if _fixed(a, mine, one.ranks) != _fixed(b, theirs, other.ranks):
                return f"KV cache group {number}: tensor {mine.name!r} has other sizes there"
    return None


def placed(
    blocks: Sequence[Blocks], dims: GroupDims, start: int, num_positions: int, *, grows: bool = False
) -> tuple[Place, ...]:
    """Return the checked location of a sequence in each pool of a group. Raises TransferMessageError.

    The checks: all blocks exist, no block occurs twice, and the blocks cover ``num_positions`` positions.
    Positions before ``start`` need no blocks: the positions do not move.

    ``grows``: the block table is not complete yet. Then ``num_positions`` counts the positions that must
    have blocks now, and states may have no place yet. For an addition to another table, ``num_positions``
    is 0.
    """
    if len(blocks) != len(dims.kinds):
        raise TransferMessageError(f"blocks of {len(blocks)} KV cache groups instead of {len(dims.kinds)}")
    places = []
    for kind, tensors, given in zip(dims.kinds, tensors_of(dims), blocks, strict=True):
        if len(given.ids) % 4:
            raise TransferMessageError("block ids are not a whole number of int32")
        ids = np.frombuffer(given.ids, "<i4").astype(np.int64)
        pool = min((tensor.blocks for tensor in tensors), default=0)
        if len(ids) and (ids.min() < 0 or ids.max() >= pool):
            raise TransferMessageError(f"a block of KV cache group {kind.kind} is outside its pool of {pool}")
        if kind.kind == "state":
            # A state occupies exactly one place. A growing table may not have the place yet.
            if len(ids) > 1 or (not len(ids) and num_positions and not grows):
                raise TransferMessageError("a state must have exactly one block")
        # Block 0 is the null block (evicted window blocks), so only 0 may repeat.
        elif len(np.unique(ids[ids > 0])) != np.count_nonzero(ids):
            raise TransferMessageError(f"a block of KV cache group {kind.kind} is named twice")
        elif num_positions > max(start, (given.first + len(ids)) * kind.block_size):
            raise TransferMessageError(
                f"blocks of KV cache group {kind.kind} end before position {num_positions}"
            )
        places.append(Place(given.first, ids))
    return tuple(places)


def joined(place: Place, more: Place) -> Place:
    """Return ``place`` with the entries of ``more`` appended. Entries of ``more`` may also replace the last
    entries of ``place``.

    Raises TransferMessageError for a gap between the two.
    """
    if not len(more.ids):
        return place
    at = more.first - place.first
    if not 0 <= at <= len(place.ids):
        raise TransferMessageError(f"a block table of {len(place.ids)} entries continues at entry {at}")
    rest = place.ids[at + len(more.ids) :]
    return Place(place.first, np.concatenate([place.ids[:at], more.ids, rest]))


def blocks_of(table: Sequence[int] | np.ndarray, first: int = 0) -> Blocks:
    """Return entries of a block table in message form (little-endian int32). ``first``: index of the first
    entry."""
    return Blocks(first=first, ids=np.asarray(table, dtype="<i4").tobytes())


def _dims(tensor: TensorLayout) -> TensorDims:
    return TensorDims(name=tensor.name, dims=tensor.dims, dtype=tensor.dtype)


def _fixed(kind: CacheGroupDims, dims: TensorDims, ranks: int) -> tuple[object, ...]:
    """Return the sizes of a tensor, which must be equal in both groups, whatever the number of ranks."""
    tensor = tensor_of(dims)
    heads = tensor.heads * ranks if kind.kind == "state" else min(tensor.heads, 1)
    return tensor.kv, heads, tensor.entry_bytes
