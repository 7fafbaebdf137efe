"""Sparse attention to a token's list of entries.

    list      window entries in order, then groups: the chosen ones (``choice``), or all that are complete at
              the token

    8 bits    an entry is codes of its first elements with a scale, and exact elements behind. If the codes
              are the whole value, scales multiply scores and weights, as in ``latent``

Lists start at absolute places, and the kernel has one form per model. Grids depend only on numbers that the
host bounds; a program returns at the end of its list.

Sources: DeepSeek-V3.2 (2025), section 2; Flash-Decoding, pytorch.org/blog/flash-decoding (the splits).
"""

from __future__ import annotations

from typing import TypeAlias

import torch
import triton
import triton.language as tl

from weft.ops.latent_ops import Rotation
from weft.ops.triton import interpreting
from weft.ops.triton.attention import merge, padded
from weft.ops.triton.choice import _tile
from weft.ops.triton.eight_bits import entries, tensors_of
from weft.ops.triton.forms import KernelForm
from weft.ops.triton.indexed import _rotated
from weft.ops.triton.unpacking import halves

Tensor = torch.Tensor
PagedLines: TypeAlias = tuple[tuple[Tensor, ...], Tensor]

_LOG2E = 1.4426950408889634


@triton.jit
def _walk_lines(
    acc, total, high, q, rest, codes_ptr, scales_ptr, exact_ptr, table_ptr, chosen_ptr, base, begin, stop,
    low, scale, CODED: tl.constexpr, WIDTH: tl.constexpr, PER_BLOCK: tl.constexpr, VALUES: tl.constexpr,
    VALUES_P2: tl.constexpr, REST: tl.constexpr, REST_P2: tl.constexpr, TILE_N: tl.constexpr,
    CHOSEN: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Attend to places [begin, stop) of a list and return the new state. Place i below ``low`` is empty;
    else the entry is ``base + i``, or with CHOSEN element i of ``chosen_ptr``.

    An entry has WIDTH elements at ``exact_ptr``, behind CODED codes (0: a plain cache).
    """
    TYPE: tl.constexpr = exact_ptr.dtype.element_ty
    FACTORED: tl.constexpr = CODED == VALUES and tl.float16 != TYPE
    steps = tl.arange(0, TILE_N)
    dims = tl.arange(0, VALUES_P2)
    more = tl.arange(0, REST_P2)
    for n in range(begin, stop, TILE_N):
        at = n + steps
        own = (at >= low) & (at < stop)
        entry = base + at
        if CHOSEN:
            entry = tl.load(chosen_ptr + at, mask=own, other=0).to(tl.int32)
        entry = tl.where(own, entry, 0)
        block = tl.load(table_ptr + entry // PER_BLOCK, mask=own, other=0).to(tl.int64)
        place = block * PER_BLOCK + entry % PER_BLOCK
        # Element CODED of an entry is the first element of an exact line.
        line_ptrs = exact_ptr + place * WIDTH - CODED
        wanted = own[:, None] & (dims[None, :] < VALUES)
        if CODED > 0:
            codes = tl.load(
                codes_ptr + place[:, None] * CODED + dims[None, :],
                mask=wanted & (dims[None, :] < CODED),
                other=0,
            )
            scales = tl.load(scales_ptr + place, mask=own, other=0.0)
            lines = halves(codes, False).to(TYPE) if FACTORED else entries(codes, scales, TYPE)
            if CODED < VALUES:
                behind = dims[None, :] >= CODED
                exact = tl.load(line_ptrs[:, None] + dims[None, :], mask=wanted & behind, other=0.0)
                lines = tl.where(behind, exact, lines)
        else:
            lines = tl.load(line_ptrs[:, None] + dims[None, :], mask=wanted, other=0.0)
        if WIDEN:
            lines = lines.to(tl.float32)
        scores = tl.dot(q, tl.trans(lines), input_precision="ieee")
        if FACTORED:
            # The numbers of codes are too small by 2^8.
            scales *= 256.0
            scores *= scales[None, :]
        if REST > 0:
            keys = tl.load(
                line_ptrs[:, None] + VALUES + more[None, :],
                mask=own[:, None] & (more[None, :] < REST),
                other=0.0,
            )
            if WIDEN:
                keys = keys.to(tl.float32)
            scores = tl.dot(rest, tl.trans(keys), scores, input_precision="ieee")
        scores = tl.where(own[None, :], scores * scale, float("-inf"))
        higher = tl.maximum(high, tl.max(scores, 1))
        # Nothing visible so far: any finite base keeps exp2(-inf - base) at 0.
        level = tl.where(higher == float("-inf"), 0.0, higher)
        kept = tl.exp2(high - level)
        weights = tl.exp2(scores - level[:, None])
        total = total * kept + tl.sum(weights, 1)
        weights = weights.to(lines.dtype)
        if FACTORED:
            weights = (weights.to(tl.float32) * scales[None, :]).to(lines.dtype)
        acc = tl.dot(weights, lines, acc * kept[:, None], input_precision="ieee")
        high = higher
    return acc, total, high


@triton.jit(
    do_not_specialize=["entries_stride", "groups_stride", "split", "splits", "token_base", "turning_stride"],
    do_not_specialize_on_alignment=[
        "offsets_ptr",
        "starts_ptr",
        "entries_table_ptr",
        "groups_table_ptr",
        "chosen_ptr",
        "cos_ptr",
        "sin_ptr",
        "tiles_ptr",
    ],
)
def _attend_lines(
    q_ptr,  # [T, HEADS, VALUES + REST], with TURNS [T, HEADS, VALUES]
    turning_ptr,  # with TURNS: [T, HEADS, LINE], not rotated; the last REST are read; tokens lie apart
    cos_ptr,  # with TURNS: float32 [T, REST / 2]
    sin_ptr,
    out_ptr,  # [T, HEADS, VALUES]; with SPLIT float32 [T - token_base, HEADS, splits, VALUES]
    lse_ptr,  # with SPLIT float32 [T - token_base, HEADS, splits]
    entries_codes_ptr,  # with WINDOW and ENTRIES_CODED: uint8 [blocks, ENTRIES_BLOCK, ENTRIES_CODED]
    entries_scales_ptr,  # float32 [blocks, ENTRIES_BLOCK]
    entries_ptr,  # with WINDOW: exact elements [blocks, ENTRIES_BLOCK, ENTRIES_WIDTH]
    groups_codes_ptr,  # with RATIO and GROUPS_CODED: uint8 [blocks, GROUPS_BLOCK, GROUPS_CODED]
    groups_scales_ptr,  # float32 [blocks, GROUPS_BLOCK]
    groups_ptr,  # with RATIO: exact elements [blocks, GROUPS_BLOCK, GROUPS_WIDTH]
    offsets_ptr,  # int32 [R + 1]
    starts_ptr,  # int64 [R]
    entries_table_ptr,  # int64 [R, entries_stride]
    groups_table_ptr,  # int64 [R, groups_stride]
    chosen_ptr,  # with CHOSEN: int64 [T, TOP]
    sinks_ptr,  # with SINKS: [HEADS]
    tiles_ptr,  # int64 [tokens]: row << 32 | query
    scale,
    entries_stride,
    groups_stride,
    split,
    splits,
    token_base,
    turning_stride,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    VALUES: tl.constexpr,
    VALUES_P2: tl.constexpr,
    REST: tl.constexpr,
    REST_P2: tl.constexpr,
    TURNS: tl.constexpr,
    LINE: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    WINDOW: tl.constexpr,
    ENTRIES_BLOCK: tl.constexpr,
    ENTRIES_CODED: tl.constexpr,
    ENTRIES_WIDTH: tl.constexpr,
    RATIO: tl.constexpr,
    GROUPS_BLOCK: tl.constexpr,
    GROUPS_CODED: tl.constexpr,
    GROUPS_WIDTH: tl.constexpr,
    CHOSEN: tl.constexpr,
    TOP: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    SPLIT: tl.constexpr,
    SINKS: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Compute one token, one part of the heads, one split of the list (or all), and write outputs (with
    SPLIT: states).

    The window takes a whole number of steps at the front of the list, so that no step reads two caches.
    """
    FRONT: tl.constexpr = (WINDOW + TILE_N - 1) // TILE_N * TILE_N
    row, query, token, count, start = _tile(offsets_ptr, starts_ptr, tiles_ptr)
    if query >= count:
        return
    at = start + query
    place = (token + query).to(tl.int64)
    lines = tl.arange(0, TILE_M)
    head = tl.program_id(1) * GROUP + lines
    live = lines < GROUP
    dims = tl.arange(0, VALUES_P2)
    more = tl.arange(0, REST_P2)
    wanted = live[:, None] & (dims[None, :] < VALUES)
    Q_LINE: tl.constexpr = VALUES if TURNS else VALUES + REST
    line_ptrs = q_ptr + (place * HEADS + head)[:, None] * Q_LINE
    q = tl.load(line_ptrs + dims[None, :], mask=wanted, other=0.0)
    rest = q
    if TURNS:
        rest = _rotated(
            turning_ptr + place * turning_stride + head * LINE + (LINE - REST), cos_ptr, sin_ptr,
            place + 0 * head, live, more, REST, INTERLEAVED,
        )  # fmt: skip
    elif REST > 0:
        rest = tl.load(
            line_ptrs + VALUES + more[None, :], mask=live[:, None] & (more[None, :] < REST), other=0.0
        )
    if WIDEN:
        q = q.to(tl.float32)
        rest = rest.to(tl.float32)
    acc = tl.zeros([TILE_M, VALUES_P2], dtype=tl.float32)
    total = tl.zeros([TILE_M], dtype=tl.float32)
    high = tl.full([TILE_M], float("-inf"), dtype=tl.float32)
    groups = 0
    if RATIO > 0:
        groups = (at + 1) // RATIO
        if CHOSEN:
            groups = tl.minimum(groups, TOP)
    begin = 0
    stop = FRONT + groups
    if SPLIT:
        begin = tl.program_id(2) * split
        stop = tl.minimum(stop, begin + split)
    if WINDOW > 0:
        # Place i of the front is position at + 1 - FRONT + i.
        base = at + 1 - FRONT
        low = tl.maximum(FRONT - WINDOW, -base)
        acc, total, high = _walk_lines(
            acc, total, high, q, rest, entries_codes_ptr, entries_scales_ptr, entries_ptr,
            entries_table_ptr + row * entries_stride, chosen_ptr, base,
            tl.maximum(begin, low // TILE_N * TILE_N), tl.minimum(stop, FRONT), low, scale,
            ENTRIES_CODED, ENTRIES_WIDTH, ENTRIES_BLOCK, VALUES, VALUES_P2, REST, REST_P2, TILE_N, False,
            WIDEN,
        )  # fmt: skip
    if RATIO > 0:
        acc, total, high = _walk_lines(
            acc, total, high, q, rest, groups_codes_ptr, groups_scales_ptr, groups_ptr,
            groups_table_ptr + row * groups_stride, chosen_ptr + place * TOP, 0,
            tl.maximum(begin - FRONT, 0), stop - FRONT, 0, scale, GROUPS_CODED, GROUPS_WIDTH, GROUPS_BLOCK,
            VALUES, VALUES_P2, REST, REST_P2, TILE_N, CHOSEN, WIDEN,
        )  # fmt: skip

    if SINKS and not SPLIT:
        sink = tl.load(sinks_ptr + head, mask=live, other=0.0).to(tl.float32) * 1.4426950408889634
        total = tl.where(total == 0.0, 1.0, total + tl.exp2(sink - high))
    empty = total == 0.0
    acc = acc / tl.where(empty, 1.0, total)[:, None]
    if SPLIT:
        # An empty state has log-sum-exp -inf; the merge never reads its output.
        lse = tl.where(empty, float("-inf"), high + tl.log2(tl.where(empty, 1.0, total)))
        states = ((place - token_base) * HEADS + head) * splits + tl.program_id(2)
        tl.store(lse_ptr + states, lse, mask=live)
        tl.store(out_ptr + states[:, None] * VALUES + dims[None, :], acc, mask=wanted & ~empty[:, None])
    else:
        out_ptrs = out_ptr + (place * HEADS + head)[:, None] * VALUES + dims[None, :]
        tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=wanted)


def attend(
    q: Tensor,
    out: Tensor,
    entries: PagedLines | None,
    groups: PagedLines | None,
    chosen: Tensor | None,
    offsets: Tensor,
    starts: Tensor,
    tiles: Tensor,
    *,
    form: KernelForm,
    group: int,
    window: int,
    ratio: int,
    scale: float,
    sinks: Tensor | None = None,
    split: int = 0,
    splits: int = 1,
    tokens: tuple[int, int] = (0, 0),
    rest: tuple[Tensor, Rotation] | None = None,
) -> None:
    """Attend to the lists of the tokens of ``tiles`` (int64 [n]: row << 32 | query, one per token).

    q: [T, heads, dim], out: [T, heads, n], n <= dim: a value is the first n elements of a line. entries and
    groups: (caches of a layer, table int64 [R, W]) or None. Caches are (lines [blocks, per block, width],),
    or in 8 bits (codes, scales, exact elements), except codes and scales of the queries' dtype; a key is the
    first dim elements of a line. chosen: int64 [T, top], or None: all complete groups. A program computes
    ``group`` heads, which divide the heads. sinks: [heads], see ``merge``. split: places of the list per
    split, a multiple of ``form.tile_n``, or 0. With splits, the tiles are tokens[0] to tokens[1] - 1. rest:
    q is only the first n elements of the queries; the others are the end of each head of rest[0] [T, heads,
    line], where tokens may lie apart, rotated by angles float32 [T, (dim - n) / 2].
    """
    heads, values, begin = q.shape[1], out.shape[2], tokens[0]
    cached = [one for one in (entries, groups) if one is not None]
    assert all(one.is_contiguous() for one in (q, out)), "not contiguous"
    assert all(caches[-1].dtype == q.dtype for caches, _ in cached), "queries and cache are of one dtype"
    assert split % form.tile_n == heads % group == 0, "splits are whole steps, parts of the heads are equal"
    target, lse = _states(out, tokens[1] - begin, splits) if split else (out, out)
    (near, window_table), (far, group_table) = entries or cached[0], groups or cached[0]
    turning, sizes = _sizes_of(q, values, rest)
    tiling = {"HEADS": heads, "GROUP": group, "TILE_M": form.tile_m, "TILE_N": form.tile_n}
    tiling |= {"num_warps": form.warps, "num_stages": form.stages}
    _attend_lines[(tiles.shape[0], heads // group, splits)](
        *(q, *turning, target, lse, *tensors_of(near), *tensors_of(far), offsets, starts),
        *(window_table, group_table, starts if chosen is None else chosen, q if sinks is None else sinks),
        *(tiles, scale * _LOG2E, window_table.stride(0), group_table.stride(0), split, splits, begin),
        turning[0].stride(0),
        **sizes,
        **_set_of("ENTRIES", near, values),
        **_set_of("GROUPS", far, values),
        WINDOW=0 if entries is None else window,
        RATIO=0 if groups is None else ratio,
        CHOSEN=chosen is not None,
        TOP=0 if chosen is None else chosen.shape[1],
        SPLIT=split > 0,
        SINKS=sinks is not None,
        WIDEN=interpreting(),
        **tiling,
    )
    if split:
        merge(target, lse, out, token_base=begin, sinks=sinks)


def _sizes_of(
    q: Tensor, values: int, rest: tuple[Tensor, Rotation] | None
) -> tuple[tuple[Tensor, Tensor, Tensor], dict[str, int]]:
    """Return (end of the queries, cos, sin), and the constants of queries with an end."""
    sizes = {"VALUES": values, "VALUES_P2": padded(values), "TURNS": int(rest is not None)}
    if rest is None:
        size = q.shape[2] - values
        return (q, q, q), sizes | {"REST": size, "REST_P2": padded(size), "LINE": 0, "INTERLEAVED": 0}
    turning, (cos, sin, interleaved) = rest
    size, line = 2 * cos.shape[1], turning.shape[2]
    assert q.shape[2] == values, "queries of another size"
    assert turning.stride()[1:] == (line, 1), "heads of a query are contiguous"
    sizes |= {"REST": size, "REST_P2": padded(size), "LINE": line, "INTERLEAVED": int(interleaved)}
    return (turning, cos.contiguous(), sin.contiguous()), sizes


def _set_of(name: str, caches: tuple[Tensor, ...], values: int) -> dict[str, int]:
    """Return the sizes of a set of entries: positions per block, codes, and exact elements."""
    coded = caches[0].shape[2] if len(caches) > 1 else 0
    assert coded <= values, "the elements behind a value are exact"
    return {f"{name}_BLOCK": caches[0].shape[1], f"{name}_CODED": coded, f"{name}_WIDTH": caches[-1].shape[2]}


def _states(out: Tensor, tokens: int, splits: int) -> tuple[Tensor, Tensor]:
    """Return memory for the states of splits: float32 [tokens, heads, splits, n] and without n."""
    of_heads = (tokens, out.shape[1], splits)
    states = torch.empty(*of_heads, out.shape[2], dtype=torch.float32, device=out.device)
    return states, torch.empty(of_heads, dtype=torch.float32, device=out.device)
