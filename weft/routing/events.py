"""Events that a fleet takes in, and actions that it asks for. Data only; see ``weft.routing.fleet``.

An instance keeps its name, and gets a new *link* (an integer) for each of its processes. Events of an old
link come from a process that was given up; they change nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, TypeAlias

from weft.common.errors import WeftError
from weft.routing.policy import PromptHashes
from weft.types.messages import Submit, ToFront, ToHead, TokenEvent

# -- events: what clients ask


class Opened(NamedTuple):
    """A client's request came: compute its sequences. Ask ``Fleet.refusal`` first."""

    submits: tuple[Submit, ...]
    hashes: Mapping[int, PromptHashes] = {}
    """Request id -> hashes of its prompt, where they were computed already."""
    pinned: str | None = None
    """The only instance that may compute the request, which fails when that instance is lost."""


class Closed(NamedTuple):
    """The text side ended these sequences, or their client left. Idempotent."""

    sequences: tuple[int, ...]


class Paused(NamedTuple):
    """The client does not read these sequences: they leave their instances until ``Resumed``. Idempotent."""

    sequences: tuple[int, ...]


class Resumed(NamedTuple):
    """The client reads these sequences again. Idempotent."""

    sequences: tuple[int, ...]


# -- events: what happens to instances


class Expected(NamedTuple):
    """A process of ``instance`` was started; ``link`` is the connection to it.

    ``domain``: of the instance, where the fleet began without it, since it was retired then.
    """

    instance: str
    link: int
    domain: str = ""


class Located(NamedTuple):
    """The address at which the process will listen is known."""

    instance: str
    link: int


class Linked(NamedTuple):
    """The connection to the process is up: it listens.

    Each further one is of another connection to the same process. Messages of either direction that the one
    before had not delivered are lost.
    """

    instance: str
    link: int


class Unreachable(NamedTuple):
    """The connection is broken, and could not be made again so far. ``Linked`` or ``Lost`` follows."""

    instance: str
    link: int


class Received(NamedTuple):
    """A message of the process came over ``link``."""

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
    """The front's own process stood still for ``seconds``, so silence of instances in that time proves
    nothing.
    """

    seconds: float


class Tick(NamedTuple):
    """Time passed; see ``Fleet.next_deadline``."""


class Closing(NamedTuple):
    """This front ends. ``shutdown``: its instances end with it."""

    shutdown: bool


Event: TypeAlias = (
    Opened
    | Closed
    | Paused
    | Resumed
    | Expected
    | Located
    | Linked
    | Unreachable
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
    """Send ``message`` over ``link``. Messages of one link stay in order."""

    instance: str
    link: int
    message: ToHead


class Deliver(NamedTuple):
    """Hand new events of open sequences to their readers. A sequence gets exactly one with ``finish``."""

    events: tuple[TokenEvent, ...]


class Replace(NamedTuple):
    """``instance`` is lost: its owner ends the rest of the process and answers with ``Expected`` for a new
    process, or ``Retired``.
    """

    instance: str
    error: WeftError


class Unlink(NamedTuple):
    """Close ``link``, which is not used any more."""

    instance: str
    link: int


class Complete(NamedTuple):
    """All instances have answered for the first time: accept requests."""


class Failed(NamedTuple):
    """No instance is left, and none will come back. Requests are refused from now on."""

    error: WeftError


Action: TypeAlias = Send | Deliver | Replace | Unlink | Complete | Failed
