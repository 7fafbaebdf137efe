"""Transport of bytes between ranks on virtual time: a ``Transport`` over numpy memory.

Data under way takes time, may overtake earlier data, and may be damaged.

    shm    the receiver copies from the sender's memory when reading the write: the present content counts
    tcp    the bytes leave the sender some time after ``write``, unless the transfer is cancelled before

In both modes each rank alone writes to its memory. A peer with an ended process no longer answers; the other
end notices.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

from weft.common.errors import ErrorInfo, Unavailable
from weft.disagg.protocol.arrivals import Copied, Incoming
from weft.disagg.protocol.digests import digest_spans, ranks_seed, span_seeds
from weft.disagg.protocol.pushes import Write, Written
from weft.disagg.protocol.spans import SpanPart
from weft.disagg.protocol.transfer_table import FenceBy
from weft.disagg.transport.base import TransferCorrupt
from weft.sim.timeline import Timeline, TimelineProcess
from weft.types.transfer import Endpoint, TransferKey

if TYPE_CHECKING:
    import torch

SLOW = 0.05
"""Share of slow writes."""


class Carried(NamedTuple):
    """A write under way, in addition to the fields of ``Incoming``."""

    writer: SimTransport
    peer: str
    """The writer's name for the receiver."""
    parts: tuple[SpanPart, ...]
    digests: np.ndarray
    payload: list[np.ndarray]
    """The bytes of each part, once sent by the writer; [] if the receiver reads the writer's memory."""


class Wires:
    """All transports of a cluster."""

    def __init__(
        self, timeline: Timeline, kind: Literal["shm", "tcp"], delay: float, write_bytes: int, window: int
    ) -> None:
        """Create the wires. ``delay``: maximum seconds of most writes; some writes take ten times as long."""
        self.timeline, self.kind, self.delay = timeline, kind, delay
        self.write_bytes, self.window_bytes = write_bytes, window
        self.copying = delay
        """Maximum seconds of one round of copying."""
        self.flips = 0
        """Number of future writes with a flipped bit."""
        self.flipped: set[TransferKey] = set()
        """Transfers with a flipped bit."""
        self._transports: dict[str, SimTransport] = {}
        self._started = 0

    def open(
        self, process: TimelineProcess, rank: int, wake: Callable[[], None], check: Callable[[Incoming], None]
    ) -> SimTransport:
        """Open the transport of ``rank`` in ``process``.

        ``wake`` is called when something arrives. ``check`` is called before every write of bytes.
        """
        self._started += 1
        address = f"wire{self._started}"
        made = self._transports[address] = SimTransport(self, address, process, rank, wake, check)
        return made

    def transport(self, address: str) -> SimTransport | None:
        """Return the transport at ``address``; None if closed, or if the process has ended."""
        found = self._transports.get(address)
        return found if found is not None and found.process.alive else None

    def late(self) -> float:
        """Return a random delay in seconds."""
        rng = self.timeline.rng
        return self.delay * rng.random() * (10.0 if rng.random() < SLOW else 1.0)

    def close(self, address: str) -> None:
        """Remove the transport. Ranks with unanswered writes notice soon. Idempotent."""
        if self._transports.pop(address, None) is None:
            return
        for other in self._transports.values():
            if other.writes_to(address):
                self.timeline.after(0.0, 0.05, other.process, other.broke, address)


class SimTransport:
    """A transport on virtual time. See ``base.Transport``."""

    fence: FenceBy = "copy"

    def __init__(
        self,
        wires: Wires,
        address: str,
        process: TimelineProcess,
        rank: int,
        wake: Callable[[], None],
        check: Callable[[Incoming], None],
    ) -> None:
        """``process``: owner of the memory.

        ``rank``: its number in the group. ``wake``: called after an arrival. ``check``: called before each
        write into ``regions``.
        """
        self.name: str = wires.kind
        self.process, self.rank = process, rank
        self.write_bytes, self.window_bytes = wires.write_bytes, wires.window_bytes
        self.endpoint = Endpoint(wires.kind, address, 0)
        self.regions: list[np.ndarray] = []
        """Regions of memory, uint8, numbered as in ``group_layout``."""
        self._wires, self._wake, self._check = wires, wake, check
        self._came: list[Incoming | Written | Copied] = []
        self._peers: dict[str, tuple[str, int]] = {}
        self._cancelled: set[TransferKey] = set()
        self._under_way: dict[tuple[TransferKey, str, int], str] = {}
        """Unanswered write -> address of the receiver."""

    def register(self, regions: Sequence[torch.Tensor]) -> None:
        """Register the memory. Not used here: ``TransferSide`` sets ``regions``."""
        raise NotImplementedError

    def connect(self, peer: Endpoint, rank: int, deadline: float) -> str:
        name = f"{peer.address}, rank {rank}"
        self._peers[name] = peer.address, rank
        return name

    def digest(self, key: TransferKey, peer: str, parts: Sequence[SpanPart]) -> np.ndarray:
        seed = ranks_seed(key, self.rank, self._peers[peer][1])
        made = [_digest(self.regions[part.source], part, part.spans[:, 0], seed) for part in parts]
        return np.concatenate(made) if made else np.empty(0, np.uint64)

    def write(self, write: Write) -> None:
        """Send a write; the peer's answer arrives later."""
        address, _ = self._peers[write.peer]
        self._under_way[write.key, write.peer, write.number] = address
        carried = Carried(self, write.peer, write.parts, write.digests, [])
        wires = self._wires
        # In shared memory the receiver copies, so nothing has to leave the sender first.
        if wires.kind == "shm":
            self._post(write, carried)
        else:
            wires.timeline.at(wires.timeline.now + wires.late(), self.process, self._leave, write, carried)

    def _leave(self, write: Write, carried: Carried) -> None:
        """Send the bytes, unless the transfer was cancelled meanwhile."""
        if write.key not in self._cancelled:
            payload = [_read(self.regions[part.source], part) for part in carried.parts]
            self._post(write, carried._replace(payload=payload))

    def _post(self, write: Write, carried: Carried) -> None:
        """Let the write arrive at the receiver later. A gone receiver breaks the connection instead."""
        timeline = self._wires.timeline
        target = self._wires.transport(self._peers[write.peer][0])
        # The peer is gone: the writer notices a broken connection soon.
        if target is None:
            timeline.after(0.0, 0.05, self.process, self.broke, self._peers[write.peer][0])
            return
        targets = tuple((part.target, np.ascontiguousarray(part.spans[:, 1:])) for part in write.parts)
        held = sum(part.nbytes for part in write.parts)
        came = Incoming(write.key, self.endpoint.address, write.number, targets, held, carried)
        timeline.at(timeline.now + self._wires.late(), target.process, target.arrived, came)

    def arrived(self, what: Incoming | Written) -> None:
        """Receive something for the next ``poll``."""
        if isinstance(what, Written) and not self._under_way.pop((what.key, what.peer, what.number), None):
            return  # the connection broke before
        self._came.append(what)
        self._wake()

    def writes_to(self, address: str) -> bool:
        """Return True if a write to ``address`` is unanswered."""
        return address in self._under_way.values()

    def broke(self, address: str) -> None:
        """Fail all unanswered writes to ``address``, because the connection broke."""
        lost = Unavailable("the connection to a rank of the other group broke").info()
        for (key, peer, number), to in list(self._under_way.items()):
            if to == address:
                self.arrived(Written(key, peer, number, lost))

    def poll(self, seconds: float) -> list[Incoming | Written | Copied]:
        came, self._came = self._came, []
        return came

    def take(self, incoming: Incoming) -> ErrorInfo | None:
        """Copy an arrived write into the memory and return None, or the error of wrong digests.

        A planned fault flips a bit.
        """
        self._check(incoming)
        carried: Carried = incoming.content
        wires, seed, done = self._wires, ranks_seed(incoming.key, carried.writer.rank, self.rank), 0
        corrupt = False
        # Copy each part, perhaps flip a bit, then compare the digests of the written bytes.
        for number, part in enumerate(carried.parts):
            region = self.regions[part.target]
            bytes_of = carried.payload
            data = bytes_of[number] if bytes_of else _read(carried.writer.regions[part.source], part)
            _write(region, part, data)
            if wires.flips and len(data):
                wires.flips -= 1
                wires.flipped.add(incoming.key)
                wires.timeline.note("wires", "..", "", f"a bit of {incoming.key} is flipped")
                region[int(part.spans[0, 1])] ^= 1 << wires.timeline.rng.randrange(8)
            made = _digest(region, part, part.spans[:, 1], seed)
            corrupt |= bool((made != carried.digests[done : done + len(part.spans)]).any())
            done += len(part.spans)
        if corrupt:
            return TransferCorrupt("bytes of a transferred cache arrived with a wrong digest").info()
        return None

    def answer(self, incoming: Incoming, error: ErrorInfo | None) -> None:
        """Send the writer the outcome of its write."""
        carried: Carried = incoming.content
        written = Written(incoming.key, carried.peer, incoming.number, error)
        timeline = self._wires.timeline
        writer = carried.writer
        timeline.at(timeline.now + self._wires.late(), writer.process, writer.arrived, written)

    def cancel(self, key: TransferKey) -> None:
        self._cancelled.add(key)

    def mark(self) -> None:
        return None

    def quiet(self, key: TransferKey) -> bool:
        return True

    def wake(self) -> None:
        self._wake()

    def close(self) -> None:
        self._wires.close(self.endpoint.address)


def _read(region: np.ndarray, part: SpanPart) -> np.ndarray:
    return np.concatenate([region[at : at + size] for at, size in part.spans[:, ::2].tolist()])


def _write(region: np.ndarray, part: SpanPart, data: np.ndarray) -> None:
    done = 0
    for at, size in part.spans[:, 1:].tolist():
        region[at : at + size] = data[done : done + size]
        done += size


def _digest(region: np.ndarray, part: SpanPart, offsets: np.ndarray, seed: int) -> np.ndarray:
    """Return the digests of the spans of ``part``, which lie at ``offsets`` of ``region``."""
    lengths = part.spans[:, 2]
    seeds = span_seeds(seed, part.target, part.spans[:, 1], lengths)
    return digest_spans(region, np.stack([offsets, lengths], axis=1), seeds)
