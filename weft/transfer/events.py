"""Events and actions of ``SendingRooms`` and ``ReceivingRooms``."""

from __future__ import annotations

import msgspec

from weft.common.errors import ErrorInfo
from weft.types import rooms as r
from weft.types.rooms import Outcome, Peer, RoomKey


class _Record(msgspec.Struct, frozen=True):
    pass


# ---- events


class Open(_Record, frozen=True):
    """A Submit came that names a room. ``peer``: the head at its other end."""

    key: RoomKey
    peer: Peer
    seconds: float
    """That the room may take, from its first offer on."""


class Heard(_Record, frozen=True):
    """A message came from the head of another group."""

    peer: Peer
    message: r.RoomMessage


class PeerLost(_Record, frozen=True):
    """A process has ended: its owner says so, or another start of it has answered, and its connections are
    closed.

    To be given for nothing less: silence proves nothing.
    """

    peer: Peer


class Revoked(_Record, frozen=True):
    """``Revoke`` was carried out: the other end of this room cannot reach this side's memory any more."""

    key: RoomKey


class RankReport(_Record, frozen=True):
    """A rank of this group says how its part of a room stands; ``pending``: its first bytes moved."""

    key: RoomKey
    rank: int
    outcome: Outcome
    error: ErrorInfo | None = None


class RankStopped(_Record, frozen=True):
    """A rank of this group carried out ``Stop``: it touches nothing of the room any more."""

    key: RoomKey
    rank: int


class RankGone(_Record, frozen=True):
    """The process of a rank of this group has ended, and with it whatever it moved."""

    rank: int


class RankBack(_Record, frozen=True):
    """Another process has taken the place of a rank that was gone, and is ready."""

    rank: int


class Cancel(_Record, frozen=True):
    """This side needs the room no longer, or cannot go on: its client left, its sequence ended, it drains."""

    key: RoomKey
    error: ErrorInfo


class Tick(_Record, frozen=True):
    """Time has passed; see ``next_due``."""


class Offer(_Record, frozen=True):
    """Sender: the scheduler has admitted the sequence; ``num_cached`` positions are its own prefix hit."""

    message: r.Admitted
    num_cached: int = 0


class Finished(_Record, frozen=True):
    """Sender: the whole prompt is computed, and the first tokens are sampled."""

    message: r.Metadata


class Reserve(_Record, frozen=True):
    """Receiver, answer to ``RoomWanted``: blocks are reserved, where the message says."""

    message: r.Bound


class Postpone(_Record, frozen=True):
    """Receiver, answer to ``RoomWanted``: there is no room now."""

    key: RoomKey
    seconds: float


class Refuse(_Record, frozen=True):
    """Receiver, answer to ``RoomWanted``: this will never work."""

    key: RoomKey
    error: ErrorInfo


Common = Open | Heard | PeerLost | Revoked | RankReport | RankStopped | RankGone | RankBack | Cancel | Tick
SenderEvent = Common | Offer | Finished
ReceiverEvent = Common | Reserve | Postpone | Refuse


# ---- actions


class Send(_Record, frozen=True):
    """Sends a message to the head of another group, if there is a connection; it will be said again."""

    peer: Peer
    message: r.RoomMessage


class Push(_Record, frozen=True):
    """Sender: every rank may push what is computed of the room, and what will be, to where ``bound`` says.

    Positions before ``num_cached`` are in its caches already, and nobody will report them as computed.
    """

    key: RoomKey
    offer: r.Admitted
    bound: r.Bound
    num_cached: int = 0


class Expect(_Record, frozen=True):
    """Receiver: every rank is to take in the room's bytes, and to report."""

    key: RoomKey
    offer: r.Admitted
    bound: r.Bound


class Stop(_Record, frozen=True):
    """Every rank forgets the room and touches nothing of it any more; answered with ``RankStopped``."""

    key: RoomKey


class Tell(_Record, frozen=True):
    """Tells the scheduler of ``event``."""

    event: r.RoomEvent


class Revoke(_Record, frozen=True):
    """The other end does not answer a fence. End its process, or its access to this side's memory.

    Answered with ``PeerLost`` or ``Revoked``, whenever that is proven; nothing waits for it but this room's
    memory.
    """

    key: RoomKey
    peer: Peer


Action = Send | Push | Expect | Stop | Tell | Revoke
