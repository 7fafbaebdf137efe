"""A deployment in which groups join, leave and are lost during the run, by the rules of a running server.

``plan_scale`` decides which groups start and leave. The fleet gets the events ``Joined``, ``Left`` and
``Lost``. A new group loads for ``load_s`` before serving. ``snapshot`` returns the counters of ``/metrics``
and ``GET /admin/groups``.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from weft.common.errors import EngineDead
from weft.config.resolved import KVConfig
from weft.config.sections.all import SchedulerSection
from weft.control.fleet import fleet_events as e
from weft.control.planner.observations import ENGINE_COUNTERS, EngineSeen, Series, Snapshot
from weft.control.processes.scaling import plan_scale
from weft.control.processes.table import Member
from weft.scheduler.policy.step_cost import CostModel
from weft.sim.deployment import HEARTBEAT_S, Deployment, Group, Groups
from weft.sim.simulated_transfers import Wire
from weft.sim.workload import Arrival
from weft.types import messages as m

_LONG = (2.5, 5, 7.5, 10, 20, 40, 80, 160)
TTFT_BOUNDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, *_LONG, math.inf)
TPOT_BOUNDS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10),
    math.inf,
)
"""The bounds of the server's histograms, in seconds."""


class Settings(NamedTuple):
    """Settings that all groups of a run share."""

    kv: KVConfig
    section: SchedulerSection
    cost: CostModel
    wire: Wire
    noise: float = 0.0
    load_s: float = 15.0
    """Seconds from the start of a group until the group serves."""


class _Process(Group):
    """The engine process of a group. Ends with its host or after a drain."""

    alive = True
    link = 0

    def receive(self, message: m.ToEngine) -> None:
        if self.alive:
            super().receive(message)

    def deliver(self, events: list[m.TokenEvent]) -> None:
        if self.alive:
            super().deliver(events)

    def _step_ended(self) -> None:
        if self.alive:
            super()._step_ended()


@dataclass(slots=True)
class _GroupRecord:
    """A group of the server, as known to its owner."""

    role: m.Role
    link: int
    """Number of the connection to the current process."""
    state: str
    """loading, running, leaving or retired."""
    began: float
    counted: bool = False
    """True after the time of the process was added to ``group_seconds``."""


class ChangingDeployment(Deployment):
    """One run. ``scale`` and ``lose`` change the groups at the current virtual time."""

    def __init__(
        self, groups: Groups, settings: Settings, arrivals: Sequence[Arrival], *, seed: int = 0
    ) -> None:
        super().__init__(
            groups,
            settings.kv,
            settings.section,
            settings.cost,
            arrivals,
            settings.wire,
            seed=seed,
            noise=settings.noise,
        )
        self._settings = settings
        self._seed = seed
        self._links = itertools.count(1)
        self.records: dict[str, _GroupRecord] = {}
        for name, role in groups.names():
            self.records[name] = _GroupRecord(role, next(self._links), "running", 0.0)
            self.groups[name] = self._process(name, self.records[name])
        self.counts: defaultdict[Series, float] = defaultdict(float)
        self.group_seconds = 0.0
        """Seconds of all groups that have ended: from the start of the load to the end of the drain."""
        self._ended = 0

    # -- changes of groups

    def scale(self, base: str, number: int) -> tuple[tuple[str, ...], list[str]]:
        """Start or end groups until the role ``base`` has ``number`` groups. Return (starting, leaving)
        groups.

        Leaving groups do not count. Lost groups count, and leave first. Raises NotFound if no group has the
        role, InvalidRequest if the number is out of range or the other groups could not do all work, and the
        error of a failed fleet.
        """
        members = {name: Member("", name, one.role, one.role) for name, one in self.records.items()}
        change = plan_scale(base, number, members, self._named("leaving"), self._named("retired"), _serves)
        for name in change.starting:
            self._start(name, self.records[change.like].role)
            self._feed(e.Joined(name))
            self._expect(name)
        for name in change.leaving:
            self.records[name].state = "leaving"
            self._feed(e.Left(name))
        return change.starting, change.leaving

    def lose(self, name: str, seconds: float) -> None:
        """End the process of a group, with all its sequences. The host comes back after ``seconds``."""
        record = self.records[name]
        process = self._end(name)
        record.state = "retired"
        self._count(record)
        self.transfers.lose(process)
        self._feed(e.Lost(name, record.link, EngineDead("the host is lost")))
        self.timeline.at(self.now + seconds, None, self._revive, name, record)

    def _count(self, record: _GroupRecord) -> None:
        """Add the time of a process that has ended to ``group_seconds``, once."""
        if not record.counted:
            record.counted = True
            self.group_seconds += self.now - record.began

    def _revive(self, name: str, record: _GroupRecord) -> None:
        """Start the group again, unless the group has left the server meanwhile."""
        if self.records.get(name) is record and record.state == "retired":
            self._start(name, record.role)
            self._expect(name)

    def _start(self, name: str, role: m.Role) -> None:
        self.records[name] = _GroupRecord(role, next(self._links), "loading", self.now)

    def _expect(self, name: str) -> None:
        record = self.records[name]
        self._feed(e.Expected(name, record.link))
        self.timeline.at(self.now + self._settings.load_s, None, self._loaded, name, record)

    def _loaded(self, name: str, record: _GroupRecord) -> None:
        """Connect the loaded process, unless the group has left meanwhile."""
        if self.records.get(name) is not record or record.state != "loading":
            return
        record.state = "running"
        self.groups[name] = self._process(name, record)
        self._feed(e.Located(name, record.link))
        self._feed(e.Linked(name, record.link))

    def _process(self, name: str, record: _GroupRecord) -> _Process:
        """Return a new process. Links are unique, so each process has its own seed and incarnation."""
        one = self._settings
        process = _Process(
            self, name, record.role, one.kv, one.section, one.cost, one.noise, self._seed + record.link - 1
        )
        process.link = record.link
        return process

    def _end(self, name: str) -> _Process:
        process = self.groups[name]
        assert isinstance(process, _Process)
        process.alive = False
        return process

    def _named(self, state: str) -> frozenset[str]:
        return frozenset(name for name, one in self.records.items() if one.state == state)

    # -- the API server

    def _act(self, action: e.Action) -> None:
        if isinstance(action, e.Forget):
            record = self.records.pop(action.instance)
            if action.instance in self.groups:
                self._end(action.instance)
            self._count(record)
        else:
            super()._act(action)

    def send_to_front(self, group: Group, outgoing: Sequence[tuple[bytes, m.ToFront]]) -> None:
        """Send the messages of a group's engine to the API server."""
        assert isinstance(group, _Process)
        for _, message in outgoing:
            self.timeline.at(self.now, None, self._feed, e.Received(group.name, group.link, message))

    def _heartbeat(self) -> None:
        for group in list(self.groups.values()):
            if isinstance(group, _Process) and group.alive:
                self.send_to_front(group, group.protocol.heartbeats())
                group.turn()
        self.timeline.at(self.now + HEARTBEAT_S, None, self._heartbeat)

    def _unfinished(self) -> bool:
        return self._ended < len(self._arrivals)

    # -- counters

    def _deliver(self, events: Sequence[m.TokenEvent]) -> None:
        """Update the server's counters, then deliver the events."""
        counts = self.counts
        for event in events:
            stream, tokens = self.streams[event.sequence], len(event.token_ids)
            if tokens and not stream.times:
                self._observe("time_to_first_token_seconds", TTFT_BOUNDS, self.now - stream.arrival.at)
            elif tokens:
                counts[Series("inter_token_latency_seconds_sum")] += self.now - stream.times[-1]
                counts[Series("inter_token_latency_seconds_count")] += tokens
            if event.finish is None:
                continue
            self._ended += 1
            if event.finish == "error":
                counts[Series("request_failure_total", "unavailable")] += 1
                continue
            output = len(stream.times) + tokens
            counts[Series("request_success_total")] += 1
            counts[Series("request_prompt_tokens_count")] += 1
            counts[Series("request_prompt_tokens_sum")] += stream.arrival.prompt
            counts[Series("request_max_num_generation_tokens_sum")] += output
            if output > 1:
                pace = (self.now - stream.times[0]) / (output - 1)
                self._observe("request_time_per_output_token_seconds", TPOT_BOUNDS, pace)
        super()._deliver(events)

    def _observe(self, name: str, bounds: tuple[float, ...], seconds: float) -> None:
        for bound in bounds[bisect_left(bounds, seconds) :]:
            self.counts[Series(f"{name}_bucket", "", bound)] += 1

    def snapshot(self) -> Snapshot:
        """Return the current counters."""
        counts = {one: float(count) for one, count in self.counts.items()}
        engines = []
        for name, record in self.records.items():
            process, running, waiting, kv = self.groups.get(name), 0, 0, 0.0
            up = record.state in ("running", "leaving") and process is not None
            if up and process is not None:
                stats = process.stats()
                running, waiting, kv = stats.running, stats.waiting, float(stats.kv_usage)
                values = (stats.steps, stats.prefill_rows, stats.prefill_tokens, stats.decode_rows)
                counts |= {
                    Series(one, name): float(v) for one, v in zip(ENGINE_COUNTERS, values, strict=True)
                }
            role = record.role
            engines.append(EngineSeen(name, name, role, role, record.state, up, running, waiting, kv))
        return Snapshot(tuple(engines), counts, len(self.streams) + self.refused - self._ended)

    def size(self) -> float:
        """Return the group-seconds so far. A retired group has no host, and counts nothing."""
        present = (one for one in self.records.values() if one.state != "retired")
        return self.group_seconds + sum(self.now - one.began for one in present)


def _serves(roles: set[str]) -> bool:
    return "unified" in roles or {"prefill", "decode"} <= roles
