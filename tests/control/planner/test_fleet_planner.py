"""The decisions of the planner: event by event, without a server."""

from __future__ import annotations

import random
from typing import Any

import pytest

from weft.control.planner.capacity import Capacity, Limits, Load
from weft.control.planner.fleet_planner import (
    FleetPlanner,
    Missing,
    Observed,
    Range,
    Refused,
    Scale,
    Settings,
)
from weft.control.planner.observations import Observation, RoleGroups, Tail, Work
from weft.sim.presets import load

LIMITS = Limits(3.0, 0.09)
CAPACITY = Capacity(load("spool-text-cpu").scaled(6.0), LIMITS, 2048, 64)
ANSWERED = Tail(50, 0, 0.5)


class Server:
    """A server with perfect groups: each wanted number is there after ``load_s`` seconds."""

    def __init__(self, groups: int = 2, most: int = 8, least: int = 1, role: str = "decode") -> None:
        self.role = role
        self.planner = FleetPlanner(CAPACITY, {role: Range(least, most)})
        self.serving, self.lost, self.waiting = groups, 0, 0
        self.coming: list[float] = []
        """Times at which groups begin to serve."""
        self.load_s = 20.0
        self.now = 0.0
        self.actions: list[tuple[float, Scale]] = []
        self.kv_use = 0.2

    def groups(self) -> RoleGroups:
        self.serving += sum(at <= self.now for at in self.coming)
        self.coming = [at for at in self.coming if at > self.now]
        return RoleGroups(
            "decode", self.serving, len(self.coming), 0, self.lost, 5, self.waiting, self.kv_use
        )

    def run(self, seconds: float, rate: float, rng: random.Random | None = None, **other: Any) -> list[int]:
        """Observe ``seconds`` of a load every 10 s. Return the wanted numbers."""
        before = len(self.actions)
        for _ in range(round(seconds / 10)):
            self.now += 10
            arrivals = 10 * rate
            if rng is not None:
                arrivals = sum(rng.random() < rate / 100 for _ in range(1000))
            self.observe(arrivals, **other)
        return [action.groups for _, action in self.actions[before:]]

    def observe(self, arrivals: float, seconds: float = 10.0, **other: Any) -> None:
        seen = Observation(
            seconds=seconds,
            roles={self.role: self.groups()},
            arrivals=arrivals,
            ended=arrivals,
            prompt_tokens=600 * arrivals,
            output_tokens=200 * arrivals,
            ttft=ANSWERED,
            tpot=ANSWERED,
            gap=0.0,
            work=(Work("prefill", 100, 0, 600 * ANSWERED.number, 0),),
        )._replace(**other)
        for action in self.planner.on(Observed(seen, self.now), self.now):
            self.actions.append((self.now, action))
            present = self.serving + len(self.coming) + self.lost
            if action.groups > present:
                self.coming += [self.now + self.load_s] * (action.groups - present)
            else:
                self.serving, self.lost = action.groups, 0


def needed(rate: float) -> int:
    return CAPACITY.groups("decode", Load(rate, 600, 600, 200), 8)


def test_a_growing_load_adds_groups_at_once_and_a_calm_one_removes_them_one_by_one() -> None:
    server = Server()
    assert needed(2.4) == 3
    assert server.run(120, 1.4) == []
    assert server.serving == needed(1.4) == 2
    begin = server.now
    wanted = server.run(120, 2.4)
    assert wanted[-1] == 3
    assert server.actions[0][0] - begin <= 40
    assert server.run(300, 2.4) == []
    begin = server.now
    assert server.run(150, 0.3) == [], "no group leaves before the calm time"
    assert server.run(600, 0.3) == [2, 1]
    times = [at for at, _ in server.actions[-2:]]
    assert times[1] - times[0] >= Settings().calm_s
    assert server.run(1000, 0.0) == [], "the last group stays"


def test_random_arrivals_near_a_border_scale_rarely() -> None:
    """An hour of independent arrivals near the border between two numbers of groups."""
    border = next(rate / 20 for rate in range(1, 200) if needed(rate / 20) > 2)
    for factor in (0.95, 1.05):
        server = Server()
        server.run(3600, border * factor, random.Random(factor))
        assert len(server.actions) <= 4, [action.groups for _, action in server.actions]


def test_numbers_stay_within_their_range() -> None:
    server = Server(groups=2, least=2, most=3)
    assert server.run(300, 0.1) == []
    server.run(300, 50.0)
    assert server.serving == 3
    assert max(action.groups for _, action in server.actions) == 3
    assert server.run(900, 0.1) == [2]


def test_without_metrics_nothing_changes() -> None:
    server = Server()
    server.run(60, 1.0)
    for _ in range(100):
        server.now += 10
        assert server.planner.on(Missing("no answer"), server.now) == []
    server.now += 10
    server.observe(1000.0, seconds=1010.0)  # an interval over the gap says nothing about now
    assert server.actions == []
    seen = Observation(10, {"decode": server.groups()}, 1e4, 1e4, 6e6, 2e6, ANSWERED, ANSWERED, 0, ())
    assert server.planner.on(Observed(seen, server.now - 100), server.now) == []
    assert server.run(120, 4.0)[-1] == needed(4.0)


def test_nothing_changes_before_the_load_is_known() -> None:
    server = Server()
    server.now = 10.0
    server.observe(1000.0)
    assert server.actions == []
    server = Server()
    assert server.run(600, 0.0) == [], "a server without a request keeps its groups"


def test_a_lost_group_is_replaced() -> None:
    server = Server(groups=3)
    server.run(120, 2.4)
    server.serving, server.lost = 2, 1
    assert server.run(20, 2.4) == [4], "the server counts the lost group"
    assert server.run(100, 2.4) == []
    assert server.serving == 3
    server.serving, server.lost = 4, 0  # the host is back
    assert server.run(400, 2.4) == [3]


def test_a_group_that_does_not_come_back_counts_as_lost() -> None:
    server = Server(groups=3)
    server.run(120, 2.4)
    server.serving, server.coming = 2, [1e9]
    assert server.run(110, 2.4) == []
    assert server.run(60, 2.4) == [4]


def test_a_change_in_progress_is_not_repeated_and_may_only_grow() -> None:
    server = Server(groups=2)
    server.load_s = 200.0
    server.run(120, 1.4)
    wanted = server.run(120, 2.4, tpot=Tail(50, 50, 1.0))
    assert wanted[-1] == 3
    assert wanted == sorted(set(wanted))
    assert server.run(60, 4.0)[-1] > 3, "a further growth need not wait"
    assert server.run(30, 0.1) == [], "nothing leaves while groups come"


def test_requests_outside_their_limits_ask_for_one_more_group() -> None:
    server = Server()
    server.run(120, 1.4)
    assert server.run(10, 1.4, tpot=Tail(500, 450, 0.2)) == [3]
    assert "requests outside their limits" in server.actions[-1][1].why
    assert server.run(500, 1.4) == [], "the group stays, because the cost model does not know the reason"
    assert server.run(600, 1.4) == [2]


def test_waiting_prompts_and_full_caches_ask_for_groups() -> None:
    server = Server(role="prefill")
    server.run(120, 0.8)
    server.waiting = 200
    assert server.run(20, 0.8)[0] > 2
    assert "200 waiting prompts" in server.actions[-1][1].why
    server = Server()
    server.run(120, 1.4)
    server.kv_use = 0.95
    assert server.run(10, 1.4) == [3]


def test_a_refused_change_is_tried_again_later() -> None:
    server = Server()
    server.load_s = 1e9
    server.run(120, 1.4)
    assert server.run(40, 2.4) == [3]
    server.coming = []
    server.planner.on(Refused("decode", "no free GPU"), server.now)
    assert server.run(50, 2.4) == []
    assert server.run(30, 2.4) == [3]


def test_measured_token_times_scale_the_cost_model() -> None:
    server = Server()
    server.run(120, 1.4)
    work = (Work("decode", 100, 0, 0, 800),)
    assert server.run(300, 1.4, gap=0.2, work=work) != []
    assert server.planner.slowness > 2
    assert f"{server.planner.slowness:.0f}" in "23456"


def test_an_action_names_its_numbers() -> None:
    server = Server()
    server.run(120, 1.4)
    server.run(60, 2.4)
    why = server.actions[0][1].why
    for part in ("decode 2 -> 3", "requests/s expected", "600 + 200 tokens", "TPOT", "waiting", "KV 20%"):
        assert part in why
    assert "\n" not in why


@pytest.mark.parametrize("role", ["prefill", "decode", "unified"])
def test_more_groups_carry_more(role: str) -> None:
    for groups in range(1, 6):
        some = CAPACITY.predict(role, Load(1.0, 600, 600, 200), groups)
        more = CAPACITY.predict(role, Load(1.0, 600, 600, 200), groups + 1)
        assert more.ttft <= some.ttft
        assert more.tpot <= some.tpot
    assert CAPACITY.groups(role, Load(1000.0, 600, 600, 200), 4) == 4
    assert CAPACITY.groups(role, Load(0.0, 600, 600, 200), 4) == 1
