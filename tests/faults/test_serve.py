"""``weft serve`` over several ranks whose engine or worker dies or stops: every request gets its answer."""

from __future__ import annotations

import concurrent.futures
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.faults.rig import Plan, fallen
from tests.front.conftest import Running, Servers, events, servers  # noqa: F401  (a fixture)
from tests.support.processes import children, is_alive
from tests.support.slowness import deadline
from weft.group.tries import MOST

ANSWER = deadline(200.0)
"""Maximum seconds for a request, whatever happens."""
KILL = signal.SIGKILL
Outlive = Callable[..., None]


def processes_of(server: int) -> dict[int, str]:
    """Return the living children of a server's process: id -> role (``rank 1``)."""
    return children(server)


def rank_of(server: int, rank: int) -> int:
    """The process of a worker."""
    (pid,) = (pid for pid, what in processes_of(server).items() if what == f"rank {rank}")
    return pid


def check_end(server: Running, number: signal.Signals, folder: Path) -> None:
    """Assert that the server ends by the signal with all its children, and leaves no file after an orderly
    end.
    """
    children = processes_of(server.process.pid)
    assert server.stop(number, seconds=30) == (0 if number == signal.SIGTERM else -number)
    server.wait(lambda: not any(map(is_alive, children)), 10)
    assert number == KILL or not list(folder.iterdir())


@pytest.fixture
def outlive(servers: Servers, tmp_path: Path) -> Iterator[Outlive]:  # noqa: F811
    """Return a function that lets faults strike a server in order while it answers."""
    folder = Path(tempfile.mkdtemp(prefix="w"))  # sockets have short paths, and pytest's folders are long

    def run(
        plans: Sequence[Plan],
        *,
        strike: Callable[[int], None] | None = None,
        stay: Sequence[int] = (),
        end: signal.Signals = signal.SIGTERM,
        engines: int = 0,
        **settings: Any,
    ) -> None:
        """Run a server under faults and assert its answers.

        ``strike`` acts on the server's process id before ``plans``. ``stay`` lists workers whose processes,
        and so their weights, must survive. ``end`` is the final signal. ``engines`` is the least number of
        engine deaths.
        """
        script = [sys.executable, "-m", "tests.faults.faulty_server", str(tmp_path)]
        script += [
            json.dumps(given) for given in (plans, [(rank, "load", "kill") for rank in stay], settings)
        ]
        server = servers.start(script, 200, HF_HUB_OFFLINE="1", TMPDIR=str(folder))
        server.http.timeout = ANSWER
        server.chat(max_tokens=2)  # first use of the API server's own pools
        server.wait(lambda: server.metric("num_requests_running") == 0)
        idle = [server.metric(name) for name in ("free_slots", "free_blocks")]
        before = [rank_of(server.process.pid, rank) for rank in stay]

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
        if strike is not None:
            with concurrent.futures.ThreadPoolExecutor() as pool:
                struck = pool.submit(all_of_them)
                # engines report their count only now and then
                server.wait(lambda: server.metric("front_sequences") > 0)
                strike(server.process.pid)
                assert struck.result(ANSWER) == wanted
        until = time.monotonic() + 3 * ANSWER
        while not all((tmp_path / f"mark{number}").exists() for number in range(len(plans))):
            assert time.monotonic() < until, sorted(path.name for path in tmp_path.iterdir())
            assert all_of_them() == wanted
        assert all_of_them() == wanted
        server.wait(lambda: server.http.get("/ready").status_code == 200, 60)
        server.wait(
            lambda: server.metric("num_requests_running") == server.metric("front_sequences") == 0, 10
        )
        server.wait(lambda: [server.metric(name) for name in ("free_slots", "free_blocks")] == idle, 10)
        assert idle[0] == 4 * settings.get("data_parallel_size", 1)
        assert [rank_of(server.process.pid, rank) for rank in stay] == before
        assert server.metric("engine_restarts_total") >= engines
        assert fallen(tmp_path) == [], "a rank loaded its weights again"
        check_end(server, end, folder)

    yield run
    shutil.rmtree(folder)


def test_a_group_that_never_forms_is_no_client_error(tmp_path: Path) -> None:
    """A rank that is killed while loading gives status 1, not 2: the command line is correct."""
    (tmp_path / "go").touch()
    plans, settings = json.dumps([(1, "load", "kill")]), json.dumps({"tensor_parallel_size": 2})
    script = [sys.executable, "-m", "tests.faults.faulty_server", str(tmp_path), plans, "[]", settings]
    made = subprocess.run(script, capture_output=True, text=True, timeout=ANSWER)
    assert "weft: rank 1 of the group is lost" in made.stderr
    assert made.returncode == 1


@pytest.mark.requirement("A7", "F40")
@pytest.mark.slow
def test_workers_outlive_their_engine(outlive: Outlive) -> None:
    """The engine dies in a step, the next engine while loading; the worker stays with all weights."""
    outlive([(0, "collective", "kill"), (0, "load", "kill")], stay=[1], engines=2, tensor_parallel_size=2)


@pytest.mark.grid
def test_workers_outlive_engines_that_stop(outlive: Outlive) -> None:
    plans: list[Plan] = [(0, "read", "stop"), (0, "load", "stop"), (0, "form", "stop")]
    outlive(plans, stay=[1], end=KILL, engines=3, tensor_parallel_size=2)


@pytest.mark.grid
def test_workers_outlive_an_engine_that_gives_up(outlive: Outlive) -> None:
    """An engine forms its group again a limited number of times, then ends by an exception; the next one
    continues.
    """
    outlive([(0, "stage", "raise")] * (MOST + 2), stay=[1], engines=1, tensor_parallel_size=2)


@pytest.mark.grid
def test_workers_that_share_experts_outlive_their_engines(outlive: Outlive) -> None:
    """Experts have moved before the fault; the new engine adopts their places."""
    plans: list[Plan] = [(0, "collective", "kill"), (2, "stage", "stop"), (2, "load", "kill")]
    both: dict[str, Any] = {"tensor_parallel_size": 2, "enable_expert_parallel": True, "eplb_interval": 8}
    outlive(plans, stay=[1, 3], engines=3, data_parallel_size=2, **both)


@pytest.mark.grid
def test_experts_that_moved(outlive: Outlive) -> None:
    plans: list[Plan] = [(0, "collective", "kill"), (0, "sample", "kill"), (0, "stage", "raise")]
    outlive(plans, stay=[1], tensor_parallel_size=2, enable_expert_parallel=True, eplb_interval=4)


@pytest.mark.grid
@pytest.mark.parametrize("layout", [(2, 1), (1, 2), (2, 2)])
def test_ranks_that_are_killed_while_experts_move(outlive: Outlive, layout: tuple[int, int]) -> None:
    """Engines and workers are killed in turn while experts and copies are in transit."""
    tensor, data = layout
    last = tensor * data - 1
    plans: list[Plan] = [(last, "rebalance", "kill"), (0, "rebalance", "kill"), (last, "rebalance", "stop")]
    moving: dict[str, Any] = {"enable_expert_parallel": True, "eplb_interval": 1, "redundant_experts": 2}
    outlive(plans, engines=1, tensor_parallel_size=tensor, data_parallel_size=data, **moving)


@pytest.mark.grid
@pytest.mark.parametrize("shared", [False, True], ids=["alone", "domain"])
def test_a_worker_that_stops_with_its_engine(outlive: Outlive, shared: bool) -> None:
    """The next engine gets no message from the worker and restarts it. Other workers of an expert-parallel
    group stay.
    """

    def strike(server: int) -> None:
        worker = rank_of(server, 1)
        os.kill(worker, signal.SIGSTOP)
        # The first replica's was started first.
        os.kill(min(pid for pid, what in processes_of(server).items() if what == "head"), KILL)
        stopped.append(worker)

    stopped: list[int] = []
    expert_group = {"data_parallel_size": 2, "enable_expert_parallel": True} if shared else {}
    outlive([], strike=strike, stay=[3] if shared else [], engines=1, tensor_parallel_size=2, **expert_group)
    assert not is_alive(stopped[0])


@pytest.mark.grid
def test_an_engine_that_stops_before_it_listens(outlive: Outlive) -> None:
    """The engine's process lives but sends nothing."""

    def engines(server: int) -> list[int]:
        return [pid for pid, what in processes_of(server).items() if what == "head"]

    def strike(server: int) -> None:
        (engine,) = engines(server)
        os.kill(engine, KILL)
        until = time.monotonic() + deadline(60)
        while engines(server) in ([], [engine]):
            assert time.monotonic() < until, "no head follows"
        os.kill(next(pid for pid in engines(server) if pid != engine), signal.SIGSTOP)

    outlive([], strike=strike, stay=[1], engines=2, tensor_parallel_size=2)


@pytest.mark.grid
def test_engine_and_worker_fall_by_turns(outlive: Outlive) -> None:
    plans: list[Plan] = [
        (0, "collective", "kill"),
        (1, "stage", "kill"),
        (0, "load", "stop"),
        (0, "read", "stop"),
    ]
    # After a worker's death only the worker loads: the engine's load comes with its next start.
    outlive([plans[0], plans[2], plans[1], plans[3]], tensor_parallel_size=2)


@pytest.mark.grid
def test_replicas_that_share_experts(outlive: Outlive) -> None:
    """One replica dies or stops, and with it the expert-parallel group; the other ranks keep all weights."""
    plans: list[Plan] = [(1, "collective", "kill"), (0, "stage", "stop"), (1, "read", "raise")]
    outlive(plans, data_parallel_size=2, enable_expert_parallel=True)


@pytest.mark.grid
@pytest.mark.parametrize(
    ("form", "layout"),
    [
        ("reduce", (2, 1)),  # of the tokens of one replica
        *itertools.product(["throughput", "low-latency", "gather"], [(2, 1), (1, 2), (2, 2)]),
    ],
)
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
@pytest.mark.parametrize("phases", [("stage", "collective"), ("sample", "read"), ("stage", "form")])
def test_an_engine_in_every_phase(outlive: Outlive, deed: str, phases: tuple[str, ...]) -> None:
    """Two at a time: a request may lose three heads, and no more."""
    outlive([(0, phase, deed) for phase in phases], stay=[1], tensor_parallel_size=2)


@pytest.mark.grid
@pytest.mark.parametrize("deed", ["kill", "stop", "raise"])
def test_an_engine_that_comes_back_badly(outlive: Outlive, deed: str) -> None:
    outlive(
        [(0, "stage", "kill"), (0, "load", deed), (0, "form", "kill"), (0, "form", deed)],
        tensor_parallel_size=2,
    )
