"""Stop strings in a stream of text, independent of the division into pieces.

The match that *completes* first ends the text. Of several matches completed by the same character, the
longest wins. One Knuth-Morris-Pratt automaton per stop string makes the cost per character independent of the
held text.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec


class StopMatch(msgspec.Struct, frozen=True):
    """A completed stop string."""

    stop: str
    text: str
    """Text before the match that was not given out yet."""
    rest: int
    """Characters of the pushed piece after the match."""


class Stops:
    """A request's stop strings with their automata. Made once and shared by all choices. Immutable."""

    def __init__(self, stops: Sequence[str]) -> None:
        self.texts = tuple(dict.fromkeys(stop for stop in stops if stop))
        self.tables = tuple(_failure(stop) for stop in self.texts)


class StopFinder:
    """Searches one text for stop strings. Without stop strings, text passes through."""

    def __init__(self, stops: Sequence[str] | Stops) -> None:
        """``stops``: stop strings, or automata shared with other finders."""
        shared = stops if isinstance(stops, Stops) else Stops(stops)
        self._stops = shared.texts
        self._tables = shared.tables
        self._states = [0] * len(self._stops)
        """For each stop string: the number of its characters at the end of the text."""
        self._held = ""

    @property
    def active(self) -> bool:
        """True if there is a stop string."""
        return bool(self._stops)

    def push(self, piece: str, *, ignore: bool = False) -> str | StopMatch:
        """Add the next piece. Return the text that no stop string can reach any more, or the match.

        With ``ignore``, matches completed in this piece do not count. The finder must not be used after a
        match.
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
        """Return the number of trailing characters that may begin stop string ``number``. An ignored match
        is over: only its overlap counts.
        """
        state = self._states[number]
        return self._tables[number][-1] if state == len(self._stops[number]) else state

    def would_match(self, piece: str, *, skip: int = 0) -> bool:
        """Return True if ``piece`` would complete a match beyond its first ``skip`` characters. Nothing
        changes.
        """
        states = list(self._states)
        matched = [self._advance(char) is not None for char in piece]
        self._states = states
        return any(matched[skip:])

    def reset(self) -> str:
        """Return the held text and restart the search behind this point."""
        self._states = [0] * len(self._stops)
        return self.finish()

    def finish(self) -> str:
        """Return the held text at the end of the text."""
        held = self._held
        self._held = ""
        return held

    def _advance(self, char: str) -> int | None:
        """Advance every automaton by one character. Return the index of the longest completed stop string, or
        None.
        """
        best: int | None = None
        for number, (stop, table) in enumerate(zip(self._stops, self._tables, strict=True)):
            state = self._states[number]
            # Fall back to the longest prefix that continues with ``char``; a complete match also falls back.
            while state and (state == len(stop) or stop[state] != char):
                state = table[state - 1]
            if stop[state] == char:
                state += 1
            self._states[number] = state
            if state == len(stop) and (best is None or len(stop) > len(self._stops[best])):
                best = number
        return best


def _failure(stop: str) -> list[int]:
    """Return the KMP table. table[i]: length of the longest proper prefix of ``stop[: i + 1]`` that is also
    its suffix.
    """
    table = [0] * len(stop)
    for index in range(1, len(stop)):
        state = table[index - 1]
        while state and stop[state] != stop[index]:
            state = table[state - 1]
        table[index] = state + 1 if stop[state] == stop[index] else 0
    return table
