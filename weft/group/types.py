"""Events and actions of ``Membership``: changes of a group, and instructions to the shell."""

from __future__ import annotations

from typing import Literal

import msgspec

from weft.common.errors import EngineDead, WeftError
from weft.types import frames as f
from weft.types.weights import WeightsUpdate


class GroupLost(EngineDead):
    """A group cannot continue in the present form. Surviving ranks have stopped and retain all weights.

    ``rank`` is the rank at fault; None if the fault is unknown, or if no rank is at fault (a broken link).
    ``refused`` is True if the rank cannot load with the given configuration.
    """

    def __init__(self, rank: int | None, reason: str, refused: bool = False) -> None:
        who = "a rank" if rank is None else f"rank {rank}"
        super().__init__(f"{who} of the group is lost: {reason}")
        self.rank, self.reason, self.refused = rank, reason, refused


class Lease(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Lease of one engine process, visible to all engine processes of the expert-parallel group."""

    incarnation: str
    """Random incarnation of the engine process."""
    epoch: int
    """The proposed epoch; with ``begun``, the running epoch."""
    begun: bool
    wakeup: str = ""
    """Address of the wake-up socket."""
    stores: str = ""
    """Prefix of rendezvous store addresses. Only the prefix of replica 0 is used."""


class _Word(msgspec.Struct, frozen=True):
    pass


# ---- events


class FrameReceived(_Word, frozen=True):
    """A frame arrived. ``peer`` is the channel's name of the sending process."""

    peer: bytes
    frame: f.ToEngine


class Garbled(_Word, frozen=True):
    """Bytes arrived and are not a frame of this version."""

    peer: bytes
    error: f.FrameError


class Read(_Word, frozen=True):
    """All received frames, or all received heartbeats, have been delivered. A late rank has sent nothing."""

    heartbeats: bool = False


class Gone(_Word, frozen=True):
    """The process of a rank has ended or cannot be reached. ``how`` says how."""

    rank: int
    how: str


class Spawned(_Word, frozen=True):
    """``Spawn`` is done. ``outlived``: the process already ran under an earlier engine process."""

    rank: int
    outlived: bool


class Own(_Word, frozen=True):
    """Load stage of this rank. A rank reads no frames while loading or allocating."""

    stage: Literal["started", "loading", "loaded", "ready"]
    blocks: tuple[int, ...] = ()
    """Number of blocks in each pool for which this rank has memory, once the rank has loaded."""


class Connected(_Word, frozen=True):
    """The action ``Connect`` is done."""

    epoch: int


class OwnOutcome(_Word, frozen=True):
    """A step has ended on this rank. ``checksum`` covers the sampled tokens."""

    step: int
    checksum: int


class OwnFailure(_Word, frozen=True):
    """A step or ``Connect`` failed on this rank. ``collective``: another rank may be at fault."""

    epoch: int
    message: str
    collective: bool


class LeasesRead(_Word, frozen=True):
    """Leases of all engine processes of the expert-parallel group, by replica. None: no lease so far."""

    leases: tuple[Lease | None, ...]


class Resume(_Word, frozen=True):
    """The engine has dropped all steps, so the group can be formed again."""

    lost: GroupLost


class WeightsChosen(_Word, frozen=True):
    """The group computes with new weights from now on. ``updates``: what a rank needs after a start."""

    updates: tuple[WeightsUpdate, ...]


class Unable(_Word, frozen=True):
    """An action failed permanently. ``Membership`` ends the group with ``error``."""

    error: WeftError


class Close(_Word, frozen=True):
    """The last event. ``dismiss``: the ranks must end as well. ``leave``: except the ranks of other hosts,
    which wait for the next engine process."""

    dismiss: bool
    leave: bool = False


Event = (
    FrameReceived | Garbled | Read | Gone | Spawned | Own | Connected | OwnOutcome | OwnFailure | LeasesRead
) | (Resume | WeightsChosen | Unable | Close)


# ---- actions


class SendFrame(_Word, frozen=True):
    """Send a frame. With a ``rank``, the shell reports a failure with ``Gone``."""

    peer: bytes
    frame: f.ToRank
    rank: int | None = None


class Spawn(_Word, frozen=True):
    """Start the process of a rank on this host unless running. ``anew``: end a running process first.

    The shell reports the result with ``Spawned`` or ``Unable``.
    """

    rank: int
    anew: bool


class Connect(_Word, frozen=True):
    """Empty the slots and connect the communicators of this rank for an epoch.

    The shell reports ``Connected`` or ``OwnFailure`` within a bounded time.
    """

    epoch: int
    store: str
    """Address at which the ranks meet; empty: no rank connects."""
    wakeups: tuple[str, ...]
    """Wake-up address of each engine process of the expert-parallel group."""


class Abort(_Word, frozen=True):
    """Close the communicators of this rank. Every wait in a collective ends."""


class Renew(_Word, frozen=True):
    """Write the lease of this engine process."""

    lease: Lease


class TellEngine(_Word, frozen=True):
    """Hand a rank's report about a transfer, a KV tier, or new weights to the engine."""

    frame: f.ReportToEngine


Action = SendFrame | Spawn | Connect | Abort | Renew | TellEngine
