"""Snapshots of recurrent states: creation, sharing and eviction."""

from __future__ import annotations

from array import array

import pytest

from weft.config.resolved import KVConfig, PoolSpec
from weft.config.spec import CacheSpec, StatePart
from weft.kv.caches import Caches, make_cache_groups
from weft.kv.hashing import HashChain, salted_root
from weft.kv.snapshots import SnapshotMarks, StateGroup, marks_for
from weft.types.plan import AllocSlot, LoadState, SaveState, SlotUpdate

BLOCK = 4
PARTS = (StatePart(name="state", shape=(2,), wide=True),)


def pool(blocks: int = 4, unit: int = BLOCK, stride: int = 0) -> PoolSpec:
    cache = CacheSpec(kind="state", layers=(0,), parts=PARTS, form="delta")
    return PoolSpec(cache=cache, block_size=unit, num_blocks=blocks, stride=stride)


def entries(
    kind: str = "full", blocks: int = 40, window: int = 0, block: int = BLOCK, ratio: int = 1
) -> PoolSpec:
    cache = CacheSpec(kind=kind, layers=(1,), width=4, window=window, ratio=ratio)  # type: ignore[arg-type]
    return PoolSpec(cache=cache, block_size=block, num_blocks=blocks)


def make(*pools: PoolSpec) -> Caches:
    kv = KVConfig(pools=pools, block_size=BLOCK, enable_prefix_caching=True, max_model_len=60, num_slots=8)
    return Caches(make_cache_groups(kv, 16), 60)


def state(blocks: int = 4, unit: int = BLOCK) -> StateGroup:
    return StateGroup(0, pool(blocks, unit), BLOCK)


def hashes_of(length: int, salt: str = "") -> list[bytes]:
    return HashChain(salted_root(salt), BLOCK).grow(array("i", range(length)), length)


def saved(kind: StateGroup, slot: int, key: bytes, step: int, keep: bool = True) -> int:
    """Save a snapshot. Return its block."""
    op = kind.save(slot, key, 0, keep, step)
    assert isinstance(op, SaveState)
    return op.block


# ---- one kind


def test_a_hit_is_the_longest_boundary_whatever_is_missing_before_it() -> None:
    kind, hashes = state(), hashes_of(40)
    for step, number in enumerate((1, 6)):
        saved(kind, 0, hashes[number], step)
        kind.committed(step)
    assert [kind.hit(hashes, limit) for limit in (7, 8, 27, 28, 40)] == [0, 8, 8, 28, 28]
    assert kind.hit(hashes[:6], 40) == 8
    assert kind.hit(hashes_of(40, "x"), 40) == 0


def test_hits_are_at_boundaries_of_all_kinds() -> None:
    kind, hashes = state(unit=12), hashes_of(40)
    saved(kind, 0, hashes[2], 0)  # of 12
    saved(kind, 0, hashes[3], 0)  # 16 positions: no boundary, so no snapshot
    kind.committed(0)
    assert kind.hit(hashes, 40) == 12


def test_a_snapshot_is_found_when_its_plan_has_committed() -> None:
    kind, hashes = state(), hashes_of(8)
    block = saved(kind, 0, hashes[1], 3)
    assert kind.hit(hashes, 8) == 0
    kind.committed(2)
    assert (kind.hit(hashes, 8), kind.available()) == (0, 3)
    kind.release(0, 2)  # the owner may end
    kind.committed(3)
    assert (kind.hit(hashes, 8), kind.available()) == (8, 4)
    (op,) = kind.acquire(5, hashes, 8, 9)
    assert op == LoadState(slot=5, kind=0, block=block)


def test_nothing_is_needed_and_nothing_taken_without_a_hit() -> None:
    kind, hashes = state(), hashes_of(40)
    assert (kind.needed(0, 40), kind.most(40), kind.least(40)) == (0, 0, 0)
    assert (
        kind.acquire(0, hashes, 0, 40) == kind.reserve(0, 40) == kind.grow([0], kind.short([0], [40])) == []
    )
    kind.insert(0, 40, hashes)
    assert (kind.available(), kind.cut(3, 17)) == (4, 17)


def test_snapshots_loaded_by_a_plan_in_flight_are_not_evicted() -> None:
    kind, hashes = state(blocks=2), hashes_of(40)
    first = saved(kind, 0, hashes[0], 0)
    kind.committed(0)
    kind.acquire(1, hashes, 4, 5)
    assert saved(kind, 2, hashes[1], 1) != first
    assert kind.save(3, hashes[2], 0, True, 1) is None  # one is being loaded, one being made
    kind.committed(1)
    kind.slide(1, 9, 2)  # step 1 has committed; step 2 names the slot too
    assert kind.available() == 1
    assert saved(kind, 3, hashes[2], 2) != first
    kind.committed(2)
    assert kind.available() == 2
    kind.slide(1, 13, 4)
    assert kind.available() == 2


@pytest.mark.parametrize("after", [0, 5])
def test_a_slot_that_ends_gives_back_what_it_loads(after: int) -> None:
    kind, hashes = state(), hashes_of(40)
    saved(kind, 0, hashes[0], 0)
    kind.committed(0)
    kind.acquire(1, hashes, 4, 5)
    assert kind.available() == 3
    kind.release(1, after)
    assert kind.available() == (4 if after == 0 else 3)
    kind.committed(5)
    assert kind.available() == 4


def test_the_least_recently_used_goes_first() -> None:
    kind, hashes = state(blocks=2), hashes_of(40)
    saved(kind, 0, hashes[0], 0)
    saved(kind, 0, hashes[1], 0)
    kind.committed(0)
    assert kind.save(0, hashes[0], 0, True, 1) is None  # exists already: only the use counts
    saved(kind, 0, hashes[2], 1)
    kind.committed(1)
    assert [kind.has(key) for key in hashes[:3]] == [True, False, True]


def test_only_the_newest_snapshot_of_a_decoding_sequence_is_kept() -> None:
    kind, hashes = state(blocks=8), hashes_of(40)
    saved(kind, 0, hashes[0], 0)
    for step, number in enumerate((1, 2, 3), 1):
        saved(kind, 0, hashes[number], step, keep=False)
        kind.committed(step)
    assert [kind.has(key) for key in hashes[:4]] == [True, False, False, True]
    kind.release(0, 3)  # the next turn of the chat may come
    saved(kind, 0, hashes[4], 4, keep=False)  # another sequence of the slot
    kind.committed(4)
    assert [kind.has(key) for key in hashes[3:5]] == [True, True]


def test_a_snapshot_that_was_of_use_to_others_is_not_replaced() -> None:
    kind, hashes = state(blocks=8), hashes_of(40)
    saved(kind, 0, hashes[0], 0, keep=False)
    saved(kind, 1, hashes[5], 0, keep=False)
    kind.committed(0)
    kind.acquire(2, hashes, 4, 5)
    assert kind.save(3, hashes[5], 0, True, 1) is None
    for slot, number in ((0, 1), (1, 6)):
        saved(kind, slot, hashes[number], 1, keep=False)
    kind.committed(1)
    assert all(kind.has(hashes[number]) for number in (0, 1, 5, 6))


def test_siblings_that_say_the_same_make_one_snapshot() -> None:
    kind, hashes = state(blocks=8), hashes_of(40)
    for slot in (0, 1):
        saved(kind, slot, hashes[0], 0, keep=False)  # neither knows of the other's yet
    kind.committed(0)
    assert kind.available() == 8
    assert len(kind.pool._cached) == 1
    for slot in (0, 1):
        kind.save(slot, hashes[1], 0, False, 1)
    kind.committed(1)
    assert [kind.has(key) for key in hashes[:2]] == [False, True]
    kind.release(0, 1)
    kind.release(1, 1)


def test_a_step_that_went_wrong_leaves_no_snapshot() -> None:
    kind, hashes = state(), hashes_of(40)
    saved(kind, 0, hashes[0], 1)
    saved(kind, 1, hashes[1], 1)
    kind.spoil(0)
    kind.committed(1)
    assert [kind.has(key) for key in hashes[:2]] == [False, True]
    assert kind.available() == 4


# ---- all kinds


def test_every_kind_agrees_on_a_hit() -> None:
    """Full entries, sliding ones, compressed ones and states: each loses something else."""
    caches = make(
        entries(), entries("latent", window=6), entries("compressed", block=12, ratio=6), pool(unit=12)
    )
    assert caches.unit == 12
    full, sliding, compressed, states = caches.kinds
    assert isinstance(states, StateGroup)
    hashes = hashes_of(56)
    caches.acquire(0, hashes, 0, 56)
    full.insert(0, 52, hashes)
    sliding.insert(0, 56, hashes)
    compressed.insert(0, 56, hashes)
    assert caches.hit(hashes, 55) == 0
    assert caches.marks(hashes, 57, 0) == SnapshotMarks(12, 12, 57, (48,))
    for boundary in (12, 36):
        assert len(caches.save(0, hashes[boundary // 4 - 1], 0, True, 0) or []) == 1
    caches.committed(0)
    assert [caches.hit(hashes, limit) for limit in (11, 12, 35, 36, 55)] == [0, 12, 12, 36, 36]
    assert caches.marks(hashes, 40, 36) == SnapshotMarks(12, 12, 40, ())
    ops = caches.acquire(1, hashes, 36, 40)
    assert sum(isinstance(op, LoadState) for op in ops) == 1
    assert caches.needed(2, 40) == [10, 6, 4, 0]
    assert caches.reserved(37) == 40
    assert not any(isinstance(op, AllocSlot) for op in ops)
    for slot in (0, 1):
        caches.release(slot, 0)
    assert caches.free_blocks() == (40, 40, 40, 4)
    assert caches.usage() == 0.0


def test_a_model_of_states_alone() -> None:
    caches = make(pool())
    hashes = hashes_of(20)
    assert caches.acquire(0, hashes, 0, 20) == []
    assert caches.fits(caches.needed(0, 1000))
    assert caches.reserved(5) > 1 << 60
    assert caches.guaranteed([60] * 100)
    assert caches.usage() == 0.0
    ops = caches.save(0, hashes[3], 0, True, 0)
    assert ops == [SaveState(slot=0, kind=0, block=1)]
    caches.committed(0)
    assert caches.hit(hashes, 19) == 16


def test_two_state_kinds_are_saved_together_or_not_at_all() -> None:
    caches = make(entries(), pool(blocks=2), pool(blocks=1))
    hashes = hashes_of(20)
    ops: list[SlotUpdate] = caches.save(0, hashes[0], 1, True, 0) or []
    assert ops == [SaveState(slot=0, kind=kind, block=1, back=1) for kind in (1, 2)]
    assert caches.save(1, hashes[1], 0, True, 0) is None
    caches.committed(0)
    assert caches.save(1, hashes[0], 0, True, 1) == []
    assert len(caches.save(1, hashes[1], 0, True, 1) or []) == 2


def test_no_marks_where_there_is_nothing_to_gain() -> None:
    hashes = hashes_of(20)
    assert make(entries()).marks(hashes, 20, 0) is None
    assert make(entries(), pool(blocks=0)).marks(hashes, 20, 0) is None
    assert make(entries(), pool()).marks([], 20, 0) is None


# ---- where


@pytest.mark.parametrize(
    ("known", "num_hit", "branch", "ends"),
    [
        (1000, 0, 0, (960,)),
        (1024, 0, 0, (960,)),  # the last id is always computed again
        (1025, 0, 0, (1024,)),
        (1000, 0, 650, (640, 960)),
        (1000, 640, 650, (960,)),
        (1000, 0, 999, (960,)),
        (1000, 0, 40, (960,)),
        (1000, 896, 0, (960,)),
        (1000, 960, 960, ()),
        (64, 0, 0, ()),
        (65, 0, 0, (64,)),
    ],
)
def test_ends_of_chunks(known: int, num_hit: int, branch: int, ends: tuple[int, ...]) -> None:
    assert marks_for(64, 1024, known, num_hit, branch) == SnapshotMarks(64, 1024, known, ends)


def test_an_end_that_saves_little_is_left_out() -> None:
    assert marks_for(16, 1024, 1000, 944, 0).ends == ()
    assert marks_for(16, 1024, 1000, 928, 0).ends == (992,)
    assert marks_for(16, 0, 1000, 944, 0).ends == (992,)


def test_chunks_end_at_marks_and_where_a_snapshot_is_due() -> None:
    marks = SnapshotMarks(64, 1024, 5000, (640, 4992))
    assert marks.cut(0, 2048, 0) == 640
    assert marks.cut(0, 640, 0) == 640
    assert marks.cut(0, 100, 0) == 100
    assert marks.cut(640, 1400, 640) == 1400  # none is due yet
    assert marks.cut(640, 1700, 640) == 1664
    assert marks.cut(1660, 1700, 640) == 1664
    assert marks.cut(1664, 1700, 640) == 1700  # a chunk must go on
    assert marks.cut(4000, 5000, 3900) == 4992
    assert marks.cut(4992, 5000, 4992) == 5000


def test_snapshots_are_wanted_at_marks_when_due_and_while_decoding() -> None:
    marks = SnapshotMarks(16, 1024, 5000, (640,))
    assert marks.wants(640, 600)
    assert not marks.wants(1648, 640)
    assert marks.wants(1664, 640)
    assert not marks.wants(5008, 4960)
    assert marks.wants(5024, 4960)
    assert SnapshotMarks(128, 1024, 100, ()).wants(128, 0)
