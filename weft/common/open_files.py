"""This process's limit of open files. Children inherit it."""

from __future__ import annotations

import resource

FILES = 1 << 16
"""Files that a process asks for at most."""


def most_files() -> int:
    """The limit to which this process may raise its own."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return FILES if hard == resource.RLIM_INFINITY else min(hard, FILES)


def allow_files() -> int:
    """Raises this process's limit of open files as far as it may, and returns it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = most_files()
    if soft == resource.RLIM_INFINITY or soft >= allowed:
        return FILES if soft == resource.RLIM_INFINITY else soft
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    return allowed
