"""Planted bugs: the checks behind the random loads must detect each bug.

Without a planted bug the same loads pass: ``test_random.py``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import numpy as np
import pytest

from tests.scheduler.harness import random_run
from weft.common.errors import WeftError
from weft.kv import hashing
from weft.kv.cache_groups import FullGroup, WindowGroup
from weft.kv.pool import BlockPool
from weft.kv.slots import SlotTable
from weft.kv.snapshots import StateGroup
from weft.scheduler import commit
from weft.scheduler.sequence import Sequence
from weft.scheduler.slot_columns import SlotColumns
from weft.scheduler.state import SchedulerState
from weft.types.plan import SlotUpdate, StepPlan

SEEDS = range(40)
SEEN_BY = {
    "save_what_is_not_known": 10,
    "insert_a_snapshot_at_once": 10,
    "forget_that_a_snapshot_names_its_slot": 10,
    "recompute_nothing": 3,
    "save_too_late": 24,
    "name_a_snapshot_wrongly": 13,
    "load_nothing": 5,
}
"""Bug -> the seed that detected the bug before. This seed is tried first."""
_release, _free_slot, _first_read = BlockPool.release, SlotTable.release, WindowGroup._first_read
_full_hit, _slide = FullGroup.hit, WindowGroup.slide
_save, _acquire = StateGroup.save, StateGroup.acquire


def free_blocks_at_once(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(BlockPool, "release", lambda self, block, after_step: _release(self, block, -1))


def free_slots_at_once(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SlotTable, "release", lambda self, slot, after_step: _free_slot(self, slot, -1))


def slide_too_far(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(WindowGroup, "_first_read", lambda self, position: _first_read(self, position + 2))


def hash_without_parent(patch: pytest.MonkeyPatch) -> None:
    chained = hashing.block_hash
    patch.setattr(hashing, "block_hash", lambda parent, tokens, media=(): chained(b"", tokens, media))


def recompute_nothing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(FullGroup, "hit", lambda self, hashes, limit: _full_hit(self, hashes, limit + 1))


def insert_before_commit(patch: pytest.MonkeyPatch) -> None:
    def insert(self: FullGroup, slot: int, committed: int, hashes: list[bytes]) -> None:
        table = self._tables[slot]
        for entry in range(min(len(hashes) // self._ratio, len(table.blocks))):
            if table.blocks[entry]:
                self.pool.insert(table.blocks[entry], hashes[(entry + 1) * self._ratio - 1])

    patch.setattr(FullGroup, "insert", insert)
    whole = SchedulerState.hashes
    patch.setattr(
        SchedulerState, "hashes", lambda self, sequence, upto: whole(self, sequence, len(sequence.tokens))
    )


def forget_to_free(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SlotTable, "announce", lambda self: [])


def share_what_is_written(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(BlockPool, "take", lambda self: self._free[-1] if self._free else next(iter(self._cached)))


def run_past_the_limit(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Sequence, "ending", lambda self: None)


def miss_an_end(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SlotColumns, "may_end", lambda self, slots, tokens: np.zeros(len(slots), bool))


def commit_the_dead(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(commit, "_alive", lambda state, segment: np.ones(segment.rows, bool))


def grow_without_asking(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(FullGroup, "short", lambda self, slots, upto: [0] * len(slots))


def tell_of_quiet_rows_only(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(commit, "_merge", lambda quiet, plain, output: plain)


def save_what_is_not_known(patch: pytest.MonkeyPatch) -> None:
    snapshots = SchedulerState.snapshots

    def saving(self: SchedulerState, step: int) -> list[SlotUpdate]:
        in_flight, self.in_flight = self.in_flight, deque()
        ops = snapshots(self, step)
        self.in_flight = in_flight
        return ops

    patch.setattr(SchedulerState, "snapshots", saving)


def save_the_last_state(patch: pytest.MonkeyPatch) -> None:
    """Plant a bug: save the newest state for every request, as if each boundary were the end of a row."""
    patch.setattr(
        StateGroup,
        "save",
        lambda self, slot, key, back, keep, step: _save(self, slot, key, 0, keep, step),
    )


def save_too_late(patch: pytest.MonkeyPatch) -> None:
    """Plant a bug: save after the next row, which has overwritten the state."""
    launched = SchedulerState.launched

    def forgetting(self: SchedulerState, plan: StepPlan) -> None:
        launched(self, plan)
        self.columns.exact[plan.prefill.slot] = 4

    patch.setattr(SchedulerState, "launched", forgetting)


def insert_a_snapshot_at_once(patch: pytest.MonkeyPatch) -> None:
    def saving(
        self: StateGroup, slot: int, key: bytes, back: int, keep: bool, step: int
    ) -> SlotUpdate | None:
        op = _save(self, slot, key, back, keep, step)
        if op is not None:
            self.pool.insert(op.block, key)  # type: ignore[union-attr]
        return op

    patch.setattr(StateGroup, "save", saving)


def name_a_snapshot_wrongly(patch: pytest.MonkeyPatch) -> None:
    hit = StateGroup.hit

    def later(self: StateGroup, hashes: list[bytes], limit: int) -> int:
        return hit(self, [b"", *hashes], limit)

    patch.setattr(StateGroup, "hit", later)
    patch.setattr(
        StateGroup,
        "acquire",
        lambda self, slot, hashes, num_hit, upto: _acquire(self, slot, [b"", *hashes], num_hit, upto),
    )


def load_nothing(patch: pytest.MonkeyPatch) -> None:
    def silent(self: StateGroup, slot: int, hashes: list[bytes], num_hit: int, upto: int) -> list[SlotUpdate]:
        _acquire(self, slot, hashes, num_hit, upto)
        return []

    patch.setattr(StateGroup, "acquire", silent)


def forget_that_a_snapshot_names_its_slot(patch: pytest.MonkeyPatch) -> None:
    snapshot = SchedulerState._snapshot

    def saving(self: SchedulerState, slot: int, back: int, step: int) -> list[SlotUpdate]:
        last = int(self.columns.last_step[slot])
        ops = snapshot(self, slot, back, step)
        self.columns.last_step[slot] = last
        return ops

    patch.setattr(SchedulerState, "_snapshot", saving)


DEPTH_2 = [
    free_blocks_at_once,
    free_slots_at_once,
    save_what_is_not_known,
    insert_a_snapshot_at_once,
    forget_that_a_snapshot_names_its_slot,
]
ANY_DEPTH = [
    slide_too_far,
    hash_without_parent,
    recompute_nothing,
    insert_before_commit,
    forget_to_free,
    share_what_is_written,
    run_past_the_limit,
    miss_an_end,
    commit_the_dead,
    grow_without_asking,
    tell_of_quiet_rows_only,
    save_too_late,
    name_a_snapshot_wrongly,
    load_nothing,
]
DEPTH_1 = [save_the_last_state]
"""Bugs that only show when an earlier state is requested: with drafts, one step in flight."""


@pytest.mark.parametrize("plant", DEPTH_2 + ANY_DEPTH)
def test_planted_bug_is_seen(plant: Callable[[pytest.MonkeyPatch], None]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        plant(patch)
        first = SEEN_BY.get(plant.__name__, 0)
        assert any(_fails(seed, 2) for seed in (first, *SEEDS))


@pytest.mark.parametrize("plant", DEPTH_1)
def test_planted_bug_is_seen_one_step_at_a_time(plant: Callable[[pytest.MonkeyPatch], None]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        plant(patch)
        assert any(_fails(seed, 1) for seed in SEEDS)


def _fails(seed: int, depth: int) -> bool:
    try:
        random_run(seed, depth)
    except (AssertionError, AttributeError, WeftError, KeyError, IndexError):
        return True
    return False
