"""The load of the last minute, and the load expected some seconds ahead: a rate, a trend, mean sizes.

A count of independent arrivals varies by its square root. A change counts only beyond some deviations, so
noise is neither growth nor a trend.
"""

from __future__ import annotations

import math
from collections import deque
from typing import NamedTuple

from weft.control.planner.capacity import Load

SLOW_S = 60.0
"""Seconds of the window for the rate, the trend and the mean sizes."""
FAST_S = 20.0
"""Seconds of the window that notices a sudden growth."""
MOST_GROWTH = 1.2
"""Maximum expected rate, in units of the rate in the newer half of the slow window."""
DEVIATIONS = 1.5
"""Deviations beyond which a sudden growth counts."""
MARGIN_DEVIATIONS = 2.0
"""Deviations that the rate may grow by after a group has left."""
TREND_DEVIATIONS = 2.5
"""Deviations beyond which a trend counts. A wrong trend adds a group for nothing."""
FEWEST = 10
"""Requests of which a mean size in the fast window counts."""


class Arrivals(NamedTuple):
    """One interval."""

    seconds: float
    arrivals: float
    """Sequences that arrived."""
    ended: float
    """Requests that ended; the sizes are sums over these requests."""
    prompt_tokens: float
    output_tokens: float
    started: float
    """Requests with a first token."""
    computed: float
    """Prompt tokens computed by engines. Known earlier than the sizes of ended requests."""


class Forecast:
    """The intervals of the last minute."""

    def __init__(self) -> None:
        self._intervals: deque[Arrivals] = deque()
        self._prompt = self._output = 0.0
        """Mean sizes in tokens; 0 before the first request has ended."""

    def add(self, interval: Arrivals) -> None:
        """Add the interval that ends now."""
        self._intervals.append(interval)
        while sum(one.seconds for one in self._intervals) - self._intervals[0].seconds >= SLOW_S:
            self._intervals.popleft()
        recent = self._last(SLOW_S)
        if recent.ended:
            self._prompt = recent.prompt_tokens / recent.ended
            self._output = recent.output_tokens / recent.ended

    def clear(self) -> None:
        """Forget all intervals, after a gap. Keep the mean sizes."""
        self._intervals.clear()

    @property
    def known(self) -> bool:
        """True if rate and sizes are known."""
        return self._output > 0 and self._last(math.inf).seconds >= FAST_S

    @property
    def rate(self) -> float:
        """Arrivals per second in the slow window."""
        return _rate(self._last(SLOW_S))

    @property
    def margin(self) -> float:
        """The noise of the rate, in units of the rate."""
        arrivals = self._last(SLOW_S).arrivals
        return MARGIN_DEVIATIONS / math.sqrt(arrivals) if arrivals else 0.0

    def trend(self) -> float:
        """Return the growth in arrivals per second per second; 0 within the noise."""
        whole = self._last(SLOW_S)
        new = self._last(whole.seconds / 2)
        old = Arrivals(*(a - b for a, b in zip(whole, new, strict=True)))
        if old.seconds <= 0 or new.seconds <= 0:
            return 0.0
        noise = math.sqrt(old.arrivals / old.seconds**2 + new.arrivals / new.seconds**2)
        change = _rate(new) - _rate(old)
        return change / (whole.seconds / 2) if abs(change) > TREND_DEVIATIONS * noise else 0.0

    def expected(self, ahead: float) -> float:
        """Return the arrivals per second expected in ``ahead`` seconds, at least the present ones."""
        whole, fast = self._last(SLOW_S), self._last(FAST_S)
        present = max(_rate(whole), _rate(fast) - DEVIATIONS * _noise(fast))
        trend = max(self.trend(), 0.0)
        new = self._last(whole.seconds / 2)
        # The rate of the newer half belongs to the middle of the half.
        later = _rate(new) + trend * (new.seconds / 2 + ahead) if trend else 0.0
        return max(present, min(later, MOST_GROWTH * _rate(new)))

    def loads(self, rate: float) -> list[Load]:
        """Return the loads of ``rate`` with the mean sizes of the slow window and, with enough requests, of
        the fast window."""
        slow, fast = self._last(SLOW_S), self._last(FAST_S)
        computed = slow.computed / slow.started if slow.started else self._prompt
        found = [Load(rate, self._prompt, computed, self._output)]
        if fast.started >= FEWEST:
            found.append(found[0]._replace(computed=fast.computed / fast.started))
        if fast.ended >= FEWEST:
            prompt, output = fast.prompt_tokens / fast.ended, fast.output_tokens / fast.ended
            found.append(found[-1]._replace(prompt=prompt, output=output))
        return found

    def _last(self, seconds: float) -> Arrivals:
        """Return the sum over the last ``seconds``, in whole intervals, at least one."""
        total = Arrivals(*[0.0] * 7)
        for one in reversed(self._intervals):
            if total.seconds and total.seconds + one.seconds > seconds * 1.01:
                break
            total = Arrivals(*(a + b for a, b in zip(total, one, strict=True)))
        return total


def _rate(one: Arrivals) -> float:
    return one.arrivals / one.seconds if one.seconds else 0.0


def _noise(one: Arrivals) -> float:
    return math.sqrt(one.arrivals) / one.seconds if one.seconds else 0.0
