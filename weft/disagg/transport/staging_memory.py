"""Caches of a rank, as seen by a transport: direct memory, read by peers, or memory behind a ring.

    Direct    the caches are host memory: peers read the caches, and received bytes are copied into the caches
    Staged    the caches are anywhere, e.g. on a GPU. To send: copy to a ring of host memory, send from
              the ring. To receive: copy to an inbox, then copy from the inbox to the caches. The GPU computes
              the digests of both sides, or the host, for caches in host memory

Peers see no difference: spans of the regions shown by a sender. A rank with staged caches shows one region,
the ring; peers never learn where the caches are.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import msgspec
import numpy as np
import torch

from weft.common.errors import EngineDead
from weft.common.log import get_logger
from weft.common.splitmix import mix_array
from weft.disagg.protocol.outbox import Outbox
from weft.disagg.protocol.pushes import Write, Written
from weft.disagg.protocol.spans import SpanPart
from weft.disagg.transport.copies import Copies
from weft.disagg.transport.copying import copy_spans, gather_spans
from weft.disagg.transport.shared_memory import SharedMemory
from weft.types.transfer import TransferKey

Tensor = torch.Tensor

log = get_logger(__name__)

_NOT_COPIED = EngineDead("a rank could not copy what a transfer sends").info()
_SOONEST_S, _LATEST_S = 0.0005, 0.004
"""Minimum and maximum seconds between checks of copies under way."""
_PIECE, _PIECE_WITH_SUMS = 1 << 20, 4 << 20
"""Bytes moved to the caches while the next bytes are copied into the inbox. Sums on the device need about 30
launches per piece."""


class Memory(Protocol):
    """Caches of a rank, as read and written by a transport. Used from the transport's thread."""

    staged: bool
    regions: Sequence[Tensor]
    """The caches, uint8 [bytes] each."""
    shown: Sequence[Tensor]
    """Regions for the source spans of outgoing writes: uint8 on the host."""
    shared: Sequence[SharedMemory]
    """``shown``, if peers can map the memory."""

    def put(self, write: Write) -> Write | None:
        """Accept a write. Return the write if ready to send; None if ``ready`` will return the write
        later."""

    def ready(self) -> list[Write]:
        """Return writes ready to send, with spans in terms of ``shown``. As digests they have the sums before
        the seed, or none."""

    def failed(self) -> list[Written]:
        """Return writes with a failed copy, since the last call."""

    def patience(self) -> float | None:
        """Return the seconds until the next useful ``ready``; None if only an answer of a peer can make
        progress."""

    def ended(self, peer: str, key: TransferKey, number: int) -> None:
        """Free the slot of write ``number`` to ``peer``: the peer does not read the slot any more."""

    def lost(self, peer: str) -> None:
        """Free the slots of all writes sent to ``peer``: the connection has ended."""

    def cancel(self, key: TransferKey) -> None:
        """Drop the transfer's writes that are not sent yet. Copies under way finish."""

    def quiet(self, key: TransferKey) -> bool:
        """Return True if no copy of the transfer's caches waits or is under way."""

    def mark(self) -> Any:
        """See ``Copies.mark``. Call from the computing thread."""

    def take(self, source: Tensor, region: int, spans: np.ndarray, seeds: np.ndarray) -> np.ndarray:
        """Copy spans into a region, see ``copying.copy_spans``. Return the digests. The bytes are in the
        caches after ``settle``."""

    def settle(self) -> None:
        """Block until all bytes of ``take`` calls are in the caches."""

    def close(self) -> None:
        """Stop all reads and writes of the caches. Raises EngineDead after a time-out."""


class DirectMemory:
    """Caches in host memory."""

    staged = False

    def __init__(self, regions: Sequence[Tensor], shared: Sequence[SharedMemory] = ()) -> None:
        """``shared``: the same regions, if peers map the caches."""
        self.regions = self.shown = regions
        self.shared = shared

    def put(self, write: Write) -> Write | None:
        return write

    def ready(self) -> list[Write]:
        return []

    def failed(self) -> list[Written]:
        return []

    def patience(self) -> float | None:
        return None

    def ended(self, peer: str, key: TransferKey, number: int) -> None:
        return

    def lost(self, peer: str) -> None:
        return

    def cancel(self, key: TransferKey) -> None:
        return

    def quiet(self, key: TransferKey) -> bool:
        return True

    def mark(self) -> Any:
        return None

    def take(self, source: Tensor, region: int, spans: np.ndarray, seeds: np.ndarray) -> np.ndarray:
        return copy_spans(source, self.regions[region], spans, seeds)

    def settle(self) -> None:
        return

    def close(self) -> None:
        return


class Sizes(NamedTuple):
    """Sizes of the staging memory, in bytes."""

    slot: int = 4 << 20
    """Maximum bytes of one outgoing write."""
    slots: int = 16
    """Number of slots of the ring."""
    inbox: int = 16 << 20
    """Maximum bytes of one received span."""


class _Copying(NamedTuple):
    """A copy under way to a slot of the ring."""

    slot: int
    copy: Any
    """Handle of the copy, see ``Copies.out``."""
    since: float
    """Start of the copy, in seconds of ``time.monotonic``."""


class Staged:
    """Caches behind a ring and an inbox. Owns the memory of both.

    INVARIANT: a slot of the ring is reused only after the receiver's answer, or after the end of the
    connection to the receiver. A cancelled transfer may have a copy out of the caches under way until
    ``quiet``.
    """

    staged = True

    def __init__(
        self, regions: Sequence[Tensor], copies: Copies, sizes: Sizes, *, sends: bool, takes: bool
    ) -> None:
        """Allocate and pin the ring (if ``sends``) and the inbox (if ``takes``). Raises EngineDead."""
        self.regions, self.sizes = regions, sizes
        self._copies = copies
        self._outbox = Outbox(sizes.slots if sends else 0)
        self._ring = SharedMemory(sizes.slot * sizes.slots if sends else 0, "weft-ring")
        self._inbox = SharedMemory(sizes.inbox if takes else 0, "weft-inbox")
        self._filled = 0
        self._copying: list[_Copying] = []
        self._failed: list[Written] = []
        self.shared: Sequence[SharedMemory] = [self._ring]
        self.shown: Sequence[Tensor] = [self._ring.tensor]
        self._sends = sends
        try:
            for memory in (self._ring, self._inbox):
                copies.pin(memory.tensor)
        except BaseException:
            self.close()
            raise

    @property
    def outbox(self) -> Outbox:
        return self._outbox

    def put(self, write: Write) -> Write | None:
        if not self._sends:
            raise EngineDead("a rank that only receives cannot send")
        if self._copies.with_sums:
            write = msgspec.structs.replace(write, parts=tuple(map(_by_length, write.parts)))
        self._outbox.put(write)
        return None

    def ready(self) -> list[Write]:
        """Start copies of waiting writes into free slots. Return the writes whose copies have ended, now with
        spans in the ring. A copy that cannot start is logged and reported by ``failed``."""
        if not self._sends:
            return []
        now = time.monotonic()
        for slot, write in self._outbox.begin():
            try:
                copy = self._copies.out(self.regions, write.parts, self._slot(slot), write.ready)
            except Exception:  # a fault of one write ends only its transfer
                log.exception("a write of transfer %d/%d could not be copied", *write.key[:2])
                self._failed.append(Written(write.key, write.peer, write.number, _NOT_COPIED))
                # Free the slot at once: mark the copy as done, then the write as ended.
                self._outbox.copied(slot)
                self._outbox.ended(write.peer, write.key, write.number)
                continue
            self._copying.append(_Copying(slot, copy, now))
        ready, under_way = list[Write](), list[_Copying]()
        for one in self._copying:
            if not self._copies.ended(one.copy):
                under_way.append(one)
            elif (copied := self._outbox.copied(one.slot)) is not None:
                ready.append(self._in_slot(copied, one.slot, one.copy))
        self._copying = under_way
        return ready

    def failed(self) -> list[Written]:
        failed, self._failed = self._failed, []
        return failed

    def patience(self) -> float | None:
        if not self._copying:
            return 0.0 if self._outbox.can_begin else None
        age = time.monotonic() - self._copying[0].since
        return min(max(age / 4, _SOONEST_S), _LATEST_S)

    def ended(self, peer: str, key: TransferKey, number: int) -> None:
        self._outbox.ended(peer, key, number)

    def lost(self, peer: str) -> None:
        self._outbox.lost(peer)

    def cancel(self, key: TransferKey) -> None:
        self._outbox.cancel(key)

    def quiet(self, key: TransferKey) -> bool:
        # A copy of a failed `take` may still write blocks of any transfer.
        return self._copies.settled() and self._outbox.quiet(key)

    def mark(self) -> Any:
        return self._copies.mark()

    def take(self, source: Tensor, region: int, spans: np.ndarray, seeds: np.ndarray) -> np.ndarray:
        """See ``Memory.take``. Raises EngineDead for a span longer than the inbox."""
        if self._copies.with_sums:
            return self._take_with_sums(source, region, spans, seeds)
        digests = [np.empty(0, np.uint64)]
        for piece in _pieces(spans, _PIECE):
            inbox, moves = self._room(spans[piece])
            digests.append(copy_spans(source, self._inbox.tensor, moves, seeds[piece]))
            self._copies.into(inbox, self.regions[region], spans[piece, 1:])
        return np.concatenate(digests)

    def _take_with_sums(
        self, source: Tensor, region: int, spans: np.ndarray, seeds: np.ndarray
    ) -> np.ndarray:
        """``take``, with sums on the device."""
        order = np.argsort(spans[:, 2], kind="stable")
        ordered, under_way = spans[order], list[Any]()
        for piece in _pieces(ordered, _PIECE_WITH_SUMS):
            inbox, moves = self._room(ordered[piece])
            gather_spans(source, self._inbox.tensor, moves)
            under_way.append(self._copies.into(inbox, self.regions[region], ordered[piece, 1:]))
        self._copies.settle()
        digests = np.empty(len(spans), np.uint64)
        digests[order] = np.concatenate([np.empty(0, np.uint64), *(each.values() for each in under_way)])
        return mix_array(digests ^ seeds)

    def settle(self) -> None:
        self._copies.settle()
        self._filled = 0

    def close(self) -> None:
        self._copies.close()
        self._copying.clear()
        for memory in (self._ring, self._inbox):
            memory.close()

    def _room(self, spans: np.ndarray) -> tuple[Tensor, np.ndarray]:
        """Return room in the inbox for ``spans``, int64 [n, 3], and the spans from the source to this room.
        Blocks while the inbox is full. Raises EngineDead for more bytes than the inbox holds."""
        size = int(spans[:, 2].sum())
        if size > self._inbox.nbytes:
            raise EngineDead(f"{size} bytes of KV cache in one write; the limit is {self._inbox.nbytes}")
        # The inbox is full: wait for the copies to the caches, then start at its beginning.
        if self._filled + size > self._inbox.nbytes:
            self.settle()
        begin = self._filled
        # Gathered bytes are aligned for every dtype used on the device.
        self._filled = begin + -(-size // 16) * 16
        moves = spans.copy()
        moves[:, 1] = begin + np.cumsum(spans[:, 2]) - spans[:, 2]
        return self._inbox.tensor[begin : begin + size], moves

    def _slot(self, slot: int) -> Tensor:
        return self._ring.tensor[slot * self.sizes.slot : (slot + 1) * self.sizes.slot]

    def _in_slot(self, write: Write, slot: int, copy: Any) -> Write:
        """Return the write with spans in the ring: the parts lie back to back from the start of the slot.
        ``copy``: the ended copy to the slot."""
        parts, at = [], slot * self.sizes.slot
        for part in write.parts:
            spans = part.spans.copy()
            spans[:, 0] = at + np.cumsum(spans[:, 2]) - spans[:, 2]
            at += part.nbytes
            parts.append(SpanPart(0, part.target, spans))
        sums = copy.values() if self._copies.with_sums else write.digests
        return msgspec.structs.replace(write, parts=tuple(parts), digests=sums, ready=None)


def _by_length(part: SpanPart) -> SpanPart:
    """Return the part with its spans in order of length."""
    return part._replace(spans=part.spans[np.argsort(part.spans[:, 2], kind="stable")])


def _pieces(spans: np.ndarray, most: int) -> Iterator[slice]:
    """Yield slices of ``spans``, int64 [n, 3], with up to ``most`` bytes each, and with at least one span."""
    ends, at = np.cumsum(spans[:, 2]), 0
    while at < len(spans):
        before = int(ends[at - 1]) if at else 0
        until = max(at + 1, int(np.searchsorted(ends, before + most, side="right")))
        yield slice(at, until)
        at = until
