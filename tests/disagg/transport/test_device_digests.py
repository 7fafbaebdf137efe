"""Digests in torch operators, as a GPU computes them, beside the definition."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from weft.disagg.protocol import digests
from weft.disagg.protocol.spans import SpanPart
from weft.disagg.transport.device_memory import by_length, seeded, span_sums

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
