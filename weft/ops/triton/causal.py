"""Causal convolutions of recurrent layers, and a convolution by itself in one kernel.

    row_of, convolved, keep_inputs, silu, softplus   parts of the kernels of delta nets, Mamba2 and Mamba 1
    _short_conv                                      a convolution with its state: with the gates of LFM2, or
                                                     with the activation of Mamba 1. See ``run``

A slot keeps the last ``TAPS - 1`` inputs of each channel before the next position. Sums are float32, one
chain of additions over the taps, so the bits of a token depend neither on other rows nor on chunks.

Source of the gated short convolution: LFM2, arXiv 2511.23404, section 2.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from weft.ops.triton.forms import power

Tensor = torch.Tensor

SPAN = 16
"""Least number of tokens of a row in one program of the short convolution."""
BLOCK = 256
"""Maximum number of channels in one program of the short convolution."""
KEPT = 2048
"""Elements of kept inputs in one program: channels times taps."""


@triton.jit
def row_of(row, offsets_ptr, starts_ptr, slots_ptr, live_ptr):
    """Return (first token, tokens, position, slot, live copy) of a row."""
    token = tl.load(offsets_ptr + row).to(tl.int64)
    count = (tl.load(offsets_ptr + row + 1) - token).to(tl.int32)
    start = tl.load(starts_ptr + row)
    live = tl.load(live_ptr + row)
    # A row at position 0 ignores its copies.
    return token, count, start, tl.load(slots_ptr + row), tl.where(start > 0, live, 0)


@triton.jit
def silu(x):
    """Return x * sigmoid(x)."""
    return x / (1.0 + tl.exp(-x))


@triton.jit
def softplus(x):
    """Return log(1 + e^x)."""
    return tl.maximum(x, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(x)))


@triton.jit
def convolved(
    inputs_ptr,  # [T, CHANNELS] of wider rows
    past_ptr,  # [TAPS - 1, DIM]: last inputs of the head in the live copy of the row's slot
    taps_ptr,  # float32 [TAPS, CHANNELS]
    token,
    j,
    start,
    channel,
    dim,
    stride,
    DIM: tl.constexpr,
    TAPS: tl.constexpr,
    CHANNELS: tl.constexpr,
    PRODUCT: tl.constexpr,
):
    """Return the convolution, float32, for the row's token j and dims ``dim`` of the head at ``channel``.

    PRODUCT: if above 0, an input is the product with the element PRODUCT places behind, rounded as in the
    slot.
    """
    inside = dim < DIM
    total = tl.zeros(dim.shape, dtype=tl.float32)
    for tap in tl.static_range(TAPS):
        at = j - (TAPS - 1) + tap
        # Tokens before the step are the last inputs of the slot.
        ptr = tl.where(
            at >= 0, inputs_ptr + (token + at) * stride + channel, past_ptr + (at + TAPS - 1) * DIM
        )
        x = tl.load(ptr + dim, mask=inside, other=0.0)
        if PRODUCT > 0:
            factor = tl.load(tl.where(at >= 0, ptr + PRODUCT, ptr) + dim, mask=inside, other=0.0)
            x = tl.where(at >= 0, (x.to(tl.float32) * factor.to(tl.float32)).to(x.dtype), x)
        # Nothing precedes position 0. The memory of the slot may hold NaN.
        x = tl.where(start + at >= 0, x.to(tl.float32), 0.0)
        total += x * tl.load(taps_ptr + tap * CHANNELS + channel + dim, mask=inside, other=0.0)
    return total


@triton.jit
def keep_inputs(
    inputs_ptr,  # as in ``convolved``
    own_ptr,  # last inputs of the row's slot, copy 0
    copy_stride,
    token,
    count,
    start,
    live,
    channel,  # channels of the program in a row of inputs
    place,  # and their places in a copy, for the oldest input
    inside,
    stride,
    DIM: tl.constexpr,
    TAPS: tl.constexpr,
    TAPS_P2: tl.constexpr,
    PRODUCT: tl.constexpr,
    EACH: tl.constexpr,
):
    """Write the last inputs of some channels after each token (EACH), or after the last token to copy 0.

    Inputs of a channel are DIM elements apart in a copy.
    """
    row = tl.arange(0, TAPS_P2)[:, None]
    inside = (row < TAPS - 1) & inside[None, :]
    past_ptr = own_ptr + live * copy_stride
    first = 0
    if not EACH:
        first = count - 1
    # The live copy is written last: all other copies are made from it. ``turn`` 0 writes the other copies.
    for turn in range(0, 2):
        for j in range(first, count):
            copy = j
            if not EACH:
                copy = 0
            if (copy == live) == (turn == 1):
                at = j - (TAPS - 2) + row
                fresh = at >= 0
                from_ptr = inputs_ptr + (token + at) * stride + channel[None, :]
                new = tl.load(from_ptr, mask=inside & fresh, other=0.0)
                if PRODUCT > 0:
                    factor = tl.load(from_ptr + PRODUCT, mask=inside & fresh, other=0.0)
                    new = (new.to(tl.float32) * factor.to(tl.float32)).to(new.dtype)
                old = (at < 0) & (start + at >= 0)
                kept = tl.load(
                    past_ptr + (at + TAPS - 1) * DIM + place[None, :], mask=inside & old, other=0.0
                )
                value = tl.where(fresh, new, kept)
                tl.debug_barrier()  # every thread has read the live copy
                tl.store(own_ptr + copy * copy_stride + row * DIM + place[None, :], value, mask=inside)


# A segment begins anywhere in a step's rows. One program for every alignment keeps the bits of a row.
@triton.jit(
    do_not_specialize_on_alignment=[
        "inputs_ptr", "out_ptr", "offsets_ptr", "starts_ptr", "slots_ptr", "live_ptr",
    ]
)  # fmt: skip
def _short_conv(
    inputs_ptr,  # [T, B | C | x], HEADS * DIM channels each, or without GATED [T, x]; of wider rows
    out_ptr,  # [T, HEADS * DIM] of wider rows
    state_ptr,  # [slots, copies, HEADS, TAPS - 1, DIM]: last inputs; slots and copies may lie apart
    taps_ptr,  # float32 [TAPS, HEADS * DIM]
    bias_ptr,  # float32 [HEADS * DIM]; used with BIAS
    offsets_ptr,  # int32 [R + 1]
    starts_ptr,  # int64 [R]
    slots_ptr,  # int64 [R]
    live_ptr,  # int64 [R]
    stride,
    out_stride,
    state_slot,  # elements from slot to slot, and from copy to copy
    state_copy,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    TAPS: tl.constexpr,
    TAPS_P2: tl.constexpr,
    SPAN: tl.constexpr,
    BLOCK: tl.constexpr,
    BIAS: tl.constexpr,
    GATED: tl.constexpr,
    EACH: tl.constexpr,
):
    """Compute SPAN tokens of one row for BLOCK channels of one head. The row's first program keeps the state.

    GATED: B times x is convolved, and the result is multiplied by C. Otherwise x is convolved, with silu.
    Tokens from SPAN on need no inputs of the slot, so no other program reads what the first program writes.
    """
    PARTS: tl.constexpr = (DIM + BLOCK - 1) // BLOCK
    CHANNELS: tl.constexpr = HEADS * DIM
    PRODUCT: tl.constexpr = 2 * CHANNELS if GATED else 0
    token, count, start, slot, live = row_of(tl.program_id(0), offsets_ptr, starts_ptr, slots_ptr, live_ptr)
    first = tl.program_id(1) * SPAN
    if first < count:
        head = tl.program_id(2) // PARTS
        dim = tl.program_id(2) % PARTS * BLOCK + tl.arange(0, BLOCK)
        inside = dim < DIM
        channel = head * DIM
        own_ptr = state_ptr + slot * state_slot + head * ((TAPS - 1) * DIM)
        for j in range(first, tl.minimum(first + SPAN, count)):
            total = convolved(
                inputs_ptr, own_ptr + live * state_copy, taps_ptr, token, j, start, channel, dim, stride,
                DIM, TAPS, CHANNELS, PRODUCT,
            )  # fmt: skip
            if BIAS:
                total += tl.load(bias_ptr + channel + dim, mask=inside, other=0.0)
            if GATED:
                gate_ptr = inputs_ptr + (token + j) * stride + CHANNELS + channel
                total = tl.load(gate_ptr + dim, mask=inside, other=0.0).to(tl.float32) * total
            else:
                total = silu(total)
            to_ptr = out_ptr + (token + j) * out_stride + channel + dim
            tl.store(to_ptr, total.to(out_ptr.dtype.element_ty), mask=inside)
        if first == 0:
            keep_inputs(
                inputs_ptr, own_ptr, state_copy, token, count, start, live, channel + dim, dim, inside,
                stride, DIM, TAPS, TAPS_P2, PRODUCT, EACH,
            )  # fmt: skip


def run(
    inputs: Tensor,
    out: Tensor,
    state: Tensor,
    taps: Tensor,
    bias: Tensor | None,
    rows: tuple[Tensor, Tensor, Tensor, Tensor],
    *,
    most: int,
    each: bool,
    gated: bool = True,
) -> None:
    """Compute ``ConvBackend.run``, or ``Mamba1Backend.convolve`` without gates, for any tokens per row.

    inputs: [T, B | C | x]; [T, x] without ``gated``. state: [slots, copies, heads, taps - 1, dim]. taps:
    float32 [taps, channels]; bias: float32 [channels]. rows: offsets int32 [R + 1], starts, slots, live int64
    [R]. most: upper bound of the tokens of a row.
    """
    for part in (state, inputs.unsqueeze(0), out.unsqueeze(0)):
        assert part[0, 0].is_contiguous(), "rows and heads are contiguous"
    heads, back, dim = state.shape[2:]
    taps_p2 = power(back)
    block = min(power(dim), BLOCK, max(16, KEPT // taps_p2))
    span = max(SPAN, taps_p2)
    _short_conv[(len(rows[1]), triton.cdiv(most, span), heads * triton.cdiv(dim, block))](
        *(inputs, out, state, taps, taps if bias is None else bias, *rows),
        *(inputs.stride(0), out.stride(0), state.stride(0), state.stride(1)),
        HEADS=heads,
        DIM=dim,
        TAPS=back + 1,
        TAPS_P2=taps_p2,
        SPAN=span,
        BLOCK=block,
        BIAS=bias is not None,
        GATED=gated,
        EACH=each,
        num_warps=max(1, block // 64),
    )
