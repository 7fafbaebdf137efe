"""Resource limits for a worker process, set before handling untrusted input."""

from __future__ import annotations

import resource

FILES = 64
"""Maximum open descriptors."""


def confine(memory: int) -> None:
    """Limit the calling process to ``memory`` bytes of further address space, ``FILES`` open descriptors and
    no core dumps.

    Hard limits are lowered, too, so the process cannot undo the limits.
    """
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
