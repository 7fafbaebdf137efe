"""Routed feed-forward blocks in the CPU extension (csrc/moe.cpp): bf16, float32, int8, codes.

One call computes router, choice, experts, shared expert and combination, with float32 sums. If ranks divide
the experts, each part between two transfers of rows is one call. Importing registers the ops, which are
chosen where the extension is built and the CPU has AVX2 or AVX-512.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, TypeAlias

import torch

from weft.ops.coded import WORD_GROUP, Codes
from weft.ops.cpu import linear
from weft.ops.cpu.expert_products import Matrices, PackedProducts
from weft.ops.cpu.served import ACTIVATIONS, serve
from weft.ops.cpu.structs import coding_struct, struct
from weft.ops.ggml import Coding
from weft.ops.moe import Routed, in_fp8, in_int4, in_w4a8
from weft.ops.routing import SCORINGS
from weft.ops.stacks import Unstacked

Tensor = torch.Tensor

SWIGLU = 5
"""Number of ``gate * sigmoid(alpha * gate) * (up + 1)`` in csrc/gemm_tile.h."""


_Bits: TypeAlias = Literal["plain", "int8", "w8a8"]
"""Format in which plain matrices are packed."""
_BLOCK = 32
"""Columns of a packed block (csrc/gemm_block.h)."""


class _Matrix(NamedTuple):
    """A matrix, or a stack of one matrix per local expert, in the layouts of ``MoeMatrix`` (csrc/moe.h)."""

    packed: Tensor | None = None
    """None: there is no such matrix."""
    scales: Tensor | None = None
    """Scales of int8, or factors of codes: float32 [matrices, rows]."""
    coding: Coding | None = None
    """None for plain and int8 matrices."""

    def struct(self, bias: Tensor | None = None) -> Any:
        """Return the ``MoeMatrix`` of the extension. bias: [matrices, rows] in the dtype of x."""
        coding = None if self.coding is None else coding_struct(self.coding)
        return torch.classes.weft_cpu.MoeMatrix(
            packed=self.packed, scales=self.scales, bias=bias, coding=coding
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Packed:
    """A routed block, or one rank's part of a block, in the extension's layout."""

    block: Any
    """Object of the extension, which shares the memory of the tensors."""
    given: dict[str, Any]
    """Arguments that made ``block``, for blocks with another table."""
    experts: int
    """Number of experts of the router."""
    device: torch.device
    shared: bool
    """True if there is a shared expert."""
    of_experts: tuple[Tensor, ...]
    """All tensors of the local experts, [local experts, ...] each."""
    matrices: Matrices
    """The same matrices, for products with one of them."""
    tensors: tuple[Tensor, ...]
    """All tensors of the block."""


def pack(weights: Routed) -> Packed:
    """Return the weights (bf16, float32, or codes) in the extension's layout, for ``moe`` and ``Parts``.

    The experts may be a part of the router's experts, or none.
    """
    return _packed(weights)


def pack_int8(weights: Routed) -> Packed:
    """Return the packed weights, with the experts' matrices rounded by ``torch_ops.to_int8``."""
    return _packed(weights, "int8")


def pack_w8a8(weights: Routed) -> Packed:
    """Return the packed weights in 8 bits, for rows in 8 bits. Inner rows have steps per ``inner_group``."""
    return _packed(weights, "w8a8")


def pack_int4(weights: Routed) -> Packed:
    """Return the packed weights, rounded by ``coded.to_int4``."""
    return pack(in_int4(weights))


def pack_w4a8(weights: Routed) -> Packed:
    """Return the packed weights, rounded by ``coded.to_w4a8``."""
    return pack(in_w4a8(weights))


def pack_fp8(weights: Routed) -> Packed:
    """Return the packed weights, rounded by ``coded.to_fp8``."""
    return pack(in_fp8(weights))


def _packed(weights: Routed, bits: _Bits = "plain") -> Packed:
    """Return the weights packed as one block of the extension.

    ``bits``: storage of the plain matrices. ``Unstacked`` stacks are emptied.
    """
    router, bias = _router(weights)
    # Before packing, which empties stacks of codes.
    spec = _spec(weights)
    hidden, rows = weights.down.shape[1], weights.gate_up.shape[1]
    shared_rows = 0 if weights.shared_gate_up is None else weights.shared_gate_up.shape[0]
    up = _matrix(weights.gate_up, True, bits)
    down = _inner(weights.down, bits, weights.inner_group, weights.down_largest)
    up_bias = _plain(weights.gate_up_bias)
    down_bias = _plain(weights.down_bias)
    shared_up = _matrix(weights.shared_gate_up, True, bits)
    shared_down = _inner(weights.shared_down, bits, weights.shared_inner_group, weights.shared_down_largest)
    matrices = Matrices(
        gate=weights.gate,
        hidden=hidden,
        rows=rows,
        shared_rows=shared_rows,
        up=up,
        down=down,
        shared_up=shared_up,
        shared_down=shared_down,
        up_bias=up_bias,
        down_bias=down_bias,
    )
    correction, table = _plain(weights.correction), _plain(weights.table)
    given = {
        "spec": spec,
        "router": _Matrix(router).struct(bias),
        "up": up.struct(up_bias),
        "down": down.struct(down_bias),
        "shared_up": shared_up.struct(),
        "shared_down": shared_down.struct(),
        "correction": correction,
        "table": table,
    }
    others = (router, bias, shared_up.packed, shared_up.scales, shared_down.packed, shared_down.scales)
    of_experts = (up.packed, up.scales, up_bias, down.packed, down.scales, down_bias)
    return Packed(
        block=torch.classes.weft_cpu.Moe(**given),
        given=given,
        experts=len(weights.router),
        device=weights.router.device,
        shared=weights.shared_down is not None,
        of_experts=tuple(tensor for tensor in of_experts if tensor is not None),
        matrices=matrices,
        tensors=tuple(one for one in (*of_experts, *others, correction, table) if one is not None),
    )


def _inner(
    weight: Tensor | Codes | Unstacked | None, bits: _Bits, group: int, largest: Tensor | None
) -> _Matrix:
    """Return ``_matrix`` of the matrices behind the activation, whose rows ranks may divide.

    ``group``: 0 for rows that are not rounded.
    """
    return _matrix(weight, False, bits if group or bits == "plain" else "int8", largest, group=group)


def _spec(weights: Routed) -> Any:
    """Return the ``MoeSpec`` of the extension."""
    rule, gate = weights.rule, weights.gate
    return struct(
        "MoeSpec",
        hidden=weights.down.shape[1],
        experts=weights.router.shape[0],
        local_experts=len(weights.down),
        top_k=rule.top_k,
        intermediate=weights.down.shape[2],
        shared_intermediate=0 if weights.shared_down is None else weights.shared_down.shape[1],
        gated_shared=weights.shared_gate is not None,
        activation=SWIGLU if gate.alpha > 0 else ACTIVATIONS[gate.activation],
        limit=gate.limit,
        alpha=gate.alpha,
        scoring=SCORINGS.index(rule.scoring),
        renormalize=rule.renormalize,
        groups=rule.groups,
        top_groups=rule.top_groups,
        top2=rule.group_rule == "top2",
        scale=rule.scale,
    )


def _plain(weight: Tensor | None) -> Tensor | None:
    return None if weight is None else weight.detach().contiguous()


def _matrix(
    weight: Tensor | Codes | Unstacked | None,
    gated: bool,
    bits: _Bits,
    largest: Tensor | None = None,
    *,
    group: int | None = None,
) -> _Matrix:
    """Return a matrix [rows, inputs], or a stack of matrices, packed.

    ``largest``: see ``to_int8``. ``group``: see ``linear.bytes_coding`` and ``linear.pack_int8``.
    """
    if weight is None:
        return _Matrix()
    if isinstance(weight, Codes | Unstacked):
        return _coded(weight, gated)
    if bits == "plain":
        return _Matrix(torch.ops.weft_cpu.pack.default(weight.detach(), gated))
    each = weight.detach() if weight.dim() == 3 else weight.detach().unsqueeze(0)
    coding = (
        linear.bytes_coding(group or 0)
        if bits == "w8a8"
        else linear.int8_coding(each, WORD_GROUP if group is None else group)
    )
    # Packing zero rows gives the shape of a block in this layout.
    none, _ = linear.int8_blocks(each.new_zeros(0, each.shape[2]), gated=gated, coding=coding)
    packed = _of_blocks(len(each), each.shape[1], none.shape[1:], gated)
    scales = torch.zeros(each.shape[:2])
    of_rows = [None] * len(each) if largest is None else largest.view(len(each), -1, 1)
    for place, (matrix, most) in enumerate(zip(each, of_rows, strict=True)):
        made = linear.int8_blocks(matrix, gated=gated, largest=most, coding=coding)
        packed[place], scales[place] = made
    return _Matrix(packed, scales, coding)


def _coded(codes: Codes | Unstacked, gated: bool) -> _Matrix:
    """Return codes packed. An ``Unstacked`` stack is emptied, matrix by matrix."""
    if isinstance(codes, Codes) and codes.values.dim() == 2:
        data, only = linear.code_blocks(codes, gated=gated)
        return _Matrix(data, linear.row_factors(codes), only)
    # A rank without experts: no block, but the coding must be valid.
    if isinstance(codes, Codes) and not len(codes):
        none = torch.empty(0, 0, 0, dtype=torch.uint8)
        return _Matrix(none, linear.row_factors(codes), linear.coded.storable(linear.stored(codes)).coding)
    factors = list[Tensor | None]()
    coding: Coding | None = None
    packed: Tensor | None = None
    for place in range(len(codes)):
        one = codes.take(place) if isinstance(codes, Unstacked) else codes[place]
        if packed is None:
            none, coding = linear.code_blocks(one[:0], gated=gated)
            packed = _of_blocks(len(codes), len(one), none.shape[1:], gated)
        packed[place], _ = linear.code_blocks(one, gated=gated)
        factors.append(linear.row_factors(one))
    kept = [each for each in factors if each is not None]
    assert packed is not None
    return _Matrix(packed, torch.stack(kept) if kept else None, coding)


def _of_blocks(count: int, rows: int, block: Sequence[int], gated: bool) -> Tensor:
    """Allocate memory for ``count`` packed matrices of ``rows`` rows. ``block``: shape of 32 packed columns.

    Allocate before the first matrix is packed. The extension can then reuse the memory of temporary packings.
    """
    blocks = -(-(rows // 2) // (_BLOCK // 2)) if gated else -(-rows // _BLOCK)
    made: Tensor = torch.ops.weft_cpu.weight_bytes.default([count, blocks, *block])
    return made


def _router(weights: Routed) -> tuple[Tensor, Tensor | None]:
    """Return (packed [experts (+ 1), hidden], bias or None) of the router.

    The shared expert's gate is the last row. The result is bf16 for bf16 models if rounding changes no
    number: products are exact and sums float32 anyway.
    """
    rows = weights.router.detach()
    bias = weights.router_bias
    if weights.shared_gate is not None:
        rows = torch.cat((rows, weights.shared_gate.detach()))
        bias = None if bias is None else torch.cat((bias.detach(), bias.new_zeros(1)))
    bias = _plain(bias)
    dtype = weights.dtype or weights.down.dtype
    # Router weights are often bf16 numbers in a float32 tensor. The round trip proves that.
    if dtype == torch.bfloat16:
        narrow = rows.bfloat16()
        narrow_bias = None if bias is None else bias.bfloat16()
        same = bias is None or narrow_bias is None or torch.equal(narrow_bias.float(), bias)
        if same and torch.equal(narrow.float(), rows):
            rows = narrow
            bias = narrow_bias
    return torch.ops.weft_cpu.pack.default(rows, False), bias


def moe(x: Tensor, ids: Tensor | None, weights: Packed) -> Tensor:
    """Compute ``weft.ops.moe.block`` with packed weights: x [T, hidden]; [T, hidden] in x's dtype."""
    result: Tensor = torch.ops.weft_cpu.moe.default(x, ids, weights.block)
    return result


class Parts:
    """Implementation of the op ``moe_pieces``: see ``weft.moe.experts.RankExperts``."""

    def route(self, x: Tensor, ids: Tensor | None, weights: Packed) -> tuple[Tensor, Tensor, Tensor]:
        """Return (experts, weights, shared factor). The last is [T, 0] if the shared expert has no gate."""
        result: tuple[Tensor, Tensor, Tensor] = torch.ops.weft_cpu.moe_route.default(x, ids, weights.block)
        return result

    def with_table(self, weights: Packed, table: Tensor) -> Packed:
        """Return ``weights`` with experts from ``table``. Shares all other memory."""
        given = {**weights.given, "table": table.contiguous()}
        return replace(weights, block=torch.classes.weft_cpu.Moe(**given), given=given)

    def answer(
        self, x: Tensor, places: Tensor, scales: Tensor | None, weights: Packed, exact: bool
    ) -> Tensor:
        scales = None if exact else scales
        result: Tensor = torch.ops.weft_cpu.moe_part.default(x, places, scales, weights.block)
        return result

    def answers(self, dtype: torch.dtype, exact: bool) -> torch.dtype:
        """Return the dtype of answers. Exact answers are not rounded, so the bits equal those of one rank."""
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

    def products(self, weights: Packed) -> PackedProducts:
        return PackedProducts(weights.matrices)


PARTS = Parts()

serve("moe_pieces", lambda: PARTS, pack, linear.available, pack, apart=True)
serve("moe", moe, pack, linear.available, pack, apart=True)
for _name, _pack in (("int8", pack_int8), ("w8a8", pack_w8a8)):
    serve(f"moe_{_name}", moe, _pack, linear.available)
    serve(f"moe_pieces_{_name}", lambda: PARTS, _pack, linear.available)
for _name, _pack in (("int4", pack_int4), ("w4a8", pack_w4a8), ("fp8", pack_fp8)):  # existing codes stay
    serve(f"moe_{_name}", moe, _pack, linear.available, _pack, apart=True)
    serve(f"moe_pieces_{_name}", lambda: PARTS, _pack, linear.available, _pack, apart=True)
