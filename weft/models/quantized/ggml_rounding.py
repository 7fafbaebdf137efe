"""Rounding of numbers to GGML blocks (``weft.ops.ggml``), for new weights of a model from a GGUF file.

Scales begin with the largest number of a group. A few smaller scales are tried, and the scale with the least
squared error is used. No sum depends on the layout of memory: a row has the same bits alone and in a matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from weft.ops.ggml import BLOCKS, IQ4

Tensor = torch.Tensor

_TRIED = (1.0, 0.95, 0.9, 0.85, 0.8)
"""Factors of the first scale. A smaller scale cuts off the largest numbers and is finer for all others."""
_FINE = (1.0, 0.97)
"""The same for codes of 6 and 8 bits."""
_ROUNDED_AT_ONCE = 1 << 20
"""Numbers that are rounded at once, as a bound of temporary memory."""


def rounded(kind: str, values: Tensor) -> Tensor:
    """Return finite ``values`` [..., K] as blocks of the type ``kind``: uint8 [..., bytes of a row].

    K must be a multiple of the numbers of a block.
    """
    block = BLOCKS[kind]
    lines = values.reshape(-1, values.shape[-1])
    parts = [
        _WRITE[kind](part.float().unflatten(-1, (-1, block.numbers))).flatten(-2)
        for part in lines.split(max(1, _ROUNDED_AT_ONCE // values.shape[-1]))
    ]
    return torch.cat(parts).unflatten(0, values.shape[:-1])


def _inverse(scale: Tensor) -> Tensor:
    return torch.where(scale == 0, 0.0, 1 / scale)


def _half(scale: Tensor) -> tuple[Tensor, Tensor]:
    """Return a scale [..., 1] as the float16 stands for, and the bytes [..., 2]."""
    stored = scale.clamp(-65504, 65504).half()
    return stored.float(), stored.contiguous().view(torch.uint8)


def _sum(x: Tensor) -> Tensor:
    """Return the sum over the last dimension, a power of two, as [..., 1], always in the same order."""
    while x.shape[-1] > 1:
        half = x.shape[-1] // 2
        x = x[..., :half] + x[..., half:]
    return x


def _best(x: Tensor, tried: Sequence[tuple[Tensor, ...]], meaning: Callable[..., Tensor]) -> list[Tensor]:
    """Return those scales of ``tried``, [..., 1] each, for which ``meaning(*scales)`` is nearest to ``x``."""
    best = list(tried[0])
    least = _sum((meaning(*best) - x).square())
    for scales in tried[1:]:
        error = _sum((meaning(*scales) - x).square())
        better = error < least
        least = torch.where(better, error, least)
        best = [torch.where(better, new, old) for new, old in zip(scales, best, strict=True)]
    return best


def _codes(x: Tensor, scale: Tensor, low: int, high: int) -> Tensor:
    return (x * _inverse(scale)).round().clamp(low, high)


def _iq4_codes(x: Tensor, scale: Tensor) -> Tensor:
    """Return the places of the nearest numbers of ``IQ4``, int64."""
    numbers = torch.tensor(IQ4, dtype=torch.float32)
    return torch.bucketize((x * _inverse(scale)).contiguous(), (numbers[1:] + numbers[:-1]) / 2)


def _signed_scale(x: Tensor, low: int, tried: Sequence[float], high: int | None = None) -> Tensor:
    """Return scales [..., 1] of groups ``x`` for codes ``low`` to ``high``, or for the numbers of ``IQ4``
    without ``high``. The largest number gets the code ``low``, so a scale may be negative."""
    least, most = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
    first = torch.where(-least >= most, least, most) / low
    numbers = torch.tensor(IQ4, dtype=torch.float32)

    def meaning(scale: Tensor) -> Tensor:
        if high is None:
            return numbers[_iq4_codes(x, scale)] * scale
        return _codes(x, scale, low, high) * scale

    return _best(x, [(first * factor,) for factor in tried], meaning)[0]


def _of_scales(scales: Tensor, most: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return (codes of ``scales`` [..., G, 1] up to ``most``, the scales that the codes mean, bytes [..., 2]
    of their common float16)."""
    common, stored = _half(scales.abs().amax(-2) / most)
    codes = _codes(scales, common.unsqueeze(-1), -most, most)
    return codes, codes * common.unsqueeze(-1), stored


def _with_minimums(x: Tensor, high: int, most: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return (codes 0 to ``high`` of groups x [..., G, n], codes of scales [..., G], codes of minimums, bytes
    of both float16)."""
    low = x.amin(-1, keepdim=True).clamp(max=0)
    scale = (x.amax(-1, keepdim=True) - low) / high

    def meaning(scale: Tensor, low: Tensor) -> Tensor:
        return _codes(x - low, scale, 0, high) * scale + low

    scale, low = _best(x, [(scale * factor, low * factor) for factor in _TRIED], meaning)
    scales, scale, d = _of_scales(scale, most)
    minimums, minimum, m = _of_scales(-low, most)
    codes = _codes(x + minimum, scale, 0, high)
    return codes.byte(), scales.squeeze(-1).byte(), minimums.squeeze(-1).byte(), d, m


def _pairs(codes: Tensor) -> Tensor:
    """Return codes [..., 2 n] as n bytes: the first half in the low bits."""
    half = codes.shape[-1] // 2
    return codes[..., :half] | codes[..., half:] << 4


def _shifted(parts: Tensor, bits: int) -> Tensor:
    """Return ``parts`` [..., P, n] in n bytes: part i at bit ``bits * i``."""
    made = parts[..., 0, :].clone()
    for i in range(1, parts.shape[-2]):
        made |= parts[..., i, :] << bits * i
    return made


def _q8_0(x: Tensor) -> Tensor:
    scale, d = _half(x.abs().amax(-1, keepdim=True) / 127)
    return torch.cat((d, _codes(x, scale, -127, 127).to(torch.int8).view(torch.uint8)), dim=-1)


def _q4_0(x: Tensor) -> Tensor:
    scale, d = _half(_signed_scale(x, -8, _TRIED, 7))
    return torch.cat((d, _pairs((_codes(x, scale, -8, 7) + 8).byte())), dim=-1)


def _iq4_nl(x: Tensor) -> Tensor:
    scale, d = _half(_signed_scale(x, IQ4[0], _TRIED))
    return torch.cat((d, _pairs(_iq4_codes(x, scale).byte())), dim=-1)


def _six_bits(scales: Tensor, minimums: Tensor) -> Tensor:
    """Return 8 scales and 8 minimums of 6 bits in 12 bytes: see ``ggml._six_bits``."""
    return torch.cat(
        (
            scales[..., :4] | scales[..., 4:] >> 4 << 6,
            minimums[..., :4] | minimums[..., 4:] >> 4 << 6,
            (scales[..., 4:] & 15) | (minimums[..., 4:] & 15) << 4,
        ),
        dim=-1,
    )


def _nibbles(codes: Tensor) -> Tensor:
    """Return 4-bit codes [..., 8, 32] in 128 bytes."""
    return _pairs(codes.unflatten(-2, (4, 2)).flatten(-2)).flatten(-2)


def _q4_k(x: Tensor) -> Tensor:
    codes, scales, minimums, d, m = _with_minimums(x.unflatten(-1, (8, 32)), 15, 63)
    return torch.cat((d, m, _six_bits(scales, minimums), _nibbles(codes)), dim=-1)


def _q5_k(x: Tensor) -> Tensor:
    codes, scales, minimums, d, m = _with_minimums(x.unflatten(-1, (8, 32)), 31, 63)
    fifth = _shifted(codes >> 4, 1)
    return torch.cat((d, m, _six_bits(scales, minimums), fifth, _nibbles(codes & 15)), dim=-1)


def _two_bits(codes: Tensor) -> Tensor:
    """Return 2-bit codes [..., 256] in 64 bytes."""
    return _shifted(codes.unflatten(-1, (2, 4, 32)), 2).flatten(-2)


def _q2_k(x: Tensor) -> Tensor:
    codes, scales, minimums, d, m = _with_minimums(x.unflatten(-1, (16, 16)), 3, 15)
    return torch.cat((scales | minimums << 4, _two_bits(codes.flatten(-2)), d, m), dim=-1)


def _q3_k(x: Tensor) -> Tensor:
    groups = x.unflatten(-1, (16, 16))
    scales, scale, d = _of_scales(_signed_scale(groups, -4, _TRIED, 3), 31)
    codes = (_codes(groups, scale, -4, 3) + 4).byte().flatten(-2)
    third = _shifted((codes >> 2).unflatten(-1, (8, 32)), 1)
    six = (scales.squeeze(-1) + 32).byte()
    high = _shifted((six >> 4).unflatten(-1, (4, 4)), 2)
    return torch.cat((third, _two_bits(codes & 3), _pairs(six & 15), high, d), dim=-1)


def _q6_k(x: Tensor) -> Tensor:
    groups = x.unflatten(-1, (16, 16))
    scales, scale, d = _of_scales(_signed_scale(groups, -32, _FINE, 31), 127)
    codes = (_codes(groups, scale, -32, 31) + 32).byte().flatten(-2).unflatten(-1, (2, 128))
    high = _shifted((codes >> 4).unflatten(-1, (4, 32)), 2)
    eight = scales.squeeze(-1).to(torch.int8).view(torch.uint8)
    return torch.cat((_pairs(codes & 15).flatten(-2), high.flatten(-2), eight, d), dim=-1)


def _iq4_xs(x: Tensor) -> Tensor:
    groups = x.unflatten(-1, (8, 32))
    scales, scale, d = _of_scales(_signed_scale(groups, IQ4[0], _TRIED), 31)
    six = (scales.squeeze(-1) + 32).byte()
    high = _shifted((six >> 4).unflatten(-1, (2, 4)).transpose(-1, -2), 2)
    low = _shifted((six & 15).unflatten(-1, (4, 2)).transpose(-1, -2), 4)
    return torch.cat((d, high, low, _pairs(_iq4_codes(groups, scale).byte()).flatten(-2)), dim=-1)


_WRITE: dict[str, Callable[[Tensor], Tensor]] = {
    "Q8_0": _q8_0,
    "Q4_0": _q4_0,
    "Q4_K": _q4_k,
    "Q6_K": _q6_k,
    "Q5_K": _q5_k,
    "IQ4_XS": _iq4_xs,
    "Q3_K": _q3_k,
    "IQ4_NL": _iq4_nl,
    "Q2_K": _q2_k,
}
"""Functions from numbers [..., numbers of a block] to bytes [..., bytes of a block], by type."""
