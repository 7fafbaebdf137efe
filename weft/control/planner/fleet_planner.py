"""The decisions of a planner: wanted groups of each role of a running server. A pure state machine.

    Observed ──► forecast ──► capacity ──► need ──► Scale
                                            ▲
                         backlog, full groups, requests outside their limits

Up at once, down slowly:

- **Up** as soon as the expected load needs more groups than are there or on their way.
- **Down** by one group, when no moment of the last ``calm_s`` seconds needed the group, even with a margin.
- **In progress.** While groups of a role start or leave, queues say nothing about the new number. Only the
  expected load may then raise the number again, and nothing lowers the number.
- **Nothing** without a usable observation. The server keeps its groups.
- A lost group that no owner starts again is replaced. A group that does not come back within ``lost_s``
  seconds counts as lost, too.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from weft.control.planner.capacity import Capacity, Load, Predicted
from weft.control.planner.forecast import Arrivals, Forecast
from weft.control.planner.observations import Observation, RoleGroups, Tail
from weft.scheduler.policy.step_cost import StepShape

ROLES = ("prefill", "decode", "unified")
"""The roles that a planner scales."""
PROMPT_ROLES, OUTPUT_ROLES = ("prefill", "unified"), ("decode", "unified")
SLOWEST, FASTEST = 20.0, 0.05
"""Limits of the measured slowness: beyond them the cost model is wrong."""
GAIN = 0.2
"""Weight of a new measurement of the slowness, and of the seconds until a group serves."""
FEWEST_ROWS = 50
"""Decode rows of which an interval measures the slowness."""


class Range(NamedTuple):
    """Allowed numbers of groups."""

    least: int
    most: int


class Settings(NamedTuple):
    """Times in seconds."""

    stale_s: float = 60.0
    """Maximum age and maximum length of a usable observation."""
    load_s: float = 30.0
    """Seconds until a new group serves, before the first measurement."""
    calm_s: float = 180.0
    """A group leaves when nothing needed the group for this time; also the time between two groups."""
    settle_s: float = 30.0
    """Time after a change in which queues and requests outside their limits cause no further change."""
    drain_s: float = 20.0
    """A backlog of prompts should be gone after this time."""
    lost_s: float = 120.0
    """A group that does not come back within this time counts as lost."""
    extra_calms: float = 3.0
    """Least time of a group that was added because requests missed their limits, in units of ``calm_s``."""
    refused_s: float = 60.0
    """Time without a new try after a refusal of the server."""
    margin: float = 0.15
    """The load may grow by this share after a group has left."""
    fullest: float = 0.9
    """KV cache use above which another group is needed."""


DEFAULTS = Settings()


class Observed(NamedTuple):
    """An observation that ended at ``at``."""

    observation: Observation
    at: float


class Missing(NamedTuple):
    """No observation could be made."""

    why: str


class Refused(NamedTuple):
    """The server refused the last number of ``base``."""

    base: str
    why: str


Event: TypeAlias = Observed | Missing | Refused


class Scale(NamedTuple):
    """Give ``base`` a number of ``groups``."""

    base: str
    groups: int
    why: str
    """The numbers behind the decision, in one line."""


@dataclass(slots=True)
class _Role:
    """State of the planner for one role."""

    range: Range
    base: str = ""
    needs: deque[tuple[float, int]] = field(default_factory=deque)
    """(time, groups needed with a margin), of the last ``calm_s`` seconds."""
    wanted: int = 0
    """Groups that should serve after the last change; 0 before the first."""
    changed_at: float = -math.inf
    asked_at: float | None = None
    """Time of the last change that added groups, until the groups serve."""
    in_progress: bool = False
    short_since: float | None = None
    """Time since which groups are on their way."""
    stuck: int = 0
    """Groups that have been on their way for too long."""
    extra: int = 0
    """Groups that are needed for reasons the capacity does not know."""
    extra_until: float = -math.inf
    quiet_until: float = -math.inf


class FleetPlanner:
    """The planner of one server. Times are seconds of one monotonic clock."""

    def __init__(
        self, capacity: Capacity, ranges: Mapping[str, Range], settings: Settings = DEFAULTS
    ) -> None:
        """``ranges``: role -> allowed numbers of groups. Only these roles are scaled."""
        self._capacity = capacity
        self._settings = settings
        self.ranges = dict(ranges)
        self._roles = {role: _Role(one) for role, one in ranges.items()}
        self._forecast = Forecast()
        self._ttft: deque[Tail] = deque(maxlen=12)
        self._tpot: deque[Tail] = deque(maxlen=12)
        self.load_s = settings.load_s
        """Seconds until a new group serves, as measured."""
        self.slowness = 1.0
        """Measured seconds of a step, in units of the cost model's seconds."""

    def on(self, event: Event, now: float) -> list[Scale]:
        """Apply ``event`` and return the changes to make."""
        if isinstance(event, Refused):
            for role in self._roles.values():
                if role.base == event.base:
                    role.quiet_until, role.asked_at = now + self._settings.refused_s, None
            return []
        if isinstance(event, Missing):
            self._forget()
            return []
        observation = event.observation
        if now - event.at > self._settings.stale_s or observation.seconds > self._settings.stale_s:
            self._forget()
            return []
        self._learn(observation)
        actions = []
        for name, role in self._roles.items():
            groups = observation.roles.get(name)
            if groups is None or not groups.base:
                continue
            self._follow(name, role, groups, now)
            if self._forecast.known and now >= role.quiet_until:
                actions += self._decide(name, role, groups, observation, now)
        return actions

    # -- what is known

    def _forget(self) -> None:
        """Forget the rates before a gap. Groups stay as they are until new observations come."""
        self._forecast.clear()
        self._ttft.clear()
        self._tpot.clear()
        for role in self._roles.values():
            role.needs.clear()

    def _learn(self, seen: Observation) -> None:
        """Add an observation to the forecast, and measure the slowness of steps."""
        self._forecast.add(
            Arrivals(
                seen.seconds,
                seen.arrivals,
                seen.ended,
                seen.prompt_tokens,
                seen.output_tokens,
                seen.ttft.number,
                sum(one.prefill_tokens for one in seen.work),
            )
        )
        self._ttft.append(seen.ttft)
        self._tpot.append(seen.tpot)
        outputs = [one for one in seen.work if one.role in OUTPUT_ROLES]
        rows = sum(one.decode_rows for one in outputs)
        waits = any(seen.roles[role].waiting for role in OUTPUT_ROLES if role in seen.roles)
        # A gap with a wait for a slot is no step. Few rows say little.
        if not seen.gap or rows < FEWEST_ROWS or waits:
            return
        load = self._forecast.loads(0.0)[0]
        predicted = 0.0
        for one in outputs:
            count = one.decode_rows / one.steps
            shape = StepShape(
                decode_rows=round(count),
                decode_tokens=round(count),
                decode_pairs=round(count * (load.prompt + load.output / 2)),
                prefill_rows=round(one.prefill_rows / one.steps),
                prefill_tokens=round(one.prefill_tokens / one.steps),
                prefill_pairs=round(one.prefill_tokens / one.steps * load.prompt / 2),
            )
            predicted += one.decode_rows / rows * self._capacity.step_seconds(shape)
        measured = min(max(seen.gap / predicted, FASTEST), SLOWEST)
        self.slowness += GAIN * (measured - self.slowness)

    def _follow(self, name: str, role: _Role, groups: RoleGroups, now: float) -> None:
        """Note the progress of the last change, and groups that stay away."""
        role.base = groups.base
        moving = bool(groups.coming or groups.leaving)
        if role.in_progress and not moving:
            if role.asked_at is not None and groups.serving >= role.wanted:
                self.load_s += GAIN * (now - role.asked_at - self.load_s)
            role.asked_at = None
            role.changed_at = now
        role.in_progress = moving
        if moving or now - role.changed_at < self._settings.settle_s:
            # Latencies from before the change say nothing about the new number.
            for tails in self._tails(name):
                tails.clear()
        role.stuck = min(role.stuck, groups.coming)
        if not groups.coming:
            role.short_since = None
        elif role.short_since is None:
            role.short_since = now
        elif not role.stuck and now - role.short_since > max(self._settings.lost_s, 3 * self.load_s):
            role.stuck = groups.coming

    def _tails(self, role: str) -> list[deque[Tail]]:
        """Return the latencies that the groups of a role make."""
        tails = [self._ttft] if role in PROMPT_ROLES else []
        return tails + ([self._tpot] if role in OUTPUT_ROLES else [])

    # -- decisions

    def _decide(
        self, name: str, role: _Role, groups: RoleGroups, seen: Observation, now: float
    ) -> list[Scale]:
        """Return the change of one role, if any."""
        stuck = role.stuck
        have = groups.serving + groups.coming - stuck
        load, need, calm = self._needs(name, role.range)
        reason = "the expected load"
        role.needs.append((now, calm))
        while role.needs[0][0] < now - self._settings.calm_s:
            role.needs.popleft()
        if not role.in_progress and now - role.changed_at >= self._settings.settle_s:
            pressed, why = self._pressure(name, groups, seen)
            if pressed > max(need, have):
                need, reason = min(pressed, role.range.most), why
                if why == "requests outside their limits":
                    role.extra, role.extra_until = (
                        need,
                        now + self._settings.extra_calms * self._settings.calm_s,
                    )
        if now < role.extra_until:
            need = max(need, min(role.extra, role.range.most))
        need = max(need, role.range.least)
        if need > have:
            # The server counts lost groups as present, so they are added to the number.
            number = need + groups.lost + stuck
            return self._change(name, role, groups, seen, need, number, reason, load, now)
        quiet = now - role.changed_at >= self._settings.calm_s
        whole = now - role.needs[0][0] >= 0.8 * self._settings.calm_s
        if role.in_progress or not quiet or not whole:
            return []
        most = max(need, *(one for _, one in role.needs), role.range.least)
        if most < have and have > 1:
            return self._change(name, role, groups, seen, have - 1, have - 1, "a calm load", load, now)
        return []

    def _needs(self, name: str, allowed: Range) -> tuple[Load, int, int]:
        """Return the expected load, the groups for the load, and the groups for the load with a margin."""
        forecast, capacity = self._forecast, self._capacity
        margin = 1 + max(self._settings.margin, forecast.margin)
        loads = forecast.loads(forecast.expected(self.load_s))
        groups = [capacity.groups(name, one, allowed.most, self.slowness) for one in loads]
        need = max(groups)
        calm = max(
            capacity.groups(name, one._replace(rate=margin * one.rate), allowed.most, self.slowness)
            for one in loads
        )
        return loads[groups.index(need)], need, calm

    def _pressure(self, name: str, groups: RoleGroups, seen: Observation) -> tuple[int, str]:
        """Return the groups that queues, memory and latencies ask for, and the reason; 0 for none."""
        settings, capacity = self._settings, self._capacity
        asks: list[tuple[int, str]] = [(0, "")]
        loads = self._forecast.loads(self._forecast.rate)
        # One waiting prompt per group is normal: the next step takes the prompt.
        backlog = groups.waiting - groups.serving
        if backlog > 0 and name in PROMPT_ROLES:
            more = [one._replace(rate=one.rate + backlog / settings.drain_s) for one in loads]
            wanted = max(capacity.groups(name, one, groups.serving + 2, self.slowness) for one in more)
            asks.append((wanted, f"{groups.waiting} waiting prompts"))
        if groups.kv_use > settings.fullest:
            asks.append((groups.serving + 1, f"KV cache use {groups.kv_use:.0%}"))
        if any(_misses(tail, capacity.limits.goal) for tail in self._tails(name)):
            asks.append((groups.serving + 1, "requests outside their limits"))
        return max(asks)

    def _change(
        self,
        name: str,
        role: _Role,
        groups: RoleGroups,
        seen: Observation,
        wanted: int,
        number: int,
        reason: str,
        load: Load,
        now: float,
    ) -> list[Scale]:
        """Note the change and return the action with its reasons."""
        present = groups.serving + groups.coming
        up = wanted > present
        role.wanted, role.changed_at, role.in_progress = wanted, now, True
        role.asked_at = now if up and role.asked_at is None else role.asked_at
        predicted = self._capacity.predict(name, load, wanted, self.slowness)
        lost = f", {groups.lost} lost" if groups.lost else ""
        why = (
            f"{groups.base} {groups.serving} -> {wanted} for {reason}: {load.rate:.2f} requests/s expected "
            f"(now {self._forecast.rate:.2f}, trend {60 * self._forecast.trend():+.2f} per minute) of "
            f"{load.prompt:.0f} + {load.output:.0f} tokens; {wanted} groups give "
            f"{_latency(predicted, name)}; {_seen(seen)}; {groups.waiting} waiting, "
            f"{groups.running} running, KV {groups.kv_use:.0%}, steps {self.slowness:.2f} x the cost model"
            f"; {groups.coming} coming, {groups.leaving} leaving{lost}"
        )
        return [Scale(groups.base, number, why)]


def _misses(tails: deque[Tail], goal: float) -> bool:
    """Return True if more requests miss their limit than the goal allows, beyond the noise."""
    count = sum(one.number for one in tails)
    outside = sum(one.outside for one in tails)
    allowed = (1 - goal) * count
    return count >= 20 and outside > allowed + 3 * math.sqrt(allowed * goal)


def _latency(predicted: Predicted, role: str) -> str:
    parts = []
    if role in PROMPT_ROLES:
        parts.append(f"TTFT {predicted.ttft:.2f} s")
    if role in OUTPUT_ROLES:
        parts.append(f"TPOT {predicted.tpot * 1e3:.0f} ms")
    return ", ".join(parts)


def _seen(seen: Observation) -> str:
    share = [one.outside / one.number if one.number else 0.0 for one in (seen.ttft, seen.tpot)]
    return (
        f"seen TTFT {seen.ttft.at_goal:.2f} s ({share[0]:.0%} outside), "
        f"TPOT {seen.tpot.at_goal * 1e3:.0f} ms ({share[1]:.0%} outside)"
    )
