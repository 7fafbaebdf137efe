"""Several replicas of a model as one engine, for callers in this process: a head process for each.

The heads are those of ``weft serve``, as are messages and fleet; only HTTP and text are missing in between.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import msgspec

from weft.cluster.owner import HeadOwner
from weft.common.errors import ConfigError, EngineDead, Overloaded, WeftError
from weft.common.folder import private_folder
from weft.config.resolved import EngineConfig
from weft.engine.core import EngineCore
from weft.engine.heads import HeadProcesses
from weft.links.links import Links
from weft.links.thread import LinksThread
from weft.parallel.remote import REFUSED
from weft.routing.instance_table import Patience
from weft.types import messages as m

STEP_S = 0.1
"""Seconds that ``step`` waits for events."""
ANSWER_S = 10.0
CLOSE_S = 5.0


def start_engine(config: EngineConfig) -> EngineCore | Replicas:
    """The engine of ``config`` in this process, or of its replicas behind this process. See both.

    Raises ConfigError for a role: nothing in this process pairs groups.
    """
    transfer = config.transfer
    if transfer.role != "unified" or transfer.prefill:
        flag = "role" if transfer.role != "unified" else "prefill"
        raise ConfigError(
            f"--{flag}: groups that prefill and groups that decode are started by `weft serve` or `weft up`; "
            "leave it out",
            param=f"--{flag}",
        )
    return EngineCore(config) if config.parallel.data_parallel_size == 1 else Replicas(config)


class Replicas:
    """The interface of ``EngineCore`` (submit, step, finish) over several replicas. Not thread-safe.

    A replica that shares no experts may die: its sequences go on elsewhere. With any other ends the engine.
    """

    def __init__(self, config: EngineConfig) -> None:
        """Starts all heads and waits until they have loaded. Raises ConfigError, and EngineDead."""
        self.config = config
        self._capacity = config.scheduler.max_num_seqs + config.scheduler.max_queued_requests
        self._folder = private_folder()
        # The kernel ends a child with the thread that made it: this one runs as long as this object.
        self._maker = ThreadPoolExecutor(1, thread_name_prefix="weft-heads")
        level = logging.getLevelName(logging.getLogger("weft").getEffectiveLevel()).lower()
        self._heads: HeadProcesses | None = None
        self._thread: LinksThread | None = None
        try:
            self._heads = HeadProcesses(config, self._folder, level)
            self._thread = LinksThread(self._links)
        except WeftError as error:
            statuses = self._end()
            if REFUSED in statuses:
                raise ConfigError(
                    f"a replica's process ended with status {REFUSED} before it was ready; see its log"
                ) from error
            raise
        except BaseException:
            self.close()
            raise

    def _links(self) -> Links:
        heads = self._heads
        assert heads is not None
        # Nothing is started again, so nothing is ever started by another thread than this.
        owner = HeadOwner(heads.members, heads, restarts=0)
        self._maker.submit(owner.start).result(60.0)
        return Links(owner, Patience(), link_timeout=self.config.parallel.rank_timeout)

    @property
    def thread(self) -> LinksThread:
        """The links to the heads. To be read only."""
        assert self._thread is not None
        return self._thread

    @property
    def heads(self) -> HeadProcesses:
        """The processes. To be read only."""
        assert self._heads is not None
        return self._heads

    @property
    def deterministic(self) -> bool:
        """See ``EngineCore.deterministic``."""
        welcomes = [instance.welcome for instance in self.thread.links.instances]
        return all(welcome is not None and welcome.deterministic for welcome in welcomes)

    def submit(self, submit: m.Submit) -> list[m.TokenEvent]:
        """Sends a sequence to a replica. What is wrong with it comes as an event.

        Raises Overloaded when every replica's queue is full, and EngineDead when none is left.
        """
        if (failure := self.thread.links.failure) is not None:
            raise EngineDead(failure.message)
        alive = sum(instance.alive for instance in self.thread.links.instances)
        if self._capacity * alive <= self.thread.open_sequences:
            raise Overloaded("every replica's queue is full; try again later")
        self.thread.submit(submit)
        return []

    def finish(self, sequence: int) -> list[m.TokenEvent]:
        """Ends a sequence wherever it is. Idempotent; nothing more is heard of it."""
        self.thread.finish(sequence)
        return []

    def has_work(self) -> bool:
        """Whether sequences are open."""
        return self.thread.open_sequences > 0

    awaiting = False
    """Replicas hear by themselves of what their sequences await: see ``EngineCore.awaiting``."""

    def hear(self) -> list[m.TokenEvent]:
        """See ``awaiting``."""
        return []

    def sleep(self, seconds: float) -> None:
        """See ``awaiting``: nobody has to."""

    def step(self) -> list[m.TokenEvent]:
        """What came from replicas; waits a moment for it. Raises EngineDead."""
        return self.thread.step(STEP_S)

    def stats(self) -> m.HeadStats:
        """All replicas' counters and gauges, asked for now; of fill levels the highest. Raises EngineDead."""
        return summed(self.thread.stats(ANSWER_S))

    def welcome(self, incarnation: int) -> m.Welcome:
        """What a front must know of this engine."""
        return msgspec.structs.replace(self.thread.welcome, incarnation=incarnation)

    def close(self) -> None:
        """Has every head end, and ends those that do not."""
        self._end()

    def _end(self) -> list[int]:
        """See ``close``. The heads' statuses."""
        if self._thread is not None:
            self._thread.end()
        statuses = [] if self._heads is None else self._heads.close(CLOSE_S)
        self._maker.shutdown(wait=False)
        shutil.rmtree(self._folder, ignore_errors=True)
        return statuses


def summed(stats: Sequence[m.HeadStats]) -> m.HeadStats:
    """Of all heads: sums, element by element in tuples, and the highest fill level."""
    made = {}
    for name in m.HeadStats.__struct_fields__:
        values = [getattr(one, name) for one in stats]
        if name == "kv_usage":
            made[name] = max(values)
        elif name == "transfers":
            made[name] = _summed_transfers([value for value in values if value is not None])
        elif isinstance(values[0], tuple):
            longest = max(map(len, values))
            padded = [(*value, *[0] * (longest - len(value))) for value in values]
            made[name] = tuple(map(sum, zip(*padded, strict=True)))
        else:
            made[name] = sum(values)
    return m.HeadStats(**made)


def _summed_transfers(stats: Sequence[m.TransferStats]) -> m.TransferStats | None:
    """None where no head has a role."""
    if not stats:
        return None
    sums = {name: sum(getattr(one, name) for one in stats) for name in m.TransferStats.__struct_fields__}
    return m.TransferStats(**sums)
