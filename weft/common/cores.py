"""How many cores this process may use: by its affinity, and by the CPU quotas of its cgroups."""

from __future__ import annotations

import contextlib
import math
import os
from pathlib import Path

_MEMBERSHIP = Path("/proc/self/cgroup")
_MOUNT = Path("/sys/fs/cgroup")


def usable_cores() -> int:
    """At least 1. A quota of one and a half cores counts as two."""
    cores = len(os.sched_getaffinity(0))
    quota = cpu_quota(_MEMBERSHIP, _MOUNT)
    return cores if quota is None else max(1, min(cores, math.ceil(quota)))


def cpu_quota(membership: Path, mount: Path) -> float | None:
    """Cores that the cgroups of a process leave it: the least quota of its groups and those above them.

    ``membership``: its /proc/PID/cgroup; ``mount``: where cgroups are mounted. None: no quota, or none seen.
    """
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return None
    quotas = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:  # version 2
            quotas += [_quota(folder / "cpu.max") for folder in _upwards(mount, path)]
        elif "cpu" in controllers.split(","):
            for name in dict.fromkeys((controllers, "cpu")):
                quotas += [
                    _quota(folder / "cpu.cfs_quota_us", folder / "cpu.cfs_period_us")
                    for folder in _upwards(mount / name, path)
                ]
    return min((quota for quota in quotas if quota is not None), default=None)


def _upwards(root: Path, path: str) -> list[Path]:
    """From a group's folder to the root. In a container only the root may be there: it is the group then."""
    folder = root / path.strip("/")
    return [folder, *(parent for parent in folder.parents if parent.is_relative_to(root))]


def _quota(*files: Path) -> float | None:
    """Quota over period, which ``files`` hold one after the other, in microseconds."""
    with contextlib.suppress(OSError, ValueError):
        quota, period = (int(word) for file in files for word in file.read_text().split())
        if quota > 0 and period > 0:
            return quota / period
    return None
