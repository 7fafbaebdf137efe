"""The memory plan covers the intermediate results of a gated delta net, as torch's memory profiler counts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from tests.attention.test_delta import Scene, state_cache
from tests.support.allocated import most_allocated
from weft.attention.base import SegmentInput
from weft.attention.delta import delta_torch
from weft.attention.delta.delta_backend import DeltaInput
from weft.attention.delta.delta_torch import TorchDelta
from weft.attention.recurrent import row_groups
from weft.config.sizing.layer_elements import delta_elements

#: (k_heads, v_heads, k_dim, v_dim, taps, rank): the last three have a decay for every key channel.
SHAPES = [(4, 4, 64, 64, 4), (2, 6, 32, 64, 4), (2, 16, 64, 128, 4)]
KIMI = [(4, 4, 64, 64, 4, 64), (2, 2, 128, 128, 4, 128), (8, 8, 32, 32, 3, 16)]
LENGTHS = [[1024], [256] * 3, [64] * 16, [16] * 64, [255, *[129] * 7], [65] * 15, [17] * 60]


def peak(shape: tuple[int, ...], lengths: list[int], dtype: torch.dtype) -> tuple[int, int]:
    """Return (largest bytes allocated at a time in a run, bytes of the plan)."""
    scene, backend = Scene(shape, dtype, lengths=lengths), TorchDelta()
    segment, qkvz, gates = scene.stage([(row, len(row.qkvz)) for row in scene.rows])
    prepared = backend.prepare(segment, 0, state_cache(scene.spec), 64, dtype)
    out = torch.empty(len(qkvz), scene.spec.v_heads * scene.spec.v_dim, dtype=dtype)
    for part in scene.state:
        part.zero_()
    given = DeltaInput(segment, scene.state, scene.weights, False, prepared)
    spec: Any = SimpleNamespace(delta=scene.spec)
    planned = delta_elements(spec, len(qkvz), len(lengths)) * max(4, dtype.itemsize)
    inputs = scene.inputs(qkvz, gates)
    return most_allocated(lambda: backend.run(inputs, out, given)), planned


@pytest.mark.parametrize("rank", [0, 4])
@pytest.mark.parametrize(("count", "n"), [(31, 65), (5, 17), (3, 600), (2, 128), (1, 70)])
def test_chunks_are_padded_within_the_tokens_of_the_rows(
    count: int, n: int, rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of 65 tokens would otherwise need the memory of 128 tokens each."""
    generator = torch.Generator().manual_seed(1)

    def random(*shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=generator, dtype=torch.float64)

    q, k, v = (random(count, 2, n, 4) / 4 for _ in range(3))
    tokens = delta_torch._DeltaTokens(q, k, v, -random(count, 2, n, 4 if rank else 1), random(count, 2, n))
    state = random(count, 2, 4, 4)
    padded = []
    chunked = delta_torch._chunked

    def watched(part: Any, before: torch.Tensor) -> Any:
        padded.append(part.q.shape[0] * -(-part.q.shape[2] // 64) * 64)
        return chunked(part, before)

    monkeypatch.setattr(delta_torch, "_chunked", watched)
    made, after = TorchDelta()._recur(tokens, state)
    assert max(padded) <= max(256 if rank else count * n, n + 63)
    due, last = TorchDelta()._one_by_one(tokens, state)
    assert torch.allclose(made, due, rtol=0, atol=1e-10)
    assert torch.allclose(after, last, rtol=0, atol=1e-10)


CASES = [
    (shape, lengths, dtype)
    for shape in (*SHAPES, *KIMI)
    for lengths in LENGTHS
    for dtype in (torch.float32, torch.bfloat16)
]


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "lengths", "dtype"), CASES)
def test_the_plan_covers_a_run(shape: tuple[int, ...], lengths: list[int], dtype: torch.dtype) -> None:
    used, planned = peak(shape, lengths, dtype)
    assert used <= planned
    assert used >= 0.4 * planned, "the plan takes memory from the caches"


@pytest.mark.parametrize("counts", [[255, *[129] * 62], [17, 31, 18], [5, 40, 600, 300, 599]])
def test_padding_never_doubles_the_tokens(counts: list[int]) -> None:
    rows = len(counts)
    segment = cast(
        SegmentInput,
        SimpleNamespace(rows=rows, host_counts=np.array(counts, np.int32), starts=torch.zeros(rows)),
    )
    groups = list(row_groups(segment))
    assert all(group.size * group.most <= sum(counts) for group in groups)
    assert sorted(row for group in groups for row in cast(torch.Tensor, group.rows).tolist()) == [
        *range(rows)
    ]
