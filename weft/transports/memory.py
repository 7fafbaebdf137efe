"""A rank's caches as a transport sees them: memory that peers read themselves, or memory behind a ring.

    Direct    the caches are host memory: peers read them, and what comes is copied into them
    Staged    they are anywhere, as on a GPU: what leaves is copied into a ring of host memory first, from
              which it is sent; what comes is copied, with its digest, into an inbox, and from there into
              the caches

What peers see is the same: spans of regions that a sender shows. A rank whose caches are staged shows one,
the ring; where its own caches are concerns it alone.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import msgspec
import numpy as np
import torch

from weft.common.errors import EngineDead
from weft.common.log import get_logger
from weft.transfer.outbox import Outbox
from weft.transfer.pushes import Write, Written
from weft.transfer.spans import Part
from weft.transports.copies import Copies
from weft.transports.copying import copy_spans
from weft.transports.shared_memory import SharedMemory
from weft.types.rooms import RoomKey

Tensor = torch.Tensor

log = get_logger(__name__)

_NOT_COPIED = EngineDead("a rank could not copy what a transfer sends").info()
_SOONEST_S, _LATEST_S = 0.0005, 0.004
"""Until copies under way are asked for again."""
_PIECE = 1 << 20
"""Bytes that go to the caches while the next ones are copied into the inbox."""


class Memory(Protocol):
    """A rank's caches, as a transport reads and writes them. Used from the transport's thread."""

    staged: bool
    regions: Sequence[Tensor]
    """The caches, uint8 [bytes] each."""
    shown: Sequence[Tensor]
    """What the writes that are to be sent name: uint8 on the host."""
    shared: Sequence[SharedMemory]
    """``shown``, where peers can map it."""

    def put(self, write: Write) -> Write | None:
        """What is to be sent now; None: it comes out of ``ready``."""

    def ready(self) -> list[Write]:
        """What is to be sent by now, in terms of ``shown``, without digests."""

    def failed(self) -> list[Written]:
        """Writes whose bytes could not be copied, since the last call."""

    def patience(self) -> float | None:
        """Seconds until ``ready`` may have something; None: whoever has a slot must answer first."""

    def ended(self, peer: str, key: RoomKey, number: int) -> None:
        """See ``Outbox.ended``."""

    def lost(self, peer: str) -> None:
        """See ``Outbox.lost``."""

    def cancel(self, key: RoomKey) -> None:
        """See ``Outbox.cancel``."""

    def quiet(self, key: RoomKey) -> bool:
        """See ``Outbox.quiet``."""

    def mark(self) -> Any:
        """See ``Copies.mark``. From the thread that computes."""

    def take(self, source: Tensor, region: int, spans: np.ndarray, seeds: np.ndarray) -> np.ndarray:
        """See ``copying.copy_spans``: into a region. The bytes are there behind ``settle``."""

    def settle(self) -> None:
        """Everything that was taken is in the caches."""

    def close(self) -> None:
        """Nothing reads or writes the caches any more. Raises EngineDead when that takes too long."""


class Direct:
    """Caches in host memory."""

    staged = False

    def __init__(self, regions: Sequence[Tensor], shared: Sequence[SharedMemory] = ()) -> None:
        """``shared``: of a rank whose peers map them."""
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

    def ended(self, peer: str, key: RoomKey, number: int) -> None:
        return

    def lost(self, peer: str) -> None:
        return

    def cancel(self, key: RoomKey) -> None:
        return

    def quiet(self, key: RoomKey) -> bool:
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
    """Sizes of what caches are staged in, in bytes."""

    slot: int = 4 << 20
    """Of one write that leaves, at most."""
    slots: int = 16
    inbox: int = 16 << 20
    """Of one span that comes, at most."""


class _Copying(NamedTuple):
    slot: int
    copy: Any
    since: float


class Staged:
    """Caches behind a ring and an inbox, whose memory it owns.

    INVARIANT: a slot of the ring is written to again only when its receiver has answered, or the connection
    to it has ended; of a room that was cancelled a copy out of the caches may be under way until it is
    ``quiet``.
    """

    staged = True

    def __init__(
        self, regions: Sequence[Tensor], copies: Copies, sizes: Sizes, *, sends: bool, takes: bool
    ) -> None:
        """A rank that does not send has no ring, one that takes nothing no inbox. Raises EngineDead."""
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
            raise EngineDead("a rank that only takes caches is to send some")
        self._outbox.put(write)
        return None

    def ready(self) -> list[Write]:
        if not self._sends:
            return []
        now = time.monotonic()
        for slot, write in self._outbox.begin():
            try:
                copy = self._copies.out(self.regions, write.parts, self._slot(slot), write.ready)
            except Exception:  # what is wrong with one write ends its room alone
                log.exception("a write of transfer %d/%d could not be copied", *write.key[:2])
                self._failed.append(Written(write.key, write.peer, write.number, _NOT_COPIED))
                self._outbox.copied(slot)
                self._outbox.ended(write.peer, write.key, write.number)
                continue
            self._copying.append(_Copying(slot, copy, now))
        made, under_way = list[Write](), list[_Copying]()
        for one in self._copying:
            if not self._copies.ended(one.copy):
                under_way.append(one)
            elif (copied := self._outbox.copied(one.slot)) is not None:
                made.append(self._in_slot(copied, one.slot))
        self._copying = under_way
        return made

    def failed(self) -> list[Written]:
        failed, self._failed = self._failed, []
        return failed

    def patience(self) -> float | None:
        if not self._copying:
            return 0.0 if self._outbox.can_begin else None
        age = time.monotonic() - self._copying[0].since
        return min(max(age / 4, _SOONEST_S), _LATEST_S)

    def ended(self, peer: str, key: RoomKey, number: int) -> None:
        self._outbox.ended(peer, key, number)

    def lost(self, peer: str) -> None:
        self._outbox.lost(peer)

    def cancel(self, key: RoomKey) -> None:
        self._outbox.cancel(key)

    def quiet(self, key: RoomKey) -> bool:
        return self._outbox.quiet(key)

    def mark(self) -> Any:
        return self._copies.mark()

    def take(self, source: Tensor, region: int, spans: np.ndarray, seeds: np.ndarray) -> np.ndarray:
        """Raises EngineDead for a span that is longer than the inbox."""
        made, at = [np.empty(0, np.uint64)], 0
        ends = np.cumsum(spans[:, 2])
        while at < len(spans):
            before = int(ends[at - 1]) if at else 0
            until = max(at + 1, int(np.searchsorted(ends, before + _PIECE, side="right")))
            made.append(self._into(source, region, spans[at:until], seeds[at:until]))
            at = until
        return np.concatenate(made)

    def settle(self) -> None:
        self._copies.settle()
        self._filled = 0

    def close(self) -> None:
        self._copies.close()
        self._copying.clear()
        for memory in (self._ring, self._inbox):
            memory.close()

    def _into(self, source: Tensor, region: int, spans: np.ndarray, seeds: np.ndarray) -> np.ndarray:
        size = int(spans[:, 2].sum())
        if size > self._inbox.nbytes:
            raise EngineDead(f"{size} bytes of a cache came at once; {self._inbox.nbytes} can be taken in")
        if self._filled + size > self._inbox.nbytes:
            self.settle()
        begin = self._filled
        # What is gathered is aligned for whatever the device reads it as.
        self._filled = begin + -(-size // 16) * 16
        moves = spans.copy()
        moves[:, 1] = begin + np.cumsum(spans[:, 2]) - spans[:, 2]
        digests = copy_spans(source, self._inbox.tensor, moves, seeds)
        self._copies.into(self._inbox.tensor[begin : begin + size], self.regions[region], spans[:, 1:])
        return digests

    def _slot(self, slot: int) -> Tensor:
        return self._ring.tensor[slot * self.sizes.slot : (slot + 1) * self.sizes.slot]

    def _in_slot(self, write: Write, slot: int) -> Write:
        """The write as it lies in the ring."""
        parts, at = [], slot * self.sizes.slot
        for part in write.parts:
            spans = part.spans.copy()
            spans[:, 0] = at + np.cumsum(spans[:, 2]) - spans[:, 2]
            at += part.nbytes
            parts.append(Part(0, part.target, spans))
        return msgspec.structs.replace(write, parts=tuple(parts), ready=None)
