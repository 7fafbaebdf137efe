"""The fleet: all instances behind a front, and the sequences that it has open on them. One pure state machine.

    Opened ──► parked ──policy──► at an instance ──► Deliver(.., finish)
                 ▲                  │ lost, refused, evicted
                 ├──────────────────┤
                 └─ Resumed ─ paused ◄─ Paused

Whatever happens is an event, whatever is to be done an action: no clock, socket, thread or process is touched
here, so a simulator runs this very class. An open sequence is parked, paused, or at one instance or more; it
ends exactly once, with an event that has ``finish``. When an instance is lost its sequences go on at others,
from the tokens that came so far. Where none lives they wait for one that is started anew, if any is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from weft.common.errors import EngineDead, ReportedError, Unavailable, WeftError
from weft.common.log import get_logger
from weft.common.restarts import MOST_LOSSES
from weft.routing import events as e
from weft.routing.instances import Instance, State
from weft.routing.ledger import Entry
from weft.routing.policy import Policy, PrefixAffinity, hashes_of
from weft.types import messages as m

log = get_logger(__name__)

HEALTHY_S = 5.0
"""Seconds that an instance is up after which its death is not one of a row."""
ROW = 2
"""Deaths in a row after which an instance comes back half-open."""
MOST_REFUSALS = 8
"""Times that one instance may give a sequence back before a token of it comes."""
LATE = "the engine failed and did not come back in time; try again later"


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """Seconds."""

    engine: float = 120.0
    """Without a word, or without progress, after which an instance counts as dead."""
    recovery: float = 120.0
    """That sequences wait while no instance takes any and one is being started anew."""
    listen: float = 60.0
    """From an instance's start until it listens, which it does first of all."""
    load: float = 3600.0
    """From then until it answers: it loads its model."""


class Fleet:
    """Times are seconds of one monotonic clock, which never falls."""

    def __init__(
        self,
        instances: Mapping[str, str],
        patience: Patience,
        policy: Policy | None = None,
        front: str = "",
    ) -> None:
        """``instances``: name -> domain; those of one domain work together or not at all, "" is none.
        ``front``: the name of this front.
        """
        self.instances = {
            name: Instance(name, domain, order) for order, (name, domain) in enumerate(instances.items())
        }
        self.entries: dict[int, Entry] = {}
        """Open sequences."""
        self.failure: WeftError | None = None
        """Set when no instance lives and none will come back."""
        self.late_events = 0
        """Of sequences, or attempts, that nobody waits for any more."""
        self.failovers = 0
        """Sequences that went on after an instance was lost."""
        self.restarts = 0
        """Processes that took another one's place."""
        self.pauses = 0
        self._patience, self._front = patience, front
        self._policy = policy or PrefixAffinity()
        self._parked: dict[int, None] = {}
        """Open sequences that wait for an instance, in order."""
        self._paused: dict[int, None] = {}
        """Open sequences that nobody reads."""
        self._requests: dict[int, dict[int, None]] = {}
        """Request -> its open sequences: they share a prompt, and its blocks where they are together."""
        self._bereft: set[int] = set()
        """Parked or paused sequences whose instance was lost."""
        self._complete = False
        """Whether all instances have been up."""
        self._closing = False
        self._unready_since = math.inf
        """Since when no instance takes sequences; inf while one does."""
        self._late = False
        """Whether sequences have waited long enough for one, so that none should begin to."""
        self._now = -math.inf
        self._actions: list[e.Action] = []
        self._events: list[m.TokenEvent] = []

    def on(self, event: e.Event, now: float) -> list[e.Action]:
        """What is to be done after ``event``, which happened at ``now``."""
        self._now, self._actions, self._events = now, [], []
        _HANDLERS[type(event)](self, event)
        if self._parked:
            self._place_parked()
        if self._events:
            self._actions.append(e.Deliver(tuple(self._events)))
        return self._actions

    def next_deadline(self) -> float:
        """When a ``Tick`` will change something, if nothing happens before; inf for never."""
        deadlines = [math.inf]
        for instance in self.instances.values():
            if instance.state is State.STARTING:
                deadlines.append(instance.deadline)
            elif instance.alive:
                deadlines.append(min(instance.heard, instance.moved) + self._patience.engine)
            if instance.state is State.HALF_OPEN:
                deadlines.append(instance.since + HEALTHY_S)
        if not self._late:
            deadlines.append(self._unready_since + self._patience.recovery)
        return min(deadlines)

    def refusal(self) -> WeftError | None:
        """Why no request can begin now; None when it can."""
        if self.failure is not None:
            return Unavailable("the engine has failed; the server is stopping")
        if self._closing or not self._complete:
            return Unavailable("the engine is not ready yet; try again later")
        if self._late:
            return Unavailable("the engine has failed and is being started again; try again later")
        return None

    @property
    def alive(self) -> bool:
        """Whether an instance lives."""
        return self._complete and any(instance.alive for instance in self.instances.values())

    @property
    def whole(self) -> bool:
        """Whether all instances live."""
        return self._complete and all(instance.alive for instance in self.instances.values())

    # -- requests -----------------------------------------------------------------------------------

    def _opened(self, event: e.Opened) -> None:
        for submit in event.submits:
            hashes = event.hashes.get(submit.request)
            self.entries[submit.sequence] = Entry(submit, hashes, event.pinned)
            self._requests.setdefault(submit.request, {})[submit.sequence] = None
            self._parked[submit.sequence] = None
        if event.pinned is not None and not self.instances[event.pinned].alive:
            self._end_pinned(event.pinned, Unavailable("the engine that was asked for is not there"))

    def _end_pinned(self, name: str, error: WeftError) -> None:
        for sequence in [s for s, entry in self.entries.items() if entry.pinned == name]:
            self._end(sequence, error)

    def _closed(self, event: e.Closed) -> None:
        for sequence in event.sequences:
            if sequence in self.entries:
                self._leave(sequence)
                self._forget(sequence)

    def _pause(self, event: e.Paused) -> None:
        before = len(self._paused)
        for sequence in event.sequences:
            if sequence in self.entries and sequence not in self._paused:
                self._leave(sequence)
                self._parked.pop(sequence, None)
                self._paused[sequence] = None
        self.pauses += len(self._paused) > before

    def _resume(self, event: e.Resumed) -> None:
        for sequence in event.sequences:
            if sequence not in self._paused:
                continue
            del self._paused[sequence]
            if self._late:
                self._end(sequence, Unavailable(LATE))
            else:
                self._parked[sequence] = None

    def _leave(self, sequence: int) -> None:
        """Takes an open sequence from wherever it is."""
        entry = self.entries[sequence]
        for name in entry.places:
            instance = self.instances[name]
            instance.end(sequence)
            self._send(instance, m.Finish(sequence=sequence))
            if instance.version < 2:
                instance.unanswered.add(sequence)
        entry.places.clear()

    def _forget(self, sequence: int) -> None:
        """It has ended."""
        entry = self.entries.pop(sequence)
        for name in entry.places:
            self.instances[name].end(sequence)
        siblings = self._requests[entry.submit.request]
        del siblings[sequence]
        if not siblings:
            del self._requests[entry.submit.request]
        self._parked.pop(sequence, None)
        self._paused.pop(sequence, None)
        self._bereft.discard(sequence)

    def _end(self, sequence: int, error: WeftError) -> None:
        self._leave(sequence)
        self._forget(sequence)
        self._events.append(m.TokenEvent(sequence=sequence, finish="error", error=error.info()))

    # -- placement ----------------------------------------------------------------------------------

    def _takers(self) -> list[Instance]:
        """Instances that take sequences now, in order."""
        up = [
            instance
            for instance in self.instances.values()
            if instance.state is State.UP or (instance.state is State.HALF_OPEN and not instance.open)
        ]
        broken = {i.domain for i in self.instances.values() if i.domain and not i.alive}
        return [instance for instance in up if instance.domain not in broken] if broken else up

    def _place_parked(self) -> None:
        """Sends parked sequences to instances, those of one prompt together."""
        takers = self._takers()
        if not takers:
            return
        groups: dict[int, list[int]] = {}
        for sequence in self._parked:
            groups.setdefault(self.entries[sequence].submit.request, []).append(sequence)
        for group in groups.values():
            first = self.entries[group[0]]
            able = [taker for taker in takers if self._can_take(taker, group, first.pinned)]
            able = [taker for taker in able if taker.name not in first.refused] or able
            if not able:
                continue
            with_siblings = [taker for taker in able if self._has_siblings(taker, first.submit.request)]
            hashes = hashes_of(first.submit.prompt_ids, first.submit.salt, first.hashes)
            self._place(self._policy.choose(with_siblings or able, hashes), group)
            if any(taker.state is State.HALF_OPEN for taker in takers):
                takers = self._takers()

    def _can_take(self, instance: Instance, group: Iterable[int], pinned: str | None) -> bool:
        if pinned is not None and pinned != instance.name:
            return False
        return not instance.unanswered or instance.unanswered.isdisjoint(group)

    def _has_siblings(self, instance: Instance, request: int) -> bool:
        siblings = self._requests[request]
        return len(siblings) > 1 and any(instance.name in self.entries[s].places for s in siblings)

    def _place(self, instance: Instance, group: Iterable[int]) -> None:
        shared = False
        for sequence in group:
            entry = self.entries[sequence]
            submit = entry.again()
            entry.places[instance.name] = entry.attempt
            tokens = (len(submit.prompt_ids) + len(submit.emitted_ids)) // 4
            instance.begin(sequence, 0 if shared else tokens)
            shared = True
            if instance.version < 2 and submit.attempt:
                submit = msgspec.structs.replace(submit, attempt=0)
            self._send(instance, submit)
            del self._parked[sequence]
            if sequence in self._bereft:
                self._bereft.discard(sequence)
                self.failovers += 1

    def _send(self, instance: Instance, message: m.ToHead) -> None:
        self._actions.append(e.Send(instance.name, instance.link, message))

    # -- what instances say -------------------------------------------------------------------------

    def _received(self, event: e.Received) -> None:
        instance, message = self.instances[event.instance], event.message
        if instance.link != event.link or instance.state in (State.DOWN, State.RETIRED):
            self.late_events += len(message.events) if isinstance(message, m.Tokens) else 0
            return
        instance.heard = self._now
        if isinstance(message, m.Tokens):
            for token_event in message.events:
                self._take(instance, token_event)
        elif isinstance(message, m.Heartbeat):
            instance.heartbeat(message, self._now)
        elif isinstance(message, m.Welcome):
            self._welcome(instance, message)
        else:
            log.error("the engine failed: %s", message.error.message)
            self._lose(instance, ReportedError(message.error))

    def _welcome(self, instance: Instance, welcome: m.Welcome) -> None:
        version = m.common_version(welcome.versions)
        if version is None:
            low, high = welcome.versions
            spoken = f"the engine speaks versions {low} to {high}, this front {m.OLDEST} to {m.VERSION}"
            self._lose(instance, EngineDead(spoken))
        elif instance.welcome is not None and instance.welcome.incarnation != welcome.incarnation:
            self._lose(instance, EngineDead("the engine was replaced"))
        elif instance.state is State.STARTING:
            instance.welcome, instance.version = welcome, version
            instance.since = instance.heard = instance.moved = self._now
            instance.state = State.HALF_OPEN if instance.deaths >= ROW else State.UP
            self._policy.forget(instance.name)  # its cache is empty
            if self._complete:
                log.info("engine %s is back", instance.name)
            elif all(other.alive for other in self.instances.values()):
                self._complete = True
                self._actions.append(e.Complete())
            self._changed()

    def _take(self, instance: Instance, event: m.TokenEvent) -> None:
        sequence = event.sequence
        entry = self.entries.get(sequence)
        if sequence in instance.unanswered:
            entry = None
            if event.finish is not None:
                instance.unanswered.discard(sequence)
        attempt = None if entry is None else entry.places.get(instance.name)
        if entry is None or attempt is None or (event.attempt != attempt and instance.version > 1):
            self.late_events += 1
            return
        if event.token_ids:
            instance.computed(sequence)
        back = event.finish in ("moved", "evicted") or self._may_retry(instance, entry, event)
        if back:
            event = msgspec.structs.replace(event, finish=None, error=None)
        fresh = entry.take(event)
        if fresh is not None and (not back or fresh.token_ids or fresh.prompt_logprobs is not None):
            self._events.append(fresh)
        if back:
            self._give_back(instance, sequence)
        elif event.finish is not None:
            self._forget(sequence)
            if event.finish != "error" and instance.state is State.HALF_OPEN:
                self._healthy(instance)

    def _may_retry(self, instance: Instance, entry: Entry, event: m.TokenEvent) -> bool:
        """Whether ``event`` says that this instance has no room, and another one may have."""
        error = event.error
        if event.finish != "error" or error is None or error.blame != "capacity" or not error.retryable:
            return False
        if entry.pinned is not None:
            return False
        return any(i.name != instance.name and i.name not in entry.refused for i in self._takers())

    def _give_back(self, instance: Instance, sequence: int) -> None:
        """``instance`` has ``sequence`` no longer, and its stream goes on: where it is, too, or elsewhere."""
        entry = self.entries[sequence]
        instance.end(sequence)
        del entry.places[instance.name]
        if entry.places:
            return
        entry.refused[instance.name] = entry.refused.get(instance.name, 0) + 1
        if entry.refused[instance.name] > MOST_REFUSALS:
            self._end(sequence, Unavailable("the engine takes the request no more; try again later"))
        else:
            self._parked[sequence] = None

    # -- instances that come and go -----------------------------------------------------------------

    def _expected(self, event: e.Expected) -> None:
        instance = self.instances[event.instance]
        if instance.link >= 0:  # the end of the process before it may be told later, or never
            self._lose(instance, EngineDead("another process took its place"), replace=False)
        self.restarts += instance.state is State.DOWN
        instance.start(event.link, self._now + self._patience.listen)

    def _linked(self, event: e.Linked) -> None:
        instance = self.instances[event.instance]
        if instance.link == event.link and instance.state is State.STARTING and not instance.listens:
            instance.listens = True
            instance.deadline = self._now + self._patience.load
            self._send(instance, m.Hello(versions=(m.OLDEST, m.VERSION), front=self._front))

    def _lost(self, event: e.Lost) -> None:
        instance = self.instances[event.instance]
        if instance.link == event.link:
            self._lose(instance, event.error)

    def _lose(self, instance: Instance, error: WeftError, replace: bool = True) -> None:
        """The process of ``instance`` is gone, or as good as gone."""
        if instance.state in (State.DOWN, State.RETIRED):
            return
        log.error("engine %s is lost: %s", instance.name, error.message)
        healthy = instance.alive and self._now - instance.since >= HEALTHY_S
        instance.deaths = 1 if healthy else instance.deaths + 1
        instance.state = State.DOWN
        self._actions.append(e.Unlink(instance.name, instance.link))
        for sequence in list(instance.open):
            self._bereave(instance, sequence, error)
        self._end_pinned(instance.name, error)
        if not self._complete:  # it failed to start: whoever waits for that hears of it
            self._fail(error)
        elif replace and not self._closing:
            self._actions.append(e.Replace(instance.name, error))
        self._changed()

    def _bereave(self, instance: Instance, sequence: int, error: WeftError) -> None:
        entry = self.entries[sequence]
        instance.end(sequence)
        del entry.places[instance.name]
        self._leave(sequence)
        entry.losses += 1
        if entry.losses > MOST_LOSSES:
            lost = f"the engine was lost {entry.losses} times while it worked on this request"
            self._end(sequence, EngineDead(lost))
        else:  # of one that is pinned, ``_lose`` sees to the end
            self._bereft.add(sequence)
            self._parked[sequence] = None

    def _retired(self, event: e.Retired) -> None:
        """With one of a domain all of it are lost for good."""
        retired = self.instances[event.instance]
        for instance in self.instances.values():
            if instance is retired or (retired.domain and instance.domain == retired.domain):
                self._lose(instance, event.error, replace=False)
                instance.state = State.RETIRED
        if all(instance.state is State.RETIRED for instance in self.instances.values()):
            self._fail(event.error)
        self._changed()

    def _draining(self, event: e.Draining) -> None:
        instance = self.instances[event.instance]
        if instance.alive:
            instance.state = State.DRAINING
            self._changed()

    def _fail(self, error: WeftError) -> None:
        if self.failure is None:
            self.failure = error
            self._actions.append(e.Failed(error))
        for sequence in list(self.entries):
            self._end(sequence, error)

    def _healthy(self, instance: Instance) -> None:
        instance.state, instance.deaths = State.UP, 0
        self._changed()

    def _changed(self) -> None:
        """Notes since when nobody takes sequences, after the state of an instance has changed."""
        broken = {i.domain for i in self.instances.values() if i.domain and not i.alive}
        takes = (State.UP, State.HALF_OPEN)
        if any(i.state in takes and i.domain not in broken for i in self.instances.values()):
            self._unready_since, self._late = math.inf, False
        elif self._complete and self._unready_since == math.inf:
            self._unready_since = self._now

    # -- time ---------------------------------------------------------------------------------------

    def _tick(self, event: e.Tick) -> None:
        for instance in self.instances.values():
            if instance.alive and (why := instance.overdue(self._patience.engine, self._now)) is not None:
                self._lose(instance, EngineDead(why))
            elif instance.state is State.STARTING and self._now >= instance.deadline:
                why = "did not start in time" if instance.listens else "does not listen"
                self._lose(instance, EngineDead(f"the engine's process {why}"))
            elif instance.state is State.HALF_OPEN and self._now >= instance.since + HEALTHY_S:
                self._healthy(instance)
        if not self._late and self._now >= self._unready_since + self._patience.recovery:
            self._late = True
            log.error("no engine is back: %d sequences fail", len(self._parked))
            for sequence in list(self._parked):
                self._end(sequence, Unavailable(LATE))

    def _stalled(self, event: e.Stalled) -> None:
        for instance in self.instances.values():
            instance.heard = min(self._now, instance.heard + event.seconds)
            instance.moved = min(self._now, instance.moved + event.seconds)
            instance.deadline += event.seconds
        if self._unready_since != math.inf:
            self._unready_since = min(self._now, self._unready_since + event.seconds)

    def _close(self, event: e.Closing) -> None:
        self._closing = True
        for instance in self.instances.values():
            if not instance.listens or instance.state in (State.DOWN, State.RETIRED):
                continue
            if event.shutdown:
                self._send(instance, m.Shutdown())
            elif instance.version > 1:
                self._send(instance, m.Goodbye())
        for sequence in list(self.entries):
            self._end(sequence, Unavailable("the server is shutting down"))


_HANDLERS: dict[type, Callable[[Fleet, Any], None]] = {
    e.Opened: Fleet._opened,
    e.Closed: Fleet._closed,
    e.Paused: Fleet._pause,
    e.Resumed: Fleet._resume,
    e.Expected: Fleet._expected,
    e.Linked: Fleet._linked,
    e.Received: Fleet._received,
    e.Lost: Fleet._lost,
    e.Retired: Fleet._retired,
    e.Draining: Fleet._draining,
    e.Stalled: Fleet._stalled,
    e.Tick: Fleet._tick,
    e.Closing: Fleet._close,
}
