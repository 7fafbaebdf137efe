"""Received writes of a transport whose receivers read: pieces, landing memory, reads under way.

    write ── pieces of 4 MiB ──► a slot of landing memory ── read ── ended ──► copy with digests ──► regions
             of a peer, in order           free only after the read

Landing memory is registered once. Peers share the slots as in ``weft.disagg.protocol.outbox``: a peer gets
one more slot only while more slots are free than the peer has. So a peer that stands still keeps only its
own slots.

INVARIANT: a slot is free or reused only after the engine has ended its read. A deadline, a cancelled transfer
or a lost connection ends the write at once, but not the read.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch

from weft.common.errors import ErrorInfo, TransportFailed, Unavailable, WeftError
from weft.common.log import get_logger
from weft.disagg.protocol.arrivals import Copied, Incoming
from weft.disagg.transport.base import PENDING, TakePending
from weft.disagg.transport.peer_links import ByteSource, connection_broke, info_of
from weft.disagg.transport.private_memory import huge_memory
from weft.disagg.transport.read_engine import Kind, ReadBroken, ReadEngine, segment_of
from weft.types.transfer import TransferKey

log = get_logger(__name__)

SLOT_BYTES = 4 << 20
"""Bytes of a slot: maximum bytes of one span."""
SLOTS = 8
PIECE_BYTES = SLOT_BYTES
"""Maximum bytes of a piece, unless one span is longer."""
READ_S = 30.0
"""Maximum seconds from the arrival of a write to the end of its reads."""
_SOONEST_S, _LATEST_S = 0.0002, 0.004
"""Minimum and maximum seconds between checks of reads under way."""
_MOST_LOST = 64
"""Slots that get other memory after a failed read. Later ones, and slots without new memory, are lost."""

_ENDED = Unavailable("a write was dropped: the transfer has ended").info()
_LATE = TransportFailed("a read of a peer's memory did not end in time").info()


class ReadPeer(NamedTuple):
    """Memory of a peer, as offered over one connection."""

    engine: str
    """Name of the peer's engine."""
    kind: Kind
    device: int


class _Piece(NamedTuple):
    source: np.ndarray
    """uint64 [runs, 3]: address, bytes and device at the peer. A run has one or more spans."""
    offsets: np.ndarray
    """int64 [runs]: places in the slot."""
    parts: tuple[tuple[int, np.ndarray], ...]
    """(region, int64 [n, 3]): offset in the slot, offset in the region, bytes."""
    digests: np.ndarray


@dataclass(slots=True)
class _Taking:
    """A received write."""

    incoming: Incoming
    peer: ReadPeer
    pieces: deque[_Piece]
    until: float
    reading: int = 0
    """Number of reads under way."""
    error: ErrorInfo | None = None
    told: bool = False
    """True once the end of the write was reported."""

    @property
    def over(self) -> bool:
        return not self.told and (self.error is not None or not (self.pieces or self.reading))


@dataclass(slots=True)
class _Reading:
    """A read under way, into a slot."""

    read: Any
    slot: int
    piece: _Piece
    taking: _Taking
    since: float = field(default_factory=time.monotonic)


class ReadWrites:
    """All received writes of one transport. Used from the transport's thread."""

    def __init__(
        self,
        engine: ReadEngine,
        take: Callable[[Incoming], ErrorInfo | None],
        broke: Callable[[str], None],
        slots: int = SLOTS,
        slot_bytes: int = SLOT_BYTES,
        memory: Callable[[int], torch.Tensor] = huge_memory,
    ) -> None:
        """Allocate and register the landing memory. ``memory``: makes the memory of a slot, uint8 [bytes], on
        the host or on a GPU.

        ``take``: copies the bytes of a piece from its slot to the regions, and returns None or the error.
        ``broke(engine)``: called after the connection to a peer's engine broke.
        """
        self._engine, self._take, self._broke = engine, take, broke
        self._memory = memory
        self._slots = [memory(slot_bytes) for _ in range(slots)]
        segments = [segment_of(slot) for slot in self._slots]
        engine.register(segments)
        self._kind, self._device = segments[0].kind, segments[0].device
        self.slot_bytes = slot_bytes
        self._free = list(range(slots))[::-1]
        self._lost: list[torch.Tensor] = []
        """Memory of slots with failed reads that may still write."""
        self._takings: dict[str, deque[_Taking]] = {}
        """Connection -> writes with pieces that are not read yet, in order. Connections take turns."""
        self._reading: list[_Reading] = []
        self._waiting: list[_Taking] = []
        """Writes whose end was not reported yet."""

    @property
    def free(self) -> int:
        """Number of free slots."""
        return len(self._free)

    def begin(self, incoming: Incoming, peer: ReadPeer) -> ErrorInfo | TakePending | None:
        """Start to read a write. Return None or the error if the engine has ended the write already, else
        PENDING: ``progress`` later returns its ``Copied``."""
        taking = _Taking(incoming, peer, _pieces(incoming.content, peer.device), time.monotonic() + READ_S)
        self._takings.setdefault(incoming.source, deque()).append(taking)
        self._start()
        if taking.over:
            taking.told = True
            return taking.error
        self._waiting.append(taking)
        return PENDING

    def progress(self) -> list[Copied]:
        """Check the reads under way, copy what has arrived, start further reads. Return the writes that have
        ended."""
        if not self._waiting and not self._reading:
            return []
        under_way, self._reading = self._reading, []
        for one in under_way:
            self._check(one)
        now = time.monotonic()
        for taking in self._waiting:
            if taking.until <= now and taking.error is None:
                self._fail(taking, _LATE)
        self._start()
        ended = [taking for taking in self._waiting if taking.over]
        for taking in ended:
            taking.told = True
        self._waiting = [taking for taking in self._waiting if not taking.told]
        return [Copied(taking.incoming, taking.error) for taking in ended]

    def patience(self) -> float | None:
        """Return the seconds until the next useful ``progress``; None without a write."""
        if self._reading:
            age = time.monotonic() - self._reading[0].since
            return min(max(age / 4, _SOONEST_S), _LATEST_S)
        if not self._waiting:
            return None
        # Over writes are reported at once; others wait for a slot until their deadline.
        if any(taking.over for taking in self._waiting):
            return 0.0
        return max(0.0, min(taking.until for taking in self._waiting) - time.monotonic())

    def cancel(self, key: TransferKey) -> None:
        """End all writes of a transfer. No byte of the transfer is copied to the regions any more."""
        for taking in self._waiting:
            if taking.incoming.key == key:
                self._fail(taking, _ENDED)

    def quiet(self, key: TransferKey) -> bool:
        """Return True if no read of the transfer is under way."""
        return all(one.taking.incoming.key != key for one in self._reading)

    def lost(self, source: str) -> None:
        """End all writes of a lost connection."""
        for taking in self._waiting:
            if taking.incoming.source == source:
                self._fail(taking, connection_broke())

    def reads(self, engine: str) -> bool:
        """Return True if a read from a peer's engine is under way."""
        return any(one.taking.peer.engine == engine for one in self._reading)

    def close(self, seconds: float) -> bool:
        """Wait up to ``seconds`` for the reads under way. Return False if a read has not ended: then engine
        and landing memory must live on."""
        until = time.monotonic() + seconds
        for taking in self._waiting:
            self._fail(taking, _ENDED)
        while self._reading and time.monotonic() < until:
            self.progress()
            time.sleep(_SOONEST_S)
        return not self._reading and not self._lost

    # ---- reads

    def _start(self) -> None:
        """Start reads of waiting pieces, in turns of the connections, as far as slots are free."""
        turns = deque(self._takings)
        while turns and self._free:
            source = turns.popleft()
            queue = self._takings.pop(source)
            while queue and not queue[0].pieces:
                queue.popleft()
            if not queue:
                continue
            self._takings[source] = queue
            held = sum(one.taking.incoming.source == source for one in self._reading)
            if len(self._free) > held:
                self._read(queue[0])
                turns.append(source)

    def _read(self, taking: _Taking) -> None:
        """Start the read of the next piece of a write, and check the read once: many reads end at once."""
        piece, slot = taking.pieces.popleft(), self._free.pop()
        to = np.empty_like(piece.source)
        to[:, 0] = (segment_of(self._slots[slot]).address + piece.offsets).astype(np.uint64)
        to[:, 1], to[:, 2] = piece.source[:, 1], self._device
        try:
            read = self._engine.start(taking.peer.engine, taking.peer.kind, piece.source, to, self._kind)
        except ReadBroken as error:
            self._read_failed(taking, slot, error)
            return
        taking.reading += 1
        self._check(_Reading(read, slot, piece, taking))

    def _check(self, one: _Reading) -> None:
        """Check a read: keep a read under way, else free its slot, after the copy of a wanted write."""
        try:
            if not self._engine.ended(one.read):
                self._reading.append(one)
                return
        except ReadBroken as broken:
            one.taking.reading -= 1
            self._read_failed(one.taking, one.slot, broken)
            return
        one.taking.reading -= 1
        if one.taking.error is None and (error := self._copy(one)) is not None:
            self._fail(one.taking, error)
        self._free.append(one.slot)

    def _copy(self, one: _Reading) -> ErrorInfo | None:
        """Copy a piece to the regions. Return None or the error; nothing is raised."""
        content: ByteSource = one.taking.incoming.content
        memory = (self._slots[one.slot],) * len(one.piece.parts)
        source = content._replace(memory=memory, parts=one.piece.parts, digests=one.piece.digests)
        try:
            return self._take(msgspec.structs.replace(one.taking.incoming, content=source))
        except Exception as error:  # a fault of one write ends only its transfer
            if not isinstance(error, WeftError):
                log.exception("a write of transfer %d/%d could not be taken", *one.taking.incoming.key[:2])
            return info_of(error)

    def _read_failed(self, taking: _Taking, slot: int, error: ReadBroken) -> None:
        """Fail the write of a failed read, and all connections to the peer's engine. Memory that the read may
        still write is never used again: the slot gets other memory."""
        self._fail(taking, error.info())
        if error.over or self._renewed(slot, error):
            self._free.append(slot)
        self._broke(taking.peer.engine)

    def _renewed(self, slot: int, error: ReadBroken) -> bool:
        """Give other memory to a slot. Return False if no memory is there: then the slot is lost."""
        log.error("landing memory of a failed read is given up: %s", error)
        self._lost.append(self._slots[slot])
        if len(self._lost) > _MOST_LOST:
            return False
        try:
            self._slots[slot] = self._memory(self.slot_bytes)
            self._engine.register([segment_of(self._slots[slot])])
        except Exception:  # an error raised here would end all transports of the rank
            log.exception("a slot of landing memory is lost")
            return False
        return True

    def _fail(self, taking: _Taking, error: ErrorInfo) -> None:
        """End a write with an error. Reads under way go on, and their bytes are dropped."""
        if taking.error is None and not taking.told:
            taking.error = error
        taking.pieces.clear()


def _pieces(content: ByteSource, device: int) -> deque[_Piece]:
    """Return a write as pieces of whole spans, each of about ``PIECE_BYTES``.

    ``content``: the source offsets of the spans are addresses at the peer. ``device``: of these addresses.
    """
    found, ordered = _by_address(content)
    pieces = deque[_Piece]()
    parts, first = list[tuple[int, np.ndarray]](), 0
    sources, places, filled, count = list[np.ndarray](), list[np.ndarray](), 0, 0

    def close() -> None:
        nonlocal parts, sources, places, filled, count, first
        if count:
            digests = ordered[first : first + count]
            pieces.append(_Piece(np.concatenate(sources), np.concatenate(places), tuple(parts), digests))
        first += count
        parts, sources, places, filled, count = [], [], [], 0, 0

    for region, spans in found:
        while len(spans):
            ends = np.cumsum(spans[:, 2])
            # At least one span per piece, even if the span is longer than a piece.
            fits = int(np.searchsorted(ends, PIECE_BYTES - filled, side="right")) or int(not filled)
            if not fits:
                close()
                continue
            taken, spans = spans[:fits], spans[fits:]
            here = taken.copy()
            here[:, 0] = filled + ends[:fits] - taken[:, 2]
            parts.append((region, here))
            runs = _runs(taken)
            source = np.empty((len(runs), 3), np.uint64)
            source[:, 0], source[:, 2] = taken[runs, 0], device
            source[:, 1] = np.add.reduceat(taken[:, 2], runs)
            sources.append(source)
            places.append(here[runs, 0])
            filled, count = filled + int(ends[fits - 1]), count + fits
    close()
    return pieces


def _by_address(content: ByteSource) -> tuple[list[tuple[int, np.ndarray]], np.ndarray]:
    """Return the parts of a write with the spans in order of the address at the peer, and the digests in the
    same order.

    Neighbours in this order become one run, and each run costs the engine a call, or a request to the network
    card. The blocks of a sequence may lie in any order.
    """
    parts, made, first = list[tuple[int, np.ndarray]](), [content.digests[:0]], 0
    for region, spans in content.parts:
        order = np.argsort(spans[:, 0], kind="stable")
        parts.append((region, spans[order]))
        made.append(content.digests[first + order])
        first += len(spans)
    return parts, np.concatenate(made)


def _runs(spans: np.ndarray) -> np.ndarray:
    """Return the numbers of the spans that do not begin where the span before ends at the peer."""
    follows = spans[1:, 0] == spans[:-1, 0] + spans[:-1, 2]
    return np.flatnonzero(np.concatenate(([True], ~follows)))
