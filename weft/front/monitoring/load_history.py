"""Load of the last minutes: one sample per second, for the charts of the page at ``/``.

Every API server keeps its own ring of samples. All API servers see the same engines, but each one measures
only the latencies of its own requests. ``merged`` therefore takes the engines' part of a second from one ring
and adds up the latencies of all rings. The processes of one host share the monotonic clock, so equal seconds
of two rings mean the same time.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import msgspec

from weft.types.messages import EngineStats

SECONDS = 600
"""Samples in a ring. A sample has at most 2,400 bytes, so a ring has at most 1.5 MB."""
WINDOW = 60
"""Length of the time window of a point's latencies, in seconds. The window ends at the point."""
LATENCIES = 2
"""Histograms of a sample: time to first token and time between tokens."""
_NO_STATS = EngineStats()


class EngineState(NamedTuple):
    """State of an engine process, as of its last heartbeat."""

    name: str
    role: str
    up: bool
    stats: EngineStats


class EngineLoad(msgspec.Struct, frozen=True, kw_only=True):
    """Load of an engine process over the last sample."""

    name: str
    role: str
    up: bool
    running: int
    waiting: int
    kv_usage: float
    steps_per_second: float
    decode_rows_per_step: float
    prefill_rows_per_step: float


class Sample(msgspec.Struct, frozen=True, array_like=True):
    """Growth of the counters over ``span`` seconds, and gauges at the end of the span."""

    second: int
    """End of the span on the monotonic clock, rounded."""
    span: float
    output: int
    prompts: int
    steps: int
    decode_rows: int
    prefill_rows: int
    running: int
    waiting: int
    kv_usage: float
    latencies: tuple[tuple[int, ...], ...] = ((),) * LATENCIES
    """Observations per bucket (not cumulative) of each histogram; () without observations."""


class Point(msgspec.Struct, frozen=True, array_like=True):
    """Values of one second. Latencies are seconds over the last ``WINDOW``; None without observations."""

    second: int
    output_per_second: float
    prompt_per_second: float
    decode_rows_per_step: float
    prefill_rows_per_step: float
    running: int
    waiting: int
    kv_usage: float
    ttft_p50: float | None
    ttft_p99: float | None
    itl_p50: float | None
    itl_p99: float | None


class LoadAnswer(msgspec.Struct, kw_only=True):
    """Answer of ``/metrics/history``."""

    now: float
    """Time of the server's monotonic clock, in seconds. ``second`` of a point is on the same clock."""
    columns: tuple[str, ...] = Point.__struct_fields__
    points: list[Point]
    engines: list[EngineLoad]


class LoadHistory:
    """Ring of the last ``SECONDS`` samples. Pure: the caller passes the time and the counters."""

    def __init__(self) -> None:
        self._samples: deque[Sample] = deque(maxlen=SECONDS)
        self._at: float | None = None
        self._stats: dict[str, EngineStats] = {}
        self._counts: Sequence[Sequence[float]] = ()
        self.engines: list[EngineLoad] = []
        """Load of each engine process over the last sample."""

    def add(self, now: float, engines: Iterable[EngineState], latencies: Sequence[Sequence[float]]) -> None:
        """Add the sample that ends ``now``, and replace ``self.engines`` by the loads over the sample.

        The first call only stores the counters for the next call. A call in the same rounded second as the
        call before changes nothing.

        ``now``: seconds of the monotonic clock. ``engines``: present state of each engine process.
        ``latencies``: cumulative bucket counts of each histogram of this process; kept until the next call.
        """
        states = list(engines)
        second = round(now)
        if self._at is not None and second <= round(self._at):
            return
        span = 0.0 if self._at is None else now - self._at
        grown = [_growth(one.stats, self._stats.get(one.name, _NO_STATS)) for one in states]
        if span:
            self.engines = [_load(one, more, span) for one, more in zip(states, grown, strict=True)]
            self._samples.append(_sample(second, span, states, grown, self._latencies(latencies)))
        self._at, self._counts = now, latencies
        self._stats = {one.name: one.stats for one in states}

    def since(self, second: int) -> list[Sample]:
        """Return the samples after ``second``, oldest first."""
        return [one for one in self._samples if one.second > second]

    def _latencies(self, counts: Sequence[Sequence[float]]) -> tuple[tuple[int, ...], ...]:
        return tuple(_per_bucket(now, then) for now, then in zip(counts, self._counts, strict=True))


class _Growth(NamedTuple):
    output: int
    prompts: int
    steps: int
    decode_rows: int
    prefill_rows: int


_COUNTERS = ("generation_tokens", "prompt_tokens", "steps", "decode_rows", "prefill_rows")


def _growth(now: EngineStats, before: EngineStats) -> _Growth:
    """Return the growth of the counters. The first heartbeat of an engine has the counts of its whole past,
    so growth begins with the second one. A counter below its last value belongs to a restarted engine, and
    counts from 0."""
    if before == _NO_STATS:
        return _Growth(0, 0, 0, 0, 0)
    pairs = [(getattr(now, name), getattr(before, name)) for name in _COUNTERS]
    return _Growth(*(value - last if value >= last else value for value, last in pairs))


def _per_bucket(now: Sequence[float], then: Sequence[float]) -> tuple[int, ...]:
    """Return the new observations in each bucket; () without any. Both arguments are cumulative."""
    more = [int(value - last) for value, last in zip(now, then, strict=True)]
    if not more or not more[-1]:
        return ()
    return tuple(value - below for value, below in zip(more, [0, *more], strict=False))


def _load(engine: EngineState, grown: _Growth, span: float) -> EngineLoad:
    """Return the load of one engine over ``span`` seconds. An empty role becomes "unified"."""
    steps = max(grown.steps, 1)
    return EngineLoad(
        name=engine.name,
        role=engine.role or "unified",
        up=engine.up,
        running=engine.stats.running,
        waiting=engine.stats.waiting,
        kv_usage=_short(engine.stats.kv_usage),
        steps_per_second=_short(grown.steps / span),
        decode_rows_per_step=_short(grown.decode_rows / steps),
        prefill_rows_per_step=_short(grown.prefill_rows / steps),
    )


def _sample(
    second: int,
    span: float,
    engines: list[EngineState],
    grown: list[_Growth],
    latencies: tuple[tuple[int, ...], ...],
) -> Sample:
    """Return the sample of all engines: sums, except ``kv_usage``, which is the maximum."""
    return Sample(
        second=second,
        span=span,
        output=sum(one.output for one in grown),
        prompts=sum(one.prompts for one in grown),
        steps=sum(one.steps for one in grown),
        decode_rows=sum(one.decode_rows for one in grown),
        prefill_rows=sum(one.prefill_rows for one in grown),
        running=sum(one.stats.running for one in engines),
        waiting=sum(one.stats.waiting for one in engines),
        kv_usage=max((one.stats.kv_usage for one in engines), default=0.0),
        latencies=latencies,
    )


def merged(rings: Iterable[Sequence[Sample]]) -> list[Sample]:
    """Return one sample for each second of ``rings``, oldest first. The engines' part comes from the first
    ring with the second; observations of all rings are added up. ``rings`` stay unchanged."""
    found: dict[int, Sample] = {}
    for ring in rings:
        for sample in ring:
            other = found.get(sample.second)
            if other is not None:
                sums = tuple(map(_added, other.latencies, sample.latencies))
                sample = msgspec.structs.replace(other, latencies=sums)
            found[sample.second] = sample
    return [found[second] for second in sorted(found)]


def _added(one: tuple[int, ...], other: tuple[int, ...]) -> tuple[int, ...]:
    """Return the sum per bucket; () for two histograms without observations."""
    if not one or not other:
        return one or other
    return tuple(a + b for a, b in zip(one, other, strict=True))


def points(samples: Sequence[Sample], since: int, bounds: Sequence[Sequence[float]]) -> list[Point]:
    """Return the points after second ``since``. ``samples``: oldest first, from ``since - WINDOW`` on.
    ``bounds``: upper bounds of the buckets of each histogram."""
    sums = [[0] * len(its) for its in bounds]
    first = 0
    made = []
    for sample in samples:
        _add(sums, sample, 1)
        while samples[first].second <= sample.second - WINDOW:
            _add(sums, samples[first], -1)
            first += 1
        if sample.second > since:
            made.append(_point(sample, sums, bounds))
    return made


def _add(sums: list[list[int]], sample: Sample, sign: int) -> None:
    """Add the observations of ``sample`` to ``sums`` in place, or subtract them with ``sign`` -1."""
    for total, counts in zip(sums, sample.latencies, strict=True):
        for bucket, count in enumerate(counts):
            total[bucket] += sign * count


def _point(sample: Sample, sums: Sequence[Sequence[int]], bounds: Sequence[Sequence[float]]) -> Point:
    """Return the point of one sample, with values of 4 significant digits. ``sums``: observations per
    bucket of each histogram over the last ``WINDOW``."""
    steps = max(sample.steps, 1)
    shares = (0.5, 0.99)
    latencies = [
        quantile(counts, its, share) for counts, its in zip(sums, bounds, strict=True) for share in shares
    ]
    return Point(
        sample.second,
        _short(sample.output / sample.span),
        _short(sample.prompts / sample.span),
        _short(sample.decode_rows / steps),
        _short(sample.prefill_rows / steps),
        sample.running,
        sample.waiting,
        _short(sample.kv_usage),
        *(None if value is None else _short(value) for value in latencies),
    )


def quantile(counts: Sequence[int], bounds: Sequence[float], share: float) -> float | None:
    """Return the quantile of a histogram, linear within a bucket; None without observations.

    ``counts``: observations per bucket. A value in the last bucket, which has no upper bound, counts as the
    bound below.
    """
    rank = share * sum(counts)
    if not rank:
        return None
    low, below = 0.0, 0
    for count, bound in zip(counts, bounds, strict=True):
        if below + count >= rank:
            return low if math.isinf(bound) else low + (bound - low) * (rank - below) / count
        low, below = bound, below + count
    return low


def _short(value: float) -> float:
    """Return ``value`` with 4 significant digits, so that the answer stays small."""
    return float(f"{value:.4g}")


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(list[Sample])


def encode(samples: list[Sample]) -> bytes:
    """Return samples as bytes for another API server."""
    return _ENCODER.encode(samples)


def decode(data: bytes, bounds: Sequence[Sequence[float]]) -> list[Sample]:
    """Return the samples of another API server; [] for samples of another version of Weft."""
    try:
        samples = _DECODER.decode(data)
    except msgspec.DecodeError:
        return []
    wanted = [(0, len(its)) for its in bounds]
    fits = all(
        len(one.latencies) == len(wanted)
        and all(len(counts) in sizes for counts, sizes in zip(one.latencies, wanted, strict=True))
        for one in samples
    )
    return samples if fits else []


async def keep(
    history: LoadHistory,
    engines: Callable[[], Iterable[EngineState]],
    latencies: Callable[[], Sequence[Sequence[float]]],
) -> None:
    """Add a sample to ``history`` at each full second of the monotonic clock. Runs until the task is
    cancelled. ``engines`` and ``latencies`` are called for each sample."""
    while True:
        now = time.monotonic()
        history.add(now, engines(), latencies())
        await asyncio.sleep(math.floor(now) + 1 - now)
