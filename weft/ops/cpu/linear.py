"""Linear layers on weights packed for the CPU extension (csrc/gemm.cpp): bf16, float32, int8, and ``Codes``.

Sums are float32 in one order for every number of rows, rounded once after scale, bias and activation.
Importing registers the ops. The ops are chosen where the extension is built and the CPU has AVX2 or AVX-512.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import torch

from weft.ops import coded, cpu
from weft.ops.coded import ROW_GROUPS, Codes, MixedCodes
from weft.ops.cpu.served import ACTIVATIONS, serve
from weft.ops.ggml import Coding
from weft.ops.torch_ops import to_int8

Tensor = torch.Tensor

WHOLE_ROW = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedMatrix:
    """A weight [rows, inputs] in the extension's layout, which is private to csrc/gemm.cpp."""

    data: Tensor
    """Packed weight: bf16, float32, or bytes of int8 or codes."""
    rows: int
    inputs: int
    scales: Tensor | None = None
    """Scales of an int8 matrix, or factors of codes: float32 [rows]; None for neither."""
    coding: dict[str, int] | None = None
    """``Coding`` of codes as keywords of the operators; None for plain and int8 weights."""
    order: Tensor | None = None
    """Input of each column of codes, int64 [inputs]; None for the natural order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedRows:
    """A weight with rows of codes in several formats, one part after another."""

    data: list[Tensor]
    rows: list[int]
    """Number of rows of each part."""
    scales: Tensor | None
    """Factors, float32 [rows of all parts]; None without factors."""
    codings: dict[str, list[int]]
    """``Coding`` of each part as keywords of the operator: a list with an entry per part for each field."""


def pack(weight: Tensor) -> PackedMatrix:
    """Pack weight, bf16 or float32 [N, K], for ``linear`` and ``embedding``."""
    return _packed(weight, gated=False)


def pack_gated(weight: Tensor) -> PackedMatrix:
    """Pack weight, bf16 or float32 [2 n, K], gate rows first, for ``gated_linear``."""
    return _packed(weight, gated=True)


def pack_int8(
    weight: Tensor, largest: Tensor | None = None, *, group: int = coded.WORD_GROUP
) -> PackedMatrix:
    """Round weight [N, K] like ``torch_ops.to_int8`` and pack the result for ``linear_int8``.

    ``group``: inputs of a row of x that are rounded to 16 bits with a common step, where ``rounds_words``
    says that rows are rounded: 64 or 128; 0: rows stay as they are.
    """
    return _packed_int8(weight, gated=False, largest=largest, coding=int8_coding(weight, group))


def pack_gated_int8(weight: Tensor) -> PackedMatrix:
    """Round weight [2 n, K], gate rows first, and pack the result for ``gated_linear_int8``."""
    return _packed_int8(weight, gated=True, coding=int8_coding(weight, coded.WORD_GROUP))


def pack_w8a8(weight: Tensor, largest: Tensor | None = None, *, group: int = 0) -> PackedMatrix:
    """Pack weight [N, K] like ``pack_int8``, for products with rows of x in 8 bits (``linear_w8a8``).

    ``group``: see ``torch_ops.Int8Weight``.
    """
    return _packed_int8(weight, gated=False, largest=largest, coding=bytes_coding(group))


def pack_gated_w8a8(weight: Tensor) -> PackedMatrix:
    """Pack weight [2 n, K] like ``pack_gated_int8``, for products with rows of x in 8 bits."""
    return _packed_int8(weight, gated=True, coding=bytes_coding(0))


def bytes_coding(group: int) -> Coding:
    """Return the coding of int8 weights for rows of x in 8 bits (csrc/rounded.h).

    ``group``: inputs of a row with a common step, a multiple of 64; 0: the whole row.
    """
    return Coding(numbers=6, scales=0, zeros=0, group=group or WHOLE_ROW)


def int8_coding(weight: Tensor, group: int) -> Coding | None:
    """Return the coding of the int8 weights of ``weight`` for rows of x in 16 bits; None: rows stay.

    ``group``: see ``pack_int8``.
    """
    if not group or not rounds_words(weight.dtype):
        return None
    return Coding(numbers=coded.WORD_ROWS["int8"], scales=0, zeros=0, group=group)


def rounds_words(dtype: torch.dtype) -> bool:
    """Return True if this CPU rounds rows of x in ``dtype`` to 16 bits, for weights of 8 and of 4 bits.

    Products of bytes are then more than twice as fast as products of bf16.
    """
    return coded.row_bits_of(dtype) == 16 and "word_rows" in cpu.capabilities()


def pack_codes(codes: Codes | MixedCodes) -> PackedMatrix | PackedRows:
    """Pack a matrix [N, K] of codes for ``linear``. Mapped pages of the codes are released; the codes stay
    usable."""
    if isinstance(codes, Codes):
        return _packed_codes(codes, gated=False)
    blocks = [code_blocks(part, gated=False) for part in codes.parts]
    factors = [row_factors(part) for part in codes.parts]
    counts = [len(part) for part in codes.parts]
    # Parts share one factors tensor if any part has factors; the other parts get ones.
    scales = None
    if any(each is not None for each in factors):
        both = zip(counts, factors, strict=True)
        scales = torch.cat([torch.ones(count) if each is None else each for count, each in both])
    return PackedRows(
        data=[data for data, _ in blocks],
        rows=counts,
        scales=scales,
        codings={field: [getattr(coding, field) for _, coding in blocks] for field in Coding._fields},
    )


def pack_gated_codes(codes: Codes) -> PackedMatrix:
    """Pack a matrix [2 n, K] of codes, gate rows first, for ``gated_linear``."""
    return _packed_codes(codes, gated=True)


def pack_int4(weight: Tensor) -> PackedMatrix | PackedRows:
    """Round weight, bf16 or float32 [N, K], with ``coded.to_int4`` and pack the result for ``linear``."""
    return pack_codes(coded.to_int4(weight.detach()))


def pack_exact_int4(weight: Tensor) -> PackedMatrix | PackedRows:
    """Do the same for products that do not round rows of x."""
    return pack_codes(coded.to_exact_int4(weight.detach()))


def pack_gated_int4(weight: Tensor) -> PackedMatrix:
    """Round weight [2 n, K] with ``coded.to_int4`` and pack the result for ``gated_linear``."""
    return pack_gated_codes(coded.to_int4(weight.detach()))


def pack_w4a8(weight: Tensor) -> PackedMatrix | PackedRows:
    """Round weight, bf16 or float32 [N, K], with ``coded.to_w4a8`` and pack the result for ``linear``."""
    return pack_codes(coded.to_w4a8(weight.detach()))


def pack_gated_w4a8(weight: Tensor) -> PackedMatrix:
    """Round weight [2 n, K] with ``coded.to_w4a8`` and pack the result for ``gated_linear``."""
    return pack_gated_codes(coded.to_w4a8(weight.detach()))


def pack_fp8(weight: Tensor) -> PackedMatrix | PackedRows:
    """Round weight, bf16 or float32 [N, K], with ``coded.to_fp8`` and pack the result for ``linear``."""
    return pack_codes(coded.to_fp8(weight.detach()))


def pack_gated_fp8(weight: Tensor) -> PackedMatrix:
    """Round weight [2 n, K] with ``coded.to_fp8`` and pack the result for ``gated_linear``."""
    return pack_gated_codes(coded.to_fp8(weight.detach()))


def code_blocks(codes: Codes, *, gated: bool) -> tuple[Tensor, Coding]:
    """Return (bytes [blocks, bytes of a block] in the extension's layout, coding) of a matrix of codes.

    Mapped pages of the codes are released.
    """
    codes = stored(codes)
    if codes.block is not None:
        number = codes.block.number
        pack_ggml = torch.ops.weft_cpu.pack_ggml.default
        blocks = pack_ggml(codes.values, codes.inputs, gated, number, codes.mapped is not None)
        codes.drop_pages()
        return blocks, codes.coding
    if codes.row_bits == 16 and not codes.four:
        values = (codes.values ^ 128).view(torch.int8)
        pack_bytes = torch.ops.weft_cpu.pack_bytes.default
        return pack_bytes(values.contiguous(), gated, codes.coding.group), codes.coding
    if codes.row_bits is not None:
        # The packed layout of nibbles (csrc/rounded.h) has a fixed group of 64.
        assert codes.group == coded.INT4_GROUP
        pack_nibbles = torch.ops.weft_cpu.pack_nibbles.default
        parts = (codes.values, codes.scales, coded.all_zeros([codes]))
        return pack_nibbles(*(part.contiguous() for part in parts), codes.inputs, gated), codes.coding
    codes = coded.storable(codes)
    scales = codes.scales.contiguous()
    if scales.dtype != torch.float32:
        scales = scales.view(torch.uint8)
    zeros = None if codes.zeros is None else codes.zeros.contiguous()
    values = codes.values.contiguous()
    coding = codes.coding
    pack_coded = torch.ops.weft_cpu.pack_coded.default
    data = pack_coded(values, scales, zeros, codes.inputs, gated, **coding._asdict())
    codes.drop_pages()
    return data, coding


def _packed_codes(codes: Codes, *, gated: bool) -> PackedMatrix:
    """Return a matrix of codes in the extension's layout.

    ``gated``: the rows are a gate half and an up half.
    """
    data, coding = code_blocks(codes, gated=gated)
    return PackedMatrix(
        data=data,
        rows=len(codes),
        inputs=codes.inputs,
        scales=row_factors(codes),
        coding=coding._asdict(),
        order=codes.order,
    )


def stored(codes: Codes) -> Codes:
    """Return ``codes`` as this CPU packs them: rows of x stay as they are, unless it rounds to 16 bits."""
    if codes.row_bits != 16:
        return codes
    keeps = rounds_words(torch.bfloat16) and (codes.four or codes.scales.shape[-1] == 1)
    return codes if keeps else replace(codes, row_bits=None)


def row_factors(codes: Codes) -> Tensor | None:
    """Return the factors of the rows of packed codes, float32 [N]; None for no factors."""
    if stored(codes).row_bits == 16 and not codes.four:
        # The packed bytes have no scales: the only scale of a row is a factor.
        scales = codes.scales.float().squeeze(-1)
        return scales if codes.factors is None else scales * codes.factors.float()
    return None if codes.factors is None else codes.factors.float()


def _packed(weight: Tensor, *, gated: bool) -> PackedMatrix:
    data = torch.ops.weft_cpu.pack.default(weight.detach(), gated)
    return PackedMatrix(data=data, rows=weight.shape[0], inputs=weight.shape[1])


def _packed_int8(
    weight: Tensor, *, gated: bool, largest: Tensor | None = None, coding: Coding | None
) -> PackedMatrix:
    data, scales = int8_blocks(weight.detach(), gated=gated, largest=largest, coding=coding)
    fields = None if coding is None else coding._asdict()
    return PackedMatrix(data=data, rows=weight.shape[0], inputs=weight.shape[1], scales=scales, coding=fields)


def int8_blocks(
    weight: Tensor, *, gated: bool, largest: Tensor | None = None, coding: Coding | None
) -> tuple[Tensor, Tensor]:
    """Round weight [N, K] to 8 bits. Return (bytes [blocks, ..], scales float32 [N]).

    ``coding``: for rows of x in 8 or 16 bits; None: rows stay as they are.
    """
    made = to_int8(weight, largest)
    ops = torch.ops.weft_cpu
    if coding is not None:
        data = ops.pack_bytes.default(made.values.contiguous(), gated, coding.group)
    else:
        data = ops.pack_int8.default(made.values, gated, weight.dtype == torch.bfloat16)
    return data, made.scales.float().flatten().contiguous()


def linear(x: Tensor, weight: PackedMatrix | PackedRows, bias: Tensor | None = None) -> Tensor:
    """Return ``x @ weight.T + bias``: x [T, K], bias [N] in x's dtype; [T, N]. Also for int8 and codes."""
    if isinstance(weight, PackedRows):
        parts = torch.ops.weft_cpu.linear_parts.default
        made: Tensor = parts(x, weight.data, weight.rows, bias, weight.scales, **weight.codings)
        return made
    return _run(x, weight, bias, 0)


def gated_linear(x: Tensor, weight: PackedMatrix, bias: Tensor | None, activation: str) -> Tensor:
    """Return ``activation(gate) * up`` of x [T, K] through both halves: [T, n]. Also for int8 and codes.

    bias: [2 n] in x's dtype. Raises KeyError for activations other than silu, gelu, gelu_pytorch_tanh and
    relu.
    """
    return _run(x, weight, bias, ACTIVATIONS[activation])


def _run(x: Tensor, weight: PackedMatrix, bias: Tensor | None, code: int) -> Tensor:
    """Return ``x @ weight.T + bias`` with the activation ``code`` of the extension (0: none)."""
    ops = torch.ops.weft_cpu
    result: Tensor
    if weight.coding is None:
        result = ops.linear.default(x, weight.data, weight.rows, bias, weight.scales, code)
        return result
    if weight.order is not None:
        # The packed columns are permuted, so x is permuted to match.
        x = x.index_select(1, weight.order)
    result = ops.linear_coded.default(x, weight.data, weight.rows, bias, weight.scales, code, **weight.coding)
    return result


def embedding(ids: Tensor, table: PackedMatrix) -> Tensor:
    """Return rows of a table from ``pack``: ids int64 [T]; [T, K]. Raises IndexError for a bad id."""
    result: Tensor = torch.ops.weft_cpu.embedding.default(ids, table.data, table.rows, table.inputs)
    return result


def coded_embedding(ids: Tensor, table: PackedMatrix, dtype: torch.dtype) -> Tensor:
    """Return rows of a table from ``pack_codes``: ids int64 [T]; [T, K] in ``dtype``."""
    assert table.coding is not None
    rows = torch.ops.weft_cpu.embedding_coded.default
    made: Tensor = rows(ids, table.data, table.rows, table.inputs, table.scales, dtype, **table.coding)
    if table.order is None:
        return made
    found = torch.empty_like(made)
    # Column i of the codes is input ``order[i]``: scatter back to the natural order.
    found[:, table.order] = made
    return found


def available() -> bool:
    """Return True if the extension is built with AVX2 or NEON. Otherwise torch's products are faster."""
    return cpu.load() and not {"avx2", "neon"}.isdisjoint(cpu.capabilities())


for _op, _product, _pack, _pack_codes in (
    ("linear", linear, pack, pack_codes),
    ("gated_linear", gated_linear, pack_gated, pack_gated_codes),
    ("linear_int8", linear, pack_int8, None),
    ("gated_linear_int8", gated_linear, pack_gated_int8, None),
    ("linear_w8a8", linear, pack_w8a8, None),
    ("gated_linear_w8a8", gated_linear, pack_gated_w8a8, None),
    ("linear_int4", linear, pack_int4, pack_codes),
    ("gated_linear_int4", gated_linear, pack_gated_int4, pack_gated_codes),
    ("linear_w4a8", linear, pack_w4a8, pack_codes),
    ("gated_linear_w4a8", gated_linear, pack_gated_w4a8, pack_gated_codes),
    ("linear_fp8", linear, pack_fp8, pack_codes),
    ("gated_linear_fp8", gated_linear, pack_gated_fp8, pack_gated_codes),
    ("embedding", embedding, pack, None),
    ("coded_embedding", coded_embedding, None, None),
):
    serve(_op, _product, _pack, available, _pack_codes, mixes=_op == "linear")
for _group in ROW_GROUPS:
    serve(f"linear_w8a8-{_group}", linear, partial(pack_w8a8, group=_group), available)
    serve(f"linear_int8-{_group}", linear, partial(pack_int8, group=_group), available)
serve("linear_int8-exact", linear, partial(pack_int8, group=0), available)
serve("linear_int4-exact", linear, pack_exact_int4, available, pack_codes)
