"""A worker process once it is welcome: loads its share of the model, then works."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable

import torch

from weft.common.errors import EngineDead, WeftError
from weft.common.log import get_logger
from weft.config.resolved import EngineConfig
from weft.engine.build import load, rank_mesh
from weft.engine.executor import RankRunner
from weft.engine.faults import Faults
from weft.engine.ranks import threads_each
from weft.engine.regroup import LOAD_S
from weft.engine.sizes import ask
from weft.engine.start import layout_of, mesh_host
from weft.engine.watch import RankWatch
from weft.engine.worker import Worker
from weft.parallel.control import RankChannel
from weft.parallel.mesh import Mesh
from weft.types import frames as f

log = get_logger(__name__)

STUCK = 3
"""Exit status of a rank that did not come out of an epoch that had ended."""


def run_rank(
    config: EngineConfig, channel: RankChannel, rank: int, beats: Callable[[], RankChannel] | None
) -> None:
    """Works until told to stop. ``beats`` opens the connection for beats.

    Raises WeftError when the model cannot be loaded, of which the head is told, or the head is gone.
    """
    layout, timeout = layout_of(config), config.parallel.rank_timeout
    if threads := threads_each(config, layout.tensor):
        torch.set_num_threads(threads)
    faults = Faults(config.faults, rank)
    mesh = faults.within(rank_mesh(config, rank, mesh_host(config)))
    life = _Life(rank, 2 * timeout)
    watch = None
    if beats is not None:  # from now on: who loads for minutes shows that it runs
        watch = RankWatch(beats(), timeout, life.beat, life.ended, life.orphaned)
        watch.start()
    try:
        runner = _load(config, channel, rank, mesh, faults, lambda: life.orphan)
        if runner is None:
            return
        life.worker = worker = Worker(rank, runner, mesh, channel, rank_timeout=timeout)
        gc.collect()
        gc.freeze()  # the model and all modules live as long as the process: never look through them again
        if life.orphan:
            worker.orphaned()
        worker.run()
    finally:
        if watch is not None:
            watch.close()


def _load(
    config: EngineConfig,
    channel: RankChannel,
    rank: int,
    mesh: Mesh,
    faults: Faults,
    orphan: Callable[[], bool],
) -> RankRunner | None:
    """The rank's runner, once the head said how large its caches are; None: the rank was told to end."""
    try:
        faults.reach("load")
        loaded = load(config, progress=False, mesh=mesh)
        kv = ask(channel, rank, loaded.kv, LOAD_S, orphan)
        if kv is None:
            channel.close()
            return None
        return faults.around(loaded.runner(kv))
    except Exception as error:
        known = error if isinstance(error, WeftError) else EngineDead(f"{type(error).__name__}: {error}")
        channel.send(f.encode(f.Failed(rank=rank, epoch=-1, step=-1, error=known.info())))
        channel.close()
        raise


class _Life:
    """What the watch is told and tells, before there is a worker too."""

    def __init__(self, rank: int, patience: float) -> None:
        """``patience``: seconds after which a rank that stays in an epoch that has ended, ends its process:
        so somebody starts it anew, on whatever host it is.
        """
        self._rank = rank
        self._patience = patience
        self._stuck_since: float | None = None
        self.worker: Worker | None = None
        self.orphan = False

    def beat(self) -> f.Beat:
        if self.worker is not None:
            return self.worker.beat()
        return f.Beat(rank=self._rank, epoch=-1, step=-1)

    def ended(self, epoch: int) -> None:
        if self.worker is None or not self.worker.ended(epoch):
            self._stuck_since = None
        elif self._stuck_since is None:
            self._stuck_since = time.monotonic()
        elif time.monotonic() - self._stuck_since > self._patience:
            log.error("rank %d does not come out of epoch %d: its process ends", self._rank, epoch)
            os._exit(STUCK)

    def orphaned(self) -> None:
        self.orphan = True
        if self.worker is not None:
            self.worker.orphaned()
