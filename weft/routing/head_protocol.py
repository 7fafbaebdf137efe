"""The head's side of the messages: its fronts, and the front of each live sequence. Does no I/O.

Every Submit is answered by exactly one event with ``finish``, unless its front sent a later attempt, or
left. A front that is gone, or does not read, loses its own sequences and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol, TypeAlias

import msgspec

from weft.common.errors import EngineDead, InvalidRequest, NotGreeted, PixelsLost, Unavailable, WeftError
from weft.common.shared_bytes import SharedName
from weft.kv.prefix_log import PrefixLog
from weft.routing.encoders import ENCODE_SINCE
from weft.routing.prefix_index import PrefixReports
from weft.types import messages as m

SHARED_SINCE = 7
"""The version of messages from which on images may be shown by name."""
Outgoing: TypeAlias = list[tuple[bytes, m.ToFront]]
"""(front, message), in the order of sending."""


class HeadEngine(Protocol):
    """The engine behind the protocol. See ``weft.engine.core.EngineCore``."""

    @property
    def recovering(self) -> bool: ...

    def submit(self, submit: m.Submit) -> list[m.TokenEvent]: ...

    def finish(self, sequence: int) -> list[m.TokenEvent]: ...

    def has_work(self) -> bool: ...

    def stats(self) -> m.HeadStats: ...

    def welcome(self, incarnation: int) -> m.Welcome: ...

    def follow_prefixes(self) -> tuple[PrefixLog, int] | None: ...


class Pixels(Protocol):
    """What finds images that fronts show by name. See ``weft.engine.pixel_inbox``."""

    @property
    def probe(self) -> SharedName | None: ...

    def take(self, submit: m.Submit) -> m.Submit: ...


class _Front(NamedTuple):
    name: str
    """The front's name, the same for all its connections."""
    version: int
    quiet: bool
    """Whether it wants heartbeats only while it has sequences."""


class _Owner(NamedTuple):
    front: bytes
    attempt: int


class HeadProtocol:
    """One for each head process. A front is named by its connection."""

    def __init__(self, engine: HeadEngine, incarnation: int, pixels: Pixels | None = None) -> None:
        """``pixels``: None where images come as bytes alone."""
        self._engine = engine
        self._pixels = pixels
        self._incarnation = incarnation
        self._fronts: dict[bytes, _Front] = {}
        self._owners: dict[int, _Owner] = {}
        """Front of each live sequence."""
        self.prefixes = PrefixReports(engine)
        self.bad_frames = 0
        self.draining = False
        """Whether new sequences are refused."""
        self.stopped = False
        """Whether the head was told to end."""

    @property
    def live(self) -> bool:
        """Whether a front's sequence is live."""
        return bool(self._owners)

    def on(self, front: bytes, message: m.ToHead) -> Outgoing:
        """Handles a message of ``front``; returns the messages to send."""
        if isinstance(message, m.Hello):
            return self._hello(front, message)
        if front not in self._fronts:
            self.bad_frames += 1
            if isinstance(message, m.Submit):  # it was forgotten, as it did not read, and does not know
                return self._reject(front, message, NotGreeted("say hello first"))
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
        elif not isinstance(message, m.Profile):  # the loop's own
            self.stopped = True
        return []

    def events(self, events: Sequence[m.TokenEvent], step: int = -1) -> Outgoing:
        """The engine's events of ``step``, as one message to each front."""
        by_front: dict[bytes, list[m.TokenEvent]] = {}
        for event in events:
            owner = self._owners.get(event.sequence)
            if owner is None:
                continue
            if owner.attempt:
                event = msgspec.structs.replace(event, attempt=owner.attempt)
            by_front.setdefault(owner.front, []).append(event)
            if event.finish is not None:
                del self._owners[event.sequence]
        return [
            (front, m.Tokens(step=step, events=self._understood(front, each)))
            for front, each in by_front.items()
        ]

    def _understood(self, front: bytes, events: list[m.TokenEvent]) -> tuple[m.TokenEvent, ...]:
        """``events`` as a front of its version knows them."""
        known = self._fronts.get(front)
        if known is not None and known.version < 3:
            return tuple(
                event if event.position < 0 else msgspec.structs.replace(event, position=-1)
                for event in events
            )
        return tuple(events)

    def heartbeats(self) -> Outgoing:
        """A heartbeat to every front that wants one now, and what changed in the prefix cache."""
        heartbeat = self._heartbeat()
        busy = {owner.front for owner in self._owners.values()}
        told: Outgoing = [
            (name, _heartbeat_of(heartbeat, front.version))
            for name, front in self._fronts.items()
            if name in busy or not front.quiet
        ]
        return [*self.prefixes.changes(), *told]

    def failed(self, error: WeftError) -> Outgoing:
        """The engine failed. Sequences get no end of their own: their front may go on with them elsewhere."""
        return [(front, m.HeadFailed(error=error.info())) for front in self._fronts]

    def forget(self, front: bytes) -> None:
        """The front is gone: its sequences end."""
        self._fronts.pop(front, None)
        self.prefixes.forget(front)
        for sequence in [s for s, owner in self._owners.items() if owner.front == front]:
            del self._owners[sequence]
            self._engine.finish(sequence)

    def _hello(self, front: bytes, hello: m.Hello) -> Outgoing:
        version = m.common_version(hello.versions)
        if version is None:
            low, high = hello.versions
            spoken = f"this head speaks versions {m.OLDEST} to {m.VERSION}, the front {low} to {high}"
            return [(front, m.HeadFailed(error=EngineDead(spoken).info()))]
        welcome = self._engine.welcome(self._incarnation)
        if welcome.role == "encode" and version < ENCODE_SINCE:
            spoken = f"this head encodes images for others, which the front, of version {version}, cannot use"
            return [(front, m.HeadFailed(error=EngineDead(spoken).info()))]
        for former in [other for other in self._fronts if other != front and self._named(other, hello.front)]:
            self.forget(former)  # that connection broke, which was not noticed here yet
        self._fronts[front] = _Front(hello.front, version, hello.quiet)
        if version < 2:
            welcome = msgspec.structs.replace(welcome, block_size=0)
        if version < 3:
            welcome = msgspec.structs.replace(welcome, role="unified", fingerprint="", rooms="")
        if version < ENCODE_SINCE:
            welcome = msgspec.structs.replace(welcome, tower=False, embeddings="", tower_fingerprint="")
        if version >= SHARED_SINCE and self._pixels is not None:
            welcome = msgspec.structs.replace(welcome, probe=self._pixels.probe)
        return [(front, welcome), (front, _heartbeat_of(self._heartbeat(), version))]

    def _submit(self, front: bytes, submit: m.Submit) -> Outgoing:
        owner = self._owners.get(submit.sequence)
        try:
            if owner is not None and owner.front != front:
                raise Unavailable("another front uses the sequence's id")
            if owner is not None and submit.attempt <= owner.attempt:
                self.bad_frames += 1  # it came twice, or late: an answer would end the attempt that runs
                return []
            if owner is not None:
                del self._owners[submit.sequence]
                self._engine.finish(submit.sequence)
            if self.draining:
                raise Unavailable("the server is shutting down")
            events = self._engine.submit(self._found(submit))
        except PixelsLost as error:  # its front has it, and sends it again
            return self._reject(front, submit, error, "evicted")
        except (ValueError, msgspec.ValidationError):
            return self._reject(front, submit, InvalidRequest("the request is malformed"))
        except WeftError as error:
            return self._reject(front, submit, error)
        self._owners[submit.sequence] = _Owner(front, submit.attempt)
        return self.events(events)

    def _named(self, connection: bytes, name: str) -> bool:
        """Whether a connection is of the front of that name."""
        return bool(name) and self._fronts[connection].name == name

    def _found(self, submit: m.Submit) -> m.Submit:
        """With the pixels that it names. Raises PixelsLost, and ValueError where nobody can look for them."""
        if self._pixels is not None:
            return self._pixels.take(submit)
        if any(item.shared is not None for item in submit.media):
            raise ValueError("pixels by name")
        return submit

    def _reject(self, front: bytes, submit: m.Submit, error: WeftError, finish: str = "error") -> Outgoing:
        event = m.TokenEvent(
            sequence=submit.sequence, attempt=submit.attempt, finish=finish, error=error.info()
        )
        return [(front, m.Tokens(step=-1, events=(event,)))]

    def _heartbeat(self) -> m.Heartbeat:
        stats = msgspec.structs.replace(self._engine.stats(), bad_frames=self.bad_frames)
        # A group that is being formed has deadlines of its own.
        return m.Heartbeat(idle=self._engine.recovering or not self._engine.has_work(), stats=stats)


_NO_STATS = m.HeadStats()
"""Only its very defaults are left out of a message, not what equals them."""
_SINCE_4 = (
    "prefill_rows",
    "prefill_tokens",
    "decode_rows",
    "constrained_steps",
    "mask_seconds",
    "grammars_compiled",
    "grammar_errors",
)
_SINCE_5 = ("images_encoded", "image_hits", "embedding_bytes", "encode_seconds")


def _heartbeat_of(heartbeat: m.Heartbeat, version: int) -> m.Heartbeat:
    """``heartbeat`` as a front of ``version`` knows it."""
    stats = heartbeat.stats
    if version < ENCODE_SINCE and (stats.embedding_transfers is not None or stats.embedding_host_bytes):
        stats = msgspec.structs.replace(stats, embedding_transfers=None, embedding_host_bytes=0)
    if version < 9:
        stats = msgspec.structs.replace(
            stats, queue_times=_NO_STATS.queue_times, prefill_times=_NO_STATS.prefill_times
        )
    if version < 5:
        stats = msgspec.structs.replace(stats, **{name: getattr(_NO_STATS, name) for name in _SINCE_5})
    if version < 4:
        stats = msgspec.structs.replace(stats, **{name: getattr(_NO_STATS, name) for name in _SINCE_4})
    if version < 3 and stats.transfers is not None:
        stats = msgspec.structs.replace(stats, transfers=None)
    return heartbeat if stats is heartbeat.stats else msgspec.structs.replace(heartbeat, stats=stats)
