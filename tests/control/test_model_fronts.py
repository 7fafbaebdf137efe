"""The table of models for several API servers: reports, members, leases, and random schedules."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest

from tests.control.test_models import Broken, World
from tests.support.slow import mostly_slow
from weft.common.errors import Unavailable
from weft.control import model_fronts as f
from weft.control import models as m
from weft.control.model_fronts import (
    Drop,
    Expel,
    Joined,
    Left,
    LoadSeen,
    ModelRecord,
    Reported,
    SharedTable,
    Use,
)
from weft.control.models import Load, ModelFacts, ModelState, Unload
from weft.control.processes.supervisor import SILENT_S


def table(*facts: ModelFacts, budget: int, members: str = "xy") -> SharedTable:
    made = SharedTable(facts, budget)
    for name in members:
        made.on(Joined(name), 0.0)
    return made


def seen(made: SharedTable, front: str, now: float, **uses: Use) -> list[Any]:
    """Report the present version of the record."""
    return made.on(Reported(front, made.version, uses), now)


def loaded(made: SharedTable, name: str, now: float) -> None:
    made.on(LoadSeen(name, made.loads[name]), now)
    assert made.admits(name)


def test_an_unload_waits_until_each_member_has_closed_the_model_and_ended_its_requests() -> None:
    made = table(ModelFacts("a", 1), ModelFacts("b", 1), budget=1)
    assert seen(made, "x", 1.0, a=Use(waiting=1, requests=1)) == [Load("a")]
    loaded(made, "a", 2.0)
    seen(made, "x", 3.0, a=Use(open=1, requests=2, begun=1))
    before = made.version
    assert seen(made, "y", 40.0, b=Use(waiting=1, requests=1)) == []
    assert made.entries["a"].state is ModelState.DRAINING
    assert made.version > before
    # A request that began at y before y saw the drain counts.
    assert made.on(Reported("y", before, {"a": Use(open=1, requests=1, begun=1)}), 40.1) == []
    assert seen(made, "x", 40.2, a=Use(requests=2, begun=1)) == []
    assert seen(made, "y", 40.3) == []
    assert made.entries["a"].open == 1
    assert seen(made, "y", 41.0, a=Use(requests=1, begun=1)) == [Unload("a")]
    assert made.on(m.Gone("a"), 42.0) == [Load("b")]


def test_no_request_is_open_but_a_member_may_still_begin_one() -> None:
    made = table(ModelFacts("a", 1), budget=1)
    made.on(m.LoadAsked("a"), 0.0)
    loaded(made, "a", 1.0)
    assert made.on(m.UnloadAsked("a"), 2.0) == []
    assert seen(made, "x", 2.1) == []
    assert seen(made, "y", 2.2) == [Unload("a")]


def test_the_death_of_a_member_closes_its_requests() -> None:
    made = table(ModelFacts("a", 1), ModelFacts("b", 1), budget=1)
    seen(made, "x", 0.0, a=Use(waiting=1, requests=1))
    loaded(made, "a", 1.0)
    seen(made, "x", 1.1, a=Use(open=3, requests=4, begun=3, keep=7.0))
    made.on(m.UnloadAsked("a"), 2.0)
    seen(made, "y", 2.1)
    assert made.on(Left("x"), 3.0) == [Unload("a")]
    assert made.on(Left("x"), 3.1) == []
    # Messages of a process that has ended
    assert seen(made, "x", 3.2, a=Use(open=9)) == []
    made.on(Joined("x"), 3.3)
    assert made.members == ("y",)
    assert made.entries["a"].open == 0


def test_a_member_that_does_not_answer_is_expelled_after_the_lease() -> None:
    made = table(ModelFacts("a", 1), budget=1)
    made.on(m.LoadAsked("a"), 0.0)
    loaded(made, "a", 1.0)
    for member in "xy":
        seen(made, member, 1.0)
    now = 1.0
    for _ in range(400):  # nothing to report: no lease runs
        now += 1.0
        assert made.on(m.Tick(), now) == []
    made.on(m.UnloadAsked("a"), now)
    seen(made, "x", now)
    begin = now
    while not (found := made.on(m.Tick(), now)):
        now += 1.0
    assert found == [Expel("y")]
    assert f.LEASE_S < now - begin <= f.LEASE_S + 1.0
    assert made.on(Left("y"), now) == [Unload("a")]


def test_a_pause_of_the_owner_expels_no_member() -> None:
    made = table(ModelFacts("a", 1), budget=1)
    made.on(m.Tick(), 0.0)
    made.on(m.LoadAsked("a"), 0.0)
    assert made.on(m.Tick(), 1000.0) == []
    assert made.on(m.Tick(), 1001.0) == []


def test_a_load_fails_if_an_api_server_cannot_use_it_and_works_for_the_first_that_can() -> None:
    made = table(ModelFacts("a", 1), budget=1)
    seen(made, "x", 0.0, a=Use(waiting=1, requests=1))
    error = Unavailable("no such file")
    assert made.on(LoadSeen("a", 1, error=error), 1.0) == [Drop("a", error)]
    assert made.record().models[0].ending
    assert made.on(LoadSeen("a", 1), 1.1) == [], "the processes end already"
    assert made.on(m.Failed("a", error), 2.0) == []
    shown = made.record().models[0]
    assert (shown.state, shown.refused, shown.failure) == ("unloaded", 1, "no such file")
    made.on(m.Tick(), 2.1)
    assert made.record().models[0].refused == 1, "x has not seen the refusal"
    seen(made, "x", 2.2, a=Use(waiting=1, requests=2))
    assert made.record().models[0].refused == 2, "another request"
    seen(made, "x", 2.3, a=Use(requests=2))
    assert seen(made, "x", 20.0, a=Use(waiting=1, requests=3)) == [Load("a")]
    assert made.on(LoadSeen("a", 1), 20.1) == []
    assert made.entries["a"].state is ModelState.LOADING
    made.on(LoadSeen("a", 2, cost=1), 20.2)
    made.on(LoadSeen("a", 2, error=error), 20.3)  # an API server that tries again
    assert made.admits("a")
    assert made.on(LoadSeen("a", 2, error=error, lost=True), 21.0) == []
    assert made.entries["a"].state is ModelState.DRAINING
    assert made.record().models[0].unloads == 0
    # The owner repeats the report: a load that an operator wants meanwhile is not refused.
    made.on(m.LoadAsked("a"), 21.1)
    made.on(LoadSeen("a", 2, error=error, lost=True), 21.2)
    seen(made, "x", 21.3, a=Use(requests=3))
    assert seen(made, "y", 21.4) == [Unload("a")]
    assert made.on(m.Gone("a"), 21.5) == [Load("a")]


def test_only_an_unload_by_an_operator_gives_new_weights_up() -> None:
    made = table(ModelFacts("a", 1), budget=1)
    made.on(m.LoadAsked("a"), 0.0)
    loaded(made, "a", 1.0)
    made.on(m.Kept("a", 0.0), 2.0)
    assert made.entries["a"].state is ModelState.DRAINING
    assert made.record().models[0].unloads == 0
    version = made.version
    made.on(m.UnloadAsked("a"), 3.0)
    assert made.record().models[0].unloads == 1
    assert made.version > version, "every API server sees the unload"


def test_time_without_requests_counts_over_all_members() -> None:
    made = table(ModelFacts("a", 1, ttl=10.0), budget=1)
    seen(made, "x", 0.0, a=Use(waiting=1, requests=1))
    loaded(made, "a", 1.0)
    seen(made, "x", 1.0, a=Use(open=1, requests=2, begun=1))
    seen(made, "y", 2.0, a=Use(open=1, requests=1, begun=1))
    seen(made, "x", 3.0, a=Use(requests=2, begun=1))
    assert made.record().models[0].expires is None
    seen(made, "y", 5.0, a=Use(requests=1, begun=1))
    assert made.record().models[0].expires == 15.0
    # A request that began and ended between two reports, with keep_alive
    seen(made, "x", 9.0, a=Use(requests=3, begun=2, keep=30.0))
    assert made.record().models[0].expires == 39.0


# -- random schedules


class Front:
    """One API server process on virtual time, with the rules of ``SharedModels``."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.records: dict[str, ModelRecord] = {}
        self.version = 0
        self.member = self.dead = self.looks = False
        self.hung = False
        """True while the process stands still. The supervisor ends such a process after ``SILENT_S``."""
        self.woke = -math.inf
        """Time at which the process went on after a pause."""
        self.stuck = False
        """True if the process follows the record no more, and everything else goes on."""
        self.connected: dict[str, int] = {}
        self.uses: dict[str, Use] = {}
        self.open: dict[str, set[int]] = {}
        self.waiting: dict[str, set[int]] = {}
        self.refused: dict[str, int] = {}
        self.sent = 0.0
        """Time at which the last message arrives."""
        self.counted: dict[str, Use] = {}
        """Uses that have arrived at the table."""

    def admits(self, name: str) -> bool:
        record = self.records.get(name)
        return (
            record is not None
            and self.member
            and record.state == "loaded"
            and self.connected.get(name) == record.load
        )


class FrontWorld(World):
    """Several API servers: messages take time, processes die and stand still."""

    table: SharedTable

    def __init__(self, seed: int, kind: type[SharedTable] = SharedTable) -> None:
        super().__init__(seed, kind)
        self.fronts: list[Front] = []
        self.running: dict[int, Front] = {}
        """Running line -> its API server."""
        self.drained: dict[str, float] = {}
        self.broken_fronts = seed % 3 != 0
        for number in range(self.random.randint(1, 3)):
            self.begin_front(f"{number}/1")

    def begin_front(self, name: str) -> None:
        front = Front(name)
        self.fronts.append(front)
        self.at(self.random.uniform(0.5, 3.0), lambda: self.send(front, Joined(front.name)))

    def run(self, requests: int) -> None:
        for _ in range(self.random.randint(0, 4) if self.broken_fronts else 0):
            self.at(self.random.random() * 200.0, self.random.choice([self.kill_front, self.hang_front]))
        super().run(requests)

    # -- API servers

    def send(self, front: Front, event: Any) -> None:
        front.sent = max(front.sent, self.now + self.random.choice([0.02, 0.1, 0.8]))
        self.at(front.sent - self.now, lambda: self.deliver(front, event))

    def deliver(self, front: Front, event: Any) -> None:
        if isinstance(event, Reported) and front.name in self.table.members:
            front.counted |= event.uses
        self.on(event)

    def report(self, front: Front, name: str = "") -> None:
        uses = {name: copy.copy(front.uses[name])} if name else {}
        self.send(front, Reported(front.name, front.version if front.member else 0, uses))

    def look_soon(self) -> None:
        for front in self.fronts:
            if front.version != self.table.version and not front.looks and not front.dead:
                front.looks = True
                self.at(self.random.choice([0.02, 0.05, 0.5]), lambda front=front: self.look(front))

    def look(self, front: Front) -> None:
        if front.dead or front.hung or front.stuck:
            return
        front.looks = False
        record = self.table.record()
        front.records = {one.name: one for one in record.models}
        front.version, front.member = record.version, front.name in record.members
        for one in record.models:
            present = 0 if one.state == "unloaded" or one.ending else one.load
            if front.connected.get(one.name, 0) not in (0, present):
                front.connected[one.name] = 0
            if one.refused != front.refused.get(one.name, 0):
                front.refused[one.name] = one.refused
                for number in sorted(front.waiting.get(one.name, ())):
                    self.give_up_at(front, one.name, number)
            if one.state == "draining":
                for line in [line for line, at in self.running.items() if at is front]:
                    if self.lines[line] == one.name:
                        self.at(0.1, lambda line=line: self.end_line(line, done=False))
            self.connect_soon(front, one)
        if front.member:
            self.report(front)
        self.wake(front)

    def connect_soon(self, front: Front, record: ModelRecord) -> None:
        wanted = record.state in ("loading", "loaded") and not record.ending
        if wanted and not front.connected.get(record.name) and self.alive.get(record.name) == "up":
            load = record.load
            self.at(self.random.uniform(0.1, 1.5), lambda: self.connect(front, record.name, load))

    def connect(self, front: Front, name: str, load: int) -> None:
        now = front.records[name]
        present = now.load == load and now.state in ("loading", "loaded", "draining") and not now.ending
        if front.dead or front.hung or not present or front.connected.get(name):
            return
        if self.alive.get(name) == "up" and self.table.loads[name] == load:
            if self.random.random() < 0.1:  # this API server alone cannot use the load now
                self.send(front, LoadSeen(name, load, error=Unavailable("no connection")))
                self.at(1.0, lambda: self.connect(front, name, load))
                return
            front.connected[name] = load
            self.send(front, LoadSeen(name, load))
            self.wake(front)

    def wake(self, front: Front) -> None:
        for name, waiting in front.waiting.items():
            while waiting and front.admits(name):
                self.begin_at(front, name, waiting.pop())

    def kill_front(self) -> None:
        living = [one for one in self.fronts if not one.dead]
        if living:
            self.end_front(self.random.choice(living))

    def end_front(self, front: Front) -> None:
        """The process ends with its requests; the owner sees the end later."""
        if front.dead:
            return
        front.dead = True
        self.over += sum(map(len, front.waiting.values()))
        for numbers in front.open.values():
            self.over += len([one for one in numbers if one not in self.running])
        for line in [line for line, at in self.running.items() if at is front]:
            self.left[self.lines.pop(line)] += 1
            del self.running[line]
        front.open.clear()
        front.waiting.clear()

        def leave() -> None:
            front.counted.clear()
            self.on(Left(front.name))

        self.at(self.random.uniform(0.0, 0.3), leave)
        number, _, incarnation = front.name.partition("/")
        self.begin_front(f"{number}/{int(incarnation) + 1}")

    def hang_front(self) -> None:
        living = [one for one in self.fronts if not one.dead and one.member]
        if living:
            front = self.random.choice(living)
            front.stuck = self.random.random() < 0.4
            front.hung = not front.stuck
            self.at(self.random.choice([3.0, 20.0, SILENT_S + 1.0]), lambda: self.go_on(front))

    def go_on(self, front: Front) -> None:
        if front.hung and self.random.random() < 0.5:
            self.end_front(front)
        front.hung, front.woke = False, self.now
        self.look(front)

    # -- clients

    def arrive(self, name: str) -> None:
        living = [one for one in self.fronts if not one.dead and not one.hung]
        if not living:
            self.at(1.0, lambda: self.arrive(name))
            return
        front, number = self.random.choice(living), next(self.numbers)
        use = front.uses.setdefault(name, Use())
        if front.admits(name):
            self.begin_at(front, name, number, waited=False)
            return
        front.waiting.setdefault(name, set()).add(number)
        use.waiting, use.requests = use.waiting + 1, use.requests + 1
        self.report(front, name)
        self.at(120.0, lambda: self.give_up_at(front, name, number))

    def give_up_at(self, front: Front, name: str, number: int) -> None:
        if front.hung:
            self.at(1.0, lambda: self.give_up_at(front, name, number))
        elif number in front.waiting.get(name, ()):
            front.waiting[name].discard(number)
            front.uses[name].waiting -= 1
            self.over += 1
            self.report(front, name)

    def begin_at(self, front: Front, name: str, number: int, waited: bool = True, line: bool = False) -> None:
        if self.alive.get(name) != "up":
            raise Broken(f"a request begins at {name}, whose processes are {self.alive.get(name)}")
        front.open.setdefault(name, set()).add(number)
        use = front.uses.setdefault(name, Use())
        use.open, use.lines = use.open + 1, use.lines + line
        use.waiting -= waited and not line
        if not line:
            use.requests, use.begun = use.requests + 1, use.begun + 1
            use.keep = self.random.choice([None] * 9 + [10.0])
            seconds = self.random.choice([0.5, 3.0, 45.0])
            self.at(seconds, lambda: self.end_at(front, name, number))
        self.report(front, name)

    def end_at(self, front: Front, name: str, number: int) -> None:
        if front.hung and not front.dead:
            self.at(1.0, lambda: self.end_at(front, name, number))
        elif number in front.open.get(name, ()):
            front.open[name].discard(number)
            front.uses[name].open -= 1
            self.over += 1
            self.report(front, name)

    # -- lines of batches: one API server has the lease

    def start_lines(self) -> None:
        leader = next((one for one in self.fronts if not one.dead and not one.hung and one.member), None)
        if leader is None:
            return
        for name, left in self.left.items():
            use = leader.uses.setdefault(name, Use())
            wants = left > 0 or any(self.lines[line] == name for line in self.running)
            if wants != use.batch:
                use.batch = wants
                self.report(leader, name)
            while leader.admits(name) and self.left[name] and use.lines < 3:
                self.left[name] -= 1
                number = next(self.numbers)
                self.lines[number], self.running[number] = name, leader
                self.begin_at(leader, name, number, line=True)
                seconds = self.random.choice([1.0, 10.0, 10.0, 1000.0])
                self.at(seconds, lambda number=number: self.end_line(number, done=True))

    def end_line(self, number: int, done: bool) -> None:
        front = self.running.get(number)
        if front is None or front.dead:
            return
        if front.hung:
            self.at(1.0, lambda: self.end_line(number, done))
            return
        name = self.lines.pop(number)
        del self.running[number]
        front.open[name].discard(number)
        self.done += done
        self.left[name] += not done
        use = front.uses[name]
        use.open, use.lines = use.open - 1, use.lines - 1
        self.report(front, name)

    # -- processes

    def kill(self) -> None:
        """The engines of a model die: in a load, or while the model is up."""
        name = self.random.choice(sorted(self.alive)) if self.alive else ""
        load = self.table.loads.get(name, 0)
        if self.alive.get(name) == "loading":
            self.on(LoadSeen(name, load, error=Unavailable("killed")))
        elif self.alive.get(name) == "up":
            self.on(LoadSeen(name, load, error=Unavailable("killed"), lost=True))
            for front in self.fronts:
                for number in sorted(front.open.get(name, set()) - self.running.keys()):
                    self.end_at(front, name, number)

    def on(self, event: m.Event) -> None:
        # Lines are wanted by their API server alone.
        if not isinstance(event, m.BatchWants):
            for action in self.table.on(event, self.now):
                self.carry_out(action)
            self.check()
            self.look_soon()

    def carry_out(self, action: Any) -> None:
        name = action.front if isinstance(action, Expel) else action.name
        if isinstance(action, Expel):
            found = next(one for one in self.fronts if one.name == name)
            # The lease may run out while the first report after a pause is on its way.
            late = self.now < found.woke + 1.0
            if not late and not found.hung and not found.stuck and not found.dead:
                raise Broken(f"API server {name} is expelled, and answers")
            self.end_front(found)
        elif isinstance(action, Drop):
            self.alive[name] = "dropped"
            self.at(self.random.uniform(0.1, 1.0), lambda: self.dropped(name))
        else:
            if isinstance(action, Unload) and any(one.open.get(name) for one in self.fronts):
                raise Broken(f"an unload of {name} ends streams")
            super().carry_out(action)

    def dropped(self, name: str) -> None:
        del self.alive[name]
        self.on(m.Failed(name, Unavailable("does not load")))

    def loaded(self, name: str, fails: bool, load: int) -> None:
        if self.alive.get(name) != "loading":
            return
        if fails:
            self.on(LoadSeen(name, self.table.loads[name], error=Unavailable("does not load")))
            return
        self.alive[name] = "up"
        for front in self.fronts:
            if name in front.records and not front.dead:
                self.connect_soon(front, front.records[name])

    # -- the rules

    def check(self) -> None:
        used = sum(one.cost for one in self.facts if one.name in self.alive)
        if used > self.budget:
            raise Broken(f"{used} of {self.budget} are in use: {self.alive}")
        for name, entry in self.table.entries.items():
            counted = [one.counted.get(name, Use()) for one in self.fronts]
            want = [sum(getattr(one, what) for one in counted) for what in ("open", "lines", "waiting")]
            if want != [entry.open, entry.lines, entry.waiting]:
                raise Broken(f"{name} has {[entry.open, entry.lines, entry.waiting]}, and not {want}")
            if entry.state is ModelState.DRAINING and not entry.ending and not self.may_be_used(name):
                if self.now > self.drained.setdefault(name, self.now) + f.LEASE_S + 5.0:
                    raise Broken(f"{name} drains without requests, and is not unloaded")
            else:
                self.drained.pop(name, None)

    def may_be_used(self, name: str) -> bool:
        """Return True while a request is open at a living API server."""
        return any(one.open.get(name) for one in self.fronts)


def first_broken(kind: type[SharedTable], schedules: int, first: int = 0) -> str:
    """Return the first broken rule; "" for none."""
    for seed in range(first, first + schedules):
        try:
            FrontWorld(seed, kind).run(60)
        except Broken as error:
            return f"seed {seed}: {error}"
    return ""


def test_random_schedules_keep_every_rule() -> None:
    assert first_broken(SharedTable, 8) == ""


@pytest.mark.slow
def test_many_random_schedules_keep_every_rule() -> None:
    assert first_broken(SharedTable, 1000, 100) == ""


class TrustsCounts(SharedTable):
    """An unload waits for no member to close the model."""

    def _may_end(self, entry: m.Entry) -> bool:
        return not entry.open


class KeepsTheDead(SharedTable):
    """The requests of a process that has ended stay open."""

    def on(self, event: Any, now: float) -> list[Any]:
        if isinstance(event, Left):
            self._uses.pop(event.front, None)
        return super().on(event, now)


class NoLease(SharedTable):
    """A member that does not answer keeps a model for ever."""

    def _expel(self, now: float) -> list[Any]:
        return []


class ExpelsTheSlow(SharedTable):
    """A lease counts from the last change, also after an answer."""

    def on(self, event: Any, now: float) -> list[Any]:
        behind = dict(self._behind)
        found = super().on(event, now)
        if isinstance(event, Reported):
            self._behind |= behind
        return found


class AddsUp(SharedTable):
    """A report adds to the last report of the same member."""

    def _count(self, name: str, before: Use, now: Use) -> None:
        super()._count(name, Use(requests=before.requests, begun=before.begun), now)


class HearsTheDropped(SharedTable):
    """A load that an API server cannot use, and whose processes end, counts as loaded by another report."""

    def on(self, event: Any, now: float) -> list[Any]:
        dropped = set(self._dropped)
        if isinstance(event, LoadSeen):
            self._dropped -= {event.name}
        found = super().on(event, now)
        self._dropped |= dropped if isinstance(event, LoadSeen) else set()
        return found


BUGS = [TrustsCounts, KeepsTheDead, NoLease, ExpelsTheSlow, AddsUp, HearsTheDropped]


@mostly_slow("kind", BUGS, 2)
def test_planted_bugs_are_found(kind: type[SharedTable]) -> None:
    assert first_broken(kind, 60) != ""
