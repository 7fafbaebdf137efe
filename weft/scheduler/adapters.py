"""LoRA adapters of a group: which are known, which have a place in the pool, and who waits for a place.

    unknown ──load──> known (host memory) ──a sequence needs the adapter──> in a place ──evicted──> known
                        │ drop: no new sequence; forgotten with the last live sequence

A sequence takes its adapter's place before the sequence is queued, and returns the place at the end. An
adapter with such users is never evicted. Sequences without a place wait in order of arrival, and nothing
passes the first of them except sequences of the model alone: so no adapter starves.

Pure. The plan updates go to ``emit``, in order, and every rank carries them out at the same step.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from weft.common.errors import InvalidRequest
from weft.scheduler.sequence import Sequence
from weft.types.plan import HoldAdapter, PlaceAdapter, ReadAdapter, ReleaseAdapter, SlotUpdate

#: At most two plans are in flight during a load, and the third has the update.
_COMMITS = 3


@dataclass(slots=True)
class _Known:
    """One adapter. ``place`` is -1 without a place. ``experts``: the adapter changes experts."""

    folder: str
    pinned: bool = False
    dropped: bool = False
    place: int = -1
    experts: bool = False
    live: int = 0
    """Live sequences of the adapter, in any state."""
    users: set[int] = field(default_factory=set)
    """Sequences that hold the place."""


class AdapterBook:
    """The adapters of one scheduler."""

    def __init__(self, places: int, emit: Callable[[SlotUpdate], None]) -> None:
        """``places``: places of the pool; 0 for none. ``emit``: takes each update for the next plan."""
        self._emit = emit
        self._known: dict[str, _Known] = {}
        self._free = list(range(places))[::-1]
        self._places = places
        self._idle: OrderedDict[str, _Known] = OrderedDict()
        """Adapters in a place without users, the longest unused first. Without pinned adapters."""
        self._waiting: dict[int, Sequence] = {}
        """Sequences that wait for a place, in order of arrival."""
        self._fresh: dict[str, int] = {}
        """Adapters that a rank may not have read yet -> commits until every rank has."""
        self.placed = 0
        """Number of copies from host memory to a place."""

    # ---- adapters

    def load(self, digest: str, folder: str, pinned: bool = False, experts: bool = False) -> None:
        """Accept sequences of an adapter. Idempotent; a second call changes ``pinned``. ``experts``: True if
        the adapter changes experts.

        Raise InvalidRequest without places, or if pinned adapters would leave no place for another.
        """
        if not self._places:
            raise InvalidRequest(
                "the server has no places for LoRA adapters: set --max-loras", param="adapter"
            )
        others = sum(one.pinned for name, one in self._known.items() if name != digest)
        if pinned and others + 1 >= self._places:
            raise InvalidRequest(
                f"at most {self._places - 1} adapters can be pinned with --max-loras {self._places}",
                param="pinned",
            )
        known = self._known.get(digest)
        if known is None:
            known = self._known[digest] = _Known(folder, experts=experts)
            self._emit(HoldAdapter(digest=digest, folder=folder))
            self._fresh[digest] = _COMMITS
        known.dropped = False
        known.pinned = pinned
        self._settle(digest, known)

    def announce(self, digest: str, folder: str) -> None:
        """Let all ranks read an adapter beside their steps. ``load`` or ``forget`` follows."""
        self._emit(ReadAdapter(digest=digest, folder=folder))

    def forget(self, digest: str) -> None:
        """End ``announce`` without a load."""
        if digest not in self._known:
            self._emit(ReleaseAdapter(digest=digest))

    def drop(self, digest: str) -> None:
        """Accept no further sequence of an adapter. Unknown digests are ignored."""
        known = self._known.get(digest)
        if known is not None:
            known.dropped, known.pinned = True, False
            self._settle(digest, known)

    def accepts(self, digest: str) -> bool:
        """Return True if a new sequence may use the adapter. True for "", the model alone."""
        known = self._known.get(digest)
        return not digest or (known is not None and not known.dropped)

    def knows(self, digest: str) -> bool:
        """Return True if the ranks have the adapter, or get the adapter with the next plan."""
        return digest in self._known

    def committed(self) -> None:
        """Count a committed step: its ranks have applied the updates of the plan."""
        for digest, left in list(self._fresh.items()):
            self._fresh[digest] = left - 1
            if left == 1:
                del self._fresh[digest]

    def fresh(self, digest: str) -> bool:
        """Return True if no committed step proves that every rank can read the adapter."""
        return digest in self._fresh

    def folders(self) -> list[tuple[str, str]]:
        """Return (digest, folder) of every known adapter."""
        return [(digest, known.folder) for digest, known in self._known.items()]

    # ---- sequences

    def arrive(self, sequence: Sequence) -> None:
        """Count a live sequence. The adapter stays known until ``leave``."""
        if sequence.adapter:
            self._known[sequence.adapter].live += 1

    def take(self, sequence: Sequence) -> bool:
        """Take the place of the sequence's adapter, evicting another adapter if needed. Idempotent.

        Return False if the sequence must wait: ``leave`` of another sequence returns the sequence later.
        """
        if not sequence.adapter or sequence.place >= 0:
            return True
        if (not self._waiting or sequence.id in self._waiting) and self._take(sequence):
            return True
        self._waiting[sequence.id] = sequence
        return False

    def leave(self, sequence: Sequence) -> list[Sequence]:
        """Return the place of an ended sequence. Return the waiting sequences that have a place now."""
        digest = sequence.adapter
        if not digest:
            return []
        known = self._known[digest]
        known.live -= 1
        known.users.discard(sequence.id)
        self._waiting.pop(sequence.id, None)
        sequence.place = -1
        self._settle(digest, known)
        ready = []
        while self._waiting and self._take(first := next(iter(self._waiting.values()))):
            ready.append(first)
        return ready

    def restore(self) -> None:
        """Emit everything again, after ranks were lost: the adapters, and the contents of all places."""
        for digest, known in self._known.items():
            self._emit(HoldAdapter(digest=digest, folder=known.folder))
            if known.place >= 0:
                self._emit(PlaceAdapter(digest=digest, place=known.place))

    # ----

    def _take(self, sequence: Sequence) -> bool:
        """Take a place for the first waiting sequence, or for a sequence with nobody before it."""
        digest = sequence.adapter
        known = self._known[digest]
        if known.place < 0:
            place = self._vacant()
            if place is None:
                return False
            known.place = place
            self.placed += 1
            self._emit(PlaceAdapter(digest=digest, place=place))
        known.users.add(sequence.id)
        sequence.place, sequence.adapts_experts = known.place, known.experts
        self._idle.pop(digest, None)
        self._waiting.pop(sequence.id, None)
        return True

    def _vacant(self) -> int | None:
        """Return a free place, or the place of the longest unused adapter; None if all are in use."""
        if self._free:
            return self._free.pop()
        if not self._idle:
            return None
        _, evicted = self._idle.popitem(last=False)
        place, evicted.place = evicted.place, -1
        return place

    def _settle(self, digest: str, known: _Known) -> None:
        """Bring an adapter after a change into the right list: evictable, or forgotten."""
        if known.dropped and not known.live:
            self._idle.pop(digest, None)
            if known.place >= 0:
                self._free.append(known.place)
            del self._known[digest]
            self._fresh.pop(digest, None)
            self._emit(ReleaseAdapter(digest=digest))
            return
        self._idle.pop(digest, None)
        if known.place >= 0 and not known.users and not known.pinned:
            self._idle[digest] = known
