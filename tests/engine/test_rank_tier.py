"""The thread of a KV tier, and the end of an engine process with a tier."""

from __future__ import annotations

import ctypes
import mmap
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

from tests.disagg.protocol.memory import KINDS, Group
from tests.scheduler.fake_runner import kv_config, submit
from tests.scheduler.tier_rig import TierRig
from tests.store.stores import open_store
from tests.support.slowness import deadline, until
from weft.common.clock import VirtualClock
from weft.common.errors import ConfigError, EngineDead
from weft.engine.tiers import engine_tier, open_tier, rank_tier
from weft.engine.tiers.block_copies import _POPULATE_WRITE, BlockCopies
from weft.engine.tiers.engine_tier import EngineTier
from weft.engine.tiers.group_tier import GroupTier
from weft.engine.tiers.open_tier import stores_that_open
from weft.engine.tiers.rank_tier import RankTier
from weft.ops.mapped import advise
from weft.store.errors import RecordError
from weft.store.host import HostLevel
from weft.store.records import Owner, RecordBuffer, RecordId
from weft.store.segments import SegmentStore
from weft.types.tiers import BlockOutcome, BlocksCopied, CopyBlocks, FlushStore, StoreChanged, copy_of


class OneByte:
    """Copies of blocks of one byte."""

    most_bytes = 1
    closed = False

    def record(self, kind: int, key: bytes) -> RecordId:
        return RecordId(kind, key)

    def writes(self, kind: int) -> bool:
        return True

    def mark(self) -> None:
        return

    def pin(self, memory: np.ndarray) -> None:
        return

    def settle(self) -> None:
        return

    def close(self) -> None:
        self.closed = True

    def out(self, kind: int, block: int, buffer: RecordBuffer, ready: object) -> int:
        return 1

    def into(self, record: RecordId, block: int, payload: np.ndarray) -> None:
        raise AssertionError("a block was filled")


def tier_of(
    opened: Callable[[], SegmentStore], *, copies: OneByte | None = None, leads: bool = True, **more: Any
) -> RankTier:
    made = cast(BlockCopies, copies or OneByte())
    return RankTier(made, lambda: [opened()], lambda work, *args: work(*args), leads=leads, **more)


class Pages(OneByte):
    """Copies of blocks of ``SIZE`` bytes, all equal to the number of the block."""

    SIZE = most_bytes = 1 << 18

    def __init__(self, *, writes: bool = True) -> None:
        self._writes = writes
        self.filled: dict[int, int] = {}
        self.prepared: list[tuple[int, int, int]] = []

    def prepare(self, kind: int, first: int, last: int) -> None:
        self.prepared.append((kind, first, last))

    def writes(self, kind: int) -> bool:
        return self._writes

    def parts_of(self, kind: int, parts: int) -> list[int]:
        return []

    def out(self, kind: int, block: int, buffer: RecordBuffer, ready: object) -> int:
        buffer.payload[: self.SIZE] = block
        return self.SIZE

    def into(self, record: RecordId, block: int, payload: np.ndarray) -> None:
        self.filled[block] = int(payload[0])


def by_hand(copies: Pages, stores: Any, host: HostLevel | None = None) -> RankTier:
    """Return a tier without a thread: ``turn`` executes one command."""
    tier = tier_of(lambda: stores[0], copies=copies, start=False, host=host)
    tier.stores = stores
    return tier


def outcomes(tier: RankTier, command: CopyBlocks) -> list[int]:
    """Execute a command. Return the outcome of each block."""
    tier.put(command)
    tier.turn(0.0)
    (done,) = [one for one in tier.take() if isinstance(one, BlocksCopied)]
    return list(done.outcomes)


def memory() -> HostLevel:
    return HostLevel(np.zeros(8 * Pages.SIZE, np.uint8), [Pages.SIZE], [1])


def blocks(count: int) -> list[tuple[int, int, bytes]]:
    return [(0, block, bytes([block]) * 16) for block in range(1, 1 + count)]


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


def test_a_store_that_cannot_be_opened_leaves_no_memory_pinned() -> None:
    def refused() -> SegmentStore:
        raise ConfigError("no such folder")

    copies = OneByte()
    tier = tier_of(refused, copies=copies)
    assert tier.wait(deadline(30))
    tier.close()
    assert copies.closed


def test_a_copy_that_does_not_end_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_tier, "_END_S", 0.05)
    stuck, begun = threading.Event(), threading.Event()
    tier = tier_of(lambda: open_store(tmp_path))
    tier._copies.out = lambda *_: begun.set() or (stuck.wait() and 1)  # type: ignore[method-assign]
    try:
        tier.put(copy_of(1, False, [(0, 1, bytes(16))]))
        assert begun.wait(deadline(30))
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
        (store,) = tier.stores
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


def test_a_flush_also_removes_blocks_that_came_to_host_memory_from_the_disk(tmp_path: Path) -> None:
    """The owner of a block goes along: a later flush by the salt leaves nothing in host memory."""
    first = by_hand(Pages(), [open_store(tmp_path)])
    for number, salt in enumerate(("tenant-7", "other")):
        assert outcomes(first, copy_of(1, False, [blocks(2)[number]], Owner(salt=salt))) == [
            BlockOutcome.DONE
        ]
    first.close()
    first.stores[0].close()
    copies, host = Pages(), memory()
    second = by_hand(copies, [open_store(tmp_path)], host)
    assert outcomes(second, copy_of(1, True, blocks(2))) == 2 * [BlockOutcome.DONE]
    assert copies.filled == {1: 1, 2: 2}
    assert host.stats().blocks == 2
    second.put(FlushStore(salt="tenant-7"))
    second.turn(0.0)
    assert [host.has(0, name) for _, _, name in blocks(2)] == [False, True]
    found = outcomes(second, copy_of(2, True, blocks(2)))
    assert found == [BlockOutcome.GONE, BlockOutcome.DONE]
    second.close()


def test_a_rank_whose_bytes_another_rank_writes_has_a_host_level_of_its_own() -> None:
    """Latents are equal on all ranks, and one rank writes the record. Without a disk, every rank must have
    the bytes in its host memory."""
    copies, host = Pages(writes=False), memory()
    tier = by_hand(copies, [], host)
    assert outcomes(tier, copy_of(1, False, blocks(2))) == 2 * [BlockOutcome.DONE]
    assert host.stats().blocks == 2
    assert outcomes(tier, copy_of(2, True, blocks(2))) == 2 * [BlockOutcome.DONE]
    assert copies.filled == {1: 1, 2: 2}
    tier.close()


def test_the_end_waits_for_a_load_of_several_reads(tmp_path: Path) -> None:
    """``close`` must not end the reading thread while a load still has reads to begin."""
    first = by_hand(Pages(), [open_store(tmp_path)])
    assert set(outcomes(first, copy_of(1, False, blocks(12)))) == {BlockOutcome.DONE}
    first.close()
    first.stores[0].close()
    copies, begun, ends = Pages(), threading.Event(), threading.Event()

    def into(record: RecordId, block: int, payload: np.ndarray) -> None:
        begun.set()
        assert ends.wait(deadline(30))

    copies.into = into  # type: ignore[method-assign]
    tier = tier_of(lambda: open_store(tmp_path), copies=copies)
    tier.put(copy_of(1, True, blocks(12)))
    assert begun.wait(deadline(30))
    closing = threading.Thread(target=tier.close)
    closing.start()
    until(lambda: not tier._commands.empty())
    ends.set()
    closing.join(deadline(30))
    assert not tier._thread.is_alive(), "the load waits for a thread that has ended"


@pytest.mark.parametrize("settles", [True, False])
def test_a_load_that_fails_unexpectedly_reserves_no_blocks(tmp_path: Path, settles: bool) -> None:
    """The command under way is answered, too, unless the device may still write to its blocks."""
    store = open_store(tmp_path)
    assert outcomes(by_hand(Pages(), [store]), copy_of(1, False, blocks(2))) == 2 * [BlockOutcome.DONE]

    def broken(*_: object) -> list[np.ndarray | RecordError]:
        raise ValueError("unexpected")

    store.check_run = broken  # type: ignore[method-assign]
    copies, calls = Pages(), list[int]()

    def settle() -> None:
        calls.append(1)
        if len(calls) > 1 and not settles:
            raise EngineDead("a GPU did not finish")

    copies.settle = settle  # type: ignore[method-assign]
    tier = tier_of(lambda: store, copies=copies)
    try:
        assert tier.wait(deadline(30))
        tier.put(copy_of(1, True, blocks(2)))
        tier.put(copy_of(2, True, blocks(2)))
        found = dict[int, list[int]]()

        def answered() -> bool:
            found.update(
                (one.job, list(one.outcomes)) for one in tier.take() if isinstance(one, BlocksCopied)
            )
            return 2 in found

        until(answered)
        off = 2 * [BlockOutcome.OFF]
        assert found == ({1: off, 2: off} if settles else {2: off})
    finally:
        tier.close()


def test_a_disk_that_fails_does_not_end_the_other_levels(tmp_path: Path) -> None:
    """A block that only the disk has is computed. ``OFF`` would end the whole tier."""
    host = memory()
    for count, near in ((1, host), (2, None)):
        stores = [open_store(tmp_path / f"{count}-{number}") for number in range(count)]
        tier = by_hand(Pages(), stores, near)
        assert outcomes(tier, copy_of(1, False, blocks(1))) == [BlockOutcome.DONE]
        host.flush(None, None, None)
        for store in stores[1:]:
            store.flush()
        stores[0]._turn_off(OSError("broken"))
        assert outcomes(tier, copy_of(2, True, blocks(1))) == [BlockOutcome.GONE]
        assert outcomes(tier, copy_of(3, False, blocks(2))) == 2 * [BlockOutcome.DONE]
        tier.close()


def test_a_level_that_cannot_be_opened_leaves_the_others(tmp_path: Path) -> None:
    def refused() -> SegmentStore:
        raise ConfigError("no such folder")

    def opened() -> SegmentStore:
        return open_store(tmp_path)

    assert len(stores_that_open([refused, opened])) == len(stores_that_open([opened, refused])) == 1
    with pytest.raises(ConfigError):
        stores_that_open([refused, refused])


def test_many_new_blocks_are_reported_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step loop applies each report: an object store may appear with a million blocks."""
    monkeypatch.setattr(rank_tier, "_MOST_CHANGES", 2)
    tier = by_hand(Pages(), [open_store(tmp_path)])
    assert outcomes(tier, copy_of(1, False, blocks(5))) == 5 * [BlockOutcome.DONE]
    found = [blocks(1)[0][2], blocks(2)[1][2]]
    for _ in range(3):
        tier.turn(0.0)
        new = [one.added for one in tier.take() if isinstance(one, StoreChanged)]
        assert len(new) <= 1
        assert all(len(added) <= 2 for added in new)
        found += [key for added in new for _, key in added]
    assert found == [key for _, _, key in blocks(5)]
    tier.close()


def test_commands_without_end_do_not_hide_other_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_tier, "_TURN_S", 0.0)
    first, second = (by_hand(Pages(), [open_store(tmp_path)]) for _ in range(2))
    assert outcomes(first, copy_of(1, False, blocks(1))) == [BlockOutcome.DONE]
    first.stores[0].close()
    for job in range(2):  # both wait: the thread is never idle
        second.put(copy_of(job, True, []))
    second.turn(0.0)
    assert any(isinstance(one, StoreChanged) for one in second.take())
    first.close()
    second.close()


def with_records(folder: Path, count: int) -> Path:
    """Return ``folder`` with a store of ``count`` records."""
    tier = by_hand(Pages(), [open_store(folder)])
    assert set(outcomes(tier, copy_of(1, False, blocks(count)))) == {BlockOutcome.DONE}
    tier.close()
    tier.stores[0].close()
    return folder


def test_an_idle_tier_prepares_memory_for_the_blocks_of_the_store(tmp_path: Path) -> None:
    """A few blocks per turn, commands first. The turns do not look at the folder
    each time."""
    copies, store = Pages(), open_store(with_records(tmp_path, 11))
    tier = tier_of(lambda: store, copies=copies, start=False, blocks=[50, 6])
    tier.stores, scans = [store], list[int]()
    store.scan = lambda: scans.append(1)  # type: ignore[method-assign]
    tier._prepared = tier._prepare()
    tier.turn(30.0)
    assert copies.prepared == [(0, 1, 4)]
    assert outcomes(tier, copy_of(1, True, blocks(2))) == 2 * [BlockOutcome.DONE]
    assert len(copies.prepared) == 2
    for _ in range(3):
        tier.turn(30.0)
    assert copies.prepared == [(0, 1, 4), (0, 5, 8), (0, 9, 11), (1, 1, 4), (1, 5, 6)]
    assert not scans
    tier.turn(0.0)
    assert len(copies.prepared) == 5
    assert scans
    tier.close()


def test_prepared_memory_is_at_most_half_of_the_available_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    config, runner = (type("Any", (), {})() for _ in range(2))
    config.ranks_beside = 2
    runner.kv = kv_config(blocks=64, window=8, window_blocks=20)
    monkeypatch.setattr(open_tier, "available_memory", lambda: 4 * 1000)
    found = [open_tier._blocks_to_prepare(config, runner, nbytes) for nbytes in ([1, 1], [10, 100], [100, 0])]
    assert found == [[32, 10], [32, 6], [10, 0]]


def test_a_sleep_ends_the_preparation(tmp_path: Path) -> None:
    """The memory that the sleep gives back must stay with the system. Also before the store is open."""
    copies, ready = Pages(), threading.Event()

    def slowly() -> SegmentStore:
        ready.wait()
        return open_store(with_records(tmp_path, 11))

    tier = tier_of(slowly, copies=copies, blocks=[100])
    try:
        tier.stop_preparing()
        ready.set()
        assert tier.wait(deadline(30))
        tier.put(copy_of(1, True, blocks(1)))
        until(lambda: [one for one in tier.take() if isinstance(one, BlocksCopied)])
        assert copies.filled
        assert not copies.prepared
    finally:
        ready.set()
        tier.close()


def resident(memory: torch.Tensor) -> list[bool]:
    """Return True for each page of ``memory`` that has memory of the system."""
    pages = (ctypes.c_ubyte * (memory.nbytes // mmap.PAGESIZE))()
    call = ctypes.CDLL(None).mincore
    assert call(ctypes.c_void_p(memory.data_ptr()), ctypes.c_size_t(memory.nbytes), pages) == 0
    return [bool(page & 1) for page in pages]


def test_prepared_blocks_have_memory_and_keep_their_contents() -> None:
    group = Group([KINDS["full"], KINDS["latent"]], 2, 1024, 12)
    maps, regions = list[mmap.mmap](), list[torch.Tensor]()
    for layout in group.layouts:
        maps.append(mmap.mmap(-1, -(-layout.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE))
        maps[-1].madvise(mmap.MADV_NOHUGEPAGE)
        regions.append(torch.frombuffer(maps[-1], dtype=torch.uint8))
    if not advise(regions[0].data_ptr(), regions[0].data_ptr() + 1, _POPULATE_WRITE):
        pytest.skip("this kernel prepares no memory")
    copies = BlockCopies(regions, group.dims, 1)
    buffer = RecordBuffer(copies.most_bytes)
    record = copies.record(0, bytes(16))
    payload = np.random.default_rng(0).integers(0, 256, copies.own_bytes[0], np.uint8)
    copies.into(record, 3, payload)
    copies.settle()
    before = [sum(resident(region)) for region in regions]
    copies.prepare(0, 2, 5)
    taken = [sum(resident(region)) - had for region, had in zip(regions, before, strict=True)]
    first = len(group.tensors(KINDS["full"]))
    assert not any(taken[first:])
    # 3 of 13 blocks, because block 3 had memory before; a few pages have bytes of two blocks.
    for region, pages in zip(regions[:first], taken[:first], strict=True):
        assert 0 <= pages - 3 * region.nbytes // 13 // mmap.PAGESIZE <= 8
    assert copies.out(0, 3, buffer) == len(payload)
    assert np.array_equal(buffer.payload[: len(payload)], payload)
    copies.prepare(0, 12, 12)  # the last block
    copies.close()
