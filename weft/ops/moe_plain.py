"""Routed feed-forward blocks whose experts have two matrices: ``down(activation(up(x)))``, in torch.

The ops ``moe_plain`` and ``moe_plain_pieces`` are the ops ``moe`` and ``moe_pieces`` of such experts. Where
``weft.ops.moe`` speaks of a gate and up matrix [2 n, hidden], there is the up matrix [n, hidden]. Experts may
read and write rows of another width than the hidden size (``Latent``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from weft.ops import tiled, torch_ops
from weft.ops.moe import (
    Multiply,
    Pieces,
    Routed,
    as_they_are,
    by_expert,
    by_gather,
    by_group,
    combine,
    count_of,
    in_fp8,
    in_int4,
    in_w4a8,
    quantized,
    register_pieces,
    usable,
    with_rounded_rows,
)
from weft.ops.registry import Implementation, register

Tensor = torch.Tensor

PLAIN_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"relu2": lambda x: F.relu(x).square()}
"""Functions between the two matrices: exact or rounded once, so rows do not depend on each other."""

GATHERED = 64
"""Maximum number of pairs of token and expert for which a GPU copies the matrices of each pair."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentRouted(Routed):
    """Weights of a routed block with experts of another width than the hidden size."""

    enter: Callable[..., Tensor]
    """Projection of x [T, hidden] to the rows of the experts, [T, latent]; may take adapters of the rows."""
    leave: Callable[..., Tensor]
    """Projection of the experts' sum, [T, latent], to [T, hidden]; may take adapters of the rows."""


def plain(up: Tensor, activation: str) -> Tensor:
    """Return the activation of ``up`` [..., n], in the same dtype. KeyError: unknown activation."""
    return PLAIN_ACTIVATIONS[activation](up)


def block(x: Tensor, ids: Tensor | None, weights: Routed, pieces: Pieces) -> Tensor:
    """Compute the whole block for x [T, hidden] and return [T, hidden] in x's dtype; see ``moe.block``."""
    chosen, scales, share = pieces.route(x, ids, weights)
    latent = weights if isinstance(weights, LatentRouted) else None
    rows = x if latent is None else latent.enter(x)
    total = combine(pieces.experts(rows, chosen, weights), scales)
    if latent is not None:
        total = latent.leave(total.to(x.dtype)).to(total.dtype)
    shared = pieces.shared(x, share, weights)
    return (total if shared is None else total + shared).to(x.dtype)


def _pieces(router: Multiply, matrix: Multiply) -> Pieces:
    """Return the parts of a block with products ``router`` and ``matrix``."""

    def experts(x: Tensor, ids: Tensor, weights: Routed) -> Tensor:
        if x.device.type != "cpu" and isinstance(weights.down, Tensor) and count_of(weights):
            # Without a wait for the device, where possible.
            if "grouped" in usable(weights):
                return by_group(x, ids, weights, plain)
            if ids.numel() <= GATHERED:
                return by_gather(x, ids, weights, plain)
        return by_expert(x, ids, weights, matrix=matrix, gated=plain)

    return Pieces(router, matrix, plain, experts)


def _register(form: str, name: str, pieces: Pieces, **facts: Any) -> None:
    """Register both ops for matrices in ``form``; "" for plain matrices."""
    ending = f"_{form}" if form else ""
    register_pieces(f"moe_plain_pieces{ending}", name, pieces, asks=True, **facts)
    run = partial(block, pieces=pieces)
    register(f"moe_plain{ending}", Implementation(name=name, run=run, asks=True, **facts))


_invariant: dict[str, Any] = {"devices": ("cpu",), "invariant": True, "priority": -1}
for _name, _router, _matrix, _int8, _more in (
    ("torch", F.linear, torch_ops.linear, torch_ops.linear_int8, {}),
    ("torch_tiled", tiled.linear, tiled.linear, tiled.linear_int8, _invariant),
):
    _register("", _name, _pieces(_router, _matrix), pack_codes=as_they_are, **_more)
    for _form, _to in (("int4", in_int4), ("w4a8", in_w4a8), ("fp8", in_fp8)):
        _register(_form, _name, _pieces(_router, _matrix), pack=_to, pack_codes=_to, **_more)
    for _form, _rounded in (("int8", quantized), ("w8a8", with_rounded_rows)):
        _register(_form, _name, _pieces(_router, _int8), pack=_rounded, **_more)
