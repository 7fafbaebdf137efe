"""Log line about load, every 10 seconds while there is traffic."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from weft.common.log import get_logger
from weft.types.messages import EngineStats

log = get_logger(__name__)

EVERY_S = 10.0
"""Seconds between two lines."""

_COUNTERS = ("prompt_tokens", "generation_tokens", "prefix_queries", "prefix_hits")


class Throughput:
    """Makes the line from the counters of all engines at two times. Pure: the caller passes the time."""

    def __init__(self, now: float) -> None:
        self._at = now
        self._before: dict[str, EngineStats] = {}

    def line(self, now: float, engines: Iterable[tuple[str, EngineStats]]) -> str | None:
        """Return the line for the time since the last call; None without computed tokens or open sequences.
        The counters become the base of the next call.

        ``engines``: names, and the counters of the last heartbeat. ``now``: seconds.
        """
        stats = dict(engines)
        seconds, self._at = max(now - self._at, 1e-3), now
        prompt, output, queries, hits = (self._since(stats, name) for name in _COUNTERS)
        self._before = stats
        running = sum(one.running for one in stats.values())
        waiting = sum(one.waiting for one in stats.values())
        if not (prompt or output or running or waiting):
            return None
        used = max((one.kv_usage for one in stats.values()), default=0.0)
        hit_rate = f"{100 * hits / queries:.1f} %" if queries else "-"
        return (
            f"prompt {prompt / seconds:.1f} tokens/s, output {output / seconds:.1f} tokens/s, "
            f"running {running}, waiting {waiting}, KV cache {100 * used:.1f} % used, "
            f"prefix cache hit rate {hit_rate}"
        )

    def _since(self, stats: dict[str, EngineStats], name: str) -> int:
        """Return the growth of a counter over all engines. The counters of a restarted engine begin at 0."""
        grown = 0
        for engine, now in stats.items():
            value, before = getattr(now, name), getattr(self._before.get(engine, EngineStats()), name)
            grown += value - before if value >= before else value
        return grown


async def report(engines: Callable[[], Iterable[tuple[str, EngineStats]]]) -> None:
    """Log a line every ``EVERY_S`` seconds with traffic. Runs until the task is cancelled. ``engines`` is
    called for each line."""
    loop = asyncio.get_running_loop()
    made = Throughput(loop.time())
    while True:
        await asyncio.sleep(EVERY_S)
        line = made.line(loop.time(), engines())
        if line is not None:
            log.info("%s", line)
