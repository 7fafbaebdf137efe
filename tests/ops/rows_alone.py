"""Check that the bits of a row do not depend on other rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

Tensor = torch.Tensor


def check_rows_alone(run: Callable[[Tensor], Tensor], x: Tensor, few: Iterable[int]) -> None:
    """Assert that bits of a row depend on neither row count, place, other rows nor threads.

    ``x`` is [T, n] with T of at least 71. ``few`` are the row counts with one thread. The caller restores the
    number of threads.
    """
    whole = run(x)
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        assert torch.equal(run(x), whole)
        for rows in few if count == 1 else (1, 8, 9, 15, 64):
            begin = rows % 7
            assert torch.equal(run(x[begin : begin + rows]), whole[begin : begin + rows]), (count, rows)
    spoiled = x[:64].clone()
    spoiled[1::2] = float("nan")
    assert torch.equal(run(spoiled)[::2], whole[:64:2])
