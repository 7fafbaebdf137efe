"""``weft plan``: flags, metrics pages, a scripted server, and a real server that grows."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.cli.test_scale import ADMIN, TOPOLOGY, groups
from tests.cli.test_serve import Server, start
from tests.cli.test_up import Clients, until
from tests.support.slowness import deadline
from weft.cli import main as cli
from weft.cli.plan.live_server import AdminRoutes, LiveServer, read_metrics
from weft.cli.plan.plan import check, ranges, watch
from weft.common.errors import ConfigError, EngineDead
from weft.control.planner.capacity import Capacity, Limits
from weft.control.planner.fleet_planner import FleetPlanner, Range
from weft.control.planner.observations import (
    COUNTERS,
    ENGINE_COUNTERS,
    EngineSeen,
    Meter,
    Series,
    roles_of,
)
from weft.sim.presets import load

__all__ = ["start"]
LIMITS = Limits(2.0, 0.1)


def test_every_counter_of_the_planner_is_a_metric() -> None:
    """A renamed metric would leave the planner blind."""
    known = (Path(__file__).parents[2] / "docs/metrics.txt").read_text()
    for name in (*COUNTERS, *ENGINE_COUNTERS):
        base = name.removesuffix("_sum").removesuffix("_count").removesuffix("_bucket")
        assert f"weft:{base} " in known, name
    assert "weft:front_sequences gauge" in known


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--max", "decode"], "--max must be ROLE=N"),
        (["--max", "encode=2"], "with a role of prefill, decode, unified"),
        (["--max", "decode=2", "--min", "decode=3"], "--min decode=3 is above --max decode=2"),
        (["--max", "decode=2", "--min", "prefill=1"], "give --max prefill=N, too"),
        (["--max", "decode=2"], "an admin key is required"),
        (["--max", "decode=2", "--admin-key", "k"], "no Weft server answers"),
        ([], "Missing option '--max'"),
    ],
)
def test_wrong_flags_are_clear_errors(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WEFT_ADMIN_KEY", raising=False)
    with pytest.raises(SystemExit) as ended:
        cli.main(["plan", "--watch", "http://127.0.0.1:1", *arguments])
    assert ended.value.code in (1, 2)
    assert message in capsys.readouterr().err


class Scripted:
    """A server as an httpx transport: ten requests per second of 600 + 200 tokens, slow tokens."""

    def __init__(self) -> None:
        self.looks = 0
        self.broken = False
        self.refuses = False
        self.decode = 1
        self.scaled: list[Any] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        if self.broken:
            raise httpx.ConnectError("refused")
        if request.url.path == "/metrics":
            return httpx.Response(200, text=self.metrics())
        if request.headers["authorization"] != "Bearer key":
            return httpx.Response(401, json={"error": {"message": "the admin key is missing or wrong"}})
        if request.url.path == "/admin/scale":
            self.scaled.append(request.read())
            if self.refuses:
                return httpx.Response(503, json={"error": {"message": "no free GPU"}})
            self.decode = 2
            return httpx.Response(200, json={"status": "starting decode1"})
        engines = [("prefill0", "prefill"), *((f"decode{n}", "decode") for n in range(self.decode))]
        return httpx.Response(200, json={"engines": [self.engine(*one) for one in engines]})

    def engine(self, name: str, role: str) -> dict[str, Any]:
        state = {"name": name, "group": name, "base": role, "role": role, "state": "running", "alive": True}
        return {**state, "incarnation": "1", "running": 4, "waiting": None, "kv_usage": 0.25}

    def metrics(self) -> str:
        self.looks += 1
        done = 100 * self.looks
        buckets = "".join(
            f'weft:{name}_bucket{{model_name="m",le="{bound}"}} {done * share}\n'
            for name in ("time_to_first_token_seconds", "request_time_per_output_token_seconds")
            for bound, share in (("0.1", 0.1), ("0.2", 1.0), ("+Inf", 1.0))
        )
        return (
            f'weft:request_success_total{{model_name="m",finished_reason="stop"}} {done}\n'
            f'weft:request_failure_total{{model_name="m",code="invalid_request"}} {done}\n'
            f'weft:request_prompt_tokens_sum{{model_name="m"}} {600 * done}\n'
            f'weft:request_prompt_tokens_count{{model_name="m"}} {done}\n'
            f'weft:request_max_num_generation_tokens_sum{{model_name="m"}} {200 * done}\n'
            f'weft:front_sequences{{model_name="m",front="0"}} 3\n'
            f'weft:front_sequences{{model_name="m",front="1"}} 4\n'
            f'weft:engine_steps_total{{model_name="m",head="decode0"}} {done}\n{buckets}'
        )


class Stop(threading.Event):
    """Counts turns, moves the clock, and is set after some turns."""

    def __init__(self, turns: int, now: list[float]) -> None:
        super().__init__()
        self.turns, self.now = turns, now

    def wait(self, timeout: float | None = None) -> bool:
        self.turns -= 1
        self.now[0] += timeout or 0.0
        return self.turns <= 0


def observe(
    scripted: Scripted, turns: int, monkeypatch: pytest.MonkeyPatch, dry_run: bool = False
) -> FleetPlanner:
    """Watch a scripted server for a number of turns of 10 s."""
    now = [1000.0]
    monkeypatch.setattr("weft.cli.plan.plan.time.monotonic", lambda: now[0])
    client = httpx.Client(base_url="http://server", transport=httpx.MockTransport(scripted))
    owner = AdminRoutes(client, "key")
    capacity = Capacity(load("spool-text-cpu"), LIMITS, 2048, 64)
    planner = FleetPlanner(capacity, {"decode": Range(1, 3)})
    server = LiveServer(client, owner, "")
    watch(planner, server, owner, Meter(LIMITS), Stop(turns, now), 10.0, dry_run)
    return planner


def test_a_watched_server_is_scaled(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "weft")
    scripted = Scripted()
    observe(scripted, 6, monkeypatch)
    assert scripted.scaled
    assert b'"base":"decode"' in scripted.scaled[0].replace(b" ", b"")
    assert "10.00 requests/s expected" in caplog.text
    assert "600 + 200 tokens" in caplog.text
    assert "starting decode1" in caplog.text
    assert "the groups stay as they are" in caplog.messages[-1]


def test_a_dry_run_changes_nothing(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "weft")
    scripted = Scripted()
    observe(scripted, 6, monkeypatch, dry_run=True)
    assert scripted.scaled == []
    assert "would scale: decode 1 -> " in caplog.text


def test_a_silent_server_is_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    scripted = Scripted()
    scripted.broken = True
    observe(scripted, 5, monkeypatch)
    assert caplog.text.count("no Weft server answers") == 1
    assert scripted.scaled == []


def test_a_refusal_is_logged_and_waits(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    scripted = Scripted()
    scripted.refuses = True
    observe(scripted, 8, monkeypatch)
    assert len(scripted.scaled) == 1
    assert "no free GPU" in caplog.text


def test_groups_and_pages_that_cannot_be_planned_are_errors() -> None:
    scripted = Scripted()
    client = httpx.Client(base_url="http://server", transport=httpx.MockTransport(scripted))
    owner = AdminRoutes(client, "key")
    check(owner, ranges(("decode=2",), ()))
    with pytest.raises(ConfigError, match="has no unified groups"):
        check(owner, ranges(("unified=2",), ()))
    with pytest.raises(ConfigError, match="admin key is missing"):
        AdminRoutes(client, "wrong").engines()
    scripted.engine = lambda name, role: {"name": name}  # type: ignore[method-assign]
    with pytest.raises(EngineDead, match="unknown form"):
        owner.engines()
    for page in ("", "<html>", "other_metric 1\n"):
        with pytest.raises(EngineDead):
            read_metrics(page)


def test_a_page_of_metrics_becomes_counters() -> None:
    counts, waiting = read_metrics(Scripted().metrics())
    assert waiting == 7
    assert counts[Series("engine_steps_total", "decode0")] == 100
    assert counts[Series("request_failure_total", "invalid_request")] == 100
    assert counts[Series("request_time_per_output_token_seconds_bucket", "", 0.2)] == 100


def test_a_group_is_as_good_as_its_worst_engine() -> None:
    def engine(name: str, state: str, alive: bool = True, base: str = "decode") -> EngineSeen:
        return EngineSeen(name, name.split(".")[0], base, "decode", state, alive, 1, 2, 0.5)

    seen = roles_of(
        [
            engine("decode0.0", "running"),
            engine("decode0.1", "running", alive=False),
            engine("decode1", "running"),
            engine("decode2", "retired", alive=False),
            engine("decode3", "leaving"),
            engine("decode4", "draining"),
        ]
    )["decode"]
    assert (seen.serving, seen.coming, seen.leaving, seen.lost) == (1, 2, 1, 1)
    assert (seen.base, seen.running, seen.waiting) == ("decode", 6, 12)
    assert roles_of([engine("a", "running", base="a"), engine("b", "running", base="b")])["decode"].base == ""


@pytest.mark.slow
def test_a_real_server_grows_under_load(start: Any, tmp_path: Path) -> None:
    """No group meets a limit of 1 ms between two tokens, so the planner asks for the maximum."""
    file = tmp_path / "topology.yaml"
    file.write_text(TOPOLOGY)
    file.chmod(0o600)
    server: Server = start(str(file), command="up")
    base = server.url()
    flags = ["--max", "decode=2", "--tpot-ms", "1", "--interval", "1"]
    command = [sys.executable, "-m", "weft", "plan", "--watch", base, *flags]
    environment = {**os.environ, "WEFT_ADMIN_KEY": ADMIN["Authorization"].removeprefix("Bearer ")}
    planner = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
    try:
        with Clients(base) as clients:
            until(server, lambda: groups(base).get("decode1") == "running")
        assert planner.poll() is None
        planner.send_signal(signal.SIGTERM)
        _, errors = planner.communicate(timeout=deadline(30))
    finally:
        planner.kill()
    assert planner.returncode == 0
    assert "decode 1 -> 2 for the expected load" in errors
    assert "starting decode1" in errors
    assert clients.errors == []
    assert set(groups(base)) == {"prefill0", "decode0", "decode1"}
