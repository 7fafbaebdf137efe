"""Router, choice of experts and tiles of a routed block on CUDA, in one kernel each.

    _router    logits of few tokens in float32, and the logit of the shared expert's gate. A program computes
               one expert for ``TOKENS`` tokens
    _route     ``weft.ops.routing.route``: one program per token
    _cut       tiles of the grouped product (``weft.ops.triton.moe``): one program per expert, which counts
               the slots of lower experts itself, so that no program waits for another

No result depends on another row. Ties go to the lowest expert. NaN is chosen first, as in torch's sort, so
ids are valid for any logits.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from weft.ops import moe as torch_moe
from weft.ops.moe import Multiply, Routed
from weft.ops.triton.forms import power

Tensor = torch.Tensor

FEW = 64
"""Maximum tokens of ``_router``. More tokens use the library's product, which reads the weight once."""
TOKENS, INPUTS = 8, 1024
"""Tokens of a program of ``_router``; maximum inputs of a step."""
MOST_EXPERTS, MOST_CHOSEN = 1024, 64
SLOTS = 1024
"""Maximum slots that a program of ``_cut`` reads at once."""
TILES = 64
"""Tiles that a program of ``_cut`` writes at once."""


@triton.jit(do_not_specialize=["rows"])
def _router(
    x_ptr,  # [rows, K]
    weight_ptr,  # float32 [E, K]
    bias_ptr,  # float32 [E], with BIAS
    gate_ptr,  # float32 [K], with GATE
    logits_ptr,  # float32 [rows, E], with GATE [rows, E + 1]
    rows,
    x_stride,
    E: tl.constexpr,
    K: tl.constexpr,
    BIAS: tl.constexpr,
    GATE: tl.constexpr,
    TOKENS: tl.constexpr,
    INPUTS: tl.constexpr,
):
    """Compute one column of the logits for TOKENS tokens. Column E is the shared expert's gate."""
    expert = tl.program_id(0)
    token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    live = token < rows
    k = tl.arange(0, INPUTS)
    column_ptr = weight_ptr + expert * K
    if GATE:
        column_ptr = tl.where(expert == E, gate_ptr, column_ptr)
    acc = tl.zeros([TOKENS, INPUTS], dtype=tl.float32)
    for begin in range(0, K, INPUTS):
        inner = begin + k < K
        x = tl.load(
            x_ptr + token[:, None] * x_stride + begin + k[None, :],
            mask=live[:, None] & inner[None, :],
            other=0.0,
        )
        w = tl.load(column_ptr + begin + k, mask=inner, other=0.0)
        acc += x.to(tl.float32) * w[None, :]
    logits = tl.sum(acc, 1)
    if BIAS:  # noqa: SIM102 (BIAS is decided when the kernel compiles)
        if expert < E:
            logits += tl.load(bias_ptr + expert)
    COLUMNS: tl.constexpr = E + 1 if GATE else E
    tl.store(logits_ptr + token * COLUMNS + expert, logits, mask=live)


@triton.jit
def _most(values):
    """Return the largest of ``values`` [A, B]."""
    return tl.max(tl.max(values, 1), 0)


@triton.jit
def _route(
    logits_ptr,  # float32 [T, E] of wider rows
    correction_ptr,  # float32 [E], with CORRECTION
    gate_ptr,  # float32 [T], ``gate_stride`` apart, with GATE
    ids_ptr,  # int64 [T, COLUMNS]
    scales_ptr,  # float32 [T, COLUMNS]
    share_ptr,  # float32 [T], with GATE and without JOINED
    logits_stride,
    gate_stride,
    scale,
    E: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUPS_P2: tl.constexpr,
    EACH: tl.constexpr,
    EACH_P2: tl.constexpr,
    TOP_K: tl.constexpr,
    TOP_K_P2: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    SOFTMAX: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    CORRECTION: tl.constexpr,
    BEST_TWO: tl.constexpr,
    GATE: tl.constexpr,
    JOINED: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Choose the experts of one token.

    JOINED: the shared expert is expert E, in the last column.
    """
    row = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, GROUPS_P2)
    place = tl.arange(0, EACH_P2)[None, :]
    live = (group < GROUPS)[:, None] & (place < EACH)
    expert = group[:, None] * EACH + place
    low = float("-inf")
    logits = tl.load(logits_ptr + row * logits_stride + expert, mask=live, other=low)
    values = logits
    if SOFTMAX:
        if not RENORMALIZE or CORRECTION or BEST_TWO:
            parts = tl.exp(logits - _most(logits))
            values = parts / tl.sum(tl.sum(parts, 1), 0)
    else:
        values = 1.0 / (1.0 + tl.exp(-logits))
    # Softmax keeps the order of logits. Logits also separate experts whose scores round to the same number.
    choice = logits if SOFTMAX and not CORRECTION and not BEST_TWO else values
    if CORRECTION:
        choice += tl.load(correction_ptr + expert, mask=live, other=0.0)
    choice = tl.where(choice == choice, choice, float("inf"))
    choice = tl.where(live, choice, low)
    if SOFTMAX and RENORMALIZE:
        values = logits
    if GROUPS > 1:
        best = tl.max(choice, 1)
        if BEST_TWO and EACH > 1:
            first = tl.min(tl.where(choice == best[:, None], place, EACH_P2), 1)
            best += tl.max(tl.where(place == first[:, None], low, choice), 1)
        there = group < GROUPS
        kept = group < 0
        for _ in range(TOP_GROUPS):
            most = tl.max(tl.where(there, best, low), 0)
            at = tl.min(tl.where(there & (best == most), group, GROUPS_P2), 0)
            kept = kept | (group == at)
            there = there & (group != at)
        choice = tl.where(kept[:, None], choice, low)

    slot = tl.arange(0, TOP_K_P2)
    ids = tl.zeros([TOP_K_P2], dtype=tl.int32)
    weights = tl.full([TOP_K_P2], low, dtype=tl.float32)
    # ``there`` and not -inf marks taken experts: a choice may be -inf itself.
    there = live
    for number in range(TOP_K):
        most = _most(tl.where(there, choice, low))
        at = tl.min(tl.min(tl.where(there & (choice == most), expert, E), 1), 0)
        mine = live & (expert == at)
        ids = tl.where(slot == number, at, ids)
        weights = tl.where(slot == number, tl.sum(tl.sum(tl.where(mine, values, 0.0), 1), 0), weights)
        there = there & (expert != at)
    chosen = slot < TOP_K
    if SOFTMAX and RENORMALIZE:
        weights = tl.exp(weights - tl.max(weights, 0))
        weights = weights / tl.sum(weights, 0)
    elif RENORMALIZE:
        weights = weights / (tl.sum(tl.where(chosen, weights, 0.0), 0) + 1e-20)
    tl.store(ids_ptr + row * COLUMNS + slot, ids.to(tl.int64), mask=chosen)
    tl.store(scales_ptr + row * COLUMNS + slot, weights * scale, mask=chosen)
    if GATE:
        share = 1.0 / (1.0 + tl.exp(-tl.load(gate_ptr + row * gate_stride)))
        if JOINED:
            tl.store(scales_ptr + row * COLUMNS + TOP_K, share)
        else:
            tl.store(share_ptr + row, share)
    elif JOINED:
        tl.store(scales_ptr + row * COLUMNS + TOP_K, 1.0)
    if JOINED:
        tl.store(ids_ptr + row * COLUMNS + TOP_K, E)


def routes(weights: Routed) -> bool:
    """Return True if ``choose`` supports the router of ``weights``."""
    rule = weights.rule
    return (
        weights.table is None
        and rule.scoring in ("softmax", "sigmoid")
        and weights.router.dtype == torch.float32
        and weights.experts <= MOST_EXPERTS
        and weights.experts % rule.groups == 0
        and rule.top_k <= min(MOST_CHOSEN, weights.experts)
    )


def choose(
    x: Tensor, weights: Routed, multiply: Multiply, *, own: bool, joined: bool = False
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Compute ``moe.choose_experts`` for a router of ``routes``.

    ``own``: use ``_router`` for few tokens. ``joined``: the shared expert is the last choice of every token,
    with id E and with its factor as weight; ids and weights are then [T, k + 1], and no factor is returned.
    """
    rule = weights.rule
    tokens, experts = len(x), weights.experts
    gated = weights.shared_gate is not None
    columns = rule.top_k + joined
    ids = torch.empty((tokens, columns), dtype=torch.int64, device=x.device)
    scales = torch.empty((tokens, columns), dtype=torch.float32, device=x.device)
    share = torch.empty((tokens, 1), dtype=torch.float32, device=x.device) if gated and not joined else None
    if not tokens:
        return ids, scales, share
    logits, gate = _logits(x, weights, multiply, own)
    each = experts // rule.groups
    _route[(tokens,)](
        logits,
        logits if weights.correction is None else weights.correction,
        logits if gate is None else gate,
        ids,
        scales,
        scales if share is None else share,
        logits.stride(0),
        0 if gate is None else gate.stride(0),
        float(rule.scale),
        E=experts,
        GROUPS=rule.groups,
        GROUPS_P2=power(rule.groups),
        EACH=each,
        EACH_P2=power(each),
        TOP_K=rule.top_k,
        TOP_K_P2=power(rule.top_k),
        TOP_GROUPS=rule.top_groups,
        SOFTMAX=rule.scoring == "softmax",
        RENORMALIZE=rule.renormalize,
        CORRECTION=weights.correction is not None,
        BEST_TWO=rule.groups > 1 and rule.group_rule != "max",
        GATE=gated,
        JOINED=joined,
        COLUMNS=columns,
        num_warps=1 if experts <= 256 else 2,
    )
    return ids, scales, share


def _logits(x: Tensor, weights: Routed, multiply: Multiply, own: bool) -> tuple[Tensor, Tensor | None]:
    """Return (router logits float32 [T, E] of wider rows, logits of the shared expert's gate [T, 1] or
    None)."""
    tokens, inputs = x.shape
    experts = weights.experts
    if not own or tokens > FEW:
        wide = x.to(weights.router.dtype)
        gate = None if weights.shared_gate is None else multiply(wide, weights.shared_gate, None)
        return multiply(wide, weights.router, weights.router_bias), gate
    gated = weights.shared_gate is not None
    x = x if x.stride(1) == 1 else x.contiguous()
    logits = torch.empty((tokens, experts + gated), dtype=torch.float32, device=x.device)
    _router[(experts + gated, triton.cdiv(tokens, TOKENS))](
        x,
        weights.router,
        weights.router if weights.router_bias is None else weights.router_bias,
        weights.router if weights.shared_gate is None else weights.shared_gate,
        logits,
        tokens,
        x.stride(0),
        E=experts,
        K=inputs,
        BIAS=weights.router_bias is not None,
        GATE=gated,
        TOKENS=TOKENS,
        INPUTS=min(INPUTS, power(inputs)),
        num_warps=8,
    )
    return logits, logits[:, experts:] if gated else None


def choose_experts(
    x: Tensor, ids: Tensor | None, weights: Routed, multiply: Multiply
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Compute ``moe.choose_experts``. The logits of few tokens have a kernel of their own."""
    if not routes(weights):
        return torch_moe.choose_experts(x, ids, weights, multiply)
    return choose(x, weights, multiply, own=True)


def choose_experts_invariant(
    x: Tensor, ids: Tensor | None, weights: Routed, multiply: Multiply
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Compute ``moe.choose_experts`` with logits by ``multiply`` for every number of tokens."""
    if not routes(weights):
        return torch_moe.choose_experts(x, ids, weights, multiply)
    return choose(x, weights, multiply, own=False)


# --- tiles ---


class Tiles(NamedTuple):
    """Work of each tile. All tensors are on the device, with sizes known to the host."""

    order: Tensor
    """int64 [slots]: the slots sorted by expert, in order within an expert. Places after the last expert's
    slots are arbitrary."""
    experts: Tensor
    """int64 [tiles]: expert of each tile; the number of experts for a tile without work."""
    rows: Tensor
    """int64 [tiles]: first place of each tile in ``order``."""
    ends: Tensor
    """int64 [experts]: place after each expert's last slot."""


@triton.jit(do_not_specialize=["slots", "tiles"])
def _cut(
    ids_ptr,  # int64 [slots]
    order_ptr,  # int64 [slots]
    expert_ptr,  # int64 [tiles]
    row_ptr,  # int64 [tiles]
    end_ptr,  # int64 [E]
    slots,
    tiles,
    E,
    TILE_M: tl.constexpr,
    SLOTS: tl.constexpr,
    TILES: tl.constexpr,
):
    """Write the tiles of one expert, or, in the last program, the tiles without work."""
    expert = tl.program_id(0)
    at = tl.arange(0, SLOTS)
    before = 0
    count = 0
    for begin in range(0, slots, SLOTS):
        ids = tl.load(ids_ptr + begin + at, mask=begin + at < slots, other=-1).to(tl.int32)
        before += tl.sum(((ids >= 0) & (ids < expert)).to(tl.int32), 0)
        count += tl.sum((ids == expert).to(tl.int32), 0)
    # The first tile follows from the slots before alone. An expert with slots has at least as many places for
    # tiles as it needs: floor((before + count) / m) - floor(before / m) + 1 >= ceil(count / m).
    first = before // TILE_M + tl.minimum(before, expert)
    last = tiles
    if expert < E:
        last = (before + count) // TILE_M + tl.minimum(before + count, expert + 1)
        tl.store(end_ptr + expert, before + count)
        place = before
        for begin in range(0, slots, SLOTS):
            ids = tl.load(ids_ptr + begin + at, mask=begin + at < slots, other=-1).to(tl.int32)
            mine = (ids == expert).to(tl.int32)
            rank = tl.cumsum(mine, 0) - mine
            tl.store(order_ptr + place + rank, (begin + at).to(tl.int64), mask=mine > 0)
            place += tl.sum(mine, 0)
    else:
        count = 0
    number = tl.arange(0, TILES)
    for begin in range(first, last, TILES):
        tile = begin + number
        row = (tile - first) * TILE_M
        tl.store(expert_ptr + tile, tl.where(row < count, expert, E).to(tl.int64), mask=tile < last)
        tl.store(row_ptr + tile, (before + row).to(tl.int64), mask=tile < last)


def cut(ids: Tensor, experts: int, tile_m: int) -> Tiles:
    """Return the tiles of the experts ``ids``, int64 [T, k]. No synchronisation.

    Slots of other ids have no tile.
    """
    slots = ids.numel()
    most = slots // tile_m + min(slots, experts)
    made = [torch.empty(size, dtype=torch.int64, device=ids.device) for size in (slots, most, most, experts)]
    if slots:
        _cut[(experts + 1,)](
            ids.contiguous(),
            *made,
            slots,
            most,
            experts,
            TILE_M=tile_m,
            SLOTS=min(SLOTS, power(slots)),
            TILES=TILES,
            num_warps=4,
        )
    return Tiles(*made)
