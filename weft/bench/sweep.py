"""Growth of cost with work: the same load at growing concurrency, and single requests of growing context."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from weft.bench.load import Limits
from weft.bench.schedule import LengthRange
from weft.bench.serving_bench import RunSettings, measure
from weft.common.errors import ConfigError, WeftError

Measure = Callable[[RunSettings], dict[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """The points of a sweep. ``seconds`` bounds each point.

    No request is sent after half of ``seconds``; the point ends with the other half.
    """

    concurrency: tuple[int, ...]
    context: tuple[int, ...]
    input_len: int = 256
    output_len: int = 64
    context_output_len: int = 32
    rounds: int = 2
    """Requests for each place of a concurrency point, and for a context point."""
    seconds: float = 60.0

    def points(self) -> list[tuple[str, int]]:
        """Return (axis, value) of each point, in order of the runs."""
        return [("concurrency", n) for n in self.concurrency] + [("context", n) for n in self.context]

    def asked(self, base: RunSettings, axis: str, value: int, number: int) -> RunSettings:
        """Return the settings of one point. ``number`` gives the point prompts of its own."""
        single = axis == "context"
        length = LengthRange(value, value) if single else LengthRange(self.input_len, self.input_len)
        output = self.context_output_len if single else self.output_len
        places = 1 if single else value
        # A few requests say little: send at least eight, or ``rounds`` per place.
        requests = self.rounds if single else max(self.rounds * places, 8)
        limits = Limits(
            concurrency=places,
            requests=requests,
            duration=self.seconds / 2,
            request_timeout=self.seconds,
            run_timeout=self.seconds,
        )
        return dataclasses.replace(
            base,
            limits=limits,
            input_len=length,
            output_len=LengthRange(output, output),
            repetition=base.repetition + number,
            warmup=1 if number == 0 else 0,
        )


def powers(text: str, flag: str) -> tuple[int, ...]:
    """Return the numbers of ``1..64`` (powers of two times the first number), ``1,4,16``, or ``none``
    (empty).

    Raise ConfigError that names ``flag``.
    """
    if text == "none":
        return ()
    try:
        if ".." in text:
            low, high = (int(part) for part in text.split(".."))
            # low, 2 * low, 4 * low, .. up to high
            found = [low << n for n in range(max(high, 1).bit_length()) if low << n <= high]
        else:
            found = [int(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or min(found) < 1:
        raise ConfigError(f"{flag} takes LOW..HIGH, a list such as 1,4,16, or none; not {text!r}", param=flag)
    return tuple(found)


def run_sweep(
    sweep: Sweep, base: RunSettings, say: Callable[[str], Any], measure_point: Measure = measure
) -> dict[str, Any]:
    """Run every point by ``measure_point`` and return the results by axis.

    A failed point gets an error, and the sweep continues. ``say`` receives a table line by line. Ctrl-C ends
    the sweep; the points measured so far are returned.
    """
    points: dict[str, list[dict[str, Any]]] = {"concurrency": [], "context": []}
    say(_row("", "value", "ok", "out tok/s", "TTFT p50 ms", "TPOT p50 ms"))
    interrupted = False
    for number, (axis, value) in enumerate(sweep.points()):
        try:
            report = measure_point(sweep.asked(base, axis, value, number))
        except KeyboardInterrupt:
            interrupted = True
            break
        except WeftError as error:
            point: dict[str, Any] = {axis: value, "error": error.message}
        else:
            interrupted = bool(report["interrupted"])
            point = _point(axis, value, report)
        points[axis].append(point)
        say(_shown(axis, value, point))
        if interrupted:
            break
    return {**points, "interrupted": interrupted, "sweep": dataclasses.asdict(sweep)}


def _point(axis: str, value: int, report: dict[str, Any]) -> dict[str, Any]:
    """Return the numbers of a point from the report of its run."""
    latency = report["latency_ms"]
    return {
        axis: value,
        "error": report["first_failure"],
        "requests": report["requests"],
        "timed_out": report["timed_out"],
        "output_token_throughput": report["output_token_throughput"],
        "prompt_tokens": report["prompt_tokens"],
        "seconds": report["seconds"],
        **{f"{name}_ms": latency[name] for name in ("ttft", "tpot", "e2el")},
    }


def _shown(axis: str, value: int, point: dict[str, Any]) -> str:
    """Return the table's line of a point."""
    if "requests" not in point:
        return _row(axis, value, "-", "-", "-", "-") + f"  {point['error'][:120]}"
    counts = point["requests"]
    note = ""
    if point["error"]:
        note = f"  {point['error'][:120]}"
    elif point["timed_out"]:
        note = "  out of time"
    return _row(axis, value, f"{counts['ok']}/{counts['sent']}", *map(_number, _values(point))) + note


def _values(point: dict[str, Any]) -> Sequence[float | None]:
    times = [point[name]["p50"] if point[name] else None for name in ("ttft_ms", "tpot_ms")]
    return [point["output_token_throughput"], *times]


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.1f}"


def _row(*cells: object) -> str:
    return f"{cells[0]!s:<12}" + "".join(f"{cell!s:>13}" for cell in cells[1:])
