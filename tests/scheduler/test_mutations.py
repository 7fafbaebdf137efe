"""Planted bugs: the checker behind the random loads must see each of them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from tests.scheduler.harness import random_run
from weft.common.errors import WeftError
from weft.kv import hashing
from weft.kv.kinds import FullKind, WindowKind
from weft.kv.pool import BlockPool
from weft.kv.slots import SlotTable
from weft.scheduler import commit
from weft.scheduler.book import Book
from weft.scheduler.columns import Columns
from weft.scheduler.sequence import Sequence

SEEDS = range(40)
_release, _free_slot, _first_read = BlockPool.release, SlotTable.release, WindowKind._first_read
_full_hit, _slide = FullKind.hit, WindowKind.slide


def free_blocks_at_once(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(BlockPool, "release", lambda self, block, after_step: _release(self, block, -1))


def free_slots_at_once(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SlotTable, "release", lambda self, slot, after_step: _free_slot(self, slot, -1))


def slide_too_far(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(WindowKind, "_first_read", lambda self, position: _first_read(self, position + 2))


def hash_without_parent(patch: pytest.MonkeyPatch) -> None:
    chained = hashing.block_hash
    patch.setattr(hashing, "block_hash", lambda parent, tokens, media=(): chained(b"", tokens, media))


def recompute_nothing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(FullKind, "hit", lambda self, hashes, limit: _full_hit(self, hashes, limit + 1))


def publish_before_commit(patch: pytest.MonkeyPatch) -> None:
    def publish(self: FullKind, slot: int, committed: int, hashes: list[bytes]) -> None:
        table = self._tables[slot]
        for entry in range(min(len(hashes) // self._ratio, len(table.blocks))):
            if table.blocks[entry]:
                self._pool.publish(table.blocks[entry], hashes[(entry + 1) * self._ratio - 1])

    patch.setattr(FullKind, "publish", publish)
    whole = Book.hashes
    patch.setattr(Book, "hashes", lambda self, sequence, upto: whole(self, sequence, len(sequence.tokens)))


def forget_to_free(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SlotTable, "announce", lambda self: [])


def share_what_is_written(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(BlockPool, "take", lambda self: self._free[-1] if self._free else next(iter(self._cached)))


def run_past_the_limit(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Sequence, "ending", lambda self: None)


def miss_an_end(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Columns, "may_end", lambda self, slots, tokens: np.zeros(len(slots), bool))


def commit_the_dead(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(commit, "_alive", lambda book, segment: np.ones(segment.rows, bool))


def grow_without_asking(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(FullKind, "short", lambda self, slots, upto: [0] * len(slots))


def tell_of_quiet_rows_only(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(commit, "_merge", lambda quiet, plain, told: plain)


DEPTH_2 = [free_blocks_at_once, free_slots_at_once]
ANY_DEPTH = [
    slide_too_far,
    hash_without_parent,
    recompute_nothing,
    publish_before_commit,
    forget_to_free,
    share_what_is_written,
    run_past_the_limit,
    miss_an_end,
    commit_the_dead,
    grow_without_asking,
    tell_of_quiet_rows_only,
]


@pytest.mark.parametrize("plant", DEPTH_2 + ANY_DEPTH)
def test_planted_bug_is_seen(plant: Callable[[pytest.MonkeyPatch], None]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        plant(patch)
        assert any(_fails(seed) for seed in SEEDS)


def test_nothing_is_seen_without_one() -> None:
    assert not any(_fails(seed) for seed in SEEDS)


def _fails(seed: int) -> bool:
    try:
        random_run(seed, 2)
    except (AssertionError, AttributeError, WeftError, KeyError, IndexError):
        return True
    return False
