"""What the caches of a rank are made of: every tensor of every kind, described once.

Sizing, allocation and transfers of caches between ranks read these descriptions: of a whole model's
kinds what a group has in all, of those of ``sharding.local_spec`` what each of its ranks has.

    full, window    KV entries    [layer, block, kv, head, position, width]
    latent          latents       [layer, block, position, width]
    compressed      likewise, one for each ``ratio`` positions of a block
    state           of a slot     [layer, slot, copy, head, row, width], for each part
                    snapshots     [layer, block, head, row, width], for each part
    embedding       of images     [layer, block, position, width]; layer 0 are the rows that stand for an
                    image, further ones those that are added behind the text model's first layers

Entries in 8 bits have their scales, and elements that keep the model's dtype, in tensors of their own.
"""

from __future__ import annotations

import math
from typing import NamedTuple, TypeAlias

from weft.config.spec import DTYPE_BYTES, CacheSpec
from weft.types.media import BLOCK_ROWS

FP8 = "float8_e4m3fn"
ITEM_BYTES = {**DTYPE_BYTES, FP8: 1}
Dims: TypeAlias = tuple[tuple[str, int], ...]


class TensorLayout(NamedTuple):
    """One tensor. Dims are named; the last varies fastest."""

    name: str
    dims: Dims
    """(name, size) of each, as the module's docstring has them; ``kv`` is keys and values."""
    dtype: str
    """As torch names it."""

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(size for _, size in self.dims)

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]

    @property
    def sharded(self) -> bool:
        """Whether ranks have different heads of it (``sharding.share_of_kv``); else each has all of it."""
        return any(name == "head" for name, _ in self.dims)


def pool_tensors(cache: CacheSpec, block_size: int, num_blocks: int, dtype: str) -> tuple[TensorLayout, ...]:
    """The memory of a pool that gives out ``num_blocks`` blocks, of ``block_size`` positions, in a model of
    ``dtype``. Block 0 is the null block. Of a state they hold snapshots."""
    first: Dims = (("layer", len(cache.layers)), ("block", 1 + num_blocks))
    if cache.kind == "state":
        return _parts(cache, first, dtype)
    entries: Dims = (*first, ("position", block_size // cache.ratio))
    if not cache.width:
        entries = (*first, ("kv", 2), ("head", cache.kv_heads), ("position", block_size))
    width = cache.width or cache.head_dim
    if not cache.fp8:
        return (TensorLayout("values", (*entries, ("width", width)), dtype),)
    values = TensorLayout("values", (*entries, ("width", width - cache.exact)), FP8)
    scales = TensorLayout("scales", entries, "float32")
    if not cache.width:
        return (values, scales)
    return (values, scales, TensorLayout("exact", (*entries, ("width", cache.exact)), dtype))


def slot_tensors(cache: CacheSpec, num_slots: int, copies: int, dtype: str) -> tuple[TensorLayout, ...]:
    """The memory of a recurrent state: ``copies`` of it for each slot, and for the spare slot."""
    first = (("layer", len(cache.layers)), ("slot", 1 + num_slots), ("copy", copies))
    return _parts(cache, first, dtype)


def embedding_tensor(levels: int, width: int, num_blocks: int, dtype: str) -> TensorLayout:
    """The memory of a pool of images' embeddings: ``levels`` rows of ``width`` for each of their tokens.
    Block 0 is the null block."""
    dims: Dims = (
        ("layer", levels),
        ("block", 1 + num_blocks),
        ("position", BLOCK_ROWS),
        ("width", width),
    )
    return TensorLayout("values", dims, dtype)


def block_bytes(cache: CacheSpec, block_size: int, dtype: str) -> int:
    """Bytes of one block (one snapshot of a state) over all the layers."""
    return sum(tensor.nbytes for tensor in pool_tensors(cache, block_size, 0, dtype))


def _parts(cache: CacheSpec, first: Dims, dtype: str) -> tuple[TensorLayout, ...]:
    wide = dtype if dtype == "float64" else "float32"
    return tuple(
        TensorLayout(part.name, (*first, *_part_dims(part.shape)), wide if part.wide else dtype)
        for part in cache.parts
    )


def _part_dims(shape: tuple[int, ...]) -> Dims:
    """Heads, rows, width; or the first of these."""
    names = ("head", "row", "width") if len(shape) > 2 else ("head", "width")
    return tuple(zip(names[: len(shape)], shape, strict=True))
