"""Events and actions of ``TransferSender`` and ``TransferReceiver``."""

from __future__ import annotations

import msgspec

from weft.common.errors import ErrorInfo
from weft.types import transfer as r
from weft.types.transfer import Outcome, Peer, TransferKey


class _Record(msgspec.Struct, frozen=True):
    pass


# ---- events


class Open(_Record, frozen=True):
    """A Submit with transfer parameters arrived. ``peer``: the engine process at the other end."""

    key: TransferKey
    peer: Peer
    seconds: float
    """Maximum seconds of the transfer, counted from the first offer."""


class PeerMessage(_Record, frozen=True):
    """A message arrived from the engine process of another group."""

    peer: Peer
    message: r.TransferMessage


class PeerLost(_Record, frozen=True):
    """A process has ended: the owner reports the exit, or a new incarnation has answered and the old
    connections are closed.

    Never sent for less: silence is no proof.
    """

    peer: Peer


class Revoked(_Record, frozen=True):
    """``Revoke`` was carried out: the peer can no longer reach the local memory of the transfer."""

    key: TransferKey


class RankReport(_Record, frozen=True):
    """A local rank reports the outcome of the rank's part. ``pending``: the first bytes have moved."""

    key: TransferKey
    rank: int
    outcome: Outcome
    error: ErrorInfo | None = None


class RankStopped(_Record, frozen=True):
    """A local rank carried out ``StopRanks``: the rank touches no memory of the transfer any more."""

    key: TransferKey
    rank: int


class RankGone(_Record, frozen=True):
    """The process of a local rank has ended, and with the process all copies."""

    rank: int


class RankBack(_Record, frozen=True):
    """A new process replaces a lost rank and is ready."""

    rank: int


class Cancel(_Record, frozen=True):
    """This side cancels the transfer: the client left, the sequence ended, or the engine process drains."""

    key: TransferKey
    error: ErrorInfo


class TransferTick(_Record, frozen=True):
    """Time has passed; see ``next_due``."""


class Offer(_Record, frozen=True):
    """Sender: the scheduler admitted the sequence. ``num_cached``: positions of the sender's own prefix
    hit."""

    message: r.Admitted
    num_cached: int = 0


class Finished(_Record, frozen=True):
    """Sender: the whole prompt is computed, and the first tokens are sampled."""

    message: r.Metadata


class Reserve(_Record, frozen=True):
    """Receiver, answer to ``TransferWanted``: blocks are reserved. ``message`` names the blocks."""

    message: r.Bound


class Postpone(_Record, frozen=True):
    """Receiver, answer to ``TransferWanted``: no blocks are free now. The sender waits ``seconds``."""

    key: TransferKey
    seconds: float


class Refuse(_Record, frozen=True):
    """Receiver, answer to ``TransferWanted``: refused for good."""

    key: TransferKey
    error: ErrorInfo


Common = (
    Open
    | PeerMessage
    | PeerLost
    | Revoked
    | RankReport
    | RankStopped
    | RankGone
    | RankBack
    | Cancel
    | TransferTick
)
SenderEvent = Common | Offer | Finished
ReceiverEvent = Common | Reserve | Postpone | Refuse


# ---- actions


class SendToPeer(_Record, frozen=True):
    """Send a message to the engine process of another group. Dropped without a connection; the caller
    repeats."""

    peer: Peer
    message: r.TransferMessage


class Push(_Record, frozen=True):
    """Sender: each rank may push computed contents of the transfer, now and later, to the places in
    ``bound``.

    Positions before ``num_cached`` are in the sender's caches already. The first step with the sequence
    reports these positions as computed.
    """

    key: TransferKey
    offer: r.Admitted
    bound: r.Bound
    num_cached: int = 0


class Expect(_Record, frozen=True):
    """Receiver: each rank accepts the transfer's bytes, and reports."""

    key: TransferKey
    offer: r.Admitted
    bound: r.Bound


class StopRanks(_Record, frozen=True):
    """Each rank drops the transfer and touches no memory of the transfer any more. Answered with
    ``RankStopped``."""

    key: TransferKey


class TellScheduler(_Record, frozen=True):
    """Notify the scheduler of ``event``."""

    event: r.TransferEvent


class Revoke(_Record, frozen=True):
    """The peer does not answer a fence. End the peer's process, or the peer's access to the local memory.

    Answered with ``PeerLost`` or ``Revoked``, once either is proven. Only the memory of the transfer waits
    for the answer.
    """

    key: TransferKey
    peer: Peer


Action = SendToPeer | Push | Expect | StopRanks | TellScheduler | Revoke
