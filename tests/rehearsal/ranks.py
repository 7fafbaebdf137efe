"""One rank of several on a simulated GPU. The peers are assumed to do the same as this rank.

The process groups are stand-ins: a rank receives its own data in place of a peer's data, so that sizes agree.
Everything behind the groups is real: the NCCL wrapper, copies through host memory, launchers and streams.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor

from tests.rehearsal.device import Rehearsal, current
from weft.config.resolved import EngineConfig
from weft.engine.build import load, rank_mesh
from weft.engine.core import EngineCore
from weft.engine.expert_group import ExpertGroup
from weft.engine.start import alone
from weft.ops.triton.peers import WINDOW
from weft.parallel.agreement import AgreementGroup
from weft.parallel.group_comm import GroupComm
from weft.parallel.host_stage import HostStage
from weft.parallel.nccl import NcclGroup
from weft.parallel.peers import PeerGroup
from weft.parallel.wakeup import LocalWakeups

Tensor = torch.Tensor


class BadCollective(AssertionError):
    """A collective has an argument that the library does not accept."""


class Work:
    """A collective that has ended."""

    def wait(self) -> None: ...


class Peers:
    """Replaces a ``ProcessGroupNCCL`` (``fake`` tensors) or a gloo group (host memory)."""

    def __init__(self, rank: int, size: int, *, fake: bool) -> None:
        self.rank, self.size, self.fake = rank, size, fake

    def _allgather_base(self, made: Tensor, x: Tensor, options: Any = None) -> Work | None:
        self._check(options, made, x)
        self._need(made.numel() == self.size * x.numel(), "every rank's part has the size of one")
        return self._run(
            "all_gather", made, x, lambda out, given: out.view(self.size, -1).copy_(given.view(-1))
        )

    def alltoall_base(
        self, made: Tensor, x: Tensor, receives: list[int], sends: list[int], options: Any = None
    ) -> Work | None:
        self._check(options, made, x)
        self._need(len(receives) == len(sends) == self.size, "a number of rows for every rank")
        self._need(sum(receives) == len(made) and sum(sends) == len(x), "rows that are sent and received")
        self._need(made.shape[1:] == x.shape[1:] or not len(x) or not len(made), "rows are of one size")
        first = sum(sends[: self.rank])

        def copy(out: Tensor, given: Tensor) -> None:
            mine, begin = given[first : first + sends[self.rank]], 0
            for count in receives:  # a peer with more rows sends some rows twice
                if len(mine):
                    out[begin : begin + count] = mine[torch.arange(count) % len(mine)]
                begin += count

        return self._run("all_to_all", made, x, copy)

    def allreduce(self, tensors: list[Tensor], options: Any = None) -> Work | None:
        self._check(options, *tensors)
        return self._run("all_reduce", tensors[0], tensors[0], lambda out, given: out.mul_(self.size))

    def abort(self) -> None: ...

    def _need(self, holds: bool, what: str) -> None:
        if not holds:
            raise BadCollective(what)

    def _check(self, options: Any, *tensors: Tensor) -> None:
        for tensor in tensors:
            kind = "the device" if self.fake else "the host"
            self._need(isinstance(tensor, FakeTensor) == self.fake, f"it takes tensors on {kind}")
            self._need(
                tensor.is_contiguous(), f"a tensor is not contiguous: {tensor.shape}, {tensor.stride()}"
            )
        if self.fake:
            self._need(not options.asyncOp, "it would run on a stream that nobody waits for")

    def _run(self, name: str, made: Tensor, x: Tensor, copy: Any) -> Work | None:
        rehearsal = current()
        rehearsal.operators.add(name)
        if not self.fake:
            rehearsal.host_reads(name, x)
            copy(made, x)
            rehearsal.host_writes(name, made)
            return Work()
        rehearsal.use(name, [x], [made])
        if rehearsal.values:
            assert rehearsal.capture is None, "collectives with values are not captured here"
            copy(rehearsal.values_of(made), rehearsal.values_of(x))
        return None


def connect(comm: GroupComm, store: Any, epoch: int, timeout: float) -> None:
    """Replace ``GroupComm.connect``."""
    comm._group = Peers(comm.rank, comm.size, fake=False)
    if comm._gpu is not None:
        comm._nccl = NcclGroup(Peers(comm.rank, comm.size, fake=True))
        if comm._reads:
            comm._peers = reading(comm.rank, comm.size)
    comm._stage = HostStage(timeout)


def reading(rank: int, size: int) -> PeerGroup:
    """Return a group of which all ranks have the window of this rank.

    Generation 0 is lost, so kernels wait for no signal. With values, a kernel therefore reads the data
    of this rank, as if all peers had published the same.
    """
    windows: Any = SimpleNamespace(generation=1, lost=torch.zeros(1, dtype=torch.int64))
    memory = torch.zeros(WINDOW // 8, dtype=torch.int64)
    numbers = [0, windows.lost.data_ptr(), *[memory.data_ptr()] * size]
    windows.memory = memory
    table = torch.tensor(numbers).pin_memory().to("cuda", non_blocking=True)
    return PeerGroup(windows, table, rank, size)


def install(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(GroupComm, "connect", connect)
    patch.setattr(dist, "is_nccl_available", lambda: True)


def first_rank(config: EngineConfig) -> tuple[EngineCore, Any]:
    """Return an engine with the first rank of the configuration, and the mesh of the rank."""
    mesh = rank_mesh(config, 0, None)
    mesh.connect(None, 0, 30.0)
    loaded = load(config, progress=False, mesh=mesh)
    for agree in mesh.formed:
        agree()
    layout, expert_group = config.parallel, None
    if layout.enable_expert_parallel and layout.data_parallel_size > 1:
        group = AgreementGroup(0, layout.data_parallel_size, LocalWakeups(layout.data_parallel_size))
        group.connect(None, 0, 30.0)
        expert_group = ExpertGroup(group)
    return EngineCore(config, runner=alone(loaded.kv, loaded.runner), expert_group=expert_group), mesh


__all__ = ["Peers", "Rehearsal", "connect", "first_rank", "install"]
