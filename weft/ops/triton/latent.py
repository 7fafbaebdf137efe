"""Latent attention for rows of few queries: absorbed queries over paged lines, with keys in splits.

    cache        [blocks, block, LORA + ROPE]: a line is the key of all heads, its latent their value
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

import torch
import triton
import triton.language as tl

from weft.ops.triton import interpreting
from weft.ops.triton.attention import merge, padded
from weft.ops.triton.forms import KernelForm

Tensor = torch.Tensor

_LOG2E = 1.4426950408889634


# A row's columns lie anywhere in a step's columns. Do not compile a program per alignment.
@triton.jit(
    do_not_specialize=["table_stride", "split", "splits", "token_base"],
    do_not_specialize_on_alignment=["offsets_ptr", "starts_ptr", "table_ptr", "tiles_ptr"],
)
def _attend_latent(
    q_ptr,  # [T, HEADS, LORA + ROPE]
    out_ptr,  # [T, HEADS, LORA]; with SPLIT float32 [T - token_base, HEADS, splits, LORA]
    lse_ptr,  # with SPLIT float32 [T - token_base, HEADS, splits]
    cache_ptr,
    offsets_ptr,  # int32 [R + 1]
    starts_ptr,  # int64 [R]
    table_ptr,  # int64 [R, table_stride]
    tiles_ptr,  # int64 [tiles]: row << 32 | first query
    scale,
    table_stride,
    split,
    splits,
    token_base,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    LORA: tl.constexpr,
    LORA_P2: tl.constexpr,
    ROPE: tl.constexpr,
    ROPE_P2: tl.constexpr,
    BLOCK: tl.constexpr,
    WINDOW: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    SPLIT: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Compute one tile, one part of the heads, one split (or all keys), and write outputs (with SPLIT:
    states).
    """
    QUERIES: tl.constexpr = TILE_M // GROUP
    WIDTH: tl.constexpr = LORA + ROPE
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
    q = tl.load(q_ptr + places[:, None] * WIDTH + dims[None, :], mask=wanted, other=0.0)
    turned = tl.load(
        q_ptr + places[:, None] * WIDTH + LORA + turns[None, :],
        mask=live[:, None] & (turns[None, :] < ROPE),
        other=0.0,
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
        line_ptrs = cache_ptr + (block * BLOCK + keys % BLOCK) * WIDTH
        latent = tl.load(
            line_ptrs[:, None] + dims[None, :], mask=own[:, None] & (dims[None, :] < LORA), other=0.0
        )
        key = tl.load(
            line_ptrs[:, None] + LORA + turns[None, :],
            mask=own[:, None] & (turns[None, :] < ROPE),
            other=0.0,
        )
        if WIDEN:
            latent = latent.to(tl.float32)
            key = key.to(tl.float32)
        scores = tl.dot(q, tl.trans(latent), input_precision="ieee")
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
        acc = tl.dot(weights.to(latent.dtype), latent, acc * kept[:, None], input_precision="ieee")
        high = higher

    empty = total == 0.0
    acc = acc / tl.where(empty, 1.0, total)[:, None]
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
    out: Tensor,
    cache: Tensor,
    offsets: Tensor,
    starts: Tensor,
    table: Tensor,
    tiles: Tensor,
    *,
    form: KernelForm,
    group: int,
    window: int,
    scale: float,
    split: int = 0,
    splits: int = 1,
    tokens: tuple[int, int] = (0, 0),
) -> None:
    """Compute latent attention of ``tiles`` (int64 [n]: row << 32 | first query) into ``out``.

    q: [T, heads, lora + rope], absorbed and rotated; out: [T, heads, lora]; cache: [blocks, block, lora +
    rope]; all contiguous and of one dtype. offsets: int32 [R + 1], starts: int64 [R], table: int64 [R, W]. A
    tile has ``form.tile_m // group`` queries of ``group`` heads; ``group`` must divide the heads. Splits: see
    ``attention``.
    """
    heads, width = q.shape[1:]
    lora = out.shape[2]
    assert all(tensor.is_contiguous() for tensor in (q, out, cache)), "attention takes contiguous memory"
    assert q.dtype == cache.dtype, "queries and cache are of one dtype"
    assert split % form.tile_n == 0, "a split is whole steps"
    assert heads % group == 0, "parts of the heads are equal"
    begin, end = tokens
    target = lse = out
    if split:
        target = torch.empty((end - begin, heads, splits, lora), dtype=torch.float32, device=q.device)
        lse = torch.empty((end - begin, heads, splits), dtype=torch.float32, device=q.device)
    tensors = (q, target, lse, cache, offsets, starts, table, tiles)
    numbers = (scale * _LOG2E, table.stride(0), split, splits, begin)
    _attend_latent[(tiles.shape[0], heads // group, splits)](
        *tensors,
        *numbers,
        HEADS=heads,
        GROUP=group,
        LORA=lora,
        LORA_P2=padded(lora),
        ROPE=width - lora,
        ROPE_P2=padded(width - lora),
        BLOCK=cache.shape[1],
        WINDOW=window,
        TILE_M=form.tile_m,
        TILE_N=form.tile_n,
        SPLIT=split > 0,
        WIDEN=interpreting(),
        num_warps=form.warps,
        num_stages=form.stages,
    )
    if split:
        merge(target, lse, out, token_base=begin)
