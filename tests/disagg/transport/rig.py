"""A sender and a receiver with real groups, each rank with a thread, over any transport."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.disagg.protocol.memory import KINDS, Group, reference
from tests.disagg.transport.stand_in_engine import StandInEngine
from tests.support.slowness import deadline
from weft.disagg.protocol.group_layout import blocks_of
from weft.disagg.protocol.pairing import narrowed
from weft.disagg.protocol.spans import first_position
from weft.disagg.protocol.transfer_events import RankReport, RankStopped
from weft.disagg.transport.base import Transport
from weft.disagg.transport.copies import Copies, HostCopies
from weft.disagg.transport.nixl_transport import NixlTransport
from weft.disagg.transport.read_engine import module_name
from weft.disagg.transport.shared_memory import SharedMemory
from weft.disagg.transport.shm import ShmTransport
from weft.disagg.transport.staging_memory import Sizes, Staged
from weft.disagg.transport.tcp import TcpTransport
from weft.disagg.transport.transfer_thread import RankTransfer
from weft.disagg.transport.transport_set import TransportSet
from weft.types import transfer as r
from weft.types.transfer import Outcome, TransferKey

SECRET = b"sixteen bytes at least"
TABLES = [[3, 9, 1, 7, 12], [5, 2, 11, 4, 8, 10, 6, 13, 1, 14]]


class Rank:
    """One rank: transport, thread, and reports to its engine."""

    def __init__(self, group: Group, rank: int, transport: Transport, start: bool = True) -> None:
        """Start a rank. Without ``start`` the rank has no thread: see ``RankTransfer``."""
        self.told: queue.SimpleQueue[RankReport | RankStopped] = queue.SimpleQueue()
        self.transport = transport
        self.transfer = RankTransfer(rank, group.dims, transport, self.told.put, start=start)

    def wait(self, key: TransferKey, seconds: float = 20.0) -> RankReport:
        """Wait for the end of a transfer. Return its outcome on this rank."""
        until = time.monotonic() + deadline(seconds)
        while True:
            said = self.told.get(timeout=max(0.0, until - time.monotonic()))
            if isinstance(said, RankReport) and said.key == key and said.outcome is not Outcome.pending:
                return said

    def wait_stopped(self, key: TransferKey, seconds: float = 20.0) -> None:
        until = time.monotonic() + deadline(seconds)
        while not isinstance(said := self.told.get(timeout=max(0.0, until - time.monotonic())), RankStopped):
            pass
        assert said.key == key


TRANSPORTS = {
    "shm": ("shm", False, False),
    "tcp": ("tcp", False, False),
    "staged shm": ("shm", True, True),
    "staged tcp": ("tcp", True, True),
    "staged shm to shm": ("shm", True, False),
    "shm to staged shm": ("shm", False, True),
    "nixl": ("nixl", False, False),
    "nixl over tcp": ("nixl over tcp", False, False),
    "staged nixl": ("nixl", True, True),
    "stand-in": ("stand-in", False, False),
    "staged stand-in": ("stand-in", True, True),
    "set over shm": ("set over shm", False, False),
    "set over tcp": ("set over tcp", False, False),
    "staged set over tcp": ("set over tcp", True, True),
}
"""Name -> transport, and whether the caches of the sender and of the receiver are staged."""
WITHOUT_NIXL = module_name() is None


def kinds(*names: str) -> list[Any]:
    """Return keys of ``TRANSPORTS`` as parameters of a test. Without NIXL its transports are skipped."""
    skip = pytest.mark.skipif(WITHOUT_NIXL, reason="needs NIXL: pip install weft[nixl]")
    return [pytest.param(name, marks=[skip] if "nixl" in name else []) for name in names]


SMALL = Sizes(slot=512, slots=3, inbox=1024)
"""Sizes for staged caches, smaller than a prompt."""


def share(group: Group, rank: int, transport: Any, staged: Copies | None = None) -> list[SharedMemory]:
    """Register the regions of a rank with the transport, or with ``staged``."""
    if staged is not None:
        regions = [torch.from_numpy(region) for region in group.regions[rank]]
        stage(transport, regions, staged)
        return []
    if isinstance(transport, TransportSet):
        shared = share(group, rank, transport.members[0])
        transport.members[1].register([memory.tensor for memory in shared])
        return shared
    shared = [SharedMemory(len(region)) for region in group.regions[rank]]
    for number, memory in enumerate(shared):
        memory.tensor.copy_(torch.from_numpy(group.regions[rank][number]))
        group.regions[rank][number] = memory.tensor.numpy()
    if isinstance(transport, ShmTransport):
        transport.share(shared)
    else:
        transport.register([memory.tensor for memory in shared])
    return shared


def stage(transport: Any, regions: list[torch.Tensor], copies: Copies, sizes: Sizes = SMALL) -> None:
    for one in transport.members if isinstance(transport, TransportSet) else [transport]:
        one.stage(Staged(regions, copies, sizes, sends=True, takes=True))


def transport(kind: str, folder: Path, rank: int, incarnation: int) -> Any:
    if kind == "shm":
        return ShmTransport(str(folder), rank, incarnation)
    if kind.startswith("set"):
        return TransportSet([transport(name, folder, rank, incarnation) for name in ("shm", "tcp")])
    if kind == "stand-in":
        return NixlTransport("127.0.0.1", rank, incarnation, SECRET, engine=StandInEngine)
    if kind.startswith("nixl"):
        with pytest.MonkeyPatch.context() as patch:
            if kind.endswith("tcp"):
                patch.setenv("UCX_TLS", "tcp")  # UCX reads the variable once per engine
            return NixlTransport("127.0.0.1", rank, incarnation, SECRET)
    return TcpTransport("127.0.0.1", rank, incarnation, SECRET)


class LateCopies(HostCopies):
    """Copies out of the caches that read as late as possible.

    A copy reads at the ``turns``-th poll, or not before ``go`` is set.
    """

    turns = 3

    def __init__(self) -> None:
        self.go = threading.Event()
        self.go.set()
        self.under_way = self.most = 0

    def out(self, regions: Any, parts: Any, to: Any, ready: Any) -> Any:
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        return [self.turns, lambda: HostCopies.out(self, regions, parts, to, ready)]

    def ended(self, copy: Any) -> bool:
        copy[0] -= 1
        if copy[0] > 0 or not self.go.is_set():
            return False
        copy[1]()
        self.under_way -= 1
        return True


class Pair:
    """Two groups, and one sequence of ``end`` positions of which the receiver has the first ``start``."""

    def __init__(
        self,
        kind: str,
        folder: Path,
        kinds: Sequence[str] = ("full", "latent, fp8", "state"),
        ranks: tuple[int, int] = (1, 1),
        blocks: tuple[int, int] = (8, 4),
        end: int = 37,
        start: int = 8,
        senders: bool = True,
        receivers: bool = True,
        copies: type[HostCopies] = HostCopies,
    ) -> None:
        """Start both groups. Without ``senders`` or ``receivers`` these ranks run in another process.

        ``kind``: a key of ``TRANSPORTS``. ``copies``: copies for staged caches.
        """
        kind, *staged = TRANSPORTS[kind]
        self.over = kind.rpartition(" ")[2] if kind.startswith("set") else ""
        """Transport of a set that the sender uses."""
        rng = np.random.default_rng(5)
        caches = [KINDS[name] for name in kinds]
        self.sender, self.receiver = (
            Group(caches, ranks[0], blocks[0], 16),
            Group(caches, ranks[1], blocks[1], 16, True),
        )
        self.sender.fill(rng)
        self.receiver.fill(rng)
        self.start, self.end = start, end
        self.shared = []
        self.senders, self.receivers = list[Rank](), list[Rank]()
        sides = ((self.sender, self.senders, 0, senders), (self.receiver, self.receivers, 50, receivers))
        for (group, found, base, here), is_staged in zip(sides, staged, strict=True):
            if not here:
                continue
            for rank in range(group.ranks):
                one = transport(kind, folder, rank, 1000 + base + rank)
                self.shared.append(share(group, rank, one, copies() if is_staged else None))
                found.append(Rank(group, rank, one))

    def tables(self, group: Group, which: int) -> list[list[int]]:
        size = -(-self.end // group.block_size)
        return [[1 + which] if spec.kind == "state" else TABLES[which][:size] for spec in group.caches]

    def offer(self, key: TransferKey) -> r.Admitted:
        return r.Admitted(key=key, num_prompt=self.end, dims=self.sender.dims)

    def bound(self, key: TransferKey) -> r.Bound:
        blocks = tuple(blocks_of(table) for table in self.tables(self.receiver, 1))
        ends = tuple(rank.transport.endpoint for rank in self.receivers)
        ends = narrowed(ends, self.over) if self.over else ends
        return r.Bound(key=key, start=self.start, dims=self.receiver.dims, blocks=blocks, endpoints=ends)

    def expected(self) -> list[list[np.ndarray]]:
        pairs = zip(self.sender.dims.kinds, self.receiver.dims.kinds, strict=True)
        positions = [range(first_position(a, b, self.start, self.end), self.end) for a, b in pairs]
        tables = self.tables(self.sender, 0), self.tables(self.receiver, 1)
        return reference(self.sender, self.receiver, *tables, positions)

    def expect(self, key: TransferKey) -> None:
        for rank in self.receivers:
            rank.transfer.expect(self.offer(key), self.bound(key))

    def begin(self, key: TransferKey) -> None:
        self.push(self.bound(key))

    def push(self, bound: r.Bound, have: int | None = None, num_cached: int = 0) -> None:
        """Start sending. ``have``: number of block table entries that the sender has already."""
        tables = zip(self.sender.caches, self.tables(self.sender, 0), strict=True)
        blocks = tuple(blocks_of(table if spec.kind == "state" else table[:have]) for spec, table in tables)
        for rank in self.senders:
            rank.transfer.begin(self.offer(bound.key), bound, blocks, num_cached)

    def grow(self, key: TransferKey, first: int, count: int) -> None:
        """The sender gets ``count`` more blocks of each kind, from entry ``first`` on."""
        tables = zip(self.sender.caches, self.tables(self.sender, 0), strict=True)
        more = [[] if spec.kind == "state" else table[first : first + count] for spec, table in tables]
        for rank in self.senders:
            rank.transfer.grow(key, tuple(blocks_of(table, first) for table in more))

    def compute(self, key: TransferKey, chunks: Sequence[int] = (13, 20), begin: int | None = None) -> None:
        first = self.start if begin is None else begin
        for start, end in zip([first, *chunks], [*chunks, self.end], strict=True):
            self.chunk(key, start, end)

    def chunk(self, key: TransferKey, begin: int, end: int) -> None:
        layers = sorted({layer for kind in self.sender.dims.kinds for layer in kind.layers})
        for layer in layers:
            for rank in self.senders:
                rank.transfer.computed(key, (layer,), begin, end)

    def transfer(self, key: TransferKey) -> list[RankReport]:
        """Run a transfer from beginning to end. Return the outcome of each rank of the receiver."""
        self.expect(key)
        self.begin(key)
        self.compute(key)
        return [rank.wait(key) for rank in self.receivers]

    def close(self) -> None:
        for rank in [*self.senders, *self.receivers]:
            rank.transfer.close()
        for regions in self.shared:
            for memory in regions:
                memory.close()
