"""Routed feed-forward blocks: weights, parts, and the torch implementations.

    out[t] = sum over j of weight[t, j] * expert[ids[t, j]](x[t])  +  gate[t] * shared(x[t])

The sum runs in top-k order with the shared expert last, in a wide dtype, and is rounded once. Torch computes
the experts in one of three forms; a table of measurements selects the form (``moe_table``).

The op ``moe`` is the whole block. ``moe_pieces`` returns the parts of the block, for experts divided over
ranks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F

from weft.ops import moe_table, tiled, torch_ops
from weft.ops.coded import Codes, to_exact_int4, to_fp8, to_int4, to_w4a8
from weft.ops.registry import Implementation, register
from weft.ops.routing import Rule, route
from weft.ops.stacks import Unstacked
from weft.ops.torch_ops import Int8Weight, to_int8, wide

Tensor = torch.Tensor


class Gate(NamedTuple):
    """Function between the two matrices of an expert: ``activation(gate) * up``, or a variant."""

    activation: str = "silu"
    limit: float = 0.0
    """Above 0: clamp gates to at most ``limit`` and ``up`` to +- ``limit``, before anything else."""
    alpha: float = 0.0
    """Above 0: compute ``gate * sigmoid(alpha * gate) * (up + 1)``, whatever the ``activation``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Routed:
    """Weights of a routed block: E experts of inner size n, a shared expert of size s. Gate rows come first.

    Expert matrices are tensors, or ``Int8Weight`` or ``Codes`` of the same leading shape. Before packing they
    may be ``Unstacked``.
    """

    rule: Rule
    gate: Gate
    router: Tensor
    """Router weight, wide [E, hidden]."""
    gate_up: Any
    """Gate and up matrices, [E, 2 n, hidden]."""
    down: Any
    """Down matrices, [E, hidden, n]."""
    router_bias: Tensor | None = None
    """Router bias, wide [E]."""
    correction: Tensor | None = None
    """Addend to the scores, wide [E]. Affects the choice of experts, not the weights."""
    table: Tensor | None = None
    """Experts by token id, int64 [vocab, top_k]. Replaces the choice by score."""
    gate_up_bias: Tensor | None = None
    """Bias of ``gate_up``, [E, 2 n]."""
    down_bias: Tensor | None = None
    """Bias of ``down``, [E, hidden]."""
    shared_gate_up: Any = None
    """Gate and up matrix of the shared expert, [2 s, hidden]."""
    shared_down: Any = None
    """Down matrix of the shared expert, [hidden, s]."""
    shared_gate: Tensor | None = None
    """Gate of the shared expert, wide [1, hidden]: the shared output is multiplied by sigmoid(x @ gate.T)."""
    down_largest: Tensor | None = None
    """Largest magnitude of each row of the whole ``down``, wide [E, hidden, 1]. Needed to round to 8 bits
    when ``down`` contains only a part of each row."""
    shared_down_largest: Tensor | None = None
    """Largest magnitude of each row of the whole ``shared_down``, wide [hidden, 1]."""
    inner_group: int = 64
    """``coded.row_group`` of the input rows of ``down``; 0: these rows are not rounded."""
    shared_inner_group: int = 64
    """The same for the input rows of ``shared_down``."""
    dtype: torch.dtype | None = None
    """Dtype of the activations for matrices in codes, which have no such dtype."""

    @property
    def experts(self) -> int:
        """Number of experts of the router."""
        return self.router.shape[0]

    @property
    def device(self) -> torch.device:
        return self.router.device


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertSum:
    """The output of a block, [T, hidden], as terms that are not yet added.

    ``add_rms_norm`` of the same implementation adds the terms and the stream in one kernel.
    """

    made: Tensor
    """Results of the experts, [T, k, hidden]."""
    scales: Tensor
    """Weight of each result, wide [T, k]."""
    share: Tensor | None
    """Weight of the shared expert, wide [T]; None for 1."""
    shared: Tensor | None
    """Result of a shared expert, [T, hidden], added last; None without."""
    add: Callable[[Tensor, Tensor, Tensor | None, Tensor | None], Tensor]
    """Function that adds the terms and rounds once."""

    def total(self) -> Tensor:
        """Return the output of the block, [T, hidden]."""
        return self.add(self.made, self.scales, self.share, self.shared)


# A contribution to the stream, [T, hidden].
Contribution: TypeAlias = Tensor | ExpertSum


def summed(contribution: Contribution | None) -> Tensor | None:
    """Return the contribution as one tensor."""
    return contribution.total() if isinstance(contribution, ExpertSum) else contribution


def added(x: Tensor, contribution: Contribution | None) -> Tensor:
    """Return the stream x [T, hidden] plus the contribution; x itself without a contribution."""
    total = summed(contribution)
    return x if total is None else x + total


# ``x @ weight.T + bias`` for x [T, K] and one matrix.
Multiply: TypeAlias = Callable[[Tensor, Any, Tensor | None], Tensor]
# ``activation(gate) * up`` of the two halves of [..., 2 n].
Gated: TypeAlias = Callable[[Tensor, str], Tensor]
# All tokens through their experts: (x [T, hidden], ids [T, k], weights) -> [T, k, hidden]. An id equal to the
# number of experts means no expert; the result for such an id is arbitrary.
Experts: TypeAlias = Callable[[Tensor, Tensor, Routed], Tensor]


class Pieces(NamedTuple):
    """Parts of a block, as one implementation of the op ``moe_pieces`` computes them."""

    multiply: Multiply
    """Product for the router and the shared expert's gate."""
    matrix: Multiply
    """Product for the shared expert."""
    gated: Gated
    experts: Experts
    choose: Callable[..., tuple[Tensor, Tensor, Tensor | None]] | None = None
    """Function with the signature of ``choose_experts``; None for ``choose_experts``."""

    def route(self, x: Tensor, ids: Tensor | None, weights: Routed) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return ``choose_experts`` with the product of these parts."""
        return (self.choose or choose_experts)(x, ids, weights, self.multiply)

    def shared(self, x: Tensor, share: Tensor | None, weights: Routed) -> Tensor | None:
        """Return the shared expert's output for x [T, hidden], wide [T, hidden]; None if there is none.

        ``share``: factor of each token, wide [T, 1], from ``choose_experts``; None for 1.
        """
        if weights.shared_gate_up is None:
            return None
        inner = activate(self.matrix(x, weights.shared_gate_up, None), weights.gate, self.gated)
        made = self.matrix(inner, weights.shared_down, None).to(wide(x.dtype))
        return made if share is None else made * share


# --- the pieces ---


def activate(gate_up: Tensor, gate: Gate, gated: Gated = torch_ops.gated) -> Tensor:
    """Return the activation of ``gate_up`` [..., 2 n], gate half first: [..., n] in the same dtype."""
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
    """Return (expert ids int64 [T, k], expert weights wide [T, k], shared factor wide [T, 1] or None)."""
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
    """Return the weighted sum over each token's experts in top-k order, [T, hidden] in the weights' dtype.

    ``made``: [T, k, hidden]; ``weights``: wide [T, k].
    """
    # A loop, not a matmul: the order of the sum is fixed, so a row does not depend on other rows.
    total = made[:, 0].to(weights.dtype) * weights[:, :1]
    for choice in range(1, weights.shape[1]):
        total = total + made[:, choice].to(weights.dtype) * weights[:, choice : choice + 1]
    return total


def block(x: Tensor, ids: Tensor | None, weights: Routed, pieces: Pieces) -> Tensor:
    """Compute the whole block for x [T, hidden] and return [T, hidden] in x's dtype.

    ``ids``: token ids int64 [T]; needed only with a ``table``.
    """
    chosen, scales, share = pieces.route(x, ids, weights)
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
    """Compute the experts one after another, each with all of its tokens: [T, k, hidden] for x [T, hidden]
    and ids [T, k].

    Results of ids without an expert here are arbitrary. The group sizes are read by the host: one
    synchronisation per call on a GPU.
    """
    tokens, top_k = ids.shape
    flat = ids.reshape(-1)
    # Sort the T * k pairs by expert. Pairs without an expert come last and stay uninitialised in ``made``.
    order = torch.argsort(flat, stable=True)
    sizes = torch.bincount(flat, minlength=count_of(weights)).tolist()[: count_of(weights)]
    grouped = x[order // top_k]  # [T * k, hidden]
    made = torch.empty_like(grouped)
    begin = 0
    for expert, size in enumerate(sizes):
        if not size:
            continue
        rows = slice(begin, begin + size)
        inner = matrix(
            grouped[rows], matrix_of(weights.gate_up, expert), matrix_of(weights.gate_up_bias, expert)
        )
        inner = activate(inner, weights.gate, gated)
        made[rows] = matrix(inner, matrix_of(weights.down, expert), matrix_of(weights.down_bias, expert))
        begin += size
    out = torch.empty_like(made)
    out[order] = made
    return out.view(tokens, top_k, x.shape[1])


def count_of(weights: Routed) -> int:
    """Return the number of local expert matrices. One rank may have fewer experts than the router."""
    down = weights.down
    return (down.values if isinstance(down, Int8Weight) else down).shape[0]


def matrix_of(weight: Any, expert: int) -> Any:
    """Return the matrix of ``expert`` from a stack; None for None."""
    if weight is None:
        return None
    if isinstance(weight, Int8Weight):
        return weight._replace(values=weight.values[expert], scales=weight.scales[expert])
    return weight[expert]


def by_gather(x: Tensor, ids: Tensor, weights: Routed, gated: Gated = torch_ops.gated) -> Tensor:
    """Copy each token's matrices side by side, then run two batched products: [T, k, hidden].

    Fast for few tokens.
    """
    tokens, top_k = ids.shape
    # Pairs without an expert use the last expert; their result is arbitrary anyway.
    flat = ids.reshape(-1).clamp(max=count_of(weights) - 1)
    rows = x.repeat_interleave(top_k, dim=0).unsqueeze(-1)  # [T * k, hidden, 1]
    inner = torch.bmm(weights.gate_up[flat], rows).squeeze(-1)
    if weights.gate_up_bias is not None:
        inner = inner + weights.gate_up_bias[flat]
    inner = activate(inner, weights.gate, gated)
    made = torch.bmm(weights.down[flat], inner.unsqueeze(-1)).squeeze(-1)
    if weights.down_bias is not None:
        made = made + weights.down_bias[flat]
    return made.view(tokens, top_k, x.shape[1])


def by_group(x: Tensor, ids: Tensor, weights: Routed, gated: Gated = torch_ops.gated) -> Tensor:
    """Compute all experts with one ``torch._grouped_mm`` per matrix: [T, k, hidden]. bfloat16 only, no
    synchronisation.
    """
    tokens, top_k = ids.shape
    order = torch.argsort(ids.reshape(-1), stable=True)
    flat = ids.reshape(-1)[order]
    last = count_of(weights) - 1
    # End row of each expert's group in the sorted pairs, int32 [E]
    ends = torch.searchsorted(flat, torch.arange(last + 1, device=x.device), right=True)
    ends = ends.to(torch.int32)
    flat = flat.clamp(max=last)
    inner = torch._grouped_mm(x[order // top_k], weights.gate_up.transpose(-2, -1), offs=ends)
    if weights.gate_up_bias is not None:
        inner = inner + weights.gate_up_bias[flat]
    inner = activate(inner, weights.gate, gated)
    made = torch._grouped_mm(inner, weights.down.transpose(-2, -1), offs=ends)
    if weights.down_bias is not None:
        made = made + weights.down_bias[flat]
    out = torch.empty_like(made)
    out[order] = made
    return out.view(tokens, top_k, x.shape[1])


FORMS: dict[str, Experts] = {"loop": by_expert, "gather": by_gather, "grouped": by_group}
"""Torch implementations of ``Experts``, by name in the table."""


def usable(weights: Routed) -> tuple[str, ...]:
    """Return the names of ``FORMS`` that support the weights: "grouped" only with ``_groups``."""
    return ("loop", "gather", "grouped") if _groups(weights) else ("loop", "gather")


def _groups(weights: Routed) -> bool:
    """Return True if ``torch._grouped_mm`` accepts the weights and needs no wait for the GPU."""
    down = weights.down
    if down.dtype != torch.bfloat16 or down.shape[1] % 8 or down.shape[2] % 8:  # rows of whole 16 bytes
        return False
    return down.device.type == "cpu" or torch.cuda.get_device_capability(down.device) >= (9, 0)


def size_of(weights: Routed) -> moe_table.Size:
    """Return the key of the lookup in the table."""
    experts, hidden, inner = weights.down.shape
    return moe_table.Size(experts, weights.rule.top_k, hidden, inner)


def chosen_form(x: Tensor, ids: Tensor, weights: Routed, forms: tuple[str, ...]) -> str:
    """Return the best of ``forms`` by the table. Counts only tokens whose ``top_k`` experts are all local."""
    dtype = str(x.dtype).removeprefix("torch.")
    tokens = ids.numel() // weights.rule.top_k
    return moe_table.choose(x.device.type, dtype, tokens, size_of(weights), forms)


# --- implementations ---


def has_codes(weights: Routed) -> bool:
    """Return True if any matrix consists of codes."""
    each = (weights.gate_up, weights.down, weights.shared_gate_up, weights.shared_down)
    return any(isinstance(matrices, Codes | Unstacked) for matrices in each)


def rounded(
    weights: Routed,
    to: Callable[[Tensor], Codes],
    inner: Callable[[Tensor], Codes] | None = None,
    shared_inner: Callable[[Tensor], Codes] | None = None,
) -> Routed:
    """Return the weights with plain matrices rounded by ``to``; codes stay.

    ``to`` accepts a matrix or a stack. ``inner`` and ``shared_inner`` replace ``to`` for ``down`` and
    ``shared_down``.
    """

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
    """Return the weights with plain matrices rounded by ``coded.to_int4``.

    The down matrices use ``to_exact_int4`` if their rows are not rounded.
    """
    inner = to_int4 if weights.inner_group else to_exact_int4
    shared = to_int4 if weights.shared_inner_group else to_exact_int4
    return rounded(weights, to_int4, inner, shared)


def in_w4a8(weights: Routed) -> Routed:
    """Return the weights with plain matrices rounded by ``coded.to_w4a8``.

    The down matrices use ``to_exact_int4`` if their rows are not rounded.
    """
    inner = to_w4a8 if weights.inner_group else to_exact_int4
    shared = to_w4a8 if weights.shared_inner_group else to_exact_int4
    return rounded(weights, to_w4a8, inner, shared)


def in_fp8(weights: Routed) -> Routed:
    """Return the weights with plain matrices rounded by ``coded.to_fp8``."""
    return rounded(weights, to_fp8)


def as_they_are(weights: Routed) -> Routed:
    """Return ``weights`` unchanged: the torch implementations accept codes."""
    return weights


def quantized(weights: Routed) -> Routed:
    """Return the weights with all expert matrices in 8 bits, one scale per output channel.

    The router and the gates stay plain.
    """

    def stacked(matrices: Tensor, largest: Tensor | None = None) -> Int8Weight:
        if not len(matrices):
            return Int8Weight(matrices.to(torch.int8), matrices[:, :, :1].float())
        # A rank with a part of each row uses the largest magnitude of the whole row.
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
    """Return ``quantized`` weights that also round rows of x, and groups of inner rows."""
    made = quantized(weights)

    def rounds(matrices: Any, group: int | None) -> Any:
        return None if matrices is None else matrices._replace(group=group)

    return replace(
        made,
        gate_up=rounds(made.gate_up, 0),
        down=rounds(made.down, made.inner_group or None),
        shared_gate_up=rounds(made.shared_gate_up, 0),
        shared_down=rounds(made.shared_down, made.shared_inner_group or None),
    )


def by_table(x: Tensor, ids: Tensor, weights: Routed) -> Tensor:
    """Compute the experts in the table's form for this number of tokens; codes always use ``by_expert``."""
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
# Parts in which rows do not depend on each other.
TILED = Pieces(tiled.linear, tiled.linear, tiled.gated, _by_expert(tiled.linear, tiled.gated))
TILED_INT8 = Pieces(tiled.linear, _tiled_int8, tiled.gated, _by_expert(_tiled_int8, tiled.gated))


def moe(x: Tensor, ids: Tensor | None, weights: Routed) -> Tensor:
    """Compute ``block`` in the table's form for this number of tokens."""
    return block(x, ids, weights, PLAIN)


def moe_int8(x: Tensor, ids: Tensor | None, weights: Routed) -> Tensor:
    """Compute ``block`` with ``quantized`` weights."""
    return block(x, ids, weights, INT8)


def moe_tiled(x: Tensor, ids: Tensor | None, weights: Routed) -> Tensor:
    """Compute ``block`` with products and activations of independent rows (``tiled``)."""
    return block(x, ids, weights, TILED)


def moe_tiled_int8(x: Tensor, ids: Tensor | None, weights: Routed) -> Tensor:
    """Compute ``moe_tiled`` with ``quantized`` weights."""
    return block(x, ids, weights, TILED_INT8)


def register_pieces(name: str, implementation: str, pieces: Pieces, **facts: Any) -> None:
    """Register ``pieces`` as an implementation of the op ``name``; ``run()`` returns ``pieces``."""
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
        _facts = {"pack": _to, "pack_codes": _to, "asks": True, **_more}  # existing codes stay
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
