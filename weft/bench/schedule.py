"""Send times and lengths of requests. Pure functions of a seed; times in seconds from the start."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft.common.errors import ConfigError


@dataclass(frozen=True, slots=True)
class LengthRange:
    """A number of tokens, drawn evenly from ``low`` to ``high`` inclusive."""

    low: int
    high: int

    def draw(self, source: random.Random) -> int:
        """Draw one length."""
        return self.low + int(source.random() * (self.high - self.low + 1))


def parse_lengths(text: str, flag: str) -> LengthRange:
    """Parse ``512`` or ``128:1024``. Raise ConfigError that names ``flag``."""
    low, colon, high = text.partition(":")
    try:
        result = LengthRange(int(low), int(high) if colon else int(low))
    except ValueError:
        result = LengthRange(0, 0)
    if not 1 <= result.low <= result.high <= 1 << 24:
        raise ConfigError(
            f"{flag} takes a number of tokens or LOW:HIGH, e.g. 128:1024, not {text!r}", param=flag
        )
    return result


def arrivals(rate: float, burstiness: float, source: random.Random) -> Iterator[float]:
    """Yield endless arrival times with an average of ``rate`` per second.

    The gaps are gamma distributed with shape ``burstiness``: 1 is a Poisson process, below 1 comes in bursts,
    large is even, infinite exactly even. The first request comes after the first gap.
    """
    now = 0.0
    while True:
        if math.isinf(burstiness):
            now += 1 / rate
        else:
            now += source.gammavariate(burstiness, 1 / (rate * burstiness))
        yield now


@dataclass(frozen=True, slots=True)
class Planned:
    """One request to send. Exactly one of ``ids`` and ``text`` is set, unless only the length is known."""

    at: float | None
    """Seconds from the start; None to send as soon as a place is free."""
    input_len: int
    output_len: int
    ids: list[int] | None = None
    text: str | None = None


def read_trace(path: Path, speed: float, output_len: LengthRange) -> list[Planned]:
    """Return the requests of a JSONL trace, in order of time.

    A line is ``{"at": seconds, "input_len": n, "output_len": m}``. A trace with prompts has ``"prompt"``
    (text or token ids) in place of ``input_len``. ``output_len`` is the default for lines without. Times are
    divided by ``speed``. Raise ConfigError that names the line.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--dataset: can't read {path.name!r}", param="--dataset") from error
    found = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            # Any malformed line gives the same error, whatever exception the parsing raised.
            try:
                found.append(_traced(json.loads(line), speed, output_len.low))
            except (ValueError, TypeError, KeyError) as error:
                raise ConfigError(
                    f"--dataset: line {number} needs at (seconds), input_len or prompt, and output_len",
                    param="--dataset",
                ) from error
    if not found:
        raise ConfigError("--dataset: the trace holds no request", param="--dataset")
    return sorted(found, key=lambda planned: planned.at or 0.0)


def _traced(entry: Any, speed: float, output_len: int) -> Planned:
    """Return the request of one line. Raise ValueError, TypeError or KeyError for an invalid line."""
    at = float(entry["at"]) / speed
    output = entry.get("output_len", output_len)
    prompt = entry.get("prompt")
    if isinstance(prompt, list):
        # `type(..) is int` rejects bool, which is a subclass of int.
        ids = [token for token in prompt if type(token) is int and token >= 0]
        planned = Planned(at, len(ids), output, ids=ids)
        if len(ids) != len(prompt):
            raise ValueError("not token ids")
    elif isinstance(prompt, str):
        planned = Planned(at, max(len(prompt), 1), output, text=prompt)
    else:
        planned = Planned(at, entry["input_len"], output)
    counts = (planned.input_len, planned.output_len)
    if not all(type(count) is int and count >= 1 for count in counts) or not 0 <= at < math.inf:
        raise ValueError("a length below 1 or a time below 0")
    return planned


def random_plan(
    input_len: LengthRange, output_len: LengthRange, rate: float | None, burstiness: float, seed: int
) -> Iterator[Planned]:
    """Yield endless requests of drawn lengths: at drawn times with a ``rate``, else without times."""
    source = random.Random(f"lengths {seed}")
    times: Iterable[float | None] = _no_times()
    if rate is not None:
        times = arrivals(rate, burstiness, random.Random(f"arrivals {seed}"))
    for at in times:
        yield Planned(at, input_len.draw(source), output_len.draw(source))


def _no_times() -> Iterator[None]:
    while True:
        yield None
