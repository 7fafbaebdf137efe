"""Where a step's work is launched from.

On a GPU, launching is asynchronous already, so work runs inline on the caller's thread. On a CPU a step's
work *is* its compute: with two steps in flight it goes to one thread of its own, in order, so that the next
step is planned and the last one's tokens are sent while it computes.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any

from weft.common.errors import EngineDead


class DeviceQueue:
    """Runs work in submission order. ``threaded`` gives it a thread."""

    def __init__(self, threaded: bool) -> None:
        self._pool = ThreadPoolExecutor(1, "weft-device") if threaded else None

    def submit(self, work: Callable[..., Any], *args: Any) -> Future[Any]:
        """Runs, or queues, ``work(*args)``. Its exception is the future's."""
        if self._pool is not None:
            return self._pool.submit(work, *args)
        future: Future[Any] = Future()
        try:
            future.set_result(work(*args))
        except BaseException as error:
            future.set_exception(error)
        return future

    def close(self) -> None:
        """Ends the thread when what is queued has run."""
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)


def result_of(future: Future[Any], timeout: float) -> Any:
    """The future's result. Raises EngineDead when it is not there after ``timeout`` seconds."""
    try:
        return future.result(timeout)
    except FutureTimeout:
        raise EngineDead(f"a step did not finish within {timeout:g} s") from None
