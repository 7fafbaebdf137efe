"""All heads behind one front: each request's sequences go to one of them, and survive its death.

    submit ──policy──→ HeadClient 0 ──zmq──→ head 0
                  └──→ HeadClient 1 ──zmq──→ head 1

When a head dies, its open sequences go to another one, from the tokens that came so far. Where none lives,
they wait for one that is started anew, if any is; else they fail. One head is the same, with no other.
In the same way a flow whose reader is held up is paused: its sequences leave their heads, and go on later.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, TypeAlias

from weft.common.clock import Clock
from weft.common.errors import EngineDead, Unavailable, WeftError
from weft.common.log import get_logger
from weft.front.flow import Flow, Observer
from weft.front.head_client import HeadClient, Process, Whence, fail_flows
from weft.parallel.secret import Keys
from weft.routing.ledger import Ledger
from weft.routing.policy import Policy, PrefixAffinity
from weft.routing.registry import Instance, Registry
from weft.types import messages as m

log = get_logger(__name__)

LATE = "the engine failed and did not come back in time; try again later"


class Place(NamedTuple):
    """Where a head is: the socket that it listens at, its process and, on another host, the keys to it."""

    endpoint: Whence
    process: Process
    keys: Keys | None = None


Respawn: TypeAlias = Callable[[int], "Place | None"]
"""Starts head number i anew, without waiting for it; None when that is not to be tried (again)."""


class _Tracked(Flow):
    """A flow whose events are noted, so that its sequences can go on elsewhere."""

    def __init__(
        self, sequences: Sequence[int], observe: Observer | None, heads: Heads, probing: bool
    ) -> None:
        super().__init__(sequences, observe)
        self._heads = heads
        self.probing = probing
        """Its sequences end with their head."""

    def push(self, event: m.TokenEvent) -> None:
        fresh = self._heads.note(event)
        if fresh is not None:
            super().push(fresh)


class Heads:
    """The front's link to its heads. Its methods are those of ``HeadClient``, and mean the same."""

    def __init__(
        self,
        places: Sequence[Place],
        engine_timeout: float,
        clock: Clock | None = None,
        policy: Policy | None = None,
        respawn: Respawn | None = None,
        *,
        link_timeout: float = 10.0,
        patience: float = 120.0,
        together: bool = False,
    ) -> None:
        """``link_timeout``: see ``HeadClient``. ``patience``: seconds that requests wait while no head lives
        and one is being started anew. ``together``: none can work without the others.
        """
        self._together = together and len(places) > 1
        self._timeout, self._link_timeout, self._clock = engine_timeout, link_timeout, clock
        self._patience = patience
        self._expiry: asyncio.TimerHandle | None = None
        """Runs while requests wait for a head to return."""
        self._late = False
        """Whether they have waited long enough, so that none should begin to."""
        self._policy = policy or PrefixAffinity()
        self._respawn = respawn
        self._registry = Registry(len(places))
        self._ledger = Ledger()
        self._parked: dict[int, Flow] = {}
        """Open sequences without a head, in order."""
        self._paused: dict[int, Flow] = {}
        """Open sequences that nobody would read."""
        self._returning: dict[int, asyncio.Task[None]] = {}
        """Heads that are being started anew."""
        self._closing = False
        self._past_bad_frames = self._past_late_events = 0
        self.clients = [self._client(number, place) for number, place in enumerate(places)]
        """The present client of each head, alive or not."""
        self.welcome: m.Welcome | None = None
        self.failure: WeftError | None = None
        """Set when no head lives and none will come back."""
        self.died = asyncio.Event()
        self.failovers = 0
        """Sequences that went on at another head, or at their own one started anew."""
        self.restarts = 0
        """Heads that were started anew."""
        self.pauses = 0
        """How often flows were paused."""

    # -- life ---------------------------------------------------------------------------------------

    async def start(self) -> m.Welcome:
        """Connects to every head; returns when all have answered. Raises WeftError when one never will."""
        starts = [asyncio.create_task(client.start()) for client in self.clients]
        try:
            welcomes = await asyncio.gather(*starts)
        except BaseException:
            for task in starts:
                task.cancel()
            await asyncio.gather(*starts, return_exceptions=True)
            raise
        if self.failure is not None:  # a head died while others still loaded
            raise self.failure
        for instance in self._registry.instances:
            instance.up = True
        self.welcome = min(welcomes, key=lambda welcome: welcome.max_model_len)
        return self.welcome

    async def close(self) -> None:
        """Tells every head to stop, fails what is still open, closes the sockets."""
        self._closing = True
        self._forget_expiry()
        for task in self._returning.values():
            task.cancel()
        await asyncio.gather(*self._returning.values(), return_exceptions=True)
        fail_flows(self._without_head(), Unavailable("the server is shutting down"))
        await asyncio.gather(*(client.close() for client in self.clients))

    @property
    def alive(self) -> bool:
        """Whether a head lives."""
        return self.welcome is not None and bool(self._registry.up())

    @property
    def whole(self) -> bool:
        """Whether all heads live."""
        return self.alive and all(instance.up for instance in self._registry.instances)

    def progressing(self, window: float) -> bool:
        """Whether a head proved progress in the last ``window`` seconds."""
        return any(client.progressing(window) for client in self.clients)

    @property
    def open_sequences(self) -> int:
        return len(self._ledger)

    @property
    def bad_frames(self) -> int:
        return self._past_bad_frames + sum(client.bad_frames for client in self.clients)

    @property
    def late_events(self) -> int:
        return self._past_late_events + sum(client.late_events for client in self.clients)

    # -- work ---------------------------------------------------------------------------------------

    def submit(self, submits: Iterable[m.Submit], observe: Observer | None = None) -> Flow:
        """Sends one request's sequences, those of one prompt to one head, and opens their flow.

        Raises WeftError; then none of them runs.
        """
        if self.failure is not None:
            raise Unavailable("the engine has failed; the server is stopping")
        if self._closing or self.welcome is None:
            raise Unavailable("the engine is not ready yet; try again later")
        if self._late:
            raise Unavailable("the engine has failed and is being started again; try again later")
        made = list(submits)
        flow = _Tracked([s.sequence for s in made], observe, self, probing=False)
        try:
            for group in _by_request(made):
                for submit in group:
                    self._ledger.open(submit)
                if self._ready():
                    self._send(group, flow)
                    continue
                for submit in group:
                    self._ledger.wait(submit.sequence)
                    self._parked[submit.sequence] = flow
        except WeftError:
            self.release(flow)
            raise
        return flow

    def submit_each(self, submits: Sequence[m.Submit]) -> Flow:
        """One of ``submits`` to each head, which nobody else goes on with. Raises WeftError."""
        flow = _Tracked([s.sequence for s in submits], None, self, probing=True)
        try:
            for submit, client in zip(submits, self.clients, strict=True):
                self._ledger.open(submit)
                client.submit([submit], flow=flow)
                self._registry.begin(self.clients.index(client), submit.sequence, 0)
        except WeftError:
            self.release(flow)
            raise
        return flow

    def finish(self, flow: Flow, sequence: int) -> None:
        """Ends one sequence of a flow, if it is open: its head is told, later events of it are dropped."""
        if sequence in flow.open:
            home = self._registry.home(sequence)
            if home is not None:
                self.clients[home].finish(flow, sequence)
            flow.open.pop(sequence, None)
            self._forget(sequence)

    def release(self, flow: Flow) -> None:
        """Ends whatever of the flow is still open. Idempotent."""
        for sequence in list(flow.open):
            self.finish(flow, sequence)

    def fail_all(self, error: WeftError) -> None:
        """Fails every open flow with ``error``."""
        for client in self.clients:
            client.fail_all(error)
        fail_flows(self._without_head(), error)

    def pause(self, flow: Flow) -> None:
        """Takes the flow's open sequences from their heads until ``resume``. Idempotent.

        What heads have sent by now is kept; what they send later is computed again.
        """
        paused = len(self._paused)
        for sequence in flow.open:
            home = self._registry.home(sequence)
            if home is not None:
                self.clients[home].take_back(sequence)
                self._registry.end(sequence)
                self._ledger.wait(sequence)  # the next head takes over from none that was lost
            elif self._parked.pop(sequence, None) is None:
                continue
            self._paused[sequence] = flow
        self.pauses += len(self._paused) > paused

    def resume(self, flow: Flow) -> None:
        """Goes on with what ``pause`` took from its heads. Idempotent."""
        flows = {sequence: flow for sequence in flow.open if self._paused.pop(sequence, None) is not None}
        if not flows or flow.failed:
            return
        if self._ready():
            self._place(flows, EngineDead("the engine was lost"))
        elif self._late:
            flow.fail(Unavailable(LATE))
        else:
            self._parked.update(flows)

    def note(self, event: m.TokenEvent) -> m.TokenEvent | None:
        """An event of an open sequence came. Returns what of it is news; None when nothing is."""
        fresh = self._ledger.take(event)
        if event.token_ids:
            self._registry.computed(event.sequence)
        if event.finish is not None:
            self._registry.end(event.sequence)
        return fresh

    def _send(self, group: Sequence[m.Submit], flow: Flow) -> None:
        """To the head that the policy names. Raises WeftError."""
        first = group[0]
        chosen = self._policy.choose(self._ready(), first.prompt_ids, first.salt, len(group))
        self.clients[chosen.number].submit(group, flow=flow)
        for submit in group:
            tokens = (len(submit.prompt_ids) + len(submit.emitted_ids)) // 4
            self._registry.begin(chosen.number, submit.sequence, tokens if submit is first else 0)

    def _forget(self, sequence: int) -> None:
        self._ledger.close(sequence)
        self._registry.end(sequence)
        self._parked.pop(sequence, None)
        self._paused.pop(sequence, None)

    def _without_head(self) -> list[Flow]:
        return [*self._parked.values(), *self._paused.values()]

    # -- heads that die and return ------------------------------------------------------------------

    def _client(self, number: int, place: Place) -> HeadClient:
        def abandon(flows: dict[int, Flow], error: WeftError) -> None:
            self._lost(number, flows, error)

        return HeadClient(
            place.endpoint, place.process, self._timeout, self._clock, self._link_timeout, abandon, place.keys
        )

    def _lost(self, number: int, flows: dict[int, Flow], error: WeftError) -> None:
        """Head ``number`` died, with these sequences open."""
        known = self._registry.instances[number].up
        self._registry.instances[number].up = False
        for sequence in flows:
            self._registry.end(sequence)
        if self._closing or self.welcome is None:  # it failed to start: whoever waits for that hears of it
            fail_flows(flows.values(), error)
            if self.welcome is None:
                self.failure = self.failure or error
            return
        self._parked.update(flows)
        if known:
            place = self._restart(number)
            if place is not None:
                self._returning[number] = asyncio.create_task(self._return(number, place))
            elif self._together:
                self._give_up(error)
        self._place_parked(error)

    def _place_parked(self, error: WeftError) -> None:
        """Sends parked sequences on. Where no head lives and none returns, they fail with ``error``."""
        flows = self._parked
        if not self._ready():
            if not self._returning and self.failure is None:
                self.failure = error
                lost = self._without_head()
                self._parked = {}
                for sequence in flows:
                    self._ledger.close(sequence)
                fail_flows(lost, error)
                self.died.set()
            elif self._returning and self._expiry is None and not self._late:
                loop = asyncio.get_running_loop()
                self._expiry = loop.call_later(self._patience, self._expire)
            return
        self._parked = {}
        self._place(flows, error)

    def _place(self, flows: dict[int, Flow], error: WeftError) -> None:
        """Sends sequences that have no head to one. ``error``: what those that had one lost it by."""
        again, lost = [], set()
        for sequence, flow in flows.items():
            try:
                if isinstance(flow, _Tracked) and flow.probing:
                    raise error
                if not self._ledger.waits(sequence):
                    lost.add(sequence)
                again.append(self._ledger.again(sequence))
            except WeftError as ended:
                self._end(flow, sequence, ended)
        for group in _by_request(again):
            flow = flows[group[0].sequence]
            try:
                self._send(group, flow)
                self.failovers += len(lost & {submit.sequence for submit in group})
            except WeftError as refused:
                for submit in group:
                    self._end(flow, submit.sequence, refused)

    def _ready(self) -> list[Instance]:
        """The heads that can work now."""
        up = self._registry.up()
        return [] if self._together and len(up) < len(self.clients) else up

    def _give_up(self, error: WeftError) -> None:
        """One head is lost for good, and no other can work without it."""
        self._respawn = None
        for task in self._returning.values():
            task.cancel()
        self._returning.clear()
        for instance in self._registry.instances:
            instance.up = False
        for client in self.clients:
            client.end(error)

    def _restart(self, number: int) -> Place | None:
        """Starts a head anew, if that is to be tried."""
        place = None if self._respawn is None or self._closing else self._respawn(number)
        self.restarts += place is not None
        return place

    def _expire(self) -> None:
        """Nobody returned in time: whoever waits gets an answer, and others one at once until one does."""
        self._expiry, self._late = None, True
        flows, self._parked = self._parked, {}
        log.error("no engine is back after %g seconds: %d sequences fail", self._patience, len(flows))
        for sequence in flows:
            self._ledger.close(sequence)
        fail_flows(flows.values(), Unavailable(LATE))

    def _forget_expiry(self) -> None:
        if self._expiry is not None:
            self._expiry.cancel()
            self._expiry = None

    def _end(self, flow: Flow, sequence: int, error: WeftError) -> None:
        """Ends an open sequence that no head has."""
        flow.open.pop(sequence, None)
        flow.push(m.TokenEvent(sequence=sequence, finish="error", error=error.info()))
        self._forget(sequence)

    async def _return(self, number: int, place: Place | None) -> None:
        """Waits for a head that was started anew, as often as that is tried, and gives it work."""
        error: WeftError = EngineDead("the engine did not come back")
        while place is not None:
            client = self._client(number, place)
            try:
                await client.start()
            except WeftError as failed:
                error = failed
                log.error("head %d did not come back: %s", number, failed.message)
                await client.close()
                place = self._restart(number)
            except asyncio.CancelledError:
                await client.close()
                raise
            else:
                if client.alive:
                    await self._replace(number, client)
                    break
                error = client.failure or error  # it died as soon as it was there
                await client.close()
                place = self._restart(number)
        del self._returning[number]
        if place is None and self._together:
            self._give_up(error)
        self._place_parked(error)

    async def _replace(self, number: int, client: HeadClient) -> None:
        old, self.clients[number] = self.clients[number], client
        self._past_bad_frames += old.bad_frames
        self._past_late_events += old.late_events
        if isinstance(self._policy, PrefixAffinity):
            self._policy.forget(number)
        self._registry.instances[number].up = client.alive
        self._forget_expiry()
        self._late = False
        log.info("head %d is back", number)
        await old.close()


def _by_request(submits: Sequence[m.Submit]) -> list[list[m.Submit]]:
    """Sequences of one prompt together, in order."""
    groups: dict[int, list[m.Submit]] = {}
    for submit in submits:
        groups.setdefault(submit.request, []).append(submit)
    return list(groups.values())
