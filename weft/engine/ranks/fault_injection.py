"""Executes planted faults: see ``weft.types.faults``. Without faults, mesh and runner stay unwrapped."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from typing import Any

from weft.common.log import get_logger
from weft.engine.ranks.executor import RankRunner
from weft.parallel.mesh import Mesh
from weft.runner.step_handle import StepHandle
from weft.types.faults import Fault, Phase
from weft.types.plan import StepPlan, StepResult, TokenMasks

log = get_logger(__name__)


class PlantedError(RuntimeError):
    """The error of a planted fault."""


class Faults:
    """The planted faults of one rank's process."""

    def __init__(self, faults: Sequence[Fault], rank: int) -> None:
        self._faults = [fault for fault in faults if fault.rank == rank]
        self._reached = [0] * len(self._faults)

    def __bool__(self) -> bool:
        return bool(self._faults)

    def reach(self, phase: Phase) -> None:
        """Execute the due faults of ``phase`` and log each.

        May raise PlantedError, or kill or stop the process.

        A fault is due after ``after`` visits of its phase. Visits before its file ``needs`` exists do not
        count. Each fault happens once over all processes: see ``mark``.
        """
        for number, fault in enumerate(self._faults):
            if fault.phase != phase or (fault.needs and not os.path.exists(fault.needs)):
                continue
            # `needs` limits a fault to the time after a file exists. `mark` makes a fault happen once over
            # all processes.
            self._reached[number] += 1
            if self._reached[number] > fault.after and _first(fault.mark):
                log.error("planted: %s of rank %d in %s", fault.deed, fault.rank, phase)
                _do(fault)

    def within(self, mesh: Mesh) -> Mesh:
        """Return ``mesh`` with the faults of the collective phases installed in the launcher."""
        if self:
            mesh.launcher.before = lambda: self._launches(mesh.launcher.moving)
        return mesh

    def _launches(self, moving: bool) -> None:
        self.reach("collective")
        if moving:
            self.reach("rebalance")

    def around(self, runner: RankRunner) -> RankRunner:
        """Return ``runner``, wrapped if there are faults."""
        return _Faulty(runner, self) if self else runner


def _first(mark: str) -> bool:
    """Create the file ``mark``. Return False if the file exists already."""
    try:
        os.close(os.open(mark, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


def _do(fault: Fault) -> None:
    if fault.deed == "raise":
        raise PlantedError(f"planted in {fault.phase}")
    os.kill(os.getpid(), signal.SIGKILL if fault.deed == "kill" else signal.SIGSTOP)


class _Faulty:
    """A ``RankRunner`` with fault phases around the calls of another runner."""

    def __init__(self, runner: RankRunner, faults: Faults) -> None:
        self._runner = runner
        self._faults = faults

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def forward(self, plan: StepPlan) -> StepHandle:
        self._faults.reach("stage")
        return self._runner.forward(plan)

    def sample(self, handle: StepHandle, masks: TokenMasks | None = None) -> None:
        self._faults.reach("sample")
        self._runner.sample(handle, masks)

    def read(self, handle: StepHandle) -> StepResult:
        result = self._runner.read(handle)
        self._faults.reach("read")
        return result

    def reset(self) -> None:
        self._runner.reset()
        self._faults.reach("form")
