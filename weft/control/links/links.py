"""The links of one API server to the engine processes: executes the decisions of
``weft.control.fleet.fleet``.

    submit ─► Fleet ─► Send ─► Link 0 ──zmq──→ engine 0
      ▲         │ ▲              Link 1 ──zmq──→ engine 1
    flow ◄─ Deliver ╰──── Received, Lost, .. ◄──╯

``Links`` decides nothing. Events go to the fleet, and the fleet's actions are executed at once, on the event
loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import secrets
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence

import zmq.asyncio

from weft.common.clock import Clock, SystemClock
from weft.common.errors import EngineDead, Overloaded, Unavailable, WeftError
from weft.common.log import get_logger
from weft.control.fleet import fleet_events as e
from weft.control.fleet.fleet import Fleet
from weft.control.fleet.instance_table import Patience
from weft.control.fleet.instances import Instance, InstanceState
from weft.control.fleet.policy import Policies, PromptHashes, block_of
from weft.control.links.flow import Flow, Observer
from weft.control.links.link import POLL, Address, Link
from weft.control.links.owner import EngineInfo, Owner, Scaled
from weft.control.links.placements import Placements
from weft.kv.hashing import prompt_hashes
from weft.tracing.trace_spans import SpanContext
from weft.tracing.writer import SpanWriter
from weft.types import messages as m
from weft.types.tier_flush import FlushTier

log = get_logger(__name__)

OUTBOX_LIMIT = 20_000
"""Maximum queued messages per engine process. Requests beyond the limit are rejected."""
STALL_S = 1.0
"""Maximum seconds of delay of a tick. Beyond the limit the local process counts as stalled."""


class Links:
    """The links of one API server, used from the server's event loop. The owner of the processes names the
    instances.
    """

    def __init__(
        self,
        owner: Owner,
        patience: Patience,
        *,
        link_timeout: float = 10.0,
        policies: Policies | None = None,
        joining: bool = False,
        local_prefill: bool = True,
        clock: Clock | None = None,
        spans: SpanWriter | None = None,
    ) -> None:
        """Take the instances from ``owner``; connect nothing yet. Call inside a running event loop.

        ``patience``: time limits. ``link_timeout``: seconds without an answer to pings after which a process
        counts as dead. ``joining``, ``local_prefill``: see ``Fleet``. ``spans``: receives the spans of traced
        requests; None disables tracing.
        """
        present = owner.present()
        expert_groups = {
            n: one.expert_group if isinstance(one, Address) else "" for n, one in present.items()
        }
        retired = [name for name, one in present.items() if isinstance(one, WeftError)]
        self._name = secrets.token_hex(8)
        self._fleet = Fleet(
            expert_groups, patience, policies, self._name, joining, local_prefill, retired, owner.elastic
        )
        self._owner, self._link_timeout = owner, link_timeout
        self._clock = clock or SystemClock()
        self._placements = None if spans is None else Placements(spans, self._clock.now)
        self._links: dict[str, Link] = {}
        """The current link of each instance."""
        self._started = 0
        self._flows: dict[int, Flow] = {}
        self._pending: deque[e.Event] = deque()
        self._feeding = False
        self._context = zmq.asyncio.Context()
        self._ticking: asyncio.Task[None] | None = None
        self._ending: set[asyncio.Task[None]] = set()
        """Tasks closing old links."""
        self._ready = asyncio.Event()
        self._past_bad_frames = 0
        self.asleep = 0
        """Level of the sleep of the server, for metrics; 0 while awake."""
        self.welcome: m.Welcome | None = None
        """The common Welcome of all engine processes; None before ``start`` returns."""
        self.died = asyncio.Event()
        """Set when no engine process is left and none will be started again."""

    # -- life ---------------------------------------------------------------------------------------

    async def start(self) -> m.Welcome:
        """Connect to every engine process and wait until all engines have answered. Return the common
        Welcome.

        Raises WeftError when an engine process can never answer.
        """
        if self.instances and all(one.state is InstanceState.RETIRED for one in self.instances):
            raise EngineDead("no engine is left")
        self._follow_owner()
        self._ticking = asyncio.create_task(self._tick())
        ended = [asyncio.create_task(event.wait()) for event in (self._ready, self.died)]
        try:
            await asyncio.wait(ended, return_when=asyncio.FIRST_COMPLETED)  # the fleet checks the deadlines
        finally:
            for task in ended:
                task.cancel()
        if self._fleet.failure is not None:
            raise self._fleet.failure
        # A prompt must fit on every engine process, so the smallest context length is the common limit.
        welcomes = [one.welcome for one in self._computing if one.welcome is not None]
        self.welcome = min(welcomes, key=lambda welcome: welcome.max_model_len)
        return self.welcome

    async def close(self, shutdown: bool = True) -> None:
        """Fail all open sequences and close the sockets.

        With ``shutdown``, first stop every engine process. Blocks the calling task up to the flush time of
        the links.
        """
        self._feed(e.Closing(shutdown))
        if self._ticking is not None:
            self._ticking.cancel()
            await asyncio.gather(self._ticking, return_exceptions=True)
        answered = {one.name for one in self.instances if one.welcome is not None}
        # An engine process without an answer is still loading. The owner ends the process.
        await asyncio.gather(*(link.close(flush=name in answered) for name, link in self._links.items()))
        await asyncio.gather(*self._ending, return_exceptions=True)
        self._context.destroy()  # sockets still linger

    @property
    def instances(self) -> Sequence[Instance]:
        """The instances, in order. Read-only."""
        return list(self._fleet.table.instances.values())

    @property
    def _computing(self) -> list[Instance]:
        """Instances that produce tokens: all except encode groups."""
        return [one for one in self.instances if one.role != "encode"]

    @property
    def failure(self) -> WeftError | None:
        """The reason why no engine process is left and none will be started; None while one is left."""
        return self._fleet.failure

    @property
    def alive(self) -> bool:
        """True if the live engine processes can serve requests."""
        return self._fleet.table.alive

    @property
    def whole(self) -> bool:
        """True if all engine processes are alive and can serve requests."""
        return self._fleet.table.whole

    def progressing(self, window: float) -> bool:
        """Return True if engine processes with progress in the last ``window`` seconds can serve requests."""
        now = self._clock.now()
        return self._fleet.table.serve(one for one in self.instances if one.progressing(window, now))

    @property
    def elastic(self) -> bool:
        """True if unknown instances may join at any time."""
        return self._owner.elastic

    @property
    def open_sequences(self) -> int:
        return len(self._fleet.entries)

    @property
    def bad_frames(self) -> int:
        """Number of dropped frames from engine processes."""
        return self._past_bad_frames + sum(link.bad_frames for link in self._links.values())

    @property
    def fleet(self) -> Fleet:
        """The state machine with all decisions. Read-only."""
        return self._fleet

    @property
    def failovers(self) -> int:
        return self._fleet.failovers

    @property
    def paired(self) -> int:
        """Number of sequences sent to a pair of engine processes, for prefill and decode."""
        return self._fleet.paired

    @property
    def local_prefills(self) -> int:
        """Number of sequences prefilled on an engine process with the role ``decode``."""
        return self._fleet.local_prefills

    @property
    def restarts(self) -> int:
        return self._fleet.table.restarts

    @property
    def pauses(self) -> int:
        return self._fleet.pauses

    # -- work ---------------------------------------------------------------------------------------

    def submit(
        self,
        submits: Iterable[m.Submit],
        observe: Observer | None = None,
        hashes: Mapping[int, PromptHashes] | None = None,
        trace: SpanContext | None = None,
    ) -> Flow:
        """Send the sequences of one request and return the new flow, which the caller must close.

        Sequences of one prompt go to one engine process.

        ``observe``: see ``Flow``. ``hashes``: the result of ``hash_prompts``. ``trace``: the span of the
        request. Raises Unavailable or another WeftError, and Overloaded when messages wait for every engine
        process; then no sequence was sent.
        """
        if (refusal := self._fleet.refusal()) is not None:
            raise refusal
        # Checked before anything is opened: a rejected request leaves no trace. One engine process with space
        # is enough.
        waiting = [self._links[one.name].waiting for one in self._computing if one.alive]
        if waiting and min(waiting) >= OUTBOX_LIMIT:
            raise Overloaded("too many requests wait for the engine; try again later")
        opened = e.Opened(tuple(submits), hashes or {})
        if self._placements is not None and trace is not None:
            for submit in opened.submits:
                self._placements.open(submit.sequence, trace)
        return self._open(opened, observe)

    def hash_prompts(self, submits: Sequence[m.Submit]) -> dict[int, PromptHashes]:
        """Return the prompt hashes for placing ``submits``: request -> block size -> hashes. Safe from any
        thread.

        Computed before ``submit``, because hashing a long prompt takes long. Empty if there is no choice of
        engine processes.
        """
        roles = Counter(instance.role for instance in self._computing)
        # With a single instance of a role there is no choice.
        blocks = {block_of(one) for one in self._computing if roles[one.role] > 1}
        if not blocks:
            return {}
        weights = self._fleet.router.weights_name(self._computing)
        return {
            submit.request: {
                block: prompt_hashes(
                    submit.prompt_ids, submit.salt, block, submit.media, submit.adapter, weights
                )
                for block in blocks
            }
            for submit in submits
            if submit.choice == 0
        }

    def submit_each(self, submits: Sequence[m.Submit]) -> Flow:
        """Send one of ``submits`` to each live engine process that produces tokens, and return the new flow,
        without the surplus submits. The sequences never move to other engine processes. Raises WeftError.
        """
        if (refusal := self._fleet.refusal()) is not None:
            raise refusal
        pairs = list(zip(submits, [one for one in self._computing if one.alive], strict=False))
        flow = Flow([submit.sequence for submit, _ in pairs])
        for submit, instance in pairs:
            self._flows[submit.sequence] = flow
            self._feed(e.Opened((submit,), pinned=instance.name))
        return flow

    def extend(self, flow: Flow, submit: m.Submit, hashes: Mapping[int, PromptHashes]) -> None:
        """Send one more sequence, with events in the open ``flow``."""
        flow.open[submit.sequence] = None
        self._flows[submit.sequence] = flow
        self._feed(e.Opened((submit,), hashes, begun=True))

    def finish(self, flow: Flow, sequence: int) -> None:
        """End one sequence of a flow, if open: the engine process is notified, and later events are
        dropped.
        """
        if sequence in flow.open:
            self._close([sequence], flow)

    def release(self, flow: Flow) -> None:
        """End the open sequences of the flow. Idempotent; every handler calls ``release`` at the end."""
        self._close(list(flow.open), flow)

    def fail_all(self, error: WeftError) -> None:
        """Fail every open flow with ``error``."""
        for flow in list({id(flow): flow for flow in self._flows.values()}.values()):
            flow.fail(error)

    def pause(self, flow: Flow) -> None:
        """Stop the open sequences of the flow on the engine processes until ``resume``. Idempotent.

        Events received before the pause are retained. Tokens sent later are computed again after ``resume``.
        """
        self._feed(e.Paused(tuple(flow.open)))

    def resume(self, flow: Flow) -> None:
        """Continue the sequences stopped by ``pause``. Idempotent."""
        self._feed(e.Resumed(() if flow.failed else tuple(flow.open)))

    def hold(self, running: bool) -> None:
        """Hold new sequences until ``release_held``; with ``running``, hold all sequences. Idempotent."""
        self._feed(e.Held(running))

    def release_held(self) -> None:
        """Continue the sequences that wait since ``hold``. Idempotent."""
        self._feed(e.Released())

    @property
    def weights(self) -> int:
        """Version of the weights for new attempts."""
        return self._fleet.router.weights

    def use_version(self, weights: int) -> None:
        """Send new attempts only to engine processes with version ``weights`` of the weights."""
        self._feed(e.Versioned(weights))

    def share_pause(self, pause: str) -> None:
        """Send the state of the pause to the other API servers, through every engine process."""
        self._feed(e.PauseShared(pause))

    async def stats(self, timeout: float) -> list[m.EngineStats]:
        """Request the counters of every live engine process.

        Wait for the answers and return the last known counters of all engine processes. Raises EngineDead
        when an engine process does not answer within ``timeout`` seconds.
        """
        counts = {name: link.heartbeats for name, link in self._links.items() if self._lives(name)}
        for name in counts:
            # An engine process answers a Hello with a heartbeat, which carries the counters.
            self._links[name].send(self._fleet.hello(self._fleet.table.instances[name]))
        try:
            async with asyncio.timeout(timeout):
                while any(self._lives(n) and self._links[n].heartbeats <= had for n, had in counts.items()):
                    await asyncio.sleep(0.005)
        except TimeoutError:
            raise EngineDead("an engine did not report its counters in time") from None
        return [one.stats for one in self.instances]

    def tell(self, name: str, message: m.ToAdapters | m.ToWeights | FlushTier) -> None:
        """Send a message about LoRA adapters or weights, or a flush, to the live engine process ``name``."""
        self._links[name].send(message)

    def flush(self, message: FlushTier) -> int:
        """Send a flush of the KV cache to every live engine process. Return the number of processes."""
        live = [one.name for one in self.instances if one.alive]
        for name in live:
            self.tell(name, message)
        return len(live)

    def profile(self, seconds: float) -> int:
        """Start a profile of ``seconds``; 0 ends a profile. Return the number of processes notified."""
        live = [one.name for one in self.instances if one.alive]
        for name in live:
            self._links[name].send(m.Profile(seconds=seconds))
        return len(live)

    async def scale(self, base: str, groups: int) -> Scaled:
        """Start or end groups of one base name. Return the changes. See ``Owner.scale``."""
        self._check_complete()
        return await self._owner.scale(base, groups)

    def describe(self) -> list[EngineInfo]:
        """Return all members of the server, as the owner of the processes knows them."""
        return self._owner.describe()

    async def restart(self, name: str, topology: str = "") -> list[str]:
        """Replace processes in turn. Return the names. See ``Owner.restart``."""
        self._check_complete()
        return await self._owner.restart(name, topology)

    async def remove(self, name: str) -> list[str]:
        """Drain and end a group or an engine process. Return the names. See ``Owner.remove``."""
        self._check_complete()
        return await self._owner.remove(name)

    async def revive(self, group: str) -> list[str]:
        """Start the retired engine processes of a group again. Return the names. See ``Owner.revive``."""
        return await self._owner.revive(group)

    def _check_complete(self) -> None:
        """Raise Unavailable until all engines have answered once, unless others start the engines."""
        if not (self._fleet.table.complete or self.elastic):
            raise Unavailable("the server is still starting")

    def _lives(self, name: str) -> bool:
        instance = self._fleet.table.instances.get(name)
        return instance is not None and instance.alive

    def _open(self, opened: e.Opened, observe: Observer | None) -> Flow:
        """Open a flow for the sequences, pass the request to the fleet and return the flow."""
        flow = Flow([submit.sequence for submit in opened.submits], observe)
        for submit in opened.submits:
            self._flows[submit.sequence] = flow
        self._feed(opened)
        return flow

    def _close(self, sequences: Sequence[int], flow: Flow) -> None:
        """Remove ``sequences`` from ``flow`` and end the sequences in the fleet.

        Unknown sequences are ignored.
        """
        for sequence in sequences:
            flow.open.pop(sequence, None)
            self._flows.pop(sequence, None)
            if self._placements is not None:
                self._placements.closed(sequence)
        if sequences:
            self._feed(e.Closed(tuple(sequences)))

    # -- the fleet ----------------------------------------------------------------------------------

    def _feed(self, event: e.Event) -> None:
        """Pass an event to the fleet and execute the resulting actions, then handle all events caused by the
        actions.
        """
        self._pending.append(event)
        # Reentrant: an action may call `_feed`. The outer call then handles the event, so the order of events
        # is kept.
        if self._feeding:
            return
        self._feeding = True
        try:
            while self._pending:
                event = self._pending.popleft()
                if self._placements is not None:
                    self._placements.record(event)
                for action in self._fleet.on(event, self._clock.now()):
                    self._attempt(functools.partial(self._carry_out, action))
        finally:
            self._feeding = False

    def _attempt(self, work: Callable[[], None]) -> None:
        """Call ``work()``. An error is logged and stops nothing else."""
        try:
            work()
        except Exception:
            log.exception("error in a link to an engine; the links continue")

    def _carry_out(self, action: e.Action) -> None:
        """Execute one action of the fleet. Actions for a replaced link are dropped."""
        match action:
            case e.Deliver(events):
                self._deliver(events)
            case e.Send(instance, number, message):
                # A late action of the fleet may name a replaced link, so compare the numbers.
                if (link := self._links.get(instance)) is not None and link.number == number:
                    if self._placements is not None:
                        message = self._placements.sent(instance, message)
                    link.send(message)
            case e.Unlink(instance, number):
                if self._placements is not None:
                    self._placements.lost(instance)
                # An instance that never had a process has no link.
                if (link := self._links.get(instance)) is not None and link.number == number:
                    self._end(link)
            case e.Forget(instance):
                if self._placements is not None:
                    self._placements.lost(instance)
                if (link := self._links.pop(instance, None)) is not None:
                    self._past_bad_frames += link.bad_frames
                    self._end(link, flush=True)
            case e.Replace(instance, error):
                self._replace(instance, error)
            case e.Complete():
                self._ready.set()
            case e.Failed():
                self.died.set()

    def _deliver(self, events: Sequence[m.TokenEvent]) -> None:
        """Push events to their flows, all events of a flow at once. A final event closes the sequence. Events
        without a flow are dropped. An error of one flow fails this flow and no other flow.
        """
        by_flow: dict[Flow, list[m.TokenEvent]] = {}
        for event in events:
            flow = self._flows.get(event.sequence)
            if flow is None:
                continue
            if event.finish is not None:
                del self._flows[event.sequence]
                flow.open.pop(event.sequence, None)
                if self._placements is not None:
                    self._placements.closed(event.sequence)
            if flow in by_flow:
                by_flow[flow].append(event)
            else:
                by_flow[flow] = [event]
        # A slow event loop catches up with merged events: one write for several tokens of a stream.
        behind = any(link.behind for link in self._links.values())
        for flow, flow_events in by_flow.items():
            try:
                flow.push(flow_events, at_once=not behind)
            except Exception:
                log.exception("the events of a request were lost; the request fails")
                flow.fail(WeftError("the server failed to answer this request"))
                self.release(flow)  # no later event may follow the gap

    def _replace(self, name: str, error: WeftError) -> None:
        """Request the replacement of a process from the owner."""
        self._owner.replace(name, self._links[name].incarnation, error)
        self._follow_owner()

    def _follow_owner(self) -> None:
        """Compare the owner's processes with the fleet's instances and feed the differences to the fleet."""
        present = self._owner.present(self._fleet.open.kept)
        table = self._fleet.table
        members = {
            name: one for name, one in present.items() if not (isinstance(one, Address) and one.leaving)
        }
        for name, found in members.items():
            if name not in table.instances or name in table.leaving:
                self._feed(e.Joined(name, found.expert_group if isinstance(found, Address) else ""))
        for name, instance in list(table.instances.items()):
            if name not in members:
                if name not in table.leaving:
                    self._feed(e.Left(name))
                continue
            address = members[name]
            link = self._links.get(name)
            if isinstance(address, WeftError):
                if instance.state is not InstanceState.RETIRED:
                    self._feed(e.Retired(name, address))
            elif address is None:
                continue
            elif link is None or link.incarnation != address.incarnation:
                gone = instance.state in (InstanceState.DOWN, InstanceState.RETIRED)
                if link is None or gone or not self._fleet.table.complete:
                    self._connect(name, address)
                else:  # another API server lost the process: a Replace follows, then `_follow_owner` again
                    self._feed(e.Lost(name, link.number, EngineDead("the engine was replaced")))
            elif address.draining and instance.state in (InstanceState.UP, InstanceState.HALF_OPEN):
                self._feed(e.Draining(name))
            elif instance.state is InstanceState.DRAINING and not address.draining:
                self._feed(e.Undrained(name))

    def _connect(self, name: str, address: Address) -> None:
        """Replace the link of instance ``name`` by a link to the process at ``address``."""
        number, self._started = self._started, self._started + 1
        if (old := self._links.get(name)) is not None:
            self._past_bad_frames += old.bad_frames
            self._end(old)
        self._feed(e.Expected(name, number, address.expert_group, address.identity))
        self._links[name] = Link(name, number, address, self._context, self._link_timeout, self._feed)

    def _end(self, link: Link, flush: bool = False) -> None:
        task = asyncio.get_running_loop().create_task(link.close(flush=flush))
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    async def _tick(self) -> None:
        """Check links, owner and deadlines every ``POLL`` seconds. A cancellation ends the loop without an
        error.

        After a stall of the event loop, extend all deadlines. Errors of links and of the owner are logged.
        """
        with contextlib.suppress(asyncio.CancelledError):
            while True:
                before = self._clock.now()
                await asyncio.sleep(POLL)
                late = self._clock.now() - before - POLL
                loop_time = asyncio.get_running_loop().time()
                if late > STALL_S:
                    for link in self._links.values():
                        link.excuse(loop_time)
                    self._feed(e.Stalled(late))
                for link in list(self._links.values()):
                    self._attempt(functools.partial(link.look, loop_time))
                self._attempt(self._follow_owner)
                self._feed(e.Tick())
