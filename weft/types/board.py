"""The entries of the rendezvous store on host 0, through which hosts and engine processes of one server find
each other.

    key                 written by             value
    settings/HOST/MARK  the host, at its start settings that all hosts must share; one entry per process
    answer/HOST/MARK    the API server         empty: the host's process may work; else the reason why not
    wanted/REPLICA      the API server         the incarnation of the engine process to run; 0: none
    head/REPLICA        the engine process     Listening: the address for the API server
    ended/REPLICA       the engine's host      EngineEnded: the exit status of the incarnation
    control/REPLICA     the engine process     the address for ranks on other hosts
    lease/REPLICA       the engine process     see weft/group/meeting.py
    over                the API server         the server ends with this exit status
    gone/HOST           the host               the host has read ``over``

An incarnation is a number for each start of an engine process, given by the API server and unique over all
starts of all servers. Entries of an older incarnation are ignored.
"""

from __future__ import annotations

import msgspec

MOST_BYTES = 16 << 20
"""Maximum bytes of one frame."""


class Ask(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Client to store, at every poll: the client's own entries, and the version of the client's table."""

    number: int
    """Number of the poll; repeated in the answer."""
    board: int
    version: int
    """``board`` and ``version`` of the last received table. The store does not send an unchanged table
    again.
    """
    entries: dict[str, bytes]


class Table(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Store to client: the answer to one ``Ask``."""

    number: int
    board: int
    """Random id of the store's process."""
    version: int
    entries: dict[str, bytes]
    """All entries; empty if the client has the version already."""


class Listening(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Entry ``engine/``: the engine process listens at ``address`` and begins to load."""

    incarnation: int
    address: str


class EngineEnded(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Entry ``ended/``: the engine's process ended with ``status``, negative for a signal."""

    incarnation: int
    status: int


def settings_key(host: int | None = None, mark: str = "") -> str:
    """Return the settings key of one process. Without ``host``, return the prefix of all settings keys."""
    return "settings/" if host is None else f"settings/{host}/{mark}"


def answer_key(host: int, mark: str) -> str:
    return f"answer/{host}/{mark}"


def gone_key(host: int) -> str:
    return f"gone/{host}"


def wanted_key(replica: int) -> str:
    return f"wanted/{replica}"


def engine_key(replica: int) -> str:
    return f"head/{replica}"


def ended_key(replica: int) -> str:
    return f"ended/{replica}"


def control_key(replica: int) -> str:
    return f"control/{replica}"


def lease_key(replica: int) -> str:
    return f"lease/{replica}"


OVER = "over"
