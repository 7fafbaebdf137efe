"""Several replicas of a model, of one group or more, as one engine for callers in this process: a head each.

The heads are those of ``weft serve``, as are messages and fleet; only HTTP and text are missing in between.
"""

from __future__ import annotations

import functools
import logging
import shutil
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import reduce
from operator import add

import msgspec

from weft.cluster.owner import HeadOwner
from weft.common.errors import ConfigError, EngineDead, Overloaded, WeftError
from weft.common.folder import private_folder
from weft.config.names import instance_name
from weft.config.resolved import EngineConfig
from weft.config.topology import face, serves
from weft.engine.core import EngineCore
from weft.engine.heads import HeadGroups
from weft.links.links import Links
from weft.links.thread import LinksThread
from weft.parallel.remote import REFUSED
from weft.routing.instance_table import Patience
from weft.types import messages as m
from weft.types.measures import Measures

STEP_S = 0.1
"""Seconds that ``step`` waits for events."""
ANSWER_S = 10.0
CLOSE_S = 5.0


def start_engine(config: EngineConfig) -> EngineCore | Replicas:
    """The engine of ``config`` in this process, or of its replicas behind this process. See both.

    Raises ConfigError for a role: nothing in this process pairs groups.
    """
    transfer = config.transfer
    if transfer.role != "unified" or transfer.prefill or transfer.encode:
        flag = "role" if transfer.role != "unified" else "prefill" if transfer.prefill else "encode"
        raise ConfigError(
            f"--{flag}: groups that prefill, decode or encode are started by `weft serve` or `weft up`; "
            "leave it out",
            param=f"--{flag}",
        )
    return EngineCore(config) if config.parallel.data_parallel_size == 1 else Replicas((config,))


class Replicas:
    """The interface of ``EngineCore`` (submit, step, finish) over all groups' replicas. Not thread-safe.

    A replica that shares no experts may die: its sequences go on elsewhere, while some are left that serve
    them. With any other ends the engine.
    """

    def __init__(self, groups: Iterable[EngineConfig]) -> None:
        """``groups``: a unified one, or those of a topology.

        Starts all heads and waits until they have loaded. Raises ConfigError, and EngineDead.
        """
        self._groups = tuple(groups)
        self.config = face(self._groups)
        """What holds for all groups."""
        self._capacity = {
            instance_name(group, replica): _capacity(group)
            for group in self._groups
            for replica in range(group.parallel.data_parallel_size)
        }
        self._folder = private_folder()
        # The kernel ends a child with the thread that made it: this one runs as long as this object.
        self._maker = ThreadPoolExecutor(1, thread_name_prefix="weft-heads")
        level = logging.getLevelName(logging.getLogger("weft").getEffectiveLevel()).lower()
        self._heads: HeadGroups | None = None
        self._thread: LinksThread | None = None
        try:
            self._heads = HeadGroups(self._groups, self._folder, level)
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
        transfer = self.config.transfer
        enough = functools.partial(serves, fallback=transfer.prefill_fallback)
        owner = HeadOwner(heads.members, heads, restarts=0, serves=enough)
        self._maker.submit(owner.start).result(60.0)
        return Links(
            owner,
            Patience(role=transfer.role_timeout, transfer=transfer.transfer_timeout),
            link_timeout=self.config.parallel.rank_timeout,
            local_prefill=transfer.prefill_fallback == "local",
        )

    @property
    def thread(self) -> LinksThread:
        """The links to the heads. To be read only."""
        assert self._thread is not None
        return self._thread

    @property
    def heads(self) -> HeadGroups:
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
        instances = self.thread.links.instances
        capacity = sum(self._capacity[instance.name] for instance in instances if instance.alive)
        if capacity <= self.thread.open_sequences:
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

    def stats_of(self) -> dict[str, tuple[m.Role, m.HeadStats]]:
        """Name of each replica -> (role, counters and gauges), asked for now. Raises EngineDead."""
        all_stats = self.thread.stats(ANSWER_S)
        pairs = zip(self.thread.links.instances, all_stats, strict=True)
        return {instance.name: (instance.role or "unified", stats) for instance, stats in pairs}

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


def _capacity(group: EngineConfig) -> int:
    """Sequences that each of its replicas can have, queued ones among them; 0 where they go on elsewhere."""
    if group.transfer.role in ("prefill", "encode"):
        return 0
    return group.scheduler.max_num_seqs + group.scheduler.max_queued_requests


def summed(stats: Sequence[m.HeadStats]) -> m.HeadStats:
    """Statistics of all heads: sums, element by element in tuples, and the highest fill level."""
    made = {}
    for name in m.HeadStats.__struct_fields__:
        values = [getattr(one, name) for one in stats]
        if name == "kv_usage":
            made[name] = max(values)
        elif name in ("transfers", "embedding_transfers"):
            made[name] = _summed_transfers([value for value in values if value is not None])
        elif isinstance(values[0], Measures):
            made[name] = sum(values[1:], values[0])
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
    fields = m.TransferStats.__struct_fields__
    sums = {name: reduce(add, (getattr(one, name) for one in stats)) for name in fields}
    return m.TransferStats(**sums)
