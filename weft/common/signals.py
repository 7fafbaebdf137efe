"""The stop signals, and the handling of stop signals in a server's processes.

A terminal sends SIGINT and SIGQUIT to all processes of the foreground group, and SIGHUP when the terminal
closes. Supervisors may send SIGTERM to all processes. Only the API server acts on the signals: the API server
drains, then ends all engine processes and workers. Engine processes and workers ignore the signals from the
first instruction on.
"""

from __future__ import annotations

import contextlib
import math
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)

RESTART = signal.SIGUSR1
"""Requests a rolling restart of the engine processes from a server's first process. The other processes
ignore the signal.
"""


def handled_stops() -> list[signal.Signals]:
    """Return the signals of ``STOPS`` that the process handles.

    SIGHUP and SIGQUIT are excluded where the parent process ignored the signal (``nohup``, ``&``).
    """
    optional = (signal.SIGHUP, signal.SIGQUIT)
    return [n for n in STOPS if n not in optional or signal.getsignal(n) is not signal.SIG_IGN]


def end(number: int, frame: object) -> None:
    """Signal handler: exit with status 128 plus the signal's number, with cleanup."""
    sys.exit(128 + number)


@contextlib.contextmanager
def ending() -> Iterator[None]:
    """Within the block, stop signals exit the process with cleanup. Call from the main thread.

    SIGINT keeps the existing handler, because Python raises KeyboardInterrupt. Signals blocked by the parent
    are unblocked.
    """
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)
    before = {number: signal.signal(number, end) for number in handled_stops() if number != signal.SIGINT}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def ignore() -> None:
    """Ignore ``STOPS`` from now on, including pending signals. Call from the main thread."""
    for number in STOPS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)


@contextlib.contextmanager
def acting(act: Callable[[int], object]) -> Iterator[None]:
    """Within the block, stop signals call ``act`` with the signal number. Afterwards stop signals are
    ignored.

    Signals blocked by the caller are unblocked. Call from the main thread.
    """
    for number in handled_stops():
        signal.signal(number, lambda caught, _: act(caught))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)
    try:
        yield
    finally:
        ignore()


@contextlib.contextmanager
def blocked() -> Iterator[None]:
    """Within the block, block ``STOPS`` for the current thread, and for child processes until a call of
    ``ignore``.

    Pending signals of the thread are delivered after the block.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def is_suspended(pid: int) -> bool:
    """Return True if process ``pid`` is suspended. False without /proc."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    except (OSError, IndexError):  # the process has ended, or there is no /proc
        return False


class Suspensions:
    """Tracks for how long processes are suspended. Pure. Times are seconds of one clock."""

    def __init__(self, patience: float) -> None:
        """``patience``: seconds after which a suspended process counts as dead."""
        self._patience = patience
        self._seen: dict[str | int, tuple[float, float]] = {}
        """Process -> times of the first and the last report of the present suspension."""

    def report(self, process: str | int, now: float) -> bool:
        """Note that ``process`` is suspended. Return True if the process counts as dead.

        Call at least twice per ``patience`` while the process is suspended. A longer gap means that the
        process ran in between.
        """
        first, last = self._seen.get(process, (now, -math.inf))
        if now - last > self._patience / 2:
            first = now
        self._seen[process] = first, now
        return now - first > self._patience

    def forget(self, process: str | int) -> None:
        """Forget a process that has ended. Idempotent."""
        self._seen.pop(process, None)
