"""Workload W4: the HTTP server of every engine with the same load generator, in interleaved rounds."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from bench.driver import last_lines, pinned, signal_tree
from bench.rounds import Deadlines, Record, say, turns
from bench.rows import Row, Setting
from weft.bench.process import ServerProcess
from weft.bench.workloads import Workload
from weft.common.errors import WeftError


class Server(ServerProcess):
    """Run a server that is stopped (as by Ctrl-Z) during the turns of others."""

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Let the server run inside the context. Stop its whole process tree afterwards."""
        self._signal(signal.SIGCONT)
        try:
            yield
        finally:
            self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Continue the server, so that it can shut down normally."""
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None and self._process.poll() is None:
            signal_tree(self._process.pid, number)


class Serving:
    """Run servers side by side, each with its own record."""

    def __init__(self, rows: Sequence[Row], setting: Setting, deadlines: Deadlines, logs: Path) -> None:
        self._rows = [row for row in rows if row.server is not None]
        self.records: dict[str, Record] = {row.name: {"samples": []} for row in self._rows}
        self._setting = setting
        self._deadlines = deadlines
        self._logs = logs
        self._servers: dict[str, Server] = {}
        self._stack = ExitStack()

    def __enter__(self) -> Serving:
        for row in self._rows:
            try:
                self._start(row)
            except WeftError as error:
                self._fail(row.name, "start", error.message)
        return self

    def __exit__(self, *_: object) -> None:
        for name, server in self._servers.items():
            self._note_memory(name, server)
            server.resume()
        self._stack.close()

    def rounds(self, workload: Workload, count: int) -> None:
        """Run a warm-up round, then ``count`` recorded rounds. A failed server is dropped."""
        for number in range(count + 1):
            for name in turns(list(self._servers), number):
                label = f"round {number}/{count}" if number else "warm-up"
                try:
                    found = self._load(name, workload, number)
                except (OSError, ValueError, RuntimeError, subprocess.TimeoutExpired) as error:
                    self._fail(name, f"{label}: {workload.name}", str(error))
                    continue
                if number:
                    self.records[name]["samples"].append(found)
                latency = found["latency_ms"]
                say(
                    f"{label}: {workload.name} {name}: {found['output_token_throughput']:.1f} tok/s, "
                    f"TTFT p50 {latency['ttft']['p50']:.0f} ms, TPOT p50 {latency['tpot']['p50']:.1f} ms"
                )

    def _start(self, row: Row) -> None:
        assert row.server is not None
        say(f"{row.name}: starting its server")
        server = Server(
            pinned(row.server, self._setting.threads),
            environment=dict(row.environment),
            log_file=self._logs / f"{row.name}-server.log",
            prompt=[1000, 1001],
        )
        self._stack.callback(server.stop)
        server.start()
        with server.turn():
            seconds = server.wait_ready(self._deadlines.load)
            # Some servers continue to warm up after the first answer.
            time.sleep(1)
        self._servers[row.name] = server
        self.records[row.name]["start_s"] = seconds
        say(f"{row.name}: first answer {seconds:.1f} s after its start")

    def _load(self, name: str, workload: Workload, number: int) -> dict[str, Any]:
        server = self._servers[name]
        out = self._logs / f"{name}-{workload.name}.json"
        out.unlink(missing_ok=True)
        command = [
            *(sys.executable, "-m", "weft", "bench", "serve", "--base-url", server.url),
            *("--workload", workload.name, "--repetition", str(number), "--prompts", "ids"),
            # llama.cpp's server closes kept-alive connections between requests without notice.
            *("--no-keep-alive", "--json", str(out)),
        ]
        with server.turn():
            made = subprocess.run(
                command, capture_output=True, text=True, timeout=self._deadlines.run, check=False
            )
        if made.returncode:
            raise RuntimeError(f"the load generator ended with {made.returncode}: {made.stderr[-600:]}")
        report: dict[str, Any] = json.loads(out.read_text())
        if report["requests"]["ok"] != workload.requests:
            raise RuntimeError(f"{report['requests']}: {report['first_failure']}")
        kept = ("seconds", "output_token_throughput", "latency_ms", "client", "notes")
        return {key: report[key] for key in kept}

    def _note_memory(self, name: str, server: Server) -> None:
        self.records[name]["peak_memory"] = server.peak_memory()

    def _fail(self, name: str, stage: str, why: str) -> None:
        log = last_lines(self._logs / f"{name}-server.log")
        self.records[name]["error"] = f"{stage}: {why}\n{log}"
        say(f"{name}: {stage} FAILED: {why}\n{log}")
        server = self._servers.pop(name, None)
        if server is not None:
            self._note_memory(name, server)
            server.resume()
            server.stop()
