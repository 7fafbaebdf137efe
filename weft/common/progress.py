"""Progress bars: one way to show them, for people who watch. In files and pipes there are none. A server's
heads tell progress in lines of the log there, and on a terminal that several of them write to.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from weft.common.log import get_logger

log = get_logger(__name__)

LINES_S = 10.0
"""Seconds from one line to the next. What takes no longer has none."""
_FORM = "{desc}: {percentage:.0f} % ({n_fmt} of {total_fmt} {unit}s, {remaining} left)"

if TYPE_CHECKING:
    Bar = tqdm[Any]
else:
    Bar = tqdm


class _Lines:
    """A file for tqdm that makes lines of the log of what it writes."""

    def write(self, text: str) -> None:
        if line := text.strip():
            log.info("%s", line)

    def flush(self) -> None:
        pass


_shown_in: _Lines | None = None


def use_lines() -> None:
    """Progress of this process is told in lines of the log from now on."""
    global _shown_in
    _shown_in = _Lines()


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
    appears after ``delay`` seconds and, unless ``leave``, goes away with its end. See ``use_lines``, too.
    """
    if shown and _shown_in is not None:
        return tqdm(
            steps,
            desc=title,
            unit=unit,
            total=total,
            file=_shown_in,
            bar_format=_FORM,
            mininterval=LINES_S,
            maxinterval=LINES_S,
            delay=LINES_S,
            leave=False,
        )
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
