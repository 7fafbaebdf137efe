"""A worker process once it is welcome: loads its share of the model, then works.

It outlives its head: it keeps process and weights, and says hello to the next head, for as long as a rank may
wait for its first welcome. The owner of the process ends it when no other head will come.
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
from weft.engine.executor import RankRunner
from weft.engine.fault_injection import Faults
from weft.engine.start import mesh_host, take_threads
from weft.engine.watch import RankWatch
from weft.engine.worker import Worker
from weft.group.sizes import blocks_of, sized
from weft.group.waits import LOAD_S
from weft.parallel.control import HeadLink, RankChannel
from weft.parallel.mesh import Mesh
from weft.types import frames as f

log = get_logger(__name__)

STUCK = 3
"""Exit status of a rank that stayed too long in an epoch that had ended."""
PATIENCE = 2.0
"""Multiple of ``--rank-timeout`` that it gets to leave the epoch."""
_TURN = 0.5
"""Seconds of one wait for a frame."""


def run_rank(config: EngineConfig, rank: int, link: HeadLink, rejoin: Callable[[int], HeadLink]) -> None:
    """Works until told to stop, for the head of ``link`` and those that follow it.

    ``rejoin(epoch)`` says hello to the next head, ``epoch`` being the last one that this rank was in, and
    raises EngineDead when none comes in time. Raises WeftError besides when the model cannot be loaded, of
    which the head is told, or a head will not have this rank.
    """
    timeout = config.parallel.rank_timeout
    take_threads(config)
    faults = Faults(config.faults, rank)
    mesh = faults.within(rank_mesh(config, rank, mesh_host(config)))
    liveness = _Liveness(rank, link.incarnation, timeout)
    liveness.watch(link)  # from now on: who loads for minutes shows that it runs
    try:
        runner = _load(config, link.channel, rank, mesh, faults, liveness)
        if runner is None:
            return
        worker = Worker(rank, runner, mesh, link.channel, rank_timeout=timeout, incarnation=link.incarnation)
        gc.collect()
        gc.freeze()  # the model and all modules live as long as the process: never look through them again
        liveness.adopt(worker)
        try:
            worker.run()
            while not worker.stopped:
                log.warning("rank %d has lost its head, and keeps its weights for the next one", rank)
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
    """The rank's runner, once the head said how large its caches are; None: the rank was told to end."""
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
        channel.send(f.encode(f.Failed(rank=rank, epoch=-1, step=-1, error=known.info())))
        channel.close()
        raise


def ask(
    channel: RankChannel, rank: int, kv: KVConfig, timeout: float, orphan: Callable[[], bool]
) -> KVConfig | None:
    """Says what this rank has room for, and waits for what it gets; None: it was told to end.

    When the head is gone it gets what it has room for. Raises EngineDead when the head refuses it or says
    nothing for ``timeout`` seconds.
    """
    channel.send(f.encode(f.Loaded(rank=rank, blocks=blocks_of(kv))))
    until = time.monotonic() + timeout
    while (left := until - time.monotonic()) > 0:
        if orphan():
            return kv  # the next head takes the least of all, this among them
        data = channel.receive(min(left, _TURN))
        if data is None:
            continue
        frame = f.decode_to_rank(data)
        if isinstance(frame, f.Pools):
            return sized(kv, frame.blocks)
        if isinstance(frame, f.Shutdown):
            return None
        if isinstance(frame, f.Refused):
            raise EngineDead(f"this rank was refused: {frame.error.message}")
    raise EngineDead(f"the head told no sizes of caches within {timeout:g} s")


class _Liveness:
    """Exchanges heartbeats with one head after the other, also before there is a worker."""

    def __init__(self, rank: int, head: str, rank_timeout: float) -> None:
        """``head``: the incarnation of the first head."""
        self._rank = rank
        self._head = head
        self._timeout = rank_timeout
        self._peer = b""
        """Name of the control connection to the present head."""
        self._stuck_since: float | None = None
        self._worker: Worker | None = None
        self._watch: RankWatch | None = None
        self.orphan = False
        """Whether the head is gone."""

    def watch(self, link: HeadLink) -> None:
        """Shows the head of ``link`` from now on that this process runs."""
        self.orphan = False
        self._stuck_since = None
        self._peer = link.channel.peer
        if link.heartbeats is not None:
            self._watch = RankWatch(link.heartbeats, self._timeout, self.heartbeat, self.ended, self.orphaned)
            self._watch.start()

    def adopt(self, worker: Worker) -> None:
        """The model is loaded. The head may be gone since."""
        self._worker = worker
        if self.orphan:
            worker.orphaned()

    def close(self) -> None:
        """Ends the watch."""
        if self._watch is not None:
            self._watch.close()

    # ---- from the watch's thread

    def heartbeat(self) -> f.RankHeartbeat:
        own = f.RankHeartbeat(rank=self._rank, epoch=-1, step=-1, incarnation=self._head)
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
        """Ends this process when it stays too long in an epoch that has ended, so that it is started again,
        on whatever host it is.
        """
        if self._stuck_since is None:
            self._stuck_since = time.monotonic()
        elif time.monotonic() - self._stuck_since > PATIENCE * self._timeout:
            log.error("rank %d does not come out of an epoch that is over: its process ends", self._rank)
            os._exit(STUCK)
