"""An engine's part in transfers, between a scheduler, ranks and other engines, on virtual time."""

from __future__ import annotations

import logging
import random
import time

import pytest

from tests.engine.transfers_rig import ERROR, PROMPT, Pair, Side
from weft.common.errors import ErrorInfo
from weft.disagg.protocol import transfer_events as ev
from weft.disagg.protocol.volume import transfer_bytes
from weft.engine.disagg.engine_transfers import IDENTIFY_S, EngineTransfers
from weft.types import frames as f
from weft.types import transfer as r
from weft.types.messages import TransferStats
from weft.types.transfer import Outcome, TransferKey, TransferParameters


def kinds(side: Side) -> list[str]:
    return [type(frame).__name__ for frame in side.ranks.frames]


def land(pair: Pair, key: TransferKey) -> None:
    for side in (pair.sender, pair.receiver):
        side.ranks.say(key, Outcome.pending)
    pair.run(0.5)
    for side in (pair.sender, pair.receiver):
        side.ranks.say(key, Outcome.done)
    pair.run(0.5)


def test_a_transfer_from_its_offer_to_its_landing() -> None:
    pair = Pair()
    key = pair.bound()
    sender, receiver = pair.sender, pair.receiver
    push, expect = sender.ranks.frames[0], receiver.ranks.frames[0]
    assert isinstance(push, f.PushTransfer)
    assert isinstance(expect, f.ExpectTransfer)
    assert push.blocks == sender.scheduler.transfer_blocks(key)
    assert push.bound == expect.bound
    assert push.bound.blocks == receiver.scheduler.transfer_blocks(key)
    assert push.bound.endpoints == receiver.ranks.endpoints()
    assert push.offer.num_prompt == PROMPT
    assert sender.transfers.moving
    assert sender.transfers.stats(None).open == receiver.transfers.stats(None).open == 1
    pair.finish(key)
    land(pair, key)
    assert sender.scheduler.kinds(key) == ["TransferBound", "TransferReceived"]
    assert receiver.scheduler.kinds(key) == ["TransferWanted", "TransferReceived"]
    received = receiver.scheduler.reported[-1]
    assert isinstance(received, r.TransferReceived)
    assert received.first == (r.FirstToken(0, 5),)
    assert kinds(sender) == ["PushTransfer", "StopTransfer"]
    assert kinds(receiver) == ["ExpectTransfer", "StopTransfer"]
    nbytes = transfer_bytes(sender.ranks.dims, receiver.ranks.dims, 0, PROMPT)
    there, here = (side.transfers.stats(TransferStats(blocked=3, done=9)) for side in (sender, receiver))
    assert (there.done, there.sent_bytes, there.received_bytes) == (1, nbytes, 0)
    assert (here.done, here.sent_bytes, here.received_bytes) == (1, 0, nbytes)
    assert here.blocked == 3
    assert here.seconds == pytest.approx(0.5, abs=0.1)
    assert not sender.transfers.moving


def test_requests_of_a_scheduler_are_executed_in_the_same_iteration() -> None:
    """The request follows the launch of the admitting plan in the same iteration."""
    pair = Pair()
    key = pair.open(1)
    pair.run(0.2)
    sent = pair.net.sent
    pair.admit(key)
    pair.sender.transfers.serve(pair.sender.scheduler)
    assert pair.net.sent == sent + 1


@pytest.mark.requirement("E8", "E20")
@pytest.mark.parametrize("seed", range(60))
def test_nothing_leaks_whatever_happens(seed: int) -> None:
    """Every transfer ends, and each block is freed exactly once and never while ranks may touch it.

    Messages are lost, duplicated and reordered. Sequences end, ranks fail, groups are lost and an engine
    dies.
    """
    rng = random.Random(seed)
    pair = Pair(seed, loss=rng.choice([0.0, 0.2, 0.5]), transport=rng.choice(["shm", "tcp"]))
    keys = [pair.open(transfer, seconds=rng.uniform(5, 60)) for transfer in range(12)]
    waiting = list(keys)
    for _ in range(120):
        if waiting and rng.random() < 0.3:
            key = waiting.pop()
            if "TransferFailed" not in pair.sender.scheduler.kinds(key):
                pair.admit(key)
        one = rng.choice(keys)
        side = rng.choice([pair.sender, pair.receiver])
        deed = rng.random()
        if deed < 0.3:
            pair.finish(one)
            for each in (pair.sender, pair.receiver):
                each.ranks.say(one, Outcome.done)
        elif deed < 0.4:
            side.ranks.say(one, rng.choice([Outcome.failed, Outcome.pending]), ERROR)
        elif deed < 0.5:
            side.scheduler.requests.append(r.CancelTransfer(one, rng.choice([None, ERROR])))
        elif deed < 0.55:
            side.transfers.lose()
        elif deed < 0.65:
            side.transfers.regain()
        elif deed < 0.66 and pair.sender.alive and pair.receiver.alive:
            side.alive = False
            other = pair.receiver if side is pair.sender else pair.sender
            other.peers.end(side.peer)
        pair.run(rng.random())
    pair.net.loss = 0.0
    for side in (pair.sender, pair.receiver):
        side.transfers.regain()
    pair.run(200.0, step=0.5)
    for side in (pair.sender, pair.receiver):
        if not side.alive:
            continue
        for key in keys:
            told = side.scheduler.kinds(key)
            assert told.count("TransferReceived") + told.count("TransferFailed") == 1, (key, told)
        never = {key for key in side.scheduler.held if side is pair.sender and key in waiting}
        assert set(side.scheduler.held) == never
        assert side.transfers.stats(None).open == 0
        assert not side.transfers.moving
        assert not side.ranks.busy
        assert not side.transfers._records
        assert not side.transfers._stops


@pytest.mark.requirement("E16")
def test_a_peer_that_has_ended_fails_its_transfers_at_once_and_gives_their_memory_back() -> None:
    for transport in ("shm", "tcp"):
        pair = Pair(transport=transport)
        key = pair.bound()
        pair.receiver.alive = False
        pair.sender.peers.end(pair.receiver.peer)
        pair.sender.turn()
        pair.sender.turn()  # the ranks have stopped
        assert pair.sender.scheduler.kinds(key)[-2:] == ["TransferFailed", "TransferFreed"]
        failed = pair.sender.scheduler.reported[-2]
        assert isinstance(failed, r.TransferFailed)
        assert failed.error.code == "peer_ended", "a front sends nothing there, then"
        assert not pair.sender.scheduler.held
        assert pair.sender.channel.dropped == [pair.receiver.peer]
        late = pair.key(2)  # the Submit was in flight
        pair.sender.transfers.open(TransferParameters(late, True, pair.receiver.peer, 60.0))
        pair.sender.turn()
        assert pair.sender.scheduler.kinds(late) == ["TransferFailed", "TransferFreed"]


def test_a_transfer_of_an_unknown_peer_is_given_up() -> None:
    """The peer ended before its first message. No watch sees this, and the deadline has not started."""
    pair = Pair()
    pair.sender.alive = False
    key = pair.key(1)
    pair.receiver.transfers.open(TransferParameters(key, False, pair.sender.peer, 600.0))
    pair.run(IDENTIFY_S - 1.0)
    assert pair.receiver.scheduler.kinds(key) == []
    pair.run(2.5)
    assert pair.receiver.scheduler.kinds(key) == ["TransferFailed", "TransferFreed"]


@pytest.mark.requirement("E8")
def test_a_silent_peer_keeps_memory_that_it_can_read_and_no_other() -> None:
    """A stopped peer may continue with mapped memory. Memory behind sockets belongs to this side alone."""
    for transport, kept in (("shm", True), ("tcp", False)):
        pair = Pair(transport=transport)
        key = pair.bound()
        pair.receiver.alive = False
        pair.sender.scheduler.requests.append(r.CancelTransfer(key, ERROR))
        pair.run(300.0, step=0.5)
        assert pair.sender.scheduler.kinds(key)[1] == "TransferFailed"
        assert bool(pair.sender.scheduler.held) is kept, transport
        assert pair.sender.transfers.stats(None).open == kept
        assert not pair.sender.transfers.moving
        pair.sender.peers.end(pair.receiver.peer)
        pair.run(0.2)
        assert not pair.sender.scheduler.held
        assert pair.sender.scheduler.kinds(key).count("TransferFreed") == 1


def test_a_peer_that_stood_still_and_goes_on_answers() -> None:
    pair = Pair()
    key = pair.bound()
    pair.receiver.alive = False
    pair.sender.scheduler.requests.append(r.CancelTransfer(key, ERROR))
    pair.run(30.0, step=0.5)
    assert pair.sender.scheduler.held
    pair.receiver.alive = True
    pair.run(30.0, step=0.5)
    assert not pair.sender.scheduler.held
    assert not pair.receiver.scheduler.held


def test_a_group_that_is_formed_anew_puts_offers_off_until_it_is_whole() -> None:
    """Otherwise each attempt would fail at once, and a sequence could use up its attempts."""
    pair = Pair()
    pair.receiver.transfers.lose()
    key = pair.open(1)
    pair.admit(key)
    pair.run(10.0)
    assert pair.receiver.scheduler.kinds(key) == pair.sender.scheduler.kinds(key) == []
    pair.receiver.transfers.regain()
    pair.run(0.2)  # before the offer is repeated
    assert pair.receiver.scheduler.kinds(key) == ["TransferWanted"]
    assert pair.sender.scheduler.kinds(key) == ["TransferBound"]


def test_a_transfer_that_was_put_off_is_bound_as_soon_as_there_are_blocks() -> None:
    """The reservation comes in the same iterations, before the sender repeats the offer."""
    pair = Pair()
    scheduler = pair.receiver.scheduler
    for other in range(len(scheduler.free) // 3):
        scheduler.hold(TransferKey(900 + other, 0, 1))
    key = pair.open(1)
    pair.admit(key)
    pair.run(0.1)
    assert scheduler.kinds(key) == ["TransferWanted"]
    assert pair.sender.scheduler.kinds(key) == []
    scheduler.free += scheduler.held.pop(TransferKey(900, 0, 1))
    pair.run(0.1)
    assert scheduler.kinds(key) == ["TransferWanted"]
    assert pair.sender.scheduler.kinds(key) == ["TransferBound"]
    pair.run(2.0)
    pair.finish(key)
    land(pair, key)
    assert scheduler.kinds(key) == ["TransferWanted", "TransferReceived"]


def test_a_lost_group_ends_its_transfers_and_repeats_stops_to_live_ranks() -> None:
    pair = Pair()
    key = pair.bound()
    sender = pair.sender
    sender.ranks.deaf = {1}  # the frame is lost with the connection
    sender.transfers.lose()
    sender.turn()
    assert sender.events[-1].finish == "evicted"
    assert sender.scheduler.held
    early = pair.open(2)  # accepted while the group is formed
    pair.admit(early)
    pair.run(1.0)
    assert sender.scheduler.kinds(early) == ["TransferBound", "TransferFailed"]
    assert kinds(sender).count("PushTransfer") == 1  # nothing begins meanwhile
    assert set(sender.scheduler.held) == {key, early}  # rank 1 has not reported a stop
    sender.ranks.deaf = set()
    sender.transfers.regain()
    pair.run(1.0)
    assert sender.scheduler.kinds(key)[-1] == "TransferFreed"
    assert not sender.scheduler.held
    after = pair.open(3)
    pair.admit(after)
    pair.run(0.3)
    assert after in sender.ranks.busy


def test_a_rank_that_was_replaced_has_stopped_with_its_process() -> None:
    pair = Pair()
    key = pair.bound()
    sender = pair.sender
    sender.ranks.deaf = {1}
    sender.transfers.lose()
    pair.run(1.0)
    assert sender.scheduler.held
    sender.ranks.said.append(ev.RankGone(1))
    pair.run(0.2)
    assert sender.scheduler.kinds(key)[-1] == "TransferFreed"
    assert not sender.scheduler.held
    sender.ranks.deaf = set()
    sender.transfers.regain()
    pair.bound(2)


def test_a_refused_transfer_fails_at_the_sender_and_holds_nothing() -> None:
    pair = Pair()
    pair.receiver.scheduler.refuse = "yes"
    key = pair.open(1)
    pair.admit(key)
    pair.run(1.0)
    for side in (pair.sender, pair.receiver):
        assert side.scheduler.kinds(key)[-2:] == ["TransferFailed", "TransferFreed"]
        assert not side.scheduler.held


@pytest.mark.requirement("E30")
def test_a_failed_transfer_is_one_line_that_names_both_ends(caplog: pytest.LogCaptureFixture) -> None:
    pair = Pair()
    key = pair.bound()
    corrupt = ErrorInfo(code="transfer_corrupt", message="other bytes arrived")
    with caplog.at_level(logging.INFO, "weft"):
        pair.receiver.ranks.say(key, Outcome.failed, corrupt)
        pair.run(1.0)
    lines = [record for record in caplog.records if "transfer 1/0" in record.message]
    assert len(lines) == 2  # one at each end
    for record in lines:
        assert record.levelno == logging.WARNING
        assert f"from {pair.sender.peer.name} to {pair.receiver.peer.name}" in record.message
    for side in (pair.sender, pair.receiver):
        stats = side.transfers.stats(None)
        assert (stats.done, stats.failed, stats.corrupt) == (0, 1, 1)


def test_a_sequence_that_ended_with_its_prefill_is_no_failure(caplog: pytest.LogCaptureFixture) -> None:
    pair = Pair()
    key = pair.bound()
    with caplog.at_level(logging.INFO, "weft"):
        pair.sender.scheduler.requests.append(r.CancelTransfer(key))
        pair.run(1.0)
    assert not [record for record in caplog.records if "transfer 1/0" in record.message]
    for side in (pair.sender, pair.receiver):
        assert side.transfers.stats(None).failed == 0
        assert side.scheduler.kinds(key)[-2:] == ["TransferFailed", "TransferFreed"]


def test_messages_that_are_none_are_dropped() -> None:
    pair = Pair()
    pair.sender.channel.send(pair.receiver.peer, b"\x81\xa4type\xa4what", asks=False)
    odd = r.Admitted(key=pair.key(1), num_prompt=PROMPT, dims=pair.sender.ranks.dims, hashes=b"odd")
    pair.sender.channel.send(pair.receiver.peer, r.encode(odd), asks=False)
    pair.run(0.2)
    assert pair.receiver.transfers.bad == 2
    pair.bound()


@pytest.mark.requirement("E18")
def test_a_message_that_cannot_be_taken_in_ends_its_transfer_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair()
    first, second = pair.bound(1), pair.key(2)
    machine = pair.receiver.transfers._machine
    handled = machine._message

    def poisoned(event: ev.PeerMessage, now: float) -> list[ev.Action]:
        if event.message.key == first and isinstance(event.message, r.Metadata):
            raise ZeroDivisionError
        return handled(event, now)

    monkeypatch.setattr(machine, "_message", poisoned)
    pair.finish(first)
    pair.run(1.0)
    assert pair.receiver.scheduler.kinds(first)[-2:] == ["TransferFailed", "TransferFreed"]
    pair.open(2)
    pair.admit(second)
    pair.run(0.5)
    assert second in pair.receiver.ranks.busy


def test_an_ending_engine_notifies_its_peers() -> None:
    """The other end does not wait for a deadline."""
    pair = Pair()
    key = pair.bound()
    pair.sender.transfers.close()
    pair.sender.alive = False
    assert pair.sender.channel.closed
    pair.run(0.3)
    assert pair.receiver.scheduler.kinds(key)[-2:] == ["TransferFailed", "TransferFreed"]
    assert not pair.receiver.scheduler.held


@pytest.mark.requirement("E28")
def test_a_turn_without_anything_to_do_costs_microseconds() -> None:
    """The bound also holds with active transfers."""
    pair = Pair()
    for transfer in range(100):
        pair.open(transfer)
    pair.run(1.0)
    transfers: EngineTransfers = pair.sender.transfers
    best = min(_seconds(pair, transfers) for _ in range(5))
    assert best < 50e-6


def _seconds(pair: Pair, transfers: EngineTransfers) -> float:
    began = time.process_time()
    for _ in range(1000):
        transfers.take(pair.sender.scheduler)
    return (time.process_time() - began) / 1000
