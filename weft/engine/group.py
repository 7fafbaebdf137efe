"""The head's side of a group: an executor whose every step is carried out by all ranks.

    forward(plan)    digest, one frame to every rank, then this rank's own Runner
    sample(handle)
    read(handle)     this rank's result, and every rank's outcome of the step before: a rank that failed, fell
                     silent or sampled something else raises GroupLost

The tokens of a step leave before the other ranks' outcomes of it are in; those are there before the next
step's leave. A group of one rank sends and waits for nothing.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any, TypeVar

from weft.common.clock import Clock, SystemClock
from weft.common.errors import EngineDead, WeftError
from weft.common.log import get_logger
from weft.config.resolved import KVConfig
from weft.engine.executor import GroupLost, OfRunner, RankRunner, checksum
from weft.engine.peers import Peers
from weft.engine.ranks import Ranks
from weft.engine.regroup import regroup
from weft.engine.sizes import Sizes
from weft.engine.watch import COLLECTIVE, GRACE, HeadWatch
from weft.kv.digest import SlotDigest
from weft.parallel.control import HeadChannel, PeerGone
from weft.parallel.group import CommLost
from weft.parallel.mesh import Mesh
from weft.parallel.store import host_store, join_store
from weft.runner.runner import StepHandle
from weft.types import frames as f
from weft.types.plan import StepPlan, StepResult

log = get_logger(__name__)

LAG = 1
"""How many steps the other ranks' outcomes may be behind the result that ``read`` returns."""
_TURN = 0.05
"""Seconds of one wait for frames; between two of them, what the watch found is looked at."""

R = TypeVar("R")


class GroupExecutor(OfRunner):
    """A group's head. Not thread-safe, but for ``lose``. It is an ``Executor``.

    After ``form`` it takes steps. When GroupLost was raised the epoch has ended on this rank and those that
    can be reached; whoever recovers replaces processes, calls ``gather`` and forms the next epoch.
    """

    def __init__(
        self,
        runner: RankRunner | None,
        mesh: Mesh,
        channel: HeadChannel,
        ranks: Sequence[int],
        *,
        settings: Mapping[str, str],
        rank: int = 0,
        rank_timeout: float = 10.0,
        clock: Clock | None = None,
        beats: str = "",
        store_folder: str = "",
        store_host: str | None = None,
    ) -> None:
        """``ranks``: the workers, numbers in the domain; ``rank``: this one's. ``runner`` may be given later,
        with ``adopt``. ``beats``: the address that ranks beat to. Epochs meet at a file in ``store_folder``
        or a port of ``store_host``.
        """
        self._mesh, self._channel = mesh, channel
        self.ranks, self.rank = tuple(ranks), rank
        self._timeout = rank_timeout
        self._clock = clock or SystemClock()
        self._store_folder, self._store_host = store_folder, store_host
        self._store: Any = None
        self.watch: HeadWatch | None = None
        self.processes: Ranks | None = None
        """Of the workers on this host; None where there are none."""
        self.on_close: Callable[[], None] = lambda: None
        if runner is not None:
            self.adopt(runner)
        self._life = secrets.token_hex(8)
        self._peers = Peers(channel, self.ranks, settings, beats, self._life)
        self._sizes = Sizes(self._peers.tell)
        self._dismiss = True
        self.epoch = -1
        """The one that runs, or ran last; -1 before the first."""
        self.step = -1
        """The last one that ended on this rank."""
        self._aborted = -1
        self._formed: dict[int, None] = {}
        self._outcomes: dict[int, dict[int, int]] = {}
        """Step -> rank -> checksum, of steps that are not settled; this rank's own among them."""
        self._results: dict[int, StepResult] = {}
        self._victims: dict[int, str] = {}
        """Ranks whose collectives failed in this epoch: somebody's fault, not theirs."""
        self._failed: dict[int, None] = {}
        """Ranks that told of a failure of their own in this epoch."""
        self._judging = False
        self._lock = threading.Lock()
        self._lost: GroupLost | None = None

    # ---- what a Runner has

    @property
    def runner(self) -> RankRunner:
        """This rank's own."""
        return self._runner

    def adopt(self, runner: RankRunner) -> None:
        """Takes this rank's runner."""
        self._runner = runner
        self._digest = SlotDigest(runner.kv.num_slots, len(runner.kv.pools))

    def forward(self, plan: StepPlan) -> StepHandle:
        """Sends the step to every rank and launches this rank's share.

        Raises GroupLost, and EngineDead for a plan that contradicts the slot table; then nothing was sent.
        """
        self._check()
        if self._aborted >= self.epoch:
            raise EngineDead("a step was planned, and the group is not formed")
        digest = self._digest.take(plan)
        if self.ranks:
            self._pump(0)
            frame = f.encode(f.StepFrame(step=plan.step, epoch=self.epoch, plan=plan, digest=digest))
            for rank in self.ranks:
                self._send(rank, frame)
        return self._guard(lambda: self._runner.forward(plan))

    def sample(self, handle: StepHandle) -> None:
        """Launches the step's sampling on this rank; the others sample when they have computed."""
        self._guard(lambda: self._runner.sample(handle))

    def read(self, handle: StepHandle) -> StepResult:
        """Waits for the step here, and for the one before it everywhere. Raises GroupLost.

        When an interrupt cut the wait short, it can be called again.
        """
        step = handle.plan.step
        if step not in self._results:
            result = self._guard(lambda: self._runner.read(handle))
            self._results[step] = result
            self._outcomes.setdefault(step, {})[self.rank] = checksum(result)
            self.step = step
        self._settle(step - LAG)
        return self._results.pop(step)

    def settle(self) -> None:
        """Waits for every rank's outcome of what was read here. Raises GroupLost."""
        self._settle(self.step)

    def check(self) -> None:
        """Looks after the ranks while nothing is computed; does not wait. Raises GroupLost."""
        if self.ranks:
            self._check()
            self._pump(0)

    def recover(self, lost: EngineDead) -> None:
        """See ``Executor``."""
        regroup(self, lost if isinstance(lost, GroupLost) else GroupLost(None, lost.message))

    def interrupt(self) -> None:
        """See ``Executor``."""
        self.lose(None, "the engine is closed")

    def leave_ranks(self) -> None:
        """When this head closes, ranks keep their weights for the next one, if anybody keeps the ranks."""
        self._dismiss = self.processes is None or not self.processes.outlive

    def close(self) -> None:
        """Waits for the outcomes that are missing, has every rank end, and ends."""
        try:
            if self._dismiss and self._lost is None and self.epoch > self._aborted:
                self.settle()
        except EngineDead as error:
            log.warning("while closing: %s", error.message)
        self._peers.tell_all(f.Shutdown() if self._dismiss else f.Abort(epoch=self.epoch))
        if self.watch is not None:
            self.watch.relax()
        self._mesh.abort()
        self._runner.close()
        self._mesh.close()
        self._channel.close()
        self.on_close()

    # ---- forming

    def knows(self, rank: int) -> bool:
        """Whether the rank's process is welcome."""
        return rank in self._peers

    def gather(self, timeout: float, ready: bool = True, ranks: Sequence[int] | None = None) -> None:
        """Waits until every rank (of ``ranks``) is welcome and, with ``ready``, has its weights.

        What was lost before is forgotten: whoever calls has replaced it.
        Raises ConfigError when a rank's version or settings differ from the head's, and GroupLost.
        """
        with self._lock:
            self._lost = None
        if self.watch is not None:
            loading = [rank for rank in self.ranks if rank not in self._peers.ready]
            self.watch.expect(self._peers.ready, loading)
        self._await(self._peers.ready if ready else self._peers, timeout, "come", ranks)

    def size(self, kv: KVConfig, timeout: float) -> KVConfig:
        """``kv`` with pools that every rank has room for; the ranks, which have been gathered, are told.

        Waits until all have loaded their weights, ``timeout`` seconds for each. Raises GroupLost.
        """
        self._await(self._sizes, timeout, "load")
        return self._sizes.agree(kv, self.ranks)

    def _await(
        self, those: Container[int], timeout: float, what: str, ranks: Sequence[int] | None = None
    ) -> None:
        """Takes in frames until all ranks (or ``ranks``) are among ``those``. Raises GroupLost."""
        wanted = self.ranks if ranks is None else ranks
        until = self._clock.now() + timeout
        while missing := [rank for rank in wanted if rank not in those]:
            if self._clock.now() >= until:
                raise self._end(GroupLost(missing[0], f"it did not {what} within {timeout:g} s"))
            self._check()
            self._pump(min(_TURN, timeout))

    @property
    def next_epoch(self) -> int:
        """One that no rank has been in, under this head or another."""
        return max(self.epoch, self._peers.epoch) + 1

    def form(self, epoch: int, store: str | None = None) -> None:
        """Begins ``epoch`` with empty slots on all ranks, which have been gathered.

        ``store``: where to meet, when another head of the domain hosts it. Raises GroupLost.
        """
        if epoch < self.next_epoch:
            raise EngineDead(f"epoch {epoch} cannot follow epoch {self.next_epoch - 1}")
        with self._lock:
            self.epoch, self._lost = epoch, None
        if self.watch is not None:
            self.watch.expect(self.ranks)
        for kept in (self._formed, self._outcomes, self._results, self._victims, self._failed, self._digest):
            kept.clear()
        patience = COLLECTIVE * self._timeout
        self._guard(lambda: self._meet(epoch, store, patience))
        self._await(self._formed, self._timeout, "form")
        self._peers.strict = False  # from now on a rank that differs is its own affair

    def _meet(self, epoch: int, address: str | None, patience: float) -> None:
        self._runner.reset()
        if self._mesh.connects:
            if address is None:
                name = f"store-{self.rank}-{epoch}"
                self._store, address = host_store(self._store_folder, name, self._store_host, patience)
            else:
                self._store = join_store(address, patience)
        for rank in self.ranks:
            self._send(rank, f.encode(f.Form(epoch=epoch, store=address or "")))
        self._mesh.connect(self._store, epoch, patience)

    # ---- losing

    @property
    def lost(self) -> GroupLost | None:
        """Why the group cannot go on, as soon as it is known; forming anew clears it."""
        return self._lost

    def lose(self, rank: int | None, reason: str) -> None:
        """From any thread: the epoch cannot go on. Whoever waits in a collective of this rank is freed."""
        with self._lock:
            if self._lost is None:
                self._lost = GroupLost(rank, reason)
        self._mesh.abort()

    def at_fault(self, lost: GroupLost) -> int | None:
        """The rank that must be replaced. One that told of its failure has stopped in order: it can go on."""
        told = lost.rank in self._victims or lost.rank in self._failed
        return lost.rank if lost.rank in self.ranks and not told else None

    def beat(self) -> f.Beat:
        """What the watch answers ranks."""
        step, aborted = self.step, self._aborted
        return f.Beat(rank=self.rank, epoch=self.epoch, step=step, life=self._life, aborted=aborted)

    def forget(self, rank: int) -> None:
        """The process of ``rank`` has ended, or must; another one will say hello."""
        self._peers.forget(rank)

    def _check(self) -> None:
        if self._lost is not None:
            raise self._end(self._lost)

    def _end(self, lost: GroupLost) -> GroupLost:
        """Ends the epoch here and everywhere; ``lost``, or what was known before it."""
        with self._lock:
            self._lost = lost = self._lost or lost
        self._mesh.abort()
        if self._aborted < self.epoch:
            self._aborted = self.epoch
            log.error("%s", lost.message)
            self._peers.tell_all(f.Abort(epoch=self.epoch))
        return lost

    def _guard(self, work: Callable[[], R]) -> R:
        """``work()`` of this rank. What it raises ends the epoch, as GroupLost that says who is at fault."""
        try:
            return work()
        except GroupLost as lost:
            raise self._end(lost) from lost
        except CommLost as error:
            raise self._end(self._blame(error)) from error
        except WeftError as error:
            raise self._end(GroupLost(self.rank, error.message)) from error
        except Exception as error:
            raise self._end(GroupLost(self.rank, f"{type(error).__name__}: {error}")) from error

    def _blame(self, error: CommLost) -> GroupLost:
        """Who made a collective fail here: waits a little for a rank that says so, ended, or says nothing."""
        until = self._clock.now() + GRACE * self._timeout
        self._judging = True
        try:
            while self._lost is None and self._clock.now() < until:
                if all(rank in self._victims for rank in self.ranks):
                    return GroupLost(None, error.message)
                self._pump(_TURN)
        except GroupLost as lost:
            return lost
        finally:
            self._judging = False
        silent = [rank for rank in self.ranks if rank not in self._victims]
        return self._lost or GroupLost(silent[0] if len(silent) == 1 else None, error.message)

    # ---- frames

    def _settle(self, step: int) -> None:
        """Waits for every rank's outcome of ``step`` and those before it, and compares them."""
        until = self._clock.now() + COLLECTIVE * self._timeout
        for number in sorted(n for n in self._outcomes if n <= step):
            while missing := [rank for rank in self.ranks if rank not in self._outcomes[number]]:
                self._check()
                if self._clock.now() >= until:
                    why = f"it did not end step {number} within {COLLECTIVE * self._timeout:g} s"
                    raise self._end(GroupLost(missing[0], why))
                self._pump(_TURN)
            sums = self._outcomes.pop(number)
            for rank in self.ranks:
                if sums[rank] != sums[self.rank]:
                    raise self._end(
                        GroupLost(rank, f"it sampled other tokens in step {number} than the head")
                    )

    def _pump(self, wait: float) -> None:
        """Takes in what ranks sent, waiting ``wait`` seconds for the first of it. Raises GroupLost."""
        for peer, message in self._peers.received(wait):
            self._take(peer, message)

    def _take(self, peer: bytes, message: f.ToHead) -> None:
        if isinstance(message, f.RankHello):
            self._hello(peer, message)
        elif isinstance(message, f.Beat) or not self._peers.speaks(peer, message.rank):
            return  # a stranger's, or of a rank's life before
        elif isinstance(message, f.Loaded):
            self._sizes.take(message)
        elif isinstance(message, f.Ready):
            self._peers.ready[message.rank] = None
        elif isinstance(message, f.Failed) and message.epoch < 0:
            refused = message.error.blame == "client"
            raise self._end(GroupLost(message.rank, message.error.message, refused))  # it could not load
        elif message.epoch != self.epoch:
            return
        elif isinstance(message, f.Formed):
            self._formed[message.rank] = None
        elif isinstance(message, f.Outcome):
            self._outcomes.setdefault(message.step, {})[message.rank] = message.checksum
        elif message.comm:
            self._victims[message.rank] = message.error.message
            if self._aborted < self.epoch and not self._judging:
                self._mesh.abort()
                raise self._end(self._blame(CommLost(message.error.message)))
        else:
            self._failed[message.rank] = None
            if self._aborted < self.epoch:
                raise self._end(GroupLost(message.rank, message.error.message))

    def _hello(self, peer: bytes, hello: f.RankHello) -> None:
        if self._peers.hello(peer, hello) and hello.rank in self._formed and self._aborted < self.epoch:
            if hello.epoch < 0:
                raise self._end(GroupLost(hello.rank, "it was started anew"))
            raise self._end(GroupLost(None, f"rank {hello.rank} had lost its head, and is back"))

    def _send(self, rank: int, data: bytes) -> None:
        try:
            self._peers.send(rank, data)
        except PeerGone:
            raise self._end(GroupLost(rank, "it is not connected")) from None
