"""The layout of every cache tensor of a rank, described once for each KV cache group.

Sizing, allocation and transfers between ranks use these descriptions. The groups of a whole model describe
the total of all ranks; the groups of ``sharding.local_spec`` describe one rank.

    full, window    KV entries    [layer, block, kv, head, position, width]
    latent          latents       [layer, block, position, width]
    compressed      latents       [layer, block, position, width], one position per ``ratio`` positions
    state           of a slot     [layer, slot, copy, head, row, width], for each part
                    snapshots     [layer, block, head, row, width], for each part
    embedding       of images     [layer, block, position, width]; layer 0: rows in place of token embeddings,
                    other layers: rows added after the first layers of the text model

Entries in 8 bits have separate tensors for scales, and for elements that keep the model's dtype.
"""

from __future__ import annotations

import math
from typing import NamedTuple, TypeAlias

from weft.config.spec import DTYPE_BYTES, CacheSpec, ModelSpec
from weft.types.media_item import BLOCK_ROWS

FP8 = "float8_e4m3fn"
ITEM_BYTES = {**DTYPE_BYTES, FP8: 1}
Dims: TypeAlias = tuple[tuple[str, int], ...]


class TensorLayout(NamedTuple):
    """Layout of one tensor. Dims are named; the last dim varies fastest."""

    name: str
    dims: Dims
    """(name, size) per dim, with the names of the table above; ``kv`` selects keys or values."""
    dtype: str
    """Name of the dtype in torch."""

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(size for _, size in self.dims)

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]

    @property
    def sharded(self) -> bool:
        """True if each rank has its own heads (``sharding.share_of_kv``).

        False if every rank has the whole tensor.
        """
        return any(name == "head" for name, _ in self.dims)


def pool_tensors(cache: CacheSpec, block_size: int, num_blocks: int, dtype: str) -> tuple[TensorLayout, ...]:
    """Return the tensors of a pool with ``num_blocks`` blocks of ``block_size`` positions, plus the null
    block 0.

    ``dtype``: type of the model. Blocks of a state group hold snapshots.
    """
    first: Dims = (("layer", len(cache.layers)), ("block", 1 + num_blocks))
    if cache.kind == "state":
        return _parts(cache, first, dtype)
    entries: Dims = (*first, ("position", block_size // cache.ratio))
    if not cache.width:
        entries = (*first, ("kv", 2), ("head", cache.kv_heads), ("position", block_size))
    width = cache.width or cache.head_dim
    # [layer, block, position, width] for latents, [layer, block, kv, head, position, width] for keys and
    # values
    if not cache.fp8:
        return (TensorLayout("values", (*entries, ("width", width)), dtype),)
    values = TensorLayout("values", (*entries, ("width", width - cache.exact)), FP8)
    scales = TensorLayout("scales", entries, "float32")
    if not cache.width:
        return (values, scales)
    return (values, scales, TensorLayout("exact", (*entries, ("width", cache.exact)), dtype))


def slot_tensors(cache: CacheSpec, num_slots: int, copies: int, dtype: str) -> tuple[TensorLayout, ...]:
    """Return the tensors of a recurrent state: ``copies`` per slot, for all slots and the spare slot."""
    first = (("layer", len(cache.layers)), ("slot", 1 + num_slots), ("copy", copies))
    return _parts(cache, first, dtype)


def embedding_tensor(levels: int, width: int, num_blocks: int, dtype: str) -> TensorLayout:
    """Return the tensor of a pool of image embeddings: ``levels`` rows of ``width`` per token.

    The pool has ``num_blocks`` blocks plus the null block 0.
    """
    dims: Dims = (
        ("layer", levels),
        ("block", 1 + num_blocks),
        ("position", BLOCK_ROWS),
        ("width", width),
    )
    return TensorLayout("values", dims, dtype)


def block_bytes(cache: CacheSpec, block_size: int, dtype: str) -> int:
    """Return the bytes of one block over all layers; for a state group, of one snapshot."""
    return sum(tensor.nbytes for tensor in pool_tensors(cache, block_size, 0, dtype))


def exact_elements(cache: CacheSpec, spec: ModelSpec) -> int:
    """Return the number of elements that keep the model's dtype at the end of an 8-bit entry of ``cache``.

    Of latents: the rotated key, and the key of an indexer. Of entries of DeepSeek V4: the rotated elements,
    and the key of an indexer. ``spec``: the model of the cache.
    """
    if not cache.width:
        return 0
    if spec.mla is not None:
        return cache.width - spec.mla.kv_lora
    assert spec.sparse is not None, "entries of other models have keys and values"
    assert spec.rope is not None
    return cache.width - (spec.head_dim - max(spec.rope.dim, spec.sparse.group_rope.dim))


def _parts(cache: CacheSpec, first: Dims, dtype: str) -> tuple[TensorLayout, ...]:
    """Return one tensor per part of a state, with ``first`` as leading dims."""
    wide = dtype if dtype == "float64" else "float32"
    return tuple(
        TensorLayout(part.name, (*first, *_part_dims(part.shape)), wide if part.wide else dtype)
        for part in cache.parts
    )


def _part_dims(shape: tuple[int, ...]) -> Dims:
    """Return the named dims of a part: (head, row, width), (head, width) or (head)."""
    names = ("head", "row", "width") if len(shape) > 2 else ("head", "width")
    return tuple(zip(names[: len(shape)], shape, strict=True))
