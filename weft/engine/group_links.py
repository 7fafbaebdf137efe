"""What a group is made of: this rank's share of the model, and what reaches the others."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import NamedTuple

from weft.config.resolved import KVConfig
from weft.engine.domain import Domain
from weft.engine.executor import RankRunner
from weft.engine.ranks import Ranks
from weft.parallel.control import HeadChannel, NoRanks
from weft.parallel.leases import Leases
from weft.parallel.mesh import Mesh


class Share(NamedTuple):
    """This rank's share of a model, loaded."""

    kv: KVConfig
    """What it has room for."""
    runner: Callable[[KVConfig], RankRunner]
    """Allocates the pools that it is given. Once."""


@dataclass(kw_only=True)
class Links:
    """What a group has to reach its ranks, and other replicas, with. By default there are neither."""

    channel: HeadChannel = field(default_factory=NoRanks)
    heartbeats: HeadChannel | None = None
    processes: Ranks | None = None
    """Of the workers on this host; None where there are none."""
    mesh: Mesh = field(default_factory=Mesh)
    leases: Leases | None = None
    domain: Domain | None = None
    resources: ExitStack = field(default_factory=ExitStack)
    """What ends with the group."""
