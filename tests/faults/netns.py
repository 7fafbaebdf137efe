"""Hosts as network namespaces with addresses of their own, and a cable between them that can be cut.

Each host also has a mount namespace with a private folder for temporary files and a private /dev/shm. So
processes of two hosts share no socket and no memory, as on two machines.
"""

from __future__ import annotations

import contextlib
import os
import queue
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TextIO

from tests.support.processes import with_role
from tests.support.slowness import deadline
from weft.common import env

ROOT = Path(__file__).resolve().parents[2]
PRIVATE = "/tmp/weft_hosts"
"""Folder for temporary files of a host's processes. Each host sees its own folder here."""
ANSWER = deadline(200.0)
"""Seconds for any answer of a host's process."""


class Hosts:
    """Two namespaces."""

    def __init__(self) -> None:
        mark = f"{os.getpid() % 100000}"
        self.names = (f"weft{mark}a", f"weft{mark}b")
        self.addresses = ("10.213.7.1", "10.213.7.2")
        self.links = (f"wv{mark}a", f"wv{mark}b")
        self.processes: list[subprocess.Popen[str]] = []
        self.keepers: list[subprocess.Popen[str]] = []
        """One process per host that keeps the host's mount namespace."""

    def up(self) -> None:
        for name in self.names:
            _ip("netns", "add", name)
        _ip("link", "add", self.links[0], "type", "veth", "peer", "name", self.links[1])
        for name, link, address in zip(self.names, self.links, self.addresses, strict=True):
            _ip("link", "set", link, "netns", name)
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", link)
            _ip("-n", name, "link", "set", "lo", "up")
            _ip("-n", name, "link", "set", link, "up")
            self.keepers.append(_keeper())

    def down(self) -> None:
        for process in [*self.processes, *self.keepers]:
            process.kill()
            process.wait()
        for name in self.names:
            with contextlib.suppress(subprocess.CalledProcessError):
                _ip("netns", "del", name)

    def cable(self, state: str) -> None:
        """ "up" or "down"."""
        _ip("-n", self.names[1], "link", "set", self.links[1], state)

    def reset(self) -> int:
        """Reset every TCP connection between the hosts, seen from host 0. Return the number of
        connections.
        """
        return len(self._ss(0, "-K").splitlines())

    def refuse(self, host: int) -> None:
        """``host`` answers each TCP packet of the other one with a reset, until ``pass_again``."""
        source = self.addresses[1 - host]
        self._nft(host, "meta", "l4proto", "tcp", "ip", "saddr", source, "reject", "with", "tcp", "reset")

    def forget(self) -> int:
        """Drop the packets of existing connections silently. New connections work. Return the number of
        connections.
        """
        found = self._ss(0, "state", "established").splitlines()
        for line in found:
            own, peer = (word.rpartition(":")[2] for word in line.split()[2:4])
            for host, ports in ((0, (peer, own)), (1, (own, peer))):
                self._nft(host, "tcp", "sport", ports[0], "tcp", "dport", ports[1], "drop")
        return len(found)

    def pass_again(self) -> None:
        """Ends ``refuse`` and ``forget``."""
        for name in self.names:
            _ip("netns", "exec", name, "nft", "flush", "ruleset")

    def _ss(self, host: int, *options: str) -> str:
        command = ["ip", "netns", "exec", self.names[host], "ss", "-tnH", *options]
        command += ["dst", self.addresses[1 - host]]
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=30).stdout

    def _nft(self, host: int, *rule: str) -> None:
        nft = ("netns", "exec", self.names[host], "nft", "add")
        _ip(*nft, "table", "inet", "weft")
        _ip(*nft, "chain", "inet", "weft", "in", "{ type filter hook input priority 0; }")
        _ip(*nft, "rule", "inet", "weft", "in", *rule)

    def run(self, host: int, *command: str, log: TextIO | None = None) -> subprocess.Popen[str]:
        """Run ``python COMMAND`` on a host. ``log`` receives its standard error."""
        inside = ["nsenter", f"--mount=/proc/{self.keepers[host].pid}/ns/mnt", "--"]
        whole = [*inside, "ip", "netns", "exec", self.names[host], sys.executable, *command]
        variables = env.child_environment(
            PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", TMPDIR=PRIVATE
        )
        process = subprocess.Popen(
            whole,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env=variables,
            cwd=ROOT,
        )
        self.processes.append(process)
        return process


def _keeper() -> subprocess.Popen[str]:
    """Start a process with a mount namespace of its own. Raises OSError where the system allows none."""
    words = (
        f"mount -t tmpfs none {PRIVATE} && mount -t tmpfs none /dev/shm && echo ready && exec sleep 100000"
    )
    os.makedirs(PRIVATE, exist_ok=True)
    made = subprocess.Popen(
        ["unshare", "--mount", "sh", "-c", words],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert made.stdout is not None
    if made.stdout.readline() != "ready\n":
        made.kill()
        made.wait()
        raise OSError("no mount namespaces")
    return made


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=deadline(30))


class Lines:
    """A process that answers lines."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self._lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line)
        self._lines.put("ended")

    def line(self) -> str:
        """The next one; "ended" when there is none."""
        return self._lines.get(timeout=ANSWER).strip()

    def send(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()


def command_lines(parent: int) -> dict[int, list[str]]:
    """Return the command words of each child of a process, over all threads of the process.

    A zombie has an empty command.
    """
    found = {}
    for task in Path(f"/proc/{parent}/task").iterdir():
        with contextlib.suppress(OSError):  # the task ends meanwhile
            for pid in map(int, (task / "children").read_text().split()):
                with contextlib.suppress(OSError):
                    found[pid] = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
    return found


def children_of(process: subprocess.Popen[str], role: str = "") -> list[int]:
    """Return the children of a host's process, or only the children with ``role`` (``engine`` or
    ``rank``)."""
    return with_role(process.pid, role) if role else sorted(command_lines(process.pid))


def child_of(process: subprocess.Popen[str], role: str = "") -> int:
    """Return the youngest child, and wait for one if necessary."""
    until = time.monotonic() + deadline(60)
    while time.monotonic() < until:
        if found := children_of(process, role):
            return found[-1]
        time.sleep(0.05)
    raise AssertionError("it has no child")
