"""Servers over several hosts, which are network namespaces."""

from __future__ import annotations

import json
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.faults.netns import ANSWER, Hosts, Lines
from tests.support.secret import write_secret
from tests.support.slowness import deadline

SETTINGS: dict[str, Any] = {
    "dtype": "float64",
    "max_model_len": 256,
    "max_num_seqs": 4,
    "kv_cache_memory": "8MiB",
    "rank_timeout": deadline(8.0),
}


class Program(Lines):
    """Host 0's script, and the other host."""

    def __init__(self, process: subprocess.Popen[str], other: subprocess.Popen[str]) -> None:
        super().__init__(process)
        self.other = other

    def ask(self, tokens: int = 60) -> None:
        self.send(str(tokens))

    def told(self) -> tuple[list[list[int]], int]:
        """(tokens, recoveries so far)."""
        tokens, _, recoveries = self.line().rpartition(" ")
        return json.loads(tokens), int(recoveries)

    def stop(self) -> None:
        """Both end in order."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        assert self.process.wait(deadline(60)) == 0
        assert self.other.wait(deadline(60)) == 0


@dataclass
class Server:
    """Hold ``weft serve`` on host 0 with the other hosts' processes and a client."""

    process: subprocess.Popen[str]
    others: list[subprocess.Popen[str]]
    client: Lines

    def ask(self, tokens: int = 60) -> None:
        self.client.send(str(tokens))

    def told(self) -> list[str]:
        return list(json.loads(self.client.line()))

    def metrics(self) -> dict[str, float]:
        self.client.send("metrics")
        return dict(json.loads(self.client.line()))

    def until_whole(self) -> dict[str, float]:
        """The metrics when both heads are there."""
        until = time.monotonic() + ANSWER
        while (counted := self.metrics())["engine_up:0"] + counted["engine_up:1"] < 2:
            assert time.monotonic() < until, "a head does not come back"
            time.sleep(0.2)
        return counted

    def stop(self) -> None:
        """Stop all processes and assert status 0."""
        assert self.client.process.stdin is not None
        self.client.process.stdin.close()
        self.process.terminate()
        assert self.process.wait(deadline(60)) == 0
        assert [other.wait(deadline(60)) for other in self.others] == [0] * len(self.others)


class Cluster:
    """Start hosts that serve one model together with the same ``flags``."""

    def __init__(self, hosts: Hosts, folder: Path) -> None:
        secret = write_secret(folder)
        self.hosts = hosts
        self.folder = folder
        self.flags: dict[str, Any] = {
            "nnodes": 2,
            "rdzv": f"{hosts.addresses[0]}:5799",
            "group_secret": str(secret),
        }

    def start(self, **flags: Any) -> Server:
        """Start ``weft serve`` on all hosts. Return the ready server."""
        self.flags |= flags
        return self.front([self.serve(number) for number in range(1, self.flags["nnodes"])])

    def front(self, others: list[subprocess.Popen[str]]) -> Server:
        """Start ``weft serve`` on host 0 beside ``others``. Return the ready server."""
        return self.ready(self.serve(0), others)

    def ready(self, process: subprocess.Popen[str], others: list[subprocess.Popen[str]]) -> Server:
        """Wait until ``process`` on host 0 is ready. Return the server."""
        zero = Lines(process)
        ready = zero.line()
        assert ready.startswith("weft is ready: "), ready
        client = Lines(self.hosts.run(0, "-m", "tests.faults.asker", ready.split()[3]))
        return Server(zero.process, others, client)

    def up(self, groups: str) -> Server:
        """Start ``weft up`` with a topology of ``groups`` on both hosts. Return the ready server."""
        given = {name.replace("_", "-"): value for name, value in (SETTINGS | self.flags).items()}
        file = self.folder / "topology.yaml"
        file.write_text(json.dumps({"model": "spool-text", **given, "groups": json.loads(groups)}))
        other = self.hosts.run(1, "-m", "weft", "up", str(file), "--node-rank", "1")
        return self.ready(self.hosts.run(0, "-m", "weft", "up", str(file), "--port", "0"), [other])

    def program(self, **flags: Any) -> Program:
        """``LLM`` in a script on host 0, and ``weft serve`` on host 1."""
        self.flags |= flags
        other = self.serve(1)
        told = json.dumps({**SETTINGS, **self.flags})
        program = Program(self.hosts.run(0, "-m", "tests.faults.host_zero", told), other)
        assert program.line() == "ready"
        return program

    def serve(self, number: int, log: Path | None = None, **flags: Any) -> subprocess.Popen[str]:
        """``weft serve`` with ``--node-rank NUMBER``. Of more hosts than two, each second pair lies the other
        way round in the two namespaces: neighbours are apart.
        """
        settings = {**SETTINGS, **self.flags, **flags, "node_rank": number, "port": "0"}
        settings = {name.replace("_", "-"): value for name, value in settings.items()}
        given = [
            f"--{name}" if value is True else f"--{name}={value}" for name, value in settings.items() if value
        ]
        return self.hosts.run((0, 1, 1, 0)[number], "-m", "weft", "serve", "spool-text", *given, log=log)
