"""Linear layers with matrices in words: packing, the check on the device, and the choice of a kernel.

``checked`` compares the kernel with the dequantized product once per format and device, at the first matrix.
If products differ, or if the kernel fails, matrices keep the layout of ``coded``, and a warning is logged.
"""

from __future__ import annotations

import functools
import logging
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from weft.ops.coded import SCALES, Codes, MixedCodes, dequantize, to_fp8, to_int4
from weft.ops.torch_ops import to_int8_codes
from weft.ops.triton import coded, fused, interpreting, matmul
from weft.ops.triton.words import FEW_ROWS, FORMS, MOST, dequantized, form_of, forms_of, run, run_dequantized
from weft.ops.words import STEP, TILE, Words, words_of

Tensor = torch.Tensor

_log = logging.getLogger(__name__)


def _one(x: Tensor, part: Words | Codes, bias: Tensor | None, out: Tensor, invariant: bool) -> None:
    """Compute the product of a part of a matrix into ``out``."""
    rows = len(x)
    if isinstance(part, Codes):
        run_codes = coded.linear_invariant if invariant else coded.linear
        out.copy_(run_codes(x, part, bias))
        return
    given = x if part.order is None else x.index_select(1, part.order)
    given = given if given.stride(1) == 1 else given.contiguous()
    if invariant:
        alike = not interpreting() and checked_words(part).alike
        form = form_of(rows, part) if alike else FORMS[2]
        run(given, part, bias, out, form)
    elif rows <= MOST:
        run(given, part, bias, out, form_of(rows, part), many=rows > FEW_ROWS)
    else:
        run_dequantized(given, part, bias, out)


def product(x: Tensor, weight: Words | Codes | MixedCodes, bias: Tensor | None, invariant: bool) -> Tensor:
    """Return ``x @ weight.T + bias``: x [T, K], bias [N]; [T, N] in x's dtype.

    ``invariant``: the bits of a row do not depend on other rows or on their number.
    """
    if isinstance(weight, Codes):
        return (coded.linear_invariant if invariant else coded.linear)(x, weight, bias)
    parts = weight.parts if isinstance(weight, MixedCodes) else (weight,)
    out = torch.empty((len(x), len(weight)), dtype=x.dtype, device=x.device)
    begin = 0
    for part in parts if len(x) else ():
        rows = slice(begin, begin + len(part))
        if len(part):
            _one(x, part, None if bias is None else bias[rows], out[:, rows], invariant)
        begin = rows.stop
    return out


def linear(x: Tensor, weight: Tensor | Words | Codes | MixedCodes, bias: Tensor | None = None) -> Tensor:
    """Return ``x @ weight.T + bias``: x [T, K]; [T, N] in x's dtype. cuBLAS computes plain weights."""
    if isinstance(weight, Tensor):
        return F.linear(x, weight, bias)
    return product(x, weight, bias, False)


def linear_invariant(
    x: Tensor, weight: Tensor | Words | Codes | MixedCodes, bias: Tensor | None = None
) -> Tensor:
    """Compute ``linear`` such that rows do not affect each other."""
    if isinstance(weight, Tensor):
        return matmul.linear(x, weight, bias)
    return product(x, weight, bias, True)


def gated_linear(x: Tensor, weight: Any, bias: Tensor | None, activation: str) -> Tensor:
    """Compute ``torch_ops.gated_linear``: a product, then one pass over its result."""
    return fused.gated(linear(x, weight, bias), activation)


def gated_linear_invariant(x: Tensor, weight: Any, bias: Tensor | None, activation: str) -> Tensor:
    """Return ``gated(linear_invariant(x, weight, bias))``."""
    return fused.gated(linear_invariant(x, weight, bias), activation)


# --- packing, and the check on the device ---


class Verdict(NamedTuple):
    """Result of a comparison on the device."""

    right: bool
    """True if products are those of the dequantized matrix."""
    alike: bool
    """True if all forms give a row the same bits."""


def _sample(numbers: str, way: str, groups: int, scale_type: torch.dtype, zeros: bool) -> Codes:
    """Return random codes of a format: 3 tiles of outputs, the last not whole, and 16 steps."""
    outputs, inputs = 3 * TILE - 5, 16 * STEP - 24
    made = torch.Generator().manual_seed(groups)
    four = numbers in ("int4", "e2m1")
    group = inputs if way == "row" else STEP // groups
    count = -(-inputs // group)
    values = torch.randint(0, 256, (outputs, inputs // 2 if four else inputs), generator=made)
    values = torch.where(values & 127 == 127, 56, values) if numbers == "e4m3" else values
    scales = 2.0 ** torch.randint(-8, 3, (outputs, count), generator=made)
    if scale_type != torch.float8_e8m0fnu:
        scales = scales * (1 + torch.randint(0, 8, scales.shape, generator=made) / 8)
    if scale_type == torch.float8_e8m0fnu:
        scales = (scales.log2() + 127).to(torch.uint8).view(scale_type)
    return Codes(
        numbers=numbers,
        values=values.to(torch.uint8),
        inputs=inputs,
        group=group,
        scales=scales.to(scale_type),
        zeros=torch.randint(0, 16, (outputs, count), generator=made).to(torch.uint8) if zeros else None,
    )


@functools.cache
def checked(
    device: torch.device, numbers: str, way: str, groups: int, scale_type: torch.dtype, zeros: bool
) -> Verdict:
    """Compare products on ``device`` with the dequantized matrix in float64. Waits for the device."""
    codes = _sample(numbers, way, groups, scale_type, zeros).to(device)
    words = words_of(codes)
    assert words is not None
    assert (words.way, words.groups) == (way, groups), "words of another format"
    weight = dequantize(codes, torch.float64)
    made = torch.Generator().manual_seed(1)
    x = torch.randn(2 * FORMS[-1].rows - 3, codes.inputs, generator=made).bfloat16().to(device)
    wanted = x.double() @ weight.T
    size = x.double().abs() @ weight.abs().T
    alike, first = True, None
    try:
        for form in forms_of(words):
            for many in (False, True):
                out = torch.empty((len(x), len(codes)), dtype=x.dtype, device=device)
                run(x, words, None, out, form, many)
                few = torch.empty_like(out[:3])
                run(x[:3].clone(), words, None, few, form, many)
                if bool(((out.double() - wanted).abs() > 2.0**-8 * wanted.abs() + 2.0**-13 * size).any()):
                    raise ArithmeticError(f"other products than the dequantized matrix in {form}")
                alike = alike and torch.equal(few, out[:3])
                if not many:
                    alike = alike and (first is None or torch.equal(out, first))
                    first = out
        weights = dequantized(words, 0, words.values.shape[0], torch.bfloat16)
        if not torch.allclose(weights.double(), weight, rtol=2.0**-7, atol=0):
            raise ArithmeticError("other numbers than the dequantized matrix")
    except Exception as error:  # the other kernel serves: a wrong or failing kernel must not end a server
        reason = f"{type(error).__name__}: {str(error)[:300]}"
        _log.warning("%s in words is not used on this GPU, so products are slower: %s", numbers, reason)
        return Verdict(right=False, alike=False)
    return Verdict(right=True, alike=alike)


def checked_words(words: Words) -> Verdict:
    """Return the verdict for the format of a matrix."""
    device, way = words.values.device, words.way
    scale_type = torch.float32
    if way == "merged":
        scale_type = SCALES[2] if words.merge.base == 0 else SCALES[1]
    return checked(device, words.numbers, way, words.groups, scale_type, words.zeros is not None)


def _packed(codes: Codes) -> Words | Codes:
    """Return words if the kernel is right on the device, and codes row by row otherwise."""
    words = words_of(codes)
    if words is None or not (interpreting() or checked_words(words).right):
        return coded.pack(codes)  # type: ignore[return-value]
    return words


def pack(codes: Codes | MixedCodes) -> Any:
    """Return codes on the device in words where possible, else in the layout of ``coded``."""
    if isinstance(codes, MixedCodes):
        parts: Any = tuple(_packed(part) for part in codes.parts)
        return MixedCodes(parts)
    return _packed(codes)


def pack_int8(weight: Tensor, largest: Tensor | None = None) -> Words | Codes:
    """Round weight [N, K] like ``torch_ops.to_int8`` and return packed codes."""
    return _packed(to_int8_codes(weight.detach(), largest))


def pack_int4(weight: Tensor) -> Words | Codes:
    """Round weight [N, K] like ``coded.to_int4`` and return packed codes."""
    return _packed(to_int4(weight.detach()))


def pack_fp8(weight: Tensor) -> Words | Codes:
    """Round weight [N, K] like ``coded.to_fp8`` and return packed codes."""
    return _packed(to_fp8(weight.detach()))
