"""The slot table: generations, deferred frees, announcements."""

from __future__ import annotations

import pytest

from weft.common.errors import EngineDead
from weft.kv.slots import SlotTable


def test_slots_come_back_after_the_commit_and_with_a_new_gen() -> None:
    table = SlotTable(2)
    assert [table.take(), table.take()] == [(0, 1), (1, 1)]
    with pytest.raises(EngineDead):
        table.take()
    table.release(0, 4)
    assert table.available() == 0
    table.committed(3)
    assert table.announce() == []
    table.committed(4)
    assert [(op.slot, op.gen) for op in table.announce()] == [(0, 1)]
    assert table.announce() == []
    assert table.peek() == 0
    assert table.take() == (0, 2)


def test_a_release_of_a_committed_step_is_immediate() -> None:
    table = SlotTable(1)
    table.take()
    table.committed(7)
    table.release(0, 7)
    assert table.available() == 1
    with pytest.raises(EngineDead):
        table.release(0, 7)
