"""``weft serve`` over several ranks whose head, or worker, dies or stops: every request gets its answer."""

from __future__ import annotations

import concurrent.futures
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.faults.rig import Plan
from tests.front.conftest import ROOT, Servers, events, servers  # noqa: F401  (a fixture)

ANSWER = 200.0
"""Seconds in which a request must be answered, whatever befalls."""
Outlive = Callable[..., None]


@pytest.fixture
def outlive(servers: Servers, tmp_path: Path) -> Outlive:  # noqa: F811
    """Has faults befall a server, one after the other, while it answers."""

    def run(plans: Sequence[Plan], **settings: Any) -> None:
        script = [sys.executable, "-m", "tests.faults.faulty_server", str(tmp_path)]
        server = servers.start([*script, json.dumps(plans), json.dumps(settings)], 200, HF_HUB_OFFLINE="1")
        server.http.timeout = ANSWER
        server.chat(max_tokens=2)  # the front's own pools have been used once

        def ask(number: int) -> Any:
            fields: dict[str, Any] = {"max_tokens": 24, "ignore_eos": True, "seed": number}
            fields["temperature"] = number % 2
            if number % 3:
                got = server.chat(f"{number} apples", n=1 + number % 2, **fields)
                assert got.status_code == 200, got.text
                return [choice["message"]["content"] for choice in got.json()["choices"]]
            with server.stream(messages=[{"role": "user", "content": f"{number} apples"}], **fields) as lines:
                told = events(lines)
            assert told[-1] == "[DONE]", told
            return "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in told[:-1])

        def all_of_them() -> list[Any]:
            with concurrent.futures.ThreadPoolExecutor() as pool:
                return list(pool.map(ask, range(6), timeout=ANSWER))

        wanted = all_of_them()
        (tmp_path / "go").touch()
        until = time.monotonic() + 3 * ANSWER
        while not (tmp_path / f"mark{len(plans) - 1}").exists():
            assert time.monotonic() < until, sorted(path.name for path in tmp_path.iterdir())
            assert all_of_them() == wanted
        assert all_of_them() == wanted
        server.wait(lambda: server.http.get("/ready").status_code == 200, 60)
        server.wait(
            lambda: server.metric("num_requests_running") == server.metric("front_sequences") == 0, 10
        )
        assert server.metric("free_slots") == 4 * settings.get("data_parallel_size", 1)
        assert server.stop(seconds=30) == 0

    return run


def test_head_and_worker_fall_by_turns(outlive: Outlive) -> None:
    plans: list[Plan] = [
        (0, "collective", "kill"),
        (1, "stage", "kill"),
        (0, "load", "stop"),
        (0, "read", "stop"),
    ]
    # Nobody loads after a worker's death but the worker: the head's load comes with its next start.
    outlive([plans[0], plans[2], plans[1], plans[3]], tensor_parallel_size=2)


@pytest.mark.grid
def test_replicas_that_share_experts(outlive: Outlive) -> None:
    """One of them dies or stops, and with it the domain; the others keep their weights."""
    plans: list[Plan] = [(1, "collective", "kill"), (0, "stage", "stop"), (1, "read", "raise")]
    outlive(plans, data_parallel_size=2, enable_expert_parallel=True)


@pytest.mark.grid
@pytest.mark.parametrize("form", ["reduce", "throughput", "low-latency", "gather"])
@pytest.mark.parametrize("layout", [(2, 1), (1, 2), (2, 2)])
def test_every_form_of_dispatch(outlive: Outlive, form: str, layout: tuple[int, int]) -> None:
    tensor, data = layout
    last = tensor * data - 1
    plans: list[Plan] = [
        (last, "collective", "kill"),
        (0, "collective", "stop"),
        (last, "collective", "raise"),
    ]
    outlive(
        plans,
        tensor_parallel_size=tensor,
        data_parallel_size=data,
        enable_expert_parallel=True,
        moe_dispatch=form,
    )


@pytest.mark.grid
@pytest.mark.parametrize("deed", ["kill", "stop", "raise"])
def test_a_head_in_every_phase(outlive: Outlive, deed: str) -> None:
    phases = ("stage", "collective", "sample", "read") if deed != "raise" else ("stage", "form", "collective")
    outlive([(0, phase, deed) for phase in phases], tensor_parallel_size=2)


@pytest.mark.grid
@pytest.mark.parametrize("deed", ["kill", "stop", "raise"])
def test_a_head_that_comes_back_badly(outlive: Outlive, deed: str) -> None:
    outlive(
        [(0, "stage", "kill"), (0, "load", deed), (0, "form", "kill"), (0, "form", deed)],
        tensor_parallel_size=2,
    )
