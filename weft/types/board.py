"""What the hosts of one server tell each other about heads: entries of a board that host 0 keeps.

    key             who writes it            what it says
    settings/HOST/  the host, when it comes  what all hosts must have alike; of each of its processes (MARK)
    answer/HOST/    the front                empty: that one may work; else why not
    wanted/REPLICA  the front                the incarnation that this replica's head should be in; 0: none
    head/REPLICA    the head                 Listening: where its front finds it
    ended/REPLICA   the head's host          Ended: how that incarnation ended
    control/REPLICA the head                 where ranks of other hosts find it
    lease/REPLICA   the head                 see weft/group/meeting.py
    over            the front                the server ends, with this status
    gone/HOST       the host                 it has read that

An incarnation is a number that the front gives a head: of all starts, in all servers, another one. What is
said of an older incarnation is nothing to anybody.
"""

from __future__ import annotations

import msgspec

MOST_BYTES = 16 << 20
"""Of one frame."""


class Ask(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """To the board: these entries are so, and how is the rest?"""

    number: int
    """The answer says it again."""
    board: int
    version: int
    """Of the last table that came, and whose: the same one is not sent again."""
    entries: dict[str, bytes]


class Table(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The board's answer."""

    number: int
    board: int
    """Which board this is, drawn by chance."""
    version: int
    entries: dict[str, bytes]
    """All of them; none when nothing has changed."""


class Listening(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A head listens, and begins to load."""

    incarnation: int
    address: str


class Ended(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A head's process ended."""

    incarnation: int
    status: int


def settings_key(host: int | None = None, mark: str = "") -> str:
    """Without ``mark``, or without ``host``: what such keys begin with."""
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
