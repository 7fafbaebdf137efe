"""Draw random GGML blocks: the ``gguf`` package reads more types than it writes."""

from __future__ import annotations

import gguf
import numpy as np
import torch

from weft.ops import ggml

Tensor = torch.Tensor

#: Byte offsets of the float16 scales of a block, and the approximate factor that a scale multiplies.
_SCALES = {
    "Q8_0": ((0,), 74.0),
    "Q4_0": ((0,), 4.6),
    "Q4_1": ((0, 2), 9.0),
    "Q5_0": ((0,), 9.0),
    "Q5_1": ((0, 2), 18.0),
    "Q2_K": ((80, 82), 16.0),
    "Q3_K": ((108,), 43.0),
    "Q4_K": ((0, 2), 300.0),
    "Q5_K": ((0, 2), 600.0),
    "Q6_K": ((208,), 1370.0),
    "IQ1_S": ((0,), 8.0),
    "IQ1_M": ((), 8.0),
    "IQ2_XXS": ((0,), 90.0),
    "IQ2_XS": ((0,), 90.0),
    "IQ2_S": ((0,), 90.0),
    "IQ3_XXS": ((0,), 200.0),
    "IQ3_S": ((0,), 200.0),
    "IQ4_NL": ((0,), 70.0),
    "IQ4_XS": ((0,), 1290.0),
    "TQ1_0": ((52,), 0.8),
    "TQ2_0": ((64,), 1.2),
    "MXFP4": ((), 3.0),
    "NVFP4": ((), 3.0),
}
DRAWN = tuple(_SCALES)
"""Types of ``drawn``."""
FITTED = ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS")
"""Types of ``fitted``, which the package does not write."""


def drawn(kind: str, rows: int, inputs: int, seed: int = 0, size: float = 0.0) -> np.ndarray:
    """Return uint8 [rows, bytes per row]. Numbers have the magnitude ``size``, by default such that sums are
    about 1.
    """
    random = np.random.default_rng(seed)
    numbers, block = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    places, largest = _SCALES[kind]
    raw = random.integers(0, 256, (rows, inputs // numbers, block), np.uint8)
    for at in places:
        scales = (0.5 + random.random((rows, inputs // numbers, 1))) * (size or inputs**-0.5) / largest
        raw[..., at : at + 2] = scales.astype(np.float16).view(np.uint8)
    if kind == "IQ1_M":  # the float16 lies in the high halves of four bytes, the lowest four bits first
        scales = (0.5 + random.random(raw.shape[:-1])) * (size or inputs**-0.5) / largest
        bits = scales.astype(np.float16).view(np.uint16)
        for i in range(4):
            raw[..., 49 + 2 * i] = raw[..., 49 + 2 * i] & 15 | (bits >> 4 * i & 15).astype(np.uint8) << 4
    if kind == "MXFP4":
        raw[..., 0] = random.integers(120, 124, raw.shape[:-1], np.uint8)
    if kind == "NVFP4":  # scales in E4M3 without a sign; 127 is no number
        raw[..., :4] = random.integers(1, 127, (*raw.shape[:-1], 4), np.uint8)
    return raw.reshape(rows, -1)


def meaning(kind: str, raw: np.ndarray) -> Tensor:
    """float32, by the package."""
    return torch.from_numpy(gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[kind]))


def fitted(kind: str, values: np.ndarray) -> np.ndarray:
    """Return float32 [.., n] quantized to Q4_K or Q6_K in a simple way, far from the best quality of the
    type. Each 32 or 16 numbers share a scale (and a minimum), a multiple of the block's float16.

    Other types get random numbers of the same size.
    """
    if kind not in ("Q4_K", "Q6_K"):
        raw = drawn(kind, values.size // values.shape[-1], values.shape[-1], size=float(values.std()))
        return raw.reshape(*values.shape[:-1], -1)
    lines = values.astype(np.float32).reshape(-1, values.shape[-1])
    blocks = lines.reshape(len(lines), -1, 256)
    made = np.zeros((*blocks.shape[:2], ggml.BLOCKS[kind].bytes), np.uint8)
    pack = _fit_q4_k if kind == "Q4_K" else _fit_q6_k
    for block, to in zip(blocks.reshape(-1, 256), made.reshape(-1, made.shape[-1]), strict=True):
        to[:] = pack(block)
    return made.reshape(*values.shape[:-1], -1)


def _fit_q4_k(block: np.ndarray) -> np.ndarray:
    groups = block.reshape(8, 32)
    low = np.minimum(groups.min(1), 0)
    steps = np.maximum((np.maximum(groups.max(1), 0) - low) / 15, 1e-12)
    d = np.float16(max(steps.max() / 63, 1e-7))
    m = np.float16(max(-low.min() / 63, 1e-7))
    scale = np.clip(np.ceil(steps / np.float32(d)), 1, 63).astype(np.uint8)
    minimum = np.clip(np.round(-low / np.float32(m)), 0, 63).astype(np.uint8)
    exact = (groups + (np.float32(m) * minimum)[:, None]) / (np.float32(d) * scale)[:, None]
    codes = np.clip(np.round(exact), 0, 15).astype(np.uint8).reshape(4, 2, 32)
    packed = np.empty(12, np.uint8)
    # GGML's layout: 6-bit scales and minimums; the upper 2 bits of the last four fill the first eight bytes.
    packed[:4] = scale[:4] | scale[4:] >> 4 << 6
    packed[4:8] = minimum[:4] | minimum[4:] >> 4 << 6
    packed[8:] = (scale[4:] & 15) | (minimum[4:] & 15) << 4
    halves = np.array([d, m]).view(np.uint8)
    return np.concatenate((halves, packed, (codes[:, 0] | codes[:, 1] << 4).reshape(-1)))


def _fit_q6_k(block: np.ndarray) -> np.ndarray:
    groups = block.reshape(16, 16)
    steps = np.maximum(np.abs(groups).max(1) / 31, 1e-12)
    d = np.float16(max(steps.max() / 127, 1e-7))
    scale = np.clip(np.ceil(steps / np.float32(d)), 1, 127).astype(np.int8)
    exact = groups / (np.float32(d) * scale)[:, None]
    codes = (np.clip(np.round(exact), -32, 31) + 32).astype(np.uint8).reshape(2, 4, 32)
    low = codes & 15
    low = np.concatenate((low[:, 0] | low[:, 2] << 4, low[:, 1] | low[:, 3] << 4), axis=1)
    high = codes >> 4
    high = high[:, 0] | high[:, 1] << 2 | high[:, 2] << 4 | high[:, 3] << 6
    return np.concatenate(
        (low.reshape(-1), high.reshape(-1), scale.view(np.uint8), np.array([d]).view(np.uint8))
    )
