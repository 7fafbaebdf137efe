"""Token buckets of keys, on a clock of the test's own."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.front.http.rate_limit import (
    RateAdmitted,
    RateLimits,
    RateRefused,
    RateRequest,
    Spent,
    Standing,
    duration,
    headers_of,
)
from weft.front.lifecycle import LEAST_WAIT, MOST_WAIT, WINDOW, RetryAfter


def ask(limits: RateLimits, now: float, key: int = 0) -> RateAdmitted | RateRefused:
    (verdict,) = limits.on(RateRequest(key), now)
    return verdict


def test_a_minutes_requests_and_no_more() -> None:
    limits = RateLimits(3, 0)
    for left in (2, 1, 0):
        assert ask(limits, 10.0) == RateAdmitted(requests=Standing(3, left, 20.0 * (3 - left)), tokens=None)
    refused = ask(limits, 10.0)
    assert isinstance(refused, RateRefused)
    assert (refused.what, refused.wait) == ("requests", 20.0)
    assert isinstance(ask(limits, 29.9), RateRefused)
    assert isinstance(ask(limits, 30.0), RateAdmitted)
    assert isinstance(ask(limits, 31.0), RateRefused), "a refusal takes nothing, an admission one"


def test_keys_have_buckets_of_their_own() -> None:
    limits = RateLimits(1, 0)
    assert isinstance(ask(limits, 0.0, key=0), RateAdmitted)
    assert isinstance(ask(limits, 0.0, key=1), RateAdmitted)
    assert isinstance(ask(limits, 0.0, key=0), RateRefused)


def test_tokens_are_counted_when_they_are_used() -> None:
    limits = RateLimits(0, 600)
    assert isinstance(ask(limits, 0.0), RateAdmitted)
    assert limits.on(Spent(0, 1200), 0.0) == []
    refused = ask(limits, 0.0)
    assert isinstance(refused, RateRefused)
    assert refused.what == "tokens"
    assert refused.wait == pytest.approx(60.1)
    assert refused.tokens == Standing(600, 0, 120.0)
    assert isinstance(ask(limits, 60.2), RateAdmitted)


def test_a_refusal_for_tokens_takes_no_request() -> None:
    limits = RateLimits(1, 60)
    limits.on(Spent(0, 61), 0.0)
    assert isinstance(ask(limits, 0.0), RateRefused)
    assert isinstance(ask(limits, 3.0), RateAdmitted)


@pytest.mark.requirement("F31")
@given(st.lists(st.tuples(st.floats(0, 30), st.integers(0, 50)), max_size=60))
def test_no_minute_has_more_than_two_buckets(steps: list[tuple[float, int]]) -> None:
    limits = RateLimits(10, 100)
    now, admitted = 0.0, []
    for pause, tokens in steps:
        now += pause
        if isinstance(ask(limits, now), RateAdmitted):
            admitted.append(now)
            limits.on(Spent(0, tokens), now)
    for start in admitted:
        assert sum(start <= at < start + 60 for at in admitted) <= 20


def test_time_that_goes_back_gives_nothing() -> None:
    limits = RateLimits(1, 0)
    ask(limits, 10.0)
    assert isinstance(ask(limits, 5.0), RateRefused)


def test_headers_and_durations() -> None:
    made = headers_of(RateAdmitted(requests=Standing(10, 3, 42.0), tokens=None))
    assert made == [
        (b"x-ratelimit-limit-requests", b"10"),
        (b"x-ratelimit-remaining-requests", b"3"),
        (b"x-ratelimit-reset-requests", b"42s"),
    ]
    found = [duration(seconds) for seconds in (0.0, 0.012, 1.5, 60.0, 360.25)]
    assert found == ["0ms", "12ms", "1.5s", "1m0s", "6m0.25s"]


@pytest.mark.requirement("F31")
def test_refused_requests_get_turns_at_the_rate_of_ends() -> None:
    retry = RetryAfter()
    assert retry.refused(0.0) == LEAST_WAIT, "nothing is known"
    for at in range(10):
        retry.ended(float(at))
    rate = retry.rate(10.0)
    assert rate == pytest.approx(1.0)
    assert [round(retry.refused(10.0)) for _ in range(4)] == [1, 2, 3, 4]
    assert retry.refused(13.9) < 3, "turns pass"
    for _ in range(200):
        assert LEAST_WAIT <= retry.refused(14.0) <= MOST_WAIT
    assert retry.rate(14.0 + 2 * WINDOW) is None
