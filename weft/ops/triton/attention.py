"""Paged attention in two kernels: one computes states for pieces of the keys, one merges states.

    cache        [blocks, 2, kv_heads, block, dim]: line ((b * 2 + kv) * kv_heads + h) * block + offset. In
                 8 bits: codes, and a scale per line (``eight_bits``)
    tile         TILE_M lines of one row's queries with one KV head: line m is query ``first + m // GROUP``,
                 head ``kv_head * GROUP + m % GROUP``; lines beyond the row's queries are idle
    keys         walked in steps of TILE_N at absolute multiples of TILE_N, from the first key that the tile's
                 first query sees to the last query's own
    split        keys [i * split, (i + 1) * split) of the row; each makes a state (normalized output, and the
                 log2 of the sum of exponentials), merged in order of i afterwards. In rows of one query, the
                 program that ends last merges the states of its heads; otherwise the second kernel does. Both
                 use the same function, so the bits are equal

One program computes one tile, one KV head, one split. The grid depends only on numbers that the host bounds.
All lengths are read on the device, so a launch can be captured in a CUDA graph.

Steps over keys visible to every query of a tile need no mask. In other steps, keys and values that no query
of the tile may see are loaded as 0. Their memory may contain another sequence's NaN, and 0 * NaN is NaN.

Source: Dao 2023, arXiv 2307.08691 (the walk); Flash-Decoding, pytorch.org/blog/flash-decoding (the splits).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from weft.ops.triton import interpreting
from weft.ops.triton.eight_bits import entries
from weft.ops.triton.forms import KernelForm, power
from weft.ops.triton.unpacking import halves

Tensor = torch.Tensor

MERGED = 8
"""Splits that the merge loads at a time."""
MOST_MERGED_HEADS = 8
"""Maximum heads of a KV head whose states the last program merges: one program reads all of the states."""
MOST_MERGED_STATES = 1024
"""Maximum states (heads times splits) that the last program merges."""
_LOG2E = 1.4426950408889634


@triton.jit
def _walk(
    acc,
    total,
    high,
    q,
    at,
    until,
    cache_ptr,
    scales_ptr,
    table_ptr,
    kv_head,
    scale,
    low,
    end,
    begin,
    stop,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_P2: tl.constexpr,
    BLOCK: tl.constexpr,
    WINDOW: tl.constexpr,
    TILE_N: tl.constexpr,
    MASKED: tl.constexpr,
    WIDEN: tl.constexpr,
    SOFTCAP: tl.constexpr,
    FP8: tl.constexpr,
    TYPE: tl.constexpr,
):
    """Add keys [begin, stop) to the running state (acc [M, D], total [M], high [M]) and return the state.

    A cache in 8 bits is read as ``halves``, too small by 2^8. The scales of keys multiply scores, and the
    scales of values multiply weights: powers of two, so the bits are those of dequantized entries. ``acc``
    stays too small by 2^8. In float16 weights times scales may underflow, so each entry is multiplied.
    at: positions of the lines [M]; until: ends of the visible keys of the lines [M]. Keys outside [low, end)
    belong to no query here. MASKED is required if there are such keys.
    """
    FACTORED: tl.constexpr = FP8 and tl.float16 != TYPE
    dims = tl.arange(0, DIM_P2)
    steps = tl.arange(0, TILE_N)
    for n in range(begin, stop, TILE_N):
        keys = n + steps
        own = (keys >= low) & (keys < end)
        if BLOCK % TILE_N == 0:
            block = tl.load(table_ptr + n // BLOCK).to(tl.int64)
            lines = block * (2 * KV_HEADS * BLOCK) + kv_head * BLOCK + (n % BLOCK) + steps
        else:
            if MASKED:
                block = tl.load(table_ptr + keys // BLOCK, mask=own, other=0).to(tl.int64)
            else:
                block = tl.load(table_ptr + keys // BLOCK).to(tl.int64)
            lines = block * (2 * KV_HEADS * BLOCK) + kv_head * BLOCK + keys % BLOCK
        k_ptrs = cache_ptr + lines[:, None] * DIM + dims[None, :]
        v_ptrs = k_ptrs + KV_HEADS * BLOCK * DIM
        if MASKED:
            wanted = own[:, None] & (dims[None, :] < DIM)
            k = tl.load(k_ptrs, mask=wanted, other=0)
            v = tl.load(v_ptrs, mask=wanted, other=0)
        elif DIM == DIM_P2:
            k = tl.load(k_ptrs)
            v = tl.load(v_ptrs)
        else:
            k = tl.load(k_ptrs, mask=dims[None, :] < DIM, other=0)
            v = tl.load(v_ptrs, mask=dims[None, :] < DIM, other=0)
        if FP8:
            k_scales = tl.load(scales_ptr + lines, mask=own, other=0.0)
            v_scales = tl.load(scales_ptr + KV_HEADS * BLOCK + lines, mask=own, other=0.0)
            if FACTORED:
                k = halves(k, False).to(TYPE)
                v = halves(v, False).to(TYPE)
            else:
                k = entries(k, k_scales, TYPE)
                v = entries(v, v_scales, TYPE)
        if WIDEN:
            k = k.to(tl.float32)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        if FACTORED:
            scores = scores * 256.0 * k_scales[None, :]
        scores = scores * scale
        if SOFTCAP > 0:
            # SOFTCAP * tanh: ``scale`` holds the factor of tanh by powers of two.
            scores = SOFTCAP - 2 * SOFTCAP / (tl.exp2(scores) + 1)
        if MASKED:
            seen = keys[None, :] < until[:, None]
            if WINDOW > 0:
                seen = seen & (keys[None, :] > at[:, None] - WINDOW)
            elif WINDOW < 0:
                seen = seen & (keys[None, :] >= at[:, None] // -WINDOW * -WINDOW)
            scores = tl.where(seen, scores, float("-inf"))
        higher = tl.maximum(high, tl.max(scores, 1))
        if MASKED:
            # Nothing visible so far: any finite base keeps exp2(-inf - base) at 0.
            base = tl.where(higher == float("-inf"), 0.0, higher)
        else:
            base = higher
        kept = tl.exp2(high - base)
        weights = tl.exp2(scores - base[:, None])
        total = total * kept + tl.sum(weights, 1)
        weights = weights.to(TYPE)
        if FACTORED:
            weights = (weights.to(tl.float32) * v_scales[None, :]).to(TYPE)
        if WIDEN:
            weights = weights.to(tl.float32)
            v = v.to(tl.float32)
        acc = tl.dot(weights, v, acc * kept[:, None], input_precision="ieee")
        high = higher
    return acc, total, high


@triton.jit
def _merged(
    part_ptr,
    lse_ptr,
    sinks_ptr,
    heads,  # [N]
    states,  # int64 [N]: first state of each head
    live,  # [N]: True if there are states
    splits,
    DIM: tl.constexpr,
    DIM_P2: tl.constexpr,
    MERGED: tl.constexpr,
    SINKS: tl.constexpr,
):
    """Return (outputs [N, DIM_P2], log2 of the sums [N]) of N heads. Empty states add 0.

    States are added one after the other, so that the bits of a head depend neither on N nor on the threads.
    Loads bypass the L1 cache, which may be older than the states of another multiprocessor.
    """
    dims = tl.arange(0, DIM_P2)
    chunk = tl.arange(0, MERGED)
    counts = tl.where(live, splits, 0)
    high = tl.full(states.shape, float("-inf"), dtype=tl.float32)
    for s in range(0, splits, MERGED):
        inside = s + chunk[None, :] < counts[:, None]
        lse_ptrs = lse_ptr + (states + s)[:, None] + chunk[None, :]
        lse = tl.load(lse_ptrs, mask=inside, other=float("-inf"), cache_modifier=".cg")
        high = tl.maximum(high, tl.max(lse, 1))
    # With only empty states all differences would be -inf - -inf: NaN.
    base = tl.where(high == float("-inf"), 0.0, high)
    total = tl.zeros(states.shape, dtype=tl.float32)
    acc = tl.zeros([states.shape[0], DIM_P2], dtype=tl.float32)
    for s in range(0, splits, MERGED):
        for i in tl.static_range(MERGED):
            inside = s + i < counts
            lse = tl.load(lse_ptr + states + s + i, mask=inside, other=float("-inf"), cache_modifier=".cg")
            wanted = (lse != float("-inf"))[:, None] & (dims[None, :] < DIM)
            part_ptrs = part_ptr + (states + s + i)[:, None] * DIM + dims[None, :]
            part = tl.load(part_ptrs, mask=wanted, other=0.0, cache_modifier=".cg")
            weight = tl.exp2(lse - base)
            acc = tl.fma(part, tl.broadcast_to(weight[:, None], acc.shape), acc)
            total += weight
    empty = total == 0.0
    if SINKS:
        sinks = tl.load(sinks_ptr + heads, mask=live, other=0.0).to(tl.float32)
        total += tl.exp2(sinks * 1.4426950408889634 - base)
    total = tl.where(empty, 1.0, total)
    return acc / total[:, None], tl.where(empty, float("-inf"), base + tl.log2(total))


# A row's columns lie anywhere in a step's columns. Do not compile a program per alignment.
@triton.jit(
    do_not_specialize=["table_stride", "split", "splits", "token_base"],
    do_not_specialize_on_alignment=["offsets_ptr", "starts_ptr", "table_ptr", "tiles_ptr", "ends_ptr"],
)
def _attend(
    q_ptr,  # [T, HEADS, DIM]
    out_ptr,  # [T, HEADS, DIM]; with SPLIT float32 [T - token_base, HEADS, splits, DIM]
    lse_ptr,  # with SPLIT float32 [T - token_base, HEADS, splits]
    merged_ptr,  # [T, HEADS, DIM], with MERGES
    counters_ptr,  # int32 [tiles, KV_HEADS], 0 before and after the launch, with MERGES
    cache_ptr,  # with FP8 codes, uint8
    cache_scales_ptr,  # float32 [blocks, 2, KV_HEADS, BLOCK], with FP8
    offsets_ptr,  # int32 [R + 1]
    starts_ptr,  # int64 [R]
    table_ptr,  # int64 [R, table_stride]
    tiles_ptr,  # int64 [tiles]: row << 32 | first query
    sinks_ptr,  # [HEADS], with SINKS
    ends_ptr,  # int64 [T], with ENDS
    scale,
    table_stride,
    split,
    splits,
    token_base,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_P2: tl.constexpr,
    BLOCK: tl.constexpr,
    WINDOW: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    SPLIT: tl.constexpr,
    PLAIN: tl.constexpr,
    WIDEN: tl.constexpr,
    SINKS: tl.constexpr,
    SOFTCAP: tl.constexpr,
    ENDS: tl.constexpr,
    FP8: tl.constexpr,
    MERGES: tl.constexpr,
    GROUP_P2: tl.constexpr,
    MERGED: tl.constexpr,
):
    """Compute one tile, one KV head, one split (or all keys), and write outputs (with SPLIT: states).

    With MERGES, a tile is one query, and the last program of its heads also merges the states.
    """
    GROUP: tl.constexpr = HEADS // KV_HEADS
    QUERIES: tl.constexpr = TILE_M // GROUP
    tile = tl.load(tiles_ptr + tl.program_id(0))
    kv_head = tl.program_id(1)
    row = tile >> 32
    first = (tile - (row << 32)).to(tl.int32)
    token = tl.load(offsets_ptr + row)
    count = tl.load(offsets_ptr + row + 1) - token
    start = tl.load(starts_ptr + row).to(tl.int32)
    last = tl.minimum(first + QUERIES, count)  # exclusive

    lines = tl.arange(0, TILE_M)
    dims = tl.arange(0, DIM_P2)
    query = first + lines // GROUP
    head = kv_head * GROUP + lines % GROUP
    live = (lines < QUERIES * GROUP) & (query < last)
    places = (token + query).to(tl.int64) * HEADS + head  # row of [T, HEADS]
    at = start + query
    until = at + 1
    if ENDS:
        own = tl.load(ends_ptr + token + query, mask=live, other=0).to(tl.int32)
        until = tl.maximum(until, own)

    # Keys visible to some query of the tile: [low, end). Steps visible to all queries: [all_begin, all_stop).
    behind = start + last
    end = behind
    if ENDS:
        end = tl.maximum(end, tl.max(tl.where(live, until, 0), 0))
    low = 0
    if WINDOW > 0:
        low = tl.maximum(start + first - WINDOW + 1, 0)
    elif WINDOW < 0:
        low = (start + first) // -WINDOW * -WINDOW
    begin = low
    stop = end
    if SPLIT:
        begin = tl.maximum(begin, tl.program_id(2) * split)
        stop = tl.minimum(stop, (tl.program_id(2) + 1) * split)
    begin = begin // TILE_N * TILE_N

    acc = tl.zeros([TILE_M, DIM_P2], dtype=tl.float32)
    total = tl.zeros([TILE_M], dtype=tl.float32)
    high = tl.full([TILE_M], float("-inf"), dtype=tl.float32)
    wanted = live[:, None] & (dims[None, :] < DIM)
    q = tl.load(q_ptr + places[:, None] * DIM + dims[None, :], mask=wanted, other=0.0)
    if WIDEN:
        q = q.to(tl.float32)
    row_table_ptr = table_ptr + row * table_stride
    # In an empty split (begin >= stop) every walk is empty.
    if PLAIN:
        all_begin = begin
        if WINDOW != 0:
            # the lowest key that the last query sees
            lowest = behind - WINDOW if WINDOW > 0 else (behind - 1) // -WINDOW * -WINDOW
            all_begin = tl.maximum(begin, (lowest + TILE_N - 1) // TILE_N * TILE_N)
            all_begin = tl.minimum(all_begin, (stop + TILE_N - 1) // TILE_N * TILE_N)
            acc, total, high = _walk(
                acc, total, high, q, at, until, cache_ptr, cache_scales_ptr, row_table_ptr, kv_head, scale,
                low, end, begin, tl.minimum(all_begin, stop),
                KV_HEADS, DIM, DIM_P2, BLOCK, WINDOW, TILE_N, True, WIDEN, SOFTCAP, FP8,
                q_ptr.dtype.element_ty,
            )  # fmt: skip
        all_stop = tl.minimum(start + first + 1, stop) // TILE_N * TILE_N
        all_stop = tl.maximum(all_stop, all_begin)
        acc, total, high = _walk(
            acc, total, high, q, at, until, cache_ptr, cache_scales_ptr, row_table_ptr, kv_head, scale,
            low, end, all_begin, all_stop,
            KV_HEADS, DIM, DIM_P2, BLOCK, WINDOW, TILE_N, False, WIDEN, SOFTCAP, FP8, q_ptr.dtype.element_ty,
        )  # fmt: skip
        begin = all_stop
    acc, total, high = _walk(
        acc, total, high, q, at, until, cache_ptr, cache_scales_ptr, row_table_ptr, kv_head, scale,
        low, end, begin, stop,
        KV_HEADS, DIM, DIM_P2, BLOCK, WINDOW, TILE_N, True, WIDEN, SOFTCAP, FP8, q_ptr.dtype.element_ty,
    )  # fmt: skip

    if SINKS and not SPLIT:
        sink = tl.load(sinks_ptr + head, mask=live, other=0.0).to(tl.float32) * 1.4426950408889634
        total = tl.where(total == 0.0, 1.0, total + tl.exp2(sink - high))
    acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    if FP8 and q_ptr.dtype.element_ty != tl.float16:
        acc *= 256.0
    if SPLIT:
        # An empty state has log-sum-exp -inf; the merge never reads its output.
        empty = total == 0.0
        lse = tl.where(empty, float("-inf"), high + tl.log2(tl.where(empty, 1.0, total)))
        states = (places - token_base * HEADS) * splits + tl.program_id(2)
        tl.store(lse_ptr + states, lse, mask=live)
        made = wanted & ~empty[:, None]
        tl.store(out_ptr + states[:, None] * DIM + dims[None, :], acc, mask=made)
        if MERGES:
            # All threads have stored before one of them counts, and whoever counts last sees all states.
            tl.debug_barrier()
            counter_ptr = counters_ptr + tl.program_id(0) * KV_HEADS + kv_head
            if tl.atomic_add(counter_ptr, 1, sem="acq_rel") == splits - 1:
                tl.store(counter_ptr, 0)
                # New names, because in Triton a name must have one shape before and in a branch.
                heads = kv_head * GROUP + tl.arange(0, GROUP_P2)
                there = tl.arange(0, GROUP_P2) < tl.where(count > 0, GROUP, 0)
                of = token.to(tl.int64) * HEADS + heads
                result, _ = _merged(
                    out_ptr, lse_ptr, sinks_ptr, heads, (of - token_base * HEADS) * splits, there, splits,
                    DIM, DIM_P2, MERGED, SINKS,
                )  # fmt: skip
                result_ptrs = merged_ptr + of[:, None] * DIM + dims[None, :]
                inside = there[:, None] & (dims[None, :] < DIM)
                tl.store(result_ptrs, result.to(merged_ptr.dtype.element_ty), mask=inside)
    else:
        out_ptrs = out_ptr + places[:, None] * DIM + dims[None, :]
        tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=wanted)


@triton.jit(do_not_specialize=["splits", "token_base"])
def _merge(
    part_ptr,  # float32 [T, HEADS, splits, DIM]
    lse_ptr,  # float32 [T, HEADS, splits], log2
    out_ptr,  # [token_base + T, HEADS, DIM]
    out_lse_ptr,  # float32 [T, HEADS], with LSE
    sinks_ptr,  # [HEADS], with SINKS
    splits,
    token_base,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_P2: tl.constexpr,
    MERGED: tl.constexpr,
    LSE: tl.constexpr,
    SINKS: tl.constexpr,
):
    """Merge the states of one head of one token."""
    dims = tl.arange(0, DIM_P2)
    head = tl.program_id(1) + tl.arange(0, 1)
    place = tl.program_id(0).to(tl.int64) * HEADS + head
    made, lse = _merged(
        part_ptr, lse_ptr, sinks_ptr, head, place * splits, head >= 0, splits, DIM, DIM_P2, MERGED, SINKS
    )
    out_ptrs = out_ptr + (place + token_base * HEADS)[:, None] * DIM + dims[None, :]
    tl.store(out_ptrs, made.to(out_ptr.dtype.element_ty), mask=(dims < DIM)[None, :])
    if LSE:
        tl.store(out_lse_ptr + place, lse)


def merge(
    part: Tensor,
    lse: Tensor,
    out: Tensor,
    out_lse: Tensor | None = None,
    token_base: int = 0,
    sinks: Tensor | None = None,
) -> None:
    """Merge S attention states of each token and head into ``out[token_base:]`` (and ``out_lse``).

    part: float32 [T, heads, S, dim], normalized outputs. lse: float32 [T, heads, S], the log2 of the sums of
    exponentials; -inf marks an empty state, and its output is not read. out: [token_base + T, heads, dim] of
    any served dtype; out_lse: float32 [T, heads]. If all states are empty, the results are 0 and -inf, never
    NaN. sinks: [heads], scores that take a share of the softmax and contribute no value.
    """
    tokens, heads, splits, dim = part.shape
    if not tokens:
        return
    _merge[(tokens, heads)](
        part,
        lse,
        out,
        lse if out_lse is None else out_lse,
        lse if sinks is None else sinks,
        splits,
        token_base,
        HEADS=heads,
        DIM=dim,
        DIM_P2=padded(dim),
        MERGED=MERGED,
        LSE=out_lse is not None,
        SINKS=sinks is not None,
        num_warps=4,
    )


def padded(dim: int) -> int:
    """Return the computed width of a head of ``dim``: a power of two, at least 16."""
    return max(16, power(dim))


def _states(out: Tensor, tokens: int, splits: int) -> tuple[Tensor, Tensor]:
    """Return memory for the states of ``splits`` pieces of keys, on the device of ``out`` [T, heads, dim]:
    outputs, float32 [tokens, heads, splits, dim], and logarithms of sums, float32 [tokens, heads, splits]."""
    shape = (tokens, out.shape[1], splits)
    return (
        torch.empty((*shape, out.shape[2]), dtype=torch.float32, device=out.device),
        torch.empty(shape, dtype=torch.float32, device=out.device),
    )


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
    window: int,
    scale: float,
    split: int = 0,
    splits: int = 1,
    tokens: tuple[int, int] = (0, 0),
    sinks: Tensor | None = None,
    softcap: float = 0.0,
    ends: Tensor | None = None,
    scales: Tensor | None = None,
    counters: Tensor | None = None,
) -> None:
    """Compute attention of ``tiles`` (int64 [n]: row << 32 | first query) into ``out``.

    q, out: contiguous [T, heads, dim]; cache: [blocks, 2, kv_heads, block, dim] of q's dtype, or E4M3 with
    ``scales``, float32 [blocks, 2, kv_heads, block]; offsets: int32 [R + 1], starts: int64 [R], table: int64
    [R, W]. A tile has ``form.tile_m // group`` queries. window: 0 for none, negative for chunks. split: keys
    of a split, a multiple of ``form.tile_n``, or 0 for one piece. With splits, the tiles must contain exactly
    the tokens [tokens[0], tokens[1]), and ``splits * split`` keys must cover every row. Else ``splits`` is 1.
    sinks: [heads], see ``merge``. softcap: cap of scores, or 0. ends: int64 [T], of the segment. counters:
    int32 zeros [n, kv_heads] for tiles of one query with splits; merges without a second kernel, zeros after.
    """
    heads, dim = q.shape[1:]
    kv_heads, block = cache.shape[2:4]
    assert all(tensor.is_contiguous() for tensor in (q, out, cache)), "attention takes contiguous memory"
    assert scales is not None or q.dtype == cache.dtype, "queries and cache are of one dtype"
    assert split % form.tile_n == 0, "a split is whole steps"
    assert form.tile_m >= heads // kv_heads, "a tile holds a query's heads"
    target, lse = _states(out, tokens[1] - tokens[0], splits) if split else (out, out)
    sizes = {"HEADS": heads, "KV_HEADS": kv_heads, "DIM": dim, "DIM_P2": padded(dim), "BLOCK": block}
    merges = split > 0 and counters is not None
    states = (target, lse, out, tiles if counters is None else counters)
    caches = (cache, q) if scales is None else (cache.view(torch.uint8), scales)
    optional = (q if sinks is None else sinks, starts if ends is None else ends)
    numbers = (scale * (2 / softcap if softcap else 1) * _LOG2E, table.stride(0), split, splits, tokens[0])
    _attend[(tiles.shape[0], kv_heads, splits)](
        q, *states, *caches, offsets, starts, table, tiles, *optional, *numbers, **sizes,
        WINDOW=window, TILE_M=form.tile_m, TILE_N=form.tile_n, SPLIT=split > 0, PLAIN=form.plain,
        WIDEN=interpreting(), SINKS=sinks is not None, SOFTCAP=softcap * _LOG2E, ENDS=ends is not None,
        FP8=scales is not None, MERGES=merges, GROUP_P2=power(heads // kv_heads), MERGED=MERGED,
        num_warps=form.warps, num_stages=form.stages,
    )  # fmt: skip
    if split and not merges:
        merge(target, lse, out, token_base=tokens[0], sinks=sinks)
