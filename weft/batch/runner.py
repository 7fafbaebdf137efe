"""Run the lines of batches: carry out the actions of a ``BatchBook`` with a line store and a server."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from typing import NamedTuple, Protocol

from weft.batch.book import (
    Action,
    Answered,
    BatchBook,
    Capacity,
    Drained,
    EndReason,
    Event,
    Finalize,
    Interrupted,
    Record,
    Recorded,
    StartLine,
    Tick,
)
from weft.batch.lines import BatchAnswer
from weft.common.log import get_logger

log = get_logger(__name__)

POLL_S = 0.05
"""Maximum seconds between two reads of the free capacity."""
MOST_GROUP = 256
"""Maximum number of outputs written at once."""


class LineRequest(NamedTuple):
    """The HTTP request of a line."""

    batch: str
    line: int
    url: str
    body: bytes
    sequences: int = 1
    """Estimated number of sequences."""
    owner: str = ""
    """Owner of the batch: the API key in a form that survives a restart."""


class LineOutput(NamedTuple):
    """The answer of a line, to be written."""

    batch: str
    line: int
    good: bool
    """True for an answer with status 200."""
    answer: BatchAnswer


class LineLost(Exception):
    """The line has no answer, because the connection or the server ended."""


class LineBroken(Exception):
    """The line cannot be sent. ``answer`` is recorded as the answer of the line."""

    def __init__(self, answer: BatchAnswer) -> None:
        self.answer = answer


class LineStore(Protocol):
    """Storage of lines and outputs. Calls may wait for a disk."""

    async def request(self, batch: str, line: int) -> LineRequest:
        """Return the request of a line. Raises LineBroken, or LineLost for a line to retry later."""

    async def record(self, outputs: list[LineOutput]) -> None:
        """Write outputs. On return the outputs are durable. A second output of a line is ignored."""

    async def finalize(self, batch: str, reason: EndReason) -> None:
        """Write the records of undone lines, and end the batch."""


Send = Callable[[LineRequest], Awaitable[BatchAnswer]]
"""Sends a request and returns the answer. Raises LineLost."""


class BatchRunner:
    """Runs all open batches of one book. Used from one event loop."""

    def __init__(
        self, book: BatchBook, store: LineStore, send: Send, capacity: Callable[[str, int], int]
    ) -> None:
        """``capacity(model, sequences)``: number of further lines of ``model`` that may run now.
        ``sequences``: sequences of the running lines of the model."""
        self.book = book
        self._store = store
        self._send = send
        self._capacity = capacity
        self._tasks: dict[tuple[str, int], asyncio.Task[None]] = {}
        self._finals: set[asyncio.Task[None]] = set()
        self._outputs: asyncio.Queue[LineOutput] = asyncio.Queue()
        self._answers: dict[tuple[str, int], BatchAnswer] = {}
        self._failed: BaseException | None = None
        self._wake = asyncio.Event()
        self.sequences: Counter[str] = Counter()
        """Model -> estimated number of sequences of the running lines."""

    async def run(self, until: Callable[[], bool]) -> None:
        """Run lines until ``until`` returns True, then stop all lines. Raises the first error of the store or
        of ``send``, except LineLost. Running lines are then lost."""
        writer = asyncio.create_task(self._write())
        try:
            while not until():
                if self._failed is not None:
                    raise self._failed
                if writer.done():
                    writer.result()
                self._start_lines()
                await self._pause()
        finally:
            ends = [writer, *self._tasks.values(), *self._finals]
            for task in ends:
                task.cancel()
            await asyncio.gather(*ends, return_exceptions=True)

    def _start_lines(self) -> None:
        """End batches after their deadline, and start lines up to the free capacity."""
        # Without `feed`: `feed` wakes this loop, so the loop would never wait.
        self._carry_out(self.book.on(Tick(), time.monotonic()))
        for model in self.book.ready_models(time.monotonic()):
            capacity = Capacity(self._capacity(model, self.sequences[model]), model)
            self._carry_out(self.book.on(capacity, time.monotonic()), model)

    def stop_lines(self, model: str) -> None:
        """Stop the running lines of a model that drains. The lines run again later."""
        self.feed(Drained(model))

    async def _pause(self) -> None:
        """Wait until something has changed, at most ``POLL_S`` seconds."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(POLL_S):
                await self._wake.wait()
        self._wake.clear()

    def feed(self, event: Event) -> None:
        """Apply an event to the book, and carry out the actions."""
        self._carry_out(self.book.on(event, time.monotonic()))
        self._wake.set()

    def _carry_out(self, actions: Iterable[Action], model: str = "") -> None:
        """Start each action. ``model``: model of the lines to start."""
        for action in actions:
            if isinstance(action, Finalize):
                task = asyncio.create_task(self._finalize(action))
                self._finals.add(task)
                continue
            key = (action.batch, action.line)
            if isinstance(action, StartLine):
                # Count one sequence now: the store may return the request late.
                self.sequences[model] += 1
                self._tasks[key] = asyncio.create_task(self._run_line(*key, model))
            elif isinstance(action, Record):
                answer = self._answers.pop(key)
                self._outputs.put_nowait(LineOutput(action.batch, action.line, action.good, answer))
            elif (running := self._tasks.get(key)) is not None:  # Stop
                # A task that is cancelled before its first step runs no code, and reports no outcome.
                asyncio.get_running_loop().call_soon(running.cancel)

    async def _run_line(self, batch: str, line: int, model: str) -> None:
        """Send one line and report the outcome to the book. An unexpected error ends the runner."""
        event: Event = Interrupted(batch, line)
        weight = 1
        try:
            try:
                request = await self._store.request(batch, line)
                self.sequences[model] += request.sequences - weight
                weight = request.sequences
                answer = await self._send(request)
            except LineBroken as broken:
                answer = broken.answer
            self._answers[batch, line] = answer
            event = Answered(batch, line, answer.status)
        except (LineLost, asyncio.CancelledError):
            pass
        except Exception as error:
            self._failed = error
        finally:
            self.sequences[model] -= weight
            del self._tasks[batch, line]
            self.feed(event)
            self._answers.pop((batch, line), None)  # the book did not record the answer

    async def _finalize(self, action: Finalize) -> None:
        try:
            await self._store.finalize(action.batch, action.reason)
        except Exception as error:
            self._failed = error
        finally:
            self._finals.discard(asyncio.current_task())
            self._wake.set()

    async def _write(self) -> None:
        """Write outputs in groups, and report each to the book. Ends with the first error of the store."""
        while True:
            group = [await self._outputs.get()]
            while len(group) < MOST_GROUP and not self._outputs.empty():
                group.append(self._outputs.get_nowait())
            await self._store.record(group)
            for output in group:
                self.feed(Recorded(output.batch, output.line))

    @property
    def idle(self) -> bool:
        """True if no batch is open, and every end is written."""
        return not self.book.open and not self._finals and not self._tasks
