"""Places of adapters: the longest unused adapter leaves, and no sequence starves."""

from __future__ import annotations

import random
from array import array

import pytest

from tests.scheduler.fake_runner import kv_config
from tests.scheduler.test_transfers import Side, key_of
from weft.common.errors import InvalidRequest
from weft.scheduler.adapters import AdapterBook
from weft.scheduler.sequence import Sequence
from weft.types.messages import Submit
from weft.types.plan import HoldAdapter, PlaceAdapter, ReleaseAdapter, SlotUpdate
from weft.types.sampling import TokenParams
from weft.types.transfer import ReserveTransfer


class World:
    """A book, with the contents of the places as a rank sees the updates."""

    def __init__(self, places: int, *digests: str) -> None:
        self.held: set[str] = set()
        self.places: dict[int, str] = {}
        self.book = AdapterBook(places, self.apply)
        self.live: list[Sequence] = []
        self.ready: list[int] = []
        for digest in digests:
            self.book.load(digest, f"/{digest}")

    def apply(self, op: SlotUpdate) -> None:
        if isinstance(op, HoldAdapter):
            self.held.add(op.digest)
        elif isinstance(op, PlaceAdapter):
            assert op.digest in self.held
            assert all(one.place != op.place for one in self.live), "a place with users is overwritten"
            self.places[op.place] = op.digest
        elif isinstance(op, ReleaseAdapter):
            self.held.remove(op.digest)

    def start(self, number: int, digest: str) -> Sequence:
        submit = Submit(
            sequence=number, request=number, seed=0, prompt_ids=b"", params=TokenParams(), adapter=digest
        )
        one = Sequence(submit, array("i", [1]), 1, 9, number)
        self.book.arrive(one)
        if self.book.take(one):
            self.ready.append(number)
        self.live.append(one)
        return one

    def end(self, one: Sequence) -> None:
        self.live.remove(one)
        self.ready += [ready.id for ready in self.book.leave(one)]
        self.check()

    def check(self) -> None:
        for one in self.live:
            assert one.place < 0 or self.places[one.place] == one.adapter


def test_the_longest_unused_adapter_leaves() -> None:
    world = World(2, "a", "b", "c")
    for number, digest in enumerate("aba"):
        world.end(world.start(number, digest))
    world.start(3, "c")
    assert sorted(world.places.values()) == ["a", "c"]
    assert world.book.placed == 3


def test_a_busy_adapter_starves_nobody() -> None:
    world = World(1, "a", "b")
    first = world.start(0, "a")
    waits = world.start(1, "b")
    behind = world.start(2, "a")
    assert world.start(3, "").place == -1
    assert world.ready == [0, 3]
    world.end(first)
    assert world.ready == [0, 3, 1]
    world.end(waits)
    assert world.ready == [0, 3, 1, 2]
    assert behind.place == 0


def test_a_pinned_adapter_keeps_its_place() -> None:
    world = World(2, "b", "c")
    world.book.load("a", "/a", pinned=True)
    for number, digest in enumerate("abcb"):
        world.end(world.start(number, digest))
    assert "a" in world.places.values()
    with pytest.raises(InvalidRequest, match="at most 1"):
        world.book.load("b", "/b", pinned=True)
    world.book.load("a", "/a")
    for number, digest in enumerate("bc"):
        world.end(world.start(10 + number, digest))
    assert "a" not in world.places.values()


def test_a_dropped_adapter_lives_until_its_last_sequence() -> None:
    world = World(1, "a")
    one, two = world.start(0, "a"), world.start(1, "a")
    world.book.drop("a")
    assert not world.book.accepts("a")
    world.end(one)
    assert world.held == {"a"}
    world.end(two)
    assert world.held == set()
    world.book.load("b", "/b")
    assert world.start(2, "b").place == 0


def test_random_requests() -> None:
    draw = random.Random(5)
    world = World(3, *"abcdefg")
    for number in range(400):
        if draw.random() < 0.55:
            digest = draw.choice("abcdefg")
            if world.book.accepts(digest):
                world.start(number, digest)
        elif world.live:
            world.end(draw.choice(world.live))
        if draw.random() < 0.1:
            digest = draw.choice("abcdefg")
            world.book.drop(digest) if draw.random() < 0.5 else world.book.load(digest, f"/{digest}")
        world.check()
    while world.live:
        world.end(world.live[0])
    assert sorted(world.ready) == sorted(set(world.ready)), "a sequence was ready twice"


def test_a_lost_group_gets_everything_again() -> None:
    world = World(2, "a", "b", "c")
    world.start(0, "a")
    world.end(world.start(1, "b"))
    before = dict(world.places)
    world.held, world.places, world.live = set(), {}, []
    world.book.restore()
    assert (world.held, world.places) == ({"a", "b", "c"}, before)


def test_no_places_no_adapters() -> None:
    with pytest.raises(InvalidRequest, match="--max-loras"):
        World(0, "a")


def test_a_receiver_takes_a_place_with_the_offer() -> None:
    """Two engines with one place each, and requests in opposite order: the offered one goes on."""
    side = Side("decode", kv_config(), places=1)
    for digest in "ab":
        side.scheduler.adapters.load(digest, f"/{digest}")
    for number, digest in enumerate("ba"):
        side.submit(number, adapter=digest)
    (answer,) = side.want(1)
    assert isinstance(answer, ReserveTransfer)
    # The place is taken now: the other sequence gets its answer after the end of the first.
    assert side.want(0) == []
    side.events += side.scheduler.finish(1)
    (later,) = [one for one in side.scheduler.transfer_requests() if isinstance(one, ReserveTransfer)]
    assert later.key == key_of(0)
