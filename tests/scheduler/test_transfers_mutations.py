"""Planted bugs of transfers: the checks behind the random loads of two groups must detect each bug.

Without a planted bug the same loads pass: ``test_transfers_random.py``.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.scheduler.test_transfers_random import play
from weft.common.errors import WeftError
from weft.kv.cache_groups import WindowGroup
from weft.kv.pool import BlockPool
from weft.kv.snapshots import StateGroup
from weft.scheduler.state import SchedulerState
from weft.scheduler.transfer_book import TransferBook
from weft.scheduler.transfers.scheduler_transfers import SchedulerTransfers
from weft.types.plan import SlotUpdate
from weft.types.transfer import TransferFailed, TransferFreed

SEEDS = range(30)
SEEN_BY = {
    "forget_pins_with_the_ranks": 13,
    "insert_a_block_that_lacks_its_first_positions": 10,
    "save_the_state_and_tell_nobody": 14,
    "believe_a_deadline": 10,
    "keep_the_transfer_of_who_ended": 1,
    "say_nothing_of_who_is_given_back": 9,
    "hit_what_is_not_there": 4,
}
"""Bug -> the seed that detected the bug before. This seed is tried first."""
_reset, _on, _save, _ended = BlockPool.reset, SchedulerTransfers.on, SchedulerState.save, TransferBook.ended
_export, _leaves, _adopt = TransferBook.export, TransferBook.leaves, StateGroup.adopt


def pin_nothing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(TransferBook, "_pin", lambda self, record, blocks: None)


def forget_pins_with_the_ranks(patch: pytest.MonkeyPatch) -> None:
    def reset(self: BlockPool) -> None:
        pins, self._pins = self._pins, {}
        _reset(self)
        self._pins = pins
        for block in pins:  # so that the end of the pin does not fail first
            self._references[block] = 0

    patch.setattr(BlockPool, "reset", reset)


def give_back_before_the_fence(patch: pytest.MonkeyPatch) -> None:
    def on(self: SchedulerTransfers, event: object) -> None:
        _on(self, event)  # type: ignore[arg-type]
        if isinstance(event, TransferFailed):
            _on(self, TransferFreed(event.key))

    patch.setattr(SchedulerTransfers, "on", on)


def believe_a_deadline(patch: pytest.MonkeyPatch) -> None:
    """Plant a bug: a sequence that ends gets its blocks back at once."""

    def ended(self: TransferBook, sequence: object, finish: str, error: object) -> None:
        record = self.of(sequence)  # type: ignore[arg-type]
        _ended(self, sequence, finish, error)  # type: ignore[arg-type]
        if record is not None and record.held and finish != "moved":
            self._pins.unpin_all(record.held)
            record.held = []

    patch.setattr(TransferBook, "ended", ended)


def insert_a_block_that_lacks_its_first_positions(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(WindowGroup, "_first_sent", lambda self, position, sent_block: 0)


def leave_before_the_state_is_saved(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        TransferBook, "leaves", lambda self, sequence, last_step: _leaves(self, sequence, last_step) or True
    )


def save_the_state_and_tell_nobody(patch: pytest.MonkeyPatch) -> None:
    def save(self: SchedulerState, step: int) -> list[SlotUpdate]:
        return [op for op in _save(self, step) if not getattr(op, "states", False)]

    patch.setattr(SchedulerState, "save", save)


def load_no_state(patch: pytest.MonkeyPatch) -> None:
    def adopt(self: StateGroup, fetch: int, slot: int) -> list[SlotUpdate]:
        _adopt(self, fetch, slot)
        return []

    patch.setattr(StateGroup, "adopt", adopt)


def export_nothing_of_later_chunks(patch: pytest.MonkeyPatch) -> None:
    def export(self: TransferBook, sequence: object, start: int, end: int) -> list[SlotUpdate]:
        return _export(self, sequence, start, end) if start < 3 else []  # type: ignore[arg-type]

    patch.setattr(TransferBook, "export", export)


def keep_the_transfer_of_who_ended(patch: pytest.MonkeyPatch) -> None:
    def ended(self: TransferBook, sequence: object, finish: str, error: object) -> None:
        _ended(self, sequence, finish, error)  # type: ignore[arg-type]
        self.requests = [r for r in self.requests if type(r).__name__ != "CancelTransfer"]

    patch.setattr(TransferBook, "ended", ended)


def say_nothing_of_who_is_given_back(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(TransferBook, "returned", lambda self, sequence, error=None: None)


def hit_what_is_not_there(patch: pytest.MonkeyPatch) -> None:
    """Plant a bug: the window group hits without the blocks below the hit position."""
    patch.setattr(
        WindowGroup,
        "fetch_hit",
        lambda self, hashes, limit, position: (
            min(limit // self.block_size, len(hashes) // self._ratio) * self.block_size
        ),
    )


@pytest.mark.requirement("E20")
@pytest.mark.parametrize(
    "plant",
    [
        pin_nothing,
        forget_pins_with_the_ranks,
        give_back_before_the_fence,
        believe_a_deadline,
        insert_a_block_that_lacks_its_first_positions,
        leave_before_the_state_is_saved,
        save_the_state_and_tell_nobody,
        load_no_state,
        export_nothing_of_later_chunks,
        keep_the_transfer_of_who_ended,
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
