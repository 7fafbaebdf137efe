"""``weft serve`` as a process: start, answers, orderly stop, and no life after its engine's."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.processes import with_role
from tests.support.slow import mostly_slow
from tests.support.slowness import deadline
from weft.cli.serve.serve import with_keys
from weft.common import signals
from weft.common.cores import usable_cores
from weft.common.errors import ConfigError
from weft.config.flags import from_keywords

ONE_RUNS = re.compile(r"^weft:front_sequences(\{.*\})? 1\b", re.MULTILINE)
"""Matches the metric of one sequence that the API server waits for."""


class Server:
    """A running ``weft serve``, or another ``command``."""

    def __init__(
        self,
        folder: Path,
        *arguments: str,
        command: str = "serve",
        omp_threads: str | None = "1",
        code: Path | None = None,
        **variables: str,
    ) -> None:
        """``code``: folder with the package of another release; None for this one."""
        # Sockets have short paths, and pytest's folders are long.
        self.temporary = tempfile.mkdtemp(prefix="w")
        environment = {**os.environ, "TMPDIR": self.temporary, **variables}
        environment.pop("OMP_NUM_THREADS", None)
        if code is not None:
            environment["PYTHONPATH"] = str(code)
        if omp_threads is not None:
            environment["OMP_NUM_THREADS"] = omp_threads
        self.log = folder / "serve.log"
        with self.log.open("wb") as log, signals_are_heeded():
            self.process = subprocess.Popen(
                [sys.executable, "-m", "weft", command, *arguments],
                stdout=subprocess.PIPE,
                stderr=log,
                env=environment,
                cwd=code,
                text=True,
                start_new_session=True,  # a process group of its own, to be signalled as by a terminal
            )

    def url(self) -> str:
        """Wait for the ready line. Return its address."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            found = re.search(r"http://127\.0\.0\.1:\d+", line)
            if found:
                return found[0]
        raise AssertionError(f"no ready line:\n{self.log.read_text()}")

    def engine(self) -> int:
        """Return the process id of the engine."""
        for engine in with_role(self.process.pid, "head"):
            return engine
        raise AssertionError("no head")

    def signal_group(self, number: int) -> None:
        os.killpg(self.process.pid, number)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()
        shutil.rmtree(self.temporary)


@contextlib.contextmanager
def signals_are_heeded() -> Iterator[None]:
    """Restore the default of ignored signals, because a child inherits ignored signals.

    ``preexec_fn`` would do the same, but it copies the memory of the test process to each child first.
    """
    ignored = [number for number in signals.STOPS if signal.getsignal(number) == signal.SIG_IGN]
    for number in ignored:
        signal.signal(number, signal.SIG_DFL)
    try:
        yield
    finally:
        for number in ignored:
            signal.signal(number, signal.SIG_IGN)


def until(server: Server, condition: Any, seconds: float = 120.0) -> None:
    """Waits for ``condition()``."""
    over = time.monotonic() + deadline(seconds)
    while not condition():
        assert time.monotonic() < over, server.log.read_text()
        time.sleep(0.1)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Any]:
    servers: list[Server] = []

    def starter(*arguments: str, **more: Any) -> Server:
        servers.append(Server(tmp_path, *arguments, **more))
        return servers[-1]

    yield starter
    for server in servers:
        server.close()


@pytest.mark.requirement("F47")
@pytest.mark.real_processes
def test_it_serves_and_ends_with_nothing_left_behind(checkpoint: str, start: Any, tmp_path: Path) -> None:
    config = tmp_path / "weft.yaml"
    config.write_text("served-model-name: tiny\nmax-num-seqs: 4\n")
    server = start(checkpoint, "--config", str(config), "--port", "0", "--block-size", "16")
    base = server.url()
    body = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "hello"}],
        "max_tokens": 4,
        "temperature": 0,
    }
    answer = httpx.post(f"{base}/v1/chat/completions", json=body, timeout=deadline(60))
    assert answer.status_code == 200, answer.text
    assert answer.json()["model"] == "tiny"
    engine = server.engine()
    assert os.listdir(server.temporary), "the endpoint lies in the folder"
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(deadline(60)) == 0, server.log.read_text()
    assert ended(engine)
    assert os.listdir(server.temporary) == []


def test_a_server_is_evaluated(checkpoint: str, start: Any, tmp_path: Path) -> None:
    server = start(checkpoint, "--served-model-name", "tiny", "--port", "0")
    base = server.url()
    report = tmp_path / "report.json"
    command = ["eval", "gsm-mini", "--url", base, "--limit", "5", "--max-tokens", "4", "--json", str(report)]
    made = subprocess.run(
        [sys.executable, "-m", "weft", *command], capture_output=True, text=True, timeout=deadline(120)
    )
    assert made.returncode == 0, made.stderr
    assert re.fullmatch(r"gsm-mini: \d+ / 5 exact \(\d+\.\d%\), [\d.]+ s\n", made.stdout)
    found = json.loads(report.read_text())
    assert (found["target"], found["total"], len(found["problems"])) == ("tiny", 5, 5)

    wrong = subprocess.run(
        [sys.executable, "-m", "weft", "eval", "gsm-mini", "other", "--url", base, "--limit", "1"],
        capture_output=True,
        text=True,
        timeout=deadline(120),
    )
    assert wrong.returncode == 2
    assert "404" in wrong.stderr
    assert "Traceback" not in wrong.stderr


@pytest.mark.real_processes
@pytest.mark.parametrize(
    ("tensor", "names"),
    [
        pytest.param(1, ["head 0", "head 1"], marks=pytest.mark.grid),
        pytest.param(2, ["head 0", "head 0 rank 1", "head 1", "head 1 rank 3"], marks=pytest.mark.slow),
    ],
)
def test_ranks_of_replicas_share_the_cores_and_each_has_a_name_and_a_trace(
    tensor: int, names: list[str], checkpoint: str, start: Any, tmp_path: Path
) -> None:
    layout = ("--data-parallel-size", "2", "--tensor-parallel-size", str(tensor))
    options = ("--port", "0", "--rank-timeout", "60", "--trace", str(tmp_path / "t.json"))
    server = start(checkpoint, *layout, *options, omp_threads=None)
    base = server.url()
    body = {"model": checkpoint, "max_tokens": 4, "ignore_eos": True}
    prompts = [f"{number} " * 200 for number in range(8)]  # without a common prefix: spread over both
    with ThreadPoolExecutor(len(prompts)) as pool:
        asked = [
            pool.submit(
                httpx.post, f"{base}/v1/completions", json={**body, "prompt": prompt}, timeout=deadline(60)
            )
            for prompt in prompts
        ]
        assert {made.result().status_code for made in asked} == {200}
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(deadline(60)) == 0, server.log.read_text()
    log = server.log.read_text()
    spoken = re.findall(r"\d\d:\d\d:\d\d \w (.+?) weft\.\S+: (.*)$", log, re.MULTILINE)
    threads = max(1, usable_cores() // len(names))
    said = sorted((name, text.partition(" (")[0]) for name, text in spoken if text.startswith("CPU threads"))
    assert said == [(name, f"CPU threads: {threads}") for name in names], log
    assert {name for name, _ in spoken} <= {"front", *names}
    files = ["t.json", *(f"t.rank{rank}.json" for rank in range(1, len(names)))]
    assert sorted(path.name for path in tmp_path.glob("t*.json*")) == sorted(files)
    traces = [json.loads((tmp_path / file).read_text()) for file in files]
    assert all(any(event.get("cat") == "step" for event in trace) for trace in traces)


@pytest.mark.requirement("F40")
def test_it_fails_when_its_engine_dies_and_must_not_be_started_again(checkpoint: str, start: Any) -> None:
    server = start(checkpoint, "--port", "0", "--engine-restarts", "0")
    server.url()
    os.kill(server.engine(), signal.SIGKILL)
    assert server.process.wait(deadline(60)) == 1
    assert os.listdir(server.temporary) == []


def test_an_engine_dies_with_its_parent(checkpoint: str, start: Any) -> None:
    server = start(checkpoint, "--port", "0")
    server.url()
    engine = server.engine()
    pidfd = os.pidfd_open(engine)
    server.process.kill()
    import select

    assert select.select([pidfd], [], [], deadline(20))[0], "the head outlived its parent"
    os.close(pidfd)


@pytest.mark.requirement("F47")
def test_the_next_start_removes_the_folder_of_a_killed_server(checkpoint: str, start: Any) -> None:
    """A start refused by the engine also cleans up: status 2, and no folder remains."""
    server = start(checkpoint, "--port", "0")
    server.url()
    (left,) = Path(server.temporary).iterdir()
    server.process.kill()
    server.process.wait()
    assert left.is_dir()
    refused = ("--attention-backend", "no-such-backend")
    again = subprocess.run(
        [sys.executable, "-m", "weft", "serve", checkpoint, "--port", "0", *refused],
        env={**os.environ, "TMPDIR": server.temporary, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=deadline(120),
        check=False,
    )
    assert again.returncode == 2, again.stderr
    assert "weft: no attention backend called 'no-such-backend'" in again.stderr
    assert "Traceback" not in again.stderr
    assert os.listdir(server.temporary) == []


def test_an_address_in_use_gives_status_2_and_leaves_no_engine(checkpoint: str, start: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        server = start(checkpoint, "--port", str(taken.getsockname()[1]))
        assert server.process.wait(deadline(60)) == 2
    assert "--port" in server.log.read_text()
    assert os.listdir(server.temporary) == []


@pytest.mark.real_processes
def test_sigterm_while_loading_ends_in_order(checkpoint: str, start: Any) -> None:
    server = start(checkpoint, "--port", "0")
    until = time.monotonic() + deadline(60)
    while not os.listdir(server.temporary):
        assert time.monotonic() < until
        time.sleep(0.02)
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(deadline(60)) in (0, 143)
    assert os.listdir(server.temporary) == []


@pytest.mark.requirement("F47")
@pytest.mark.real_processes
@mostly_slow("number", signals.STOPS, signals.STOPS[:1])
def test_a_signal_to_all_while_loading_ends_all_at_once(checkpoint: str, start: Any, number: int) -> None:
    """The signal arrives while the engine imports; the status is 128 plus the number of the signal."""
    server = start(checkpoint, "--port", "0")
    until = time.monotonic() + deadline(60)
    while True:
        assert time.monotonic() < until
        try:
            engine = server.engine()
            break
        except AssertionError:
            time.sleep(0.005)
    server.signal_group(number)
    assert server.process.wait(deadline(60)) == 128 + number
    assert ended(engine)
    assert os.listdir(server.temporary) == []
    assert "Traceback" not in server.log.read_text()


RAISED_AS_THE_LOOP_BEGINS = """
import signal, socket, sys
pair = socket.socketpair
def first(*arguments):
    if sys._getframe(1).f_code.co_filename.endswith("asyncio/runners.py"):
        print("raised", file=sys.stderr)
        signal.raise_signal(signal.SIGTERM)
    return pair(*arguments)
socket.socketpair = first
"""


@pytest.mark.slow
@pytest.mark.real_processes
def test_a_signal_as_the_event_loop_begins_ends_in_order(checkpoint: str, start: Any, tmp_path: Path) -> None:
    """The signal is raised while uvloop makes its sockets. A handler that raised there would leave a
    half-initialized loop, which cannot be closed.
    """
    (tmp_path / "sitecustomize.py").write_text(RAISED_AS_THE_LOOP_BEGINS)
    server = start(checkpoint, "--port", "0", PYTHONPATH=os.pathsep.join([str(tmp_path), *sys.path]))
    assert server.process.wait(deadline(60)) == 128 + signal.SIGTERM
    assert os.listdir(server.temporary) == []
    assert "raised" in server.log.read_text()
    assert "Traceback" not in server.log.read_text()


def ended(pid: int) -> bool:
    """Return True if the process ends within 10 s. The kernel kills a process with its parent."""
    until = time.monotonic() + deadline(10)
    while time.monotonic() < until:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return True
        if state == "Z":
            return True
        time.sleep(0.01)
    return False


def stopped_engine(server: Server) -> int:
    """Wait until the engine listens, then stop the engine, as if loading never ended. Return the process
    id.
    """
    until = time.monotonic() + deadline(60)
    while not list(Path(server.temporary).glob("*/g0/head-0-1")):
        assert time.monotonic() < until
        time.sleep(0.005)
    engine = server.engine()
    os.kill(engine, signal.SIGSTOP)
    return engine


@pytest.mark.real_processes
def test_an_engine_that_loads_is_not_waited_for(checkpoint: str, start: Any) -> None:
    server = start(checkpoint, "--port", "0")
    engine = stopped_engine(server)
    server.signal_group(signal.SIGINT)
    assert server.process.wait(deadline(60)) == 130
    assert ended(engine)
    assert os.listdir(server.temporary) == []
    assert "Traceback" not in server.log.read_text()


@pytest.mark.requirement("F47")
@pytest.mark.parametrize(
    ("number", "more"),
    [
        pytest.param(
            signal.SIGHUP,
            ["--tensor-parallel-size", "2", "--rank-timeout", str(deadline(20))],
            marks=pytest.mark.slow,
        ),
        pytest.param(signal.SIGQUIT, [], marks=pytest.mark.grid),
        (signal.SIGINT, []),
    ],
    ids=["SIGHUP", "SIGQUIT", "SIGINT"],
)
def test_a_signal_to_all_drains(checkpoint: str, start: Any, number: int, more: list[str]) -> None:
    """API server, engine and workers get the signal, as from a terminal; the running stream completes.

    The engine is stopped until the shutdown begins, so the stream still runs then on any machine.
    """
    drain = round(deadline(60))
    server = start(checkpoint, "--port", "0", "--drain-timeout", str(drain), *more)
    base = server.url()
    body = {"model": checkpoint, "prompt": "x", "max_tokens": 100, "temperature": 0, "stream": True}
    with ThreadPoolExecutor() as pool:
        engine = server.engine()
        os.kill(engine, signal.SIGSTOP)
        asked = pool.submit(
            httpx.post, f"{base}/v1/completions", json={**body, "ignore_eos": True}, timeout=deadline(120)
        )
        until(server, lambda: ONE_RUNS.search(httpx.get(f"{base}/metrics").text))
        server.signal_group(number)
        told = f"stopping: 1 request may run for {drain} more seconds; a second Ctrl-C stops at once"
        until(server, lambda: told in server.log.read_text())
        if number == signal.SIGHUP:  # closing a terminal sends the signal more than once
            server.signal_group(number)
        os.kill(engine, signal.SIGCONT)
        *_, last, done = [line for line in asked.result().text.splitlines() if line]
    assert done == "data: [DONE]"
    assert json.loads(last.removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
    assert server.process.wait(deadline(60)) == 0
    assert os.listdir(server.temporary) == []


@pytest.mark.requirement("F5")
def test_keys_come_from_the_environment(checkpoint: str, start: Any) -> None:
    server = start(checkpoint, "--port", "0", WEFT_API_KEY=" sesame , second\n")
    models = f"{server.url()}/v1/models"
    assert httpx.get(models).status_code == 401
    assert httpx.get(models, headers={"Authorization": "Bearer other"}).status_code == 401
    for key in ("sesame", "second"):
        assert httpx.get(models, headers={"Authorization": f"Bearer {key}"}).status_code == 200
    for process in (server.process.pid, server.engine()):
        assert b"sesame" not in Path(f"/proc/{process}/cmdline").read_bytes()
    # A server without requests logs nothing about requests when it stops.
    server.process.terminate()
    assert server.process.wait(deadline(60)) == 0
    log = server.log.read_text()
    assert "stopping" in log
    assert "request" not in log.partition("stopping")[2]


def test_keys_of_flags_and_file_win_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WEFT_API_KEY", raising=False)
    assert with_keys(from_keywords({})).front.api_key == ()
    monkeypatch.setenv("WEFT_API_KEY", "a,b")
    assert with_keys(from_keywords({})).front.api_key == ("a", "b")
    assert with_keys(from_keywords({"api_key": ["flag"]})).front.api_key == ("flag",)


@pytest.mark.requirement("F5")
@pytest.mark.parametrize("text", ["", " , "])
def test_a_variable_without_a_key_does_not_open_the_server(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WEFT_API_KEY", text)
    with pytest.raises(ConfigError, match="WEFT_API_KEY is set but empty"):
        with_keys(from_keywords({}))


@pytest.mark.slow
def test_a_template_that_does_not_compile_is_reported_at_the_start(
    checkpoint: str, start: Any, tmp_path: Path
) -> None:
    folder = tmp_path / "broken"
    shutil.copytree(checkpoint, folder)
    (folder / "chat_template.jinja").write_text("{% for message in messages %}\n{{ message.content }")
    server = start(str(folder), "--port", "0", "--served-model-name", "tiny")
    base = server.url()
    warnings = [line for line in server.log.read_text().splitlines() if " W front " in line]
    assert len(warnings) == 1
    assert "the chat template does not compile: syntax error in line" in warnings[0]
    assert "chat requests are rejected: start with --chat-template" in warnings[0]
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}
    refused = httpx.post(f"{base}/v1/chat/completions", json=body)
    assert refused.status_code == 400
    assert "does not compile" in refused.json()["error"]["message"]


@pytest.mark.slow
def test_no_bars_in_a_log_and_no_folder_for_operations(checkpoint: str, start: Any, tmp_path: Path) -> None:
    """An impossible folder for operations costs one log line, and the server continues."""
    (tmp_path / "file").touch()
    server = start(checkpoint, "--port", "0", WEFT_OPS_CACHE=str(tmp_path / "file" / "ops"))
    base = server.url()
    body = {"model": checkpoint, "prompt": "x", "max_tokens": 2}
    assert httpx.post(f"{base}/v1/completions", json=body, timeout=deadline(60)).status_code == 200
    log = server.log.read_text()
    assert "Traceback" not in log
    assert "\r" not in log
    assert "Loading weights" not in log
    assert sum("C++ operations" in line for line in log.splitlines()) == 1
