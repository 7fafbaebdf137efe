"""A Ray cluster of two nodes in two network namespaces, whose processes and cable tests break."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from tests.faults.netns import Hosts
from tests.on_ray.cluster import ENVIRONMENT, RAY
from tests.support.slowness import deadline

CLONE_NEWNET = 0x40000000
PORT = 6379


class TwoNodes:
    """Node 0 has the head of the cluster; node 1 can be lost.

    The thread that makes the cluster lives in the namespace of node 0 until ``close``, and so do all threads
    and processes that the thread starts meanwhile: the clients and the API server are on node 0.
    """

    def __init__(self, cpus: tuple[int, int] = (3, 3)) -> None:
        """Make the namespaces, and start both nodes. Raise OSError or CalledProcessError on a machine without
        namespaces, and RuntimeError if no Ray node starts."""
        self.cpus = cpus
        self.hosts = Hosts()
        self.folder = Path(tempfile.mkdtemp(prefix="r"))  # Ray's socket paths are long
        self.address = f"{self.hosts.addresses[0]}:{PORT}"
        self._home = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
        try:
            self.hosts.up()
            self._namespaces = [os.stat(f"/var/run/netns/{name}").st_ino for name in self.hosts.names]
            with open(f"/var/run/netns/{self.hosts.names[0]}") as namespace:
                _enter(namespace.fileno())
            for number in range(2):
                self.start(number)
        except BaseException:
            self.close()
            raise

    def start(self, number: int) -> None:
        """Start the Ray node of a host. Raise RuntimeError if the node does not start."""
        address, log = self.hosts.addresses[number], self.folder / f"start{number}.log"
        command = ["ip", "netns", "exec", self.hosts.names[number], *RAY, "start"]
        if number:
            command += ["--address", self.address]
        else:
            command += ["--head", "--port", str(PORT), "--temp-dir", str(self.folder)]
            command += ["--include-dashboard=false"]
        command += ["--node-ip-address", address, "--num-cpus", str(self.cpus[number])]
        command += ["--labels", f"host={number}", "--object-store-memory", "80000000"]
        # Not a pipe: the processes of the node keep the output open.
        with log.open("wb") as output:
            environment = {**os.environ, **ENVIRONMENT}
            status = subprocess.run(
                command, env=environment, stdout=output, stderr=output, timeout=deadline(120), check=False
            ).returncode
        if status:
            raise RuntimeError(f"no Ray node starts: {log.read_text()[-1000:]}")

    def kill(self, number: int = 1) -> None:
        """SIGKILL all processes of a host, except this process, as a loss of power does."""
        for _ in range(3):
            for pid in self.processes(number):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.1)

    @contextlib.contextmanager
    def cut(self) -> Iterator[None]:
        """The cable between the hosts is cut within the block."""
        self.hosts.cable("down")
        try:
            yield
        finally:
            self.hosts.cable("up")

    def processes(self, number: int) -> dict[int, str]:
        """Return process id -> command line of a host, without this process."""
        found = {}
        for place in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if (place / "ns/net").stat().st_ino == self._namespaces[number]:
                    line = (place / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                    found[int(place.name)] = line
        found.pop(os.getpid(), None)
        return found

    def engines_of(self, number: int) -> dict[str, int]:
        """Return engine -> process id of a host."""
        lines = self.processes(number).items()
        return {line.split()[2]: pid for pid, line in lines if line.startswith("weft: head ")}

    def engines(self) -> dict[str, tuple[int, int]]:
        """Return engine -> (host, process id)."""
        return {name: (n, pid) for n in range(2) for name, pid in self.engines_of(n).items()}

    def placed(self) -> dict[str, int]:
        """Return engine -> host."""
        return {engine: number for engine, (number, _) in sorted(self.engines().items())}

    def actors(self, number: int, kind: str = "GroupActor") -> list[int]:
        """Return the process ids of the actors of a class on a host."""
        return [pid for pid, line in self.processes(number).items() if line.startswith(f"ray::{kind}")]

    def close(self) -> None:
        """Kill all processes of both hosts, and remove the namespaces."""
        with contextlib.suppress(AttributeError):
            for number in range(2):
                self.kill(number)
        _enter(self._home)
        os.close(self._home)
        self.hosts.down()
        shutil.rmtree(self.folder, ignore_errors=True)


def _enter(namespace: int) -> None:
    """Move the calling thread into a network namespace, given as a file descriptor. Raise OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(namespace, CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "setns")
