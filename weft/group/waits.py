"""Time limits for ranks and engine processes of a group, in seconds."""

from __future__ import annotations

HELLO_S = 120.0
"""Maximum seconds from the start of a rank's process to the hello."""
LOAD_S = 3600.0
"""Maximum seconds for ranks to load, and for engine processes to meet. Heartbeats are required meanwhile."""
LAG = 1
"""Maximum steps by which the reports of other ranks may be behind a committed step."""
LOOK_MEETING_S, LOOK_S = 0.02, 1.0
"""Seconds between two readings of leases: in phase ``meeting``, and in phase ``running``."""


def late(what: str, patience: float) -> str:
    """Return the reason for a rank's loss: ``what`` was not done within ``patience`` seconds."""
    return f"it did not {what} within {patience:g} s"
