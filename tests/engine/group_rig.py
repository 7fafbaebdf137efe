"""An engine and workers in one process, on the loopback channel and a virtual clock.

The scheduler, the executor and the workers are real. Each rank has a fake runner instead of a model, and a
real slot table beside the fake runner.
"""

from __future__ import annotations

from collections import deque
from concurrent.futures import Executor, Future
from typing import Any

import torch

from tests.scheduler.fake_runner import VOCAB, FakeRunner
from tests.scheduler.harness import Rig
from weft.common.clock import VirtualClock
from weft.common.restarts import RestartBudget
from weft.config.resolved import KVConfig
from weft.engine.group import GroupExecutor
from weft.engine.group_links import GroupLinks, Share
from weft.engine.ranks.worker import Worker
from weft.group.membership import Membership
from weft.group.sizes import blocks_of, sized
from weft.group.types import GroupLost
from weft.parallel.loopback import LinkFault, Loopback
from weft.parallel.mesh import Mesh
from weft.runner.exports import RankTransfers, Reports, TransferThread
from weft.runner.slot_state import SlotState
from weft.runner.step_handle import StepHandle
from weft.types import frames as f
from weft.types.plan import StepPlan, StepResult, TokenMasks
from weft.types.transfer import Endpoint

SETTINGS = {"scheduler.max_num_seqs": "8", "dtype": '"float64"'}
TIMEOUT = 10.0


class TableRunner:
    """Keeps the slot tables and samples a function of the history, without a model."""

    graphs = None
    drafter = None
    varying: tuple[str, ...] = ()
    transfer: TransferThread | None = None
    reports: Reports | None = None
    endpoint: Endpoint | None = None
    embeddings: RankTransfers | None = None

    def __init__(self, kv: KVConfig, commits: dict[int, int], fake: FakeRunner | None = None) -> None:
        """Make a runner. ``commits``: step -> last committed step when the step was planned."""
        self.kv = kv
        self.commits = commits
        self.fake = fake or FakeRunner(kv)
        self.state = SlotState(kv, torch.device("cpu"))
        self.closed = False
        self.resets = 0
        self.masks: dict[int, TokenMasks | None] = {}
        """Step -> masks of the step."""

    def forward(self, plan: StepPlan) -> StepHandle:
        handle = StepHandle(plan=plan, launched=0.0, forwarded=Future())
        try:
            handle.forwarded.set_result(self._launch(plan))
        except Exception as error:
            handle.forwarded.set_exception(error)
        return handle

    def _launch(self, plan: StepPlan) -> StepResult:
        for op in plan.ops:
            self.state.apply(op)
        self.state.validate(plan.prefill)
        self.state.validate(plan.decode)
        for step in [s for s in self.fake.named if s <= self.commits[plan.step]]:
            self.fake.committed(step)
        return self.fake.launch(plan)

    def sample(self, handle: StepHandle, masks: TokenMasks | None = None) -> None:
        if masks is not None:
            masks.check(handle.plan, VOCAB)
        self.masks[handle.plan.step] = masks
        handle.sampled = handle.forwarded

    def done(self, handle: StepHandle) -> bool:
        return handle.sampled is not None

    def read(self, handle: StepHandle) -> StepResult:
        result: StepResult = handle.forwarded.result()
        return result

    def reset(self) -> None:
        self.resets += 1
        self.state.clear()
        self.fake = self.fake.anew()

    def close(self) -> None:
        self.closed = True

    def table(self) -> dict[int, tuple[Any, ...]]:
        """Return the complete state of each live slot."""
        made: dict[int, tuple[Any, ...]] = {}
        for slot, occupant in sorted(self.fake.in_slot.items()):
            entries = self.state._entries[:, slot].tolist()
            blocks = [t[slot, :n].tolist() for t, n in zip(self.state.tables, entries, strict=True)]
            assert self.state._live[slot]
            kept = (occupant.history, occupant.num_computed, occupant.tables, occupant.live, occupant.op.seed)
            made[slot] = (int(self.state._gen[slot]), occupant.gen, entries, blocks, *kept)
        assert int(self.state._live.sum()) == len(made)
        return made


class Inline(Executor):
    """Runs each task at once."""

    def submit(self, work: Any, /, *args: Any, **more: Any) -> Future[Any]:
        done: Future[Any] = Future()
        done.set_result(work(*args, **more))
        return done


class Ranks:
    """The group: the engine's rank and ``workers`` further ranks."""

    def __init__(
        self,
        kv: KVConfig,
        workers: int = 3,
        faults: tuple[LinkFault, ...] = (),
        transfers: dict[int, tuple[int, ...]] | None = None,
    ) -> None:
        """Start the ranks. ``transfers``: rank -> number of blocks of each pool, where different from
        ``kv``."""
        self.kv = kv
        self.transfers = transfers or {}
        self.clock = VirtualClock()
        self.net = Loopback(self.clock, faults)
        self.commits: dict[int, int] = {}
        self.runners = {rank: TableRunner(kv, self.commits) for rank in range(workers + 1)}
        self.workers: dict[int, Worker] = {}
        self.right = 0.7
        self.incarnations = dict.fromkeys(range(1, workers + 1), 0)
        self.engines = 0
        self.books: Any = None
        """The supervisor of rank processes, if the test has one."""
        for rank in self.incarnations:
            self.start(rank)

    def up(self) -> None:
        """Start an engine and run until the first epoch is formed."""
        self.engines += 1
        membership = Membership(
            0,
            dict.fromkeys(self.incarnations, self.books is not None),
            settings=SETTINGS,
            rank_timeout=TIMEOUT,
            incarnation=f"head {self.engines}",
            budget=RestartBudget(1000, 1.0),
            hello_s=TIMEOUT,
            load_s=TIMEOUT,
        )
        self.engine = GroupExecutor(
            membership,
            lambda: Share(self.kv, self._runner),
            GroupLinks(channel=self.net.engine(), processes=self.books),
            rank_timeout=TIMEOUT,
            clock=self.clock,
            carrier=Inline(),
        )

    def _runner(self, kv: KVConfig) -> TableRunner:
        self.runners[0].kv = kv
        return self.runners[0]

    @property
    def epoch(self) -> int:
        return self.engine.membership.epoch

    def behead(self) -> None:
        """Replace the engine by an empty one. The workers register with the new engine."""
        self.net = Loopback(self.clock)
        self.runners[0] = TableRunner(self.kv, self.commits, FakeRunner(self.kv, right=self.right))
        for rank, worker in self.workers.items():
            self.incarnations[rank] += 1
            self.start(rank, worker=worker)

    def peer(self, rank: int) -> bytes:
        """Return the address of the rank's current incarnation."""
        return b"%d.%d" % (rank, self.incarnations[rank])

    def start(
        self,
        rank: int,
        settings: dict[str, str] | None = None,
        version: int = f.VERSION,
        worker: Worker | None = None,
    ) -> None:
        """Start a process of ``rank``, or use ``worker`` without an engine. The process registers and then
        works."""
        channel = self.net.rank(self.peer(rank))
        hello = f.RankHello(
            version=version,
            release="test",
            rank=rank,
            pid=1,
            epoch=-1 if worker is None else worker.epoch,
            settings=SETTINGS if settings is None else settings,
        )
        channel.send(f.encode(hello))
        state: dict[str, Worker] = {}
        engines: list[str] = []
        old = worker

        def turn() -> bool:
            if "worker" in state:
                did = state["worker"].turn()
                if state["worker"].stopped:
                    state["worker"].close()
                return did
            data = channel.receive(0)
            if data is None:
                return False
            answer = f.decode_to_rank(data)
            runner = self.runners[rank]
            if isinstance(answer, f.RankWelcome) and old is None:
                engines.append(answer.incarnation)
                blocks = self.transfers.get(rank, blocks_of(self.kv))
                channel.send(f.encode(f.Loaded(rank=rank, blocks=blocks)))
                return True
            if isinstance(answer, f.RankWelcome) and old is not None:
                old.join(channel, answer.incarnation)
                made = old
            elif isinstance(answer, f.Pools):
                runner.kv = sized(self.kv, answer.blocks)
                made = Worker(rank, runner, Mesh(), channel, rank_timeout=TIMEOUT, incarnation=engines[0])
            else:
                return True
            self.workers[rank] = state["worker"] = made
            own = None if runner.embeddings is None else runner.embeddings.endpoint
            channel.send(f.encode(f.Ready(rank=rank, endpoint=runner.endpoint, embeddings=own)))
            return True

        self.net.drive(self.peer(rank), turn)

    def restart(self, rank: int) -> None:
        """Kill the process of the rank and start an empty process."""
        self.kill(rank)
        self.runners[rank] = TableRunner(self.kv, self.commits, FakeRunner(self.kv, right=self.right))
        self.incarnations[rank] += 1
        self.start(rank)

    def kill(self, rank: int) -> None:
        """End the process of the rank without a notification."""
        self.net.cut(self.peer(rank))

    def settle(self) -> None:
        """Let every rank process all received messages."""
        while self.net.turn():
            pass

    def check_equal(self) -> None:
        """Check that the tables of all ranks are equal."""
        self.settle()
        expected = self.runners[0].table()
        for rank in self.incarnations:
            assert self.runners[rank].table() == expected, f"the table of rank {rank} differs"


class GroupRig(Rig):
    """A ``Rig`` whose plans are executed by a group."""

    def join(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self.handles: deque[StepHandle] = deque()
        self.last_commit = -1
        ranks.right = self.runner.right
        for runner in ranks.runners.values():
            runner.fake.right = self.runner.right
        self.runner = ranks.runners[0].fake

    def plan(self) -> StepPlan | None:
        plan = self.scheduler.plan(0.0)
        if plan is None:
            return None
        self._check_shape(plan)
        self.plans.append(plan)
        self.ranks.commits[plan.step] = self.last_commit
        handle = self.ranks.engine.forward(plan)
        if not plan.constrained:
            self.ranks.engine.sample(handle)
        self.in_flight.append((plan, None))  # type: ignore[arg-type]
        self.handles.append(handle)
        self.mask()
        return plan

    def mask(self) -> None:
        super().mask()
        if self.handles and self.handles[0].sampled is None:
            self.ranks.engine.sample(self.handles[0], self.masks[self.handles[0].plan.step])

    def commit(self) -> None:
        result = self.ranks.engine.read(self.handles[0])
        handle = self.handles.popleft()
        self.in_flight.popleft()
        self.last_commit = result.step
        self.collect(self.scheduler.commit(handle.plan, result, 0.0))
        self.mask()

    def recover(self, lost: GroupLost | None = None) -> None:
        """Recover as an engine does: restart the lost rank and keep the other ranks with their memory."""
        ranks = self.ranks
        if lost is not None and lost.rank:
            ranks.restart(lost.rank)
            ranks.engine._turn(0.0)
        self.in_flight.clear()
        self.handles.clear()
        ranks.engine.recover(lost or GroupLost(None, "planted"))
        while not ranks.engine.recovered(TIMEOUT):
            pass
        self.resume()

    def resume(self) -> None:
        """Continue after a new epoch was formed, perhaps under another engine."""
        ranks = self.ranks
        self.in_flight.clear()
        self.handles.clear()
        self.scheduler.requeue_all()
        self.runner = ranks.runners[0].fake
