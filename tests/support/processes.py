"""The processes of a server by what they are, whether or not they could give themselves a title."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

from tests.support.forked import NURSERY
from weft.bench import process


def role_of(words: list[str]) -> str | None:
    """See ``weft.bench.process.role_of``; a head that tests script is one, too."""
    fake = any(word.endswith("fake_head.py") for word in words[:2])
    return "head" if fake else process.role_of(words)


def commands(parent: int) -> dict[int, list[str]]:
    """The children of a process that have not ended, whichever thread started them, with their commands."""
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
    """The children of a process that have a role and have not ended."""
    roles = {pid: role_of(words) for pid, words in commands(parent).items()}
    return {pid: role for pid, role in roles.items() if role is not None}


def with_role(parent: int, role: str) -> list[int]:
    """The children of a process that are ``head``, ``front`` or ``rank``, the oldest first."""
    return [pid for pid, its in children(parent).items() if its.split()[0] == role]


def is_alive(pid: int) -> bool:
    """Whether the process has not ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def serving_process(port: int, candidates: list[int]) -> int | None:
    """Which of ``candidates`` has the other end of a loopback connection from ``port``."""
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
