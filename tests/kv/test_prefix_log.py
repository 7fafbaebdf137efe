"""The log of a pool's index."""

from __future__ import annotations

import random

import pytest

from weft.kv.pool import NULL_BLOCK, BlockPool


def split(keys: bytes) -> set[bytes]:
    return {keys[at : at + 16] for at in range(0, len(keys), 16)}


@pytest.mark.requirement("E32")
def test_changes_replayed_give_the_index_whatever_happens() -> None:
    """Insertion, eviction, removal and reset happen at random, with reports in between."""
    rng = random.Random(5)
    pool = BlockPool(6)
    names = [bytes([n]) * 16 for n in range(20)]
    held: list[int] = []
    pool.insert(pool.take(), names[19])  # before anybody follows
    log = pool.follow()
    assert pool.follow() is log
    known = set(log.keys)
    assert known == {names[19]}
    assert log.take() == (b"", b"")
    changes = 0
    for _ in range(3000):
        kind = rng.random()
        if kind < 0.4 and pool.available():
            held.append(pool.take())
            if rng.random() < 0.8:
                pool.insert(held[-1], rng.choice(names))
        elif kind < 0.8 and held:
            pool.release(held.pop(rng.randrange(len(held))), -1)
        elif kind < 0.9:
            pool.forget(rng.choice(names))
        elif kind < 0.91:
            pool.reset()
            held.clear()
        if rng.random() < 0.2:
            added, removed = log.take()
            assert not split(added) & known
            assert split(removed) <= known
            known = (known - split(removed)) | split(added)
            assert known == {name for name in names if pool.find(name) != NULL_BLOCK}
            assert set(log.keys) == known
            changes += bool(added or removed)
    assert changes > 200
