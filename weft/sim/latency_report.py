"""Results of a run: latencies, throughput, and counts of the scheduler."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np

from weft.sim.workload import Arrival


@dataclass(slots=True)
class Stream:
    """The tokens of one sequence as seen by the client. Times are seconds of the virtual clock."""

    arrival: Arrival
    times: list[float] = field(default_factory=list)
    """Arrival time of each token."""
    finish: str | None = None

    @property
    def done(self) -> bool:
        return self.finish in ("length", "stop")


class Latency(msgspec.Struct, frozen=True, kw_only=True):
    """A distribution of times in seconds; all 0 for an empty distribution."""

    count: int = 0
    mean: float = 0.0
    p50: float = 0.0
    p99: float = 0.0
    most: float = 0.0

    @classmethod
    def of(cls, times: Sequence[float] | np.ndarray) -> Latency:
        """Return the distribution of ``times``, in seconds."""
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
    """Results of one run. Times in seconds, rates in tokens per second of virtual time."""

    seconds: float
    """From the start to the end of the last request (without background sequences), or to the cut-off."""
    requests: int
    """Number of requests; background sequences are not counted."""
    done: int
    refused: int
    """Requests refused with 429 because of ``--max-queued-requests``."""
    ttft: Latency
    """Arrival to first token, of requests."""
    itl: Latency
    """Times between two tokens of one request."""
    background_itl: Latency
    """Times between two tokens of one background sequence, from the first arrival until the last first
    token."""
    quiet_itl: Latency
    """As ``background_itl``, without load: in the second half of the time before the first arrival."""
    prompt_rate: float
    """Prompt tokens per second, from the first arrival until the last first token."""
    output_rate: float
    """Output tokens per second, background sequences included."""
    steps: int
    mixed_steps: int
    preemptions: int
    prefix_hits: int
    """Prompt tokens found in the prefix cache."""
    drafts: int
    """Drafts verified."""
    drafts_accepted: int
    device_share: float
    """Share of time in which the device computed, 0 .. 1."""
    wall_seconds: float = 0.0
    """Real seconds of the simulation. Not determined by the seed."""


def gaps(streams: Sequence[Stream], begin: float = 0.0, end: float = float("inf")) -> np.ndarray:
    """Return times between consecutive tokens of each stream, float64 seconds [gaps], of all gaps that
    overlap ``begin .. end`` (seconds). Empty without gaps."""
    found = []
    for stream in streams:
        times = np.asarray(stream.times)
        if len(times) > 1:
            found.append(np.diff(times)[(times[1:] > begin) & (times[:-1] < end)])
    return np.concatenate(found) if found else np.zeros(0)


def prompt_window(streams: Sequence[Stream]) -> tuple[float, float]:
    """Return (first arrival, last first token) of the streams; (0, 0) if no token came."""
    first = [stream.times[0] for stream in streams if stream.times]
    if not first:
        return 0.0, 0.0
    return min(stream.arrival.at for stream in streams), max(first)


def rate(count: int, seconds: float) -> float:
    """Return ``count`` per second; 0 if no time passed."""
    return count / seconds if seconds > 0 else 0.0
