"""The events of a fleet (input) and the actions of a fleet (output). Data only; see
``weft.control.fleet.fleet``.

An instance has one name for ever, and a new *link* (an integer) for each process. Events of an old link come
from a process already given up, and change nothing. Events of an instance that has left change nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, TypeAlias

from weft.common.errors import WeftError
from weft.control.fleet.policy import PromptHashes
from weft.types.handshake import EngineIdentity
from weft.types.messages import Submit, ToEngine, ToFront, TokenEvent

# -- events: requests of clients


class Opened(NamedTuple):
    """A client request arrived: compute the sequences. Ask ``Fleet.refusal`` first."""

    submits: tuple[Submit, ...]
    hashes: Mapping[int, PromptHashes] = {}
    """Request id -> hashes of the prompt, for prompts with hashes computed earlier."""
    pinned: str | None = None
    """The only instance allowed to compute the request. The loss of the instance fails the request."""
    begun: bool = False
    """True for a further sequence of a request that has begun."""


class Closed(NamedTuple):
    """The text side ended ``sequences``, or the client left. Idempotent."""

    sequences: tuple[int, ...]


class Paused(NamedTuple):
    """The client does not read these sequences. The sequences leave all instances until ``Resumed``.
    Idempotent."""

    sequences: tuple[int, ...]


class Resumed(NamedTuple):
    """The client reads ``sequences`` again. Idempotent."""

    sequences: tuple[int, ...]


class Held(NamedTuple):
    """The server is paused: new sequences wait for ``Released``, at no instance. Idempotent.

    With ``running``, open sequences leave all instances and wait, too. A later event cannot withdraw
    ``running``.
    """

    running: bool


class Released(NamedTuple):
    """The pause of the server has ended. Idempotent."""


class Versioned(NamedTuple):
    """New attempts go only to instances with version ``weights`` of the weights."""

    weights: int


class PauseShared(NamedTuple):
    """All instances get the state of the pause, see ``Hello.pause``. Instances that come later, too."""

    pause: str


# -- events: changes of instances


class Joined(NamedTuple):
    """``instance`` is a new member of the server. ``Expected`` follows with the first process.

    ``expert_group`` is the expert-parallel group of the instance; "" means no group. A name that is already a
    member changes nothing.
    """

    instance: str
    expert_group: str = ""


class Left(NamedTuple):
    """``instance`` is no longer a member of the server.

    The instance gets no new sequences. ``Forget`` follows after the end of the open sequences. Unknown names
    change nothing.
    """

    instance: str


class Expected(NamedTuple):
    """A process of ``instance`` was started; ``link`` is the connection to the process.

    ``expert_group`` is the expert-parallel group of an instance that was retired when the fleet began; else
    "". ``identity``: of the process, if the process can tell its identity; else None.
    """

    instance: str
    link: int
    expert_group: str = ""
    identity: EngineIdentity | None = None


class Located(NamedTuple):
    """The address at which the process will listen is known."""

    instance: str
    link: int


class Linked(NamedTuple):
    """The connection to the process is up, so the process listens.

    Each further event announces another connection to the same process. Undelivered messages of the former
    connection are lost, in both directions.
    """

    instance: str
    link: int


class Unreachable(NamedTuple):
    """The connection is broken, and all tries to reconnect failed so far. ``Linked`` or ``Lost`` follows."""

    instance: str
    link: int


class Received(NamedTuple):
    """A message of the process came over ``link``."""

    instance: str
    link: int
    message: ToFront


class Lost(NamedTuple):
    """The process ended, or the connection broke."""

    instance: str
    link: int
    error: WeftError


class Retired(NamedTuple):
    """No process of ``instance`` will be started again."""

    instance: str
    error: WeftError


class Draining(NamedTuple):
    """``instance`` finishes the present sequences, and gets no new sequences."""

    instance: str


class Undrained(NamedTuple):
    """The planned restart of ``instance`` is cancelled: the same process takes new sequences again."""

    instance: str


class Stalled(NamedTuple):
    """The API server's own process stood still for ``seconds``. Silence of instances in this time proves
    nothing."""

    seconds: float


class Tick(NamedTuple):
    """Time passed; see ``Fleet.next_deadline``."""


class Closing(NamedTuple):
    """The API server ends. With ``shutdown``, all instances end, too."""

    shutdown: bool


Event: TypeAlias = (
    Opened
    | Closed
    | Paused
    | Resumed
    | Held
    | Released
    | Versioned
    | PauseShared
    | Joined
    | Left
    | Expected
    | Located
    | Linked
    | Unreachable
    | Received
    | Lost
    | Retired
    | Draining
    | Undrained
    | Stalled
    | Tick
    | Closing
)

# -- actions


class Send(NamedTuple):
    """Send ``message`` over ``link``. Messages of one link stay in order."""

    instance: str
    link: int
    message: ToEngine


class Deliver(NamedTuple):
    """Deliver new events of open sequences to the readers. Each sequence gets exactly one event with
    ``finish``."""

    events: tuple[TokenEvent, ...]


class Replace(NamedTuple):
    """``instance`` is lost. The owner of the process ends the remains, and answers with ``Expected`` for a
    new process or with ``Retired``."""

    instance: str
    error: WeftError


class Unlink(NamedTuple):
    """Close ``link``, which is no longer used."""

    instance: str
    link: int


class Forget(NamedTuple):
    """``instance`` has left: the last sequence there has ended. Close the link and drop the name."""

    instance: str


class Complete(NamedTuple):
    """All instances have answered for the first time, or enough for a start: accept requests."""


class Failed(NamedTuple):
    """No instance is left, and none will come back. Requests are refused from now on."""

    error: WeftError


Action: TypeAlias = Send | Deliver | Replace | Unlink | Forget | Complete | Failed
