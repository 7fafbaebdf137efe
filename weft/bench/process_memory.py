"""Memory of a tree of processes, read from /proc."""

from __future__ import annotations

import contextlib
import os
import re
import signal
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

_PSS = re.compile(rb"^Pss:\s+(\d+) kB", re.MULTILINE)
_PEAK_RSS = re.compile(rb"^VmHWM:\s+(\d+) kB", re.MULTILINE)
_GROWTH = 1.01


@dataclass(frozen=True, slots=True)
class ProcessMemory:
    """A process, identified by id and start time, so a later process with the same id differs."""

    pid: int
    started: int
    """Clock ticks since boot."""

    def is_alive(self) -> bool:
        """Return True if the process still runs. A zombie does not run."""
        found = _stat(self.pid)
        return found is not None and found[1] == self.started and found[2] != "Z"

    def kill(self) -> None:
        """Send SIGKILL if the process still runs."""
        if self.is_alive():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(self.pid, signal.SIGKILL)


@dataclass(frozen=True, slots=True)
class MemorySample:
    """Bytes of a tree at one time; ``pss`` is None if not read."""

    rss: int
    pss: int | None


@dataclass(frozen=True, slots=True)
class Peak:
    """The largest sums so far, in bytes. ``at`` is the RSS at the last read of PSS."""

    rss: int = 0
    pss: int = 0
    at: int = 0

    def with_sample(self, found: MemorySample) -> Peak:
        peak = replace(self, rss=max(self.rss, found.rss))
        if found.pss is None:
            return peak
        return replace(peak, pss=max(self.pss, found.pss), at=max(self.at, found.rss))


def _stat(pid: int) -> tuple[int, int, str] | None:
    """Return (parent, start, state) of a process, or None if there is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    # The name, in parentheses, may contain any character, so split after the last parenthesis.
    fields = text[text.rindex(")") + 2 :].split()
    return int(fields[1]), int(fields[19]), fields[0]


def tree(root: int) -> list[ProcessMemory]:
    """Return ``root`` and its descendants, parents first. Empty if ``root`` is gone."""
    children: dict[int, list[ProcessMemory]] = {}
    first: ProcessMemory | None = None
    for entry in os.listdir("/proc"):
        if entry.isdigit() and (found := _stat(int(entry))) is not None:
            one = ProcessMemory(int(entry), found[1])
            children.setdefault(found[0], []).append(one)
            if one.pid == root:
                first = one
    order = [] if first is None else [first]
    for one in order:
        order += children.get(one.pid, [])
    return order


def sample(processes: Iterable[ProcessMemory], peak: Peak) -> MemorySample:
    """Return the sums over the processes.

    PSS costs the kernel a walk of page tables, so PSS is read only after RSS has grown.
    """
    pids = [one.pid for one in processes]
    rss = sum(map(_rss, pids))
    if rss <= peak.at * _GROWTH:
        return MemorySample(rss, None)
    parts = [_kilobytes(pid, "smaps_rollup", _PSS) for pid in pids]
    known = [part for part in parts if part is not None]
    return MemorySample(rss, sum(known) if known and len(known) == len(parts) else None)


def _rss(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError, ValueError):
        return 0


def _kilobytes(pid: int, file: str, field: re.Pattern[bytes]) -> int | None:
    """Return a field of a file in /proc/PID, in bytes; 0 without the field, None without the file."""
    try:
        found = field.search(Path(f"/proc/{pid}/{file}").read_bytes())
    except OSError:
        return None
    return int(found[1]) * 1024 if found else 0


def own_peak() -> int:
    """Return the largest resident set of this process in bytes, since the start or ``reset_own_peak``."""
    return _kilobytes(os.getpid(), "status", _PEAK_RSS) or 0


def own_resident() -> int:
    """Return the resident set of this process in bytes."""
    return _rss(os.getpid())


def reset_own_peak() -> None:
    """Restart the measurement of ``own_peak``. Raise OSError if the system does not support the reset."""
    Path("/proc/self/clear_refs").write_text("5")
