"""Messages of transfers between processes, and proof that a process has ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq

from tests.engine.transfers_rig import FakeRanks, FakeScheduler
from tests.support.slowness import deadline
from weft.common.clock import SystemClock
from weft.common.folder import private_folder
from weft.engine.disagg import peers
from weft.engine.disagg.engine_transfers import EngineTransfers
from weft.engine.disagg.peers import PeerProcess, PeerWatch, own_process
from weft.engine.disagg.transfer_channel import Arrived, ZmqTransferChannel
from weft.parallel.secret import derive
from weft.types import transfer as r
from weft.types.transfer import Peer, TransferKey, TransferParameters

SECONDS = deadline(20.0)


@pytest.fixture
def folder() -> Iterator[Path]:
    import shutil

    made = private_folder()
    yield made
    shutil.rmtree(made, ignore_errors=True)


class Other:
    """The process of a peer."""

    def __init__(self, folder: Path) -> None:
        self.peer = Peer(f"ipc://{folder}/other", 8)
        command = [sys.executable, "-m", "tests.engine.transfer_peer", self.peer.name, "8"]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE)
        assert self.process.stdout is not None
        assert self.process.stdout.readline().decode().strip() == self.peer.name

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture
def other(folder: Path) -> Iterator[Other]:
    made = Other(folder)
    yield made
    made.close()


class Engine:
    """A prefill engine with real sockets."""

    def __init__(self, folder: Path) -> None:
        self.scheduler = FakeScheduler()
        self.channel = ZmqTransferChannel(f"ipc://{folder}/head", 7)
        self.transfers = EngineTransfers(True, FakeRanks(), self.channel, incarnation=7, clock=SystemClock())
        self.poller = zmq.Poller()
        for socket in self.transfers.sockets:
            self.poller.register(socket, zmq.POLLIN)

    def until(self, reached: Callable[[], bool]) -> float:
        """Run iterations, asleep between them, until ``reached()``. Return the seconds."""
        began = time.monotonic()
        while not reached():
            assert time.monotonic() - began < SECONDS
            self.poller.poll(100)
            self.transfers.take(self.scheduler)
        return time.monotonic() - began


@pytest.fixture
def engine(folder: Path) -> Iterator[Engine]:
    made = Engine(folder)
    yield made
    made.transfers.close()


@pytest.mark.requirement("E9")
def test_a_killed_peer_fails_its_transfers_well_before_two_seconds(engine: Engine, other: Other) -> None:
    key = TransferKey(1, 0, 7)
    engine.transfers.open(TransferParameters(key, True, other.peer, 600.0))
    engine.until(lambda: engine.transfers._peers.knows(other.peer))
    engine.scheduler.hold(key)
    engine.scheduler.requests.append(r.OfferTransfer(key, 10, 0))
    engine.until(lambda: not engine.scheduler.requests)
    assert engine.scheduler.kinds(key) == []
    other.process.send_signal(signal.SIGSTOP)  # a stopped process proves nothing
    until = time.monotonic() + 0.5
    engine.until(lambda: time.monotonic() > until)
    assert engine.scheduler.kinds(key) == []
    other.process.kill()
    took = engine.until(lambda: "TransferFreed" in engine.scheduler.kinds(key))
    assert took < deadline(1.0)
    assert not engine.scheduler.held


def test_a_peer_that_came_later_is_reached_then(engine: Engine, folder: Path) -> None:
    """Processes may start in any order."""
    peer = Peer(f"ipc://{folder}/other", 8)
    key = TransferKey(1, 0, 7)
    engine.transfers.open(TransferParameters(key, True, peer, 600.0))
    engine.transfers.take(engine.scheduler)
    late = Other(folder)
    try:
        engine.until(lambda: engine.transfers._peers.knows(peer))
    finally:
        late.close()
    engine.until(lambda: "TransferFailed" in engine.scheduler.kinds(key))


@pytest.mark.requirement("E22")
def test_an_engine_without_transfers_connects_to_no_peer_and_ends_at_once(folder: Path) -> None:
    engine = Engine(folder)
    assert engine.channel._others == {}
    began = time.monotonic()
    engine.transfers.close()
    assert time.monotonic() - began < deadline(0.5)
    assert not (folder / "head").exists()


def test_invalid_envelopes_are_counted_and_dropped(engine: Engine) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.connect(engine.channel.address)
    try:
        for parts in ([b"\x00nonsense"], [b"two", b"parts"], [b""]):
            socket.send_multipart(parts)
        engine.until(lambda: engine.channel.bad == 3)
    finally:
        socket.close(0)
        context.term()


def test_only_sockets_of_this_host_are_connected_to(engine: Engine) -> None:
    for address in ("tcp://192.0.2.1:1", "ipc://", "ipc://relative", "ipc:///" + "x" * 120, "ipc:///a\0b"):
        engine.channel.send(Peer(address, 1), b"x", asks=False)
    assert [peer.name for peer in engine.channel._others] in ([], ["ipc:///a\0b"])


class TestOverHosts:
    """Messages over tcp, with keys derived from a secret."""

    SECRET = b"0123456789abcdef"

    @pytest.fixture
    def channels(self) -> Iterator[Callable[[bytes], ZmqTransferChannel]]:
        made: list[ZmqTransferChannel] = []

        def make(secret: bytes) -> ZmqTransferChannel:
            made.append(ZmqTransferChannel("tcp://127.0.0.1:*", len(made), derive(secret)))
            return made[-1]

        yield make
        for channel in made:
            channel.close()

    def heard(self, channel: ZmqTransferChannel, seconds: float) -> list[bytes]:
        got: list[bytes] = []
        until = time.monotonic() + seconds
        while not got and time.monotonic() < until:
            got += [one.body for one in [channel.receive()] if one is not None]
            time.sleep(0.005)
        return got

    def test_channels_with_the_same_secret_exchange_messages(
        self, channels: Callable[[bytes], ZmqTransferChannel]
    ) -> None:
        here, there = channels(self.SECRET), channels(self.SECRET)
        here.send(Peer(there.address, 1), b"offer", asks=True)
        assert self.heard(there, SECONDS) == [b"offer"]
        there.send(Peer(here.address, 0), b"answer", asks=False)
        assert self.heard(here, SECONDS) == [b"answer"]

    @pytest.mark.requirement("E1")
    def test_channels_with_different_secrets_exchange_nothing(
        self, channels: Callable[[bytes], ZmqTransferChannel]
    ) -> None:
        here, stranger = channels(self.SECRET), channels(b"another secret of 16")
        stranger.send(Peer(here.address, 0), b"offer", asks=True)
        here.send(Peer(stranger.address, 1), b"offer", asks=True)
        assert self.heard(here, 1.0) == self.heard(stranger, 0.2) == []
        friend = channels(self.SECRET)  # channels with the secret still communicate
        friend.send(Peer(here.address, 0), b"offer", asks=True)
        assert self.heard(here, SECONDS) == [b"offer"]

    def test_only_numeric_addresses_are_connected_to(
        self, channels: Callable[[bytes], ZmqTransferChannel]
    ) -> None:
        here = channels(self.SECRET)
        for address in ("tcp://host:1", "tcp://127.0.0.1", "tcp://127.0.0.1:0", "tcp://[::1]:x", "ipc:///a"):
            here.send(Peer(address, 1), b"x", asks=False)
        assert here._others == {}
        here.send(Peer("tcp://[::1]:9", 1), b"x", asks=False)
        assert len(here._others) == 1


def test_connections_that_nobody_uses_are_closed(
    engine: Engine, other: Other, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.channel.send(other.peer, b"", asks=True)
    engine.channel.tidy()
    assert set(engine.channel._others) == {other.peer}
    monkeypatch.setattr("weft.engine.disagg.transfer_channel.UNUSED_S", -1.0)
    engine.channel.tidy()
    assert engine.channel._others == {}
    engine.channel.send(other.peer, b"", asks=True)  # and connected again
    engine.until(lambda: engine.transfers._peers.knows(other.peer))


class TestPeerWatch:
    PEER = Peer("ipc://there", 1)

    def process(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])

    def of(self, child: subprocess.Popen[bytes]) -> PeerProcess:
        started = peers._started(child.pid)
        assert started is not None
        return own_process()._replace(pid=child.pid, started=started)

    @pytest.mark.parametrize("pidfds", [True, False])
    def test_the_end_of_a_process_is_seen(self, pidfds: bool, monkeypatch: pytest.MonkeyPatch) -> None:
        if not pidfds:
            monkeypatch.delattr(os, "pidfd_open")
        watch = PeerWatch()
        child = self.process()
        watch.register(self.PEER, self.of(child))
        watch.look()
        assert watch.take() == []
        assert watch.here(self.PEER)
        child.kill()  # a zombie: no process has waited for it
        until = time.monotonic() + SECONDS
        while not (ended := watch.take()) and time.monotonic() < until:
            watch.look()
            time.sleep(0.01)
        assert ended == [self.PEER]
        assert watch.take() == []
        child.wait()
        watch.close()

    def test_a_loop_that_sleeps_wakes(self) -> None:
        watch = PeerWatch()
        child = self.process()
        poller = zmq.Poller()
        poller.register(watch.sockets[0], zmq.POLLIN)
        watch.register(self.PEER, self.of(child))
        assert not poller.poll(0)
        child.kill()
        assert poller.poll(SECONDS * 1e3)
        assert watch.take() == [self.PEER]
        assert not poller.poll(0)
        child.wait()
        watch.close()

    def test_another_process_of_the_same_number_is_another(self) -> None:
        watch = PeerWatch()
        me = own_process()
        watch.register(self.PEER, me._replace(started=me.started - 1))
        assert watch.take() == [self.PEER]
        watch.close()

    def test_a_process_that_ended_before_its_registration(self) -> None:
        watch = PeerWatch()
        child = self.process()
        process = self.of(child)
        child.kill()
        child.wait()
        watch.register(self.PEER, process)
        assert watch.take() == [self.PEER]
        watch.close()

    def test_processes_of_other_hosts_are_not_watched(self) -> None:
        watch = PeerWatch()
        watch.register(self.PEER, own_process()._replace(host="elsewhere", pid=1 << 30))
        watch.look()
        assert watch.take() == []
        assert watch.knows(self.PEER)
        assert not watch.here(self.PEER)
        watch.close()

    def test_nothing_is_left_open(self) -> None:
        before = len(os.listdir("/proc/self/fd"))
        watch = PeerWatch()
        watch.register(self.PEER, own_process())
        assert watch.sockets
        watch.close()
        assert len(os.listdir("/proc/self/fd")) == before


def test_an_arrival_names_peer_and_process(engine: Engine, folder: Path) -> None:
    channel = ZmqTransferChannel(f"ipc://{folder}/second", 9)
    got: list[Arrived] = []
    try:
        channel.send(Peer(engine.channel.address, 7), b"body", asks=True)
        until = time.monotonic() + SECONDS
        while not got and time.monotonic() < until:
            got += [one for one in [engine.channel.receive()] if one is not None]
        assert got == [Arrived(Peer(channel.address, 9), own_process(), True, b"body")]
    finally:
        channel.close()
