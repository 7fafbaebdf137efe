"""Routed feed-forward blocks as one call of the CPU extension (csrc/moe.cpp): bf16, float32, int8.

Router, choice, experts, shared expert and combination; sums are float32. Importing registers the ops; they
are chosen where the extension is built and the CPU has AVX2 or AVX-512.
"""

from __future__ import annotations

from typing import Any

import torch

from weft.ops.cpu import linear
from weft.ops.cpu.served import ACTIVATIONS, serve
from weft.ops.moe import Routed
from weft.ops.routing import SCORINGS
from weft.ops.torch_ops import to_int8

Tensor = torch.Tensor

SWIGLU = 5
"""The code of csrc/gemm_tile.h for ``gate * sigmoid(alpha * gate) * (up + 1)``."""


def pack(weights: Routed) -> Any:
    """The weights in the extension's layout: an object that ``moe`` takes. bf16 or float32."""
    return _packed(weights, quantize=False)


def pack_int8(weights: Routed) -> Any:
    """Likewise, with the experts' matrices quantized as ``torch_ops.to_int8`` does."""
    return _packed(weights, quantize=True)


def _packed(weights: Routed, *, quantize: bool) -> Any:
    rule, gate = weights.rule, weights.gate
    router, bias = _router(weights)
    shared = 0 if weights.shared_down is None else weights.shared_down.shape[1]
    sizes = [
        weights.down.shape[1],
        weights.router.shape[0],
        rule.top_k,
        weights.down.shape[2],
        shared,
        int(weights.shared_gate is not None),
        SWIGLU if gate.alpha > 0 else ACTIVATIONS[gate.activation],
        SCORINGS.index(rule.scoring),
        int(rule.renormalize),
        rule.groups,
        rule.top_groups,
        int(rule.group_rule == "top2"),
    ]
    return torch.classes.weft_cpu.Moe(
        router,
        bias,
        _plain(weights.correction),
        _plain(weights.table),
        *_matrix(weights.gate_up, True, quantize),
        _plain(weights.gate_up_bias),
        *_matrix(weights.down, False, quantize, weights.down_largest),
        _plain(weights.down_bias),
        *_matrix(weights.shared_gate_up, True, quantize),
        *_matrix(weights.shared_down, False, quantize, weights.shared_down_largest),
        sizes,
        [rule.scale, gate.limit, gate.alpha],
    )


def _plain(weight: Tensor | None) -> Tensor | None:
    return None if weight is None else weight.detach().contiguous()


def _matrix(
    weight: Tensor | None, gated: bool, quantize: bool, largest: Tensor | None = None
) -> tuple[Tensor | None, Tensor | None]:
    """(packed, scales) of [rows, inputs], or of as many as there are experts. ``largest``: as ``to_int8``."""
    if weight is None:
        return None, None
    if not quantize:
        return torch.ops.weft_cpu.pack.default(weight.detach(), gated), None
    each = weight.detach() if weight.dim() == 3 else weight.detach().unsqueeze(0)
    packed, scales = [], []
    of_rows = [None] * len(each) if largest is None else largest.view(len(each), -1, 1)
    for matrix, most in zip(each, of_rows, strict=True):
        made = to_int8(matrix, most)
        bf16 = weight.dtype == torch.bfloat16
        packed.append(torch.ops.weft_cpu.pack_int8.default(made.values, gated, bf16))
        scales.append(made.scales.float().flatten())
    return torch.stack(packed), torch.stack(scales)


def _router(weights: Routed) -> tuple[Tensor, Tensor | None]:
    """(packed [experts (+ 1), hidden], bias): the shared expert's gate is a row of it.

    In bf16 where the model is and nothing is rounded by it: products are exact and sums float32 either way.
    """
    rows, bias = weights.router.detach(), weights.router_bias
    if weights.shared_gate is not None:
        rows = torch.cat((rows, weights.shared_gate.detach()))
        bias = None if bias is None else torch.cat((bias.detach(), bias.new_zeros(1)))
    bias = _plain(bias)
    if weights.down.dtype == torch.bfloat16:
        narrow, narrow_bias = rows.bfloat16(), None if bias is None else bias.bfloat16()
        same = bias is None or narrow_bias is None or torch.equal(narrow_bias.float(), bias)
        if same and torch.equal(narrow.float(), rows):
            rows, bias = narrow, narrow_bias
    return torch.ops.weft_cpu.pack.default(rows, False), bias


def moe(x: Tensor, ids: Tensor | None, weights: Any) -> Tensor:
    """``weft.ops.moe.block`` of packed weights: x [T, hidden]; [T, hidden] in x's dtype."""
    made: Tensor = torch.ops.weft_cpu.moe.default(x, ids, weights)
    return made


serve("moe", moe, pack, linear.available)
serve("moe_int8", moe, pack_int8, linear.available)
