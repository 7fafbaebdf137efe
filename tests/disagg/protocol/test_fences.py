"""Fences and their conditions: answers of peers, silence of peers, and lost ranks."""

from __future__ import annotations

import itertools

import pytest

from tests.disagg.protocol.test_transfers import BOUND, KEY, OFFER, D, P, names, receiver, sender
from tests.disagg.protocol.world import ERROR, GROUP, PATIENCE
from weft.disagg.protocol import transfer_events as ev
from weft.disagg.protocol.receiver import TransferReceiver
from weft.disagg.protocol.tombstones import Tombstones
from weft.types import transfer as r
from weft.types.transfer import TransferKey


@pytest.mark.parametrize("proof", ["Fenced", "PeerLost", "Revoked"])
def test_a_peer_that_has_answered_is_not_revoked(proof: str) -> None:
    """A rank of this side takes longer than the peer's time-out."""
    out = sender()
    out.on(ev.Cancel(KEY, ERROR), 1.0)
    events: dict[str, ev.SenderEvent] = {
        "Fenced": ev.PeerMessage(D, r.Fenced(key=KEY)),
        "PeerLost": ev.PeerLost(D),
        "Revoked": ev.Revoked(KEY),
    }
    assert out.on(events[proof], 2.0) == []
    for later in (5.0, 100.0, 10_000.0):
        assert out.on(ev.TransferTick(), later) in ([], [ev.StopRanks(KEY)])
    assert out.on(ev.RankStopped(KEY, 0), 10_000.0) == []
    assert names(out.on(ev.RankStopped(KEY, 1), 10_000.0)) == ["TransferFreed"]


def test_fences_and_revocations_are_repeated_as_long_as_memory_waits_for_them() -> None:
    out = sender()
    out.on(ev.Cancel(KEY, ERROR), 0.0)
    at: dict[str, list[float]] = {"Fence": [], "Revoke": [], "StopRanks": []}
    now = 0.0
    while now < 20 * PATIENCE.remember:
        due = out.next_due()
        assert due is not None
        assert due > now
        now = due
        for name in names(out.on(ev.TransferTick(), now)):
            at[name].append(now)
    for times in at.values():
        gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
        assert gaps == sorted(gaps)
        assert max(gaps) == PATIENCE.longest
        assert times[-1] > 20 * PATIENCE.remember - PATIENCE.longest


def test_a_fence_that_nothing_waits_for_is_given_up() -> None:
    into = receiver()
    into.on(ev.Cancel(KEY, ERROR), 0.0)
    for rank in (0, 1):
        into.on(ev.RankStopped(KEY, rank), 0.0)
    assert names(into.on(ev.TransferTick(), PATIENCE.retry)) == ["Fence"]
    into.on(ev.TransferTick(), PATIENCE.remember)
    assert into.next_due() is None


@pytest.mark.parametrize("back", [False, True])
def test_a_rank_that_is_gone_before_the_transfer_is_bound_fails_it(back: bool) -> None:
    out, into = sender("new"), receiver("new")
    for event in (ev.RankGone(1), ev.RankBack(1))[: 1 + back]:
        assert out.on(event, 0.0) == into.on(event, 0.0) == []
    out.on(ev.Offer(OFFER), 0.0)
    into.on(ev.PeerMessage(P, OFFER), 0.0)
    bound, reserved = names(out.on(ev.PeerMessage(D, BOUND), 0.0)), names(into.on(ev.Reserve(BOUND), 0.0))
    if back:
        assert (bound, reserved) == (["Push", "TransferBound"], ["Expect", "Bound"])
        return
    assert bound == reserved == ["TransferFailed", "StopRanks", "Fence"]
    assert names(into.on(ev.RankStopped(KEY, 0), 0.0)) == ["TransferFreed"]


def test_tombstones_of_unknown_transfers_are_bounded_in_bytes() -> None:
    known = Tombstones[str](100.0, most=1000)
    known.add(KEY, "ours", 0.0)
    for number in range(50):
        known.add_of("a", TransferKey(100 + number, 0, 1), "theirs", 100, 1.0)
    known.add_of("b", TransferKey(500, 0, 1), "theirs", 100, 1.0)
    known.add_of("b", TransferKey(501, 0, 1), "theirs", 5000, 1.0)
    assert KEY in known
    assert len(known) == 1 + 10
    assert TransferKey(149, 0, 1) in known
    assert TransferKey(139, 0, 1) not in known
    known.expire(101.0)
    assert len(known) == 0
    assert not known._of
    assert not known._by
    assert not known._bytes


def test_the_senders_prefix_hit_is_sent_to_its_ranks() -> None:
    out = sender("new")
    out.on(ev.Offer(OFFER, 6), 0.0)
    assert out.on(ev.PeerMessage(D, BOUND), 0.0)[0] == ev.Push(KEY, OFFER, BOUND, 6)


def test_stops_are_repeated_to_ranks_without_a_report() -> None:
    """The request or the answer may have been lost with a connection, and no step shows the loss."""
    into = TransferReceiver(GROUP.dims, patience=PATIENCE)
    into.on(ev.Open(KEY, P, 1000.0), 0.0)
    into.on(ev.PeerMessage(P, OFFER), 0.0)
    into.on(ev.Reserve(BOUND), 0.0)
    into.on(ev.Cancel(KEY, ERROR), 10.0)
    into.on(ev.RankStopped(KEY, 0), 10.0)
    into.on(ev.PeerMessage(P, r.Fenced(key=KEY)), 10.0)
    told = []
    now = 10.0
    while len(told) < 3:
        due = into.next_due()
        assert due is not None
        assert due > now
        now = due
        told += [now for action in into.on(ev.TransferTick(), now) if action == ev.StopRanks(KEY)]
    assert told == [15.0, 25.0, 45.0]
    assert names(into.on(ev.RankStopped(KEY, 1), now)) == ["TransferFreed"]
    assert ev.StopRanks(KEY) not in into.on(ev.TransferTick(), now + 1000.0)
