"""Collectives of one group as a model sees them: launched, then waited for where the result is needed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator

import torch

Tensor = torch.Tensor


class Pending(ABC):
    """A collective in flight. A step generator yields it, and asks for its result when it is resumed."""

    @abstractmethod
    def result(self) -> Tensor:
        """The collective's output; waits for it. Raises what the communicator raised."""


class Comm(ABC):
    """The collectives of one axis. Every rank launches the same ones in the same order."""

    rank: int
    size: int

    @abstractmethod
    def all_reduce(self, partial: Tensor) -> Pending | None:
        """Starts the sum of ``partial`` over the ranks; None where it is the sum already.

        The tensor belongs to the collective until its result was taken.
        """


class LocalComm(Comm):
    """A group of one rank: its collectives do nothing."""

    rank = 0
    size = 1

    def all_reduce(self, partial: Tensor) -> Pending | None:
        return None


def reduced(comm: Comm, partial: Tensor) -> Generator[Pending, None, Tensor]:
    """The sum of a row-parallel layer's partials: one yield on several ranks, none on one.

    For ``yield from`` inside ``Block.steps`` and ``Model.steps`` only.
    """
    pending = comm.all_reduce(partial)
    if pending is None:
        return partial
    yield pending
    return pending.result()
