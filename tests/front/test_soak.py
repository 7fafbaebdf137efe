"""Two hundred requests with random cancels, disconnects and stops, on blocks for one and a half sequences."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import httpx
import pytest

from tests.support.slowness import deadline

CONTEXT = 256
BLOCK = 16
#: spool-text in float32: 4 layers, keys and values of 2 heads of 32.
BLOCK_BYTES = 4 * 2 * 2 * 32 * 4 * BLOCK
GAUGES = ("num_requests_running", "num_requests_waiting", "front_sequences")


def body_of(rng: random.Random, number: int, model: str) -> dict[str, Any]:
    body: dict[str, Any] = {
        "model": model,
        "prompt": f"Question: {number} apples and {rng.randrange(99)} more. " * rng.choice([1, 2, 6]),
        "max_tokens": rng.choice([1, 16, 64, 120]),
        "temperature": rng.choice([0, 1]),
        "seed": number,
        "stream": rng.random() < 0.6,
        "n": rng.choice([1, 1, 1, 2]),
    }
    if rng.random() < 0.3:
        body["stop"] = ["a", "\n"]
    return body


async def one_stream(client: httpx.AsyncClient, body: dict[str, Any], leave_after: int | None) -> str:
    """Return the end of a streamed request: "left", or "answered" with one finish per choice and one
    [DONE].
    """
    finishes: list[int] = []
    done = 0
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        assert answer.status_code == 200
        lines = 0
        async for line in answer.aiter_lines():
            if not line.startswith("data: "):
                continue
            assert not done, "an event after [DONE]"
            lines += 1
            if leave_after is not None and lines > leave_after:
                return "left"
            data = line.removeprefix("data: ")
            if data == "[DONE]":
                done += 1
                continue
            event = json.loads(data)
            assert "error" not in event, event
            finishes += [c["index"] for c in event["choices"] if c["finish_reason"] is not None]
    assert sorted(finishes) == list(range(body["n"]))
    assert done == 1
    return "answered"


async def one(client: httpx.AsyncClient, rng: random.Random, number: int, model: str) -> str:
    body = body_of(rng, number, model)
    leaves = rng.random() < 0.3
    if body["stream"]:
        return await one_stream(client, body, rng.randrange(0, 12) if leaves else None)
    try:
        patience = rng.choice([0.02, 0.3, 1.0]) if leaves else 120
        answer = await client.post("/v1/completions", json=body, timeout=patience)
    except httpx.TimeoutException:
        return "left"
    assert answer.status_code == 200, answer.text
    reasons = [choice["finish_reason"] for choice in answer.json()["choices"]]
    assert len(reasons) == body["n"]
    assert set(reasons) <= {"stop", "length"}
    return "answered"


@pytest.mark.requirement("F42")
@pytest.mark.slow
def test_two_hundred_hostile_requests(start_weft: Any) -> None:
    memory = (CONTEXT * 3 // 2 // BLOCK + 1) * BLOCK_BYTES  # and the null block
    server = start_weft(
        *("--max-model-len", str(CONTEXT), "--block-size", str(BLOCK), "--kv-cache-memory", str(memory)),
        *("--max-num-seqs", "16", "--max-num-batched-tokens", "128"),
    )
    blocks, slots = server.metric("free_blocks"), server.metric("free_slots")
    assert blocks == CONTEXT * 3 // 2 // BLOCK
    rng = random.Random(11)

    async def run() -> list[str]:
        limits = httpx.Limits(max_connections=40)
        async with httpx.AsyncClient(base_url=server.url, limits=limits, timeout=deadline(120)) as client:
            asked = (one(client, random.Random(rng.random()), n, server.model) for n in range(200))
            return await asyncio.gather(*asked)

    ended = asyncio.run(run())
    assert len(ended) == 200
    assert set(ended) == {"answered", "left"}
    server.wait(lambda: all(server.metric(name) == 0 for name in GAUGES), 20)
    server.wait(lambda: (server.metric("free_blocks"), server.metric("free_slots")) == (blocks, slots), 3)
    assert server.metric("num_preemptions_total") > 0
    assert server.chat(max_tokens=2).status_code == 200
