"""The entries of the board on host 0, by which hosts and heads of one server know of each other, and its
messages.

    key               who writes it            what it says
    settings/HOST/MARK  the host, at its start   settings that all hosts must have alike; one entry a process
    answer/HOST/MARK  the front                empty: the host's process may work; else the reason why not
    wanted/REPLICA    the front                the incarnation of the head that should run; 0: none
    head/REPLICA      the head                 Listening: the address that its front connects to
    ended/REPLICA     the head's host          HeadEnded: the exit status of that incarnation
    control/REPLICA   the head                 the address that ranks of other hosts connect to
    lease/REPLICA     the head                 see weft/group/meeting.py
    over              the front                the server ends with this exit status
    gone/HOST         the host                 it has read ``over``

An incarnation is a number that the front gives each start of a head. It is unique over all starts of all
servers. Entries of an older incarnation are ignored.
"""

from __future__ import annotations

import msgspec

MOST_BYTES = 16 << 20
"""Size of one frame at most."""


class Ask(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Client to board, at every look: the client's own entries, and the version of the table that it has."""

    number: int
    """Number of this question; the answer repeats it."""
    board: int
    version: int
    """``board`` and ``version`` of the last table received; the board does not send the same one again."""
    entries: dict[str, bytes]


class Table(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Board to client: the answer to one ``Ask``."""

    number: int
    board: int
    """Random id of the board's process."""
    version: int
    entries: dict[str, bytes]
    """All entries; empty when the client has this version already."""


class Listening(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Entry ``head/``: the head listens at ``address`` and begins to load."""

    incarnation: int
    address: str


class HeadEnded(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Entry ``ended/``: the head's process ended with ``status``, negative for a signal."""

    incarnation: int
    status: int


def settings_key(host: int | None = None, mark: str = "") -> str:
    """The key of one process; without ``mark`` or ``host`` the prefix of such keys."""
    return "settings/" if host is None else f"settings/{host}/{mark}"


def answer_key(host: int, mark: str) -> str:
    return f"answer/{host}/{mark}"


def gone_key(host: int) -> str:
    return f"gone/{host}"


def wanted_key(replica: int) -> str:
    return f"wanted/{replica}"


def head_key(replica: int) -> str:
    return f"head/{replica}"


def ended_key(replica: int) -> str:
    return f"ended/{replica}"


def control_key(replica: int) -> str:
    return f"control/{replica}"


def lease_key(replica: int) -> str:
    return f"lease/{replica}"


OVER = "over"
