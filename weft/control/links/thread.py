"""``Links`` in a dedicated thread, for callers without an event loop. ``step`` returns the events."""

from __future__ import annotations

import asyncio
import concurrent.futures
import queue
import threading
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, TypeVar

from weft.common.errors import EngineDead, ReportedError, WeftError
from weft.common.log import get_logger
from weft.control.links.flow import Flow
from weft.control.links.links import Links
from weft.types import messages as m
from weft.types.adapters import LoadAdapter
from weft.types.tier_flush import FlushTier

log = get_logger(__name__)

T = TypeVar("T")
CALL_S = 60.0
"""Maximum seconds for calls that do not wait for engine processes."""


class LinksThread:
    """Submit, step and finish with the interface of ``EngineCore``. Not thread-safe: one thread calls the
    methods.
    """

    def __init__(self, make: Callable[[], Links]) -> None:
        """Start the thread and block until all engine processes have loaded. Raises WeftError.

        ``make`` creates the links and is called on the thread's event loop.
        """
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
        """The links. Read-only."""
        assert self._links is not None
        return self._links

    @property
    def welcome(self) -> m.Welcome:
        """The common Welcome of all engine processes."""
        return self._welcome

    @property
    def open_sequences(self) -> int:
        """Number of sequences without an end event from ``step``."""
        return len(self._flows)

    def submit(self, submit: m.Submit) -> None:
        """Send a sequence to an engine process. Errors of the sequence arrive later, as an event. Raises
        WeftError.
        """
        links = self.links
        # On the loop: an interrupt here cannot leave an unknown sequence.
        self._call(_later(lambda: self._open(links, submit)))

    def _open(self, links: Links, submit: m.Submit) -> None:
        self._flows[submit.sequence] = links.submit([submit], self._events.put)

    def finish(self, sequence: int) -> None:
        """End a sequence in any state. Idempotent. No further events of the sequence follow."""
        flow = self._flows.pop(sequence, None)
        if flow is not None:
            self._loop.call_soon_threadsafe(self.links.release, flow)

    def step(self, wait: float) -> list[m.TokenEvent]:
        """Return the events since the last call.

        Block up to ``wait`` seconds for the first. Finished sequences are forgotten. Raises EngineDead once
        no engine process is left.
        """
        events = []
        try:
            events.append(self._events.get(timeout=wait))
            while True:
                events.append(self._events.get_nowait())
        except queue.Empty:
            pass
        if self.links.failure is not None:
            raise EngineDead(self.links.failure.message)
        # Drop late events of sequences already finished here.
        fresh = [event for event in events if event.sequence in self._flows]
        for event in fresh:
            if event.finish is not None:
                del self._flows[event.sequence]
        return fresh

    def stats(self, timeout: float) -> list[m.EngineStats]:
        """Return the statistics of all engine processes. See ``Links.stats``."""
        return self._call(self.links.stats(timeout), timeout + CALL_S)

    def flush(self, message: FlushTier) -> None:
        """Send a flush of the KV cache to every live engine process."""
        self._call(_later(lambda: self.links.flush(message)))

    def load_adapters(self, messages: Iterable[LoadAdapter], timeout: float) -> None:
        """Load LoRA adapters on all engine processes with places, and block until all have answered.

        Raises the error of the first process that refuses an adapter, and EngineDead after ``timeout``
        seconds.
        """
        self._call(self._load(list(messages), timeout), timeout + CALL_S)

    async def _load(self, messages: list[LoadAdapter], timeout: float) -> None:
        live = [(one, one.welcome) for one in self.links.instances if one.alive]
        takers = [one for one, welcome in live if welcome is not None and welcome.max_loras]
        waiting = [(one, message.digest) for one in takers for message in messages]
        for one in takers:
            for message in messages:
                self.links.tell(one.name, message)
        try:
            async with asyncio.timeout(timeout):
                while any(one.alive and digest not in one.adapters for one, digest in waiting):
                    await asyncio.sleep(0.005)
        except TimeoutError:
            raise EngineDead("an engine did not load the LoRA adapters in time") from None
        for one, digest in waiting:
            if (error := one.adapters.get(digest)) is not None:
                raise ReportedError(error)

    def end(self) -> None:
        """Stop every engine process and end the thread.

        Idempotent. Errors of the engines are logged, not raised.
        """
        if self._loop.is_closed():
            return
        try:
            if self._links is not None:
                self._call(self._links.close())
        except (WeftError, TimeoutError) as error:
            log.warning("error while closing: %s", error)
        self._loop.call_soon_threadsafe(self._stop)
        self._thread.join(CALL_S)
        self._loop.close()

    def _stop(self) -> None:
        """Stop the event loop, after cancelling tasks to release waiting callers."""
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        self._loop.call_soon(self._loop.stop)

    def _call(self, work: Coroutine[Any, Any, T], timeout: float | None = CALL_S) -> T:
        """Run ``work`` on the thread's event loop and return the result.

        Blocks. Raises EngineDead after ``end``, TimeoutError after ``timeout`` seconds, and the errors of
        ``work``.
        """
        if self._loop.is_closed():
            work.close()
            raise EngineDead("the engine was shut down")
        try:
            return asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout)
        except concurrent.futures.CancelledError:
            raise EngineDead("the engine was shut down") from None


async def _later(work: Callable[[], T]) -> T:
    return work()
