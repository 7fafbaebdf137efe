"""A group that was lost is formed anew: who is gone starts again, the others keep their weights.

lost ──> replace who is gone ──> gather ──> form the next epoch ──> done
              ^                     │           │
              ╰──── lost again ─────┴───────────╯        at most TRIES times
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol

from weft.common.errors import ConfigError
from weft.common.log import get_logger
from weft.config.resolved import KVConfig
from weft.engine.executor import GroupLost
from weft.engine.ranks import Ranks

log = get_logger(__name__)

HELLO_S = 120.0
"""Seconds from starting a rank's process to its hello."""
LOAD_S = 3600.0
"""Seconds that ranks may take to load their weights, as long as they show that they run."""
TRIES = 4


class Group(Protocol):
    """What is needed of a ``GroupExecutor``."""

    processes: Ranks | None

    @property
    def next_epoch(self) -> int: ...

    def at_fault(self, lost: GroupLost) -> int | None:
        """The rank that must be replaced; None: nobody, or nobody knows."""

    def forget(self, rank: int) -> None: ...

    def knows(self, rank: int) -> bool: ...

    def gather(self, timeout: float, ready: bool = True, ranks: Sequence[int] | None = None) -> None: ...

    def size(self, kv: KVConfig, timeout: float) -> KVConfig: ...

    def form(self, epoch: int) -> None: ...


def regroup(group: Group, lost: GroupLost) -> None:
    """Forms the next epoch of ``group``. Raises GroupLost when it is lost again and again."""
    for number in range(TRIES):
        _replace(group, lost)
        try:
            group.gather(HELLO_S, ready=False)
            group.gather(LOAD_S)
            group.form(group.next_epoch)
        except GroupLost as again:
            log.error("try %d of %d to form the group anew: %s", number + 1, TRIES, again.message)
            lost = again
        else:
            return
    raise lost


def size(group: Group, kv: KVConfig, tries: int) -> KVConfig:
    """``group.size``, ``tries`` times: ranks that are lost while they load are started again.

    Raises GroupLost; ConfigError when it is the configuration that a rank cannot load with.
    """
    lost: GroupLost | None = None
    for _ in range(tries):
        if lost is not None:
            _replace(group, lost)
        try:
            group.gather(HELLO_S, ready=False)
            return group.size(kv, LOAD_S)
        except GroupLost as again:
            lost = again
    assert lost is not None, "tries are at least 1"
    raise ConfigError(lost.message) if lost.refused else lost


def recall(group: Group, held: Sequence[int], patience: float) -> None:
    """Waits for ranks that outlived the head before this one: they say hello to it.

    Who ends, or does not come within ``patience`` seconds, is started again.
    """
    until = time.monotonic() + patience
    while late := [rank for rank in held if not group.knows(rank)]:
        try:
            group.gather(max(until - time.monotonic(), 0.0), ready=False, ranks=late)
        except GroupLost as lost:
            again = _replace(group, lost)
            held = [rank for rank in held if rank not in again]


def _replace(group: Group, lost: GroupLost) -> list[int]:
    """Starts again every rank whose process has ended, and the one that is at fault. Which these are."""
    processes = group.processes
    if processes is None:
        return []
    gone: dict[int, str] = {}
    rank = group.at_fault(lost)
    if rank is not None and not processes.keeps(rank):
        group.forget(rank)  # who keeps it on its host starts it, too
    elif rank is not None:
        gone[rank] = lost.reason
        processes.kill(rank)
    while (found := processes.dead()) is not None:
        gone[found[0]] = found[1]
        processes.kill(found[0])
    for rank, why in gone.items():
        log.warning("rank %d is started again: %s", rank, why)
        group.forget(rank)
        processes.spawn(rank)
    return list(gone)
