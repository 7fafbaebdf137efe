"""The book of running batches: which line runs next, which line is done, and when a batch ends.

Pure: ``on(event, now)`` returns actions. No clock, no file, no network. The owner carries the actions out
and reports the results as events.

    pending ── StartLine ──► running ── Answered ──► Record ── Recorded ──► done
       ▲                        │
       └── Answered with a temporary failure, or Interrupted

A batch ends with ``Finalize`` after its last line is done. After ``CancelBatch`` or at its deadline, pending
lines stay undone, and the batch ends when no line runs any more.

Each line belongs to a model, "" for the only model. ``Capacity`` is the free capacity of one model. Lines of
a model that is not loaded therefore wait.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import msgspec

EndReason = Literal["completed", "cancelled", "expired"]

MOST_ATTEMPTS = 4
"""Maximum attempts of a line after failures of the server (``SERVER_FAILED``)."""
FIRST_PAUSE, LONGEST_PAUSE = 0.25, 30.0
"""Seconds before a line runs again after a temporary failure. The pause doubles with each failure."""
NO_CAPACITY = frozenset({429, 499, 503})
"""Statuses of a server without capacity. The line runs again, without a limit of attempts."""
SERVER_FAILED = frozenset({500, 502, 504})
"""Statuses of a failed server. The line runs at most ``MOST_ATTEMPTS`` times."""


class OpenBatch(msgspec.Struct, frozen=True, kw_only=True):
    """A batch begins or continues."""

    batch: str
    lines: tuple[int, ...]
    """Lines without an output, in the order of their run."""
    models: Mapping[int, str] = {}
    """Line -> model, for lines of a server of several models."""
    deadline: float | None = None
    """Time at which the batch ends without the missing outputs; None for no deadline."""


class Capacity(msgspec.Struct, frozen=True):
    """``free`` more lines of the model may start now."""

    free: int
    model: str = ""


class Drained(msgspec.Struct, frozen=True):
    """The model is unloading: stop its running lines. The lines run again when there is capacity."""

    model: str


class Answered(msgspec.Struct, frozen=True):
    """A line has an answer with the HTTP status ``status``."""

    batch: str
    line: int
    status: int


class Interrupted(msgspec.Struct, frozen=True):
    """A line ended without an answer, because its process or its connection ended."""

    batch: str
    line: int


class Recorded(msgspec.Struct, frozen=True):
    """The output of a line is durable."""

    batch: str
    line: int


class CancelBatch(msgspec.Struct, frozen=True):
    """Start no further line of the batch, and stop the running lines."""

    batch: str


class Tick(msgspec.Struct, frozen=True):
    """Time has passed."""


Event: TypeAlias = OpenBatch | Capacity | Drained | Answered | Interrupted | Recorded | CancelBatch | Tick


class StartLine(msgspec.Struct, frozen=True):
    """Send the line to the model."""

    batch: str
    line: int


class Stop(msgspec.Struct, frozen=True):
    """End the running line. ``Interrupted`` or ``Answered`` must follow."""

    batch: str
    line: int


class Record(msgspec.Struct, frozen=True):
    """Write the answer of the line, then report ``Recorded``."""

    batch: str
    line: int
    good: bool
    """True for an answer with status 200."""


class Finalize(msgspec.Struct, frozen=True):
    """Close the files of the batch. Lines without an output get an error record with ``reason``."""

    batch: str
    reason: EndReason


Action: TypeAlias = StartLine | Stop | Record | Finalize


@dataclass(slots=True)
class _Queue:
    """Lines of one model that do not run."""

    pending: deque[int] = field(default_factory=deque)
    paused: list[tuple[float, int]] = field(default_factory=list)
    """Heap of (time of the next attempt, line)."""

    def ready(self, now: float) -> bool:
        return bool(self.pending or (self.paused and self.paused[0][0] <= now))


@dataclass(slots=True)
class _Batch:
    """State of one open batch."""

    order: int
    queues: dict[str, _Queue]
    """Model -> lines of the model that do not run."""
    models: Mapping[int, str]
    deadline: float | None
    running_lines: dict[int, int] = field(default_factory=dict)
    """Running line -> number of the attempt, from 0."""
    recording: set[int] = field(default_factory=set)
    failures: dict[int, int] = field(default_factory=dict)
    """Line -> temporary failures so far."""
    attempts: dict[int, int] = field(default_factory=dict)
    """Line -> failures of the server so far."""
    ends: EndReason | None = None
    """Reason of an early end."""

    def running(self, model: str) -> int:
        """Return the number of running lines of the model."""
        if not self.models:
            return len(self.running_lines)
        return sum(self.models.get(line, "") == model for line in self.running_lines)

    @property
    def busy(self) -> bool:
        """True if a line is running, or an output is being written."""
        return bool(self.running_lines or self.recording)


class BatchBook:
    """All open batches of one API server, or the one batch of a command."""

    def __init__(self) -> None:
        self._batches: dict[str, _Batch] = {}
        self._opened = 0

    @property
    def running(self) -> int:
        """Number of lines that run now."""
        return sum(len(batch.running_lines) for batch in self._batches.values())

    @property
    def open(self) -> list[str]:
        """Names of the open batches, oldest first."""
        return list(self._batches)

    def ready_models(self, now: float) -> list[str]:
        """Return the models with a line that may start at ``now``, in the order of the batches."""
        return list(
            dict.fromkeys(
                model
                for batch in self._batches.values()
                if batch.ends is None
                for model, queue in batch.queues.items()
                if queue.ready(now)
            )
        )

    def unfinished(self) -> Counter[str]:
        """Return model -> number of running, pending and paused lines."""
        found: Counter[str] = Counter()
        for batch in self._batches.values():
            found.update(batch.models.get(line, "") for line in batch.running_lines)
            if batch.ends is None:
                for model, queue in batch.queues.items():
                    found[model] += len(queue.pending) + len(queue.paused)
        return +found

    def on(self, event: Event, now: float) -> list[Action]:
        """Apply ``event`` at ``now``, seconds of any clock that never goes back, and return the actions.

        Each line gets at most one ``Record``, and each batch exactly one ``Finalize``, which is the last
        action of the batch. An event of an unknown batch has no effect.
        """
        # One branch per event class. Each handler returns its own actions; the end of a batch is common.
        if isinstance(event, OpenBatch):
            return self._open(event)
        if isinstance(event, Capacity):
            return self._start(event, now)
        if isinstance(event, Drained):
            return self._drained(event.model)
        if isinstance(event, Tick):
            return [action for name in self.open for action in self._expire(name, now)]
        batch = self._batches.get(event.batch)
        if batch is None:
            return []
        if isinstance(event, CancelBatch):
            return self._end_early(event.batch, batch, "cancelled")
        if isinstance(event, Answered):
            actions = self._answered(batch, event, now)
        elif isinstance(event, Interrupted):
            actions = self._retry(batch, event.line, now) if event.line in batch.running_lines else []
        else:
            batch.recording.discard(event.line)
            actions = []
        return actions + self._check_end(event.batch, batch)

    def _open(self, event: OpenBatch) -> list[Action]:
        if event.batch in self._batches:
            return []
        self._opened += 1
        queues: dict[str, _Queue] = {}
        for line in event.lines:
            queues.setdefault(event.models.get(line, ""), _Queue()).pending.append(line)
        batch = _Batch(self._opened, queues, event.models, event.deadline)
        self._batches[event.batch] = batch
        return self._check_end(event.batch, batch)

    def _start(self, capacity: Capacity, now: float) -> list[Action]:
        """Start lines of one model. The batch with the fewest running lines is first, then the oldest."""
        actions: list[Action] = []
        model = capacity.model
        ready = [
            (batch.running(model), batch.order, name)
            for name, batch in self._batches.items()
            if batch.ends is None and model in batch.queues and batch.queues[model].ready(now)
        ]
        heapq.heapify(ready)
        while ready and len(actions) < capacity.free:
            running, order, name = heapq.heappop(ready)
            batch = self._batches[name]
            queue = batch.queues[model]
            retry = queue.paused and queue.paused[0][0] <= now
            line = heapq.heappop(queue.paused)[1] if retry else queue.pending.popleft()
            batch.running_lines[line] = batch.attempts.get(line, 0)
            actions.append(StartLine(name, line))
            if queue.ready(now):
                heapq.heappush(ready, (running + 1, order, name))
        return actions

    def _drained(self, model: str) -> list[Action]:
        return [
            Stop(name, line)
            for name, batch in self._batches.items()
            for line in batch.running_lines
            if batch.models.get(line, "") == model
        ]

    def _answered(self, batch: _Batch, event: Answered, now: float) -> list[Action]:
        """Return the Record of a final answer; [] after a temporary failure: the line runs again."""
        if event.line not in batch.running_lines:
            return []
        if event.status in NO_CAPACITY:
            return self._retry(batch, event.line, now)
        if event.status in SERVER_FAILED:
            batch.attempts[event.line] = batch.running_lines[event.line] + 1
            if batch.attempts[event.line] < MOST_ATTEMPTS:
                return self._retry(batch, event.line, now)
        del batch.running_lines[event.line]
        batch.recording.add(event.line)
        return [Record(event.batch, event.line, event.status == 200)]

    def _retry(self, batch: _Batch, line: int, now: float) -> list[Action]:
        """Schedule the next attempt of the line after a pause."""
        del batch.running_lines[line]
        failures = batch.failures[line] = batch.failures.get(line, 0) + 1
        pause = min(FIRST_PAUSE * 2 ** min(failures - 1, 16), LONGEST_PAUSE)
        queue = batch.queues[batch.models.get(line, "")]
        heapq.heappush(queue.paused, (now + pause, line))
        return []

    def _expire(self, name: str, now: float) -> list[Action]:
        batch = self._batches[name]
        if batch.deadline is None or now < batch.deadline or batch.ends is not None:
            return []
        return self._end_early(name, batch, "expired")

    def _end_early(self, name: str, batch: _Batch, reason: EndReason) -> list[Action]:
        if batch.ends is not None:
            return []
        batch.ends = reason
        stops: Iterable[Action] = [Stop(name, line) for line in batch.running_lines]
        return [*stops, *self._check_end(name, batch)]

    def _check_end(self, name: str, batch: _Batch) -> list[Action]:
        """Return the Finalize of an ended batch, and remove the batch; [] before the end."""
        waits = any(queue.pending or queue.paused for queue in batch.queues.values())
        if batch.busy or (batch.ends is None and waits):
            return []
        del self._batches[name]
        return [Finalize(name, batch.ends or "completed")]
