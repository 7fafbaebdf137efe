"""The parts of a group: the local rank's share of the model, and the connections to the other ranks."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import NamedTuple

from weft.config.resolved import KVConfig
from weft.engine.expert_group import ExpertGroup
from weft.engine.ranks.executor import RankRunner
from weft.engine.ranks.ranks import Ranks
from weft.parallel.control import EngineChannel, NoRanks
from weft.parallel.leases import Leases
from weft.parallel.mesh import Mesh


class Share(NamedTuple):
    """The local rank's share of a loaded model."""

    kv: KVConfig
    """KV configuration with pool sizes limited by memory."""
    runner: Callable[[KVConfig], RankRunner]
    """Allocates pools of the given sizes and returns the runner. May be called once."""


@dataclass(kw_only=True)
class GroupLinks:
    """Connections of a group to ranks and to other replicas. The defaults describe a single rank."""

    channel: EngineChannel = field(default_factory=NoRanks)
    heartbeats: EngineChannel | None = None
    processes: Ranks | None = None
    """Worker processes on the local host; None without workers."""
    mesh: Mesh = field(default_factory=Mesh)
    leases: Leases | None = None
    expert_group: ExpertGroup | None = None
    resources: ExitStack = field(default_factory=ExitStack)
    """Resources to close with the group."""
