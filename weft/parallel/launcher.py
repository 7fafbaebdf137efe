"""Launchers run a rank's collectives in order: at once on the caller's thread, or in parallel to compute.

    Launcher          at once, on the caller's thread and stream
    ThreadLauncher    on a CPU: a separate thread for steps in micro-batches
    StreamLauncher    on a GPU with NCCL: a separate stream for steps in micro-batches

All ranks launch in the same order. So one thread (or stream) for all communicators of a rank cannot deadlock,
and the collectives on this thread run while the caller computes.
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
from weft.parallel.comm import FinishedCollective, Pending

Tensor = torch.Tensor


class CommLost(EngineDead):
    """A collective failed: a peer is gone or late, or the group was aborted."""


@dataclass(slots=True)
class Flight:
    """Times of one collective, in seconds of ``time.monotonic``."""

    micro_batch: int
    """The micro-batch of the collective, 0 or 1 (0 for a whole step)."""
    launched: float
    began: float = 0.0
    """Time at which all earlier collectives had ended."""
    ended: float = 0.0
    waited: float = 0.0
    """Seconds of waiting for the collective."""

    @property
    def seconds(self) -> float:
        return self.ended - self.began


class Launcher:
    """Runs the collectives of one rank in launch order. This class runs each at once."""

    def __init__(self) -> None:
        """Every attribute starts unset: no recording, no abort, no planted fault."""
        self.micro_batch = 0
        """The micro-batch that launches now; recorded in ``flights``."""
        self.recording = False
        """True if ``flights`` are recorded. A caller that sets the flag must call ``take``."""
        self.flights: list[Flight] = []
        """Collectives launched since the last ``take``."""
        self.broken = False
        """True from the abort of the groups until new groups are formed. Results of the device may be
        invalid. Set before the first group is aborted.
        """
        self.lost: list[Callable[[], bool]] = []
        """Functions that return True if a collective on the device has given up, one per communicator."""
        self.moving = False
        """True while the launched collectives move experts; read by planted faults."""
        self.before: Callable[[], None] | None = None
        """Called before each launch; set by planted faults."""

    def launch(self, work: Callable[[], Tensor]) -> Pending:
        """Run ``work``, a blocking collective, and return the finished handle.

        Raises the errors of ``work``. Subclasses return before the end; their handle then raises the errors.
        """
        flight = self._flight()
        flight.began = flight.launched
        output = work()
        flight.ended = time.monotonic()
        flight.waited = flight.seconds
        return FinishedCollective(output)

    def threaded(self, wanted: bool) -> None:
        """Set whether collectives run in parallel to compute from now on. No collective may be in flight."""

    @property
    def direct(self) -> bool:
        """True if a whole step runs its collectives on the caller's thread, so the step can be captured."""
        return True

    def add_flights(self, times: Iterable[tuple[float, float]]) -> None:
        """Record the collectives of a whole step run elsewhere: (began, ended) of each."""
        self.flights += [Flight(0, began, began, ended, ended - began) for began, ended in times]

    def take(self) -> list[Flight]:
        """Return and clear the flights. The caller must have waited for all of them."""
        taken = self.flights
        self.flights = []
        return taken

    def cancel(self) -> None:
        """Drop queued collectives: waiting for a dropped one raises CommLost. Call after the groups were
        aborted."""

    def settle(self, timeout: float) -> None:
        """Wait until no collective runs. Raise CommLost after ``timeout`` seconds."""

    def close(self) -> None:
        """End the thread or stream of collectives."""

    def check(self) -> None:
        """Raise CommLost if results of the device cannot be trusted: see ``broken`` and ``lost``."""
        if self.broken:
            raise CommLost("the group was aborted in the middle of a step")
        if any(lost() for lost in self.lost):
            raise CommLost("a GPU has waited too long for another rank")

    def _flight(self) -> Flight:
        """Return the times of a collective launched now.

        Call ``before``; with ``recording``, append to ``flights``.
        """
        if self.before is not None:
            self.before()
        flight = Flight(self.micro_batch, time.monotonic())
        if self.recording:
            self.flights.append(flight)
        return flight


class _ThreadCollective(Pending):
    """A collective on the thread of a ``ThreadLauncher``."""

    def __init__(self, work: Callable[[], Tensor], flight: Flight, timeout: float) -> None:
        """``work``: the collective.

        ``flight``: filled with the times. ``timeout``: seconds that ``result`` waits.
        """
        self.work: Callable[[], Tensor] | None = work
        self.inference = torch.is_inference_mode_enabled()
        self._flight = flight
        self._timeout = timeout
        self._ended = threading.Event()
        self._output: Tensor | None = None
        self._error: BaseException | None = None

    def run(self, delay: float) -> None:
        """Run the collective on the launcher's thread and store result or error.

        ``delay``: seconds to add to the end time.
        """
        assert self.work is not None
        self._flight.began = time.monotonic()
        try:
            with torch.inference_mode(self.inference):
                self._output = self.work()
        except BaseException as error:
            self._error = error
        self.work = None  # also frees the input tensors
        self._flight.ended = time.monotonic() + delay
        self._ended.set()

    def drop(self) -> None:
        """Drop the collective: ``result`` raises CommLost, and ``run`` is never called."""
        self.work = None
        self._error = CommLost("a collective was dropped: its group was aborted")
        self._ended.set()

    def result(self) -> Tensor:
        """Block until the end, including the delay, and return the tensor.

        Raise CommLost after the time-out, and the error of the collective.
        """
        began = time.monotonic()
        if not self._ended.wait(self._timeout):
            raise CommLost("a collective did not end in time")
        if self._error is not None:
            raise self._error
        # `ended` includes the simulated delay, which may lie in the future.
        late = self._flight.ended - time.monotonic()
        if late > 0:  # the simulated link delay is not over
            time.sleep(late)
        self._flight.waited += time.monotonic() - began
        assert self._output is not None
        return self._output


class ThreadLauncher(Launcher):
    """Runs collectives on a separate thread if ``threaded``, else at once.

    A step computed whole waits for each collective at the launch, so a thread would only add latency. A layer
    may compute something between launch and result (a shared expert during a dispatch). In steps in
    micro-batches the collective runs during such work; in whole steps the work comes after the collective.
    """

    def __init__(self, timeout: float = 600.0, delay: float = 0.0) -> None:
        """Create the launcher; the thread starts with the first use.

        ``timeout``: seconds that a caller waits for a collective; must exceed the timeout of the groups.
        ``delay``: seconds added to every collective.
        """
        super().__init__()
        self._timeout = timeout
        self._delay = delay
        """Seconds added to every collective."""
        self._wanted = False
        self._queue: queue.SimpleQueue[_ThreadCollective | None] = queue.SimpleQueue()
        self._idle = threading.Condition()
        self._unfinished = 0
        self._thread: threading.Thread | None = None

    def threaded(self, wanted: bool) -> None:
        self._wanted = wanted

    @property
    def direct(self) -> bool:
        return not self._delay

    def launch(self, work: Callable[[], Tensor]) -> Pending:
        """Queue ``work`` for the thread and return a handle.

        Run ``work`` at once unless a thread is wanted or a delay is set.
        """
        if not (self._wanted or self._delay):
            return super().launch(work)
        collective = _ThreadCollective(work, self._flight(), self._timeout)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="weft-collectives", daemon=True)
            self._thread.start()
        # Count before queueing, so `settle` never misses a collective.
        with self._idle:
            self._unfinished += 1
        self._queue.put(collective)
        return collective

    def _run(self) -> None:
        while (collective := self._queue.get()) is not None:
            collective.run(self._delay)
            self._finished()

    def _finished(self) -> None:
        with self._idle:
            self._unfinished -= 1
            self._idle.notify_all()

    def cancel(self) -> None:
        """Drop all queued collectives, and ``flights``. The running collective continues."""
        while True:
            try:
                collective = self._queue.get_nowait()
            except queue.Empty:
                break
            if collective is None:  # ``close`` has already queued the end
                self._queue.put(None)
                break
            collective.drop()
            self._finished()
        self.flights = []

    def settle(self, timeout: float) -> None:
        """Block until no collective is queued or running. Raise CommLost after ``timeout`` seconds."""
        with self._idle:
            if not self._idle.wait_for(lambda: self._unfinished == 0, timeout):
                raise CommLost("collectives of an epoch that has ended are still running")

    def close(self) -> None:
        """End the thread, after the queued collectives. Wait at most 10 seconds."""
        if self._thread is not None:
            self._queue.put(None)
            # a daemon thread: a hanging collective does not block the exit
            self._thread.join(min(self._timeout, 10.0))
            self._thread = None


class DelayedLauncher(ThreadLauncher):
    """A slow network: each collective ends ``seconds`` later, and several may be under way at once.

    For tests and benchmarks. The bandwidth of links is not reduced.
    """

    def __init__(self, seconds: float, timeout: float = 600.0) -> None:
        super().__init__(timeout, seconds)


class StreamLauncher(Launcher):
    """Launcher for a GPU: collectives of steps in micro-batches run on a separate stream.

    The compute stream waits at ``result``. Collectives of whole steps run on the compute stream. Works only
    with communicators that queue on the current stream (NCCL). Fork and join use events alone, so a step in
    micro-batches can be captured in a CUDA graph. Recorded times are times of launches, not of the device.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        self._beside = False

    def threaded(self, wanted: bool) -> None:
        self._beside = wanted

    def launch(self, work: Callable[[], Tensor]) -> Pending:
        """Queue ``work`` on the separate stream and return a handle.

        Outside of micro-batches, queue on the compute stream.
        """
        if not self._beside:
            return super().launch(work)
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)
        flight = self._flight()
        flight.began = flight.launched
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            output = work()
            joined = self._stream.record_event()
        flight.ended = time.monotonic()
        return _StreamCollective(self._device, work, output, joined)

    def settle(self, timeout: float) -> None:
        """Block until the separate stream is idle. Raise CommLost after ``timeout`` seconds."""
        if self._stream is None:
            return
        ended = self._stream.record_event()
        until = time.monotonic() + timeout
        while not ended.query():
            if time.monotonic() > until:
                raise CommLost("collectives of an epoch that has ended are still running on the GPU")
            time.sleep(0.0001)


class _StreamCollective(Pending):
    """A collective on the stream of a ``StreamLauncher``.

    Rules for the use of memory:

    * The input lies in memory of the compute stream and is read by the other stream. So the input must not be
      freed before the compute stream waits for ``joined``: until then ``_work`` keeps the input alive. Later
      users of the memory on the compute stream come after the collective.
    * The output lies in memory of the other stream and is read by the compute stream. Once freed, the memory
      could go to the next collective at once; ``record_stream`` prevents reuse until the compute stream is
      done.
    * Temporary memory of the collective belongs to the other stream, and is used there alone.

    A collective without a call of ``result`` breaks the first rule. Such a case occurs only in an epoch that
    ends, and nothing is computed afterwards until the device has been synchronized (``Runner.reset``).
    """

    def __init__(
        self, device: torch.device, work: Callable[[], Tensor], output: Tensor, joined: torch.cuda.Event
    ) -> None:
        self._device = device
        self._work: Callable[[], Tensor] | None = work
        self._output = output
        self._joined = joined

    def result(self) -> Tensor:
        """Return the tensor. The compute stream waits for the collective; the host does not."""
        compute_stream = torch.cuda.current_stream(self._device)
        compute_stream.wait_event(self._joined)
        self._output.record_stream(compute_stream)
        self._work = None
        return self._output


def default_launcher(device: torch.device, queued: bool) -> Launcher:
    """Return the launcher of a rank on ``device``.

    With ``queued``, collectives are queued on the device's stream (NCCL); else the host runs the collectives.
    Raise ConfigError if WEFT_LINK_DELAY_MS is not a number from 0 to 60000, or is set for a GPU.
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
        # Through host memory the host waits for the device, so nothing could overlap with a collective.
        return StreamLauncher(device) if queued else Launcher()
    return DelayedLauncher(delay) if delay else ThreadLauncher()
