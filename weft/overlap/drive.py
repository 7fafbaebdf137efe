"""Running a model's step generator.

A generator launches a collective, yields its ``Pending`` and takes ``.result()`` when it is resumed. So
its driver decides what else runs in between, on one thread, with ordinary exceptions.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import TypeVar

from weft.parallel.comm import Pending

R = TypeVar("R")


def drive(steps: Generator[Pending, None, R]) -> R:
    """Runs one generator to its end and returns what it returns. Its exceptions pass through."""
    try:
        while True:
            next(steps)
    except StopIteration as end:
        result: R = end.value
        return result
