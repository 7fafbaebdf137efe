"""Planted bugs of transfers: the checks behind the random loads of two groups must detect each bug.

Without a planted bug the same loads pass: ``test_rooms_random.py``.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.scheduler.test_rooms_random import play
from weft.common.errors import WeftError
from weft.kv.kinds import WindowKind
from weft.kv.pool import BlockPool
from weft.kv.snapshots import StateKind
from weft.scheduler.room_book import RoomBook
from weft.scheduler.state import SchedulerState
from weft.scheduler.transfers.rooms import SchedulerRooms
from weft.types.plan import Op
from weft.types.rooms import RoomFailed, RoomFreed

SEEDS = range(30)
SEEN_BY = {
    "forget_holds_with_the_ranks": 13,
    "publish_a_block_that_lacks_its_first_positions": 10,
    "save_the_state_and_tell_nobody": 2,
    "hit_what_is_not_there": 4,
}
"""Bug -> the seed that detected the bug before. This seed is tried first."""
_reset, _on, _save, _ended = BlockPool.reset, SchedulerRooms.on, SchedulerState.save, RoomBook.ended
_export, _leaves, _adopt = RoomBook.export, RoomBook.leaves, StateKind.adopt


def hold_nothing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RoomBook, "_hold", lambda self, record, blocks: None)


def forget_holds_with_the_ranks(patch: pytest.MonkeyPatch) -> None:
    def reset(self: BlockPool) -> None:
        holds, self._holds = self._holds, {}
        _reset(self)
        self._holds = holds
        for block in holds:  # so that the end of the pin does not fail first
            self._references[block] = 0

    patch.setattr(BlockPool, "reset", reset)


def give_back_before_the_fence(patch: pytest.MonkeyPatch) -> None:
    def on(self: SchedulerRooms, event: object) -> None:
        _on(self, event)  # type: ignore[arg-type]
        if isinstance(event, RoomFailed):
            _on(self, RoomFreed(event.key))

    patch.setattr(SchedulerRooms, "on", on)


def believe_a_deadline(patch: pytest.MonkeyPatch) -> None:
    """Plant a bug: a sequence that ends gets its blocks back at once."""

    def ended(self: RoomBook, sequence: object, finish: str, error: object) -> None:
        record = self.of(sequence)  # type: ignore[arg-type]
        _ended(self, sequence, finish, error)  # type: ignore[arg-type]
        if record is not None and record.held and finish != "moved":
            self._holds.unhold_all(record.held)
            record.held = []

    patch.setattr(RoomBook, "ended", ended)


def publish_a_block_that_lacks_its_first_positions(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(WindowKind, "_first_sent", lambda self, position, sent_block: 0)


def leave_before_the_state_is_saved(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        RoomBook, "leaves", lambda self, sequence, last_step: _leaves(self, sequence, last_step) or True
    )


def save_the_state_and_tell_nobody(patch: pytest.MonkeyPatch) -> None:
    def save(self: SchedulerState, step: int) -> list[Op]:
        return [op for op in _save(self, step) if not getattr(op, "states", False)]

    patch.setattr(SchedulerState, "save", save)


def load_no_state(patch: pytest.MonkeyPatch) -> None:
    def adopt(self: StateKind, fetch: int, slot: int) -> list[Op]:
        _adopt(self, fetch, slot)
        return []

    patch.setattr(StateKind, "adopt", adopt)


def export_nothing_of_later_chunks(patch: pytest.MonkeyPatch) -> None:
    def export(self: RoomBook, sequence: object, start: int, end: int) -> list[Op]:
        return _export(self, sequence, start, end) if start < 3 else []  # type: ignore[arg-type]

    patch.setattr(RoomBook, "export", export)


def keep_the_room_of_who_ended(patch: pytest.MonkeyPatch) -> None:
    def ended(self: RoomBook, sequence: object, finish: str, error: object) -> None:
        _ended(self, sequence, finish, error)  # type: ignore[arg-type]
        self.requests = [r for r in self.requests if type(r).__name__ != "CancelRoom"]

    patch.setattr(RoomBook, "ended", ended)


def say_nothing_of_who_is_given_back(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RoomBook, "evicted", lambda self, sequence, error=None: None)


def hit_what_is_not_there(patch: pytest.MonkeyPatch) -> None:
    """Plant a bug: the window group hits without the blocks below the hit position."""
    patch.setattr(
        WindowKind,
        "fetch_hit",
        lambda self, hashes, limit, position: (
            min(limit // self.block_size, len(hashes) // self._ratio) * self.block_size
        ),
    )


@pytest.mark.requirement("E20")
@pytest.mark.parametrize(
    "plant",
    [
        hold_nothing,
        forget_holds_with_the_ranks,
        give_back_before_the_fence,
        believe_a_deadline,
        publish_a_block_that_lacks_its_first_positions,
        leave_before_the_state_is_saved,
        save_the_state_and_tell_nobody,
        load_no_state,
        export_nothing_of_later_chunks,
        keep_the_room_of_who_ended,
        say_nothing_of_who_is_given_back,
        hit_what_is_not_there,
    ],
)
def test_planted_bug_is_seen(plant: Callable[[pytest.MonkeyPatch], None]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        plant(patch)
        first = SEEN_BY.get(plant.__name__, 0)
        assert any(_fails(seed) for seed in (first, *SEEDS))


def _fails(seed: int) -> bool:
    try:
        play(seed, patience=60.0).check_end()
    except (AssertionError, AttributeError, WeftError, KeyError, IndexError):
        return True
    return False
