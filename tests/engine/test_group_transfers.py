"""Transfers and the ranks of a group: frames in order with steps, reports, and ended ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import zmq

from tests.engine.group_rig import GroupRig, Ranks
from tests.engine.test_group import load
from tests.engine.transfers_rig import ERROR, GROUP, PROMPT
from tests.scheduler.fake_runner import kv_config
from weft.common.errors import EngineDead, ErrorInfo
from weft.disagg.protocol import transfer_events as ev
from weft.disagg.protocol.group_layout import blocks_of
from weft.disagg.transport.reports import TransferReports
from weft.engine.disagg.group_transfers import GroupTransfers
from weft.engine.ranks.worker import GivenUp
from weft.group import types as t
from weft.parallel.loopback import Loopback
from weft.runner.exports import RankTransfers
from weft.types import frames as f
from weft.types import transfer as r
from weft.types.plan import StepPlan
from weft.types.transfer import Endpoint, Outcome, TransferKey

KEY = TransferKey(5, 1, 9)
OFFER = r.Admitted(key=KEY, num_prompt=PROMPT, dims=GROUP.dims)
BLOCKS = (blocks_of([1, 2, 3]),)


class FakeTransfer:
    """The transfers of a rank. Records all calls, in order with the steps of the rank."""

    dims = GROUP.dims
    failure: Exception | None = None

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.log: list[Any] = []
        self.reports = TransferReports()

    def begin(
        self, offer: r.Admitted, bound: r.Bound, blocks: tuple[r.Blocks, ...], num_cached: int = 0
    ) -> None:
        self.log.append(("begin", offer.key, blocks, num_cached))

    def expect(self, offer: r.Admitted, bound: r.Bound) -> None:
        self.log.append(("expect", offer.key))

    def stop(self, key: TransferKey) -> None:
        self.log.append(("stop", key))
        self.reports.tell(ev.RankStopped(key, 99))

    def stop_all(self) -> None:
        self.log.append("stop all")

    def grow(self, key: TransferKey, blocks: tuple[r.Blocks, ...]) -> None: ...

    def computed(self, key: TransferKey, layers: tuple[int, ...], begin: int, end: int) -> None: ...

    def fail(self, key: TransferKey, error: ErrorInfo) -> None: ...


class Books:
    """A supervisor of rank processes, which start and end at once."""

    outlive = False

    def __init__(self) -> None:
        self.ranks: Ranks | None = None
        self.kills = 0

    def spawn(self, rank: int) -> bool:
        return False

    def keeps(self, rank: int) -> bool:
        return True

    def dead(self) -> list[tuple[int, str]]:
        return []

    def kill(self, rank: int) -> None:
        assert self.ranks is not None
        self.kills += 1
        self.ranks.restart(rank)

    def close(self, seconds: float) -> None: ...


def endpoint(rank: int) -> Endpoint:
    return Endpoint("shm", f"rank{rank}", rank)


def equip(ranks: Ranks) -> dict[int, FakeTransfer]:
    """Give every rank a fake transfer object."""
    made = {}
    for rank, runner in ranks.runners.items():
        made[rank] = transfer = FakeTransfer(rank)
        runner.transfer, runner.reports, runner.endpoint = transfer, transfer.reports, endpoint(rank)
        runner.forward = _noted(runner.forward, transfer)  # type: ignore[method-assign]
    return made


def equip_embeddings(ranks: Ranks) -> dict[int, FakeTransfer]:
    """Give every rank a fake transfer object for embeddings."""
    made = {}
    for rank, runner in ranks.runners.items():
        made[rank] = transfer = FakeTransfer(rank)
        runner.embeddings = RankTransfers(
            transfer=transfer,
            reports=transfer.reports,
            endpoint=endpoint(100 + rank),
            memory=(),
            close=lambda: None,
        )
    return made


def _noted(forward: Callable[[StepPlan], Any], transfer: FakeTransfer) -> Callable[[StepPlan], Any]:
    def noted(plan: StepPlan) -> Any:
        transfer.log.append(("step", plan.step))
        return forward(plan)

    return noted


@pytest.fixture
def rig() -> GroupRig:
    made = GroupRig(kv_config(copies=4), 1)
    made.join(Ranks(made.kv, 2))
    return made


def push() -> f.PushTransfer:
    endpoints = tuple(endpoint(rank) for rank in range(3))
    bound = r.Bound(key=KEY, start=0, dims=GROUP.dims, blocks=BLOCKS, endpoints=endpoints)
    return f.PushTransfer(offer=OFFER, bound=bound, blocks=BLOCKS, num_cached=4)


@pytest.mark.requirement("E21")
def test_a_group_without_a_role_has_nothing_of_it(rig: GroupRig) -> None:
    rig.ranks.up()
    assert rig.ranks.engine.transfers is None
    rig.ranks.workers[1]._send(f.TransferStopped(rank=1, key=KEY))  # a report from an unknown rank is ignored
    rig.ranks.engine.check()


def test_ranks_execute_transfer_commands_in_order_with_steps(rig: GroupRig) -> None:
    recorded = equip(rig.ranks)
    rig.ranks.up()
    transfers = rig.ranks.engine.transfers
    assert transfers is not None
    assert transfers.endpoints() == tuple(endpoint(rank) for rank in range(3))
    load(rig, 1)
    rig.plan()
    transfers.send(push())
    rig.commit()
    rig.plan()
    transfers.send(f.ExpectTransfer(offer=OFFER, bound=push().bound))
    transfers.send(f.StopTransfer(key=KEY))
    rig.commit()
    rig.ranks.settle()
    expected = [("step", 0), ("begin", KEY, BLOCKS, 4), ("step", 1), ("expect", KEY), ("stop", KEY)]
    assert {rank: transfer.log for rank, transfer in recorded.items()} == dict.fromkeys(range(3), expected)
    rig.ranks.engine.check()
    assert set(transfers.take()) == {ev.RankStopped(KEY, rank) for rank in range(3)}
    assert transfers.take() == []


@pytest.mark.requirement("E7")
def test_ranks_say_how_it_stands_and_have_numbers_of_their_group(rig: GroupRig) -> None:
    recorded = equip(rig.ranks)
    rig.ranks.up()
    transfers = rig.ranks.engine.transfers
    assert transfers is not None
    transfers.send(push())
    rig.ranks.settle()
    for transfer in recorded.values():
        transfer.reports.tell(ev.RankReport(KEY, 0, Outcome.failed, ERROR))
    rig.ranks.settle()
    rig.ranks.engine.check()
    said = transfers.take()
    assert sorted(word.rank for word in said) == [0, 1, 2]
    assert all(word == ev.RankReport(KEY, word.rank, Outcome.failed, ERROR) for word in said)


def test_caches_and_embeddings_have_transfers_of_their_own(rig: GroupRig) -> None:
    both = equip(rig.ranks), equip_embeddings(rig.ranks)
    rig.ranks.up()
    engine = rig.ranks.engine
    assert engine.transfers is not None
    assert engine.embeddings is not None
    assert engine.transfers.endpoints() == tuple(endpoint(rank) for rank in range(3))
    assert engine.embeddings.endpoints() == tuple(endpoint(100 + rank) for rank in range(3))
    kv, image = TransferKey(1, 0, 9), TransferKey(2, 0, 9)
    for transfers, key in ((engine.transfers, kv), (engine.embeddings, image)):
        offer = r.Admitted(key=key, num_prompt=PROMPT, dims=GROUP.dims)
        transfers.send(f.PushTransfer(offer=offer, bound=push().bound, blocks=BLOCKS, num_cached=0))
        transfers.send(f.StopTransfer(key=key))
    rig.ranks.settle()
    for recorded, key in zip(both, (kv, image), strict=True):
        expected = [("begin", key, BLOCKS, 0), ("stop", key)]
        assert {rank: made.log for rank, made in recorded.items()} == dict.fromkeys(range(3), expected)
    engine.check()
    assert set(engine.transfers.take()) == {ev.RankStopped(kv, rank) for rank in range(3)}
    assert set(engine.embeddings.take()) == {ev.RankStopped(image, rank) for rank in range(3)}
    for made in both[1].values():
        made.reports.tell(ev.RankReport(image, 0, Outcome.done))  # ignored after the stop
    rig.ranks.settle()
    engine.check()
    assert [word.rank for word in engine.embeddings.take()] == [0]
    assert engine.transfers.take() == []


def test_an_ended_rank_is_reported_to_both_kinds_of_transfers() -> None:
    rig = GroupRig(kv_config(copies=4), 1)
    ranks, books = Ranks(rig.kv, 2), Books()
    ranks.books = books
    rig.join(ranks)
    equip(ranks)
    equip_embeddings(ranks)
    ranks.up()
    books.ranks = ranks
    ranks.engine._feed(t.Gone(2, "planted"))
    lost = ranks.engine.membership.lost
    assert lost is not None
    ranks.engine.recover(lost)
    while not ranks.engine.recovered(10.0):
        pass
    for transfers in (ranks.engine.transfers, ranks.engine.embeddings):
        assert transfers is not None
        assert ev.RankGone(2) in transfers.take()
    assert ranks.engine.embeddings is not None
    assert ranks.engine.embeddings.endpoints() is None, "the process that took its place has not said where"


def test_a_rank_that_joins_another_engine_stops_the_transfers_of_both(rig: GroupRig) -> None:
    both = equip(rig.ranks), equip_embeddings(rig.ranks)
    rig.ranks.up()
    rig.ranks.behead()
    rig.ranks.up()
    for recorded in both:
        assert [recorded[rank].log for rank in (1, 2)] == [["stop all"]] * 2


def test_a_rank_with_failed_embedding_transfers_is_given_up(rig: GroupRig) -> None:
    """Another process can replace the rank."""
    equip(rig.ranks)
    embeddings = equip_embeddings(rig.ranks)
    rig.ranks.up()
    embeddings[1].failure = OSError("planted")
    with pytest.raises(GivenUp, match="KV transfer thread"):
        rig.ranks.workers[1].turn()


def test_ranks_of_a_replica_are_numbered_from_its_engine_on() -> None:
    own, sent = FakeTransfer(4), []
    transfers = GroupTransfers(
        own, own.reports, lambda: [endpoint(0)] * 3, {5: 1, 6: 2}, lambda *to: sent.append(to)
    )
    assert transfers.ranks == range(3)
    transfers.send(f.StopTransfer(key=KEY))
    assert [rank for rank, _ in sent] == [5, 6]
    transfers.report(f.TransferStopped(rank=6, key=KEY))
    transfers.ended(5)
    transfers.ended(4)  # the engine's own rank has no process to report
    assert set(transfers.take()) == {ev.RankStopped(KEY, 0), ev.RankStopped(KEY, 2), ev.RankGone(1)}


def test_endpoints_are_complete_or_none() -> None:
    own = FakeTransfer(0)
    known: list[Endpoint | None] = [endpoint(0), None]
    transfers = GroupTransfers(own, own.reports, lambda: known, {1: 1}, lambda *_: None)
    assert transfers.endpoints() is None
    known[1] = endpoint(1)
    assert transfers.endpoints() == (endpoint(0), endpoint(1))


def test_a_rank_that_was_replaced_has_ended_and_the_next_one_has_an_endpoint_of_its_own() -> None:
    rig = GroupRig(kv_config(copies=4), 1)
    books = Books()
    ranks = Ranks(rig.kv, 2)
    ranks.books = books
    rig.join(ranks)
    equip(ranks)
    ranks.up()
    transfers = ranks.engine.transfers
    assert transfers is not None
    books.ranks = ranks
    ranks.engine._feed(t.Gone(2, "planted"))
    lost = ranks.engine.membership.lost
    assert lost is not None
    ranks.engine.recover(lost)  # kills the rest of the rank and starts another process
    for _ in range(4):  # transfers fail meanwhile: the starting rank takes no part
        transfers.send(f.StopTransfer(key=KEY))
    ranks.runners[2].endpoint = endpoint(22)
    while not ranks.engine.recovered(10.0):
        pass
    assert books.kills == 1
    assert ev.RankGone(2) in transfers.take()
    assert transfers.endpoints() == (endpoint(0), endpoint(1), endpoint(22))


def test_a_rank_report_wakes_an_idle_engine(rig: GroupRig) -> None:
    recorded = equip(rig.ranks)
    rig.ranks.up()
    transfers = rig.ranks.engine.transfers
    assert transfers is not None
    poller = zmq.Poller()
    for socket in transfers.sockets:
        poller.register(socket, zmq.POLLIN)
    assert not poller.poll(0)
    recorded[0].reports.tell(ev.RankStopped(KEY, 0))
    assert poller.poll(0)
    transfers.take()
    assert not poller.poll(0)
    assert isinstance(rig.ranks.net, Loopback)  # a zmq channel has a socket too


def test_an_engine_whose_transfers_have_failed_ends(rig: GroupRig) -> None:
    """Another process, with working transfers, takes the place of the engine."""
    transfer = FakeTransfer(0)
    transfers = GroupTransfers(transfer, transfer.reports, lambda: [endpoint(0)], {}, lambda rank, data: None)
    assert transfers.take() == []
    transfer.failure = OSError("planted")
    with pytest.raises(EngineDead, match="KV transfer thread"):
        transfers.take()
