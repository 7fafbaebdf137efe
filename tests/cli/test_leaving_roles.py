"""Clients leave while their sequence is queued, computed, transferred or decoded, and all resources become
free.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Iterator

import httpx
import pytest

from bench.observed import pools
from tests.cli.test_serve import Server
from tests.support.slow import mostly_slow
from tests.support.slowness import deadline

FLAGS = (
    "--prefill 1 --decode 1 --port 0 --dtype float64 --threads 1 --max-num-seqs 2 --block-size 16 "
    "--max-num-batched-tokens 17 --kv-cache-memory 32M --no-enable-prefix-caching"
)
LONG, SHORT = "A train travels 60 miles. " * 120, "Tom has 12 apples."


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    server = Server(tmp_path_factory.mktemp("leaving"), "spool-text", *FLAGS.split())
    yield server.url()
    server.close()


class Clients:
    """Clients that read streams repeatedly until they leave. Engine metrics are up to half a second old, and
    a single stream may end within that time.
    """

    def __init__(self, http: httpx.AsyncClient, prompt: str, tokens: int, count: int) -> None:
        self._http, self._prompt, self._tokens = http, prompt, tokens
        self.events = [0] * count
        self._tasks = [asyncio.create_task(self._run(number)) for number in range(count)]

    async def _run(self, number: int) -> None:
        body = {"model": "spool-text", "prompt": f"{number}. {self._prompt}", "max_tokens": self._tokens}
        body |= {"stream": True, "ignore_eos": True}
        while True:
            async with self._http.stream("POST", "/v1/completions", json=body) as answer:
                assert answer.status_code == 200
                async for _ in answer.aiter_lines():
                    self.events[number] += 1

    async def leave(self) -> None:
        for task in self._tasks:
            assert not task.done(), task.result()
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


def gauge(text: str, name: str, engine: str) -> float:
    (value,) = re.findall(rf'^weft:{name}\{{.*head="{engine}0".*\}} (\S+)$', text, re.M)
    return float(value)


STAGES: dict[str, tuple[str, int, int, Callable[[str], bool]]] = {
    "queued": (LONG, 8, 4, lambda text: gauge(text, "num_requests_waiting", "prefill") >= 4),
    "prefilling": (LONG, 4, 4, lambda text: gauge(text, "num_requests_running", "prefill") > 0),
    "transferring": (LONG, 8, 4, lambda text: gauge(text, "transfers_fetching", "decode") > 0),
    "decoding": (SHORT, 4, 1000, lambda text: gauge(text, "num_requests_running", "decode") == 2),
}
"""(prompt, clients, tokens, predicate on the metrics that shows the stage)."""


@pytest.mark.requirement("E17")
@mostly_slow("stage", STAGES, ["prefilling", "transferring"])
def test_a_client_that_leaves_frees_everything_within_a_second(stage: str, base: str) -> None:
    prompt, count, tokens, reached = STAGES[stage]

    async def run() -> float:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        async with httpx.AsyncClient(base_url=base, timeout=deadline(60), limits=limits) as http:

            async def until(condition: Callable[[str], bool], seconds: float) -> None:
                over = time.monotonic() + deadline(seconds)
                while not condition(text := (await http.get("/metrics")).text):
                    assert time.monotonic() < over, (stage, pools(text))
                    await asyncio.sleep(0.02)

            await until(lambda text: sum(pools(text).values()) > 0, 10)
            free = pools((await http.get("/metrics")).text)
            clients = Clients(http, prompt, tokens, count)
            await until(reached, 30)
            assert pools((await http.get("/metrics")).text) != free
            await clients.leave()
            left = time.monotonic()
            await until(lambda text: pools(text) == free, 1.0)
            return time.monotonic() - left

    asyncio.run(run())
