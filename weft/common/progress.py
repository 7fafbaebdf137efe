"""Progress bars: one way to show them, for people who watch. In files and pipes there are none."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

if TYPE_CHECKING:
    Bar = tqdm[Any]
else:
    Bar = tqdm


def progress_bar(
    steps: Iterable[Any] | None = None,
    *,
    title: str,
    unit: str,
    total: int | None = None,
    shown: bool = True,
    delay: float = 0.0,
    leave: bool = True,
) -> Bar:
    """A bar on standard error if that is a terminal and ``shown``; else one that writes nothing.

    Iterate over it to go through ``steps``, or ``update`` it up to ``total``; leave it as a context. It
    appears after ``delay`` seconds and, unless ``leave``, goes away with its end.
    """
    return tqdm(
        steps,
        desc=title,
        unit=unit,
        total=total,
        disable=None if shown else True,  # None: by whether the file is a terminal
        dynamic_ncols=True,
        delay=delay,
        leave=leave,
    )
