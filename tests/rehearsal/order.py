"""Who may touch which memory when: a trace of streams, events and the host, and a proof that nothing races.

A trace is a list of ``Use``, ``Record``, ``Wait`` and ``Free`` in the order in which the host issued them. An
actor is the host or a stream. What the host did before it launched work comes before that work; work of one
stream is in order; across streams, and back to the host, order comes from events alone.

Two uses of one buffer, at least one of them a write, race if neither is ordered before the other. Memory that
is freed goes to whoever allocates next on its home stream, so every use by another stream must come before
whatever the home stream does next, unless the allocator was told of that stream (``record_stream``).

No torch here: the same check proves the table of streams (``streams.py``) and the traces of rehearsed steps.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from typing import TypeAlias

HOST = "host"

Buffer: TypeAlias = Hashable
Clock: TypeAlias = dict[str, int]


@dataclass(frozen=True, slots=True)
class Use:
    """An actor reads and writes buffers. Work of a stream is launched here, and runs any time after."""

    actor: str
    label: str
    reads: tuple[Buffer, ...] = ()
    writes: tuple[Buffer, ...] = ()


@dataclass(frozen=True, slots=True)
class Record:
    """``event`` will stand for all that ``actor`` was given so far. It replaces what the event stood for."""

    actor: str
    event: Hashable


@dataclass(frozen=True, slots=True)
class Wait:
    """What ``actor`` does from now on comes after ``event``. The host saw that the event has happened."""

    actor: str
    event: Hashable


@dataclass(frozen=True, slots=True)
class Free:
    """The host gives ``buffer`` back to the allocator of ``home``; ``known``: streams it was told of."""

    buffer: Buffer
    home: str
    known: frozenset[str] = frozenset()


Entry: TypeAlias = Use | Record | Wait | Free


@dataclass(slots=True)
class _Past:
    """Uses of one buffer that a later one must come after: the last write, and the reads since."""

    write: tuple[str, int, str] | None = None
    reads: dict[str, tuple[int, str]] = field(default_factory=dict)
    last: dict[str, tuple[int, str]] = field(default_factory=dict)
    """Of each stream, its last use of any kind."""


class Checker:
    """Takes a trace entry by entry; ``races`` has a line for each that was found."""

    def __init__(self) -> None:
        self.races: list[str] = []
        self._clocks: dict[str, Clock] = {HOST: {HOST: 1}}
        self._events: dict[Hashable, Clock] = {}
        self._past: dict[Buffer, _Past] = {}

    def take(self, entry: Entry) -> None:
        """The next entry of the trace."""
        if isinstance(entry, Use):
            self._use(entry)
        elif isinstance(entry, Record):
            self._events[entry.event] = dict(self._begin(entry.actor))
        elif isinstance(entry, Wait):
            self._wait(entry)
        else:
            self._free(entry)

    def open_ends(self, actor: str) -> list[str]:
        """Streams with work that ``actor`` has not waited for."""
        clock = self._clocks.get(actor, {})
        ends = {name: own.get(name, 0) for name, own in self._clocks.items() if name not in (actor, HOST)}
        return sorted(name for name, tick in ends.items() if tick > max(clock.get(name, 0), 1))

    def _begin(self, actor: str) -> Clock:
        """The actor's clock at its next piece of work: it knows what the host knew when it launched it."""
        clock = self._clocks.setdefault(actor, {actor: 1})
        if actor != HOST:
            _join(clock, self._clocks[HOST])
        return clock

    def _wait(self, entry: Wait) -> None:
        happened = self._events.get(entry.event)
        if happened is None:
            self.races.append(f"{entry.actor} waits for {entry.event}, which nobody recorded")
            return
        _join(self._begin(entry.actor), happened)

    def _use(self, entry: Use) -> None:
        clock = self._begin(entry.actor)
        clock[entry.actor] += 1
        now = clock[entry.actor]
        for buffer in entry.reads:
            past = self._past.setdefault(buffer, _Past())
            self._after(clock, past.write, "writes", entry, "reads", buffer)
            past.reads[entry.actor] = past.last[entry.actor] = (now, entry.label)
        for buffer in entry.writes:
            past = self._past.setdefault(buffer, _Past())
            self._after(clock, past.write, "writes", entry, "writes", buffer)
            for actor, (tick, label) in past.reads.items():
                self._after(clock, (actor, tick, label), "reads", entry, "writes", buffer)
            past.write, past.reads = (entry.actor, now, entry.label), {}
            past.last[entry.actor] = (now, entry.label)

    def _after(
        self,
        clock: Clock,
        before: tuple[str, int, str] | None,
        did: str,
        entry: Use,
        does: str,
        buffer: Buffer,
    ) -> None:
        if before is None or clock.get(before[0], 0) >= before[1]:
            return
        self.races.append(
            f"{entry.label} on {entry.actor} {does} {buffer} and does not wait for {before[2]} on "
            f"{before[0]}, which {did} it"
        )

    def _free(self, entry: Free) -> None:
        past = self._past.pop(entry.buffer, None)
        if past is None:
            return
        clock = self._begin(entry.home)
        for actor, (tick, label) in past.last.items():
            if actor == entry.home or actor in entry.known or clock.get(actor, 0) >= tick:
                continue
            self.races.append(
                f"{entry.buffer} is freed, and {entry.home} may use its memory while {label} on {actor} does"
            )


def _join(clock: Clock, other: Clock) -> None:
    for actor, tick in other.items():
        if clock.get(actor, 0) < tick:
            clock[actor] = tick


def races(trace: Iterable[Entry]) -> list[str]:
    """A line for each pair of uses that nothing orders; empty: the trace is free of races."""
    checker = Checker()
    for entry in trace:
        checker.take(entry)
    return checker.races
