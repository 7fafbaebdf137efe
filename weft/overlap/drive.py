"""Run a model's step generator.

The generator launches a collective, yields its ``Pending`` and calls ``.result()`` when resumed. So the
driver decides what runs in between, on one thread, with ordinary exceptions.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import TypeVar

from weft.parallel.comm import Pending

R = TypeVar("R")


def drive(steps: Generator[Pending, None, R]) -> R:
    """Run a generator to the end and return the return value. Exceptions pass through."""
    try:
        while True:
            next(steps)
    except StopIteration as end:
        result: R = end.value
        return result
