"""Sending side of one rank: push cache contents after each layer, within a window of bytes per peer. Pure.

Each peer has a window of bytes (a ring). Parts beyond the window wait in a queue here, never in a caller.
So a slow receiver delays its own transfers only. Transfers to one peer take turns, write by write; writes
of one transfer keep their order.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np

from weft.common.errors import ErrorInfo
from weft.disagg.protocol.coverage import Positions
from weft.disagg.protocol.group_layout import Place
from weft.disagg.protocol.memory_leases import MemoryLease, Ring
from weft.disagg.protocol.spans import SpanPart, SpanPlan, split
from weft.types.transfer import Outcome, TransferKey


class _PushWord(msgspec.Struct, frozen=True):
    pass


class Begin(_PushWord, frozen=True):
    """The receiver is bound: each receiving rank gets the spans of one plan."""

    key: TransferKey
    plans: Mapping[str, SpanPlan]
    """Peer -> spans from this rank to the peer."""
    end: int
    """Positions of the sequence."""
    start: int = 0
    """Number of leading positions that the receiver has already."""


class Computed(_PushWord, frozen=True):
    """Positions ``begin`` .. end - 1 are in the caches of the model's ``layers``, computed here or found
    there. For a recurrent layer: the state after the positions is at the place from which the transfer
    sends. Positions reported before are not pushed again."""

    key: TransferKey
    layers: tuple[int, ...]
    begin: int
    end: int
    ready: Any = None
    """Mark of the transport (``base.Transport.mark``): the bytes are valid once the mark is reached."""


class Grown(_PushWord, frozen=True):
    """The sequence has more blocks: the new blocks of each KV cache group. Must precede their
    ``Computed``."""

    key: TransferKey
    places: tuple[Place, ...]


class Spoiled(_PushWord, frozen=True):
    """The rank cannot compute the bytes of the transfer, because of ``error``. No further push."""

    key: TransferKey
    error: ErrorInfo


class Written(_PushWord, frozen=True):
    """A write has ended. ``error``: None if the receiver accepted the write."""

    key: TransferKey
    peer: str
    number: int
    error: ErrorInfo | None


class PushStopped(_PushWord, frozen=True):
    """The engine process reports the end of a transfer."""

    key: TransferKey


class More(_PushWord, frozen=True):
    """The caller has time for one queued event of a transfer: see ``Pushes.behind``."""

    key: TransferKey


Event = Begin | Computed | Grown | Spoiled | Written | PushStopped | More


class Write(_PushWord, frozen=True):
    """Send bytes to a peer. Answered with ``Written``."""

    key: TransferKey
    peer: str
    number: int
    parts: tuple[SpanPart, ...]
    digests: np.ndarray
    """uint64, one per span, in order: digests of the bytes at the time of queueing. Empty for staged
    caches, because the bytes are not on the host yet."""
    ready: Any = None
    """Mark of the transport: the bytes are valid once the mark is reached."""


class PushReport(_PushWord, frozen=True):
    """Report the rank's outcome of a transfer to the engine process."""

    key: TransferKey
    outcome: Outcome
    error: ErrorInfo | None = None


Action = Write | PushReport

WRITE_BYTES = 1 << 20
"""Maximum bytes of one write. Other writes wait so long, and the bytes stay in a core's cache between
the digest and the copy."""
WINDOW_BYTES = 16 << 20
"""Maximum bytes under way to one peer."""
MOST_STOPPED = 4096
"""Maximum number of remembered stopped transfers."""
_MOST_SPANS = 4096
"""Maximum spans of one write."""

Digest = Callable[[TransferKey, str, tuple[SpanPart, ...]], np.ndarray]
"""Function from parts sent to a peer to their digests: see ``base.Transport.digest``."""

Limits = Callable[[str], tuple[int, int]]
"""Function from a peer to (maximum bytes of one write, maximum bytes under way)."""


class Queued(NamedTuple):
    """Parts of one future write."""

    parts: tuple[SpanPart, ...]
    digests: np.ndarray
    ready: Any


class _Push:
    def __init__(self, begin: Begin, layers: Sequence[tuple[int, int]], states: Collection[int]) -> None:
        self.plans, self.start, self.end = begin.plans, begin.start, begin.end
        self.computed = {layer: Positions() for layer in layers}
        """(KV cache group, layer number within the group) -> queued positions."""
        self.missing = {layer for layer in layers if self.start < self.end or layer[0] in states}
        """(KV cache group, layer number within the group) of layers with unqueued positions or an unqueued
        state."""
        self.queued: dict[str, deque[Queued]] = {peer: deque() for peer in begin.plans}
        self.under_way: dict[tuple[str, int], MemoryLease] = {}
        self.numbers = dict.fromkeys(begin.plans, 0)
        self.behind: deque[Computed | Grown | Spoiled] = deque()
        """Events from before ``Begin``, and later events queued behind such events."""
        self.started = self.over = False

    @property
    def idle(self) -> bool:
        return not (self.missing or self.under_way or self.behind or any(self.queued.values()))


class Pushes:
    """All sends of one rank. Used from one thread. ``layers``: for each KV cache group, the model layers in
    the group."""

    def __init__(
        self,
        layers: Sequence[Sequence[int]],
        digest: Digest,
        write_bytes: int = WRITE_BYTES,
        window: int = WINDOW_BYTES,
        states: Collection[int] = (),
        limits: Limits | None = None,
    ) -> None:
        """``digest``: called when a part is queued, while the bytes are still in the core's cache.
        ``write_bytes``: maximum bytes of one write, at most ``window``. ``window``: maximum bytes under way
        to one peer. ``states``: the recurrent KV cache groups. A receiver gets the state at the end,
        whatever the receiver has already. ``limits``: in place of ``write_bytes`` and ``window``."""
        self._digest = digest
        self._states = frozenset(states)
        self._of_layer: dict[int, list[tuple[int, int]]] = {}
        for kind, has in enumerate(layers):
            for number, layer in enumerate(has):
                self._of_layer.setdefault(layer, []).append((kind, number))
        self._limits: Limits = limits or (lambda peer: (min(write_bytes, window), window))
        self._transfers: OrderedDict[TransferKey, _Push] = OrderedDict()
        self._early: dict[TransferKey, list[Computed | Grown | Spoiled]] = {}
        self._stopped: OrderedDict[TransferKey, None] = OrderedDict()
        """The last stopped transfers: later events are ignored."""
        self._rings: dict[str, Ring] = {}
        self._catching = False
        """True if a transfer may have waiting events (see ``behind``)."""

    def __len__(self) -> int:
        return len(self._transfers) + len(self._early)

    def transfers(self) -> list[TransferKey]:
        """Return the keys of begun transfers."""
        return list(self._transfers)

    def waiting(self) -> list[TransferKey]:
        """Return the keys of transfers with events but without ``Begin``."""
        return list(self._early)

    def behind(self) -> TransferKey | None:
        """Return a transfer with events from before its ``Begin``; None if there is none. Each ``More``
        handles one such event, so other transfers do not wait for all digests of one transfer.
        Transfers take turns."""
        return (
            next((key for key, transfer in self._transfers.items() if transfer.behind), None)
            if self._catching
            else None
        )

    @property
    def under_way(self) -> int:
        """Bytes sent to all peers without an answer yet."""
        return sum(ring.used for ring in self._rings.values())

    @property
    def queued_bytes(self) -> int:
        """Bytes waiting for space in a window."""
        queues = (queue for transfer in self._transfers.values() for queue in transfer.queued.values())
        return sum(part.nbytes for queue in queues for queued in queue for part in queued.parts)

    def on(self, event: Event) -> list[Action]:
        """Return the actions for ``event``, in order of execution. Events of a transfer without ``Begin`` are
        stored; events of a stopped transfer are ignored. Independent of time."""
        match event:
            case Begin():
                return self._begin(event)
            case Computed() | Grown() | Spoiled():
                transfer = self._transfers.get(event.key)
                if transfer is not None and not transfer.behind:
                    return self._take(transfer, event)
                # Keep the order: an event behind a waiting event waits, too.
                if transfer is not None:
                    transfer.behind.append(event)
                elif event.key not in self._stopped:
                    self._early.setdefault(event.key, []).append(event)
                return []
            case More(key):
                return self._more(key)
            case Written():
                return self._written(event)
            case PushStopped(key):
                self._early.pop(key, None)
                self._stopped[key] = None
                while len(self._stopped) > MOST_STOPPED:
                    self._stopped.popitem(last=False)
                transfer = self._transfers.pop(key, None)
                return [] if transfer is None else self._release(transfer)

    def _begin(self, event: Begin) -> list[Action]:
        """Register a transfer. Early events wait for ``More``. No effect for a known transfer."""
        if event.key in self._transfers:
            return []
        everything = [pair for pairs in self._of_layer.values() for pair in pairs]
        transfer = self._transfers[event.key] = _Push(event, everything, self._states)
        # Early events need digests of all their bytes, so `More` handles them one at a time.
        transfer.behind.extend(self._early.pop(event.key, []))
        self._catching |= bool(transfer.behind)
        return self._report(event.key, transfer)

    def _more(self, key: TransferKey) -> list[Action]:
        """Handle the oldest waiting event of a transfer; nothing for an unknown transfer or without such an
        event."""
        transfer = self._transfers.get(key)
        if transfer is None or not transfer.behind:
            return []
        self._transfers.move_to_end(key)
        event = transfer.behind.popleft()
        return self._take(transfer, event)

    def _take(self, transfer: _Push, event: Computed | Grown | Spoiled) -> list[Action]:
        """Handle one event of a begun transfer: fail, extend the block tables, or queue computed positions
        and send as many writes as fit."""
        if isinstance(event, Spoiled):
            return self._fail(event.key, transfer, event.error)
        if isinstance(event, Grown):
            for plan in transfer.plans.values():
                plan.grow(event.places)
            return self._report(event.key, transfer)
        self._queue(transfer, event)
        return self._turn(transfer.plans) + self._report(event.key, transfer)

    def _queue(self, transfer: _Push, event: Computed) -> None:
        """Queue the new positions of ``event`` as writes to each peer, and the state of a layer behind its
        last position. Computes the digests now. No effect for a failed transfer."""
        if transfer.over:
            return
        ranges = dict[tuple[int, tuple[tuple[int, int], ...]], list[int]]()
        """(KV cache group, new positions) -> layer numbers within the group."""
        # Layers of a group with the same new positions share one span plan, so collect them first.
        ended = dict[int, list[int]]()
        for kind, number in (pair for layer in event.layers for pair in self._of_layer.get(layer, [])):
            computed = transfer.computed[kind, number]
            new = computed.add(max(event.begin, 0), min(event.end, transfer.end))
            ranges.setdefault((kind, tuple(new)), []).append(number)
            # A layer has ended once its last position is queued; then its recurrent state is queued, too.
            last = computed.has(min(transfer.start, transfer.end - 1), transfer.end)
            if last and (kind, number) in transfer.missing:
                ended.setdefault(kind, []).append(number)
        # One digest per group of parts: computed now, while the bytes are in the core's cache.
        for peer, plan in transfer.plans.items():
            parts = list[SpanPart]()
            for (kind, new_ones), numbers in ranges.items():
                parts += [part for at in new_ones for part in plan.entries(kind, numbers, *at)]
            for kind, numbers in ended.items():
                parts += plan.state(kind, numbers)
            for group in packed(parts, self._limits(peer)[0]):
                transfer.queued[peer].append(Queued(group, self._digest(event.key, peer, group), event.ready))
        transfer.missing -= {(kind, number) for kind, numbers in ended.items() for number in numbers}

    def _written(self, event: Written) -> list[Action]:
        """Free the window space of an ended write and send further writes. An error fails the transfer. An
        unknown write is ignored."""
        transfer = self._transfers.get(event.key)
        lease = None if transfer is None else transfer.under_way.pop((event.peer, event.number), None)
        if transfer is None or lease is None:
            return []
        self._rings[event.peer].give_back(lease)
        failed = [] if event.error is None else self._fail(event.key, transfer, event.error)
        return [*failed, *self._turn([event.peer]), *self._report(event.key, transfer)]

    def _fail(self, key: TransferKey, transfer: _Push, error: ErrorInfo) -> list[Action]:
        """Drop all queued writes and report the failure, at most once per transfer."""
        if transfer.over:
            return []
        transfer.over = True
        for queue in transfer.queued.values():
            queue.clear()
        return [PushReport(key, Outcome.failed, error)]

    def _release(self, transfer: _Push) -> list[Action]:
        # Late answers find no transfer any more, so give the leases back now.
        for (peer, _), lease in transfer.under_way.items():
            self._rings[peer].give_back(lease)
        return self._turn({peer for peer, _ in transfer.under_way})

    def _turn(self, peers: Sequence[str] | set[str] | Mapping[str, object]) -> list[Action]:
        """Send to each of ``peers`` as many writes as fit in the peer's window. Transfers take turns, one
        write each."""
        actions = list[Action]()
        for peer in sorted(peers):
            ring = self._rings.setdefault(peer, Ring(self._limits(peer)[1]))
            waiting = deque(key for key, transfer in self._transfers.items() if transfer.queued.get(peer))
            while waiting:
                key = waiting.popleft()
                transfer = self._transfers[key]
                parts, digests, ready = transfer.queued[peer][0]
                lease = ring.take(sum(part.nbytes for part in parts), key)
                # No space for the first write: the other writes to the peer wait, too.
                if lease is None:
                    break
                transfer.queued[peer].popleft()
                number, transfer.numbers[peer] = transfer.numbers[peer], transfer.numbers[peer] + 1
                transfer.under_way[peer, number] = lease
                if not transfer.started:
                    transfer.started = True
                    actions.append(PushReport(key, Outcome.pending))
                actions.append(Write(key, peer, number, parts, digests, ready))
                self._transfers.move_to_end(key)
                if transfer.queued[peer]:
                    waiting.append(key)
        return actions

    def _report(self, key: TransferKey, transfer: _Push) -> list[Action]:
        if transfer.over or not transfer.idle:
            return []
        transfer.over = True
        return [PushReport(key, Outcome.done)]


def packed(parts: Sequence[SpanPart], most: int) -> list[tuple[SpanPart, ...]]:
    """Return the spans of ``parts`` in order, in groups of at most ``most`` bytes. Longer spans are cut."""
    groups, group, space, left = list[tuple[SpanPart, ...]](), list[SpanPart](), most, _MOST_SPANS
    for part in parts:
        spans = split(part.spans, most)
        while len(spans):
            ends = np.cumsum(spans[:, 2])
            # Number of whole spans that still fit in the group.
            count = min(int(np.searchsorted(ends, space, side="right")), left)
            if count:
                group.append(part._replace(spans=spans[:count]))
                space, left = space - int(ends[count - 1]), left - count
                spans = spans[count:]
            if len(spans):
                groups.append(tuple(group))
                group, space, left = [], most, _MOST_SPANS
    if group:
        groups.append(tuple(group))
    return [group for group in groups if group]
