"""The table of models for several API servers: a pure state machine in the process that owns the engines.

    API servers                                     owner
      Reported: requests of each model     ──────►  SharedTable ─► Load, Unload, Drop
      LoadSeen: this load works, or failed ──────►      │
      ◄── ModelsRecord: version, members, states ───────╯

Each API server decides alone if a request may begin: by the last record, without a message. So an unload
takes one more step than with one API server:

1. The model drains from version v of the record on.
2. Each member reports that the member has seen version v. The same report has the open requests. From then on
   the member begins no request for the model.
3. All members have seen v, and no request is open: Unload.

A member whose report stays away for ``LEASE_S`` is expelled: the owner ends the process, and the requests of
the process end with the process. So no API server blocks an unload for ever, and no expelled API server can
begin a request at a model that is gone. An API server begins no request before the record names the server as
a member.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, TypeAlias

import msgspec

from weft.common.errors import ErrorInfo, WeftError
from weft.control import models as m

LEASE_S = 30.0
"""Maximum seconds for an API server to report a new version of the record."""
STALL_S = 2.0
"""Tolerated seconds between two ticks. After a longer pause of the owner, no lease has run out."""


class Use(msgspec.Struct, array_like=True):
    """Requests of one API server for one model."""

    open: int = 0
    """Requests that have begun, with lines of batches."""
    lines: int = 0
    """Lines of batches in ``open``."""
    waiting: int = 0
    """Requests that wait for the model."""
    requests: int = 0
    """Number of requests of clients so far; a request that waits counts again when the request begins."""
    begun: int = 0
    """Number of requests of clients that have begun so far."""
    keep: float | None = None
    """Seconds of ``keep_alive`` of the last request that has begun; None without."""
    batch: bool = False
    """True while batches have lines for the model."""
    kept: int = 0
    """Begun sequences at no engine: see ``weft.control.links.owner.Owner.present``."""


class ModelRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Published state of one model."""

    name: str
    state: str
    """A value of ``ModelState``."""
    load: int
    """Number of the present or last load; 0 before the first."""
    ending: bool
    """True while the processes of the load end."""
    cost: int
    pinned: bool
    running: int
    waiting: int
    expires: float | None
    """See ``Entry.expires``, on the monotonic clock of the host."""
    failure: str
    refused: int
    """Number of refusals so far. A new refusal fails all requests that wait."""
    refusal: ErrorInfo | None
    """The last refusal."""
    wait: float
    """Predicted seconds until the model admits requests."""
    loads: int
    """Number of loads that have succeeded."""
    unloads: int
    """Number of unloads that operators have asked for. Each gives up new weights; other ends of a load do
    not."""


class ModelsRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Published state of all models."""

    version: int
    members: tuple[str, ...]
    """API servers that may begin requests, as NAME/INCARNATION."""
    models: tuple[ModelRecord, ...]


# -- events


class Joined(NamedTuple):
    """An API server asks to be a member. The event may repeat."""

    front: str


class Left(NamedTuple):
    """The process of an API server has ended, with all its requests. The event may repeat."""

    front: str


class Reported(NamedTuple):
    """A member has seen version ``seen``. ``uses``: of the models whose use has changed."""

    front: str
    seen: int
    uses: Mapping[str, Use]


class LoadSeen(NamedTuple):
    """An API server has generated a token with each engine of a load, or cannot use the load. Or all engines
    are lost."""

    name: str
    load: int
    cost: int = 0
    """Bytes in use; 0 if unknown."""
    error: WeftError | None = None
    """Why the load cannot be used."""
    lost: bool = False
    """With ``error``: all engines of the load are lost for good."""


SharedEvent: TypeAlias = Joined | Left | Reported | LoadSeen | m.Event


# -- actions


class Drop(NamedTuple):
    """End the processes of a load that has failed. ``Failed`` follows."""

    name: str
    error: WeftError


class Expel(NamedTuple):
    """End the process of an API server that does not answer. ``Left`` follows."""

    front: str


SharedAction: TypeAlias = m.Action | Drop | Expel


class SharedTable(m.ModelTable):
    """``ModelTable`` over the sum of the requests of all members. Does not return ``StopLines``: members stop
    the lines of a model that drains when the members see the record."""

    def __init__(self, models: Iterable[m.ModelFacts], budget: int | None = None) -> None:
        super().__init__(models, budget)
        self.version = 1
        """Number of the present record. The number grows when an API server must act."""
        self.loads = dict.fromkeys(self.entries, 0)
        """Name -> number of the present or last load."""
        self.succeeded = dict.fromkeys(self.entries, 0)
        self._uses: dict[str, dict[str, Use]] = {}
        """Member -> model -> use."""
        self._seen: dict[str, int] = {}
        self._past: set[str] = set()
        """Members that have ended."""
        self._behind: dict[str, float] = {}
        """Member -> time from which a version has waited for the member."""
        self._shut_from = dict.fromkeys(self.entries, 0)
        """Name -> version from which the model admits no request."""
        self._dropped: set[str] = set()
        """Models whose processes end after a failed load."""
        self._refusals: dict[str, tuple[int, ErrorInfo]] = {}
        """Model -> number of refusals, and the last one."""
        self._refused: dict[str, int] = {}
        """Model -> version of the last refusal."""
        self._ticked = math.inf

    @property
    def members(self) -> tuple[str, ...]:
        return tuple(self._seen)

    def seen(self, version: int) -> bool:
        """Return True if all members have seen ``version``."""
        return all(one >= version for one in self._seen.values())

    def kept(self, name: str) -> int:
        """Return the begun sequences of a model at no engine, of all members."""
        return sum(uses[name].kept for uses in self._uses.values() if name in uses)

    def record(self) -> ModelsRecord:
        """Return the state for API servers."""
        made = []
        for name, entry in self.entries.items():
            refused, refusal = self._refusals.get(name, (0, None))
            made.append(
                ModelRecord(
                    name=name,
                    state=entry.state.value,
                    load=self.loads[name],
                    ending=entry.ending or name in self._dropped,
                    cost=entry.cost,
                    pinned=entry.pinned,
                    running=entry.open,
                    waiting=entry.waiting,
                    expires=entry.expires,
                    failure=entry.failure,
                    refused=refused,
                    refusal=refusal,
                    # Rounded, so that the passing time alone changes no record.
                    wait=float(math.ceil(self.wait(name))),
                    loads=self.succeeded[name],
                    unloads=entry.unloads,
                )
            )
        return ModelsRecord(self.version, self.members, tuple(made))

    # -- events

    def start(self, now: float) -> list[Any]:
        """Return the loads at the start of the server."""
        return self._noted(super().start(now))

    def on(self, event: Any, now: float) -> list[Any]:
        """Return the actions for ``event``, a ``SharedEvent``, at time ``now``."""
        before = self._shape()
        found: list[SharedAction] = []
        if (handler := _HANDLERS.get(type(event))) is not None:
            self._now = now
            found = handler(self, event)
            event = m.Tick()  # the plan follows from the new counts
        elif isinstance(event, m.Tick):
            found = self._expel(now)
        elif isinstance(event, m.Failed):
            self._dropped.discard(event.name)
        found += self._noted(super().on(event, now))
        # A drain that was taken back and began again in one event changes no state, but needs a new version.
        if self._shape() != before or max(self._shut_from.values()) > self.version:
            self.version += 1
            for front in self._seen:
                self._behind.setdefault(front, now)
        return found

    def _shape(self) -> tuple[Any, ...]:
        """Return everything on which an API server acts."""
        models = tuple((one.state, one.ending, one.unloads) for one in self.entries.values())
        return models, dict(self.loads), self.members, dict(self._refusals), set(self._dropped)

    def _noted(self, actions: list[m.Action]) -> list[SharedAction]:
        """Note refusals, which the record carries. Return the actions for the owner of the processes."""
        for one in actions:
            # If no member with waiting requests has seen the last refusal, the last refusal fails these, too.
            if isinstance(one, m.Refuse) and self._refusal_seen(one.name):
                number = self._refusals[one.name][0] + 1 if one.name in self._refusals else 1
                self._refusals[one.name] = number, one.error.info()
                self._refused[one.name] = self.version + 1
        return [one for one in actions if isinstance(one, (m.Load, m.Unload))]

    def _refusal_seen(self, name: str) -> bool:
        """Return True if requests wait for the model at a member that has seen the last refusal."""
        last = self._refused.get(name, 0)
        return any(
            self._seen[front] >= last
            for front, uses in self._uses.items()
            if name in uses and uses[name].waiting
        )

    # -- members

    def _joined(self, event: Joined) -> list[SharedAction]:
        # A message of a process that has ended may arrive late.
        if event.front not in self._seen and event.front not in self._past:
            self._seen[event.front] = 0
            self._uses[event.front] = {}
        return []

    def _left(self, event: Left) -> list[SharedAction]:
        """Close all requests of the process."""
        self._past.add(event.front)
        for name, use in self._uses.pop(event.front, {}).items():
            self._count(name, use, Use(requests=use.requests, begun=use.begun))
        self._seen.pop(event.front, None)
        self._behind.pop(event.front, None)
        return []

    def _reported(self, event: Reported) -> list[SharedAction]:
        uses = self._uses.get(event.front)
        if uses is None:  # the process has ended
            return []
        if event.seen > self._seen[event.front]:
            self._seen[event.front] = event.seen
            self._behind.pop(event.front, None)
            if event.seen < self.version:
                self._behind[event.front] = self._now
        for name, use in event.uses.items():
            if name in self.entries:
                before, uses[name] = uses.get(name, Use()), use
                self._count(name, before, use)
        return []

    def _count(self, name: str, before: Use, now: Use) -> None:
        """Change the counts of a model by the difference between two reports of one member."""
        entry = self.entries[name]
        was_used, came = entry.used, now.requests > before.requests
        if entry.state is m.ModelState.COLD and not entry.waiting and now.waiting and not entry.asked:
            entry.since = self._now
        entry.open += now.open - before.open
        entry.lines += now.lines - before.lines
        entry.waiting += now.waiting - before.waiting
        if came:
            entry.wanted, entry.for_batch = self._now, False
        if now.begun > before.begun:
            entry.keep = now.keep
        if was_used or came:
            self._update_idle(entry)
        batch = any(name in uses and uses[name].batch for uses in self._uses.values())
        self._batch_wants(entry, m.BatchWants(name, batch))

    def _expel(self, now: float) -> list[SharedAction]:
        """Return an action for each member whose lease has run out."""
        late = max(0.0, now - self._ticked - STALL_S)
        self._ticked = now
        if late:  # the owner stood still, so no report could arrive
            self._behind = {front: since + late + STALL_S for front, since in self._behind.items()}
        gone = [front for front, since in self._behind.items() if now - since > LEASE_S]
        self._behind.update(dict.fromkeys(gone, now))
        return [Expel(front) for front in gone]

    # -- loads

    def _begin(self, entry: m.Entry, for_batch: bool = False) -> m.Load:
        self.loads[entry.name] += 1
        return super()._begin(entry, for_batch)

    def _drain(self, entry: m.Entry, *, may_cancel_drain: bool) -> None:
        if entry.state is not m.ModelState.DRAINING:
            self._shut_from[entry.name] = self.version + 1  # the version of the next record
        super()._drain(entry, may_cancel_drain=may_cancel_drain)

    def _may_end(self, entry: m.Entry) -> bool:
        """Return True if no member has a request at a model that drains, or will have one."""
        return not entry.open and self.seen(self._shut_from[entry.name])

    def _load_seen(self, event: LoadSeen) -> list[SharedAction]:
        """Handle the first API server that can use a load, or an API server that cannot. Later ones are
        ignored: an API server that cannot use a loaded model tries again by itself."""
        entry = self.entries.get(event.name)
        if entry is None or event.load != self.loads[event.name]:
            return []
        if entry.ending or event.name in self._dropped:  # the processes end already
            return []
        loading = entry.state is m.ModelState.LOADING
        works = entry.state is not m.ModelState.COLD and entry.error is None
        if event.error is None and loading:
            self.succeeded[event.name] += 1
            self._loaded(entry, m.Loaded(event.name, event.cost))
        elif event.error is not None and loading:
            self._dropped.add(event.name)
            return [Drop(event.name, event.error)]
        elif event.error is not None and event.lost and works:  # once: the owner repeats the event
            self._failed(entry, m.Failed(event.name, event.error))
        return []


_HANDLERS: dict[type, Callable[[SharedTable, Any], list[SharedAction]]] = {
    Joined: SharedTable._joined,
    Left: SharedTable._left,
    Reported: SharedTable._reported,
    LoadSeen: SharedTable._load_seen,
}
