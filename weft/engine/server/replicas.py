"""Several replicas of a model, in one or more groups, as one engine for callers in the local process.

Each replica has an engine process. Engine processes, messages and fleet are the same as in ``weft serve``.
HTTP and text are absent.
"""

from __future__ import annotations

import functools
import logging
import shutil
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import reduce
from operator import add
from typing import Any

import msgspec
from msgspec import UNSET

from weft.common.errors import ConfigError, EngineDead, Overloaded, WeftError
from weft.common.folder import private_folder
from weft.config.adapters import parse_modules, read_adapter
from weft.config.names import instance_name
from weft.config.resolved import EngineConfig
from weft.config.topology import face, serves
from weft.control.fleet.instance_table import Patience
from weft.control.links.links import Links
from weft.control.links.thread import LinksThread
from weft.control.processes.engine_owner import EngineOwner
from weft.engine.core import EngineCore
from weft.engine.server.engine_processes import REFUSED, EngineGroups
from weft.types import messages as m
from weft.types.adapters import LoadAdapter
from weft.types.messages import Measures
from weft.types.tier_flush import FlushTier
from weft.types.tiers import summed_tiers

STEP_S = 0.1
"""Maximum seconds for ``step`` to wait for events."""
ANSWER_S = 10.0
"""Maximum seconds until all engine processes have reported their counters."""
ADAPTERS_S = 120.0
"""Maximum seconds until all engine processes have loaded the adapters of --lora-modules."""
CLOSE_S = 5.0
"""Maximum seconds for the engine processes to end before they are killed."""


def start_engine(config: EngineConfig) -> EngineCore | Replicas:
    """Return the engine of ``config``: in the local process for one replica, else over the replicas'
    processes.

    Raises ConfigError for a role, because nothing in the local process pairs groups.
    """
    transfer = config.transfer
    if transfer.role != "unified" or transfer.prefill or transfer.encode:
        flag = "role" if transfer.role != "unified" else "prefill" if transfer.prefill else "encode"
        raise ConfigError(
            f"--{flag}: only `weft serve` and `weft up` start groups that prefill, decode or encode; "
            f"leave --{flag} out",
            param=f"--{flag}",
        )
    return EngineCore(config) if config.parallel.data_parallel_size == 1 else Replicas((config,))


class Replicas:
    """The interface of ``EngineCore`` (submit, step, finish) over the replicas of all groups. Not
    thread-safe.

    If a replica without shared experts dies, the sequences continue on the remaining replicas, if possible.
    The death of any other replica ends the engine.
    """

    def __init__(self, groups: Iterable[EngineConfig]) -> None:
        """Start all engine processes and block until all engines have loaded. Raises ConfigError or
        EngineDead.

        ``groups``: one unified group, or the groups of a topology.
        """
        self._groups = tuple(groups)
        self.config = face(self._groups)
        """Settings common to all groups."""
        self._capacity = {
            instance_name(group, replica): _capacity(group)
            for group in self._groups
            for replica in range(group.parallel.data_parallel_size)
        }
        self._folder = private_folder()
        # The kernel kills a child at the end of the starting thread. The thread here lives as long as the
        # object.
        self._maker = ThreadPoolExecutor(1, thread_name_prefix="weft-heads")
        level = logging.getLevelName(logging.getLogger("weft").getEffectiveLevel()).lower()
        self._engines: EngineGroups | None = None
        self._thread: LinksThread | None = None
        try:
            self._engines = EngineGroups(self._groups, self._folder, level)
            self._thread = LinksThread(self._links)
            # Requests with an adapter go only to processes that have announced the adapter.
            if modules := parse_modules(self.config.lora.lora_modules):
                self._thread.load_adapters(map(_announced, modules, modules.values()), ADAPTERS_S)
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
        """Start all engine processes and return the links to them, not connected yet.

        Raises the errors of the start.
        """
        engines = self._engines
        assert engines is not None
        # With `restarts=0` no engine process is started again, so no thread other than `_maker` ever starts
        # an engine.
        transfer = self.config.transfer
        enough = functools.partial(serves, fallback=transfer.prefill_fallback)
        owner = EngineOwner(engines.members, engines, restarts=0, serves=enough)
        self._maker.submit(owner.start).result(60.0)
        return Links(
            owner,
            Patience(role=transfer.role_timeout, transfer=transfer.transfer_timeout),
            link_timeout=self.config.parallel.rank_timeout,
            local_prefill=transfer.prefill_fallback == "local",
        )

    @property
    def thread(self) -> LinksThread:
        """The links to the engine processes. Read-only."""
        assert self._thread is not None
        return self._thread

    @property
    def engines(self) -> EngineGroups:
        """The engine processes of all groups. Read-only."""
        assert self._engines is not None
        return self._engines

    @property
    def deterministic(self) -> bool:
        """True if every replica is connected and deterministic. See ``EngineCore.deterministic``."""
        welcomes = [instance.welcome for instance in self.thread.links.instances]
        return all(welcome is not None and welcome.deterministic for welcome in welcomes)

    def submit(self, submit: m.Submit) -> list[m.TokenEvent]:
        """Send a sequence to a replica. Return no events: errors of the sequence arrive later, as an event of
        ``step``.

        Raises Overloaded when every replica's queue is full, and EngineDead when no replica is left.
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
        """End a sequence in any state. Idempotent. No further events of the sequence follow."""
        self.thread.finish(sequence)
        return []

    def has_work(self) -> bool:
        """Return True if sequences are open."""
        return self.thread.open_sequences > 0

    blocked = False
    """Always False: the replicas wait for external input on their own. See ``EngineCore.blocked``."""

    def poll(self) -> list[m.TokenEvent]:
        """Return no events. See ``blocked``."""
        return []

    def sleep(self, seconds: float) -> None:
        """Return at once. See ``blocked``."""

    def step(self) -> list[m.TokenEvent]:
        """Return events of the replicas. Block up to ``STEP_S`` seconds for the first. Raises EngineDead."""
        return self.thread.step(STEP_S)

    def stats(self) -> m.EngineStats:
        """Request and return the counters and gauges of all replicas: sums, and the highest fill level.
        Raises EngineDead.
        """
        return summed(self.thread.stats(ANSWER_S))

    def flush(self, command: FlushTier) -> None:
        """Empty the prefix cache of every engine process, see ``EngineCore.flush``. ``stats`` counts the
        blocks."""
        self.thread.flush(command)

    def stats_of(self) -> dict[str, tuple[m.Role, m.EngineStats]]:
        """Request the counters and gauges now. Return replica name -> (role, counters and gauges). Raises
        EngineDead.
        """
        all_stats = self.thread.stats(ANSWER_S)
        pairs = zip(self.thread.links.instances, all_stats, strict=True)
        return {instance.name: (instance.role or "unified", stats) for instance, stats in pairs}

    def welcome(self, incarnation: int) -> m.Welcome:
        """Return the ``Welcome`` message, a description of the engine for API servers."""
        return msgspec.structs.replace(self.thread.welcome, incarnation=incarnation)

    def close(self) -> None:
        """Stop every engine process, and kill engines that do not end within ``CLOSE_S`` seconds."""
        self._end()

    def _end(self) -> list[int]:
        """Stop every engine process and remove the folder.

        Return the exit statuses of the engine processes.
        """
        if self._thread is not None:
            self._thread.end()
        statuses = [] if self._engines is None else self._engines.close(CLOSE_S)
        self._maker.shutdown(wait=False)
        shutil.rmtree(self._folder, ignore_errors=True)
        return statuses


def _announced(name: str, folder: str) -> LoadAdapter:
    """Return the message that announces an adapter of --lora-modules. Raises ConfigError."""
    adapter = read_adapter(folder, name)
    return LoadAdapter(name=name, digest=adapter.digest, folder=adapter.folder)


def _capacity(group: EngineConfig) -> int:
    """Return the maximum sequences of one replica, queued sequences included. Return 0 for ``prefill`` and
    ``encode``, because the sequences continue elsewhere.
    """
    if group.transfer.role in ("prefill", "encode"):
        return 0
    return group.scheduler.max_num_seqs + group.scheduler.max_queued_requests


def summed(stats: Sequence[m.EngineStats]) -> m.EngineStats:
    """Return the combined statistics of all engine processes: sums, element by element for tuples, and the
    highest fill level.
    """
    fields = {}
    for name in m.EngineStats.__struct_fields__:
        values = [getattr(one, name) for one in stats]
        if name == "kv_usage":
            fields[name] = max(values)
        elif name in ("transfers", "embedding_transfers"):
            fields[name] = _summed_transfers([value for value in values if value is not None])
        elif name == "overlap_choices":
            fields[name] = tuple(choice for value in values for choice in value)
        elif name == "tier":
            fields[name] = summed_tiers([value for value in values if value is not None])
        elif isinstance(values[0], Measures):
            fields[name] = sum(values[1:], values[0])
        elif isinstance(values[0], tuple):
            longest = max(map(len, values))
            # Tuples of different length are padded with zeros at the end.
            padded = [(*value, *[0] * (longest - len(value))) for value in values]
            fields[name] = tuple(map(sum, zip(*padded, strict=True)))
        else:
            fields[name] = sum(values)
    return m.EngineStats(**fields)


def _summed_transfers(stats: Sequence[m.TransferStats]) -> m.TransferStats | None:
    """Return the sums, or None where no engine process has transfers."""
    if not stats:
        return None
    sums: dict[str, Any] = {}
    for name in m.TransferStats.__struct_fields__:
        values = [value for one in stats if (value := getattr(one, name)) is not UNSET]
        sums[name] = reduce(add, values) if values else UNSET
    return m.TransferStats(**sums)
