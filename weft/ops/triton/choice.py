"""Sparse attention: scores of an indexer, and the choice of groups.

    scores    float32 [T, groups]: sum over heads of ``weight * relu(q . key)``; keys are the last elements of
              the groups' entries
    choice    int64 [T, TOP]: the TOP groups of a token with the highest scores, ascending, then -1

Scores begin at absolute places, and both kernels have one form per model. So the choice of a token does not
depend on other tokens. Grids depend only on numbers that the host bounds.

Source: DeepSeek-V3.2 (2025), section 2.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from weft.ops.triton import interpreting
from weft.ops.triton.attention import padded

Tensor = torch.Tensor

SCORED = 64
"""Keys per step of the scores."""
WALKED = 4096
"""Scores per step of the choice; at most 32,767, because two counts share an int32."""


@triton.jit
def _tile(offsets_ptr, starts_ptr, tiles_ptr):
    """Return (row, first query, first token of the row, tokens of the row, context before the row)."""
    tile = tl.load(tiles_ptr + tl.program_id(0))
    row = tile >> 32
    first = (tile - (row << 32)).to(tl.int32)
    token = tl.load(offsets_ptr + row)
    count = tl.load(offsets_ptr + row + 1) - token
    return row, first, token, count, tl.load(starts_ptr + row).to(tl.int32)


# --- scores ---


@triton.jit
def _score_of(
    q_ptr, weights_ptr, keys, HEADS: tl.constexpr, HEADS_P2: tl.constexpr, DIM: tl.constexpr,
    DIM_P2: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Return the scores of ``keys`` [N, DIM_P2] for one query, float32 [N]."""
    heads = tl.arange(0, HEADS_P2)
    dims = tl.arange(0, DIM_P2)
    inside = (heads[:, None] < HEADS) & (dims[None, :] < DIM)
    q = tl.load(q_ptr + heads[:, None] * DIM + dims[None, :], mask=inside, other=0.0)
    if WIDEN:
        q = q.to(tl.float32)
    products = tl.dot(q, tl.trans(keys), input_precision="ieee")
    weights = tl.load(weights_ptr + heads, mask=heads < HEADS, other=0.0)
    return tl.sum(tl.maximum(products, 0.0) * weights[:, None], 0)


@triton.jit(
    do_not_specialize=["q_stride", "weights_stride", "table_stride", "scores_stride", "token_base"],
    do_not_specialize_on_alignment=["weights_ptr", "offsets_ptr", "starts_ptr", "table_ptr", "tiles_ptr"],
)
def _index_scores(
    q_ptr,  # [T, HEADS, DIM]; tokens lie apart
    weights_ptr,  # float32 [T, HEADS]; tokens lie apart
    cache_ptr,  # [blocks, PER_BLOCK, WIDTH]; a key is the last DIM elements
    offsets_ptr,  # int32 [R + 1]
    starts_ptr,  # int64 [R]
    table_ptr,  # int64 [R, table_stride]
    tiles_ptr,  # int64 [tiles]: row << 32 | first query
    scores_ptr,  # float32 [tokens, scores_stride]
    q_stride,
    weights_stride,
    table_stride,
    scores_stride,
    token_base,
    HEADS: tl.constexpr,
    HEADS_P2: tl.constexpr,
    DIM: tl.constexpr,
    DIM_P2: tl.constexpr,
    WIDTH: tl.constexpr,
    PER_BLOCK: tl.constexpr,
    RATIO: tl.constexpr,
    TOP: tl.constexpr,
    QUERIES: tl.constexpr,
    TILE_N: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Score some steps of TILE_N groups for QUERIES queries of a row.

    A tile without a query that sees more than TOP groups computes nothing: the choice reads no score then.
    """
    row, first, token, count, start = _tile(offsets_ptr, starts_ptr, tiles_ptr)
    last = tl.minimum(first + QUERIES, count)  # exclusive
    groups = (start + last) // RATIO  # visible to the last query
    if groups <= TOP:
        return
    steps = tl.arange(0, TILE_N)
    dims = tl.arange(0, DIM_P2)
    row_table_ptr = table_ptr + row * table_stride
    stride = tl.num_programs(1) * TILE_N
    for n in range(tl.program_id(1) * TILE_N, groups, stride):
        at = n + steps
        own = at < groups
        block = tl.load(row_table_ptr + at // PER_BLOCK, mask=own, other=0).to(tl.int64)
        line_ptrs = cache_ptr + (block * PER_BLOCK + at % PER_BLOCK) * WIDTH + (WIDTH - DIM)
        keys = tl.load(
            line_ptrs[:, None] + dims[None, :], mask=own[:, None] & (dims[None, :] < DIM), other=0.0
        )
        if WIDEN:
            keys = keys.to(tl.float32)
        for query in range(first, last):
            place = (token + query).to(tl.int64)
            made = _score_of(
                q_ptr + place * q_stride, weights_ptr + place * weights_stride, keys,
                HEADS, HEADS_P2, DIM, DIM_P2, WIDEN,
            )  # fmt: skip
            tl.store(scores_ptr + (place - token_base) * scores_stride + at, made, mask=own)


# --- choice ---


@triton.jit
def _keys_of(scores_ptr, at, live):
    """Return uint32 keys in the order of the scores. Zeros of both signs have one key."""
    scores = tl.load(scores_ptr + at, mask=live, other=0.0)
    scores = tl.where(scores == 0.0, 0.0, scores)
    bits = scores.to(tl.int32, bitcast=True)
    # Of a negative number all bits turn; of another the sign alone.
    turned = bits ^ ((bits >> 31) | (-2147483648))
    return turned.to(tl.uint32, bitcast=True)


@triton.jit(
    do_not_specialize=["scores_stride", "token_base"],
    do_not_specialize_on_alignment=["offsets_ptr", "starts_ptr", "tiles_ptr"],
)
def _choose(
    scores_ptr,  # float32 [tokens, scores_stride]
    chosen_ptr,  # int64 [T, TOP]
    offsets_ptr,  # int32 [R + 1]
    starts_ptr,  # int64 [R]
    tiles_ptr,  # int64 [tokens]: row << 32 | query
    scores_stride,
    token_base,
    RATIO: tl.constexpr,
    TOP: tl.constexpr,
    STEP: tl.constexpr,
):
    """Write the choice of one token.

    Four passes over the scores find the key of the last chosen score, 8 bits per pass from the highest on.
    One more pass writes the groups above this key, and of the groups with this key the lowest ones.
    """
    _row, query, token, count, start = _tile(offsets_ptr, starts_ptr, tiles_ptr)
    if query >= count:
        return
    place = (token + query).to(tl.int64)
    groups = (start + query + 1) // RATIO
    out_ptr = chosen_ptr + place * TOP
    steps = tl.arange(0, STEP)
    if groups <= TOP:
        for n in range(0, TOP, STEP):
            at = n + steps
            tl.store(out_ptr + at, tl.where(at < groups, at, -1).to(tl.int64), mask=at < TOP)
        return
    row_ptr = scores_ptr + (place - token_base) * scores_stride
    bins = tl.arange(0, 256)
    left = TOP  # groups to choose among those with the digits ``found`` so far
    found = tl.full([], 0, tl.uint32)
    for shift in tl.static_range(24, -8, -8):
        counts = tl.zeros([256], dtype=tl.int32)
        for n in range(0, groups, STEP):
            at = n + steps
            live = at < groups
            keys = _keys_of(row_ptr, at, live)
            if shift < 24:
                live = live & ((keys >> (shift + 8)) == found)
            counts += tl.histogram(((keys >> shift) & 255).to(tl.int32), 256, mask=live)
        above = tl.cumsum(counts, 0, reverse=True)  # groups with this digit or a higher one
        digit = tl.sum((above >= left).to(tl.int32), 0) - 1
        left -= tl.sum(tl.where(bins > digit, counts, 0), 0)
        found = (found << 8) | digit.to(tl.uint32)
    higher_before = 0
    equal_before = 0
    for n in range(0, groups, STEP):
        at = n + steps
        live = at < groups
        keys = _keys_of(row_ptr, at, live)
        higher = live & (keys > found)
        equal = live & (keys == found)
        # Two counts in one scan: higher keys in the low half, equal keys in the high half.
        ones = higher.to(tl.int32) + (equal.to(tl.int32) << 16)
        before = tl.cumsum(ones, 0) - ones
        rank = equal_before + (before >> 16)
        target = higher_before + (before & 0xFFFF) + tl.minimum(rank, left)
        tl.store(out_ptr + target, at.to(tl.int64), mask=higher | (equal & (rank < left)))
        together = tl.sum(ones, 0)
        higher_before += together & 0xFFFF
        equal_before += together >> 16


def index_scores(
    q: Tensor,
    weights: Tensor,
    scores: Tensor,
    cache: Tensor,
    offsets: Tensor,
    starts: Tensor,
    table: Tensor,
    tiles: Tensor,
    *,
    ratio: int,
    top: int,
    queries: int,
    programs: int,
    token_base: int = 0,
) -> None:
    """Write the scores of the groups that are visible to some query of a tile.

    q: [T, heads, dim] and weights: float32 [T, heads], tokens may lie apart. scores: float32 [tokens, groups]
    of the tokens from ``token_base`` on. cache: [blocks, per block, width] of q's dtype; a key is the last
    dim elements of a line. offsets: int32 [R + 1], starts: int64 [R], table: int64 [R, W]. tiles: int64
    [n], row << 32 | first query, of ``queries`` queries each. Tiles without a query that sees more than
    ``top`` groups write nothing. ``programs``: programs per tile; any number gives equal bits.
    """
    heads, dim = q.shape[1:]
    assert q.stride(2) == 1 and q.stride(1) == dim, "heads of a query are contiguous"  # noqa: PT018
    assert weights.stride(1) == 1 and scores.stride(1) == 1, "rows are contiguous"  # noqa: PT018
    assert cache.is_contiguous(), "attention takes contiguous memory"
    assert q.dtype == cache.dtype, "queries and cache are of one dtype"
    _index_scores[(tiles.shape[0], programs)](
        *(q, weights, cache, offsets, starts, table, tiles, scores),
        *(q.stride(0), weights.stride(0), table.stride(0), scores.stride(0), token_base),
        HEADS=heads,
        HEADS_P2=padded(heads),
        DIM=dim,
        DIM_P2=padded(dim),
        WIDTH=cache.shape[2],
        PER_BLOCK=cache.shape[1],
        RATIO=ratio,
        TOP=top,
        QUERIES=queries,
        TILE_N=SCORED if q.dtype != torch.float32 else 16,
        WIDEN=interpreting(),
        num_warps=4,
        num_stages=2 if q.dtype != torch.float32 else 1,
    )


def choose(
    scores: Tensor,
    chosen: Tensor,
    offsets: Tensor,
    starts: Tensor,
    tiles: Tensor,
    *,
    ratio: int,
    token_base: int = 0,
) -> None:
    """Write the highest groups of each token to ``chosen``, int64 [T, top]: ascending, then -1.

    scores: float32 [tokens, groups] of the tokens from ``token_base`` on; ties go to the lowest group, and
    zeros of both signs are equal. Scores of tokens that see at most ``top`` groups are not read. tiles:
    int64 [n], row << 32 | query, one per token.
    """
    assert chosen.is_contiguous(), "rows of the choice are contiguous"
    _choose[(tiles.shape[0],)](
        *(scores, chosen, offsets, starts, tiles, scores.stride(0), token_base),
        RATIO=ratio,
        TOP=chosen.shape[1],
        STEP=WALKED,
        num_warps=16,
    )
