"""What happens to a fleet, and what it wants done. Data only; see ``weft.routing.fleet``.

An instance has a name for life and a new *link* (an integer) for each of its processes: what comes over an
old link is of a process that was given up, and changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, TypeAlias

from weft.common.errors import WeftError
from weft.routing.policy import PromptHashes
from weft.types.messages import Submit, ToFront, ToHead, TokenEvent

# -- events: what clients ask


class Opened(NamedTuple):
    """A request of a client: its sequences are to be computed. See ``Fleet.refusal`` first."""

    submits: tuple[Submit, ...]
    hashes: Mapping[int, PromptHashes] = {}
    """Request id -> hashes of its prompt, where they were computed already."""
    pinned: str | None = None
    """The only instance that may compute it; it ends with that instance."""


class Closed(NamedTuple):
    """Nobody wants these sequences any more: the text side ended them, or the client left. Idempotent."""

    sequences: tuple[int, ...]


class Paused(NamedTuple):
    """Nobody reads these sequences: they leave their instances until ``Resumed``. Idempotent."""

    sequences: tuple[int, ...]


class Resumed(NamedTuple):
    """They are read again. Idempotent."""

    sequences: tuple[int, ...]


# -- events: what happens to instances


class Expected(NamedTuple):
    """A process of ``instance`` was started; it is, or will be, connected to over ``link``.

    ``relinked``: it is the process that was there, over another link.
    """

    instance: str
    link: int
    relinked: bool = False


class Located(NamedTuple):
    """It is known where the process will listen."""

    instance: str
    link: int


class Linked(NamedTuple):
    """There is a connection, so the process listens."""

    instance: str
    link: int


class Received(NamedTuple):
    """A message came."""

    instance: str
    link: int
    message: ToFront


class Lost(NamedTuple):
    """The process ended, or its connection broke."""

    instance: str
    link: int
    error: WeftError


class Retired(NamedTuple):
    """No process of ``instance`` will be started again."""

    instance: str
    error: WeftError


class Draining(NamedTuple):
    """``instance`` finishes what it has, and gets nothing new."""

    instance: str


class Stalled(NamedTuple):
    """This process itself stood still for ``seconds``: silence in that time proves nothing."""

    seconds: float


class Tick(NamedTuple):
    """Time passed; see ``Fleet.next_deadline``."""


class Closing(NamedTuple):
    """This front ends. ``shutdown``: the instances end with it."""

    shutdown: bool


Event: TypeAlias = (
    Opened
    | Closed
    | Paused
    | Resumed
    | Expected
    | Located
    | Linked
    | Received
    | Lost
    | Retired
    | Draining
    | Stalled
    | Tick
    | Closing
)

# -- actions


class Send(NamedTuple):
    """``message`` leaves over ``link``; messages of one link stay in order."""

    instance: str
    link: int
    message: ToHead


class Deliver(NamedTuple):
    """New events of open sequences, for whoever reads them. A sequence gets exactly one with ``finish``."""

    events: tuple[TokenEvent, ...]


class Replace(NamedTuple):
    """``instance`` is lost: its owner ends what is left of the process and answers ``Expected`` for another
    one, or ``Retired``.
    """

    instance: str
    error: WeftError


class Unlink(NamedTuple):
    """``link`` is of no use any more: it is closed."""

    instance: str
    link: int


class Complete(NamedTuple):
    """All instances have answered for the first time: requests may come."""


class Failed(NamedTuple):
    """No instance is left, and none will come back. Requests are refused from now on."""

    error: WeftError


Action: TypeAlias = Send | Deliver | Replace | Unlink | Complete | Failed
