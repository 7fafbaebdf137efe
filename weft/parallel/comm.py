"""Collectives of one group, as a model sees them: launched, then awaited at the use of the result."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Sequence
from typing import TypeVar

import torch

Tensor = torch.Tensor
R = TypeVar("R")


class Pending(ABC):
    """A collective in flight. A step generator yields the collective, and takes the result once resumed."""

    @abstractmethod
    def result(self) -> Tensor:
        """Wait for the collective and return the output. Raise any error of the communicator."""


class FinishedCollective(Pending):
    """A finished collective."""

    def __init__(self, made: Tensor) -> None:
        self._made = made

    def result(self) -> Tensor:
        return self._made


class Comm(ABC):
    """The collectives of one axis. All ranks launch the same collectives in the same order.

    An input tensor belongs to the collective until the result is taken. Sums are taken in the order of ranks,
    in a wide dtype, and rounded once. So all ranks get the same bits, whatever the other rows of the tensor.
    A ``GroupComm`` of GPUs may let NCCL choose the order; then only the equality of ranks holds.
    """

    rank: int
    size: int

    @abstractmethod
    def all_reduce(self, partial: Tensor) -> Pending | None:
        """Start the sum of ``partial`` over the ranks. Return None if ``partial`` is already the sum."""

    @abstractmethod
    def all_gather(self, x: Tensor) -> Pending:
        """Start the gather [size, *x.shape] of x. All ranks pass the same shape."""

    @abstractmethod
    def reduce_scatter(self, x: Tensor) -> Pending:
        """Start the sum of ``x[rank]`` over the ranks; x: [size, *shape] on all ranks."""

    @abstractmethod
    def all_to_all(
        self, x: Tensor, sends: Sequence[int], receives: Sequence[int], even: bool = False
    ) -> Pending:
        """Start an exchange of rows. The result is [sum(receives), *x.shape[1:]], in order of ranks.

        Rows of x are grouped in order of ranks: ``sends[r]`` rows go to rank r. ``receives[r]`` rows come
        from rank r. ``even``: True if all ranks send equally many rows to every rank. All ranks pass the same
        value.
        """


class LocalComm(Comm):
    """A group of one rank, with no-op collectives."""

    rank = 0
    size = 1

    def all_reduce(self, partial: Tensor) -> Pending | None:
        return None

    def all_gather(self, x: Tensor) -> Pending:
        return FinishedCollective(x.unsqueeze(0))

    def reduce_scatter(self, x: Tensor) -> Pending:
        return FinishedCollective(x[0])

    def all_to_all(
        self, x: Tensor, sends: Sequence[int], receives: Sequence[int], even: bool = False
    ) -> Pending:
        return FinishedCollective(x)


def reduced(comm: Comm, partial: Tensor) -> Generator[Pending, None, Tensor]:
    """Return the sum of a row-parallel layer's partials: one yield on several ranks, none on one rank.

    Use only with ``yield from`` inside ``Block.steps`` and ``Model.steps``.
    """
    pending = comm.all_reduce(partial)
    if pending is None:
        return partial
    yield pending
    return pending.result()


def awaited(comm: Comm, pending: Pending) -> Generator[Pending, None, Tensor]:
    """Return the result of a collective of ``comm``: one yield on several ranks, none on one rank."""
    if comm.size > 1:
        yield pending
    return pending.result()


def drive(steps: Generator[Pending, None, R]) -> R:
    """Run a model's step generator to the end, on one rank or without overlap. Return the return value.

    The generator launches a collective, yields its ``Pending`` and calls ``result`` when resumed. So the
    driver decides what runs in between, on one thread. Exceptions pass through.
    """
    try:
        while True:
            next(steps)
    except StopIteration as end:
        result: R = end.value
        return result
