"""Messages between a supervisor and an API server, over a socket pair that the API server inherits."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import socket
from collections import deque
from collections.abc import Callable
from typing import Literal, TypeAlias

import msgspec

from weft.common.errors import DeadlineExceeded, ErrorInfo, ReportedError, Unavailable, WeftError
from weft.control.links.owner import Scaled
from weft.control.model_fronts import Use
from weft.control.processes.supervisor import Order

ALIVE_S = 1.0
"""Seconds between two ``FrontAlive`` messages."""
MOST_BYTES = 64 << 10
"""Maximum size of a message."""
VERDICT_S = 20.0
"""Maximum seconds between a command of an operator and the supervisor's verdict."""
MOST_USES = 32
"""Maximum number of models in one message: names may be long, and ``MOST_BYTES`` holds."""


class Load(msgspec.Struct, frozen=True, array_like=True):
    """One load of one model, in a server of several models; without a name in a server of one model."""

    model: str = ""
    number: int = 0


class FrontReady(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """API server to supervisor, once: ready for requests."""


class FrontAlive(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """API server to supervisor, every ``ALIVE_S`` seconds and when ``kept`` changes: the event loop runs."""

    kept: int = 0
    """Number of begun sequences at no engine, for instance paused streams."""


class DrainAsked(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """API server to supervisor: an operator requested a drain of the server by HTTP.

    The effect is that of SIGTERM.
    """


class GroupRevived(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """API server to supervisor: an operator revives the retired engines of a group by HTTP.

    ``name`` is a group or a single engine. ``request``: number of the command, for the verdict.
    """

    name: str
    request: int
    load: Load = Load()


class GroupsScaled(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """API server to supervisor: an operator changes the number of groups of one base name by HTTP."""

    base: str
    groups: int
    request: int
    load: Load = Load()


class GroupRemoved(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """API server to supervisor: an operator removes a group by HTTP.

    ``name`` is a group or a single engine.
    """

    name: str
    request: int
    load: Load = Load()


class GroupRestarted(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """API server to supervisor: an operator replaces the engines of a group in turn by HTTP; "" for all.

    ``topology``: text of a topology with new settings; "" keeps the settings.
    """

    name: str
    request: int
    topology: str = ""
    load: Load = Load()


class EngineLost(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """API server to supervisor: the API server has lost the connection to an engine process."""

    name: str
    incarnation: int
    error: ErrorInfo
    load: Load = Load()


class ModelAsked(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """API server to supervisor: an operator loads, unloads or pins a model by HTTP, or sets its time without
    a request until the unload."""

    model: str
    what: Literal["load", "unload", "pin", "unpin", "keep"]
    request: int
    seconds: float = 0.0
    """For ``keep``."""


class FrontJoins(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """API server to supervisor, once: may begin requests for models from now on."""


class ModelsUsed(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """API server to supervisor: ``Reported`` of ``weft.control.model_fronts``."""

    seen: int
    uses: dict[str, Use]


class ModelReady(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """API server to supervisor: ``LoadSeen`` of ``weft.control.model_fronts``."""

    load: Load
    cost: int = 0
    error: ErrorInfo | None = None


class Stop(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Supervisor to API server: finish open requests and end, or end now."""

    order: Order


class Verdict(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Supervisor to API server: the answer to a command of an operator."""

    request: int
    changes: Scaled = Scaled()
    error: ErrorInfo | None = None
    """Reason of a refusal; None after the changes have begun."""


Command: TypeAlias = GroupRevived | GroupRestarted | GroupsScaled | GroupRemoved
OfModels: TypeAlias = FrontJoins | ModelsUsed | ModelReady
FromFront: TypeAlias = FrontReady | FrontAlive | DrainAsked | Command | ModelAsked | OfModels | EngineLost
_from_front = msgspec.msgpack.Decoder(FromFront)
_to_front = msgspec.msgpack.Decoder(Stop | Verdict)


def channel() -> tuple[socket.socket, socket.socket]:
    """Return the supervisor's end and the API server's end of a new socket pair.

    The supervisor's end never blocks.
    """
    # SEQPACKET keeps message borders, so a received frame is a whole message.
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setblocking(False)
    return ours, theirs


def tell(link: socket.socket, order: Order) -> None:
    """Send an order to an API server. Never block or raise: a hung or dead API server is killed later."""
    answer(link, Stop(order))


def answer(link: socket.socket, message: Stop | Verdict) -> None:
    """Send a message to an API server. Never block or raise, see ``tell``."""
    with contextlib.suppress(OSError):
        link.send(msgspec.msgpack.encode(message))


def receive(link: socket.socket) -> list[FromFront] | None:
    """Return all messages since the last call, or None after the end of the API server. Never block.

    Raise MsgspecError for an invalid message.
    """
    messages: list[FromFront] = []
    while True:
        try:
            frame = link.recv(MOST_BYTES)
        except BlockingIOError:
            return messages
        except OSError:
            return None
        if not frame:
            # End of the stream. Deliver the last messages first; the next call returns None.
            return messages or None
        messages.append(_from_front.decode(frame))


class SupervisorLink:
    """The API server's end of the socket pair.

    Implement ``weft.front.front_server.FrontSupervisor``. Use from one event loop.
    """

    def __init__(self, link: socket.socket, serving: bool) -> None:
        """Take over the socket ``link``. ``serving``: see ``weft.front.front_server.FrontSupervisor``."""
        self.serving = serving
        link.setblocking(False)
        self._link = link
        self._unsent: deque[bytes] = deque()
        self._kept = 0
        self._numbers = itertools.count()
        self._verdicts: dict[int, asyncio.Future[Verdict]] = {}
        """Number of a command -> its verdict, for the commands without a verdict."""

    def attach(self, drain: Callable[[], None], stop: Callable[[], None]) -> None:
        """Register the callbacks for a drain and for a stop, and begin to send ``FrontAlive``.

        Call from the event loop. The end of the supervisor counts as a stop.
        """
        loop = asyncio.get_running_loop()

        def read() -> None:
            try:
                frame = self._link.recv(MOST_BYTES)
            except BlockingIOError:
                return
            except OSError:
                frame = b""
            if not frame:  # the supervisor has ended
                loop.remove_reader(self._link)
                self._fail_commands()
                return stop()
            message = _to_front.decode(frame)
            if isinstance(message, Verdict):
                self._decided(message)
            elif message.order == "drain":
                drain()
            else:
                stop()

        def live() -> None:
            self._say(FrontAlive(self._kept))
            loop.call_later(ALIVE_S, live)

        loop.add_reader(self._link, read)
        live()

    def keeps(self, kept: int) -> None:
        """Report the number of begun sequences at no engine. A repeated number is not sent."""
        if kept != self._kept:
            self._kept = kept
            self._say(FrontAlive(kept))

    def ready(self) -> None:
        """Report readiness for requests."""
        self._say(FrontReady())

    def drain(self) -> None:
        """Request a drain of the whole server."""
        self._say(DrainAsked())

    async def command(self, make: Callable[[int], Command | ModelAsked]) -> Scaled:
        """Send the command that ``make`` returns for a new number. Return the changes.

        Raise the supervisor's refusal, Unavailable if the supervisor ends, or DeadlineExceeded after
        ``VERDICT_S`` seconds.
        """
        number = next(self._numbers)
        verdict: asyncio.Future[Verdict] = asyncio.get_running_loop().create_future()
        self._verdicts[number] = verdict
        self._say(make(number))
        try:
            async with asyncio.timeout(VERDICT_S):
                found = await verdict
        except TimeoutError:
            raise DeadlineExceeded(
                "the supervisor did not answer in time; `weft status` shows whether the groups change"
            ) from None
        finally:
            del self._verdicts[number]
        if found.error is not None:
            raise ReportedError(found.error)
        return found.changes

    def _decided(self, verdict: Verdict) -> None:
        """Give a verdict to its command. A verdict after the deadline is dropped."""
        waiting = self._verdicts.get(verdict.request)
        if waiting is not None and not waiting.done():
            waiting.set_result(verdict)

    def _fail_commands(self) -> None:
        """Refuse all commands without a verdict, because the supervisor has ended."""
        refusal = Unavailable("the server is shutting down").info()
        for number in self._verdicts:
            self._decided(Verdict(number, error=refusal))

    @property
    def behind(self) -> bool:
        """True while the supervisor does not read, and messages wait."""
        return bool(self._unsent)

    def say(self, message: OfModels | EngineLost) -> None:
        """Send a report, after all earlier messages."""
        self._say(message)

    def _say(self, message: FromFront) -> None:
        """Send messages in order.

        Unsent messages wait for the next call; ``FrontAlive`` is dropped instead.
        """
        # A backlog proves that the supervisor is not reading; more signs of life would only grow the backlog.
        if not self._unsent or not isinstance(message, FrontAlive):
            self._unsent.append(msgspec.msgpack.encode(message))
        while self._unsent:
            try:
                self._link.send(self._unsent[0])
            # The buffer is full because the supervisor is suspended, or the supervisor has ended.
            except OSError:
                return
            self._unsent.popleft()


class LoadLink:
    """Commands of operators and reports of losses, for the engines of a server of one model, or of one load
    of a model. Implement ``weft.control.processes.process_registry.Commands``."""

    def __init__(self, link: SupervisorLink, load: Load = Load()) -> None:
        self._link, self._load = link, load

    async def revive(self, name: str) -> Scaled:
        """Start the retired engines of group ``name``, or engine ``name``. Return the changes. Raise as
        ``SupervisorLink.command``."""
        return await self._link.command(lambda number: GroupRevived(name, number, self._load))

    async def scale(self, base: str, groups: int) -> Scaled:
        """Change the number of groups of one base name. Return the changes. Raise as
        ``SupervisorLink.command``."""
        return await self._link.command(lambda number: GroupsScaled(base, groups, number, self._load))

    async def remove(self, name: str) -> Scaled:
        """Remove group ``name``, or engine ``name``. Return the changes. Raise as
        ``SupervisorLink.command``."""
        return await self._link.command(lambda number: GroupRemoved(name, number, self._load))

    async def restart(self, name: str, topology: str) -> Scaled:
        """Restart group ``name``, engine ``name``, or all engines (""), in turn. Return the changes. Raise as
        ``SupervisorLink.command``."""
        return await self._link.command(lambda number: GroupRestarted(name, number, topology, self._load))

    def report(self, name: str, incarnation: int, error: WeftError) -> None:
        """Report the loss of an engine process."""
        self._link.say(EngineLost(name, incarnation, error.info(), self._load))
