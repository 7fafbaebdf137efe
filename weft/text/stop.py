"""Stop strings in a stream of text, wherever its pieces are cut.

The match that *completes* first ends the text; of several that complete with the same character the longest
wins. Both depend on the text alone, not on how it was split. One Knuth-Morris-Pratt automaton a stop
string makes a character's cost independent of what is held back.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec


class StopMatch(msgspec.Struct, frozen=True):
    """A completed stop string."""

    stop: str
    text: str
    """What was held back and is kept: everything before the match that was not given out yet."""
    rest: int
    """Characters of the pushed piece after the match."""


class Stops:
    """A request's stop strings with their automata: made once, shared by all its choices. Immutable."""

    def __init__(self, stops: Sequence[str]) -> None:
        self.texts = tuple(dict.fromkeys(stop for stop in stops if stop))
        self.tables = tuple(_failure(stop) for stop in self.texts)


class StopFinder:
    """Searches one text for stop strings. Without any, text just passes through."""

    def __init__(self, stops: Sequence[str] | Stops) -> None:
        shared = stops if isinstance(stops, Stops) else Stops(stops)
        self._stops = shared.texts
        self._tables = shared.tables
        self._states = [0] * len(self._stops)
        """For each stop: how many of its characters the text ends with."""
        self._held = ""

    @property
    def active(self) -> bool:
        """Whether there is anything to search for."""
        return bool(self._stops)

    def push(self, piece: str, *, ignore: bool = False) -> str | StopMatch:
        """Takes the next piece. Returns the text that no stop string can reach any more, or the match.

        With ``ignore`` matches that complete in this piece do not count. After a match the finder is spent.
        """
        if not self._stops:
            return piece
        text = self._held + piece
        start = len(self._held)
        for at, char in enumerate(piece):
            number = self._advance(char)
            if number is None or ignore:
                continue
            stop = self._stops[number]
            end = start + at + 1
            self._held = ""
            return StopMatch(stop, text[: end - len(stop)], len(piece) - at - 1)
        keep = max(map(self._reach, range(len(self._stops))))
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def _reach(self, number: int) -> int:
        """How many trailing characters may still begin stop ``number``; a match that was ignored is over."""
        state = self._states[number]
        return self._tables[number][-1] if state == len(self._stops[number]) else state

    def would_match(self, piece: str, *, skip: int = 0) -> bool:
        """Whether pushing ``piece`` would complete a match beyond its first ``skip`` characters. Changes
        nothing."""
        states = list(self._states)
        matched = [self._advance(char) is not None for char in piece]
        self._states = states
        return any(matched[skip:])

    def reset(self) -> str:
        """The text still held back: it ends here, and what comes next begins anew."""
        self._states = [0] * len(self._stops)
        return self.finish()

    def finish(self) -> str:
        """The text still held back: the end came before a stop string did."""
        held = self._held
        self._held = ""
        return held

    def _advance(self, char: str) -> int | None:
        """Moves every automaton by one character; the number of the longest stop that completes with it."""
        best: int | None = None
        for number, (stop, table) in enumerate(zip(self._stops, self._tables, strict=True)):
            state = self._states[number]
            while state and (state == len(stop) or stop[state] != char):
                state = table[state - 1]
            if stop[state] == char:
                state += 1
            self._states[number] = state
            if state == len(stop) and (best is None or len(stop) > len(self._stops[best])):
                best = number
        return best


def _failure(stop: str) -> list[int]:
    """table[i]: length of the longest proper prefix of ``stop[: i + 1]`` that is also its suffix."""
    table = [0] * len(stop)
    for index in range(1, len(stop)):
        state = table[index - 1]
        while state and stop[state] != stop[index]:
            state = table[state - 1]
        table[index] = state + 1 if stop[state] == stop[index] else 0
    return table
