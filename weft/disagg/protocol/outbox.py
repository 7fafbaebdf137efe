"""Writes of a rank with caches out of the peers' reach: bytes leave through a ring of host memory. Pure.

    put ── waits ──► a slot ── copied there ──► sent ── answered ──► the slot is free
             of its peer, in order

The ring consists of slots of equal size, given back in any order. A peer without answers keeps only its own
slots. A peer gets one more slot only while more slots are free than the peer has. So of S slots, n peers
without answers keep at most S n / (n + 1), and some slots stay free for all other peers.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

from weft.common.errors import EngineDead
from weft.disagg.protocol.pushes import Write
from weft.types.transfer import TransferKey


class Slotted(NamedTuple):
    """A write with a slot. The bytes are to be copied to the slot, or are in the slot already."""

    slot: int
    write: Write


@dataclass(slots=True)
class _Taken:
    write: Write
    sent: bool = False
    wanted: bool = True
    """True if the write is still to be sent after the copy. False after ``cancel``."""


class Outbox:
    """Writes of one rank that leave through a ring. Used from one thread. Slots are numbered from 0."""

    def __init__(self, slots: int) -> None:
        self._free = list(range(slots))[::-1]
        self._taken: dict[int, _Taken] = {}
        self._waiting: dict[str, deque[Write]] = {}
        """Peer -> writes without a slot. Peers are in round-robin order: after a turn a peer goes to the
        end."""

    @property
    def free(self) -> int:
        """Number of free slots."""
        return len(self._free)

    @property
    def can_begin(self) -> bool:
        """True if ``begin`` would return a write."""
        return any(self._may_take(peer) for peer in self._waiting)

    @property
    def waiting(self) -> int:
        """Number of writes without a slot."""
        return sum(len(queue) for queue in self._waiting.values())

    def put(self, write: Write) -> None:
        """Append a write to the queue of the peer."""
        self._waiting.setdefault(write.peer, deque()).append(write)

    def begin(self) -> list[Slotted]:
        """Move waiting writes into free slots, one write per peer and turn, and return the writes with slots.
        The caller copies the bytes, then calls ``copied``."""
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
        """Record the end of a slot's copy: the caches are no longer read for the write. Return the write
        to send now. For a cancelled transfer, free the slot and return None. Raises EngineDead for a second
        call, KeyError for a slot that ``begin`` did not give."""
        taken = self._taken[slot]
        if taken.sent:
            raise EngineDead(f"slot {slot} of a ring was copied to twice")
        if not taken.wanted:
            self._release(slot)
            return None
        taken.sent = True
        return taken.write

    def ended(self, peer: str, key: TransferKey, number: int) -> None:
        """Free the slot of a sent write after the answer: the receiver does not read the slot any more."""
        for slot, taken in list(self._taken.items()):
            write = taken.write
            if taken.sent and (write.peer, write.key, write.number) == (peer, key, number):
                self._release(slot)

    def lost(self, peer: str) -> None:
        """Free all slots of writes sent to ``peer``, because the connection to the peer has ended.

        A late read of the peer from a reused slot fails the digest check, in a transfer that has failed
        already.
        """
        for slot, taken in list(self._taken.items()):
            if taken.sent and taken.write.peer == peer:
                self._release(slot)

    def cancel(self, key: TransferKey) -> None:
        """Drop all waiting writes of a transfer. Copies under way finish, but are not sent. A sent write
        keeps its slot until ``ended`` or ``lost``."""
        for peer, queue in list(self._waiting.items()):
            kept = deque(write for write in queue if write.key != key)
            if kept:
                self._waiting[peer] = kept
            else:
                del self._waiting[peer]
        for taken in self._taken.values():
            taken.wanted &= taken.write.key != key

    def quiet(self, key: TransferKey) -> bool:
        """Return True if no copy of the transfer's memory is waiting or under way."""
        copying = any(taken.write.key == key for taken in self._taken.values() if not taken.sent)
        return not copying and all(write.key != key for queue in self._waiting.values() for write in queue)

    def _may_take(self, peer: str) -> bool:
        held = sum(taken.write.peer == peer for taken in self._taken.values())
        return len(self._free) > held

    def _release(self, slot: int) -> None:
        del self._taken[slot]
        self._free.append(slot)
