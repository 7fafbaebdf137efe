"""Digests in torch operators, as a GPU computes them, beside the definition."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from weft.disagg.protocol import digests
from weft.disagg.protocol.spans import SpanPart
from weft.disagg.transport.device_memory import _WARM_UP, by_length, seeded, span_sums

KEYS = torch.from_numpy(np.stack([digests.KEYS_LOW, digests.KEYS_HIGH]).view(np.int64))
LENGTHS = (1, 7, 8, 9, 64, 1000, 1023, 1024, 1025, 1032, 4096, 5 * 1024 + 3, 128 * 1024, 129 * 1024 + 5)


@pytest.mark.requirement("E30")
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("count", [1, 3])
def test_sums_with_seeds_are_the_digests(length: int, count: int) -> None:
    rng = np.random.default_rng(length)
    memory = rng.integers(0, 256, count * length, dtype=np.uint8)
    spans = np.array([(at * length, 64 * at, length) for at in range(count)], np.int64)
    part = SpanPart(0, 5, spans)
    seeds = digests.span_seeds(77, 5, spans[:, 1], spans[:, 2])
    expected = digests.digest_spans(memory, spans[:, ::2], seeds)
    rows = torch.from_numpy(memory).view(count, length)
    made = span_sums(rows, KEYS).numpy().view(np.uint64)
    assert np.array_equal(seeded(made, (part,), 77), expected)


@pytest.mark.parametrize("offset", [0, 3, 8])
def test_rows_may_start_anywhere(offset: int) -> None:
    memory = torch.arange(4096 + offset, dtype=torch.int64).to(torch.uint8)
    expected = span_sums(memory[offset : offset + 4096].clone().view(4, 1024), KEYS)
    assert torch.equal(span_sums(memory[offset : offset + 4096].view(4, 1024), KEYS), expected)


def test_words_of_all_ones_wrap_as_in_the_definition() -> None:
    memory = np.full(8 * 128 * 130, 255, np.uint8)
    (expected,) = digests.digest_spans(memory, np.array([[0, len(memory)]]), np.array([9], np.uint64))
    made = span_sums(torch.from_numpy(memory).view(1, -1), KEYS).numpy().view(np.uint64)
    assert int(digests.mix(int(made[0]) ^ 9)) == int(expected)


def test_spans_of_several_lengths_are_grouped() -> None:
    order, lengths = by_length(np.array([8, 64, 8, 16, 64]))
    assert order.tolist() == [0, 2, 3, 1, 4]
    assert lengths == [(8, 2), (16, 1), (64, 2)]


class Operators(TorchDispatchMode):
    """Records the names of all operators."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(str(func))
        return func(*args, **(kwargs or {}))


def operators(*lengths: int) -> set[str]:
    with Operators() as seen:
        for length in lengths:
            span_sums(torch.zeros((2, length), dtype=torch.uint8), KEYS)
    return seen.names


def test_the_sums_of_a_start_have_all_operators_of_later_sums() -> None:
    """A GPU loads a kernel at the first launch, which waits for all work of the device."""
    assert operators(*LENGTHS) == operators(*_WARM_UP)
