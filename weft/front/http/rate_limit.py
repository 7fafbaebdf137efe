"""Requests and tokens per minute for each key: token buckets without a clock of their own.

A bucket holds the amount of one minute, and refills evenly. A request is admitted if the key's buckets have
at least one request and at least one token. The tokens of a request are known only after its end. So a
token bucket can be overdrawn by several requests, and the key waits until the level is positive again.
"""

from __future__ import annotations

import math
from typing import TypeAlias

import msgspec

MINUTE = 60.0


class RateRequest(msgspec.Struct, frozen=True):
    """A request arrived with this key."""

    key: int


class Spent(msgspec.Struct, frozen=True):
    """A request with this key has used ``tokens`` tokens."""

    key: int
    tokens: int


class Standing(msgspec.Struct, frozen=True):
    """State of a bucket."""

    limit: int
    remaining: int
    reset: float
    """Seconds until the bucket is full."""


class RateAdmitted(msgspec.Struct, frozen=True, kw_only=True):
    """The request may begin. A field is None without a limit."""

    requests: Standing | None
    tokens: Standing | None


class RateRefused(msgspec.Struct, frozen=True, kw_only=True):
    """The request is refused for ``wait`` seconds, because of the limit ``what``."""

    what: str
    wait: float
    requests: Standing | None
    tokens: Standing | None


Event: TypeAlias = RateRequest | Spent
Action: TypeAlias = RateAdmitted | RateRefused


class _Bucket:
    def __init__(self, limit: int, now: float) -> None:
        self._limit = limit
        self._level = float(limit)
        self._at = now

    def take(self, count: float, now: float) -> None:
        """Remove ``count`` from the bucket. The level may become negative."""
        self._level = self.level(now) - count
        self._at = now

    def level(self, now: float) -> float:
        """Return the level at ``now``, refilled since the last removal. Negative for an overdrawn bucket."""
        gained = max(now - self._at, 0.0) * self._limit / MINUTE
        return min(self._level + gained, float(self._limit))

    def wait(self, level: float, now: float) -> float:
        """Return the seconds until the bucket reaches ``level``."""
        return max(level - self.level(now), 0.0) * MINUTE / self._limit

    def standing(self, now: float) -> Standing:
        """Return the state for the answer's headers; a negative level is shown as 0."""
        remaining = max(math.floor(self.level(now)), 0)
        return Standing(self._limit, remaining, self.wait(self._limit, now))


class RateLimits:
    """Buckets of all keys. ``on(event, now)`` decides. A limit of 0 means no limit."""

    def __init__(self, requests: int, tokens: int) -> None:
        """``requests``, ``tokens``: limits per minute for each key."""
        self._limits = (requests, tokens)
        self._buckets: dict[int, tuple[_Bucket | None, _Bucket | None]] = {}

    def on(self, event: Event, now: float) -> list[Action]:
        """Apply ``event`` and return the actions: one RateAdmitted or RateRefused for ``RateRequest``, [] for
        ``Spent``. An admitted request takes one from the key's request bucket; a refused request takes
        nothing. ``now``: seconds of any monotonic clock."""
        requests, tokens = self._of(event.key, now)
        if isinstance(event, Spent):
            if tokens is not None:
                tokens.take(event.tokens, now)
            return []
        # Admission needs one request and one token; the longest wait decides. A refusal costs nothing.
        waits = {
            "requests": 0.0 if requests is None else requests.wait(1.0, now),
            "tokens": 0.0 if tokens is None else tokens.wait(1.0, now),
        }
        what = max(waits, key=lambda name: waits[name])
        if not waits[what] and requests is not None:
            requests.take(1.0, now)
        have = {
            "requests": None if requests is None else requests.standing(now),
            "tokens": None if tokens is None else tokens.standing(now),
        }
        if waits[what]:
            return [RateRefused(what=what, wait=waits[what], **have)]
        return [RateAdmitted(**have)]

    def _of(self, key: int, now: float) -> tuple[_Bucket | None, _Bucket | None]:
        """Return the key's buckets (requests, tokens), created full at the first call; None without a
        limit."""
        if key not in self._buckets:
            requests, tokens = self._limits
            self._buckets[key] = (
                _Bucket(requests, now) if requests else None,
                _Bucket(tokens, now) if tokens else None,
            )
        return self._buckets[key]


def headers_of(verdict: Action) -> list[tuple[bytes, bytes]]:
    """Return the verdict as OpenAI's rate limit headers."""
    found = []
    for name, standing in (("requests", verdict.requests), ("tokens", verdict.tokens)):
        if standing is not None:
            words = (str(standing.limit), str(standing.remaining), duration(standing.reset))
            for word, value in zip(("limit", "remaining", "reset"), words, strict=True):
                found.append((f"x-ratelimit-{word}-{name}".encode(), value.encode()))
    return found


def duration(seconds: float) -> str:
    """Return a duration in Go's format, rounded up to milliseconds: ``12ms``, ``1.5s``, ``6m0s``."""
    milliseconds = math.ceil(seconds * 1000)
    if milliseconds < 1000:
        return f"{milliseconds}ms"
    minutes, rest = divmod(milliseconds, 60_000)
    text = f"{rest / 1000:g}s"
    return f"{minutes}m{text}" if minutes else text
