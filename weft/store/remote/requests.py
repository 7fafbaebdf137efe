"""Requests to an object store, on an event loop in a thread of its own.

Callers wait up to a deadline. A request that is late is cancelled, and nothing waits for the request any
more.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any, TypeVar

from weft.store.remote.objects import RemoteError

_T = TypeVar("_T")
MOST_IN_FLIGHT = 16
"""Maximum requests under way."""


class Requests:
    """The event loop. ``call`` and ``start`` may be used from any thread."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._limit = asyncio.Semaphore(MOST_IN_FLIGHT)
        self._thread = threading.Thread(target=self._run, name="weft-remote", daemon=True)
        self._thread.start()

    def call(self, work: Coroutine[Any, Any, _T], seconds: float) -> _T:
        """Return the result of ``work``. Raises RemoteError, also after ``seconds``."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result(seconds)
        except TimeoutError:
            future.cancel()
            raise RemoteError(f"no answer in {seconds:.0f} s") from None

    def start(self, work: Coroutine[Any, Any, object]) -> None:
        """Begin ``work`` and return. ``work`` handles all errors."""
        asyncio.run_coroutine_threadsafe(work, self._loop)

    def soon(self, work: Callable[[], object]) -> None:
        """Call ``work`` on the event loop."""
        self._loop.call_soon_threadsafe(work)

    async def one(self, work: Callable[[], Coroutine[Any, Any, _T]], seconds: float) -> _T:
        """Return the result of one request, once fewer than ``MOST_IN_FLIGHT`` are under way. Raises
        RemoteError, also after ``seconds`` without an answer. For coroutines of the loop."""
        async with self._limit:
            try:
                return await asyncio.wait_for(work(), seconds)
            except TimeoutError:
                raise RemoteError(f"no answer in {seconds:.0f} s") from None

    def close(self) -> None:
        """Cancel everything and end the thread."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(2.0)

    def _run(self) -> None:
        self._loop.run_forever()
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        if tasks:
            self._loop.run_until_complete(asyncio.wait(tasks, timeout=1.0))
        self._loop.close()


def batched(items: Sequence[_T], size: int) -> Iterator[Sequence[_T]]:
    """Yield ``items`` in order, up to ``size`` at a time."""
    for at in range(0, len(items), size):
        yield items[at : at + size]
