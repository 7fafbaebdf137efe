"""Placement of packed weights: small weights are adjacent, and freed memory is reused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from weft.ops import cpu

pytestmark = pytest.mark.skipif(not cpu.load(), reason="the C++ operations are not built")


def pack(rows: int, inputs: int) -> torch.Tensor:
    made: torch.Tensor = torch.ops.weft_cpu.pack.default(torch.randn(rows, inputs), False)
    return made


def resident() -> int:
    """Return the resident bytes of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_small_weights_share_pages() -> None:
    first, second = pack(64, 100), pack(64, 100)
    assert second.data_ptr() - first.data_ptr() == first.nbytes
    assert first.data_ptr() % 256 == 0


def test_weights_that_are_dropped_give_their_memory_back() -> None:
    before = resident()
    kept = pack(32, 8)
    for _ in range(6):
        assert pack(4096, 6000).nbytes > 90 << 20
    assert resident() - before < 250 << 20
    expected = pack(32, 8)
    del kept
    assert torch.isfinite(expected).all()


def test_the_place_of_the_last_is_taken_again() -> None:
    """Temporary packing leaves no gap between weights that stay."""
    kept = pack(64, 100)
    places = {pack(64, 100).data_ptr() for _ in range(5)}
    assert len(places) == 1
    first, second = pack(64, 100), pack(64, 100)
    assert first.data_ptr() in places
    del first
    third = pack(64, 100)
    assert len({kept.data_ptr(), second.data_ptr(), third.data_ptr()}) == 3
    assert not (second.data_ptr() <= third.data_ptr() < second.data_ptr() + second.nbytes)


def test_each_weight_has_its_own_memory() -> None:
    """Covers a weight larger than a region, and an empty weight."""
    sizes = [(32, 64), (9000, 2048), (32, 64), (0, 64)]
    made = [pack(*size) for size in sizes]
    for number, tensor in enumerate(made):
        tensor.fill_(number)
    assert all((tensor == number).all() for number, tensor in enumerate(made))
