"""Transfers of image embeddings from encode groups to other groups, over real transports."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.engine.embedding_rig import BLOCKS, BROKEN, ROW, SECONDS, Pair
from tests.support.slow import mostly_slow
from weft.common.errors import Unavailable
from weft.common.folder import private_folder
from weft.types import frames as f
from weft.types import transfer as r
from weft.types.transfer import GroupDims, TransferParameters

IMAGES = [256, 1, 77, 64, 300, 2, 199, 640]
"""Rows of eight images. Images of one or two rows leave some ranks without a shard."""
ERROR = Unavailable("its client left").info()
KINDS = ["shm", "tcp", "staged shm", "staged tcp"]
KINDS = ["shm", "tcp", "staged shm", "staged tcp"]
Make = Callable[..., Pair]


def with_shards(dims: GroupDims, shards: bool) -> GroupDims:
    kinds = tuple(msgspec.structs.replace(kind, shards=shards) for kind in dims.kinds)
    return msgspec.structs.replace(dims, kinds=kinds)


@pytest.fixture
def make() -> Iterator[Make]:
    import shutil

    made: list[tuple[Pair, Path]] = []

    def one(
        kind: str = "shm", ranks: tuple[int, int] = (1, 1), shards: bool = False, small: bool = False
    ) -> Pair:
        folder = private_folder()
        made.append((Pair(kind, folder, ranks, shards, small), folder))
        return made[-1][0]

    yield one
    for pair, folder in made:
        pair.close()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.requirement("D8", "D13")
@mostly_slow("kind", KINDS, ["shm", "staged tcp"])
@pytest.mark.parametrize("ranks", [(1, 1), (1, 2), (1, 4), (2, 2), (2, 4), (2, 1)])
@pytest.mark.parametrize("shards", [False, True])
def test_received_embeddings_equal_the_sent_ones(
    kind: str, ranks: tuple[int, int], shards: bool, make: Make
) -> None:
    pair = make(kind, ranks, shards and ranks[1] > 1)
    keys = [pair.image(rows) for rows in (130, 1, 64, 3)]
    for key in keys:
        pair.open(key)
        pair.compute(key)
    pair.land(*keys)
    for key in keys:
        pair.check(key)
        assert pair.sender.scheduler.kinds(key) == ["TransferBound", "TransferReceived"]
        assert pair.receiver.scheduler.kinds(key) == ["TransferWanted", "TransferReceived"]
    times = ranks[1] if not pair.shards else 1
    assert pair.sent_bytes == times * sum((130, 1, 64, 3)) * ROW
    stats = pair.sender.transfers.stats(None), pair.receiver.transfers.stats(None)
    assert stats[0].sent_bytes == stats[1].received_bytes == pair.sent_bytes
    assert [one.open for one in stats] == [0, 0]


@pytest.mark.requirement("D14")
@pytest.mark.parametrize("ranks", [2, 4])
def test_shares_cost_the_sender_exactly_so_many_times_less(ranks: int, make: Make) -> None:
    """Eight images, bytes as transports are given them."""
    sent = []
    for shards in (False, True):
        pair = make("shm", (1, ranks), shards)
        keys = [pair.image(rows) for rows in IMAGES]
        for key in keys:
            pair.open(key)
            pair.compute(key)
        pair.land(*keys)
        for key in keys:
            pair.check(key)
        sent.append(pair.sent_bytes)
    whole, shared = sent
    assert shared == sum(IMAGES) * ROW
    assert whole == ranks * shared


@pytest.mark.requirement("D13")
def test_ranks_of_the_sender_share_the_work(make: Make) -> None:
    for shards in (False, True):
        pair = make("shm", (2, 4), shards)
        key = pair.image(400)
        pair.open(key)
        pair.compute(key)
        pair.land(key)
        first, second = (rank.sent_bytes for rank in pair.sender.group.members)
        assert first == second == 400 * ROW * (1 if shards else 4) // 2


@pytest.mark.requirement("D9")
@pytest.mark.parametrize("kind", KINDS)
def test_an_image_larger_than_the_senders_window_is_sent_in_pieces(kind: str, make: Make) -> None:
    """Large images pass through a window of 25 rows, in turns with other transfers, and end once."""
    pair = make(kind, (1, 2), False, True)
    keys = [pair.image(rows) for rows in (640, 30, 200)]
    for key in keys:
        pair.open(key)
        pair.compute(key)
    pair.land(*keys)
    for key in keys:
        pair.check(key)
        assert pair.sender.scheduler.kinds(key) == ["TransferBound", "TransferReceived"]
    (rank,) = pair.sender.group.members
    assert rank.writes >= 2 * sum((640, 30, 200)) // 10
    pair.until(lambda: rank.transfer.pushes.under_way == 0)  # late answers may follow


@pytest.mark.requirement("D10")
@pytest.mark.parametrize("kind", KINDS)
def test_bytes_that_come_before_their_rank_knows_of_the_transfer_are_parked(kind: str, make: Make) -> None:
    """The engine's own rank knows the transfer at once. The other rank gets a late frame."""
    pair = make(kind, (1, 2), True)
    keys = [pair.image(rows) for rows in (100, 1, 64)]
    pair.receiver.group.late = []
    for key in keys:
        pair.open(key)
        pair.compute(key)
    own, other = pair.receiver.group.members
    pair.until(lambda: other.transfer.arrivals.parked > 0 and len(own.transfer.arrivals) == 3)
    later = time.monotonic() + 0.2
    pair.until(lambda: time.monotonic() > later)
    assert (other.pool == -1.0).all(), "bytes were taken in before the room was known"
    assert not any(pair.reported(key, "TransferReceived") for key in keys)
    pair.receiver.group.deliver()
    pair.land(*keys)
    for key in keys:
        pair.check(key)
    assert other.transfer.arrivals.parked == 0


@pytest.mark.requirement("D29")
def test_ranks_that_receive_one_transfer_do_not_wait_for_each_other(make: Make) -> None:
    """One rank stops in the middle of a copy. The other rank completes its part."""
    pair = make("shm", (1, 2), True)
    key = pair.image(300)
    slow, quick = pair.receiver.group.members
    go_on = threading.Event()
    take = slow.transport.take

    def waits(write: Any) -> Any:
        assert go_on.wait(SECONDS)
        return take(write)

    slow.transport.take = waits
    pair.open(key)
    pair.compute(key)
    value, _, blocks = pair.images[key]
    pair.until(lambda: bool((quick.rows(blocks, 300)[:, 150:] == value[:, 150:]).all()))
    assert (slow.pool == -1.0).all()
    assert not pair.reported(key, "TransferReceived")
    go_on.set()
    pair.land(key)
    pair.check(key)


@pytest.mark.requirement("D8")
def test_a_sender_of_whole_rows_is_refused_by_receivers_of_shares_before_a_byte_is_written(
    make: Make,
) -> None:
    """The settings of the sender's ranks contradict the settings of the receiver's ranks."""
    pair = make("shm", (1, 2), True)
    key = pair.image(100)
    send = pair.sender.group.send

    def wrong(frame: f.TransferToRank) -> None:
        if isinstance(frame, f.PushTransfer):
            bound = msgspec.structs.replace(frame.bound, dims=with_shards(frame.bound.dims, False))
            frame = msgspec.structs.replace(frame, bound=bound)
        send(frame)

    pair.sender.group.send = wrong  # type: ignore[method-assign]
    pair.open(key)
    pair.compute(key)
    pair.freed(key)
    assert "lies outside the transfer" in pair.receiver.scheduler.error(key)
    assert all((rank.pool == -1.0).all() for rank in pair.receiver.group.members)


@pytest.mark.requirement("D10", "D12")
@mostly_slow("kind", KINDS, ["shm", "staged tcp"])
def test_a_ready_embedding_waits_for_its_receiver(kind: str, make: Make) -> None:
    """The receiver's Submit comes late, and the receiver then has no space for a while."""
    pair = make(kind, (2, 2), True)
    keys = [pair.image(rows) for rows in (100, 5, 64)]
    for key in keys:
        pair.open(key, receiver=False)
        pair.compute(key)
    pair.receiver.scheduler.postpone.update(keys)
    later = time.monotonic() + 0.2
    pair.until(lambda: time.monotonic() > later)
    assert pair.sent_bytes == 0
    for key in keys:
        pair.open(key, sender=False)
    pair.until(lambda: all(pair.receiver.scheduler.kinds(key).count("TransferWanted") > 2 for key in keys))
    assert pair.sent_bytes == 0
    pair.receiver.scheduler.postpone.clear()
    pair.land(*keys)
    for key in keys:
        pair.check(key)


@pytest.mark.requirement("D10")
def test_a_transfer_without_a_receiver_ends_at_its_deadline(make: Make) -> None:
    pair = make()
    key = pair.image(70)
    pair.open(key, receiver=False, seconds=0.3)
    pair.compute(key)
    pair.until(lambda: "TransferFreed" in pair.sender.scheduler.kinds(key))
    assert "took too long" in pair.sender.scheduler.error(key)
    assert key not in pair.sender.scheduler.blocks
    assert pair.sent_bytes == 0
    pair.open(key, sender=False)  # the receiver is notified when its Submit comes
    pair.until(lambda: "TransferFreed" in pair.receiver.scheduler.kinds(key))


@pytest.mark.parametrize("shards", [False, True])
def test_rows_of_the_receiver_are_not_sent(shards: bool, make: Make) -> None:
    """The receiver reports the rows with ``start`` and needs no blocks. The sender may not even have
    encoded."""
    pair = make("shm", (2, 2), shards)
    key, other = pair.image(100), pair.image(90)
    for engine in pair.engines:
        engine.scheduler.blocks[key] = []
    pair.receiver.scheduler.held[key] = 100
    pair.open(key)
    pair.open(other)
    pair.sender.scheduler.requests.append(r.FinishTransfer(key))
    pair.compute(other)
    pair.land(key, other)
    pair.check(other)
    assert pair.sent_bytes == 90 * ROW * (1 if shards else 2)
    assert pair.sender.transfers.stats(None).done == pair.receiver.transfers.stats(None).done == 2


@pytest.mark.requirement("D12")
@pytest.mark.parametrize("end", ["sender", "receiver"])
def test_a_transfer_that_is_given_up_is_fenced_and_its_blocks_serve_the_next(end: str, make: Make) -> None:
    pair = make("shm", (1, 2), True)
    key, other = pair.image(200), pair.image(30)
    for one in (key, other):
        pair.open(one)
    pair.until(lambda: "TransferBound" in pair.sender.scheduler.kinds(key))
    engine = pair.sender if end == "sender" else pair.receiver
    engine.scheduler.requests.append(r.CancelTransfer(key, ERROR))
    pair.freed(key)
    for one in pair.engines:
        assert one.scheduler.error(key) == ERROR.message
        assert one.scheduler.kinds(key)[-2:] == ["TransferFailed", "TransferFreed"]
        assert key not in one.scheduler.blocks
    pair.compute(key, finish=False)  # the step was in flight: nothing is sent
    pair.compute(other)
    pair.land(other)
    assert pair.sent_bytes == 30 * ROW
    again = pair.image(150, transfer=key.transfer, attempt=1)
    pair.open(again)
    pair.compute(again)
    pair.land(again)
    pair.check(again)


@pytest.mark.requirement("D13")
@pytest.mark.parametrize("bound", [True, False])
@pytest.mark.parametrize("rank", [0, 1])
def test_an_item_that_a_rank_cannot_encode_fails_alone_and_once(bound: bool, rank: int, make: Make) -> None:
    """The item fails before or after the receiver has come. The other items are sent, and the ranks
    continue."""
    pair = make("shm", (2, 2), True)
    key, other = pair.image(64), pair.image(130)
    pair.open(other)
    pair.open(key, receiver=bound)
    if bound:
        pair.until(lambda: pair.receiver.scheduler.kinds(key) != [])
    pair.spoil(key, rank)
    pair.compute(other)
    pair.land(other)
    if not bound:
        assert pair.sender.scheduler.kinds(key) == []
        pair.open(key, sender=False)
    pair.freed(key)
    for engine in pair.engines:
        assert engine.scheduler.error(key) == BROKEN.message
        assert engine.scheduler.kinds(key).count("TransferFailed") == 1
    pair.check(other)
    last = pair.image(64)
    pair.open(last)
    pair.compute(last)
    pair.land(last)
    pair.check(last)


@pytest.mark.requirement("D13")
@pytest.mark.parametrize("end", ["sender", "receiver"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_lost_rank_fails_its_transfers_and_notifies_every_receiver(end: str, kind: str, make: Make) -> None:
    pair = make(kind, (2, 2), False)
    keys = [pair.image(rows) for rows in (64, 500)]
    for key in keys:
        pair.open(key)
    pair.until(lambda: all("TransferBound" in pair.sender.scheduler.kinds(key) for key in keys))
    engine = pair.sender if end == "sender" else pair.receiver
    engine.group.kill(1)
    if end == "receiver":
        for key in keys:
            pair.compute(key)
    pair.freed(*keys)
    for key in keys:
        assert all(
            "lost" in one.scheduler.error(key) or "broke" in one.scheduler.error(key) for one in pair.engines
        )
    assert not pair.sender.transfers.moving
    assert not pair.receiver.transfers.moving


@pytest.mark.parametrize("end", ["sender", "receiver"])
def test_a_group_that_loses_ranks_gives_all_transfers_up_and_stops_them(end: str, make: Make) -> None:
    pair = make("shm", (1, 1))
    key = pair.image(64)
    pair.open(key)
    pair.until(lambda: "TransferBound" in pair.sender.scheduler.kinds(key))
    engine = pair.sender if end == "sender" else pair.receiver
    engine.transfers.lose()
    pair.freed(key)
    late = pair.image(64)
    pair.open(late)
    if end == "receiver":
        pair.compute(late)
        later = time.monotonic() + 0.2
        pair.until(lambda: time.monotonic() > later)
        assert not pair.reported(late, "TransferReceived"), "it was taken in by ranks that are not there"
        engine.transfers.regain()
        pair.land(late)
        pair.check(late)
    else:
        pair.freed(late)


@pytest.mark.requirement("D29")
@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_that_take_whole_rows_refuse_shares(rank: int, make: Make) -> None:
    """The ranks have other settings than their engine. No byte is written."""
    pair = make("shm", (1, 2), False)
    key = pair.image(100)
    send = pair.receiver.group.send

    def wrong(frame: f.TransferToRank) -> None:
        if isinstance(frame, f.ExpectTransfer):
            bound = msgspec.structs.replace(frame.bound, dims=with_shards(frame.bound.dims, True))
            frame = msgspec.structs.replace(frame, bound=bound)
        send(frame)

    pair.receiver.group.send = wrong  # type: ignore[method-assign]
    pair.open(key)
    pair.compute(key)
    pair.freed(key)
    assert (
        "shares of rows was sent to a rank that does not receive such transfers"
        in pair.receiver.scheduler.error(key)
    )
    assert (pair.receiver.group.members[rank].pool == -1.0).all()


@pytest.mark.requirement("D23")
def test_a_transfer_of_another_start_of_the_encoder_ends_at_once(make: Make) -> None:
    """The encoder was restarted at the same address: transfers of the earlier incarnation end at once."""
    pair = make()
    key = pair.image(64)
    stale = key._replace(incarnation=key.incarnation - 1)
    pair.sender.transfers.open(TransferParameters(stale, True, pair.receiver.peer, 60.0))
    pair.receiver.transfers.open(TransferParameters(stale, False, pair.sender.peer, 60.0))
    pair.freed(stale)
    assert "another process" in pair.receiver.scheduler.error(stale)


def test_an_idle_engine_sleeps_on_all_that_may_come(make: Make) -> None:
    pair = make("shm", (2, 2))
    for engine in pair.engines:
        sockets: Any = engine.source.sockets
        assert {rank.reports.descriptor for rank in engine.group.members} <= {
            s for s in sockets if isinstance(s, int)
        }
        assert any(not isinstance(socket, int) for socket in sockets)


@pytest.mark.requirement("D12")
@mostly_slow("kind", KINDS, ["shm", "staged tcp"])
@mostly_slow("seed", range(3), 1)
def test_random_transfers_end_once_at_both_ends_and_what_received_is_right(
    kind: str, seed: int, make: Make
) -> None:
    """Random computation times, postponements, cancellations at either end and rank failures.

    The pool is so small that blocks of ended transfers are reused at once.
    """
    draw = random.Random(seed)
    pair = make(kind, draw.choice([(1, 2), (2, 2), (2, 4)]), draw.random() < 0.7, True)
    live: set[r.TransferKey] = set()
    uncomputed: set[r.TransferKey] = set()
    given_up: dict[r.TransferKey, float] = {}
    """Transfer -> time to cancel the transfer, unless ended by then."""
    checked = 0
    until = time.monotonic() + SECONDS
    while len(pair.images) < 60 or live:
        assert time.monotonic() < until, live
        if len(pair.images) < 60 and min(len(pair.free(engine)) for engine in pair.engines) >= 5:
            key = pair.image(draw.choice([1, 3, 64, 100, 250]))
            live.add(key)
            uncomputed.add(key)
            if draw.random() < 0.3:
                given_up[key] = time.monotonic() + draw.random() * 0.05
            if draw.random() < 0.2:
                pair.receiver.scheduler.postpone.add(key)
            first = draw.random() < 0.5
            pair.open(key, sender=first, receiver=not first)
            pair.open(key, sender=not first, receiver=first)
        for key in list(uncomputed):
            if draw.random() < 0.3:
                uncomputed.discard(key)
                if draw.random() < 0.1:
                    pair.spoil(key, draw.randrange(pair.sender.group.dims.ranks))
                elif key in pair.sender.scheduler.blocks:  # otherwise already ended
                    pair.compute(key)
        for key in list(live):
            if given_up.get(key, until) < time.monotonic():
                del given_up[key]
                draw.choice(pair.engines).scheduler.requests.append(r.CancelTransfer(key, ERROR))
            if draw.random() < 0.2:
                pair.receiver.scheduler.postpone.discard(key)
        for engine in draw.sample(pair.engines, 2):
            received = {e.key for e in engine.scheduler.reported if isinstance(e, r.TransferReceived)}
            engine.turn()
            if engine is pair.receiver:
                for event in engine.scheduler.reported:
                    if isinstance(event, r.TransferReceived) and event.key not in received:
                        pair.check(event.key, fresh=False)
                        checked += 1
        for key in list(live):
            ends = [
                {"TransferReceived", "TransferFreed"} & {*engine.scheduler.kinds(key)}
                for engine in pair.engines
            ]
            assert all(len(one) <= 1 for one in ends), ends
            assert all(engine.scheduler.kinds(key).count("TransferReceived") <= 1 for engine in pair.engines)
            if all(ends):
                live.discard(key)
    assert checked > 20
    assert all(len(pair.free(engine)) == BLOCKS for engine in pair.engines)
    assert not pair.sender.transfers.moving
    assert not pair.receiver.transfers.moving
