"""Collectives of one group as a model sees them: launched, then waited for where the result is needed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Sequence

import torch

Tensor = torch.Tensor


class Pending(ABC):
    """A collective in flight. A step generator yields it, and asks for its result when it is resumed."""

    @abstractmethod
    def result(self) -> Tensor:
        """The collective's output; waits for it. Raises what the communicator raised."""


class Done(Pending):
    """A collective that has ended."""

    def __init__(self, made: Tensor) -> None:
        self._made = made

    def result(self) -> Tensor:
        return self._made


class Comm(ABC):
    """The collectives of one axis. Every rank launches the same ones in the same order.

    A tensor that is given belongs to the collective until its result was taken. Sums are taken in the order
    of ranks, in a wide dtype, and rounded once: all ranks get the same bits, whatever else is in the tensor.
    (Where NCCL may choose its order, as a ``GroupComm`` of GPUs can let it, only the former holds.)
    """

    rank: int
    size: int

    @abstractmethod
    def all_reduce(self, partial: Tensor) -> Pending | None:
        """Starts the sum of ``partial`` over the ranks; None where it is the sum already."""

    @abstractmethod
    def all_gather(self, x: Tensor) -> Pending:
        """Starts [size, *x.shape] of x, which has one shape on all ranks."""

    @abstractmethod
    def reduce_scatter(self, x: Tensor) -> Pending:
        """Starts the sum over ranks of ``x[rank]``; x: [size, *shape] on all ranks."""

    @abstractmethod
    def all_to_all(self, x: Tensor, sends: Sequence[int], receives: Sequence[int]) -> Pending:
        """Starts an exchange of rows: ``sends[r]`` of x, in order of ranks, go to rank r; of each rank r come
        ``receives[r]``. Returns [sum(receives), *x.shape[1:]], in order of ranks.
        """


class LocalComm(Comm):
    """A group of one rank: its collectives do nothing."""

    rank = 0
    size = 1

    def all_reduce(self, partial: Tensor) -> Pending | None:
        return None

    def all_gather(self, x: Tensor) -> Pending:
        return Done(x.unsqueeze(0))

    def reduce_scatter(self, x: Tensor) -> Pending:
        return Done(x[0])

    def all_to_all(self, x: Tensor, sends: Sequence[int], receives: Sequence[int]) -> Pending:
        return Done(x)


def reduced(comm: Comm, partial: Tensor) -> Generator[Pending, None, Tensor]:
    """The sum of a row-parallel layer's partials: one yield on several ranks, none on one.

    For ``yield from`` inside ``Block.steps`` and ``Model.steps`` only.
    """
    pending = comm.all_reduce(partial)
    if pending is None:
        return partial
    yield pending
    return pending.result()


def awaited(comm: Comm, pending: Pending) -> Generator[Pending, None, Tensor]:
    """The result of a collective of ``comm``: one yield on several ranks, none on one."""
    if comm.size > 1:
        yield pending
    return pending.result()
