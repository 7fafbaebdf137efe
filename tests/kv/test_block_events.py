"""Events of a pool's index: runs of new blocks, blocks of several hashes, images, and the end of a cache."""

from __future__ import annotations

import random
from array import array
from dataclasses import dataclass, field

import pytest

from weft.common.errors import EngineDead
from weft.kv.block_events import BlockEvents, Cleared, Removed, Stored
from weft.kv.hashing import HashChain, media_keys, salted_root
from weft.kv.pool import BlockPool
from weft.types.media_item import MediaItem

BASE = 4


@dataclass
class Sequence:
    tokens: array[int]
    salt: str = ""
    adapter: str = ""
    media: tuple[MediaItem, ...] = ()
    hashes: list[bytes] = field(default_factory=list)

    def __post_init__(self) -> None:
        chain = HashChain(salted_root(self.salt), BASE, media_keys(self.media, BASE))
        self.hashes = chain.grow(self.tokens, len(self.tokens))


def tokens(count: int, seed: int = 0) -> array[int]:
    return array("i", [random.Random(seed + i).randrange(100) for i in range(count)])


def test_a_run_of_new_blocks_is_one_event() -> None:
    one = Sequence(tokens(4 * BASE))
    events = BlockEvents(BASE, BASE)
    for key in (one.hashes[0], one.hashes[1], one.hashes[3]):  # block 2 was in the index already
        events.added(key)
    events.describe(one, one.hashes)
    first, last = events.take()
    assert first == Stored(one.hashes[:2], None, one.tokens[: 2 * BASE].tolist(), [None, None])
    assert last == Stored([one.hashes[3]], one.hashes[2], one.tokens[3 * BASE :].tolist(), [None])
    assert events.take() == []


def test_blocks_of_several_hashes() -> None:
    """A block of 8 positions has the hash of its second base block, and the hash before as parent."""
    one = Sequence(tokens(5 * BASE))
    events = BlockEvents(2 * BASE, BASE)
    events.added(one.hashes[3])
    events.describe(one, one.hashes)
    assert events.take() == [
        Stored([one.hashes[3]], one.hashes[1], one.tokens[2 * BASE : 4 * BASE].tolist(), [None])
    ]


def test_images_and_salt_are_extra_keys() -> None:
    """The image covers positions 6 to 13; a block has 8 positions."""
    image = MediaItem(key=bytes(range(16)), start=6, count=8, grid=(1, 2, 2))
    one = Sequence(tokens(6 * BASE), salt="s", media=(image,))
    events = BlockEvents(2 * BASE, BASE)
    for key in one.hashes[1::2]:
        events.added(key)
    events.describe(one, one.hashes)
    (stored,) = events.take()
    assert isinstance(stored, Stored)
    name = bytes(range(16)).hex() + "0" * 32
    assert stored.extra == [((name, 6), "s"), ((name, -2),), None]


def test_groups_at_other_times_of_a_video_have_other_keys() -> None:
    names = set()
    for lag in (None, 0, 1):
        item = MediaItem(key=bytes(range(16)), start=0, count=BASE, grid=(1, 2, 2), lag=lag)
        one = Sequence(tokens(BASE), media=(item,))
        events = BlockEvents(BASE, BASE)
        events.added(one.hashes[0])
        events.describe(one, one.hashes)
        (stored,) = events.take()
        assert isinstance(stored, Stored)
        (found,) = stored.extra[0] or ()
        assert isinstance(found, tuple)
        assert (len(found[0]), found[1]) == (64, 0)
        names.add(found[0])
    assert len(names) == 3


def test_the_log_of_a_pool_feeds_the_events() -> None:
    one = Sequence(tokens(2 * BASE))
    pool = BlockPool(2)
    events = pool.follow().record(BASE, BASE)
    assert pool.follow().record(BASE, BASE) is events
    for key in one.hashes:
        block = pool.take()
        pool.insert(block, key)
        pool.release(block, -1)
    events.describe(one, one.hashes)
    pool.take()  # evicts the oldest block
    stored, removed = events.take()
    assert isinstance(stored, Stored)
    assert removed == Removed(one.hashes[0])
    pool.reset()
    assert events.take() == [Cleared()]
    assert not pool.follow().keys


def test_a_key_of_another_sequence_is_an_error() -> None:
    events = BlockEvents(BASE, BASE)
    events.added(b"x" * 16)
    with pytest.raises(EngineDead, match="without its sequence"):
        events.describe(one := Sequence(tokens(BASE)), one.hashes)
