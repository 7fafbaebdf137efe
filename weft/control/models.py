"""Which models of a server are loaded: a pure state machine.

    cold ──wanted──► loading ──Loaded──► up ──for room, by time, by an operator──► draining
      ▲                 │ Failed                                                      │ last request ends
      ╰─────────────────┴──────────────────────────Gone◄────────────Unload◄───────────╯

A request for a model that is not up waits. Waiting models load in the order of their first request, within
the budget. To make room, models that nobody uses are unloaded first. A model in use drains: new requests for
the model wait, running requests end by themselves, and then the model is unloaded. So an unload ends no
stream. A model in use drains at the earliest ``HYSTERESIS_S`` seconds after its load. So two models that
alternate are served in batches.

Lines of batches are background work. The table treats a model that only lines use as unused:

    BatchWants ──► the model fits, also after unloads of models without recent requests: Load ──► lines run
    a request for another model needs the memory ──► draining, StopLines ──► Gone

So lines wait for requests of every model. A request does not wait for lines, but may wait for the end of a
load that has begun for lines. A model stays until its lines are done, or for ``TURN_S`` if another model with
lines needs the memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple, TypeAlias

from weft.common.errors import Unavailable, WeftError

HYSTERESIS_S = 30.0
"""Minimum seconds between the load of a model and a drain while the model is in use."""
QUIET_S = 5.0
"""Minimum seconds without a request before another model may take the place of a model, within
``HYSTERESIS_S`` of the load. Later, another model may take the place at once."""
TURN_S = 600.0
"""Seconds after a load for lines before other lines may take the place of the model."""
BATCH_QUIET_S = 60.0
"""Minimum seconds without a request before lines of another model may take the place of a model."""
BATCH_REST_S = 300.0
"""Seconds after a failure, or an unload by an operator, in which lines load no model."""
BACKOFF_S = 10.0
"""Seconds after a failure in which requests for the model fail at once."""
LOAD_S = 5.0
"""Predicted seconds of a load, before the first load of the model has been measured."""
END_S = 20.0
"""Maximum seconds for the processes of an unloaded model to end by themselves. An idle engine needs well
under a second, and longer with blocks for the KV disk tier or on a busy host. A killed engine deletes no file
in shared memory."""


class ModelState(Enum):
    """State of a model; see the transitions at the head of the module."""

    COLD = "unloaded"
    LOADING = "loading"
    UP = "loaded"
    DRAINING = "draining"


class ModelFacts(NamedTuple):
    """Settings of one model."""

    name: str
    cost: int
    """Bytes of memory while the model is loaded: an estimate, until ``Loaded`` brings a better number."""
    pinned: bool = False
    """True: the model is unloaded only on an operator's request."""
    ttl: float = math.inf
    """Seconds without a request after which the model is unloaded."""
    starts: bool = False
    """True: the model loads when the server starts."""


# -- events


class Wanted(NamedTuple):
    """A request arrives and must wait for the model."""

    name: str


class GaveUp(NamedTuple):
    """A waiting request ends without the model."""

    name: str


class Opened(NamedTuple):
    """A request begins at a model that admits requests."""

    name: str
    waited: bool = False
    """True if ``Wanted`` came before."""
    line: bool = False
    """True for a line of a batch."""


class Closed(NamedTuple):
    """A request that has begun ends."""

    name: str
    line: bool = False
    """True for a line of a batch."""


class BatchWants(NamedTuple):
    """Batches have lines for the model, or have none any more."""

    name: str
    wants: bool


class Kept(NamedTuple):
    """A request sets the seconds without a request until the unload, in place of ``ttl``, until the next
    request."""

    name: str
    seconds: float


class Loaded(NamedTuple):
    """A load has succeeded. ``cost``: bytes in use; 0 if unknown."""

    name: str
    cost: int = 0


class Failed(NamedTuple):
    """A load has failed and all its processes have ended, or all engines of a loaded model are retired."""

    name: str
    error: WeftError


class Gone(NamedTuple):
    """All processes of a model have ended after ``Unload``."""

    name: str


class LoadAsked(NamedTuple):
    """An operator wants the model to be loaded."""

    name: str


class UnloadAsked(NamedTuple):
    """An operator wants the model to be unloaded, even a pinned model."""

    name: str


class PinAsked(NamedTuple):
    """An operator pins or unpins the model."""

    name: str
    pinned: bool


class Tick(NamedTuple):
    """Time has passed. Sent about once per second."""


Event: TypeAlias = (
    Wanted
    | GaveUp
    | Opened
    | Closed
    | BatchWants
    | Kept
    | Loaded
    | Failed
    | Gone
    | LoadAsked
    | UnloadAsked
    | PinAsked
    | Tick
)


# -- actions


class Load(NamedTuple):
    """Start the processes of the model. ``Loaded`` or ``Failed`` follows."""

    name: str


class Unload(NamedTuple):
    """End the processes of the model, which has no open request. ``Gone`` follows."""

    name: str


class Refuse(NamedTuple):
    """Fail all requests that wait for the model. ``GaveUp`` follows for each."""

    name: str
    error: WeftError


class StopLines(NamedTuple):
    """Stop the running lines of the model, which drains. ``Closed`` follows for each. The lines run again
    later."""

    name: str


Action: TypeAlias = Load | Unload | Refuse | StopLines


@dataclass(slots=True)
class Entry:
    """One model. Read-only for users of ``ModelTable``."""

    facts: ModelFacts
    cost: int
    pinned: bool
    state: ModelState = ModelState.COLD
    open: int = 0
    """Requests that have begun, with lines of batches."""
    lines: int = 0
    """Lines of batches in ``open``."""
    batch: bool = False
    """True while batches have lines for the model."""
    batch_since: float = 0.0
    """Time from which lines have waited for a load of the model."""
    for_batch: bool = False
    """True from a load for lines until the first request of a client."""
    stops: bool = False
    """True from the begin of a drain until ``StopLines``."""
    rest: float = -math.inf
    """Time before which lines load no model."""
    waiting: int = 0
    """Requests that wait for the model."""
    asked: bool = False
    """True while an operator, or the start of the server, wants the model to be loaded."""
    since: float = 0.0
    """Time at which the model began to wait for its load, to load, or to be up."""
    wanted: float = -math.inf
    """Time of the last request, and of the load."""
    idle: float = 0.0
    """Time at which the last open request ended."""
    keep: float | None = None
    """Seconds of the last ``Kept``."""
    may_cancel_drain: bool = False
    """True while the model drains only for room, and may stay if the room is not needed any more."""
    ending: bool = False
    """True from ``Unload`` to ``Gone``."""
    failed: float = -math.inf
    """Time of the last failure."""
    error: WeftError | None = None
    """Reason of the last failure; None after a load that succeeded."""
    unwanted: bool = False
    """True while the model loads, and an operator wants the model to be unloaded."""
    took: float = LOAD_S
    """Seconds of the last load."""
    unloads: int = 0
    """Number of unloads that operators have asked for."""

    @property
    def name(self) -> str:
        return self.facts.name

    @property
    def used(self) -> bool:
        """True while a request of a client has begun or waits. Lines of batches do not count."""
        return self.open > self.lines or self.waiting > 0

    @property
    def limit(self) -> float:
        """Seconds without a request until the unload."""
        return self.facts.ttl if self.keep is None else self.keep

    @property
    def failure(self) -> str:
        """Reason of the last failure; "" after a load that succeeded."""
        return "" if self.error is None else self.error.message

    @property
    def expires(self) -> float | None:
        """Time of the unload if no request comes; None for never, and for a model in use."""
        busy = self.used or self.batch or self.lines
        if self.state is not ModelState.UP or busy or self.pinned or math.isinf(self.limit):
            return None
        return self.idle + self.limit


class ModelTable:
    """Decides which models are loaded. ``on(event, now)`` returns the actions; ``entries`` has the state."""

    def __init__(self, models: Iterable[ModelFacts], budget: int | None = None) -> None:
        """``budget``: maximum bytes of all models that are not cold; None for no maximum."""
        self.entries = {one.name: Entry(one, one.cost, one.pinned) for one in models}
        self._budget = math.inf if budget is None else budget
        self._now = 0.0

    @property
    def used(self) -> int:
        """Bytes of all models that are not cold."""
        return sum(one.cost for one in self.entries.values() if one.state is not ModelState.COLD)

    def admits(self, name: str) -> bool:
        """Return True if a request for the model may begin now."""
        return self.entries[name].state is ModelState.UP

    def wait(self, name: str) -> float:
        """Return the predicted seconds until the model admits requests, at least 1."""
        entry = self.entries[name]
        if entry.state is ModelState.UP:
            return 1.0
        left = entry.took
        if entry.state is ModelState.LOADING:
            left -= self._now - entry.since
        elif self.used + entry.cost > self._budget:
            left += HYSTERESIS_S
        return max(left, 1.0)

    def start(self, now: float) -> list[Action]:
        """Return the loads at the start of the server."""
        self._now = now
        for entry in self.entries.values():
            if entry.facts.starts:
                self._ask(entry)
        return self._plan()

    def on(self, event: Event, now: float) -> list[Action]:
        """Return the actions for ``event`` at time ``now``."""
        self._now = now
        if not isinstance(event, Tick):
            _HANDLERS[type(event)](self, self.entries[event.name], event)
        return self._plan()

    # -- requests

    def _wanted(self, entry: Entry, event: Wanted) -> None:
        if entry.state is ModelState.COLD and not entry.waiting and not entry.asked:
            entry.since = self._now
        entry.waiting += 1
        entry.wanted, entry.for_batch = self._now, False

    def _gave_up(self, entry: Entry, event: GaveUp) -> None:
        entry.waiting -= 1
        self._update_idle(entry)

    def _opened(self, entry: Entry, event: Opened) -> None:
        assert entry.state is ModelState.UP, "only a loaded model admits requests"
        entry.waiting -= event.waited
        entry.open += 1
        if event.line:
            entry.lines += 1
            return
        entry.keep = None
        entry.wanted, entry.for_batch = self._now, False

    def _closed(self, entry: Entry, event: Closed) -> None:
        entry.open -= 1
        if event.line:
            entry.lines -= 1
        else:
            self._update_idle(entry)

    def _batch_wants(self, entry: Entry, event: BatchWants) -> None:
        if event.wants and not entry.batch:
            entry.batch_since = self._now
        elif entry.batch and not event.wants:
            self._update_idle(entry)
        entry.batch = event.wants

    def _update_idle(self, entry: Entry) -> None:
        """Record the time of the last use if no request uses the model any more."""
        if not entry.used:
            entry.idle = self._now

    def _kept(self, entry: Entry, event: Kept) -> None:
        entry.keep = event.seconds

    # -- processes

    def _loaded(self, entry: Entry, event: Loaded) -> None:
        if entry.state is ModelState.LOADING:
            entry.took = self._now - entry.since
            entry.state, entry.since, entry.error = ModelState.UP, self._now, None
            entry.asked = False
            entry.cost = event.cost or entry.cost
            entry.idle = self._now
            if not entry.for_batch:
                entry.wanted = self._now
            if entry.unwanted and not entry.waiting:
                self._drain(entry, may_cancel_drain=False)
        entry.unwanted = False

    def _failed(self, entry: Entry, event: Failed) -> None:
        entry.failed, entry.error, entry.asked = self._now, event.error, False
        entry.unwanted = False
        entry.rest = self._now + BATCH_REST_S
        if entry.state is ModelState.LOADING:
            entry.state = ModelState.COLD
        elif entry.state is not ModelState.COLD:
            # The open requests fail without the engines. The memory is free when the processes have ended.
            self._drain(entry, may_cancel_drain=False)

    def _gone(self, entry: Entry, event: Gone) -> None:
        entry.state, entry.ending, entry.keep = ModelState.COLD, False, None
        entry.batch_since = self._now  # lines of other models come first
        if entry.used or entry.asked:
            entry.since = self._now

    # -- operators

    def _load_asked(self, entry: Entry, event: LoadAsked) -> None:
        entry.failed, entry.unwanted = -math.inf, False
        entry.wanted, entry.for_batch = self._now, False
        # A model that drains with an error has lost its engines.
        if entry.state is ModelState.DRAINING and not entry.ending and entry.error is None:
            entry.state = ModelState.UP
        elif entry.state in (ModelState.COLD, ModelState.DRAINING):
            self._ask(entry)

    def _ask(self, entry: Entry) -> None:
        if not entry.waiting and not entry.asked:
            entry.since = self._now
        entry.asked, entry.wanted = True, self._now

    def _unload_asked(self, entry: Entry, event: UnloadAsked) -> None:
        entry.asked = False
        entry.unloads += 1
        entry.rest = self._now + BATCH_REST_S
        if entry.state in (ModelState.UP, ModelState.DRAINING):
            self._drain(entry, may_cancel_drain=False)
        # A load is not interrupted. If requests wait at the end of the load, the model stays.
        entry.unwanted = entry.state is ModelState.LOADING

    def _pin_asked(self, entry: Entry, event: PinAsked) -> None:
        entry.pinned = event.pinned
        may_stay = entry.state is ModelState.DRAINING and entry.may_cancel_drain and not entry.ending
        if event.pinned and may_stay:
            entry.state = ModelState.UP

    # -- the plan

    def _drain(self, entry: Entry, *, may_cancel_drain: bool) -> None:
        entry.stops |= entry.state is not ModelState.DRAINING
        entry.state, entry.may_cancel_drain = ModelState.DRAINING, may_cancel_drain

    def _plan(self) -> list[Action]:
        """Return the actions that follow from the present state."""
        actions: list[Action] = []
        self._expire()
        waiting = [
            one
            for one in self.entries.values()
            if one.state is ModelState.COLD and (one.waiting or one.asked)
        ]
        waiting.sort(key=lambda one: one.since)
        # Models drain only for the first waiting model: a later, smaller model must not take the free memory.
        blocked = False
        for entry in waiting:
            refusal = self._refusal(entry)
            if refusal is not None:
                entry.asked = False
                actions.append(Refuse(entry.name, refusal))
            elif not blocked and self._fits(entry):
                actions.append(self._begin(entry))
            elif not blocked:
                blocked = True
                self._drain_for(entry, self._may_drain)
        # Requests come first: lines load nothing while a request waits for room.
        batch_blocked = not blocked and self._loads_for_lines(actions)
        self._trim(blocked, batch_blocked)
        for entry in self.entries.values():
            if entry.state is not ModelState.DRAINING or entry.ending:
                continue
            if self._may_end(entry):
                entry.ending = True
                actions.append(Unload(entry.name))
            elif entry.lines and entry.stops:
                actions.append(StopLines(entry.name))
            entry.stops = False
        return actions

    def _may_end(self, entry: Entry) -> bool:
        """Return True if no request can be at a model that drains."""
        return not entry.open

    def _begin(self, entry: Entry, for_batch: bool = False) -> Load:
        entry.state, entry.since, entry.for_batch = ModelState.LOADING, self._now, for_batch
        return Load(entry.name)

    def _loads_for_lines(self, actions: list[Action]) -> bool:
        """Add the loads for lines of batches to ``actions``. Return True if models drain for lines."""
        wanting = [
            one
            for one in self.entries.values()
            if one.state is ModelState.COLD and one.batch and not one.waiting and self._now >= one.rest
        ]
        for entry in sorted(wanting, key=lambda one: one.batch_since):
            if self._refusal(entry) is not None:
                continue
            if self._fits(entry):
                actions.append(self._begin(entry, for_batch=True))
            elif self._drain_for(entry, self._may_drain_for_lines):
                return True
            # No model may drain while clients use all models. The next model with lines may be smaller.
        return False

    def _expire(self) -> None:
        """Drain the models that have reached their maximum time without a request."""
        for entry in self.entries.values():
            if (until := entry.expires) is not None and self._now >= until:
                self._drain(entry, may_cancel_drain=False)

    def _refusal(self, entry: Entry) -> WeftError | None:
        """Return why the model cannot be loaded now or later; None if the model can be loaded."""
        if self._now < entry.failed + BACKOFF_S:
            assert entry.error is not None
            return Unavailable(entry.error.message)
        pinned = sum(
            one.cost
            for one in self.entries.values()
            if one is not entry and one.pinned and one.state is not ModelState.COLD
        )
        if entry.cost + pinned > self._budget:
            return Unavailable(
                f"the model {entry.name} needs {_size(entry.cost)}, and --models-memory leaves "
                f"{_size(max(int(self._budget) - pinned, 0))} beside pinned models"
            )
        return None

    def _fits(self, entry: Entry) -> bool:
        """Return True if the model can load now."""
        return self.used + entry.cost <= self._budget

    def _drain_for(self, entry: Entry, may_go: Callable[[Entry], bool]) -> bool:
        """Drain models until the model will fit, if enough models may drain. Return True if the model will
        fit when all drains have ended. ``may_go``: returns True for a model that may drain now."""
        lacking = self.used + entry.cost - self._budget
        # The memory of draining models is free soon.
        lacking -= sum(one.cost for one in self.entries.values() if one.state is ModelState.DRAINING)
        victims = self._victims(lacking, may_go)
        for victim in victims:
            self._drain(victim, may_cancel_drain=True)
        return lacking <= 0 or bool(victims)

    def _may_drain(self, entry: Entry) -> bool:
        """Return True if another model may take the place of the model, for a request."""
        if _in_background(entry):
            return True
        if not entry.used and self._now >= max(entry.wanted, entry.idle) + QUIET_S:
            return True
        return self._now >= entry.since + HYSTERESIS_S

    def _may_drain_for_lines(self, entry: Entry) -> bool:
        """Return True if another model may take the place of the model, for lines of batches."""
        if entry.used or self._now < entry.since + HYSTERESIS_S:
            return False
        if entry.batch and self._now < entry.since + TURN_S:
            return False
        return entry.for_batch or self._now >= max(entry.wanted, entry.idle) + BATCH_QUIET_S

    def _victims(self, lacking: float, may_go: Callable[[Entry], bool]) -> list[Entry]:
        """Return loaded models with at least ``lacking`` bytes; [] if there are not enough.

        Models without requests come first. Among these models, the largest product of size and time since the
        last request comes first. Lines of batches are no requests.
        """
        candidates = [
            one
            for one in self.entries.values()
            if one.state is ModelState.UP and not one.pinned and may_go(one)
        ]
        candidates.sort(key=lambda one: (one.used, -(self._now - max(one.wanted, 0.0) + 1e-3) * one.cost))
        chosen: list[Entry] = []
        for one in candidates:
            if lacking <= 0:
                break
            chosen.append(one)
            lacking -= one.cost
        return chosen if lacking <= 0 else []

    def _trim(self, blocked: bool, batch_blocked: bool) -> None:
        """Cancel drains that are not needed any more, and drain models if a model took more memory than its
        estimate. ``blocked``: True if a request waits for memory. ``batch_blocked``: True if models drain
        only for lines. Lines never unload a model that a request uses."""
        excess = self.used - self._budget
        draining = [one for one in self.entries.values() if one.state is ModelState.DRAINING]
        excess -= sum(one.cost for one in draining)
        if excess > 0:
            newest = max((one.since for one in self.entries.values()), default=0.0)
            # The newest model stays, except a model of lines: lines take no memory from requests.
            victims = self._victims(excess, _in_background) or self._victims(
                excess, lambda one: one.since < newest or _in_background(one)
            )
            for victim in victims:
                self._drain(victim, may_cancel_drain=False)
        elif not blocked:
            for one in draining:
                needed = batch_blocked and not one.used
                if one.may_cancel_drain and not needed and not one.ending and self.used <= self._budget:
                    one.state = ModelState.UP


def _in_background(entry: Entry) -> bool:
    """Return True for a model that was loaded for lines, and that no request has used since."""
    return entry.for_batch and not entry.used


def _size(nbytes: int) -> str:
    return f"{nbytes / (1 << 30):.2f} GiB"


_HANDLERS: dict[type, Callable[[ModelTable, Entry, Any], None]] = {
    Wanted: ModelTable._wanted,
    GaveUp: ModelTable._gave_up,
    Opened: ModelTable._opened,
    Closed: ModelTable._closed,
    BatchWants: ModelTable._batch_wants,
    Kept: ModelTable._kept,
    Loaded: ModelTable._loaded,
    Failed: ModelTable._failed,
    Gone: ModelTable._gone,
    LoadAsked: ModelTable._load_asked,
    UnloadAsked: ModelTable._unload_asked,
    PinAsked: ModelTable._pin_asked,
}
