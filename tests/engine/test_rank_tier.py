"""The thread of a KV tier, and the end of an engine process with a tier."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from tests.scheduler.fake_runner import kv_config, submit
from tests.scheduler.tier_rig import TierRig
from tests.store.stores import open_store
from weft.common.clock import VirtualClock
from weft.common.errors import EngineDead
from weft.engine.tiers import engine_tier, rank_tier
from weft.engine.tiers.block_copies import BlockCopies
from weft.engine.tiers.engine_tier import EngineTier
from weft.engine.tiers.group_tier import GroupTier
from weft.engine.tiers.rank_tier import RankTier
from weft.store.records import RecordBuffer, RecordId
from weft.store.segments import SegmentStore
from weft.types.tiers import BlocksCopied, copy_of


class OneByte:
    """Copies of blocks of one byte."""

    most_bytes = 1

    def record(self, kind: int, key: bytes) -> RecordId:
        return RecordId(kind, key)

    def writes(self, kind: int) -> bool:
        return True

    def mark(self) -> None:
        return

    def settle(self) -> None:
        return

    def close(self) -> None:
        return

    def out(self, kind: int, block: int, buffer: RecordBuffer, ready: object) -> int:
        return 1

    def into(self, record: RecordId, block: int, payload: np.ndarray) -> None:
        raise AssertionError("a block was filled")


def tier_of(opened: Callable[[], SegmentStore], *, leads: bool = True) -> RankTier:
    copies = cast(BlockCopies, OneByte())
    return RankTier(copies, opened, lambda work, *args: work(*args), leads=leads)


def until(found: Callable[[], Any]) -> None:
    end = time.monotonic() + 30
    while not found():
        assert time.monotonic() < end
        time.sleep(0.002)


def test_a_store_that_opens_slowly_does_not_stop_another_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The digest of large weights takes minutes. Commands from before ``stop_all`` are dropped; later
    commands are carried out."""
    monkeypatch.setattr(rank_tier, "_END_S", 0.05)
    ready = threading.Event()

    def slowly() -> SegmentStore:
        ready.wait()
        return open_store(tmp_path)

    tier = tier_of(slowly)
    try:
        tier.put(copy_of(1, True, [(0, 1, bytes(16))]))
        tier.stop_all()
        tier.put(copy_of(2, False, []))
        ready.set()
        jobs = list[int]()
        until(lambda: jobs.extend(one.job for one in tier.take() if isinstance(one, BlocksCopied)) or jobs)
        assert jobs == [2]
    finally:
        ready.set()
        tier.close()


def test_a_copy_that_does_not_end_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_tier, "_END_S", 0.05)
    stuck, begun = threading.Event(), threading.Event()
    tier = tier_of(lambda: open_store(tmp_path))
    tier._copies.out = lambda *_: begun.set() or (stuck.wait() and 1)  # type: ignore[method-assign]
    try:
        tier.put(copy_of(1, False, [(0, 1, bytes(16))]))
        assert begun.wait(30)
        with pytest.raises(EngineDead, match="does not stop"):
            tier.stop_all()
    finally:
        stuck.set()
        tier.close()


def test_a_rank_that_reports_no_changes_collects_none(tmp_path: Path) -> None:
    tier = tier_of(lambda: open_store(tmp_path), leads=False)
    try:
        tier.put(copy_of(1, False, [(0, block, bytes([block]) * 16) for block in range(1, 9)]))
        until(tier.take)
        store = tier.store
        assert store is not None
        assert store.stats().written == 8
        until(lambda: not store._index._added)
    finally:
        tier.close()


def test_a_slow_disk_holds_the_end_for_a_limited_time() -> None:
    rig = TierRig(kv_config(), mode="all")
    rig.loads.book._rate = 1e-3  # nothing may be written
    rig.submit(submit(0, [7, 3] * 16))
    while rig.scheduler.has_work():
        rig.step()
    rig.ask()
    assert rig.loads.moving
    clock = VirtualClock()
    ranks = type("Ranks", (), {"wait": lambda self, seconds: None, "take": lambda self: []})()
    tier = EngineTier(rig.loads, cast(GroupTier, ranks), clock)
    assert tier.moving
    clock.advance_to(engine_tier.FLUSH_S + 1.0)
    assert not tier.moving
    tier.finish()
