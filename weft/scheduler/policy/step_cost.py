"""The cost of a step: predicted seconds as a function of the step's composition.

The model is linear in a few features of a step. Coefficients are never negative, so the cost grows with
everything added to a step. Merged tokens enter as a piecewise linear function with one slope between two
knots: reading weights limits a step of few tokens, arithmetic limits a step of many.

    seconds = step + slope_1 * tokens up to 16 + slope_2 * tokens 17 .. 64 + ...
            + prefill_row * rows + prefill_pair * (query, key) pairs + prefill_read * positions read
            + decode_row * rows + decode_pair * (query, key) pairs
            + verify, if any row verifies drafts + draft_pass * drafter's passes + draft * drafts proposed

For a row with one new position, pairs and positions read are the same number: a decode row's cache reads
equal the pairs. ``weft.scheduler.policy.fit`` finds the coefficients. No torch: a prediction takes
microseconds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import msgspec
import numpy as np

from weft.common.errors import ConfigError
from weft.types.plan import PlannedRows

KNOTS = (16, 64, 256, 1024)
"""Numbers of merged tokens at which the slope may change."""

NAMES = (
    "step",
    *(f"tokens_to_{knot}" for knot in KNOTS),
    "tokens_beyond",
    "prefill_row",
    "prefill_pair",
    "prefill_read",
    "decode_row",
    "decode_pair",
    "verify",
    "draft_pass",
    "draft",
)
"""Features in order; a coefficient is the seconds of one unit."""

SPECULATION = ("verify", "draft_pass", "draft")
"""Features of steps with drafts only. A file may omit the features; the cost is then 0."""

FIRST_SLOPE, NUM_SLOPES = 1, len(KNOTS) + 1
"""Index of the first slope in ``NAMES``, and number of slopes."""

_FORMAT = 1


class StepShape(NamedTuple):
    """The facts about a step on which the cost depends. Positions count from 0."""

    prefill_rows: int = 0
    prefill_tokens: int = 0
    prefill_pairs: int = 0
    """(query, key) pairs of causal attention: the sum over tokens of position + 1."""
    prefill_read: int = 0
    """Cached positions read by rows: the sum over rows of start + count."""
    decode_rows: int = 0
    decode_tokens: int = 0
    decode_pairs: int = 0
    verify: int = 0
    """1 if a row verifies drafts, which may leave the fastest code path; else 0."""
    draft_passes: int = 0
    """Maximum drafts proposed in a row after the step: a drafter may need one pass per draft."""
    drafts: int = 0
    """Number of drafts proposed after the step, over all rows."""

    @property
    def tokens(self) -> int:
        return self.prefill_tokens + self.decode_tokens

    def with_chunk(self, start: int, count: int) -> StepShape:
        """Return the shape with one more prefill row over positions ``start .. start + count - 1``."""
        return self._replace(
            prefill_rows=self.prefill_rows + 1,
            prefill_tokens=self.prefill_tokens + count,
            prefill_pairs=self.prefill_pairs + pairs(start, count),
            prefill_read=self.prefill_read + start + count,
        )


def pairs(start: int, count: int) -> int:
    """Return the (query, key) pairs of ``count`` queries from position ``start`` with causal attention."""
    return count * start + count * (count + 1) // 2


def shape_of(plan: PlannedRows) -> StepShape:
    """Return the shape of a plan. With drafts to verify, positions are upper bounds."""
    prefill = plan.prefill
    decode = plan.decode
    passes = max(int(prefill.next_k.max(initial=0)), int(decode.next_k.max(initial=0)))
    return decode_shape(decode.start, decode.count)._replace(
        prefill_rows=prefill.rows,
        prefill_tokens=prefill.tokens,
        prefill_pairs=_seen(prefill.start, prefill.count),
        prefill_read=int(prefill.start.sum(dtype="int64")) + prefill.tokens,
        draft_passes=passes,
        drafts=int(prefill.next_k.sum() + decode.next_k.sum()) if passes else 0,
    )


def decode_shape(start: np.ndarray, count: np.ndarray) -> StepShape:
    """Return the shape of decode rows alone: ``count`` tokens each from positions ``start``, integers
    [rows]."""
    rows = len(start)
    tokens = int(count.sum())
    return StepShape(
        decode_rows=rows,
        decode_tokens=tokens,
        decode_pairs=_seen(start, count),
        verify=int(tokens > rows),
    )


def _seen(start: np.ndarray, count: np.ndarray) -> int:
    """Return the (query, key) pairs of all rows."""
    first = start.astype("int64")
    tokens = count.astype("int64")
    return int((tokens * first + tokens * (tokens + 1) // 2).sum())


def features(shape: StepShape) -> list[float]:
    """Return the features of the step in the order of ``NAMES``."""
    found = [1.0]
    low = 0
    tokens = shape.tokens
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
        float(shape.verify),
        float(shape.draft_passes),
        float(shape.drafts),
    ]


class _CostFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A cost model as JSON."""

    format: int
    about: str = ""
    seconds: dict[str, float]


@dataclass(frozen=True, slots=True)
class CostModel:
    """Coefficients in the order of ``NAMES``, in seconds."""

    coefficients: tuple[float, ...]
    about: str = ""
    """Origin of the measurements, as text."""

    def predict(self, shape: StepShape) -> float:
        """Return the predicted seconds of a step."""
        return sum(c * x for c, x in zip(self.coefficients, features(shape), strict=True))

    def scaled(self, factor: float) -> CostModel:
        """Return the model of a machine ``factor`` times as slow."""
        return CostModel(tuple(c * factor for c in self.coefficients), self.about)

    def to_json(self) -> bytes:
        """Return readable JSON. ``from_json`` reads the JSON without loss."""
        seconds = dict(zip(NAMES, self.coefficients, strict=True))
        return msgspec.json.format(
            msgspec.json.encode(_CostFile(format=_FORMAT, about=self.about, seconds=seconds)), indent=2
        )

    @classmethod
    def from_json(cls, data: bytes, name: str = "the cost model") -> CostModel:
        """Parse the result of ``to_json``. Raises ConfigError with ``name`` for anything else."""
        try:
            file = msgspec.json.decode(data, type=_CostFile)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"{name} is not a cost model: {error}") from error
        if file.format != _FORMAT:
            raise ConfigError(f"{name} has format {file.format}; this version reads {_FORMAT}: measure again")
        return cls.of(file.seconds, file.about, name)

    @classmethod
    def of(cls, seconds: Mapping[str, float], about: str = "", name: str = "the cost model") -> CostModel:
        """Return the model with the given coefficients by feature. Features in ``SPECULATION`` default to 0.

        Raises ConfigError for missing or unknown features, for infinite, NaN or negative values, and if all
        coefficients are 0.
        """
        seconds = {**dict.fromkeys(SPECULATION, 0.0), **seconds}
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
        "verify": 1e-4,
        "draft_pass": 3e-4,
        "draft": 1e-5,
    },
    "a guess for before the first measurement; its proportions matter, its size is scaled to what is seen",
)
