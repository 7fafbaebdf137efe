"""Progress bars on a terminal. Files and pipes get no bars. Engine processes of a server write log lines
instead, because several engines may share a terminal.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from weft.common.log import get_logger

log = get_logger(__name__)

LINES_S = 10.0
"""Seconds between two log lines. Shorter work gets no line."""
_FORM = "{desc}: {percentage:.0f} % ({n_fmt} of {total_fmt} {unit}s, {remaining} left)"

if TYPE_CHECKING:
    Bar = tqdm[Any]
else:
    Bar = tqdm


class _Lines:
    """A file for tqdm that turns each write into a log line."""

    def write(self, text: str) -> None:
        if line := text.strip():
            log.info("%s", line)

    def flush(self) -> None:
        pass


_shown_in: _Lines | None = None


def use_lines() -> None:
    """Report progress of the process as log lines from now on."""
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
    """Return a bar on standard error, or a silent bar if standard error is no terminal or ``shown`` is False.

    Iterate over the bar to go through ``steps``, or call ``update`` up to ``total``. Use the bar as a context
    manager. The bar appears after ``delay`` seconds and disappears at the end unless ``leave``. After
    ``use_lines`` the bar writes log lines.
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
        disable=None if shown else True,  # None: tqdm disables the bar if the file is no terminal
        dynamic_ncols=True,
        delay=delay,
        leave=leave,
    )
