"""Where a step's work is launched from.

On a GPU, launching is asynchronous already, so work runs inline on the caller's thread. On a CPU a step's
work *is* its compute: with two steps in flight it goes to one thread of its own, in order, so that the next
step is planned and the last one's tokens are sent while it computes.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

from weft.common.errors import EngineDead


class DeviceQueue:
    """Runs work in submission order. ``threaded`` gives it a thread."""

    def __init__(self, threaded: bool) -> None:
        self._pool = ThreadPoolExecutor(1, "weft-device") if threaded else None

    def submit(self, work: Callable[..., Any], *args: Any) -> Future[Any]:
        """Runs, or queues, ``work(*args)``. Its exception is the future's; an interrupt of it, EngineDead."""
        if self._pool is not None:
            return self._pool.submit(work, *args)
        future: Future[Any] = Future()
        try:
            future.set_result(work(*args))
        except Exception as error:
            future.set_exception(error)
        except BaseException as interrupt:  # the work is half done, and whoever comes next must know
            lost = EngineDead("a step was interrupted")
            lost.__cause__ = interrupt
            future.set_exception(lost)
        return future

    def close(self) -> None:
        """Ends the thread when what is queued has run."""
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)


def result_of(future: Future[Any], deadline: float) -> Any:
    """The future's result, or its exception. Raises EngineDead after ``deadline`` (monotonic seconds)."""
    if not wait((future,), max(deadline - time.monotonic(), 0.0)).done:
        raise EngineDead("a step did not finish in time")
    return future.result()
