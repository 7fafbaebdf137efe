"""Reference implementation of every op in torch, for CPU and CUDA.

No intermediate result is downcast: float64 stays float64. Sums and exponentials of narrower dtypes are
computed in float32 and rounded once at the end. Importing registers the ops.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple, TypeAlias

import torch
import torch.nn.functional as F

from weft.ops.coded import (
    INT8_DIVIDED,
    ROW_GROUPS,
    Codes,
    MixedCodes,
    dequantize,
    quotient,
    row_bits_of,
    rows_at_once,
    to_exact_int4,
    to_fp8,
    to_int4,
    to_w4a8,
)
from weft.ops.registry import Implementation, register

Tensor = torch.Tensor


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype for sums and exponentials of ``dtype``: float64 for float64, otherwise float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return ``x / sqrt(mean(x^2) + eps) * weight`` over the last dim, in x's dtype. x [..., n], weight [n].

    Source: Zhang and Sennrich 2019, arXiv 1910.07467.
    """
    y = x.to(wide(x.dtype))
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
    return (y * weight.to(y.dtype)).to(x.dtype)


def add_rms_norm(x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return (x + delta, RMS norm of the rounded sum), each [T, n] in x's dtype.

    An implementation may write the sum into x. Without a delta the sum is x.
    """
    if delta is not None:
        x = x + delta
    return x, rms_norm(x, weight, eps)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return the rotary embedding of x [T, heads, dim] by wide cos, sin [T, dim / 2], in x's dtype.

    Dim i is paired with dim i + dim / 2, as in published checkpoints, not with its neighbour. Source: Su et
    al. 2021, arXiv 2104.09864.
    """
    first, second = x.to(cos.dtype).chunk(2, dim=-1)
    cos = cos.unsqueeze(1)
    sin = sin.unsqueeze(1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def qkv_rope_cache(
    qkv: Tensor,
    heads: int,
    kv_heads: int,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    cache: Tensor,
    writes: Tensor,
) -> Tensor:
    """Normalize and rotate queries and keys, and write keys and values to the cache.

    Returns the queries [T, heads, dim]. qkv: [T, (heads + 2 * kv_heads) * dim], queries first. q_weight,
    k_weight: [dim], RMS norm of each head, or None. cos, sin: [T, rotated / 2] (wide); dims beyond
    ``rotated`` are unchanged. cache: [blocks, 2, kv_heads, block, dim] of one layer. writes: int64 [T], block
    id * block + offset.
    """
    q, k, v = rotated_qkv(qkv, heads, kv_heads, cache.shape[4], q_weight, k_weight, eps, cos, sin)
    new = torch.stack((k, v)).view(-1, cache.shape[4])  # [2 * T * kv_heads, dim]
    cache.view(-1, cache.shape[4]).index_copy_(0, cache_rows(cache, writes), new.to(cache.dtype))
    return q


def rotated_qkv(
    qkv: Tensor,
    heads: int,
    kv_heads: int,
    dim: int,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
    cos: Tensor,
    sin: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return normalized and rotated queries and keys, and values: [T, heads or kv_heads, dim] each."""
    rotated = 2 * cos.shape[1]
    q, k, v = qkv.view(qkv.shape[0], heads + 2 * kv_heads, dim).split((heads, kv_heads, kv_heads), dim=1)
    if q_weight is not None:
        q = rms_norm(q, q_weight, eps)
    if k_weight is not None:
        k = rms_norm(k, k_weight, eps)
    if rotated == dim:
        q = rotate(q, cos, sin)
        k = rotate(k, cos, sin)
    else:
        q = torch.cat((rotate(q[..., :rotated], cos, sin), q[..., rotated:]), dim=-1)
        k = torch.cat((rotate(k[..., :rotated], cos, sin), k[..., rotated:]), dim=-1)
    return q, k, v


def cache_rows(cache: Tensor, writes: Tensor) -> Tensor:
    """Return the cache rows of all keys, then of all values: int64 [2 * T * kv_heads], in units of ``dim``.

    cache: [blocks, 2, kv_heads, block, dim]; writes: int64 [T], block id * block + offset.
    """
    kv_heads, block = cache.shape[2:4]
    heads = torch.arange(2 * kv_heads, device=writes.device).view(2, 1, kv_heads)
    line = (writes // block).view(1, -1, 1) * (2 * kv_heads) + heads  # [2, T, kv_heads]
    return (line * block + (writes % block).view(1, -1, 1)).view(-1)


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
}


def gated(gate_up: Tensor, activation: str) -> Tensor:
    """Return ``activation(gate) * up`` for the halves of gate_up [..., 2 n]: [..., n] in the same dtype."""
    gate, up = gate_up.chunk(2, dim=-1)
    return ACTIVATIONS[activation](gate) * up


def sigmoid_gate(x: Tensor, gate: Tensor) -> Tensor:
    """Return ``x * sigmoid(gate)`` for [T, n] inputs, in x's dtype, rounded once.

    Uses exp, because torch.sigmoid does not compute every element with the same function.
    """
    exact = wide(x.dtype)
    return (x.to(exact) / (1 + (-gate.to(exact)).exp())).to(x.dtype)


def plain(weight: Tensor | Codes | MixedCodes, dtype: torch.dtype) -> Tensor:
    """Return a plain matrix unchanged, or codes dequantized to ``dtype``."""
    return weight if isinstance(weight, Tensor) else dequantize(weight, wide(dtype)).to(dtype)


# Maximum numbers of codes dequantized at a time. The output matrix may have a hundred times as many.
SLICE = 1 << 23


def linear(
    x: Tensor,
    weight: Tensor | Codes | MixedCodes,
    bias: Tensor | None = None,
    product: Callable[[Tensor, Tensor, Tensor | None], Tensor] = F.linear,
) -> Tensor:
    """Return ``x @ weight.T + bias`` for x [T, K]: [T, N] in x's dtype.

    Each call dequantizes codes. ``product`` multiplies plain matrices.
    """
    if isinstance(weight, Codes) and weight.row_bits == 8:
        # Rows of x become codes * steps, so the product is one of plain rows in a wide dtype.
        codes, steps = rounded_rows(x, weight.group)
        added = None if bias is None else bias.to(codes.dtype)
        plain_rows = replace(weight, row_bits=None)
        return linear((codes * steps)[:, : x.shape[1]], plain_rows, added, product).to(x.dtype)
    rows = max(1, SLICE // max(1, x.shape[-1]))
    if not isinstance(weight, Codes) or len(weight) <= rows:
        return product(x, plain(weight, x.dtype), bias)
    # Slices of output rows bound the memory of dequantized codes.
    parts = [slice(at, at + rows) for at in range(0, len(weight), rows)]
    made = [product(x, plain(weight[at], x.dtype), None if bias is None else bias[at]) for at in parts]
    return torch.cat(made, dim=-1)


def gated_linear(
    x: Tensor, weight: Tensor | Codes | MixedCodes, bias: Tensor | None, activation: str
) -> Tensor:
    """Return ``gated(x @ weight.T + bias)``: x [T, K], weight [2 n, K], gate rows first; [T, n]."""
    return gated(linear(x, weight, bias), activation)


def embedding(ids: Tensor, weight: Tensor) -> Tensor:
    """Return rows of a table: ids int64 [T], weight [V, n]; [T, n]."""
    return F.embedding(ids, weight)


def coded_embedding(ids: Tensor, table: Codes, dtype: torch.dtype) -> Tensor:
    """Return rows of a table of codes, dequantized on reading: ids int64 [T]; [T, n] in ``dtype``."""
    return plain(table[ids], dtype)


# ``x @ weight.T`` for x [T, K], weight [N, K].
Product: TypeAlias = Callable[[Tensor, Tensor], Tensor]


class Int8Weight(NamedTuple):
    """A matrix in 8 bits, ``values * scales``, with one scale per output channel."""

    values: Tensor
    """Codes, int8 [N, K]."""
    scales: Tensor
    """Scales, wide [N, 1]."""
    group: int | None = None
    """Inputs of a row of x with a common step of rounding to 8 bits; 0: the whole row. None: no rounding."""


def to_int8(weight: Tensor, largest: Tensor | None = None) -> Int8Weight:
    """Round weight [N, K] symmetrically by the largest magnitude of each row; halves round to even.

    ``largest``: wide [N, 1], the largest magnitudes of whole rows if ``weight`` has only parts of rows.
    """
    if (rows := rows_at_once(weight)) < len(weight):
        of_rows = [None] * len(weight) if largest is None else largest.split(rows)
        parts = [to_int8(some, most) for some, most in zip(weight.split(rows), of_rows, strict=False)]
        return Int8Weight(torch.cat([p.values for p in parts]), torch.cat([p.scales for p in parts]))
    exact = weight.to(wide(weight.dtype))
    largest = exact.abs().amax(dim=1, keepdim=True) if largest is None else largest
    scales = quotient(largest, 127).clamp(min=torch.finfo(exact.dtype).tiny)
    return Int8Weight((exact / scales).round().to(torch.int8), scales)


def to_w8a8(weight: Tensor, largest: Tensor | None = None, *, group: int = 0) -> Int8Weight:
    """Round weight like ``to_int8``, and mark that rows of x are rounded as well.

    ``group``: see ``Int8Weight``.
    """
    return to_int8(weight, largest)._replace(group=group)


def rounded_rows(x: Tensor, group: int = 0) -> tuple[Tensor, Tensor]:
    """Return (codes -127 to 127, steps), both wide: x [T, K] is approximately codes * steps.

    A step is 1/127 of its row's largest magnitude, or NaN if the magnitude is not finite: [T, 1]. With
    ``group`` each ``group`` inputs of a row have a step, and codes and steps are [T, groups * group], padded
    with zeros.
    """
    exact = x.to(wide(x.dtype))
    if group:
        filled = F.pad(exact, (0, -x.shape[1] % group))
        codes, steps = rounded_rows(filled.view(-1, group))
        return codes.view(filled.shape), steps.expand(-1, group).reshape(filled.shape)
    largest = exact.abs().amax(dim=1, keepdim=True)
    inverse = (exact.new_full((), 127) / largest).clamp(max=torch.finfo(exact.dtype).max)
    codes = (exact * inverse.masked_fill(largest == 0, 0)).round()
    return codes, quotient(largest, 127).masked_fill(~largest.isfinite(), torch.nan)


def to_int8_codes(weight: Tensor, largest: Tensor | None = None) -> Codes:
    """Round weight like ``to_int8`` and return codes with one group per row.

    Rows of x may be rounded to 16 bits if ``weight`` is bf16.
    """
    made, inputs = to_int8(weight, largest), weight.shape[1]
    return Codes(
        numbers="int8",
        values=made.values.view(torch.uint8) ^ 128,
        inputs=inputs,
        group=inputs + inputs % 2,
        scales=made.scales.float(),
        row_bits=row_bits_of(weight.dtype),
    )


def linear_int8(
    x: Tensor, weight: Int8Weight, bias: Tensor | None = None, *, product: Product = F.linear
) -> Tensor:
    """Return ``x @ (values * scales).T + bias`` for x [T, K]: [T, N] in x's dtype.

    The scales multiply the sum. ``product`` multiplies x (or the codes of its rows) and the values.
    """
    scales = weight.scales.view(1, -1)
    if weight.group == 0:
        codes, steps = rounded_rows(x)
        made = product(codes, weight.values.to(codes.dtype)) * scales * steps
    elif weight.group is not None:
        codes, steps = rounded_rows(x, weight.group)
        rounded = (codes * steps)[:, : x.shape[1]]
        made = product(rounded, weight.values.to(rounded.dtype)) * scales
    else:
        made = product(x, weight.values.to(x.dtype)).to(scales.dtype) * scales
    if bias is not None:
        made = made + bias
    return made.to(x.dtype)


def gated_linear_int8(x: Tensor, weight: Int8Weight, bias: Tensor | None, activation: str) -> Tensor:
    """Return ``gated(linear_int8(x, weight, bias))``."""
    return gated(linear_int8(x, weight, bias), activation)


def as_they_are(codes: Codes) -> Codes:
    """Return ``codes`` unchanged: the torch implementations accept codes."""
    return codes


register("linear", Implementation(name="torch", run=linear, pack_codes=as_they_are, mixes=True))
register("gated_linear", Implementation(name="torch", run=gated_linear, pack_codes=as_they_are, mixes=True))
for _name, _pack in (("int4", to_int4), ("w4a8", to_w4a8), ("fp8", to_fp8)):
    _rounds = Implementation(name="torch", run=linear, pack=_pack, pack_codes=as_they_are)
    register(f"linear_{_name}", _rounds)
    register(f"gated_linear_{_name}", replace(_rounds, run=gated_linear))
for _name, _rounding in (("int8", to_int8), ("w8a8", to_w8a8)):
    register(f"linear_{_name}", Implementation(name="torch", run=linear_int8, pack=_rounding))
    register(f"gated_linear_{_name}", Implementation(name="torch", run=gated_linear_int8, pack=_rounding))
for _group in ROW_GROUPS:
    _grouping = partial(to_w8a8, group=_group)
    register(f"linear_w8a8-{_group}", Implementation(name="torch", run=linear_int8, pack=_grouping))
for _kind in INT8_DIVIDED:
    register(f"linear_{_kind}", Implementation(name="torch", run=linear_int8, pack=to_int8))
register(
    "linear_int4-exact",
    Implementation(name="torch", run=linear, pack=to_exact_int4, pack_codes=as_they_are),
)
register("gated", Implementation(name="torch", run=gated))
# Every output element depends on its own row alone, in one fixed order of computation.
for _op in (embedding, coded_embedding, sigmoid_gate):
    register(_op.__name__, Implementation(name="torch", run=_op, invariant=True))
# The same holds on the CPU. A GPU's order of summation depends on the number of rows.
for _op_name, _run in (
    ("rms_norm", rms_norm),
    ("add_rms_norm", add_rms_norm),
    ("qkv_rope_cache", qkv_rope_cache),
):
    register(_op_name, Implementation(name="torch", run=_run, invariant=True, devices=("cpu",)))
    register(_op_name, Implementation(name="torch-cuda", run=_run, devices=("cuda",)))
