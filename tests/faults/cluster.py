"""Servers of ``weft engine`` and ``weft front`` over several hosts, which are network namespaces."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.faults.netns import ANSWER, Hosts, Lines
from tests.support.processes import with_role
from tests.support.secret import write_secret
from tests.support.slowness import deadline

SETTINGS: dict[str, Any] = {
    "dtype": "float64",
    "max_model_len": 256,
    "max_num_seqs": 4,
    "kv_cache_memory": "8MiB",
    "rank_timeout": deadline(8.0),
    "threads": 1,
}
PORT = 5799
"""``--join-port`` of the head."""
ENDED = (0, 2)
"""Exit statuses after which nobody starts ``weft engine`` again."""


class Engine:
    """``weft engine`` on a host. A thread starts the command again, as systemd or Kubernetes do."""

    def __init__(self, hosts: Hosts, namespace: int, words: Sequence[str], log: Path) -> None:
        self.hosts, self.namespace, self.words, self.log = hosts, namespace, words, log
        self.restarts = 0
        self._over = False
        self.process = self._run()
        self._thread = threading.Thread(target=self._keep, daemon=True)
        self._thread.start()

    def _run(self) -> subprocess.Popen[str]:
        with self.log.open("a") as log:
            return self.hosts.run(self.namespace, "-m", "weft", *self.words, log=log)

    def _keep(self) -> None:
        while self.process.wait() not in ENDED and not self._over:
            time.sleep(0.2)
            self.restarts += 1
            self.process = self._run()

    def ranks(self, role: str) -> list[int]:
        """Return the processes with ``role`` (``head`` or ``rank``), children of children too."""
        engines = with_role(self.process.pid, "head")
        if role == "head":
            return engines
        return [rank for pid in (self.process.pid, *engines) for rank in with_role(pid, "rank")]

    def one(self, role: str) -> int:
        """Return the youngest process with ``role``. Wait for a process if necessary."""
        until = time.monotonic() + deadline(60)
        while time.monotonic() < until:
            with contextlib.suppress(OSError):
                if found := self.ranks(role):
                    return found[-1]
            time.sleep(0.05)
        raise AssertionError(f"no {role}: {self.log.read_text()}")

    def kill(self) -> None:
        """Kill the command, and start no other."""
        self._over = True
        self.process.kill()
        self.process.wait()

    def stop(self) -> int:
        """Send SIGTERM. Return the exit status."""
        self._over = True
        self.process.terminate()
        return self.process.wait(deadline(60))


@dataclass
class Server:
    """API servers and clients on host 0, and the engines of all hosts."""

    fronts: list[subprocess.Popen[str]]
    clients: list[Lines]
    engines: list[Engine] = field(default_factory=list)

    def ask(self, tokens: int = 60) -> None:
        for client in self.clients:
            client.send(str(tokens))

    def received(self) -> list[str]:
        """Return the answers, which are equal at all API servers."""
        answers = [list(json.loads(client.line())) for client in self.clients]
        assert all(answer == answers[0] for answer in answers)
        return answers[0]

    def metrics(self) -> dict[str, float]:
        self.clients[0].send("metrics")
        return dict(json.loads(self.clients[0].line()))

    def until_whole(self, engines: int = 2) -> dict[str, float]:
        """Wait until ``engines`` engines are up. Return the metrics."""
        until = time.monotonic() + ANSWER
        while True:
            counted = self.metrics()
            if sum(value for name, value in counted.items() if name.startswith("engine_up:")) >= engines:
                return counted
            assert time.monotonic() < until, "an engine does not come back"
            time.sleep(0.2)

    def logs(self) -> str:
        """Return the logs of all engines, for messages of failed tests."""
        return "\n".join(engine.log.read_text() for engine in self.engines)

    def restarts(self) -> int:
        """Return how often the commands were started again."""
        return sum(engine.restarts for engine in self.engines)

    def stop(self) -> None:
        """Stop all processes, API servers first, and assert status 0. The engines of one group drain
        together."""
        for client in self.clients:
            assert client.process.stdin is not None
            client.process.stdin.close()
        for front in self.fronts:
            front.terminate()
            assert front.wait(deadline(60)) == 0
        for engine in self.engines:
            engine._over = True
            engine.process.send_signal(signal.SIGTERM)
        assert [engine.process.wait(deadline(60)) for engine in self.engines] == [0] * len(self.engines)


class Cluster:
    """Start groups and API servers of one topology file."""

    def __init__(self, hosts: Hosts, folder: Path) -> None:
        self.hosts, self.folder = hosts, folder
        self.secret = write_secret(folder)
        self.file = folder / "topology.yaml"
        self.started = 0

    def write(self, *groups: dict[str, Any], file: Path | None = None, **settings: Any) -> Path:
        """Write the topology file, for the groups ``groups``. Return the file."""
        given = {name.replace("_", "-"): value for name, value in {**SETTINGS, **settings}.items()}
        front = {"engine-timeout": deadline(25), "drain-timeout": deadline(10)}
        file = file or self.file
        groups = tuple({name.replace("_", "-"): value for name, value in group.items()} for group in groups)
        whole = {
            "model": "spool-text",
            "group-secret": str(self.secret),
            **given,
            "front": front,
            "groups": groups,
        }
        file.write_text(json.dumps(whole))
        file.chmod(0o600)
        return file

    def engine(
        self,
        group: str,
        *more: str,
        namespace: int = 0,
        index: int | None = None,
        port: int = PORT,
        file: Path | None = None,
    ) -> Engine:
        """Start ``weft engine``. ``index``: number of the host in a group over several hosts."""
        words = [
            "engine",
            str(file or self.file),
            "--group",
            group,
            "--directory",
            str(self.folder / "directory"),
        ]
        words += ["--advertise", self.hosts.addresses[namespace]]
        if index == 0:
            words += ["--join-port", str(port)]
        elif index is not None:
            words += ["--join", f"{self.hosts.addresses[0]}:{port}", "--host-index", str(index)]
        self.started += 1
        return Engine(self.hosts, namespace, [*words, *more], self.folder / f"engine{self.started}.log")

    def spread(self, hosts: int = 2, group: str = "unified0") -> list[Engine]:
        """Start all hosts of one group. Of four hosts, each second pair lies the other way round in the two
        namespaces: neighbours are apart."""
        return [self.engine(group, namespace=(0, 1, 1, 0)[number], index=number) for number in range(hosts)]

    def front(self, engines: list[Engine], count: int = 1) -> Server:
        """Start ``count`` API servers on host 0 beside ``engines``. Return the ready server."""
        words = ["front", str(self.file), "--directory", str(self.folder / "directory"), "--port", "0"]
        lines = [Lines(self.hosts.run(0, "-m", "weft", *words)) for _ in range(count)]
        clients = []
        for one in lines:
            ready = one.line()
            assert ready.startswith("weft is ready: "), ready
            clients.append(Lines(self.hosts.run(0, "-m", "tests.faults.asker", ready.split()[3])))
        return Server([one.process for one in lines], clients, engines)

    def start(self, hosts: int = 2, **settings: Any) -> Server:
        """Start one group with ``settings`` over ``hosts`` hosts, and an API server. Return the ready
        server."""
        self.write({}, hosts=hosts, **settings)
        return self.front(self.spread(hosts))

    def groups(self, *groups: dict[str, Any], count: int = 1, **settings: Any) -> Server:
        """Start ``groups``, each on the host of its key ``namespace``, and ``count`` API servers. Return the
        ready server."""
        places = [group.pop("namespace") for group in groups]
        self.write(*groups, **settings)
        roles = [group.get("role", "unified") for group in groups]
        names = [f"{role}{roles[:number].count(role)}" for number, role in enumerate(roles)]
        pairs = zip(names, places, strict=True)
        return self.front([self.engine(name, namespace=place) for name, place in pairs], count)
