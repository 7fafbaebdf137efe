"""The open-files limit of the process. Children inherit the limit."""

from __future__ import annotations

import resource

FILES = 1 << 16
"""Maximum limit requested by a process."""


def most_files() -> int:
    """Return the highest limit of open files allowed to the process."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return FILES if hard == resource.RLIM_INFINITY else min(hard, FILES)


def allow_files() -> int:
    """Raise the open-files limit of the process as far as allowed, and return the limit in effect.

    A higher or infinite limit stays; infinite counts as ``FILES``.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = most_files()
    if soft == resource.RLIM_INFINITY or soft >= allowed:
        return FILES if soft == resource.RLIM_INFINITY else soft
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    return allowed
