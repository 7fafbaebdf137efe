"""Observations of a running server: from two snapshots of its counters to rates and latencies.

A snapshot has the names of ``/metrics`` and the groups of ``GET /admin/groups``. The simulator makes the same
snapshots. A counter that became smaller was reset by a restart, and counts from 0.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from weft.control.planner.capacity import Limits

COUNTERS = (
    "request_success_total",
    "request_failure_total",
    "request_prompt_tokens_sum",
    "request_prompt_tokens_count",
    "request_max_num_generation_tokens_sum",
    "inter_token_latency_seconds_sum",
    "inter_token_latency_seconds_count",
    "time_to_first_token_seconds_bucket",
    "request_time_per_output_token_seconds_bucket",
)
"""Counters of the API servers, without the prefix ``weft:``."""
ENGINE_COUNTERS = (
    "engine_steps_total",
    "engine_prefill_rows_total",
    "engine_prefill_tokens_total",
    "engine_decode_rows_total",
)
"""Counters of one engine."""
_TTFT, _TPOT = COUNTERS[7:9]
OF_CLIENTS = frozenset({"invalid_request", "context_length_exceeded", "forbidden", "not_found"})
"""Codes of failures that are no load: the request was refused before any computation."""


class Series(NamedTuple):
    """One counter."""

    name: str
    source: str = ""
    """The engine, for counters of engines; else any text that tells counters of one name apart."""
    bound: float = math.inf
    """Upper bound of a bucket."""


class EngineSeen(NamedTuple):
    """One engine of ``GET /admin/groups``."""

    name: str
    group: str
    base: str
    role: str
    state: str
    alive: bool
    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0


class Snapshot(NamedTuple):
    """The counters of a server at one moment."""

    engines: tuple[EngineSeen, ...]
    counts: Mapping[Series, float]
    open: float
    """Open sequences of all API servers."""


class RoleGroups(NamedTuple):
    """The groups of one role."""

    base: str = ""
    """The name to scale. Empty if the groups of the role have no name or several names."""
    serving: int = 0
    coming: int = 0
    """Groups that load, or are down and will be started again."""
    leaving: int = 0
    """Groups that drain and end."""
    lost: int = 0
    """Retired groups: no process will be started."""
    running: int = 0
    waiting: int = 0
    kv_use: float = 0.0
    """Used share of the fullest KV cache, 0 .. 1."""


class Tail(NamedTuple):
    """Latencies of the requests of a window."""

    number: float = 0.0
    outside: float = 0.0
    """Number of requests beyond the limit."""
    at_goal: float = 0.0
    """Seconds at the goal's percentile."""


class Work(NamedTuple):
    """The steps of one engine in a window."""

    role: str
    steps: float
    prefill_rows: float
    prefill_tokens: float
    decode_rows: float


class Observation(NamedTuple):
    """A server between two snapshots."""

    seconds: float
    roles: Mapping[str, RoleGroups]
    arrivals: float
    """Sequences that arrived."""
    ended: float
    """Requests that ended well."""
    prompt_tokens: float
    """Prompt tokens of the ended requests."""
    output_tokens: float
    """Output tokens of the ended requests."""
    ttft: Tail
    tpot: Tail
    gap: float
    """Mean seconds between two tokens; 0 without tokens."""
    work: tuple[Work, ...]


class Meter:
    """Turns snapshots into observations."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._last: Snapshot | None = None
        self._at = 0.0

    def on(self, snapshot: Snapshot, now: float) -> Observation | None:
        """Return the observation since the last snapshot; None for the first snapshot."""
        last, at, self._last, self._at = self._last, self._at, snapshot, now
        if last is None or now <= at:
            return None
        grown = _grown(last.counts, snapshot.counts)
        total = _totals(grown)
        failures = sum(
            count
            for one, count in grown.items()
            if one.name == "request_failure_total" and one.source.rpartition(" ")[2] not in OF_CLIENTS
        )
        ended = total["request_success_total"] + failures
        gaps = total["inter_token_latency_seconds_count"]
        return Observation(
            seconds=now - at,
            roles=roles_of(snapshot.engines),
            arrivals=max(ended + snapshot.open - last.open, 0.0),
            ended=total["request_prompt_tokens_count"],
            prompt_tokens=total["request_prompt_tokens_sum"],
            output_tokens=total["request_max_num_generation_tokens_sum"],
            ttft=_tail(grown, _TTFT, self._limits.ttft, self._limits.goal),
            tpot=_tail(grown, _TPOT, self._limits.tpot, self._limits.goal),
            gap=total["inter_token_latency_seconds_sum"] / gaps if gaps else 0.0,
            work=_work(grown, snapshot.engines),
        )


def roles_of(engines: Iterable[EngineSeen]) -> dict[str, RoleGroups]:
    """Return the groups of each role. A group is as good as its worst engine."""
    groups: dict[str, list[EngineSeen]] = {}
    for one in engines:
        groups.setdefault(one.group or one.name, []).append(one)
    found: dict[str, RoleGroups] = {}
    bases: dict[str, set[str]] = {}
    for members in groups.values():
        role = members[0].role
        so_far = found.get(role, RoleGroups())
        state = _state(members)
        bases.setdefault(role, set()).add(members[0].base)
        found[role] = so_far._replace(
            **{state: getattr(so_far, state) + 1},
            base=members[0].base if len(bases[role]) == 1 else "",
            running=so_far.running + sum(one.running for one in members),
            waiting=so_far.waiting + sum(one.waiting for one in members),
            kv_use=max(so_far.kv_use, *(one.kv_usage for one in members)),
        )
    return found


def _state(members: list[EngineSeen]) -> str:
    """Return the field of ``RoleGroups`` that counts the group."""
    states = {one.state for one in members}
    if "retired" in states:
        return "lost"
    if "leaving" in states:
        return "leaving"
    # An engine of a rolling restart drains and comes back.
    return "serving" if states == {"running"} and all(one.alive for one in members) else "coming"


def _grown(before: Mapping[Series, float], after: Mapping[Series, float]) -> dict[Series, float]:
    """Return the growth of each counter. A counter that became smaller has started again from 0."""
    grown = {}
    for one, count in after.items():
        old = before.get(one, 0.0)
        grown[one] = count - old if count >= old else count
    return grown


def _totals(grown: Mapping[Series, float]) -> dict[str, float]:
    totals = dict.fromkeys(COUNTERS, 0.0)
    for one, count in grown.items():
        if one.name in totals:
            totals[one.name] += count
    return totals


def _work(grown: Mapping[Series, float], engines: Iterable[EngineSeen]) -> tuple[Work, ...]:
    work = []
    for engine in engines:
        counts = [grown.get(Series(name, engine.name), 0.0) for name in ENGINE_COUNTERS]
        if counts[0] > 0:
            work.append(Work(engine.role, *counts))
    return tuple(work)


def _tail(grown: Mapping[Series, float], name: str, limit: float, goal: float) -> Tail:
    """Return the latencies of a histogram, linear inside a bucket. A bucket counts up to its bound."""
    buckets: dict[float, float] = {}
    for one, count in grown.items():
        if one.name == name:
            buckets[one.bound] = buckets.get(one.bound, 0.0) + count
    bounds = sorted(buckets)
    count = buckets[bounds[-1]] if bounds else 0.0
    if not count:
        return Tail()
    within, at_goal, low, below = count, 0.0, 0.0, 0.0
    found = False
    for bound in bounds:
        number = buckets[bound]
        width = 0.0 if math.isinf(bound) else bound - low
        if not found and number >= goal * count:
            at_goal = low + width * (goal * count - below) / max(number - below, 1e-9)
            found = True
        if low < limit <= bound:
            within = below + (number - below) * ((limit - low) / width if width else 0.0)
        low, below = bound, number
    return Tail(count, count - within, at_goal)
