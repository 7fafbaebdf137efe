"""Conversion of the parts of one weight to ``Codes``, which stay packed: the same formats as in ``readers``.

None means that a format has no codes, and that the weight must be dequantized. Also dequantized: a matrix
with a code or scale that is not a number, groups of an odd number of inputs, E5M2, and uneven groups
("desc_act").
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch

from weft.config.spec import QuantizedSpec
from weft.models.quantized import awq, float8, packed
from weft.models.quantized.packed_words import bits_of, unpack
from weft.models.quantized.scales import Misfit, block_of, checked_zeros
from weft.models.quantized.sources import PLAIN
from weft.models.weights import Placement
from weft.ops.coded import Codes, as_bytes, broken, nibbles

Tensor = torch.Tensor


@dataclass(frozen=True, slots=True)
class CodedPiece:
    """Codes of a weight, or of one matrix of a stack."""

    index: tuple[int, ...]
    """() for the whole weight."""
    codes: Codes | None
    turned: bool = False
    """True if the published weight is the transpose of ``codes``."""


def read_codes(
    parts: Mapping[str, Tensor], spec: QuantizedSpec, wanted: Callable[[int], bool] = lambda i: True
) -> tuple[str, Iterator[CodedPiece]] | None:
    """Return (format name, pieces of the weight); None for a format without codes. ``parts``: by role.

    Of a stack, only ``wanted`` matrices are returned. Like ``readers.read``, may raise Misfit, also during
    iteration. Missing parts give None.
    """
    # The present roles identify the format.
    if "blocks" in parts and "scales" in parts:
        return "MXFP4", _blocks(parts["blocks"], parts["scales"], wanted)
    if "qweight" in parts and "qzeros" in parts and "scales" in parts:
        return _words(parts, spec)
    if "packed" in parts and "scale" in parts:
        return _packed(parts)
    if PLAIN in parts and "scale" in parts:
        return _with_scale(parts, spec, wanted)
    return None


def arranged(codes: Codes, placement: Placement, piece: CodedPiece) -> Codes | None:
    """Return ``codes`` with rows in the order of ``placement``.

    Return None if ``placement`` does more than reorder rows.
    """
    if placement.offset:
        return None
    if placement.read is None and not placement.parts:
        return None if piece.turned else codes
    rows = len(codes)
    # Send two probes through the placement: row numbers, and column numbers. Two columns represent all
    # columns.
    number = torch.arange(rows).unsqueeze(1).expand(rows, 2)
    column = torch.arange(2).expand(rows, 2)
    try:
        found = [_through(probe, placement, piece) for probe in (number, column)]
    except (ValueError, IndexError, RuntimeError):
        return None
    if any(one.shape != (rows, 2) for one in found):
        return None
    if not torch.equal(found[0][:, 0], found[0][:, 1]) or not torch.equal(found[1], column):
        return None
    return codes if torch.equal(found[0], number) else codes[found[0][:, 0]]


def _through(probe: Tensor, placement: Placement, piece: CodedPiece) -> Tensor:
    values = probe.T if piece.turned else probe
    made = placement.arranged(values[None] if piece.index else values, torch.int64)
    return made[0] if piece.index else made


# --- the forms ---


def _one(codes: Codes | None) -> Iterator[CodedPiece]:
    yield CodedPiece((), _sound(codes))


def _sound(codes: Codes | None) -> Codes | None:
    """Return ``codes``; None if some code is not a number, or if groups have an odd size."""
    if codes is None or broken(codes) or (codes.group % 2 and codes.group < codes.inputs):
        return None
    return codes


def _words(parts: Mapping[str, Tensor], spec: QuantizedSpec) -> tuple[str, Iterator[CodedPiece]]:
    """Return (format name, the one piece) of an AWQ or GPTQ weight.

    The codes of the piece are None for uneven groups. Raises Misfit.
    """
    qweight = parts["qweight"]
    qzeros = parts["qzeros"]
    scales = parts["scales"]
    if spec.method == "awq":
        values = unpack(qweight, 4, 1, awq.ORDER)
        zeros = unpack(qzeros, 4, 1, awq.ORDER)
        return "AWQ 4 bits", _one(_integers(values.T, scales.T, zeros.T, 4, None))
    if scales.dim() != 2 or qzeros.dim() != 2:
        raise Misfit(f"qzeros of {list(qzeros.shape)} do not fit scales of {list(scales.shape)}")
    bits = bits_of(scales.shape[1], qzeros.shape[1])
    values = unpack(qweight, bits, 0)
    zeros = (unpack(qzeros, bits, 1) + spec.zero_offset) & ((1 << bits) - 1)
    codes = _integers(values.T, scales.T, zeros.T, bits, parts.get("groups"))
    return f"GPTQ {bits} bits", _one(codes)


def _integers(
    values: Tensor, scales: Tensor, zeros: Tensor | None, bits: int, groups: Tensor | None
) -> Codes | None:
    """Build codes of integers. Returns None for uneven groups.

    values: uint8 [N, K]; scales, zeros: [N, G]; groups: group of each input, integers [K], or None for even
    groups. Raises Misfit.
    """
    rows, inputs = values.shape
    count = scales.shape[1]
    if scales.shape[0] != rows or count < 1 or (zeros is not None and zeros.shape != scales.shape):
        raise Misfit(f"scales of {list(scales.shape)} do not fit {list(values.shape)} values")
    if inputs % count:
        return None
    order = None
    even = torch.arange(inputs) // (inputs // count)
    # Groups in another order: sort the inputs by group, if this makes even groups.
    if (
        groups is not None
        and groups.numel()
        and int(groups.min()) >= 0
        and not torch.equal(groups.long(), even)
    ):
        if groups.shape != even.shape:
            return None
        order = torch.argsort(groups.long(), stable=True)
        if not torch.equal(groups[order].long(), even):
            return None
        values = values[:, order]
    four = bits <= 4
    return Codes(
        numbers="int4" if four else "int8",
        values=nibbles(values) if four else values.contiguous(),
        inputs=inputs,
        group=inputs // count,
        scales=scales.float().contiguous(),
        zeros=None if zeros is None else zeros.contiguous(),
        order=order,
    )


def _packed(parts: Mapping[str, Tensor]) -> tuple[str, Iterator[CodedPiece]] | None:
    """Return (format name, the one piece) of packed integers or E2M1 pairs.

    Return None if the shape is missing or does not fit. Raises Misfit.
    """
    values = parts["packed"]
    scale = parts["scale"]
    # int32 words hold integers of 4 or 8 bits; bytes hold pairs of E2M1 numbers.
    if values.dtype != torch.int32:
        divisor = parts.get("divisor")
        return "MXFP4" if divisor is None else "NVFP4", _one(_fours(values, scale, divisor, inverse=True))
    if "shape" not in parts:
        return None
    n, k = (int(size) for size in parts["shape"])
    bits = next((b for b in (4, 8) if -(-k // (32 // b)) == values.shape[1]), 0)
    if not bits or values.shape[0] != n:
        return None
    zeros = parts.get("zeros")
    found = None if zeros is None else packed.zero_points(zeros, n, bits)
    scales = scale.reshape(1, 1).expand(n, 1) if scale.numel() == 1 else scale
    codes = _integers(unpack(values, bits, 1)[:, :k], scales, found, bits, parts.get("groups"))
    return f"packed {bits} bits", _one(codes)


def _with_scale(
    parts: Mapping[str, Tensor], spec: QuantizedSpec, wanted: Callable[[int], bool]
) -> tuple[str, Iterator[CodedPiece]] | None:
    """Return (format name, pieces) of a weight with its own name and a scale; None for a format without
    codes.

    Of a stack, only ``wanted`` matrices are returned. Raises Misfit, perhaps during iteration.
    """
    values = parts[PLAIN]
    scale = parts["scale"]
    # Bytes with exponents or a factor are pairs of E2M1 numbers; other 8-bit values are FP8 or int8.
    exponents = scale.dtype in (torch.float8_e8m0fnu, torch.uint8)
    factor = parts.get("factor")
    if values.dtype == torch.uint8 or (values.dtype == torch.int8 and exponents):
        if not exponents and factor is None:
            return None
        name = "MXFP4" if factor is None else "NVFP4"
        if values.dim() == 2:
            return name, _one(_fours(values, scale, factor))
        return name, (
            CodedPiece((i,), _sound(_fours(values[i], scale[i], _of(factor, i, len(values)))))
            for i in filter(wanted, range(len(values)))
        )
    if values.dtype not in (torch.float8_e4m3fn, torch.int8):
        return None
    name = "INT8" if values.dtype == torch.int8 else "FP8"
    zeros = parts.get("zeros")
    if values.dim() == 2:
        codes = _eights(values, scale, spec.block, zeros)
        return f"{name} {float8.kind(values, scale, spec.block)}", _one(codes)
    if values.dim() != 3:
        return None
    n = len(values)
    first = _of(scale, 0, n)
    assert first is not None
    return f"{name} {float8.kind(values[0], first, spec.block)}", (
        CodedPiece((i,), _sound(_eights(values[i], _of(scale, i, n), spec.block, _of(zeros, i, n))))
        for i in filter(wanted, range(n))
    )


def _of(scale: Tensor | None, i: int, count: int) -> Tensor | None:
    """Return the part of ``scale`` for stacked matrix ``i``; a scale of one element (or None) serves the
    whole stack.

    Raises Misfit.
    """
    if scale is None or scale.numel() == 1:
        return scale
    if scale.shape[0] != count:
        raise Misfit(f"scales of {list(scale.shape)} do not fit {count} matrices")
    return as_bytes(scale)[i].view(scale.dtype)


def _eights(
    values: Tensor, scale: Tensor | None, block: tuple[int, int] | None, zeros: Tensor | None
) -> Codes | None:
    """Return codes of FP8 or int8 [N, K], never None. scale: one element, [N], [N, 1], or a grid of blocks;
    zeros: zero points of int8, one per scale, or None.

    Raises Misfit.
    """
    assert scale is not None
    rows, inputs = values.shape
    what = float8.kind(values, scale, block)
    known = checked_zeros(zeros, values, scale)
    high, group = (rows, inputs) if what == "per tensor" else (1, inputs)
    if what.startswith("blocks"):
        high, group = block_of(values.shape, scale.shape, block)

    def by_row(numbers: Tensor) -> Tensor:
        """Return one number per row and group: [N, groups]."""
        grid = numbers.reshape(-(-rows // high), -1)
        # Without repetition the numbers stay in the mapped file.
        return grid.contiguous() if high == 1 else grid.repeat_interleave(high, dim=0)[:rows]

    found = values.contiguous().view(torch.uint8)
    integers = values.dtype == torch.int8
    return Codes(
        numbers="int8" if integers else "e4m3",
        values=found ^ 128 if integers else found,
        inputs=inputs,
        group=group,
        scales=by_row(_scales(scale)).view(_kept(scale)),
        # Codes of int8 are values plus 128.
        zeros=None if known is None else by_row((known.int() + 128).to(torch.uint8)),
    )


def _kept(scale: Tensor) -> torch.dtype:
    """Return the dtype of stored scales: E8M0 and E4M3 stay, other types become float32."""
    if scale.dtype in (torch.uint8, torch.float8_e8m0fnu):
        return torch.float8_e8m0fnu
    return torch.float8_e4m3fn if scale.dtype == torch.float8_e4m3fn else torch.float32


def _scales(scale: Tensor) -> Tensor:
    """Return bytes of scales that stay in 8 bits; else float32."""
    return scale.float() if _kept(scale) == torch.float32 else scale.view(torch.uint8)


def _fours(packed: Tensor, scale: Tensor, one: Tensor | None, *, inverse: bool = False) -> Codes:
    """Build codes of E2M1 pairs, bytes [N, K / 2]. scale: [N, K / 16 or 32]; one: scale of the whole matrix.

    inverse: ``one`` divides instead of multiplying. Raises Misfit.
    """
    rows, inputs = packed.shape[0], 2 * packed.shape[1]
    group = inputs // scale.shape[-1] if scale.dim() == 2 and scale.shape[1] else 0
    if (
        group not in (16, 32)
        or scale.shape != (rows, inputs // group)
        or (one is not None and one.numel() != 1)
    ):
        raise Misfit(f"scales of {list(scale.shape)} do not fit {[rows, inputs]} values of 4 bits")
    factors = None
    if one is not None:
        number = one.double().reshape(())
        factors = (1 / number if inverse else number).expand(rows).contiguous()
    return Codes(
        numbers="e2m1",
        values=packed.contiguous().view(torch.uint8),
        inputs=inputs,
        group=group,
        scales=_scales(scale).contiguous().view(_kept(scale)),
        factors=factors,
    )


def _blocks(blocks: Tensor, scales: Tensor, wanted: Callable[[int], bool]) -> Iterator[CodedPiece]:
    """Yield codes of GPT-OSS experts: uint8 [experts, outputs, inputs / 32, 16], published as [inputs,
    outputs]."""
    if len(blocks) != len(scales) or blocks.shape[:-1] != scales.shape:
        raise Misfit(f"blocks of {list(blocks.shape)} do not fit scales of {list(scales.shape)}")
    for i in filter(wanted, range(len(blocks))):
        yield CodedPiece((i,), _sound(_fours(blocks[i].flatten(1), scales[i], None)), turned=True)
