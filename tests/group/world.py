"""Groups without engines, on virtual time: ranks and shells of ``weft.sim``, with engines that always step.

All events are drawn from one seed. ``testing.cluster.group`` checks the invariants after every change.
"""

from __future__ import annotations

from testing.cluster.collectives import Collectives
from testing.cluster.group import Group
from testing.cluster.ranks import Pace, RankProcess, Replica, Work, patience_of
from weft.common.errors import WeftError
from weft.common.restarts import RestartBudget
from weft.group.meeting import Meeting
from weft.group.types import Lease
from weft.sim.timeline import Timeline

PACE = Pace(timeout=10.0, hello=20.0, load=40.0, watch=0.5, delay=0.02, slow=10.0)
CHANCES = {"load": 0.05, "connect": 0.03, "step": 0.005, "form": 0.01}
"""Probability that an action of a process fails."""


class Engine:
    """An engine that always has a step to run."""

    def __init__(self, world: World, number: int, incarnation: int) -> None:
        self.world = world
        self.number = number
        self.incarnation = incarnation
        self.name = f"{number}.{incarnation}"
        self.alive = True
        self.stalled_until = 0.0
        self.failed: WeftError | None = None
        self._step = -1
        meeting = Meeting(number, f"store{self.name}", "", self.name) if len(world.replicas) > 1 else None
        self.group = Group(
            self,
            world.replicas[number],
            self.name,
            load=world.rng.uniform(0.1, 5.0),
            meeting=meeting,
            leases=world.leases,
            budget=RestartBudget(1000, 1.0),
            lag=world.rng.choice((0, 1)),
        )
        self.group.start()

    @property
    def over(self) -> bool:
        """Return True if the engine runs or has given up."""
        return self.failed is not None or self.group.running

    def group_runs(self) -> None:
        self.world.at(self.world.now, self, self._launch)

    def group_lost(self) -> None:
        pass

    def group_failed(self, error: WeftError) -> None:
        self.failed = error

    def step_counts(self) -> None:
        self.world.count("settled")
        self.group.check_count(self._step, self.group.membership.epoch)
        self.world.at(self.world.now, self, self._launch)

    def _launch(self) -> None:
        if self.group.running and self.failed is None:
            self._step += 1
            step = self._step
            seconds = self.world.rng.uniform(0.05, 0.15)
            self.group.launch(Work(self.group.membership.epoch, step, seconds, step * 7, lambda _: step * 7))
            self.group.wait_for(step)


class World(Timeline):
    """Hosts, ranks and heads, to which something happens for a while."""

    def __init__(self, seed: int, tensor: int = 3, replicas: int = 1, faults: float = 60.0) -> None:
        """``faults``: seconds in which anything may fail; from then on nothing does."""
        super().__init__(seed)
        self.until = faults
        self.leases: list[Lease | None] = [None] * replicas
        shared = Collectives(self, patience_of(PACE), 0.2)
        self.replicas: list[Replica] = []
        for number in range(replicas):
            ranks = range(number * tensor, (number + 1) * tensor)
            remote = frozenset(rank for rank in ranks[1:] if self.rng.random() < 0.3)
            replica = Replica(
                self, str(number), ranks, collectives=shared, mishaps=self, remote=remote, pace=PACE
            )
            replica.size = tensor * replicas
            self.replicas.append(replica)
        for replica in self.replicas:
            replica.expert_group = self.replicas
            replica.start_remote()
        self.engines = [Engine(self, number, 0) for number in range(replicas)]
        self.at(1.0, None, self._befall)

    def run(self, until: float) -> bool:
        """Run until ``until``, or later until every engine runs or has given up after the last fault."""
        while self._heap and self._heap[0][0] <= until:
            self.advance()
            if self.now > self.until and all(engine.over for engine in self.engines):
                return True
        return all(engine.over for engine in self.engines)

    # ---- mishaps

    def befalls(self, kind: str, rank: int) -> bool:
        """See ``Mishaps``."""
        return self.now < self.until and self.rng.random() < CHANCES[kind]

    def seen(self, kind: str) -> None:
        """See ``Mishaps``."""
        self.count(kind)

    def _befall(self) -> None:
        """Something goes wrong."""
        if self.now >= self.until:
            return
        rng = self.rng
        self.at(self.now + rng.expovariate(1 / 4.0), None, self._befall)
        self.count("faults")
        kind = rng.choice(("die", "die", "stop", "raise", "late", "lost", "head"))
        if kind == "head":
            self._behead(rng.choice(self.engines))
            return
        awake = [
            process
            for replica in self.replicas
            for process in replica.living.values()
            if process.stalled_until <= self.now
        ]
        if awake:
            self._hit(kind, rng.choice(awake))

    def _hit(self, kind: str, process: RankProcess) -> None:
        rng = self.rng
        if kind == "die":
            process.end()
        elif kind == "stop" and rng.random() < 0.5:
            process.stop(rng.uniform(1.0, 15.0))
        elif kind == "stop":
            process.stop(1e6)
            if process.rank in process.replica.remote:  # ended by its own host
                self.at(self.now + PACE.timeout, None, process.end)
        elif kind == "raise":
            process.fail(collective=False)
        elif kind == "late":
            process.delay_reports(rng.uniform(0.0, 12.0))
        else:
            process.loses_report = True

    def _behead(self, engine: Engine) -> None:
        """Kill an engine and start another. Its ranks keep their weights and register again."""
        self.count("heads")
        engine.group.end(None)
        engine.alive = False
        self.engines[engine.number] = Engine(self, engine.number, engine.incarnation + 1)
