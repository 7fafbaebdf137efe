"""A server's process tree becomes ready, is measured, and ends, even against its will."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.slowness import deadline
from weft.bench.process import ServerFailed, ServerProcess
from weft.bench.process_memory import MemorySample, Peak, ProcessMemory, sample, tree
from weft.common.errors import ConfigError

#: Starts a child in a separate session that ignores SIGTERM, holds 64 MiB, and answers on the port.
STUBBORN = """
import http.server, json, os, signal, subprocess, sys
child = subprocess.Popen(
    [sys.executable, "-c", "import signal,time;signal.signal(15, 1);print(flush=True);time.sleep(600)"],
    start_new_session=True, stdout=subprocess.PIPE)
child.stdout.readline()
open(sys.argv[2], "w").write(str(child.pid))
signal.signal(15, signal.SIG_IGN)
held = b"x" * (64 << 20)
class Handler(http.server.BaseHTTPRequestHandler):
    def answer(self, data):
        self.send_response(200); self.end_headers(); self.wfile.write(json.dumps(data).encode())
    def do_GET(self): self.answer({"data": [{"id": "m"}]})
    def do_POST(self): self.answer({"choices": [{"text": "a"}]})
    def log_message(self, *_): pass
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def stubborn(folder: Path) -> ServerProcess:
    return ServerProcess([sys.executable, "-c", STUBBORN, "{port}", str(folder / "child")])


def is_alive(pid: int) -> bool:
    return bool(tree(pid)) and tree(pid)[0].is_alive()


def test_it_is_timed_measured_and_ended_with_its_whole_tree(tmp_path: Path) -> None:
    with stubborn(tmp_path) as server:
        seconds = server.wait_ready(60)
        assert 0 < seconds < 60
        assert server.ready_seconds == seconds
        assert server.model == "m"
        time.sleep(0.5)
        assert 64 << 20 <= server.peak_memory() < 300 << 20
        child = int((tmp_path / "child").read_text())
        assert is_alive(child)
        began = time.monotonic()
        assert server.stop(0.5) == -signal.SIGKILL
        assert time.monotonic() - began < deadline(10)
    assert not is_alive(child)
    assert server.stop() == -signal.SIGKILL, "again, without effect"


def test_it_ends_when_whoever_started_it_is_killed(tmp_path: Path) -> None:
    code = (
        "import sys, time\nfrom weft.bench.process import ServerProcess\n"
        "server = ServerProcess([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "server.start()\nprint(server.pid, flush=True)\ntime.sleep(600)\n"
    )
    owner = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    with owner.stdout as lines:
        server = int(lines.readline())
        assert is_alive(server)
        owner.kill()
        owner.wait(deadline(20))
    until = time.monotonic() + deadline(20)
    while is_alive(server):
        assert time.monotonic() < until, "the server outlived its owner"
        time.sleep(0.05)


def test_the_end_of_a_server_is_reported_with_its_log(tmp_path: Path) -> None:
    code = "print('no such model'); raise SystemExit(3)"
    server = ServerProcess([sys.executable, "-c", code], log_file=tmp_path / "log")
    with server, pytest.raises(ServerFailed, match=r"status 3 before it answered; .*\n(.*\n)*no such model"):
        server.wait_ready(60)
    assert server.stop() == 3


def test_a_server_that_never_answers_runs_into_the_deadline() -> None:
    server = ServerProcess([sys.executable, "-c", "import time; time.sleep(600)"])
    with server, pytest.raises(ServerFailed, match="within 1 s"):
        server.wait_ready(1)


def test_a_command_that_cannot_run_is_named() -> None:
    with pytest.raises(ConfigError, match="no-such-command"):
        ServerProcess(["no-such-command"]).start()
    assert ServerProcess(["x"]).stop() is None


def test_a_later_process_of_the_same_id_is_not_killed() -> None:
    me = tree(os.getpid())[0]
    assert me.is_alive()
    other = ProcessMemory(me.pid, me.started - 1)
    assert not other.is_alive()
    other.kill()


def test_memory_is_summed_and_peaks_stay() -> None:
    me = tree(os.getpid())[:1]
    found = sample(me, Peak())
    assert found.pss is not None
    assert 0 < found.pss <= found.rss
    assert sample(me, Peak(at=2 * found.rss)).pss is None, "not read again while nothing grew"
    peak = (
        Peak()
        .with_sample(MemorySample(100, 60))
        .with_sample(MemorySample(90, None))
        .with_sample(MemorySample(95, 70))
    )
    assert peak == Peak(rss=100, pss=70, at=100)


@pytest.mark.slow
@pytest.mark.real_processes
def test_weft_serve(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "weft", "serve", "spool-text", "--port", "{port}", "--threads", "1"]
    with ServerProcess(command, log_file=tmp_path / "log") as server:
        server.wait_ready(120)
        assert server.model == "spool-text"
        assert server.peak_memory() > 100 << 20
        assert server.stop() == 0


def test_load_over_http_needs_no_torch() -> None:
    code = (
        "import sys\nfrom weft.bench import load, plots, process, report, serving_bench, sweep\n"
        "from weft.cli.main import main\n"
        "try:\n    main(['bench', 'sweep', '--help'])\nexcept SystemExit as end:\n    assert end.code == 0\n"
        "loaded = {'torch', 'transformers', 'matplotlib'} & set(sys.modules)\nassert not loaded, loaded\n"
    )
    made = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=deadline(120))
    assert made.returncode == 0, made.stderr
