"""A day of a server, compressed to half an hour: the load doubles, long prompts with short outputs become
short prompts with long outputs, and a host is lost.

The seed determines the times and sizes of the changes. The same day runs with a planner and with fixed
fleets. A fixed fleet gets a lost host back after the repair. The planner may start another group at once,
within the limit of groups.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import NamedTuple

import msgspec

from weft.common.errors import WeftError
from weft.config.sections.all import SchedulerSection
from weft.config.sizing.budget import with_budget
from weft.control.planner.capacity import Capacity, Limits
from weft.control.planner.fleet_planner import FleetPlanner, Observed, Range, Refused, Scale
from weft.control.planner.fleet_planner import Settings as PlannerSettings
from weft.control.planner.observations import Meter
from weft.scheduler.policy.step_cost import CostModel
from weft.sim.changing import ChangingDeployment, Settings
from weft.sim.deployment import Groups, pace
from weft.sim.engine import kv_config
from weft.sim.simulated_transfers import Wire
from weft.sim.workload import Arrival, Lengths

INTERVAL_S = 5.0
"""Seconds between two observations."""
LONGEST = 4096
"""Tokens that fit into one sequence."""


class Day(NamedTuple):
    """The requests of a day, and the loss of a host."""

    arrivals: list[Arrival]
    lost_at: float
    repair_s: float
    seconds: float


class Outcome(NamedTuple):
    """One day with one fleet."""

    fleet: str
    requests: int
    outside: int
    """Requests outside their limits; refused requests count."""
    ttft_outside: int
    tpot_outside: int
    size: float
    """Mean number of groups, including loading and draining groups."""
    prefill: float
    decode: float
    """Mean numbers of groups by role."""
    changes: int
    """Changes by the planner."""
    log: tuple[str, ...] = ()


def draw_day(seed: int, rate: float, shorter: float = 1.0) -> Day:
    """Return the day of ``seed``. ``rate``: requests per second before noon, before the seed's factor.

    ``shorter``: divisor of all durations.
    """
    rng = random.Random(f"day {seed}")

    def about(value: float, share: float = 0.2) -> float:
        return value * rng.uniform(1 - share, 1 + share)

    rate = about(rate)
    long, short = Lengths(1000, 2000), Lengths(200, 500)
    some, many = Lengths(32, 96), Lengths(200, 400)
    night = about(0.4 * rate)
    # (seconds, requests per second at the end, prompts, outputs); the rate changes linearly.
    double = about(2 * rate, 0.1)
    turned = about(1.4 * rate)
    phases = [
        (about(240.0), rate, long, some),
        (about(60.0), double, long, some),
        (about(360.0), double, long, some),
        (about(30.0), turned, short, many),
        (about(540.0), turned, short, many),
        (about(60.0), night, long, some),
        (about(420.0), night, long, some),
    ]
    arrivals, begin, before = [], 0.0, rate
    for length, after, prompt, output in phases:
        seconds, at = length / shorter, 0.0
        most = max(before, after)
        while True:
            at += rng.expovariate(most)
            if at >= seconds:
                break
            # Thinning: accept a candidate with probability (current rate) / (maximum rate).
            if rng.random() * most < before + (after - before) * at / seconds:
                arrivals.append(Arrival(begin + at, prompt.draw(rng), output.draw(rng)))
        begin, before = begin + seconds, after
    starts = [sum(one[0] for one in phases[:number]) / shorter for number in range(len(phases))]
    lost_at = starts[4] + rng.uniform(0.3, 0.6) * phases[4][0] / shorter
    return Day(arrivals, lost_at, about(300.0) / shorter, begin)


class DayParameters(NamedTuple):
    """Parameters that all days share."""

    cost: CostModel
    limits: Limits
    most: int = 8
    """Maximum groups of each role."""
    slots: int = 64
    noise: float = 0.05
    load_s: float = 30.0
    wire: Wire = Wire(12288, 2e9)
    settings: PlannerSettings = PlannerSettings(calm_s=90.0)
    believed: float = 1.0
    """Factor of the step times in the planner's cost model; 1.0 for an exact model."""

    def play(self, day: Day, groups: Groups, planned: bool = False, seed: int = 0) -> Outcome:
        """Return the outcome of ``day`` for a fleet that begins with ``groups``.

        Raises the error of a failed fleet.
        """
        section = with_budget(
            SchedulerSection(max_num_seqs=self.slots, max_queued_requests=len(day.arrivals)), "cuda"
        )
        settings = Settings(
            kv_config(section, LONGEST), section, self.cost, self.wire, self.noise, self.load_s
        )
        fleet = ChangingDeployment(groups, settings, day.arrivals, seed=seed)
        watch = _Observer(fleet, self._planner(section, groups) if planned else None, self.limits)
        fleet.timeline.at(0.0, None, watch.observe)
        fleet.timeline.at(day.lost_at, None, watch.lose_host, day.repair_s)
        fleet.run((self.limits.ttft, self.limits.tpot))
        return watch.outcome("planner" if planned else str(groups))

    def _planner(self, section: SchedulerSection, groups: Groups) -> FleetPlanner:
        cost = self.cost.scaled(self.believed)
        capacity = Capacity(cost, self.limits, section.max_num_batched_tokens, self.slots)
        roles = {role for _, role in groups.names()}
        ranges = {str(role): Range(1, self.most) for role in roles if role != "encode"}
        return FleetPlanner(capacity, ranges, self.settings)


class _Observer:
    """Observes a run every ``INTERVAL_S`` seconds, lets the planner act, and loses the host."""

    def __init__(self, fleet: ChangingDeployment, planner: FleetPlanner | None, limits: Limits) -> None:
        self._fleet = fleet
        self._planner = planner
        self._limits = limits
        self._meter = Meter(limits)
        self._log: list[str] = []
        self._seconds: dict[str, float] = {}

    def observe(self) -> None:
        """Observe, and carry out the planner's actions."""
        fleet, now = self._fleet, self._fleet.now
        for one in fleet.records.values():
            if one.state != "retired":
                self._seconds[one.role] = self._seconds.get(one.role, 0.0) + INTERVAL_S
        seen = self._meter.on(fleet.snapshot(), now)
        if seen is not None and self._planner is not None:
            for action in self._planner.on(Observed(seen, now), now):
                self._carry_out(action, self._planner)
        fleet.timeline.at(now + INTERVAL_S, None, self.observe)

    def _carry_out(self, action: Scale, planner: FleetPlanner) -> None:
        self._log.append(f"{self._fleet.now:6.0f}  {action.why}")
        try:
            self._fleet.scale(action.base, action.groups)
        except WeftError as error:
            planner.on(Refused(action.base, error.message), self._fleet.now)
            self._log.append(f"{self._fleet.now:6.0f}  refused: {error.message}")

    def lose_host(self, repair: float) -> None:
        """Lose the first serving group of the role with the most groups."""
        serving = [(name, one.role) for name, one in self._fleet.records.items() if one.state == "running"]
        count = Counter(role for _, role in serving)
        name, _ = max(serving, key=lambda one: count[one[1]])
        self._log.append(f"{self._fleet.now:6.0f}  the host of {name} is lost for {repair:.0f} s")
        self._fleet.lose(name, repair)

    def outcome(self, name: str) -> Outcome:
        """Return the results of the ended run."""
        streams = list(self._fleet.streams.values())
        refused = self._fleet.refused
        late = [stream.times[0] - stream.arrival.at > self._limits.ttft for stream in streams]
        slow = [pace(stream) > self._limits.tpot for stream in streams]
        now = self._fleet.now
        return Outcome(
            fleet=name,
            requests=len(streams) + refused,
            outside=sum(a or b for a, b in zip(late, slow, strict=True)) + refused,
            ttft_outside=sum(late),
            tpot_outside=sum(slow),
            size=self._fleet.size() / now,
            prefill=self._seconds.get("prefill", 0.0) / now,
            decode=self._seconds.get("decode", 0.0) / now,
            changes=sum("refused" not in line and "lost for" not in line for line in self._log),
            log=tuple(self._log),
        )


def divisions_of(total: int) -> list[Groups]:
    """Return the divisions of ``total`` groups into prefill and decode groups, two or more of each role.

    A fixed fleet with one group of a role could not serve after the loss of that group's host.
    """
    return [Groups(prefill=prefill, decode=total - prefill) for prefill in range(2, total - 1)]


def encode(outcomes: list[Outcome]) -> bytes:
    """Return the outcomes as JSON."""
    return msgspec.json.format(msgspec.json.encode(outcomes), indent=2)
