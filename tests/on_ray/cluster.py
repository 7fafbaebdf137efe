"""A Ray cluster of one node in processes of the test, and servers on it."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from tests.cli.test_serve import Server
from tests.support.slowness import deadline

RAY = [sys.executable, "-m", "ray.scripts.scripts"]
ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "disabled",  # else `ray start` wants a token, if this user has one
    "RAY_agent_register_timeout_ms": "120000",  # the default fails on a busy machine
    "OMP_NUM_THREADS": "1",
}


class RayNode:
    """The head node of a cluster."""

    def __init__(self, cpus: int = 8, dashboard: bool = False) -> None:
        self.folder = tempfile.mkdtemp(prefix="r")  # Ray's socket paths are long
        self.address = f"127.0.0.1:{_free_port()}"
        _, port = self.address.split(":")
        command = [*RAY, "start", "--head", "--port", port, "--temp-dir", self.folder]
        command += ["--num-cpus", str(cpus), "--node-ip-address=127.0.0.1"]
        command += [f"--include-dashboard={str(dashboard).lower()}"]
        self.dashboard = f"http://127.0.0.1:{_free_port()}"
        command += ["--dashboard-port", self.dashboard.rpartition(":")[2]]
        command += ["--object-store-memory", "80000000"]
        # Not a pipe: the processes of the cluster keep the output open.
        with Path(self.folder, "start.log").open("wb") as log:
            environment = {**os.environ, **ENVIRONMENT}
            status = subprocess.run(
                command, env=environment, stdout=log, stderr=log, timeout=deadline(120), check=False
            ).returncode
        if status:  # for example a machine without shared memory, or a container without its own network
            said = Path(log.name).read_text().strip().splitlines()
            self.close()
            pytest.skip(f"no Ray node starts on this machine: {said[-1] if said else status}")

    def processes(self) -> list[tuple[int, str]]:
        """Return (process id, command line) of all processes of the cluster: processes with the folder in the
        command line, and all descendants. A process with a title shows neither arguments nor environment."""
        lines, parents = {}, {}
        for place in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                line = (place / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                parent = (place / "stat").read_text().rpartition(")")[2].split()[1]
                lines[int(place.name)], parents[int(place.name)] = line, int(parent)
        own = {pid for pid, line in lines.items() if self.folder in line and pid != os.getpid()}
        while more := {pid for pid, parent in parents.items() if parent in own} - own:
            own |= more
        return [(pid, lines[pid]) for pid in sorted(own)]

    def actors(self, kind: str = "GroupActor") -> list[int]:
        """Return the process ids of the actors of a class."""
        return [pid for pid, line in self.processes() if line.startswith(f"ray::{kind}")]

    def close(self) -> None:
        """Kill all processes of the cluster: `ray stop` would end other clusters of this machine, too."""
        for _ in range(3):
            for pid, _ in self.processes():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.2)
        shutil.rmtree(self.folder, ignore_errors=True)


_TABLE = """
import json, sys, ray
from ray.util.placement_group import placement_group_table
ray.init(address=sys.argv[1], log_to_driver=False)
print(json.dumps({one["name"]: one["state"] for one in placement_group_table().values()}))
"""


def placement_groups(address: str) -> dict[str, str]:
    """Return the name of each placement group that the cluster has ever had -> its state."""
    command = [sys.executable, "-c", _TABLE, address]
    environment = {**os.environ, **ENVIRONMENT}
    shown = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=deadline(60), check=True
    ).stdout
    found: dict[str, str] = json.loads(shown.splitlines()[-1])
    return found


def up(node: RayNode, file: Path, folder: Path, *arguments: str) -> Server:
    """Start ``weft up --on ray``."""
    folder.mkdir()
    where = ("--on", "ray", "--ray-address", node.address)
    return Server(folder, str(file), *where, *arguments, command="up", RAY_USAGE_STATS_ENABLED="0")


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port
