"""Two micro-batches of a step in turns, on one thread.

    first    compute ─ launch  ..........  take ─ compute ─ launch  ..........
    second              compute ─ launch  ..........  take ─ compute ─ launch
                        └ under the first one's collective

A micro-batch runs from one communication point to its next; then it is the other's turn. So the first
micro-batch is always ahead, by no more than one stretch: whatever it computes between two of its points (a
layer's caches and states, for one) is there before the second micro-batch comes to the same stretch.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import TypeVar

from weft.common.errors import EngineDead
from weft.parallel.comm import Pending

R = TypeVar("R")


def interleave(
    first: Generator[Pending, None, R],
    second: Generator[Pending, None, R],
    turn: Callable[[int], None] | None = None,
) -> tuple[R, R]:
    """Runs both to their ends and returns what they return. Both must yield equally often.

    ``turn(micro_batch)`` is called before each stretch of micro-batch 0 or 1. What one of them raises closes
    the other and passes through; collectives that were in flight are left to the communicator, which has to
    be aborted, as the other ranks wait in them. Raises EngineDead when only one of them ends.
    """
    micro_batches = (first, second)
    made: list[R] = []
    try:
        while not made:
            for micro_batch, steps in enumerate(micro_batches):
                if turn is not None:
                    turn(micro_batch)
                try:
                    next(steps)
                except StopIteration as end:
                    made.append(end.value)
            if len(made) == 1:
                raise EngineDead("two micro-batches of a step do not communicate equally often")
    finally:
        for steps in micro_batches:
            steps.close()
    return made[0], made[1]
