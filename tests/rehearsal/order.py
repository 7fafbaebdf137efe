"""A trace of streams, events and the host, and a proof that no two accesses race.

A trace is a list of ``Use``, ``Record``, ``Wait`` and ``Free``, in the order in which the host issued them.
An actor is the host or a stream. Actions of the host before a launch come before the launched work. Work of
one stream is in order. Across streams, and from a stream to the host, only events order work.

Two uses of a buffer race if at least one use writes and neither use is ordered before the other. Freed memory
goes to the next allocation on its home stream. Every use by another stream must therefore come before the
next work of the home stream, unless the allocator knows the other stream (``record_stream``).

This module does not import torch. The same check covers the table of streams (``streams.py``) and the traces
of rehearsed steps.
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
    """An actor reads and writes buffers. Work of a stream is launched here and runs at any later time."""

    actor: str
    label: str
    reads: tuple[Buffer, ...] = ()
    writes: tuple[Buffer, ...] = ()


@dataclass(frozen=True, slots=True)
class Record:
    """``event`` stands for all work of ``actor`` so far, and no longer for earlier records."""

    actor: str
    event: Hashable


@dataclass(frozen=True, slots=True)
class Wait:
    """Later work of ``actor`` comes after ``event``. For the host: the event has happened."""

    actor: str
    event: Hashable


@dataclass(frozen=True, slots=True)
class Free:
    """The host frees ``buffer`` to the allocator of ``home``. ``known``: streams reported to the
    allocator."""

    buffer: Buffer
    home: str
    known: frozenset[str] = frozenset()


Entry: TypeAlias = Use | Record | Wait | Free


@dataclass(slots=True)
class _Past:
    """Uses of one buffer that later uses must follow: the last write, and the reads since then."""

    write: tuple[str, int, str] | None = None
    reads: dict[str, tuple[int, str]] = field(default_factory=dict)
    last: dict[str, tuple[int, str]] = field(default_factory=dict)
    """Stream -> last use of any kind."""


class Checker:
    """Reads a trace entry by entry. ``races`` has one line for each race."""

    def __init__(self) -> None:
        self.races: list[str] = []
        self._clocks: dict[str, Clock] = {HOST: {HOST: 1}}
        self._events: dict[Hashable, Clock] = {}
        self._past: dict[Buffer, _Past] = {}

    def take(self, entry: Entry) -> None:
        """Process the next entry of the trace."""
        if isinstance(entry, Use):
            self._use(entry)
        elif isinstance(entry, Record):
            self._events[entry.event] = dict(self._begin(entry.actor))
        elif isinstance(entry, Wait):
            self._wait(entry)
        else:
            self._free(entry)

    def happened(self, event: Hashable) -> bool:
        """Return True if the host knows that all work before the last record of ``event`` has ended."""
        clock, recorded = self._clocks[HOST], self._events.get(event)
        ended = {} if recorded is None else recorded
        return recorded is not None and all(clock.get(actor, 0) >= tick for actor, tick in ended.items())

    def open_ends(self, actor: str) -> list[str]:
        """Return the streams with work that ``actor`` has not waited for."""
        clock = self._clocks.get(actor, {})
        ends = {name: own.get(name, 0) for name, own in self._clocks.items() if name not in (actor, HOST)}
        return sorted(name for name, tick in ends.items() if tick > max(clock.get(name, 0), 1))

    def _begin(self, actor: str) -> Clock:
        """Return the actor's clock at the next piece of work, including all knowledge of the launching
        host."""
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
    """Return one line for each pair of unordered uses. An empty list proves the trace free of races."""
    checker = Checker()
    for entry in trace:
        checker.take(entry)
    return checker.races
