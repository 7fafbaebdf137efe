"""Transfers: the effect of each message, and random schedules with all kinds of faults."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tests.disagg.protocol.world import ERROR, GROUP, LONGEST, PATIENCE, PROMPT, Violation, World
from weft.disagg.protocol import transfer_events as ev
from weft.disagg.protocol.group_layout import blocks_of
from weft.disagg.protocol.receiver import TransferReceiver
from weft.disagg.protocol.sender import TransferSender, intact, sealed
from weft.disagg.protocol.transfer_table import FenceBy
from weft.types import transfer as r
from weft.types.transfer import Outcome, Peer, State, TransferKey

P, D = Peer("P", 1), Peer("D", 2)
KEY = TransferKey(7, 0, 1)
OFFER = r.Admitted(key=KEY, num_prompt=PROMPT, dims=GROUP.dims)
BOUND = r.Bound(
    key=KEY,
    start=0,
    dims=GROUP.dims,
    blocks=(blocks_of([1, 2, 3]),),
    endpoints=(r.Endpoint("shm", "a", 1), r.Endpoint("shm", "b", 1)),
)
FIRST = r.Metadata(key=KEY, first=(r.FirstToken(0, 42),))


def play(seed: int, fence: FenceBy, harm: float = 1.0) -> World:
    """Sixty rooms of several attempts while anything happens; then peace until everything is over."""
    world = World(seed, fence, harm)
    rng = world.rng
    for number in range(60):
        key = TransferKey(number // 2, number % 2, 1)
        start = rng.random() * 60

        def submit(key: TransferKey = key) -> None:
            seconds = LONGEST * (0.2 + 0.8 * rng.random())
            world.at(rng.random() * 2, lambda: world.sender.open(key, seconds))
            world.at(rng.random() * 2, lambda: world.receiver.open(key, seconds))
            if rng.random() < 0.15 * harm:
                engine = rng.choice([world.sender, world.receiver])
                world.at(rng.random() * 8, lambda: engine.feed(ev.Cancel(key, ERROR)))

        world.at(start, submit)
    for _ in range(round(4 * harm)):
        which, when, long = rng.random(), rng.random() * 80, rng.random() * 20
        pick = (lambda: world.sender) if rng.random() < 0.5 else (lambda: world.receiver)
        if which < 0.4:
            world.at(when, lambda pick=pick: world.kill(pick()))  # type: ignore[misc]
        else:
            world.at(when, lambda pick=pick, long=long: world.pause(pick(), long))  # type: ignore[misc]
    world.run(90.0)
    world.harm = 0.0
    for key in world.receiver.opened:  # no sender will offer this transfer, as the front knows
        if world.sender.receivers.get(key) != world.receiver.peer:
            world.receiver.feed(ev.Cancel(key, ERROR))
    world.run(500.0)
    return world


def check_end(world: World) -> None:
    """Every room ended once on both sides, and nothing is left of any."""
    for engine in (world.sender, world.receiver):
        assert len(engine.machine) == 0
        assert engine.machine.remembered == 0
        assert engine.machine.next_due() is None
        assert engine.memory.tenant == {}
        assert len(engine.memory.free) == 63
        for key in engine.opened:
            said = engine.told.get(key, [])
            ends = [what for what in said if what in ("TransferReceived", "TransferFailed")]
            assert len(ends) == 1, (engine.peer, key, said)
            assert ends == ["TransferReceived"] or "TransferFreed" in said, (engine.peer, key, said)
    for key in world.sender.opened:
        if "TransferReceived" in world.sender.told[key] and not world.past:
            assert "TransferReceived" in world.receiver.told[key]
    assert getattr(world.receiver.machine, "parked", 0) == 0


@pytest.mark.requirement("E8", "E9")
@pytest.mark.parametrize("seeds", [range(25), pytest.param(range(25, 100), marks=pytest.mark.grid)])
@pytest.mark.parametrize("fence", ["copy", "connection"])
def test_random_schedules(fence: FenceBy, seeds: range) -> None:
    happened: set[str] = set()
    received = failed = 0
    for seed in seeds:
        world = play(seed, fence)
        check_end(world)
        happened |= world.happened
        said = list(world.receiver.told.values())
        received += sum("TransferReceived" in each for each in said)
        failed += sum("TransferFailed" in each for each in said)
    assert happened >= {"lost", "killed", "paused", "a rank failed", "revoked"}
    assert received > 5 * len(seeds)
    assert failed > 5 * len(seeds)


def test_without_faults_every_transfer_that_is_not_refused_lands() -> None:
    for seed in range(20):
        world = play(seed, "copy", harm=0.0)
        check_end(world)
        received = sum("TransferReceived" in said for said in world.sender.told.values())
        assert received >= 45


@pytest.mark.slow
def test_the_watch_on_memory_notices_what_is_freed_without_a_fence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TransferReceiver, "_needs_peer", lambda self, transfer: False)
    caught = 0
    for seed in range(40):
        try:
            play(seed, "connection")
        except Violation as violation:
            caught += "no longer has" in str(violation)
    assert caught > 0


# ---- one message at a time


def names(actions: list[ev.Action]) -> list[str]:
    """Return the names of sent messages and of reported events."""
    found = []
    for action in actions:
        inner: Any = getattr(action, "message", None) or getattr(action, "event", None) or action
        found.append(type(inner).__name__)
    return found


def sender(state: str = "active", fence: FenceBy = "copy") -> TransferSender:
    transfers = TransferSender(2, fence, PATIENCE)
    transfers.on(ev.Open(KEY, D, 30.0), 0.0)
    if state == "new":
        return transfers
    transfers.on(ev.Offer(OFFER), 0.0)
    transfers.on(ev.PeerMessage(D, BOUND), 0.0)
    if state == "active":
        transfers.on(ev.RankReport(KEY, 0, Outcome.pending), 0.0)
    return transfers


def receiver(state: str = "active", fence: FenceBy = "copy") -> TransferReceiver:
    transfers = TransferReceiver(GROUP.dims, fence, PATIENCE)
    transfers.on(ev.Open(KEY, P, 30.0), 0.0)
    if state == "new":
        return transfers
    transfers.on(ev.PeerMessage(P, OFFER), 0.0)
    transfers.on(ev.Reserve(BOUND), 0.0)
    if state == "active":
        transfers.on(ev.RankReport(KEY, 0, Outcome.pending), 0.0)
    return transfers


def test_a_transfer_from_beginning_to_end() -> None:
    out, into = TransferSender(2), TransferReceiver(GROUP.dims)
    assert out.on(ev.Open(KEY, D, 30.0), 0.0) == []
    assert into.on(ev.Open(KEY, P, 30.0), 0.0) == []
    assert names(out.on(ev.Offer(OFFER), 0.0)) == ["Admitted"]
    assert names(into.on(ev.PeerMessage(P, OFFER), 0.0)) == ["TransferWanted"]
    assert names(into.on(ev.Reserve(BOUND), 0.0)) == ["Expect", "Bound"]
    assert names(out.on(ev.PeerMessage(D, BOUND), 0.0)) == ["Push", "TransferBound"]
    assert out.state(KEY) is State.bound
    assert out.on(ev.RankReport(KEY, 0, Outcome.pending), 0.0) == []
    assert out.state(KEY) is State.active
    (said,) = out.on(ev.Finished(FIRST), 0.0)
    assert isinstance(said, ev.SendToPeer)
    assert into.on(ev.PeerMessage(P, said.message), 0.0) == []
    assert into.on(ev.RankReport(KEY, 0, Outcome.done), 0.0) == []
    assert names(into.on(ev.RankReport(KEY, 1, Outcome.done), 0.0)) == [
        "StopRanks",
        "TransferReceived",
        "AllReceived",
    ]
    assert names(out.on(ev.PeerMessage(D, r.AllReceived(key=KEY)), 0.0)) == ["StopRanks", "TransferReceived"]
    assert (out.state(KEY), into.state(KEY)) == (State.done, State.done)
    assert (len(out), len(into)) == (0, 0)


@pytest.mark.requirement("E7")
def test_all_ranks_must_have_received_and_failure_wins() -> None:
    into = receiver()
    into.on(ev.PeerMessage(P, sealed(FIRST)), 0.0)
    for _ in range(3):
        assert into.on(ev.RankReport(KEY, 0, Outcome.done), 0.0) == []
    actions = into.on(ev.RankReport(KEY, 1, Outcome.failed, ERROR), 0.0)
    assert names(actions)[:3] == ["TransferFailed", "StopRanks", "Fence"]
    assert into.on(ev.RankReport(KEY, 1, Outcome.done), 0.0) == []


@pytest.mark.requirement("E30")
def test_bytes_without_metadata_are_not_received_and_wrong_metadata_fail() -> None:
    into = receiver()
    for rank in (0, 1):
        assert into.on(ev.RankReport(KEY, rank, Outcome.done), 0.0) == []
    other = msgspec.structs.replace(sealed(FIRST), first=(r.FirstToken(0, 43),))
    assert "TransferFailed" in names(into.on(ev.PeerMessage(P, other), 0.0))
    assert intact(sealed(FIRST))
    assert not intact(msgspec.structs.replace(sealed(FIRST), key=KEY._replace(attempt=1)))


@pytest.mark.requirement("E8", "E13")
def test_a_deadline_fails_both_sides_at_once_and_frees_nothing() -> None:
    out = sender()
    due = out.next_due()
    assert due is not None
    actions = out.on(ev.TransferTick(), 30.0)
    assert names(actions) == ["TransferFailed", "StopRanks", "Fence"]
    for later in (31.0, 100.0, 10_000.0):  # no acknowledgement: time alone frees nothing
        assert "TransferFreed" not in names(out.on(ev.TransferTick(), later))
    assert out.state(KEY) is State.failing
    for rank in (0, 1):
        assert out.on(ev.RankStopped(KEY, rank), 10_000.0) == []
    assert names(out.on(ev.PeerMessage(D, r.Fenced(key=KEY)), 10_000.0)) == ["TransferFreed"]


@pytest.mark.requirement("E8")
@pytest.mark.parametrize("proof", ["Fenced", "PeerLost", "Revoked"])
def test_events_that_free_memory_of_a_silent_peer(proof: str) -> None:
    transfers: list[tuple[Any, Peer]] = [(sender(), D), (receiver(fence="rekey"), P)]
    for side, peer in transfers:
        side.on(ev.Cancel(KEY, ERROR), 1.0)
        for rank in (0, 1):
            assert "TransferFreed" not in names(side.on(ev.RankStopped(KEY, rank), 1.0))
        event = {
            "Fenced": ev.PeerMessage(peer, r.Fenced(key=KEY)),
            "PeerLost": ev.PeerLost(peer),
            "Revoked": ev.Revoked(KEY),
        }[proof]
        assert names(side.on(event, 2.0)) == ["TransferFreed"]


def test_a_receiver_with_own_copies_needs_no_fence() -> None:
    into = receiver()
    into.on(ev.Cancel(KEY, ERROR), 1.0)
    assert into.on(ev.RankStopped(KEY, 0), 1.0) == []
    assert names(into.on(ev.RankStopped(KEY, 1), 1.0)) == ["TransferFreed"]


def test_a_rank_that_died_touches_nothing() -> None:
    into = receiver()
    assert names(into.on(ev.RankGone(0), 1.0)) == ["TransferFailed", "StopRanks", "Fence"]
    assert names(into.on(ev.RankStopped(KEY, 1), 1.0)) == ["TransferFreed"]


def test_a_peer_that_does_not_answer_a_fence_is_to_be_revoked() -> None:
    out = sender()
    out.on(ev.Cancel(KEY, ERROR), 1.0)
    assert "Revoke" not in names(out.on(ev.TransferTick(), 0.9 + PATIENCE.fence))
    assert "Revoke" in names(out.on(ev.TransferTick(), 1.0 + PATIENCE.fence))
    assert "Revoke" not in names(out.on(ev.TransferTick(), 2.0 + PATIENCE.fence))


@pytest.mark.requirement("E9")
def test_messages_are_repeated_until_they_are_answered() -> None:
    out = TransferSender(2, patience=PATIENCE)
    out.on(ev.Open(KEY, D, 30.0), 0.0)
    out.on(ev.Offer(OFFER), 0.0)
    assert names(out.on(ev.TransferTick(), 0.5)) == ["Admitted"]
    assert out.on(ev.PeerMessage(D, r.Later(key=KEY, seconds=4.0)), 0.6) == []
    assert out.on(ev.TransferTick(), 2.0) == []
    assert names(out.on(ev.TransferTick(), 4.7)) == ["Admitted"]
    out.on(ev.PeerMessage(D, BOUND), 5.0)
    assert out.on(ev.TransferTick(), 6.0) == []
    out.on(ev.Finished(FIRST), 6.0)
    assert names(out.on(ev.TransferTick(), 6.5)) == ["Metadata"]


def test_repeated_messages_get_the_same_answers() -> None:
    into = receiver()
    assert names(into.on(ev.PeerMessage(P, OFFER), 1.0)) == ["Bound"]
    into.on(ev.PeerMessage(P, sealed(FIRST)), 1.0)
    for rank in (0, 1):
        into.on(ev.RankReport(KEY, rank, Outcome.done), 1.0)
    for message in (OFFER, sealed(FIRST)):
        assert names(into.on(ev.PeerMessage(P, message), 2.0)) == ["AllReceived"]
    assert into.on(ev.Open(KEY, P, 30.0), 2.0) == []


def test_an_offer_before_its_submit_is_parked_and_flushed() -> None:
    into = TransferReceiver(GROUP.dims, patience=PATIENCE)
    assert into.on(ev.PeerMessage(P, OFFER), 0.0) == []
    assert into.on(ev.PeerMessage(P, OFFER), 0.1) == []
    assert into.parked == 1
    assert names(into.on(ev.Open(KEY, P, 30.0), 0.2)) == ["TransferWanted"]
    assert into.parked == 0
    small = TransferReceiver(GROUP.dims, patience=PATIENCE, parked_bytes=10)
    assert names(small.on(ev.PeerMessage(P, OFFER), 0.0)) == ["Later"]
    into.on(ev.PeerMessage(P, msgspec.structs.replace(OFFER, key=TransferKey(8, 0, 1))), 0.0)
    into.on(ev.TransferTick(), PATIENCE.bind + 1)
    assert into.parked == 0


def test_a_fence_before_its_submit_ends_the_transfer() -> None:
    into = TransferReceiver(GROUP.dims, patience=PATIENCE)
    assert names(into.on(ev.PeerMessage(P, r.Fence(key=KEY, error=ERROR)), 0.0)) == ["Fenced"]
    assert names(into.on(ev.Open(KEY, P, 30.0), 1.0)) == ["TransferFailed", "TransferFreed"]


def test_refusals_end_the_transfer_on_both_sides() -> None:
    into, out = receiver("new"), sender("new")
    out.on(ev.Offer(OFFER), 0.0)
    into.on(ev.PeerMessage(P, OFFER), 0.0)
    actions = into.on(ev.Refuse(KEY, ERROR), 0.0)
    assert names(actions) == ["Refused", "TransferFailed", "StopRanks", "TransferFreed"]
    assert names(into.on(ev.PeerMessage(P, OFFER), 1.0)) == ["Refused"]
    refused = r.Refused(key=KEY, error=ERROR)
    assert names(out.on(ev.PeerMessage(D, refused), 1.0)) == ["TransferFailed", "StopRanks", "TransferFreed"]


def test_a_reservation_for_a_transfer_that_ended_is_given_back() -> None:
    into = receiver("new")
    into.on(ev.PeerMessage(P, OFFER), 0.0)
    into.on(ev.Cancel(KEY, ERROR), 0.0)
    assert names(into.on(ev.Reserve(BOUND), 0.1)) == ["TransferFreed"]


def test_answers_that_do_not_fit_the_offer_fail_the_transfer_alone() -> None:
    for wrong in (
        msgspec.structs.replace(BOUND, start=PROMPT + 1),
        msgspec.structs.replace(BOUND, endpoints=()),
        msgspec.structs.replace(BOUND, blocks=()),
        msgspec.structs.replace(BOUND, blocks=(blocks_of([1]),)),
        msgspec.structs.replace(BOUND, blocks=(r.Blocks(0, b"123"),)),
        msgspec.structs.replace(BOUND, dims=r.GroupDims(ranks=2, kinds=())),
    ):
        out = sender("new")
        out.on(ev.Offer(OFFER), 0.0)
        assert "TransferFailed" in names(out.on(ev.PeerMessage(D, wrong), 0.0))


def test_messages_of_other_processes_are_dropped() -> None:
    out, stranger = sender(), Peer("D", 3)
    assert out.on(ev.PeerMessage(stranger, r.AllReceived(key=KEY)), 0.0) == []
    assert out.on(ev.PeerMessage(stranger, r.Fence(key=KEY, error=ERROR)), 0.0) == []
    assert out.on(ev.PeerLost(stranger), 0.0) == []
    assert out.strays == 2
    assert out.state(KEY) is State.active


@pytest.mark.requirement("E2")
def test_a_transfer_of_another_start_of_the_sender_fails_at_once() -> None:
    out = TransferSender(2, incarnation=5)
    assert names(out.on(ev.Open(KEY, D, 30.0), 0.0)) == ["TransferFailed", "TransferFreed", "Fence"]
    assert names(out.on(ev.TransferTick(), 1.0)) == ["Fence"]
    out.on(ev.PeerMessage(D, r.Fenced(key=KEY)), 1.1)
    assert out.on(ev.TransferTick(), 100.0) == []
    assert out.on(ev.Open(KEY._replace(incarnation=5), D, 30.0), 0.0) == []
    assert len(out) == 1


def test_tombstones_expire() -> None:
    into = receiver()
    into.on(ev.Cancel(KEY, ERROR), 0.0)
    into.on(ev.PeerLost(P), 0.0)
    for rank in (0, 1):
        into.on(ev.RankStopped(KEY, rank), 0.0)
    assert into.remembered == 1
    assert into.next_due() == PATIENCE.remember
    into.on(ev.TransferTick(), PATIENCE.remember)
    assert into.remembered == 0
    assert into.next_due() is None


class TestMessages:
    ALL = (
        OFFER,
        BOUND,
        r.Later(key=KEY, seconds=1.0),
        r.Refused(key=KEY, error=ERROR),
        sealed(FIRST),
        r.AllReceived(key=KEY),
        r.Fence(key=KEY, error=ERROR),
        r.Fenced(key=TransferKey((1 << 64) - 1, (1 << 32) - 1, (1 << 64) - 1)),
    )

    def test_every_message_comes_back_and_its_parts_do_not(self) -> None:
        for message in self.ALL:
            data = r.encode(message)
            assert r.decode(data) == message
            for size in range(len(data)):
                with pytest.raises(r.TransferMessageError):
                    r.decode(data[:size])

    @pytest.mark.requirement("F28")
    def test_unknown_fields_tags_and_values_are_refused(self) -> None:
        good = msgspec.msgpack.decode(r.encode(r.AllReceived(key=KEY)))
        for change in (
            {"more": 1},
            {"type": "Else"},
            {"key": [1, 2]},
            {"key": [-1, 0, 0]},
            {"key": [1, 1 << 32, 0]},
            {"key": [1.5, 0, 0]},
            {"key": ["1", 0, 0]},
        ):
            with pytest.raises(r.TransferMessageError):
                r.decode(msgspec.msgpack.encode({**good, **change}))

    def test_sizes_are_bounded_by_type(self) -> None:
        with pytest.raises(r.TransferMessageError, match="limit"):
            r.encode(r.Fence(key=KEY, error=msgspec.structs.replace(ERROR, message="x" * 70_000)))
        big = msgspec.msgpack.encode({"type": "AllReceived", "key": [1, 0, 0], "pad": b"x" * 70_000})
        with pytest.raises(r.TransferMessageError):
            r.decode(big)
        with pytest.raises(r.TransferMessageError, match="limit"):
            r.decode(bytes(r.MAX_MESSAGE + 1))


def test_the_time_in_the_senders_queue_is_not_the_transfers() -> None:
    out = sender("new")
    into = receiver("new")
    for transfers in (out, into):
        assert transfers.next_due() is None
        assert transfers.on(ev.TransferTick(), 1000.0) == []
    assert names(out.on(ev.Offer(OFFER), 1000.0)) == ["Admitted"]
    into.on(ev.PeerMessage(P, OFFER), 1000.0)
    into.on(ev.Postpone(KEY, 1.0), 1000.0)
    into.on(ev.PeerMessage(P, OFFER), 1020.0)  # a repeated offer does not extend the deadline
    assert into.on(ev.TransferTick(), 1029.0) == []
    assert "TransferFailed" in names(into.on(ev.TransferTick(), 1030.0))
    out.on(ev.PeerMessage(D, BOUND), 1001.0)
    assert out.on(ev.TransferTick(), 1029.0) == []
    assert "TransferFailed" in names(out.on(ev.TransferTick(), 1030.0))


def test_a_receiver_that_asked_for_patience_may_take_the_transfer_at_any_time() -> None:
    """The receiver does not wait for a repeated offer. An offer in flight changes nothing."""
    out, into = sender("new"), receiver("new")
    out.on(ev.Offer(OFFER), 0.0)
    into.on(ev.PeerMessage(P, OFFER), 0.0)
    out.on(ev.PeerMessage(D, r.Later(key=KEY, seconds=0.5)), 0.0)
    into.on(ev.Postpone(KEY, 0.5), 0.0)
    assert names(into.on(ev.Reserve(BOUND), 0.1)) == ["Expect", "Bound"]
    assert names(out.on(ev.PeerMessage(D, BOUND), 0.1)) == ["Push", "TransferBound"]
    assert names(into.on(ev.PeerMessage(P, OFFER), 0.2)) == ["Bound"]
    assert out.on(ev.PeerMessage(D, BOUND), 0.3) == []
    into, error = receiver("new"), ERROR
    into.on(ev.PeerMessage(P, OFFER), 0.0)
    into.on(ev.Postpone(KEY, 0.5), 0.0)
    assert "Refused" in names(into.on(ev.Refuse(KEY, error), 0.1))


def test_an_offer_that_the_scheduler_keeps_is_not_given_up() -> None:
    """A parallel sample may wait for its first sample. The sender learns that the receiver is alive."""
    out, into = TransferSender(2, "copy", PATIENCE), TransferReceiver(GROUP.dims, "copy", PATIENCE)
    out.on(ev.Open(KEY, D, 100.0), 0.0)
    into.on(ev.Open(KEY, P, 100.0), 0.0)
    out.on(ev.Offer(OFFER), 0.0)
    assert names(into.on(ev.PeerMessage(P, OFFER), 0.0)) == ["TransferWanted"]
    offers = 0
    for second in range(1, 100):
        for action in out.on(ev.TransferTick(), float(second)):
            assert isinstance(action, ev.SendToPeer), (second, action)
            offers += 1
            for answer in into.on(ev.PeerMessage(P, action.message), float(second)):
                assert isinstance(answer, ev.SendToPeer)
                assert isinstance(answer.message, r.Later)
                out.on(ev.PeerMessage(D, answer.message), float(second))
    assert offers > 2
    assert names(into.on(ev.Reserve(BOUND), 99.5)) == ["Expect", "Bound"]
    assert names(out.on(ev.PeerMessage(D, BOUND), 99.5)) == ["Push", "TransferBound"]


def test_a_receiver_that_asks_for_patience_gets_it_until_the_deadline() -> None:
    out = TransferSender(2, "copy", PATIENCE)
    out.on(ev.Open(KEY, D, 100.0), 0.0)
    out.on(ev.Offer(OFFER), 0.0)
    for second in range(99):
        said = names(out.on(ev.TransferTick(), float(second)))
        assert said in ([], ["Admitted"]), second
        out.on(ev.PeerMessage(D, r.Later(key=KEY, seconds=0.5)), float(second))
    assert "TransferFailed" in names(out.on(ev.TransferTick(), 100.0))
    out = TransferSender(2, "copy", PATIENCE)
    out.on(ev.Open(KEY, D, 100.0), 0.0)
    out.on(ev.Offer(OFFER), 0.0)
    out.on(ev.PeerMessage(D, r.Later(key=KEY, seconds=0.5)), 10.0)
    assert "TransferFailed" not in names(out.on(ev.TransferTick(), 10.0 + PATIENCE.bind))
    assert "TransferFailed" in names(out.on(ev.TransferTick(), 10.5 + PATIENCE.bind))
