"""No client stalls another: a canary asks for two tokens repeatedly beside each hostile client.

The attacks are smaller versions of ``bench.canary``, which measures the latency. Here every canary request
must be answered, and nothing may remain afterwards.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import pytest

from bench.canary import CANARIES, Canary, Memory, beside
from bench.hostile import ATTACKS, IMAGE_ATTACKS
from tests.support.processes import commands
from tests.support.servers import Servers
from tests.support.slow import mostly_slow

SLOTS = 8
SCALE = {"bad_words": 1.0, "nested": 0.2, "long_prompts": 0.5}
"""Scale of an attack; 0.05 by default."""
EXPECTED = {
    "bad_words": {400},
    "stops": {200},
    "long_prompts": {400},
    "nested": {400},
    "chunks": {0, 400, 413},  # 0: cut before the answer could be read
    "echo_logprobs": {200, 400},
    "endless_grammars": {400, 429},
    "large_grammars": {200, 400, 429},
    "spent_grammars": {200, 400},
    "exclusive_grammars": {200},
    "chained_responses": {200, 413, 429},
    "full_store": {200, 429},
}
GROWTH_MB = 100


@pytest.fixture(scope="module")
def server(start_weft: Any) -> Any:
    running = start_weft("--max-num-seqs", str(SLOTS), "--api-key", "attacker", "--api-key", "canary")
    running.http.headers["authorization"] = "Bearer canary"
    return running


@pytest.mark.requirement("F46")
@mostly_slow("attack", [each for each in ATTACKS if each not in IMAGE_ATTACKS], ["chunks"])
def test_a_canary_beside(server: Any, attack: str) -> None:
    command = [sys.executable, "-m", "bench.hostile", attack, server.url, "--model", server.model]
    command += ["--seconds", "1", "--scale", str(SCALE.get(attack, 0.05)), "--streams", str(SLOTS)]
    command += ["--key", "attacker"]
    front = Memory(server.process.pid)
    before = front.now()
    canary = Canary(server.url, server.model, [kind for kind in CANARIES if kind != "image"], "canary")
    told = asyncio.run(beside(canary, command, 1, settle=0.3))
    assert canary.refused == []
    assert len(canary.seconds) > 5
    statuses = {int(status) for status in json.loads(told)}
    assert statuses <= EXPECTED.get(attack, set()), statuses
    assert bool(statuses) == (attack in EXPECTED)
    server.wait(
        lambda: server.metric("num_requests_running") == server.metric("num_requests_waiting") == 0, 30
    )
    server.wait(lambda: front.now() < before + GROWTH_MB, 30)
    assert server.http.get("/ready").status_code == 200


@pytest.mark.slow
@pytest.mark.parametrize("attack", IMAGE_ATTACKS)
def test_a_canary_beside_images(servers: Servers, attack: str) -> None:
    """Text and images of another key are answered while one key's images fill the decoders."""
    if attack == "video_flood":
        pytest.importorskip("av", reason="video files need PyAV (weft[video])")
    keys = ("--api-key", "attacker", "--api-key", "canary")
    name = "spool-vision"
    with servers.scope():
        server = servers.weft("--model", name, "--threads", "1", *keys)
        command = [sys.executable, "-m", "bench.hostile", attack, server.url, "--model", name]
        command += ["--seconds", "1", "--scale", "0.04", "--key", "attacker"]
        canary = Canary(server.url, name, ["text", "image"], "canary")
        told = asyncio.run(beside(canary, command, 3, settle=0.3))
    assert canary.refused == []
    assert all(canary.by_kind.values())
    assert {int(status) for status in json.loads(told)} <= {200, 400, 429}


@pytest.mark.requirement("F46")
def test_large_bodies_are_read_in_another_process(server: Any) -> None:
    def readers() -> int:
        return sum(
            "weft.front.requests.read_worker" in words for words in commands(server.process.pid).values()
        )

    body = {"model": server.model, "prompt": [5] * 20, "max_tokens": 1, "temperature": 0}
    small = server.http.post("/v1/completions", json=body)
    large = server.http.post(
        "/v1/completions",
        content=json.dumps(body) + " " * (1 << 20),
        headers={"content-type": "application/json"},
    )
    assert small.status_code == large.status_code == 200
    assert large.json()["choices"] == small.json()["choices"]
    assert readers() >= 1
