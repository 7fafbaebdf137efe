"""That a row's bits are its own, of anything that takes rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

Tensor = torch.Tensor


def check_rows_alone(run: Callable[[Tensor], Tensor], x: Tensor, few: Iterable[int]) -> None:
    """Whatever the number of rows (with one thread ``few``), a row's place, the others, and the threads.

    x: [T, n], T at least 71. The caller gives the number of threads back.
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
