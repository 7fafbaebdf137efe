"""The control channel: over real sockets, with and without a secret; and within a process, with faults."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
import zmq

from tests.support.slowness import deadline
from weft.common.clock import VirtualClock
from weft.common.errors import ConfigError
from weft.common.folder import private_folder
from weft.parallel import loopback
from weft.parallel.control import PeerGone, ZmqEngineChannel, ZmqRank
from weft.parallel.secret import derive, read_keys
from weft.types.frames import MAX_FRAME

SECONDS = deadline(20.0)


def endpoint(kind: str) -> str:
    return f"ipc://{private_folder()}/ranks" if kind == "ipc" else "tcp://127.0.0.1:*"


@pytest.mark.requirement("A5")
@pytest.mark.parametrize("kind", ["ipc", "tcp"])
def test_frames_go_both_ways_in_order(kind: str) -> None:
    engine = ZmqEngineChannel(endpoint(kind))
    ranks = [ZmqRank(engine.address, rank) for rank in (1, 2)]
    try:
        for number, rank in enumerate(ranks):
            rank.send(b"hello %d" % number)
        peers = {}
        for _ in ranks:
            found = engine.receive(SECONDS)
            assert found is not None
            peers[found[1]] = found[0]
        assert sorted(peers) == [b"hello 0", b"hello 1"]
        for number in range(200):
            engine.send(peers[b"hello 0"], b"%d" % number)
            engine.send(peers[b"hello 1"], b"-%d" % number)
        assert [ranks[0].receive(SECONDS) for _ in range(200)] == [b"%d" % n for n in range(200)]
        assert [ranks[1].receive(SECONDS) for _ in range(200)] == [b"-%d" % n for n in range(200)]
        assert engine.receive(0) is None
        assert ranks[0].receive(0.01) is None
    finally:
        for end in (*ranks, engine):
            end.close()


def test_peers_that_are_gone_cannot_be_sent_to_and_a_restarted_rank_is_another_peer() -> None:
    engine = ZmqEngineChannel(endpoint("ipc"))
    try:
        with pytest.raises(PeerGone):
            engine.send(b"nobody", b"x")
        peers = []
        for _ in range(2):
            rank = ZmqRank(engine.address, 1)
            rank.send(b"hello")
            found = engine.receive(SECONDS)
            assert found is not None
            peers.append(found[0])
            rank.close()
        assert peers[0] != peers[1]
        assert all(peer.startswith(b"1.") for peer in peers)
        until = time.monotonic() + SECONDS
        with pytest.raises(PeerGone):  # noqa: PT012
            while time.monotonic() < until:
                engine.send(peers[0], b"x")
                time.sleep(0.01)
    finally:
        engine.close()


def joins(engine: ZmqEngineChannel, make: Callable[[], ZmqRank], seconds: float) -> bool:
    rank = make()
    try:
        rank.send(b"hello")
        return engine.receive(seconds) is not None
    finally:
        rank.close()


@pytest.mark.requirement("F27")
def test_only_ranks_with_the_secret_join() -> None:
    keys, others = derive(b"a secret of enough bytes"), derive(b"another secret, as long")
    engine = ZmqEngineChannel("tcp://127.0.0.1:*", keys)
    try:
        assert joins(engine, lambda: ZmqRank(engine.address, 1, keys), SECONDS)
        assert not joins(engine, lambda: ZmqRank(engine.address, 1), 1.0)
        assert not joins(engine, lambda: ZmqRank(engine.address, 1, others), 1.0)
        # A rank with the engine's key but without the ranks' key.
        stolen = type(keys)(engine=keys.engine, rank=others.rank)
        assert not joins(engine, lambda: ZmqRank(engine.address, 1, stolen), 1.0)
        assert joins(engine, lambda: ZmqRank(engine.address, 2, keys), SECONDS)
    finally:
        engine.close()


@pytest.mark.slow
def test_a_rank_with_the_secret_does_not_talk_to_a_stranger_who_poses_as_the_engine() -> None:
    keys, others = derive(b"a secret of enough bytes"), derive(b"another secret, as long")
    for stranger in (ZmqEngineChannel("tcp://127.0.0.1:*", others), ZmqEngineChannel("tcp://127.0.0.1:*")):
        try:
            assert not joins(stranger, lambda engine=stranger: ZmqRank(engine.address, 1, keys), 1.0)  # type: ignore[misc]
        finally:
            stranger.close()


def test_secrets_come_from_files(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    with pytest.raises(ConfigError, match=r"--group-secret .*secret: the file can't be read"):
        read_keys(str(file))
    file.touch(mode=0o600)
    file.write_bytes(b"short\n")
    with pytest.raises(ConfigError, match="at least 16 bytes"):
        read_keys(str(file))
    file.write_bytes(b"a secret of enough bytes\n")
    keys = read_keys(str(file))
    assert keys == derive(b"a secret of enough bytes")
    assert "secret" not in repr(keys)


@pytest.mark.requirement("F27")
def test_frames_over_the_limit_end_the_connection_and_nothing_else() -> None:
    engine = ZmqEngineChannel(endpoint("ipc"))
    rank, other = ZmqRank(engine.address, 1), ZmqRank(engine.address, 2)
    try:
        rank.send(bytes(MAX_FRAME + 1))
        other.send(b"hello")
        found = engine.receive(SECONDS)
        assert found is not None
        assert found[1] == b"hello"
    finally:
        for end in (rank, other, engine):
            end.close()


# ---- loopback


def net(*faults: loopback.LinkFault) -> tuple[loopback.Loopback, VirtualClock]:
    clock = VirtualClock()
    return loopback.Loopback(clock, faults), clock


def test_waiting_takes_virtual_time_and_none_of_ours() -> None:
    wires, clock = net()
    engine, rank = wires.engine(), wires.rank(b"1")
    assert engine.receive(3600.0) is None
    assert clock.now() == 3600.0
    engine.send(b"1", b"x")
    assert rank.receive(0) == b"x"
    assert rank.receive(0) is None
    assert clock.now() == 3600.0


def test_ranks_take_turns_while_the_engine_waits() -> None:
    wires, clock = net()
    engine = wires.engine()
    for peer in (b"1", b"2"):
        rank = wires.rank(peer)

        def turn(rank: loopback.LoopbackRank = rank) -> bool:
            data = rank.receive(0)
            if data is not None:
                rank.send(data * 2)
            return data is not None

        wires.drive(peer, turn)
    engine.send(b"1", b"a")
    engine.send(b"2", b"b")
    assert [engine.receive(1.0), engine.receive(1.0)] == [(b"1", b"aa"), (b"2", b"bb")]
    assert clock.now() == 0.0


def test_planted_faults() -> None:
    lost = loopback.LinkFault(b"1", to_rank=True, at=0, deed=loopback.lose)
    twice = loopback.LinkFault(b"1", to_rank=True, at=2, deed=loopback.repeat)
    late = loopback.LinkFault(b"1", to_rank=True, at=1, delay=5.0)
    wires, clock = net(lost, twice, late)
    engine, rank = wires.engine(), wires.rank(b"1")
    for number in range(4):
        engine.send(b"1", b"%d" % number)
    assert [rank.receive(0) for _ in range(4)] == [b"2", b"2", b"3", None]
    assert engine.receive(60.0) is None
    assert clock.now() == 60.0
    assert rank.receive(0) == b"1"
    assert (lost.hits, twice.hits, late.hits) == (1, 1, 1)
    wires.cut(b"1")
    with pytest.raises(PeerGone):
        engine.send(b"1", b"x")
    with pytest.raises(PeerGone):
        engine.send(b"2", b"x")


@pytest.mark.parametrize("connected", [False, True])
def test_a_fault_planted_later_applies_once(connected: bool) -> None:
    """With and without earlier frames on the link."""
    wires, _ = net()
    engine, rank = wires.engine(), wires.rank(b"1")
    if connected:
        rank.send(b"first")
        assert engine.receive(0) == (b"1", b"first")
    twice = loopback.LinkFault(b"1", to_rank=False, at=int(connected), deed=loopback.repeat)
    wires.plant(twice)
    rank.send(b"x")
    assert [engine.receive(0) for _ in range(3)] == [(b"1", b"x"), (b"1", b"x"), None]
    assert twice.hits == 1


def test_a_rank_that_reconnects_is_answered_before_its_first_connection_ends() -> None:
    """As after a break that only the rank has noticed."""
    engine = ZmqEngineChannel("tcp://127.0.0.1:*")
    context = zmq.Context()
    try:
        for data in (b"first", b"second"):  # both stay open
            rank = context.socket(zmq.DEALER)
            rank.setsockopt(zmq.IDENTITY, b"1 and random bytes")
            rank.connect(engine.address)
            rank.send(data)
            assert engine.receive(deadline(5)) == (b"1 and random bytes", data)
            engine.send(b"1 and random bytes", b"answer")
            assert rank.poll(int(deadline(5) * 1000))
    finally:
        context.destroy(0)
        engine.close()
