"""Threads of an API server for text work, so that the event loop stays free."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from weft.common.allocator import trim_heap

P = ParamSpec("P")
T = TypeVar("T")

TEXT_THREADS = 2
TRIM_AFTER = 3.0
"""Seconds between a large body and the trim of the heap."""


class TextThreads:
    """A small pool of threads. Used from one event loop, by all models of the server."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(TEXT_THREADS, thread_name_prefix="weft-text")
        self.busy = 0
        """Number of work items that run or wait for a thread."""
        self._trimming: asyncio.TimerHandle | None = None

    async def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run ``function`` in a thread and return the result, or raise its exception."""
        self.busy += 1
        try:
            work = functools.partial(function, *args, **kwargs)
            return await asyncio.get_running_loop().run_in_executor(self._pool, work)
        finally:
            self.busy -= 1

    def trim_later(self) -> None:
        """Schedule a heap trim in ``TRIM_AFTER`` seconds; else the allocator keeps large bodies' memory."""
        loop = asyncio.get_running_loop()
        if self._trimming is None or self._trimming.when() < loop.time():
            self._trimming = loop.call_later(TRIM_AFTER, loop.run_in_executor, self._pool, trim_heap)

    def close(self) -> None:
        """End the threads after their present work."""
        if self._trimming is not None:
            self._trimming.cancel()
        self._pool.shutdown(wait=False, cancel_futures=True)
