"""Workloads: Poisson arrivals, bursts, traces, and background sequences that decode all the time.

A workload is a list of ``Arrival`` in order of time. A seed determines a workload.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from weft.common.errors import ConfigError

MAX_TOKENS = 1 << 24


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request with one sequence."""

    at: float
    """Seconds from the start."""
    prompt: int
    """Number of prompt tokens."""
    output: int
    """Number of output tokens. The sequence produces exactly as many, unless the run is cut off."""
    restart_output: int = 0
    """Output tokens of the successor, which starts when the sequence ends; 0 for no successor.

    A sequence with a successor is a background sequence. Its inter-token times show the effect of requests.
    Background sequences are admitted before requests.
    """
    images: int = 0
    """Number of images. Image tokens are not included in ``prompt``."""

    @property
    def background(self) -> bool:
        return self.restart_output > 0


@dataclass(frozen=True, slots=True)
class Lengths:
    """A number of tokens, uniform over ``low .. high``."""

    low: int
    high: int

    @classmethod
    def parse(cls, text: str, label: str) -> Lengths:
        """Return the range of ``512`` or ``100-2000``. Raise ConfigError with the name ``label``."""
        parts = text.split("-")
        if len(parts) <= 2 and all(part.strip().isascii() and part.strip().isdigit() for part in parts):
            low, high = int(parts[0]), int(parts[-1])
            if 1 <= low <= high <= MAX_TOKENS:
                return cls(low, high)
        raise ConfigError(
            f"{label} must be a number of tokens such as 512, or a range such as 100-2000, not {text[:40]!r}",
            param=label,
        )

    def draw(self, rng: random.Random) -> int:
        return rng.randint(self.low, self.high)


def burst(count: int, prompt: Lengths, output: Lengths, rng: random.Random, at: float = 0.0) -> list[Arrival]:
    """Return ``count`` requests at second ``at``."""
    return [Arrival(at, prompt.draw(rng), output.draw(rng)) for _ in range(count)]


def poisson(
    count: int, rate: float, prompt: Lengths, output: Lengths, rng: random.Random, at: float = 0.0
) -> list[Arrival]:
    """Return ``count`` independent requests from second ``at`` on, on average ``rate`` (> 0) per second."""
    found = []
    for _ in range(count):
        at += rng.expovariate(rate)
        found.append(Arrival(at, prompt.draw(rng), output.draw(rng)))
    return found


def background(count: int, prompt: int, output: int, rng: random.Random) -> list[Arrival]:
    """Return ``count`` sequences that decode all the time: each end starts a successor at once.

    Each sequence produces ``output`` tokens. The first sequences produce 1 to ``output``, so that their ends
    are spread.
    """
    return [Arrival(0.0, prompt, rng.randint(1, output), output) for _ in range(count)]


class _Line(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    at: float
    prompt_tokens: int
    output_tokens: int


def read_trace(path: str | Path) -> list[Arrival]:
    """Return the arrivals of a JSONL file with lines ``{"at": 0.5, "prompt_tokens": 300, "output_tokens":
    40}``, in order of time.

    Lines need not be in order of time. Raise ConfigError with the number of the wrong line, and for an
    unreadable or empty file.
    """
    name = Path(path).name
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise ConfigError(f"--trace-file {name}: {why}", param="--trace-file") from error
    found = [_parse(line, number, name) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
    if not found:
        raise ConfigError(f"--trace-file {name} is empty", param="--trace-file")
    return in_order(found)


def _parse(line: str, number: int, name: str) -> Arrival:
    """Return the arrival of one line. Raise ConfigError with the line's number."""
    try:
        one = msgspec.json.decode(line, type=_Line)
    except msgspec.DecodeError as error:
        raise ConfigError(f"--trace-file {name}, line {number}: {error}", param="--trace-file") from error
    lengths_fit = 1 <= one.prompt_tokens <= MAX_TOKENS and 1 <= one.output_tokens <= MAX_TOKENS
    if not (0.0 <= one.at < 1e9 and lengths_fit):
        raise ConfigError(
            f"--trace-file {name}, line {number}: at must be seconds of at least 0, and both numbers of "
            "tokens at least 1",
            param="--trace-file",
        )
    return Arrival(one.at, one.prompt_tokens, one.output_tokens)


def in_order(arrivals: Sequence[Arrival]) -> list[Arrival]:
    """Return the arrivals in order of time; ties keep the given order."""
    return sorted(arrivals, key=lambda arrival: arrival.at)


class Prompts:
    """Makes prompts of random ids. The first ``shared`` ids are the same in all prompts."""

    def __init__(self, vocabulary: int, shared: int, seed: int) -> None:
        self._vocabulary = vocabulary
        self._rng = np.random.default_rng(seed)
        self._common = self._draw(shared)

    def make(self, length: int) -> np.ndarray:
        """Return a prompt, int32 [length]."""
        return np.concatenate([self._common[:length], self._draw(max(length - len(self._common), 0))])

    def _draw(self, count: int) -> np.ndarray:
        return self._rng.integers(0, self._vocabulary, count, dtype=np.int32)
