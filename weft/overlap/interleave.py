"""Run the two micro-batches of a step alternately, on one thread.

    first    compute ─ launch  ..........  take ─ compute ─ launch  ..........
    second              compute ─ launch  ..........  take ─ compute ─ launch
                        └ under the first micro-batch's collective

A micro-batch runs from one communication point to the next; then the other micro-batch runs. So the first
micro-batch is always ahead by at most one stretch, the work between two communication points. So the results
of a stretch of the first micro-batch (for example the caches and states of a layer) are complete before the
second micro-batch begins the same stretch.
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
    """Run both generators to the end, in turn, and return both return values. Both must yield equally often.

    ``turn(micro_batch)`` is called before each stretch of micro-batch 0 or 1. An exception in one micro-batch
    closes the other and passes through. Collectives in flight are left to the communicator: the caller must
    abort the communicator, because other ranks wait in the collectives.

    Raises EngineDead when only one generator ends.
    """
    micro_batches = (first, second)
    results: list[R] = []
    try:
        # Both generators must end in the same round, or the check below fails.
        while not results:
            for micro_batch, steps in enumerate(micro_batches):
                if turn is not None:
                    turn(micro_batch)
                try:
                    next(steps)
                except StopIteration as end:
                    results.append(end.value)
            if len(results) == 1:
                raise EngineDead("two micro-batches of a step do not communicate equally often")
    finally:
        for steps in micro_batches:
            steps.close()
    return results[0], results[1]
