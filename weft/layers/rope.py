"""Rotary position embedding with every scaling form of ``RopeSpec``.

Angles depend only on a token's absolute position, so tokens do not depend on chunks or batches. The rule also
holds for ``dynamic`` (NTK by length): position p is rotated with the base for a sequence of ``max(p + 1,
max_position)`` tokens.

    transformers takes the base from the longest position of the current forward pass. Both agree exactly for
    sequences of at most ``max_position`` tokens (no scaling). Both also agree for longer sequences whenever
    positions beyond ``max_position`` are computed one token at a time, as in generation from a short prompt.
    Results differ for a prompt longer than ``max_position`` that transformers gets in one piece.
"""

from __future__ import annotations

import math

import torch

from weft.config.spec import RopeSpec
from weft.layers.build import Build

Tensor = torch.Tensor


def inverse_frequencies(spec: RopeSpec) -> Tensor:
    """Return radians per position of each pair of dims: float64 [dim / 2], on the CPU.

    ``dynamic`` frequencies are not stretched here.
    """
    exponents = torch.arange(0, spec.dim, 2, dtype=torch.float64) / spec.dim
    base = spec.theta**-exponents
    if spec.kind == "linear":
        return base / spec.factor
    if spec.kind == "longrope":
        return base / torch.tensor(spec.divisors, dtype=torch.float64)
    if spec.kind == "proportional":
        return torch.where(torch.arange(spec.dim // 2) < spec.pairs, base / spec.factor, 0.0)
    if spec.kind == "llama3":
        return _llama3(spec, base)
    if spec.kind == "yarn":
        return _yarn(spec, base)
    return base


def _llama3(spec: RopeSpec, base: Tensor) -> Tensor:
    """Divide slow pairs by the factor, keep fast pairs, blend others. Source: Llama 3.1 reference code."""
    turns = spec.original_max_position * base / (2 * math.pi)
    width = spec.high_freq_factor - spec.low_freq_factor
    # Equal factors divide the pairs into slow and fast ones, without a blend.
    blend = ((turns - spec.low_freq_factor) / width).clamp(0, 1) if width else turns >= spec.low_freq_factor
    blend = blend.to(base.dtype)
    return (1 - blend) * base / spec.factor + blend * base


def _yarn(spec: RopeSpec, base: Tensor) -> Tensor:
    """Return frequencies interpolated by parts. Source: Peng et al. 2023, arXiv 2309.00071, section 3.2."""

    def pair_with(turns: float) -> float:
        """Return the (fractional) pair that makes ``turns`` turns within the original context."""
        return (
            spec.dim
            * math.log(spec.original_max_position / (turns * 2 * math.pi))
            / (2 * math.log(spec.theta))
        )

    low = pair_with(spec.beta_fast)
    high = pair_with(spec.beta_slow)
    if spec.truncate:
        low = math.floor(low)
        high = math.ceil(high)
    low = max(low, 0)
    high = min(high, spec.dim - 1)
    if low == high:
        # An empty ramp would divide by zero below.
        high += 0.001
    pairs = torch.arange(spec.dim // 2, dtype=torch.float64)
    interpolated = ((pairs - low) / (high - low)).clamp(0, 1)
    return base / spec.factor * interpolated + base * (1 - interpolated)


def attention_factor(spec: RopeSpec) -> float:
    """Return the factor of cos and sin: the configured factor of yarn, or the temperature of ``spec``."""
    if spec.kind in ("yarn", "longrope") and spec.attention_factor is not None:
        return spec.attention_factor
    return spec.temperature


def axes(spec: RopeSpec) -> list[int]:
    """Return the axis of each pair of dims: 0 for frame, 1 for row, 2 for column. Needs sections.

    Interleaved axes alternate frame, row, column until a section has all its pairs. Remaining pairs use the
    frame. Otherwise sections follow one another. Source: Qwen2-VL, arXiv 2409.12191; Qwen3-VL, arXiv
    2511.21631.
    """
    assert spec.sections is not None
    frame, row, _ = spec.sections
    pairs = range(spec.dim // 2)
    if spec.interleaved:
        return [pair % 3 if pair < 3 * spec.sections[pair % 3] else 0 for pair in pairs]
    return [(pair >= frame) + (pair >= frame + row) for pair in pairs]


class Rope:
    """Angles of positions. Owns the frequencies, which are computed and not loaded."""

    def __init__(self, spec: RopeSpec, build: Build) -> None:
        self._spec = spec
        self._wide = build.wide
        exact = inverse_frequencies(spec).to(build.device)
        self._exact = exact
        self._frequencies = exact.to(build.wide)
        self._factor = attention_factor(spec)
        self._axes: Tensor | None = None
        """Axis of each pair, int64 [dim / 2]; None without sections."""
        if spec.sections is not None:
            self._axes = torch.tensor(axes(spec), device=build.device)

    def angles(self, positions: Tensor, rope_positions: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return cos and sin of int64 [T] positions: each [T, dim / 2], float32 (float64 in a float64 model).

        rope_positions: int64 [3, T], frame, row and column of each token; needs sections. If all three equal
        the position, the angles have the same bits as without ``rope_positions``.
        """
        if rope_positions is None:
            turns = positions.to(self._wide).unsqueeze(1)
        else:
            assert self._axes is not None
            turns = rope_positions.to(self._wide).index_select(0, self._axes).t().contiguous()
        angles = turns * self._frequencies_at(positions)
        return angles.cos() * self._factor, angles.sin() * self._factor

    def _frequencies_at(self, positions: Tensor) -> Tensor:
        """Return the frequencies: [dim / 2], or [T, dim / 2] if frequencies depend on the position."""
        spec = self._spec
        if spec.kind != "dynamic":
            return self._frequencies
        length = (positions + 1).clamp(min=spec.max_position).to(torch.float64)
        stretch = spec.factor * length / spec.max_position - (spec.factor - 1)
        pairs = torch.arange(spec.dim // 2, dtype=torch.float64, device=positions.device)
        # base * stretch^(dim / (dim - 2)), to the power of -2 i / dim. exp and log compute every element
        # alike; pow uses another function for the last elements of a loop, and rows would affect each other.
        scaled = (stretch.log().unsqueeze(1) * (-2 * pairs / (spec.dim - 2))).exp()
        return (self._exact * scaled).to(self._wide)
