"""Pure state machine over all instances behind one API server, and over all open sequences.

    Opened ──► parked ──policy──► at an instance ──► Deliver(.., finish)
                 ▲                  │ lost, refused, evicted
                 ├──────────────────┤
                 └─ Resumed ─ paused ◄─ Paused

Input is events, output is actions (``weft.control.fleet.fleet_events``). The class uses no clock, socket,
thread or process, so the simulator runs the same code. An open sequence is parked, paused, at an instance, or
at a pair of instances (``weft.control.fleet.pairs``). Further instances may encode the images of the sequence
(``weft.control.fleet.encoders``). Each sequence ends exactly once, with an event with ``finish``. After the
loss of an instance, the sequences of the instance continue from the tokens received so far: at other
instances, or after a wait for a replacement.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec

from weft.common.errors import EngineDead, PeerEnded, RanksLost, ReportedError, Unavailable, WeftError
from weft.common.log import get_logger
from weft.common.restarts import MOST_LOSSES
from weft.control.fleet import fleet_events as e
from weft.control.fleet.instance_table import InstanceTable, Patience
from weft.control.fleet.instances import GONE, Instance, InstanceState
from weft.control.fleet.ledger import LedgerEntry, Unreceived, by_request, was_not_greeted, with_final_error
from weft.control.fleet.open_sequences import (
    MOST_REFUSALS,
    Lateness,
    OpenSequences,
    begin,
    may_retry,
    wait_after,
)
from weft.control.fleet.pairs import Report, Route, Router
from weft.control.fleet.policy import Policies, make_policies
from weft.types import messages as m
from weft.types.versions import message_for

log = get_logger(__name__)


class Fleet:
    """All instances behind one API server. Times are seconds of one monotonic clock."""

    def __init__(
        self,
        instances: Mapping[str, str],
        patience: Patience,
        policies: Policies | None = None,
        front: str = "",
        joining: bool = False,
        local_prefill: bool = True,
        retired: Iterable[str] = (),
        elastic: bool = False,
    ) -> None:
        """Create a fleet in which no instance has answered yet.

        ``instances`` maps a name to an expert-parallel group. The instances of a group only work together. ""
        means no group. ``front`` is the name of this API server. With ``joining``, other API
        servers already serve: this API server does not wait for all instances, and survives the loss of an
        instance during startup. With ``local_prefill``, decode instances also compute prompts if no prefill
        instance comes in time. ``retired`` names instances without a process. ``elastic``: unknown instances
        may join at any time, so requests wait for a missing role.
        """
        self.table = InstanceTable(instances, patience, joining, local_prefill, retired, elastic)
        self._joining = joining
        self.open = OpenSequences()
        self.entries = self.open.entries  # the open sequences
        self._pause_state: str | None = None  # in every ``Hello``
        self.failure: WeftError | None = None  # no instance is left, and no process will be started again
        self.late_events = 0  # events of sequences or attempts already over
        self.failovers = 0  # sequences continued after the loss of an instance
        self.pauses = 0
        self.paired = 0  # sequences sent to two instances
        # sequences sent to a decode instance alone, for lack of a prefill instance
        self.local_prefills = 0
        self.encodes = Counter(first=0, again=0)  # images sent to encode instances, by attempt
        self._patience, self._front = patience, front
        self.router = Router(policies or make_policies())
        self._unreceived = Unreceived()
        self._parked = self.open.parked
        self._closing, self._now = False, -math.inf
        self._lateness = Lateness(self.table, patience)
        self._actions: list[e.Action] = []
        self._events: list[m.TokenEvent] = []

    def on(self, event: e.Event, now: float) -> list[e.Action]:
        """Apply ``event``, which happened at ``now``, and return the actions to carry out, in order.

        All resulting token events leave in one ``Deliver``, the last action.
        """
        self._now, self._actions, self._events = now, [], []
        _HANDLERS[type(event)](self, event)
        if self.table.leaving:
            self._forget_departed()
        # Any event may free an instance or a sequence, so placement follows every event.
        self._lateness.look(now)
        if self._parked:
            self._place_parked()
        late = self.open.late(self._lateness) if self._parked or self._lateness.vacant else ()
        for sequence, error in late:
            self._end(sequence, error)
        if self._events:
            self._actions.append(e.Deliver(tuple(self._events)))
        return self._actions

    def next_deadline(self) -> float:
        """Return the time of the next necessary ``Tick`` if no event comes earlier; inf for never."""
        return min(one.deadline() for one in (self.table, self._lateness, self._parked, self._unreceived))

    def refusal(self) -> WeftError | None:
        """Return the reason why no new request is accepted now; None if requests are accepted."""
        if self.failure is not None:
            return Unavailable("the engine has failed; the server is stopping")
        if self._closing or not self.table.complete:
            return Unavailable("the engine is not ready yet; try again later")
        return self._lateness.why(begun=False)

    # -- requests -----------------------------------------------------------------------------------

    def _opened(self, event: e.Opened) -> None:
        self.open.open(event)
        if event.pinned is not None:
            pinned = self.table.instances.get(event.pinned)
            if pinned is None or not pinned.alive:
                self._end_pinned(event.pinned, Unavailable("the requested engine is not available"))

    def _end_pinned(self, name: str, error: WeftError) -> None:
        for sequence in [s for s, entry in self.entries.items() if entry.pinned == name]:
            self._end(sequence, error)

    def _closed(self, event: e.Closed) -> None:
        for sequence in event.sequences:
            if sequence in self.entries:
                self._leave(sequence)
                self.open.forget(sequence)

    def _pause(self, event: e.Paused) -> None:
        for sequence in (fresh := self.open.unpaused(event.sequences)):
            self._leave(sequence)
            self.open.pause(sequence)
        self.pauses += bool(fresh)

    def _resume(self, event: e.Resumed) -> None:
        self.open.resume(event.sequences)

    def _hold(self, event: e.Held) -> None:
        for sequence in self.open.pause_of_server.hold(event.running, self.open.paused):
            self._leave(sequence)
            self._parked.add(sequence)

    def _release(self, event: e.Released) -> None:
        self.open.pause_of_server.release()

    def _version(self, event: e.Versioned) -> None:
        self.router.weights = event.weights
        for entry in self.entries.values():
            entry.hashes = None  # the hashes of prompts name the version

    def _follow_version(self, instance: Instance) -> None:
        """Send new attempts to instances with the version of ``instance``, if another API server has changed
        the weights: here, or before this process started."""
        if instance.weights > self.router.weights:
            self._version(e.Versioned(instance.weights))

    def _leave(self, sequence: int) -> None:
        """Remove an open sequence from all instances, and send each instance a ``Finish``.

        The entry then names no instance.
        """
        entry = self.entries[sequence]
        for name in entry.places:
            instance = self.table.instances[name]
            instance.end(sequence)
            self._send(instance, m.Finish(sequence=sequence))
        entry.left()

    def _end(self, sequence: int, error: WeftError) -> None:
        self._leave(sequence)
        self.open.forget(sequence)
        self._events.append(m.TokenEvent(sequence=sequence, finish="error", error=error.info()))

    # -- placement ----------------------------------------------------------------------------------

    def _place_parked(self) -> None:
        """Send due parked sequences to instances. All sequences of one prompt go to the same route.

        Sequences without a route stay parked.
        """
        ready = self.open.pause_of_server.admitted(self._parked.ready(self._now))
        takers = self.table.takers()
        if not takers:
            return
        # Without any instance for images, `by_request` skips the sequences with images.
        for request, group in by_request(ready, self.entries, not self.table.blind).items():
            entry = self.entries[group[0]]
            encoders = self.table.encoders() if entry.submit.media else None
            near = self.open.near(request)
            route = self.router.route(takers, entry, near, self._lateness.local, encoders)
            if route is not None:
                self._place(route, group)
            # A half-open instance takes one prompt at a time, so the placement may have used up the instance.
            if any(taker.state is InstanceState.HALF_OPEN for taker in takers):
                takers = self.table.takers()

    def _place(self, route: Route, group: list[int]) -> None:
        """Begin the next attempts of ``group`` at the instances of ``route``: send the Submits, take the
        sequences out of the parked ones and count.
        """
        began = begin(route, [self.entries[sequence] for sequence in group], self._patience.transfer)
        for instance, message in began.submits:
            self._send(instance, message)
        self.encodes.update(began.encodes)
        self.paired += began.paired
        self.local_prefills += began.local
        self.failovers += sum(map(self.open.placed, group))

    def _send(self, instance: Instance, message: m.ToEngine) -> None:
        self._actions.append(e.Send(instance.name, instance.link, message_for(instance.welcome, message)))

    # -- messages of instances -----------------------------------------------------------------------

    def _received(self, event: e.Received) -> None:
        """Apply a message of an instance and note the time.

        An ``EngineFailed`` counts as a loss. Messages over an old link, or of an instance given up or
        forgotten, are dropped.
        """
        instance, message = self.table.instances.get(event.instance), event.message
        # A message over an old link comes from a process already given up, or from an instance that has left.
        if instance is None or instance.link != event.link or instance.state in GONE:
            self.late_events += len(message.events) if isinstance(message, m.Tokens) else 0
            return
        instance.heard = self._now
        if isinstance(message, m.Tokens):
            for token_event in message.events:
                self._take(instance, token_event)
        elif isinstance(message, Report):
            if not self.router.report(instance, message, self._now):
                self._send(instance, m.WatchPrefixes())
            self._follow_version(instance)
        elif isinstance(message, m.Welcome):
            self._welcome(instance, message)
        elif isinstance(message, m.EngineFailed):
            self._lose(instance, ReportedError(message.error))

    def _welcome(self, instance: Instance, welcome: m.Welcome) -> None:
        """Note the answer of a process, and request reports of its prefix cache if a policy uses them.

        An unusable process counts as lost. The last expected answer adds ``Complete``.
        """
        complete = self.table.complete
        instance.pause, instance.behind = welcome.pause, welcome.behind
        try:
            self.table.welcome(instance, welcome, self._now)
        except EngineDead as error:
            self._lose(instance, error)
            return
        self._follow_version(instance)
        self._watch_prefixes()
        if self.table.complete and not complete:
            self._actions.append(e.Complete())

    def _watch_prefixes(self) -> None:
        """Request reports of cached prefixes from all live instances, once for each process.

        A single instance leaves no choice, so no reports are needed.
        """
        if len(self.table.instances) > 1:
            for instance in self.table.instances.values():
                if instance.alive and not instance.watched and self.router.wants_prefixes(instance):
                    instance.watched = True
                    self._send(instance, m.WatchPrefixes())

    def _take(self, instance: Instance, event: m.TokenEvent) -> None:
        """Apply a token event of ``instance``.

        Events of ended attempts are counted in ``late_events`` and dropped. Events out of turn are held in
        the entry.

        If the engine does not know the connection, ``Hello`` is sent again. Skipped tokens are logged and end
        the sequence at ``instance``.
        """
        sequence = event.sequence
        entry = self.entries.get(sequence)
        attempt = None if entry is None else entry.places.get(instance.name)
        # Drop events of ended attempts, and events of sequences no longer at the instance.
        if entry is None or attempt is None or event.attempt != attempt:
            self.late_events += 1
            return
        if was_not_greeted(event):
            self._greet(instance)
            return
        if instance.name in entry.encoders:
            self._take_of_encoder(instance, entry, event)
            return
        if event.token_ids:
            if instance.weights:
                event = msgspec.structs.replace(event, weights=instance.weights)
            instance.computed(sequence)
            entry.computed = True
        # Without a transfer, an event has no position and needs no ordering.
        alone = entry.pair is None and event.position < 0
        ordered = event if alone else entry.in_order(instance.name, event)
        if ordered is None:
            return
        # Tokens are missing: the next attempt computes the tokens. Without a Finish the instance would go on.
        if ordered is not event and ordered.finish == "evicted" != event.finish:
            log.error("engine %s skipped tokens: another attempt computes the tokens", instance.name)
            self._send(instance, m.Finish(sequence=sequence))
        self._apply_event(instance, entry, with_final_error(ordered))

    def _apply_event(self, instance: Instance, entry: LedgerEntry, event: m.TokenEvent) -> None:
        """Apply an accepted event of ``instance``: queue new output for ``Deliver``, then end or move the
        sequence.

        Some ends concern only ``instance``: ``moved``, ``evicted``, and a refusal with a possible retry. The
        client does not see such an end, because the sequence continues elsewhere.
        """
        sequence, finish = event.sequence, event.finish
        continues = finish in ("moved", "evicted") or (finish and self._may_retry(instance, entry, event))
        why = "" if event.error is None else event.error.code
        # An end that concerns only this instance must not reach the client.
        if continues:
            event = msgspec.structs.replace(event, finish=None, error=None)
        fresh = entry.take(event, entry.pair is not None and entry.receives(instance.name))
        if fresh is not None and (not continues or fresh.token_ids or fresh.prompt_logprobs is not None):
            self._events.append(fresh)
        if finish is None:
            return
        if finish == "moved" and entry.sender == instance.name:
            self.table.prove(instance)
            self._hand_over(instance, entry)
        elif continues:
            self._take_back(instance, entry, why)
        else:
            self._depart(instance, entry)
            self._leave(sequence)
            self.open.forget(sequence)
            if finish != "error":
                self.table.prove(instance)

    def _take_of_encoder(self, instance: Instance, entry: LedgerEntry, event: m.TokenEvent) -> None:
        """Apply an event of ``instance``, which encodes images of the sequence.

        A lasting error ends the sequence. A retryable error returns the sequence to the router.
        """
        finish, error = event.finish, event.error
        # all embeddings have arrived; a later failure changes nothing
        if finish == "moved" or (finish and entry.computed):
            self._depart(instance, entry)
        elif finish == "error" and error is not None and not self._may_retry(instance, entry, event):
            self._depart(instance, entry)
            self._end(entry.submit.sequence, ReportedError(error))
        elif finish:
            self._take_back(instance, entry, "" if error is None else error.code)
        if finish == "moved":
            self.table.prove(instance)

    def _may_retry(self, instance: Instance, entry: LedgerEntry, event: m.TokenEvent) -> bool:
        return may_retry(self.table, self._lateness.local, instance, entry, event)

    def _depart(self, instance: Instance, entry: LedgerEntry) -> None:
        """Remove the sequence from the records of ``instance``."""
        instance.end(entry.submit.sequence)
        del entry.places[instance.name]
        entry.encoders.pop(instance.name, None)

    def _hand_over(self, sender: Instance, entry: LedgerEntry) -> None:
        """Release ``sender``, which has sent all its events, and apply the held events of the decode
        instance. The entry holds no events afterwards.
        """
        self._depart(sender, entry)
        held, entry.held = entry.held, []
        for event in held:
            if (receiver := entry.partner(sender.name)) is not None:
                self._take(self.table.instances[receiver], event)

    def _take_back(self, instance: Instance, entry: LedgerEntry, why: str) -> None:
        """Take the sequence back from ``instance`` and park the sequence for another attempt.

        ``why`` is the error code; "" without an error.

        The loss of ranks or of a peer counts as a loss. Every other return counts as a refusal, and the
        sequence waits longer with each refusal. After more than ``MOST_REFUSALS`` refusals by one instance
        the sequence fails.
        """
        # The partner has reached the end of the sequence. Its final event has not arrived yet.
        if entry.ends_elsewhere(instance.name, why):
            self._depart(instance, entry)
            return
        sequence = entry.submit.sequence
        ended_peer = entry.peer(instance.name) if why == PeerEnded.code else None
        # An encode instance may be the cause of a return by another instance.
        suspects = [] if instance.name in entry.encoders else list(entry.encoders)
        self._depart(instance, entry)
        peer = self.table.instances.get(ended_peer or "")  # None: no peer has ended, or the peer has left
        if peer is not None and not entry.orphaned:  # no new sequences until the next process is up
            self.table.shun(peer, self._now)
        if why == RanksLost.code or ended_peer is not None:
            self._park_after_loss(entry)
            return
        for name in suspects:
            entry.refuse(name)
        if entry.refuse(instance.name, why) > MOST_REFUSALS:
            self._end(sequence, Unavailable("the engines evicted the request too often; try again later"))
        else:
            self._leave(sequence)
            self._parked.add(sequence, self._now + wait_after(sum(entry.refused.values())))

    # -- instances that come and go -----------------------------------------------------------------

    def _join(self, event: e.Joined) -> None:
        self.table.join(event.instance, event.expert_group, self._now)
        self._watch_prefixes()

    def _left(self, event: e.Left) -> None:
        if (instance := self.table.instances.get(event.instance)) is not None:
            self.table.leave(instance, self._now)

    def _forget_departed(self) -> None:
        """Send ``Goodbye`` to the leaving instances without open sequences, and forget these instances."""
        for instance in self.table.departed(self._now):
            if instance.alive:
                self._send(instance, m.Goodbye())
                # If the instance ends before its handed-off caches arrive, only this deadline detects it.
                self._await_handed_off(instance)
            self._actions.append(e.Forget(instance.name))
            # A paused sequence is at no instance. A sequence pinned to this instance could never continue.
            self._end_pinned(instance.name, Unavailable("the requested engine has left the server"))
            log.info("engine %s has left", instance.name)

    def _expected(self, event: e.Expected) -> None:
        instance = self.table.instances[event.instance]
        if instance.link >= 0:  # the report about the end of the former process may come later, or never
            self._lose(instance, EngineDead("another process has replaced the engine"), replace=False)
        self.table.expect(instance, event.link, self._now, event.expert_group, event.identity)

    def _located(self, event: e.Located) -> None:
        if (instance := self._linked_to(event)) is not None:
            self.table.locate(instance, self._now)

    def _listening(self, event: e.Linked) -> None:
        if (instance := self._linked_to(event)) is not None and instance.state not in GONE:
            self._greet(instance)

    def _greet(self, instance: Instance) -> None:
        """Send ``Hello`` over a connection unknown to the engine process.

        The engine has ended all sequences of the former connection, and messages were lost. So each sequence
        begins another attempt from the tokens received so far. No process was lost, so no loss counts.
        """
        self.table.listen(instance, self._now)
        self._send(instance, self.hello(instance))
        for entry in self._detach(instance):
            self._leave(entry.submit.sequence)
            self._parked.add(entry.submit.sequence)

    def hello(self, instance: Instance) -> m.Hello:
        """Return the first message to an instance. Sent again, the message requests Welcome and heartbeat."""
        identity, versions = instance.identity, (m.OLDEST, m.VERSION)
        pause = None if identity is None else self._pause_state  # the first release knows neither field
        return m.Hello(versions=versions, front=self._front, engine=identity, pause=pause)

    def _share_pause(self, event: e.PauseShared) -> None:
        self._pause_state = event.pause
        for instance in self.table.instances.values():
            # A process that starts may have the Hello with the former state already.
            if instance.listens and instance.state not in GONE:
                self._send(instance, self.hello(instance))

    def _unreachable(self, event: e.Unreachable) -> None:
        if (instance := self._linked_to(event)) is not None and instance.alive:
            self.table.shun(instance, self._now, "the connection is broken; reconnecting")

    def _linked_to(self, event: e.Located | e.Linked | e.Unreachable | e.Lost) -> Instance | None:
        """Return the instance of ``event`` if the event comes from the present link; None for an old link."""
        instance = self.table.instances.get(event.instance)
        return instance if instance is not None and instance.link == event.link else None

    def _lost(self, event: e.Lost) -> None:
        if (instance := self._linked_to(event)) is not None:
            self._lose(instance, event.error)

    def _lose(self, instance: Instance, error: WeftError, replace: bool = True) -> None:
        """Handle the end of the process of ``instance``: move sequences elsewhere and request a replacement.

        Sequences pinned to the process end with ``error``. A loss during the first start requests no
        replacement and fails the whole fleet. Do nothing if the instance is already down or retired.
        ``replace=False`` requests no replacement.
        """
        if not self.table.lose(instance, self._now, error, self._closing):
            return
        self._actions.append(e.Unlink(instance.name, instance.link))
        for entry in self._detach(instance):
            self._park_after_loss(entry)
        self._await_handed_off(instance)
        self._end_pinned(instance.name, error)
        if not self.table.complete and not self._joining:  # a failed start ends the API server
            self._fail(error)
        elif replace and not self._closing and not instance.leaving:
            self._actions.append(e.Replace(instance.name, error))

    def _await_handed_off(self, sender: Instance) -> None:
        """Set a deadline for the first token of sequences that ``sender`` handed off: the sender ends."""
        self._unreceived.add(sender.name, self.entries.values(), self._now + self._patience.transfer)

    def _detach(self, instance: Instance) -> list[LedgerEntry]:
        """Remove all sequences from ``instance``; return the entries that cannot continue without the
        instance.

        Finished prefill work is handed over, with the held events of the decode instance.
        """
        interrupted = []
        for sequence in list(instance.open):
            entry = self.entries[sequence]
            # The decode instance continues if all output of the lost prefill instance has arrived.
            if entry.sender == instance.name and not entry.needs_sender:
                self._hand_over(instance, entry)
                continue
            # A lost encode instance does not matter once the prompt is computed.
            if instance.name not in entry.encoders or not entry.computed:
                interrupted.append(entry)
            self._depart(instance, entry)
        return interrupted

    def _park_after_loss(self, entry: LedgerEntry) -> None:
        """Park a sequence after the loss of an instance, and count the loss.

        After more than ``MOST_LOSSES`` losses the sequence ends with EngineDead.
        """
        sequence = entry.submit.sequence
        self._leave(sequence)
        entry.losses += 1
        if entry.losses > MOST_LOSSES:
            lost = f"the engine was lost {entry.losses} times while it worked on this request"
            self._end(sequence, EngineDead(lost))
        else:  # for a pinned sequence, `_lose` calls `_end_pinned` next
            self.open.bereft.add(sequence)
            self._parked.add(sequence)

    def _drain(self, event: e.Draining) -> None:
        if (instance := self.table.instances.get(event.instance)) is not None:
            self.table.drain(instance, self._now)

    def _undrain(self, event: e.Undrained) -> None:
        if (instance := self.table.instances.get(event.instance)) is not None:
            self.table.undrain(instance, self._now)

    def _retired(self, event: e.Retired) -> None:
        """Retire the instance with the whole expert-parallel group, whose sequences move elsewhere.

        Fail the fleet if the rest can never serve.
        """
        retired = self.table.instances.get(event.instance)
        if retired is None:  # it has left
            return
        for instance in self.table.instances.values():
            if instance is retired or (
                retired.expert_group and instance.expert_group == retired.expert_group
            ):
                self._lose(instance, event.error, replace=False)
                self.table.retire(instance)
        if self.table.over:
            self._fail(event.error)

    def _fail(self, error: WeftError) -> None:
        """Set ``failure``, end every open sequence with ``error`` and add ``Failed`` for the first error."""
        if self.failure is None:
            self.failure = error
            self._actions.append(e.Failed(error))
        for sequence in list(self.entries):
            self._end(sequence, error)

    def _tick(self, event: e.Tick) -> None:
        """Lose overdue instances, continue late handed-off sequences elsewhere, and begin without absent
        hosts when due.
        """
        for instance, error in self.table.overdue(self._now):
            self._lose(instance, error)
        for entry in self._unreceived.late(self._now):
            self._park_after_loss(entry)
        if self.table.starts_without(self._now):
            self._actions.append(e.Complete())

    def _stalled(self, event: e.Stalled) -> None:
        self.table.stall(event.seconds, self._now)
        self._unreceived.stall(event.seconds)

    def _close(self, event: e.Closing) -> None:
        """Send the last messages to all instances, and end every open sequence with an error."""
        self._closing = True
        for instance, message in self.table.farewells(event.shutdown):
            self._send(instance, message)
        for sequence in list(self.entries):
            self._end(sequence, Unavailable("the server is shutting down"))


_HANDLERS: dict[type, Callable[[Fleet, Any], None]] = {
    e.Opened: Fleet._opened,
    e.Closed: Fleet._closed,
    e.Paused: Fleet._pause,
    e.Resumed: Fleet._resume,
    e.Held: Fleet._hold,
    e.Released: Fleet._release,
    e.Versioned: Fleet._version,
    e.PauseShared: Fleet._share_pause,
    e.Joined: Fleet._join,
    e.Left: Fleet._left,
    e.Expected: Fleet._expected,
    e.Located: Fleet._located,
    e.Linked: Fleet._listening,
    e.Unreachable: Fleet._unreachable,
    e.Received: Fleet._received,
    e.Lost: Fleet._lost,
    e.Retired: Fleet._retired,
    e.Draining: Fleet._drain,
    e.Undrained: Fleet._undrain,
    e.Stalled: Fleet._stalled,
    e.Tick: Fleet._tick,
    e.Closing: Fleet._close,
}
