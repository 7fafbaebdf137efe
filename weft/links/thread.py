"""``Links`` in a thread of their own, for callers without an event loop: events come by ``step``."""

from __future__ import annotations

import asyncio
import concurrent.futures
import queue
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from weft.common.errors import EngineDead, WeftError
from weft.common.log import get_logger
from weft.links.flow import Flow
from weft.links.links import Links
from weft.types import messages as m

log = get_logger(__name__)

T = TypeVar("T")
CALL_S = 60.0
"""Seconds that the thread may take for what does not wait for heads."""


class LinksThread:
    """Submits, steps and finishes as ``EngineCore`` does. Not thread-safe: one thread calls it."""

    def __init__(self, make: Callable[[], Links]) -> None:
        """``make`` is called in the thread, on its loop. Waits for all heads to load. Raises WeftError."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="weft-links", daemon=True)
        self._thread.start()
        self._events: queue.SimpleQueue[m.TokenEvent] = queue.SimpleQueue()
        self._flows: dict[int, Flow] = {}
        self._links: Links | None = None
        try:
            self._links = self._call(_later(make), None)
            self._welcome = self._call(self._links.start(), None)
        except BaseException:
            self.end()
            raise

    @property
    def links(self) -> Links:
        """To be read only."""
        assert self._links is not None
        return self._links

    @property
    def welcome(self) -> m.Welcome:
        """What all heads can serve."""
        return self._welcome

    @property
    def open_sequences(self) -> int:
        """Sequences whose end was not returned by ``step`` yet."""
        return len(self._flows)

    def submit(self, submit: m.Submit) -> None:
        """Sends a sequence to a head. What is wrong with it comes as an event. Raises WeftError."""
        links = self.links
        self._call(_later(lambda: self._open(links, submit)))  # an interrupt leaves nothing unknown

    def _open(self, links: Links, submit: m.Submit) -> None:
        self._flows[submit.sequence] = links.submit([submit], self._events.put)

    def finish(self, sequence: int) -> None:
        """Ends a sequence wherever it is. Idempotent; nothing more is heard of it."""
        flow = self._flows.pop(sequence, None)
        if flow is not None:
            self._loop.call_soon_threadsafe(self.links.release, flow)

    def step(self, wait: float) -> list[m.TokenEvent]:
        """What came since the last call; waits ``wait`` seconds for the first. Raises EngineDead."""
        events = []
        try:
            events.append(self._events.get(timeout=wait))
            while True:
                events.append(self._events.get_nowait())
        except queue.Empty:
            pass
        if self.links.failure is not None:
            raise EngineDead(self.links.failure.message)
        fresh = [event for event in events if event.sequence in self._flows]
        for event in fresh:
            if event.finish is not None:
                del self._flows[event.sequence]
        return fresh

    def stats(self, timeout: float) -> list[m.HeadStats]:
        """See ``Links.stats``."""
        return self._call(self.links.stats(timeout), timeout + CALL_S)

    def end(self) -> None:
        """Tells every head to stop, and ends the thread. Idempotent."""
        if self._loop.is_closed():
            return
        try:
            if self._links is not None:
                self._call(self._links.close())
        except (WeftError, TimeoutError) as error:
            log.warning("while closing: %s", error)
        self._loop.call_soon_threadsafe(self._stop)
        self._thread.join(CALL_S)
        self._loop.close()

    def _stop(self) -> None:
        """Ends the loop, after those who still wait for something on it have heard so."""
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        self._loop.call_soon(self._loop.stop)

    def _call(self, work: Coroutine[Any, Any, T], timeout: float | None = CALL_S) -> T:
        if self._loop.is_closed():
            work.close()
            raise EngineDead("the engine was shut down")
        try:
            return asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout)
        except concurrent.futures.CancelledError:
            raise EngineDead("the engine was shut down") from None


async def _later(work: Callable[[], T]) -> T:
    return work()
