"""Stand-ins for the objects of CUDA in a rehearsal: streams, events, graphs, and device queries.

The stand-ins compute nothing. Each reports to the rehearsal of its thread, whose trace is checked.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from tests.rehearsal.calls import here
from tests.rehearsal.device import COMPUTE, Capture, NotCapturable, current
from tests.rehearsal.order import HOST, Record, Use, Wait
from weft.config import devices

GPU_BYTES = 80 << 30
CAPABILITY = (9, 0)
POOL = "the graphs' memory"

_numbers = itertools.count()


#: Place where a stream is made -> name. One stream for each place, as in a rank.
ROLES = {
    ("weft/parallel/launcher.py", "launch"): "collectives",
    ("weft/runner/graphs/graphs.py", "__init__"): "capture",
    ("weft/disagg/transport/copies.py", "__init__"): "copies",
}


class Stream:
    """A queue of work."""

    def __init__(self, device: Any = None, priority: int = 0, *, name: str | None = None) -> None:
        self.name = name or ROLES.get(here(), f"stream {next(_numbers)}")

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())

    def wait_event(self, event: Event) -> None:
        event.awaited(self.name)

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        current().wait("Stream.synchronize")
        self.record_event().awaited(HOST)


class Event:
    """A point in a stream. The first query after a record returns False, so that the host must wait."""

    def __init__(
        self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False
    ) -> None:
        self.number = f"event {next(_numbers)}"
        self._times = enable_timing
        self._at = 0.0
        """Seconds of the device at the last record."""
        self._asked = False
        self._recorded: tuple[str, tuple[str, str]] | None = None
        """(stream, place) of the last record."""

    def record(self, stream: Stream | None = None) -> None:
        made = current()
        actor = made.stream if stream is None else stream.name
        self._asked, self._recorded = False, (actor, here())
        self._at = made.device_seconds
        made.note(Record(actor, self.number))

    def elapsed_time(self, later: Event) -> float:
        """Return the milliseconds between two events that have happened. CUDA refuses other events."""
        for event in (self, later):
            assert event._times, "an event without enable_timing has no time"
            assert current().checker.happened(event.number), "the time of an event that may not have happened"
        return (later._at - self._at) * 1e3

    def wait(self, stream: Stream | None = None) -> None:
        self.awaited(current().stream if stream is None else stream.name)

    def awaited(self, actor: str) -> None:
        """Record that ``actor`` waits for the event."""
        made = current()
        if self._recorded is not None:
            made.edges.add((*self._recorded, actor, here()))
        made.note(Wait(actor, self.number))

    def query(self) -> bool:
        if current().capture is not None:
            raise NotCapturable("an event is asked for in a capture")
        if self._recorded is None:
            return True
        if not self._asked:
            self._asked = True
            return False
        self.awaited(HOST)
        return True

    def synchronize(self) -> None:
        current().wait("Event.synchronize")
        self.awaited(HOST)


class Graph:
    """A captured function."""

    def __init__(self) -> None:
        self.captured: Capture | None = None

    def replay(self) -> None:
        made, captured = current(), self.captured
        assert captured is not None, "a graph is replayed that was not captured"
        for piece in (*captured.reads.values(), *captured.writes.values()):
            if piece.gone:
                raise NotCapturable(f"a graph uses {piece.name}, which was freed since it was captured")
        made.device_seconds += made.replay_seconds(captured)
        made.note(Use(made.stream, "replay", tuple(captured.reads), (*captured.writes, POOL)))
        with torch.inference_mode():
            for call in captured.calls:
                call()


@contextmanager
def capturing(
    graph: Graph, pool: Any = None, stream: Stream | None = None, capture_error_mode: str = "global"
) -> Iterator[None]:
    """Replace ``torch.cuda.graph``."""
    made = current()
    assert made.capture is None, "captures are one at a time"
    assert stream is not None, "graphs are captured on a stream of their own"
    assert pool is not None, "graphs share memory"
    made.capture = Capture(born=made.memory.latest)
    with on_stream(stream):
        try:
            yield
        finally:
            graph.captured, made.capture = made.capture, None
    captured = graph.captured
    made.check(captured.checker)
    if ends := captured.checker.open_ends(stream.name):
        raise NotCapturable(f"a capture ends while {', '.join(ends)} has work that it does not wait for")
    for values, before in captured.saved.values():
        values.copy_(before)


@contextmanager
def on_stream(stream: Stream) -> Iterator[None]:
    """Replace ``torch.cuda.stream``."""
    made = current()
    before, made.stream = made.stream, stream.name
    try:
        yield
    finally:
        made.stream = before


@contextmanager
def on_device(device: Any) -> Iterator[None]:
    """Replace ``torch.cuda.device``."""
    yield


def record_stream(tensor: torch.Tensor, stream: Stream) -> None:
    """Replace ``Tensor.record_stream``."""
    made = current()
    made.memory.piece(tensor, made.stream).known.add(stream.name)


class Runtime:
    """Replaces ``torch.cuda.cudart``."""

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        current().memory.registered.append((address, size))
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        made = current().memory
        made.registered = [one for one in made.registered if one[0] != address]
        return 0


def install(patch: pytest.MonkeyPatch, gpus: int = 1) -> None:
    """Install the stand-ins in torch, and simulate ``gpus`` GPUs."""
    replaced: dict[str, Any] = {
        "Stream": Stream,
        "Event": Event,
        "CUDAGraph": Graph,
        "graph": capturing,
        "stream": on_stream,
        "device": on_device,
        "current_stream": lambda device=None: Stream(name=current().stream),
        "default_stream": lambda device=None: Stream(name=COMPUTE),
        "graph_pool_handle": lambda: (0, 1),
        "is_available": lambda: True,
        "current_device": lambda: 0,
        "get_device_capability": lambda device=None: CAPABILITY,
        "mem_get_info": lambda device=None: (GPU_BYTES, GPU_BYTES),
        "memory_reserved": lambda device=None: 0,
        "empty_cache": lambda: None,
        "_lazy_init": lambda: None,
        "cudart": Runtime,
    }
    for name, stand_in in replaced.items():
        patch.setattr(torch.cuda, name, stand_in)
    patch.setattr(torch.Tensor, "record_stream", record_stream)
    patch.setattr(devices, "gpu_memory", lambda: GPU_BYTES)
    patch.setattr(devices, "gpus", lambda: tuple(str(number) for number in range(gpus)))


__all__ = ["Event", "Graph", "Stream", "capturing", "install"]
