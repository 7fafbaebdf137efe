"""Events and actions of ``Membership``: what happens to a group, and what its head is to do."""

from __future__ import annotations

from typing import Literal

import msgspec

from weft.common.errors import EngineDead, WeftError
from weft.types import frames as f


class GroupLost(EngineDead):
    """A group cannot go on as it is. Its ranks that still run have stopped, with weights kept.

    ``rank``: who is at fault; None when it cannot be told, or nobody is (a link that broke).
    ``refused``: whether that rank cannot load as it is configured.
    """

    def __init__(self, rank: int | None, reason: str, refused: bool = False) -> None:
        who = "a rank" if rank is None else f"rank {rank}"
        super().__init__(f"{who} of the group is lost: {reason}")
        self.rank, self.reason, self.refused = rank, reason, refused


class Lease(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the head of a replica tells the heads of its domain about itself."""

    incarnation: str
    """Of its process, drawn by chance."""
    epoch: int
    """That it would begin or, if ``begun``, is in."""
    begun: bool
    wakeup: str = ""
    """The address where it is woken."""
    stores: str = ""
    """What the addresses of stores begin with that heads meet at, if this one is the first of all heads."""


class _Word(msgspec.Struct, frozen=True):
    pass


# ---- events


class Received(_Word, frozen=True):
    """A frame came, from the process that the channel calls ``peer``."""

    peer: bytes
    frame: f.ToHead


class Garbled(_Word, frozen=True):
    """Bytes came that are no frame of this version."""

    peer: bytes
    error: f.FrameError


class Read(_Word, frozen=True):
    """All frames that had come were given, or all heartbeats: whoever is late now has sent nothing."""

    heartbeats: bool = False


class Gone(_Word, frozen=True):
    """The process of a rank has ended, or cannot be reached."""

    rank: int
    how: str


class Spawned(_Word, frozen=True):
    """``Spawn`` was carried out. ``outlived``: the process ran already, under the head before this one."""

    rank: int
    outlived: bool


class Own(_Word, frozen=True):
    """How far this rank is. While it is loading, and until it is ready, it reads no frames."""

    stage: Literal["started", "loading", "loaded", "ready"]
    blocks: tuple[int, ...] = ()
    """Of each pool, that it has room for, once it is loaded."""


class Connected(_Word, frozen=True):
    """The action ``Connect`` was carried out."""

    epoch: int


class OwnOutcome(_Word, frozen=True):
    """A step has ended on this rank."""

    step: int
    checksum: int


class OwnFailure(_Word, frozen=True):
    """A step, or ``Connect``, failed on this rank. ``collective``: another rank may be at fault."""

    epoch: int
    message: str
    collective: bool


class LeasesRead(_Word, frozen=True):
    """The leases of all heads of the domain, by replica; None of one that never had any."""

    leases: tuple[Lease | None, ...]


class Resume(_Word, frozen=True):
    """The engine has dropped its steps: the group can be formed anew."""

    lost: GroupLost


class Unable(_Word, frozen=True):
    """An action could not be carried out, and nothing will help."""

    error: WeftError


class Close(_Word, frozen=True):
    """The last event. ``dismiss``: the ranks are to end, too."""

    dismiss: bool


Event = (
    Received | Garbled | Read | Gone | Spawned | Own | Connected | OwnOutcome | OwnFailure | LeasesRead
) | (Resume | Unable | Close)


# ---- actions


class Send(_Word, frozen=True):
    """Sends a frame. Where ``rank`` is given, a failure is answered with ``Gone``."""

    peer: bytes
    frame: f.ToRank
    rank: int | None = None


class Spawn(_Word, frozen=True):
    """Starts the process of a rank on this host, unless it runs. ``anew``: ends the one that runs first.

    Answered with ``Spawned``, or ``Unable``.
    """

    rank: int
    anew: bool


class Connect(_Word, frozen=True):
    """Empties this rank's slots and connects its communicators for an epoch.

    Answered with ``Connected`` or ``OwnFailure``, in a time that has a bound.
    """

    epoch: int
    store: str
    """Where ranks meet."""
    wakeups: tuple[str, ...]
    """Where each head of the domain is woken."""


class Abort(_Word, frozen=True):
    """Ends this rank's communicators: whoever waits in a collective is free."""


class Renew(_Word, frozen=True):
    """Writes this head's lease."""

    lease: Lease


class Told(_Word, frozen=True):
    """A rank of this group says something of a room."""

    frame: f.RoomToHead


Action = Send | Spawn | Connect | Abort | Renew | Told
