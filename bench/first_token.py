"""Measure a request that ends with its first token, on a server with separate prefill and decode groups.

python -m bench.first_token --name first-token-mine
python -m bench.first_token --tree ../weft-before --name first-token-before

One client sends requests in sequence. Runs with ``max_tokens`` 1 and runs with ``max_tokens`` 2 alternate.
Requests with 2 tokens are the reference: they need a transfer, and requests with 1 token need none.
``--tree`` runs the server of another working tree, to compare versions.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx

from bench import record
from weft.bench.process import ServerProcess

LENGTHS = (1, 2)
EVICTED = re.compile(r'^weft:transfers_evictions_total\{.*head="(\w+)".*\} (.*)$', re.M)


def percentile(values: Sequence[float], share: float) -> float:
    """Return the smallest of ``values`` that is at least as large as the share ``share`` of ``values``."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def evictions(http: httpx.Client) -> float:
    """Return the number of sequences that engines have returned to the router so far."""
    return sum(float(value) for _, value in EVICTED.findall(http.get("/metrics").text))


def run(
    http: httpx.Client, model: str, max_tokens: int, requests: int, first: int
) -> tuple[list[float], list[int]]:
    """Return (seconds of each request, HTTP statuses except 200). ``first``: number of the first prompt. No
    prompt repeats.
    """
    took: list[float] = []
    failed: list[int] = []
    for number in range(first, first + requests):
        body = {"model": model, "prompt": f"Tom has {number} apples and", "max_tokens": max_tokens}
        began = time.perf_counter()
        answer = http.post("/v1/completions", json={**body, "temperature": 0, "ignore_eos": True})
        took.append(time.perf_counter() - began)
        if answer.status_code != 200:
            failed.append(answer.status_code)
    return took, failed


def measure(http: httpx.Client, model: str, requests: int, rounds: int) -> list[dict[str, Any]]:
    """Return a row for each number of tokens."""
    took: dict[int, list[float]] = {length: [] for length in LENGTHS}
    failed: dict[int, list[int]] = {length: [] for length in LENGTHS}
    evicted = dict.fromkeys(LENGTHS, 0.0)
    for length in LENGTHS:
        run(http, model, length, 50, 10_000_000)  # warm
    each = -(-requests // rounds)
    for number in range(rounds):
        for length in LENGTHS if number % 2 else LENGTHS[::-1]:
            before = evictions(http)
            seconds, statuses = run(http, model, length, each, (number * 2 + length) * each)
            time.sleep(1.5)  # engines report their counters once per second
            evicted[length] += evictions(http) - before
            took[length] += seconds
            failed[length] += statuses
    return [
        {
            "max_tokens": length,
            "requests": len(took[length]),
            "p50, ms": round(1000 * percentile(took[length], 0.5), 1),
            "p99, ms": round(1000 * percentile(took[length], 0.99), 1),
            "longest, ms": round(1000 * max(took[length]), 1),
            "failed": len(failed[length]),
            "evictions": int(evicted[length]),
        }
        for length in LENGTHS
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="spool-text")
    parser.add_argument("--requests", type=int, default=1000, help="requests for each number of tokens")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--flags", default="--prefill 1 --decode 1", help="flags of the server")
    parser.add_argument("--tree", type=Path, default=record.ROOT, help="the server's working tree")
    parser.add_argument("--folder", type=Path, default=record.ROOT / "bench" / "results")
    parser.add_argument("--name", help="name of the result; default: no result is written")
    given = parser.parse_args()
    command = [sys.executable, "-m", "weft", "serve", given.model, "--port", "{port}", *given.flags.split()]
    environment = {"PYTHONPATH": os.fspath(given.tree.resolve())}
    with ServerProcess(command, environment=environment) as server:
        server.wait_ready(300)
        with httpx.Client(base_url=server.url, trust_env=False, timeout=120.0) as http:
            rows = measure(http, http.get("/v1/models").json()["data"][0]["id"], given.requests, given.rounds)
    table = record.markdown(rows)
    print(table)
    ratio = rows[0]["p99, ms"] / rows[1]["p99, ms"]
    print(f"p99 of {LENGTHS[0]} is {ratio:.2f} times that of {LENGTHS[1]}")
    if given.name:
        title = "Requests that end with their first token"
        record.write(given.folder / f"{given.name}.json", "bench.first_token", title, table, {"rows": rows})


if __name__ == "__main__":
    main()
