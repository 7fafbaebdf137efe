"""Where a rank's collectives run: at once on the caller's thread, or beside it, in order.

    Launcher          at once, on the caller's thread and stream
    ThreadLauncher    on a CPU: steps in micro-batches have them on a thread of their own
    StreamLauncher    on a GPU, for NCCL: steps in micro-batches have them on a stream of their own

The order of launches is the same on all ranks, so one thread (or stream) for all communicators of a rank
cannot deadlock, and what it runs goes on while the caller computes.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from weft.common import env
from weft.common.errors import ConfigError, EngineDead
from weft.parallel.comm import Done, Pending

Tensor = torch.Tensor


class CommLost(EngineDead):
    """A collective failed: a peer is gone or did not come in time, or the group was aborted."""


@dataclass(slots=True)
class Flight:
    """One collective's times, in seconds of ``time.monotonic``."""

    micro_batch: int
    """The micro-batch, 0 or 1, that it belongs to (0 for a whole step)."""
    launched: float
    began: float = 0.0
    """When all collectives before it had ended."""
    ended: float = 0.0
    waited: float = 0.0
    """Seconds that compute waited for it."""

    @property
    def seconds(self) -> float:
        return self.ended - self.began


class Launcher:
    """Runs the collectives of one rank, in the order of their launch: here at once."""

    def __init__(self) -> None:
        self.micro_batch = 0
        """The micro-batch that launches now; noted in ``flights``."""
        self.recording = False
        """Whether ``flights`` are kept; a caller that sets it must call ``take``."""
        self.flights: list[Flight] = []
        """Collectives launched since ``take``."""
        self.broken = False
        """Whether the groups were aborted, and not formed anew: what the device computes may be garbage. Set
        before the first of them is."""
        self.moving = False
        """Whether the launched collectives move experts; read by planted faults."""
        self.before: Callable[[], None] | None = None
        """Called before each launch: planted faults."""

    def launch(self, work: Callable[[], Tensor]) -> Pending:
        """Starts ``work``, a blocking collective."""
        flight = self._flight()
        flight.began = flight.launched
        made = work()
        flight.ended = time.monotonic()
        flight.waited = flight.seconds
        return Done(made)

    def threaded(self, wanted: bool) -> None:
        """Sets whether collectives run beside compute from now on. None may be in flight."""

    @property
    def direct(self) -> bool:
        """Whether a whole step's collectives are calls of the caller's thread, which can be captured."""
        return True

    def flew(self, times: Iterable[tuple[float, float]]) -> None:
        """Notes collectives of a whole step that ran elsewhere: (began, ended) of each."""
        self.flights += [Flight(0, began, began, ended, ended - began) for began, ended in times]

    def take(self) -> list[Flight]:
        """The flights since the last call. All of them must have been waited for."""
        taken = self.flights
        self.flights = []
        return taken

    def cancel(self) -> None:
        """Drops queued collectives: waiting for one raises CommLost. Call it after groups were aborted."""

    def settle(self, timeout: float) -> None:
        """Waits until no collective runs. Raises CommLost after ``timeout`` seconds."""

    def close(self) -> None:
        """Ends the thread or stream that runs collectives."""

    def check(self) -> None:
        """Raises CommLost when results of the device cannot be trusted: see ``broken``."""
        if self.broken:
            raise CommLost("the group was aborted in the middle of a step")

    def _flight(self) -> Flight:
        if self.before is not None:
            self.before()
        flight = Flight(self.micro_batch, time.monotonic())
        if self.recording:
            self.flights.append(flight)
        return flight


class _Flying(Pending):
    """A collective on the thread of a ``ThreadLauncher``."""

    def __init__(self, work: Callable[[], Tensor], flight: Flight, timeout: float) -> None:
        self.work: Callable[[], Tensor] | None = work
        self.inference = torch.is_inference_mode_enabled()
        self._flight = flight
        self._timeout = timeout
        self._ended = threading.Event()
        self._made: Tensor | None = None
        self._error: BaseException | None = None

    def run(self, delay: float) -> None:
        """On the launcher's thread."""
        assert self.work is not None
        self._flight.began = time.monotonic()
        try:
            with torch.inference_mode(self.inference):
                self._made = self.work()
        except BaseException as error:
            self._error = error
        self.work = None  # and with it the tensors that it was given
        self._flight.ended = time.monotonic() + delay
        self._ended.set()

    def drop(self) -> None:
        """Drops the collective: it will not run."""
        self.work = None
        self._error = CommLost("a collective was dropped: its group was aborted")
        self._ended.set()

    def result(self) -> Tensor:
        began = time.monotonic()
        if not self._ended.wait(self._timeout):
            raise CommLost("a collective did not end in time")
        if self._error is not None:
            raise self._error
        late = self._flight.ended - time.monotonic()
        if late > 0:  # the link's delay is not over
            time.sleep(late)
        self._flight.waited += time.monotonic() - began
        assert self._made is not None
        return self._made


class ThreadLauncher(Launcher):
    """Runs collectives on a thread of its own while they are wanted there, else at once.

    A step that is computed whole waits for each collective where it launches it, and a thread would only cost
    it the way there and back. What a layer computes between launch and result (a shared expert under a
    dispatch) is under the collective in steps in micro-batches, and comes after it in others.
    """

    def __init__(self, timeout: float = 600.0, delay: float = 0.0) -> None:
        """``timeout``: seconds that a caller waits for a collective; longer than the groups' own timeout."""
        super().__init__()
        self._timeout = timeout
        self._delay = delay
        """Seconds added to every collective."""
        self._wanted = False
        self._queue: queue.SimpleQueue[_Flying | None] = queue.SimpleQueue()
        self._idle = threading.Condition()
        self._unfinished = 0
        self._thread: threading.Thread | None = None

    def threaded(self, wanted: bool) -> None:
        self._wanted = wanted

    @property
    def direct(self) -> bool:
        return not self._delay

    def launch(self, work: Callable[[], Tensor]) -> Pending:
        if not (self._wanted or self._delay):
            return super().launch(work)
        flying = _Flying(work, self._flight(), self._timeout)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="weft-collectives", daemon=True)
            self._thread.start()
        with self._idle:
            self._unfinished += 1
        self._queue.put(flying)
        return flying

    def _run(self) -> None:
        while (flying := self._queue.get()) is not None:
            flying.run(self._delay)
            self._finished()

    def _finished(self) -> None:
        with self._idle:
            self._unfinished -= 1
            self._idle.notify_all()

    def cancel(self) -> None:
        while True:
            try:
                flying = self._queue.get_nowait()
            except queue.Empty:
                break
            if flying is None:  # ``close`` was there already
                self._queue.put(None)
                break
            flying.drop()
            self._finished()
        self.flights = []

    def settle(self, timeout: float) -> None:
        with self._idle:
            if not self._idle.wait_for(lambda: self._unfinished == 0, timeout):
                raise CommLost("collectives of an epoch that has ended are still running")

    def close(self) -> None:
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join(min(self._timeout, 10.0))  # it is a daemon: what hangs holds up nobody
            self._thread = None


class DelayedLauncher(ThreadLauncher):
    """A slow network: each collective ends ``seconds`` after it would have, and several may be under way.

    For tests and benches; the links' bandwidth is not slowed.
    """

    def __init__(self, seconds: float, timeout: float = 600.0) -> None:
        super().__init__(timeout, seconds)


class StreamLauncher(Launcher):
    """On a GPU: collectives of steps in micro-batches on a stream of their own, which the compute stream
    waits for at ``result``; those of whole steps on the compute stream itself.

    For communicators whose collectives are queued on the current stream (NCCL). Fork and join are events
    alone, so a step in micro-batches can be captured in a CUDA graph. Times are of launches, not of what the
    device does.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        self._beside = False

    def threaded(self, wanted: bool) -> None:
        self._beside = wanted

    def launch(self, work: Callable[[], Tensor]) -> Pending:
        if not self._beside:
            return super().launch(work)
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)
        flight = self._flight()
        flight.began = flight.launched
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            made = work()
            joined = self._stream.record_event()
        flight.ended = time.monotonic()
        return _Streaming(self._device, work, made, joined)

    def settle(self, timeout: float) -> None:
        if self._stream is None:
            return
        ended = self._stream.record_event()
        until = time.monotonic() + timeout
        while not ended.query():
            if time.monotonic() > until:
                raise CommLost("collectives of an epoch that has ended are still running on the GPU")
            time.sleep(0.0001)


class _Streaming(Pending):
    """A collective on the stream of a ``StreamLauncher``.

    Who may use which memory when:

    * What was given lies in memory of the compute stream, and the other stream reads it. So it must not be
      freed before the compute stream waits for ``joined``: until then ``_given`` keeps it. After that,
      whatever gets its memory on the compute stream comes behind the collective.
    * What was made lies in memory of the other stream, and the compute stream reads it. Freed, it could go to
      the next collective at once; ``record_stream`` keeps it until the compute stream has come so far.
    * What the collective itself allocated in between is of the other stream, and used there alone.

    A collective whose result nobody takes breaks the first rule. That happens only in an epoch that ends, and
    nothing is computed from then on until the device has been synchronized (``Runner.reset``).
    """

    def __init__(
        self, device: torch.device, work: Callable[[], Tensor], made: Tensor, joined: torch.cuda.Event
    ) -> None:
        self._device = device
        self._given: Callable[[], Tensor] | None = work
        self._made = made
        self._joined = joined

    def result(self) -> Tensor:
        here = torch.cuda.current_stream(self._device)
        here.wait_event(self._joined)
        self._made.record_stream(here)
        self._given = None
        return self._made


def default_launcher(device: torch.device, queued: bool) -> Launcher:
    """The launcher of a rank on ``device``, whose collectives are ``queued`` there or run on the host.

    Raises ConfigError for a WEFT_LINK_DELAY_MS that is no number of ms, or that a GPU cannot have.
    """
    text = env.get("WEFT_LINK_DELAY_MS", "0")
    try:
        delay = float(text) / 1e3
    except ValueError:
        delay = -1.0
    if not 0.0 <= delay <= 60.0:
        raise ConfigError(f"WEFT_LINK_DELAY_MS must be a number from 0 to 60000, not {text!r}")
    if device.type == "cuda":
        if delay:
            raise ConfigError("WEFT_LINK_DELAY_MS delays ranks on a CPU: unset it, or use --device cpu")
        # Through host memory a collective has the host wait for the device: nothing could go on beside it.
        return StreamLauncher(device) if queued else Launcher()
    return DelayedLauncher(delay) if delay else ThreadLauncher()
