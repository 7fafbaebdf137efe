"""The Ray actors of a group whose ranks lie on several hosts: one for the head, one for each other host."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import time
from pathlib import Path

import ray

from weft.common.errors import Unavailable
from weft.control.directory.folder import FolderDirectory
from weft.on_ray.actors import LOOK_S, REACH_S, GroupActor, insist

HEALTHY_S = 30.0
"""Seconds from which a failed command of a further host is no sign of a bad node."""
PORT_S = 5.0
"""Maximum seconds for the port of the head before. Then the head takes another port."""


class HeadActor(GroupActor):
    """Runs the head of a group, which has the engine. The other hosts join at an address that the fleet actor
    knows. A head that starts again keeps the address if possible: then the other hosts keep their weights."""

    def _command(self, folder: Path) -> list[str]:
        address = insist(self._meet, REACH_S)
        return [*super()._command(folder), "--join-port", address.rpartition(":")[2]]

    def _meet(self) -> str:
        """Return the address for the other hosts, after the fleet actor knows the address."""
        own = ray.util.get_node_ip_address()
        found = self._call("join", self._group, self._attempt)
        host, _, port = found[2].rpartition(":") if found is not None else ("", "", "")
        if host != own or not _becomes_free(own, int(port), PORT_S):
            port = str(_free_port(own))
        address = f"{own}:{port}"
        self._call("meet", self._group, self._attempt, address)
        return address


class HostActor(GroupActor):
    """Runs ``weft engine --join`` for another host of a group. The command outlives heads. The actor starts
    the command again when the address of the head has changed."""

    _head = ""
    """Address at which the present command joins."""

    def _admit(self) -> tuple[str, str] | None:
        with self._lock:
            self._again = self._signalled = False
            self._process = None
        found = self._call("join", self._group, self._attempt, self._host, self._number)
        if found is None:
            return None
        topology, secret, self._head = found
        if not self._head:
            raise Unavailable("the head of the group has no address yet")
        return topology, secret

    def _command(self, folder: Path) -> list[str]:
        return [*super()._command(folder), "--join", self._head, "--host-index", str(self._index)]

    def _follow(self, process: subprocess.Popen[bytes], directory: FolderDirectory) -> int:
        """Wait for the end of the command, which is ordered when the group ends or has another address.
        Return its status."""
        while True:
            status = process.poll()
            # The fleet actor restarts, or its node is away. The next look tries again.
            with contextlib.suppress(Exception):
                # Only hosts with whole replicas of an expert-parallel group have engines.
                wanted = self._publish(self._host, directory, status is not None)
                found = self._call("join", self._group, self._attempt)
                with self._lock:
                    # Engines drain with those of the head. Ranks without an engine outlive the drain.
                    self._over = self._over or found is None or bool(self._records and not wanted)
                    # A head that drains has no address.
                    self._again = self._again or (found is not None and found[2] not in ("", self._head))
                    if self._over or self._again:
                        self._drain()
            if status is not None:
                return status
            time.sleep(LOOK_S)

    def _healthy(self) -> bool:
        return time.monotonic() - self._begun >= HEALTHY_S

    @property
    def _host(self) -> str:
        """Name of the host for the fleet actor."""
        return f"{self._group}/{self._index}"

    def _say_left(self) -> None:
        """Do nothing: the head leaves for the group."""


def _becomes_free(host: str, port: int, seconds: float) -> bool:
    """Return True once a port can be bound, within ``seconds``."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        with contextlib.suppress(OSError), socket.create_server((host, port)):
            return True
        time.sleep(LOOK_S)
    return False


def _free_port(host: str) -> int:
    """Return a port that was free a moment ago."""
    with socket.create_server((host, 0)) as one:
        port: int = one.getsockname()[1]
        return port
