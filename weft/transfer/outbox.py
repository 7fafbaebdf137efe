"""Writes of a rank whose caches are not what its peers read: they leave through a ring of host memory. Pure.

    put ── waits ──► a slot ── copied there ──► sent ── answered ──► the slot is free
             of its peer, in order

The ring consists of slots of one size, which are given back in any order: a peer that does not answer keeps
its own slots and no others. A peer gets one more as long as more are free than it has, so of S slots n peers
that answer nothing keep at most S n / (n + 1), and some are left for everybody else.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

from weft.common.errors import EngineDead
from weft.transfer.pushes import Write
from weft.types.rooms import RoomKey


class Slotted(NamedTuple):
    """A write that has a slot: its bytes are to be copied there, or are there."""

    slot: int
    write: Write


@dataclass(slots=True)
class _Taken:
    write: Write
    sent: bool = False
    wanted: bool = True
    """Whether it is still to be sent when it was copied."""


class Outbox:
    """Writes of one rank that leave through a ring, used from one thread. Slots are numbered from 0 on."""

    def __init__(self, slots: int) -> None:
        self._free = list(range(slots))[::-1]
        self._taken: dict[int, _Taken] = {}
        self._waiting: dict[str, deque[Write]] = {}
        """Of each peer with waiting writes, in order of turns: a peer that had its turn goes to the end."""

    @property
    def free(self) -> int:
        """Slots that nobody has."""
        return len(self._free)

    @property
    def can_begin(self) -> bool:
        """Whether ``begin`` has something."""
        return any(self._may_take(peer) for peer in self._waiting)

    @property
    def waiting(self) -> int:
        """Writes that have no slot."""
        return sum(len(queue) for queue in self._waiting.values())

    def put(self, write: Write) -> None:
        """Adds a write, behind those of its peer that wait."""
        self._waiting.setdefault(write.peer, deque()).append(write)

    def begin(self) -> list[Slotted]:
        """Writes that have got a slot: the caller copies their bytes there, then says ``copied``."""
        begun, turns = list[Slotted](), deque(self._waiting)
        while turns and self._free:
            peer = turns.popleft()
            if not self._may_take(peer):
                continue
            queue = self._waiting.pop(peer)
            write, slot = queue.popleft(), self._free.pop()
            if queue:
                self._waiting[peer] = queue
                turns.append(peer)
            self._taken[slot] = _Taken(write)
            begun.append(Slotted(slot, write))
        return begun

    def copied(self, slot: int) -> Write | None:
        """Nothing reads the caches for it any more. What is to be sent now; None: its room was cancelled."""
        taken = self._taken[slot]
        if taken.sent:
            raise EngineDead(f"slot {slot} of a ring was copied to twice")
        if not taken.wanted:
            self._release(slot)
            return None
        taken.sent = True
        return taken.write

    def ended(self, peer: str, key: RoomKey, number: int) -> None:
        """A write that was sent was answered, or never left: its receiver does not read it any more."""
        for slot, taken in list(self._taken.items()):
            write = taken.write
            if taken.sent and (write.peer, write.key, write.number) == (peer, key, number):
                self._release(slot)

    def lost(self, peer: str) -> None:
        """The connection to it has ended, and with it all that was sent there.

        What the peer may read of a slot afterwards is refused by its digest, in a room that has failed.
        """
        for slot, taken in list(self._taken.items()):
            if taken.sent and taken.write.peer == peer:
                self._release(slot)

    def cancel(self, key: RoomKey) -> None:
        """No copy of the room begins any more; those under way end, and are not sent. What was sent keeps its
        slot until it has ended."""
        for peer, queue in list(self._waiting.items()):
            kept = deque(write for write in queue if write.key != key)
            if kept:
                self._waiting[peer] = kept
            else:
                del self._waiting[peer]
        for taken in self._taken.values():
            taken.wanted &= taken.write.key != key

    def quiet(self, key: RoomKey) -> bool:
        """Whether no copy of the room's memory is to come or under way."""
        copying = any(taken.write.key == key for taken in self._taken.values() if not taken.sent)
        return not copying and all(write.key != key for queue in self._waiting.values() for write in queue)

    def _may_take(self, peer: str) -> bool:
        held = sum(taken.write.peer == peer for taken in self._taken.values())
        return len(self._free) > held

    def _release(self, slot: int) -> None:
        del self._taken[slot]
        self._free.append(slot)
