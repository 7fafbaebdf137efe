"""Invariant attention backends: a query has equal bits in every chunk, batch and block size."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from tests.e1.rig import attention_backends
from tests.support.slow import mostly_slow
from tests.support.specs import cache_spec, first_seen
from weft.attention.base import AttentionBackend, CoreInput, SegmentInput
from weft.attention.gqa.torch_backend import TorchAttention

Tensor = torch.Tensor
LENGTH = 210
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 4e-2}
HEADS = {"grouped": (8, 2, 16), "multi": (3, 3, 48), "one": (20, 1, 64), "wide": (2, 1, 128)}


class Sequence:
    """Queries, keys and values of one sequence: [LENGTH, heads, dim]. Equal for every computation."""

    def __init__(self, seed: int, heads: tuple[int, int, int], dtype: torch.dtype) -> None:
        torch.manual_seed(seed)
        self.q = torch.randn(LENGTH, heads[0], heads[2]).to(dtype)
        self.k, self.v = torch.randn(2, LENGTH, heads[1], heads[2]).to(dtype)


Row = tuple[Sequence, int, int]
"""(sequence, start, count)."""


def attend(
    backend: AttentionBackend, rows: list[Row], block: int, window: int, softcap: float = 0.0
) -> list[Tensor]:
    """Return the output of each row. The cache has NaN at every entry that must not be read."""
    one = rows[0][0]
    kv_heads, dim, dtype = one.k.shape[1], one.k.shape[2], one.q.dtype
    spec = cache_spec(window, kv_heads, dim)
    width = max(-(-(start + count) // block) for _, start, count in rows)
    order = random.Random(len(rows) * block).sample(range(1, len(rows) * width + 1), len(rows) * width)
    table = torch.tensor(order).view(len(rows), width)
    cache = torch.full((len(order) + 1, 2, kv_heads, block, dim), float("nan"), dtype=dtype)
    for row, (sequence, start, count) in enumerate(rows):
        first = first_seen(start, window)
        p = torch.arange(first, start + count)
        both = torch.stack((sequence.k[p], sequence.v[p]), dim=1)  # [positions, 2, kv_heads, dim]
        cache[table[row, p // block], :, :, p % block] = both
    counts = np.array([count for _, _, count in rows], np.int32)
    starts = np.array([start for _, start, _ in rows], np.int32)
    segment = SegmentInput(
        begin=0,
        rows=len(rows),
        tokens=int(counts.sum()),
        host_counts=counts,
        host_starts=starts,
        q_offsets=torch.tensor([0, *np.cumsum(counts).tolist()], dtype=torch.int32),
        starts=torch.tensor(starts.tolist(), dtype=torch.int64),
        slots=torch.arange(len(rows)),
        live=torch.zeros(len(rows), dtype=torch.int64),
        tables=(table,),
    )
    q = torch.cat([sequence.q[start : start + count] for sequence, start, count in rows])
    out = torch.full_like(q, float("nan"))
    prepared = backend.prepare(segment, 0, spec, block, dtype)
    backend.attend(q, out, CoreInput(segment, {0: (cache,)}, 0.25, prepared, None, softcap), 0, spec)
    return list(out.split(counts.tolist()))


def chunks(length: int, size: int) -> Iterator[tuple[int, int]]:
    for start in range(0, length, size):
        yield start, min(size, length - start)


FORMS = [
    (name, dtype, heads, window)
    for name in ("cpu", "invariant")
    for dtype in (torch.float32, torch.bfloat16)
    for heads in HEADS
    for window in (0, 5, 70, 130)
]
FORMS += [
    ("invariant", dtype, heads, window)
    for dtype in (torch.float64, torch.float16)
    for heads, window in (("grouped", 70), ("one", 0))
]
#: Chunks of positions, and capped scores.
FORMS += [
    (name, dtype, "grouped", -70)
    for name, dtype in (("cpu", torch.bfloat16), ("invariant", torch.float64), ("invariant", torch.float32))
]


@mostly_slow(("name", "dtype", "heads", "window"), FORMS, [form for form in FORMS if abs(form[3]) == 70])
def test_bits_of_a_query_are_its_own(name: str, dtype: torch.dtype, heads: str, window: int) -> None:
    backend = attention_backends(name, dtype)
    cap = 0.7 if window < 0 else 0.0
    one, others = Sequence(0, HEADS[heads], dtype), [Sequence(s, HEADS[heads], dtype) for s in range(1, 9)]
    (whole,) = attend(backend, [(one, 0, LENGTH)], 64, window, cap)
    (close,) = attend(TorchAttention(), [(one, 0, LENGTH)], 64, window, cap)
    assert torch.allclose(whole.double(), close.double(), atol=TOLERANCE[dtype])
    for size, block in ((1, 64), (7, 16), (64, 4), (100, 3), (16, 24)):
        parts = list(chunks(LENGTH, size))
        if size < 64:
            parts = random.Random(size).sample(parts, 5)
        for start, count in parts:
            company = [(o, (37 * i) % 120, 1 + (i * count) % 90) for i, o in enumerate(others[: start % 9])]
            made = attend(backend, [*company[:2], (one, start, count), *company[2:]], block, window, cap)
            assert torch.equal(made[min(2, len(company))], whole[start : start + count]), (size, block, start)


@pytest.mark.parametrize("name", ["cpu", "invariant"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_threads_change_no_bit(name: str, dtype: torch.dtype) -> None:
    backend = attention_backends(name, dtype)
    rows: list[Row] = [(Sequence(s, HEADS["grouped"], dtype), 25 * s, 1 + 60 * (s % 2)) for s in range(6)]
    threads = torch.get_num_threads()
    made = []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            made.append(torch.cat(attend(backend, rows, 16, 0)))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(made[0], made[1])
    assert torch.equal(made[0], made[2])
