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

from weft.ops.latent_ops import Rotation
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
    q_ptr, weights_ptr, cos_ptr, sin_ptr, first, second, rest, HEADS: tl.constexpr, HEADS_P2: tl.constexpr,
    DIM: tl.constexpr, HALF: tl.constexpr, HALF_P2: tl.constexpr, REST_P2: tl.constexpr,
    INTERLEAVED: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Return the scores of keys for one query, float32 [N].

    A key is ``first`` and ``second`` [N, HALF_P2], the two parts of the rotated elements, and ``rest``
    [N, REST_P2]. Queries are rotated here. HALF is 0 if queries are rotated: ``rest`` is then the whole key.
    """
    ROPE: tl.constexpr = 2 * HALF
    heads = tl.arange(0, HEADS_P2)
    there = heads < HEADS
    line_ptrs = (q_ptr + heads * DIM)[:, None]
    more = tl.arange(0, REST_P2)[None, :]
    q = tl.load(line_ptrs + ROPE + more, mask=there[:, None] & (more < DIM - ROPE), other=0.0)
    if WIDEN:
        q = q.to(tl.float32)
    products = tl.dot(q, tl.trans(rest), input_precision="ieee")
    if HALF > 0:
        pair = tl.arange(0, HALF_P2)
        inside = there[:, None] & (pair < HALF)[None, :]
        at = 2 * pair if INTERLEAVED else pair
        x = tl.load(line_ptrs + at[None, :], mask=inside, other=0.0)
        y = tl.load(line_ptrs + (at + 1 if INTERLEAVED else at + HALF)[None, :], mask=inside, other=0.0)
        cos = tl.load(cos_ptr + pair, mask=pair < HALF, other=0.0)[None, :]
        sin = tl.load(sin_ptr + pair, mask=pair < HALF, other=0.0)[None, :]
        narrow = x.dtype
        x = x.to(tl.float32)
        y = y.to(tl.float32)
        a = (x * cos - y * sin).to(narrow)
        b = (y * cos + x * sin).to(narrow)
        if WIDEN:
            a = a.to(tl.float32)
            b = b.to(tl.float32)
        products = tl.dot(a, tl.trans(first), products, input_precision="ieee")
        products = tl.dot(b, tl.trans(second), products, input_precision="ieee")
    weights = tl.load(weights_ptr + heads, mask=there, other=0.0).to(tl.float32)
    return tl.sum(tl.maximum(products, 0.0) * weights[:, None], 0)


@triton.jit
def _key_part(line_ptrs, own, BEGIN: tl.constexpr, SIZE: tl.constexpr, P2: tl.constexpr, WIDEN: tl.constexpr):
    """Return elements BEGIN .. BEGIN + SIZE - 1 of the lines, [N, P2]."""
    at = tl.arange(0, P2)[None, :]
    part = tl.load(line_ptrs[:, None] + BEGIN + at, mask=own[:, None] & (at < SIZE), other=0.0)
    if WIDEN:
        part = part.to(tl.float32)
    return part


@triton.jit(
    do_not_specialize=["q_stride", "weights_stride", "table_stride", "scores_stride", "token_base"],
    do_not_specialize_on_alignment=[
        "weights_ptr",
        "cos_ptr",
        "sin_ptr",
        "offsets_ptr",
        "starts_ptr",
        "table_ptr",
        "tiles_ptr",
    ],
)
def _index_scores(
    q_ptr,  # [T, HEADS, DIM]; tokens lie apart
    weights_ptr,  # [T, HEADS]; tokens lie apart
    cos_ptr,  # float32 [T, HALF], with HALF
    sin_ptr,
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
    HALF: tl.constexpr,
    HALF_P2: tl.constexpr,
    REST_P2: tl.constexpr,
    INTERLEAVED: tl.constexpr,
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
    ROPE: tl.constexpr = 2 * HALF
    steps = tl.arange(0, TILE_N)
    row_table_ptr = table_ptr + row * table_stride
    stride = tl.num_programs(1) * TILE_N
    for n in range(tl.program_id(1) * TILE_N, groups, stride):
        at = n + steps
        own = at < groups
        block = tl.load(row_table_ptr + at // PER_BLOCK, mask=own, other=0).to(tl.int64)
        line_ptrs = cache_ptr + (block * PER_BLOCK + at % PER_BLOCK) * WIDTH + (WIDTH - DIM)
        rest = _key_part(line_ptrs, own, ROPE, DIM - ROPE, REST_P2, WIDEN)
        front = rest
        back = rest
        if HALF > 0:
            front = _key_part(line_ptrs, own, 0, HALF, HALF_P2, WIDEN)
            back = _key_part(line_ptrs, own, HALF, HALF, HALF_P2, WIDEN)
        for query in range(first, last):
            place = (token + query).to(tl.int64)
            made = _score_of(
                q_ptr + place * q_stride, weights_ptr + place * weights_stride, cos_ptr + place * HALF,
                sin_ptr + place * HALF, front, back, rest, HEADS, HEADS_P2, DIM, HALF, HALF_P2, REST_P2,
                INTERLEAVED, WIDEN,
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
    rotation: Rotation | None = None,
) -> None:
    """Write the scores of the groups that are visible to some query of a tile.

    q: [T, heads, dim] and weights: [T, heads], tokens may lie apart. scores: float32 [tokens, groups]
    of the tokens from ``token_base`` on. cache: [blocks, per block, width] of q's dtype; a key is the last
    dim elements of a line. offsets: int32 [R + 1], starts: int64 [R], table: int64 [R, W]. tiles: int64
    [n], row << 32 | first query, of ``queries`` queries each. Tiles without a query that sees more than
    ``top`` groups write nothing. ``programs``: programs per tile; any number gives equal bits. rotation: of
    the first elements of q, by angles float32 [T, rope / 2], computed here; None if q is rotated.
    """
    heads, dim = q.shape[1:]
    assert q.stride(2) == 1 and q.stride(1) == dim, "heads of a query are contiguous"  # noqa: PT018
    assert weights.stride(1) == 1 and scores.stride(1) == 1, "rows are contiguous"  # noqa: PT018
    assert cache.is_contiguous(), "attention takes contiguous memory"
    assert q.dtype == cache.dtype, "queries and cache are of one dtype"
    cos, sin, interleaved = Rotation(weights, weights, False) if rotation is None else rotation
    assert rotation is None or (cos.is_contiguous() and sin.is_contiguous()), "rows of angles lie apart"
    half = 0 if rotation is None else cos.shape[1]
    assert 2 * half <= dim, "a key is shorter than its rotated part"
    _index_scores[(tiles.shape[0], programs)](
        *(q, weights, cos, sin, cache, offsets, starts, table, tiles, scores),
        *(q.stride(0), weights.stride(0), table.stride(0), scores.stride(0), token_base),
        HEADS=heads,
        HEADS_P2=padded(heads),
        DIM=dim,
        HALF=half,
        HALF_P2=padded(half),
        REST_P2=padded(dim - 2 * half),
        INTERLEAVED=interleaved,
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
