"""The fleet: all instances behind a front, and the sequences open on them, as one pure state machine.

    Opened ──► parked ──policy──► at an instance ──► Deliver(.., finish)
                 ▲                  │ lost, refused, evicted
                 ├──────────────────┤
                 └─ Resumed ─ paused ◄─ Paused

Input is events, output is actions (``weft.routing.events``). The class uses no clock, socket, thread or
process, so the simulator runs it, too. An open sequence is parked, paused, or at one instance or more; it
ends exactly once, with an event that has ``finish``. When an instance is lost its sequences go on at others,
from the tokens that came so far. If no instance is alive, they wait for one that is being started, if any is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec

from weft.common.errors import EngineDead, ReportedError, Unavailable, WeftError
from weft.common.log import get_logger
from weft.common.restarts import MOST_LOSSES
from weft.routing import events as e
from weft.routing.instance_table import InstanceTable, Patience
from weft.routing.instances import Instance, InstanceState
from weft.routing.ledger import LedgerEntry
from weft.routing.policy import Policy, PrefixAffinity, hashes_of
from weft.types import messages as m

log = get_logger(__name__)

MOST_REFUSALS = 8
"""Times that one instance may give a sequence back before a token of it comes."""
LATE = "the engine failed and did not come back in time; try again later"


class Fleet:
    """All instances behind one front. Times are seconds of one monotonic clock."""

    def __init__(
        self,
        instances: Mapping[str, str],
        patience: Patience,
        policy: Policy | None = None,
        front: str = "",
        joining: bool = False,
    ) -> None:
        """``instances``: name -> domain; those of one domain work together or not at all, "" is none.
        ``front``: the name of this front. ``joining``: other fronts serve already, so this one does not
        wait for all instances, and goes on when one is lost before it was up.
        """
        self.table = InstanceTable(instances, patience, joining)
        self._joining = joining
        self.entries: dict[int, LedgerEntry] = {}
        """Open sequences."""
        self.failure: WeftError | None = None
        """Set when no instance is left and none will be started again."""
        self.late_events = 0
        """Events of sequences or attempts that have ended already."""
        self.failovers = 0
        """Sequences that went on after an instance was lost."""
        self.pauses = 0
        self._patience, self._front = patience, front
        self._policy = policy or PrefixAffinity()
        self._parked: dict[int, None] = {}
        """Open sequences that wait for an instance, in order."""
        self._paused: dict[int, None] = {}
        """Open sequences that their client does not read."""
        self._requests: dict[int, dict[int, None]] = {}
        """Request -> its open sequences: they share a prompt, and its blocks where they are together."""
        self._bereft: set[int] = set()
        """Parked or paused sequences that lost their instance."""
        self._closing = False
        self._late = False
        """Whether sequences have waited for an instance for longer than ``Patience.recovery``: new ones are
        refused.
        """
        self._now = -math.inf
        self._actions: list[e.Action] = []
        self._events: list[m.TokenEvent] = []

    def on(self, event: e.Event, now: float) -> list[e.Action]:
        """Takes in ``event``, which happened at ``now``; returns the actions to carry out, in order."""
        self._now, self._actions, self._events = now, [], []
        _HANDLERS[type(event)](self, event)
        self._late = self._late and self.table.unready_since < math.inf
        if self._parked:
            self._place_parked()
        if self._events:
            self._actions.append(e.Deliver(tuple(self._events)))
        return self._actions

    def next_deadline(self) -> float:
        """When a ``Tick`` will change something, if nothing happens before; inf for never."""
        unready = math.inf if self._late else self.table.unready_since + self._patience.recovery
        return min(self.table.deadline(), unready)

    def refusal(self) -> WeftError | None:
        """Why no request can begin now; None when it can."""
        if self.failure is not None:
            return Unavailable("the engine has failed; the server is stopping")
        if self._closing or not self.table.complete:
            return Unavailable("the engine is not ready yet; try again later")
        if self._late:
            return Unavailable("the engine has failed and is being started again; try again later")
        return None

    # -- requests -----------------------------------------------------------------------------------

    def _opened(self, event: e.Opened) -> None:
        for submit in event.submits:
            hashes = event.hashes.get(submit.request)
            self.entries[submit.sequence] = LedgerEntry(submit, hashes, event.pinned)
            self._requests.setdefault(submit.request, {})[submit.sequence] = None
            self._parked[submit.sequence] = None
        if event.pinned is not None and not self.table.instances[event.pinned].alive:
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
            instance = self.table.instances[name]
            instance.end(sequence)
            self._send(instance, m.Finish(sequence=sequence))
            if instance.version < 2:
                instance.unanswered.add(sequence)
        entry.places.clear()

    def _forget(self, sequence: int) -> None:
        """It has ended."""
        entry = self.entries.pop(sequence)
        for name in entry.places:
            self.table.instances[name].end(sequence)
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

    def _place_parked(self) -> None:
        """Sends parked sequences to instances, those of one prompt together."""
        takers = self.table.takers()
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
            if any(taker.state is InstanceState.HALF_OPEN for taker in takers):
                takers = self.table.takers()

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
        instance, message = self.table.instances[event.instance], event.message
        if instance.link != event.link or instance.state in (InstanceState.DOWN, InstanceState.RETIRED):
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
        complete = self.table.complete
        try:
            up = self.table.welcome(instance, welcome, self._now)
        except EngineDead as error:
            self._lose(instance, error)
            return
        if up:
            self._policy.forget(instance.name)  # its cache is empty
        if self.table.complete and not complete:
            self._actions.append(e.Complete())

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
            if event.finish != "error":
                self.table.prove(instance)

    def _may_retry(self, instance: Instance, entry: LedgerEntry, event: m.TokenEvent) -> bool:
        """Whether ``event`` says that this instance has no room, and another one may have."""
        error = event.error
        if event.finish != "error" or error is None or error.blame != "capacity" or not error.retryable:
            return False
        if entry.pinned is not None:
            return False
        return any(i.name != instance.name and i.name not in entry.refused for i in self.table.takers())

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
        instance = self.table.instances[event.instance]
        if instance.link >= 0:  # the end of the process before it may be told later, or never
            self._lose(instance, EngineDead("another process took its place"), replace=False)
        self.table.expect(instance, event.link, self._now, event.relinked)

    def _located(self, event: e.Located) -> None:
        if (instance := self._linked_to(event.instance, event.link)) is not None:
            self.table.locate(instance, self._now)

    def _listening(self, event: e.Linked) -> None:
        instance = self._linked_to(event.instance, event.link)
        if instance is not None and self.table.listen(instance, self._now):
            self._send(instance, m.Hello(versions=(m.OLDEST, m.VERSION), front=self._front))

    def _linked_to(self, name: str, link: int) -> Instance | None:
        """The instance, if ``link`` is its present one."""
        instance = self.table.instances[name]
        return instance if instance.link == link else None

    def _lost(self, event: e.Lost) -> None:
        if (instance := self._linked_to(event.instance, event.link)) is not None:
            self._lose(instance, event.error)

    def _lose(self, instance: Instance, error: WeftError, replace: bool = True) -> None:
        """The process of ``instance`` is gone, or as good as gone."""
        if not self.table.lose(instance, self._now):
            return
        log.error("engine %s is lost: %s", instance.name, error.message)
        self._actions.append(e.Unlink(instance.name, instance.link))
        for sequence in list(instance.open):
            self._bereave(instance, sequence, error)
        self._end_pinned(instance.name, error)
        if (
            not self.table.complete and not self._joining
        ):  # it failed to start: who waits for that hears of it
            self._fail(error)
        elif replace and not self._closing:
            self._actions.append(e.Replace(instance.name, error))

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
        retired = self.table.instances[event.instance]
        for instance in self.table.instances.values():
            if instance is retired or (retired.domain and instance.domain == retired.domain):
                self._lose(instance, event.error, replace=False)
                self.table.retire(instance)
        if self.table.over:
            self._fail(event.error)

    def _draining(self, event: e.Draining) -> None:
        self.table.drain(self.table.instances[event.instance], self._now)

    def _fail(self, error: WeftError) -> None:
        if self.failure is None:
            self.failure = error
            self._actions.append(e.Failed(error))
        for sequence in list(self.entries):
            self._end(sequence, error)

    def _tick(self, event: e.Tick) -> None:
        for instance, error in self.table.overdue(self._now):
            self._lose(instance, error)
        if not self._late and self._now >= self.table.unready_since + self._patience.recovery:
            self._late = True
            log.error("no engine is back: %d sequences fail", len(self._parked))
            for sequence in list(self._parked):
                self._end(sequence, Unavailable(LATE))

    def _stalled(self, event: e.Stalled) -> None:
        self.table.stall(event.seconds, self._now)

    def _close(self, event: e.Closing) -> None:
        self._closing = True
        for instance in self.table.instances.values():
            if not instance.listens or instance.state in (InstanceState.DOWN, InstanceState.RETIRED):
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
    e.Located: Fleet._located,
    e.Linked: Fleet._listening,
    e.Received: Fleet._received,
    e.Lost: Fleet._lost,
    e.Retired: Fleet._retired,
    e.Draining: Fleet._draining,
    e.Stalled: Fleet._stalled,
    e.Tick: Fleet._tick,
    e.Closing: Fleet._close,
}
