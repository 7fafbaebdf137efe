"""Routed feed-forward blocks on CUDA: a grouped product with a grid that the host knows in advance.

    slots    a token and one of its experts, T * k of them, sorted by expert
    tiles    TILE_M sorted slots of one expert; an expert's last tile may be partly empty. For any group sizes
             there are at most ``slots // TILE_M + min(slots, experts)``: this number is launched, and surplus
             programs return at once
    product  [slots, K] x [E, N, K] -> [slots, N], each tile by its expert's matrix, all of K in one chain

The first product reads tokens in sorted order and applies the activation; the second writes to the slots'
original places. The bits of a row depend only on its own chain, not on other rows of the tile, so the kernel
is also the invariant form. The fast form also uses torch's forms where the table (``weft.ops.moe_table``)
shows an advantage. Packed matrices are unpacked in the tile, as in ``weft.ops.triton.coded``, and have no
other form.

For few tokens the fast form computes a shared expert of the experts' size as one more expert of the grouped
product. The whole block then is six kernels: logits, choice, tiles, two products, combination. If the next
norm adds the results of the experts (``moe_terms``), the combination is a part of the norm.

Experts without a gate (``weft.ops.moe_plain``) take the same products. Torch computes the activation between
the two products.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl

from weft.ops import moe as torch_moe
from weft.ops import moe_table, torch_ops
from weft.ops.coded import Codes, to_fp8, to_int4
from weft.ops.moe import ExpertSum, Gate, Gated, Pieces, Routed, activate, has_codes, rounded
from weft.ops.moe_plain import LatentRouted, plain
from weft.ops.stacks import stacked
from weft.ops.triton import coded, fused, interpreting, matmul, routing
from weft.ops.triton.forms import power
from weft.ops.triton.routing import Tiles, cut
from weft.ops.triton.sums import sum_of_experts
from weft.ops.triton.unpacking import finish, step

Tensor = torch.Tensor

TILES_M = (16, 64)
"""Slots of a tile: for few and for many tokens per expert."""
TILE_N, TILE_K, TILE_K_EXACT = 64, 64, 32
COLUMNS = 1024
"""Maximum columns of one program of ``_combine``."""
CODE_FORMS = {16: coded.NARROW, 64: replace(coded.MIDDLE, tile_n=64)}
"""Slots of a tile -> form of a product with codes. 64 slots and 128 outputs spill registers on Ampere and
Blackwell."""


@triton.jit
def _grouped(
    x_ptr,  # [T, K], or [slots, K] sorted
    weight_ptr,  # [E, N, K], with GATED [E, 2 * N, K], gate rows first; with SHARED one expert fewer
    shared_ptr,  # the last expert's matrix, with SHARED
    bias_ptr,  # [E, N], with GATED [E, 2 * N], with BIAS
    out_ptr,  # [slots, N]
    order_ptr,  # int64 [slots]: slot at each sorted place
    expert_ptr,  # int64 [tiles]: expert of each tile, E for surplus tiles
    row_ptr,  # int64 [tiles]: first sorted place of each tile
    end_ptr,  # int64 [E]: place after each expert's last slot
    limit,
    alpha,
    x_stride,
    E,
    N: tl.constexpr,
    K: tl.constexpr,
    TOP_K: tl.constexpr,
    GATHER: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
    BIAS: tl.constexpr,
    GATED: tl.constexpr,
    SHARED: tl.constexpr,
    LIMIT: tl.constexpr,
    ALPHA: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Multiply one tile of slots of one expert.

    GATHER: rows of x are tokens, and out is sorted. Otherwise x is sorted, and out is in slot order. GATED:
    out is the activation of the product, ``silu(gate) * up`` or a variant of ``moe.Gate``.
    """
    expert = tl.load(expert_ptr + tl.program_id(0))
    if expert >= E:
        return
    place = tl.load(row_ptr + tl.program_id(0)) + tl.arange(0, TILE_M)
    live = place < tl.load(end_ptr + expert)
    slot = tl.load(order_ptr + place, mask=live, other=0)
    source = slot // TOP_K if GATHER else place
    n = tl.program_id(1) * TILE_N + tl.arange(0, TILE_N)
    k = tl.arange(0, TILE_K)
    x_ptrs = x_ptr + source[:, None] * x_stride + k[None, :]
    ROWS: tl.constexpr = 2 * N if GATED else N
    matrix_ptr = weight_ptr + expert * ROWS * K
    if SHARED:
        matrix_ptr = tl.where(expert == E - 1, shared_ptr, matrix_ptr)
    w_ptrs = matrix_ptr + n[:, None] * K + k[None, :]
    acc = tl.zeros([TILE_M, TILE_N], dtype=tl.float32)
    up = tl.zeros([TILE_M, TILE_N], dtype=tl.float32)  # with GATED
    for begin in range(0, K, TILE_K):
        if K % TILE_K == 0:
            inside = live[:, None]
            held = (n < N)[:, None]
        else:
            inside = live[:, None] & (begin + k < K)[None, :]
            held = (n < N)[:, None] & (begin + k < K)[None, :]
        x = tl.load(x_ptrs + begin, mask=inside, other=0.0)
        w = tl.load(w_ptrs + begin, mask=held, other=0.0)
        if WIDEN:
            x = x.to(tl.float32)
            w = w.to(tl.float32)
        acc = tl.dot(x, tl.trans(w), acc, input_precision="ieee")
        if GATED:
            w = tl.load(w_ptrs + N * K + begin, mask=held, other=0.0)
            if WIDEN:
                w = w.to(tl.float32)
            up = tl.dot(x, tl.trans(w), up, input_precision="ieee")
    if BIAS:
        acc += tl.load(bias_ptr + expert * ROWS + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    if GATED:
        if BIAS:
            up += tl.load(bias_ptr + expert * ROWS + N + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
        acc = _activated(acc, up, limit, alpha, LIMIT, ALPHA, out_ptr.dtype.element_ty)
    target = place if GATHER else slot
    out_ptrs = out_ptr + target[:, None] * N + n[None, :]
    tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=live[:, None] & (n < N)[None, :])


@triton.jit
def _activated(gate, up, limit, alpha, LIMIT: tl.constexpr, ALPHA: tl.constexpr, narrow: tl.constexpr):
    """Compute ``moe.activate`` in float32, rounded to ``narrow`` wherever separate ops round."""
    gate = gate.to(narrow).to(tl.float32)
    up = up.to(narrow).to(tl.float32)
    if LIMIT:
        # Limits round to the dtype, as in a clamp of narrow elements.
        most = tl.full([1, 1], limit, dtype=narrow).to(tl.float32)
        gate = tl.where(gate > most, most, gate)  # keeps NaN
        up = tl.where(up > most, most, tl.where(up < -most, -most, up))
    if ALPHA:
        return gate / (1.0 + tl.exp(-alpha * gate)) * (up + 1.0)
    return (gate / (1.0 + tl.exp(-gate))).to(narrow).to(tl.float32) * up


@triton.jit
def _grouped_codes(
    x_ptr,  # up to x_stride as in ``_grouped``
    values_ptr,  # uint8 [E, N, line]
    scales_ptr,  # float32 or uint8 [E, N, groups]
    zeros_ptr,  # uint8 [E, N, groups], with ZEROS
    factors_ptr,  # float32 [E, N], with FACTORS
    bias_ptr,
    out_ptr,
    order_ptr,
    expert_ptr,
    row_ptr,
    end_ptr,
    x_stride,
    E,
    N,
    K,
    line,
    groups,
    NUMBERS: tl.constexpr,
    SCALES: tl.constexpr,
    WAY: tl.constexpr,
    GROUP: tl.constexpr,
    UNIT: tl.constexpr,
    ZEROS: tl.constexpr,
    FACTORS: tl.constexpr,
    BIAS: tl.constexpr,
    TOP_K: tl.constexpr,
    GATHER: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
    EVEN: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Compute ``_grouped`` with codes."""
    expert = tl.load(expert_ptr + tl.program_id(0))
    if expert >= E:
        return
    place = tl.load(row_ptr + tl.program_id(0)) + tl.arange(0, TILE_M)
    there = place < tl.load(end_ptr + expert)
    slot = tl.load(order_ptr + place, mask=there, other=0)
    source = slot // TOP_K if GATHER else place
    n = tl.program_id(1) * TILE_N + tl.arange(0, TILE_N)
    k = tl.arange(0, TILE_K)
    row = expert * N + n
    live = n < N
    x_ptrs = x_ptr + source[:, None] * x_stride + k[None, :]
    acc = tl.zeros([TILE_M, TILE_N], dtype=tl.float32)
    for begin in range(0, K, TILE_K):
        inner = there[:, None] if EVEN else there[:, None] & (begin + k < K)[None, :]
        x = tl.load(x_ptrs + begin, mask=inner, other=0.0)
        acc = step(
            acc, x, begin, row, live, values_ptr, scales_ptr, zeros_ptr, line, groups,
            NUMBERS, SCALES, WAY, GROUP, UNIT, ZEROS, TILE_N, TILE_K, EVEN, WIDEN,
        )  # fmt: skip
    acc = finish(acc, row, live, row, scales_ptr, factors_ptr, bias_ptr, SCALES, WAY, UNIT, FACTORS, BIAS)
    target = place if GATHER else slot
    out_ptrs = out_ptr + target[:, None] * N + n[None, :]
    tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=there[:, None] & live[None, :])


@triton.jit
def _combine(
    made_ptr,  # [T, TOP_K, N]
    weight_ptr,  # float32 [T, TOP_K]
    shared_ptr,  # [T, N], with SHARED
    share_ptr,  # float32 [T], with SHARE
    out_ptr,  # [T, N]
    N: tl.constexpr,
    TOP_K: tl.constexpr,
    COLUMNS: tl.constexpr,
    SHARED: tl.constexpr,
    SHARE: tl.constexpr,
):
    """Sum one token's experts; see ``sum_of_experts``."""
    token = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    total = sum_of_experts(made_ptr, weight_ptr, shared_ptr, share_ptr, token, n, N, TOP_K, SHARED, SHARE)
    tl.store(out_ptr + token * N + n, total.to(out_ptr.dtype.element_ty), mask=n < N)


def _product_of_codes(
    x: Tensor,
    weight: Codes,
    bias: Tensor | None,
    out: Tensor,
    tiles: Tiles,
    top_k: int,
    tile_m: int,
    gather: bool,
) -> None:
    """Write the product of each slot and its expert's codes to ``out``; see ``_product``."""
    experts, outputs, inputs = weight.shape
    form = CODE_FORMS[tile_m]
    _grouped_codes[(len(tiles.experts), triton.cdiv(outputs, form.tile_n))](
        x_ptr=x,
        bias_ptr=x if bias is None else bias,
        out_ptr=out,
        order_ptr=tiles.order,
        expert_ptr=tiles.experts,
        row_ptr=tiles.rows,
        end_ptr=tiles.ends,
        x_stride=x.stride(0),
        E=experts,
        N=outputs,
        K=inputs,
        BIAS=bias is not None,
        TOP_K=top_k,
        GATHER=gather,
        **coded.arguments(weight, x.dtype, form),
    )


def _product(
    x: Tensor,
    weight: Tensor | Codes,
    bias: Tensor | None,
    out: Tensor,
    tiles: Tiles,
    top_k: int,
    tile_m: int,
    gather: bool,
    *,
    gate: Gate | None = None,
    shared: Tensor | None = None,
) -> None:
    """Write the product of each slot and its expert's matrix to ``out`` [slots, N].

    ``gather``: see ``_grouped``. ``gate``: write the activation of the product. ``shared``: matrix of one
    more expert. Codes support neither.
    """
    if isinstance(weight, Codes):
        return _product_of_codes(x, weight, bias, out, tiles, top_k, tile_m, gather)
    experts, rows, inputs = weight.shape
    outputs = rows if gate is None else rows // 2
    exact = x.dtype == torch.float32
    # A narrow tile with an activation reads as many rows of the matrix as a tile without.
    tile_n = TILE_N if gate is None or tile_m > TILES_M[0] else TILE_N // 2
    _grouped[(len(tiles.experts), triton.cdiv(outputs, tile_n))](
        x,
        weight,
        weight if shared is None else shared,
        weight if bias is None else bias,
        out,
        tiles.order,
        tiles.experts,
        tiles.rows,
        tiles.ends,
        0.0 if gate is None else float(gate.limit),
        0.0 if gate is None else float(gate.alpha),
        x.stride(0),
        experts + (shared is not None),
        N=outputs,
        K=inputs,
        TOP_K=top_k,
        GATHER=gather,
        TILE_M=tile_m,
        TILE_N=tile_n,
        TILE_K=TILE_K_EXACT if exact else TILE_K,
        BIAS=bias is not None,
        GATED=gate is not None,
        SHARED=shared is not None,
        LIMIT=gate is not None and gate.limit > 0,
        ALPHA=gate is not None and gate.alpha > 0,
        WIDEN=interpreting(),
        num_warps=4,
        num_stages=2 if exact else 4 if tile_n * (1 + (gate is not None)) == TILE_N else 3,
    )


def by_tiles(
    x: Tensor,
    ids: Tensor,
    weights: Routed,
    tile_m: int = TILES_M[0],
    *,
    joined: bool = False,
    gated: Gated = fused.gated,
) -> Tensor:
    """Compute all tokens through their experts: x [T, hidden], ids int64 [T, k]; [T, k, hidden].

    Results of ids without an expert here are arbitrary. ``joined``: the shared expert is one more expert.
    ``gated``: activation where the first product does not apply it; ``plain`` for experts without a gate.
    """
    (tokens, top_k), (experts, hidden, inner) = ids.shape, weights.down.shape
    made = torch.empty((tokens, top_k, hidden), dtype=x.dtype, device=x.device)
    if not tokens:
        return made
    x = x if x.stride(1) == 1 else x.contiguous()
    tiles = cut(ids, experts + joined, tile_m)
    bias = weights.gate_up_bias
    if isinstance(weights.gate_up, Codes) or not _fuses(weights.gate):
        gate_up = torch.empty((tokens * top_k, weights.gate_up.shape[1]), dtype=x.dtype, device=x.device)
        _product(x, weights.gate_up, bias, gate_up, tiles, top_k, tile_m, True)
        act = activate(gate_up, weights.gate, gated)
    else:
        act = torch.empty((tokens * top_k, inner), dtype=x.dtype, device=x.device)
        first = weights.shared_gate_up if joined else None
        _product(x, weights.gate_up, bias, act, tiles, top_k, tile_m, True, gate=weights.gate, shared=first)
    second = weights.shared_down if joined else None
    _product(act, weights.down, weights.down_bias, made, tiles, top_k, tile_m, False, shared=second)
    return made


def _fuses(gate: Gate) -> bool:
    """Return True if the first product can apply the activation."""
    return gate.alpha > 0 or gate.activation == "silu"


def tile_of(ids: Tensor, weights: Routed) -> int:
    """Return TILE_M for the average number of slots per expert. Uses only numbers of the host."""
    return TILES_M[ids.numel() > 32 * weights.down.shape[0]]


def _table_form(tokens: int, weights: Routed) -> str:
    """Return the table's fastest form without synchronisation for plain matrices."""
    forms = ("triton", *(form for form in torch_moe.usable(weights) if form != "loop"))
    dtype = str(weights.down.dtype).removeprefix("torch.")
    return moe_table.choose(weights.down.device.type, dtype, tokens, torch_moe.size_of(weights), forms)


def by_table(x: Tensor, ids: Tensor, weights: Routed) -> Tensor:
    """Compute all tokens through their experts in the table's fastest form without synchronisation.

    Packed matrices always use ``by_tiles``.
    """
    if has_codes(weights):
        return by_tiles(x, ids, weights, tile_of(ids, weights))
    form = _table_form(ids.numel() // weights.rule.top_k, weights)
    if form == "triton":
        return by_tiles(x, ids, weights, tile_of(ids, weights))
    return torch_moe.FORMS[form](x, ids, weights)


def plain_by_table(x: Tensor, ids: Tensor, weights: Routed) -> Tensor:
    """Compute ``by_table`` for experts without a gate."""
    if not has_codes(weights):
        form = _table_form(ids.numel() // weights.rule.top_k, weights)
        if form != "triton":
            made = torch_moe.by_group if form == "grouped" else torch_moe.by_gather
            return made(x, ids, weights, plain)
    return by_tiles(x, ids, weights, tile_of(ids, weights), gated=plain)


def _finish(made: Tensor, scales: Tensor, share: Tensor | None, shared: Tensor | None) -> Tensor:
    """Return the weighted sum of the experts and the shared expert, [T, hidden], rounded once."""
    tokens, top_k, hidden = made.shape
    out = torch.empty((tokens, hidden), dtype=made.dtype, device=made.device)
    if not tokens:
        return out
    columns = min(COLUMNS, power(hidden))
    _combine[(tokens, triton.cdiv(hidden, columns))](
        made,
        scales.contiguous(),
        made if shared is None else shared.contiguous(),
        scales if share is None else share.contiguous(),
        out,
        N=hidden,
        TOP_K=top_k,
        COLUMNS=columns,
        SHARED=shared is not None,
        SHARE=share is not None,
        num_warps=4,
    )
    return out


def _block(x: Tensor, ids: Tensor | None, weights: Routed, pieces: Pieces) -> ExpertSum:
    """Return the output of the whole block, [T, hidden], for x [T, hidden]."""
    chosen, scales, share = pieces.route(x, ids, weights)
    made = pieces.experts(x, chosen, weights)
    shared = None
    if weights.shared_gate_up is not None:
        inner = activate(pieces.matrix(x, weights.shared_gate_up, None), weights.gate, pieces.gated)
        shared = pieces.matrix(inner, weights.shared_down, None)
    return ExpertSum(made=made, scales=scales, share=share, shared=shared, add=_finish)


FAST = Pieces(torch.nn.functional.linear, coded.linear, fused.gated, by_table, routing.choose_experts)
INVARIANT = Pieces(
    matmul.linear, coded.linear_invariant, fused.gated, by_tiles, routing.choose_experts_invariant
)


PLAIN = FAST._replace(gated=plain, experts=plain_by_table)
PLAIN_INVARIANT = INVARIANT._replace(gated=plain, experts=partial(by_tiles, gated=plain))


def joins(tokens: int, weights: Routed) -> bool:
    """Return True if the shared expert is one more expert of the grouped product for ``tokens`` tokens."""
    shared, experts = weights.shared_down, weights.down
    return (
        isinstance(shared, Tensor)
        and isinstance(experts, Tensor)
        and 0 < tokens <= routing.FEW
        and shared.shape == experts.shape[1:]
        and weights.gate_up_bias is None
        and weights.down_bias is None
        and _fuses(weights.gate)
        and routing.routes(weights)
        and _table_form(tokens, weights) == "triton"
    )


def moe(x: Tensor, ids: Tensor | None, weights: Routed) -> Tensor:
    """Compute ``weft.ops.moe.block`` in the table's fastest form without synchronisation."""
    return moe_terms(x, ids, weights).total()


def moe_terms(x: Tensor, ids: Tensor | None, weights: Routed) -> ExpertSum:
    """Return the output of ``moe`` as terms."""
    if not joins(len(x), weights):
        return _block(x, ids, weights, FAST)
    chosen, scales, _ = routing.choose(x, weights, FAST.multiply, own=True, joined=True)
    made = by_tiles(x, chosen, weights, joined=True)
    return ExpertSum(made=made, scales=scales, share=None, shared=None, add=_finish)


def moe_invariant(x: Tensor, ids: Tensor | None, weights: Routed) -> Tensor:
    """Compute ``block`` with equal tiles for every number of tokens."""
    return moe_terms_invariant(x, ids, weights).total()


def moe_terms_invariant(x: Tensor, ids: Tensor | None, weights: Routed) -> ExpertSum:
    """Return the output of ``moe_invariant`` as terms."""
    return _block(x, ids, weights, INVARIANT)


def pieces() -> Pieces:
    """Return the parts of ``moe``."""
    return FAST


def pieces_invariant() -> Pieces:
    """Return the parts of ``moe_invariant``."""
    return INVARIANT


def moe_plain(x: Tensor, ids: Tensor | None, weights: Routed) -> Tensor:
    """Compute ``weft.ops.moe_plain.block`` in the table's fastest form without synchronisation."""
    return _plain_block(x, ids, weights, PLAIN)


def moe_plain_invariant(x: Tensor, ids: Tensor | None, weights: Routed) -> Tensor:
    """Compute ``weft.ops.moe_plain.block`` with equal tiles for every number of tokens."""
    return _plain_block(x, ids, weights, PLAIN_INVARIANT)


def _plain_block(x: Tensor, ids: Tensor | None, weights: Routed, pieces: Pieces) -> Tensor:
    """Return the output of a block of experts without a gate, [T, hidden], for x [T, hidden]."""
    if not isinstance(weights, LatentRouted):
        return _block(x, ids, weights, pieces).total()
    chosen, scales, share = pieces.route(x, ids, weights)
    total = weights.leave(_finish(pieces.experts(weights.enter(x), chosen, weights), scales, None, None))
    shared = pieces.shared(x, share, weights)
    return total if shared is None else (total.to(shared.dtype) + shared).to(x.dtype)


def plain_pieces() -> Pieces:
    """Return the parts of ``moe_plain``."""
    return PLAIN


def plain_pieces_invariant() -> Pieces:
    """Return the parts of ``moe_plain_invariant``."""
    return PLAIN_INVARIANT


# --- packed matrices ---


def pack_codes(weights: Routed) -> Routed:
    """Return the weights with codes in the layout of the kernels; plain matrices stay."""

    def made(matrices: Any) -> Any:
        return coded.pack(matrices) if isinstance(matrices, Codes) else matrices

    return replace(
        weights,
        gate_up=made(weights.gate_up),
        down=made(weights.down),
        shared_gate_up=made(weights.shared_gate_up),
        shared_down=made(weights.shared_down),
    )


def _each(matrices: Tensor, to: Callable[..., Codes], *more: Any) -> Codes:
    """Round a matrix, or the matrices of a stack one by one to bound float32 memory.

    ``more``: further arguments of ``to``, one item per matrix of a stack.
    """
    if matrices.dim() == 2:
        return to(matrices, *more)
    if not len(matrices):
        return _each(matrices.new_zeros(1, *matrices.shape[1:]), to)[:0]
    codes = stacked([to(*one) for one in zip(matrices, *more, strict=True)])
    assert codes is not None, "all were made in one way"
    return codes


def pack_int4(weights: Routed) -> Routed:
    """Return the weights rounded by ``coded.to_int4``, packed."""
    return pack_codes(rounded(weights, lambda matrices: _each(matrices, to_int4)))


def pack_fp8(weights: Routed) -> Routed:
    """Return the weights rounded by ``coded.to_fp8``, packed."""
    return pack_codes(rounded(weights, lambda matrices: _each(matrices, to_fp8)))


def pack_int8(weights: Routed) -> Routed:
    """Return the weights rounded by ``torch_ops.to_int8`` with one scale per output channel, packed."""

    def made(matrices: Tensor | None, largest: Tensor | None = None) -> Codes | None:
        if matrices is None:
            return None
        return _each(matrices, torch_ops.to_int8_codes, *([] if largest is None else [largest]))

    return pack_codes(
        replace(
            weights,
            dtype=weights.dtype or weights.down.dtype,
            gate_up=made(weights.gate_up),
            down=made(weights.down, weights.down_largest),
            shared_gate_up=made(weights.shared_gate_up),
            shared_down=made(weights.shared_down, weights.shared_down_largest),
        )
    )
