"""The loop of a worker rank: receives a step, checks the step, executes the step, reports the outcome.

    no epoch ──Form──► running ──Abort, or a failure of this rank──► no epoch ──Form──► ...
                          ├── StepFrame: the step number and the slot digest must be as expected
                          └── LateMasks: must directly follow the StepFrame of a constrained step

A worker decides nothing. The worker reports every failure to the engine process. Then the worker keeps the
weights and waits for the next epoch, in which all slots are empty. After the loss of the engine process, a
worker can join another engine process.

Transfers to and from other groups outlast epochs: the engine process starts and stops each transfer. Reports
go only to the engine process that started the transfer. A rank stops all transfers before joining another
engine process.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, get_args

from weft.common.errors import EngineDead, WeftError, known_error
from weft.common.log import get_logger
from weft.engine.ranks.executor import RankRunner, checksum, moves
from weft.engine.ranks.step_pixels import opened
from weft.engine.ranks.worker_tier import WorkerTier
from weft.engine.ranks.worker_transfers import WorkerTransfers
from weft.engine.weights.rank_weights import RankWeights
from weft.group.liveness import COLLECTIVE
from weft.group.sizes import blocks_of
from weft.kv.digest import SlotDigest
from weft.parallel.control import PeerGone, RankChannel
from weft.parallel.group_comm import CommLost
from weft.parallel.mesh import Mesh
from weft.parallel.store import join_store
from weft.runner.step_handle import StepHandle
from weft.runner.tier_thread import tier_of
from weft.types import frames as f
from weft.types.tiers import TierCommand
from weft.types.weights import FreeMemory, StageWeights, SwapWeights, WeightsToRank

log = get_logger(__name__)

_IDLE = 0.5
"""Seconds of one wait for frames while no step runs."""
_BUSY = 0.0005
"""Seconds of one wait for frames while a step runs."""


class GivenUp(EngineDead):
    """Raised when the engine process has refused or dropped the rank, or when the process cannot serve any
    engine.
    """


class Worker:
    """The loop of one worker rank. ``run`` calls ``turn``, which handles one frame or result."""

    def __init__(
        self,
        rank: int,
        runner: RankRunner,
        mesh: Mesh,
        channel: RankChannel,
        *,
        rank_timeout: float = 10.0,
        incarnation: str = "",
        look: Callable[[bool], None] = lambda idle: None,
    ) -> None:
        """``runner``, ``mesh``, ``channel``: closed by ``close``. ``rank_timeout``: seconds; the deadlines
        for a connection are multiples of ``rank_timeout``. ``incarnation``: identifies the engine process at
        the other end of ``channel``. ``look``: called between frames, with True if no frame came for
        ``_IDLE`` seconds."""
        self._between_frames = look
        self.rank = rank
        self._runner = runner
        self._mesh = mesh
        self._timeout = rank_timeout
        self._channel = channel
        self._incarnation = incarnation
        self._digest = SlotDigest(runner.kv.num_slots, len(runner.kv.pools))
        self._in_flight: deque[StepHandle] = deque()
        self._unsampled: StepHandle | None = None
        """Newest step in flight while awaiting masks; else None."""
        self._store: Any = None
        self.epoch = -1
        """Current epoch, or the last epoch; -1 before the first."""
        self._running = False
        self._next: int | None = None
        """Number of the next step of the epoch; None before the first step."""
        self.step = -1
        """Last step completed on the rank; -1 before the first."""
        self.stopped = False
        """True after a Shutdown from the engine process."""
        self._orphan = False
        self._served = False
        """True if the current engine process has begun an epoch."""
        self._transfers: dict[f.Cache, WorkerTransfers] = {
            cache: WorkerTransfers(rank, cache) for cache in get_args(f.Cache)
        }
        self._tier = WorkerTier(rank)
        both = (runner.reports, None if runner.embeddings is None else runner.embeddings.reports)
        self._weights: RankWeights | None = getattr(runner, "weights", None)
        self._wake = [reports.descriptor for reports in (*both, tier_of(runner)) if reports is not None]
        self._wake += [] if self._weights is None else [self._weights.wakeup.descriptor]

    # ---- the loop

    def run(self) -> None:
        """Work until the engine process sends Shutdown (``stopped``) or is gone. After the loss of the engine
        process, ``join`` may follow.

        Raises EngineDead when the engine process refuses the rank.
        """
        embeddings = None if self._runner.embeddings is None else self._runner.embeddings.endpoint
        ready = f.Ready(rank=self.rank, endpoint=self._runner.endpoint, embeddings=embeddings)
        self._channel.send(f.encode(ready))
        while not self.stopped and not self._orphan:
            busy = self.turn(_BUSY if self._in_flight else _IDLE)
            self._between_frames(not busy and not self._in_flight)  # steps of a request follow within `_IDLE`
        self._leave()

    def join(self, channel: RankChannel, incarnation: str) -> None:
        """Work for another engine process, which has welcomed the rank.

        First stop all transfers: no transfer of the old engine process may touch the caches when the new
        engine reads Loaded. Raises EngineDead when a transfer does not end. The caller must then end the
        process.
        """
        self._leave()
        self._channel = channel
        self._incarnation = incarnation
        self._orphan = self._served = False
        for cache, transfers in self._transfers.items():
            transfers.joined(moves(self._runner, cache)[0])
        self._tier.joined(tier_of(self._runner))
        self._send(f.Loaded(rank=self.rank, blocks=blocks_of(self._runner.kv)))

    def turn(self, wait: float = 0.0) -> bool:
        """Report a completed step or handle one frame.

        Block up to ``wait`` seconds for a frame. Return False if there was neither a step, a frame nor a
        transfer report.

        Raises GivenUp, PeerGone and the errors of ``_attempt``. Other errors are reported to the engine
        process.
        """
        # Report a completed step before waiting for further frames.
        if self._in_flight and self._runner.done(self._in_flight[0]):
            self._attempt(self._answer)
            return True
        reported = self._send_reports()
        data = self._channel.receive(0.0 if reported else wait, self._wake)
        if data is None:
            return reported or self._send_reports()
        self._attempt(lambda: self._take(f.decode_to_rank(data)))
        return True

    def close(self) -> None:
        """Free all resources."""
        self._leave()
        self._runner.close()
        self._mesh.close()
        self._channel.close()

    # ---- from the watch's thread

    def heartbeat(self) -> f.RankHeartbeat:
        epoch = self.epoch if self._served else -1
        return f.RankHeartbeat(rank=self.rank, epoch=epoch, step=self.step, incarnation=self._incarnation)

    def ended(self, epoch: int) -> bool:
        """Abort collectives of an ended epoch, which cannot complete. Return True if the rank is still in the
        epoch.
        """
        late = self._running and epoch >= self.epoch
        if late:
            self._mesh.abort()
        return late

    def orphaned(self) -> None:
        """Stop the loop after the loss of the engine process."""
        self._orphan = True
        self._mesh.abort()

    # ---- frames. Frames without a slot come first: no lookup is needed.

    def _take(self, frame: f.ToRank) -> None:
        """Execute one frame of the engine process.

        Raises GivenUp after Refused, and EngineDead for a frame out of order.
        """
        # RankWelcome and RankHeartbeat have no branch: the join and the heartbeat thread handle these frames.
        if isinstance(frame, f.RankShutdown):
            self.stopped = True
        elif isinstance(frame, f.RankRefused):
            raise GivenUp(f"this rank was rejected: {frame.error.message}")
        elif isinstance(frame, f.Abort):
            # Ignore a late Abort of an earlier epoch.
            if frame.epoch >= self.epoch:
                self._leave()
        elif isinstance(frame, f.Pools):
            self._check_pools(frame)
        elif isinstance(frame, f.Form):
            self._form(frame)
        elif isinstance(frame, f.StepFrame):
            self._step(frame)
        elif isinstance(frame, f.TransferToRank):
            self._transfers[frame.cache].take(frame, moves(self._runner, frame.cache)[0])
        elif isinstance(frame, TierCommand):
            self._tier.take(frame, tier_of(self._runner))
        elif isinstance(frame, WeightsToRank):
            self._take_weights(frame)
        elif isinstance(frame, f.LateMasks):
            self._sample(frame)

    def _send_reports(self) -> bool:
        """Send the reports of the rank's transfers to the engine process. Return False if there were none.

        Raises GivenUp when the transfer thread has failed. A new process can transfer again.
        """
        any_reports = False
        for cache, transfers in self._transfers.items():
            transfer, reports, _ = moves(self._runner, cache)
            if transfer is None or reports is None:
                continue
            if transfer.failure is not None:
                raise GivenUp("this rank's KV transfer thread has failed")
            taken = reports.take()
            any_reports |= bool(taken)
            for frame in transfers.frames_of(taken):
                self._send(frame)
        for copied in self._tier.frames_of(tier_of(self._runner)):
            any_reports = True
            self._send(copied)
        if self._weights is not None and (report := self._weights.report()) is not None:
            any_reports = True
            self._send(report)
        return any_reports

    def _take_weights(self, frame: WeightsToRank) -> None:
        """Execute one frame about the weights: begin to read new weights, use the read weights, drop the read
        weights, or free memory.

        Raises EngineDead if the weights to use were not read, or if the runner takes no new weights."""
        weights = self._weights
        if weights is None:
            raise EngineDead("this rank takes no new weights")
        if isinstance(frame, StageWeights):
            weights.stage(frame.update)
        elif isinstance(frame, SwapWeights):
            while self._in_flight:
                self._answer()
            self._send(weights.swap(frame.version))
        elif isinstance(frame, FreeMemory):
            while self._in_flight:
                self._answer()
            self._send(weights.free(frame.weights))
        else:
            weights.drop()

    def _check_pools(self, frame: f.Pools) -> None:
        """Check the pools against the sizes of the engine. Raises GivenUp if a pool is smaller or missing."""
        local = blocks_of(self._runner.kv)
        if len(frame.blocks) != len(local) or any(a > b for a, b in zip(frame.blocks, local, strict=True)):
            raise GivenUp(
                f"the engine's KV cache has {list(frame.blocks)} blocks, this rank's has {list(local)}"
            )

    def _form(self, frame: f.Form) -> None:
        """Leave the present epoch, connect the communicators of the new epoch and send Formed. Blocks.

        All slots are empty then. Raises EngineDead for an epoch that does not follow, and CommLost.
        """
        self._leave()
        if frame.epoch <= self.epoch:
            raise EngineDead(f"epoch {frame.epoch} cannot follow epoch {self.epoch}")
        version = 0 if self._weights is None else self._weights.version
        if frame.weights != version:
            raise GivenUp(f"the group has version {frame.weights} of the weights, this rank {version}")
        self.epoch = frame.epoch
        self._next = None
        self._served = True
        self._digest.clear()
        self._runner.reset()
        # Set before connecting: the end of the epoch must abort the connection attempt, too.
        self._running = True
        patience = COLLECTIVE * self._timeout
        if frame.store:
            self._store = join_store(frame.store, patience)
        self._mesh.connect(self._store, frame.epoch, patience)
        self._send(f.Formed(rank=self.rank, epoch=frame.epoch))

    def _step(self, frame: f.StepFrame) -> None:
        """Check a step frame, launch the forward pass, and sample unless masks are due.

        A step already complete is reported at once.

        A late frame of another epoch is dropped. Raises EngineDead for a frame out of order or another slot
        digest.
        """
        if not self._current(frame.epoch):
            return
        # Every check below finds a lost, repeated or reordered frame, or a difference of slot tables.
        if self._unsampled is not None:
            raise EngineDead(f"received step {frame.step} instead of the masks of step {frame.step - 1}")
        if self._next is not None and frame.step != self._next:
            raise EngineDead(f"received step {frame.step} instead of step {self._next}")
        if frame.plan.step != frame.step:
            raise EngineDead(f"the frame of step {frame.step} holds the plan of step {frame.plan.step}")
        digest = self._digest.take(frame.plan)
        if digest != frame.digest:
            raise EngineDead(
                f"the slot tables differ at step {frame.step}: digest {frame.digest:016x} at the engine, "
                f"{digest:016x} here"
            )
        self._next = frame.step + 1
        handle = self._runner.forward(opened(frame.plan))
        self._in_flight.append(handle)
        if frame.plan.constrained:
            self._unsampled = handle
            return
        self._runner.sample(handle)
        if self._runner.done(handle):
            self._answer()

    def _sample(self, frame: f.LateMasks) -> None:
        """Sample the constrained step that awaits the masks of ``frame``.

        A late frame is dropped. Raises EngineDead for a step without need of masks.
        """
        if not self._current(frame.epoch):
            return
        handle = self._unsampled
        if handle is None or handle.plan.step != frame.step:
            raise EngineDead(f"received masks of step {frame.step}, which needs none")
        self._unsampled = None
        self._runner.sample(handle, frame.masks)

    def _answer(self) -> None:
        """Block until the oldest step in flight has ended, and send its StepOutcome."""
        result = self._runner.read(self._in_flight.popleft())
        self.step = result.step
        self._send(
            f.StepOutcome(rank=self.rank, epoch=self.epoch, step=result.step, checksum=checksum(result))
        )

    def _current(self, epoch: int) -> bool:
        """Return True if frames of ``epoch`` concern the running epoch. Late frames are dropped: the engine
        process has ended, or will end, the epoch.
        """
        return self._running and epoch == self.epoch

    # ---- failing

    def _attempt(self, work: Callable[[], None]) -> None:
        """Run ``work()``. Report an error to the engine process and leave the epoch. Raises GivenUp and
        PeerGone, and any error after a Shutdown or before the first epoch.
        """
        try:
            work()
        except Exception as error:
            if self.stopped or isinstance(error, PeerGone | GivenUp):
                raise
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        """Log an error, leave the epoch and send Failed to the engine process.

        Before the first epoch, raise the error instead.
        """
        known = known_error(error)
        was_running = self._running
        log.error("rank %d: %s", self.rank, known.message, exc_info=not isinstance(error, WeftError))
        self._leave()
        # Without any epoch there is nothing to continue: the process ends.
        if not was_running and self.epoch < 0:
            raise known from error
        step = self.step + 1
        lost = isinstance(error, CommLost)
        self._send(f.RankFailed(rank=self.rank, epoch=self.epoch, step=step, error=known.info(), comm=lost))

    def _leave(self) -> None:
        """Leave the epoch: abort communicators, wait for the steps in flight and drop the results.

        Errors are logged. Idempotent.
        """
        self._running = False
        self._unsampled = None
        self._mesh.abort()
        while self._in_flight:
            try:
                self._runner.read(self._in_flight.popleft())
            except Exception as error:
                log.info("rank %d: a step in flight ended with its epoch: %s", self.rank, error)

    def _send(self, frame: f.ToEngine) -> None:
        self._channel.send(f.encode(frame))
