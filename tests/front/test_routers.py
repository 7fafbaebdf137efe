"""A server behind a router: the router renders a prompt, knows where its blocks are, and sends token ids."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from tests.support.slowness import deadline

MESSAGES = [{"role": "user", "content": "Tell me a story about a small brown fox. " * 12}]
BLOCK = 64
WAIT_MS = round(deadline(20.0) * 1e3)


def replayed(endpoint: str) -> list[Any]:
    """Return all batches so far: (time, events, replica)."""
    context = zmq.Context()
    client = context.socket(zmq.DEALER)
    client.connect(endpoint)
    client.send_multipart([b"", bytes(8)])
    batches: list[Any] = []
    first = 0
    while True:
        assert client.poll(WAIT_MS), "no answer"
        _, number, payload = client.recv_multipart()
        if not payload:
            assert number == b"\xff" * 8
            context.destroy(linger=0)
            return batches
        first = int.from_bytes(number, "big") if not batches else first
        assert int.from_bytes(number, "big") == first + len(batches)
        batches.append(msgspec.msgpack.decode(payload))


@pytest.mark.requirement("E36")
@pytest.mark.requirement("F68")
def test_a_router_finds_the_prompt_in_the_events(start_weft: Any, tmp_path: Path) -> None:
    """Two replicas: each has its own address and number. The tokens of the events are the rendered tokens."""
    config = {
        "enable_kv_cache_events": True,
        "endpoint": f"ipc://{tmp_path}/events",
        "replay_endpoint": f"ipc://{tmp_path}/replay",
        "topic": "kv@pod@model",
    }
    server = start_weft(
        "--kv-events-config", json.dumps(config), "--data-parallel-size", "2", "--kv-cache-memory", "64M"
    )
    rendered = server.http.post("/v1/chat/completions/render", json={"messages": MESSAGES}).json()
    rendered["sampling_params"]["max_tokens"] = 2
    answer = server.http.post("/inference/v1/generate", json=rendered)
    assert answer.status_code == 200, answer.text
    endpoints = [config["replay_endpoint"], config["replay_endpoint"] + "-1"]
    ids = rendered["token_ids"]
    whole = len(ids) // BLOCK * BLOCK
    assert whole >= BLOCK

    def stored(replica: int) -> list[int]:
        """Return the tokens of all stored blocks of one replica."""
        batches = replayed(endpoints[replica])
        assert all(number == replica for _, _, number in batches)
        events = [event for _, events, _ in batches for event in events]
        return [token for event in events if event["type"] == "BlockStored" for token in event["token_ids"]]

    server.wait(lambda: [stored(0), stored(1)] in ([ids[:whole], []], [[], ids[:whole]]))
