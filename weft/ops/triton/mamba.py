"""Mamba2 in two kernels for all tokens of a segment, and the recurrence of Mamba 1 in one: token by token.

    _mamba_states    convolution, time steps, recurrence, and the gate unless a norm comes first. A program
                     has ``TILE`` rows of one head's state in registers for all tokens of a row of the
                     segment; rows of a state do not depend on each other
    _mamba_outputs   norm of each token, and the last inputs of the convolution
    _mamba1_states   time steps, recurrence and gate of Mamba 1. A program has the states of ``TILE`` channels
                     in registers for all tokens of a row

All sums are float32, in an order that depends on the sizes of the layer only, so the bits of a row depend
neither on other rows nor on the chunks of its tokens.

Source: Dao and Gu 2024, arXiv 2405.21060. Mamba 1: Gu and Dao 2023, arXiv 2312.00752.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from weft.ops.triton.causal import KEPT, convolved, keep_inputs, row_of, silu, softplus
from weft.ops.triton.forms import power

Tensor = torch.Tensor

TILE = 32
"""Rows of a head's state, or channels of Mamba 1, in one program."""
MOST_STATE, MOST_TAPS = 256, 8
"""Maximum elements of B and C, and taps of Mamba2, for which the registers of a program suffice."""
NORM_BLOCK = 8192
"""Maximum number of channels of a norm that a program loads at a time."""


@triton.jit
def _mixed(
    inputs_ptr,
    past_ptr,
    taps_ptr,
    bias_ptr,  # float32 [CHANNELS]; used with BIAS
    token,
    j,
    start,
    channel,
    dim,
    stride,
    DIM: tl.constexpr,
    TAPS: tl.constexpr,
    CHANNELS: tl.constexpr,
    BIAS: tl.constexpr,
):
    """Return silu of the convolution with its bias: see ``convolved``."""
    total = convolved(
        inputs_ptr, past_ptr, taps_ptr, token, j, start, channel, dim, stride, DIM, TAPS, CHANNELS, 0
    )
    if BIAS:
        total += tl.load(bias_ptr + channel + dim, mask=dim < DIM, other=0.0)
    return silu(total)


# A segment begins anywhere in a step's rows. One program for every alignment keeps the bits of a row.
@triton.jit(
    do_not_specialize_on_alignment=[
        "zxbcdt_ptr", "y_ptr", "offsets_ptr", "starts_ptr", "slots_ptr", "live_ptr",
    ]
)  # fmt: skip
def _mamba_states(
    zxbcdt_ptr,  # [T, z | x | B | C | steps] of wider rows
    y_ptr,  # [T, HEADS * DIM] of wider rows
    x_ptr,  # [slots, copies, HEADS, TAPS - 1, DIM]: last inputs; slots and copies may lie apart
    b_ptr,  # [slots, copies, PLACES, TAPS - 1, STATE]; all places of a group are equal
    c_ptr,
    state_ptr,  # float32 [slots, copies, HEADS, DIM, STATE]
    taps_ptr,  # float32 [TAPS, HEADS * DIM + 2 * GROUPS * STATE]
    bias_ptr,  # float32 [HEADS * DIM + 2 * GROUPS * STATE]; used with BIAS
    rate_ptr,  # float32 [HEADS]
    step_bias_ptr,  # float32 [HEADS]
    skip_ptr,  # float32 [HEADS]
    offsets_ptr,  # int32 [R + 1]
    starts_ptr,  # int64 [R]
    slots_ptr,  # int64 [R]
    live_ptr,  # int64 [R]
    stride,
    y_stride,
    x_slot,  # elements from slot to slot, and from copy to copy
    x_copy,
    shared_slot,
    shared_copy,
    state_slot,
    state_copy,
    low,
    high,
    HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    PLACES: tl.constexpr,
    DIM: tl.constexpr,
    STATE: tl.constexpr,
    STATE_P2: tl.constexpr,
    TAPS: tl.constexpr,
    TILE: tl.constexpr,
    BIAS: tl.constexpr,
    GATED: tl.constexpr,
    EACH: tl.constexpr,
):
    """Advance TILE rows of one head's state by the tokens of one row, and write y, or y * silu(z) (GATED)."""
    INNER: tl.constexpr = HEADS * DIM
    SHARED: tl.constexpr = GROUPS * STATE
    CHANNELS: tl.constexpr = INNER + 2 * SHARED
    token, count, start, slot, live = row_of(tl.program_id(0), offsets_ptr, starts_ptr, slots_ptr, live_ptr)
    if count == 0:
        return
    head = tl.program_id(1)
    group = head // (HEADS // GROUPS)
    dim = tl.program_id(2) * TILE + tl.arange(0, TILE)
    column = tl.arange(0, STATE_P2)
    inside = (dim < DIM)[:, None] & (column < STATE)[None, :]
    inputs_ptr = zxbcdt_ptr + INNER
    x_past = x_ptr + slot * x_slot + live * x_copy + head * ((TAPS - 1) * DIM)
    # The first of the group's places.
    of_group = slot * shared_slot + live * shared_copy + group * (PLACES // GROUPS * (TAPS - 1) * STATE)
    rate = tl.load(rate_ptr + head)
    step_bias = tl.load(step_bias_ptr + head)
    skip = tl.load(skip_ptr + head)
    own_ptr = state_ptr + slot * state_slot + head * (DIM * STATE)
    places = own_ptr + dim[:, None] * STATE + column[None, :]
    state = tl.load(places + live * state_copy, mask=inside, other=0.0)
    state = tl.where(start > 0, state, 0.0)
    # Taps stay in memory: they need as many registers as the state.
    for j in tl.range(0, count, disable_licm=True):
        x = _mixed(
            inputs_ptr, x_past, taps_ptr, bias_ptr, token, j, start, head * DIM, dim, stride,
            DIM, TAPS, CHANNELS, BIAS,
        )  # fmt: skip
        b = _mixed(
            inputs_ptr, b_ptr + of_group, taps_ptr, bias_ptr, token, j, start, INNER + group * STATE, column,
            stride, STATE, TAPS, CHANNELS, BIAS,
        )  # fmt: skip
        c = _mixed(
            inputs_ptr, c_ptr + of_group, taps_ptr, bias_ptr, token, j, start,
            INNER + SHARED + group * STATE, column, stride, STATE, TAPS, CHANNELS, BIAS,
        )  # fmt: skip
        row_ptr = zxbcdt_ptr + (token + j) * stride
        step = tl.load(row_ptr + INNER + CHANNELS + head).to(tl.float32) + step_bias
        dt = softplus(step)
        # Comparisons keep NaN; minimum and maximum would not.
        dt = tl.where(dt < low, low, dt)
        dt = tl.where(dt > high, high, dt)
        state = state * tl.exp(-rate * dt) + (x * dt)[:, None] * b[None, :]
        y = tl.sum(state * c[None, :], 1) + skip * x
        if GATED:
            z = tl.load(row_ptr + head * DIM + dim, mask=dim < DIM, other=0.0).to(tl.float32)
            y = y * silu(z)
        to_ptr = y_ptr + (token + j) * y_stride + head * DIM + dim
        tl.store(to_ptr, y.to(y_ptr.dtype.element_ty), mask=dim < DIM)
        if EACH:
            tl.store(places + j * state_copy, state, mask=inside)
    if not EACH:
        tl.store(places, state, mask=inside)


@triton.jit
def _norm(
    y_ptr,  # float32 [SIZE]
    z_ptr,  # [SIZE]; used without GATED
    out_ptr,  # [SIZE]
    norm_ptr,  # float32 [SIZE]
    eps,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    GATED: tl.constexpr,
):
    """Write the RMSNorm of the channels of one norm group, times silu(z) without GATED."""
    lane = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for first in range(0, SIZE, BLOCK):
        y = tl.load(y_ptr + first + lane, mask=first + lane < SIZE, other=0.0)
        total += y * y
    scale = tl.rsqrt(tl.sum(total, 0) / SIZE + eps)
    for first in range(0, SIZE, BLOCK):
        inside = first + lane < SIZE
        y = tl.load(y_ptr + first + lane, mask=inside, other=0.0)
        y = y * scale * tl.load(norm_ptr + first + lane, mask=inside, other=0.0)
        if not GATED:
            y = y * silu(tl.load(z_ptr + first + lane, mask=inside, other=0.0).to(tl.float32))
        tl.store(out_ptr + first + lane, y.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit(
    do_not_specialize=["tokens"],
    do_not_specialize_on_alignment=[
        "zxbcdt_ptr", "out_ptr", "offsets_ptr", "starts_ptr", "slots_ptr", "live_ptr",
    ],
)  # fmt: skip
def _mamba_outputs(
    zxbcdt_ptr,  # as in ``_mamba_states``
    y_ptr,  # float32 [T, HEADS * DIM]; used with NORMS
    out_ptr,  # [T, HEADS * DIM] of wider rows; written with NORMS
    x_ptr,
    b_ptr,
    c_ptr,
    norm_ptr,  # float32 [HEADS * DIM]; used with NORMS
    offsets_ptr,
    starts_ptr,
    slots_ptr,
    live_ptr,
    tokens,  # T with NORMS, else 0
    stride,
    out_stride,
    x_slot,
    x_copy,
    shared_slot,
    shared_copy,
    eps,
    HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    PLACES: tl.constexpr,
    DIM: tl.constexpr,
    STATE: tl.constexpr,
    TAPS: tl.constexpr,
    TAPS_P2: tl.constexpr,
    NORMS: tl.constexpr,
    BLOCK: tl.constexpr,
    KEPT: tl.constexpr,
    GATED: tl.constexpr,
    EACH: tl.constexpr,
):
    """Finish a norm group of one token, or keep the last inputs of KEPT channels of one row."""
    INNER: tl.constexpr = HEADS * DIM
    SHARED: tl.constexpr = GROUPS * STATE
    X_PARTS: tl.constexpr = (INNER + KEPT - 1) // KEPT
    SHARED_PARTS: tl.constexpr = (PLACES * STATE + KEPT - 1) // KEPT
    number = tl.program_id(0)
    part = tl.program_id(1)
    if number < tokens:
        if NORMS > 0:  # noqa: SIM102 - NORMS is known to the compiler
            if part < NORMS:
                at = number.to(tl.int64)
                first = part * (INNER // NORMS)
                _norm(
                    y_ptr + at * INNER + first, zxbcdt_ptr + at * stride + first,
                    out_ptr + at * out_stride + first, norm_ptr + first, eps, INNER // NORMS, BLOCK, GATED,
                )  # fmt: skip
    else:
        token, count, start, slot, live = row_of(
            number - tokens, offsets_ptr, starts_ptr, slots_ptr, live_ptr
        )
        inputs_ptr = zxbcdt_ptr + INNER
        lane = tl.arange(0, KEPT)
        if (count > 0) & (part < X_PARTS):
            channel = part * KEPT + lane
            place = channel // DIM * ((TAPS - 1) * DIM) + channel % DIM
            keep_inputs(
                inputs_ptr, x_ptr + slot * x_slot, x_copy, token, count, start, live, channel, place,
                channel < INNER, stride, DIM, TAPS, TAPS_P2, 0, EACH,
            )  # fmt: skip
        if (count > 0) & (part >= X_PARTS) & (part < X_PARTS + 2 * SHARED_PARTS):
            # B, then C, as in the channels. Every place of a group gets the group's inputs.
            later = part - X_PARTS
            place_ptr = tl.where(later < SHARED_PARTS, b_ptr, c_ptr)
            begin = tl.where(later < SHARED_PARTS, INNER, INNER + SHARED)
            column = later % SHARED_PARTS * KEPT + lane
            at_place = column // STATE
            channel = begin + at_place // (PLACES // GROUPS) * STATE + column % STATE
            place = at_place * ((TAPS - 1) * STATE) + column % STATE
            keep_inputs(
                inputs_ptr, place_ptr + slot * shared_slot, shared_copy, token, count, start, live, channel,
                place, column < PLACES * STATE, stride, STATE, TAPS, TAPS_P2, 0, EACH,
            )  # fmt: skip


def run(
    zxbcdt: Tensor,
    out: Tensor,
    state: tuple[Tensor, ...],
    weights: tuple[Tensor, Tensor | None, Tensor, Tensor, Tensor, Tensor | None],
    rows: tuple[Tensor, Tensor, Tensor, Tensor],
    *,
    groups: int,
    norm_groups: int,
    bounds: tuple[float, float],
    eps: float,
    finish: str,
    each: bool,
) -> None:
    """Compute ``MambaBackend.run`` for any number of tokens per row, one token after another.

    weights: taps, bias of the convolution or None, rate, bias of the time step, skip, weight of the norm or
    None, as in ``MambaWeights``. rows: offsets int32 [R + 1], starts, slots, live int64 [R]. bounds: of the
    time step. finish: see ``weft.attention.mamba.mamba_backend.Finish``.
    """
    x, b, c, recurrent = state
    taps, bias, *of_heads, norm = weights
    heads, dim, columns = recurrent.shape[2:]
    assert b.stride() == c.stride(), "B and C lie alike"
    for part in (*state, zxbcdt.unsqueeze(0), out.unsqueeze(0)):
        assert part[0, 0].is_contiguous(), "rows and heads are contiguous"
    inner, places, taps_p2 = heads * dim, b.shape[2], power(len(taps) - 1)
    kept = min(max(16, KEPT // taps_p2), power(max(inner, places * columns)))
    y = out if norm is None else torch.empty(len(out), inner, dtype=torch.float32, device=out.device)
    strides = (x.stride(0), x.stride(1), b.stride(0), b.stride(1))
    sizes = {"HEADS": heads, "GROUPS": groups, "PLACES": places, "DIM": dim, "STATE": columns}
    sizes |= {"TAPS": len(taps), "EACH": each}
    _mamba_states[(len(rows[1]), heads, triton.cdiv(dim, TILE))](
        *(zxbcdt, y, *state, taps, taps if bias is None else bias, *of_heads, *rows),
        *(zxbcdt.stride(0), y.stride(0), *strides, recurrent.stride(0), recurrent.stride(1), *bounds),
        **sizes,
        STATE_P2=power(columns),
        TILE=TILE,
        BIAS=bias is not None,
        GATED=finish in ("gated", "none"),
        # As many threads as elements of B: Triton then loads B once, not once per layout.
        num_warps=max(1, power(columns) // 32),
    )
    tokens, norms = (0, 0) if norm is None else (len(out), norm_groups)
    block = min(power(inner // max(1, norms)), NORM_BLOCK)
    programs = triton.cdiv(inner, kept) + 2 * triton.cdiv(places * columns, kept)
    _mamba_outputs[(tokens + len(rows[1]), max(norms, programs))](
        *(zxbcdt, y, out, x, b, c, taps if norm is None else norm, *rows),
        *(tokens, zxbcdt.stride(0), out.stride(0), *strides, eps),
        **sizes,
        TAPS_P2=taps_p2,
        NORMS=norms,
        BLOCK=block,
        KEPT=kept,
        GATED=finish == "gated",
        num_warps=8 if norms and block > 2048 else 4,
    )


@triton.jit(
    do_not_specialize_on_alignment=[
        "x_ptr", "steps_ptr", "b_ptr", "c_ptr", "z_ptr", "out_ptr", "offsets_ptr", "starts_ptr", "slots_ptr",
        "live_ptr",
    ]
)  # fmt: skip
def _mamba1_states(
    x_ptr,  # [T, HEADS * DIM] of wider rows, as steps, z and out
    steps_ptr,
    b_ptr,  # [T, STATE] of wider rows, as C
    c_ptr,
    z_ptr,
    out_ptr,
    state_ptr,  # float32 [slots, copies, HEADS, STATE, DIM]; slots and copies may lie apart
    rate_ptr,  # float32 [HEADS, STATE, DIM]
    step_bias_ptr,  # float32 [HEADS * DIM]
    skip_ptr,  # float32 [HEADS * DIM]
    offsets_ptr,  # int32 [R + 1]
    starts_ptr,  # int64 [R]
    slots_ptr,  # int64 [R]
    live_ptr,  # int64 [R]
    x_stride,
    steps_stride,
    b_stride,
    c_stride,
    z_stride,
    out_stride,
    state_slot,  # elements from slot to slot, and from copy to copy
    state_copy,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    STATE: tl.constexpr,
    STATE_P2: tl.constexpr,
    TILE: tl.constexpr,
    EACH: tl.constexpr,
):
    """Advance the states of TILE channels of one head by the tokens of one row. Write the gated outputs."""
    token, count, start, slot, live = row_of(tl.program_id(0), offsets_ptr, starts_ptr, slots_ptr, live_ptr)
    if count == 0:
        return
    head = tl.program_id(1)
    dim = tl.program_id(2) * TILE + tl.arange(0, TILE)
    channel = head * DIM + dim
    real = dim < DIM
    column = tl.arange(0, STATE_P2)
    inside = (column < STATE)[:, None] & real[None, :]
    place = head * (STATE * DIM) + column[:, None] * DIM + dim[None, :]
    rate = tl.load(rate_ptr + place, mask=inside, other=0.0)
    step_bias = tl.load(step_bias_ptr + channel, mask=real, other=0.0)
    skip = tl.load(skip_ptr + channel, mask=real, other=0.0)
    places = state_ptr + slot * state_slot + place
    state = tl.load(places + live * state_copy, mask=inside, other=0.0)
    state = tl.where(start > 0, state, 0.0)
    for j in range(0, count):
        at = token + j
        x = tl.load(x_ptr + at * x_stride + channel, mask=real, other=0.0).to(tl.float32)
        step = tl.load(steps_ptr + at * steps_stride + channel, mask=real, other=0.0).to(tl.float32)
        z = tl.load(z_ptr + at * z_stride + channel, mask=real, other=0.0).to(tl.float32)
        b = tl.load(b_ptr + at * b_stride + column, mask=column < STATE, other=0.0).to(tl.float32)
        c = tl.load(c_ptr + at * c_stride + column, mask=column < STATE, other=0.0).to(tl.float32)
        dt = softplus(step + step_bias)
        state = state * tl.exp(-rate * dt[None, :]) + b[:, None] * (x * dt)[None, :]
        y = (tl.sum(state * c[:, None], 0) + skip * x) * silu(z)
        tl.store(out_ptr + at * out_stride + channel, y.to(out_ptr.dtype.element_ty), mask=real)
        if EACH:
            tl.store(places + j * state_copy, state, mask=inside)
    if not EACH:
        tl.store(places, state, mask=inside)


def scan(
    inputs: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    out: Tensor,
    state: Tensor,
    weights: tuple[Tensor, Tensor, Tensor],
    rows: tuple[Tensor, Tensor, Tensor, Tensor],
    *,
    each: bool,
) -> None:
    """Compute ``Mamba1Backend.scan`` for any number of tokens per row, one token after another.

    inputs: as ``weft.attention.mamba1.mamba1_backend.Selected``. state: [slots, copies, heads, state, dim].
    weights: rate, bias of the time step, skip, as in ``Mamba1Weights``. rows: as in ``run``.
    """
    for part in (state, *(one.unsqueeze(0) for one in (*inputs, out))):
        assert part[0, 0].is_contiguous(), "rows and heads are contiguous"
    heads, columns, dim = state.shape[2:]
    _mamba1_states[(len(rows[1]), heads, triton.cdiv(dim, TILE))](
        *(*inputs, out, state, *weights, *rows),
        *(one.stride(0) for one in (*inputs, out)),
        *(state.stride(0), state.stride(1)),
        HEADS=heads,
        DIM=dim,
        STATE=columns,
        STATE_P2=power(columns),
        TILE=TILE,
        EACH=each,
        num_warps=max(1, power(columns) // 32),
    )
