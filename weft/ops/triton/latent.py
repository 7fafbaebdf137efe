"""Latent attention: cache entries, and absorbed queries over paged lines, with keys in splits.

``latent_rope_cache`` writes the entries of a step. ``attend`` serves rows of few queries and rotates the
queries itself.

    cache        [blocks, block, LORA + ROPE]: a line is the key of all heads, its latent their value. In
                 8 bits: codes of the latents, a scale per latent (``eight_bits``), a cache of rotated keys
    tile         TILE_M lines of one row's queries: line m is query ``first + m // GROUP``, head
                 ``part * GROUP + m % GROUP`` of the heads' part
    keys         walked in steps of TILE_N at absolute multiples of TILE_N, from the first key that the tile's
                 first query sees to the last query's own
    split        keys [i * split, (i + 1) * split) of the row; each makes a state of LORA dims

As in attention.py, the grid depends only on numbers that the host bounds, states are merged in order, and
lines invisible to all queries of a tile are loaded as 0. A line is read once for its scores and its values.

Source: arXiv 2405.04434, section 2.1; Flash-Decoding, pytorch.org/blog/flash-decoding (the splits).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
import triton
import triton.language as tl

from weft.ops import latent_ops
from weft.ops.latent_ops import IndexParts, Rotation
from weft.ops.triton import interpreting
from weft.ops.triton.attention import merge, padded
from weft.ops.triton.eight_bits import entries, tensors_of
from weft.ops.triton.forms import KernelForm, power
from weft.ops.triton.fused import LONGEST_ROW
from weft.ops.triton.indexed import _latent_rope_cache, _rotated
from weft.ops.triton.unpacking import halves

Tensor = torch.Tensor

_LOG2E = 1.4426950408889634
# Weights of the norms of the queries' part (or None) and of the latents, and epsilon.
Norms: TypeAlias = tuple[Tensor | None, Tensor, float]


def latent_rope_cache(
    joined: Tensor,
    q_weight: Tensor | None,
    weight: Tensor,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool,
    cache: Tensor,
    writes: Tensor,
    index: IndexParts | None = None,
) -> Tensor:
    """Compute ``latent_ops.latent_rope_cache`` in one pass: write the entries, return the queries' part.

    With ``index``, write also the indexer's key of each token, the last elements of a line. The cache must be
    contiguous; cos and sin are float32.
    """
    norms, rotation = (q_weight, weight, eps), Rotation(cos, sin, interleaved)
    if not _fits(joined, norms, rotation):
        _write_index_key(index, rotation, cache, writes)
        return latent_ops.latent_rope_cache(joined, *norms, *rotation, cache, writes)
    return _write(joined, norms, rotation, (cache,), writes, index)


def latent_rope_cache_fp8(
    joined: Tensor,
    q_weight: Tensor | None,
    weight: Tensor,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool,
    cache: Tensor,
    scales: Tensor,
    keys: Tensor,
    writes: Tensor,
    index: IndexParts | None = None,
) -> Tensor:
    """Compute ``latent_ops.latent_rope_cache_fp8`` in one pass, with equal codes for equal latents.

    With ``index``, write also the indexer's key of each token, the last elements of a line of ``keys``.
    """
    norms, rotation = (q_weight, weight, eps), Rotation(cos, sin, interleaved)
    if not _fits(joined, norms, rotation):
        _write_index_key(index, rotation, keys, writes)
        return latent_ops.latent_rope_cache_fp8(joined, *norms, *rotation, cache, scales, keys, writes)
    return _write(joined, norms, rotation, (cache, scales, keys), writes, index)


def _write_index_key(index: IndexParts | None, rotation: Rotation, cache: Tensor, writes: Tensor) -> None:
    """Write the indexer's key of each token to the end of a line of ``cache``, by torch."""
    if index is not None:
        key = index.key(rotation.cos, rotation.sin).to(cache.dtype)
        cache.view(-1, cache.shape[2])[:, -key.shape[1] :].index_copy_(0, writes, key)


def _first(joined: Tensor, norms: Norms, rotation: Rotation) -> int:
    """Return the number of elements of the queries' part."""
    return joined.shape[1] - len(norms[1]) - 2 * rotation.cos.shape[1]


def _fits(joined: Tensor, norms: Norms, rotation: Rotation) -> bool:
    """Return True if the kernel can normalize the queries' part and the latents."""
    return max(_first(joined, norms, rotation), len(norms[1])) <= LONGEST_ROW


def _write(
    joined: Tensor,
    norms: Norms,
    rotation: Rotation,
    caches: tuple[Tensor, ...],
    writes: Tensor,
    index: IndexParts | None,
) -> Tensor:
    """Write the entries of a step, and return the queries' part [T, first].

    caches: of the layer, see ``tensors_of``.
    """
    q_weight, weight, eps = norms
    cos, sin, interleaved = rotation
    tokens, lora, rope = len(joined), len(weight), 2 * cos.shape[1]
    first = _first(joined, norms, rotation)
    joined = joined if joined.stride(1) == 1 else joined.contiguous()
    q = joined[:, :first]
    if q_weight is not None:
        q = torch.empty((tokens, first), dtype=joined.dtype, device=joined.device)
    if not tokens:
        return q
    assert cos.dtype == torch.float32, "angles are wide"
    of_index = (joined, weight, weight) if index is None else (index.joined, index.norm, index.bias)
    assert of_index[0].stride(1) == 1, "rows are contiguous"
    dim = 1 if index is None else len(index.norm)
    _latent_rope_cache[(tokens, 1 + (q_weight is not None) + (index is not None))](
        *(joined, weight if q_weight is None else q_weight, weight, cos.contiguous(), sin.contiguous()),
        *(*tensors_of(caches), writes, q, *of_index, joined.stride(0), of_index[0].stride(0), eps),
        0.0 if index is None else index.eps,
        **{"FIRST": first, "FIRST_P2": power(first), "LORA": lora, "LORA_P2": power(lora)},
        **{"ROPE": rope, "ROPE_P2": power(rope)},
        WIDTH=caches[0].shape[2],
        KEYS_WIDTH=caches[-1].shape[2],
        FP8=len(caches) > 1,
        INTERLEAVED=interleaved,
        Q_NORM=q_weight is not None,
        INDEX=index is not None,
        DIM=dim,
        DIM_P2=power(dim),
        INDEX_INTERLEAVED=index is not None and index.interleaved,
        num_warps=4,
    )
    return q


def entry_writer(fp8: bool) -> Callable[..., Tensor]:
    """Return the function that writes the entries of sparse latent attention; see
    ``latent_ops.entry_writer``."""
    return latent_rope_cache_fp8 if fp8 else latent_rope_cache


# A row's columns lie anywhere in a step's columns. Do not compile a program per alignment.
@triton.jit(
    do_not_specialize=["table_stride", "split", "splits", "token_base"],
    do_not_specialize_on_alignment=[
        "offsets_ptr",
        "starts_ptr",
        "table_ptr",
        "tiles_ptr",
        "cos_ptr",
        "sin_ptr",
    ],
)
def _attend_latent(
    q_ptr,  # [T, HEADS, LORA], absorbed
    turned_ptr,  # [T, HEADS, LINE], not rotated; the last ROPE elements are read; tokens lie apart
    cos_ptr,  # float32 [T, ROPE / 2]
    sin_ptr,
    out_ptr,  # [T, HEADS, LORA]; with SPLIT float32 [T - token_base, HEADS, splits, LORA]
    lse_ptr,  # with SPLIT float32 [T - token_base, HEADS, splits]
    cache_ptr,  # [blocks * BLOCK, WIDTH]; with FP8 codes, uint8
    scales_ptr,  # float32 [blocks * BLOCK], with FP8
    keys_ptr,  # the cache, with rotated keys behind the latents; with FP8 [blocks * BLOCK, ROPE]
    offsets_ptr,  # int32 [R + 1]
    starts_ptr,  # int64 [R]
    table_ptr,  # int64 [R, table_stride]
    tiles_ptr,  # int64 [tiles]: row << 32 | first query
    scale,
    turned_stride,
    table_stride,
    split,
    splits,
    token_base,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    LINE: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    LORA: tl.constexpr,
    LORA_P2: tl.constexpr,
    ROPE: tl.constexpr,
    ROPE_P2: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
    FP8: tl.constexpr,
    WINDOW: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    SPLIT: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Compute one tile, one part of the heads, one split (or all keys), and write outputs (with SPLIT:
    states).

    Latents in 8 bits are read as ``halves``, too small by 2^8, and their scales multiply scores and weights,
    as in ``attention._walk``.
    """
    QUERIES: tl.constexpr = TILE_M // GROUP
    TYPE: tl.constexpr = turned_ptr.dtype.element_ty
    FACTORED: tl.constexpr = FP8 and tl.float16 != TYPE
    KEYS_WIDTH: tl.constexpr = ROPE if FP8 else WIDTH
    KEYS_FROM: tl.constexpr = 0 if FP8 else LORA
    tile = tl.load(tiles_ptr + tl.program_id(0))
    row = tile >> 32
    first = (tile - (row << 32)).to(tl.int32)
    token = tl.load(offsets_ptr + row)
    count = tl.load(offsets_ptr + row + 1) - token
    start = tl.load(starts_ptr + row).to(tl.int32)
    last = tl.minimum(first + QUERIES, count)  # exclusive

    lines = tl.arange(0, TILE_M)
    query = first + lines // GROUP
    head = tl.program_id(1) * GROUP + lines % GROUP
    live = (lines < QUERIES * GROUP) & (query < last)
    places = (token + query).to(tl.int64) * HEADS + head  # row of [T, HEADS]
    at = start + query

    end = start + last
    low = 0
    if WINDOW > 0:
        low = tl.maximum(start + first - WINDOW + 1, 0)
    begin = low
    stop = end
    if SPLIT:
        begin = tl.maximum(begin, tl.program_id(2) * split)
        stop = tl.minimum(stop, (tl.program_id(2) + 1) * split)
    begin = begin // TILE_N * TILE_N

    dims = tl.arange(0, LORA_P2)
    turns = tl.arange(0, ROPE_P2)
    wanted = live[:, None] & (dims[None, :] < LORA)
    q = tl.load(q_ptr + places[:, None] * LORA + dims[None, :], mask=wanted, other=0.0)
    turned = _rotated(
        turned_ptr + (token + query).to(tl.int64) * turned_stride + head * LINE + (LINE - ROPE),
        cos_ptr,
        sin_ptr,
        token + query,
        live,
        turns,
        ROPE,
        INTERLEAVED,
    )
    if WIDEN:
        q = q.to(tl.float32)
        turned = turned.to(tl.float32)
    acc = tl.zeros([TILE_M, LORA_P2], dtype=tl.float32)
    total = tl.zeros([TILE_M], dtype=tl.float32)
    high = tl.full([TILE_M], float("-inf"), dtype=tl.float32)
    steps = tl.arange(0, TILE_N)
    row_table_ptr = table_ptr + row * table_stride
    for n in range(begin, stop, TILE_N):
        keys = n + steps
        own = (keys >= low) & (keys < end)
        block = tl.load(row_table_ptr + keys // BLOCK, mask=own, other=0).to(tl.int64)
        entry = block * BLOCK + keys % BLOCK
        latent = tl.load(
            cache_ptr + entry[:, None] * WIDTH + dims[None, :],
            mask=own[:, None] & (dims[None, :] < LORA),
            other=0,
        )
        key = tl.load(
            keys_ptr + entry[:, None] * KEYS_WIDTH + KEYS_FROM + turns[None, :],
            mask=own[:, None] & (turns[None, :] < ROPE),
            other=0.0,
        )
        if FP8:
            scales = tl.load(scales_ptr + entry, mask=own, other=0.0)
            latent = halves(latent, False).to(TYPE) if FACTORED else entries(latent, scales, TYPE)
        if WIDEN:
            latent = latent.to(tl.float32)
            key = key.to(tl.float32)
        scores = tl.dot(q, tl.trans(latent), input_precision="ieee")
        if FACTORED:
            scores = scores * 256.0 * scales[None, :]
        scores = tl.dot(turned, tl.trans(key), scores, input_precision="ieee") * scale
        seen = keys[None, :] <= at[:, None]
        if WINDOW > 0:
            seen = seen & (keys[None, :] > at[:, None] - WINDOW)
        scores = tl.where(seen, scores, float("-inf"))
        higher = tl.maximum(high, tl.max(scores, 1))
        # Nothing visible so far: any finite base keeps exp2(-inf - base) at 0.
        base = tl.where(higher == float("-inf"), 0.0, higher)
        kept = tl.exp2(high - base)
        weights = tl.exp2(scores - base[:, None])
        total = total * kept + tl.sum(weights, 1)
        weights = weights.to(TYPE)
        if FACTORED:
            weights = (weights.to(tl.float32) * scales[None, :]).to(TYPE)
        acc = tl.dot(weights.to(latent.dtype), latent, acc * kept[:, None], input_precision="ieee")
        high = higher

    empty = total == 0.0
    acc = acc / tl.where(empty, 1.0, total)[:, None]
    if FACTORED:
        acc *= 256.0
    if SPLIT:
        # An empty state has log-sum-exp -inf; the merge never reads its output.
        lse = tl.where(empty, float("-inf"), high + tl.log2(tl.where(empty, 1.0, total)))
        states = (places - token_base * HEADS) * splits + tl.program_id(2)
        tl.store(lse_ptr + states, lse, mask=live)
        tl.store(out_ptr + states[:, None] * LORA + dims[None, :], acc, mask=wanted & ~empty[:, None])
    else:
        out_ptrs = out_ptr + places[:, None] * LORA + dims[None, :]
        tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=wanted)


def attend(
    q: Tensor,
    turned: Tensor,
    angles: tuple[Tensor, Tensor],
    out: Tensor,
    caches: tuple[Tensor, ...],
    offsets: Tensor,
    starts: Tensor,
    table: Tensor,
    tiles: Tensor,
    *,
    interleaved: bool,
    form: KernelForm,
    group: int,
    window: int,
    scale: float,
    split: int = 0,
    splits: int = 1,
    tokens: tuple[int, int] = (0, 0),
) -> None:
    """Compute latent attention of ``tiles`` (int64 [n]: row << 32 | first query) into ``out``.

    q: [T, heads, lora], absorbed; turned: [T, heads, nope + rope], of which the last rope elements are read
    and rotated by ``angles``, float32 [T, rope / 2] each; out: [T, heads, lora]; caches: [blocks, block, lora
    + rope], or latents in 8 bits, scales and rotated keys, see ``latent_ops.latent_rope_cache_fp8``. All else
    of one dtype; tokens of ``turned`` may lie apart. offsets: int32 [R + 1], starts: int64 [R], table: int64
    [R, W]. A tile has ``form.tile_m // group`` queries of ``group`` heads; ``group`` must divide the heads.
    Splits: see ``attention``.
    """
    heads, lora = q.shape[1:]
    cos, sin = (one.contiguous() for one in angles)
    cache = tensors_of(caches)
    rope = 2 * cos.shape[1]
    assert all(one.is_contiguous() for one in (turned[0], q, out)), "attention takes contiguous memory"
    assert q.dtype == turned.dtype == cache[2].dtype, "queries and cache are of one dtype"
    assert split % form.tile_n == 0, "a split is whole steps"
    assert heads % group == 0, "parts of the heads are equal"
    begin, end = tokens
    target = lse = out
    if split:
        target = torch.empty((end - begin, heads, splits, lora), dtype=torch.float32, device=q.device)
        lse = torch.empty((end - begin, heads, splits), dtype=torch.float32, device=q.device)
    _attend_latent[(tiles.shape[0], heads // group, splits)](
        *(q, turned, cos, sin, target, lse, *cache, offsets, starts, table, tiles),
        *(scale * _LOG2E, turned.stride(0), table.stride(0), split, splits, begin),
        **{"HEADS": heads, "GROUP": group, "LINE": turned.shape[2], "INTERLEAVED": interleaved},
        **{"LORA": lora, "LORA_P2": padded(lora), "ROPE": rope, "ROPE_P2": padded(rope)},
        BLOCK=cache[0].shape[1],
        WIDTH=cache[0].shape[2],
        FP8=len(caches) > 1,
        WINDOW=window,
        TILE_M=form.tile_m,
        TILE_N=form.tile_n,
        SPLIT=split > 0,
        WIDEN=interpreting(),
        **{"num_warps": form.warps, "num_stages": form.stages},
    )
    if split:
        merge(target, lse, out, token_base=begin)
