"""KV cache entries in 8 bits inside kernels: the rule of ``weft.ops.kv_fp8``, with equal bits, and
writes of whole lines.

Conversions use integer operations, not instructions of the GPU, so that GPUs without FP8 (Ampere) and
Triton's interpreter round in the same way.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from weft.ops.triton.forms import power
from weft.ops.triton.unpacking import halves

STEP = 1024
"""Maximum exact elements that ``write_lines`` copies at once."""


def tensors_of(caches: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (codes, scales, exact elements) as kernels read caches of whole lines (``kv_fp8.write_lines``).

    A plain cache is all three; its scales are not read. Codes are uint8.
    """
    assert all(one.is_contiguous() for one in caches), "caches are read and written in place"
    if len(caches) == 1:
        return caches[0], caches[0], caches[0]
    codes, scales, exact = caches
    return codes.view(torch.uint8), scales, exact


@triton.jit
def magnitudes(x):
    """Return the bits of |x| for float32 x, as int32. The order of magnitudes is the order of the integers;
    infinity and NaN are the largest."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def powers(top):
    """Return (factor, scale), both float32, of entries whose largest magnitude has the bits ``top``.

    The factor is a power of two that maps the largest magnitude to at most 448. The scale is 1 / factor, or
    NaN for an entry with infinity or NaN.
    """
    # 448 is 0.875 * 2^9. The top of a number in [2^e, 2^(e + 1)) is a mantissa in [0.5, 1) times 2^(e + 1).
    power = (top >> 23) - 126 - 9 + ((top & 0x7FFFFF) > 0x600000).to(tl.int32)
    power = tl.minimum(tl.maximum(power, -126), 126)
    # The rule's power of an entry of zeros is -9.
    power = tl.where(top == 0, -9, power)
    finite = top < 0x7F800000
    power = tl.where(finite, power, 0)
    scale = ((power + 127) << 23).to(tl.float32, bitcast=True)
    factor = ((127 - power) << 23).to(tl.float32, bitcast=True)
    return factor, tl.where(finite, scale, float("nan"))


@triton.jit
def coded(x):
    """Return the E4M3 codes (uint8) of float32 x with |x| at most 448; halves round to even."""
    bits = x.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    # Three bits of mantissa stay. The bias of the exponent is 7 in place of 127.
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - (120 << 3)
    # Below 2^-6 codes are multiples of 2^-9, the distance of float32 numbers from 2^14 on.
    small = (size.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    code = tl.where(size < 0x3C800000, small, normal)
    return (code | ((bits >> 24) & 128)).to(tl.uint8)


@triton.jit
def entries(codes, scales, TYPE: tl.constexpr):
    """Return ``kv_fp8.dequantize`` of codes [N, D] (uint8) and scales float32 [N]: [N, D] in TYPE."""
    # ``halves`` are too small by 2^8.
    made = halves(codes, False).to(tl.float32) * 256.0 * scales[:, None]
    if tl.float16 == TYPE:
        # Unlike tl.clamp, a comparison keeps NaN.
        made = tl.where(made > 65504.0, 65504.0, made)
        made = tl.where(made < -65504.0, -65504.0, made)
    return made.to(TYPE)


# --- whole lines ---


# A segment's places lie anywhere in a step's places. Do not compile a program per alignment.
@triton.jit(do_not_specialize_on_alignment=["rows_ptr"])
def _write_lines(
    lines_ptr,  # [N, CODED + EXACT] of wider rows
    rows_ptr,  # int64 [N]
    codes_ptr,  # uint8 [blocks * BLOCK, CODED], with CODED
    scales_ptr,  # float32 [blocks * BLOCK], with CODED
    exact_ptr,  # [blocks * BLOCK, EXACT]
    stride,
    CODED: tl.constexpr,
    CODED_P2: tl.constexpr,
    EXACT: tl.constexpr,
    STEP: tl.constexpr,
):
    """Write one line: codes and scale of its first CODED elements, and all other elements as they are."""
    line_ptr = lines_ptr + tl.program_id(0).to(tl.int64) * stride
    row = tl.load(rows_ptr + tl.program_id(0))
    narrow = exact_ptr.dtype.element_ty
    if CODED > 0:
        dims = tl.arange(0, CODED_P2)
        # The codes are those of the line in the dtype of the cache.
        front = tl.load(line_ptr + dims, mask=dims < CODED, other=0.0).to(narrow).to(tl.float32)
        factor, scale = powers(tl.max(magnitudes(front), 0))
        tl.store(scales_ptr + row, scale)
        tl.store(codes_ptr + row * CODED + dims, coded(front * factor), mask=dims < CODED)
    for first in range(0, EXACT, STEP):
        at = first + tl.arange(0, STEP)
        behind = tl.load(line_ptr + CODED + at, mask=at < EXACT, other=0.0)
        tl.store(exact_ptr + row * EXACT + at, behind.to(narrow), mask=at < EXACT)


def write_lines(caches: tuple[torch.Tensor, ...], rows: torch.Tensor, lines: torch.Tensor) -> None:
    """Compute ``kv_fp8.write_lines`` in one pass. Rows of ``lines`` may lie apart."""
    assert lines.stride(1) == 1, "elements of a line are contiguous"
    codes, scales, exact = tensors_of(caches)
    coded_dims = codes.shape[2] if len(caches) > 1 else 0
    assert lines.shape[1] == coded_dims + exact.shape[2], "a line is codes and exact elements"
    if not len(lines):
        return
    _write_lines[(len(lines),)](
        *(lines, rows, codes, scales, exact, lines.stride(0)),
        CODED=coded_dims,
        CODED_P2=power(max(1, coded_dims)),
        EXACT=exact.shape[2],
        STEP=min(STEP, power(exact.shape[2])),
        num_warps=4,
    )
