"""Leases, outcomes, tombstones, digests, and the two sides of a rank."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.disagg.protocol.memory import KINDS, Group
from weft.common.errors import EngineDead, Unavailable
from weft.disagg.protocol import arrivals as a
from weft.disagg.protocol import digests
from weft.disagg.protocol import pushes as p
from weft.disagg.protocol.coverage import Coverage, Positions
from weft.disagg.protocol.memory_leases import MemoryLease, Ring
from weft.disagg.protocol.outcomes import Outcomes
from weft.disagg.protocol.spans import SpanPart, SpanPlan
from weft.disagg.protocol.tombstones import Parking, Tombstones
from weft.types.transfer import Outcome, TransferKey

KEY, OTHER = TransferKey(1, 0, 1), TransferKey(2, 0, 1)
ERROR = Unavailable("planted").info()


def test_leases_never_overlap_and_nothing_leaks() -> None:
    for seed in range(50):
        rng, memory, held = random.Random(seed), Ring(1000), list[MemoryLease]()
        deferred = 0
        for _ in range(400):
            if rng.random() < 0.6:
                lease = memory.take(rng.randint(1, 300), KEY)
                if lease is None:
                    deferred += 1
                    continue
                assert lease.offset + lease.size <= 1000
                for other in held:
                    apart = (lease.offset + lease.size, other.offset + other.size)
                    assert apart[0] <= other.offset or apart[1] <= lease.offset
                held.append(lease)
            elif held:
                memory.give_back(held.pop(rng.randrange(len(held))))
        assert deferred
        assert memory.of(KEY) == sorted(held)
        for lease in held:
            memory.give_back(lease)
        assert memory.count == 0
        whole = memory.take(1000, KEY)
        assert whole is not None
        assert whole.offset == 0


def test_a_lease_is_given_back_once() -> None:
    ring = Ring(10)
    lease = ring.take(5, KEY)
    assert lease is not None
    ring.give_back(lease)
    with pytest.raises(EngineDead):
        ring.give_back(lease)
    with pytest.raises(EngineDead):
        ring.take(11, KEY)


@pytest.mark.requirement("E7")
def test_outcomes_are_the_least_of_all_and_are_not_taken_back() -> None:
    for seed in range(100):
        rng, outcomes = random.Random(seed), Outcomes(3)
        said = {rank: rng.choice([Outcome.done, Outcome.done, Outcome.failed]) for rank in range(3)}
        reports = [(rank, Outcome.pending) for rank in said] + list(said.items()) * 2
        rng.shuffle(reports)
        last = dict[int, Outcome]()
        for rank, outcome in reports:
            outcomes.take(rank, outcome)
            if outcome is not Outcome.pending:
                last[rank] = outcome
            expected = min([*last.values(), *([Outcome.pending] if len(last) < 3 else [])])
            assert outcomes.all is expected
        outcomes.take(0, Outcome.done)
        assert outcomes.all is min(said.values())


def test_tombstones_and_parking_forget_in_time() -> None:
    tombs, parking = Tombstones[str](10.0), Parking[str](100, 5.0)
    tombs.add(KEY, "first", 0.0)
    tombs.add(KEY, "second", 5.0)
    assert tombs.get(KEY) == "first"
    tombs.expire(9.9)
    assert KEY in tombs
    tombs.expire(10.0)
    assert KEY not in tombs
    assert parking.park(KEY, "a", 60, 0.0)
    assert not parking.park(OTHER, "b", 60, 0.0)
    assert parking.park(KEY, "c", 40, 1.0)
    assert parking.flush(KEY) == ["a", "c"]
    assert parking.park(OTHER, "d", 60, 2.0)
    assert parking.expire(7.0) == [(OTHER, "d")]
    assert parking.used == len(parking) == 0


class TestDigests:
    SEED = digests.transfer_seed(KEY)

    def of(self, data: np.ndarray, seed: int | None = None) -> int:
        return digests.digest(data, self.SEED if seed is None else seed)

    def test_known_values(self) -> None:
        """The bytes on the wire do not change by accident."""
        data = np.arange(3000, dtype=np.int64).astype(np.uint8)
        assert [f"{self.of(data[:size]):016x}" for size in (0, 1, 8, 1024, 1025, 3000)] == KNOWN

    @settings(max_examples=200, deadline=None)
    @given(st.integers(1, 5000), st.data())
    def test_a_flipped_bit_a_swap_and_another_length_are_noticed(
        self, size: int, data: st.DataObject
    ) -> None:
        rng = np.random.default_rng(size)
        memory = rng.integers(0, 256, size, dtype=np.uint8)
        whole = self.of(memory)
        flipped = memory.copy()
        bit = data.draw(st.integers(0, 8 * size - 1))
        flipped[bit // 8] ^= 1 << bit % 8
        assert self.of(flipped) != whole
        if size >= 16:
            swapped = np.concatenate([memory[8:16], memory[:8], memory[16:]])
            assert (self.of(swapped) == whole) == np.array_equal(swapped, memory)
        if size >= 2048:
            blocks = np.concatenate([memory[1024:2048], memory[:1024], memory[2048:]])
            assert self.of(blocks) != whole

    def test_transfer_attempt_incarnation_place_and_length_are_part_of_it(self) -> None:
        keys = [KEY, KEY._replace(transfer=9), KEY._replace(attempt=1), KEY._replace(incarnation=2)]
        places = [(0, 0, 64), (1, 0, 64), (0, 8, 64), (0, 0, 72)]
        seeds = {
            int(digests.span_seeds(digests.transfer_seed(key), region, np.array([at]), np.array([size]))[0])
            for key in keys
            for region, at, size in places
        }
        assert len(seeds) == 16
        assert len({digests.ranks_seed(KEY, rank, to) for rank in range(8) for to in range(8)}) == 64

    def test_the_extension_computes_the_same_bits(self) -> None:
        torch = pytest.importorskip("torch")
        from weft.disagg.transport.copying import copy_spans, digest_spans
        from weft.ops import cpu

        if not cpu.load():
            pytest.skip("needs the C++ operations (weft build-ops)")
        rng = np.random.default_rng(1)
        memory = torch.from_numpy(rng.integers(0, 256, 300_000, dtype=np.uint8))
        sizes = [0, 1, 7, 8, 9, 1023, 1024, 1025, 4096, 131_072, 131_079, 0xFFFF]
        spans = np.array([(int(rng.integers(0, 1000)), size) for size in sizes], np.int64)
        seeds = rng.integers(0, 1 << 63, len(sizes)).astype(np.uint64) * np.uint64(2)
        want = digests.digest_spans(memory.numpy(), spans, seeds)
        assert (digest_spans(memory, spans, seeds) == want).all()
        target = torch.zeros(400_000, dtype=torch.uint8)
        for row, seed, digest in zip(spans, seeds, want, strict=True):
            copy = np.array([[row[0], 17, row[1]]])
            assert copy_spans(memory, target, copy, np.array([seed])) == digest
            assert torch.equal(target[17 : 17 + row[1]], memory[row[0] : row[0] + row[1]])
        for wrong in ([-1, 5], [300_000, 1], [0, 300_001], [5, -1], [(1 << 63) - 1, 2]):
            with pytest.raises(IndexError):
                digest_spans(memory, np.array([wrong]), seeds[:1])


KNOWN = [
    "1f6f65ea634e8406",
    "b9b322fcf61f5758",
    "c977f9219d6fd0c1",
    "1b09d19a57f6cdd5",
    "af8610119e5c39ae",
    "75d0633f04356468",
]


class TestArrivals:
    def write(
        self, number: int, begin: int, size: int, source: str = "s", key: TransferKey = KEY
    ) -> a.Incoming:
        return a.Incoming(key, source, number, ((0, np.array([[begin, size]])),), 100)

    def coverage(self) -> Coverage:
        return Coverage({0: np.array([[0, 30]], np.int64)})

    def names(self, actions: list[a.Action]) -> list[str]:
        return [type(action).__name__ for action in actions]

    def test_a_transfer_is_done_when_all_has_come_once(self) -> None:
        into = a.Arrivals()
        into.on(a.ExpectedArrival(KEY, self.coverage()), 0.0)
        first, last = self.write(0, 0, 10), self.write(1, 10, 20)
        assert self.names(into.on(first, 0.0)) == ["ArrivalReport", "Copy"]
        assert self.names(into.on(a.Copied(first, None), 0.0)) == ["Answer"]
        assert self.names(into.on(first, 0.0)) == ["Answer"]  # again: nothing is copied
        assert self.names(into.on(last, 0.0)) == ["Copy"]
        actions = into.on(a.Copied(last, None), 0.0)
        assert actions[-1] == a.ArrivalReport(KEY, Outcome.done)
        assert self.names(into.on(self.write(5, 0, 10), 0.0)) == ["Answer"]
        assert into.dropped == 1

    def test_nothing_is_copied_of_a_stopped_transfer(self) -> None:
        into = a.Arrivals(remember_s=50.0)
        assert into.on(self.write(0, 0, 10), 0.0) == []
        assert self.names(into.on(a.ArrivalStopped(KEY), 0.0)) == ["Answer"]
        assert self.names(into.on(self.write(1, 0, 10), 1.0)) == ["Answer"]
        assert into.on(a.ExpectedArrival(KEY, self.coverage()), 2.0) == []
        assert self.names(into.on(self.write(1, 0, 10), 3.0)) == ["Answer"]
        assert into.next_due() == 50.0
        into.on(a.ArrivalTick(), 50.0)
        assert into.next_due() is None

    def test_parking_is_bounded_in_bytes_and_time(self) -> None:
        into = a.Arrivals(parked_bytes=250, parked_s=5.0)
        assert into.on(self.write(0, 0, 10), 0.0) == []
        assert into.on(self.write(1, 10, 10), 0.0) == []
        assert self.names(into.on(self.write(2, 20, 10), 0.0)) == ["Answer"]
        assert self.names(into.on(a.ArrivalTick(), 5.0)) == ["Answer", "Answer"]
        assert into.parked == 0

    def test_a_digest_that_is_wrong_fails_the_transfer(self) -> None:
        into = a.Arrivals()
        into.on(a.ExpectedArrival(KEY, self.coverage()), 0.0)
        write = self.write(0, 0, 30)
        into.on(write, 0.0)
        assert into.on(a.Copied(write, ERROR), 0.0)[-1] == a.ArrivalReport(KEY, Outcome.failed, ERROR)

    def test_a_rank_that_gets_nothing_is_done_at_once(self) -> None:
        assert a.Arrivals().on(a.ExpectedArrival(KEY, Coverage({})), 0.0) == [
            a.ArrivalReport(KEY, Outcome.done)
        ]


class TestPushes:
    GROUP = Group([KINDS["full"], KINDS["state"]], 1, 8, 16)

    def plan(self, start: int = 0) -> SpanPlan:
        to = Group([KINDS["full"], KINDS["state"]], 1, 8, 16, snapshots=True)
        sides = self.GROUP.side([[3, 9, 1], [1]], 0, 20), to.side([[5, 2, 11], [2]], 0, 20)
        return SpanPlan(sides[0], 0, sides[1], 0, start, 20)

    def pushes(self, **more: int) -> p.Pushes:
        def digest(key: TransferKey, peer: str, parts: tuple[SpanPart, ...]) -> np.ndarray:
            return np.zeros(sum(len(part.spans) for part in parts), np.uint64)

        return p.Pushes([kind.layers for kind in self.GROUP.dims.kinds], digest, states=[1], **more)

    def total(self) -> int:
        return sum(part.nbytes for part in self.plan().everything())

    def run(self, out: p.Pushes, actions: list[p.Action], window: int) -> list[p.Action]:
        """Answers every write, at most ``window`` bytes of which are under way."""
        done, queue = list[p.Action](), list(actions)
        while True:
            for action in queue:
                done.append(action)
                assert out.under_way <= window
                if isinstance(action, p.Write):
                    queue += out.on(p.Written(action.key, action.peer, action.number, None))
            if (late := out.behind()) is None:
                return done
            queue = out.on(p.More(late))

    def test_transfers_that_are_bound_late_take_turns(self) -> None:
        out = self.pushes()
        for key in (KEY, OTHER):
            for layer in (1, 2):
                assert out.on(p.Computed(key, (layer,), 0, 20)) == []
            assert out.on(p.Begin(key, {"peer": self.plan()}, 20)) == []
        out.on(p.Computed(KEY, (1,), 0, 20))  # behind the earlier report
        late, order = out.behind(), list[TransferKey]()
        while late is not None:
            order.append(late)
            out.on(p.More(late))
            late = out.behind()
        assert order == [KEY, OTHER, KEY, OTHER, KEY]

    @pytest.mark.requirement("E3")
    def test_everything_is_pushed_once_whenever_the_receiver_is_bound(self) -> None:
        layers = (1, 2)
        for bound_after in range(5):
            out = self.pushes(write_bytes=600, window=1500)
            events: list[p.Event] = [
                p.Computed(KEY, (layer,), begin, end)
                for begin, end in ((0, 13), (13, 20))
                for layer in layers
            ]
            events.insert(bound_after, p.Begin(KEY, {"peer": self.plan()}, 20))
            actions = list[p.Action]()
            for event in events:
                actions += self.run(out, out.on(event), 1500)
            writes = [action for action in actions if isinstance(action, p.Write)]
            assert [write.number for write in writes] == list(range(len(writes)))
            assert sum(part.nbytes for write in writes for part in write.parts) == self.total()
            assert all(sum(part.nbytes for part in write.parts) <= 600 for write in writes)
            assert actions[-1] == p.PushReport(KEY, Outcome.done)
            out.on(p.PushStopped(KEY))
            assert len(out) == out.under_way == 0

    @pytest.mark.parametrize("bound_after", range(5))
    def test_spans_reported_twice_are_pushed_once(self, bound_after: int) -> None:
        out = self.pushes()
        events: list[p.Event] = [p.Computed(KEY, (layer,), 0, end) for end in (13, 20) for layer in (1, 2)]
        events.insert(bound_after, p.Begin(KEY, {"peer": self.plan()}, 20))
        actions = [action for event in events for action in self.run(out, out.on(event), 1 << 30)]
        writes = [action for action in actions if isinstance(action, p.Write)]
        assert sum(part.nbytes for write in writes for part in write.parts) == self.total()
        assert actions[-1] == p.PushReport(KEY, Outcome.done)

    def test_a_state_is_pushed_to_a_receiver_that_has_every_position(self) -> None:
        out = self.pushes()
        states = sum(part.nbytes for part in self.plan().state(1, range(2)))
        assert out.on(p.Begin(KEY, {"peer": self.plan(20)}, 20, 20)) == []
        actions = list[p.Action]()
        for layer in (1, 2):
            assert out.on(p.Computed(KEY, (layer,), 0, 13)) == []  # a state of the past
            actions += self.run(out, out.on(p.Computed(KEY, (layer,), 13, 20)), 1 << 30)
        writes = [action for action in actions if isinstance(action, p.Write)]
        assert sum(part.nbytes for write in writes for part in write.parts) == states > 0
        assert actions[-1] == p.PushReport(KEY, Outcome.done)

    def test_a_rank_is_not_done_while_positions_lack(self) -> None:
        out = self.pushes()
        out.on(p.Begin(KEY, {"peer": self.plan()}, 20))
        actions = list[p.Action]()
        for begin, end in ((5, 13), (13, 20), (5, 20)):
            for layer in (1, 2):
                actions += self.run(out, out.on(p.Computed(KEY, (layer,), begin, end)), 1 << 30)
        assert p.PushReport(KEY, Outcome.done) not in actions
        for layer in (1, 2):
            actions += self.run(out, out.on(p.Computed(KEY, (layer,), 0, 7)), 1 << 30)
        assert actions[-1] == p.PushReport(KEY, Outcome.done)
        writes = [action for action in actions if isinstance(action, p.Write)]
        assert sum(part.nbytes for write in writes for part in write.parts) == self.total()

    @settings(max_examples=100, deadline=None)
    @given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), max_size=8))
    def test_positions_are_those_of_a_set(self, ranges: list[tuple[int, int]]) -> None:
        have, want = Positions(), set[int]()
        for begin, end in ranges:
            new = [at for low, high in have.add(begin, end) for at in range(low, high)]
            assert sorted(new) == sorted(set(range(begin, end)) - want)
            assert len(new) == len(set(new))
            want |= set(range(begin, end))
            for low in range(21):
                assert all(have.has(low, high) == (set(range(low, high)) <= want) for high in range(low, 21))

    def test_computed_spans_of_a_stopped_transfer_are_dropped(self) -> None:
        out = self.pushes()
        for number in range(p.MOST_STOPPED + 10):
            out.on(p.PushStopped(TransferKey(100 + number, 0, 1)))
        out.on(p.Computed(KEY, (1,), 0, 20))
        assert len(out) == 1
        out.on(p.PushStopped(KEY))
        assert out.on(p.Computed(KEY, (2,), 0, 20)) == []
        assert len(out) == 0
        assert len(out._stopped) == p.MOST_STOPPED

    def test_a_full_window_defers_and_delays_nobody_else(self) -> None:
        out = self.pushes(write_bytes=600, window=600)
        for key, peer in ((KEY, "slow"), (OTHER, "fast")):
            out.on(p.Begin(key, {peer: self.plan()}, 20))
        slow = [action for layer in (1, 2) for action in out.on(p.Computed(KEY, (layer,), 0, 20))]
        assert sum(isinstance(action, p.Write) for action in slow) == 1
        fast = [
            action
            for layer in (1, 2)
            for action in self.run(out, out.on(p.Computed(OTHER, (layer,), 0, 20)), 1200)
        ]
        assert fast[-1] == p.PushReport(OTHER, Outcome.done)
        out.on(p.PushStopped(KEY))
        assert out.under_way == 0

    def test_transfers_of_one_peer_take_turns(self) -> None:
        out = self.pushes(write_bytes=200, window=400)
        for key in (KEY, OTHER):
            out.on(p.Begin(key, {"peer": self.plan()}, 20))
        first = out.on(p.Computed(KEY, (1,), 0, 20)) + out.on(p.Computed(OTHER, (1,), 0, 20))
        transfers = [action.key for action in self.run(out, first, 400) if isinstance(action, p.Write)]
        assert transfers.index(OTHER) < len(transfers) - 1 - transfers[::-1].index(KEY)

    def test_a_write_that_fails_fails_the_transfer_and_no_more_is_sent(self) -> None:
        out = self.pushes(write_bytes=200, window=200)
        out.on(p.Begin(KEY, {"peer": self.plan()}, 20))
        write = next(x for x in out.on(p.Computed(KEY, (1,), 0, 20)) if isinstance(x, p.Write))
        assert out.on(p.Written(KEY, "peer", write.number, ERROR)) == [
            p.PushReport(KEY, Outcome.failed, ERROR)
        ]
        assert out.on(p.Written(KEY, "peer", write.number, ERROR)) == []
        assert out.under_way == 0

    def test_writes_of_tiny_spans_are_bounded_in_number(self) -> None:
        begins = np.arange(3000, dtype=np.int64) * 16
        part = SpanPart(0, 0, np.stack([begins, begins, np.full(3000, 8)], axis=1))
        groups = p.packed([part._replace(target=number) for number in range(8)], 1 << 20)
        assert max(sum(len(part.spans) for part in group) for group in groups) <= 4096
        assert sum(len(part.spans) for group in groups for part in group) == 24_000

    def test_packing_keeps_every_byte_in_order(self) -> None:
        rng = np.random.default_rng(0)
        parts = list[SpanPart]()
        for number in range(3):
            sizes = rng.integers(1, 3000, 20)
            ends = np.cumsum(sizes + 1)
            parts.append(SpanPart(0, number, np.stack([ends - sizes, 7 + ends - sizes, sizes], axis=1)))
        groups = p.packed(parts, 1000)
        assert all(0 < sum(part.nbytes for part in group) <= 1000 for group in groups)
        for number, part in enumerate(parts):
            got = np.concatenate([x.spans for group in groups for x in group if x.target == number])
            assert got[:, 2].sum() == part.nbytes
            assert (np.diff(got[:, 1]) > 0).all()
