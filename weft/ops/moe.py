"""Routed feed-forward blocks: what they are made of, and their torch implementations.

    out[t] = sum over j of weight[t, j] * expert[ids[t, j]](x[t])  +  gate[t] * shared(x[t])

summed in top-k order, the shared expert last, in a wide dtype and rounded once. Three forms compute the
experts in torch; a measured table says which (``moe_table``).

The op ``moe`` is the whole block. Where ranks divide its experts, ``moe_pieces`` gives its parts one by one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F

from weft.ops import moe_table, tiled, torch_ops
from weft.ops.coded import Codes, to_fp8, to_int4, to_w4a8
from weft.ops.registry import Implementation, register
from weft.ops.routing import Rule, route
from weft.ops.stacks import Unstacked
from weft.ops.torch_ops import Int8Weight, to_int8, wide

Tensor = torch.Tensor


class Gate(NamedTuple):
    """What stands between an expert's two matrices: ``activation(gate) * up``, or a variant of it."""

    activation: str = "silu"
    limit: float = 0.0
    """Above 0: gates are clamped to at most this, and ``up`` to within +- this, before anything else."""
    alpha: float = 0.0
    """Above 0: ``gate * sigmoid(alpha * gate) * (up + 1)`` instead, whatever ``activation`` says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Routed:
    """The weights of a routed block. E experts of n, a shared one of s; gate rows come before up rows.

    The matrices of experts are tensors, or ``Int8Weight`` or ``Codes`` of the same leading shape; for an op
    to pack they may be ``Unstacked``.
    """

    rule: Rule
    gate: Gate
    router: Tensor
    """Wide [E, hidden]."""
    gate_up: Any
    """[E, 2 n, hidden]."""
    down: Any
    """[E, hidden, n]."""
    router_bias: Tensor | None = None
    """Wide [E]."""
    correction: Tensor | None = None
    """Wide [E]: added to scores for the choice alone."""
    table: Tensor | None = None
    """int64 [vocab, top_k]: the experts of each token id, which replace the choice by score."""
    gate_up_bias: Tensor | None = None
    """[E, 2 n]."""
    down_bias: Tensor | None = None
    """[E, hidden]."""
    shared_gate_up: Any = None
    """[2 s, hidden]."""
    shared_down: Any = None
    """[hidden, s]."""
    shared_gate: Tensor | None = None
    """Wide [1, hidden]: the shared expert is multiplied by the sigmoid of this product."""
    down_largest: Tensor | None = None
    """Wide [E, hidden, 1]: the largest magnitude of each row of the whole ``down``, where this has a part of
    them; for rounding to 8 bits."""
    shared_down_largest: Tensor | None = None
    """Wide [hidden, 1]: likewise."""
    round_inner: bool = True
    """Whether w4a8 rounds what is multiplied by ``down``, too."""
    round_shared_inner: bool = True
    """Likewise by ``shared_down``."""
    dtype: torch.dtype | None = None
    """Of the activations, where the matrices don't say (codes)."""

    @property
    def experts(self) -> int:
        """That the router knows."""
        return self.router.shape[0]

    @property
    def device(self) -> torch.device:
        return self.router.device


#: ``x @ weight.T + bias`` of x [T, K] and one matrix.
Multiply: TypeAlias = Callable[[Tensor, Any, Tensor | None], Tensor]
#: ``activation(gate) * up`` of the two halves of [..., 2 n].
Gated: TypeAlias = Callable[[Tensor, str], Tensor]
#: All tokens through their experts: (x [T, hidden], ids [T, k], weights) -> [T, k, hidden]. An id that is the
#: number of experts stands for none, and what is returned for it is anything.
Experts: TypeAlias = Callable[[Tensor, Tensor, Routed], Tensor]


class Pieces(NamedTuple):
    """The parts of a block as one implementation of the op ``moe_pieces`` computes them."""

    multiply: Multiply
    """The router and the shared expert's gate."""
    matrix: Multiply
    """The shared expert."""
    gated: Gated
    experts: Experts

    def shared(self, x: Tensor, share: Tensor | None, weights: Routed) -> Tensor | None:
        """The shared expert of x [T, hidden], wide [T, hidden]; None where there is none.

        share: wide [T, 1], what it is multiplied by; see ``choose_experts``.
        """
        if weights.shared_gate_up is None:
            return None
        inner = activate(self.matrix(x, weights.shared_gate_up, None), weights.gate, self.gated)
        made = self.matrix(inner, weights.shared_down, None).to(wide(x.dtype))
        return made if share is None else made * share


# --- the pieces ---


def activate(gate_up: Tensor, gate: Gate, gated: Gated = torch_ops.gated) -> Tensor:
    """gate_up [..., 2 n], gate half first; [..., n] in the same dtype."""
    if gate.limit > 0:
        first, second = gate_up.chunk(2, dim=-1)
        gate_up = torch.cat((first.clamp(max=gate.limit), second.clamp(-gate.limit, gate.limit)), dim=-1)
    if gate.alpha == 0:
        return gated(gate_up, gate.activation)
    first, second = gate_up.to(wide(gate_up.dtype)).chunk(2, dim=-1)
    return (first / (1 + (first * -gate.alpha).exp()) * (second + 1)).to(gate_up.dtype)


def choose_experts(
    x: Tensor, ids: Tensor | None, weights: Routed, multiply: Multiply
) -> tuple[Tensor, Tensor, Tensor | None]:
    """(experts int64 [T, k], their weights wide [T, k], the shared expert's wide [T, 1] or None)."""
    x = x.to(weights.router.dtype)
    logits = multiply(x, weights.router, weights.router_bias)
    chosen = None
    if weights.table is not None:
        assert ids is not None
        chosen = weights.table[ids]
    experts, scales = route(logits, weights.rule, weights.correction, chosen)
    shared = None
    if weights.shared_gate is not None:
        shared = 1 / (1 + multiply(x, weights.shared_gate, None).neg().exp())
    return experts, scales, shared


def combine(made: Tensor, weights: Tensor) -> Tensor:
    """Weighted sum over each token's experts in top-k order, in the weights' wide dtype: [T, hidden].

    made: [T, k, hidden]; weights: wide [T, k].
    """
    total = made[:, 0].to(weights.dtype) * weights[:, :1]
    for choice in range(1, weights.shape[1]):
        total = total + made[:, choice].to(weights.dtype) * weights[:, choice : choice + 1]
    return total


def block(x: Tensor, ids: Tensor | None, weights: Routed, pieces: Pieces) -> Tensor:
    """The whole block. x: [T, hidden]; ids: int64 [T], token ids that a table is read with.

    Returns [T, hidden] in x's dtype.
    """
    chosen, scales, share = choose_experts(x, ids, weights, pieces.multiply)
    total = combine(pieces.experts(x, chosen, weights), scales)
    shared = pieces.shared(x, share, weights)
    return (total if shared is None else total + shared).to(x.dtype)


# --- experts, in three forms ---


def by_expert(
    x: Tensor,
    ids: Tensor,
    weights: Routed,
    *,
    matrix: Multiply = torch_ops.linear,
    gated: Gated = torch_ops.gated,
) -> Tensor:
    """One product after another, each expert with all of its tokens.

    The host learns the group sizes: one synchronisation a call on a GPU.
    """
    tokens, top_k = ids.shape
    flat = ids.reshape(-1)
    order = torch.argsort(flat, stable=True)
    sizes = torch.bincount(flat, minlength=count_of(weights)).tolist()[: count_of(weights)]
    grouped = x[order // top_k]  # [T * k, hidden]
    made = torch.empty_like(grouped)
    begin = 0
    for expert, size in enumerate(sizes):
        if not size:
            continue
        rows = slice(begin, begin + size)
        inner = matrix(grouped[rows], _at(weights.gate_up, expert), _at(weights.gate_up_bias, expert))
        inner = activate(inner, weights.gate, gated)
        made[rows] = matrix(inner, _at(weights.down, expert), _at(weights.down_bias, expert))
        begin += size
    out = torch.empty_like(made)
    out[order] = made
    return out.view(tokens, top_k, x.shape[1])


def count_of(weights: Routed) -> int:
    """How many experts' matrices there are: those of one rank may be fewer than the router knows."""
    down = weights.down
    return (down.values if isinstance(down, Int8Weight) else down).shape[0]


def _at(weight: Any, expert: int) -> Any:
    if weight is None:
        return None
    if isinstance(weight, Int8Weight):
        return weight._replace(values=weight.values[expert], scales=weight.scales[expert])
    return weight[expert]


def by_gather(x: Tensor, ids: Tensor, weights: Routed) -> Tensor:
    """Each token's matrices copied side by side, and two products of batches: for few tokens."""
    tokens, top_k = ids.shape
    flat = ids.reshape(-1).clamp(max=count_of(weights) - 1)
    rows = x.repeat_interleave(top_k, dim=0).unsqueeze(-1)  # [T * k, hidden, 1]
    inner = torch.bmm(weights.gate_up[flat], rows).squeeze(-1)
    if weights.gate_up_bias is not None:
        inner = inner + weights.gate_up_bias[flat]
    inner = activate(inner, weights.gate)
    made = torch.bmm(weights.down[flat], inner.unsqueeze(-1)).squeeze(-1)
    if weights.down_bias is not None:
        made = made + weights.down_bias[flat]
    return made.view(tokens, top_k, x.shape[1])


def by_group(x: Tensor, ids: Tensor, weights: Routed) -> Tensor:
    """``torch._grouped_mm``, one call for all experts: bfloat16; no synchronisation."""
    tokens, top_k = ids.shape
    order = torch.argsort(ids.reshape(-1), stable=True)
    flat = ids.reshape(-1)[order]
    last = count_of(weights) - 1
    ends = torch.searchsorted(flat, torch.arange(last + 1, device=x.device), right=True)
    ends = ends.to(torch.int32)
    flat = flat.clamp(max=last)
    inner = torch._grouped_mm(x[order // top_k], weights.gate_up.transpose(-2, -1), offs=ends)
    if weights.gate_up_bias is not None:
        inner = inner + weights.gate_up_bias[flat]
    inner = activate(inner, weights.gate)
    made = torch._grouped_mm(inner, weights.down.transpose(-2, -1), offs=ends)
    if weights.down_bias is not None:
        made = made + weights.down_bias[flat]
    out = torch.empty_like(made)
    out[order] = made
    return out.view(tokens, top_k, x.shape[1])


FORMS: dict[str, Experts] = {"loop": by_expert, "gather": by_gather, "grouped": by_group}
"""By their names in the table."""


def usable(weights: Routed) -> tuple[str, ...]:
    """The forms that can compute plain weights here."""
    return ("loop", "gather", "grouped") if _groups(weights) else ("loop", "gather")


def _groups(weights: Routed) -> bool:
    """Whether ``torch._grouped_mm`` takes them, without waiting for a GPU."""
    down = weights.down
    if down.dtype != torch.bfloat16 or down.shape[1] % 8 or down.shape[2] % 8:  # rows of whole 16 bytes
        return False
    return down.device.type == "cpu" or torch.cuda.get_device_capability(down.device) >= (9, 0)


def size_of(weights: Routed) -> moe_table.Size:
    """What the table is looked up by."""
    experts, hidden, inner = weights.down.shape
    return moe_table.Size(experts, weights.rule.top_k, hidden, inner)


def chosen_form(x: Tensor, ids: Tensor, weights: Routed, forms: tuple[str, ...]) -> str:
    """The table's form for so many tokens as have all of their ``top_k`` experts."""
    dtype = str(x.dtype).removeprefix("torch.")
    tokens = ids.numel() // weights.rule.top_k
    return moe_table.choose(x.device.type, dtype, tokens, size_of(weights), forms)


# --- implementations ---


def has_codes(weights: Routed) -> bool:
    """Whether any of its matrices are codes."""
    each = (weights.gate_up, weights.down, weights.shared_gate_up, weights.shared_down)
    return any(isinstance(matrices, Codes | Unstacked) for matrices in each)


def rounded(
    weights: Routed,
    to: Callable[[Tensor], Codes],
    inner: Callable[[Tensor], Codes] | None = None,
    shared_inner: Callable[[Tensor], Codes] | None = None,
) -> Routed:
    """Its plain matrices as codes: ``to`` of one, or of all of a stack. The others: of ``down``s instead."""

    def made(matrices: Any, to: Callable[[Tensor], Codes] = to) -> Any:
        return to(matrices) if isinstance(matrices, Tensor) else matrices

    return replace(
        weights,
        dtype=weights.dtype or weights.down.dtype,
        gate_up=made(weights.gate_up),
        down=made(weights.down, inner or to),
        shared_gate_up=made(weights.shared_gate_up),
        shared_down=made(weights.shared_down, shared_inner or to),
    )


def in_int4(weights: Routed) -> Routed:
    """As ``coded.to_int4`` rounds."""
    return rounded(weights, to_int4)


def in_w4a8(weights: Routed) -> Routed:
    """As ``coded.to_w4a8`` rounds; rows between an expert's halves where ``round_inner`` says so."""
    inner = to_w4a8 if weights.round_inner else to_int4
    shared = to_w4a8 if weights.round_shared_inner else to_int4
    return rounded(weights, to_w4a8, inner, shared)


def in_fp8(weights: Routed) -> Routed:
    """As ``coded.to_fp8`` rounds."""
    return rounded(weights, to_fp8)


def as_they_are(weights: Routed) -> Routed:
    """What the torch implementations take for matrices of which some are codes."""
    return weights


def quantized(weights: Routed) -> Routed:
    """The matrices of all experts in 8 bits, one scale an output channel; router and gates stay."""

    def stacked(matrices: Tensor, largest: Tensor | None = None) -> Int8Weight:
        if not len(matrices):
            return Int8Weight(matrices.to(torch.int8), matrices[:, :, :1].float())
        of_rows = [None] * len(matrices) if largest is None else list(largest)
        made = [to_int8(matrix, most) for matrix, most in zip(matrices, of_rows, strict=True)]
        return Int8Weight(torch.stack([m.values for m in made]), torch.stack([m.scales for m in made]))

    return replace(
        weights,
        gate_up=stacked(weights.gate_up),
        down=stacked(weights.down, weights.down_largest),
        shared_gate_up=None if weights.shared_gate_up is None else to_int8(weights.shared_gate_up),
        shared_down=None
        if weights.shared_down is None
        else to_int8(weights.shared_down, weights.shared_down_largest),
    )


def with_rounded_rows(weights: Routed) -> Routed:
    """``quantized``, and rows of tokens are rounded as well; those between an expert's halves are not: ranks
    may have parts of them.
    """
    made = quantized(weights)
    shared = made.shared_gate_up
    return replace(
        made,
        gate_up=made.gate_up._replace(rounds_rows=True),
        shared_gate_up=None if shared is None else shared._replace(rounds_rows=True),
    )


def by_table(x: Tensor, ids: Tensor, weights: Routed) -> Tensor:
    """The experts in the form that the table has for so many tokens."""
    if not count_of(weights) or has_codes(weights):
        return by_expert(x, ids, weights)
    return FORMS[chosen_form(x, ids, weights, usable(weights))](x, ids, weights)


def _by_expert(matrix: Multiply, gated: Gated) -> Experts:
    return functools.partial(by_expert, matrix=matrix, gated=gated)


_gated = torch_ops.gated
_int8 = torch_ops.linear_int8
_tiled_int8 = tiled.linear_int8
PLAIN = Pieces(F.linear, torch_ops.linear, _gated, by_table)
INT8 = Pieces(F.linear, _int8, _gated, _by_expert(_int8, _gated))
#: Products and activations whose rows don't depend on each other.
TILED = Pieces(tiled.linear, tiled.linear, tiled.gated, _by_expert(tiled.linear, tiled.gated))
TILED_INT8 = Pieces(tiled.linear, _tiled_int8, tiled.gated, _by_expert(_tiled_int8, tiled.gated))


def moe(x: Tensor, ids: Tensor | None, weights: Routed) -> Tensor:
    """``block`` in the form that the table has for so many tokens."""
    return block(x, ids, weights, PLAIN)


def moe_int8(x: Tensor, ids: Tensor | None, weights: Routed) -> Tensor:
    """``moe`` of ``quantized`` weights."""
    return block(x, ids, weights, INT8)


def moe_tiled(x: Tensor, ids: Tensor | None, weights: Routed) -> Tensor:
    """``block`` with products and activations whose rows don't depend on each other (``tiled``)."""
    return block(x, ids, weights, TILED)


def moe_tiled_int8(x: Tensor, ids: Tensor | None, weights: Routed) -> Tensor:
    """``moe_tiled`` of ``quantized`` weights."""
    return block(x, ids, weights, TILED_INT8)


def register_pieces(name: str, implementation: str, pieces: Pieces, **facts: Any) -> None:
    """Registers ``pieces`` as an implementation of the op ``name``, whose ``run()`` returns them."""
    register(name, Implementation(name=implementation, run=lambda: pieces, **facts))


_invariant: dict[str, Any] = {"devices": ("cpu",), "invariant": True, "priority": -1}
_whole: Any
for _name, _pieces, _whole, _more in (
    ("torch", PLAIN, moe, {}),
    ("torch_tiled", TILED, moe_tiled, _invariant),
):
    _facts: dict[str, Any] = {"pack_codes": as_they_are, "asks": True, **_more}
    register_pieces("moe_pieces", _name, _pieces, **_facts)
    register("moe", Implementation(name=_name, run=_whole, **_facts))
    for _form, _to in (("int4", in_int4), ("w4a8", in_w4a8), ("fp8", in_fp8)):
        _facts = {"pack": _to, "pack_codes": _to, "asks": True, **_more}  # codes stay as they are
        register_pieces(f"moe_pieces_{_form}", _name, _pieces, **_facts)
        register(f"moe_{_form}", Implementation(name=_name, run=_whole, **_facts))
for _name, _pieces, _whole, _more in (
    ("torch", INT8, moe_int8, {}),
    ("torch_tiled", TILED_INT8, moe_tiled_int8, _invariant),
):
    for _form, _to in (("int8", quantized), ("w8a8", with_rounded_rows)):
        _facts = {"pack": _to, "asks": True, **_more}
        register_pieces(f"moe_pieces_{_form}", _name, _pieces, **_facts)
        register(f"moe_{_form}", Implementation(name=_name, run=_whole, **_facts))
