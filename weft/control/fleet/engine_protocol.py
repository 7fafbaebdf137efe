"""The engine's side of the messages: the connected API servers, and the owner of each live sequence. No I/O.

Each Submit gets exactly one event with ``finish``, unless the API server sent a later attempt or left. An API
server that is gone, or does not read, loses its own sequences and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol, TypeAlias

import msgspec

from weft.common.errors import EngineDead, InvalidRequest, NotGreeted, PixelsLost, Unavailable, WeftError
from weft.common.shared_bytes import SharedName
from weft.control.fleet.prefix_index import PrefixReports
from weft.kv.prefix_log import PrefixLog
from weft.types import messages as m
from weft.types.adapters import AdapterChanged
from weft.types.handshake import IDENTITY_SINCE, EngineIdentity, no_common_version_text, wrong_engine_text
from weft.types.weights import WeightsChanged

Outgoing: TypeAlias = list[tuple[bytes, m.ToFront]]
"""(connection of an API server, message), in sending order."""


class EngineInterface(Protocol):
    """The engine behind the protocol. See ``weft.engine.core.EngineCore``."""

    @property
    def recovering(self) -> bool: ...

    def submit(self, submit: m.Submit) -> list[m.TokenEvent]: ...

    def finish(self, sequence: int) -> list[m.TokenEvent]: ...

    def has_work(self) -> bool: ...

    def stats(self) -> m.EngineStats: ...

    def welcome(self, incarnation: int) -> m.Welcome: ...

    def follow_prefixes(self) -> tuple[PrefixLog, int] | None: ...


class AdapterLoader(Protocol):
    """Loads and drops LoRA adapters. See ``weft.engine.adapters``."""

    def begin(self, message: m.ToAdapters) -> AdapterChanged | None:
        """Return the answer, or None: then ``finished`` has the answer later."""

    def finished(self) -> list[AdapterChanged]:
        """Return the answers to loads that have ended since the last call."""


class WeightsLoader(Protocol):
    """Stages and uses new weights. See ``weft.engine.weights.engine_weights``."""

    def begin(self, message: m.ToWeights) -> None:
        """Carry out a message. ``finished`` has the answer later."""

    def finished(self) -> list[WeightsChanged]:
        """Return the answers since the last call."""

    def leave(self) -> None:
        """Cancel the change that the sender of the last message has begun: this API server is gone."""


class Pixels(Protocol):
    """Resolver of images passed by name. See ``weft.engine.server.engine_server``."""

    @property
    def probe(self) -> SharedName | None: ...

    def take(self, submit: m.Submit) -> m.Submit: ...


class _Front(NamedTuple):
    name: str
    """The name of the API server, the same for all connections of the server."""
    quiet: bool
    """True if the API server wants heartbeats only while owning sequences."""
    version: int
    """Version of the messages to the API server."""
    pause: str | None = None
    """``Hello.pause`` of the last Hello."""


class _Owner(NamedTuple):
    front: bytes
    attempt: int


MOST_PAUSE = 200
"""Maximum characters of a ``Hello.pause``."""
FRAME_BYTES = 16 << 20
"""Bytes of logprobs and routes above which the events of one step are sent as several messages."""


def _stamp(pause: str) -> tuple[int, str]:
    """Return (number, name) of the change in ``Hello.pause``, to compare which change is later. Return
    (-1, "") for an invalid text, which is earlier than every change."""
    number, _, rest = pause.partition(" ")
    return (int(number), rest.partition(" ")[0]) if number.isascii() and number.isdigit() else (-1, "")


def _frames(events: list[m.TokenEvent]) -> Iterator[tuple[m.TokenEvent, ...]]:
    """Yield ``events`` in order, in parts with about ``FRAME_BYTES`` of logprobs and routes."""
    part, size = list[m.TokenEvent](), 0
    for event in events:
        part.append(event)
        columns = (event.logprobs, event.prompt_logprobs)
        size += sum(one.nbytes for one in columns if one is not None)
        size += 0 if event.routes is None else len(event.routes.ids)
        if size > FRAME_BYTES:
            yield tuple(part)
            part, size = [], 0
    if part:
        yield tuple(part)


class EngineProtocol:
    """State machine of one engine process. A connection (bytes) identifies an API server."""

    def __init__(
        self,
        engine: EngineInterface,
        incarnation: int,
        pixels: Pixels | None = None,
        identity: EngineIdentity | None = None,
        adapters: AdapterLoader | None = None,
        weights: WeightsLoader | None = None,
    ) -> None:
        """Create the protocol without connections.

        ``incarnation`` goes into every Welcome. ``pixels`` is None if images always come as bytes.
        ``identity``: API servers that want another engine are refused; None refuses nobody.
        ``adapters``: None for an engine without LoRA adapters. ``weights``: None for an engine without
        weights.
        """
        self._weights = weights
        self._weights_front = b""
        """Connection that sent the last message about weights."""
        self._adapters = adapters
        self._loading: dict[str, list[bytes]] = {}
        """Connections that wait for the load of an adapter, by digest."""
        self._identity = identity
        self._engine = engine
        self._pixels = pixels
        self._incarnation = incarnation
        self._fronts: dict[bytes, _Front] = {}
        self._pause = ""
        """The latest state of the pause, for API servers that share no other process."""
        self._owners: dict[int, _Owner] = {}
        """Owner (API server and attempt) of each live sequence."""
        self.prefixes = PrefixReports(engine)
        self.bad_frames = 0
        self.draining = False
        """True if new sequences are refused."""
        self.stopped = False
        """True once the engine process was asked to end."""

    @property
    def live(self) -> bool:
        """True if a sequence of any API server is live."""
        return bool(self._owners)

    def on(self, front: bytes, message: m.ToEngine) -> Outgoing:
        """Handle a message of the connection ``front`` and return the messages to send, to any connection.

        May start or finish sequences in the engine, and set ``draining`` or ``stopped``. A message before
        Hello counts in ``bad_frames``; a Submit among them is rejected. A Shutdown needs no Hello.
        """
        if isinstance(message, m.Hello):
            return self._hello(front, message)
        if isinstance(message, m.Shutdown):
            # A sender that has closed is forgotten: the answer to the Hello before could not be sent.
            self.stopped = True
        elif front not in self._fronts:
            self.bad_frames += 1
            if isinstance(message, m.Submit):  # the API server was dropped because it did not read
                return self._reject(front, message, NotGreeted("Hello must be the first message"))
        elif isinstance(message, m.Submit):
            return self._submit(front, message)
        elif isinstance(message, m.Finish):
            if message.sequence in self._owners and self._owners[message.sequence].front == front:
                return self.events(self._engine.finish(message.sequence))
        elif isinstance(message, m.WatchPrefixes):
            return list(self.prefixes.watch(front))
        elif isinstance(message, m.Drain):
            self.draining = True
        elif isinstance(message, m.Goodbye):
            self.forget(front)
        elif isinstance(message, m.ToAdapters):
            return self._begin_adapter_change(front, message)
        elif isinstance(message, m.ToWeights):
            self._weights_front = front
            if self._weights is None:
                error = InvalidRequest("the engine takes no new weights").info()
                return [(front, WeightsChanged(version=0, error=error))]
            self._weights.begin(message)
        return []  # the step loop handles Profile and FlushTier

    def events(self, events: Sequence[m.TokenEvent], step: int = -1) -> Outgoing:
        """Return the engine's events of ``step`` as one message to each API server, with the attempt of each
        sequence. A final event also removes the sequence. Events of unknown sequences are dropped.
        """
        by_front: dict[bytes, list[m.TokenEvent]] = {}
        for event in events:
            owner = self._owners.get(event.sequence)
            # The API server left, or a later attempt has already ended the sequence.
            if owner is None:
                continue
            if owner.attempt:
                event = msgspec.structs.replace(event, attempt=owner.attempt)
            by_front.setdefault(owner.front, []).append(event)
            if event.finish is not None:
                del self._owners[event.sequence]
        return [
            (front, m.Tokens(step=step, events=part))
            for front, each in by_front.items()
            for part in _frames(each)
        ]

    def heartbeats(self) -> Outgoing:
        """Return a heartbeat for each API server, and the changes of the prefix cache.

        Quiet API servers get a heartbeat only while their sequences run.
        """
        versions = {front.version for front in self._fronts.values()}
        by_version = {version: self._heartbeat(version) for version in versions}
        busy = {owner.front for owner in self._owners.values()}
        heartbeats: Outgoing = [
            (name, by_version[front.version])
            for name, front in self._fronts.items()
            if name in busy or not front.quiet
        ]
        return [*self.prefixes.changes(), *heartbeats]

    def failed(self, error: WeftError) -> Outgoing:
        """Return the messages about a failed engine.

        Sequences get no final event: the API server may continue the sequences elsewhere.
        """
        return [(front, m.EngineFailed(error=error.info())) for front in self._fronts]

    def forget(self, front: bytes) -> None:
        """Drop a lost API server: finish all its sequences, and cancel its update of the weights.
        Idempotent."""
        known = self._fronts.pop(front, None)
        if known is not None and front == self._weights_front and self._weights is not None:
            self._weights.leave()
        self.prefixes.forget(front)
        for sequence in [s for s, owner in self._owners.items() if owner.front == front]:
            del self._owners[sequence]
            self._engine.finish(sequence)

    def _hello(self, front: bytes, hello: m.Hello) -> Outgoing:
        """Accept an API server and return Welcome and heartbeat.

        A former connection of the same API server is forgotten, with its sequences. Without a common version,
        or if the API server wants another engine, return EngineFailed instead and accept nothing. The API
        server may have another connection to this engine, so a refusal must not forget that connection.
        """
        version, identity = m.common_version(hello.versions), self._identity
        if version is None:
            apart = no_common_version_text((m.OLDEST, m.VERSION), hello.versions, "engine")
            return [(front, m.EngineFailed(error=EngineDead(apart).info()))]
        if identity is not None and hello.engine is not None and not hello.engine.is_same(identity):
            return [
                (front, m.EngineFailed(error=EngineDead(wrong_engine_text(hello.engine, identity)).info()))
            ]
        for former in [other for other in self._fronts if other != front and self._named(other, hello.front)]:
            self.forget(former)  # the former connection broke, unnoticed so far
        pause = hello.pause if hello.pause is None or len(hello.pause) <= MOST_PAUSE else None
        self._fronts[front] = _Front(hello.front, hello.quiet, version, pause)
        answers: Outgoing = [(front, self._welcome(front)), (front, self._heartbeat(version))]
        if pause is None or _stamp(pause) <= _stamp(self._pause):
            return answers
        self._pause = pause
        others = [other for other, one in self._fronts.items() if other != front and one.pause is not None]
        return [(front, self._welcome(front)), answers[1], *((one, self._welcome(one)) for one in others)]

    def _welcome(self, front: bytes) -> m.Welcome:
        """Return the description of the engine for one API server."""
        welcome = self._engine.welcome(self._incarnation)
        if self._fronts[front].version >= IDENTITY_SINCE:
            welcome = msgspec.structs.replace(welcome, engine=self._identity)
        if self._pixels is not None:
            welcome = msgspec.structs.replace(welcome, probe=self._pixels.probe)
        if not self._pause or self._fronts[front].pause is None:
            return welcome
        behind = tuple(
            one.name
            for other, one in self._fronts.items()
            if other != front and one.pause is not None and _stamp(one.pause) < _stamp(self._pause)
        )
        return msgspec.structs.replace(welcome, pause=self._pause, behind=behind)

    def _submit(self, front: bytes, submit: m.Submit) -> Outgoing:
        """Submit a sequence to the engine and return its events.

        Errors become final events: nothing is raised.

        A later attempt replaces a running one. A duplicate or an earlier attempt is counted in ``bad_frames``
        and dropped. Lost pixels end the attempt as "evicted", so that the API server sends the pixels again.
        """
        owner = self._owners.get(submit.sequence)
        try:
            # Sequence ids come from API servers, so two servers may clash.
            if owner is not None and owner.front != front:
                raise Unavailable("another API server uses this sequence id")
            if owner is not None and submit.attempt <= owner.attempt:
                self.bad_frames += 1  # a duplicate or a late message: an answer would end the running attempt
                return []
            if owner is not None:
                del self._owners[submit.sequence]
                self._engine.finish(submit.sequence)
            if self.draining:
                raise Unavailable("the server is shutting down")
            events = self._engine.submit(self._with_pixels(submit))
        except PixelsLost as error:  # the API server still has the pixels and sends them again
            return self._reject(front, submit, error, "evicted")
        except (ValueError, msgspec.ValidationError):
            return self._reject(front, submit, InvalidRequest("the request is malformed"))
        except WeftError as error:
            return self._reject(front, submit, error)
        self._owners[submit.sequence] = _Owner(front, submit.attempt)
        return self.events(events)

    def _begin_adapter_change(self, front: bytes, message: m.ToAdapters) -> Outgoing:
        """Load or drop a LoRA adapter. Return the answer, if there is one already; ``adapters_changed`` has
        the other answers. An engine without adapters answers with an error."""
        if self._adapters is None:
            error = InvalidRequest("the engine takes no LoRA adapters", param="adapter").info()
            return [(front, AdapterChanged(digest=message.digest, loaded=False, error=error))]
        answer = self._adapters.begin(message)
        if answer is not None:
            # A drop ends a load: the error of the old load must not answer a load that follows.
            return [*self.adapters_changed(), (front, answer)]
        self._loading.setdefault(message.digest, []).append(front)
        return []

    def adapters_changed(self) -> Outgoing:
        """Return the answers to loads of adapters that have ended since the last call."""
        if not self._loading or self._adapters is None:
            return []
        answers: Outgoing = []
        for answer in self._adapters.finished():
            waiting = self._loading.pop(answer.digest, [])
            answers += [(front, answer) for front in waiting if front in self._fronts]
        return answers

    def weights_changed(self) -> Outgoing:
        """Return the answers about weights since the last call, and reports of changes to all other API
        servers, except those of earlier releases."""
        if self._weights is None or not self._weights_front:
            return []
        answers: Outgoing = []
        for answer in self._weights.finished():
            if self._weights_front in self._fronts:
                answers.append((self._weights_front, answer))
            if answer.staged or answer.error is not None:
                continue
            report = WeightsChanged(version=answer.version, name=answer.name)
            others = [name for name, one in self._fronts.items() if one.version >= m.REPORTS_SINCE]
            answers += [(name, report) for name in others if name != self._weights_front]
        return answers

    def _named(self, connection: bytes, name: str) -> bool:
        """Return True if the connection belongs to the API server ``name``."""
        return bool(name) and self._fronts[connection].name == name

    def _with_pixels(self, submit: m.Submit) -> m.Submit:
        """Return ``submit`` with the pixels passed by name.

        Raise PixelsLost for missing pixels, and ValueError if the engine resolves no names.
        """
        if self._pixels is not None:
            return self._pixels.take(submit)
        if any(item.shared is not None for item in submit.media):
            raise ValueError("pixels by name are not supported here")
        return submit

    def _reject(self, front: bytes, submit: m.Submit, error: WeftError, finish: str = "error") -> Outgoing:
        """Return the terminal event of a Submit that was not accepted."""
        event = m.TokenEvent(
            sequence=submit.sequence, attempt=submit.attempt, finish=finish, error=error.info()
        )
        return [(front, m.Tokens(step=-1, events=(event,)))]

    def _heartbeat(self, version: int) -> m.Heartbeat:
        """Return a heartbeat in a version of the messages."""
        stats = m.stats_in(version, msgspec.structs.replace(self._engine.stats(), bad_frames=self.bad_frames))
        # The forming of a group has separate deadlines, so the engine counts as idle meanwhile.
        return m.Heartbeat(idle=self._engine.recovering or not self._engine.has_work(), stats=stats)
