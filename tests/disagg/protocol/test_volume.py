"""The number of bytes of a transfer, against the number that its receivers expect."""

from __future__ import annotations

import itertools

import pytest

from tests.disagg.protocol.memory import KINDS
from tests.disagg.protocol.test_spans import Case
from weft.disagg.protocol.spans import arriving
from weft.disagg.protocol.volume import transfer_bytes


@pytest.mark.parametrize("kind", sorted(KINDS))
@pytest.mark.parametrize("ranks", itertools.product((1, 2, 4), repeat=2))
def test_all_ranks_get_so_many_bytes(kind: str, ranks: tuple[int, int]) -> None:
    for start, end in ((0, 17), (8, 30), (0, 1), (24, 25)):
        case = Case(1, [kind], ranks, (4, 8), start, end)
        dims = case.sender.dims
        arrive = [arriving(case.sides[1], to, dims, start, end) for to in range(ranks[1])]
        expected = sum(int(spans[:, 1].sum()) for each in arrive for spans in each.values())
        assert transfer_bytes(dims, case.receiver.dims, start, end) == expected
