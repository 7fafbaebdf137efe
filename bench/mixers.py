"""Time the cores of Mamba2 and Mamba 1 (C++ and torch) and of short convolutions (torch) on the CPU.

python -m bench.mixers [--dtype bfloat16] [--threads 1] [--repeat 7] [--form all]

Mamba2: 128 heads of 64 x 128, 8 groups (Nemotron-H 8B). Mamba 1: 8,192 channels, states of 16 (Falcon Mamba
7B). Short convolution: 2,048 channels, 3 taps (LFM2 1.2B). One layer, without its projections. Times are
minima of interleaved repetitions.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from weft.attention.base import Backend, SegmentInput
from weft.attention.conv.conv_backend import ConvInput, ConvWeights
from weft.attention.mamba.mamba_backend import MambaInput, MambaWeights
from weft.attention.mamba1.mamba1_backend import Mamba1Input, Mamba1Weights, Selected
from weft.attention.registry import FORMS, PREFERRED
from weft.config.families.mixers.state_caches import conv_cache, mamba1_cache, mamba_cache
from weft.config.parts.mixers import ConvSpec, Mamba1Spec, MambaSpec
from weft.ops import cpu

MAMBA = MambaSpec(layers=(0,), heads=128, dim=64, groups=8, state=128, conv=4, norm_groups=8)
MAMBA1 = Mamba1Spec(layers=(0,), heads=16, dim=512, state=16, rank=256, conv=4)
CONV = ConvSpec(layers=(0,), heads=8, dim=256, taps=3)
CACHES = {"mamba": mamba_cache(MAMBA), "mamba1": mamba1_cache(MAMBA1), "conv": conv_cache(CONV)}
CASES = ((1, 1), (8, 1), (16, 1), (1, 512), (1, 2048))
"""(rows, tokens of each row)."""


def segment(rows: int, count: int) -> SegmentInput:
    """Return ``rows`` rows of ``count`` tokens. One token continues a sequence, more tokens begin one."""
    start = 100 if count == 1 else 0
    return SegmentInput(
        begin=0,
        rows=rows,
        tokens=rows * count,
        host_counts=np.full(rows, count, np.int32),
        host_starts=np.full(rows, start, np.int32),
        q_offsets=torch.arange(rows + 1, dtype=torch.int32) * count,
        starts=torch.full((rows,), start),
        slots=torch.arange(rows),
        live=torch.zeros(rows, dtype=torch.int64),
        tables=(),
    )


def mamba_weights() -> MambaWeights:
    """Return random weights of a layer."""
    inner = MAMBA.heads * MAMBA.dim
    channels = inner + 2 * MAMBA.groups * MAMBA.state
    return MambaWeights(
        groups=MAMBA.groups,
        taps=torch.randn(MAMBA.conv, channels),
        conv_bias=torch.randn(channels),
        rate=torch.rand(MAMBA.heads),
        step_bias=torch.randn(MAMBA.heads) - 3,
        skip=torch.randn(MAMBA.heads),
        low=0.0,
        high=float("inf"),
        finish="gated",
        norm=torch.ones(inner),
        norm_groups=MAMBA.norm_groups,
        eps=1e-5,
    )


def mamba1_weights() -> Mamba1Weights:
    """Return random weights of a layer."""
    return Mamba1Weights(
        taps=torch.randn(MAMBA1.conv, MAMBA1.inner),
        conv_bias=torch.randn(MAMBA1.inner),
        rate=torch.rand(MAMBA1.heads, MAMBA1.state, MAMBA1.dim),
        step_bias=torch.randn(MAMBA1.inner) - 3,
        skip=torch.randn(MAMBA1.inner),
    )


def call(form: str, backend: Any, rows: int, count: int, dtype: torch.dtype) -> Callable[[], None]:
    """Return a call of the core of one layer: decode rows of one token, or prompts."""
    cache = CACHES[form]
    given = segment(rows, count)
    state = tuple(
        torch.zeros(rows + 1, 1, *part.shape, dtype=torch.float32 if part.wide else dtype)
        for part in cache.parts
    )
    prepared = backend.prepare(given, 0, cache, 64, dtype)

    def noise(columns: int) -> torch.Tensor:
        return torch.randn(rows * count, columns, dtype=dtype)

    if form == "mamba":
        inner = MAMBA.heads * MAMBA.dim
        x, out = noise(2 * (inner + MAMBA.groups * MAMBA.state) + MAMBA.heads), noise(inner)
        core = MambaInput(given, state, mamba_weights(), count == 1, prepared)
        return lambda: backend.run(x, out, core)
    if form == "mamba1":
        inner = MAMBA1.inner
        x, out = noise(inner), noise(inner)
        first = Mamba1Input(given, state, mamba1_weights(), count == 1, prepared)
        inputs = Selected(noise(inner), noise(inner), noise(MAMBA1.state), noise(MAMBA1.state), noise(inner))

        def run() -> None:
            backend.convolve(x, inputs.x, first)
            backend.scan(inputs, out, first)

        return run
    channels = CONV.heads * CONV.dim
    x, out = noise(3 * channels), noise(channels)
    weights = ConvWeights(taps=torch.randn(CONV.taps, channels), bias=None)
    short = ConvInput(given, state, weights, count == 1, prepared)
    return lambda: backend.run(x, out, short)


def measured(calls: list[Callable[[], None]], repeat: int) -> list[float]:
    """Return the least milliseconds of each call."""
    best = [float("inf")] * len(calls)
    for _ in range(repeat + 1):  # the first round warms up
        for number, run in enumerate(calls):
            began = time.perf_counter()
            run()
            best[number] = min(best[number], 1e3 * (time.perf_counter() - began))
    return best


def available(form: str) -> list[tuple[str, Backend]]:
    """Return the backends of a form that run here, by name."""
    names = [name for name in PREFERRED[form]["cpu"] if name != "cpu" or cpu.load()]
    return [(name, FORMS[form].get(name)()) for name in names]


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--form", default="all", choices=["all", *CACHES])
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    for form in CACHES if options.form == "all" else (options.form,):
        backends = available(form)
        for rows, count in CASES:
            # ``invariant`` takes minutes for a prompt.
            some = [one for one in backends if one[0] != "invariant" or count == 1]
            calls = [call(form, one, rows, count, getattr(torch, options.dtype)) for _, one in some]
            for (name, _), ms in zip(some, measured(calls, options.repeat), strict=True):
                print(f"{form:6} {rows:3} x {count:<5} {name:10} {ms:9.3f} ms")


if __name__ == "__main__":
    main()
