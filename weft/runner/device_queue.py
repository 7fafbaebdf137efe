"""Queue that launches the work of steps.

On a GPU, launches are asynchronous already, so work runs inline on the thread of the caller. On a CPU, the
work of a step *is* its compute. With two steps in flight, one thread runs the work in order. Meanwhile the
caller plans the next step and sends the tokens of the last step.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any, TypeAlias

import torch

from weft.common.errors import EngineDead


class Settled:
    """Completed future for work that ran inline."""

    __slots__ = ("_error", "_value")

    def __init__(self, value: Any, error: BaseException | None = None) -> None:
        self._value, self._error = value, error

    def done(self) -> bool:
        return True

    def exception(self) -> BaseException | None:
        return self._error

    def result(self) -> Any:
        if self._error is not None:
            raise self._error
        return self._value

    def add_done_callback(self, call: Callable[[Any], object]) -> None:
        call(self)


Work: TypeAlias = Future[Any] | Settled


class DeviceQueue:
    """Runs work in submission order. With ``threaded``, the work runs on a daemon thread: a process can exit
    even if the work hangs.

    The work computes with as many CPU threads as the caller of ``submit``. torch's setting counts for one
    thread, so the caller's setting alone would not reach the daemon thread.
    """

    def __init__(self, threaded: bool) -> None:
        """With ``threaded``, start a daemon thread that runs the submitted work in order. Otherwise
        ``submit`` runs work in the caller."""
        self._work: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        if threaded:
            self._thread = threading.Thread(target=self._run, name="weft-device", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while (task := self._work.get()) is not None:
            task()

    def submit(self, work: Callable[..., Any], *args: Any) -> Work:
        """Run or queue ``work(*args)`` and return a future. An Exception of the work is stored in the future.

        If inline work is interrupted (KeyboardInterrupt, SystemExit), the interrupt is raised here. The
        interrupted work is half done and cannot resume.
        """
        if self._thread is None:
            return _carried_out(work, args)
        future: Future[Any] = Future()
        threads = torch.get_num_threads()
        self._work.put(lambda: _carry_out(future, threads, work, args))
        return future

    def close(self, timeout: float = 10.0) -> None:
        """Stop the thread after the queued work. Gives up after ``timeout`` seconds."""
        if self._thread is not None:
            self._work.put(None)
            self._thread.join(timeout)


def _carry_out(future: Future[Any], threads: int, work: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """Run work with ``threads`` CPU threads and store its result or exception in the future. An interrupt is
    stored as EngineDead."""
    try:
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
        future.set_result(work(*args))
    except Exception as error:
        future.set_exception(error)
    except BaseException as interrupt:
        future.set_exception(_lost(interrupt))


def _carried_out(work: Callable[..., Any], args: tuple[Any, ...]) -> Settled:
    """Run work inline and return its result or Exception as a completed future. An interrupt propagates."""
    try:
        return Settled(work(*args))
    except Exception as error:
        return Settled(None, error)


def _lost(interrupt: BaseException) -> EngineDead:
    """Return the EngineDead error for work that an interrupt left half done."""
    lost = EngineDead("a step was interrupted")
    lost.__cause__ = interrupt
    return lost


def result_of(future: Work, deadline: float) -> Any:
    """Return the result of the future or raise its exception. Raises EngineDead after ``deadline`` (monotonic
    seconds)."""
    if (
        isinstance(future, Future)
        and not future.done()
        and not wait((future,), max(deadline - time.monotonic(), 0.0)).done
    ):
        raise EngineDead("a step did not finish in time")
    return future.result()
