"""Measures the forms of routed blocks on this machine, for the table behind the automatic choice."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from weft.ops import moe
from weft.ops.moe import Experts, Gate, Routed
from weft.ops.moe_table import Measured, Size
from weft.ops.routing import Rule

Tensor = torch.Tensor

TOKENS = (1, 2, 4, 8, 16, 32, 128, 512, 2048)
# By device: many small experts, few large experts, and sizes in between.
SIZES: dict[str, tuple[Size, ...]] = {
    "cpu": (Size(32, 4, 512, 256), Size(128, 8, 768, 192), Size(8, 2, 1024, 1024)),
    "cuda": (
        Size(32, 4, 512, 256),
        Size(128, 8, 2048, 768),
        Size(256, 8, 7168, 512),
        Size(8, 2, 4096, 4096),
        Size(32, 4, 2880, 2880),
    ),
}
DTYPES: dict[str, tuple[str, ...]] = {
    "cpu": ("bfloat16", "float32", "float64"),
    "cuda": ("bfloat16", "float16", "float32"),
}
SECONDS = 0.04
"""Seconds of one measurement, after one warm-up call. Even a slow call is measured twice."""
SLOW = 1.0
"""Seconds per call after which a form is skipped for more tokens."""

Tick = Callable[[str], None]


def cases(device: str) -> int:
    """Return the number of calls of ``tick``."""
    return len(SIZES[device]) * len(DTYPES[device]) * len(TOKENS)


def measure(device: str, tick: Tick = lambda done: None) -> list[Measured]:
    """Measure every size, dtype, number of tokens and form. Takes a few minutes."""
    return [_measure(device, dtype, size, tick) for dtype in DTYPES[device] for size in SIZES[device]]


@torch.inference_mode()
def _measure(device: str, dtype: str, size: Size, tick: Tick) -> Measured:
    """Measure the forms at each of ``TOKENS`` and return the row, with microseconds by tokens and form.

    A form slower than ``SLOW`` is left out for more tokens. ``tick`` is called after each number of tokens.
    """
    weights = _weights(device, getattr(torch, dtype), size)
    times: dict[int, dict[str, float]] = {}
    slow: set[str] = set()
    for tokens in TOKENS:
        times[tokens] = {}
        for form, run in _forms(weights, tokens).items():
            if form in slow:
                continue
            seconds = _seconds(device, weights, tokens, run)
            times[tokens][form] = round(seconds * 1e6, 1)
            if seconds > SLOW:
                slow.add(form)
        tick(f"{dtype} {size.experts}x{size.intermediate}, {tokens} tokens")
    return Measured(device, machine(device), dtype, size, times)


def machine(device: str) -> str:
    """Return a description of the measured machine and torch."""
    torch_version = f"torch {torch.__version__}"
    if device == "cuda":
        return f"{torch.cuda.get_device_name()}, {torch_version}"
    return f"{_processor()}, {torch.get_num_threads()} threads of {os.cpu_count()}, {torch_version}"


def _processor() -> str:
    """Return the name of the CPU."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _weights(device: str, dtype: torch.dtype, size: Size) -> Routed:
    """Return random weights of a block of ``size``, the same in each call."""

    def noise(*shape: int, kind: torch.dtype = dtype) -> Tensor:
        made = torch.empty(shape, dtype=kind, device=device)
        return made.normal_(0, shape[-1] ** -0.5, generator=generator)

    generator = torch.Generator(device).manual_seed(0)
    return Routed(
        rule=Rule(size.top_k, renormalize=True),
        gate=Gate(),
        router=noise(
            size.experts, size.hidden, kind=torch.float64 if dtype == torch.float64 else torch.float32
        ),
        gate_up=noise(size.experts, 2 * size.intermediate, size.hidden),
        down=noise(size.experts, size.hidden, size.intermediate),
    )


def _forms(weights: Routed, tokens: int) -> dict[str, Experts]:
    """Return the forms to measure for ``tokens`` tokens."""
    result = {form: moe.FORMS[form] for form in moe.usable(weights)}
    # Beyond this limit the copies of ``gather`` alone are larger than all weights.
    if tokens * weights.rule.top_k > 4 * weights.down.shape[0]:
        result.pop("gather", None)
    if weights.down.device.type == "cuda" and weights.down.dtype != torch.float64:
        from weft.ops.triton.moe import by_tiles, tile_of

        result["triton"] = lambda x, ids, w: by_tiles(x, ids, w, tile_of(ids, w))
    return result


def _seconds(device: str, weights: Routed, tokens: int, run: Experts) -> float:
    """Return the seconds of the fastest call. Each call has new random expert ids."""
    generator = torch.Generator(device).manual_seed(tokens)
    x = torch.empty(tokens, weights.down.shape[1], dtype=weights.down.dtype, device=device)
    x.normal_(generator=generator)
    best = float("inf")
    for elapsed in _calls(device, weights, x, run, generator):
        best = min(best, elapsed)
    return best


def _calls(
    device: str, weights: Routed, x: Tensor, run: Experts, generator: torch.Generator
) -> Iterator[float]:
    """Yield the seconds of each call after the warm-up, for at least 2 calls and ``SECONDS``."""
    experts, top_k = weights.down.shape[0], weights.rule.top_k
    spent, made = 0.0, 0
    while made < 3 or spent < SECONDS:
        scores = torch.rand(x.shape[0], experts, generator=generator, device=device)
        ids = scores.argsort(dim=1)[:, :top_k]
        if device == "cuda":
            torch.cuda.synchronize()
        begin = time.perf_counter()
        run(x, ids, weights)
        if device == "cuda":
            torch.cuda.synchronize()
        elapsed = time.perf_counter() - begin
        if made:  # the first call warms up
            yield elapsed
            spent += elapsed
        made += 1


def summary(found: list[Measured]) -> Iterator[str]:
    """Yield one line for each block: the fastest form by number of tokens."""
    for row in found:
        best: dict[str, Any] = {str(n): min(by, key=lambda f: by[f]) for n, by in row.times.items()}
        size = f"{row.size.experts} x {row.size.intermediate} of {row.size.hidden}, top {row.size.top_k}"
        yield f"{row.dtype:<9} {size:<28} " + ", ".join(f"{n}: {form}" for n, form in best.items())
