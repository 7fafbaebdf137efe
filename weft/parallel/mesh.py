"""The communicators of one rank, by axis.

tp    the ranks of this replica, for sums of the partials of split matrices
ep    all ranks of the expert-parallel group, which share experts
dp    the ranks at the same place in every replica of the expert-parallel group
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from weft.common.log import get_logger
from weft.parallel.comm import Comm, LocalComm
from weft.parallel.group_comm import CommLost, GroupComm
from weft.parallel.launcher import Launcher, default_launcher
from weft.parallel.nccl import check_nccl
from weft.types.layout import ALONE, Layout

log = get_logger(__name__)

CPU = torch.device("cpu")
CLOSE_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """The communicators of one rank. A model receives the mesh at construction. See ``make_mesh``."""

    layout: Layout = ALONE
    rank: int = 0
    tp: Comm = field(default_factory=LocalComm)
    ep: Comm = field(default_factory=LocalComm)
    dp: Comm = field(default_factory=LocalComm)
    launcher: Launcher = field(default_factory=Launcher)
    """Runs the collectives of all axes."""
    formed: list[Callable[[], None]] = field(default_factory=list)
    """Functions that all ranks call together after each forming of the groups, added by models of the
    mesh."""
    nccl: bool = False
    """True if CUDA tensors go over NCCL."""
    ordered: bool = True
    """True if sums are taken in the order of ranks, with NCCL too."""

    @property
    def obstacle(self) -> str | None:
        """Reason why a step with collectives cannot be captured as a CUDA graph. None if capture is
        possible."""
        if self.layout.expert_ranks == 1:
            return None
        if not self.nccl:
            return "the collectives inside a step do not use NCCL"
        return None

    @property
    def varying(self) -> tuple[str, ...]:
        """Collectives that make the bits of a row depend on other rows of the step."""
        return ("sums over ranks (nccl)",) if self.nccl and not self.ordered and self.connects else ()

    @property
    def connects(self) -> bool:
        """True if there is a group of more than one rank."""
        return bool(self._groups())

    @property
    def shares(self) -> bool:
        """True if all collectives of CPU tensors go through shared memory in this epoch.

        All ranks have the same answer: within a group either all ranks share memory or none does.
        """
        return all(comm.shares for comm in self._groups())

    def connect(self, store: Any, epoch: int, timeout: float) -> None:
        """Form every group of more than one rank for ``epoch``, and call all of ``formed``.

        All ranks must call. Blocks. Raise CommLost.

        ``timeout``: seconds for each wait, and for each later collective.
        """
        self.launcher.settle(timeout)
        for comm in self._groups():
            comm.settle(timeout)
        self.launcher.broken = False
        for comm in self._groups():
            comm.connect(store, epoch, timeout)
        for agree in self.formed:
            agree()
        self.launcher.take()  # drop the records: collectives of the forming belong to no step

    def abort(self) -> None:
        """End every group: a waiting collective raises CommLost. May be called from any thread; does not
        wait."""
        self.launcher.broken = True
        for comm in self._groups():
            comm.abort()
        self.launcher.cancel()

    def close(self) -> None:
        """Wait up to ``CLOSE_S`` seconds per aborted group: exiting earlier may crash the process.

        A late group is logged, not raised.
        """
        try:
            for comm in self._groups():
                comm.settle(CLOSE_S)
        except CommLost as error:
            log.warning("error while closing: %s", error.message)

    def _groups(self) -> list[GroupComm]:
        return [comm for comm in (self.tp, self.ep, self.dp) if isinstance(comm, GroupComm)]


def make_mesh(
    layout: Layout,
    rank: int,
    launcher: Launcher | None = None,
    host: str | None = None,
    *,
    device: torch.device = CPU,
    collectives: str = "auto",
    ordered: bool = True,
) -> Mesh:
    """Return the mesh of ``rank``, with unconnected groups. For ``host`` and ``ordered`` see ``GroupComm``.

    ``collectives`` has the values of ``ParallelSection.collectives``. Raise ConfigError if NCCL is needed and
    missing.
    """
    replica = layout.replica(rank)
    place = layout.place(rank)
    nccl = device.type == "cuda" and collectives != "gloo" and layout.expert_ranks > 1
    if nccl:
        check_nccl()
    launcher = launcher or default_launcher(device, nccl)
    gpu = device if nccl else None
    share = collectives != "gloo"

    def comm(name: str, ranks: range) -> Comm:
        if len(ranks) == 1:
            return LocalComm()
        return GroupComm(name, ranks, rank, launcher, host, share, gpu, ordered, reads=collectives == "auto")

    first = replica * layout.tensor
    tp = comm(f"tp{replica}", range(first, first + layout.tensor))
    mesh = Mesh(layout=layout, rank=rank, tp=tp, launcher=launcher, nccl=nccl, ordered=ordered)
    if not layout.expert:
        return mesh
    ep = comm("ep", range(layout.ranks))
    dp = comm(f"dp{place}", range(place, layout.ranks, layout.tensor))
    return replace(mesh, ep=ep, dp=dp)
