"""Messages and entries of the rendezvous store, which connects the hosts of one group.

    key                 written by             value
    host/INDEX/MARK     a host that joins      settings that all hosts must share; one entry per process
    control/REPLICA     an engine process      the address for RankHello of ranks on other hosts
    lease/REPLICA       an engine process      see weft/group/meeting.py
    leaves/MARK         a host that joins      empty: the host will end, and waits for the drain
    answer/MARK         the head               empty: the host may work; else the reason why not
    drains/INDEX        a host with engines    the host drains: "busy" or "idle"
    drain               the head               empty: all hosts with engines must drain
    busy                the head               numbers of the hosts that drain and have requests

Entries are states, not orders: an entry cannot be lost, arrive twice or arrive late.
"""

from __future__ import annotations

import msgspec

MOST_BYTES = 16 << 20
"""Maximum bytes of one frame."""


class Ask(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Client to store, at every poll."""

    number: int
    """Number of the poll; repeated in the answer."""
    entries: dict[str, bytes]
    """All entries of the client."""
    head: int = 0
    """``head`` of the client's table; 0 without a table."""
    version: int = 0
    """``version`` of the client's table."""


class Table(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Store to client: the answer to one ``Ask``."""

    number: int
    head: int
    """Random number of the head's process."""
    version: int
    """Counts the changes of the table."""
    entries: dict[str, bytes] | None
    """All entries; None if the client's version is current."""


HOSTS, LEAVES, DRAINS = "host/", "leaves/", "drains/"
DRAIN, BUSY = "drain", "busy"


def host_key(index: int, mark: str) -> str:
    """Return the key of one host process. ``mark``: random text of the process."""
    return f"{HOSTS}{index}/{mark}"


def leave_key(mark: str) -> str:
    return f"{LEAVES}{mark}"


def drain_key(index: int) -> str:
    return f"{DRAINS}{index}"


def answer_key(mark: str) -> str:
    return f"answer/{mark}"


def control_key(replica: int) -> str:
    return f"control/{replica}"


def lease_key(replica: int) -> str:
    return f"lease/{replica}"
