"""Dequantization of the parts of one weight. The present parts and their types identify the format."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import torch

from weft.config.spec import QuantizedSpec
from weft.models.quantized import awq, float4, float8, gptq, packed
from weft.models.quantized.scales import Misfit
from weft.models.quantized.sources import PLAIN

Tensor = torch.Tensor

_BYTES = (torch.uint8, torch.int8)
_Wanted: TypeAlias = Callable[[int], bool]


class LacksTensors(Misfit):
    """The part ``role`` is missing."""

    def __init__(self, role: str) -> None:
        super().__init__(f"there is no {role}")
        self.role = role


@dataclass(frozen=True, slots=True)
class StoredPiece:
    """Values of a weight, or of one matrix of a stack."""

    index: tuple[int, ...]
    """() for the whole weight."""
    values: Tensor


def read(
    parts: Mapping[str, Tensor],
    spec: QuantizedSpec | None,
    dtype: torch.dtype,
    wanted: Callable[[int], bool] = lambda i: True,
) -> tuple[str, Iterator[StoredPiece]]:
    """Return (format name, pieces of the weight in ``dtype``, a wide dtype). ``parts``: by role.

    Matrices of a stack (experts) come one by one, so only one matrix is dequantized at a time. Matrix i is
    left out unless ``wanted(i)``. A plain weight keeps its own dtype, and its format name is "". Raises Lacks
    for a missing part, and Misfit for misfitting parts; Misfit may come during iteration.
    """
    if spec is None or _is_plain(parts):
        return "", iter([StoredPiece((), parts[PLAIN])])
    if "blocks" in parts:
        blocks, scales = _need(parts, "blocks", "scales")
        return "MXFP4", _blocks(blocks, scales, dtype, wanted)
    if "qweight" in parts:
        return _words(parts, spec, dtype)
    if "packed" in parts:
        return _packed(parts, dtype)
    if PLAIN not in parts:
        raise LacksTensors(_VALUES.get(spec.method, PLAIN))
    return _with_scale(parts, spec, dtype, wanted)


#: Role of a weight's values, by method.
_VALUES = {"awq": "qweight", "gptq": "qweight", "mxfp4": "blocks"}


def _is_plain(parts: Mapping[str, Tensor]) -> bool:
    """Return True for a single part of numbers with at least 16 bits, or of ids."""
    return len(parts) == 1 and PLAIN in parts and parts[PLAIN].dtype not in (*float8.DTYPES, *_BYTES)


def _need(parts: Mapping[str, Tensor], *roles: str) -> list[Tensor]:
    for role in roles:
        if role not in parts:
            raise LacksTensors(role)
    return [parts[role] for role in roles]


def _one(values: Tensor) -> Iterator[StoredPiece]:
    yield StoredPiece((), values)


def _words(
    parts: Mapping[str, Tensor], spec: QuantizedSpec, dtype: torch.dtype
) -> tuple[str, Iterator[StoredPiece]]:
    """Return (format name, the one piece) of an AWQ or GPTQ weight. Raises Lacks or Misfit."""
    qweight, qzeros, scales = _need(parts, "qweight", "qzeros", "scales")
    if spec.method == "awq":
        return "AWQ 4 bits", _one(awq.dequantize(qweight, qzeros, scales, dtype))
    made = gptq.dequantize(
        qweight, qzeros, scales, dtype, groups=parts.get("groups"), offset=spec.zero_offset
    )
    return f"GPTQ {32 * qweight.shape[0] // made.shape[1]} bits", _one(made)


def _packed(parts: Mapping[str, Tensor], dtype: torch.dtype) -> tuple[str, Iterator[StoredPiece]]:
    """Return (format name, the one piece) of packed integers or E2M1 pairs. Raises Lacks or Misfit."""
    values, scale = _need(parts, "packed", "scale")
    if values.dtype == torch.int32:
        (shape,) = _need(parts, "shape")
        zeros = parts.get("zeros")
        groups = parts.get("groups")
        made = packed.dequantize(values, scale, shape, dtype, zeros=zeros, groups=groups)
        return f"packed {32 * values.shape[1] // made.shape[1]} bits", _one(made)
    divisor = parts.get("divisor")
    made = float4.dequantize(values, scale, dtype, divisor=divisor)
    return "NVFP4" if divisor is not None else "MXFP4", _one(made)


def _with_scale(
    parts: Mapping[str, Tensor], spec: QuantizedSpec, dtype: torch.dtype, wanted: _Wanted
) -> tuple[str, Iterator[StoredPiece]]:
    """Return (format name, pieces) of a weight with its own name and a scale. Raises Lacks or Misfit."""
    values = parts[PLAIN]
    if values.dtype not in (*float8.DTYPES, *_BYTES):
        raise Misfit(f"the values have type {values.dtype}")
    if values.dtype == torch.uint8 or (values.dtype == torch.int8 and _exponents(parts)):
        return _fours(parts, dtype, wanted)
    (scale,) = _need(parts, "scale")
    zeros = parts.get("zeros")
    name = "INT8" if values.dtype == torch.int8 else "FP8"
    if values.dim() == 3:
        first = float8.kind(values[0], _of_matrix(scale, 0, len(values)), spec.block)
        return f"{name} {first}", _eights(values, scale, zeros, spec, dtype, wanted)
    what = float8.kind(values, scale, spec.block)
    return f"{name} {what}", _one(float8.dequantize(values, scale, dtype, spec.block, zeros))


def _exponents(parts: Mapping[str, Tensor]) -> bool:
    return "scale" in parts and parts["scale"].dtype in (torch.float8_e8m0fnu, torch.uint8)


def _fours(
    parts: Mapping[str, Tensor], dtype: torch.dtype, wanted: _Wanted
) -> tuple[str, Iterator[StoredPiece]]:
    """Return (format name, pieces) of E2M1 pairs with a scale and perhaps a factor.

    Raises Lacks or Misfit.
    """
    values, scale = _need(parts, PLAIN, "scale")
    factor = parts.get("factor")
    if not _exponents(parts) and factor is None:
        raise LacksTensors("factor")
    name = "MXFP4" if factor is None else "NVFP4"
    if values.dim() == 3:
        return name, _stacked_fours(values, scale, factor, dtype, wanted)
    return name, _one(float4.dequantize(values, scale, dtype, factor=factor))


def _blocks(blocks: Tensor, scales: Tensor, dtype: torch.dtype, wanted: _Wanted) -> Iterator[StoredPiece]:
    if len(blocks) != len(scales):
        raise Misfit(f"{len(blocks)} experts' blocks do not fit {len(scales)} experts' scales")
    for i in filter(wanted, range(len(blocks))):
        yield StoredPiece((i,), float4.from_blocks(blocks[i], scales[i], dtype))


def _stacked_fours(
    values: Tensor, scale: Tensor, factor: Tensor | None, dtype: torch.dtype, wanted: _Wanted
) -> Iterator[StoredPiece]:
    for i in filter(wanted, range(len(values))):
        one = None if factor is None else _of_matrix(factor, i, len(values))
        yield StoredPiece((i,), float4.dequantize(values[i], scale[i], dtype, factor=one))


def _eights(
    values: Tensor,
    scale: Tensor,
    zeros: Tensor | None,
    spec: QuantizedSpec,
    dtype: torch.dtype,
    wanted: _Wanted,
) -> Iterator[StoredPiece]:
    for i in filter(wanted, range(len(values))):
        own = _of_matrix(scale, i, len(values))
        known = None if zeros is None else _of_matrix(zeros, i, len(values))
        yield StoredPiece((i,), float8.dequantize(values[i], own, dtype, spec.block, known))


def _of_matrix(scale: Tensor, i: int, count: int) -> Tensor:
    """Return the part of ``scale`` for stacked matrix ``i``; a scale of one element serves the whole stack.

    Raises Misfit.
    """
    if scale.numel() == 1:
        return scale
    if scale.shape[0] != count:
        raise Misfit(f"scales of {list(scale.shape)} do not fit {count} matrices")
    return scale[i]
