"""Find the processes of a server by role, with or without a process title."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

from tests.support.forked import NURSERY
from weft.bench import process


def role_of(words: list[str]) -> str | None:
    """Return the role as ``weft.bench.process.role_of`` does. A scripted test engine is a ``engine`` too."""
    fake = any(word.endswith("fake_engine.py") for word in words[:2])
    return "head" if fake else process.role_of(words)


def commands(parent: int) -> dict[int, list[str]]:
    """Return the living children of a process with their commands, over all threads of the process."""
    found: dict[int, list[str]] = {}
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{parent}/task").iterdir():
            with contextlib.suppress(OSError):
                for pid in map(int, (task / "children").read_text().split()):
                    words = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
                    if words[0].startswith(sys.executable + " "):  # a copy's title (tests.support.forked)
                        words = words[0].split()
                    if not words[0].startswith(NURSERY):
                        found[pid] = words
    return dict(sorted(found.items()))


def children(parent: int) -> dict[int, str]:
    """Return the living children of a process that have a role."""
    roles = {pid: role_of(words) for pid, words in commands(parent).items()}
    return {pid: role for pid, role in roles.items() if role is not None}


def with_role(parent: int, role: str) -> list[int]:
    """Return the children of a process with role ``engine``, ``front`` or ``rank``, lowest id first."""
    return [pid for pid, its in children(parent).items() if its.split()[0] == role]


def is_alive(pid: int) -> bool:
    """Return True if the process has not ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def serving_process(port: int, candidates: list[int]) -> int | None:
    """Return the process of ``candidates`` at the other end of a loopback connection from ``port``; None if
    absent.
    """
    inodes = set()
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if int(fields[2].rpartition(":")[2], 16) == port:
            inodes.add(f"socket:[{fields[9]}]")
    for pid in candidates:
        with contextlib.suppress(OSError):
            for link in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    if str(link.readlink()) in inodes:
                        return pid
    return None
