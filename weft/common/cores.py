"""The number of usable cores, by CPU affinity and by the CPU quotas of cgroups."""

from __future__ import annotations

import contextlib
import math
import os
from pathlib import Path

_MEMBERSHIP = Path("/proc/self/cgroup")
_MOUNT = Path("/sys/fs/cgroup")


def usable_cores() -> int:
    """Return the number of usable cores, at least 1. A quota of 1.5 cores counts as 2."""
    cores = allowed_cores()
    quota = cpu_quota(_MEMBERSHIP, _MOUNT)
    return cores if quota is None else max(1, min(cores, math.ceil(quota)))


def allowed_cores() -> int:
    """Return the number of cores of the calling thread's CPU affinity."""
    return len(os.sched_getaffinity(0))


def cpu_quota(membership: Path, mount: Path) -> float | None:
    """Return the smallest CPU quota, in cores, of a process's cgroups and all ancestors.

    Return None without a readable quota. ``membership``: the process's /proc/PID/cgroup. ``mount``: the mount
    point of cgroups.
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
    """Return the folder of cgroup ``path`` and its ancestors up to ``root``. Inside a container, ``root`` may
    be the container's cgroup.
    """
    folder = root / path.strip("/")
    return [folder, *(parent for parent in folder.parents if parent.is_relative_to(root))]


def _quota(*files: Path) -> float | None:
    """Return quota / period from the two numbers in ``files``; None for no quota or unreadable files."""
    with contextlib.suppress(OSError, ValueError):
        quota, period = (int(word) for file in files for word in file.read_text().split())
        if quota > 0 and period > 0:
            return quota / period
    return None
