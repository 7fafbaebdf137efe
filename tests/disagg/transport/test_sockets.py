"""Shared memory and TCP over real sockets: bytes, strangers, forged frames, stopped peers."""

from __future__ import annotations

import contextlib
import mmap
import os
import random
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.disagg.transport.rig import SECRET, TRANSPORTS, Pair, kinds
from tests.support.slowness import deadline
from weft.common.errors import ConfigError, EngineDead
from weft.disagg.protocol import arrivals as a
from weft.disagg.protocol.group_layout import blocks_of
from weft.disagg.protocol.pushes import Write
from weft.disagg.transport import wire as f
from weft.disagg.transport.nixl_transport import NixlTransport
from weft.disagg.transport.shared_memory import SharedMemory, map_read_only
from weft.disagg.transport.shm import ShmTransport
from weft.disagg.transport.sockets import SocketTransport
from weft.disagg.transport.tcp import TcpTransport
from weft.types import transfer as r
from weft.types.transfer import Outcome, TransferKey

KEY = TransferKey(7, 0, 1)
NIXL = kinds("nixl", "nixl over tcp", "staged nixl", "stand-in", "staged stand-in")
KINDS = [*kinds("shm", "tcp", "staged shm", "staged tcp"), *NIXL]


@pytest.fixture
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Pair]]:
    made: list[Pair] = []

    def make(kind: str, **more: Any) -> Pair:
        made.append(Pair(kind, tmp_path_factory.mktemp("t"), **more))
        return made[-1]

    yield make
    for one in made:
        one.close()


def same(pair: Pair, expected: list[list[np.ndarray]]) -> bool:
    return all(
        np.array_equal(have, want)
        for rank, regions in enumerate(expected)
        for have, want in zip(pair.receiver.regions[rank], regions, strict=True)
    )


@pytest.mark.parametrize("kind", kinds(*TRANSPORTS))
@pytest.mark.parametrize("ranks", [(1, 1), (2, 1), (1, 2)])
def test_a_sequence_arrives(pair: Callable[..., Pair], kind: str, ranks: tuple[int, int]) -> None:
    one = pair(kind, ranks=ranks, kinds=("full", "window", "latent, fp8", "compressed", "state"))
    expected = one.expected()
    assert not same(one, expected)
    assert {said.outcome for said in one.transfer(KEY)} == {Outcome.done}
    assert same(one, expected)
    assert {rank.wait(KEY).outcome for rank in one.senders} == {Outcome.done}
    for rank in [*one.senders, *one.receivers]:
        rank.transfer.stop(KEY)
        rank.wait_stopped(KEY)
        assert len(rank.transfer.pushes) == len(rank.transfer.arrivals) == 0
        assert rank.transfer.pushes.under_way == rank.transfer.arrivals.parked == 0


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_before_their_transfer_are_parked_and_later_ones_dropped(
    pair: Callable[..., Pair], kind: str
) -> None:
    one = pair(kind)
    expected = one.expected()
    one.begin(KEY)
    one.compute(KEY)
    until = time.monotonic() + deadline(10)
    while not one.receivers[0].transfer.arrivals.parked and time.monotonic() < until:
        time.sleep(0.01)
    assert not same(one, expected)
    one.expect(KEY)
    assert one.receivers[0].wait(KEY).outcome is Outcome.done
    assert same(one, expected)
    assert one.senders[0].wait(KEY).outcome is Outcome.done
    one.receivers[0].transfer.stop(KEY)
    one.receivers[0].wait_stopped(KEY)
    before = [region.copy() for region in one.receiver.regions[0]]
    for region in one.sender.regions[0]:
        region += 1
    for rank in one.senders:
        rank.transfer.stop(KEY)
    one.begin(KEY)
    one.compute(KEY)
    assert one.senders[0].wait(KEY).outcome is Outcome.failed
    assert all(np.array_equal(x, y) for x, y in zip(before, one.receiver.regions[0], strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_a_sender_that_closes_fails_its_writes_and_the_receiver_goes_on(
    pair: Callable[..., Pair], kind: str
) -> None:
    one, other = pair(kind), pair(kind)
    one.expect(KEY)
    one.receivers[0].transfer.close()
    one.begin(KEY)
    one.compute(KEY)
    assert one.senders[0].wait(KEY).outcome is Outcome.failed
    assert other.transfer(KEY)[0].outcome is Outcome.done


@pytest.mark.requirement("E30")
@pytest.mark.parametrize("kind", KINDS)
def test_memory_that_changes_between_digest_and_copy_is_noticed(
    pair: Callable[..., Pair], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A block of the sender is reused too early."""
    caught = 0
    reads = kind not in ("tcp", "staged tcp")  # the receiver reads the sender's memory
    taker = SocketTransport if kind.endswith("shm") else NixlTransport
    original = taker.take if reads else SocketTransport._send_write
    rng = np.random.default_rng(0)
    for _ in range(10):
        one = pair(kind)

        def spoil(one: Pair = one) -> None:
            if kind.startswith("staged"):
                ring: Any = one.senders[0].transport
                ring._memory.shown[0][:64] ^= int(rng.integers(1, 256))  # the slot is used again too early
                return
            block = one.tables(one.sender, 0)[0][2]
            elements = one.sender.elements(0, 0)
            elements[:, block] ^= rng.integers(1, 256, dtype=np.uint8)

        if reads:

            def take(self: SocketTransport, incoming: a.Incoming, spoil: Callable[[], None] = spoil) -> Any:
                spoil()
                return original(self, incoming)  # type: ignore[call-arg, arg-type]

            monkeypatch.setattr(taker, "take", take)
        else:

            def send(self: SocketTransport, *rest: Any, spoil: Callable[[], None] = spoil) -> None:
                flush = self._flush

                def spoiled(link: Any) -> None:
                    spoil()
                    flush(link)

                self._flush = spoiled  # type: ignore[method-assign]
                original(self, *rest)
                self._flush = flush  # type: ignore[method-assign]

            monkeypatch.setattr(SocketTransport, "_send_write", send)
        said = one.transfer(KEY)[0]
        assert said.error is not None
        caught += said.error.code == "transfer_corrupt"
    assert caught == 10


ALL = ("full", "window", "latent, fp8", "compressed", "state")


@pytest.mark.parametrize("cached", [3, 16, 24, 32])
def test_a_senders_own_prefix_hit_arrives(pair: Callable[..., Pair], cached: int) -> None:
    one = pair("shm", kinds=ALL)
    expected = one.expected()
    one.expect(KEY)
    one.push(one.bound(KEY), num_cached=cached)
    assert one.senders[0].told.empty()
    one.compute(KEY, chunks=(), begin=0)
    assert one.receivers[0].wait(KEY).outcome is Outcome.done
    assert same(one, expected)
    assert one.senders[0].wait(KEY).outcome is Outcome.done


@pytest.mark.requirement("E3")
@pytest.mark.parametrize("bound_after", [0, 1, 2, 3])
def test_blocks_may_come_chunk_by_chunk(pair: Callable[..., Pair], bound_after: int) -> None:
    """The reservation comes before the first chunk, or after any chunk. A chunk needs only its own blocks."""
    one = pair("shm", kinds=ALL)
    expected = one.expected()
    one.expect(KEY)
    have = 1
    for number, (begin, end) in enumerate([(8, 13), (13, 20), (20, 37)]):
        if number == bound_after:
            one.push(one.bound(KEY), have=1)
        need = -(-end // 8)
        one.grow(KEY, have, need - have)
        have = need
        one.chunk(KEY, begin, end)
    if bound_after == 3:
        one.push(one.bound(KEY), have=5)
    assert one.receivers[0].wait(KEY).outcome is Outcome.done
    assert same(one, expected)


@pytest.mark.parametrize("grown", [None, 3])
def test_positions_without_blocks_fail_the_transfer(pair: Callable[..., Pair], grown: int | None) -> None:
    """The positions are computed, and are added after a gap."""
    one = pair("shm", kinds=("full",))
    one.push(one.bound(KEY), have=2)
    if grown is None:
        one.chunk(KEY, 8, 20)
    else:
        one.grow(KEY, grown, 1)
    said = one.senders[0].wait(KEY)
    assert said.error is not None
    assert said.error.code == "bad_room_message"


@pytest.mark.requirement("E9")
def test_a_receiver_that_stands_still_delays_only_its_own_transfers(pair: Callable[..., Pair]) -> None:
    """The other end does not read: the window fills, and the thread continues with other peers."""
    one, other = pair("tcp"), pair("tcp")
    with socket.create_server(("127.0.0.1", 0)) as still:
        dead = one.receivers[0].transport.endpoint
        one.receivers[0].transport.endpoint = type(dead)(
            "tcp", f"127.0.0.1|{still.getsockname()[1]}", dead.incarnation
        )
        one.begin(KEY)
        one.compute(KEY)
        one.receivers[0].transport.endpoint = dead
        again = TransferKey(8, 0, 1)
        bound = other.bound(again)
        other.expect(again)
        one.senders[0].transfer.begin(
            one.offer(again),
            bound,
            tuple(blocks_of(table) for table in one.tables(one.sender, 0)),
        )
        began = time.monotonic()
        one.compute(again)
        assert other.receivers[0].wait(again).outcome is Outcome.done
        assert time.monotonic() - began < deadline(5.0)


@pytest.mark.requirement("E22")
def test_threads_end_promptly(pair: Callable[..., Pair]) -> None:
    one = pair("shm")
    before = threading.active_count()
    began = time.monotonic()
    one.senders[0].transfer.close()
    one.receivers[0].transfer.close()
    assert time.monotonic() - began < deadline(1.0)
    assert threading.active_count() == before - 2


@pytest.mark.requirement("E18")
@pytest.mark.parametrize("kind", KINDS)
def test_an_error_of_one_connection_ends_that_connection_alone(
    pair: Callable[..., Pair], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = pair(kind)
    original, planted = SocketTransport._got_write, list[int]()

    def got_write(self: SocketTransport, *rest: Any) -> None:
        if not planted:
            planted.append(1)
            raise KeyError("planted")
        original(self, *rest)

    monkeypatch.setattr(SocketTransport, "_got_write", got_write)
    one.expect(KEY)
    one.begin(KEY)
    one.compute(KEY)
    assert one.senders[0].wait(KEY).outcome is Outcome.failed
    again = TransferKey(8, 0, 1)
    expected = one.expected()
    assert one.transfer(again)[0].outcome is Outcome.done
    assert same(one, expected)


@pytest.mark.requirement("E18")
@pytest.mark.parametrize("kind", KINDS)
def test_a_thread_that_fails_fails_its_transfers_and_answers_stop(
    pair: Callable[..., Pair], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = pair(kind)
    again = TransferKey(8, 0, 1)
    one.expect(KEY)
    until = time.monotonic() + deadline(5)
    while not len(one.receivers[0].transfer.arrivals) and time.monotonic() < until:
        time.sleep(0.01)

    def poll(*rest: Any) -> Any:
        raise ValueError("planted")

    monkeypatch.setattr(one.receivers[0].transport, "poll", poll)
    one.receivers[0].transport.wake()
    said = one.receivers[0].wait(KEY)
    assert said.outcome is Outcome.failed
    assert said.error is not None
    one.receivers[0].transfer.stop(KEY)
    one.receivers[0].wait_stopped(KEY)
    one.expect(again)
    assert one.receivers[0].wait(again).outcome is Outcome.failed
    one.begin(KEY)
    one.compute(KEY)
    assert one.senders[0].wait(KEY).outcome is Outcome.failed


def test_a_connection_that_breaks_as_its_hand_shake_ends_fails_every_write(
    pair: Callable[..., Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first waiting write finds the broken connection. All other writes fail too."""
    one = pair("tcp")
    transport: Any = TcpTransport("127.0.0.1", 0, 9, SECRET)
    name = transport.connect(one.receivers[0].transport.endpoint, 0, 5.0)
    for number in range(3):
        transport.write(Write(KEY, name, number, (), np.empty(0, np.uint64)))
    opened = transport._open

    def broken(*rest: Any) -> int:
        raise BrokenPipeError

    def open_then(link: Any) -> None:
        link.connection.flush = broken
        opened(link)

    monkeypatch.setattr(transport, "_open", open_then)
    events, until = list[Any](), time.monotonic() + deadline(5)
    while len(events) < 3 and time.monotonic() < until:
        events += transport.poll(0.2)
    transport.close()
    assert sorted(event.number for event in events) == [0, 1, 2]
    assert all(event.error is not None for event in events)


# ---- hostile peers


def talk(listener: str, data: bytes) -> bytes:
    """Return the bytes that a stranger gets for ``data`` until the connection ends."""
    host, _, port = listener.rpartition("|")
    got = b""
    address, patience = (host, int(port)), deadline(5)
    with socket.create_connection(address, timeout=patience) as sock, contextlib.suppress(OSError):
        sock.sendall(data)
        sock.shutdown(socket.SHUT_WR)
        while data := sock.recv(65536):
            got += data
    return got


def hello(
    transport: str = "tcp", wanted: int = 1050, version: int = f.VERSION, nonce: bytes = b"n" * 32
) -> f.PeerHello:
    return f.PeerHello(version, transport, 5, wanted, 0, nonce)


@pytest.mark.requirement("F28")
@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"GET / HTTP/1.1\r\n\r\n",
        random.Random(0).randbytes(4096),
        struct.pack("<II16s", 1 << 31, 0, b""),
        struct.pack("<II16s", 10, 1 << 31, b""),
        f.pack(hello(version=99), 0, f.NO_KEY),
        f.pack(hello("shm"), 0, f.NO_KEY),
        f.pack(hello(wanted=1), 0, f.NO_KEY),
        f.pack(hello(nonce=b"short"), 0, f.NO_KEY),
        f.pack(f.KeyProof(), 0, f.NO_KEY),
        f.pack(hello(), 0, f.NO_KEY) + f.pack(f.KeyProof(), 1, f.NO_KEY),
        f.pack(hello(), 0, f.NO_KEY) + f.pack(f.KeyProof(), 1, b"k" * 32),
        f.pack(f.AnswerFrame(KEY, 0, None), 0, f.NO_KEY),
        b"\x80\x04\x95",
    ],
)
def test_invalid_connections_end_alone(pair: Callable[..., Pair], data: bytes) -> None:
    one = pair("tcp")
    expected = one.expected()
    talk(one.receivers[0].transport.endpoint.address, data)
    assert one.transfer(KEY)[0].outcome is Outcome.done
    assert same(one, expected)


@pytest.mark.parametrize("pieces", [1, 2, 4])
def test_a_client_without_the_key_gets_no_answer(pair: Callable[..., Pair], pieces: int) -> None:
    """A whole conversation without a key, in one segment: the key holds from the second frame on."""
    one = pair("tcp")
    receiver: Any = one.receivers[0].transport
    payload = b"x" * 64
    spans = f.SpansFrame(0, 0, np.array([(0, 0, 64)], "<i8").tobytes())
    frames = [
        f.pack(hello(), 0, f.NO_KEY),
        f.pack(f.KeyProof(), 1, f.NO_KEY),
        f.pack(f.WriteFrame(KEY, 0, (spans,), bytes(8)), 2, f.NO_KEY, len(payload)),
        payload,
    ]
    talk(receiver.endpoint.address, b"".join(frames[:pieces]))
    until = time.monotonic() + deadline(5)
    while receiver._links and time.monotonic() < until:
        time.sleep(0.01)
    assert receiver.refused == (pieces > 1)
    assert receiver._links == {}
    assert one.receivers[0].transfer.arrivals.parked == 0


@pytest.mark.parametrize("reply", ["hello", "forged proof", "echo"])
def test_a_listener_without_the_secret_gets_no_bytes(pair: Callable[..., Pair], reply: str) -> None:
    """A listener took the receiver's place."""
    one = pair("tcp")
    real = one.receivers[0].transport.endpoint
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(5)
        address = f"127.0.0.1|{server.getsockname()[1]}"
        one.receivers[0].transport.endpoint = type(real)("tcp", address, real.incarnation)
        one.begin(KEY)
        one.compute(KEY)
        sock, _ = server.accept()
        with sock:
            sock.settimeout(0.5)
            first = sock.recv(65536)
            answer = f.pack(f.PeerHello(f.VERSION, "tcp", real.incarnation, 0, 0, b"m" * 32), 0, f.NO_KEY)
            sock.sendall(answer)
            proof = sock.recv(65536)
            if reply != "hello":
                sock.sendall(proof if reply == "echo" else f.pack(f.KeyProof(), 1, f.NO_KEY))
            more = b""
            with contextlib.suppress(TimeoutError):
                more = sock.recv(65536)
    assert first
    assert len(proof) == len(f.pack(f.KeyProof(), 1, f.NO_KEY))
    assert more == b""
    assert one.senders[0].wait(KEY).outcome is Outcome.failed


@pytest.mark.parametrize("address", ["localhost|80", "example.org|80", "127.0.0.1|0", "127.0.0.1|x", "|", ""])
def test_an_endpoint_is_a_numeric_host_and_a_port(pair: Callable[..., Pair], address: str) -> None:
    """A name would have to be looked up, which may take long."""
    one = pair("tcp")
    real = one.receivers[0].transport.endpoint
    one.receivers[0].transport.endpoint = type(real)("tcp", address, real.incarnation)
    one.begin(KEY)
    one.compute(KEY)
    said = one.senders[0].wait(KEY, 2.0)
    assert said.error is not None
    assert "numeric host" in said.error.message


def test_only_clients_with_the_secret_are_answered(pair: Callable[..., Pair]) -> None:
    one = pair("tcp")
    impostor = TcpTransport("127.0.0.1", 0, 9, b"another secret of enough bytes")
    name = impostor.connect(one.receivers[0].transport.endpoint, 0, 5.0)
    impostor.write(Write(KEY, name, 0, (), np.empty(0, np.uint64)))
    until, events = time.monotonic() + deadline(10), list[Any]()
    while not events and time.monotonic() < until:
        events = impostor.poll(0.5)
    impostor.close()
    assert events[0].error is not None
    assert one.receivers[0].transport.refused == 1  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="--group-secret"):
        TcpTransport("127.0.0.1", 0, 9, b"short")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("trusting", [False, True])
def test_endpoints_that_are_swapped_are_noticed(
    pair: Callable[..., Pair], kind: str, trusting: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the hand-shake, and, were there none, by the digests: both ranks' blocks have the same numbers."""
    one = pair(kind, ranks=(2, 2), kinds=("full",))
    bound = one.bound(KEY)
    if trusting:
        monkeypatch.setattr(SocketTransport, "_check_hello", lambda *rest: None)
    one.expect(KEY)
    one.push(r.Bound(key=KEY, start=one.start, dims=bound.dims, blocks=bound.blocks,
                     endpoints=bound.endpoints[::-1]))  # fmt: skip
    one.compute(KEY)
    said = [rank.wait(KEY) for rank in (one.receivers if trusting else one.senders)]
    assert {each.outcome for each in said} == {Outcome.failed}
    if trusting:
        assert all(each.error and each.error.code == "transfer_corrupt" for each in said)


@pytest.mark.parametrize("kind", kinds("shm", "tcp", "nixl", "stand-in"))
def test_a_block_that_is_reassigned_while_its_write_waits_is_noticed(
    pair: Callable[..., Pair], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The digest covers the layer as computed, not the bytes sent later."""
    classes = {"shm": ShmTransport, "tcp": TcpTransport}
    monkeypatch.setattr(classes.get(kind, NixlTransport), "window_bytes", 512)
    one = pair(kind, kinds=("full",))
    out = one.senders[0].transfer
    one.begin(KEY)
    one.compute(KEY)  # the first writes are in flight without an answer: the others are queued
    until = time.monotonic() + deadline(10)
    while out.pushes.queued_bytes == 0 and time.monotonic() < until:
        time.sleep(0.01)
    assert out.pushes.queued_bytes > 0
    time.sleep(0.1)
    one.sender.elements(0, 0)[:, one.tables(one.sender, 0)[0][4]] ^= 0x55
    one.expect(KEY)
    said = one.receivers[0].wait(KEY)
    assert said.error is not None
    assert said.error.code == "transfer_corrupt"


def test_a_start_that_is_gone_is_not_taken_for_the_next(pair: Callable[..., Pair], tmp_path: Path) -> None:
    one = pair("shm")
    endpoint = one.receivers[0].transport.endpoint
    one.receivers[0].transport.endpoint = type(endpoint)("shm", endpoint.address, endpoint.incarnation + 1)
    one.begin(KEY)
    one.compute(KEY)
    assert one.senders[0].wait(KEY).outcome is Outcome.failed


@pytest.mark.requirement("F28")
@pytest.mark.parametrize("kind", kinds("shm", "nixl", "stand-in"))
@pytest.mark.parametrize(
    ("region", "span"),
    [(0, (0, 1 << 40, 8)), (0, (0, -8, 8)), (0, (0, 0, 1 << 62)), (0, (1 << 40, 0, 8)), (99, (0, 0, 8)),
     (0, (0, 0, 0)), (0, (-1, 0, 8)), (0, ((1 << 63) - 1, (1 << 63) - 1, (1 << 63) - 1))],
)  # fmt: skip
def test_forged_spans_are_refused_before_a_byte_is_touched(
    pair: Callable[..., Pair],
    kind: str,
    region: int,
    span: tuple[int, int, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one = pair(kind)
    receiver = one.receivers[0].transport
    assert isinstance(receiver, SocketTransport)
    before = [part.copy() for part in one.receiver.regions[0]]
    forged = f.SpansFrame(0, region, np.array([span], "<i8").tobytes())
    original = f.pack

    def pack(frame: f.Frame, *rest: Any) -> bytes:
        if isinstance(frame, f.WriteFrame):
            frame = f.WriteFrame(frame.key, frame.number, (forged,), bytes(8))
        return original(frame, *rest)

    monkeypatch.setattr(f, "pack", pack)
    one.expect(KEY)
    one.begin(KEY)
    one.compute(KEY)
    assert one.senders[0].wait(KEY).outcome is Outcome.failed
    assert receiver.refused >= 1
    assert all(np.array_equal(x, y) for x, y in zip(before, one.receiver.regions[0], strict=True))


@pytest.mark.requirement("F28")
@pytest.mark.parametrize("kind", kinds("shm", "nixl", "stand-in"))
def test_spans_of_somebody_elses_blocks_fail_the_transfer(
    pair: Callable[..., Pair], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The span lies inside a region, but outside the blocks of this transfer."""
    one = pair(kind, kinds=("full",))
    before = [part.copy() for part in one.receiver.regions[0]]
    original = f.pack

    def pack(frame: f.Frame, *rest: Any) -> bytes:
        if isinstance(frame, f.WriteFrame):
            forged = f.SpansFrame(0, 0, np.array([(0, 0, 8)], "<i8").tobytes())  # the null block
            frame = f.WriteFrame(frame.key, frame.number, (forged,), bytes(8))
        return original(frame, *rest)

    monkeypatch.setattr(f, "pack", pack)
    said = one.transfer(KEY)[0]
    assert said.error is not None
    assert said.error.code == "bad_spans"
    assert np.array_equal(before[0], one.receiver.regions[0][0])


# ---- memory


def test_shared_memory_is_read_only_for_others() -> None:
    memory = SharedMemory(10_000)
    memory.tensor[5] = 7
    seen = map_read_only(memory.fd, 10_000)
    assert seen[5] == 7
    memory.tensor[6] = 8
    assert seen[6] == 8
    with pytest.raises(OSError):
        os.ftruncate(memory.fd, 1)
    with pytest.raises(OSError):
        os.pwrite(memory.fd, b"x", 0)
    with pytest.raises(OSError):
        mmap.mmap(memory.fd, 10_000, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
    memory.close()


def test_memory_that_its_owner_could_cut_off_is_refused() -> None:
    loose = os.memfd_create("loose")
    os.ftruncate(loose, 4096)
    with pytest.raises(EngineDead):
        map_read_only(loose, 4096)
    os.close(loose)
    memory = SharedMemory(4096)
    with pytest.raises(EngineDead):
        map_read_only(memory.fd, 8192)
    memory.close()
    reader, writer = os.pipe()
    with pytest.raises(EngineDead):
        map_read_only(reader, 1)
    for fd in (reader, writer):
        os.close(fd)


def test_regions_take_no_memory_before_they_are_written() -> None:
    memory = SharedMemory(1 << 30)
    assert os.fstat(memory.fd).st_blocks == 0
    assert torch.count_nonzero(memory.tensor[:100]) == 0
    memory.close()


def test_the_secret_is_in_no_address() -> None:
    transport = TcpTransport("127.0.0.1", 0, 1, SECRET)
    assert SECRET.decode() not in repr(transport.endpoint)
    transport.close()
