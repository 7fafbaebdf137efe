"""Limits that a worker process sets for itself, so that input which it does not trust cannot take more."""

from __future__ import annotations

import resource

FILES = 64
"""Descriptors that may be open."""


def confine(memory: int) -> None:
    """Limit this process from now on: ``memory`` bytes of further address space, 64 descriptors, no core."""
    with open("/proc/self/statm", encoding="ascii") as file:
        present = int(file.read().split()[0]) * resource.getpagesize()
    limits = {
        resource.RLIMIT_AS: present + memory,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_NOFILE: FILES,
    }
    for limit, value in limits.items():
        _, hard = resource.getrlimit(limit)
        least = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(limit, (least, least))
