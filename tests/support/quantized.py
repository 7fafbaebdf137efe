"""Quantize and pack as publishing tools do, value by value, and compute the expected values.

No code is shared with the readers: Python integers place the bits, and float64 arithmetic on the integer
codes gives the values.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

Tensor = torch.Tensor
Tensors = dict[str, Tensor]

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def _words(rows: list[list[int]], bits: int, order: Sequence[int] | None = None) -> Tensor:
    """Each row's values in 32-bit words; value order[i] of a word's is at bit i * bits."""
    count = 32 // bits
    order = order or range(count)
    made = []
    for row in rows:
        row = row + [0] * (-len(row) % count)
        words = []
        for begin in range(0, len(row), count):
            word = 0
            for i, place in enumerate(order):
                word |= row[begin + place] << (i * bits)
            words.append(word)
        made.append(words)
    return torch.from_numpy(np.array(made, np.uint32).view(np.int32).copy())


def _random_groups(rng: np.random.Generator, inputs: int, group: int, shuffled: bool) -> np.ndarray:
    groups = np.arange(inputs) // group
    return rng.permutation(groups) if shuffled else groups


def gptq(
    shape: tuple[int, int], bits: int, group: int, *, desc_act: bool = False, v2: bool = False, seed: int = 0
) -> tuple[Tensors, Tensor]:
    """Return the parts of a random matrix [N, K], and its float64 values."""
    rng = np.random.default_rng(seed)
    n, k = shape
    q = rng.integers(0, 1 << bits, (k, n))
    zeros = rng.integers(0, 1 << bits, (-(-k // group), n))
    scales = torch.from_numpy(rng.uniform(0.001, 0.01, zeros.shape)).half()
    groups = _random_groups(rng, k, group, desc_act)
    stored = zeros if v2 else (zeros - 1) % (1 << bits)
    parts = {
        "qweight": _words(q.T.tolist(), bits).T.contiguous(),
        "qzeros": _words(stored.tolist(), bits),
        "scales": scales,
        "g_idx": torch.from_numpy(groups.astype(np.int32)),
    }
    return parts, torch.from_numpy((q - zeros[groups]) * scales.double().numpy()[groups]).T


def awq(shape: tuple[int, int], group: int, seed: int = 0) -> tuple[Tensors, Tensor]:
    """As ``gptq``, in AutoAWQ's layout: outputs in words, interleaved."""
    rng = np.random.default_rng(seed)
    n, k = shape
    q = rng.integers(0, 16, (k, n))
    zeros = rng.integers(0, 16, (k // group, n))
    scales = torch.from_numpy(rng.uniform(0.001, 0.01, zeros.shape)).half()
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    parts = {
        "qweight": _words(q.tolist(), 4, order),
        "qzeros": _words(zeros.tolist(), 4, order),
        "scales": scales,
    }
    groups = np.arange(k) // group
    return parts, torch.from_numpy((q - zeros[groups]) * scales.double().numpy()[groups]).T


def packed(
    shape: tuple[int, int], bits: int, group: int, *, zeros: bool = False, order: bool = False, seed: int = 0
) -> tuple[Tensors, Tensor]:
    """compressed-tensors' pack-quantized; group 0 for one scale a row."""
    rng = np.random.default_rng(seed)
    n, k = shape
    half = 1 << (bits - 1)
    count = k // group if group else 1
    q = rng.integers(-half, half, (n, k))
    zero = rng.integers(-half, half, (n, count)) if zeros else np.zeros((n, count), np.int64)
    scales = torch.from_numpy(rng.uniform(0.001, 0.01, (n, count))).bfloat16()
    groups = _random_groups(rng, k, group or k, order)
    parts = {
        "weight_packed": _words((q + half).tolist(), bits),
        "weight_scale": scales,
        "weight_shape": torch.tensor([n, k]),
    }
    if zeros:
        parts["weight_zero_point"] = _words((zero + half).T.tolist(), bits).T.contiguous()
    if order:
        parts["weight_g_idx"] = torch.from_numpy(groups.astype(np.int32))
    exact = (q - zero[:, groups]) * scales.double().numpy()[:, groups]
    return parts, torch.from_numpy(exact)


def fp8(
    weight: Tensor,
    scale: str,
    *,
    block: tuple[int, int] = (128, 128),
    exponents: bool = False,
    name: str = "weight_scale_inv",
) -> tuple[Tensors, Tensor]:
    """``weight`` [N, K] in E4M3 with a scale per ``tensor``, ``channel`` or ``block``."""
    exact = weight.double()
    n, k = weight.shape
    rows, columns = {"tensor": (n, k), "channel": (1, k), "block": block}[scale]
    grid = torch.empty(-(-n // rows), -(-k // columns), dtype=torch.float64)
    spread = torch.empty_like(exact)
    for i in range(grid.shape[0]):
        for j in range(grid.shape[1]):
            part = (slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns))
            top = exact[part].abs().max().clamp(min=1e-9) / 448
            grid[i, j] = 2.0 ** torch.ceil(torch.log2(top)) if exponents else top.float()
            spread[part] = grid[i, j]
    values = (exact / spread).float().to(torch.float8_e4m3fn)
    saved = grid.to(torch.float8_e8m0fnu) if exponents else grid.float()
    if scale == "tensor":
        saved = saved.reshape(())
    return {"weight": values, name: saved}, values.double() * spread


def _to_e2m1(values: Tensor) -> tuple[Tensor, Tensor]:
    """(codes 0 .. 15, values) nearest to ``values``."""
    table = torch.tensor(E2M1, dtype=torch.float64)
    code = (values.abs().unsqueeze(-1) - table).abs().argmin(-1)
    sign = values < 0
    return code + 8 * sign, table[code] * (1 - 2 * sign.double())


def _pairs(codes: Tensor) -> Tensor:
    low, high = codes[..., 0::2], codes[..., 1::2]
    return (low + 16 * high).to(torch.uint8)


def nvfp4(weight: Tensor, *, divides: bool = False) -> tuple[Tensors, Tensor]:
    """Return parts with ModelOpt's names, or with compressed-tensors' names if the global scale
    ``divides``.
    """
    exact = weight.double()
    grouped = exact.unflatten(1, (-1, 16))
    factor = (exact.abs().max() / (6 * 448)).float()
    scale = (grouped.abs().amax(-1) / 6 / factor.double()).float().to(torch.float8_e4m3fn)
    if divides:
        published = (1 / factor.double()).float()
        total = scale.double() / published.double()
    else:
        published = factor
        total = scale.double() * factor.double()
    codes, values = _to_e2m1(grouped / total.clamp(min=1e-12).unsqueeze(-1))
    parts = {
        "weight_packed" if divides else "weight": _pairs(codes.flatten(1)),
        "weight_scale": scale,
        "weight_global_scale" if divides else "weight_scale_2": published.reshape(1 if divides else ()),
    }
    return parts, (values * total.unsqueeze(-1)).flatten(1)


def mxfp4(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(bytes [..., K / 2], exponents uint8 [..., K / 32], float64 values [..., K]) along the last dim."""
    grouped = weight.double().unflatten(-1, (-1, 32))
    exponent = torch.floor(torch.log2(grouped.abs().amax(-1).clamp(min=1e-30))) - 2
    codes, values = _to_e2m1(grouped / torch.exp2(exponent).unsqueeze(-1))
    made = (values * torch.exp2(exponent).unsqueeze(-1)).flatten(-2)
    return _pairs(codes.flatten(-2)), (exponent + 127).to(torch.uint8), made
