"""What a step costs: seconds as a function of what is in it.

The model is linear in a few features of a step, with coefficients that are never negative, so it grows with
everything that is added to a step. Merged tokens enter as a piecewise linear function, one slope for each
stretch between two knots: a step of few tokens is bound by reading the weights, one of many by arithmetic.

    seconds = step + slope_1 * tokens up to 16 + slope_2 * tokens 17 .. 64 + ...
            + prefill_row * rows + prefill_pair * (query, key) pairs + prefill_read * positions read
            + decode_row * rows + decode_pair * (query, key) pairs

For one new position a row, pairs and positions read are the same number: a decode row's cache reads are its
pairs. ``weft.scheduler.fit`` finds the coefficients. Pure Python, no torch: a prediction takes microseconds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from weft.common.errors import ConfigError
from weft.types.plan import StepPlan

KNOTS = (16, 64, 256, 1024)
"""Merged tokens at which the slope may change."""

NAMES = (
    "step",
    *(f"tokens_to_{knot}" for knot in KNOTS),
    "tokens_beyond",
    "prefill_row",
    "prefill_pair",
    "prefill_read",
    "decode_row",
    "decode_pair",
)
"""Features in order; coefficients are seconds for one of each."""

FIRST_SLOPE, NUM_SLOPES = 1, len(KNOTS) + 1
"""Where the slopes of merged tokens are in ``NAMES``."""

_FORMAT = 1


class StepShape(NamedTuple):
    """What the cost of a step depends on. Positions count from 0."""

    prefill_rows: int = 0
    prefill_tokens: int = 0
    prefill_pairs: int = 0
    """(query, key) pairs of causal attention: the sum over tokens of position + 1."""
    prefill_read: int = 0
    """Cached positions that rows read: the sum over rows of start + count."""
    decode_rows: int = 0
    decode_tokens: int = 0
    decode_pairs: int = 0

    @property
    def tokens(self) -> int:
        return self.prefill_tokens + self.decode_tokens

    def with_chunk(self, start: int, count: int) -> StepShape:
        """This step and one more prefill row over positions ``start .. start + count - 1``."""
        return StepShape(
            self.prefill_rows + 1,
            self.prefill_tokens + count,
            self.prefill_pairs + pairs(start, count),
            self.prefill_read + start + count,
            self.decode_rows,
            self.decode_tokens,
            self.decode_pairs,
        )

    def label(self) -> str:
        """As in traces: ``prefill rows/tokens + decode rows/tokens``."""
        return f"{self.prefill_rows}/{self.prefill_tokens} + {self.decode_rows}/{self.decode_tokens}"


def pairs(start: int, count: int) -> int:
    """(query, key) pairs of ``count`` queries from position ``start``, each seeing itself and all before."""
    return count * start + count * (count + 1) // 2


def shape_of(plan: StepPlan) -> StepShape:
    """The shape of a plan; where rows verify drafts, of its upper bounds."""
    sums = []
    for segment in (plan.prefill, plan.decode):
        start, count = segment.start.astype("int64"), segment.count.astype("int64")
        seen = int((count * start + count * (count + 1) // 2).sum())
        sums.append((segment.rows, int(count.sum()), seen, int(start.sum())))
    (rows, tokens, seen, starts), (decode_rows, decode_tokens, decode_seen, _) = sums
    return StepShape(rows, tokens, seen, starts + tokens, decode_rows, decode_tokens, decode_seen)


def features(shape: StepShape) -> list[float]:
    """The step's features, in the order of ``NAMES``."""
    found, low, tokens = [1.0], 0, shape.tokens
    for knot in KNOTS:
        found.append(float(min(max(tokens - low, 0), knot - low)))
        low = knot
    found.append(float(max(tokens - low, 0)))
    return [
        *found,
        float(shape.prefill_rows),
        float(shape.prefill_pairs),
        float(shape.prefill_read),
        float(shape.decode_rows),
        float(shape.decode_pairs),
    ]


class _File(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A cost model as JSON."""

    format: int
    about: str = ""
    seconds: dict[str, float]


@dataclass(frozen=True, slots=True)
class CostModel:
    """Coefficients in the order of ``NAMES``, in seconds."""

    coefficients: tuple[float, ...]
    about: str = ""
    """Where it was measured, in words."""

    def predict(self, shape: StepShape) -> float:
        """Seconds of a step."""
        return sum(c * x for c, x in zip(self.coefficients, features(shape), strict=True))

    def scaled(self, factor: float) -> CostModel:
        """A machine that is ``factor`` times as slow at everything."""
        return CostModel(tuple(c * factor for c in self.coefficients), self.about)

    def to_json(self) -> bytes:
        """Readable JSON; ``from_json`` takes it back without loss."""
        seconds = dict(zip(NAMES, self.coefficients, strict=True))
        return msgspec.json.format(
            msgspec.json.encode(_File(format=_FORMAT, about=self.about, seconds=seconds)), indent=2
        )

    @classmethod
    def from_json(cls, data: bytes, name: str = "the cost model") -> CostModel:
        """Parses what ``to_json`` made. Raises ConfigError, calling it ``name``, for anything else."""
        try:
            file = msgspec.json.decode(data, type=_File)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"{name} is not a cost model: {error}") from error
        if file.format != _FORMAT:
            raise ConfigError(f"{name} has format {file.format}; this version reads {_FORMAT}: measure again")
        return cls.of(file.seconds, file.about, name)

    @classmethod
    def of(cls, seconds: Mapping[str, float], about: str = "", name: str = "the cost model") -> CostModel:
        """From coefficients by feature. Raises ConfigError unless all are there, finite and not negative."""
        wrong = sorted(set(seconds) ^ set(NAMES))
        if wrong:
            raise ConfigError(f"{name} must have the features {', '.join(NAMES)}; look at {', '.join(wrong)}")
        for key, value in seconds.items():
            if not (math.isfinite(value) and value >= 0):
                raise ConfigError(f"{name}: {key} must be a number of seconds of at least 0")
        if not any(seconds.values()):
            raise ConfigError(f"{name}: all its coefficients are 0, so no step would take any time")
        return cls(tuple(float(seconds[key]) for key in NAMES), about)


PRIOR = CostModel.of(
    {
        "step": 5e-3,
        "tokens_to_16": 1e-4,
        "tokens_to_64": 1e-4,
        "tokens_to_256": 1e-4,
        "tokens_to_1024": 1e-4,
        "tokens_beyond": 1e-4,
        "prefill_row": 1e-4,
        "prefill_pair": 1e-8,
        "prefill_read": 1e-8,
        "decode_row": 1e-5,
        "decode_pair": 1e-7,
    },
    "a guess for before the first measurement; its proportions matter, its size is scaled to what is seen",
)
