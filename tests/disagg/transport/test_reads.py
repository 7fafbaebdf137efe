"""Reads of a peer's memory that end late, break, or never end. A stand-in engine decides when."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from tests.disagg.transport.rig import SECRET, Pair
from tests.disagg.transport.stand_in_engine import StandInEngine
from tests.support.slowness import deadline
from weft.common.errors import ConfigError, EngineDead, TransportFailed
from weft.disagg.protocol.arrivals import Copied, Incoming
from weft.disagg.protocol.digests import ranks_seed
from weft.disagg.protocol.pushes import Write, Written
from weft.disagg.protocol.spans import SpanPart
from weft.disagg.transport import nixl_transport, read_writes
from weft.disagg.transport import wire as f
from weft.disagg.transport.base import PENDING
from weft.disagg.transport.copying import digest_parts
from weft.disagg.transport.nixl_transport import NixlTransport
from weft.disagg.transport.peer_links import ByteSource
from weft.disagg.transport.read_engine import ReadBroken, Segment, segment_of
from weft.disagg.transport.read_writes import ReadPeer, ReadWrites
from weft.types.transfer import Outcome, TransferKey

KEY, AGAIN = TransferKey(7, 0, 1), TransferKey(7, 1, 1)
GONE = ReadBroken("planted", over=True)


@pytest.fixture
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Pair]]:
    made: list[Pair] = []

    def make(kind: str = "stand-in") -> Pair:
        made.append(Pair(kind, tmp_path_factory.mktemp("t")))
        return made[-1]

    yield make
    for one in made:
        for rank in one.receivers:
            engine_of(rank).go.set()
        one.close()


def engine_of(rank: Any) -> StandInEngine:
    engine: StandInEngine = rank.transport._engine
    return engine


def until(done: Callable[[], object], seconds: float = 10.0) -> None:
    end = time.monotonic() + deadline(seconds)
    while not done():
        assert time.monotonic() < end
        time.sleep(0.005)


def held_back(one: Pair, key: TransferKey = KEY) -> StandInEngine:
    """Start a transfer. Return the receiver's engine, with a read under way that does not end."""
    engine = engine_of(one.receivers[0])
    engine.go.clear()
    one.expect(key)
    one.begin(key)
    one.compute(key)
    until(lambda: engine.under_way)
    return engine


def copies(one: Pair) -> list[np.ndarray]:
    return [region.copy() for region in one.receiver.regions[0]]


def unchanged(one: Pair, before: list[np.ndarray]) -> bool:
    return all(np.array_equal(x, y) for x, y in zip(before, one.receiver.regions[0], strict=True))


@pytest.mark.requirement("E8")
@pytest.mark.parametrize("kind", ["stand-in", "staged stand-in"])
def test_a_stopped_transfer_is_quiet_only_after_its_reads(pair: Callable[..., Pair], kind: str) -> None:
    one = pair(kind)
    before = copies(one)
    engine = held_back(one)
    receiver: Any = one.receivers[0]
    receiver.transfer.stop(KEY)
    assert one.senders[0].wait(KEY).outcome is Outcome.failed  # the answer needs no end of the read
    free = receiver.transport._reads.free
    assert free < read_writes.SLOTS
    time.sleep(0.1)
    assert engine.under_way
    assert receiver.transport._reads.free == free
    assert not receiver.transport.quiet(KEY)
    engine.go.set()
    receiver.wait_stopped(KEY)
    until(lambda: receiver.transport._reads.free == read_writes.SLOTS)
    assert unchanged(one, before)


@pytest.mark.requirement("E9")
def test_a_read_beyond_its_deadline_fails_the_transfer_and_keeps_its_memory(
    pair: Callable[..., Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read_writes, "READ_S", 0.1)
    one = pair()
    before = copies(one)
    engine = held_back(one)
    said = one.receivers[0].wait(KEY)
    assert said.error is not None
    assert "did not end in time" in said.error.message
    assert one.senders[0].wait(KEY).outcome is Outcome.failed
    assert engine.under_way
    assert not one.receivers[0].transport.quiet(KEY)
    reads: Any = one.receivers[0].transport
    until(lambda: not reads._reads._waiting)  # each write of the transfer is late
    monkeypatch.undo()
    engine.go.set()
    until(lambda: one.receivers[0].transport.quiet(KEY))
    assert unchanged(one, before)
    expected = one.expected()[0]
    assert one.transfer(AGAIN)[0].outcome is Outcome.done
    assert unchanged(one, expected)


@pytest.mark.parametrize("over", [True, False])
def test_a_broken_read_is_a_lost_connection(pair: Callable[..., Pair], over: bool) -> None:
    """The next transfer connects again. Memory that a failed read may still write is not used again."""
    one = pair()
    engine = held_back(one)
    slots = len(engine.registered[engine.name])
    engine.broken = ReadBroken("planted", over=over)
    assert one.receivers[0].wait(KEY).outcome is Outcome.failed
    said = one.senders[0].wait(KEY)
    assert said.error is not None
    assert said.error.code == TransportFailed.code
    until(lambda: engine.removed)
    engine.broken = None
    engine.go.set()
    more = len(engine.registered[engine.name]) - slots
    assert bool(more) is not over
    expected = one.expected()[0]
    assert one.transfer(AGAIN)[0].outcome is Outcome.done
    assert unchanged(one, expected)
    assert engine.peers == [engine_of(one.senders[0]).name]


def test_a_sender_that_closes_during_a_read_fails_the_transfer(pair: Callable[..., Pair]) -> None:
    one = pair()
    before = copies(one)
    engine = held_back(one)
    one.senders[0].transfer.close()
    said = one.receivers[0].wait(KEY)
    assert said.error is not None
    assert said.error.code == TransportFailed.code
    assert not engine.removed, "a read is under way"
    engine.go.set()
    until(lambda: engine.removed)
    assert unchanged(one, before)


def test_a_transport_that_closes_during_a_read_keeps_its_memory(
    pair: Callable[..., Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nixl_transport, "_CLOSE_S", 0.05)
    kept: list[object] = []
    monkeypatch.setattr(nixl_transport, "_ABANDONED", kept)
    one = pair()
    engine = held_back(one)
    one.receivers[0].transfer.close()
    assert len(kept) == 1
    assert not engine.closed


# ---- pieces and slots


def incoming(
    source: str, memory: torch.Tensor, target: int, spans: list[tuple[int, int]], number: int = 0
) -> Incoming:
    """Return a write of ``spans``, (offset, bytes), from ``memory`` to equal offsets of region ``target``."""
    rows = np.array([(memory.data_ptr() + at, at, size) for at, size in spans], np.int64)
    content = ByteSource((), ((target, rows),), np.arange(len(rows), dtype=np.uint64), 0)
    return Incoming(KEY._replace(transfer=number), source, number, (), 0, content)


class Landing:
    """``ReadWrites`` over a stand-in engine, with two peers in this process."""

    def __init__(self, slots: int = 4, slot_bytes: int = 1024) -> None:
        self.engine = StandInEngine("landing")
        self.memory = torch.arange(8192, dtype=torch.int64).to(torch.uint8)
        for name in ("a", "b"):
            StandInEngine(name).register([segment_of(self.memory)])
            self.engine.add(name.encode())
        self.taken: list[tuple[str, int, bytes]] = []
        self.broke: list[str] = []
        self.reads = ReadWrites(self.engine, self._take, self.broke.append, slots, slot_bytes)

    def begin(self, peer: str, spans: list[tuple[int, int]], number: int = 0) -> Any:
        write = incoming(peer, self.memory, 3, spans, number)
        return self.reads.begin(write, ReadPeer(peer, "DRAM", 0))

    def run(self) -> list[Copied]:
        return [ended for _ in range(20) for ended in self.reads.progress()]

    def _take(self, write: Incoming) -> None:
        content = write.content
        assert len(content.digests) == sum(len(spans) for _, spans in content.parts)
        for memory, (region, spans) in zip(content.memory, content.parts, strict=True):
            for begin, to, size in spans.tolist():
                assert region == 3
                data = bytes(memory[begin : begin + size].tolist())
                assert data == bytes(self.memory[to : to + size].tolist())
                self.taken.append((write.source, to, data))


def test_a_write_is_read_in_pieces_of_whole_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_writes, "PIECE_BYTES", 256)
    landing = Landing()
    spans = [(0, 100), (200, 100), (400, 100), (1000, 900), (2000, 8), (2100, 248), (2500, 0x100)]
    assert landing.begin("a", spans) is PENDING
    (ended,) = landing.run()
    assert ended.error is None
    assert sorted(at for _, at, _ in landing.taken) == [at for at, _ in spans]
    assert landing.reads.free == 4
    assert landing.reads.patience() is None


def test_a_read_that_ends_at_once_needs_no_further_poll() -> None:
    landing = Landing()
    landing.engine.turns = 1
    assert landing.begin("a", [(0, 1000)]) is None
    assert landing.run() == []
    assert len(landing.taken) == 1


def test_a_peer_that_stands_still_leaves_slots_for_others() -> None:
    landing = Landing()
    landing.engine.go.clear()
    for number in range(9):
        assert landing.begin("a", [(0, 1000)], number) is PENDING
    assert landing.reads.free == 2
    landing.reads.cancel(KEY._replace(transfer=0))
    assert [ended.key.transfer for ended in landing.run()] == [0]
    assert landing.reads.free == 2, "a cancelled write frees no slot before the end of its read"
    assert landing.begin("b", [(8, 1000)], 20) is PENDING
    assert landing.reads.free == 1
    landing.engine.go.set()
    assert {ended.key.transfer for ended in landing.run()} == {*range(1, 9), 20}
    assert landing.reads.free == 4
    assert [source for source, _, _ in landing.taken].count("a") == 8


def test_an_exception_of_a_copy_ends_its_write_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    landing = Landing()
    landing.begin("a", [(0, 1000)], 1)
    landing.begin("b", [(0, 1000)], 2)
    take = landing.reads._take

    def fails(write: Incoming) -> Any:
        if write.source == "a":
            raise IndexError("planted")
        return take(write)

    monkeypatch.setattr(landing.reads, "_take", fails)
    assert {ended.key.transfer: ended.error is None for ended in landing.run()} == {1: False, 2: True}


# ---- offers of memory


@pytest.fixture
def sides() -> Iterator[Callable[..., NixlTransport]]:
    made: list[NixlTransport] = []

    def side(rank: int, **more: Any) -> NixlTransport:
        made.append(NixlTransport("127.0.0.1", rank, 40 + rank, SECRET, engine=StandInEngine, **more))
        return made[-1]

    yield side
    for one in made:
        one.close()


def exchange(sender: Any, receiver: Any, write: Write) -> tuple[Written, list[Any]]:
    """Send one write. Return the end of the write, and the receiver's events."""
    sender.write(write)
    end, found = time.monotonic() + deadline(10), list[Any]()
    while time.monotonic() < end:
        for event in receiver.poll(0.01):
            found.append(event)
            if isinstance(event, Incoming):
                taken = receiver.take(event)
                if taken is not PENDING:
                    receiver.answer(event, taken)
            elif isinstance(event, Copied):
                receiver.answer(event.write, event.error)
        for event in sender.poll(0.01):
            if isinstance(event, Written):
                return event, found
    raise AssertionError("a write did not end")


def one_write(sender: Any, receiver: Any, memory: torch.Tensor) -> Write:
    name = sender.connect(receiver.endpoint, 1, 5.0)
    parts = (SpanPart(0, 0, np.array([(16, 32, 64)], np.int64)),)
    return Write(KEY, name, 0, parts, digest_parts([memory], parts, ranks_seed(KEY, 0, 1)))


class DeviceTensor:
    """A stand-in for a tensor on a GPU: memory of the host under the name of a device."""

    def __init__(self, memory: torch.Tensor, device: int) -> None:
        self.memory, self.device = memory, torch.device("cuda", device)

    def numel(self) -> int:
        return self.memory.numel()

    def element_size(self) -> int:
        return self.memory.element_size()

    def data_ptr(self) -> int:
        return self.memory.data_ptr()

    def get_device(self) -> int:
        return int(self.device.index)


def test_memory_of_a_gpu_is_registered_by_address_and_device(sides: Callable[..., NixlTransport]) -> None:
    """The rehearsal of device memory: no GPU takes part."""
    sender, receiver = sides(0, takes=False), sides(1, sends=False)
    memory = torch.arange(256, dtype=torch.int64).to(torch.uint8)
    region: Any = DeviceTensor(memory, 3)
    sender.register([region])
    there: Any = sender._engine
    assert there.registered[there.name] == [Segment("VRAM", memory.data_ptr(), 256, 3)]
    here = torch.zeros(256, dtype=torch.uint8)
    receiver.register([here])
    ended, _ = exchange(sender, receiver, one_write(sender, receiver, memory))
    assert ended.error is None
    assert torch.equal(here[32:96], memory[16:80])
    with pytest.raises(EngineDead, match="GPU"):
        sender.digest(KEY, "peer", ())


def test_caches_on_two_devices_are_refused(sides: Callable[..., NixlTransport]) -> None:
    memory = torch.zeros(64, dtype=torch.uint8)
    regions: Any = [DeviceTensor(memory, 0), DeviceTensor(memory, 1)]
    with pytest.raises(ConfigError, match="several devices"):
        sides(0).register(regions)


def test_an_offer_has_a_limit(sides: Callable[..., NixlTransport], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StandInEngine, "metadata", lambda self: bytes(f.MOST_OFFER))
    with pytest.raises(ConfigError, match=r"65\d+ bytes; the limit is 65536"):
        sides(0).register([torch.zeros(64, dtype=torch.uint8)])


@pytest.mark.parametrize(
    "change", ["name", "own name", "metadata", "twice", "bytes", "none", "region", "long"]
)
def test_a_bad_offer_ends_its_connection(sides: Callable[..., NixlTransport], change: str) -> None:
    sender, receiver = sides(0, takes=False), sides(1, sends=False)
    memory, here = torch.ones(6 << 20, dtype=torch.uint8), torch.zeros(6 << 20, dtype=torch.uint8)
    sender.register([memory])
    receiver.register([here])
    offer = msgspec.msgpack.decode(sender._offer, type=nixl_transport._Offer)
    write = one_write(sender, receiver, memory)
    if change == "region":
        offer = msgspec.structs.replace(offer, regions=())
    elif change == "name":
        offer = msgspec.structs.replace(offer, engine="another")
    elif change == "own name":
        offer = msgspec.structs.replace(offer, engine=receiver._engine.name)
    elif change == "metadata":
        offer = msgspec.structs.replace(offer, metadata=b"none")
    elif change == "long":
        long = (SpanPart(0, 0, np.array([(0, 0, 5 << 20)], np.int64)),)
        write = msgspec.structs.replace(write, parts=long)
    sender._offer = b"?" if change == "bytes" else msgspec.msgpack.encode(offer)
    opened = sender._open

    def open_with(link: Any) -> None:
        if change == "twice":
            link.connection.send(f.MemoryOffer(sender._offer))
        if change == "none":
            return NixlTransport.__mro__[2]._open(sender, link)  # type: ignore[attr-defined]
        return opened(link)

    sender._open = open_with  # type: ignore[method-assign]
    ended, found = exchange(sender, receiver, write)
    assert ended.error is not None
    assert receiver.refused == 1
    assert not found
    assert not here.any()


def test_a_rank_that_only_receives_offers_nothing(sides: Callable[..., NixlTransport]) -> None:
    receiver = sides(1, sends=False)
    receiver.register([torch.zeros(64, dtype=torch.uint8)])
    engine: Any = receiver._engine
    assert len(engine.registered[engine.name]) == read_writes.SLOTS
    with pytest.raises(EngineDead, match="only receives"):
        receiver.write(Write(KEY, "peer", 0, (), np.empty(0, np.uint64)))


def test_spans_are_read_in_order_and_neighbours_at_once() -> None:
    """Scattered destinations and any order of blocks: one run for adjacent bytes at the peer."""
    first = np.array([(1300, 0, 100), (1000, 64, 100), (1100, 512, 100), (5000, 900, 8)], np.int64)
    second = np.array([(5008, 0, 8), (1200, 64, 50)], np.int64)
    digests = np.arange(10, 16, dtype=np.uint64)
    content = ByteSource((), ((3, first), (4, second)), digests, 0)
    (piece,) = read_writes._pieces(content, 7)
    runs = [(1000, 200, 7), (1300, 100, 7), (5000, 8, 7), (1200, 50, 7), (5008, 8, 7)]
    assert piece.source.tolist() == [list(run) for run in runs]
    assert piece.offsets.tolist() == [0, 200, 300, 308, 358]
    assert piece.digests.tolist() == [11, 12, 10, 13, 15, 14]
    (_, here), (_, there) = piece.parts
    assert here.tolist() == [[0, 64, 100], [100, 512, 100], [200, 0, 100], [300, 900, 8]]
    assert there.tolist() == [[308, 64, 50], [358, 0, 8]]


def test_runs_end_with_their_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_writes, "PIECE_BYTES", 256)
    spans = np.array([(at, 4096 - at, 64) for at in range(0, 640, 64)], np.int64)
    pieces = read_writes._pieces(ByteSource((), ((0, spans),), np.arange(10, dtype=np.uint64), 0), 0)
    assert [piece.source.tolist() for piece in pieces] == [[[0, 256, 0]], [[256, 256, 0]], [[512, 128, 0]]]
    assert np.concatenate([piece.digests for piece in pieces]).tolist() == list(range(10))
