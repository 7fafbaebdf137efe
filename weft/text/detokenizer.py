"""Incremental detokenization, and stop strings in the text.

``Detokenizer`` takes one token and returns the newly certain text. Invariant: all text given out so far is a
prefix of the final text, and the final text equals decoding all ids at once. A character with missing bytes
is held back. ``finish`` gives U+FFFD for incomplete characters. The cost of a token does not depend on the
number of earlier tokens, except for a decoder of the form "whole" (see ``pieces``).

``StopFinder`` finds stop strings independent of the division into pieces. The match that *completes* first
ends the text. Of several matches completed by the same character, the longest wins. One Knuth-Morris-Pratt
automaton per stop string makes the cost per character independent of the held text.
"""

from __future__ import annotations

import codecs
import copy
from collections.abc import Sequence
from typing import Protocol

import msgspec

from weft.text.pieces import DecoderForm, TextPiece

REPLACEMENT = "\ufffd"


class PieceSource(Protocol):
    """The interface of a tokenizer for a detokenizer."""

    form: DecoderForm

    def piece(self, token: int) -> TextPiece | None:
        """Return the token's contribution to text; None for an unknown id."""

    def is_special(self, token: int) -> bool:
        """Return True for a special token."""

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        """Return the text of ``ids``."""


class Detokenizer:
    """The text of one sequence. Not thread-safe.

    With ``continues``, the text continues other text (a prompt). The first token is then not the start of a
    text, and a leading space is kept. Without ``continues``, the result equals ``decode(ids)``.
    """

    def __init__(
        self,
        source: PieceSource,
        *,
        skip_special_tokens: bool = True,
        continues: bool = False,
        visible: frozenset[int] = frozenset(),
    ) -> None:
        """``visible``: special tokens whose text is shown although special tokens are skipped."""
        self._source = source
        self._visible = visible
        self._skip = skip_special_tokens
        self._join = source.form.join
        self._first = not continues
        self._strip = 0 if continues else source.form.strip_count
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._whole = False
        """True inside a text without incomplete bytes at its end. A token of whole characters then has its
        own text."""
        self._run = bytearray()
        """Byte tokens of an unfinished byte-fallback run. The end of the run decides: valid text, or one
        U+FFFD per byte.
        """
        self._ids: list[int] = []
        """All ids, for a decoder that only decodes the whole."""

    def push(self, token: int) -> str:
        """Add the next token and return the newly certain text.

        Return "" for a skipped or unknown token, and while the text is held back.
        """
        if self._skip and self._source.is_special(token) and token not in self._visible:
            return ""
        if self._whole:
            piece = self._source.piece(token)
            if piece is not None and piece.text is not None:
                return piece.text
        if self._join == "whole":
            self._ids.append(token)
            return ""
        piece = self._source.piece(token)
        if piece is None:
            return ""
        # Decoders treat the first token of a text differently (for example the leading space).
        data = piece.first if self._first else piece.rest
        self._first = False
        if self._join == "level":
            text = self._utf8.decode(data)
            self._whole = not self._utf8.getstate()[0]
            return text
        # The text of a byte run is known only at the end of the run.
        if piece.byte:
            self._run += data
            return ""
        return self._stripped(self._end_run() + data.decode())

    def preview(self) -> str:
        """Return the held-back text in case the sequence ended here: complete characters only.

        The detokenizer does not change. Later tokens may still change this text.
        """
        if self._join == "whole":
            return self._source.decode(self._ids, False).rstrip(REPLACEMENT)
        if not self._run:
            return ""
        try:
            # A copy, because ``_stripped`` counts the removed characters.
            return copy.copy(self)._stripped(self._run.decode())
        except UnicodeDecodeError:
            return ""

    def finish(self) -> str:
        """Return the rest of the text; incomplete bytes become U+FFFD. No token may follow."""
        if self._join == "whole":
            return self._source.decode(self._ids, False)
        if self._join == "level":
            return self._utf8.decode(b"", True)
        return self._stripped(self._end_run())

    def _end_run(self) -> str:
        """End the byte run and return its text: valid UTF-8 as a whole, or one U+FFFD per byte."""
        if not self._run:
            return ""
        run = self._run
        self._run = bytearray()
        try:
            return run.decode()
        except UnicodeDecodeError:
            return REPLACEMENT * len(run)

    def _stripped(self, text: str) -> str:
        """Return ``text`` without the leading characters dropped by the decoder at the start of a text.

        The count of characters left to drop is updated.
        """
        if not self._strip or not text:
            return text
        char = self._source.form.strip
        while self._strip and text.startswith(char):
            text = text[len(char) :]
            self._strip = self._strip - 1
        if text:
            self._strip = 0
        return text


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
