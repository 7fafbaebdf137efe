"""Network inside one process, on any clock, with configurable faults for tests and simulations.

Two modes: receivers copy, or writers write one-sided into the receiver's memory. One-sided bytes land at
their time of arrival, whatever the use of the memory by then (``LoopbackFaults.late``).
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from weft.common.errors import ErrorInfo
from weft.disagg.protocol.arrivals import Copied, Incoming
from weft.disagg.protocol.digests import digest_spans, ranks_seed, span_seeds
from weft.disagg.protocol.pushes import WINDOW_BYTES, WRITE_BYTES, Write, Written
from weft.disagg.protocol.spans import SpanPart
from weft.disagg.protocol.transfer_table import FenceBy
from weft.disagg.transport.base import TransferCorrupt
from weft.disagg.transport.copying import digest_parts
from weft.disagg.transport.peer_links import connection_broke
from weft.types.transfer import Endpoint, TransferKey


class LoopbackFaults(NamedTuple):
    """Probabilities per write or answer, and times in seconds."""

    delay: float = 0.001
    """Maximum delay. Delays are random, so messages may overtake each other."""
    lost: float = 0.0
    repeated: float = 0.0
    flipped: float = 0.0
    """Probability that one bit of the bytes changes."""
    swapped: float = 0.0
    """Probability that the first span of each part and another span of equal length (if any) swap their
    bytes."""
    moved: float = 0.0
    """Probability that the spans of the first part land one span length beside the right place."""
    late: float = 0.0
    """Probability that the write takes ``late_s`` longer."""
    late_s: float = 10.0


class _Carried(NamedTuple):
    """A write under way."""

    peer: str
    memory: list[torch.Tensor]
    spans: list[tuple[int, np.ndarray]]
    """(region of the receiver, int64 [n, 3])."""
    digests: np.ndarray
    damage: str
    rank: int
    """Rank of the writer."""
    name: str
    """Name of the receiver, as used by the writer."""


class LoopbackNetwork:
    """All transports of one test. ``now``: any clock."""

    def __init__(
        self, now: Callable[[], float], seed: int = 0, faults: LoopbackFaults = LoopbackFaults()
    ) -> None:
        """``now``: the clock in seconds. ``seed``: makes the faults reproducible. ``faults``: probabilities
        and delays."""
        self.now, self.faults = now, faults
        self.rng = random.Random(seed)
        self.transports: dict[str, LoopbackTransport] = {}
        self._under_way: list[tuple[float, int, str, Incoming | Written]] = []
        self._count = 0

    def send(self, to: str, what: Incoming | Written) -> None:
        """Schedule the arrival of ``what`` at transport ``to``. By chance ``what`` is lost, repeated or
        late."""
        faults, draw = self.faults, self.rng.random
        if draw() < faults.lost:
            return
        for _ in range(1 + (draw() < faults.repeated)):
            delay = draw() * faults.delay + (faults.late_s if draw() < faults.late else 0.0)
            self._count += 1
            heapq.heappush(self._under_way, (self.now() + delay, self._count, to, what))

    def next_due(self) -> float | None:
        return self._under_way[0][0] if self._under_way else None

    def arrived(self) -> None:
        """Deliver all due messages. One-sided bytes land now, whatever the present use of the memory."""
        while self._under_way and self._under_way[0][0] <= self.now():
            _, _, to, what = heapq.heappop(self._under_way)
            transport = self.transports.get(to)
            if transport is None:
                continue
            if transport.fence != "copy" and isinstance(what, Incoming):
                if not self.connected(what.content.peer, to):
                    continue
                transport.land(what)
            transport.came.append(what)

    def connected(self, one: str, other: str) -> bool:
        """Return True if neither side has cut the other off."""
        return other not in self.transports[one].cut and one not in self.transports[other].cut


class LoopbackTransport:
    """Transport over a ``LoopbackNetwork``; see ``base.Transport``."""

    name = "loopback"
    write_bytes = WRITE_BYTES
    window_bytes = WINDOW_BYTES

    def __init__(
        self,
        network: LoopbackNetwork,
        address: str,
        incarnation: int = 0,
        fence: FenceBy = "copy",
        rank: int = 0,
    ) -> None:
        self._network, self.fence, self.rank = network, fence, rank
        self.endpoint = Endpoint(self.name, address, incarnation)
        self.came: list[Incoming | Written | Copied] = []
        self.cut = set[str]()
        """Peers cut off from the receiver's memory, as by a closed connection or a revoked key."""
        self._regions: list[torch.Tensor] = []
        self._cancelled = set[TransferKey]()
        self._peers: dict[str, tuple[str, int]] = {}
        network.transports[address] = self

    def register(self, regions: Sequence[torch.Tensor]) -> None:
        self._regions = list(regions)

    def connect(self, peer: Endpoint, rank: int, deadline: float) -> str:
        name = f"{peer.address}, rank {rank}"
        self._peers[name] = peer.address, rank
        return name

    def digest(self, key: TransferKey, peer: str, parts: Sequence[SpanPart]) -> np.ndarray:
        return digest_parts(self._regions, parts, ranks_seed(key, self.rank, self._peers[peer][1]))

    def write(self, write: Write) -> None:
        address, _ = self._peers[write.peer]
        if address not in self._network.transports:
            lost = connection_broke()
            self.came.append(Written(write.key, write.peer, write.number, lost))
            return
        faults, draw, damage = self._network.faults, self._network.rng.random, ""
        for name in ("flipped", "swapped", "moved"):
            if draw() < getattr(faults, name):
                damage = name
        carried = _Carried(
            self.endpoint.address,
            [self._regions[part.source] for part in write.parts],
            [(part.target, part.spans) for part in write.parts],
            write.digests,
            damage,
            self.rank,
            write.peer,
        )
        targets = tuple((part.target, np.ascontiguousarray(part.spans[:, 1:])) for part in write.parts)
        held = sum(part.nbytes for part in write.parts)
        name = self.endpoint.address
        self._network.send(address, Incoming(write.key, name, write.number, targets, held, carried))

    def poll(self, seconds: float) -> list[Incoming | Written | Copied]:
        self._network.arrived()
        came, self.came = self.came, []
        return came

    def take(self, incoming: Incoming) -> ErrorInfo | None:
        if self.fence == "copy":
            self.land(incoming)
        carried: _Carried = incoming.content
        seed, done = ranks_seed(incoming.key, carried.rank, self.rank), 0
        for region, spans in carried.spans:
            seeds = span_seeds(seed, region, spans[:, 1], spans[:, 2])
            made = digest_spans(self._regions[region].numpy(), spans[:, 1:], seeds)
            if (made != carried.digests[done : done + len(spans)]).any():
                return TransferCorrupt("bytes of a transferred cache arrived with a wrong digest").info()
            done += len(spans)
        return None

    def land(self, incoming: Incoming) -> None:
        """Write the bytes, as now present in the sender's memory and with the damage of the network."""
        carried: _Carried = incoming.content
        for number, (memory, (region, spans)) in enumerate(zip(carried.memory, carried.spans, strict=True)):
            source, target = memory.numpy(), self._regions[region].numpy()
            froms = spans[:, 0].copy()
            # Swap the first and the last span of equal length.
            if carried.damage == "swapped":
                alike = np.flatnonzero(spans[:, 2] == spans[0, 2])[[0, -1]]
                froms[alike] = froms[alike[::-1]]
            shift = int(spans[0, 2]) if carried.damage == "moved" and not number else 0
            for begin, to, size in zip(
                froms.tolist(), spans[:, 1].tolist(), spans[:, 2].tolist(), strict=True
            ):
                end = min(to + shift + size, len(target))
                target[end - size : end] = source[begin : begin + size]
            if carried.damage == "flipped" and not number:
                bit = self._network.rng.randrange(8 * int(spans[0, 2]))
                target[spans[0, 1] + bit // 8] ^= 1 << bit % 8

    def answer(self, incoming: Incoming, error: ErrorInfo | None) -> None:
        written = Written(incoming.key, incoming.content.name, incoming.number, error)
        self._network.send(incoming.source, written)

    def cancel(self, key: TransferKey) -> None:
        self._cancelled.add(key)

    def mark(self) -> None:
        return None

    def quiet(self, key: TransferKey) -> bool:
        return True

    def wake(self) -> None:
        return

    def close(self) -> None:
        self._network.transports.pop(self.endpoint.address, None)
