"""Routed feed-forward blocks in the CPU extension (csrc/moe.cpp): bf16, float32, int8.

Router, choice, experts, shared expert and combination are one call; sums are float32. Where ranks divide the
experts, the parts between which rows travel are a call each. Importing registers the ops; they are chosen
where the extension is built and the CPU has AVX2 or AVX-512.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch

from weft.ops.coded import Codes
from weft.ops.cpu import linear
from weft.ops.cpu.served import ACTIVATIONS, serve
from weft.ops.moe import Routed, in_fp8, in_int4, in_w4a8
from weft.ops.routing import SCORINGS
from weft.ops.stacks import Unstacked

Tensor = torch.Tensor

SWIGLU = 5
"""The code of csrc/gemm_tile.h for ``gate * sigmoid(alpha * gate) * (up + 1)``."""


_PLAIN = [0, 0, 0, 0]
"""The coding of what is not coded."""
_Bits: TypeAlias = Literal["plain", "int8", "w8a8"]
"""What becomes of plain matrices."""
_BLOCK = 32
"""Columns of a packed block (csrc/gemm_block.h)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Packed:
    """A block, or what one rank has of it, in the extension's layout."""

    block: Any
    """The extension's object, which shares the tensors' memory."""
    experts: int
    """That the router knows."""
    device: torch.device
    shared: bool
    """Whether there is a shared expert."""
    of_experts: tuple[Tensor, ...]
    """All that belongs to the experts that are here; its first dim is theirs."""


def pack(weights: Routed) -> Any:
    """The weights in the extension's layout: an object that ``moe`` takes. bf16 or float32, or codes."""
    return _packed(weights).block


def pack_int8(weights: Routed) -> Any:
    """Likewise, with the experts' matrices quantized as ``torch_ops.to_int8`` does."""
    return _packed(weights, "int8").block


def pack_w8a8(weights: Routed) -> Any:
    """Likewise; rows of tokens are rounded as well, those between an expert's halves are not."""
    return _packed(weights, "w8a8").block


def pack_int4(weights: Routed) -> Any:
    """Likewise, rounded as ``coded.to_int4`` does."""
    return pack(in_int4(weights))


def pack_w4a8(weights: Routed) -> Any:
    """Likewise, rounded as ``coded.to_w4a8`` does."""
    return pack(in_w4a8(weights))


def pack_fp8(weights: Routed) -> Any:
    """Likewise, rounded as ``coded.to_fp8`` does."""
    return pack(in_fp8(weights))


def pack_part(weights: Routed) -> Packed:
    """For ``Parts``: the matrices may be of fewer experts than the router knows, or of none."""
    return _packed(weights)


def pack_part_int8(weights: Routed) -> Packed:
    """Likewise, quantized."""
    return _packed(weights, "int8")


def pack_part_w8a8(weights: Routed) -> Packed:
    """Likewise; rows of tokens are rounded as well."""
    return _packed(weights, "w8a8")


def pack_part_int4(weights: Routed) -> Packed:
    """Likewise, rounded as ``coded.to_int4`` does."""
    return pack_part(in_int4(weights))


def pack_part_w4a8(weights: Routed) -> Packed:
    """Likewise, rounded as ``coded.to_w4a8`` does."""
    return pack_part(in_w4a8(weights))


def pack_part_fp8(weights: Routed) -> Packed:
    """Likewise, rounded as ``coded.to_fp8`` does."""
    return pack_part(in_fp8(weights))


def _packed(weights: Routed, bits: _Bits = "plain") -> Packed:
    rule = weights.rule
    gate = weights.gate
    router, bias = _router(weights)
    shared = 0 if weights.shared_down is None else weights.shared_down.shape[1]
    down = weights.down.shape[1:]
    inner: _Bits = "plain" if bits == "plain" else "int8"  # ranks may have parts of its rows
    matrices = {
        "up": _matrix(weights.gate_up, True, bits),
        "down": _matrix(weights.down, False, inner, weights.down_largest),
        "shared_up": _matrix(weights.shared_gate_up, True, bits),
        "shared_down": _matrix(weights.shared_down, False, inner, weights.shared_down_largest),
    }
    sizes = [
        down[0],
        weights.router.shape[0],
        rule.top_k,
        down[1],
        shared,
        int(weights.shared_gate is not None),
        SWIGLU if gate.alpha > 0 else ACTIVATIONS[gate.activation],
        SCORINGS.index(rule.scoring),
        int(rule.renormalize),
        rule.groups,
        rule.top_groups,
        int(rule.group_rule == "top2"),
        len(weights.down),
    ]
    experts = (
        *matrices["up"][:2],
        _plain(weights.gate_up_bias),
        *matrices["down"][:2],
        _plain(weights.down_bias),
    )
    block = torch.classes.weft_cpu.Moe(
        router,
        bias,
        _plain(weights.correction),
        _plain(weights.table),
        *experts,
        *matrices["shared_up"][:2],
        *matrices["shared_down"][:2],
        sizes,
        [rule.scale, gate.limit, gate.alpha],
        [number for _, _, coding in matrices.values() for number in coding],
    )
    return Packed(
        block=block,
        experts=len(weights.router),
        device=weights.router.device,
        shared=weights.shared_down is not None,
        of_experts=tuple(tensor for tensor in experts if tensor is not None),
    )


def _plain(weight: Tensor | None) -> Tensor | None:
    return None if weight is None else weight.detach().contiguous()


def _matrix(
    weight: Tensor | Codes | Unstacked | None, gated: bool, bits: _Bits, largest: Tensor | None = None
) -> tuple[Tensor | None, Tensor | None, list[int]]:
    """(packed, scales or factors, coding) of [rows, inputs], or of as many as there are experts.

    ``largest``: as ``to_int8``.
    """
    if weight is None:
        return None, None, _PLAIN
    if isinstance(weight, Codes | Unstacked):
        return _coded(weight, gated)
    if bits == "plain":
        return torch.ops.weft_cpu.pack.default(weight.detach(), gated), None, _PLAIN
    each = weight.detach() if weight.dim() == 3 else weight.detach().unsqueeze(0)
    rounds = bits == "w8a8"
    none, _ = linear.int8_blocks(each.new_zeros(0, each.shape[2]), gated=gated, rounds_rows=rounds)
    packed = _of_blocks(len(each), each.shape[1], none.shape[1:], gated)
    scales = torch.zeros(each.shape[:2])
    of_rows = [None] * len(each) if largest is None else largest.view(len(each), -1, 1)
    for place, (matrix, most) in enumerate(zip(each, of_rows, strict=True)):
        made = linear.int8_blocks(matrix, gated=gated, largest=most, rounds_rows=rounds)
        packed[place], scales[place] = made
    return packed, scales, linear.BYTES if rounds else _PLAIN


def _coded(codes: Codes | Unstacked, gated: bool) -> tuple[Tensor, Tensor | None, list[int]]:
    """Likewise. What is apart is taken, one matrix after another."""
    if isinstance(codes, Codes) and codes.values.dim() == 2:
        data, coding = linear.code_blocks(codes, gated=gated)
        return data, _floats(codes.factors), coding
    if isinstance(codes, Codes) and not len(codes):
        coding = linear.coded.storable(codes).coding
        return torch.empty(0, 0, 0, dtype=torch.uint8), _floats(codes.factors), coding
    factors = list[Tensor | None]()
    coding = list[int]()
    packed: Tensor | None = None
    for place in range(len(codes)):
        one = codes.take(place) if isinstance(codes, Unstacked) else codes[place]
        if packed is None:
            none, coding = linear.code_blocks(one[:0], gated=gated)
            packed = _of_blocks(len(codes), len(one), none.shape[1:], gated)
        packed[place], _ = linear.code_blocks(one, gated=gated)
        factors.append(_floats(one.factors))
    kept = [each for each in factors if each is not None]
    assert packed is not None
    return packed, torch.stack(kept) if kept else None, coding


def _of_blocks(count: int, rows: int, block: Sequence[int], gated: bool) -> Tensor:
    """Memory for ``count`` matrices of ``rows`` rows as they are packed. ``block``: the shape of 32 columns.

    It is taken before any of them is packed: their place in the extension's memory is then used again.
    """
    blocks = -(-(rows // 2) // (_BLOCK // 2)) if gated else -(-rows // _BLOCK)
    made: Tensor = torch.ops.weft_cpu.weight_bytes.default([count, blocks, *block])
    return made


def _floats(factors: Tensor | None) -> Tensor | None:
    return None if factors is None else factors.float()


def _router(weights: Routed) -> tuple[Tensor, Tensor | None]:
    """(packed [experts (+ 1), hidden], bias): the shared expert's gate is a row of it.

    In bf16 where the model is and nothing is rounded by it: products are exact and sums float32 either way.
    """
    rows = weights.router.detach()
    bias = weights.router_bias
    if weights.shared_gate is not None:
        rows = torch.cat((rows, weights.shared_gate.detach()))
        bias = None if bias is None else torch.cat((bias.detach(), bias.new_zeros(1)))
    bias = _plain(bias)
    dtype = weights.dtype or weights.down.dtype
    if dtype == torch.bfloat16:
        narrow = rows.bfloat16()
        narrow_bias = None if bias is None else bias.bfloat16()
        same = bias is None or narrow_bias is None or torch.equal(narrow_bias.float(), bias)
        if same and torch.equal(narrow.float(), rows):
            rows = narrow
            bias = narrow_bias
    return torch.ops.weft_cpu.pack.default(rows, False), bias


def moe(x: Tensor, ids: Tensor | None, weights: Any) -> Tensor:
    """``weft.ops.moe.block`` of packed weights: x [T, hidden]; [T, hidden] in x's dtype."""
    result: Tensor = torch.ops.weft_cpu.moe.default(x, ids, weights)
    return result


class Parts:
    """The op ``moe_pieces``: see ``weft.moe.experts.RankExperts``."""

    def route(self, x: Tensor, ids: Tensor | None, weights: Packed) -> tuple[Tensor, Tensor, Tensor]:
        """The last is [T, 0] where the shared expert has no gate."""
        result: tuple[Tensor, Tensor, Tensor] = torch.ops.weft_cpu.moe_route.default(x, ids, weights.block)
        return result

    def answer(
        self, x: Tensor, places: Tensor, scales: Tensor | None, weights: Packed, exact: bool
    ) -> Tensor:
        scales = None if exact else scales
        result: Tensor = torch.ops.weft_cpu.moe_part.default(x, places, scales, weights.block)
        return result

    def answers(self, dtype: torch.dtype, exact: bool) -> torch.dtype:
        """One expert's output is not rounded: so the bits are those of one rank."""
        return torch.float32 if exact else dtype

    def shared(self, x: Tensor, share: Tensor | None, weights: Packed) -> tuple[Tensor, Tensor | None] | None:
        if not weights.shared:
            return None
        return torch.ops.weft_cpu.moe_shared.default(x, weights.block), share

    def finish(self, total: Tensor, scales: Tensor, shared: Any, dtype: torch.dtype, exact: bool) -> Tensor:
        made, share = (None, None) if shared is None else shared
        by = scales if exact else None
        out: Tensor = torch.ops.weft_cpu.moe_finish.default(total, by, made, share, dtype)
        return out

    def tensors(self, weights: Packed) -> Iterable[Tensor]:
        return weights.of_experts


PARTS = Parts()

serve("moe_pieces", lambda: PARTS, pack_part, linear.available, pack_part, apart=True)
serve("moe", moe, pack, linear.available, pack, apart=True)
for _name, _whole, _part in (
    ("int8", pack_int8, pack_part_int8),
    ("w8a8", pack_w8a8, pack_part_w8a8),
):
    serve(f"moe_{_name}", moe, _whole, linear.available)
    serve(f"moe_pieces_{_name}", lambda: PARTS, _part, linear.available)
for _name, _whole, _part in (
    ("int4", pack_int4, pack_part_int4),
    ("w4a8", pack_w4a8, pack_part_w4a8),
    ("fp8", pack_fp8, pack_part_fp8),
):  # codes stay as they are
    serve(f"moe_{_name}", moe, _whole, linear.available, _whole, apart=True)
    serve(f"moe_pieces_{_name}", lambda: PARTS, _part, linear.available, _part, apart=True)
