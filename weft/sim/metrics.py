"""What a run showed: latencies, throughput, and what the scheduler did."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np

from weft.sim.workload import Arrival


@dataclass(slots=True)
class Stream:
    """What a client saw of one sequence. Times are seconds of the virtual clock."""

    arrival: Arrival
    times: list[float] = field(default_factory=list)
    """When each token came."""
    finish: str | None = None

    @property
    def done(self) -> bool:
        return self.finish in ("length", "stop")


class Latency(msgspec.Struct, frozen=True, kw_only=True):
    """A distribution of times in seconds; all 0 when there was none."""

    count: int = 0
    mean: float = 0.0
    p50: float = 0.0
    p99: float = 0.0
    most: float = 0.0

    @classmethod
    def of(cls, times: Sequence[float] | np.ndarray) -> Latency:
        if not len(times):
            return cls()
        values = np.asarray(times, np.float64)
        p50, p99 = np.percentile(values, [50, 99])
        return cls(
            count=len(values),
            mean=float(values.mean()),
            p50=float(p50),
            p99=float(p99),
            most=float(values.max()),
        )


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """One run. Times in seconds, rates in tokens a second of virtual time."""

    seconds: float
    """From the start until the last request, background ones left out, was done (or the run was cut off)."""
    requests: int
    """That arrived; background sequences are not counted."""
    done: int
    refused: int
    """Turned away with 429 by ``--max-queued-requests``."""
    ttft: Latency
    """Arrival to first token, of requests."""
    itl: Latency
    """Between two tokens of one request."""
    background_itl: Latency
    """Between two tokens of one background sequence, from the first arrival until the last first token."""
    quiet_itl: Latency
    """The same while there were no requests: in the second half of the time before the first arrival."""
    prompt_rate: float
    """Prompt tokens a second, from the first arrival until the last first token."""
    output_rate: float
    """Output tokens a second, background ones included."""
    steps: int
    mixed_steps: int
    preemptions: int
    prefix_hits: int
    """Tokens found in the prefix cache."""
    drafts: int
    """Drafts verified."""
    drafts_accepted: int
    device_share: float
    """Part of the time that the device computed, 0 .. 1."""
    wall_seconds: float = 0.0
    """What simulating took. Not part of what a seed determines."""


def gaps(streams: Sequence[Stream], begin: float = 0.0, end: float = float("inf")) -> np.ndarray:
    """Times between consecutive tokens, float64 seconds, of gaps that reach into ``begin .. end``."""
    found = []
    for stream in streams:
        times = np.asarray(stream.times)
        if len(times) > 1:
            found.append(np.diff(times)[(times[1:] > begin) & (times[:-1] < end)])
    return np.concatenate(found) if found else np.zeros(0)


def prompt_window(streams: Sequence[Stream]) -> tuple[float, float]:
    """(first arrival, last first token) of the streams; (0, 0) when there was none."""
    first = [stream.times[0] for stream in streams if stream.times]
    if not first:
        return 0.0, 0.0
    return min(stream.arrival.at for stream in streams), max(first)


def rate(count: int, seconds: float) -> float:
    """``count`` in ``seconds``; 0 where no time passed."""
    return count / seconds if seconds > 0 else 0.0
