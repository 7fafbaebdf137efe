"""The worker process after the welcome: loads a share of the model, then works.

A worker outlives the engine process. The process keeps the weights and says hello to the next engine process,
for as long as a rank may wait for the first welcome. The owner of the process ends the worker when no other
engine process will come.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable

import msgspec

from weft.common.errors import EngineDead, known_error
from weft.common.log import get_logger
from weft.config.resolved import EngineConfig, KVConfig
from weft.engine.build import rank_mesh
from weft.engine.build_encoder import load_rank
from weft.engine.cpu_threads import CpuThreads
from weft.engine.ranks.executor import RankRunner
from weft.engine.ranks.fault_injection import Faults
from weft.engine.ranks.watch import RankWatch
from weft.engine.ranks.worker import Worker
from weft.engine.start import mesh_host
from weft.group.sizes import blocks_of, sized
from weft.group.waits import LOAD_S
from weft.parallel.control import EngineLink, RankChannel
from weft.parallel.mesh import Mesh
from weft.types import frames as f

log = get_logger(__name__)

STUCK = 3
"""Exit status of a rank stuck in an ended epoch."""
PATIENCE = 2.0
"""Multiple of ``--rank-timeout`` within which a rank must leave an ended epoch."""
_TURN = 0.5
"""Seconds of one wait for a frame."""


def run_rank(config: EngineConfig, rank: int, link: EngineLink, rejoin: Callable[[int], EngineLink]) -> None:
    """Work for the engine process of ``link``, and for later engines, until shutdown.

    ``rejoin(epoch)`` says hello to the next engine process and returns the link. ``epoch`` is the last epoch
    of the rank. ``rejoin`` raises EngineDead when no engine process comes in time. Raises WeftError also when
    the model cannot be loaded, which is reported to the engine process, or when an engine refuses the rank.
    """
    timeout = config.parallel.rank_timeout
    threads = CpuThreads(config)
    faults = Faults(config.faults, rank)
    mesh = faults.within(rank_mesh(config, rank, mesh_host(config)))
    liveness = _Liveness(rank, link.incarnation, timeout)
    liveness.watch(link)  # before the load, which can take minutes without frames
    try:
        runner = _load(config, link.channel, rank, mesh, faults, liveness)
        if runner is None:
            return
        if link.updates and runner.weights is not None:
            runner.weights.follow(link.updates)
        worker = Worker(
            rank,
            runner,
            mesh,
            link.channel,
            rank_timeout=timeout,
            incarnation=link.incarnation,
            look=threads.look,
        )
        gc.collect()
        gc.freeze()  # the model and all modules live as long as the process: the collector should skip them
        liveness.adopt(worker)
        try:
            worker.run()
            while not worker.stopped:
                log.warning(
                    "rank %d lost its engine process, and keeps its weights for the next engine process", rank
                )
                liveness.close()
                link.channel.close(deliver=False)
                link = rejoin(worker.epoch)
                worker.join(link.channel, link.incarnation)
                liveness.watch(link)
                worker.run()
        finally:
            worker.close()
    finally:
        liveness.close()


def _load(
    config: EngineConfig,
    channel: RankChannel,
    rank: int,
    mesh: Mesh,
    faults: Faults,
    liveness: _Liveness,
) -> RankRunner | None:
    """Load the model and return the rank's runner.

    Blocks until the engine process reports the pool sizes. Return None after a Shutdown, with ``channel``
    closed.

    Errors are reported to the engine process and raised, with ``channel`` closed.
    """
    try:
        faults.reach("load")
        loaded = load_rank(config, progress=False, mesh=mesh)
        kv = ask(channel, rank, loaded.kv, LOAD_S, lambda: liveness.orphan)
        if kv is None:
            channel.close()
            return None
        return faults.around(loaded.runner(kv))
    except Exception as error:
        known = known_error(error)
        channel.send(f.encode(f.RankFailed(rank=rank, epoch=-1, step=-1, error=known.info())))
        channel.close()
        raise


def ask(
    channel: RankChannel, rank: int, kv: KVConfig, timeout: float, orphan: Callable[[], bool]
) -> KVConfig | None:
    """Report how many blocks fit on the rank and return ``kv`` with the engine's pool sizes.

    Return None after a Shutdown. If the engine process is gone, return ``kv`` unchanged. Other frames are
    dropped.

    Raises EngineDead when the engine process refuses the rank or sends no sizes within ``timeout`` seconds.
    """
    channel.send(f.encode(f.Loaded(rank=rank, blocks=blocks_of(kv))))
    until = time.monotonic() + timeout
    while (left := until - time.monotonic()) > 0:
        if orphan():
            # The next engine process uses the minimum of all ranks, so the local sizes are never too small.
            return kv
        data = channel.receive(min(left, _TURN))
        if data is None:
            continue
        frame = f.decode_to_rank(data)
        if isinstance(frame, f.Pools):
            return sized(kv, frame.blocks)
        if isinstance(frame, f.RankShutdown):
            return None
        if isinstance(frame, f.RankRefused):
            raise EngineDead(f"this rank was rejected: {frame.error.message}")
    raise EngineDead(f"the engine sent no KV cache sizes within {timeout:g} s")


class _Liveness:
    """Exchanges heartbeats with the current engine process, also before there is a worker."""

    def __init__(self, rank: int, engine: str, rank_timeout: float) -> None:
        """``engine``: incarnation of the first engine process."""
        self._rank = rank
        self._engine = engine
        self._timeout = rank_timeout
        self._peer = b""
        """Name of the control connection to the present engine."""
        self._stuck_since: float | None = None
        self._worker: Worker | None = None
        self._watch: RankWatch | None = None
        self.orphan = False
        """True after the loss of the engine process."""

    def watch(self, link: EngineLink) -> None:
        """Start to send heartbeats to the engine process of ``link``, and reset ``orphan``.

        Without a heartbeat channel, only reset.
        """
        self.orphan = False
        self._stuck_since = None
        self._peer = link.channel.peer
        if link.heartbeats is not None:
            self._watch = RankWatch(link.heartbeats, self._timeout, self.heartbeat, self.ended, self.orphaned)
            self._watch.start()

    def adopt(self, worker: Worker) -> None:
        """Register the worker after the load. The engine process may be gone by then."""
        self._worker = worker
        if self.orphan:
            worker.orphaned()

    def close(self) -> None:
        """Stop the heartbeats."""
        if self._watch is not None:
            self._watch.close()

    # ---- from the watch's thread

    def heartbeat(self) -> f.RankHeartbeat:
        own = f.RankHeartbeat(rank=self._rank, epoch=-1, step=-1, incarnation=self._engine)
        return msgspec.structs.replace(
            own if self._worker is None else self._worker.heartbeat(), peer=self._peer
        )

    def ended(self, epoch: int) -> None:
        if self._worker is None or not self._worker.ended(epoch):
            self._stuck_since = None
        else:
            self._stuck()

    def orphaned(self) -> None:
        self.orphan = True
        if self._worker is not None:
            self._worker.orphaned()
            self._stuck()

    def _stuck(self) -> None:
        """Exit the process (status ``STUCK``, logged) after too long a stay in an ended epoch.

        The first call starts the time.

        The owner of the process then starts a new one, on any host.
        """
        if self._stuck_since is None:
            self._stuck_since = time.monotonic()
        elif time.monotonic() - self._stuck_since > PATIENCE * self._timeout:
            log.error("rank %d hangs in an epoch that has ended: its process exits", self._rank)
            os._exit(STUCK)
