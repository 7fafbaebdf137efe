"""Where a step's work is launched from.

On a GPU, launching is asynchronous already, so work runs inline on the caller's thread. On a CPU a step's
work *is* its compute: with two steps in flight it goes to one thread of its own, in order, so that the next
step is planned and the last one's tokens are sent while it computes.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any, TypeAlias

from weft.common.errors import EngineDead


class Settled:
    """A future that has ended: of work that ran inline, most of which nobody waits for."""

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
    """Runs work in submission order. ``threaded`` gives it a thread, which a process does not wait for at
    its end: work that hangs hangs nobody else.
    """

    def __init__(self, threaded: bool) -> None:
        self._work: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        if threaded:
            self._thread = threading.Thread(target=self._run, name="weft-device", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while (task := self._work.get()) is not None:
            task()

    def submit(self, work: Callable[..., Any], *args: Any) -> Work:
        """Runs, or queues, ``work(*args)``. Its exception is the future's.

        An interrupt of work that runs inline is raised here: the work is half done, and can't be resumed.
        """
        if self._thread is None:
            return _carried_out(work, args)
        future: Future[Any] = Future()
        self._work.put(lambda: _carry_out(future, work, args))
        return future

    def close(self, timeout: float = 10.0) -> None:
        """Ends the thread when what is queued has run, or gives it up after ``timeout`` seconds."""
        if self._thread is not None:
            self._work.put(None)
            self._thread.join(timeout)


def _carry_out(future: Future[Any], work: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """Gives the future its result or exception; of an interrupt, EngineDead."""
    try:
        future.set_result(work(*args))
    except Exception as error:
        future.set_exception(error)
    except BaseException as interrupt:
        future.set_exception(_lost(interrupt))


def _carried_out(work: Callable[..., Any], args: tuple[Any, ...]) -> Settled:
    """The same inline; an interrupt passes."""
    try:
        return Settled(work(*args))
    except Exception as error:
        return Settled(None, error)


def _lost(interrupt: BaseException) -> EngineDead:
    """The error of work that an interrupt cut short, when it was half done."""
    lost = EngineDead("a step was interrupted")
    lost.__cause__ = interrupt
    return lost


def result_of(future: Work, deadline: float) -> Any:
    """The future's result, or its exception. Raises EngineDead after ``deadline`` (monotonic seconds)."""
    if (
        isinstance(future, Future)
        and not future.done()
        and not wait((future,), max(deadline - time.monotonic(), 0.0)).done
    ):
        raise EngineDead("a step did not finish in time")
    return future.result()
