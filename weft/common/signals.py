"""The signals that ask a process to stop, and how a server's processes share them.

A terminal sends SIGINT and SIGQUIT, and SIGHUP when it is closed, to all processes of the foreground group,
and supervisors may send SIGTERM to all of them. Only the front acts on them: it drains, then ends its heads
and their workers, which ignore them from their first instruction on.
"""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Iterator

STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)

RESTART = signal.SIGUSR1
"""Asks a server's first process for a rolling restart of its heads; the others ignore it."""


def heeded() -> list[signal.Signals]:
    """The signals of ``STOPS`` that this process should act on.

    SIGHUP and SIGQUIT are left alone where the parent process had them ignored (``nohup``, ``&``).
    """
    kept = (signal.SIGHUP, signal.SIGQUIT)
    return [n for n in STOPS if n not in kept or signal.getsignal(n) is not signal.SIG_IGN]


def end(number: int, frame: object) -> None:
    """A handler: ends this process in order, with status 128 and the signal's number."""
    sys.exit(128 + number)


@contextlib.contextmanager
def ending() -> Iterator[None]:
    """In this block they end the process in order, so what it began is undone. From the main thread.

    SIGINT is left as it is: Python raises KeyboardInterrupt. A parent may have blocked the signals.
    """
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)
    before = {number: signal.signal(number, end) for number in heeded() if number != signal.SIGINT}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def ignore() -> None:
    """Ignores ``STOPS`` from now on, and those that came while they were blocked. From the main thread."""
    for number in STOPS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)


@contextlib.contextmanager
def blocked() -> Iterator[None]:
    """Blocks ``STOPS`` for this thread, and for processes that it starts until they ``ignore`` them.

    What comes for this thread is delivered afterwards.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
