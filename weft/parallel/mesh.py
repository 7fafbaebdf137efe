"""The communicators of one rank, by axis.

tp    the ranks of this replica: partials of split matrices are summed over it
ep    all ranks of the domain, where they share experts
dp    the ranks at the same place in every replica of the domain
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from weft.parallel.comm import Comm, LocalComm
from weft.parallel.group import GroupComm
from weft.parallel.launcher import Launcher, default_launcher
from weft.types.layout import ALONE, Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """What a model under construction is given, and holds for its life. See ``make_mesh``."""

    layout: Layout = ALONE
    rank: int = 0
    tp: Comm = field(default_factory=LocalComm)
    ep: Comm = field(default_factory=LocalComm)
    dp: Comm = field(default_factory=LocalComm)
    launcher: Launcher = field(default_factory=Launcher)
    """Runs the collectives of all of them."""
    formed: list[Callable[[], None]] = field(default_factory=list)
    """What ranks do together whenever their groups have formed: models that were built for the mesh."""

    @property
    def connects(self) -> bool:
        """Whether there is a group of more than one rank."""
        return bool(self._groups())

    @property
    def shares(self) -> bool:
        """Whether all collectives of CPU tensors go through shared memory, in this epoch. All ranks have the
        same answer: a group's all share memory, and have the CPU extension, or none does."""
        return all(comm.shares for comm in self._groups())

    def connect(self, store: Any, epoch: int, timeout: float) -> None:
        """Forms every group of more than one rank for ``epoch``; all ranks call it. Raises CommLost."""
        self.launcher.settle(timeout)
        for comm in self._groups():
            comm.connect(store, epoch, timeout)
        for agree in self.formed:
            agree()

    def abort(self) -> None:
        """Ends every group: whoever waits in one gets CommLost."""
        for comm in self._groups():
            comm.abort()
        self.launcher.cancel()

    def _groups(self) -> list[GroupComm]:
        return [comm for comm in (self.tp, self.ep, self.dp) if isinstance(comm, GroupComm)]


def make_mesh(layout: Layout, rank: int, launcher: Launcher | None = None, host: str | None = None) -> Mesh:
    """The mesh of ``rank``, its groups not connected yet. ``host``: see ``GroupComm``."""
    launcher = launcher or default_launcher()
    replica, place = layout.replica(rank), layout.place(rank)

    def comm(name: str, ranks: range) -> Comm:
        return GroupComm(name, ranks, rank, launcher, host) if len(ranks) > 1 else LocalComm()

    first = replica * layout.tensor
    tp = comm(f"tp{replica}", range(first, first + layout.tensor))
    if not layout.expert:
        return Mesh(layout=layout, rank=rank, tp=tp, launcher=launcher)
    ep = comm("ep", range(layout.ranks))
    dp = comm(f"dp{place}", range(place, layout.ranks, layout.tensor))
    return Mesh(layout=layout, rank=rank, tp=tp, ep=ep, dp=dp, launcher=launcher)
