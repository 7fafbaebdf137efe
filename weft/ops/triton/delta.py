"""Gated delta net token by token, in two kernels for all tokens of a segment.

    _delta_states    convolution, gates and recurrence. A program has ``TILE`` columns of one head's state in
                     registers for all tokens of a row; columns do not depend on each other
    _delta_outputs   norm and gate of each head, then the last inputs of the convolution

All sums are float32, in an order that depends on the sizes of a head only, so the bits of a row depend
neither on other rows nor on the chunks of its tokens. With a decay for every key channel (``BY_CHANNEL``) the
decays of a token are a column, one for each row of the state.

Source: Yang et al. 2024, arXiv 2412.06464; arXiv 2510.26692.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from weft.ops.triton.causal import convolved, keep_inputs, row_of, silu, softplus
from weft.ops.triton.forms import power

Tensor = torch.Tensor

TILE = 32
"""Columns of a head's state in one program."""
MOST_KEYS, MOST_VALUES = 256, 1024
"""Maximum dims of a head, for which the registers of a program suffice."""


@triton.jit
def _decay_input(ptr, at, k_dim, K_DIM: tl.constexpr, BY_CHANNEL: tl.constexpr):
    """Return the float32 numbers of one head: a number, or one for each key channel."""
    if BY_CHANNEL:
        result = tl.load(ptr + at, mask=k_dim < K_DIM, other=0.0).to(tl.float32)
    else:
        result = tl.load(ptr + at).to(tl.float32)
    return result


# A row's columns lie anywhere in a step's columns. Do not compile a program per alignment.
@triton.jit(do_not_specialize_on_alignment=["offsets_ptr", "starts_ptr", "slots_ptr", "live_ptr"])
def _delta_states(
    qkv_ptr,  # [T, q heads | k heads | v heads] of wider rows
    b_ptr,  # [T, V_HEADS] of wider rows
    a_ptr,  # [T, V_HEADS], or [T, V_HEADS * K_DIM] with BY_CHANNEL, of wider rows
    o_ptr,  # float32 [T, V_HEADS, V_DIM]
    q_ptr,  # [slots, copies, K_HEADS, TAPS - 1, K_DIM]: last inputs; slots and copies may lie apart
    k_ptr,
    v_ptr,  # [slots, copies, V_HEADS, TAPS - 1, V_DIM]
    state_ptr,  # float32 [slots, copies, V_HEADS, K_DIM, V_DIM]
    taps_ptr,  # float32 [TAPS, 2 * K_HEADS * K_DIM + V_HEADS * V_DIM]
    rate_ptr,  # float32 [V_HEADS]
    bias_ptr,  # float32 [V_HEADS], or [V_HEADS, K_DIM] with BY_CHANNEL
    offsets_ptr,  # int32 [R + 1]
    starts_ptr,  # int64 [R]
    slots_ptr,  # int64 [R]
    live_ptr,  # int64 [R]
    qkv_stride,
    b_stride,
    a_stride,
    key_slot,  # elements from slot to slot, and from copy to copy
    key_copy,
    value_slot,
    value_copy,
    state_slot,
    state_copy,
    length_eps,
    reach,  # upper bound of beta
    floor,  # lower bound of the log decays, with BOUNDED
    K_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    K_DIM: tl.constexpr,
    K_P2: tl.constexpr,
    V_DIM: tl.constexpr,
    TAPS: tl.constexpr,
    TILE: tl.constexpr,
    BY_CHANNEL: tl.constexpr,
    BOUNDED: tl.constexpr,
    EACH: tl.constexpr,
):
    """Advance TILE columns of one head's state by the tokens of one row."""
    V_HEADS: tl.constexpr = K_HEADS * GROUP
    KEYS: tl.constexpr = K_HEADS * K_DIM
    CHANNELS: tl.constexpr = 2 * KEYS + V_HEADS * V_DIM
    token, count, start, slot, live = row_of(tl.program_id(0), offsets_ptr, starts_ptr, slots_ptr, live_ptr)
    if count == 0:
        return
    head = tl.program_id(1)
    key_head = head // GROUP
    k_dim = tl.arange(0, K_P2)
    v_dim = tl.program_id(2) * TILE + tl.arange(0, TILE)
    inside = (k_dim < K_DIM)[:, None] & (v_dim < V_DIM)[None, :]
    of_keys = slot * key_slot + live * key_copy + key_head * ((TAPS - 1) * K_DIM)
    v_past = v_ptr + slot * value_slot + live * value_copy + head * ((TAPS - 1) * V_DIM)
    rate = tl.load(rate_ptr + head)
    # Offset of the decays of the head in a row of a, and in the biases.
    if BY_CHANNEL:
        decay_at = head * K_DIM + k_dim
    else:
        decay_at = head
    bias = _decay_input(bias_ptr, decay_at, k_dim, K_DIM, BY_CHANNEL)
    own_ptr = state_ptr + slot * state_slot + head * (K_DIM * V_DIM)
    places = own_ptr + k_dim[:, None] * V_DIM + v_dim[None, :]
    state = tl.load(places + live * state_copy, mask=inside, other=0.0)
    state = tl.where(start > 0, state, 0.0)
    for j in range(0, count):
        q = silu(convolved(
            qkv_ptr, q_ptr + of_keys, taps_ptr, token, j, start, key_head * K_DIM, k_dim, qkv_stride,
            K_DIM, TAPS, CHANNELS, 0,
        ))  # fmt: skip
        k = silu(convolved(
            qkv_ptr, k_ptr + of_keys, taps_ptr, token, j, start, KEYS + key_head * K_DIM, k_dim, qkv_stride,
            K_DIM, TAPS, CHANNELS, 0,
        ))  # fmt: skip
        v = silu(convolved(
            qkv_ptr, v_past, taps_ptr, token, j, start, 2 * KEYS + head * V_DIM, v_dim, qkv_stride,
            V_DIM, TAPS, CHANNELS, 0,
        ))  # fmt: skip
        q = q * (tl.rsqrt(tl.sum(q * q, 0) + length_eps) * K_DIM**-0.5)
        k = k * tl.rsqrt(tl.sum(k * k, 0) + length_eps)
        beta = reach / (1.0 + tl.exp(-tl.load(b_ptr + (token + j) * b_stride + head).to(tl.float32)))
        a = _decay_input(a_ptr + (token + j) * a_stride, decay_at, k_dim, K_DIM, BY_CHANNEL) + bias
        if BOUNDED:
            decay = tl.exp(floor / (1.0 + tl.exp(-rate * a)))
        else:
            decay = tl.exp(-rate * softplus(a))
        if BY_CHANNEL:
            state = state * decay[:, None]
        else:
            state = state * decay
        change = (v - tl.sum(k[:, None] * state, 0)) * beta
        state = state + k[:, None] * change[None, :]
        o = tl.sum(q[:, None] * state, 0)
        tl.store(o_ptr + ((token + j) * V_HEADS + head) * V_DIM + v_dim, o, mask=v_dim < V_DIM)
        if EACH:
            tl.store(places + j * state_copy, state, mask=inside)
    if not EACH:
        tl.store(places, state, mask=inside)


@triton.jit(do_not_specialize_on_alignment=["offsets_ptr", "starts_ptr", "slots_ptr", "live_ptr"])
def _delta_outputs(
    qkv_ptr,  # as in ``_delta_states``
    z_ptr,  # [T, V_HEADS * V_DIM] of wider rows
    o_ptr,
    out_ptr,  # [T, V_HEADS * V_DIM] of wider rows
    q_ptr,
    k_ptr,
    v_ptr,
    norm_ptr,  # float32 [V_DIM]
    offsets_ptr,
    starts_ptr,
    slots_ptr,
    live_ptr,
    qkv_stride,
    z_stride,
    out_stride,
    key_slot,
    key_copy,
    value_slot,
    value_copy,
    eps,
    K_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    K_DIM: tl.constexpr,
    K_P2: tl.constexpr,
    V_DIM: tl.constexpr,
    V_P2: tl.constexpr,
    TAPS: tl.constexpr,
    TAPS_P2: tl.constexpr,
    SIGMOID: tl.constexpr,
    EACH: tl.constexpr,
):
    """Finish a value head of one row, or keep the last inputs of a head of q or k."""
    V_HEADS: tl.constexpr = K_HEADS * GROUP
    KEYS: tl.constexpr = K_HEADS * K_DIM
    token, count, start, slot, live = row_of(tl.program_id(0), offsets_ptr, starts_ptr, slots_ptr, live_ptr)
    if count == 0:
        return
    head = tl.program_id(1)
    if head >= V_HEADS:
        head = head - V_HEADS  # q heads, then k heads, as in the channels
        part_ptr = tl.where(head < K_HEADS, q_ptr, k_ptr)
        part_ptr += slot * key_slot + head % K_HEADS * ((TAPS - 1) * K_DIM)
        key = tl.arange(0, K_P2)
        keep_inputs(
            qkv_ptr, part_ptr, key_copy, token, count, start, live, head * K_DIM + key, key, key < K_DIM,
            qkv_stride, K_DIM, TAPS, TAPS_P2, 0, EACH,
        )  # fmt: skip
    else:
        dim = tl.arange(0, V_P2)
        inside = dim < V_DIM
        norm = tl.load(norm_ptr + dim, mask=inside, other=0.0)
        for j in range(0, count):
            o = tl.load(o_ptr + ((token + j) * V_HEADS + head) * V_DIM + dim, mask=inside, other=0.0)
            o = o * tl.rsqrt(tl.sum(o * o, 0) / V_DIM + eps) * norm
            gate_ptr = z_ptr + (token + j) * z_stride + head * V_DIM
            z = tl.load(gate_ptr + dim, mask=inside, other=0.0).to(tl.float32)
            if SIGMOID:
                gate = 1.0 / (1.0 + tl.exp(-z))
            else:
                gate = z / (1.0 + tl.exp(-z))
            o = (o * gate).to(out_ptr.dtype.element_ty)
            tl.store(out_ptr + (token + j) * out_stride + head * V_DIM + dim, o, mask=inside)
        part_ptr = v_ptr + slot * value_slot + head * ((TAPS - 1) * V_DIM)
        keep_inputs(
            qkv_ptr, part_ptr, value_copy, token, count, start, live, 2 * KEYS + head * V_DIM + dim, dim,
            inside, qkv_stride, V_DIM, TAPS, TAPS_P2, 0, EACH,
        )  # fmt: skip


def fits(k_dim: int, v_dim: int) -> bool:
    """Return True if the kernels support heads of these sizes."""
    return k_dim <= MOST_KEYS and v_dim <= MOST_VALUES


def run(
    inputs: tuple[Tensor, Tensor, Tensor, Tensor],
    out: Tensor,
    state: tuple[Tensor, ...],
    weights: tuple[Tensor, Tensor, Tensor, Tensor],
    rows: tuple[Tensor, Tensor, Tensor, Tensor],
    *,
    eps: float,
    length_eps: float,
    reach: float = 1.0,
    floor: float = 0.0,
    sigmoid: bool,
    each: bool,
) -> None:
    """Compute ``DeltaBackend.run`` for any number of tokens per row, one token after another.

    inputs: qkv, z, b, a as in ``DeltaInputs``. weights: taps [taps, channels], rate [v_heads], bias [v_heads]
    or [v_heads, k_dim], norm [v_dim], float32. rows: offsets int32 [R + 1], starts, slots, live int64 [R].
    length_eps: addend to the square of the length of q and k. reach: upper bound of
    beta. floor: lower bound of the log decays if below 0. sigmoid: kind of the output gate.
    """
    qkv, z, b, a = inputs
    q, k, v, recurrent = state
    k_heads, v_heads = q.shape[2], v.shape[2]
    k_dim, v_dim = recurrent.shape[3:]
    assert q.stride() == k.stride(), "queries and keys lie alike"
    for part in (*state, *(one.unsqueeze(0) for one in (*inputs, out))):
        assert part[0, 0].is_contiguous(), "rows and heads are contiguous"
    o = torch.empty((len(qkv), v_heads, v_dim), dtype=torch.float32, device=qkv.device)
    *of_states, norm = weights
    taps = len(weights[0])
    strides = (q.stride(0), q.stride(1), v.stride(0), v.stride(1))
    sizes = {"K_HEADS": k_heads, "GROUP": v_heads // k_heads, "K_DIM": k_dim, "K_P2": power(k_dim)}
    sizes |= {"V_DIM": v_dim, "TAPS": taps, "EACH": each}
    tensors = (qkv, b, a, o, q, k, v, recurrent, *of_states, *rows)
    numbers = (qkv.stride(0), b.stride(0), a.stride(0), *strides, recurrent.stride(0), recurrent.stride(1))
    _delta_states[(len(rows[1]), v_heads, triton.cdiv(v_dim, TILE))](
        *tensors,
        *numbers,
        length_eps,
        reach,
        floor,
        **sizes,
        TILE=TILE,
        BY_CHANNEL=weights[2].dim() == 2,
        BOUNDED=floor < 0,
        # As many threads as dims of a key: Triton then loads a key once, not once per layout.
        num_warps=max(1, power(k_dim) // 32),
    )
    _delta_outputs[(len(rows[1]), v_heads + 2 * k_heads)](
        *(qkv, z, o, out, q, k, v, norm, *rows),
        *(qkv.stride(0), z.stride(0), out.stride(0), *strides, eps),
        **sizes,
        V_P2=power(v_dim),
        TAPS_P2=power(taps - 1),
        SIGMOID=sigmoid,
        num_warps=1,
    )
